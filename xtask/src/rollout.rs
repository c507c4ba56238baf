//! `cargo xtask rollout`: the command line of `outrider-rollout`, and the drill that shows on one machine that it does what it says.

mod callers;
mod damage;
mod drill;
mod report;
mod world;

use std::process::ExitCode;

use outrider_rollout::cli;

/// Arguments of `cargo xtask rollout`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, clap::Subcommand)]
enum Task {
    #[command(flatten)]
    Rollout(cli::Task),
    /// Roll out good and bad versions on this machine and see that nobody is harmed
    Drill(drill::Args),
}

/// Runs a command of a rollout; the exit code is its own.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.task {
        Task::Rollout(task) => Ok(cli::run(task)),
        Task::Drill(args) => drill::run(&args),
    }
}
