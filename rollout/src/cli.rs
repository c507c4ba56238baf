//! The command line, for `cargo xtask rollout` and the program alike.

#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "printing is what a command line is for"
)]

use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use crate::argo;
use crate::clock;
use crate::gateway;
use crate::machine::{Command, Input, Phase, State};
use crate::metric::{self, Metric};
use crate::plan::Plan;
use crate::real::Real;
use crate::runner;
use crate::store::{Lock, Request, Store};

/// Exit code of a rollout that could not be carried on.
const COULD_NOT_RUN: u8 = 2;
/// Most time that a process takes to see a request, unless it is busy with a command of the plan.
const PATIENCE: Duration = Duration::from_secs(2);
const POLL: Duration = Duration::from_millis(20);

/// The folder that a command is about.
#[derive(Debug, clap::Args)]
pub struct Folder {
    /// Folder of the rollout
    #[arg(long, default_value = ".outrider/rollout", value_name = "DIR")]
    state: PathBuf,
}

/// What to do with a rollout.
#[derive(Debug, clap::Subcommand)]
pub enum Task {
    /// Check the plan and print what would happen; change nothing
    DryRun {
        /// The plan
        plan: PathBuf,
    },
    /// Print the plan as objects of Argo Rollouts, for a cluster that has it
    ArgoRollouts {
        /// The plan
        plan: PathBuf,
    },
    /// Begin a rollout and carry it on until it ends
    Start {
        /// The plan
        plan: PathBuf,
        /// Its folder
        #[command(flatten)]
        folder: Folder,
    },
    /// End a pause, and carry the rollout on where nothing does so
    Resume(Folder),
    /// Say where the rollout stands
    Status {
        /// Its folder
        #[command(flatten)]
        folder: Folder,
        /// Print the state itself
        #[arg(long)]
        json: bool,
    },
    /// Stay at the share that it has; a failed gate still rolls back
    Pause(Folder),
    /// Take the next step now
    Promote(Folder),
    /// Roll back
    Abort(Folder),
}

/// Runs a command; the exit code is 0 for success or a rollout that is complete, 1 after a rollback, 2 when it could not be carried on.
pub fn run(task: Task) -> ExitCode {
    let result = match task {
        Task::DryRun { plan } => dry_run(&plan),
        Task::ArgoRollouts { plan } => argo_rollouts(&plan),
        Task::Start { plan, folder } => start(&plan, &folder),
        Task::Status { folder, json } => status(&folder, json),
        Task::Resume(folder) => ask(&folder, Command::Resume),
        Task::Pause(folder) => ask(&folder, Command::Pause),
        Task::Promote(folder) => ask(&folder, Command::Promote),
        Task::Abort(folder) => ask(&folder, Command::Abort),
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::from(COULD_NOT_RUN)
    })
}

/// Tells a person something while a rollout goes on.
pub(crate) fn tell(text: &str) {
    eprintln!("{text}");
}

fn dry_run(plan: &std::path::Path) -> anyhow::Result<ExitCode> {
    let plan = Plan::read(plan)?;
    let gateway = gateway::of(&plan)?;
    let command = |command: &Option<Vec<String>>| {
        let text = command.as_ref().map(|command| command.join(" "));
        text.unwrap_or_else(|| "no command".to_owned())
    };
    println!("rollout {}", plan.id);
    println!("preflight: {}", command(&plan.preflight));
    println!("start: {}", command(&plan.canary.start));
    println!(
        "  ready with bundle {} within {} s",
        plan.canary.digest, plan.ready_s
    );
    println!(
        "smoke: {} with X-Outrider-Version: canary",
        plan.gateway_address()
    );
    println!("verify: {}", command(&plan.verify));
    for &percent in &plan.steps {
        println!(
            "step {percent} %, {} s: {}",
            plan.bake_s,
            gateway.describe(percent)
        );
    }
    for gate in &plan.gates {
        let named = Metric::named(&gate.metric).map(|metric| metric.query);
        let template = gate.query.as_deref().or(named).unwrap_or_default();
        println!(
            "gate {}: {}",
            gate.metric,
            metric::query(template, "canary", plan.bake_s)
        );
    }
    println!("retire: {}", command(&plan.stable.stop));
    println!("rollback: {}", gateway.describe(0));
    println!("  then: {}", command(&plan.canary.stop));
    Ok(ExitCode::SUCCESS)
}

