//! `cargo xtask preflight`: the checks of `outrider-preflight`, with this workspace's ONNX Runtime and reference bundle where nothing else is named.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::Context;
use outrider_bundle::manifest::Precision;

use crate::build::{self, Profile};
use crate::reference;
use crate::workspace::Workspace;

/// Arguments of `cargo xtask preflight`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Numeric form of the reference model, where no bundle and no configuration is named
    #[arg(long, default_value = "int8", value_parser = reference::precision_parser())]
    precision: Precision,
    /// Build the program as it is shipped, without debug assertions
    #[arg(long)]
    release: bool,
    /// Arguments of outrider-preflight, such as --config FILE, --user UID, --quick, --json; --help shows them behind `--`
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "PREFLIGHT ARGS"
    )]
    arguments: Vec<OsString>,
}

/// Runs the checks; the exit code is theirs.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let workspace = Workspace::find()?;
    let profile = if args.release {
        Profile::Release
    } else {
        Profile::Dev
    };
    let program = build::preflight(&workspace, profile)?;
    let mut defaults = Vec::new();
    if names_no_other(&args.arguments, &["--config", "--facts-in", "--explain"]) {
        let library = reference::onnxruntime(&workspace)?;
        defaults.push(("serving.runtime.onnxruntime_library", library));
        if names_no_other(&args.arguments, &["--bundle"]) {
            let bundle = reference::ensure(&workspace, args.precision)?;
            defaults.push(("serving.bundle", bundle));
        }
    }
    let status = command(&program, &defaults, &args.arguments)
        .status()
        .with_context(|| format!("cannot run {}", program.display()))?;
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(ExitCode::from(code.unwrap_or(u8::MAX)))
}

/// The program with its arguments behind the defaults: of two settings of one key the later one counts.
fn command(program: &Path, defaults: &[(&str, PathBuf)], arguments: &[OsString]) -> Command {
    let mut command = Command::new(program);
    for (key, path) in defaults {
        let mut setting = OsString::from(format!("{key}="));
        setting.push(path);
        command.arg("--set").arg(setting);
    }
    command.args(arguments);
    command
}

/// Whether none of these options is among the arguments, with its value behind it or behind `=`.
fn names_no_other(arguments: &[OsString], options: &[&str]) -> bool {
    let is_option = |argument: &OsString| {
        let text = argument.to_string_lossy();
        let name = text.split('=').next().unwrap_or_default();
        options.contains(&name)
    };
    !arguments.iter().any(is_option)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_model_is_taken_only_where_nothing_else_is_named() {
        let names = |arguments: &[&str]| {
            let arguments: Vec<OsString> = arguments.iter().map(OsString::from).collect();
            names_no_other(&arguments, &["--config", "--facts-in"])
        };
        assert!(names(&[]));
        assert!(names(&["--quick", "--facts-out", "facts.json"]));
        assert!(!names(&["--config", "server.yaml"]));
        assert!(!names(&["--config=server.yaml"]));
        assert!(!names(&["--json", "--facts-in=facts.json"]));
    }

    #[test]
    fn what_the_caller_sets_stands_behind_the_defaults() {
        let arguments = ["--set", "serving.bundle=mine"].map(OsString::from);
        let command = command(
            Path::new("preflight"),
            &[("serving.bundle", PathBuf::from("reference"))],
            &arguments,
        );
        let given: Vec<_> = command.get_args().collect();
        assert_eq!(
            given,
            [
                "--set",
                "serving.bundle=reference",
                "--set",
                "serving.bundle=mine"
            ]
        );
    }
}
