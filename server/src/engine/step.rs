//! One engine step: plan the passes, run them, commit what they gave.
//!
//! A step feeds prompt chunks up to the token budget, one sequence at a time, and then one row batch of all decoding sequences:
//! for each its newest token and what was drafted behind it.
//! Prompts take turns, so a long one holds up a short one for one chunk, and running streams advance in every step.
//! The two are separate passes because a pass has one width: a chunk beside single tokens would pad every one of them to the chunk.
//! Right behind a pass, while its taps are where the target left them, the drafter appends those of the tokens that were kept and proposes the next blocks.
//! A pass that fails or panics fails the sequences it carried, nothing else.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use super::clock::Clock;
use super::request::EngineError;
use super::sampler::{Sampler, logprobs};
use super::sequence::{Progress, Sequence};
use super::speculation::{PlainCause, Speculation};
use crate::model::{Batch, BatchRow, ModelError, Target, WidthRule};

/// Most rows of logits that one pass of a prompt with log-probabilities computes, to bound the size of the output.
const PROMPT_LOGPROB_ROWS: usize = 32;

/// Sequences by slot, and what is needed to step them.
pub(super) struct Stepper {
    target: Box<dyn Target>,
    speculation: Speculation,
    sampler: Sampler,
    rule: WidthRule,
    eos: Vec<u32>,
    clock: Clock,
    /// The sequence in each slot, with its turn to feed its prompt; the lowest is next.
    slots: Vec<Option<(u64, Sequence)>>,
    /// The turn behind all others.
    last_turn: u64,
    /// How long slots were held that have become free.
    occupancies: Vec<Duration>,
}

/// What a target pass is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PassKind {
    /// To feed tokens that are known: a prompt, or what the drafter has missed.
    Feed,
    /// To choose the next tokens of all decoding sequences.
    Decode,
}

/// What one step did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StepReport {
    /// Prompt tokens fed.
    pub prefill_tokens: usize,
    /// Tokens committed.
    pub committed_tokens: usize,
    /// Requests that failed.
    pub failed: usize,
    /// Time in target passes that fed prompts.
    pub prefill_time: Duration,
    /// Time in the target pass over all decoding sequences.
    pub verify_time: Duration,
    /// Time in draft passes.
    pub draft_time: Duration,
}

impl Stepper {
    pub(super) fn new(
        target: Box<dyn Target>,
        speculation: Speculation,
        rule: WidthRule,
        eos: Vec<u32>,
        clock: Clock,
    ) -> Self {
        let slots = (0..target.shape().slots).map(|_| None).collect();
        Self {
            target,
            speculation,
            sampler: Sampler::default(),
            rule,
            eos,
            clock,
            slots,
            last_turn: 0,
            occupancies: Vec::new(),
        }
    }

    /// Sequences that hold a slot.
    pub(super) fn running(&self) -> usize {
        self.slots.iter().flatten().count()
    }

    /// Whether a slot is free.
    pub(super) fn has_room(&self) -> bool {
        self.slots.iter().any(Option::is_none)
    }

    /// Takes a sequence into the lowest free slot, so that active slots stay close together.
    ///
    /// # Panics
    ///
    /// No slot is free.
    pub(super) fn admit(&mut self, sequence: Sequence) {
        let slot = self.slots.iter_mut().find(|slot| slot.is_none());
        *slot.expect("the caller saw a free slot") = Some((self.last_turn, sequence));
        self.last_turn += 1;
    }

    /// Sequences of `caller` that hold a slot.
    pub(super) fn running_of(&self, caller: &str) -> usize {
        let sequences = self.slots.iter().flatten();
        sequences
            .filter(|(_, sequence)| &*sequence.request().caller == caller)
            .count()
    }

    /// How long each slot was held that has become free since this was last asked.
    pub(super) fn take_occupancies(&mut self) -> Vec<Duration> {
        std::mem::take(&mut self.occupancies)
    }

    /// Frees the slot of a sequence that has ended.
    fn release(&mut self, sequence: Sequence) {
        let held = self
            .clock
            .now()
            .saturating_duration_since(sequence.admitted());
        self.occupancies.push(held);
    }

    /// Frees the slots of sequences whose callers are gone.
    pub(super) fn drop_cancelled(&mut self) {
        self.end_where(Sequence::is_cancelled, |_| ());
    }

    /// Fails the sequences whose requests arrived longer ago than `limit`.
    pub(super) fn expire(&mut self, limit: Duration) {
        let now = self.clock.now();
        self.end_where(
            |sequence| now.saturating_duration_since(sequence.request().arrived) >= limit,
            |sequence| sequence.fail(EngineError::DeadlineExceeded { limit }),
        );
    }

