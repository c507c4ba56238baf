//! `cargo xtask fuzz`: feeds the readers of outside bytes with inputs that libFuzzer makes up.
//!
//! The program is `fuzz/`, a workspace of its own, built with the coverage counters of the stable compiler; it needs no tool but a C++ compiler.
//! What breaks a reader is written to `.outrider/fuzz` and named. Put it into `tests/fuzz-cases` with the mending: a normal test replays what is there.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail};
use clap::builder::PossibleValuesParser;

use crate::build;
use crate::workspace::Workspace;

/// Environment variable by which the program learns which target to feed.
pub const TARGET_VARIABLE: &str = "OUTRIDER_FUZZ_TARGET";

/// Memory that a reader may take beyond what it has loaded for all inputs.
pub const INPUT_MEMORY_BYTES: usize = 256 << 20;

/// Names of the targets; their entry functions are in `tests/src/fuzz`.
pub const TARGET_NAMES: [&str; 11] = [
    "chat-request",
    "completion-request",
    "chat-template",
    "detokenizer",
    "stop-strings",
    "gguf",
    "safetensors",
    "safetensors-index",
    "checkpoint-config",
    "onnx",
    "bundle-manifest",
];

/// Longest input that is made up.
const INPUT_BYTES: usize = 16 << 10;
/// An input that takes longer is a case.
const INPUT_SECONDS: u32 = 10;
/// Resident memory of the whole program, its C++ part included.
const PROGRAM_MEMORY_MIB: usize = 2048;

/// What makes rustc count which branches an input takes, as `cargo fuzz --sanitizer none` does.
const COVERAGE_FLAGS: [&str; 6] = [
    "--cfg=fuzzing",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
];

/// Arguments of `cargo xtask fuzz`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// What to feed; every target in turn when not given
    #[arg(value_parser = PossibleValuesParser::new(TARGET_NAMES))]
    target: Option<String>,
    /// How long to feed each target
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..))]
    seconds: u64,
}

/// Builds the program and feeds the targets; an error when one of them broke.
pub fn run(args: Args) -> anyhow::Result<()> {
    let workspace = Workspace::find()?;
    let program = build(&workspace)?;
    let targets: Vec<&str> = match &args.target {
        Some(target) => vec![target],
        None => TARGET_NAMES.to_vec(),
    };
    let mut broken = Vec::new();
    for target in targets {
        if !feed(&workspace, &program, target, args.seconds)? {
            broken.push(target);
        }
    }
    if !broken.is_empty() {
        bail!("broken by an input: {}", broken.join(", "));
    }
    Ok(())
}

fn build(workspace: &Workspace) -> anyhow::Result<PathBuf> {
    let output = build::cargo(workspace)
        .args(["build", "--manifest-path", "fuzz/Cargo.toml"])
        .args(["--target-dir", "target/fuzz"])
        .args(["--message-format", "json-render-diagnostics"])
        // With a target, build scripts and macros are built without the counters.
        .args(["--target", &host()?])
        .env("CARGO_ENCODED_RUSTFLAGS", COVERAGE_FLAGS.join("\x1f"))
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run cargo")?;
    if !output.status.success() {
        bail!("cargo could not build fuzz/: {}", output.status);
    }
    build::executable(&output.stdout).context("cargo named no executable of fuzz/")
}

/// The compiler's name for this machine.
fn host() -> anyhow::Result<String> {
    let compiler = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(&compiler)
        .arg("-vV")
        .output()
        .with_context(|| format!("cannot run {}", compiler.display()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("rustc -vV names no host")?.to_owned())
}

/// Feeds one target and prints one line about it; whether it held.
fn feed(workspace: &Workspace, program: &Path, target: &str, seconds: u64) -> anyhow::Result<bool> {
    let home = workspace.home("fuzz");
    let [corpus, cases] = ["corpus", "cases"].map(|part| home.join(part).join(target));
    for directory in [&corpus, &cases] {
        fs::create_dir_all(directory)
            .with_context(|| format!("cannot make {}", directory.display()))?;
    }
    let kept = workspace.root().join("tests/fuzz-cases").join(target);
    let log = home.join(format!("{target}.log"));
    let output = File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
    let status = Command::new(program)
        .env(TARGET_VARIABLE, target)
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-max_len={INPUT_BYTES}"))
        .arg(format!("-timeout={INPUT_SECONDS}"))
        .arg(format!("-rss_limit_mb={PROGRAM_MEMORY_MIB}"))
        .arg(format!("-artifact_prefix={}/", cases.display()))
        .arg("-print_final_stats=1")
        // The first is where new inputs go.
        .args([&corpus, &kept])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(output)
        .status()
        .with_context(|| format!("cannot run {}", program.display()))?;

    let text = String::from_utf8_lossy(&fs::read(&log)?).into_owned();
    let executions = statistic(&text, "number_of_executed_units").unwrap_or(0);
    let held = status.success();
    let found = if held {
        "holds".to_owned()
    } else {
        let case = text
            .lines()
            .filter_map(|line| line.split_once("Test unit written to "))
            .next_back();
        match case {
            Some((_, path)) => format!("broken by {path}, see {}", log.display()),
            None => format!("broken, see {}", log.display()),
        }
    };
    println!("{target:<20} {executions:>10} inputs  {found}");
    Ok(held)
}

/// A figure that libFuzzer prints at its end.
fn statistic(log: &str, name: &str) -> Option<u64> {
    let prefix = format!("stat::{name}:");
    let value = log.lines().find_map(|line| line.strip_prefix(&prefix))?;
    value.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_inputs_is_read_from_the_fuzzers_last_words() {
        let log = "Done 9 runs in 1 second(s)\nstat::number_of_executed_units: 1234\nstat::average_exec_per_sec:     9\n";
        assert_eq!(statistic(log, "number_of_executed_units"), Some(1234));
        assert_eq!(statistic(log, "peak_rss_mb"), None);
    }
}
