//! `outrider-preflight`: says before a start whether a server will run here.
//!
//! Exit codes: 0 when it will, 1 when it will not or nobody can tell, 2 for a wrong command line or a fault of this program, 3 for warnings under
//! `--strict`.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Parser;
use outrider_preflight::checks;
use outrider_preflight::collect::{self, Options, child, gpu, probe};
use outrider_preflight::facts::{Facts, SCHEMA_VERSION};
use outrider_preflight::report::{self, Report, Selection};
use outrider_server::config::ConfigArguments;

/// Checks a machine, a bundle and a configuration before a server starts on them. Changes nothing.
#[derive(Parser)]
#[command(version, args_conflicts_with_subcommands = true)]
struct Arguments {
    #[command(subcommand)]
    child: Option<Child>,
    #[command(flatten)]
    config: ConfigArguments,
    /// Number of the user that the server will run as [default: the user of this process]
    #[arg(long, value_name = "UID")]
    user: Option<u32>,
    /// NVIDIA's management library, where the loader does not find it
    #[arg(long, value_name = "FILE")]
    nvml_library: Option<PathBuf>,
    /// Take the sizes of the bundle's files, and not their digests
    #[arg(long)]
    quick: bool,
    /// Judge facts that were written on another machine
    #[arg(long, value_name = "FILE", conflicts_with_all = ["config", "bundle", "listen", "admin_listen", "settings", "user", "nvml_library", "quick"])]
    facts_in: Option<PathBuf>,
    /// Write the facts into a file as well; they hold paths, addresses and sizes, and no secrets
    #[arg(long, value_name = "FILE")]
    facts_out: Option<PathBuf>,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
    /// Only these checks, by id or part, such as gpu or host.listen; separated by commas
    #[arg(long, value_name = "CHECKS", value_delimiter = ',')]
    only: Vec<String>,
    /// Not these checks
    #[arg(long, value_name = "CHECKS", value_delimiter = ',')]
    skip: Vec<String>,
    /// Say what a check looks at and when it complains, and exit
    #[arg(long, value_name = "CHECK")]
    explain: Option<String>,
    /// End with exit code 3 when there are warnings
    #[arg(long)]
    strict: bool,
}

/// What this program runs in a child of itself, since it may block or crash.
#[derive(clap::Subcommand)]
enum Child {
    /// Make a session with ONNX Runtime and run it
    #[command(hide = true)]
    ProbeRuntime(probe::Args),
    /// Ask NVIDIA's management library for everything about GPUs
    #[command(hide = true)]
    CollectGpu(gpu::ReaderArgs),
}

/// Exit code of a fault of this program; clap ends with the same one after a wrong command line.
const INTERNAL: u8 = 2;

/// Most bytes of a file of facts; those of a machine with many GPUs and a large bundle have a part of it.
const MAX_FACTS_BYTES: u64 = 16 << 20;

/// Longest wait for a file of facts: it may be a pipe.
const FACTS_LIMIT: Duration = Duration::from_secs(30);

/// Longest wait until a file of facts is written: it may be a pipe that nobody reads.
const WRITE_LIMIT: Duration = Duration::from_secs(5);

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    run(arguments).unwrap_or_else(|error| {
        let _ = writeln!(anstream::stderr(), "outrider-preflight: {error:#}");
        ExitCode::from(INTERNAL)
    })
}

fn run(arguments: Arguments) -> anyhow::Result<ExitCode> {
    if let Some(child) = arguments.child {
        child::end_with_parent();
        return match child {
            Child::ProbeRuntime(args) => print(&probe::run(&args)?).map(|()| ExitCode::SUCCESS),
            Child::CollectGpu(args) => {
                gpu::tell(&args).context("cannot tell what the GPUs said")?;
                Ok(ExitCode::SUCCESS)
            }
        };
    }
    if let Some(id) = &arguments.explain {
        return explain(id);
    }
    let selection = Selection {
        only: arguments.only,
        skip: arguments.skip,
    };
    let facts = match &arguments.facts_in {
        Some(path) => read_facts(path)?,
        None => collect::collect(&Options {
            sources: arguments.config.sources(),
            user_id: arguments.user,
            quick: arguments.quick,
            program: std::env::current_exe().context("cannot tell which program this is")?,
            nvml_library: arguments.nvml_library,
        }),
    };
    if let Some(path) = &arguments.facts_out {
        write_facts(path, &facts)?;
    }
    let report = Report::selected(checks::run(&facts), &selection)?;
    let text = if arguments.json {
        report.to_json()
    } else {
        report.to_text()
    };
    print(&text)?;
    Ok(ExitCode::from(report.exit_code(arguments.strict)))
}

fn explain(id: &str) -> anyhow::Result<ExitCode> {
    let Some(text) = report::explain(id) else {
        let known: Vec<&str> = report::documented_ids().collect();
        bail!("{id:?} is no check; these are: {}", known.join(", "));
    };
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn read_facts(path: &Path) -> anyhow::Result<Facts> {
    let unreadable = || format!("cannot read the facts in {}", path.display());
    let read = {
        let path = path.to_owned();
        move || {
            let mut text = Vec::new();
            let file = File::open(path)?;
            file.take(MAX_FACTS_BYTES + 1).read_to_end(&mut text)?;
            io::Result::Ok(text)
        }
    };
    let text = child::within(FACTS_LIMIT, read)
        .with_context(unreadable)?
        .with_context(unreadable)?;
    if text.len() as u64 > MAX_FACTS_BYTES {
        bail!("{}: has more than {MAX_FACTS_BYTES} bytes", unreadable());
    }
    let json: serde_json::Value = serde_json::from_slice(&text).with_context(unreadable)?;
    let version = &json["schema_version"];
    if *version != SCHEMA_VERSION {
        bail!(
            "{}: schema_version is {version}, this build reads {SCHEMA_VERSION}",
            path.display()
        );
    }
    serde_json::from_value(json).with_context(unreadable)
}

fn write_facts(path: &Path, facts: &Facts) -> anyhow::Result<()> {
    let json = serde_json::to_vec_pretty(facts).context("the facts are no JSON")?;
    let unwritable = || format!("cannot write the facts to {}", path.display());
    let write = {
        let path = path.to_owned();
        move || {
            // A device or a pipe is written to, and must not be replaced by a file.
            let is_special = fs::metadata(&path).is_ok_and(|metadata| !metadata.is_file());
            if is_special {
                return fs::write(path, json);
            }
            let mut aside = path.as_os_str().to_owned();
            aside.push(".partial");
            let aside = PathBuf::from(aside);
            // What lies there may be a link of somebody else to a file of ours.
            match fs::remove_file(&aside) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                _ => outrider_bundle::digest::write_atomic(&path, &aside, &json),
            }
        }
    };
    child::within(WRITE_LIMIT, write)
        .with_context(unwritable)?
        .with_context(unwritable)
}

fn print(text: &str) -> anyhow::Result<()> {
    anstream::stdout()
        .write_all(text.as_bytes())
        .context("cannot write to standard output")
}
