//! Drafters: models that propose the tokens behind the newest one, for the target to check in one pass.
//!
//! A drafter owns the draft context of every slot, a pure function of the target's taps for the tokens a sequence has kept.
//! It proposes and nothing else: what is kept is decided by the target alone, so a proposal can cost time and never change a token.
//!
//! The engine calls [`Drafter::draft`] right after the target pass whose taps it wants appended, over the same range of slots,
//! so that the taps need no copy: they are read where the target left them.

#[cfg(test)]
pub(crate) mod fake;

use std::ops::Range;

use crate::model::Taps;

/// What the engine needs to know of a loaded drafter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DrafterShape {
    /// Slots, as many as the target has.
    pub slots: usize,
    /// Positions the drafter can work at run from 0 to this, exclusive; a block must end before it.
    pub context_tokens: usize,
    /// Widest block in tokens, the anchor included; at least 2.
    pub block_size: usize,
    /// Columns of the taps it reads.
    pub tap_size: usize,
}

/// The part of one slot in a draft pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DraftRow {
    /// Context rows of the slot that stay valid; rows behind them are forgotten.
    pub context_start: usize,
    /// Tap rows of the slot, from its first one in the pass on, that are appended to the context; 0 for a slot that takes no part.
    pub context_rows: usize,
    /// The block to propose, at position `context_start + context_rows`; `None` only appends.
    pub block: Option<Block>,
}

impl DraftRow {
    /// A row for a slot that lies between others but takes no part; `valid` of its context rows stay as they are.
    pub fn gap(valid: usize) -> Self {
        Self {
            context_start: valid,
            context_rows: 0,
            block: None,
        }
    }

    /// Position of the anchor.
    pub fn anchor_position(&self) -> usize {
        self.context_start + self.context_rows
    }
}

/// A block to propose.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Block {
    /// The newest token of the sequence, which the target has not seen yet.
    pub anchor: u32,
    /// Tokens of the block, the anchor included: from 2 to [`DrafterShape::block_size`].
    pub width: usize,
    /// 0 walks to the best candidate; above 0 the walk shares the target's noise.
    pub temperature: f32,
    /// Noise key of the request.
    pub seed: u64,
}

/// One draft pass over consecutive slots.
#[derive(Clone, Debug, PartialEq)]
pub struct DraftBatch {
    /// Slot of `rows[0]`.
    pub first_slot: usize,
    /// One entry per slot.
    pub rows: Vec<DraftRow>,
}

/// A draft model that keeps the context of several sequences.
pub trait Drafter: Send {
    /// Sizes and limits.
    fn shape(&self) -> &DrafterShape;

    /// Appends taps to the contexts and proposes blocks. `taps` has one row per entry of `batch.rows`.
    ///
    /// # Errors
    ///
    /// The pass could not be run; the context rows it should have appended are then unspecified, those before are not.
    fn draft(&mut self, batch: &DraftBatch, taps: Taps<'_>) -> Result<(), DraftError>;

    /// Makes the context rows `rows` of slot `to` those of slot `from`; either may be one of the target's parking slots.
    ///
    /// # Panics
    ///
    /// There are no such slots or rows.
    fn copy_rows(&mut self, from: usize, to: usize, rows: Range<usize>);

    /// What the last pass proposed for `rows[row]`: at most `width - 1` tokens, fewer where the draft's logits stopped being finite.
    fn proposal(&self, row: usize) -> &[u32];
}

/// Why a draft pass could not be run.
#[derive(Debug, thiserror::Error)]
pub enum DraftError {
    /// A batch that the drafter can't run; a fault of the engine.
    #[error("draft batch refused: {0}")]
    Batch(String),
    /// ONNX Runtime reported an error.
    #[error("onnx runtime: {0}")]
    Ort(#[from] ort::Error),
}
