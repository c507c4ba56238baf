//! The server inside images: built so that the same sources give the same bytes in any directory.
//!
//! Paths of the workspace, of cargo's home and of the compiler are replaced by fixed ones, and flags of the environment don't count.
//! What remains are the compilers themselves: another version of rustc or of the C compiler may give other bytes, so both are said in the provenance.

use std::collections::BTreeMap;
use std::env;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, ensure};
use outrider_image::definition::Architecture;

use crate::build::{cargo, executable};
use crate::workspace::Workspace;

/// Name of the package and of its binary.
pub const NAME: &str = "outrider-server";

/// Separates the flags in `CARGO_ENCODED_RUSTFLAGS`.
const SEPARATOR: &str = "\u{1f}";

/// Builds the server for an image, stripped and without a path of this machine.
pub fn build(workspace: &Workspace, architecture: Architecture) -> anyhow::Result<PathBuf> {
    let target = match architecture {
        Architecture::Amd64 => "x86_64-unknown-linux-gnu",
        Architecture::Arm64 => "aarch64-unknown-linux-gnu",
    };
    let places = [
        (cargo_home()?, "/cargo"),
        (
            PathBuf::from(said("rustc", &["--print", "sysroot"])?),
            "/rust",
        ),
        (workspace.root().to_owned(), "/outrider"),
    ];
    let map = |flag: &str, wanted: &[usize]| -> Vec<String> {
        let places = wanted.iter().map(|index| &places[*index]);
        places
            .map(|(place, name)| format!("{flag}{}={name}", place.display()))
            .collect()
    };
    let mut rust_flags = map("--remap-path-prefix=", &[0, 1, 2]);
    rust_flags.push("-Cstrip=symbols".to_owned());
    let c_flags = map("-ffile-prefix-map=", &[0, 2]).join(" ");
    let mut command = cargo(workspace);
    // Only this package is selected: an image has no use for the features that the tests of others ask for.
    command.args(["build", "--locked", "--release", "--package", NAME]);
    command.args(["--bin", NAME, "--target", target]);
    command.args(["--message-format", "json-render-diagnostics"]);
    for (name, _) in env::vars_os() {
        let is_profile = name
            .to_str()
            .is_some_and(|name| name.starts_with("CARGO_PROFILE_RELEASE_"));
        if is_profile {
            command.env_remove(name);
        }
    }
    command
        .env("CARGO_ENCODED_RUSTFLAGS", rust_flags.join(SEPARATOR))
        .env("CARGO_INCREMENTAL", "0")
        .env("CFLAGS", &c_flags)
        .env("CXXFLAGS", &c_flags);
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run cargo")?;
    ensure!(
        output.status.success(),
        "cargo could not build {NAME}: {}",
        output.status
    );
    executable(&output.stdout).with_context(|| format!("cargo named no {NAME} executable"))
}

/// The compilers that the bytes depend on, by name.
pub fn compilers() -> anyhow::Result<BTreeMap<String, String>> {
    let c_compiler = env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let first_line = |text: String| text.lines().next().unwrap_or_default().to_owned();
    Ok(BTreeMap::from([
        ("rustc".to_owned(), said("rustc", &["--version"])?),
        (
            "cc".to_owned(),
            first_line(said(&c_compiler, &["--version"])?),
        ),
    ]))
}

fn cargo_home() -> anyhow::Result<PathBuf> {
    if let Some(home) = env::var_os("CARGO_HOME") {
        return Ok(PathBuf::from(home));
    }
    let home = env::home_dir().context("neither CARGO_HOME nor HOME is set")?;
    Ok(home.join(".cargo"))
}

/// What a program prints, without white space around it.
pub fn said(program: &str, arguments: &[&str]) -> anyhow::Result<String> {
    let output = Command::new(program)
        .args(arguments)
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot run {program}"))?;
    ensure!(
        output.status.success(),
        "{program} {} failed: {}",
        arguments.join(" "),
        output.status
    );
    let text = String::from_utf8(output.stdout)
        .with_context(|| format!("{program} prints something that is not UTF-8"))?;
    Ok(text.trim().to_owned())
}
