//! The bodies of answers: completions and chat completions, whole and as chunks of a stream.
//!
//! Extensions to OpenAI's shapes: `seed` (of the request, and of each choice once it is finished), `token_ids` and `prompt_token_ids`.
//! Every generated token is listed in `logprobs` and `token_ids`, those of an end-of-sequence token or a stop string too, so both are
//! as long as `usage.completion_tokens` says; `text` and `content` never hold them.

use serde::{Serialize, Serializer};

use super::backend::Backend;
use super::choices::{Choice, Piece};
use crate::engine::{FinishReason, TokenLogprobs, Usage};

/// Stands for a probability of zero, whose logarithm JSON cannot hold; OpenAI's value.
const LOWEST_LOGPROB: f32 = -9999.0;

/// Which of the two interfaces an answer belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// `/v1/completions`.
    Completion,
    /// `/v1/chat/completions`.
    Chat,
}

/// What every body of one answer repeats.
#[derive(Clone, Debug)]
pub struct Head {
    /// Which interface.
    pub shape: Shape,
    /// Identifier of the answer.
    pub id: String,
    /// Unix time of the request in seconds.
    pub created: u64,
    /// Name of the model.
    pub model: String,
    /// Build and bundle: answers with equal fingerprints came from equal weights and code.
    pub system_fingerprint: String,
    /// Seed of the request.
    pub seed: i64,
    /// Report token ids.
    pub token_ids: bool,
    /// Report log-probabilities.
    pub logprobs: bool,
}

/// A body.
#[derive(Serialize)]
pub struct Body<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'a str,
    seed: i64,
    choices: Vec<ChoiceBody>,
    /// Absent in chunks unless the usage was asked for; `null` in all of those but the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<UsageBody>>,
}

/// Token counts of an answer.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct UsageBody {
    /// Tokens of all prompts; a prompt counts once, whatever `n` is.
    pub prompt_tokens: usize,
    /// Tokens generated, over all choices.
    pub completion_tokens: usize,
    /// Both together.
    pub total_tokens: usize,
    /// How the tokens of the prompts came about.
    pub prompt_tokens_details: PromptTokensBody,
    /// What drafting did, over all choices.
    pub speculative: SpeculativeBody,
}

/// How the tokens of the prompts came about. It depends on what else the server did before.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct PromptTokensBody {
    /// Tokens that were computed for an earlier request already.
    pub cached_tokens: usize,
}

/// What drafting did for an answer. It depends on what else the server did at the time.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct SpeculativeBody {
    /// Drafted tokens that the target checked.
    pub drafted_tokens: usize,
    /// Those of them that became part of a completion.
    pub accepted_tokens: usize,
    /// Target passes that checked drafted tokens.
    pub steps: usize,
}

impl UsageBody {
    fn of_prompts(prompt_tokens: usize) -> Self {
        Self {
            prompt_tokens,
            total_tokens: prompt_tokens,
            ..Self::default()
        }
    }

    /// Adds what one choice cost; its prompt is counted already, and of its choices the first says what was cached.
    fn add(&mut self, choice: &Usage, is_first: bool) {
        if is_first {
            self.prompt_tokens_details.cached_tokens += choice.cached_tokens;
        }
        self.completion_tokens += choice.completion_tokens;
        self.total_tokens = self.prompt_tokens + self.completion_tokens;
        self.speculative.drafted_tokens += choice.speculative.drafted_tokens;
        self.speculative.accepted_tokens += choice.speculative.accepted_tokens;
        self.speculative.steps += choice.speculative.steps;
    }
}

#[derive(Serialize)]
struct ChoiceBody {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<Message>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delta: Option<Delta>,
    logprobs: Option<Logprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    seed: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

#[derive(Serialize)]
struct Message {
    role: &'static str,
    content: String,
    refusal: Option<String>,
}

#[derive(Serialize)]
struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
}

/// Log-probabilities in the form of either interface.
#[derive(Serialize)]
#[serde(untagged)]
enum Logprobs {
    Completion(CompletionLogprobs),
    Chat {
        content: Vec<ChatToken>,
        /// Always `null`: this server writes no refusals.
        refusal: (),
    },
}