    fn end_where(&mut self, ends: impl Fn(&Sequence) -> bool, end: impl Fn(&mut Sequence)) {
        for slot in 0..self.slots.len() {
            let entry = self.slots[slot].take_if(|(_, sequence)| ends(sequence));
            if let Some((_, mut sequence)) = entry {
                end(&mut sequence);
                self.release(sequence);
            }
        }
    }

    /// Fails every running sequence.
    pub(super) fn fail_all(&mut self, error: &EngineError) {
        self.end_where(|_| true, |sequence| sequence.fail(error.clone()));
    }

    /// Whether the engine drafts.
    pub(super) fn speculation(&self) -> &Speculation {
        &self.speculation
    }

    /// Runs one step; `speculate` is the state of the switch, and at most `budget` prompt tokens are fed.
    pub(super) fn step(&mut self, speculate: bool, mut budget: usize) -> StepReport {
        let mut report = StepReport::default();
        self.speculation.begin_step(speculate);
        // Chosen before the prompts are fed: a sequence whose prompt ends in this step decodes from the next one on.
        let decoding = self.decoding_slots();
        while budget > 0 {
            let Some((slot, batch)) = self.prefill_batch(budget) else {
                break;
            };
            let fed = batch.rows[0].tokens.len();
            budget -= fed.min(budget);
            report.prefill_tokens += fed;
            let time = self.run_pass(PassKind::Feed, &batch, &[slot], &mut report);
            report.prefill_time += time;
        }
        for &slot in &decoding {
            while let Some(batch) = self.catch_up_batch(slot, budget) {
                budget -= batch.rows[0].tokens.len().min(budget);
                let time = self.run_pass(PassKind::Feed, &batch, &[slot], &mut report);
                report.prefill_time += time;
            }
        }
        let decoding = self.still_running(decoding);
        if let Some(batch) = self.decode_batch(&decoding) {
            let time = self.run_pass(PassKind::Decode, &batch, &decoding, &mut report);
            report.verify_time += time;
        }
        report
    }

    fn still_running(&self, mut slots: Vec<usize>) -> Vec<usize> {
        slots.retain(|&slot| self.slots[slot].is_some());
        slots
    }

    /// The next chunk of the prompt whose turn it is; the turn passes on.
    fn prefill_batch(&mut self, budget: usize) -> Option<(usize, Batch)> {
        let entries = self.slots.iter_mut().enumerate();
        let prefilling = entries.filter_map(|(slot, entry)| {
            let (turn, sequence) = entry.as_mut()?;
            sequence.is_prefilling().then_some((slot, turn))
        });
        let (slot, turn) = prefilling.min_by_key(|(_, turn)| **turn)?;
        *turn = self.last_turn;
        self.last_turn += 1;
        let (_, sequence) = self.slots[slot].as_ref()?;
        let scores_prompt = sequence.request().prompt_logprobs.is_some();
        let limit = if scores_prompt {
            budget.min(PROMPT_LOGPROB_ROWS)
        } else {
            budget
        };
        let taps = self.feeds_draft(sequence, sequence.cached());
        let pending = sequence.pending();
        let tokens = pending[..pending.len().min(limit)].to_vec();
        let is_last = tokens.len() == pending.len();
        let logits = if scores_prompt {
            0..tokens.len()
        } else {
            tokens.len() - usize::from(is_last)..tokens.len()
        };
        let row = BatchRow {
            start: sequence.cached(),
            tokens,
            logits,
        };
        Some((slot, self.batch(slot, vec![row], taps)))
    }

    /// Whether the taps of a pass that feeds `sequence` from position `start` on are of use to the drafter.
    fn feeds_draft(&self, sequence: &Sequence, start: usize) -> bool {
        sequence.draft.seen() == start && self.speculation.obstacle(sequence).is_none()
    }

    /// Feeds tokens of a decoding sequence again whose taps the drafter has not seen: drafting was off, or failed, when they were fed first.
    ///
    /// The rows of the cache that are written again get the values they have, since a row does not depend on the pass it is computed in.
    fn catch_up_batch(&self, slot: usize, budget: usize) -> Option<Batch> {
        let (_, sequence) = self.slots[slot].as_ref()?;
        let start = sequence.draft.seen();
        let missing = sequence
            .cached()
            .checked_sub(start)
            .filter(|&missing| missing > 0)?;
        if self.speculation.obstacle(sequence).is_some() {
            return None;
        }
        // Padding may only follow the last valid row: a shorter chunk has a width that needs none.
        let mut length = missing.min(budget);
        while length < missing && length > 0 && self.rule.width(length) != length {
            length -= 1;
        }
        if length == 0 {
            return None;
        }
        let row = BatchRow {
            start,
            tokens: sequence.committed(start, length).to_vec(),
            logits: 0..0,
        };
        Some(self.batch(slot, vec![row], true))
    }

