//! `cargo xtask rollout`: the command line of `outrider-rollout`.

use std::process::ExitCode;

pub use outrider_rollout::cli::Args;

/// Runs a command of a rollout; the exit code is its own.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    Ok(outrider_rollout::cli::run(args))
}
