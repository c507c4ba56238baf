//! A deterministic model without ONNX Runtime: one token for each byte, and answers that a test scripts or that spell letters.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use outrider_server::engine::{
    Drafting, EngineLimits, EngineStatus, Event, FinishReason, KvRows, LosslessClass, ModelLimits,
    Phase, Request, SpeculationError, SpeculationStatus, SpeculativeUsage, SubmitError,
    TokenLogprobs, Trace, Usage,
};
use outrider_server::http::backend::{Backend, DraftCard, ModelCard};
use outrider_server::text::{ChatError, ChatMessage, EncodeError};
use serde_json::{Map, Value};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

pub const CONTEXT_TOKENS: usize = 200;
/// Bytes, then `EOS`, then `THE`, a token of several characters.
pub const VOCAB_SIZE: usize = 258;
pub const EOS: u32 = 256;
pub const THE: u32 = 257;

type Answer = Box<dyn Fn(&Request) -> Result<UnboundedReceiver<Event>, SubmitError> + Send + Sync>;

pub struct FakeBackend {
    card: ModelCard,
    answer: Answer,
    requests: Mutex<Vec<Request>>,
    status: Mutex<EngineStatus>,
    speculation: AtomicBool,
    /// The limits that were set last.
    pub engine_limits: Mutex<Option<EngineLimits>>,
    encoding: AtomicUsize,
    /// Most prompts that were encoded at the same time.
    pub most_encoding: AtomicUsize,
    /// Called when a prompt is to be encoded.
    pub on_encode: Box<dyn Fn() + Send + Sync>,
    /// Called when the engine is told to stop.
    pub on_stop: Box<dyn Fn() + Send + Sync>,
}

impl FakeBackend {
    /// Answers every request with letters that depend on its seed.
    pub fn new() -> Self {
        Self::answering(|request| Ok(finished(&letters(request))))
    }

    pub fn answering(
        answer: impl Fn(&Request) -> Result<UnboundedReceiver<Event>, SubmitError>
        + Send
        + Sync
        + 'static,
    ) -> Self {
        Self {
            card: ModelCard {
                name: "fake".to_owned(),
                bundle_digest: "0123456789abcdef".repeat(4),
                generation: outrider_bundle::manifest::GenerationDefaults {
                    eos_token_ids: vec![EOS],
                    temperature: Some(0.5),
                    top_p: Some(0.75),
                    top_k: Some(40),
                    min_p: Some(0.125),
                    repetition_penalty: Some(1.25),
                },
                draft: Err("the bundle has no draft".to_owned()),
            },
            answer: Box::new(answer),
            requests: Mutex::default(),
            status: Mutex::new(EngineStatus {
                phase: Phase::Ready,
                detail: "serving".to_owned(),
                heartbeat_age: Duration::from_millis(250),
                lossless: Some(LosslessClass::Exact),
                running: 1,
                slots: 8,
                kv_rows: KvRows {
                    capacity: 1000,
                    running: 30,
                    kept: 200,
                },
                waiting: 2,
                speculation: Some(SpeculationStatus {
                    drafting: Drafting::Unavailable,
                    detail: "/srv/model has no draft".to_owned(),
                    block_size: None,
                }),
            }),
            speculation: AtomicBool::new(true),
            engine_limits: Mutex::default(),
            encoding: AtomicUsize::new(0),
            most_encoding: AtomicUsize::new(0),
            on_encode: Box::new(|| {}),
            on_stop: Box::new(|| {}),
        }
    }

    /// Every answer is these events.
    pub fn scripted(events: Vec<Event>) -> Self {
        Self::answering(move |_| Ok(finished(&events)))
    }

    pub fn with_draft(mut self) -> Self {
        self.card.draft = Ok(DraftCard {
            architecture: "DFlash2DraftModel".to_owned(),
            block_size: 8,
            candidate_topk: 4,
            adaptive_width: true,
        });
        self.set_status(|status| {
            status.speculation = Some(SpeculationStatus {
                drafting: Drafting::On,
                detail: String::new(),
                block_size: Some(8),
            });
        });
        self
    }

    pub fn set_status(&self, change: impl FnOnce(&mut EngineStatus)) {
        change(&mut self.status.lock().unwrap());
    }

    /// The requests submitted so far.
    pub fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }
}

/// What the engine says of a request that does not fit.
fn check(request: &Request) -> Result<(), SubmitError> {
    let prompt_tokens = request.prompt.len();
    let room = usize::from(request.max_tokens > 0);
    if prompt_tokens == 0 {
        return Err(SubmitError::EmptyPrompt);
    }
    if prompt_tokens + room > CONTEXT_TOKENS {
        return Err(SubmitError::PromptTooLong {
            prompt_tokens,
            limit_tokens: CONTEXT_TOKENS - room,
        });
    }
    if prompt_tokens + request.max_tokens > CONTEXT_TOKENS {
        return Err(SubmitError::ContextExceeded {
            prompt_tokens,
            max_tokens: request.max_tokens,
            context_tokens: CONTEXT_TOKENS,
        });
    }
    Ok(())
}

impl Backend for FakeBackend {
    fn card(&self) -> &ModelCard {
        &self.card
    }

    fn limits(&self) -> ModelLimits {
        ModelLimits {
            context_tokens: CONTEXT_TOKENS,
            vocab_size: VOCAB_SIZE,
        }
    }

    fn status(&self) -> EngineStatus {
        self.status.lock().unwrap().clone()
    }

