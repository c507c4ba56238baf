//! The Python packages of the client tests: exactly what `tests/python/requirements.lock` pins, in a directory of their own.
//!
//! Nothing else of the machine's Python is used or changed, and no source package is ever built.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};
use sha2::{Digest, Sha256};

use crate::workspace::Workspace;

/// Environment variable that names the interpreter, when it is not `python3`.
pub const INTERPRETER_VARIABLE: &str = "PYTHON";

/// An interpreter together with the packages of the lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Python {
    interpreter: OsString,
    packages: PathBuf,
}

impl Python {
    /// The packages as they are, or an error that says how to get them.
    pub fn find(workspace: &Workspace) -> anyhow::Result<Self> {
        let python = Self::locate(workspace)?;
        if !python.packages.is_dir() {
            bail!(
                "the Python packages of the client tests are not installed, run `cargo xtask test`"
            );
        }
        Ok(python)
    }

    /// The packages, installed now if they are not there yet.
    pub fn ensure(workspace: &Workspace) -> anyhow::Result<Self> {
        let python = Self::locate(workspace)?;
        if python.packages.is_dir() {
            return Ok(python);
        }
        let parent = python
            .packages
            .parent()
            .context("the package directory has no parent")?;
        fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
        let aside = tempfile::tempdir_in(parent)
            .with_context(|| format!("cannot make a directory in {}", parent.display()))?;
        eprintln!("installing the Python packages of the client tests");
        let status = Command::new(&python.interpreter)
            .args([
                "-m",
                "pip",
                "install",
                "--quiet",
                "--require-hashes",
                "--no-deps",
                "--only-binary",
                ":all:",
            ])
            .args([
                "--disable-pip-version-check",
                "--no-input",
                "--root-user-action",
                "ignore",
                "--target",
            ])
            .arg(aside.path())
            .arg("-r")
            .arg(lock_file(workspace))
            .status()
            .with_context(|| format!("cannot run {:?}", python.interpreter))?;
        if !status.success() {
            bail!(
                "pip could not install {}: {status}",
                lock_file(workspace).display()
            );
        }
        fs::rename(aside.path(), &python.packages)
            .with_context(|| format!("cannot make {}", python.packages.display()))?;
        // It has moved: there is nothing left to clean up.
        let _ = aside.keep();
        Ok(python)
    }

    /// A command of the interpreter that sees the packages.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.interpreter);
        command
            .arg("-s")
            .env("PYTHONPATH", &self.packages)
            .env("PYTHONDONTWRITEBYTECODE", "1");
        command
    }

    /// The directory is named by the lock and the interpreter's ABI, so that it is right whenever it exists.
    fn locate(workspace: &Workspace) -> anyhow::Result<Self> {
        let interpreter = env::var_os(INTERPRETER_VARIABLE).unwrap_or_else(|| "python3".into());
        let output = Command::new(&interpreter)
            .args(["-c", "import sys, sysconfig; print(sys.implementation.cache_tag, sysconfig.get_platform())"])
            .output()
            .with_context(|| format!("cannot run {interpreter:?}; Python 3.10 or newer with pip is needed, or set {INTERPRETER_VARIABLE}"))?;
        if !output.status.success() {
            bail!(
                "{interpreter:?} failed: {}",
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        let lock = lock_file(workspace);
        let lock = fs::read(&lock).with_context(|| format!("cannot read {}", lock.display()))?;
        let digest = hex::encode(
            Sha256::new()
                .chain_update(&lock)
                .chain_update(&output.stdout)
                .finalize(),
        );
        Ok(Self {
            interpreter,
            packages: workspace.python().join(&digest[..16]),
        })
    }
}

fn lock_file(workspace: &Workspace) -> PathBuf {
    workspace
        .root()
        .join(Path::new("tests/python/requirements.lock"))
}