#[derive(Serialize)]
struct ChatToken {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
    top_logprobs: Vec<ChatAlternative>,
}

#[derive(Serialize)]
struct ChatAlternative {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

#[derive(Default, Serialize)]
struct CompletionLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Vec<Option<TopLogprobs>>,
    text_offset: Vec<usize>,
}

/// The most likely tokens by their text, an object in the order of the entries.
#[derive(Default)]
struct TopLogprobs(Vec<(String, f32)>);

impl Serialize for TopLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(text, logprob)| (text, logprob)))
    }
}

/// Characters of the text of one choice that its tokens have reached.
#[derive(Clone, Copy, Debug, Default)]
struct TextOffset {
    characters: usize,
}

impl TextOffset {
    /// Offset of the character in which `bytes` begin, before they are passed over.
    fn pass(&mut self, bytes: &[u8]) -> usize {
        let is_continuation = |byte: &u8| byte & 0xc0 == 0x80;
        let begins_inside = bytes.first().is_some_and(is_continuation);
        let offset = self.characters - usize::from(begins_inside && self.characters > 0);
        self.characters += bytes.iter().filter(|byte| !is_continuation(byte)).count();
        offset
    }
}

/// Writes the pieces of one choice.
#[derive(Debug)]
pub struct ChoiceWriter {
    index: usize,
    begun: bool,
    offset: TextOffset,
}

impl ChoiceWriter {
    /// Writes choice `index`.
    pub fn new(index: usize) -> Self {
        Self {
            index,
            begun: false,
            offset: TextOffset::default(),
        }
    }

    /// Whether a chunk with `piece` would tell the caller anything.
    pub fn is_worth_a_chunk(&self, piece: &Piece, head: &Head) -> bool {
        !piece.text.is_empty()
            || piece.finished.is_some()
            || (head.token_ids && !piece.tokens.is_empty())
            || (head.logprobs && (!piece.logprobs.is_empty() || piece.prompt_logprobs.is_some()))
    }

    /// The first chunk of a chat choice, which names the role before there is any text.
    fn opening(&mut self, choice: &Choice, head: &Head) -> ChoiceBody {
        self.begun = true;
        ChoiceBody {
            index: self.index,
            text: None,
            message: None,
            delta: Some(Delta {
                role: Some("assistant"),
                content: Some(String::new()),
            }),
            logprobs: None,
            finish_reason: None,
            seed: None,
            prompt_token_ids: head.token_ids.then(|| choice.prompt.tokens.clone()),
            token_ids: None,
        }
    }

    fn write(
        &mut self,
        backend: &dyn Backend,
        head: &Head,
        choice: &Choice,
        piece: Piece,
        chunk: bool,
    ) -> ChoiceBody {
        let first = !std::mem::replace(&mut self.begun, true);
        // A chunk without tokens, such as the last one, has none to report.
        let has_logprobs = !chunk || !piece.logprobs.is_empty() || piece.prompt_logprobs.is_some();
        let logprobs = (head.logprobs && has_logprobs).then(|| match head.shape {
            Shape::Completion => {
                Logprobs::Completion(self.completion_logprobs(backend, choice, &piece, first))
            }
            Shape::Chat => Logprobs::Chat {
                content: piece
                    .logprobs
                    .iter()
                    .map(|token| chat_token(backend, token))
                    .collect(),
                refusal: (),
            },
        });
        let mut body = ChoiceBody {
            index: self.index,
            text: None,
            message: None,
            delta: None,
            logprobs,
            finish_reason: piece.finished.map(|(reason, _)| finish_reason(reason)),
            seed: piece.finished.map(|_| choice.seed),
            prompt_token_ids: (head.token_ids && first).then(|| choice.prompt.tokens.clone()),
            token_ids: head.token_ids.then_some(piece.tokens),
        };
        match (head.shape, chunk) {
            (Shape::Completion, _) => {
                let echo = choice
                    .prompt
                    .echo
                    .as_deref()
                    .filter(|_| first)
                    .unwrap_or_default();
                body.text = Some(if echo.is_empty() {
                    piece.text
                } else {
                    format!("{echo}{}", piece.text)
                });
            }
            (Shape::Chat, true) => {
                body.delta = Some(Delta {
                    role: None,
                    content: (!piece.text.is_empty() || body.finish_reason.is_none())
                        .then_some(piece.text),
                });
            }
            (Shape::Chat, false) => {
                body.message = Some(Message {
                    role: "assistant",
                    content: piece.text,
                    refusal: None,
                });
            }
        }
        body
    }

