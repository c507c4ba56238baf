//! OCI image layouts: a directory of blobs by digest, with an index that says which of them are images.
//!
//! A layout is written in a directory beside its place and renamed when every byte is on disk, so a reader never sees a part of one.
//! What is read out of a layout is held to its digest.
//! A layer of weights may be left out of it and be made again from the file that it holds, for images that are pushed as they are built.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use oci_spec::image::{
    Descriptor, DescriptorBuilder, ImageConfiguration, ImageIndex, ImageManifest, MediaType,
    Sha256Digest,
};
use outrider_bundle::digest::{Hasher, sha256_hex, sync_parent};
use outrider_bundle::manifest::FileEntry;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tempfile::TempDir;

use crate::Error;
use crate::layer::{self, Compression, Written, entry};
use crate::tree::Tree;

/// Content of the file `oci-layout`.
const LAYOUT_TEXT: &str = r#"{"imageLayoutVersion":"1.0.0"}"#;

/// Annotation of an image in an index: the name that other programs choose it by, such as `oci:DIR:NAME`.
pub const NAME_ANNOTATION: &str = "org.opencontainers.image.ref.name";

/// Largest index, manifest or configuration that is read, in bytes: what registries allow.
pub const MAX_JSON_BYTES: u64 = 4 << 20;

/// A layout on disk.
#[derive(Clone, Debug)]
pub struct Layout {
    dir: PathBuf,
    /// By their SHA-256.
    unstored: BTreeMap<String, Unstored>,
}

/// An uncompressed layer of one file, without the bytes of the file.
#[derive(Clone, Debug)]
struct Unstored {
    /// What comes before the file.
    head: Vec<u8>,
    file: PathBuf,
    file_bytes: u64,
    /// Zeros behind the file.
    tail_bytes: u64,
}

impl Unstored {
    fn read_at(&self, offset_bytes: u64) -> io::Result<Box<dyn Read>> {
        let head_bytes = self.head.len() as u64;
        let head = self.head.get(offset_bytes as usize..).unwrap_or_default();
        let in_file = offset_bytes.saturating_sub(head_bytes).min(self.file_bytes);
        let in_tail = offset_bytes.saturating_sub(head_bytes + self.file_bytes);
        let mut file = File::open(&self.file)?;
        file.seek(SeekFrom::Start(in_file))?;
        let tail = io::repeat(0).take(self.tail_bytes.saturating_sub(in_tail));
        let head = io::Cursor::new(head.to_vec());
        Ok(Box::new(
            head.chain(file.take(self.file_bytes - in_file)).chain(tail),
        ))
    }
}

/// One image of a layout: the descriptor of its manifest, the manifest, and its configuration.
#[derive(Clone, Debug)]
pub struct Image {
    /// Descriptor of the manifest.
    pub descriptor: Descriptor,
    /// The manifest.
    pub manifest: ImageManifest,
    /// The configuration.
    pub config: ImageConfiguration,
}

impl Layout {
    /// Opens a layout; its blobs aren't looked at.
    pub fn open(dir: &Path) -> Result<Self, Error> {
        let path = dir.join("oci-layout");
        let text = fs::read(&path).map_err(|source| Error::read(&path, source))?;
        let value: Value = parse(&text, || format!("{}", path.display()))?;
        if value["imageLayoutVersion"] != "1.0.0" {
            let version = &value["imageLayoutVersion"];
            let problem = format!("imageLayoutVersion is {version}, this build reads \"1.0.0\"");
            return Err(Error::entry(path.display().to_string(), problem));
        }
        Ok(Self {
            dir: dir.to_owned(),
            unstored: BTreeMap::new(),
        })
    }

    /// Its directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Its index.
    pub fn index(&self) -> Result<ImageIndex, Error> {
        let path = self.dir.join("index.json");
        let file = File::open(&path).map_err(|source| Error::read(&path, source))?;
        let mut bytes = Vec::new();
        file.take(MAX_JSON_BYTES)
            .read_to_end(&mut bytes)
            .map_err(|source| Error::read(&path, source))?;
        parse(&bytes, || format!("{}", path.display()))
    }

