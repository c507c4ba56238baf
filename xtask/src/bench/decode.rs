//! `cargo xtask bench decode`: tokens per second with drafting off and on.
//!
//! A cell is a kind of prompts at a concurrency. In every round each cell is measured twice, with the same requests, off and on in turn, and the next
//! round takes them in the other order; so a machine that becomes slower for a while makes both slower. Figures are medians over the rounds.

pub(super) mod report;

pub use report::{Cell, Checks, Report, Side};

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use clap::builder::PossibleValuesParser;
use outrider_bundle::manifest::Precision;
use serde_json::json;

use super::chart;
use crate::answer::{Answer, Drafted, whole};
use crate::build;
use crate::output::OutputDir;
use crate::prompts::{self, Prompt};
use crate::reference;
use crate::server_process::ServerCommand;
use crate::session::{Scrape, Session};
use crate::workspace::Workspace;

/// Requests of a measurement at least; with one in flight they follow each other.
const LEAST_REQUESTS: usize = 4;
/// Tokens of one slot: the longest prompt and its answer fit.
const CONTEXT_TOKENS: usize = 2048;

/// Arguments of `cargo xtask bench decode`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Bundle directory; the reference pair when not given
    #[arg(long, value_name = "DIR", conflicts_with = "precision")]
    bundle: Option<PathBuf>,
    /// Numeric form of the reference pair
    #[arg(long, default_value = "int8", value_parser = reference::precision_parser())]
    precision: Precision,
    /// Requests in flight
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1, 2, 4, 8])]
    concurrency: Vec<usize>,
    /// Kinds of prompts
    #[arg(long, value_delimiter = ',', value_parser = PossibleValuesParser::new(prompts::KINDS), default_values = prompts::KINDS)]
    kinds: Vec<String>,
    /// Rounds, of which the medians are taken
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Most tokens of an answer
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(8..=1024))]
    max_tokens: u32,
    /// Softmax temperature; 0 is greedy
    #[arg(long, default_value_t = 0.0)]
    temperature: f64,
    /// Check whole blocks of this many tokens, instead of what the server finds to pay
    #[arg(long, value_name = "N")]
    block_size: Option<usize>,
    /// Directory for decode.json and decode.svg [default: .outrider/bench]
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// Fail when drafting gains too little or the engine takes too much, see the messages
    #[arg(long)]
    check: bool,
    /// Measure the build that tests use instead of the one that is shipped
    #[arg(long)]
    dev: bool,
}

/// Measures, prints, and writes the files.
pub fn run(args: Args) -> anyhow::Result<()> {
    let workspace = Workspace::find()?;
    let output = OutputDir::make(&workspace, args.output.as_ref(), "bench")?;
    let report = measure(&workspace, &args)?;
    println!("{report}");
    output.write_json("decode.json", &report)?;
    output.write("decode.svg", chart::draw(&report).as_bytes())?;
    if !report.has_drafted() {
        bail!("invalid: nothing was drafted");
    }
    let failed = report.checks().failed();
    if args.check && !failed.is_empty() {
        bail!("{}", failed.join("; "));
    }
    Ok(())
}

fn measure(workspace: &Workspace, args: &Args) -> anyhow::Result<Report> {
    ensure!(
        args.concurrency.iter().all(|&many| many > 0),
        "--concurrency 0 is no concurrency, allowed is from 1"
    );
    let slots = args.concurrency.iter().copied().max().unwrap_or(1);
    let onnxruntime = reference::onnxruntime(workspace)?;
    let bundle = match &args.bundle {
        Some(bundle) => bundle.clone(),
        None => reference::ensure(workspace, args.precision)?,
    };
    let profile = match args.dev {
        true => build::Profile::Dev,
        false => build::Profile::Release,
    };
    let mut command =
        ServerCommand::new(build::server(workspace, profile)?, &bundle, &onnxruntime)?
            .set("serving.runtime.max_concurrency", slots)
            .set("serving.runtime.context_tokens", CONTEXT_TOKENS)
            .set("serving.runtime.kv_cache_ratio", 0.9)
            .set("serving.speculative.enabled", true);
    if let Some(block_size) = args.block_size {
        command = command
            .set("serving.speculative.draft_block_size", block_size)
            .set("serving.speculative.adaptive_width", false);
    }
    let session = Session::start(&command)?;
    if let Some(reason) = session.unavailable() {
        bail!("invalid: nothing was drafted: {reason}");
    }
    let mut cells = Vec::new();
    let mut requests = Vec::new();
    for kind in &args.kinds {
        let prompts = prompts::of_kind(kind)?;
        for &concurrency in &args.concurrency {
            cells.push(Cell::new(kind, concurrency));
            let count = concurrency.max(LEAST_REQUESTS);
            requests.push(
                prompts
                    .iter()
                    .cycle()
                    .take(count)
                    .cloned()
                    .collect::<Vec<_>>(),
            );
        }
    }
    warm_up(&session, args, &requests)?;
    for round in 0..args.rounds {
        for (cell, requests) in cells.iter_mut().zip(&requests) {
            let order = if round % 2 == 0 {
                [false, true]
            } else {
                [true, false]
            };
            for drafting in order {
                let sample = sample(&session, args, requests, cell.concurrency, drafting)?;
                cell.side_mut(drafting).add(sample);
            }
            eprintln!(
                "round {} of {}, {}, {} in flight",
                round + 1,
                args.rounds,
                cell.kind,
                cell.concurrency
            );
        }
    }
    Ok(Report::new(&session, &bundle, profile, args, cells))
}

