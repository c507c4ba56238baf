//! Whether a directory holds exactly what its manifest says.
//!
//! A bundle directory holds the manifest, the listed files, and nothing else: an unlisted file is a fault, since a graph could name it as the home of its
//! weights and it would be loaded without a digest.
//! Symbolic links are faults as well, wherever they point, so no path below the directory ever leads out of it.
//! The directory itself may be reached by a link.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde::Serialize;

use crate::contract::draft::check_draft;
use crate::contract::{FactError, check_external_files, check_target};
use crate::digest::hash_file;
use crate::facts::{GraphError, GraphFacts};
use crate::manifest::{FILE_NAME, FileEntry, Manifest, ManifestError, list};

/// One thing that is wrong with a bundle directory. Paths are relative to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
#[serde(tag = "fault", rename_all = "snake_case")]
pub enum Fault {
    /// A listed file isn't there.
    #[error("{path}: missing")]
    Missing {
        /// The listed path.
        path: String,
    },
    /// A listed or unlisted entry is neither a plain file nor a plain directory, or a listed one is a directory.
    #[error("{path}: is {found}, but must be a regular file")]
    NotPlain {
        /// The entry.
        path: String,
        /// What it is.
        found: String,
    },
    /// A file has another size than listed. Its digest isn't taken.
    #[error("{path}: has {actual_bytes} bytes, the manifest says {expected_bytes}")]
    WrongSize {
        /// The listed path.
        path: String,
        /// Size by the manifest.
        expected_bytes: u64,
        /// Size of the file.
        actual_bytes: u64,
    },
    /// A file has the listed size and another content.
    #[error("{path}: has sha256 {actual}, the manifest says {expected}")]
    WrongDigest {
        /// The listed path.
        path: String,
        /// Digest by the manifest.
        expected: String,
        /// Digest of the file.
        actual: String,
    },
    /// A file that the manifest doesn't list.
    #[error("{path}: not listed in the manifest")]
    Unlisted {
        /// The file.
        path: String,
    },
    /// A file or directory can't be read.
    #[error("{path}: cannot be read: {reason}")]
    Unreadable {
        /// The file or directory.
        path: String,
        /// What the system said.
        reason: String,
    },
}

/// Why a bundle can't be used.
#[derive(Debug, thiserror::Error)]
pub enum BundleError {
    /// The manifest itself is unusable.
    #[error("{} has no usable manifest", dir.display())]
    Manifest {
        /// The bundle directory.
        dir: PathBuf,
        /// What is wrong with it.
        source: ManifestError,
    },
    /// The files aren't the ones the manifest lists; every fault.
    #[error("{} doesn't match its manifest: {}", dir.display(), list(faults))]
    Files {
        /// The bundle directory.
        dir: PathBuf,
        /// Every fault, by path.
        faults: Vec<Fault>,
    },
    /// A graph can't be read.
    #[error("{} has an unusable graph", dir.display())]
    Graph {
        /// The bundle directory.
        dir: PathBuf,
        /// What is wrong with it.
        source: GraphError,
    },
    /// A graph isn't what the manifest says or what an engine can drive; every error.
    #[error("graph {path} of {} doesn't fit: {}", dir.display(), list(errors))]
    Facts {
        /// The bundle directory.
        dir: PathBuf,
        /// Path of the graph in the bundle.
        path: String,
        /// Every error.
        errors: Vec<FactError>,
    },
}

impl BundleError {
    /// One line per thing that is wrong.
    pub fn lines(&self) -> Vec<String> {
        match self {
            Self::Manifest { source, .. } => source
                .lines()
                .into_iter()
                .map(|line| format!("{FILE_NAME}: {line}"))
                .collect(),
            Self::Files { faults, .. } => faults.iter().map(ToString::to_string).collect(),
            Self::Graph {
                source: GraphError::Open { path, source },
                ..
            } => vec![format!("{}: {source}", path.display())],
            Self::Graph {
                source: GraphError::Content { path, source },
                ..
            } => vec![format!("{}: {source}", path.display())],
            Self::Facts { path, errors, .. } => errors
                .iter()
                .map(|error| format!("{path}: {error}"))
                .collect(),
        }
    }
}

impl Manifest {
    /// Compares a directory with this manifest: every file is hashed, in parallel and streaming. Returns all faults, by path.
    pub fn verify(&self, dir: &Path) -> Result<(), Vec<Fault>> {
        self.compare(dir, |path, entry, size_bytes| {
            compare(dir, path, entry, size_bytes)
        })
    }

    /// As [`Manifest::verify`], but sizes only: damage that keeps the size stays unseen.
    pub fn compare_sizes(&self, dir: &Path) -> Result<(), Vec<Fault>> {
        self.compare(dir, compare_size)
    }

