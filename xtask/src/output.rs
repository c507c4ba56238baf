//! The folder that a measurement leaves its files in.

use std::fs;
use std::path::PathBuf;

use anyhow::Context;
use outrider_bundle::digest::write_atomic;
use serde::Serialize;

use crate::workspace::Workspace;

/// A folder that exists.
#[derive(Debug)]
pub struct OutputDir {
    path: PathBuf,
}

impl OutputDir {
    /// Makes the folder `given`, or the one called `name` in the workspace's home.
    ///
    /// Called before a measurement: one that can't keep its result is not begun.
    pub fn make(
        workspace: &Workspace,
        given: Option<&PathBuf>,
        name: &str,
    ) -> anyhow::Result<Self> {
        let path = given.cloned().unwrap_or_else(|| workspace.home(name));
        fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(Self { path })
    }

    /// Writes the file `name`, all of it or nothing, and prints where it is.
    pub fn write(&self, name: &str, bytes: &[u8]) -> anyhow::Result<()> {
        let file = self.path.join(name);
        write_atomic(&file, &self.path.join(format!(".{name}.partial")), bytes)
            .with_context(|| format!("cannot write {}", file.display()))?;
        println!("{}", file.display());
        Ok(())
    }

    /// The same with `report` as indented JSON.
    pub fn write_json(&self, name: &str, report: &impl Serialize) -> anyhow::Result<()> {
        let json = serde_json::to_vec_pretty(report).context("the report is no JSON")?;
        self.write(name, &json)
    }
}
