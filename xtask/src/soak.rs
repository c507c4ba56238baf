//! `cargo xtask soak`: hours of callers in minutes, all kinds at once, and whether the server is afterwards what it was before.
//!
//! Every answer that comes to its end is compared with the one that the same request had when nothing else ran. Callers stream or wait, leave in the
//! middle, send nonsense; meanwhile drafting is switched off and on and the process is told to read its files again. What happens is drawn from a
//! seed; when it happens is the machine's.

mod caller;
mod cases;
mod disturb;
mod keys;
mod report;

pub use report::Report;

use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use outrider_bundle::manifest::Precision;

use crate::build;
use crate::machine::resident_bytes;
use crate::output::OutputDir;
use crate::reference;
use crate::server_process::ServerCommand;
use crate::session::Session;
use crate::workspace::Workspace;
use caller::{Caller, Counts, REQUEST_DEADLINE};
use cases::Case;
use disturb::Disturber;

/// Length of a run, and of a short one.
const SECONDS: u64 = 1800;
const SHORT_SECONDS: u64 = 300;
/// Callers at once; more than slots, so that some always wait.
const CALLERS: u64 = 8;
/// Slots of the server.
const SLOTS: usize = 4;
/// Tokens of a slot.
const CONTEXT_TOKENS: usize = 512;
/// Between two readings of the server's memory.
const MEMORY_INTERVAL: Duration = Duration::from_millis(500);
/// After the last answer the slots must be free in this time.
const SLOTS_FREE_DEADLINE: Duration = Duration::from_secs(60);
/// Most time to stop.
const STOP_DEADLINE: Duration = Duration::from_secs(60);

/// Arguments of `cargo xtask soak`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Five minutes instead of thirty
    #[arg(long, conflicts_with = "seconds")]
    short: bool,
    /// How long the callers go on
    #[arg(long, value_parser = clap::value_parser!(u64).range(20..))]
    seconds: Option<u64>,
    /// What the callers draw
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Numeric form of the reference pair
    #[arg(long, default_value = "int8", value_parser = reference::precision_parser())]
    precision: Precision,
    /// Directory for soak.json [default: .outrider/soak]
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
}

/// Runs, prints and writes the report; an error when something was not as it must be.
pub fn run(args: Args) -> anyhow::Result<()> {
    let workspace = Workspace::find()?;
    let output = OutputDir::make(&workspace, args.output.as_ref(), "soak")?;
    let report = soak(&workspace, &args)?;
    println!("{report}");
    output.write_json("soak.json", &report)?;
    let breaches = report.breaches();
    ensure!(breaches.is_empty(), "{}", breaches.join("; "));
    Ok(())
}

/// What the threads of a run share.
struct Run {
    session: Session,
    cases: Vec<Case>,
    ended: AtomicBool,
}

impl Run {
    fn is_over(&self) -> bool {
        self.ended.load(Ordering::Relaxed)
    }
}

