//! What a rollout does next: a pure function of where it stands, what was seen, and the time.
//!
//! It reads no clock and touches nothing, so that every way through a rollout is a table in a test.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::plan::{OnFailure, Plan};

/// Inconclusive findings in a row that end a rollout.
pub const MOST_INCONCLUSIVE: u32 = 3;

/// Where a rollout stands.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Before anything is started.
    Preflight,
    /// The canary is started, or waited for.
    Start,
    /// It is asked through the gateway by name.
    Smoke,
    /// It is judged beside stable.
    Verify,
    /// It serves the share of this index of the plan's steps.
    Step(usize),
    /// The old version serves nobody any more and is stopped.
    Retire,
    /// The canary serves nobody any more and is stopped.
    RollBack,
    /// The end: the new version serves everybody.
    Complete,
    /// The end: the old version serves everybody.
    RolledBack,
}

impl Phase {
    /// Whether nothing follows.
    pub fn is_end(self) -> bool {
        matches!(self, Self::Complete | Self::RolledBack)
    }
}

/// All that a rollout must remember; it is one file.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// Name of the rollout.
    pub id: String,
    /// Folder that the plan's paths start from.
    pub plan_directory: PathBuf,
    /// Where it stands.
    pub phase: Phase,
    /// Whether the gateway was ever moved by this rollout: one that was not is not moved back.
    pub gateway_moved: bool,
    /// When the gateway confirmed the share of this phase, in milliseconds since 1970.
    pub confirmed_ms: Option<u64>,
    /// Where the window of the gates begins.
    pub window_from_ms: u64,
    /// When the bake time ends.
    pub bake_until_ms: u64,
    /// Inconclusive findings in a row.
    pub inconclusive: u32,
    /// Whether it shall stay where it is.
    pub paused: bool,
    /// Whether drafting was switched off on the canary after a failed gate.
    pub speculation_off: bool,
    /// Stable's figures at the first step that passed, while it had nearly all callers: what the step in which it has none compares with.
    pub stable_figures: BTreeMap<String, f64>,
    /// Why it rolls back.
    pub cause: Option<String>,
    /// The last request of an operator that was carried out.
    pub last_request: u64,
    /// The journal's last line. It is kept here so that state and journal can't part: what is missing there is written again.
    pub record: Record,
}

/// A line of the journal: one decision with its evidence.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// Number of the line, from 1.
    pub seq: u64,
    /// Milliseconds since 1970.
    pub time_ms: u64,
    /// What was decided.
    pub event: Event,
    /// Where the rollout stands by it.
    pub phase: Phase,
    /// Share that the canary shall have; null where the gateway is left alone.
    pub percent: Option<u8>,
    /// Why, in words.
    pub detail: String,
    /// What it was decided by.
    pub evidence: Value,
}

/// What was decided.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// The rollout began.
    Started,
    /// The phase began that the line names.
    Entered,
    /// The gateway confirmed the share.
    Confirmed,
    /// Nothing was proven.
    Inconclusive,
    /// Drafting is switched off on the canary, and the step begins again.
    SpeculationOff,
    /// An operator asked to stay.
    Paused,
    /// An operator asked to go on.
    Resumed,
    /// An operator asked for what can't be done now.
    Refused,
}

/// What a look at the world says.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// As it must be.
    Pass,
    /// Not as it must be.
    Fail,
    /// Not known.
    Inconclusive,
}

/// What was seen.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// What it says.
    pub verdict: Verdict,
    /// In words.
    pub detail: String,
    /// The figures and answers behind it.
    pub evidence: Value,
    /// Whether a canary without drafting may be better.
    pub drafting_may_be_why: bool,
    /// Stable's figures, by the gate's metric.
    pub stable_figures: BTreeMap<String, f64>,
}

impl Finding {
    /// A finding without figures.
    pub fn new(verdict: Verdict, detail: impl Into<String>, evidence: Value) -> Self {
        Self {
            verdict,
            detail: detail.into(),
            evidence,
            drafting_may_be_why: false,
            stable_figures: BTreeMap::new(),
        }
    }
}

