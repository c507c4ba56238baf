//! Where the things are that tests need. What is missing is an error that names the command which makes it, never a skipped test.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use serde::de::DeserializeOwned;
use xtask::reference;
use xtask::workspace::Workspace;

/// Environment variable that names the server to test, when it is not the one built beside the tests.
pub const SERVER_VARIABLE: &str = "OUTRIDER_TEST_SERVER";

/// The workspace these tests were built in.
pub fn workspace() -> anyhow::Result<Workspace> {
    Workspace::find()
}

/// The ONNX Runtime library, from the environment or the store.
pub fn onnxruntime(workspace: &Workspace) -> anyhow::Result<PathBuf> {
    if let Some(library) = env::var_os(xtask::test::LIBRARY_VARIABLE) {
        return Ok(library.into());
    }
    let library = reference::locked_file(workspace, "onnxruntime")?;
    if !library.is_file() {
        bail!(
            "{} does not exist, run `cargo xtask fetch`",
            library.display()
        );
    }
    Ok(library)
}

/// The `outrider-server` executable.
pub fn server_binary() -> anyhow::Result<PathBuf> {
    beside_the_tests("outrider-server", Some(SERVER_VARIABLE))
}

/// The `outrider-verify` executable.
pub fn verify_binary() -> anyhow::Result<PathBuf> {
    beside_the_tests("outrider-verify", None)
}

/// The `xtask` executable.
pub fn xtask_binary() -> anyhow::Result<PathBuf> {
    beside_the_tests("xtask", None)
}

fn beside_the_tests(name: &str, variable: Option<&str>) -> anyhow::Result<PathBuf> {
    if let Some(path) = variable.and_then(env::var_os) {
        return Ok(path.into());
    }
    let executable = env::current_exe().context("cannot find this executable")?;
    let profile_dir = executable
        .parent()
        .and_then(Path::parent)
        .context("this executable is in no target directory")?;
    let binary = profile_dir.join(name);
    if !binary.is_file() {
        bail!(
            "{} does not exist, run `cargo xtask test`, or `cargo build --workspace --bins` before",
            binary.display()
        );
    }
    Ok(binary)
}

/// A program of Debian's `package`, from `PATH` or the folders that only root has in it.
pub fn program(name: &str, package: &str) -> anyhow::Result<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/usr/local/sbin".into()])
        .map(|directory| directory.join(name))
        .find(|program| program.is_file())
        .with_context(|| format!("{name} is not installed: apt-get install {package}"))
}

/// A checked-in file under `tests/`.
pub fn data(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// A checked-in JSON file under `tests/`.
pub fn json<T: DeserializeOwned>(path: &str) -> anyhow::Result<T> {
    let path = data(path);
    let text =
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("cannot understand {}", path.display()))
}

/// A fresh directory on the file system of the bundles, so that large files can be linked into it.
pub fn scratch_dir() -> anyhow::Result<tempfile::TempDir> {
    let parent = workspace()?.bundles();
    tempfile::Builder::new()
        .prefix(".test-")
        .tempdir_in(&parent)
        .with_context(|| format!("cannot make a directory in {}", parent.display()))
}
