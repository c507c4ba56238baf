//! Whether an image holds exactly what a definition and its lock say.
//!
//! Every blob is held to its digest, every archive to its `diff_id`, every file to the lock, and how the image is run to the definition.
//! All faults are found, and each names the file.
//! Files of the base are held to the packages when they are at hand; without them they are counted, since a lock has the digests of packages only.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::path::Path;

use outrider_bundle::digest::{Hasher, hash_file, sha256_hex};
use outrider_bundle::manifest::FileEntry;

use crate::Error;
use crate::build::{BUNDLE_LABEL, FILE_ANNOTATION, FILE_SHA256_ANNOTATION};
use crate::debian;
use crate::definition::{Base, Definition};
use crate::layer::{Compression, entry};
use crate::layout::{self, Image, Layout, describe};
use crate::lock::Lock;
use crate::tree::{Content, Node, is_at_or_below};

/// What an image is held to.
#[derive(Clone, Copy, Debug)]
pub struct Expected<'a> {
    /// What it is made of.
    pub definition: &'a Definition,
    /// The digests of it.
    pub lock: &'a Lock,
    /// Directory of the `.deb` files of the base, when they are at hand.
    pub packages_dir: Option<&'a Path>,
}

/// What was found in an image that is what it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verified {
    /// Digest of the manifest, `sha256:…`.
    pub digest: String,
    /// Layers whose blob and archive have the right digest.
    pub layers: usize,
    /// Files that were held to a digest.
    pub files: usize,
    /// Files of the base that weren't, since its packages weren't at hand.
    pub base_files_unchecked: usize,
    /// Files that no lock can have, since they are built from the same sources; provenance has their digests.
    pub built: BTreeMap<String, FileEntry>,
}

/// Checks an image of a layout; an error lists everything that is wrong.
pub fn verify(layout: &Layout, image: &Image, expected: Expected<'_>) -> Result<Verified, Error> {
    let Expected {
        definition, lock, ..
    } = expected;
    lock.check_covers(definition)?;
    let mut faults = Vec::new();
    let files = layers(layout, image, &mut faults);
    let is_weights_only = is_weights_only(image);
    check_config(image, expected, is_weights_only, &mut faults);
    let mut wanted: BTreeMap<&str, Option<FileEntry>> = BTreeMap::new();
    for file in &lock.files {
        let bundle = definition.bundle.as_ref();
        if !is_weights_only || bundle.is_some_and(|it| is_at_or_below(&file.path, &it.to)) {
            wanted.insert(&file.path, lock.file(&file.path));
        }
    }
    let scratch =
        tempfile::tempdir().map_err(|source| Error::write(std::env::temp_dir(), source))?;
    let base = match (&definition.base, expected.packages_dir) {
        _ if is_weights_only => Some(BTreeMap::new()),
        (Base::Debian(rules), Some(dir)) => {
            let tree = debian::unpack(rules, &lock.packages, dir, scratch.path())?;
            Some(file_entries(&tree)?)
        }
        _ => None,
    };
    if !is_weights_only {
        for rule in definition.files() {
            let text = rule.text.as_ref().map(|text| FileEntry {
                size_bytes: text.len() as u64,
                sha256: sha256_hex(text.as_bytes()),
            });
            wanted.entry(&rule.to).or_insert(text);
        }
    }
    for (path, entry) in base.iter().flatten() {
        wanted.entry(path).or_insert_with(|| Some(entry.clone()));
    }
    let mut checked = 0;
    let mut built = BTreeMap::new();
    for (path, wanted) in &wanted {
        match (files.get(*path), wanted) {
            (None, _) => faults.push(format!("{path}: is not in the image")),
            (Some(found), Some(wanted)) if found != wanted => faults.push(format!(
                "{path}: has {} bytes and sha256 {}, expected {} bytes and sha256 {}",
                found.size_bytes, found.sha256, wanted.size_bytes, wanted.sha256
            )),
            (Some(_), Some(_)) => checked += 1,
            (Some(found), None) => {
                built.insert((*path).to_owned(), found.clone());
            }
        }
    }
    let unknown: Vec<&String> = files
        .keys()
        .filter(|path| !wanted.contains_key(path.as_str()))
        .collect();
    let is_in_bundle = |path: &&&String| {
        let bundle = definition.bundle.as_ref();
        bundle.is_some_and(|bundle| is_at_or_below(path, &bundle.to))
    };
    let refused = |path: &&&String| base.is_some() || is_in_bundle(path);
    faults.extend(
        unknown
            .iter()
            .filter(refused)
            .map(|path| format!("{path}: nothing names it")),
    );
    if faults.is_empty() {
        Ok(Verified {
            digest: image.descriptor.digest().to_string(),
            layers: image.manifest.layers().len(),
            files: checked,
            base_files_unchecked: unknown.len(),
            built,
        })
    } else {
        Err(Error::Image(faults))
    }
}