    /// The image with this manifest digest (`sha256:…`), or without one the only image of the layout.
    pub fn image(&self, digest: Option<&str>) -> Result<Image, Error> {
        let index = self.index()?;
        let is_image = |descriptor: &&Descriptor| {
            *descriptor.media_type() == MediaType::ImageManifest
                && descriptor.artifact_type().is_none()
                && digest.is_none_or(|digest| descriptor.digest().as_ref() == digest)
        };
        let mut images = index.manifests().iter().filter(is_image);
        let missing = |what: String| Error::Missing {
            what,
            layout: self.dir.clone(),
        };
        let descriptor = match (images.next(), images.next()) {
            (Some(descriptor), None) => descriptor.clone(),
            (None, _) => {
                let what = digest.map_or("an image manifest".to_owned(), |it| {
                    format!("manifest {it}")
                });
                return Err(missing(what));
            }
            (Some(_), Some(_)) => return Err(missing("a single image manifest".to_owned())),
        };
        let manifest: ImageManifest = self.json(&descriptor)?;
        let config = self.json(manifest.config())?;
        Ok(Image {
            descriptor,
            manifest,
            config,
        })
    }

    /// A document of the layout, held to its digest.
    pub fn json<T: DeserializeOwned>(&self, descriptor: &Descriptor) -> Result<T, Error> {
        parse(&self.bytes(descriptor)?, || describe(descriptor))
    }

    /// The bytes of a small blob, held to its digest.
    pub fn bytes(&self, descriptor: &Descriptor) -> Result<Vec<u8>, Error> {
        let path = self.blob_path(descriptor)?;
        let mut bytes = Vec::new();
        self.blob(descriptor)?
            .take(MAX_JSON_BYTES + 1)
            .read_to_end(&mut bytes)
            .map_err(|source| Error::read(&path, source))?;
        let actual = FileEntry {
            size_bytes: bytes.len() as u64,
            sha256: sha256_hex(&bytes),
        };
        check(descriptor, &actual)?;
        Ok(bytes)
    }

    /// A blob as a stream; [`check`] says afterwards whether it is the right one.
    pub fn blob(&self, descriptor: &Descriptor) -> Result<File, Error> {
        let path = self.blob_path(descriptor)?;
        File::open(&path).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => Error::Missing {
                what: describe(descriptor),
                layout: self.dir.clone(),
            },
            _ => Error::read(path, source),
        })
    }

    /// The bytes of a blob from an offset on; a layer that isn't stored is made again from its file.
    pub fn read_at(
        &self,
        descriptor: &Descriptor,
        offset_bytes: u64,
    ) -> Result<Box<dyn Read>, Error> {
        if let Some(unstored) = self.unstored.get(sha256_of(descriptor)?) {
            return unstored
                .read_at(offset_bytes)
                .map_err(|source| Error::read(&unstored.file, source));
        }
        let mut blob = self.blob(descriptor)?;
        blob.seek(SeekFrom::Start(offset_bytes))
            .map_err(|source| Error::read(describe(descriptor), source))?;
        Ok(Box::new(blob))
    }

    /// Where a blob is.
    pub fn blob_path(&self, descriptor: &Descriptor) -> Result<PathBuf, Error> {
        Ok(self.dir.join("blobs/sha256").join(sha256_of(descriptor)?))
    }

    /// Adds manifests with their blobs to a layout that is there already, such as those that refer to its image.
    pub fn add(
        &self,
        documents: &[(Descriptor, Vec<u8>)],
        manifest: Descriptor,
    ) -> Result<(), Error> {
        for (descriptor, bytes) in documents {
            let path = self.blob_path(descriptor)?;
            write_whole(&path, bytes)?;
        }
        let mut index = self.index()?;
        let mut manifests = index.manifests().clone();
        manifests.retain(|known| known.digest() != manifest.digest());
        manifests.push(manifest);
        index.set_manifests(manifests);
        write_whole(&self.dir.join("index.json"), &canonical_json(&index))
    }
}