    fn decoding_slots(&self) -> Vec<usize> {
        let decodes = |entry: &Option<(u64, Sequence)>| {
            entry
                .as_ref()
                .is_some_and(|(_, sequence)| !sequence.is_prefilling())
        };
        self.slots
            .iter()
            .enumerate()
            .filter(|(_, entry)| decodes(entry))
            .map(|(slot, _)| slot)
            .collect()
    }

    /// One row for each of `slots`, over the range that holds them; what lies between takes no part and keeps its cache rows.
    fn decode_batch(&mut self, slots: &[usize]) -> Option<Batch> {
        let range = *slots.first()?..slots.last()? + 1;
        let mut taps = false;
        for &slot in slots {
            let Some((_, sequence)) = &mut self.slots[slot] else {
                continue;
            };
            if let Some(cause) = self.speculation.obstacle(sequence) {
                sequence.draft.proposal.clear();
                sequence.draft.plain = cause;
            }
            // What was drafted is checked as far as the plan for this step goes, which may have been made later.
            let planned = self.speculation.planned_tokens();
            if planned == 0 && !sequence.draft.proposal.is_empty() {
                sequence.draft.plain = PlainCause::NotWorthwhile;
            }
            sequence.draft.proposal.truncate(planned);
            if sequence.draft.proposal.is_empty() {
                metrics::counter!("outrider_plain_steps_total", "cause" => sequence.draft.plain.as_str()).increment(1);
            }
        }
        for &slot in slots {
            if let Some((_, sequence)) = &self.slots[slot] {
                taps |= self.feeds_draft(sequence, sequence.cached());
            }
        }
        let rows = range.clone().map(|slot| match &self.slots[slot] {
            Some((_, sequence)) if slots.contains(&slot) => {
                let mut tokens = sequence.pending().to_vec();
                let first_logits = tokens.len() - 1;
                tokens.extend(&sequence.draft.proposal);
                BatchRow {
                    start: sequence.cached(),
                    logits: first_logits..tokens.len(),
                    tokens,
                }
            }
            Some((_, sequence)) => BatchRow::gap(sequence.cached()),
            None => BatchRow::gap(0),
        });
        let rows = rows.collect();
        Some(self.batch(range.start, rows, taps))
    }

    fn batch(&self, first_slot: usize, rows: Vec<BatchRow>, taps: bool) -> Batch {
        let longest = |length: fn(&BatchRow) -> usize| rows.iter().map(length).max().unwrap_or(0);
        let width = self.rule.width(longest(|row| row.tokens.len()));
        let logit_width = self.rule.width(longest(|row| row.logits.len()).max(1));
        Batch {
            first_slot,
            rows,
            width,
            logit_width,
            taps,
        }
    }

