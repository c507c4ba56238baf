//! A bundle that was checked, as the only thing a loader takes.

use std::fs;
use std::path::{Path, PathBuf};

use crate::digest::sha256_hex;
use crate::draft_part;
use crate::manifest::Manifest;
use crate::verify::{BundleError, Fault, unreadable};

/// A bundle whose every byte matched its manifest when it was opened.
///
/// This is what a loader takes: there is no other way to get one than [`VerifiedBundle::open`] and [`VerifiedBundle::open_target`], so bytes that
/// nobody checked can't be loaded.
///
/// ```compile_fail
/// # fn forge(manifest: outrider_bundle::Manifest) {
/// let forged = outrider_bundle::VerifiedBundle { dir: "models".into(), digest: manifest.digest(), manifest, draft_fault: None };
/// # }
/// ```
#[derive(Debug)]
pub struct VerifiedBundle {
    dir: PathBuf,
    digest: String,
    manifest: Manifest,
    draft_fault: Option<BundleError>,
}

impl VerifiedBundle {
    /// Opens a bundle directory: reads the manifest, hashes every file and compares, then checks the graphs against the facts.
    pub fn open(dir: &Path) -> Result<Self, BundleError> {
        let manifest = Manifest::load(dir).map_err(|source| BundleError::Manifest {
            dir: dir.to_owned(),
            source,
        })?;
        manifest.verify(dir).map_err(|faults| BundleError::Files {
            dir: dir.to_owned(),
            faults,
        })?;
        manifest.check_graphs(dir)?;
        Ok(Self {
            dir: dir.to_owned(),
            digest: manifest.digest(),
            manifest,
            draft_fault: None,
        })
    }

    /// Opens a bundle directory for the sake of its target: as [`VerifiedBundle::open`], but what is wrong with the draft alone is no error.
    ///
    /// It is kept as [`VerifiedBundle::draft_fault`], and no damaged file is handed out.
    /// The digest is the manifest's, whatever state the files are in.
    pub fn open_target(dir: &Path) -> Result<Self, BundleError> {
        let manifest = Manifest::load(dir).map_err(|source| BundleError::Manifest {
            dir: dir.to_owned(),
            source,
        })?;
        let faults = manifest.verify(dir).err().unwrap_or_default();
        let draft_fault = manifest.judge(dir, faults)?;
        Ok(Self {
            dir: dir.to_owned(),
            digest: manifest.digest(),
            manifest,
            draft_fault,
        })
    }

    /// Looks at a bundle directory without hashing: files by their sizes, graphs by their headers.
    ///
    /// Returns what is wrong with the draft alone, and opens nothing: bytes that nobody hashed are not for loading.
    ///
    /// # Errors
    ///
    /// As [`VerifiedBundle::open_target`], as far as sizes and headers show it.
    pub fn inspect(dir: &Path) -> Result<Option<BundleError>, BundleError> {
        let manifest = Manifest::load(dir).map_err(|source| BundleError::Manifest {
            dir: dir.to_owned(),
            source,
        })?;
        let faults = manifest.compare_sizes(dir).err().unwrap_or_default();
        manifest.judge(dir, faults)
    }

    /// What is wrong with the draft of a bundle that was opened by [`VerifiedBundle::open_target`].
    pub fn draft_fault(&self) -> Option<&BundleError> {
        self.draft_fault.as_ref()
    }

    /// What the bundle is.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The bundle digest, see [`Manifest::digest`].
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// The bundle directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Where a listed file is; `None` when the manifest doesn't list it, or it is damaged.
    pub fn path(&self, name: &str) -> Option<PathBuf> {
        (self.manifest.files.contains_key(name) && !self.is_damaged(name))
            .then(|| self.dir.join(name))
    }

    fn is_damaged(&self, name: &str) -> bool {
        match &self.draft_fault {
            Some(BundleError::Files { faults, .. }) => {
                faults.iter().any(|fault| draft_part::covers(fault, name))
            }
            _ => false,
        }
    }

    /// Content of a listed file, hashed once more, so that these very bytes are the ones the manifest names.
    pub fn read(&self, name: &str) -> Result<Vec<u8>, BundleError> {
        let fault = |fault| BundleError::Files {
            dir: self.dir.clone(),
            faults: vec![fault],
        };
        let path = name.to_owned();
        let Some(entry) = self.manifest.files.get(name) else {
            return Err(fault(Fault::Unlisted { path }));
        };
        let bytes =
            fs::read(self.dir.join(name)).map_err(|error| fault(unreadable(name, &error)))?;
        let actual = sha256_hex(&bytes);
        if actual != entry.sha256 {
            return Err(fault(Fault::WrongDigest {
                path,
                expected: entry.sha256.clone(),
                actual,
            }));
        }
        Ok(bytes)
    }
}

