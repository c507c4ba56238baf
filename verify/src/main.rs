//! `outrider-verify`: checks a live OpenAI-compatible service and says yes or no.

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use outrider_verify::client::{Client, ClientOptions};
use outrider_verify::report::Report;
use outrider_verify::smoke;

/// Bad usage, as `sysexits.h` numbers it.
const EXIT_USAGE: u8 = 64;

#[derive(Parser)]
#[command(
    version,
    about = "Checks a live OpenAI-compatible service and says yes or no",
    after_help = "Exit codes: 0 every check passed, 1 a check failed, 2 the checks could not be run to the end, 64 bad usage"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Does the service keep the basic promises of its interface? Takes seconds, changes nothing.
    Smoke(Smoke),
}

#[derive(Args)]
struct Smoke {
    #[command(flatten)]
    service: Service,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct Service {
    /// Address of the service, for example http://127.0.0.1:8080
    #[arg(long, value_name = "URL")]
    endpoint: String,
    /// Model to ask; the first one of the service's list when not given
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Key of the service
    #[arg(
        long,
        env = "OUTRIDER_VERIFY_API_KEY",
        hide_env_values = true,
        value_name = "KEY"
    )]
    api_key: Option<String>,
    /// Most seconds for one request
    #[arg(long, default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..=3600), value_name = "SECONDS")]
    timeout_s: u64,
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // A closed pipe is the reader's choice.
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { EXIT_USAGE } else { 0 });
        }
    };
    let Command::Smoke(Smoke { service, json }) = cli.command;
    let options = ClientOptions {
        api_key: service.api_key,
        timeout: Duration::from_secs(service.timeout_s),
    };
    let client = match Client::new(&service.endpoint, options) {
        Ok(client) => client,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "error: {error}");
            return ExitCode::from(EXIT_USAGE);
        }
    };
    let report = smoke::run(
        &client,
        &smoke::Options {
            model: service.model,
        },
    );
    match print(&report, json) {
        Ok(()) => ExitCode::from(report.verdict.exit_code()),
        Err(error) => {
            let _ = writeln!(
                std::io::stderr(),
                "error: the report could not be printed: {error}"
            );
            ExitCode::from(2)
        }
    }
}

fn print(report: &Report, json: bool) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    if json {
        serde_json::to_writer_pretty(&mut out, report)?;
        writeln!(out)?;
    } else {
        write!(out, "{report}")?;
    }
    Ok(out.flush()?)
}
