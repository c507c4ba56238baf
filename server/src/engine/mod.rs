//! The engine: one thread that owns the model and steps all running sequences together.
//!
//! It knows tokens, slots and steps; it does no network or file I/O and knows nothing of HTTP.
//! Callers hold an [`EngineHandle`] and receive [`Event`]s; dropping the receiver cancels the request.

pub mod request;
pub mod status;

pub use request::{
    EngineError, Event, FinishReason, Request, Sampling, SubmitError, TokenLogprobs, Usage,
};
pub use status::{EngineStatus, LosslessClass, ModelLimits, Phase};
