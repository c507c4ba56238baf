//! The program as operators meet it: what it prints, what it refuses, and by which code it ends.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::thread;
use std::time::{Duration, Instant};

use outrider_rollout::machine::{Phase, State};
use outrider_rollout::plan::Plan;
use outrider_rollout::store::Store;

const DEADLINE: Duration = Duration::from_secs(60);

fn program(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_outrider-rollout"));
    command.args(arguments);
    command
}

fn run(arguments: &[&str]) -> Output {
    program(arguments).output().unwrap()
}

fn shipped() -> String {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/rollout/plan.yaml");
    file.to_str().unwrap().to_owned()
}

/// A rollout that only has to stop a canary that nobody can reach.
fn begin(directory: &Path) -> Store {
    let plan = Plan::read(Path::new(&shipped())).unwrap();
    let mut state = State::new(&plan, 1);
    state.phase = Phase::RollBack;
    let store = Store::new(directory);
    store.begin(&plan, &state).unwrap();
    store
}

#[test]
fn a_dry_run_prints_every_step_and_changes_nothing() {
    let output = run(&["dry-run", &shipped()]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}");
    for part in [
        "step 1 %, 900 s: /run/haproxy/outrider.sock: set map /etc/haproxy/outrider/split.map canary 1;",
        "step 100 %",
        "gate first_token_p95_s: histogram_quantile(0.95, ",
        "smoke: http://127.0.0.1:8000 with X-Outrider-Version: canary",
        "rollback: /run/haproxy/outrider.sock: set map /etc/haproxy/outrider/split.map canary 0;",
    ] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
}

#[test]
fn exit_codes_are_those_of_the_page() {
    let directory = tempfile::tempdir().unwrap();
    let folder = directory.path().to_str().unwrap();
    let code = |arguments: &[&str]| run(arguments).status.code();
    assert_eq!(code(&["--version"]), Some(0));
    assert_eq!(code(&["roll"]), Some(64));
    assert_eq!(code(&["dry-run", "none.yaml"]), Some(2));
    assert_eq!(code(&["status", "--state", folder]), Some(2));
    begin(directory.path());
    assert_eq!(code(&["status", "--state", folder]), Some(0));
    // Another one has not ended.
    assert_eq!(code(&["start", &shipped(), "--state", folder]), Some(2));
    assert_eq!(code(&["promote", "--state", folder]), Some(0));
    assert_eq!(code(&["resume", "--state", folder]), Some(1));
    assert_eq!(code(&["abort", "--state", folder]), Some(1));
    let status = run(&["status", "--json", "--state", folder]);
    let state: State = serde_json::from_slice(&status.stdout).unwrap();
    assert_eq!(state.phase, Phase::RolledBack);
}

#[test]
fn a_rollout_is_carried_on_though_the_lock_of_its_killed_process_is_let_go_of_late() {
    let directory = tempfile::tempdir().unwrap();
    let store = begin(directory.path());
    let lock = store.lock().unwrap().unwrap();
    let folder = directory.path().to_str().unwrap();
    let mut child = program(&["resume", "--state", folder]).spawn().unwrap();
    let began = Instant::now();
    while store.request().unwrap().is_none() {
        assert!(began.elapsed() < DEADLINE, "nothing was asked for");
        thread::sleep(Duration::from_millis(5));
    }
    drop(lock);
    assert_eq!(child.wait().unwrap().code(), Some(1));
    assert_eq!(store.state().unwrap().unwrap().phase, Phase::RolledBack);
    assert!(store.request().unwrap().is_none());
}

#[test]
fn half_a_line_of_the_journal_is_cut_off_and_a_foreign_journal_refused() {
    let directory = tempfile::tempdir().unwrap();
    let store = begin(directory.path());
    let file = directory.path().join("journal.jsonl");
    let whole = fs::read(&file).unwrap();
    fs::write(&file, [&whole[..], b"{\"seq\":2,\"ti"].concat()).unwrap();
    let mut record = store.state().unwrap().unwrap().record;
    record.seq = 2;
    store.follow(&record).unwrap();
    assert_eq!(store.journal().unwrap().len(), 2);
    record.seq = 9;
    let error = store.follow(&record).unwrap_err().to_string();
    assert!(error.contains("not of the same rollout"), "{error}");
}
