//! Makes a bundle of a directory: hashes its files, checks the facts, writes the manifest last.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::digest::hash_file;
use crate::manifest::{
    ASIDE_NAME, DraftFacts, FILE_NAME, FileEntry, GenerationDefaults, Manifest, ManifestError,
    SCHEMA_VERSION, Source, TargetFacts, TextFacts,
};
use crate::verify::{BundleError, Fault, scan, unreadable};

/// Everything a manifest says that can't be read from the files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Builder {
    /// Model name as callers see it.
    pub name: String,
    /// Facts about the target graph.
    pub target: TargetFacts,
    /// Facts about the draft graph, when there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft: Option<DraftFacts>,
    /// Tokenizer and chat template.
    pub text: TextFacts,
    /// Defaults for requests that leave a field out.
    pub generation: GenerationDefaults,
    /// Tools that made the files, name to version.
    pub tools: BTreeMap<String, String>,
    /// Inputs the files were made from.
    pub sources: Vec<Source>,
}

impl Builder {
    /// Makes the directory a bundle: every file in it becomes part of the bundle, and `bundle.json` is written when all facts have been checked.
    /// A manifest that is there already is replaced. Same files, same manifest.
    pub fn write(self, dir: &Path) -> Result<Manifest, BundleError> {
        let unusable = |source: ManifestError| BundleError::Manifest {
            dir: dir.to_owned(),
            source,
        };
        let manifest = Manifest {
            schema_version: SCHEMA_VERSION,
            name: self.name,
            files: hash_files(dir)?,
            target: self.target,
            draft: self.draft,
            text: self.text,
            generation: self.generation,
            tools: self.tools,
            sources: self.sources,
        };
        manifest.check().map_err(unusable)?;
        manifest.check_graphs(dir)?;
        manifest.write(dir).map_err(unusable)?;
        Ok(manifest)
    }
}

/// What another bundle says, to make one like it.
impl From<Manifest> for Builder {
    fn from(manifest: Manifest) -> Self {
        let Manifest {
            schema_version: _,
            files: _,
            name,
            target,
            draft,
            text,
            generation,
            tools,
            sources,
        } = manifest;
        Self {
            name,
            target,
            draft,
            text,
            generation,
            tools,
            sources,
        }
    }
}

/// Size and digest of every file of a directory but the manifest.
fn hash_files(dir: &Path) -> Result<BTreeMap<String, FileEntry>, BundleError> {
    let files = |faults| BundleError::Files {
        dir: PathBuf::from(dir),
        faults,
    };
    let mut faults = Vec::new();
    let mut found = BTreeMap::new();
    scan(dir, "", &mut found, &mut faults);
    if !faults.is_empty() {
        return Err(files(faults));
    }
    for own in [FILE_NAME, ASIDE_NAME] {
        found.remove(own);
    }
    let hash = |path: String| match hash_file(&dir.join(&path)) {
        Ok((size_bytes, sha256)) => Ok((path, FileEntry { size_bytes, sha256 })),
        Err(error) => Err(unreadable(&path, &error)),
    };
    let entries: Result<BTreeMap<_, _>, Fault> = found
        .into_keys()
        .collect::<Vec<_>>()
        .into_par_iter()
        .map(hash)
        .collect();
    entries.map_err(|fault| files(vec![fault]))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::VerifiedBundle;
    use crate::testing::{sample_bundle, sample_manifest, write_sample_files};

    fn builder() -> Builder {
        sample_manifest().into()
    }

    #[test]
    fn a_directory_becomes_a_bundle_that_opens() {
        let dir = tempfile::tempdir().unwrap();
        write_sample_files(dir.path());
        let manifest = builder().write(dir.path()).unwrap();
        assert_eq!(manifest, sample_manifest());
        assert_eq!(
            VerifiedBundle::open(dir.path()).unwrap().manifest(),
            &manifest
        );
    }

    #[test]
    fn making_it_again_writes_the_same_bytes() {
        let dir = sample_bundle();
        let path = dir.path().join(FILE_NAME);
        let first = fs::read(&path).unwrap();
        fs::write(dir.path().join(ASIDE_NAME), "left by a crash").unwrap();
        builder().write(dir.path()).unwrap();
        assert_eq!(fs::read(&path).unwrap(), first);
        assert!(!dir.path().join(ASIDE_NAME).exists());
    }

    #[test]
    fn facts_that_do_not_hold_leave_no_manifest() {
        let dir = tempfile::tempdir().unwrap();
        write_sample_files(dir.path());
        let mut wrong_facts = builder();
        wrong_facts.target.vocab_size = 33;
        let error = wrong_facts.write(dir.path()).unwrap_err();
        assert_eq!(
            error.lines(),
            ["model.onnx: `logits` is float32 [batch,rows,32], expected float32 [B,n,33]"]
        );

        fs::remove_file(dir.path().join("tokenizer.json")).unwrap();
        let error = builder().write(dir.path()).unwrap_err();
        assert_eq!(
            error.lines(),
            ["bundle.json: text.tokenizer: \"tokenizer.json\" is not among the files"]
        );

        fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
        fs::write(dir.path().join("model.onnx"), "no graph").unwrap();
        assert!(
            builder().write(dir.path()).unwrap_err().lines()[0]
                .contains("model.onnx: not a protobuf message")
        );
        assert!(!dir.path().join(FILE_NAME).exists());
    }

    #[cfg(unix)]
    #[test]
    fn a_link_in_the_directory_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        write_sample_files(dir.path());
        std::os::unix::fs::symlink("model.onnx", dir.path().join("link.onnx")).unwrap();
        assert_eq!(
            builder().write(dir.path()).unwrap_err().lines(),
            ["link.onnx: is a symbolic link, but must be a regular file"]
        );
    }
}
