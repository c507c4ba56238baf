//! Drafting inside a step: which sequences get a block, how wide, and what happens when the drafter fails.
//!
//! Taps that the drafter has not seen yet, because drafting did not pay at the time, wait in a backlog of bounded length, so that it can be taken up again at once.
//!
//! Nothing here can change a token: a proposal is only ever compared with the target's choice, in [`super::step`].
//! A draft pass that fails costs its sequences one plain step each; passes that go on failing are suspended and tried again later.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use super::sequence::Sequence;
use super::status::{Drafting, SpeculationStatus};
use super::step::panic_text;
use super::width::{Acceptance, Members, WidthPolicy};
use crate::draft::{Block, DraftBatch, DraftRow, Drafter};
use crate::model::Taps;

/// Failed draft passes in a row that suspend drafting.
const FAILURES_TO_SUSPEND: u32 = 3;

/// Steps that drafting is suspended for at first; doubled each time the pass that is tried afterwards fails as well.
const SUSPENSION_STEPS: u32 = 64;

/// Longest suspension in steps.
const LONGEST_SUSPENSION_STEPS: u32 = 4096;

/// Most tokens of a sequence whose taps wait for a draft pass.
const BACKLOG_TOKENS: usize = 64;

/// What the loader found in the place of a draft.
pub enum Draft {
    /// A drafter for the same slots as the target's.
    Loaded(Box<dyn Drafter>),
    /// None, and why; for operators.
    Unavailable(String),
}

/// Why a sequence took a step without drafted tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlainCause {
    /// No draft is loaded, or it can't be used.
    Unavailable,
    /// Drafting is switched off.
    Off,
    /// The request asked for none.
    Request,
    /// Drafting is suspended after repeated failures.
    Suspended,
    /// The draft pass failed.
    DraftError,
    /// The draft's logits were not finite.
    NonFinite,
    /// The sequence is at the end of the draft's context.
    Context,
    /// One token is left to generate.
    LastToken,
    /// The draft's context lags behind, after a failure or a time without drafting.
    CatchingUp,
    /// Measured costs and acceptance say that a plain step is faster.
    NotWorthwhile,
}

impl PlainCause {
    /// Every cause.
    pub const ALL: [Self; 10] = [
        Self::Unavailable,
        Self::Off,
        Self::Request,
        Self::Suspended,
        Self::DraftError,
        Self::NonFinite,
        Self::Context,
        Self::LastToken,
        Self::CatchingUp,
        Self::NotWorthwhile,
    ];

    /// Whether a draft pass brought nothing.
    pub(super) fn is_failure(self) -> bool {
        matches!(self, Self::DraftError | Self::NonFinite)
    }

    /// The name that metrics show.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unavailable => "unavailable",
            Self::Off => "off",
            Self::Request => "request",
            Self::Suspended => "suspended",
            Self::DraftError => "draft_error",
            Self::NonFinite => "non_finite",
            Self::Context => "context",
            Self::LastToken => "last_token",
            Self::CatchingUp => "catching_up",
            Self::NotWorthwhile => "not_worthwhile",
        }
    }
}

/// The draft side of one sequence.
#[derive(Debug)]
pub(super) struct SequenceDraft {
    /// Rows of the draft context that are valid: the taps of the first `context` tokens.
    pub context: usize,
    /// Taps of the tokens behind them that were kept, `[backlog_tokens, size]`.
    backlog: Vec<f32>,
    backlog_tokens: usize,
    /// Whether it does without to its end, since drafting did not pay when it began.
    pub rests: bool,
    /// How often its drafted tokens were accepted.
    pub acceptance: Acceptance,
    /// Tokens proposed for the positions behind the newest token.
    pub proposal: Vec<u32>,
    /// Why there is no proposal.
    pub plain: PlainCause,
}

impl Default for SequenceDraft {
    fn default() -> Self {
        Self {
            context: 0,
            backlog: Vec::new(),
            backlog_tokens: 0,
            rests: false,
            acceptance: Acceptance::default(),
            proposal: Vec::new(),
            plain: PlainCause::CatchingUp,
        }
    }
}

