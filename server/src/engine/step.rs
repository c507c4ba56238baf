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
use super::sampler::Sampler;
use super::sequence::{Progress, Sequence};
use super::slots::{KvRows, Slot, Slots, Source};
use super::speculation::{Part, PlainCause, Speculation};
use super::walk::Walk;
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
    slots: Slots,
    /// Whether sequences start from rows that are there already.
    prefix_cache: bool,
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
        prefix_cache: bool,
        clock: Clock,
    ) -> Self {
        let shape = target.shape();
        let slots = Slots::new(shape.slots, shape.parking_slots, shape.context_tokens);
        Self {
            target,
            speculation,
            sampler: Sampler::default(),
            rule,
            eos,
            clock,
            slots,
            prefix_cache,
            occupancies: Vec::new(),
        }
    }

    /// Sequences that hold a slot.
    pub(super) fn running(&self) -> usize {
        self.slots.running().count()
    }

    /// Whether a slot is free.
    pub(super) fn has_room(&self) -> bool {
        self.slots.free().is_some()
    }

    /// Takes a sequence into the lowest free slot, with as much of its prompt as is in any slot already.
    ///
    /// # Panics
    ///
    /// No slot is free.
    pub(super) fn admit(&mut self, mut sequence: Sequence) {
        let slot = self.slots.free().expect("the caller saw a free slot");
        let others = self.slots.running().map(|(_, other)| other);
        self.speculation.admit(&mut sequence, others);
        if self.may_reuse(&sequence) {
            metrics::counter!("outrider_prefix_cache_lookups_total").increment(1);
        }
        let source = self.source(&sequence);
        let prompt = &sequence.request().prompt;
        if let Some(place) = self.slots.place_to_park(slot, prompt, source) {
            let (rows, draft_rows) = self.slots.park(slot, place);
            self.copy_rows(slot, place, 0..rows, 0..draft_rows);
        }
        if let Some(source) = source
            && self.speculation.obstacle(&sequence).is_none()
        {
            let lacking = source.tokens.saturating_sub(source.draft_rows);
            self.speculation
                .record_fed_again(self.running() + 1, lacking);
        }
        self.slots.put(slot, Box::new(sequence));
        self.reuse(slot, source);
        if let Some(sequence) = self.slots.sequence_mut(slot) {
            sequence.note_reused();
        }
    }

    /// Whether a prompt need not be fed whole: when each row of it is to be scored it must be.
    fn may_reuse(&self, sequence: &Sequence) -> bool {
        self.prefix_cache && sequence.request().prompt_logprobs.is_none()
    }

    /// Where most of the prompt is already, if it may come from there.
    fn source(&self, sequence: &Sequence) -> Option<Source> {
        let request = sequence.request();
        let source = || self.slots.source(&request.caller, &request.prompt);
        self.may_reuse(sequence).then(source).flatten()
    }

    /// Gives the sequence in `slot` the rows of its prompt that `source` holds beyond its own.
    fn reuse(&mut self, slot: usize, source: Option<Source>) {
        let (Some(source), Some(sequence)) = (source, self.slots.sequence(slot)) else {
            return;
        };
        let seen = sequence.draft.seen();
        let draft_rows = source.draft_rows.max(seen);
        // A short piece that the draft lacks is fed for both models; a long one, behind which little is left, later and for the draft alone.
        let lacking = source.tokens - draft_rows.min(source.tokens);
        let rest = sequence.request().prompt.len() - source.tokens;
        let drafts = self.speculation.obstacle(sequence).is_none();
        let tokens = if drafts && lacking <= rest {
            draft_rows.min(source.tokens)
        } else {
            source.tokens
        };
        let cached = sequence.cached();
        if tokens <= cached {
            return;
        }
        let context = sequence.draft.context;
        let draft_rows = if source.draft_rows > seen {
            context..source.draft_rows.min(tokens)
        } else {
            context..context
        };
        self.copy_rows(source.slot, slot, cached..tokens, draft_rows.clone());
        self.slots.note_use(source.slot, tokens);
        if let Some(sequence) = self.slots.sequence_mut(slot) {
            sequence.set_cached(tokens);
            if !draft_rows.is_empty() {
                sequence.draft.adopt(draft_rows.end);
            }
        }
        metrics::counter!("outrider_prefix_cache_tokens_total").increment((tokens - cached) as u64);
    }

    fn copy_rows(&mut self, from: usize, to: usize, rows: Range<usize>, draft: Range<usize>) {
        if from != to {
            self.target.copy_rows(from, to, rows);
            if !draft.is_empty() {
                self.speculation.copy_rows(from, to, draft);
            }
        }
    }

    /// Rows of the slots that are valid.
    pub(super) fn kv_rows(&self) -> KvRows {
        self.slots.kv_rows()
    }

    /// Sequences of `caller` that hold a slot.
    pub(super) fn running_of(&self, caller: &str) -> usize {
        let sequences = self.slots.running();
        sequences
            .filter(|(_, sequence)| &*sequence.request().caller == caller)
            .count()
    }

    /// How long each slot was held that has become free since this was last asked.
    pub(super) fn take_occupancies(&mut self) -> Vec<Duration> {
        std::mem::take(&mut self.occupancies)
    }

    /// Frees the slot of a sequence that has ended; `sound` says whether what it has computed can be built upon.
    fn release(&mut self, slot: usize, sound: bool) {
        if let Some(sequence) = self.slots.sequence(slot) {
            let now = self.clock.now();
            self.occupancies
                .push(now.saturating_duration_since(sequence.admitted()));
        }
        self.slots.end(slot, sound && self.prefix_cache);
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
        for slot in self.slots_where(ends) {
            if let Some(sequence) = self.slots.sequence_mut(slot) {
                end(sequence);
            }
            self.release(slot, true);
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
        let decoding = self.slots_where(|sequence| !sequence.is_prefilling());
        while budget > 0 {
            let Some((slot, batch)) = self.prefill_batch(budget) else {
                break;
            };
            let fed = batch.rows[0].tokens.len();
            budget -= fed.min(budget);
            report.prefill_tokens += fed;
            let time = self.run_pass(PassKind::Feed, &batch, &[slot], &mut report);
            self.speculation.record_feed(fed, time);
            report.prefill_time += time;
        }
        for &slot in &decoding {
            while let Some(batch) = self.catch_up_batch(slot, budget) {
                let start = batch.rows[0].start;
                budget -= batch.rows[0].tokens.len().min(budget);
                let time = self.run_pass(PassKind::Feed, &batch, &[slot], &mut report);
                report.prefill_time += time;
                let sequence = self.slots.sequence(slot);
                if sequence.is_none_or(|sequence| sequence.draft.seen() == start) {
                    // The draft pass failed, and the next step is soon enough to try another one.
                    break;
                }
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
        slots.retain(|&slot| self.slots.sequence(slot).is_some());
        slots
    }

    /// The next chunk of the prompt whose turn it is; the turn passes on.
    fn prefill_batch(&mut self, budget: usize) -> Option<(usize, Batch)> {
        let slot = self.slots.take_turn()?;
        // Another sequence may have fed the same chunk since this one was admitted.
        let source = self.source(self.slots.sequence(slot)?);
        self.reuse(slot, source);
        let sequence = self.slots.sequence(slot)?;
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
        let sequence = self.slots.sequence(slot)?;
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

    fn slots_where(&self, holds: impl Fn(&Sequence) -> bool) -> Vec<usize> {
        let running = self.slots.running();
        running
            .filter(|(_, sequence)| holds(sequence))
            .map(|(slot, _)| slot)
            .collect()
    }

    /// One row for each of `slots`, over the range that holds them; what lies between takes no part and keeps its cache rows.
    fn decode_batch(&mut self, slots: &[usize]) -> Option<Batch> {
        let range = *slots.first()?..slots.last()? + 1;
        let mut taps = false;
        for &slot in slots {
            let Some(sequence) = self.slots.sequence_mut(slot) else {
                continue;
            };
            if let Some(cause) = self.speculation.obstacle(sequence) {
                sequence.draft.proposal.clear();
                // The failure that suspends drafting is the cause of the step right behind it.
                if !sequence.draft.plain.is_failure() {
                    sequence.draft.plain = cause;
                }
            }
            // What was drafted is checked as far as the plan for this step goes, which may have been made later.
            let planned = self.speculation.planned_tokens();
            if planned == 0 && !sequence.draft.proposal.is_empty() {
                sequence.draft.plain = PlainCause::NotWorthwhile;
            }
            sequence.draft.proposal.truncate(planned);
            if sequence.draft.proposal.is_empty() {
                let cause = std::mem::replace(&mut sequence.draft.plain, PlainCause::CatchingUp);
                metrics::counter!("outrider_plain_steps_total", "cause" => cause.as_str())
                    .increment(1);
            }
        }
        for &slot in slots {
            if let Some(sequence) = self.slots.sequence(slot) {
                taps |= self.feeds_draft(sequence, sequence.cached());
            }
        }
        let rows = range.clone().map(|slot| match self.slots.sequence(slot) {
            Some(sequence) if slots.contains(&slot) => {
                let mut tokens = sequence.pending().to_vec();
                let first_logits = tokens.len() - 1;
                tokens.extend(&sequence.draft.proposal);
                BatchRow {
                    start: sequence.cached(),
                    logits: first_logits..tokens.len(),
                    tokens,
                }
            }
            Some(sequence) => BatchRow::gap(sequence.cached()),
            None => BatchRow::gap(self.slots.kept_rows(slot)),
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
            let row_index = slot - batch.first_slot;
            let (progress, committed) = match &fault {
                Some(fault) => (Err(EngineError::StepFailed(fault.clone())), 0),
                None => catch_unwind(AssertUnwindSafe(|| {
                    self.commit_row(slot, row_index, &batch.rows[row_index])
                }))
                .unwrap_or_else(|panic| {
                    let fault = panic_text(panic.as_ref());
                    (Err(EngineError::StepFailed(fault)), 0)
                }),
            };
            report.committed_tokens += committed;
            match progress {
                Ok(progress) => {
                    if progress == Progress::Finished {
                        self.release(slot, true);
                    }
                }
                Err(error) => {
                    report.failed += 1;
                    if let Some(sequence) = self.slots.sequence_mut(slot) {
                        tracing::warn!(
                            parent: sequence.request().trace.request(),
                            completion = sequence.request().id,
                            %error,
                            "completion failed"
                        );
                        sequence.fail(error);
                    }
                    self.release(slot, false);
                }
            }
        }
        if fault.is_none() {
            if kind == PassKind::Decode {
                let width = batch.rows.iter().map(|row| row.tokens.len()).max();
                let slots_in_pass = batch.rows.len();
                let width = width.unwrap_or(0);
                metrics::histogram!("outrider_step_width_tokens").record(width as f64);
                // With what was chosen from its rows, of which a wide pass has more.
                self.speculation
                    .record_target(slots_in_pass, width, started.elapsed());
                let running = slots.iter().filter_map(|&slot| self.slots.sequence(slot));
                self.speculation.plan(slots_in_pass, running);
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
        let rows = entries.behind_mut(batch.first_slot).zip(&batch.rows);
        let parts = rows.enumerate().map(|(index, (entry, row))| match entry {
            Slot::Idle(kept) => Part::Idle {
                draft_rows: kept.draft_rows(),
            },
            Slot::Running { sequence, .. } => {
                let took_part = slots.contains(&(batch.first_slot + index));
                Part::Running {
                    sequence,
                    fed: took_part.then_some((row.start, row.tokens.len())),
                }
            }
        });
        speculation.draft(batch.first_slot, parts, target.taps())
    }

    /// Commits what a pass found for the sequence in `slot`, and counts what became of its drafted tokens; with how many tokens it committed, also before
    /// a fault.
    fn commit_row(
        &mut self,
        slot: usize,
        index: usize,
        row: &BatchRow,
    ) -> (Result<Progress, EngineError>, usize) {
        let now = self.clock.now();
        let Self {
            slots,
            sampler,
            target,
            speculation,
            eos,
            ..
        } = self;
        let Some(sequence) = slots.sequence_mut(slot) else {
            return (Ok(Progress::Running), 0);
        };
        let end = row.start + row.tokens.len();
        if end <= sequence.cached() {
            // The rows were fed before; this pass was for their taps.
            return (Ok(Progress::Running), 0);
        }
        let drafted = row.tokens.len().saturating_sub(sequence.pending().len());
        let mut walk = Walk {
            target: &**target,
            sampler,
            eos,
            now,
            committed: 0,
            accepted: 0,
        };
        if drafted == 0 {
            let progress = walk.run(sequence, index, row);
            return (progress, walk.committed);
        }
        sequence.record_drafted(drafted);
        let progress = walk.run(sequence, index, row);
        metrics::counter!("outrider_speculative_steps_total").increment(1);
        metrics::counter!("outrider_drafted_tokens_total").increment(drafted as u64);
        for position in 1..=walk.accepted {
            metrics::counter!("outrider_accepted_tokens_total", "position" => position.to_string())
                .increment(1);
        }
        metrics::histogram!("outrider_acceptance_length_tokens").record(walk.committed as f64);
        if matches!(progress, Ok(Progress::Running)) {
            speculation.record_acceptance(sequence, drafted, walk.accepted);
        }
        (progress, walk.committed)
    }
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
