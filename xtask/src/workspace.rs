//! Where things are: the workspace, the store of fetched files, the bundles.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::Context;

/// Environment variable that moves the home directory away from `.outrider` of the workspace.
pub const HOME_VARIABLE: &str = "OUTRIDER_HOME";

/// Directories that every task agrees on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workspace {
    root: PathBuf,
    home: PathBuf,
}

impl Workspace {
    /// Finds the workspace that `cargo xtask` runs in, else the one around the current directory.
    pub fn find() -> anyhow::Result<Self> {
        let start = match env::var_os("CARGO_MANIFEST_DIR") {
            Some(manifest_dir) => PathBuf::from(manifest_dir),
            None => env::current_dir().context("cannot read the current directory")?,
        };
        let root = start
            .ancestors()
            .find(|dir| dir.join("Cargo.lock").is_file() && dir.join("xtask/Cargo.toml").is_file())
            .with_context(|| format!("no Outrider workspace around {}", start.display()))?
            .to_owned();
        let home = match env::var_os(HOME_VARIABLE) {
            Some(home) if !home.is_empty() => std::path::absolute(&home)
                .with_context(|| format!("{HOME_VARIABLE} {home:?} is no path"))?,
            _ => root.join(".outrider"),
        };
        Ok(Self { root, home })
    }

    /// The directory of the workspace's `Cargo.toml`.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Fetched files, one directory per lock entry, see `cargo xtask fetch`.
    pub fn store(&self) -> PathBuf {
        self.home.join("store")
    }

    /// Bundles, one directory per model and precision.
    pub fn bundles(&self) -> PathBuf {
        self.home.join("bundles")
    }

    /// A directory of the home directory, for the results of a task.
    pub fn home(&self, name: &str) -> PathBuf {
        self.home.join(name)
    }

    /// Python packages of the client tests.
    pub fn python(&self) -> PathBuf {
        self.home.join("python")
    }

    /// Fetch locks.
    pub fn locks(&self) -> PathBuf {
        self.root.join("configs/locks")
    }
}