    fn compare(
        &self,
        dir: &Path,
        compare_file: impl Fn(&str, &FileEntry, u64) -> Option<Fault> + Sync,
    ) -> Result<(), Vec<Fault>> {
        let mut faults = Vec::new();
        let mut found = BTreeMap::new();
        scan(dir, "", &mut found, &mut faults);
        found.remove(FILE_NAME);

        let broken: Vec<String> = faults.iter().map(|fault| fault.path().to_owned()).collect();
        let explained = |path: &str| {
            broken
                .iter()
                .any(|broken| path == broken || path.starts_with(&format!("{broken}/")))
        };
        for path in self
            .files
            .keys()
            .filter(|path| !found.contains_key(*path) && !explained(path))
        {
            // No link is followed: one on the way to this path is a fault already, which explains it.
            let is_directory = fs::symlink_metadata(dir.join(path)).is_ok_and(|it| it.is_dir());
            faults.push(if is_directory {
                not_plain(path.clone(), "a directory")
            } else {
                Fault::Missing { path: path.clone() }
            });
        }
        for path in found.keys().filter(|path| !self.files.contains_key(*path)) {
            faults.push(Fault::Unlisted { path: path.clone() });
        }

        let to_hash: Vec<_> = self
            .files
            .iter()
            .filter_map(|(path, entry)| Some((path, entry, *found.get(path)?)))
            .collect();
        faults.par_extend(
            to_hash
                .into_par_iter()
                .filter_map(|(path, entry, size_bytes)| compare_file(path, entry, size_bytes)),
        );
        faults.sort_by(|a, b| a.path().cmp(b.path()));
        if faults.is_empty() {
            Ok(())
        } else {
            Err(faults)
        }
    }
}

impl Manifest {
    /// Checks the graphs of a bundle directory against the facts of this manifest and against the contract of [`crate::contract`].
    pub fn check_graphs(&self, dir: &Path) -> Result<(), BundleError> {
        self.check_graph(dir, &self.target.graph, |graph| {
            check_target(&self.target, graph)
        })?;
        let Some(draft) = &self.draft else {
            return Ok(());
        };
        self.check_graph(dir, &draft.graph, |graph| {
            check_draft(draft, &self.target, graph)
        })
    }

    fn check_graph(
        &self,
        dir: &Path,
        path: &str,
        check: impl FnOnce(&GraphFacts) -> Result<(), Vec<FactError>>,
    ) -> Result<(), BundleError> {
        let graph = GraphFacts::read(&dir.join(path)).map_err(|source| BundleError::Graph {
            dir: dir.to_owned(),
            source,
        })?;
        let mut errors = check(&graph).err().unwrap_or_default();
        errors.extend(
            check_external_files(path, &graph, &self.files)
                .err()
                .unwrap_or_default(),
        );
        if errors.is_empty() {
            Ok(())
        } else {
            Err(BundleError::Facts {
                dir: dir.to_owned(),
                path: path.to_owned(),
                errors,
            })
        }
    }
}

impl Fault {
    /// The file it is about, relative to the bundle directory.
    pub fn path(&self) -> &str {
        match self {
            Self::Missing { path }
            | Self::NotPlain { path, .. }
            | Self::WrongSize { path, .. }
            | Self::WrongDigest { path, .. }
            | Self::Unlisted { path }
            | Self::Unreadable { path, .. } => path,
        }
    }
}

/// Compares one plain file with its entry.
fn compare(dir: &Path, path: &str, entry: &FileEntry, size_bytes: u64) -> Option<Fault> {
    if let Some(fault) = compare_size(path, entry, size_bytes) {
        return Some(fault);
    }
    match hash_file(&dir.join(path)) {
        Ok((actual_bytes, _)) if actual_bytes != entry.size_bytes => {
            compare_size(path, entry, actual_bytes)
        }
        Ok((_, actual)) if actual != entry.sha256 => Some(Fault::WrongDigest {
            path: path.to_owned(),
            expected: entry.sha256.clone(),
            actual,
        }),
        Ok(_) => None,
        Err(error) => Some(unreadable(path, &error)),
    }
}

fn compare_size(path: &str, entry: &FileEntry, actual_bytes: u64) -> Option<Fault> {
    (actual_bytes != entry.size_bytes).then(|| Fault::WrongSize {
        path: path.to_owned(),
        expected_bytes: entry.size_bytes,
        actual_bytes,
    })
}

fn not_plain(path: String, found: &str) -> Fault {
    Fault::NotPlain {
        path,
        found: found.to_owned(),
    }
}

pub(crate) fn unreadable(path: &str, error: &io::Error) -> Fault {
    Fault::Unreadable {
        path: path.to_owned(),
        reason: error.to_string(),
    }
}

