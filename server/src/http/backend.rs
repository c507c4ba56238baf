//! What the HTTP layer needs from the layers below, as one trait, so that routes are tested with a fake model.

use std::time::Duration;

use outrider_bundle::manifest::GenerationDefaults;
use serde_json::{Map, Value};
use tokio::sync::mpsc::UnboundedReceiver;

use crate::engine::{
    EngineLimits, EngineStatus, Event, ModelLimits, Phase, Request, SpeculationError, SubmitError,
};
use crate::text::{ChatError, ChatMessage, EncodeError};

/// A loaded model that takes requests.
pub trait Backend: Send + Sync + 'static {
    /// Who the model is.
    fn card(&self) -> &ModelCard;

    /// What the model accepts.
    fn limits(&self) -> ModelLimits;

    /// How the engine is.
    fn status(&self) -> EngineStatus;

    /// Time since the engine last came round its loop; `None` while it is loading. It must not wait for the engine.
    fn heartbeat_age(&self) -> Option<Duration> {
        let status = self.status();
        (status.phase == Phase::Ready).then_some(status.heartbeat_age)
    }

    /// Validates and queues the completions of one request, all or none, and takes none behind one that does not fit; dropping a receiver cancels its
    /// completion.
    ///
    /// # Errors
    ///
    /// Why there are none, with the index of the completion that does not fit the model where it is one.
    fn submit(
        &self,
        requests: &mut dyn Iterator<Item = Request>,
    ) -> Result<Vec<UnboundedReceiver<Event>>, (usize, SubmitError)>;

    /// Whether drafting is switched on. It may be so and yet nothing be drafted, see [`EngineStatus::speculation`].
    fn speculation(&self) -> bool;

    /// Switches drafting on or off from the next step on.
    fn set_speculation(&self, enabled: bool) -> Result<(), SpeculationError>;

    /// Changes the engine's limits from the next step on, for requests that wait or run as well.
    fn set_limits(&self, limits: EngineLimits);

    /// Ends the engine after its current step; requests that wait or run fail.
    fn stop(&self);

    /// Tokens of a plain prompt, with a beginning-of-sequence token where the model wants one.
    fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, EncodeError>;

    /// Tokens of a conversation rendered by the model's chat template, ready for the assistant's answer.
    fn encode_chat(
        &self,
        messages: &[ChatMessage],
        kwargs: Map<String, Value>,
    ) -> Result<Vec<u32>, ChatError>;

    /// The bytes a token stands for; not always whole characters.
    fn token_bytes(&self, id: u32) -> Vec<u8>;
}

/// Who a loaded model is.
#[derive(Clone, Debug)]
pub struct ModelCard {
    /// The name callers use.
    pub name: String,
    /// Lower-case hexadecimal SHA-256 of the bundle manifest.
    pub bundle_digest: String,
    /// Values for request fields that are left out.
    pub generation: GenerationDefaults,
    /// The draft beside it, or why there is none, in words for callers: nothing of the inside.
    pub draft: Result<DraftCard, String>,
}

/// Who a loaded draft is.
#[derive(Clone, Debug)]
pub struct DraftCard {
    /// Its architecture, as the manifest names it.
    pub architecture: String,
    /// Tokens of its widest block in use, the anchor included.
    pub block_size: usize,
    /// Candidates per position in use.
    pub candidate_topk: usize,
    /// Whether less than a block is checked, or nothing, where that is faster.
    pub adaptive_width: bool,
}
