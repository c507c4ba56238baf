//! A rollout that is killed before and after everything it does, and resumed, ends where one ends that is not.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;

use outrider_rollout::machine::{Finding, Phase, Record, State, Verdict};
use outrider_rollout::plan::Plan;
use outrider_rollout::runner::{World, run};
use outrider_rollout::store::{Request, Store};
use serde_json::Value;

const START_MS: u64 = 1_000_000;

fn plan() -> Plan {
    let text = format!(
        "rollout_version: 1
id: crash
stable: {{ endpoint: 'http://s', admin: 'http://sa', digest: {} }}
canary: {{ endpoint: 'http://c', admin: 'http://ca', digest: {} }}
gateway: {{ haproxy: {{ address: 'http://g', socket: s, map: m }} }}
prometheus: http://p
steps: [1, 50, 100]
bake_s: 2
check_s: 1
gates: [{{ metric: restarts, max: 0 }}]
",
        "a".repeat(64),
        "b".repeat(64)
    );
    Plan::parse(&text, PathBuf::from("/")).unwrap()
}

/// What outlives a killed process, and where it is killed.
struct Fake {
    store: Store,
    now_ms: u64,
    percent: u8,
    shares: Vec<u8>,
    fails_at_percent: Option<u8>,
    operations: usize,
    killed_at: Option<usize>,
}

impl Fake {
    fn operation(&mut self) {
        self.operations += 1;
        if self.killed_at == Some(self.operations) {
            std::panic::resume_unwind(Box::new("killed"));
        }
    }
}

impl World for Fake {
    fn now_ms(&mut self) -> u64 {
        self.now_ms
    }

    fn wait(&mut self, ms: u64) {
        self.operation();
        self.now_ms += ms;
    }

    fn save(&mut self, state: &State) -> anyhow::Result<()> {
        self.operation();
        self.store.save(state)?;
        self.operation();
        self.store.follow(&state.record)?;
        self.operation();
        Ok(())
    }

    fn request(&mut self) -> anyhow::Result<Option<Request>> {
        Ok(None)
    }

    fn clear_request(&mut self) -> anyhow::Result<()> {
        Ok(())
    }

    fn gateway(&mut self) -> anyhow::Result<Option<u8>> {
        Ok(Some(self.percent))
    }

    fn set_gateway(&mut self, percent: u8) -> anyhow::Result<()> {
        self.operation();
        if self.percent != percent {
            self.shares.push(percent);
        }
        self.percent = percent;
        self.operation();
        Ok(())
    }

    fn switch_speculation_off(&mut self) -> anyhow::Result<()> {
        Ok(())
    }

    fn perform(&mut self, _: &State) -> Finding {
        self.operation();
        Finding::new(Verdict::Pass, "done", Value::Null)
    }

    fn look(&mut self, _: &State) -> Finding {
        self.operation();
        let fails = self.fails_at_percent == Some(self.percent);
        let verdict = if fails { Verdict::Fail } else { Verdict::Pass };
        Finding::new(verdict, "seen", Value::Null)
    }

    fn canary_fault(&mut self) -> Option<String> {
        None
    }

    fn tell(&mut self, _: &str) {}
}

/// Runs a rollout that is killed at one operation, resumes it, and says how it ended.
fn end(
    fails_at_percent: Option<u8>,
    killed_at: Option<usize>,
) -> (Phase, Vec<u8>, Vec<Record>, bool) {
    // In memory: thousands of files are synced here, and no disk has to keep them.
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let plan = plan();
    let store = Store::new(directory.path());
    store.begin(&plan, &State::new(&plan, START_MS)).unwrap();
    let mut world = Fake {
        store: store.clone(),
        now_ms: START_MS,
        percent: 0,
        shares: Vec::new(),
        fails_at_percent,
        operations: 0,
        killed_at,
    };
    let mut was_killed = false;
    loop {
        let state = store.state().unwrap().unwrap();
        let ended = catch_unwind(AssertUnwindSafe(|| run(&plan, state, &mut world)));
        match ended {
            Ok(state) => {
                let state = state.unwrap();
                assert_eq!(store.state().unwrap().unwrap(), state);
                assert_eq!(state.percent(&plan).unwrap_or(0), world.percent);
                return (
                    state.phase,
                    world.shares,
                    store.journal().unwrap(),
                    was_killed,
                );
            }
            Err(_) => was_killed = true,
        }
    }
}

fn decisions(journal: &[Record]) -> Vec<(u64, Phase, Option<u8>)> {
    let lines = journal.iter();
    lines
        .map(|line| (line.seq, line.phase, line.percent))
        .collect()
}

#[test]
fn a_rollout_killed_anywhere_and_resumed_skips_and_doubles_no_step() {
    for (fails_at, phase, shares) in [
        (None, Phase::Complete, vec![1, 50, 100]),
        (Some(50), Phase::RolledBack, vec![1, 50, 0]),
        (Some(1), Phase::RolledBack, vec![1, 0]),
    ] {
        let (whole_phase, whole_shares, whole, _) = end(fails_at, None);
        assert_eq!((whole_phase, &whole_shares), (phase, &shares));
        let mut killed_at = 1;
        loop {
            let (ended, moved, journal, was_killed) = end(fails_at, Some(killed_at));
            if !was_killed {
                break;
            }
            assert_eq!((ended, &moved), (phase, &shares), "killed at {killed_at}");
            assert_eq!(
                decisions(&journal),
                decisions(&whole),
                "killed at {killed_at}"
            );
            killed_at += 1;
        }
        assert!(killed_at > 30, "only {killed_at} operations were tried");
    }
}