/// A layout that is being written beside its place.
#[derive(Debug)]
pub struct Unfinished {
    aside: TempDir,
    place: PathBuf,
    manifests: Vec<Descriptor>,
    unstored: BTreeMap<String, Unstored>,
}

impl Unfinished {
    /// Begins a layout that will be at `place`; a layout that is there is replaced at the end, anything else is refused.
    pub fn begin(place: &Path) -> Result<Self, Error> {
        if place.exists() && Layout::open(place).is_err() {
            return Err(Error::NotALayout {
                path: place.to_owned(),
            });
        }
        let parent = match place.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        fs::create_dir_all(parent).map_err(|source| Error::write(parent, source))?;
        let aside = tempfile::Builder::new()
            .prefix(".image-")
            .tempdir_in(parent)
            .map_err(|source| Error::write(parent, source))?;
        let blobs = aside.path().join("blobs/sha256");
        fs::create_dir_all(&blobs).map_err(|source| Error::write(&blobs, source))?;
        Ok(Self {
            aside,
            place: place.to_owned(),
            manifests: Vec::new(),
            unstored: BTreeMap::new(),
        })
    }

    /// Writes a layer and says what it is. The descriptor has no annotations yet.
    pub fn layer(
        &mut self,
        tree: &Tree,
        compression: Compression,
        epoch_s: u64,
    ) -> Result<(Descriptor, Written), Error> {
        let mut blob = self.new_blob()?;
        let written = layer::write(tree, compression, epoch_s, &mut blob)?;
        let descriptor = descriptor(compression.media_type(), &written.blob);
        self.keep(blob, &descriptor)?;
        Ok((descriptor, written))
    }

    /// Takes the digest of an uncompressed layer of one file and keeps only what surrounds the file; the layout is whole in this process alone.
    pub fn unstored_layer(
        &mut self,
        tree: &Tree,
        file: &Path,
        epoch_s: u64,
    ) -> Result<(Descriptor, Written), Error> {
        let layer_bytes = layer::archive_bytes(tree)?;
        let metadata = fs::metadata(file).map_err(|source| Error::read(file, source))?;
        let file_bytes = metadata.len();
        let tail_bytes = layer::filled_up_bytes(file_bytes) - file_bytes + layer::END_BYTES;
        let mut beginning = Beginning {
            kept: Vec::new(),
            wanted_bytes: (layer_bytes - file_bytes - tail_bytes) as usize,
        };
        let written = layer::write(tree, Compression::None, epoch_s, &mut beginning)?;
        let descriptor = descriptor(Compression::None.media_type(), &written.blob);
        let unstored = Unstored {
            head: beginning.kept,
            file: file.to_owned(),
            file_bytes,
            tail_bytes,
        };
        self.unstored.insert(written.blob.sha256.clone(), unstored);
        Ok((descriptor, written))
    }

    /// Writes a document as canonical JSON.
    pub fn json(
        &mut self,
        media_type: MediaType,
        document: &impl Serialize,
    ) -> Result<Descriptor, Error> {
        self.bytes(media_type, &canonical_json(document))
    }

    /// Writes a small blob.
    pub fn bytes(&mut self, media_type: MediaType, bytes: &[u8]) -> Result<Descriptor, Error> {
        let descriptor = of_bytes(media_type, bytes);
        self.stream(&descriptor, bytes)?;
        Ok(descriptor)
    }

    /// Writes a blob from a stream, which must be what the descriptor says.
    pub fn stream(&mut self, descriptor: &Descriptor, mut stream: impl Read) -> Result<(), Error> {
        let mut blob = self.new_blob()?;
        let mut hasher = Hasher::default();
        let mut chunk = vec![0; 1 << 20];
        loop {
            let count = match stream.read(&mut chunk) {
                Ok(0) => break,
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(source) => return Err(Error::read(describe(descriptor), source)),
            };
            hasher.update(&chunk[..count]);
            blob.write_all(&chunk[..count])
                .map_err(|source| Error::write(blob.path(), source))?;
        }
        check(descriptor, &entry(hasher))?;
        self.keep(blob, descriptor)
    }

