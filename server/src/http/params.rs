//! Request bodies as checked values: which fields there are, what they may hold and what holds when they are left out.
//!
//! Fields that OpenAI's clients send but that this server has no use for are accepted only with the value that asks for nothing.

use serde_json::{Map, Value, json};

use super::fields::{
    Bounds, FieldError, FieldResult, Fields, Rule, integer, number, shown, wrong_type,
};
use crate::text::ChatMessage;

/// Most stop strings of one request.
const MAX_STOPS: usize = 4;
/// Most likely tokens that can be reported for each position.
const MAX_TOP_LOGPROBS: u32 = 20;
/// Completion tokens of `/v1/completions` when the request does not say.
pub const DEFAULT_COMPLETION_TOKENS: usize = 16;

/// What the model and the configuration allow, for fields whose bounds depend on them.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most completions of one request: prompts times `n`.
    pub completions: usize,
    /// Token ids run from 0 to this, exclusive.
    pub vocab_size: usize,
}

/// A `/v1/completions` request.
#[derive(Clone, Debug)]
pub struct CompletionParams {
    /// Name of the model asked for.
    pub model: String,
    /// One or more prompts.
    pub prompts: Vec<Prompt>,
    /// Put the prompt before the completion.
    pub echo: bool,
    /// Everything that both kinds of request have.
    pub generation: Generation,
}

/// One prompt.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// Text to tokenise.
    Text(String),
    /// Token ids as they are.
    Tokens(Vec<u32>),
}

/// A `/v1/chat/completions` request.
#[derive(Clone, Debug)]
pub struct ChatParams {
    /// Name of the model asked for.
    pub model: String,
    /// The conversation.
    pub messages: Vec<ChatMessage>,
    /// Variables for the chat template.
    pub template_kwargs: Map<String, Value>,
    /// Everything that both kinds of request have.
    pub generation: Generation,
}

/// What both kinds of request have.
#[derive(Clone, Debug, PartialEq)]
pub struct Generation {
    /// Completions for each prompt.
    pub n: usize,
    /// Most tokens of each completion.
    pub max_tokens: Option<usize>,
    /// Softmax temperature; 0 is greedy.
    pub temperature: Option<f32>,
    /// Nucleus bound.
    pub top_p: Option<f32>,
    /// Candidate bound; 0 keeps all.
    pub top_k: Option<u32>,
    /// Least share of the largest probability.
    pub min_p: Option<f32>,
    /// Presence penalty.
    pub presence_penalty: f32,
    /// Frequency penalty.
    pub frequency_penalty: f32,
    /// Repetition penalty; 1 does nothing.
    pub repetition_penalty: Option<f32>,
    /// Values added to logits.
    pub logit_bias: Vec<(u32, f32)>,
    /// Seed of the first choice.
    pub seed: Option<i64>,
    /// Texts that end a completion.
    pub stop: Vec<String>,
    /// Go on after an end-of-sequence token.
    pub ignore_eos: bool,
    /// Log-probabilities, and of how many most likely tokens.
    pub logprobs: Option<usize>,
    /// Answer with a stream of server-sent events.
    pub stream: bool,
    /// End the stream with a chunk that holds the usage.
    pub include_usage: bool,
    /// Whether drafting may be used; when not said it may, and `true` also asks that there is a draft.
    pub speculative: Option<bool>,
    /// Report token ids.
    pub return_token_ids: bool,
}

impl CompletionParams {
    /// Reads a request body.
    pub fn read(body: Value, limits: Limits) -> FieldResult<Self> {
        let mut fields = Fields::of(body, "")?;
        let model = fields.text("model")?;
        let prompt = fields.take("prompt");
        let echo = fields.flag("echo")?.unwrap_or(false);
        let least_tokens = if echo { 0 } else { 1 };
        let max_tokens = fields.count("max_tokens", least_tokens..=u32::MAX)?;
        let logprobs = fields.count("logprobs", 0..=MAX_TOP_LOGPROBS)?;
        fields.only("suffix", &[json!("")])?;
        let generation = Generation::read(&mut fields, limits, max_tokens, logprobs)?;
        let best_of = fields.count("best_of", 1..=u32::MAX)?;
        if best_of.is_some_and(|best_of| best_of != generation.n) {
            return Err(fields.error(
                "best_of",
                Rule::Conflict("must equal `n`: completions are not ranked"),
            ));
        }
        let missing = |name: &str| FieldError {
            path: name.to_owned(),
            rule: Rule::Missing,
        };
        fields.finish()?;
        let model = model.ok_or_else(|| missing("model"))?;
        let prompts = prompts(prompt.ok_or_else(|| missing("prompt"))?, limits)?;
        if prompts.len().saturating_mul(generation.n) > limits.completions {
            return Err(FieldError {
                path: "prompt".to_owned(),
                rule: Rule::TooLarge {
                    given: format!("{} prompts with `n` {}", prompts.len(), generation.n),
                    allowed: format!("at most {} completions in one request", limits.completions),
                },
            });
        }
        Ok(Self {
            model,
            prompts,
            echo,
            generation,
        })
    }
}

