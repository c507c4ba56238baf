//! `outrider-rollout`: the rollout without a workspace. Exit codes are those of [`outrider_rollout::cli`], wrong usage is 64.

use std::process::ExitCode;

use clap::Parser;
use outrider_rollout::cli;

/// Brings a new version of a service from no traffic to all of it, and back by itself when something is wrong.
#[derive(Debug, Parser)]
#[command(name = "outrider-rollout", version)]
struct Cli {
    #[command(subcommand)]
    task: cli::Task,
}

fn main() -> ExitCode {
    match Cli::try_parse() {
        Ok(cli) => cli::run(cli.task),
        Err(error) => {
            let is_fault = error.use_stderr();
            // Where not even this can be printed, the code says it.
            let _ = error.print();
            ExitCode::from(if is_fault { 64 } else { 0 })
        }
    }
}