impl SequenceDraft {
    /// Tokens, from the first one on, whose taps are in the draft's context or wait for it.
    pub(super) fn seen(&self) -> usize {
        self.context + self.backlog_tokens
    }

    /// Records that the first `rows` rows are in the draft's context, put there by another sequence.
    pub(super) fn adopt(&mut self, rows: usize) {
        self.set_context(rows);
    }

    fn set_context(&mut self, rows: usize) {
        self.context = rows;
        self.backlog.clear();
        self.backlog_tokens = 0;
    }
}

/// What a slot of a target pass means to the draft pass behind it.
pub(super) enum Part<'s> {
    /// No sequence runs in it; its valid rows stay as they are.
    Idle {
        /// Valid rows.
        draft_rows: usize,
    },
    /// A sequence runs in it.
    Running {
        sequence: &'s mut Sequence,
        /// From which position how many of its tokens were fed, when it took part.
        fed: Option<(usize, usize)>,
    },
}

/// A sequence in a draft pass.
struct Member<'s> {
    /// Row of the pass.
    index: usize,
    /// Taps of the target pass that are appended for it.
    new_taps: usize,
    sequence: &'s mut Sequence,
}

/// The drafter and whether it is used.
pub(super) struct Speculation {
    drafter: Option<Box<dyn Drafter>>,
    /// Why there is no drafter; empty when there is one.
    absence: String,
    block_size: usize,
    enabled: bool,
    breaker: Breaker,
    policy: WidthPolicy,
    /// Width of the next step over all decoding sequences.
    planned_width: usize,
}

/// Suspends drafting after repeated failures.
#[derive(Debug, Default)]
struct Breaker {
    failures: u32,
    /// Steps left of the suspension; 0 lets passes through.
    wait: u32,
    /// Length of the next suspension.
    next_wait: u32,
    fault: String,
}

impl Breaker {
    fn record_failure(&mut self, fault: String) {
        self.failures += 1;
        self.fault = fault;
        if self.failures >= FAILURES_TO_SUSPEND {
            self.next_wait = (self.next_wait * 2).clamp(SUSPENSION_STEPS, LONGEST_SUSPENSION_STEPS);
            self.wait = self.next_wait;
            tracing::error!(
                failures = self.failures,
                steps = self.wait,
                fault = self.fault,
                "drafting is suspended"
            );
        }
    }

    fn record_success(&mut self) {
        if self.failures >= FAILURES_TO_SUSPEND {
            tracing::info!("drafting works again");
        }
        *self = Self::default();
    }
}

impl Speculation {
    /// `block_size` narrows the drafter's own; `adaptive` lets measured costs choose how much of a block is checked.
    pub(super) fn new(draft: Draft, block_size: Option<usize>, adaptive: bool) -> Self {
        let (drafter, absence) = match draft {
            Draft::Loaded(drafter) => (Some(drafter), String::new()),
            Draft::Unavailable(reason) => (None, reason),
        };
        let widest = drafter
            .as_ref()
            .map_or(0, |drafter| drafter.shape().block_size);
        let slots = drafter.as_ref().map_or(0, |drafter| drafter.shape().slots);
        let block_size = block_size.map_or(widest, |size| size.min(widest));
        Self {
            drafter,
            absence,
            block_size,
            enabled: false,
            breaker: Breaker::default(),
            policy: WidthPolicy::new(adaptive, slots, block_size),
            planned_width: block_size,
        }
    }

    /// What operators are told while drafting is switched on.
    pub(super) fn status(&self) -> SpeculationStatus {
        let (drafting, detail) = self.ability();
        SpeculationStatus {
            drafting,
            detail: detail.to_owned(),
            block_size: self.drafter.as_ref().map(|_| self.block_size),
        }
    }

    /// Whether it drafts when it is switched on, and why not.
    pub(super) fn ability(&self) -> (Drafting, &str) {
        if self.drafter.is_none() {
            (Drafting::Unavailable, &self.absence)
        } else if self.breaker.wait > 0 {
            (Drafting::Suspended, &self.breaker.fault)
        } else {
            (Drafting::On, "")
        }
    }

