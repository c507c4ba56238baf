//! What callers ask of the engine and what they get back.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::trace::Trace;

/// One request for one completion. A caller that wants `n` completions submits `n` requests with different seeds.
#[derive(Clone, Debug)]
pub struct Request {
    /// Name of the request in logs.
    pub id: String,
    /// Who asks; slots are shared out fairly between callers.
    pub caller: Arc<str>,
    /// When the request arrived, by the engine's clock; its deadline counts from here.
    pub arrived: Instant,
    /// Prompt token ids; never empty.
    pub prompt: Vec<u32>,
    /// Most tokens to generate, at least 1 (0 is allowed together with `prompt_logprobs`, for scoring a text).
    pub max_tokens: usize,
    /// How the next token is chosen.
    pub sampling: Sampling,
    /// Key of the noise generator; used only when `sampling.temperature` is above 0.
    pub seed: u64,
    /// Texts that end the completion; they never appear in it.
    pub stop: Vec<String>,
    /// Go on after an end-of-sequence token.
    pub ignore_eos: bool,
    /// Report the log-probability of each generated token and of this many most likely ones.
    pub logprobs: Option<usize>,
    /// The same for the prompt's tokens (the first one has none).
    pub prompt_logprobs: Option<usize>,
    /// Whether drafting may be used for this request.
    pub speculative: bool,
    /// Follows it through the engine.
    pub trace: Trace,
}

/// How the next token is chosen from the target's logits: a pure function of them, these values, the seed and the position.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 takes the most likely token; above 0 scales the logits before the noise is added.
    pub temperature: f32,
    /// Keep the smallest set of most likely tokens whose probabilities sum to at least this; 1 keeps all.
    pub top_p: f32,
    /// Keep this many most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Drop tokens whose probability is below this share of the largest one; 0 keeps all.
    pub min_p: f32,
    /// Subtracted once from every token generated before.
    pub presence_penalty: f32,
    /// Subtracted from a token once for each time it was generated before.
    pub frequency_penalty: f32,
    /// Divides positive and multiplies negative logits of tokens in the prompt or generated before; 1 does nothing.
    pub repetition_penalty: f32,
    /// Added to the logits of these tokens.
    pub logit_bias: Vec<(u32, f32)>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
        }
    }
}

/// What the engine tells the caller, in this order: at most one `Prompt`, any number of `Token`s, then one `Finished` or `Failed`.
#[derive(Clone, Debug)]
pub enum Event {
    /// Log-probabilities of prompt tokens 1, 2, … (token 0 has none), when `prompt_logprobs` asked for them.
    Prompt(Vec<TokenLogprobs>),
    /// One generated token was committed.
    Token {
        /// The token.
        id: u32,
        /// Text that became final with it: whole characters only, never part of a stop string; may be empty.
        text: String,
        /// Its log-probability, when `logprobs` asked for it.
        logprobs: Option<TokenLogprobs>,
    },
    /// The completion is complete.
    Finished {
        /// Why it ended.
        reason: FinishReason,
        /// Text that was held back until now.
        text: String,
        /// Token counts.
        usage: Usage,
    },
    /// The request failed; nothing follows.
    Failed(EngineError),
}

/// Log-probability of one token under the target's unmodified distribution, and the most likely alternatives.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// The token.
    pub id: u32,
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// The most likely tokens with theirs, most likely first, equal ones by lower id first.
    pub top: Vec<(u32, f32)>,
}

/// Why a completion ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop string or an end-of-sequence token.
    Stop,
    /// `max_tokens` or the context limit.
    Length,
}

/// Token counts of one request; they count emitted tokens only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Those of them that another sequence had computed already.
    pub cached_tokens: usize,
    /// Tokens generated, the one that ended the completion included.
    pub completion_tokens: usize,
    /// What drafting did for the request.
    pub speculative: SpeculativeUsage,
}

/// What drafting did for one request.
///
/// `accepted_tokens / steps + 1` is the mean acceptance length, up to the last step, which can be one shorter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpeculativeUsage {
    /// Drafted tokens that the target checked.
    pub drafted_tokens: usize,
    /// Those of them that became part of the completion.
    pub accepted_tokens: usize,
    /// Target passes that checked drafted tokens.
    pub steps: usize,
}

/// Why the engine does not take a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The prompt has no tokens.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// The prompt leaves no room for one generated token.
    #[error(
        "the prompt has {prompt_tokens} tokens; at most {limit_tokens} fit with room for one more"
    )]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt_tokens: usize,
        /// Most tokens a prompt may have.
        limit_tokens: usize,
    },
    /// Prompt and completion together exceed the context.
    #[error(
        "the prompt has {prompt_tokens} tokens and {max_tokens} more were asked for; the context holds {context_tokens}"
    )]
    ContextExceeded {
        /// Tokens of the prompt.
        prompt_tokens: usize,
        /// Tokens asked for.
        max_tokens: usize,
        /// Tokens the context holds.
        context_tokens: usize,
    },
    /// A token id outside the vocabulary.
    #[error("token id {id} is outside the vocabulary of {vocab_size}")]
    UnknownToken {
        /// The id.
        id: u32,
        /// Size of the vocabulary.
        vocab_size: usize,
    },
    /// As many requests wait as the configuration allows.
    #[error("{limit} requests are waiting already")]
    QueueFull {
        /// Most requests that may wait.
        limit: usize,
        /// How long the caller should stay away.
        retry_after: Duration,
    },
    /// The model is not loaded yet, or the server is going down.
    #[error("the engine is not ready")]
    NotReady,
}

/// Why a request that was taken failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// The target returned NaN or infinite logits for this request.
    #[error("the model returned non-finite logits")]
    NonFiniteLogits,
    /// The step this request was part of failed.
    #[error("an engine step failed: {0}")]
    StepFailed(String),
    /// No slot became free in time.
    #[error("no slot became free within {} ms", .limit.as_millis())]
    QueueTimeout {
        /// Longest wait for a slot.
        limit: Duration,
        /// How long the caller should stay away.
        retry_after: Duration,
    },
    /// The queue is full, and the request's place went to a caller who holds fewer.
    #[error("the place in the queue went to a caller who holds fewer")]
    Displaced {
        /// How long the caller should stay away.
        retry_after: Duration,
    },
    /// The request was not complete in time.
    #[error("the request was not complete within {} ms", .limit.as_millis())]
    DeadlineExceeded {
        /// Longest time from the arrival of a request to its last token.
        limit: Duration,
    },
    /// The engine stopped.
    #[error("the engine stopped")]
    Stopped,
}

impl EngineError {
    /// Every name that metrics show.
    pub const CAUSES: [&str; 6] = [
        "queue_full",
        "queue_timeout",
        "deadline_exceeded",
        "non_finite_logits",
        "step_failed",
        "stopped",
    ];

    /// The name that metrics show.
    pub fn cause(&self) -> &'static str {
        match self {
            Self::NonFiniteLogits => "non_finite_logits",
            Self::StepFailed(_) => "step_failed",
            Self::QueueTimeout { .. } => "queue_timeout",
            Self::Displaced { .. } => "queue_full",
            Self::DeadlineExceeded { .. } => "deadline_exceeded",
            Self::Stopped => "stopped",
        }
    }
}
