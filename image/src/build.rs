//! From a definition and its lock to an image.
//!
//! Layers, the lowest first: base, runtime libraries, every large file of the bundle alone and uncompressed, its small files, what was built, configuration.
//! What changes rarely lies low, and a weight that didn't change is the same blob in every version of every image.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use oci_spec::image::{
    Arch, Config, ConfigBuilder, Descriptor, History, HistoryBuilder, ImageConfigurationBuilder,
    ImageManifestBuilder, MediaType, Os, PlatformBuilder, RootFsBuilder,
};
use outrider_bundle::manifest::FILE_NAME as BUNDLE_MANIFEST;

use crate::Error;
use crate::base;
use crate::debian;
use crate::definition::{Base, Bundle, Definition, FileRule};
use crate::layer::{self, Compression};
use crate::layout::{Layout, Unfinished};
use crate::lock::{Lock, load_bundle};
use crate::tree::{Content, Mode, Node, Tree, is_at_or_below};

/// Annotation of a layer that holds one file: the path of the file in the image.
pub const FILE_ANNOTATION: &str = "outrider.file.path";

/// Annotation of a layer that holds one file: the lower-case hexadecimal SHA-256 of the file.
pub const FILE_SHA256_ANNOTATION: &str = "outrider.file.sha256";

/// Label of the configuration: the digest of the bundle, the same as in `/v1/models`.
pub const BUNDLE_LABEL: &str = "outrider.bundle.digest";

/// Files of a bundle from this size on have a layer of their own.
pub const OWN_LAYER_BYTES: u64 = 1 << 20;

/// Latest time of an image, in seconds since 1970: the end of the year 9999, which RFC 3339 can say in every time zone.
const LATEST_S: u64 = 253_402_207_200;

/// What to build, and how.
#[derive(Clone, Debug)]
pub struct Options<'a> {
    /// What the image is made of.
    pub definition: &'a Definition,
    /// The digests of it.
    pub lock: &'a Lock,
    /// Directory that paths of the definition are relative to.
    pub root: &'a Path,
    /// Directory of the `.deb` files.
    pub packages_dir: &'a Path,
    /// Where the layout goes.
    pub output: &'a Path,
    /// Time of every file and of the image, in seconds since 1970.
    pub epoch_s: u64,
    /// Form of the layers that aren't weights.
    pub compression: Compression,
    /// Largest layer in bytes, before compression; `None` is no limit.
    pub max_layer_bytes: Option<u64>,
    /// Whether layers of weights are written; without them the layout is whole in this process alone, where it can be pushed.
    pub store_weights: bool,
    /// Whether only the layers of the bundle are in the image, to be mounted as a volume.
    pub weights_only: bool,
    /// Labels that the definition can't know, such as version and revision.
    pub labels: BTreeMap<String, String>,
}

/// What was built.
#[derive(Clone, Debug)]
pub struct Built {
    /// The layout.
    pub layout: Layout,
    /// Descriptor of the manifest; its digest is the image's name.
    pub manifest: Descriptor,
    /// The layers with what they are, the lowest first.
    pub layers: Vec<(String, Descriptor)>,
}

/// The time of an image from the text of `SOURCE_DATE_EPOCH`; 0 when it isn't set.
pub fn epoch_s(source_date_epoch: Option<&str>) -> Result<u64, Error> {
    let Some(text) = source_date_epoch else {
        return Ok(0);
    };
    match text.parse() {
        Ok(epoch_s) if epoch_s <= LATEST_S => Ok(epoch_s),
        _ => {
            let problem = format!("{text:?} must be seconds since 1970, from 0 to {LATEST_S}");
            Err(Error::entry("SOURCE_DATE_EPOCH", problem))
        }
    }
}