impl ChatParams {
    /// Reads a request body.
    pub fn read(body: Value, limits: Limits) -> FieldResult<Self> {
        let mut fields = Fields::of(body, "")?;
        let model = fields.text("model")?;
        let messages = fields.list("messages")?;
        let max_tokens = fields.count("max_tokens", 1..=u32::MAX)?;
        let max_completion_tokens = fields.count("max_completion_tokens", 1..=u32::MAX)?;
        if max_tokens.is_some() && max_completion_tokens.is_some() {
            return Err(fields.error(
                "max_tokens",
                Rule::Conflict("and `max_completion_tokens` mean the same; give only one"),
            ));
        }
        let logprobs = fields.flag("logprobs")?.unwrap_or(false);
        let top_logprobs = fields.count("top_logprobs", 0..=MAX_TOP_LOGPROBS)?;
        if top_logprobs.is_some() && !logprobs {
            return Err(fields.error(
                "top_logprobs",
                Rule::Conflict("needs `logprobs` to be true"),
            ));
        }
        let logprobs = logprobs.then(|| top_logprobs.unwrap_or(0));
        let template_kwargs = fields
            .object("chat_template_kwargs")?
            .map(Fields::into_map)
            .unwrap_or_default();
        for (name, allowed) in chat_no_ops() {
            fields.only(name, &allowed)?;
        }
        let generation = Generation::read(
            &mut fields,
            limits,
            max_tokens.or(max_completion_tokens),
            logprobs,
        )?;
        let missing = |name: &str| FieldError {
            path: name.to_owned(),
            rule: Rule::Missing,
        };
        fields.finish()?;
        let model = model.ok_or_else(|| missing("model"))?;
        let messages = messages.ok_or_else(|| missing("messages"))?;
        if messages.is_empty() {
            return Err(FieldError {
                path: "messages".to_owned(),
                rule: Rule::Empty,
            });
        }
        let messages = messages
            .into_iter()
            .enumerate()
            .map(|(position, value)| message(value, &format!("messages[{position}]")))
            .collect::<FieldResult<_>>()?;
        Ok(Self {
            model,
            messages,
            template_kwargs,
            generation,
        })
    }
}

