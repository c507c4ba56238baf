//! `cargo xtask bench load`: many clients at once, with drafting off and on.
//!
//! A client sends its next request when it has its answer. What is compared, drafting with none and many clients with few, is asked of two servers that
//! get the same requests and run in turn ([`turns`]): both do the same work, and a machine that becomes slower for a while makes both slower.

mod course;
mod exchange;
mod report;
mod tally;
mod turns;

pub use report::{Cell, Growth, Report, Side};

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use nix::sys::signal::Signal;
use outrider_bundle::manifest::Precision;
use outrider_verify::client::{Client, ClientOptions};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::build;
use crate::output::OutputDir;
use crate::reference;
use crate::server_process::{ServerCommand, Signaller};
use crate::session::Session;
use crate::traffic::{CONTEXT_TOKENS, Traffic};
use crate::workspace::Workspace;
use course::{Callers, Course, Load};
use tally::{Tally, client_cpu};
use turns::Turns;

/// Pairs of rounds. No two processes are equally fast, so the servers change places within each; the median of the pairs counts.
const PAIRS: u32 = 3;
/// More clients must not bring fewer tokens a second: from the first to the second of these.
const FROM_TO: [usize; 2] = [4, 16];
/// An answer that is not there after this is stuck.
const STUCK: Duration = Duration::from_secs(300);
/// Above it, an exit code names the signal that ended a process.
const SIGNALLED: i32 = 128;
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
    /// How long each pair of rounds lasts for each of the two servers, while it is its turn
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
    if let Some(reason) = sessions.iter().find_map(Session::unavailable) {
        bail!("invalid: nothing is drafted: {reason}");
    }
    let servers = sessions.each_ref().map(|it| it.process().signaller());
    end_when_interrupted(servers)?;
    let traffic = Traffic::new(args.seed)?;
    let client_of = |session: &Session| {
        let options = ClientOptions {
            timeout: STUCK,
            ..ClientOptions::default()
        };
        Client::new(&session.process().endpoint(), options)
    };
    let callers = [client_of(&sessions[0])?, client_of(&sessions[1])?].map(|client| Callers {
        client,
        model: sessions[0].model(),
        traffic: &traffic,
    });
    for callers in &callers {
        let began = Instant::now();
        for number in 0..WARM_UP_REQUESTS {
            for drafting in [false, true] {
                callers.answer(number, drafting, &|| began.elapsed(), &mut Tally::new());
            }
        }
    }
    let mut rounds = Rounds {
        callers,
        servers,
        limit: Duration::from_secs(args.seconds) / 2,
        next: WARM_UP_REQUESTS,
    };
    let (cpu, began) = (client_cpu()?, Instant::now());
    let mut cells = Vec::new();
    for &clients in &args.clients {
        let mut cell = Cell::new(clients);
        let loads = [false, true].map(|drafting| Load { clients, drafting });
        cell.pair_ratios = rounds.run(loads, |[off, on]| {
            cell.off.add(off);
            cell.on.add(on);
        })?;
        cells.push(cell);
    }
    let mut growth = Vec::new();
    if FROM_TO.iter().all(|clients| args.clients.contains(clients)) {
        for drafting in [false, true] {
            let loads = FROM_TO.map(|clients| Load { clients, drafting });
            let mut errors = BTreeMap::new();
            let pair_ratios = rounds.run(loads, |tallies| {
                for (code, count) in tallies.into_iter().flat_map(|tally| tally.errors) {
                    *errors.entry(code).or_default() += count;
                }
            })?;
            growth.push(Growth {
                from_to: FROM_TO,
                drafting,
                errors,
                pair_ratios,
            });
        }
    }
    let share = (client_cpu()? - cpu).as_secs_f64() / began.elapsed().as_secs_f64();
    Ok(Report::new(
        &sessions[1],
        &bundle,
        profile,
        args,
        share,
        cells,
        growth,
    ))
}

/// Has an interrupt end the servers with this process: one that is stopped takes no notice of its own.
fn end_when_interrupted(servers: [Signaller; 2]) -> anyhow::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("cannot catch signals")?;
    std::thread::spawn(move || {
        if let Some(signal) = signals.forever().next() {
            for server in servers {
                let _ = server.send(Signal::SIGKILL);
            }
            std::process::exit(SIGNALLED + signal);
        }
    });
    Ok(())
}

/// Rounds over the same two servers.
struct Rounds<'a> {
    callers: [Callers<'a>; 2],
    servers: [Signaller; 2],
    /// How long one goes on.
    limit: Duration,
    /// Number of the next request.
    next: u64,
}

impl Rounds<'_> {
    /// Runs a comparison and hands over what was answered to each load in each round; the throughput of the second load, of that of the first, in each pair.
    fn run(
        &mut self,
        loads: [Load; 2],
        mut answered: impl FnMut([Tally; 2]),
    ) -> anyhow::Result<Vec<f64>> {
        let [of, to] = loads;
        let mut ratios = Vec::new();
        for pair in 0..PAIRS {
            let first = pair as usize % 2;
            let rounds = [
                self.round(loads, false, first)?,
                self.round(loads, true, first)?,
            ];
            let of_round = |[of, to]: &[Tally; 2]| to.tokens_per_second() / of.tokens_per_second();
            let [one, other] = rounds.each_ref().map(of_round);
            let ratio = (one * other).sqrt();
            eprintln!(
                "pair {} of {PAIRS}, {to} against {of}: {one:.3} and {other:.3}, together {ratio:.3}",
                pair + 1
            );
            ratios.push(ratio);
            rounds.into_iter().for_each(&mut answered);
        }
        Ok(ratios)
    }

    /// Runs both loads at once, the first one on the first server unless they are swapped, beginning with the turn of server `first`.
    fn round(
        &mut self,
        loads: [Load; 2],
        is_swapped: bool,
        first: usize,
    ) -> anyhow::Result<[Tally; 2]> {
        let mut by_server = loads;
        if is_swapped {
            by_server.reverse();
        }
        let turns = Turns::begin(self.servers, first)?;
        let course = Course::new(self.next, self.limit);
        let mut tallies = course.run(&self.callers, by_server, &turns)?;
        if is_swapped {
            tallies.reverse();
        }
        self.next += tallies[0].requests;
        Ok(tallies)
    }
}