    /// Makes the draft's rows `rows` of slot `to` those of slot `from`.
    pub(super) fn copy_rows(&mut self, from: usize, to: usize, rows: Range<usize>) {
        if let Some(drafter) = &mut self.drafter {
            drafter.copy_rows(from, to, rows);
        }
    }

    /// Starts a step with the switch as it is now.
    pub(super) fn begin_step(&mut self, enabled: bool) {
        self.enabled = enabled;
        self.breaker.wait = self.breaker.wait.saturating_sub(1);
    }

    /// Why `sequence` can't have drafted tokens at the moment; `None` when it can.
    pub(super) fn obstacle(&self, sequence: &Sequence) -> Option<PlainCause> {
        if !sequence.request().speculative {
            return Some(PlainCause::Request);
        }
        match self.ability().0 {
            Drafting::Unavailable => Some(PlainCause::Unavailable),
            _ if !self.enabled => Some(PlainCause::Off),
            Drafting::Suspended => Some(PlainCause::Suspended),
            // A block needs a row for the anchor and one for a candidate.
            _ if sequence.tokens() + 1 > self.context_tokens() => Some(PlainCause::Context),
            _ if sequence.draft.rests => Some(PlainCause::NotWorthwhile),
            _ => None,
        }
    }

    /// Drafted tokens that are checked in the next step.
    pub(super) fn planned_tokens(&self) -> usize {
        self.planned_width.saturating_sub(1)
    }

    /// Takes in what a target pass over all decoding sequences cost.
    pub(super) fn record_target(&mut self, slots: usize, width: usize, elapsed: Duration) {
        self.policy
            .record_target(slots, width, elapsed.as_secs_f64());
    }

    /// Takes in what it cost to feed so many tokens of a prompt.
    pub(super) fn record_feed(&mut self, tokens: usize, elapsed: Duration) {
        self.policy.record_feed(tokens, elapsed.as_secs_f64());
    }

    /// Takes in that so many tokens, for which the target has rows, are fed again for the draft of one of `running` sequences.
    pub(super) fn record_fed_again(&mut self, running: usize, tokens: usize) {
        self.policy.record_fed_again(running, tokens);
    }

    /// Takes in what became of drafted tokens.
    pub(super) fn record_acceptance(
        &mut self,
        sequence: &mut Sequence,
        checked: usize,
        accepted: usize,
    ) {
        sequence.draft.acceptance.record(checked, accepted);
        self.policy.record_acceptance(checked, accepted);
    }