/// Chat fields without effect, each with the values that ask for none.
fn chat_no_ops() -> [(&'static str, Vec<Value>); 14] {
    [
        ("audio", vec![]),
        ("function_call", vec![json!("none")]),
        ("functions", vec![json!([])]),
        ("modalities", vec![json!(["text"])]),
        ("parallel_tool_calls", vec![json!(true), json!(false)]),
        ("prediction", vec![]),
        ("prompt_cache_key", vec![]),
        ("reasoning_effort", vec![]),
        ("response_format", vec![json!({"type": "text"})]),
        ("safety_identifier", vec![]),
        ("tool_choice", vec![json!("none"), json!("auto")]),
        ("tools", vec![json!([])]),
        ("verbosity", vec![]),
        ("web_search_options", vec![]),
    ]
}

impl Generation {
    fn read(
        fields: &mut Fields,
        limits: Limits,
        max_tokens: Option<usize>,
        logprobs: Option<usize>,
    ) -> FieldResult<Self> {
        let most_choices = u32::try_from(limits.completions).unwrap_or(u32::MAX);
        let n = fields.count("n", 1..=most_choices)?.unwrap_or(1);
        let temperature = fields.number("temperature", Bounds::closed(0.0, 2.0))?;
        let top_p = fields.number("top_p", Bounds::above(0.0, 1.0))?;
        let top_k = fields
            .integer("top_k", -1..=i64::from(u32::MAX))?
            .map(|top_k| u32::try_from(top_k).unwrap_or(0));
        let min_p = fields.number("min_p", Bounds::closed(0.0, 1.0))?;
        let presence_penalty = fields
            .number("presence_penalty", Bounds::closed(-2.0, 2.0))?
            .unwrap_or(0.0);
        let frequency_penalty = fields
            .number("frequency_penalty", Bounds::closed(-2.0, 2.0))?
            .unwrap_or(0.0);
        let repetition_penalty = fields.number("repetition_penalty", Bounds::above(0.0, 10.0))?;
        let logit_bias = logit_bias(fields, limits.vocab_size)?;
        let seed = fields.integer("seed", i64::MIN..=i64::MAX)?;
        let stop = stop(fields)?;
        let ignore_eos = fields.flag("ignore_eos")?.unwrap_or(false);
        let stream = fields.flag("stream")?.unwrap_or(false);
        let include_usage = stream_options(fields, stream)?;
        let speculative = match fields.object("speculative")? {
            None => None,
            Some(mut speculative) => {
                let enabled = speculative.flag("enabled")?;
                let missing = speculative.error("enabled", Rule::Missing);
                speculative.finish()?;
                Some(enabled.ok_or(missing)?)
            }
        };
        let return_token_ids = fields.flag("return_token_ids")?.unwrap_or(false);
        // Names the end user in OpenAI's abuse reports; it never had an effect on the answer.
        fields.text("user")?;
        fields.only("metadata", &[json!({})])?;
        fields.only("service_tier", &[json!("auto"), json!("default")])?;
        fields.only("store", &[json!(false)])?;
        Ok(Self {
            n,
            max_tokens,
            temperature,
            top_p,
            top_k,
            min_p,
            presence_penalty,
            frequency_penalty,
            repetition_penalty,
            logit_bias,
            seed,
            stop,
            ignore_eos,
            logprobs,
            stream,
            include_usage,
            speculative,
            return_token_ids,
        })
    }
}

fn stream_options(fields: &mut Fields, stream: bool) -> FieldResult<bool> {
    let Some(mut options) = fields.object("stream_options")? else {
        return Ok(false);
    };
    if !stream {
        return Err(fields.error(
            "stream_options",
            Rule::Conflict("needs `stream` to be true"),
        ));
    }
    let include_usage = options.flag("include_usage")?.unwrap_or(false);
    options.only("include_obfuscation", &[json!(false)])?;
    options.finish()?;
    Ok(include_usage)
}

fn logit_bias(fields: &mut Fields, vocab_size: usize) -> FieldResult<Vec<(u32, f32)>> {
    let Some(entries) = fields.object("logit_bias")? else {
        return Ok(Vec::new());
    };
    let path = fields.path("logit_bias");
    let mut biases = Vec::new();
    for (key, value) in entries.into_map() {
        // The canonical form only, so that no two keys name the same token.
        let id = key.parse::<u32>().ok().filter(|id| id.to_string() == key);
        let id = id.filter(|id| usize::try_from(*id).is_ok_and(|id| id < vocab_size));
        let Some(id) = id else {
            return Err(FieldError {
                path,
                rule: Rule::Value {
                    given: format!("an object with the key {}", shown(&Value::String(key))),
                    allowed: format!(
                        "keyed by token ids from 0 to {}",
                        vocab_size.saturating_sub(1)
                    ),
                },
            });
        };
        biases.push((
            id,
            number(
                &format!("{path}.{id}"),
                &value,
                Bounds::closed(-100.0, 100.0),
            )?,
        ));
    }
    Ok(biases)
}

fn stop(fields: &mut Fields) -> FieldResult<Vec<String>> {
    let Some(value) = fields.take("stop") else {
        return Ok(Vec::new());
    };
    let path = fields.path("stop");
    let entries = match value {
        Value::String(_) => vec![(path, value)],
        Value::Array(entries) if entries.len() > MAX_STOPS => {
            return Err(fields.error(
                "stop",
                Rule::TooMany {
                    given: entries.len(),
                    most: MAX_STOPS,
                },
            ));
        }
        Value::Array(entries) => entries
            .into_iter()
            .enumerate()
            .map(|(position, entry)| (format!("{path}[{position}]"), entry))
            .collect(),
        other => return Err(wrong_type(&path, "a string or a list of strings", &other)),
    };
    entries
        .into_iter()
        .map(|(path, entry)| match entry {
            Value::String(text) if text.is_empty() => Err(FieldError {
                path,
                rule: Rule::Empty,
            }),
            Value::String(text) => Ok(text),
            other => Err(wrong_type(&path, "a string", &other)),
        })
        .collect()
}

/// A string, a list of strings, a list of token ids, or a list of such lists.
fn prompts(value: Value, limits: Limits) -> FieldResult<Vec<Prompt>> {
    const EXPECTED: &str =
        "a string, a list of strings, a list of token ids or a list of lists of token ids";
    let entries = match value {
        Value::String(text) => return Ok(vec![prompt_text(text, "prompt")?]),
        Value::Array(entries) => entries,
        other => return Err(wrong_type("prompt", EXPECTED, &other)),
    };
    match entries.first() {
        None => Err(FieldError {
            path: "prompt".to_owned(),
            rule: Rule::Empty,
        }),
        Some(Value::Number(_)) => Ok(vec![prompt_tokens(entries, "prompt", limits)?]),
        Some(Value::String(_) | Value::Array(_)) => entries
            .into_iter()
            .enumerate()
            .map(|(position, entry)| {
                let path = format!("prompt[{position}]");
                match entry {
                    Value::String(text) => prompt_text(text, &path),
                    Value::Array(ids) => prompt_tokens(ids, &path, limits),
                    other => Err(wrong_type(&path, "a string or a list of token ids", &other)),
                }
            })
            .collect(),
        Some(other) => Err(wrong_type(
            "prompt[0]",
            "a string, a token id or a list of token ids",
            other,
        )),
    }
}

fn prompt_text(text: String, path: &str) -> FieldResult<Prompt> {
    if text.is_empty() {
        return Err(FieldError {
            path: path.to_owned(),
            rule: Rule::Empty,
        });
    }
    Ok(Prompt::Text(text))
}

fn prompt_tokens(ids: Vec<Value>, path: &str, limits: Limits) -> FieldResult<Prompt> {
    if ids.is_empty() {
        return Err(FieldError {
            path: path.to_owned(),
            rule: Rule::Empty,
        });
    }
    let largest = i64::try_from(limits.vocab_size).unwrap_or(i64::MAX) - 1;
    let ids = ids.iter().enumerate().map(|(position, id)| {
        let id = integer(&format!("{path}[{position}]"), id, 0..=largest)?;
        Ok(u32::try_from(id).unwrap_or(u32::MAX))
    });
    Ok(Prompt::Tokens(ids.collect::<FieldResult<_>>()?))
}

fn message(value: Value, path: &str) -> FieldResult<ChatMessage> {
    const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];
    let mut fields = Fields::of(value, path)?;
    let role = fields.text("role")?;
    let content = fields.take("content");
    let name = fields.text("name")?;
    // What OpenAI's clients put into an assistant message that they send back.
    fields.only("annotations", &[json!([])])?;
    fields.only("audio", &[])?;
    fields.only("function_call", &[])?;
    fields.only("parsed", &[])?;
    fields.only("refusal", &[])?;
    fields.only("tool_call_id", &[])?;
    fields.only("tool_calls", &[json!([])])?;
    let missing_role = fields.error("role", Rule::Missing);
    let missing_content = fields.error("content", Rule::Missing);
    let content_path = fields.path("content");
    let role_path = fields.path("role");
    fields.finish()?;
    let role = role.ok_or(missing_role)?;
    if !ROLES.contains(&role.as_str()) {
        return Err(FieldError {
            path: role_path,
            rule: Rule::Value {
                given: shown(&Value::String(role)),
                allowed: format!("one of {}", ROLES.join(", ")),
            },
        });
    }
    let content = text_of(content.ok_or(missing_content)?, &content_path)?;
    Ok(ChatMessage {
        role,
        content,
        name,
    })
}

/// The text of a content: a string, or text parts put together with nothing between them.
fn text_of(content: Value, path: &str) -> FieldResult<String> {
    let parts = match content {
        Value::String(text) => return Ok(text),
        Value::Array(parts) => parts,
        other => return Err(wrong_type(path, "a string or a list of text parts", &other)),
    };
    let mut joined = String::new();
    for (position, part) in parts.into_iter().enumerate() {
        let mut fields = Fields::of(part, &format!("{path}[{position}]"))?;
        let kind = fields
            .text("type")?
            .ok_or_else(|| fields.error("type", Rule::Missing))?;
        if kind != "text" {
            return Err(fields.error(
                "type",
                Rule::Value {
                    given: shown(&Value::String(kind)),
                    allowed: "\"text\": other parts are not supported".to_owned(),
                },
            ));
        }
        let text = fields
            .text("text")?
            .ok_or_else(|| fields.error("text", Rule::Missing))?;
        fields.finish()?;
        joined.push_str(&text);
    }
    Ok(joined)
}