    /// Whether a blob has been written already.
    pub fn has(&self, descriptor: &Descriptor) -> bool {
        sha256_of(descriptor).is_ok_and(|sha256| self.blobs().join(sha256).exists())
    }

    /// Takes a manifest into the index, under a name where it has one.
    pub fn list(&mut self, mut manifest: Descriptor, name: Option<&str>) {
        if let Some(name) = name {
            let annotations = [(NAME_ANNOTATION.to_owned(), name.to_owned())];
            manifest.set_annotations(Some(annotations.into()));
        }
        self.manifests.push(manifest);
    }

    /// A file that [`Unfinished::adopt`] can make a blob.
    pub(crate) fn new_blob(&self) -> Result<tempfile::NamedTempFile, Error> {
        tempfile::NamedTempFile::new_in(self.blobs())
            .map_err(|source| Error::write(self.blobs(), source))
    }

    /// Makes a file a blob whose digest has been checked.
    pub(crate) fn keep(
        &mut self,
        blob: tempfile::NamedTempFile,
        descriptor: &Descriptor,
    ) -> Result<(), Error> {
        let path = self.blobs().join(sha256_of(descriptor)?);
        let kept = set_mode(blob.path(), 0o644)
            .and_then(|()| blob.as_file().sync_all())
            .and_then(|()| blob.persist(&path).map_err(|error| error.error));
        kept.map(|_| ())
            .map_err(|source| Error::write(path, source))
    }

    /// Writes the index and puts the layout at its place.
    pub fn finish(self) -> Result<Layout, Error> {
        let Self {
            aside,
            place,
            manifests,
            unstored,
        } = self;
        let mut index = ImageIndex::default();
        index.set_media_type(Some(MediaType::ImageIndex));
        index.set_manifests(manifests);
        write_whole(&aside.path().join("oci-layout"), LAYOUT_TEXT.as_bytes())?;
        write_whole(&aside.path().join("index.json"), &canonical_json(&index))?;
        let done = (|| {
            for dir in ["", "blobs", "blobs/sha256"] {
                let dir = aside.path().join(dir);
                set_mode(&dir, 0o755)?;
                File::open(&dir)?.sync_all()?;
            }
            // Two renames, not one: a directory can't be renamed over one that has files in it.
            let beside = aside.path().parent().expect("it was made in a directory");
            let old = tempfile::Builder::new()
                .prefix(".image-")
                .tempdir_in(beside)?;
            let old_place = old.path().join("old");
            let is_replaced = place.exists();
            if is_replaced {
                fs::rename(&place, &old_place)?;
            }
            if let Err(error) = fs::rename(aside.path(), &place) {
                if is_replaced {
                    // The first error is the one to report.
                    let _ = fs::rename(&old_place, &place);
                }
                return Err(error);
            }
            // Its place is another now, so there is nothing left to remove.
            let _ = aside.keep();
            sync_parent(&place)
        })();
        done.map_err(|source| Error::write(&place, source))?;
        Ok(Layout {
            unstored,
            ..Layout::open(&place)?
        })
    }

    fn blobs(&self) -> PathBuf {
        self.aside.path().join("blobs/sha256")
    }
}

/// Keeps the beginning of what is written to it.
struct Beginning {
    kept: Vec<u8>,
    wanted_bytes: usize,
}

