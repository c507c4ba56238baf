//! What can go wrong when an image is made, moved or checked.

use std::io;
use std::path::{Path, PathBuf};

use outrider_bundle::manifest::{FieldFault, ManifestError};

/// Why an image can't be made, moved or trusted.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file of this machine can't be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file of this machine can't be written.
    #[error("cannot write {}", path.display())]
    Write {
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Something is wrong with what a file says.
    #[error("{}", path.display())]
    InFile {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: Box<Error>,
    },
    /// The text is no TOML of the expected form.
    #[error("the text is not of the expected form")]
    Toml(#[source] Box<toml::de::Error>),
    /// The text is no JSON of the expected form.
    #[error("{what} is not of the expected form")]
    Json {
        /// What it should be, such as `the manifest sha256:…`.
        what: String,
        /// What the parser said.
        source: serde_json::Error,
    },
    /// A file was written for another version of its format.
    #[error("schema_version is {found}, this build reads {reads}")]
    SchemaVersion {
        /// The version in the file.
        found: u32,
        /// The version that is read.
        reads: u32,
    },
    /// The form is right and values are not; all faults.
    #[error("invalid values: {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Values(Vec<FieldFault>),
    /// A file isn't the one that the lock names.
    #[error(
        "stale lock: {file} has {actual_bytes} bytes and sha256 {actual}, the lock says {expected_bytes} bytes and sha256 {expected}"
    )]
    Stale {
        /// Path in the image, or name of the package.
        file: String,
        /// Size by the lock.
        expected_bytes: u64,
        /// Lower-case hexadecimal SHA-256 by the lock.
        expected: String,
        /// Size as it was read.
        actual_bytes: u64,
        /// Lower-case hexadecimal SHA-256 as it was read.
        actual: String,
    },
    /// The definition and the lock don't name the same things.
    #[error("stale lock: {what} is in the {present} only")]
    Unlocked {
        /// Path in the image, or name of the package.
        what: String,
        /// Where it is: `definition` or `lock`.
        present: &'static str,
    },
    /// The bundle has another digest than the lock says.
    #[error("stale lock: the bundle has digest {actual}, the lock says {expected}")]
    BundleDigest {
        /// Digest by the lock.
        expected: String,
        /// Digest of the bundle's manifest.
        actual: String,
    },
    /// The bundle's manifest can't be read.
    #[error("the bundle in {} has no usable manifest", dir.display())]
    Bundle {
        /// Directory of the bundle.
        dir: PathBuf,
        /// What is wrong.
        source: ManifestError,
    },
    /// An entry can't be in a layer.
    #[error("{path}: {problem}")]
    Entry {
        /// The path, in the image or in the archive.
        path: String,
        /// What it is and what is allowed.
        problem: String,
    },
    /// A file can't be in a layer of the allowed size.
    #[error(
        "{path}: takes {layer_bytes} bytes in a layer, --max-layer-bytes allows {max_layer_bytes}, and a file can't be split"
    )]
    LayerTooLarge {
        /// Path in the image.
        path: String,
        /// Size of a layer with only this file.
        layer_bytes: u64,
        /// The limit.
        max_layer_bytes: u64,
    },
    /// A place that would be written over isn't what is written.
    #[error("{} exists and is no OCI image layout, so it is not replaced", path.display())]
    NotALayout {
        /// The directory.
        path: PathBuf,
    },
    /// A layout lacks something.
    #[error("{what} is not in the layout {}", layout.display())]
    Missing {
        /// What: a blob by its digest, a manifest.
        what: String,
        /// The layout.
        layout: PathBuf,
    },
    /// Bytes aren't those that their digest names.
    #[error("{what} is damaged: expected {expected}, got {actual}")]
    Digest {
        /// What the bytes are, with the files that they hold when that is known.
        what: String,
        /// Digest that they should have, with the size where that differs.
        expected: String,
        /// Digest that they have.
        actual: String,
    },
    /// A program that was asked failed.
    #[error("{command}: {problem}")]
    Command {
        /// The command line.
        command: String,
        /// What it said.
        problem: String,
    },
    /// A layout doesn't hold what the lock says; all faults.
    #[error("the image is not what the lock says: {}", .0.join("; "))]
    Image(Vec<String>),
    /// A file can't be used as a key, or a key can't be put there.
    #[error("key {}: {problem}", path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// What it is and what is allowed.
        problem: String,
    },
    /// What an image comes with doesn't vouch for it; all faults.
    #[error("the image is not vouched for: {}", .0.join("; "))]
    Evidence(Vec<String>),
    /// Something about a registry; the message names it.
    #[error(transparent)]
    Registry(#[from] crate::registry::RegistryError),
}

impl Error {
    pub(crate) fn read(path: impl AsRef<Path>, source: io::Error) -> Self {
        Self::Read {
            path: path.as_ref().to_owned(),
            source,
        }
    }

    pub(crate) fn write(path: impl AsRef<Path>, source: io::Error) -> Self {
        Self::Write {
            path: path.as_ref().to_owned(),
            source,
        }
    }

    pub(crate) fn in_file(self, path: &Path) -> Self {
        Self::InFile {
            path: path.to_owned(),
            source: Box::new(self),
        }
    }

    pub(crate) fn key(path: &Path, problem: impl Into<String>) -> Self {
        Self::Key {
            path: path.to_owned(),
            problem: problem.into(),
        }
    }

    pub(crate) fn entry(path: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Entry {
            path: path.into(),
            problem: problem.into(),
        }
    }

    /// The message with those of its sources, for a place that has one line.
    pub fn chain(&self) -> String {
        let mut text = self.to_string();
        let mut source = std::error::Error::source(self);
        while let Some(error) = source {
            text.push_str(": ");
            text.push_str(&error.to_string());
            source = error.source();
        }
        text
    }
}
