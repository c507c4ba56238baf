//! Carries a rollout on: looks, lets [`State::next`] decide, keeps the decision, and only then brings the world to it.
//!
//! Everything done to the world is done again after a crash, so [`World`] asks for states and never for changes.

use anyhow::Context;
use serde_json::json;

use crate::machine::{Finding, Input, Phase, State, Verdict};
use crate::plan::Plan;
use crate::store::Request;

/// Between two looks at requests and at the canary's health.
const TICK_MS: u64 = 500;
/// Failures in a row of the gateway or of the canary's health that count as one.
const MOST_FAILURES: u32 = 3;

/// What a rollout sees and moves.
pub trait World {
    /// Milliseconds since 1970.
    fn now_ms(&mut self) -> u64;
    /// Lets time pass.
    fn wait(&mut self, ms: u64);
    /// Keeps the state and brings the journal up to it.
    fn save(&mut self, state: &State) -> anyhow::Result<()>;
    /// What an operator asks for.
    fn request(&mut self) -> anyhow::Result<Option<Request>>;
    /// Takes the request away.
    fn clear_request(&mut self) -> anyhow::Result<()>;
    /// Share that the gateway gives the canary; `None` when its parts do not agree.
    fn gateway(&mut self) -> anyhow::Result<Option<u8>>;
    /// Gives the canary this share, and comes back when that is so.
    fn set_gateway(&mut self, percent: u8) -> anyhow::Result<()>;
    /// Switches drafting off on the canary.
    fn switch_speculation_off(&mut self) -> anyhow::Result<()>;
    /// Does the work of a phase that is no step.
    fn perform(&mut self, state: &State) -> Finding;
    /// Looks at the gates.
    fn look(&mut self, state: &State) -> Finding;
    /// What is wrong with the canary's health.
    fn canary_fault(&mut self) -> Option<String>;
    /// Tells a person that something will be tried again.
    fn tell(&mut self, text: &str);
}

struct Runner<'a, W> {
    plan: &'a Plan,
    world: &'a mut W,
    state: State,
}

/// Carries the rollout on to its end.
pub fn run(plan: &Plan, state: State, world: &mut impl World) -> anyhow::Result<State> {
    let mut runner = Runner { plan, world, state };
    // A crash may have come between the state and the journal.
    runner.world.save(&runner.state)?;
    runner.carry_on()?;
    Ok(runner.state)
}

impl<W: World> Runner<'_, W> {
    fn carry_on(&mut self) -> anyhow::Result<()> {
        // Nothing is known of the gateway yet: files may say what the process behind them does not.
        let mut set_percent = None;
        let mut speculation_is_off = false;
        let mut gateway_failures = 0;
        let mut canary_failures = 0;
        let mut next_look_ms = 0;
        loop {
            if self.carry_out_request()? {
                continue;
            }
            if self.state.phase.is_end() && set_percent == self.state.percent(self.plan) {
                return Ok(());
            }
            let now_ms = self.world.now_ms();
            let looks = now_ms >= next_look_ms || now_ms >= self.state.bake_until_ms;
            if let Some(percent) = self.state.percent(self.plan) {
                let is_known = set_percent == Some(percent);
                match self.reconcile(percent, is_known, looks) {
                    Ok(()) => {
                        gateway_failures = 0;
                        set_percent = Some(percent);
                    }
                    Err(error) => {
                        set_percent = None;
                        gateway_failures += 1;
                        let detail = format!("the gateway: {error:#}");
                        self.world.tell(&detail);
                        let gives_up = matches!(self.state.phase, Phase::Step(_))
                            && gateway_failures >= MOST_FAILURES;
                        if gives_up {
                            self.decide(Finding::new(Verdict::Fail, detail, json!(null)))?;
                        } else {
                            self.world.wait(TICK_MS);
                        }
                        continue;
                    }
                }
                if self.advance(Input::Confirmed)? {
                    next_look_ms = self.world.now_ms() + self.plan.check_s * 1000;
                    continue;
                }
            } else {
                set_percent = None;
            }
            if self.state.phase.is_end() {
                continue;
            }
            if !matches!(self.state.phase, Phase::Step(_)) {
                let waits = self.state.paused
                    && !matches!(self.state.phase, Phase::Retire | Phase::RollBack);
                if waits {
                    self.world.wait(TICK_MS);
                } else {
                    let finding = self.world.perform(&self.state);
                    let in_doubt = finding.verdict == Verdict::Inconclusive;
                    // What an operator's request cut short proves nothing.
                    if in_doubt && self.carry_out_request()? {
                        continue;
                    }
                    self.decide(finding)?;
                    if in_doubt {
                        self.world.wait(TICK_MS);
                    }
                }
                continue;
            }
            if self.state.speculation_off && !speculation_is_off {
                match self.world.switch_speculation_off() {
                    Ok(()) => speculation_is_off = true,
                    Err(error) => {
                        let detail = format!("drafting can't be switched off: {error:#}");
                        self.decide(Finding::new(Verdict::Fail, detail, json!(null)))?;
                        continue;
                    }
                }
            }
            match self.world.canary_fault() {
                None => canary_failures = 0,
                Some(fault) => {
                    canary_failures += 1;
                    if canary_failures >= MOST_FAILURES {
                        let detail = format!("the canary: {fault}");
                        self.decide(Finding::new(Verdict::Fail, detail, json!(null)))?;
                        continue;
                    }
                }
            }
            if looks && canary_failures == 0 {
                next_look_ms = now_ms + self.plan.check_s * 1000;
                let finding = self.world.look(&self.state);
                if self.decide(finding)? {
                    continue;
                }
            }
            self.world.wait(TICK_MS);
        }
    }

    fn reconcile(&mut self, percent: u8, is_known: bool, looks: bool) -> anyhow::Result<()> {
        if is_known && (!looks || self.world.gateway()? == Some(percent)) {
            return Ok(());
        }
        self.world.set_gateway(percent)
    }

    fn carry_out_request(&mut self) -> anyhow::Result<bool> {
        let Some(request) = self.world.request()? else {
            return Ok(false);
        };
        if request.id != self.state.last_request {
            self.advance(Input::Request(request.id, request.command))?;
        }
        self.world.clear_request()?;
        Ok(true)
    }

    fn decide(&mut self, finding: Finding) -> anyhow::Result<bool> {
        self.advance(Input::Finding(finding))
    }

    /// Whether anything changed.
    fn advance(&mut self, input: Input) -> anyhow::Result<bool> {
        let now_ms = self.world.now_ms();
        let Some(next) = self.state.next(self.plan, input, now_ms) else {
            return Ok(false);
        };
        self.world
            .save(&next)
            .context("the state can't be kept, so nothing is changed")?;
        self.state = next;
        Ok(true)
    }
}
