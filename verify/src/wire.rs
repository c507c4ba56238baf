//! The OpenAI shapes that checks need: requests for the two generation interfaces, and one form of their answers, streamed or whole.
//!
//! Token ids are an extension (`return_token_ids`) that several servers share; they are read where present and never required here.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// One of the two generation interfaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Api {
    /// `/v1/completions`.
    Completions,
    /// `/v1/chat/completions`.
    Chat,
}

impl Api {
    /// Where requests go.
    pub fn path(self) -> &'static str {
        match self {
            Self::Completions => "/v1/completions",
            Self::Chat => "/v1/chat/completions",
        }
    }

    /// A request for `model` to go on from `prompt`, as text or as one user message.
    pub fn request(self, model: &str, prompt: &str) -> Map<String, Value> {
        let mut request = Map::new();
        request.insert("model".into(), model.into());
        match self {
            Self::Completions => request.insert("prompt".into(), prompt.into()),
            Self::Chat => request.insert(
                "messages".into(),
                json!([{ "role": "user", "content": prompt }]),
            ),
        };
        request
    }

    fn whole_object(self) -> &'static str {
        match self {
            Self::Completions => "text_completion",
            Self::Chat => "chat.completion",
        }
    }

    fn chunk_object(self) -> &'static str {
        match self {
            Self::Completions => "text_completion",
            Self::Chat => "chat.completion.chunk",
        }
    }

    /// JSON pointers to the text of a whole answer and of a chunk.
    fn text_pointers(self) -> (&'static str, &'static str) {
        match self {
            Self::Completions => ("/choices/0/text", "/choices/0/text"),
            Self::Chat => ("/choices/0/message/content", "/choices/0/delta/content"),
        }
    }
}

/// What one request brought, however it was delivered.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Generation {
    /// The text.
    pub text: String,
    /// Why it ended, such as `stop` or `length`.
    pub finish_reason: Option<String>,
    /// Generated token ids, when the service returns them.
    pub token_ids: Option<Vec<u64>>,
    /// Token ids of the prompt, when the service returns them.
    pub prompt_token_ids: Option<Vec<u64>>,
    /// Token counts.
    pub usage: Option<Usage>,
    /// What drafting did, when the service says so.
    pub speculative: Option<Speculative>,
}

/// Token counts of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub completion_tokens: u64,
    /// Both together, as the service says.
    pub total_tokens: u64,
}

/// What drafting did for one request (`usage.speculative`, an extension).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Speculative {
    /// Drafted tokens that the target checked.
    pub drafted_tokens: u64,
    /// Those of them that became part of the answer.
    pub accepted_tokens: u64,
    /// Target passes that checked drafted tokens.
    pub steps: u64,
}

impl Speculative {
    /// Tokens that a target pass with drafted tokens brought, `None` without such a pass.
    pub fn acceptance_length(&self) -> Option<f64> {
        (self.steps > 0).then(|| 1.0 + self.accepted_tokens as f64 / self.steps as f64)
    }
}

impl std::ops::AddAssign for Speculative {
    fn add_assign(&mut self, other: Self) {
        self.drafted_tokens += other.drafted_tokens;
        self.accepted_tokens += other.accepted_tokens;
        self.steps += other.steps;
    }
}

/// An answer that does not have the shape of its interface.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{field}` is {found}, expected {expected}")]
pub struct ShapeError {
    /// Which field.
    pub field: String,
    /// What it must be.
    pub expected: &'static str,
    /// What it is.
    pub found: String,
}

impl Generation {
    /// Reads a whole answer.
    pub fn from_whole(api: Api, answer: &Value) -> Result<Self, ShapeError> {
        object_is(answer, api.whole_object())?;
        let pointer = api.text_pointers().0;
        let text = answer.pointer(pointer).and_then(Value::as_str);
        Ok(Self {
            text: text
                .ok_or_else(|| shape(answer, pointer, "a string"))?
                .to_owned(),
            finish_reason: finish_reason(answer)?,
            token_ids: ids(answer, "/choices/0/token_ids")?,
            prompt_token_ids: prompt_ids(answer)?,
            usage: usage(answer)?,
            speculative: speculative(answer)?,
        })
    }