/// The first requests after a start pay for pages of memory that no later one pays for.
fn warm_up(session: &Session, args: &Args, requests: &[Vec<Prompt>]) -> anyhow::Result<()> {
    let Some(first) = requests.first() else {
        bail!("there is nothing to measure: no kind or no concurrency is given");
    };
    for drafting in [false, true] {
        sample(session, args, first, 1, drafting)?;
    }
    Ok(())
}

/// One measurement of one side of a cell.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// Tokens of all answers.
    pub tokens: usize,
    /// Answers, each of which has its first token from its prompt.
    pub answers: usize,
    /// From the first request sent to the last answer received.
    pub wall_seconds: f64,
    /// Time of engine steps outside the passes that feed prompts.
    pub decode_seconds: f64,
    /// What was drafted.
    pub drafted: Drafted,
    /// Time in draft passes, and how many steps had one.
    pub draft: Timed,
    /// Time in target passes over decoding sequences, and how many steps had one.
    pub verify: Timed,
    /// Time of steps outside both models, and how many steps there were.
    pub overhead: Timed,
}

/// A sum of times and their number.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timed {
    /// Their sum.
    pub seconds: f64,
    /// Their number.
    pub count: f64,
}

impl Timed {
    fn between(earlier: &Scrape, later: &Scrape, metric: &str) -> Self {
        Self {
            seconds: later.growth(earlier, &format!("{metric}_sum")),
            count: later.growth(earlier, &format!("{metric}_count")),
        }
    }
}

fn sample(
    session: &Session,
    args: &Args,
    prompts: &[Prompt],
    concurrency: usize,
    drafting: bool,
) -> anyhow::Result<Sample> {
    let before = session.scrape()?;
    let began = Instant::now();
    let answers = ask(session, args, prompts, concurrency, drafting)?;
    let wall_seconds = began.elapsed().as_secs_f64();
    let after = session.scrape()?;
    let timed = |metric: &str| Timed::between(&before, &after, metric);
    let mut drafted = Drafted::default();
    for answer in &answers {
        drafted += answer.drafted;
    }
    if !drafting && drafted.drafted_tokens > 0 {
        bail!(
            "{} tokens were drafted although it was off",
            drafted.drafted_tokens
        );
    }
    let steps = timed("outrider_step_seconds");
    Ok(Sample {
        tokens: answers.iter().map(|answer| answer.token_ids.len()).sum(),
        answers: answers.len(),
        wall_seconds,
        decode_seconds: steps.seconds - timed("outrider_prefill_seconds").seconds,
        drafted,
        draft: timed("outrider_draft_seconds"),
        verify: timed("outrider_verify_seconds"),
        overhead: timed("outrider_step_overhead_seconds"),
    })
}

fn ask(
    session: &Session,
    args: &Args,
    prompts: &[Prompt],
    concurrency: usize,
    drafting: bool,
) -> anyhow::Result<Vec<Answer>> {
    let next = AtomicUsize::new(0);
    let work = || -> anyhow::Result<Vec<Answer>> {
        let mut answers = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(prompt) = prompts.get(index) else {
                return Ok(answers);
            };
            let mut fields = prompt.fields.clone();
            fields["max_tokens"] = json!(args.max_tokens);
            fields["temperature"] = json!(args.temperature);
            fields["seed"] = json!(index);
            if !drafting {
                fields["speculative"] = json!({ "enabled": false });
            }
            let answer = whole(session.client(), session.model(), prompt.api, &fields);
            answers.push(answer.with_context(|| prompt.id.clone())?);
        }
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..concurrency).map(|_| scope.spawn(work)).collect();
        let answers: anyhow::Result<Vec<_>> = workers
            .into_iter()
            .map(|worker| worker.join().expect("a worker does not panic"))
            .collect();
        Ok(answers?.into_iter().flatten().collect())
    })
}