    /// Decides whether `sequence`, which begins beside `others`, is to do without drafting to its end.
    pub(super) fn admit<'s>(
        &self,
        sequence: &mut Sequence,
        others: impl Iterator<Item = &'s Sequence>,
    ) {
        let (mut running, mut drafting) = (0, 0);
        for other in others {
            running += 1;
            drafting += usize::from(self.obstacle(other).is_none());
        }
        sequence.draft.rests = self.policy.lets_rest(running, drafting);
    }

    /// Plans the width of the next step over `slots` slots.
    pub(super) fn plan<'s>(&mut self, slots: usize, sequences: impl Iterator<Item = &'s Sequence>) {
        let mut members = Members::default();
        let mut reachable = 1;
        for sequence in sequences {
            match self.obstacle(sequence) {
                None => {
                    members.drafting.push(&sequence.draft.acceptance);
                    if sequence.remaining_tokens() > 1 {
                        reachable = reachable.max(sequence.remaining_tokens() + 1);
                    }
                }
                Some(PlainCause::NotWorthwhile) => members.resting += 1,
                Some(_) => members.plain += 1,
            }
        }
        if !members.drafting.is_empty() || members.resting > 0 {
            self.planned_width = self.policy.choose(slots, &members, reachable);
        }
    }

    /// Whether the taps of this row go into the backlog, and the draft pass is left out.
    fn waits(&self, row: &DraftRow) -> bool {
        self.planned_width == 1 && row.block.is_none() && row.context_rows <= BACKLOG_TOKENS
    }

    fn context_tokens(&self) -> usize {
        self.drafter
            .as_ref()
            .map_or(0, |drafter| drafter.shape().context_tokens)
    }

    /// What to draft for `sequence` after a pass that fed `fed` of its tokens from position `start` on.
    ///
    /// `None` when the pass is of no use to its draft context.
    fn row(&self, sequence: &Sequence, start: usize, fed: usize) -> Option<DraftRow> {
        if self.obstacle(sequence).is_some() || sequence.draft.seen() != start {
            return None;
        }
        let kept = sequence.cached().min(start + fed);
        let context_start = sequence.draft.context;
        let mut row = DraftRow {
            context_start,
            context_rows: kept - context_start,
            block: None,
        };
        let remaining = sequence.remaining_tokens();
        // With one token left the target's next pass gives it, whatever is drafted.
        if self.planned_width > 1 && kept + 1 == sequence.tokens() && remaining > 1 {
            let width = self
                .block_size
                .min(remaining + 1)
                .min(self.context_tokens() - row.anchor_position());
            let sampling = &sequence.request().sampling;
            row.block = Some(Block {
                anchor: sequence.newest_token(),
                width,
                temperature: sampling.temperature,
                seed: sequence.request().seed,
            });
        }
        Some(row)
    }

    /// Runs the draft pass behind a target pass over slots from `first_slot` on; `parts` has one entry per slot of the pass.
    ///
    /// Afterwards every sequence that took part holds a proposal or the reason why it has none.
    /// Returns the time in the drafter.
    pub(super) fn draft<'s>(
        &mut self,
        first_slot: usize,
        parts: impl Iterator<Item = Part<'s>>,
        taps: Taps<'_>,
    ) -> Duration {
        let started = Instant::now();
        let (mut batch, mut members) = self.gather(first_slot, parts, taps);
        let slots = batch.rows.len();
        let Some(taps) = narrow(&mut batch, &mut members, taps) else {
            return Duration::ZERO;
        };
        match self.run_draft(&batch, &members, taps) {
            Ok(()) => {
                let drafted = self.take_proposals(&batch, members);
                if drafted && taps.width <= self.block_size {
                    self.policy
                        .record_draft(slots, started.elapsed().as_secs_f64());
                }
            }
            Err(fault) => {
                tracing::warn!(fault, "a draft pass failed, going on without it");
                metrics::counter!("outrider_draft_errors_total", "cause" => "pass").increment(1);
                for member in members {
                    member.sequence.draft.plain = PlainCause::DraftError;
                }
                self.breaker.record_failure(fault);
            }
        }
        started.elapsed()
    }

    /// Makes the batch of a draft pass; as long as none of its sequences needs it yet, their taps are put by instead.
    fn gather<'s>(
        &self,
        first_slot: usize,
        parts: impl Iterator<Item = Part<'s>>,
        taps: Taps<'_>,
    ) -> (DraftBatch, Vec<Member<'s>>) {
        let mut rows = Vec::new();
        let mut wanted = Vec::new();
        for (index, part) in parts.enumerate() {
            let (sequence, fed) = match part {
                Part::Idle { draft_rows } => {
                    rows.push(DraftRow::gap(draft_rows));
                    continue;
                }
                Part::Running { sequence, fed } => (sequence, fed),
            };
            rows.push(DraftRow::gap(sequence.draft.context));
            let Some((start, fed)) = fed else {
                continue;
            };
            sequence.draft.proposal.clear();
            sequence.draft.plain = PlainCause::CatchingUp;
            if let Some(row) = self.row(sequence, start, fed) {
                let new_taps = row.anchor_position() - start;
                let member = Member {
                    index,
                    new_taps,
                    sequence,
                };
                wanted.push((row, member));
            }
        }
        let mut members = Vec::new();
        let all_wait = wanted.iter().all(|(row, _)| self.waits(row));
        for (row, member) in wanted {
            if all_wait {
                member.sequence.draft.plain = PlainCause::NotWorthwhile;
                let first = member.index * taps.width * taps.size;
                let values = &taps.values[first..first + member.new_taps * taps.size];
                member.sequence.draft.backlog.extend_from_slice(values);
                member.sequence.draft.backlog_tokens += member.new_taps;
            } else {
                rows[member.index] = row;
                members.push(member);
            }
        }
        (DraftBatch { first_slot, rows }, members)
    }

    /// Runs the pass; the error is what went wrong, a panic included.
    fn run_draft(
        &mut self,
        batch: &DraftBatch,
        members: &[Member<'_>],
        taps: Taps<'_>,
    ) -> Result<(), String> {
        let Some(drafter) = &mut self.drafter else {
            return Err("there is no drafter".to_owned());
        };
        let outcome = catch_unwind(AssertUnwindSafe(|| match joined(batch, members, taps) {
            None => drafter.draft(batch, taps),
            Some((values, width)) => drafter.draft(
                batch,
                Taps {
                    values: &values,
                    width,
                    ..taps
                },
            ),
        }));
        match outcome {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(panic) => Err(panic_text(panic.as_ref())),
        }
    }

    /// Hands out what a pass proposed; whether it was asked for a proposal at all.
    fn take_proposals(&mut self, batch: &DraftBatch, members: Vec<Member<'_>>) -> bool {
        let Some(drafter) = &self.drafter else {
            return false;
        };
        let (mut blocks, mut empty) = (0, 0);
        for Member {
            index, sequence, ..
        } in members
        {
            let row = &batch.rows[index];
            let draft = &mut sequence.draft;
            draft.set_context(row.anchor_position());
            let Some(block) = row.block else {
                draft.plain = if self.planned_width > 1 {
                    PlainCause::LastToken
                } else {
                    PlainCause::NotWorthwhile
                };
                continue;
            };
            blocks += 1;
            let proposal = drafter.proposal(index);
            draft
                .proposal
                .extend(&proposal[..proposal.len().min(block.width - 1)]);
            if draft.proposal.len() + 1 < block.width {
                metrics::counter!("outrider_draft_errors_total", "cause" => "non_finite")
                    .increment(1);
            }
            if draft.proposal.is_empty() {
                empty += 1;
                draft.plain = PlainCause::NonFinite;
            }
        }
        if blocks > 0 && empty == blocks {
            self.breaker
                .record_failure("the draft's logits are not finite".to_owned());
        } else if blocks > 0 {
            self.breaker.record_success();
        }
        blocks > 0
    }
}