/// What an operator asks for.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Command {
    /// Stay at the share that it has.
    Pause,
    /// Go on.
    Resume,
    /// End the step now.
    Promote,
    /// Roll back.
    Abort,
}

/// What a decision is made of.
#[derive(Clone, Debug, PartialEq)]
pub enum Input {
    /// The gateway has the share of the phase.
    Confirmed,
    /// Something was seen.
    Finding(Finding),
    /// An operator asked for something, under this number.
    Request(u64, Command),
}

impl State {
    /// The beginning.
    pub fn new(plan: &Plan, now_ms: u64) -> Self {
        Self {
            id: plan.id.clone(),
            plan_directory: plan.directory.clone(),
            phase: Phase::Preflight,
            gateway_moved: false,
            confirmed_ms: None,
            window_from_ms: now_ms,
            bake_until_ms: now_ms,
            inconclusive: 0,
            paused: false,
            speculation_off: false,
            stable_figures: BTreeMap::new(),
            cause: None,
            last_request: 0,
            record: Record {
                seq: 1,
                time_ms: now_ms,
                event: Event::Started,
                phase: Phase::Preflight,
                percent: None,
                detail: format!("from {} to {}", plan.stable.digest, plan.canary.digest),
                evidence: Value::Null,
            },
        }
    }

    /// Share that the gateway must give the canary; `None` where the rollout leaves it alone.
    pub fn percent(&self, plan: &Plan) -> Option<u8> {
        match self.phase {
            Phase::Step(index) => plan.steps.get(index).copied(),
            Phase::Retire | Phase::Complete => Some(100),
            Phase::RollBack | Phase::RolledBack => self.gateway_moved.then_some(0),
            Phase::Preflight | Phase::Start | Phase::Smoke | Phase::Verify => None,
        }
    }

    /// The state after `input`; `None` when it changes nothing.
    pub fn next(&self, plan: &Plan, input: Input, now_ms: u64) -> Option<Self> {
        if self.phase.is_end() && !matches!(input, Input::Request(..)) {
            return None;
        }
        match input {
            Input::Confirmed => self.confirmed(plan, now_ms),
            Input::Finding(finding) => self.found(plan, finding, now_ms),
            Input::Request(id, command) => {
                let mut next = self.asked(plan, command, now_ms);
                next.last_request = id;
                Some(next)
            }
        }
    }

    fn confirmed(&self, plan: &Plan, now_ms: u64) -> Option<Self> {
        if self.confirmed_ms.is_some() {
            return None;
        }
        let mut next = self.clone();
        next.confirmed_ms = Some(now_ms);
        next.window_from_ms = now_ms;
        next.bake_until_ms = now_ms + plan.bake_s * 1000;
        let detail = "the gateway has the share".to_owned();
        Some(next.with_record(plan, Event::Confirmed, detail, Value::Null, now_ms))
    }

    fn found(&self, plan: &Plan, finding: Finding, now_ms: u64) -> Option<Self> {
        match (self.phase, finding.verdict) {
            (Phase::Retire, _) => Some(self.entered(plan, Phase::Complete, finding, now_ms)),
            (Phase::RollBack, _) => Some(self.entered(plan, Phase::RolledBack, finding, now_ms)),
            (_, Verdict::Fail) => Some(self.failed(plan, finding, now_ms)),
            (_, Verdict::Pass) => {
                let ends = match self.phase {
                    Phase::Step(_) => self.bake_is_over(now_ms),
                    _ => true,
                };
                (ends && !self.paused).then(|| self.advanced(plan, finding, now_ms))
            }
            (_, Verdict::Inconclusive) => {
                let counts = match self.phase {
                    Phase::Step(_) => self.bake_is_over(now_ms),
                    _ => true,
                };
                (counts && !self.paused).then(|| self.in_doubt(plan, finding, now_ms))
            }
        }
    }

    fn bake_is_over(&self, now_ms: u64) -> bool {
        self.confirmed_ms.is_some() && now_ms >= self.bake_until_ms
    }

