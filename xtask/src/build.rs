//! Builds binaries of the workspace with cargo and says where they are.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, bail};
use serde_json::Value;

use crate::workspace::Workspace;

/// Which cargo profile to build with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// Optimised, with assertions: what tests and `cargo xtask serve` use.
    Dev,
    /// What is shipped.
    Release,
}

/// The cargo that runs this task, else the one on the path.
pub fn cargo(workspace: &Workspace) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(workspace.root());
    forget_package(&mut command);
    command
}

/// Takes what cargo says to a program about its package out of the environment of `command`, which runs another cargo.
///
/// Build scripts that look at it, such as ring's, would see other values there than in a shell: everything above them would be built twice.
pub fn forget_package(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        let of_package = ["CARGO_MANIFEST_", "CARGO_PKG_"];
        if name
            .to_str()
            .is_some_and(|name| of_package.iter().any(|prefix| name.starts_with(prefix)))
        {
            command.env_remove(name);
        }
    }
}

/// Builds `outrider-server`.
pub fn server(workspace: &Workspace, profile: Profile) -> anyhow::Result<PathBuf> {
    binary(workspace, profile, "outrider-server")
}

/// Builds `outrider-preflight`.
pub fn preflight(workspace: &Workspace, profile: Profile) -> anyhow::Result<PathBuf> {
    binary(workspace, profile, "outrider-preflight")
}

/// Builds `outrider-verify`.
pub fn verify(workspace: &Workspace, profile: Profile) -> anyhow::Result<PathBuf> {
    binary(workspace, profile, "outrider-verify")
}

fn binary(workspace: &Workspace, profile: Profile, name: &str) -> anyhow::Result<PathBuf> {
    let mut command = cargo(workspace);
    // All members are selected, so that their features unite as they do for `cargo test --workspace`; only this one is built.
    command.args(["build", "--quiet", "--workspace", "--bin", name]);
    command.args(["--message-format", "json-render-diagnostics"]);
    if profile == Profile::Release {
        command.arg("--release");
    }
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run cargo")?;
    if !output.status.success() {
        bail!("cargo could not build {name}: {}", output.status);
    }
    executable(&output.stdout).with_context(|| format!("cargo named no {name} executable"))
}

/// The executable among cargo's messages, one JSON object a line.
pub(crate) fn executable(messages: &[u8]) -> Option<PathBuf> {
    messages
        .split(|&byte| byte == b'\n')
        .rev()
        .find_map(|line| {
            let message: Value = serde_json::from_slice(line).ok()?;
            Some(PathBuf::from(message["executable"].as_str()?))
        })
}