/// Builds an image. The same definition, lock and options give the same manifest digest.
pub fn build(options: &Options<'_>) -> Result<Built, Error> {
    let Options {
        definition, lock, ..
    } = options;
    epoch_s(Some(&options.epoch_s.to_string()))?;
    lock.check_covers(definition)?;
    if options.weights_only && definition.bundle.is_none() {
        return Err(Error::entry(
            "bundle",
            "is missing, an image of weights needs one",
        ));
    }
    let mut image = Assembly {
        options,
        layout: Unfinished::begin(options.output)?,
        layers: base::Layers::default(),
        names: Vec::new(),
    };
    if !options.weights_only {
        image.add_base()?;
        let runtime = image.files(&definition.runtime.files, &definition.runtime.directories)?;
        image.add_split("runtime", &runtime)?;
    }
    if let Some(bundle) = &definition.bundle {
        image.add_bundle(bundle)?;
    }
    if !options.weights_only {
        let (built, others): (Vec<_>, Vec<_>) =
            definition.app.files.iter().partition(|rule| rule.built);
        let built = image.files(built, &[])?;
        image.add_split("server", &built)?;
        let others = image.files(others, &definition.app.directories)?;
        image.add_split("app", &others)?;
    }
    image.finish()
}

/// An image on its way.
struct Assembly<'a> {
    options: &'a Options<'a>,
    layout: Unfinished,
    layers: base::Layers,
    names: Vec<String>,
}

