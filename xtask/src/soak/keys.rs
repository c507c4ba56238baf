//! The keys of the callers, in a file that the server reads again whenever it is told to.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;
use outrider_bundle::digest::sha256_hex;

/// Callers that the server tells apart.
const NAMES: u64 = 4;

/// The key of caller `number`; several callers share one.
pub fn secret(number: u64) -> String {
    format!("outrider-soak-caller-{:032}", number % NAMES)
}

/// Writes the file of all keys into a directory.
pub fn write(directory: &Path) -> anyhow::Result<PathBuf> {
    let line = |number| {
        format!(
            "caller-{number} {}\n",
            sha256_hex(secret(number).as_bytes())
        )
    };
    let file = directory.join("keys");
    fs::write(&file, (0..NAMES).map(line).collect::<String>())
        .with_context(|| format!("cannot write {}", file.display()))?;
    Ok(file)
}