fn soak(workspace: &Workspace, args: &Args) -> anyhow::Result<Report> {
    let seconds = match (args.short, args.seconds) {
        (true, _) => SHORT_SECONDS,
        (false, seconds) => seconds.unwrap_or(SECONDS),
    };
    let onnxruntime = reference::onnxruntime(workspace)?;
    let bundle = reference::ensure(workspace, args.precision)?;
    let files = tempfile::tempdir().context("cannot make a directory for the server's files")?;
    let binary = build::server(workspace, build::Profile::Dev)?;
    let command = ServerCommand::new(binary, &bundle, &onnxruntime)?
        .set("serving.runtime.max_concurrency", SLOTS)
        .set("serving.runtime.context_tokens", CONTEXT_TOKENS)
        .set("serving.runtime.kv_cache_ratio", 0.9)
        // On a slow machine callers wait for long, which is not what is looked for here.
        .set(
            "serving.runtime.queue_timeout_ms",
            REQUEST_DEADLINE.as_millis(),
        )
        .set(
            "serving.runtime.request_deadline_ms",
            REQUEST_DEADLINE.as_millis(),
        )
        // Blocks are checked whether they pay or not, so that every kind of step runs.
        .set("serving.speculative.adaptive_width", false)
        .set(
            "serving.auth.api_keys_path",
            keys::write(files.path())?.display(),
        )
        .set(
            "serving.audit.path",
            files.path().join("audit.jsonl").display(),
        );
    let session = Session::start_as(&command, Some(keys::secret(0)))?;
    if session.fact("lossless_class") != "exact" {
        bail!(
            "invalid: answers can't be compared, since the server's lossless class is {:?} on this machine",
            session.fact("lossless_class")
        );
    }
    eprintln!("asking every request alone");
    let cases = cases::prepare(&session, args.seed)?;
    touch_every_slot(&session)?;
    eprintln!("{CALLERS} callers for {seconds} s");

    let run = Run {
        session,
        cases,
        ended: AtomicBool::new(false),
    };
    let before = run.session.scrape()?;
    let limit = Duration::from_secs(seconds);
    let began = Instant::now();
    let counts = Mutex::new(Counts::default());
    let callers = (0..CALLERS)
        .map(|number| Caller::new(&run, args.seed, number))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let (memory, disturbances) = thread::scope(|scope| -> anyhow::Result<_> {
        for caller in callers {
            let counts = &counts;
            scope.spawn(move || {
                let counted = caller.call_until_over();
                counts.lock().expect("no caller panics").add(counted);
            });
        }
        let disturber = scope.spawn(|| Disturber::new(&run, args.seed).disturb_until_over());
        let mut memory = Vec::new();
        let mut outcome = Ok(());
        while began.elapsed() < limit && outcome.is_ok() {
            thread::sleep(MEMORY_INTERVAL);
            match resident_bytes(run.session.process().id()) {
                Ok(bytes) => memory.push((began.elapsed(), bytes)),
                Err(error) => {
                    let log = run.session.process().log_tail();
                    outcome = Err(error.context(format!("the server has ended{log}")));
                }
            }
        }
        run.ended.store(true, Ordering::Relaxed);
        let disturbances = disturber.join().expect("the disturber does not panic");
        outcome.map(|()| (memory, disturbances))
    })?;
    let counts = counts.into_inner().expect("no caller panicked");
    let slots_freed = wait_until_free(&run.session)?;
    let after = run.session.scrape()?;
    let report = Report::new(
        &run,
        args,
        limit,
        &memory,
        counts,
        disturbances,
        slots_freed,
        (&before, &after),
    );
    let Run { session, .. } = run;
    session.stop(STOP_DEADLINE)?;
    Ok(report)
}

/// Fills every slot to its end, more than once, so that no page of the KV memory is first used later.
fn touch_every_slot(session: &Session) -> anyhow::Result<()> {
    // Prompts that differ from their first token on share no beginning.
    let fill = |first: usize| {
        let prompt: Vec<usize> = (0..CONTEXT_TOKENS - 2)
            .map(|at| 100 + first * 7 + at % 50)
            .collect();
        serde_json::json!({ "model": session.model(), "prompt": prompt, "max_tokens": 2, "temperature": 0 })
    };
    thread::scope(|scope| {
        let fillers: Vec<_> = (0..SLOTS)
            .map(|slot| {
                scope.spawn(move || -> anyhow::Result<()> {
                    for turn in 0..2 {
                        let response = session
                            .client()
                            .post("/v1/completions", &fill(slot + SLOTS * turn))?;
                        ensure!(
                            response.status == 200,
                            "{} {}",
                            response.status,
                            response.text()
                        );
                    }
                    Ok(())
                })
            })
            .collect();
        fillers
            .into_iter()
            .try_for_each(|filler| filler.join().expect("a filler does not panic"))
    })
}

/// Whether no completion runs or waits any more.
fn wait_until_free(session: &Session) -> anyhow::Result<bool> {
    let began = Instant::now();
    loop {
        let scrape = session.scrape()?;
        let busy = [
            "outrider_completions_running",
            "outrider_completions_waiting",
        ]
        .iter()
        .any(|gauge| scrape.value(gauge) > 0.0);
        if !busy || began.elapsed() > SLOTS_FREE_DEADLINE {
            return Ok(!busy);
        }
        thread::sleep(MEMORY_INTERVAL);
    }
}