    fn submit(
        &self,
        requests: &mut dyn Iterator<Item = Request>,
    ) -> Result<Vec<UnboundedReceiver<Event>>, (usize, SubmitError)> {
        let submit_one = |(index, request): (usize, Request)| {
            check(&request).map_err(|error| (index, error))?;
            self.requests.lock().unwrap().push(Request {
                // A span ends when the last who knows of it is gone.
                trace: Trace::default(),
                ..request.clone()
            });
            (self.answer)(&request).map_err(|error| (index, error))
        };
        requests.enumerate().map(submit_one).collect()
    }

    fn speculation(&self) -> bool {
        self.speculation.load(Ordering::SeqCst)
    }

    fn set_speculation(&self, enabled: bool) -> Result<(), SpeculationError> {
        let mut status = self.status.lock().unwrap();
        match &mut status.speculation {
            None => return Err(SpeculationError::NotReady),
            Some(speculation) if speculation.drafting == Drafting::Unavailable => {
                if enabled {
                    return Err(SpeculationError::Unavailable(speculation.detail.clone()));
                }
            }
            Some(speculation) => {
                speculation.drafting = if enabled { Drafting::On } else { Drafting::Off };
            }
        }
        self.speculation.store(enabled, Ordering::SeqCst);
        Ok(())
    }

    fn set_limits(&self, limits: EngineLimits) {
        *self.engine_limits.lock().unwrap() = Some(limits);
    }

    fn stop(&self) {
        (self.on_stop)();
    }

    fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, EncodeError> {
        let now = self.encoding.fetch_add(1, Ordering::SeqCst) + 1;
        self.most_encoding.fetch_max(now, Ordering::SeqCst);
        (self.on_encode)();
        // Gives others that are let in the chance to be seen.
        (0..text.len()).for_each(|_| std::thread::yield_now());
        self.encoding.fetch_sub(1, Ordering::SeqCst);
        Ok(bytes(text))
    }

    fn encode_chat(
        &self,
        messages: &[ChatMessage],
        kwargs: Map<String, Value>,
    ) -> Result<Vec<u32>, ChatError> {
        if messages.iter().any(|message| message.role == "tool") {
            return Err(ChatError::Template(
                "this model takes no tool messages".to_owned(),
            ));
        }
        if kwargs.contains_key("messages") {
            return Err(ChatError::ReservedKwarg("messages".to_owned()));
        }
        let mut rendered: String = messages
            .iter()
            .map(|message| {
                format!(
                    "{}: {}\n",
                    message.name.as_ref().unwrap_or(&message.role),
                    message.content
                )
            })
            .collect();
        for (name, value) in kwargs {
            rendered.push_str(&format!("[{name}={value}]\n"));
        }
        Ok(bytes(&rendered))
    }

    fn token_bytes(&self, id: u32) -> Vec<u8> {
        match id {
            EOS => b"<eos>".to_vec(),
            THE => b"the".to_vec(),
            byte => vec![u8::try_from(byte).unwrap()],
        }
    }
}

pub fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// Letters that depend on the seed, as many as were asked for, with log-probabilities that depend on the position.
pub fn letters(request: &Request) -> Vec<Event> {
    let logprobs = |position: usize, id: u32, top: usize| TokenLogprobs {
        id,
        logprob: -(position as f32 + 1.0) / 4.0,
        top: (0..top as u32)
            .map(|rank| (id + rank, -(position as f32 + 1.0 + rank as f32) / 4.0))
            .collect(),
    };
    let mut events = Vec::new();
    if let Some(top) = request.prompt_logprobs {
        let scored = request.prompt.iter().enumerate().skip(1);
        events.push(Event::Prompt(
            scored
                .map(|(position, id)| logprobs(position, *id, top))
                .collect(),
        ));
    }
    let first = u32::from(b'a') + (request.seed % 20) as u32;
    for position in 0..request.max_tokens {
        let id = first + (position % 5) as u32;
        events.push(Event::Token {
            id,
            text: char::from_u32(id).unwrap().to_string(),
            logprobs: request.logprobs.map(|top| logprobs(position, id, top)),
        });
    }
    events.push(Event::Finished {
        reason: FinishReason::Length,
        text: String::new(),
        usage: Usage {
            prompt_tokens: request.prompt.len(),
            cached_tokens: request.prompt.len() - 1,
            completion_tokens: request.max_tokens,
            speculative: drafted(request),
        },
    });
    events
}

/// What a drafter might have done for a request.
fn drafted(request: &Request) -> SpeculativeUsage {
    if request.speculative {
        SpeculativeUsage {
            drafted_tokens: 7,
            accepted_tokens: 3,
            steps: 2,
        }
    } else {
        SpeculativeUsage::default()
    }
}

/// A channel that holds `events` and nothing more.
pub fn finished(events: &[Event]) -> UnboundedReceiver<Event> {
    let (sender, receiver) = unbounded_channel();
    for event in events {
        sender.send(event.clone()).unwrap();
    }
    receiver
}

/// An answer whose events the test sends itself; every submission hands the test its sender.
pub fn held() -> (
    FakeBackend,
    std::sync::mpsc::Receiver<UnboundedSender<Event>>,
) {
    let (senders, taken) = std::sync::mpsc::channel();
    let backend = FakeBackend::answering(move |_| {
        let (sender, receiver) = unbounded_channel();
        senders.send(sender).unwrap();
        Ok(receiver)
    });
    (backend, taken)
}

pub fn token(text: &str) -> Event {
    Event::Token {
        id: u32::from(text.bytes().next().unwrap_or(b' ')),
        text: text.to_owned(),
        logprobs: None,
    }
}

pub fn stopped(text: &str, completion_tokens: usize) -> Event {
    Event::Finished {
        reason: FinishReason::Stop,
        text: text.to_owned(),
        usage: Usage {
            prompt_tokens: 2,
            cached_tokens: 0,
            completion_tokens,
            speculative: SpeculativeUsage::default(),
        },
    }
}