    /// Puts the chunks of a stream together.
    pub fn from_chunks(api: Api, chunks: &[Value]) -> Result<Self, ShapeError> {
        let mut whole = Self::default();
        for chunk in chunks {
            object_is(chunk, api.chunk_object())?;
            let pointer = api.text_pointers().1;
            match chunk.pointer(pointer) {
                None | Some(Value::Null) => {}
                Some(Value::String(delta)) => whole.text.push_str(delta),
                Some(_) => return Err(shape(chunk, pointer, "a string")),
            }
            if let Some(more) = ids(chunk, "/choices/0/token_ids")? {
                whole.token_ids.get_or_insert_default().extend(more);
            }
            whole.finish_reason = finish_reason(chunk)?.or(whole.finish_reason);
            whole.prompt_token_ids = prompt_ids(chunk)?.or(whole.prompt_token_ids);
            whole.usage = usage(chunk)?.or(whole.usage);
            whole.speculative = speculative(chunk)?.or(whole.speculative);
        }
        Ok(whole)
    }
}

/// One generated token with what the service found most likely in its place.
#[derive(Clone, Debug, PartialEq)]
pub struct Alternatives {
    /// Text of the token that was chosen.
    pub token: String,
    /// Text and log-probability (natural logarithm) of the most likely tokens, best first.
    pub top: Vec<(String, f64)>,
}

impl Alternatives {
    /// By how much the best token is more likely than the second, in nats; `None` when the service did not name two.
    pub fn margin(&self) -> Option<f64> {
        match self.top.as_slice() {
            [(_, first), (_, second), ..] => Some(first - second),
            _ => None,
        }
    }
}

impl Api {
    /// Asks for the two most likely tokens at each position.
    pub fn ask_alternatives(self, request: &mut Map<String, Value>) {
        match self {
            Self::Completions => {
                request.insert("logprobs".into(), 2.into());
            }
            Self::Chat => {
                request.insert("logprobs".into(), true.into());
                request.insert("top_logprobs".into(), 2.into());
            }
        }
    }
}

/// The alternatives of a whole answer, `None` when it has none.
pub fn alternatives(api: Api, answer: &Value) -> Option<Vec<Alternatives>> {
    let logprobs = answer.pointer("/choices/0/logprobs")?;
    let mut found = match api {
        Api::Completions => completion_alternatives(logprobs)?,
        Api::Chat => logprobs
            .get("content")?
            .as_array()?
            .iter()
            .map(chat_alternatives)
            .collect::<Option<Vec<_>>>()?,
    };
    for entry in &mut found {
        entry.top.sort_by(|a, b| b.1.total_cmp(&a.1));
    }
    Some(found)
}

fn completion_alternatives(logprobs: &Value) -> Option<Vec<Alternatives>> {
    // Some servers answer completions in the shape of chat.
    if let Some(content) = logprobs.get("content").and_then(Value::as_array) {
        return content.iter().map(chat_alternatives).collect();
    }
    let tokens = logprobs.get("tokens")?.as_array()?;
    let tops = logprobs.get("top_logprobs")?.as_array()?;
    let entry = |(token, top): (&Value, &Value)| {
        let top = top
            .as_object()?
            .iter()
            .map(|(text, logprob)| Some((text.clone(), logprob.as_f64()?)))
            .collect::<Option<Vec<_>>>()?;
        Some(Alternatives {
            token: token.as_str()?.to_owned(),
            top,
        })
    };
    tokens.iter().zip(tops).map(entry).collect()
}

fn chat_alternatives(entry: &Value) -> Option<Alternatives> {
    let top = entry
        .get("top_logprobs")?
        .as_array()?
        .iter()
        .map(|top| {
            Some((
                top.get("token")?.as_str()?.to_owned(),
                top.get("logprob")?.as_f64()?,
            ))
        })
        .collect::<Option<Vec<_>>>()?;
    Some(Alternatives {
        token: entry.get("token")?.as_str()?.to_owned(),
        top,
    })
}