fn argo_rollouts(plan: &std::path::Path) -> anyhow::Result<ExitCode> {
    for object in argo::objects(&Plan::read(plan)?)? {
        print!("---\n{}", serde_yaml::to_string(&object)?);
    }
    Ok(ExitCode::SUCCESS)
}

fn start(plan: &std::path::Path, folder: &Folder) -> anyhow::Result<ExitCode> {
    let plan = Plan::read(plan)?;
    let store = Store::new(&folder.state);
    let Some(lock) = store.lock()? else {
        bail!(
            "another process carries on the rollout in {}",
            folder.state.display()
        );
    };
    store.begin(&plan, &State::new(&plan, clock::now_ms()))?;
    carry_on(&store, lock)
}

fn carry_on(store: &Store, _lock: Lock) -> anyhow::Result<ExitCode> {
    let state = store.state()?.context("no rollout was ever begun here")?;
    let plan = store.plan(&state)?;
    let mut world = Real::new(&plan, store)?;
    let state = runner::run(&plan, state, &mut world)?;
    print_state(&plan, &state);
    Ok(code(&state))
}

fn status(folder: &Folder, json: bool) -> anyhow::Result<ExitCode> {
    let store = Store::new(&folder.state);
    let state = state_of(&store, folder)?;
    if json {
        println!("{}", serde_json::to_string_pretty(&state)?);
    } else {
        print_state(&store.plan(&state)?, &state);
        if !state.phase.is_end() && store.lock()?.is_some() {
            println!("no process carries it on: resume does");
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn ask(folder: &Folder, command: Command) -> anyhow::Result<ExitCode> {
    let store = Store::new(&folder.state);
    let state = state_of(&store, folder)?;
    if state.phase.is_end() {
        print_state(&store.plan(&state)?, &state);
        return Ok(code(&state));
    }
    let request = Request {
        id: clock::since_1970().as_nanos() as u64,
        command,
    };
    let lock = match store.lock()? {
        Some(lock) => lock,
        None => {
            store.ask(request)?;
            let Some(lock) = lock_of_nobody(&store, request)? else {
                println!("asked the process that carries the rollout on");
                return Ok(ExitCode::SUCCESS);
            };
            lock
        }
    };
    // Nobody carries it on: what another one asked for comes first, then this.
    let mut state = state_of(&store, folder)?;
    let plan = store.plan(&state)?;
    store.follow(&state.record)?;
    let earlier = store.request()?;
    for request in earlier.into_iter().chain([request]) {
        let input = Input::Request(request.id, request.command);
        let is_new = request.id != state.last_request;
        if let Some(next) = state.next(&plan, input, clock::now_ms())
            && is_new
        {
            store.save(&next)?;
            store.follow(&next.record)?;
            state = next;
        }
        store.clear_request()?;
    }
    if matches!(command, Command::Resume | Command::Abort) {
        return carry_on(&store, lock);
    }
    print_state(&plan, &state);
    println!("no process carries it on: resume does");
    Ok(ExitCode::SUCCESS)
}

/// The lock of a process that has just been killed and let go of it only now; `None` when one is there that carries the rollout on.
fn lock_of_nobody(store: &Store, request: Request) -> anyhow::Result<Option<Lock>> {
    let began = Instant::now();
    while began.elapsed() < PATIENCE && store.request()? == Some(request) {
        if let Some(lock) = store.lock()? {
            return Ok(Some(lock));
        }
        thread::sleep(POLL);
    }
    Ok(None)
}

fn state_of(store: &Store, folder: &Folder) -> anyhow::Result<State> {
    let state = store.state()?;
    state.with_context(|| format!("{} holds no rollout", folder.state.display()))
}

fn print_state(plan: &Plan, state: &State) {
    let record = &state.record;
    let phase = match state.phase {
        Phase::Step(index) => format!("step {} of {}", index + 1, plan.steps.len()),
        phase => format!("{phase:?}").to_lowercase(),
    };
    let share = state.percent(plan);
    let share = share.map_or("the gateway is left alone".to_owned(), |percent| {
        format!("canary {percent} %")
    });
    let paused = if state.paused { ", paused" } else { "" };
    println!("{}: {phase}, {share}{paused}", state.id);
    println!("  {:?}: {}", record.event, record.detail);
    if let Some(cause) = &state.cause {
        println!("  rolled back because: {cause}");
    }
}

fn code(state: &State) -> ExitCode {
    match state.phase {
        Phase::Complete => ExitCode::SUCCESS,
        Phase::RolledBack => ExitCode::from(1),
        _ => ExitCode::from(COULD_NOT_RUN),
    }
}