    /// Runs a pass and commits its rows to the sequences in `slots`, all of which it carries.
    ///
    /// Returns the time in the target.
    fn run_pass(
        &mut self,
        kind: PassKind,
        batch: &Batch,
        slots: &[usize],
        report: &mut StepReport,
    ) -> Duration {
        let started = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| self.target.forward(batch)));
        let elapsed = started.elapsed();
        let fault = match outcome {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(describe(&error)),
            Err(panic) => Some(panic_text(panic.as_ref())),
        };
        for &slot in slots {
            let Some((turn, mut sequence)) = self.slots[slot].take() else {
                continue;
            };
            let row_index = slot - batch.first_slot;
            let result = match &fault {
                Some(fault) => Err(EngineError::StepFailed(fault.clone())),
                None => catch_unwind(AssertUnwindSafe(|| {
                    self.commit_row(&mut sequence, row_index, &batch.rows[row_index])
                }))
                .unwrap_or_else(|panic| Err(EngineError::StepFailed(panic_text(panic.as_ref())))),
            };
            match result {
                Ok((Progress::Running, committed)) => {
                    report.committed_tokens += committed;
                    self.slots[slot] = Some((turn, sequence));
                }
                Ok((Progress::Finished, committed)) => {
                    report.committed_tokens += committed;
                    self.release(sequence);
                }
                Err(error) => {
                    tracing::warn!(request_id = sequence.request().id, %error, "request failed");
                    report.failed += 1;
                    sequence.fail(error);
                    self.release(sequence);
                }
            }
        }
        if fault.is_none() {
            if kind == PassKind::Decode {
                let width = batch.rows.iter().map(|row| row.tokens.len()).max();
                let slots_in_pass = batch.rows.len();
                let width = width.unwrap_or(0);
                metrics::histogram!("outrider_step_width_tokens").record(width as f64);
                self.speculation
                    .record_target(slots_in_pass, width, elapsed);
                let running = slots.iter().filter_map(|&slot| self.slots[slot].as_ref());
                self.speculation
                    .plan(slots_in_pass, running.map(|(_, sequence)| sequence));
            }
            if batch.taps {
                report.draft_time += self.draft(batch, slots);
            }
        }
        elapsed
    }

    /// Hands the taps of a pass to the drafter, for those of `slots` that are still running.
    fn draft(&mut self, batch: &Batch, slots: &[usize]) -> Duration {
        let Self {
            slots: entries,
            speculation,
            target,
            ..
        } = self;
        let range = batch.first_slot..batch.first_slot + batch.rows.len();
        let rows = entries[range].iter_mut().zip(&batch.rows).enumerate();
        let rows = rows.map(|(index, (entry, row))| {
            let (_, sequence) = entry.as_mut()?;
            let took_part = slots.contains(&(batch.first_slot + index));
            Some((sequence, took_part.then_some((row.start, row.tokens.len()))))
        });
        speculation.draft(batch.first_slot, rows, target.taps())
    }

    /// Commits what a pass found for one sequence, and counts what became of its drafted tokens.
    fn commit_row(
        &mut self,
        sequence: &mut Sequence,
        index: usize,
        row: &BatchRow,
    ) -> Result<(Progress, usize), EngineError> {
        let end = row.start + row.tokens.len();
        if end <= sequence.cached() {
            // The rows were fed before; this pass was for their taps.
            return Ok((Progress::Running, 0));
        }
        let drafted = row.tokens.len().saturating_sub(sequence.pending().len());
        if drafted == 0 {
            let mut walk = Walk::default();
            let progress = self.walk(sequence, index, row, &mut walk)?;
            return Ok((progress, walk.committed));
        }
        sequence.record_drafted(drafted);
        let mut walk = Walk::default();
        let progress = self.walk(sequence, index, row, &mut walk);
        metrics::counter!("outrider_speculative_steps_total").increment(1);
        metrics::counter!("outrider_drafted_tokens_total").increment(drafted as u64);
        for position in 1..=walk.accepted {
            metrics::counter!("outrider_accepted_tokens_total", "position" => position.to_string())
                .increment(1);
        }
        metrics::histogram!("outrider_acceptance_length_tokens").record(walk.committed as f64);
        if matches!(progress, Ok(Progress::Running)) {
            self.speculation
                .record_acceptance(sequence, drafted, walk.accepted);
        }
        Ok((progress?, walk.committed))
    }

    /// Walks the rows of logits a sequence got, token by token.
    ///
    /// Row `i` of `row.tokens` judges position `start + i + 1`. Where the sequence has a token there already (the prompt), it is scored.
    /// Where it has none, the target chooses; if the row after it was fed with another token than the choice, that row and all later ones are void.
    fn walk(
        &mut self,
        sequence: &mut Sequence,
        index: usize,
        row: &BatchRow,
        walk: &mut Walk,
    ) -> Result<Progress, EngineError> {
        let Range { start: first, end } = row.logits.clone();
        let prompt_tokens = sequence.request().prompt.len();
        // Everything that was fed from the sequence itself is valid whatever the logits say.
        sequence.set_cached(row.start + row.tokens.len().min(sequence.pending().len()));
        for fed in first..end {
            let logits = self.target.logits(index, fed - first);
            let position = row.start + fed + 1;
            if let Some(id) = sequence.token_at(position) {
                if let Some(top) = sequence.request().prompt_logprobs {
                    let scored =
                        logprobs(logits, id, top).map_err(|_| EngineError::NonFiniteLogits)?;
                    sequence.record_prompt_logprobs(scored);
                }
                continue;
            }
            if position == prompt_tokens && sequence.prompt_done() == Progress::Finished {
                return Ok(Progress::Finished);
            }
            let id = self
                .sampler
                .choose(logits, sequence.context())
                .map_err(|_| EngineError::NonFiniteLogits)?;
            let scored = match sequence.request().logprobs {
                Some(top) => {
                    Some(logprobs(logits, id, top).map_err(|_| EngineError::NonFiniteLogits)?)
                }
                None => None,
            };
            let is_drafted = row.tokens.get(fed + 1) == Some(&id);
            if is_drafted {
                walk.accepted += 1;
                sequence.record_accepted();
            }
            walk.committed += 1;
            if sequence.commit(id, scored, &self.eos) == Progress::Finished {
                return Ok(Progress::Finished);
            }
            if !is_drafted {
                break;
            }
            sequence.set_cached(position + 1);
        }
        Ok(Progress::Running)
    }
}

/// What a walk over the logits of one sequence led to.
#[derive(Clone, Copy, Debug, Default)]
struct Walk {
    /// Tokens committed.
    committed: usize,
    /// Drafted tokens among them.
    accepted: usize,
}

fn describe(error: &ModelError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

pub(super) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("panic: {}", text.unwrap_or("of unknown type"))
}