/// Checks blobs and archives; returns the files as the topmost layer has them.
fn layers(layout: &Layout, image: &Image, faults: &mut Vec<String>) -> BTreeMap<String, FileEntry> {
    let mut files = BTreeMap::new();
    let diff_ids = image.config.rootfs().diff_ids();
    let layers = image.manifest.layers();
    if diff_ids.len() != layers.len() {
        faults.push(format!(
            "the manifest has {} layers, the configuration {}",
            layers.len(),
            diff_ids.len()
        ));
    }
    for (descriptor, diff_id) in layers.iter().zip(diff_ids) {
        let read = read_layer(layout, descriptor, &mut files);
        match read {
            Ok(archive) if format!("sha256:{archive}") == *diff_id => {}
            Ok(archive) => faults.push(format!(
                "{}: the archive has sha256 {archive}, the configuration says {diff_id}",
                describe(descriptor)
            )),
            Err(error) => faults.push(error.chain()),
        }
        let annotations = descriptor.annotations().clone().unwrap_or_default();
        if let Some(path) = annotations.get(FILE_ANNOTATION) {
            let named = annotations.get(FILE_SHA256_ANNOTATION);
            let found = files.get(path).map(|it: &FileEntry| &it.sha256);
            if named.is_none() || named != found {
                faults.push(format!(
                    "{path}: is not the file that the annotation of its layer names"
                ));
            }
        }
    }
    files
}

/// Reads a layer to its end; returns the digest of the archive when the blob has the digest that the manifest says.
fn read_layer(
    layout: &Layout,
    descriptor: &oci_spec::image::Descriptor,
    files: &mut BTreeMap<String, FileEntry>,
) -> Result<String, Error> {
    let Some(compression) = Compression::of(descriptor.media_type()) else {
        let problem = format!(
            "has the media type {}, which is no layer",
            descriptor.media_type()
        );
        return Err(Error::entry(describe(descriptor), problem));
    };
    // The blob is read twice, so that bytes with a wrong digest never reach a decoder.
    let path = layout.blob_path(descriptor)?;
    drop(layout.blob(descriptor)?);
    let (size_bytes, sha256) = hash_file(&path).map_err(|source| Error::read(&path, source))?;
    layout::check(descriptor, &FileEntry { size_bytes, sha256 })?;
    let read = |source| Error::read(describe(descriptor), source);
    let reader = compression.reader(layout.blob(descriptor)?).map_err(read)?;
    let mut hashed = HashedReader {
        inner: reader,
        hasher: Hasher::default(),
    };
    let mut archive = tar::Archive::new(&mut hashed);
    for member in archive.entries().map_err(read)? {
        let mut member = member.map_err(read)?;
        let Some(path) = debian::text(&member.path_bytes())?.map(str::to_owned) else {
            continue;
        };
        if path
            .rsplit('/')
            .next()
            .is_some_and(|name| name.starts_with(".wh."))
        {
            return Err(Error::entry(
                path,
                "takes a file of a lower layer away, which no build does",
            ));
        }
        match member.header().entry_type() {
            tar::EntryType::Regular => {
                let (size_bytes, sha256) =
                    outrider_bundle::digest::hash_stream(&mut member).map_err(read)?;
                files.insert(path, FileEntry { size_bytes, sha256 });
            }
            // A link or a directory over a file hides it.
            _ => {
                files.remove(&path);
            }
        }
    }
    io::copy(&mut hashed, &mut io::sink()).map_err(read)?;
    Ok(entry(hashed.hasher).sha256)
}

fn check_config(
    image: &Image,
    expected: Expected<'_>,
    is_weights_only: bool,
    faults: &mut Vec<String>,
) {
    let Expected {
        definition, lock, ..
    } = expected;
    let config = image.config.config().clone().unwrap_or_default();
    let mut same = |field: &str, found: String, wanted: String| {
        if found != wanted {
            faults.push(format!("{field} is {found}, expected {wanted}"));
        }
    };
    same(
        "architecture",
        image.config.architecture().to_string(),
        definition.architecture.name().to_owned(),
    );
    let labels = config.labels().clone().unwrap_or_default();
    let none = || "nothing".to_owned();
    same(
        BUNDLE_LABEL,
        labels.get(BUNDLE_LABEL).cloned().unwrap_or_else(none),
        lock.bundle_digest.clone().unwrap_or_else(none),
    );
    if is_weights_only {
        return;
    }
    let rules = &definition.config;
    let list = |list: &Option<Vec<String>>| format!("{:?}", list.clone().unwrap_or_default());
    same(
        "user",
        config.user().clone().unwrap_or_default(),
        rules.user.clone(),
    );
    same(
        "entrypoint",
        list(config.entrypoint()),
        format!("{:?}", rules.entrypoint),
    );
    same("cmd", list(config.cmd()), format!("{:?}", rules.cmd));
    let env: Vec<String> = rules
        .env
        .iter()
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    same("env", list(config.env()), format!("{env:?}"));
}

/// An image of weights alone has nothing that could be run.
pub(crate) fn is_weights_only(image: &Image) -> bool {
    let config = image.config.config().as_ref();
    config.is_none_or(|config| config.entrypoint().is_none())
}

fn file_entries(tree: &crate::tree::Tree) -> Result<BTreeMap<String, FileEntry>, Error> {
    let mut entries = BTreeMap::new();
    for (path, node) in tree.iter() {
        let (size_bytes, sha256) = match node {
            Node::File(Content::Bytes(bytes), _) => (bytes.len() as u64, sha256_hex(bytes)),
            Node::File(Content::Path(file, _), _) => {
                hash_file(file).map_err(|source| Error::read(file, source))?
            }
            Node::Link(_) | Node::Directory => continue,
        };
        entries.insert(path.to_owned(), FileEntry { size_bytes, sha256 });
    }
    Ok(entries)
}

struct HashedReader<R> {
    inner: R,
    hasher: Hasher,
}

impl<R: Read> Read for HashedReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.hasher.update(&buffer[..count]);
        Ok(count)
    }
}