impl Write for Beginning {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let missing = self.wanted_bytes - self.kept.len();
        self.kept
            .extend_from_slice(&bytes[..bytes.len().min(missing)]);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The bytes of a document: JSON with sorted keys and no white space.
pub fn canonical_json(document: &impl Serialize) -> Vec<u8> {
    let mut value = serde_json::to_value(document).expect("OCI documents have string keys only");
    value.sort_all_objects();
    serde_json::to_vec(&value).expect("a JSON value can be written")
}

/// Descriptor of bytes in memory.
pub fn of_bytes(media_type: MediaType, bytes: &[u8]) -> Descriptor {
    let entry = FileEntry {
        size_bytes: bytes.len() as u64,
        sha256: sha256_hex(bytes),
    };
    descriptor(media_type, &entry)
}

/// Descriptor of a blob with this size and digest.
pub(crate) fn descriptor(media_type: MediaType, blob: &FileEntry) -> Descriptor {
    let digest: Sha256Digest = blob
        .sha256
        .parse()
        .expect("digests that were computed are 64 hexadecimal digits");
    DescriptorBuilder::default()
        .media_type(media_type)
        .size(blob.size_bytes)
        .digest(digest)
        .build()
        .expect("every required field is set")
}

/// Whether bytes are what a descriptor says. The message has the files that the descriptor's annotations name.
pub fn check(descriptor: &Descriptor, actual: &FileEntry) -> Result<(), Error> {
    let expected = sha256_of(descriptor)?;
    if descriptor.size() != actual.size_bytes || expected != actual.sha256 {
        return Err(Error::Digest {
            what: describe(descriptor),
            expected: format!("{} bytes with sha256 {expected}", descriptor.size()),
            actual: format!("{} bytes with sha256 {}", actual.size_bytes, actual.sha256),
        });
    }
    Ok(())
}

/// Digest of a descriptor in lower-case hexadecimal digits; other algorithms than SHA-256 are refused.
pub fn sha256_of(descriptor: &Descriptor) -> Result<&str, Error> {
    descriptor.as_digest_sha256().ok_or_else(|| {
        Error::entry(
            descriptor.digest().to_string(),
            "must be a digest with sha256",
        )
    })
}

/// A blob in words: the file that it holds when an annotation names it, and its digest.
pub(crate) fn describe(descriptor: &Descriptor) -> String {
    let file = descriptor
        .annotations()
        .as_ref()
        .and_then(|annotations| annotations.get(crate::build::FILE_ANNOTATION));
    match file {
        Some(file) => format!("the layer of {file}, blob {}", descriptor.digest()),
        None => format!("blob {}", descriptor.digest()),
    }
}

pub(crate) fn parse<T: DeserializeOwned>(
    bytes: &[u8],
    what: impl Fn() -> String,
) -> Result<T, Error> {
    serde_json::from_slice(bytes).map_err(|source| Error::Json {
        what: what(),
        source,
    })
}

/// Writes a file aside, with the same mode for every user, and renames it.
fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let aside = path.with_extension("partial");
    outrider_bundle::digest::write_atomic(path, &aside, bytes)
        .and_then(|()| set_mode(path, 0o644))
        .map_err(|source| Error::write(path, source))
}

fn set_mode(path: &Path, mode: u32) -> io::Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_but_a_layout_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("image");
        fs::create_dir(&place).unwrap();
        fs::write(place.join("thesis.tex"), "years of work").unwrap();
        let error = Unfinished::begin(&place).unwrap_err();
        assert!(matches!(error, Error::NotALayout { .. }), "{error}");
        assert!(place.join("thesis.tex").exists());
    }

    #[test]
    fn a_layout_replaces_another_and_leaves_nothing_aside() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("image");
        for content in ["old", "new"] {
            let mut layout = Unfinished::begin(&place).unwrap();
            layout
                .bytes(MediaType::EmptyJSON, content.as_bytes())
                .unwrap();
            layout.finish().unwrap();
        }
        let blobs = fs::read_dir(place.join("blobs/sha256")).unwrap();
        let names: Vec<_> = blobs.map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, [sha256_hex(b"new").as_str()]);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_layout_that_is_given_up_leaves_the_old_one() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("image");
        Unfinished::begin(&place).unwrap().finish().unwrap();
        let mut layout = Unfinished::begin(&place).unwrap();
        let wrong = of_bytes(MediaType::EmptyJSON, b"right");
        let error = layout.stream(&wrong, b"wrong".as_slice()).unwrap_err();
        assert!(error.to_string().contains(&sha256_hex(b"right")), "{error}");
        drop(layout);
        Layout::open(&place).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
