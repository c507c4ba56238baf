//! What the engine says about itself to readiness, liveness and metrics.

use std::time::Duration;

use super::slots::KvRows;
pub use crate::model::LosslessClass;

/// What the loaded model accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelLimits {
    /// Most tokens of prompt and completion together.
    pub context_tokens: usize,
    /// Token ids run from 0 to this, exclusive.
    pub vocab_size: usize,
}

/// Where the engine is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Loading, probing or warming up.
    Starting,
    /// Serving.
    Ready,
    /// Stopped for good.
    Failed,
}

/// A snapshot of the engine.
#[derive(Clone, Debug)]
pub struct EngineStatus {
    /// Where it is in its life.
    pub phase: Phase,
    /// What it is doing, or why it failed; for operators.
    pub detail: String,
    /// Time since the engine thread last came round its loop.
    pub heartbeat_age: Duration,
    /// Result of the probe, once it ran.
    pub lossless: Option<LosslessClass>,
    /// Requests that hold a slot.
    pub running: usize,
    /// Slots that there are, once the model is loaded.
    pub slots: usize,
    /// Rows of KV memory, once the model is loaded.
    pub kv_rows: KvRows,
    /// Requests that wait for one.
    pub waiting: usize,
    /// Drafting, once the model is loaded.
    pub speculation: Option<SpeculationStatus>,
}

/// Whether the engine drafts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drafting {
    /// It can't: no draft is loaded, or it could not promise equal output.
    Unavailable,
    /// It is switched off.
    Off,
    /// It drafts.
    On,
    /// Draft passes failed repeatedly; a later one is tried by itself.
    Suspended,
}

impl Drafting {
    /// Every value.
    pub const ALL: [Self; 4] = [Self::Unavailable, Self::Off, Self::On, Self::Suspended];

    /// The name that interfaces show.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unavailable => "unavailable",
            Self::Off => "off",
            Self::On => "on",
            Self::Suspended => "suspended",
        }
    }
}

/// Drafting, as an operator wants to know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpeculationStatus {
    /// Whether the engine drafts.
    pub drafting: Drafting,
    /// Why it can't, or why it is suspended; empty otherwise.
    pub detail: String,
    /// Widest block in tokens, the anchor included, when a draft is loaded.
    pub block_size: Option<usize>,
}