    fn completion_logprobs(
        &mut self,
        backend: &dyn Backend,
        choice: &Choice,
        piece: &Piece,
        first: bool,
    ) -> CompletionLogprobs {
        let mut logprobs = CompletionLogprobs::default();
        if let (true, Some(echo)) = (first, &choice.prompt.echo) {
            self.echo_logprobs(backend, choice, piece, echo, &mut logprobs);
        }
        for token in &piece.logprobs {
            let bytes = backend.token_bytes(token.id);
            logprobs.text_offset.push(self.offset.pass(&bytes));
            logprobs.push(backend, &bytes, Some(token));
        }
        logprobs
    }

    fn echo_logprobs(
        &mut self,
        backend: &dyn Backend,
        choice: &Choice,
        piece: &Piece,
        echo: &str,
        logprobs: &mut CompletionLogprobs,
    ) {
        let tokens: Vec<Vec<u8>> = choice
            .prompt
            .tokens
            .iter()
            .map(|id| backend.token_bytes(*id))
            .collect();
        let length: usize = tokens.iter().map(Vec::len).sum();
        // Tokens that the tokenizer put before the text, such as a beginning-of-sequence token, take no place in it.
        let mut unseen = length.saturating_sub(echo.len());
        let scored = piece.prompt_logprobs.iter().flatten().map(Some);
        for (bytes, token) in tokens.iter().zip(std::iter::once(None).chain(scored)) {
            let hidden = !bytes.is_empty() && bytes.len() <= unseen;
            if hidden {
                unseen -= bytes.len();
            }
            logprobs
                .text_offset
                .push(self.offset.pass(if hidden { &[] } else { bytes }));
            logprobs.push(backend, bytes, token);
        }
    }
}

impl CompletionLogprobs {
    fn push(&mut self, backend: &dyn Backend, bytes: &[u8], token: Option<&TokenLogprobs>) {
        self.tokens.push(token_text(bytes));
        self.token_logprobs
            .push(token.map(|token| finite(token.logprob)));
        self.top_logprobs.push(token.map(|token| {
            let chosen = (token.id, token.logprob);
            let is_listed = token.top.iter().any(|(id, _)| *id == token.id);
            let mut top = TopLogprobs::default();
            for (id, logprob) in token
                .top
                .iter()
                .copied()
                .chain((!is_listed).then_some(chosen))
            {
                let text = token_text(&backend.token_bytes(id));
                // Tokens with equal text share a key; the likelier one, which comes first, keeps it.
                if top.0.iter().all(|(known, _)| *known != text) {
                    top.0.push((text, finite(logprob)));
                }
            }
            top
        }));
    }
}

/// Writes the bodies of one answer.
#[derive(Debug)]
pub struct AnswerWriter {
    head: Head,
    writers: Vec<ChoiceWriter>,
    /// Tokens of each choice that has not finished.
    running_tokens: Vec<usize>,
    usage: UsageBody,
}

impl AnswerWriter {
    /// An answer of `choices` completions for prompts of `prompt_tokens` in all.
    pub fn new(head: Head, choices: usize, prompt_tokens: usize) -> Self {
        Self {
            head,
            writers: (0..choices).map(ChoiceWriter::new).collect(),
            running_tokens: vec![0; choices],
            usage: UsageBody::of_prompts(prompt_tokens),
        }
    }

    /// Token counts so far, those of choices that have not finished included.
    pub fn usage(&self) -> UsageBody {
        let running: usize = self.running_tokens.iter().sum();
        let mut usage = self.usage;
        usage.completion_tokens += running;
        usage.total_tokens += running;
        usage
    }