    fn failed(&self, plan: &Plan, finding: Finding, now_ms: u64) -> Self {
        let may_switch = plan.on_failure == OnFailure::SpeculationOffFirst
            && matches!(self.phase, Phase::Step(_))
            && finding.drafting_may_be_why
            && !self.speculation_off;
        if !may_switch {
            return self.rolled_back(plan, finding, now_ms);
        }
        let mut next = self.clone();
        next.speculation_off = true;
        next.inconclusive = 0;
        next.window_from_ms = now_ms;
        next.bake_until_ms = now_ms + plan.bake_s * 1000;
        next.with_record(
            plan,
            Event::SpeculationOff,
            finding.detail,
            finding.evidence,
            now_ms,
        )
    }

    fn in_doubt(&self, plan: &Plan, mut finding: Finding, now_ms: u64) -> Self {
        if self.inconclusive + 1 >= MOST_INCONCLUSIVE {
            finding.detail = format!(
                "{MOST_INCONCLUSIVE} inconclusive findings in a row, the last: {}",
                finding.detail
            );
            return self.rolled_back(plan, finding, now_ms);
        }
        let mut next = self.clone();
        next.inconclusive += 1;
        next.bake_until_ms = now_ms + plan.bake_s * 1000;
        next.with_record(
            plan,
            Event::Inconclusive,
            finding.detail,
            finding.evidence,
            now_ms,
        )
    }

    fn advanced(&self, plan: &Plan, finding: Finding, now_ms: u64) -> Self {
        let phase = match self.phase {
            Phase::Preflight => Phase::Start,
            Phase::Start => Phase::Smoke,
            Phase::Smoke => Phase::Verify,
            Phase::Verify => Phase::Step(0),
            Phase::Step(index) if index + 1 < plan.steps.len() => Phase::Step(index + 1),
            Phase::Step(_) => Phase::Retire,
            end => end,
        };
        let mut next = self.clone();
        if next.stable_figures.is_empty() {
            next.stable_figures = finding.stable_figures.clone();
        }
        next.entered(plan, phase, finding, now_ms)
    }

    fn rolled_back(&self, plan: &Plan, finding: Finding, now_ms: u64) -> Self {
        let mut next = self.clone();
        next.cause = Some(finding.detail.clone());
        next.entered(plan, Phase::RollBack, finding, now_ms)
    }

    fn entered(&self, plan: &Plan, phase: Phase, finding: Finding, now_ms: u64) -> Self {
        let mut next = self.clone();
        next.phase = phase;
        next.gateway_moved |= matches!(phase, Phase::Step(_));
        // What has the share already needs no second confirmation.
        let is_end = phase.is_end();
        next.confirmed_ms = self.confirmed_ms.filter(|_| is_end);
        next.inconclusive = 0;
        next.window_from_ms = now_ms;
        next.bake_until_ms = now_ms + plan.bake_s * 1000;
        next.with_record(
            plan,
            Event::Entered,
            finding.detail,
            finding.evidence,
            now_ms,
        )
    }

    fn asked(&self, plan: &Plan, command: Command, now_ms: u64) -> Self {
        let by_operator =
            |what: &str| Finding::new(Verdict::Pass, what, json!({ "operator": command }));
        let moves = !self.phase.is_end() && self.phase != Phase::RollBack;
        match (command, self.phase) {
            (Command::Abort, phase) if moves && phase != Phase::Retire => {
                self.rolled_back(plan, by_operator("an operator asked for it"), now_ms)
            }
            (Command::Promote, Phase::Step(_)) if self.confirmed_ms.is_some() => {
                let finding = by_operator("an operator asked for the next step");
                self.advanced(plan, finding, now_ms)
            }
            (Command::Pause, _) if moves => self.with_pause(plan, true, now_ms),
            (Command::Resume, _) if moves => self.with_pause(plan, false, now_ms),
            (command, phase) => {
                let detail = format!("{command:?} can't be done in phase {phase:?}").to_lowercase();
                let next = self.clone();
                next.with_record(plan, Event::Refused, detail, Value::Null, now_ms)
            }
        }
    }

    fn with_pause(&self, plan: &Plan, paused: bool, now_ms: u64) -> Self {
        let mut next = self.clone();
        next.paused = paused;
        let event = if paused {
            Event::Paused
        } else {
            Event::Resumed
        };
        let detail = "an operator asked for it".to_owned();
        next.with_record(plan, event, detail, Value::Null, now_ms)
    }