/// Takes the slots off both ends of a pass that take no part in it, since every slot of its range is computed; `None` when none takes part.
fn narrow<'t>(
    batch: &mut DraftBatch,
    members: &mut [Member<'_>],
    taps: Taps<'t>,
) -> Option<Taps<'t>> {
    let first = members.first()?.index;
    let end = members.last()?.index + 1;
    batch.first_slot += first;
    batch.rows.truncate(end);
    batch.rows.drain(..first);
    for member in members {
        member.index -= first;
    }
    let row_values = taps.width * taps.size;
    Some(Taps {
        values: &taps.values[first * row_values..end * row_values],
        rows: end - first,
        ..taps
    })
}

/// Taps that waited, each with the new ones of its sequence behind them, as `[rows, width, size]`; `None` when none waited.
fn joined(batch: &DraftBatch, members: &[Member<'_>], taps: Taps<'_>) -> Option<(Vec<f32>, usize)> {
    if members
        .iter()
        .all(|member| member.sequence.draft.backlog_tokens == 0)
    {
        return None;
    }
    let width = batch.rows.iter().map(|row| row.context_rows).max()?;
    let size = taps.size;
    let mut values = vec![0.0; batch.rows.len() * width * size];
    for Member {
        index,
        new_taps,
        sequence,
    } in members
    {
        let waiting = &sequence.draft.backlog;
        let new = &taps.values[index * taps.width * size..][..new_taps * size];
        let row = &mut values[index * width * size..];
        row[..waiting.len()].copy_from_slice(waiting);
        row[waiting.len()..waiting.len() + new.len()].copy_from_slice(new);
    }
    Some((values, width))
}