/// Whether a chunk of a stream carries text.
pub fn carries_text(api: Api, chunk: &Value) -> bool {
    let text = chunk.pointer(api.text_pointers().1);
    text.and_then(Value::as_str)
        .is_some_and(|text| !text.is_empty())
}

/// Message and type of an OpenAI error body.
pub fn error_of(answer: &Value) -> Result<(String, String), ShapeError> {
    let text = |pointer| {
        let text = answer
            .pointer(pointer)
            .and_then(Value::as_str)
            .filter(|text| !text.is_empty());
        text.map(str::to_owned)
            .ok_or_else(|| shape(answer, pointer, "a string with text"))
    };
    Ok((text("/error/message")?, text("/error/type")?))
}

fn object_is(answer: &Value, expected: &'static str) -> Result<(), ShapeError> {
    if answer.get("object").and_then(Value::as_str) == Some(expected) {
        Ok(())
    } else {
        Err(shape(answer, "/object", expected))
    }
}

fn finish_reason(answer: &Value) -> Result<Option<String>, ShapeError> {
    match answer.pointer("/choices/0/finish_reason") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(reason)) => Ok(Some(reason.clone())),
        Some(_) => Err(shape(answer, "/choices/0/finish_reason", "a string")),
    }
}

fn ids(answer: &Value, pointer: &str) -> Result<Option<Vec<u64>>, ShapeError> {
    match answer.pointer(pointer) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => {
            let ids: Option<Vec<u64>> = value
                .as_array()
                .and_then(|ids| ids.iter().map(Value::as_u64).collect());
            ids.map(Some)
                .ok_or_else(|| shape(answer, pointer, "a list of token ids"))
        }
    }
}

/// Servers put the prompt's ids into the choice or beside the choices.
fn prompt_ids(answer: &Value) -> Result<Option<Vec<u64>>, ShapeError> {
    match ids(answer, "/choices/0/prompt_token_ids")? {
        Some(found) => Ok(Some(found)),
        None => ids(answer, "/prompt_token_ids"),
    }
}

fn usage(answer: &Value) -> Result<Option<Usage>, ShapeError> {
    if answer.get("usage").is_none_or(Value::is_null) {
        return Ok(None);
    }
    Ok(Some(Usage {
        prompt_tokens: count(answer, "/usage/prompt_tokens")?,
        completion_tokens: count(answer, "/usage/completion_tokens")?,
        total_tokens: count(answer, "/usage/total_tokens")?,
    }))
}

fn speculative(answer: &Value) -> Result<Option<Speculative>, ShapeError> {
    let found = answer.pointer("/usage/speculative");
    if found.is_none_or(Value::is_null) {
        return Ok(None);
    }
    Ok(Some(Speculative {
        drafted_tokens: count(answer, "/usage/speculative/drafted_tokens")?,
        accepted_tokens: count(answer, "/usage/speculative/accepted_tokens")?,
        steps: count(answer, "/usage/speculative/steps")?,
    }))
}

fn count(answer: &Value, pointer: &'static str) -> Result<u64, ShapeError> {
    let count = answer.pointer(pointer).and_then(Value::as_u64);
    count.ok_or_else(|| shape(answer, pointer, "a count"))
}

fn shape(answer: &Value, pointer: &str, expected: &'static str) -> ShapeError {
    let found = answer
        .pointer(pointer)
        .map_or_else(|| "missing".to_owned(), |value| shorten(&value.to_string()));
    ShapeError {
        field: pointer.trim_start_matches('/').replace('/', "."),
        expected,
        found,
    }
}

/// `text`, cut to a length that fits a report line.
pub(crate) fn shorten(text: &str) -> String {
    const LIMIT_CHARS: usize = 160;
    match text.char_indices().nth(LIMIT_CHARS) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}
