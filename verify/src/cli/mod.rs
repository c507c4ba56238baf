//! The command line: from arguments to a run, and from its report to output and exit code. It judges nothing.

mod all;
mod baseline;
mod lossless;
mod perf;
mod service;
mod soak;

use std::fmt::Display;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use clap::{Args, Parser, Subcommand};
use outrider_verify::report::Verdict;
use outrider_verify::{boundary, smoke};
use serde::Serialize;

/// Bad usage, as `sysexits.h` numbers it.
const EXIT_USAGE: u8 = 64;
/// Least time between two lines of progress.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);

#[derive(Parser)]
#[command(
    version,
    about = "Checks a live OpenAI-compatible service and says yes or no",
    after_help = "Exit codes: 0 pass, 1 a check failed or an answer differs, 2 could not run to the end, 3 inconclusive, 4 performance below the gate, 64 bad usage\n\nThe service's API key is read from OUTRIDER_VERIFY_API_KEY or --api-key-file, the reference's from OUTRIDER_VERIFY_REFERENCE_API_KEY or --reference-api-key-file"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Does the service keep the basic promises of its interface? Takes seconds, changes nothing
    Smoke(Checked),
    /// Does drafting change the output? Compares the same requests with drafting on and off, token by token
    Lossless(lossless::Arguments),
    /// Does the service keep its promises at the edges: empty, over-long, odd characters, stop strings, clients that leave?
    Boundary(Checked),
    /// Does drafting pay, and where? Measures with drafting on and off in turns
    Perf(perf::Arguments),
    /// Does the service hold for long: errors, answers that change, restarts, memory?
    Soak(soak::Arguments),
    /// May this service serve? Runs every step of a gate and writes report.json and report.html
    All(all::Arguments),
    /// Does the service still say what it said? Answers are kept per bundle digest
    #[command(subcommand)]
    Baseline(baseline::Command),
}

#[derive(Args)]
struct Checked {
    #[command(flatten)]
    service: service::ServiceArguments,
    #[command(flatten)]
    output: Output,
}

#[derive(Args)]
struct Output {
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

/// Why there is no report.
enum Failure {
    /// The arguments, or a file that they name, are wrong.
    Usage(anyhow::Error),
    /// There is no answer to judge.
    CouldNotRun(anyhow::Error),
}

type Outcome = Result<Verdict, Failure>;

/// Runs the program.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // A closed pipe is the reader's choice.
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { EXIT_USAGE } else { 0 });
        }
    };
    let outcome = match cli.command {
        Command::Smoke(arguments) => arguments.smoke(),
        Command::Lossless(arguments) => arguments.run(),
        Command::Boundary(arguments) => arguments.boundary(),
        Command::Perf(arguments) => arguments.run(),
        Command::Soak(arguments) => arguments.run(),
        Command::All(arguments) => arguments.run(),
        Command::Baseline(command) => command.run(),
    };
    match outcome {
        Ok(verdict) => ExitCode::from(verdict.exit_code()),
        Err(Failure::Usage(error)) => failed("error", &error, EXIT_USAGE),
        Err(Failure::CouldNotRun(error)) => {
            failed("could not run", &error, Verdict::CouldNotRun.exit_code())
        }
    }
}

fn failed(what: &str, error: &anyhow::Error, code: u8) -> ExitCode {
    // There is nowhere left to say that this could not be said.
    let _ = writeln!(std::io::stderr(), "{what}: {error:#}");
    ExitCode::from(code)
}

impl Checked {
    fn smoke(self) -> Outcome {
        let client = self.service.client()?;
        let options = smoke::Options {
            model: self.service.model,
        };
        let report = smoke::run(&client, &options);
        self.output.print(&report, report.verdict)
    }

    fn boundary(self) -> Outcome {
        let report = boundary::run(&self.service.service()?);
        self.output.print(&report, report.verdict)
    }
}

impl Output {
    /// Prints a report; one that could not be printed is none.
    fn print(&self, report: &(impl Serialize + Display), verdict: Verdict) -> Outcome {
        let print = || -> anyhow::Result<()> {
            let mut out = std::io::stdout().lock();
            if self.json {
                serde_json::to_writer_pretty(&mut out, report)?;
                writeln!(out)?;
            } else {
                write!(out, "{report}")?;
            }
            Ok(out.flush()?)
        };
        let printed = print().map_err(|error| error.context("the report can't be printed"));
        printed.map_err(Failure::CouldNotRun)?;
        Ok(verdict)
    }
}

/// Prints a line.
fn say(line: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    let said = writeln!(out, "{line}").and_then(|()| out.flush());
    said.map_err(|error| Failure::CouldNotRun(error.into()))
}

/// Says now and then on a terminal how far a run is.
struct Progress {
    what: &'static str,
    last: Mutex<Instant>,
    shown: bool,
}

impl Progress {
    fn new(what: &'static str) -> Self {
        Self {
            what,
            last: Mutex::new(Instant::now()),
            shown: std::io::stderr().is_terminal(),
        }
    }

    fn tell(&self, done: usize, total: usize) {
        self.tell_of(self.what, done, total);
    }

    fn tell_of(&self, what: &str, done: usize, total: usize) {
        let Ok(mut last) = self.last.try_lock() else {
            return;
        };
        if self.shown && last.elapsed() >= PROGRESS_INTERVAL {
            *last = Instant::now();
            let _ = writeln!(std::io::stderr(), "{what}: {done} of {total}");
        }
    }
}