impl Manifest {
    /// What the faults of a directory, and its graphs, mean: those of the draft alone, or an error when the target can't be served.
    fn judge(&self, dir: &Path, faults: Vec<Fault>) -> Result<Option<BundleError>, BundleError> {
        let files = |faults| BundleError::Files {
            dir: dir.to_owned(),
            faults,
        };
        let (of_target, of_draft) =
            draft_part::split(self, dir, faults).map_err(|source| BundleError::Graph {
                dir: dir.to_owned(),
                source,
            })?;
        if !of_target.is_empty() {
            return Err(files([of_target, of_draft].concat()));
        }
        let target_alone = Self {
            draft: None,
            ..self.clone()
        };
        target_alone.check_graphs(dir)?;
        Ok(if of_draft.is_empty() {
            self.check_graphs(dir).err()
        } else {
            Some(files(of_draft))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{sample_bundle, sample_pair};

    #[test]
    fn an_inspection_sees_sizes_and_headers_and_no_digests() {
        let dir = sample_pair();
        assert!(VerifiedBundle::inspect(dir.path()).unwrap().is_none());
        let path = dir.path().join("tokenizer.json");
        let mut bytes = fs::read(&path).unwrap();
        bytes[0] ^= 1;
        fs::write(&path, &bytes).unwrap();
        assert!(VerifiedBundle::inspect(dir.path()).unwrap().is_none());
        bytes.push(0);
        fs::write(&path, &bytes).unwrap();
        let lines = VerifiedBundle::inspect(dir.path()).unwrap_err().lines();
        assert!(lines[0].starts_with("tokenizer.json: has"), "{lines:?}");
        bytes.pop();
        fs::write(&path, &bytes).unwrap();
        fs::remove_file(dir.path().join("draft.onnx")).unwrap();
        let lines = VerifiedBundle::inspect(dir.path())
            .unwrap()
            .unwrap()
            .lines();
        assert_eq!(lines, ["draft.onnx: missing"]);
    }

    #[test]
    fn an_intact_bundle_opens_and_reads() {
        let dir = sample_bundle();
        let bundle = VerifiedBundle::open(dir.path()).unwrap();
        assert_eq!(bundle.digest(), bundle.manifest().digest());
        assert_eq!(
            bundle.read("tokenizer.json").unwrap(),
            fs::read(dir.path().join("tokenizer.json")).unwrap()
        );
        assert_eq!(
            bundle.path("model.onnx"),
            Some(dir.path().join("model.onnx"))
        );
        assert_eq!(bundle.path("other.onnx"), None);
        assert!(bundle.read("../etc/passwd").is_err());
    }

    #[test]
    fn bytes_that_changed_after_opening_are_not_handed_out() {
        let dir = sample_bundle();
        let bundle = VerifiedBundle::open(dir.path()).unwrap();
        fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
        let error = bundle.read("tokenizer.json").unwrap_err().to_string();
        assert!(
            error.contains("tokenizer.json: has sha256") && error.contains("the manifest says"),
            "{error}"
        );
    }

    #[test]
    fn facts_that_the_graphs_contradict_do_not_open() {
        type Change = fn(&mut Manifest);
        let changes: [(Change, &str); 2] = [
            (
                |manifest| manifest.target.kv_dtype = "float16".to_owned(),
                "model.onnx: `key_cache.0` is float32",
            ),
            (
                |manifest| manifest.draft.as_mut().unwrap().block_size = 3,
                "draft.onnx: the graph's metadata has outrider.block_size = \"4\", the manifest says \"3\"",
            ),
        ];
        for (change, expected) in changes {
            let dir = sample_pair();
            let mut manifest = Manifest::load(dir.path()).unwrap();
            VerifiedBundle::open(dir.path()).unwrap();
            change(&mut manifest);
            manifest.write(dir.path()).unwrap();
            let lines = VerifiedBundle::open(dir.path()).unwrap_err().lines();
            assert!(lines[0].starts_with(expected), "{lines:?}");
        }
    }
}