impl Assembly<'_> {
    fn add_base(&mut self) -> Result<(), Error> {
        let definition = self.options.definition;
        match &definition.base {
            Base::Debian(debian) => {
                let scratch = tempfile::tempdir()
                    .map_err(|source| Error::write(std::env::temp_dir(), source))?;
                let packages = &self.options.lock.packages;
                let tree =
                    debian::unpack(debian, packages, self.options.packages_dir, scratch.path())?;
                self.add_split("base", &tree)
            }
            Base::Oci(oci) => {
                let layers = base::copy(
                    oci,
                    self.options.root,
                    definition.architecture,
                    &mut self.layout,
                )?;
                self.names
                    .extend(vec!["base".to_owned(); layers.descriptors.len()]);
                self.layers = layers;
                Ok(())
            }
        }
    }

    /// Files of the definition as a tree, each held to the lock.
    fn files<'a>(
        &self,
        rules: impl IntoIterator<Item = &'a FileRule>,
        directories: &[String],
    ) -> Result<Tree, Error> {
        let mut tree = Tree::default();
        for rule in rules {
            let mode = if rule.executable {
                Mode::Executable
            } else {
                Mode::Plain
            };
            let content = match (&rule.from, &rule.text) {
                (Some(from), _) => {
                    let expected = self.options.lock.file(&rule.to);
                    Content::Path(self.options.root.join(from), expected)
                }
                (None, text) => Content::Bytes(text.clone().unwrap_or_default().into_bytes()),
            };
            tree.insert(&rule.to, Node::File(content, mode))?;
        }
        for directory in directories {
            tree.insert(directory, Node::Directory)?;
        }
        Ok(tree)
    }

    fn add_bundle(&mut self, bundle: &Bundle) -> Result<(), Error> {
        let Options { lock, root, .. } = self.options;
        let dir = root.join(&bundle.from);
        let manifest = load_bundle(&dir)?;
        if lock.bundle_digest.as_ref() != Some(&manifest.digest()) {
            return Err(Error::BundleDigest {
                expected: lock.bundle_digest.clone().unwrap_or_default(),
                actual: manifest.digest(),
            });
        }
        let own = manifest.files.keys().map(String::as_str);
        let named: BTreeMap<String, PathBuf> = own
            .chain([BUNDLE_MANIFEST])
            .map(|path| (format!("{}/{path}", bundle.to), dir.join(path)))
            .collect();
        let in_lock = lock.files.iter().map(|file| &file.path);
        if let Some(path) = in_lock
            .filter(|path| is_at_or_below(path, &bundle.to))
            .find(|path| !named.contains_key(*path))
        {
            return Err(Error::Unlocked {
                what: path.clone(),
                present: "lock",
            });
        }
        let mut small = Tree::default();
        for (to, from) in named {
            let Some(expected) = lock.file(&to) else {
                return Err(Error::Unlocked {
                    what: to,
                    present: "bundle",
                });
            };
            let is_large = expected.size_bytes >= OWN_LAYER_BYTES;
            let node = Node::File(Content::Path(from.clone(), Some(expected)), Mode::ReadOnly);
            if is_large {
                self.add_weights(&to, &from, node)?;
            } else {
                small.insert(&to, node)?;
            }
        }
        self.add_split("bundle", &small)
    }

    /// One file as a layer of its own.
    fn add_weights(&mut self, path: &str, from: &Path, node: Node) -> Result<(), Error> {
        let mut tree = Tree::default();
        tree.insert(path, node)?;
        self.check_size(path, &tree)?;
        let Options {
            epoch_s,
            store_weights,
            ..
        } = self.options;
        let (mut descriptor, written) = if *store_weights {
            self.layout.layer(&tree, Compression::None, *epoch_s)?
        } else {
            self.layout.unstored_layer(&tree, from, *epoch_s)?
        };
        let annotations = [
            (FILE_ANNOTATION, path.to_owned()),
            (FILE_SHA256_ANNOTATION, written.files[path].sha256.clone()),
        ];
        let annotations = annotations.map(|(name, value)| (name.to_owned(), value));
        descriptor.set_annotations(Some(HashMap::from(annotations)));
        self.push(
            &format!("weights {path}"),
            descriptor,
            &written.archive.sha256,
        );
        Ok(())
    }

    /// A tree as one layer, or as several where one would be too large.
    fn add_split(&mut self, name: &str, tree: &Tree) -> Result<(), Error> {
        let mut part = Tree::default();
        let Some(max_layer_bytes) = self.options.max_layer_bytes else {
            return self.add_part(name, tree);
        };
        for (path, node) in tree.iter() {
            let mut larger = part.clone();
            larger.insert(path, node.clone())?;
            if !part.is_empty() && layer::archive_bytes(&larger)? > max_layer_bytes {
                self.add_part(name, &part)?;
                larger = Tree::default();
                larger.insert(path, node.clone())?;
            }
            self.check_size(path, &larger)?;
            part = larger;
        }
        self.add_part(name, &part)
    }

    fn add_part(&mut self, name: &str, tree: &Tree) -> Result<(), Error> {
        if tree.is_empty() {
            return Ok(());
        }
        let Options {
            compression,
            epoch_s,
            ..
        } = self.options;
        let (descriptor, written) = self.layout.layer(tree, *compression, *epoch_s)?;
        self.push(name, descriptor, &written.archive.sha256);
        Ok(())
    }

    fn check_size(&self, path: &str, tree: &Tree) -> Result<(), Error> {
        let layer_bytes = layer::archive_bytes(tree)?;
        match self.options.max_layer_bytes {
            Some(max_layer_bytes) if layer_bytes > max_layer_bytes => Err(Error::LayerTooLarge {
                path: path.to_owned(),
                layer_bytes,
                max_layer_bytes,
            }),
            _ => Ok(()),
        }
    }

    fn push(&mut self, name: &str, descriptor: Descriptor, archive_sha256: &str) {
        self.layers.history.push(self.history(name));
        self.layers
            .diff_ids
            .push(format!("sha256:{archive_sha256}"));
        self.layers.descriptors.push(descriptor);
        self.names.push(name.to_owned());
    }

    fn history(&self, name: &str) -> History {
        HistoryBuilder::default()
            .created(created(self.options.epoch_s))
            .created_by(format!("outrider image: {name}"))
            .build()
            .expect("history has no required field")
    }

    fn finish(mut self) -> Result<Built, Error> {
        let Options {
            definition,
            epoch_s,
            ..
        } = self.options;
        let created = created(*epoch_s);
        let architecture = Arch::from(definition.architecture.name());
        let rootfs = RootFsBuilder::default()
            .typ("layers")
            .diff_ids(self.layers.diff_ids.clone())
            .build()
            .expect("every required field is set");
        let config = ImageConfigurationBuilder::default()
            .created(created.clone())
            .architecture(architecture.clone())
            .os(Os::Linux)
            .config(self.run_config())
            .rootfs(rootfs)
            .history(self.layers.history.clone())
            .build()
            .expect("every required field is set");
        let config = self.layout.json(MediaType::ImageConfig, &config)?;
        let annotations = HashMap::from([("org.opencontainers.image.created".to_owned(), created)]);
        let manifest = ImageManifestBuilder::default()
            .schema_version(2_u32)
            .media_type(MediaType::ImageManifest)
            .config(config)
            .layers(self.layers.descriptors.clone())
            .annotations(annotations)
            .build()
            .expect("every required field is set");
        let mut descriptor = self.layout.json(MediaType::ImageManifest, &manifest)?;
        let platform = PlatformBuilder::default()
            .architecture(architecture)
            .os(Os::Linux)
            .build()
            .expect("every required field is set");
        descriptor.set_platform(Some(platform));
        self.layout.list(descriptor.clone(), Some(&definition.name));
        Ok(Built {
            layout: self.layout.finish()?,
            manifest: descriptor,
            layers: self
                .names
                .into_iter()
                .zip(self.layers.descriptors)
                .collect(),
        })
    }

    /// The part of the configuration that says how the image is run.
    fn run_config(&self) -> Config {
        let Options {
            definition, lock, ..
        } = self.options;
        let rules = &definition.config;
        let mut labels = rules.labels.clone();
        labels.extend(self.options.labels.clone());
        if let Some(digest) = &lock.bundle_digest {
            labels.insert(BUNDLE_LABEL.to_owned(), digest.clone());
        }
        let mut config = ConfigBuilder::default();
        if !self.options.weights_only {
            if let Some(health) = &rules.health {
                labels.insert(
                    "outrider.health.live".to_owned(),
                    format!("{}{}", health.port, health.live),
                );
                labels.insert(
                    "outrider.health.ready".to_owned(),
                    format!("{}{}", health.port, health.ready),
                );
            }
            let env: Vec<String> = rules
                .env
                .iter()
                .map(|(name, value)| format!("{name}={value}"))
                .collect();
            config = config
                .user(rules.user.clone())
                .entrypoint(rules.entrypoint.clone())
                .cmd(rules.cmd.clone())
                .env(env)
                .working_dir(rules.working_dir.clone())
                .stop_signal(rules.stop_signal.clone())
                .exposed_ports(rules.ports.clone());
        }
        config
            .labels(labels.into_iter().collect::<HashMap<_, _>>())
            .build()
            .expect("a configuration has no required field")
    }
}

/// A time as OCI writes it (RFC 3339, UTC).
pub(crate) fn created(epoch_s: u64) -> String {
    let time = i64::try_from(epoch_s)
        .ok()
        .and_then(|it| jiff::Timestamp::from_second(it).ok());
    time.expect("build refuses later times").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_an_image_is_zero_or_what_the_variable_says() {
        assert_eq!(epoch_s(None).unwrap(), 0);
        assert_eq!(epoch_s(Some("1700000000")).unwrap(), 1_700_000_000);
        for text in ["", "-1", "now", "253402207201"] {
            let message = epoch_s(Some(text)).unwrap_err().to_string();
            assert!(
                message.contains("SOURCE_DATE_EPOCH") && message.contains(text),
                "{message}"
            );
        }
        assert_eq!(created(0), "1970-01-01T00:00:00Z");
        assert_eq!(created(LATEST_S), "9999-12-30T22:00:00Z");
    }
}
