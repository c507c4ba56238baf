//! The models: their sessions, their KV memory, and the load-time proof of what the target's arithmetic can promise.
//!
//! The engine sees the [`Target`] trait only, and [`crate::draft::Drafter`] for the draft: it hands over a [`Batch`] of token rows for a range of slots and reads logits back.
//! This module decides nothing about requests, and holds the only unsafe code besides the operators: views of caller-owned memory for ONNX Runtime.

#[cfg(test)]
pub(crate) mod fake;
mod kv_slab;
mod memory;
pub mod onnx_draft;
pub mod onnx_target;
pub mod probe;
pub mod runtime;
pub mod session;

use std::ops::Range;

pub use onnx_draft::{DraftOptions, OnnxDraft};
pub use onnx_target::{OnnxTarget, TargetOptions};
pub use probe::{LosslessClass, ProbeReport, WidthRule};
pub use session::{ExecutionProvider, SessionOptions};

/// Bindings kept by a session. There is one for each range of slots, and each holds views of every layer's cache.
const MAX_BINDINGS: usize = 256;

/// What the engine needs to know of a loaded target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetShape {
    /// Sequences that can be run at once.
    pub slots: usize,
    /// Slots behind them that only keep rows, see [`Target::copy_rows`].
    pub parking_slots: usize,
    /// Longest sequence of a slot in tokens.
    pub context_tokens: usize,
    /// Most rows one sequence may feed in a batched step without running past its slot; prefill chunks of a lone sequence may be longer.
    pub headroom_tokens: usize,
    /// Columns of the logits.
    pub vocab_size: usize,
    /// Columns of the taps; 0 when the graph has none.
    pub tap_size: usize,
}

/// The rows one sequence feeds to a forward pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchRow {
    /// Position of the first token, which is also the number of cache rows that stay valid.
    pub start: usize,
    /// Tokens at positions `start`, `start + 1`, …; may be fewer than the width of the batch, and none for a slot that only fills a gap.
    pub tokens: Vec<u32>,
    /// Which of `tokens` need logits, by index.
    pub logits: Range<usize>,
}

impl BatchRow {
    /// A row for a slot that lies between others but takes no part in the step; `valid` of its cache rows stay as they are.
    pub fn gap(valid: usize) -> Self {
        Self {
            start: valid,
            tokens: Vec::new(),
            logits: 0..0,
        }
    }
}

/// One forward pass over consecutive slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Slot of `rows[0]`; `rows[i]` belongs to slot `first_slot + i`.
    pub first_slot: usize,
    /// One entry per slot.
    pub rows: Vec<BatchRow>,
    /// Rows of every sequence in the pass, padding included; at least the longest `tokens`.
    pub width: usize,
    /// Rows of logits per sequence, padding included; at least the longest `logits`.
    pub logit_width: usize,
    /// Whether the taps of all rows are wanted.
    pub taps: bool,
}

/// A target model that keeps the keys and values of several sequences.
///
/// A forward pass writes cache rows `start .. start + width` of each slot in the batch and leaves rows below `start` alone.
/// Rows that only served as padding, or that belong to rejected drafts, are taken back by passing a smaller `start` later.
pub trait Target: Send {
    /// Sizes and limits.
    fn shape(&self) -> &TargetShape;

    /// Runs one pass. Afterwards [`Target::logits`] and [`Target::taps`] refer to it.
    fn forward(&mut self, batch: &Batch) -> Result<(), ModelError>;

    /// Makes the cache rows `rows` of slot `to` those of slot `from`; either may be a parking slot.
    ///
    /// # Panics
    ///
    /// There are no such slots or rows.
    fn copy_rows(&mut self, from: usize, to: usize, rows: Range<usize>);

    /// Logits `[vocab_size]` of the `index`-th row asked for by `rows[row].logits` of the last batch.
    fn logits(&self, row: usize, index: usize) -> &[f32];

    /// Taps of the last batch.
    ///
    /// # Panics
    ///
    /// The batch did not ask for them.
    fn taps(&self) -> Taps<'_>;
}

/// Taps of one pass, `[rows, width, size]`, as the target left them in memory.
#[derive(Clone, Copy, Debug)]
pub struct Taps<'a> {
    /// The values.
    pub values: &'a [f32],
    /// Sequences of the pass.
    pub rows: usize,
    /// Rows of every sequence, padding included.
    pub width: usize,
    /// Columns: number of tapped layers times hidden size.
    pub size: usize,
}

impl<'a> Taps<'a> {
    /// Taps `[size]` of token `index` of sequence `row`.
    pub fn of(&self, row: usize, index: usize) -> &'a [f32] {
        assert!(
            row < self.rows && index < self.width,
            "taps {index} of row {row} were not computed"
        );
        &self.values[(row * self.width + index) * self.size..][..self.size]
    }
}

/// Checks the context that is configured, if any, against the model's `own`.
///
/// # Errors
///
/// The model does not support it.
pub fn check_context(configured: Option<usize>, own: usize) -> Result<(), String> {
    match configured {
        Some(tokens) if tokens == 0 || tokens > own => Err(format!(
            "serving.runtime.context_tokens is {tokens}; the model supports 1 to {own}"
        )),
        _ => Ok(()),
    }
}

/// Why a model can't be loaded or a pass can't be run.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The ONNX Runtime library.
    #[error(transparent)]
    Runtime(#[from] runtime::RuntimeError),
    /// The graph and the manifest disagree, or the graph lacks something.
    #[error("graph {graph}: {fault}")]
    Graph {
        /// Path of the graph inside the bundle.
        graph: String,
        /// What is wrong.
        fault: String,
    },
    /// The KV memory asked for is more than allowed.
    #[error(
        "the KV cache needs {needed_bytes} bytes ({slots} slots of {context_tokens} tokens); {allowed_bytes} are allowed: lower serving.runtime.max_concurrency, serving.runtime.prefix_cache_slots or serving.runtime.context_tokens, or raise serving.runtime.kv_cache_ratio"
    )]
    KvMemory {
        /// Bytes of the slab.
        needed_bytes: u64,
        /// Bytes that may be used.
        allowed_bytes: u64,
        /// Slots asked for, those of the prefix cache included.
        slots: usize,
        /// Tokens per slot asked for.
        context_tokens: usize,
    },
    /// A batch that the model can't run; a fault of the engine.
    #[error("batch refused: {0}")]
    Batch(String),
    /// The draft can't be used, and the configuration says that it must be.
    #[error("serving.speculative.required is true, but {0}")]
    DraftRequired(String),
    /// ONNX Runtime reported an error.
    #[error("onnx runtime: {0}")]
    Ort(#[from] ort::Error),
}
