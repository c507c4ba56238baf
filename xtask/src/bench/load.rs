//! `cargo xtask bench load`: many clients at once, with drafting off and on.
//!
//! A client sends its next request when it has its answer. Two servers, one of which drafts, get the same requests from as many clients each, and run
//! in turn ([`turns`]): both do the same work, and a machine that becomes slower for a while makes both slower.

mod course;
mod exchange;
mod report;
mod tally;
mod turns;

pub use report::{Cell, Report, Side};

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use outrider_bundle::manifest::Precision;
use outrider_verify::client::{Client, ClientOptions};

use crate::build;
use crate::output::OutputDir;
use crate::reference;
use crate::server_process::ServerCommand;
use crate::session::Session;
use crate::traffic::{CONTEXT_TOKENS, Traffic};
use crate::workspace::Workspace;
use course::{Callers, Course};
use tally::{Tally, client_cpu};
use turns::Turns;

/// Rounds, an even number, so that each server comes first as often; the median of their ratios counts.
const ROUNDS: u32 = 6;
/// An answer that is not there after this is stuck.
const STUCK: Duration = Duration::from_secs(300);
/// Requests to each server before the first measurement: the first ones after a start pay for pages of memory that no later one pays for.
const WARM_UP_REQUESTS: u64 = 4;

/// Arguments of `cargo xtask bench load`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Bundle directory; the reference pair when not given
    #[arg(long, value_name = "DIR", conflicts_with = "precision")]
    bundle: Option<PathBuf>,
    /// Numeric form of the reference pair
    #[arg(long, default_value = "int8", value_parser = reference::precision_parser())]
    precision: Precision,
    /// Clients at once
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1, 4, 16, 64])]
    clients: Vec<usize>,
    /// How long each number of clients sends requests to each of the two servers, while it is its turn
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(2..))]
    seconds: u64,
    /// Which requests are drawn
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Directory for load.json [default: .outrider/bench]
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// Fail on an error, on fewer tokens a second from 16 clients than from 4, or when drafting costs throughput
    #[arg(long)]
    check: bool,
    /// Measure the build that tests use instead of the one that is shipped
    #[arg(long)]
    dev: bool,
}

/// Measures, prints, and writes the file.
pub fn run(args: Args) -> anyhow::Result<()> {
    let workspace = Workspace::find()?;
    let output = OutputDir::make(&workspace, args.output.as_ref(), "bench")?;
    let report = measure(&workspace, &args)?;
    println!("{report}");
    output.write_json("load.json", &report)?;
    let failed = report.failed_checks();
    if args.check && !failed.is_empty() {
        bail!("{}", failed.join("; "));
    }
    Ok(())
}

fn measure(workspace: &Workspace, args: &Args) -> anyhow::Result<Report> {
    ensure!(
        args.clients.iter().all(|&clients| clients > 0),
        "--clients 0 is no load, allowed is from 1"
    );
    let onnxruntime = reference::onnxruntime(workspace)?;
    let bundle = match &args.bundle {
        Some(bundle) => bundle.clone(),
        None => reference::ensure(workspace, args.precision)?,
    };
    let profile = match args.dev {
        true => build::Profile::Dev,
        false => build::Profile::Release,
    };
    let command = ServerCommand::new(build::server(workspace, profile)?, &bundle, &onnxruntime)?
        .set("serving.runtime.context_tokens", CONTEXT_TOKENS)
        .set("serving.runtime.kv_cache_ratio", 0.9)
        // How long a full server lets its callers wait is measured, not cut off.
        .set("serving.runtime.queue_timeout_ms", STUCK.as_millis())
        .set("serving.speculative.enabled", true);
    let sessions = [Session::start(&command)?, Session::start(&command)?];
    if let Some(reason) = sessions[1].unavailable() {
        bail!("invalid: nothing is drafted: {reason}");
    }
    let traffic = Traffic::new(args.seed)?;
    let side = |server: usize| {
        let options = ClientOptions {
            timeout: STUCK,
            ..ClientOptions::default()
        };
        let session = &sessions[server];
        anyhow::Ok(Callers {
            client: Client::new(&session.process().endpoint(), options)?,
            model: session.model(),
            traffic: &traffic,
            drafting: server == 1,
        })
    };
    let sides = [side(0)?, side(1)?];
    for side in &sides {
        let began = Instant::now();
        for number in 0..WARM_UP_REQUESTS {
            side.answer(number, &|| began.elapsed(), &mut Tally::new());
        }
    }
    let servers = [0, 1].map(|server: usize| sessions[server].process().signaller());
    let mut cells = Vec::new();
    let mut next = WARM_UP_REQUESTS;
    let (cpu, began) = (client_cpu()?, Instant::now());
    for &clients in &args.clients {
        let mut cell = Cell::new(clients);
        for round in 0..ROUNDS {
            let turns = Turns::begin(servers, round as usize % 2)?;
            let course = Course::new(next, Duration::from_secs(args.seconds) / ROUNDS);
            let tallies = course.run(&sides, &turns, clients)?;
            next += tallies[0].requests;
            let [off, on] = tallies.each_ref().map(Tally::tokens_per_second);
            cell.round_ratios.push(on / off);
            for (drafting, tally) in [false, true].into_iter().zip(tallies) {
                cell.side_mut(drafting).add(tally);
            }
            eprintln!(
                "{clients} clients, round {} of {ROUNDS}: {:.3}",
                round + 1,
                on / off
            );
        }
        cells.push(cell);
    }
    let share = (client_cpu()? - cpu).as_secs_f64() / began.elapsed().as_secs_f64();
    Ok(Report::new(
        &sessions[1],
        &bundle,
        profile,
        args,
        share,
        cells,
    ))
}