    fn with_record(
        mut self,
        plan: &Plan,
        event: Event,
        detail: String,
        evidence: Value,
        now_ms: u64,
    ) -> Self {
        self.record = Record {
            seq: self.record.seq + 1,
            time_ms: now_ms,
            event,
            phase: self.phase,
            percent: self.percent(plan),
            detail,
            evidence,
        };
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BAKE_MS: u64 = 10_000;

    fn plan(on_failure: &str) -> Plan {
        let text = format!(
            "rollout_version: 1
id: machine
stable: {{ endpoint: 'http://s', admin: 'http://sa', digest: {digest} }}
canary: {{ endpoint: 'http://c', admin: 'http://ca', digest: {digest} }}
gateway: {{ haproxy: {{ address: 'http://g', socket: s, map: m }} }}
prometheus: http://p
steps: [5, 50, 100]
bake_s: 10
on_failure: {on_failure}
gates: [{{ metric: restarts, max: 0 }}]
",
            digest = "a".repeat(64)
        );
        Plan::parse(&text, PathBuf::from("/")).unwrap()
    }

    fn finding(verdict: Verdict) -> Input {
        Input::Finding(Finding::new(verdict, "seen", Value::Null))
    }

    fn doubted_draft() -> Input {
        let mut finding = Finding::new(Verdict::Fail, "slow", Value::Null);
        finding.drafting_may_be_why = true;
        Input::Finding(finding)
    }

    /// A rollout whose step of this index is confirmed at 0 ms.
    fn at_step(plan: &Plan, index: usize) -> State {
        let mut state = State::new(plan, 0);
        state.phase = Phase::Step(index);
        state.gateway_moved = true;
        state.next(plan, Input::Confirmed, 0).unwrap()
    }

    #[test]
    fn a_step_ends_only_after_its_bake_time_and_only_by_a_pass() {
        let plan = plan("roll_back");
        let state = at_step(&plan, 0);
        assert_eq!(state.next(&plan, finding(Verdict::Pass), BAKE_MS - 1), None);
        assert_eq!(
            state.next(&plan, finding(Verdict::Inconclusive), BAKE_MS - 1),
            None
        );
        let next = state.next(&plan, finding(Verdict::Pass), BAKE_MS).unwrap();
        assert_eq!(
            (next.phase, next.percent(&plan)),
            (Phase::Step(1), Some(50))
        );
        assert_eq!(next.confirmed_ms, None);
        // Before the gateway confirms there is no bake time that could be over.
        assert_eq!(next.next(&plan, finding(Verdict::Pass), 10 * BAKE_MS), None);
        let failed = state.next(&plan, finding(Verdict::Fail), 1).unwrap();
        assert_eq!(
            (failed.phase, failed.percent(&plan)),
            (Phase::RollBack, Some(0))
        );
        let last = at_step(&plan, 2).next(&plan, finding(Verdict::Pass), BAKE_MS);
        assert_eq!(last.unwrap().phase, Phase::Retire);
    }

    #[test]
    fn the_third_inconclusive_look_in_a_row_rolls_back_and_each_before_it_waits_a_bake_time() {
        let plan = plan("roll_back");
        let mut state = at_step(&plan, 1);
        for count in 1..MOST_INCONCLUSIVE {
            let now_ms = u64::from(count) * BAKE_MS;
            assert_eq!(
                state.next(&plan, finding(Verdict::Inconclusive), now_ms - 1),
                None
            );
            state = state
                .next(&plan, finding(Verdict::Inconclusive), now_ms)
                .unwrap();
            assert_eq!((state.phase, state.inconclusive), (Phase::Step(1), count));
        }
        let passed = state
            .next(&plan, finding(Verdict::Pass), 3 * BAKE_MS)
            .unwrap();
        assert_eq!((passed.phase, passed.inconclusive), (Phase::Step(2), 0));
        let third = state
            .next(&plan, finding(Verdict::Inconclusive), 3 * BAKE_MS)
            .unwrap();
        assert_eq!(third.phase, Phase::RollBack);
        assert!(third.cause.unwrap().contains("3 inconclusive"));
    }

    #[test]
    fn what_goes_wrong_before_the_first_step_leaves_the_gateway_alone() {
        let plan = plan("roll_back");
        for phase in [Phase::Preflight, Phase::Start, Phase::Smoke, Phase::Verify] {
            let mut state = State::new(&plan, 0);
            state.phase = phase;
            let failed = state.next(&plan, finding(Verdict::Fail), 1).unwrap();
            assert_eq!(
                (failed.phase, failed.percent(&plan)),
                (Phase::RollBack, None)
            );
            assert_eq!(failed.cause.as_deref(), Some("seen"));
        }
    }

    #[test]
    fn drafting_is_switched_off_once_and_only_for_what_it_may_cause() {
        let switching = plan("speculation_off_first");
        let state = at_step(&switching, 1);
        let off = state.next(&switching, doubted_draft(), 4000).unwrap();
        assert_eq!((off.phase, off.speculation_off), (Phase::Step(1), true));
        assert_eq!(
            (off.window_from_ms, off.bake_until_ms),
            (4000, 4000 + BAKE_MS)
        );
        let again = off.next(&switching, doubted_draft(), 5000).unwrap();
        assert_eq!(again.phase, Phase::RollBack);
        let dead = state
            .next(&switching, finding(Verdict::Fail), 4000)
            .unwrap();
        assert_eq!(dead.phase, Phase::RollBack);
        let strict = plan("roll_back");
        let failed = at_step(&strict, 1)
            .next(&strict, doubted_draft(), 4000)
            .unwrap();
        assert_eq!(failed.phase, Phase::RollBack);
    }

    #[test]
    fn the_figures_of_the_first_step_that_passed_are_kept() {
        let plan = plan("roll_back");
        let pass = |value: f64| {
            let mut finding = Finding::new(Verdict::Pass, "seen", Value::Null);
            finding.stable_figures = BTreeMap::from([("memory_bytes".to_owned(), value)]);
            Input::Finding(finding)
        };
        let second = at_step(&plan, 0).next(&plan, pass(1.0), BAKE_MS).unwrap();
        let second = second.next(&plan, Input::Confirmed, BAKE_MS).unwrap();
        let third = second.next(&plan, pass(2.0), 2 * BAKE_MS).unwrap();
        assert_eq!(third.stable_figures["memory_bytes"], 1.0);
    }

    #[test]
    fn operators_pause_promote_and_abort_where_that_can_be_done_and_are_refused_elsewhere() {
        let plan = plan("roll_back");
        let ask = |state: &State, command| {
            let next = state.next(&plan, Input::Request(7, command), 1).unwrap();
            assert_eq!(next.last_request, 7);
            next
        };
        let step = at_step(&plan, 0);
        let paused = ask(&step, Command::Pause);
        assert_eq!(paused.next(&plan, finding(Verdict::Pass), BAKE_MS), None);
        assert_eq!(
            paused.next(&plan, finding(Verdict::Inconclusive), BAKE_MS),
            None
        );
        let failed = paused.next(&plan, finding(Verdict::Fail), BAKE_MS).unwrap();
        assert_eq!(failed.phase, Phase::RollBack);
        let resumed = ask(&paused, Command::Resume);
        let passed = resumed.next(&plan, finding(Verdict::Pass), BAKE_MS);
        assert_eq!(passed.unwrap().phase, Phase::Step(1));
        assert_eq!(ask(&step, Command::Promote).phase, Phase::Step(1));
        assert_eq!(ask(&step, Command::Abort).phase, Phase::RollBack);
        for (phase, command) in [
            (Phase::Verify, Command::Promote),
            (Phase::Retire, Command::Abort),
            (Phase::RollBack, Command::Abort),
            (Phase::RollBack, Command::Promote),
            (Phase::Complete, Command::Pause),
        ] {
            let mut state = at_step(&plan, 0);
            state.phase = phase;
            let refused = ask(&state, command);
            assert_eq!(
                (refused.phase, refused.record.event),
                (phase, Event::Refused)
            );
        }
    }
}
