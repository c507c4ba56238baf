//! Request bodies, up to where the engine takes over.

use std::sync::LazyLock;
use std::time::Duration;

use outrider_bundle::manifest::GenerationDefaults;
use outrider_server::engine::{
    EngineLimits, EngineStatus, Event, KvRows, ModelLimits, Phase, Request, SpeculationError,
    SubmitError,
};
use outrider_server::http::backend::{Backend, ModelCard};
use outrider_server::http::error::ApiError;
use outrider_server::http::{chat_prompts, completion_prompts};
use outrider_server::text::{ChatError, ChatMessage, EncodeError, Text};
use serde_json::{Map, Value};
use tokio::sync::mpsc::UnboundedReceiver;

use super::text;

/// Most completions of one request, as the server's default is.
const MAX_COMPLETIONS: usize = 8;
/// Rows of the vocabulary; more than the tokenizer has.
const VOCAB_SIZE: usize = 1000;

/// A model that reads and writes text and computes nothing.
struct TextOnly {
    card: ModelCard,
    text: Text,
}

static MODEL: LazyLock<TextOnly> = LazyLock::new(|| TextOnly {
    card: ModelCard {
        name: "m".to_owned(),
        bundle_digest: "0".repeat(64),
        generation: GenerationDefaults::default(),
        draft: Err("the bundle has no draft".to_owned()),
    },
    text: text::load("byte-level", Some(&text::template("features"))),
});

/// A body of `/v1/chat/completions`.
pub fn chat(input: &[u8]) -> bool {
    check(chat_prompts(&*MODEL, input, MAX_COMPLETIONS))
}

/// A body of `/v1/completions`.
pub fn completion(input: &[u8]) -> bool {
    check(completion_prompts(&*MODEL, input, MAX_COMPLETIONS))
}

fn check(prompts: Result<Vec<Vec<u32>>, ApiError>) -> bool {
    match prompts {
        Ok(prompts) => {
            assert!((1..=MAX_COMPLETIONS).contains(&prompts.len()));
            assert!(
                prompts
                    .iter()
                    .flatten()
                    .all(|&id| (id as usize) < VOCAB_SIZE)
            );
            true
        }
        Err(error) => {
            let code = error.code();
            assert!(
                code.status().is_client_error(),
                "{code:?} for what the client sent: {:?}",
                error.log()
            );
            let body = serde_json::to_string(&error.body()).expect("an error can be written");
            assert!(body.len() < 4096, "the error is {} bytes long", body.len());
            false
        }
    }
}

impl Backend for TextOnly {
    fn card(&self) -> &ModelCard {
        &self.card
    }

    fn limits(&self) -> ModelLimits {
        ModelLimits {
            context_tokens: 4096,
            vocab_size: VOCAB_SIZE,
        }
    }

    fn status(&self) -> EngineStatus {
        EngineStatus {
            phase: Phase::Ready,
            detail: String::new(),
            heartbeat_age: Duration::ZERO,
            lossless: None,
            running: 0,
            slots: 1,
            kv_rows: KvRows::default(),
            waiting: 0,
            speculation: None,
        }
    }

    fn submit(
        &self,
        _requests: &mut dyn Iterator<Item = Request>,
    ) -> Result<Vec<UnboundedReceiver<Event>>, (usize, SubmitError)> {
        Err((0, SubmitError::EmptyPrompt))
    }

    fn speculation(&self) -> bool {
        false
    }

    fn set_speculation(&self, _enabled: bool) -> Result<(), SpeculationError> {
        Err(SpeculationError::NotReady)
    }

    fn set_limits(&self, _limits: EngineLimits) {}

    fn stop(&self) {}

    fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, EncodeError> {
        self.text.encode_prompt(text)
    }

    fn encode_chat(
        &self,
        messages: &[ChatMessage],
        kwargs: Map<String, Value>,
    ) -> Result<Vec<u32>, ChatError> {
        self.text.encode_chat(messages, kwargs)
    }

    fn token_bytes(&self, id: u32) -> Vec<u8> {
        self.text.token_bytes(id)
    }
}
