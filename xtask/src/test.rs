//! `cargo xtask test`: brings what the tests need, builds everything they start, and runs them all.

use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::{Context, bail};

use crate::build;
use crate::fetch;
use crate::python::Python;
use crate::reference;
use crate::workspace::Workspace;

/// Environment variable by which tests find the ONNX Runtime library.
pub const LIBRARY_VARIABLE: &str = "OUTRIDER_ONNXRUNTIME_LIBRARY";

/// Arguments of `cargo xtask test`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Arguments of `cargo test`, such as `--lib` or a part of a test's name
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "ARGS"
    )]
    arguments: Vec<OsString>,
}

/// Runs the tests; the exit code is that of `cargo test`.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let workspace = Workspace::find()?;
    let onnxruntime = reference::onnxruntime(&workspace)?;
    for precision in reference::PRECISIONS {
        reference::ensure(&workspace, precision)?;
    }
    fetch::fetch_named(&workspace, &["nvrtc"])?;
    Python::ensure(&workspace)?;

    // `cargo test` builds no binary that only another package's tests start.
    let status = build::cargo(&workspace)
        .args(["build", "--workspace", "--bins"])
        .status()
        .context("cannot run cargo")?;
    if !status.success() {
        bail!("the workspace does not build: {status}");
    }
    let mut test = build::cargo(&workspace);
    // One run tells everything that fails.
    test.args(["test", "--no-fail-fast"]);
    if !args
        .arguments
        .iter()
        .any(|argument| argument == "--package" || argument == "-p")
    {
        test.arg("--workspace");
    }
    let status = test
        .args(&args.arguments)
        .env(LIBRARY_VARIABLE, onnxruntime)
        .status()
        .context("cannot run cargo")?;
    Ok(ExitCode::from(if status.success() { 0 } else { 1 }))
}