    /// Notes that choice `index`, which has not finished, has brought this many more tokens.
    pub fn brought(&mut self, index: usize, tokens: usize) {
        self.running_tokens[index] += tokens;
    }

    /// The chunk that opens choice `index`, where the interface has one.
    pub fn opening(&mut self, index: usize, choice: &Choice, with_usage: bool) -> Option<Body<'_>> {
        if self.head.shape == Shape::Completion {
            return None;
        }
        let body = self.writers[index].opening(choice, &self.head);
        Some(self.body(vec![body], with_usage.then_some(None), true))
    }

    /// A chunk with what choice `index` has brought; `None` when that is nothing to tell.
    pub fn chunk(
        &mut self,
        backend: &dyn Backend,
        index: usize,
        choice: &Choice,
        piece: Piece,
        with_usage: bool,
    ) -> Option<Body<'_>> {
        self.brought(index, piece.tokens.len());
        self.count(index, choice, &piece);
        let writer = &mut self.writers[index];
        if !writer.is_worth_a_chunk(&piece, &self.head) {
            return None;
        }
        let body = writer.write(backend, &self.head, choice, piece, true);
        Some(self.body(vec![body], with_usage.then_some(None), true))
    }

    /// The chunk after all others, with the token counts.
    pub fn usage_chunk(&self) -> Body<'_> {
        self.body(Vec::new(), Some(Some(self.usage)), true)
    }

    /// The whole answer.
    pub fn whole<'a>(
        &mut self,
        backend: &dyn Backend,
        choices: impl Iterator<Item = &'a Choice>,
        pieces: Vec<Piece>,
    ) -> Body<'_> {
        let mut bodies = Vec::with_capacity(pieces.len());
        for ((index, piece), choice) in pieces.into_iter().enumerate().zip(choices) {
            self.count(index, choice, &piece);
            bodies.push(self.writers[index].write(backend, &self.head, choice, piece, false));
        }
        self.body(bodies, Some(Some(self.usage)), false)
    }

    fn count(&mut self, index: usize, choice: &Choice, piece: &Piece) {
        if let Some((_, usage)) = &piece.finished {
            self.running_tokens[index] = 0;
            self.usage.add(usage, choice.is_first);
        }
    }

    fn body(
        &self,
        choices: Vec<ChoiceBody>,
        usage: Option<Option<UsageBody>>,
        chunk: bool,
    ) -> Body<'_> {
        Body {
            id: &self.head.id,
            object: match (self.head.shape, chunk) {
                (Shape::Completion, _) => "text_completion",
                (Shape::Chat, false) => "chat.completion",
                (Shape::Chat, true) => "chat.completion.chunk",
            },
            created: self.head.created,
            model: &self.head.model,
            system_fingerprint: &self.head.system_fingerprint,
            seed: self.head.seed,
            choices,
            usage,
        }
    }
}

/// How an interface says why a completion ended.
pub fn finish_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
    }
}

fn chat_token(backend: &dyn Backend, token: &TokenLogprobs) -> ChatToken {
    let alternative = |id: u32, logprob: f32| {
        let bytes = backend.token_bytes(id);
        ChatAlternative {
            token: String::from_utf8_lossy(&bytes).into_owned(),
            logprob: finite(logprob),
            bytes,
        }
    };
    let ChatAlternative {
        token: text,
        logprob,
        bytes,
    } = alternative(token.id, token.logprob);
    ChatToken {
        token: text,
        logprob,
        bytes,
        top_logprobs: token
            .top
            .iter()
            .map(|(id, logprob)| alternative(*id, *logprob))
            .collect(),
    }
}

fn finite(logprob: f32) -> f32 {
    logprob.max(LOWEST_LOGPROB)
}

/// Text of a token in the completions interface: bytes that are not whole characters are spelt out, as OpenAI does, so that different
/// tokens stay different.
fn token_text(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold("bytes:".to_owned(), |mut text, byte| {
            text.push_str(&format!("\\x{byte:02x}"));
            text
        }),
    }
}
