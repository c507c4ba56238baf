//! `cargo xtask rollout drill`: rollouts of good and bad versions on one machine, before callers who stream without a pause.

#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "printing is what a command line is for"
)]

use std::fs::{self, OpenOptions};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use outrider_bundle::manifest::Precision;
use outrider_rollout::clock;
use outrider_rollout::gateway::Gateway as _;
use outrider_rollout::gateway::haproxy::Haproxy;
use outrider_rollout::machine::{Event, Phase, Record, State};
use outrider_rollout::store::Store;
use outrider_verify::wire::Api;
use serde_json::Value;

use super::callers::{Callers, Question};
use super::damage;
use super::report::{Expected, Run, shares, table};
use super::world::{Inputs, POLL, Process, World};
use crate::server_process::free_addresses;
use crate::workspace::Workspace;
use crate::{build, prompts, reference};

/// Prompts that callers ask.
const PROMPTS: usize = 8;
/// Percent that a rollout begins with in a short drill, and in a whole one.
const STEPS: [&[u8]; 2] = [&[20, 50, 100], &[5, 25, 50, 100]];
/// Least and most bake time: what lies between depends on how fast the machine is now.
const BAKE_S: [u64; 2] = [6, 120];
/// Requests of each version that a look needs.
const MIN_SAMPLES: u64 = 5;
/// Most time of one rollout.
const DEADLINE: Duration = Duration::from_secs(1800);
/// How long a slow version stands still, and how long it runs then.
const SLOW_MS: [u64; 2] = [180, 20];

/// Arguments of `cargo xtask rollout drill`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Fewer steps with less time, for CI
    #[arg(long)]
    short: bool,
    /// Only this rollout; can be given several times
    #[arg(long, value_enum, value_name = "NAME")]
    only: Vec<Version>,
}

/// What is rolled out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Version {
    /// Another target, whose answers are wrong
    WrongOutput,
    /// One request in five is answered with an error
    Errors,
    /// Ten times slower
    Slow,
    /// Ends at the second step
    Crash,
    /// Its draft is never right, and the plan has no check of the version alone
    UselessDraft,
    /// Nothing is wrong with it
    Good,
    /// Nothing is wrong with it, but the rollout is killed again and again
    Killed,
}

impl Version {
    const ALL: [Self; 7] = [
        Self::WrongOutput,
        Self::Errors,
        Self::Slow,
        Self::Crash,
        Self::UselessDraft,
        Self::Good,
        Self::Killed,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::WrongOutput => "wrong output",
            Self::Errors => "one error in five",
            Self::Slow => "ten times slower",
            Self::Crash => "crashes",
            Self::UselessDraft => "useless draft, not verified",
            Self::Good => "good",
            Self::Killed => "good, rollout killed",
        }
    }

    fn expected(self) -> Expected {
        let (at, cause, harms_canary) = match self {
            Self::WrongOutput => (Phase::Verify, "verify", false),
            Self::Errors => (Phase::Step(0), "gateway_error_ratio", true),
            Self::Slow => (Phase::Step(0), "inter_token_mean_s", false),
            Self::Crash => (Phase::Step(1), "the canary:", true),
            Self::UselessDraft => (Phase::Step(0), "acceptance_length_tokens", false),
            Self::Good | Self::Killed => return Expected::Complete,
        };
        Expected::RolledBack {
            at,
            cause,
            harms_canary,
        }
    }
}

