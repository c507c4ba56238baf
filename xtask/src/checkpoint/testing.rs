//! Paths of test inputs, and copies of them with something changed.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::Value;
use tempfile::TempDir;

use crate::workspace::Workspace;

/// A file or directory of `tests/goldens`.
pub fn golden(path: &str) -> PathBuf {
    Workspace::find()
        .unwrap()
        .root()
        .join("tests/goldens")
        .join(path)
}

/// The reference target.
pub fn reference_gguf() -> PathBuf {
    let path = Workspace::find()
        .unwrap()
        .store()
        .join("smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf");
    assert!(
        path.is_file(),
        "{} is missing: run `cargo xtask fetch`",
        path.display()
    );
    path
}

/// A copy of a golden checkpoint, to be changed.
pub struct Edited {
    directory: TempDir,
}

impl Edited {
    /// Copies a directory of `tests/goldens`.
    pub fn copy_of(golden_path: &str) -> Edited {
        let directory = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(golden(golden_path)).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), directory.path().join(entry.file_name())).unwrap();
        }
        Edited { directory }
    }

    /// Where the copy is.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Sets top-level keys of a JSON file.
    pub fn set(self, file: &str, changes: Value) -> Edited {
        let path = self.path().join(file);
        let mut object: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        for (key, value) in changes.as_object().unwrap() {
            object[key] = value.clone();
        }
        fs::write(path, serde_json::to_vec(&object).unwrap()).unwrap();
        self
    }

    /// Removes top-level keys of a JSON file.
    pub fn without(self, file: &str, keys: &[&str]) -> Edited {
        let path = self.path().join(file);
        let mut object: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        for key in keys {
            object.as_object_mut().unwrap().remove(*key).unwrap();
        }
        fs::write(path, serde_json::to_vec(&object).unwrap()).unwrap();
        self
    }

    /// Writes a file.
    pub fn write(self, file: &str, content: impl AsRef<[u8]>) -> Edited {
        fs::write(self.path().join(file), content).unwrap();
        self
    }

    /// Removes a file.
    pub fn remove(self, file: &str) -> Edited {
        fs::remove_file(self.path().join(file)).unwrap();
        self
    }

    /// Rewrites `model.safetensors`.
    pub fn tensors(
        self,
        change: impl FnOnce(&mut BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>),
    ) -> Edited {
        let path = self.path().join("model.safetensors");
        let bytes = fs::read(&path).unwrap();
        let parsed = SafeTensors::deserialize(&bytes).unwrap();
        let mut tensors = parsed
            .iter()
            .map(|(name, view)| {
                (
                    name.to_string(),
                    (view.dtype(), view.shape().to_vec(), view.data().to_vec()),
                )
            })
            .collect();
        change(&mut tensors);
        let views = tensors.iter().map(|(name, (dtype, shape, data))| {
            (name, TensorView::new(*dtype, shape.clone(), data).unwrap())
        });
        fs::write(
            path,
            safetensors::serialize(views, None::<HashMap<String, String>>).unwrap(),
        )
        .unwrap();
        self
    }
}