/// Lists the plain files below a directory with their sizes, without following a link.
pub(crate) fn scan(
    root: &Path,
    below: &str,
    found: &mut BTreeMap<String, u64>,
    faults: &mut Vec<Fault>,
) {
    let entries = match fs::read_dir(root.join(below)) {
        Ok(entries) => entries,
        Err(error) => {
            let path = if below.is_empty() { "." } else { below };
            faults.push(unreadable(path, &error));
            return;
        }
    };
    for entry in entries {
        let entry = match entry {
            Ok(entry) => entry,
            Err(error) => {
                faults.push(unreadable(below, &error));
                continue;
            }
        };
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = if below.is_empty() {
            name
        } else {
            format!("{below}/{name}")
        };
        match entry.metadata() {
            Ok(metadata) if metadata.is_dir() => scan(root, &path, found, faults),
            Ok(metadata) if metadata.is_file() => {
                found.insert(path, metadata.len());
            }
            Ok(metadata) => {
                let found = if metadata.is_symlink() {
                    "a symbolic link"
                } else {
                    "a special file"
                };
                faults.push(not_plain(path, found));
            }
            Err(error) => faults.push(unreadable(&path, &error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;

    use super::*;
    use crate::VerifiedBundle;
    use crate::digest::sha256_hex;
    use crate::testing::sample_bundle;

    fn faults(dir: &Path) -> Vec<Fault> {
        match VerifiedBundle::open(dir).unwrap_err() {
            BundleError::Files { faults, .. } => faults,
            other => panic!("{other}"),
        }
    }

    #[test]
    fn each_file_missing_cut_or_with_one_bit_flipped_is_named() {
        let names: Vec<String> = Manifest::load(sample_bundle().path())
            .unwrap()
            .files
            .into_keys()
            .collect();
        assert!(names.len() >= 4);
        for name in names {
            let dir = sample_bundle();
            let path = dir.path().join(&name);
            let bytes = fs::read(&path).unwrap();

            fs::remove_file(&path).unwrap();
            assert_eq!(faults(dir.path()), [Fault::Missing { path: name.clone() }]);

            fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
            let (expected_bytes, actual_bytes) = (bytes.len() as u64, bytes.len() as u64 - 1);
            assert_eq!(
                faults(dir.path()),
                [Fault::WrongSize {
                    path: name.clone(),
                    expected_bytes,
                    actual_bytes
                }]
            );

            let mut flipped = bytes.clone();
            flipped[bytes.len() / 2] ^= 1;
            fs::write(&path, &flipped).unwrap();
            let (expected, actual) = (sha256_hex(&bytes), sha256_hex(&flipped));
            assert_eq!(
                faults(dir.path()),
                [Fault::WrongDigest {
                    path: name.clone(),
                    expected,
                    actual
                }]
            );

            fs::write(&path, &bytes).unwrap();
            VerifiedBundle::open(dir.path()).unwrap();
        }
    }

    #[test]
    fn every_fault_is_reported_at_once_in_the_order_of_paths() {
        let dir = sample_bundle();
        fs::remove_file(dir.path().join("model.onnx.data")).unwrap();
        OpenOptions::new()
            .append(true)
            .open(dir.path().join("tokenizer.json"))
            .unwrap()
            .set_len(3)
            .unwrap();
        fs::create_dir(dir.path().join("sub")).unwrap();
        fs::write(dir.path().join("sub/extra.data"), "x").unwrap();
        let error = VerifiedBundle::open(dir.path()).unwrap_err();
        insta::assert_snapshot!(error.lines().join("\n"));
    }

    #[cfg(unix)]
    #[test]
    fn links_are_faults_wherever_they_point() {
        use std::os::unix::fs::symlink;

        let outside = tempfile::tempdir().unwrap();
        let dir = sample_bundle();
        let path = dir.path().join("model.onnx.data");
        let copy = outside.path().join("copy");
        fs::rename(&path, &copy).unwrap();
        symlink(&copy, &path).unwrap();
        let link = |path: &str| Fault::NotPlain {
            path: path.to_owned(),
            found: "a symbolic link".to_owned(),
        };
        assert_eq!(faults(dir.path()), [link("model.onnx.data")]);

        fs::remove_file(&path).unwrap();
        fs::rename(&copy, &path).unwrap();
        symlink(outside.path(), dir.path().join("sub")).unwrap();
        assert_eq!(faults(dir.path()), [link("sub")]);
    }

    #[test]
    fn a_directory_in_the_place_of_a_file_is_said_to_be_one() {
        let dir = sample_bundle();
        let path = dir.path().join("tokenizer.json");
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        let fault = "tokenizer.json: is a directory, but must be a regular file";
        let texts = |faults: Vec<Fault>| faults.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(texts(faults(dir.path())), [fault]);

        // What is inside it is a fault of its own.
        fs::write(path.join("inner"), "").unwrap();
        let inner = "tokenizer.json/inner: not listed in the manifest";
        assert_eq!(texts(faults(dir.path())), [fault, inner]);
    }

    #[test]
    fn a_message_of_one_line_names_the_faults_but_not_hundreds() {
        let dir = sample_bundle();
        for index in 0..10 {
            fs::write(dir.path().join(format!("extra{index}")), "").unwrap();
        }
        let error = VerifiedBundle::open(dir.path()).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("extra7: not listed in the manifest; and 2 more"),
            "{text}"
        );
        assert_eq!(error.lines().len(), 10);
    }

    #[test]
    fn a_directory_without_a_manifest_is_no_bundle() {
        let dir = tempfile::tempdir().unwrap();
        for dir in [dir.path(), &dir.path().join("gone")] {
            assert!(matches!(
                VerifiedBundle::open(dir),
                Err(BundleError::Manifest { .. })
            ));
        }
    }
}
