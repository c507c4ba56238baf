//! `cargo xtask`: the command line for model owners and operators.
//!
//! This file only dispatches to the tasks of the library. Exit status 0 is success, 1 failure, 2 wrong usage; `serve`, `test` and
//! `preflight` end with the status of what they run.

#![expect(
    clippy::print_stderr,
    reason = "printing is what a command line is for"
)]

use std::process::ExitCode;

use clap::Parser;
use xtask::{
    bench, bundle, export, fetch, fuzz, image, measure, preflight, rollout, serve, soak, test,
};

/// Outrider's tasks: fetch inputs, export and check models, serve and test.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", version)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, clap::Subcommand)]
enum Task {
    /// Bring the pinned library and model inputs into the local store
    Fetch(fetch::Args),
    /// Make, check and show model bundles
    Bundle(bundle::Args),
    /// Turn a checkpoint into an ONNX graph in a bundle
    Export(export::Args),
    /// Fetch, export, check and serve a model
    Serve(serve::Args),
    /// Build, push, pull and verify images with a model inside
    Image(image::Args),
    /// Say whether a server will run here before it is started
    Preflight(preflight::Args),
    /// Bring a new version from no traffic to all of it, and back when something is wrong
    Rollout(rollout::Args),
    /// Run every test, with all it needs
    Test(test::Args),
    /// Feed what reads outside bytes with inputs that are made up
    Fuzz(fuzz::Args),
    /// Measure what the documentation quotes
    Measure(measure::Args),
    /// Measure how fast the server is
    Bench(bench::Args),
    /// Load a server with callers of all kinds for a while, and compare every answer
    Soak(soak::Args),
}

fn main() -> ExitCode {
    let result = match Cli::parse().task {
        Task::Fetch(args) => fetch::run(args).map(|()| ExitCode::SUCCESS),
        Task::Bundle(args) => bundle::run(args).map(|()| ExitCode::SUCCESS),
        Task::Export(args) => export::run(args).map(|()| ExitCode::SUCCESS),
        Task::Serve(args) => serve::run(args),
        Task::Image(args) => image::run(args).map(|()| ExitCode::SUCCESS),
        Task::Preflight(args) => preflight::run(args),
        Task::Rollout(args) => rollout::run(args),
        Task::Test(args) => test::run(args),
        Task::Fuzz(args) => fuzz::run(args).map(|()| ExitCode::SUCCESS),
        Task::Measure(args) => measure::run(args).map(|()| ExitCode::SUCCESS),
        Task::Bench(args) => bench::run(args).map(|()| ExitCode::SUCCESS),
        Task::Soak(args) => soak::run(args).map(|()| ExitCode::SUCCESS),
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}
