//! Paths of test inputs.

use std::path::PathBuf;

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
