//! `cargo xtask bench load`: many clients at once, with drafting off and on.
//!
//! A client sends its next request when it has its answer. A round asks the same requests twice, off and on in turn, and the next round takes them in
//! the other order: the first side goes on sending until its time is up, the second sends as many. So both sides do the same work, and a machine
//! that becomes slower for a while makes both slower.

mod exchange;
mod report;
mod tally;

pub use report::{Cell, Report, Side};

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
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
use exchange::{Outcome, send};
use tally::{Tally, client_cpu};

/// Rounds, an even number, so that each side comes first as often; many, since the median of their ratios counts and machines have slow minutes.
const ROUNDS: u32 = 6;
/// An answer that is not there after this is stuck.
const STUCK: Duration = Duration::from_secs(300);
/// Requests before the first measurement: the first ones after a start pay for pages of memory that no later one pays for.
const WARM_UP_REQUESTS: u64 = 4;
/// A client that waits needs next to nothing.
const STACK_BYTES: usize = 512 << 10;

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
    /// How long each number of clients sends requests, with drafting off; on, it sends the same requests
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

/// What every client needs.
struct Load<'a> {
    client: Client,
    model: &'a str,
    traffic: Traffic,
}

/// When a side stops sending.
#[derive(Clone, Copy)]
enum Until {
    Elapsed(Duration),
    Sent(u64),
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
    let session = Session::start(&command)?;
    if let Some(reason) = session.unavailable() {
        bail!("invalid: nothing is drafted: {reason}");
    }
    let options = ClientOptions {
        timeout: STUCK,
        ..ClientOptions::default()
    };
    let load = Load {
        client: Client::new(&session.process().endpoint(), options)?,
        model: session.model(),
        traffic: Traffic::read(workspace, args.seed)?,
    };
    for drafting in [false, true] {
        load.side(0, Until::Sent(WARM_UP_REQUESTS), 1, drafting);
    }
    let mut cells = Vec::new();
    let mut next = WARM_UP_REQUESTS;
    let (cpu, began) = (client_cpu()?, Instant::now());
    for &clients in &args.clients {
        let mut cell = Cell::new(clients);
        for round in 0..ROUNDS {
            let mut until = Until::Elapsed(Duration::from_secs(args.seconds) / ROUNDS);
            let mut speeds = [0.0; 2];
            for drafting in [round % 2 == 1, round % 2 == 0] {
                let tally = load.side(next, until, clients, drafting);
                until = Until::Sent(tally.requests);
                speeds[usize::from(drafting)] = tally.tokens_per_second();
                cell.side_mut(drafting).add(tally);
            }
            cell.round_ratios.push(speeds[1] / speeds[0]);
            if let Until::Sent(sent) = until {
                next += sent;
            }
            eprintln!("{clients} clients, round {} of {ROUNDS}", round + 1);
        }
        cells.push(cell);
    }
    let share = (client_cpu()? - cpu).as_secs_f64() / began.elapsed().as_secs_f64();
    Ok(Report::new(&session, &bundle, profile, args, share, cells))
}

impl Load<'_> {
    /// One side of a round: the requests from number `first` on.
    fn side(&self, first: u64, until: Until, clients: usize, drafting: bool) -> Tally {
        let sent = AtomicU64::new(0);
        let began = Instant::now();
        let take = || match until {
            Until::Elapsed(limit) if began.elapsed() >= limit => None,
            Until::Elapsed(_) => Some(sent.fetch_add(1, Ordering::Relaxed)),
            Until::Sent(count) => {
                Some(sent.fetch_add(1, Ordering::Relaxed)).filter(|&number| number < count)
            }
        };
        let client = || {
            let mut tally = Tally::new();
            while let Some(number) = take() {
                self.answer(first + number, drafting, &mut tally);
            }
            tally
        };
        let mut all = thread::scope(|scope| {
            let clients: Vec<_> = (0..clients)
                .map(|_| {
                    thread::Builder::new()
                        .stack_size(STACK_BYTES)
                        .spawn_scoped(scope, client)
                        .expect("a thread can be started")
                })
                .collect();
            let mut all = Tally::new();
            for client in clients {
                all.add(&client.join().expect("a client does not panic"));
            }
            all
        });
        all.wall_seconds = began.elapsed().as_secs_f64();
        all
    }

    /// Sends one request until there is room for it.
    fn answer(&self, number: u64, drafting: bool, tally: &mut Tally) {
        let planned = self.traffic.request(number);
        tally.requests += 1;
        let began = Instant::now();
        loop {
            match send(&self.client, self.model, &planned, drafting) {
                Outcome::Answered(answered) => return tally.answered(&answered),
                Outcome::NoRoom { after } if began.elapsed() < STUCK => {
                    tally.no_room += 1;
                    thread::sleep(after);
                }
                Outcome::NoRoom { .. } => return tally.failed("never_room".to_owned()),
                Outcome::Failed(code) => return tally.failed(code),
            }
        }
    }
}
