//! What the engine says about itself to readiness, liveness and metrics.

use std::time::Duration;

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
    /// Requests that wait for one.
    pub waiting: usize,
}