/// Runs the drill; an error or a rollout in which something does not hold is a failure.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let workspace = Workspace::find()?;
    let inputs = Inputs {
        server: build::server(&workspace, build::Profile::Dev)?,
        verify: build::verify(&workspace, build::Profile::Dev)?,
        onnxruntime: reference::onnxruntime(&workspace)?,
        bundle: reference::ensure(&workspace, Precision::Int8)?,
    };
    let world = World::start(&workspace, inputs)?;
    world.reset()?;
    let prompts = prompts::of_kind("code")?;
    let chats = prompts.into_iter().filter(|prompt| prompt.api == Api::Chat);
    let chats: Vec<_> = chats.take(PROMPTS).collect();
    let began = Instant::now();
    let questions = Question::learn(&chats, world.stable.listen)?;
    let bake_s = bake_s(began.elapsed().as_secs_f64() / PROMPTS as f64, args.short);
    eprintln!("drill: bake time {bake_s} s");
    let mut runs = Vec::new();
    let versions: Vec<_> = Version::ALL
        .into_iter()
        .filter(|version| args.only.is_empty() || args.only.contains(version))
        // A rollout that is killed shows all that one shows that is not.
        .filter(|version| !args.short || !args.only.is_empty() || *version != Version::Good)
        .collect();
    for version in versions {
        eprintln!("drill: {}", version.name());
        runs.push(roll_out(&world, version, args.short, bake_s, &questions)?);
    }
    print!("{}", table(&runs));
    for run in runs
        .iter()
        .filter(|run| matches!(run.expected, Expected::Complete))
    {
        println!(
            "{}: {}; killed and resumed {} times",
            run.name,
            shares(run),
            run.kills
        );
    }
    let mut holds = true;
    for run in &runs {
        if let Some(cause) = &run.state.cause {
            println!("{}: {cause}", run.name);
        }
        for fault in run.faults() {
            holds = false;
            println!("FAILED {}: {fault}", run.name);
        }
    }
    println!(
        "{}",
        if holds {
            "everything holds"
        } else {
            "not everything holds"
        }
    );
    Ok(if holds {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Time in which the canary gets twice the requests that a look needs, at the first share, where one answer takes so long.
fn bake_s(seconds_each: f64, short: bool) -> u64 {
    let share = f64::from(STEPS[usize::from(!short)][0]) / 100.0;
    // Streams share the processor, so that they are together hardly faster than one.
    let seconds = 2.0 * MIN_SAMPLES as f64 * seconds_each / share;
    let [least, most] = BAKE_S;
    (seconds.ceil() as u64).clamp(least, most)
}

fn roll_out(
    world: &World,
    version: Version,
    short: bool,
    bake_s: u64,
    questions: &[Question],
) -> anyhow::Result<Run> {
    world.reset()?;
    let form = usize::from(!short);
    let mut fault = Fault::prepare(world, version)?;
    let id = version.name().replace([' ', ','], "-");
    let mut plan = world.plan(&id, &fault.digest, bake_s, STEPS[form], MIN_SAMPLES);
    if version == Version::UselessDraft {
        // It would stop there already, since no accepted token is no proof that drafting is lossless.
        plan["verify"] = Value::Null;
    }
    let plan_file = world.file(&format!("{id}.yaml"));
    // JSON is YAML.
    fs::write(&plan_file, plan.to_string())?;
    let callers = Callers::begin(world.gateway_address, questions);
    let began = Instant::now();
    let mut rollout = Rollout {
        state: world.file(&id),
        log: world.file(&format!("{id}.log")),
        kills: 0,
    };
    let start = ["start".to_owned(), plan_file.display().to_string()];
    let result = rollout.carry_through(&start, version == Version::Killed, |record| {
        fault.follow(world, record)
    });
    let requests = callers.end()?;
    drop(fault);
    let (state, journal) = result.with_context(|| {
        let log = fs::read_to_string(&rollout.log).unwrap_or_default();
        format!("the rollout {} did not end:\n{log}", version.name())
    })?;
    Ok(Run {
        name: version.name(),
        expected: version.expected(),
        state,
        journal,
        requests,
        share: world.gateway.percent()?,
        steps: STEPS[form].to_vec(),
        kills: rollout.kills,
        seconds: began.elapsed().as_secs_f64(),
    })
}

/// A rollout in a process of its own.
struct Rollout {
    state: std::path::PathBuf,
    log: std::path::PathBuf,
    kills: usize,
}

impl Rollout {
    fn spawn(&self, arguments: &[String]) -> anyhow::Result<Child> {
        let output = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&self.log)?;
        let child = Command::new(std::env::current_exe()?)
            .arg("rollout")
            .args(arguments)
            .arg("--state")
            .arg(&self.state)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn();
        child.context("cannot run the rollout")
    }

    /// Runs it to its end. With `kills` it is killed after every line of the journal and in the middle of every bake time, and resumed.
    fn carry_through(
        &mut self,
        start: &[String],
        kills: bool,
        mut follow: impl FnMut(&Record) -> anyhow::Result<()>,
    ) -> anyhow::Result<(State, Vec<Record>)> {
        let store = Store::new(&self.state);
        let mut child = Running(self.spawn(start)?);
        let began = Instant::now();
        let mut seen = 0;
        // When the next kill within a step is due.
        let mut kill_at_ms = None;
        loop {
            // There is none before the first decision.
            let journal = store.journal().unwrap_or_default();
            let mut kill_now = kill_at_ms.is_some_and(|due_ms| clock::now_ms() >= due_ms);
            for record in &journal[seen..] {
                follow(record)?;
                // What a resumed one writes first would else be its end each time.
                kill_now |= kills && record.event != Event::Resumed;
                let baking = record.event == Event::Confirmed && record.phase != Phase::RollBack;
                if kills
                    && baking
                    && let Some(state) = store.state()?
                {
                    kill_at_ms = Some(u64::midpoint(record.time_ms, state.bake_until_ms));
                }
            }
            seen = journal.len();
            if kill_now {
                if kill_at_ms.is_some_and(|due_ms| clock::now_ms() >= due_ms) {
                    kill_at_ms = None;
                }
                child.0.kill()?;
                child.0.wait()?;
                self.kills += 1;
                child = Running(self.spawn(&["resume".to_owned()])?);
                continue;
            }
            if let Some(status) = child.0.try_wait()? {
                let state = store.state()?.context("there is no state")?;
                if !state.phase.is_end() {
                    bail!("{status} at {:?}", state.phase);
                }
                for record in &store.journal()?[seen..] {
                    follow(record)?;
                }
                return Ok((state, store.journal()?));
            }
            if began.elapsed() > DEADLINE {
                bail!("it still runs after {DEADLINE:?}");
            }
            thread::sleep(POLL);
        }
    }
}

/// A child that is killed when it is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself; then there is nothing left to do.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What is wrong with a canary, and when that begins.
struct Fault {
    version: Version,
    digest: String,
    errors: Option<(Process, Haproxy)>,
    slow: Option<Slow>,
}

impl Fault {
    fn prepare(world: &World, version: Version) -> anyhow::Result<Self> {
        let mut fault = Self {
            version,
            digest: world.digest.clone(),
            errors: None,
            slow: None,
        };
        // Another version of the configuration, which changes no answer.
        let settings = ["serving.runtime.prefill_chunk_tokens=32"];
        let mut bundle = world.bundle().to_owned();
        let mut listen = world.canary.listen;
        match version {
            Version::WrongOutput | Version::UselessDraft => {
                let graph = match version {
                    Version::WrongOutput => "model.onnx",
                    _ => "draft.onnx",
                };
                bundle = world.file(&format!("bundle-with-a-damaged-{graph}"));
                fault.digest = damage::copy(world.bundle(), &bundle, graph)?;
            }
            Version::Errors => {
                (listen, _) = free_addresses()?;
                fault.errors = Some(world.start_errors(listen)?);
            }
            Version::Slow | Version::Crash | Version::Good | Version::Killed => {}
        }
        world.write_canary(&bundle, listen, &settings)?;
        Ok(fault)
    }

    /// Begins where the rollout has come to.
    fn follow(&mut self, world: &World, record: &Record) -> anyhow::Result<()> {
        match (self.version, record.event, record.phase) {
            (Version::Errors, Event::Confirmed, Phase::Step(0)) => {
                let (_, switch) = self.errors.as_ref().context("there is no proxy")?;
                switch.set(100)
            }
            (Version::Slow, Event::Confirmed, Phase::Step(0)) => {
                self.slow = Some(Slow::begin(world.canary_pid()?));
                Ok(())
            }
            (Version::Crash, Event::Confirmed, Phase::Step(1)) => {
                kill(world.canary_pid()?, Signal::SIGKILL).context("cannot end the canary")
            }
            _ => Ok(()),
        }
    }
}

/// A process that stands still for most of the time.
struct Slow {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Slow {
    fn begin(pid: Pid) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let steps = [Signal::SIGSTOP, Signal::SIGCONT].into_iter().zip(SLOW_MS);
            for (signal, ms) in steps.cycle() {
                // A process that has ended is slow enough.
                let gone = kill(pid, signal).is_err();
                if gone || (signal == Signal::SIGCONT && until.load(Ordering::Relaxed)) {
                    return;
                }
                thread::sleep(Duration::from_millis(ms));
            }
        });
        Self {
            stop,
            thread: Some(thread),
        }
    }
}

impl Drop for Slow {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // It has nothing to give.
            let _ = thread.join();
        }
    }
}
