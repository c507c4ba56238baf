//! The model's chat template: from messages to the text the model was trained on.
//!
//! Templates are written for Hugging Face transformers, so the environment is the one they find there: Jinja with trimmed blocks and loop controls,
//! Python's string methods, `raise_exception`, `strftime_now`, `tojson` that escapes nothing but what JSON asks for. A template runs with limits on
//! its work and its output; it reaches no file and no other template.

use std::collections::HashSet;
use std::fmt;
use std::io;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, Value};
use outrider_bundle::manifest::TextFacts;
use serde_json::Map;

use super::guard::{ControlTexts, Guard, NoStandIn, Rendered};
use super::{EncodeError, TextError};

/// Most bytes a template may write; more than any context holds.
const OUTPUT_LIMIT_BYTES: usize = 32 << 20;

/// Work a template may do whatever it is given, in the engine's units: about one per operation and per 64 bytes handled.
const BASE_FUEL: u64 = 1_000_000;

/// Further work per message.
const FUEL_PER_MESSAGE: u64 = 5_000;

const TEMPLATE_NAME: &str = "chat_template";

/// Names that `chat_template_kwargs` may not set, since the server does.
const RESERVED: [&str; 6] = [
    "messages",
    "tools",
    "documents",
    "bos_token",
    "eos_token",
    "loop",
];

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant` or what else the template knows.
    pub role: String,
    /// The text.
    pub content: String,
    /// Name of the speaker, when the caller gives one.
    pub name: Option<String>,
}

/// Why a conversation can't be turned into a prompt.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// The bundle has no chat template.
    #[error("this model has no chat template; use the completions endpoint")]
    NoTemplate,
    /// The template refuses the conversation, in its own words.
    #[error("{0}")]
    Template(String),
    /// The template failed on this conversation.
    #[error("the chat template failed: {0}")]
    Render(String),
    /// The template did more work or wrote more text than it may.
    #[error("the chat template {0} for these messages")]
    Limit(&'static str),
    /// A variable the template does not read, which would be without effect.
    #[error("the chat template of this model has no variable `{0}`")]
    UnknownKwarg(String),
    /// The name of the speaker of this message, which the template does not read.
    #[error("the chat template of this model does not use the names of speakers")]
    UnusedName(usize),
    /// A template variable the server sets itself.
    #[error("`chat_template_kwargs` may not set `{0}`")]
    ReservedKwarg(String),
    /// No character is left to tell the callers' text from the template's.
    #[error("the messages use too many private-use characters next to texts of control tokens")]
    PrivateUse,
    /// The tokenizer refuses the rendered text.
    #[error(transparent)]
    Encode(#[from] EncodeError),
}

impl From<NoStandIn> for ChatError {
    fn from(_: NoStandIn) -> Self {
        Self::PrivateUse
    }
}

#[derive(Debug)]
pub(super) struct ChatTemplate {
    environment: Environment<'static>,
    /// Names that the template reads, functions included.
    variables: HashSet<String>,
    controls: ControlTexts,
    bos_token: Option<String>,
    eos_token: Option<String>,
    /// Characters of the template that must not be taken for stand-ins.
    taken: HashSet<char>,
}

impl ChatTemplate {
    pub(super) fn new<'a>(
        source: &str,
        facts: &TextFacts,
        controls: impl Iterator<Item = &'a str>,
    ) -> Result<Self, TextError> {
        let failed = |error: &dyn fmt::Display| TextError::Template(error.to_string());
        let mut environment = Environment::new();
        environment.set_debug(false);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_syntax(
            SyntaxConfig::builder()
                .trim_blocks(true)
                .lstrip_blocks(true)
                .build()
                .map_err(|error| failed(&error))?,
        );
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_formatter(python_formatter);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_filter("tojson", tojson);
        environment.add_test("iterable", |value: &Value| {
            !value.is_none() && value.try_iter().is_ok()
        });
        environment
            .add_template_owned(TEMPLATE_NAME, without_generation_blocks(source))
            .map_err(|error| failed(&error))?;
        let template = environment.get_template(TEMPLATE_NAME);
        let variables = template
            .map_err(|error| failed(&error))?
            .undeclared_variables(false);
        let bos_token = facts.bos_token.clone();
        let eos_token = facts.eos_token.clone();
        let taken = [Some(source), bos_token.as_deref(), eos_token.as_deref()]
            .into_iter()
            .flatten()
            .flat_map(Guard::taken)
            .collect();
        let controls = ControlTexts::new(controls).map_err(|error| failed(&error))?;
        Ok(Self {
            environment,
            variables,
            controls,
            bos_token,
            eos_token,
            taken,
        })
    }

    pub(super) fn render(
        &self,
        messages: &[ChatMessage],
        kwargs: Map<String, serde_json::Value>,
    ) -> Result<Rendered, ChatError> {
        if let Some(name) = kwargs.keys().find(|name| RESERVED.contains(&name.as_str())) {
            return Err(ChatError::ReservedKwarg(name.clone()));
        }
        if let Some(name) = kwargs.keys().find(|name| !self.variables.contains(*name)) {
            return Err(ChatError::UnknownKwarg(name.clone()));
        }
        let rendered = self.write(messages, &kwargs)?;
        if let Some(named) = messages.iter().position(|message| message.name.is_some()) {
            // Of no use when another name leaves the text the same.
            let text_with = |name: &str| {
                let renamed = |message: &ChatMessage| ChatMessage {
                    name: message.name.as_ref().map(|_| name.to_owned()),
                    ..message.clone()
                };
                let messages: Vec<ChatMessage> = messages.iter().map(renamed).collect();
                self.write(&messages, &kwargs).map(|rendered| rendered.text)
            };
            if let (Ok(one), Ok(other)) = (text_with("A"), text_with("B"))
                && one == other
            {
                return Err(ChatError::UnusedName(named));
            }
        }
        Ok(rendered)
    }

    fn write(
        &self,
        messages: &[ChatMessage],
        kwargs: &Map<String, serde_json::Value>,
    ) -> Result<Rendered, ChatError> {
        let mut taken = self.taken.clone();
        for message in messages {
            let strings = [
                Some(&message.role),
                Some(&message.content),
                message.name.as_ref(),
            ];
            taken.extend(
                strings
                    .into_iter()
                    .flatten()
                    .flat_map(|string| Guard::taken(string)),
            );
        }
        kwargs.iter().for_each(|(name, value)| {
            taken.extend(Guard::taken(name));
            strings_of(value, &mut |string| taken.extend(Guard::taken(string)));
        });
        let mut guard = Guard::new(&self.controls, taken);
        let variables = self.variables(messages, kwargs, &mut guard)?;

        let mut environment = self.environment.clone();
        let input_bytes: usize = messages
            .iter()
            .map(|message| message.role.len() + message.content.len())
            .sum();
        environment.set_fuel(Some(
            BASE_FUEL + FUEL_PER_MESSAGE * messages.len() as u64 + input_bytes as u64,
        ));
        let mut output = Output(Vec::new());
        let template = environment
            .get_template(TEMPLATE_NAME)
            .map_err(|error| ChatError::Render(error.to_string()))?;
        let result = template
            .render_captured_to(variables, &mut output)
            .map(drop);
        result.map_err(|error| render_error(&error, &guard))?;
        let rendered =
            String::from_utf8(output.0).map_err(|error| ChatError::Render(error.to_string()))?;
        Ok(guard.restore(&rendered))
    }

    fn variables(
        &self,
        messages: &[ChatMessage],
        kwargs: &Map<String, serde_json::Value>,
        guard: &mut Guard<'_>,
    ) -> Result<Value, NoStandIn> {
        let mut list = Vec::with_capacity(messages.len());
        for message in messages {
            let mut fields = vec![
                ("role", guard.swap(&message.role, false)?),
                ("content", guard.swap(&message.content, true)?),
            ];
            if let Some(name) = &message.name {
                fields.push(("name", guard.swap(name, true)?));
            }
            list.push(Value::from_pairs(fields));
        }
        let mut variables = vec![
            ("messages".to_owned(), Value::from(list)),
            ("tools".to_owned(), Value::from(())),
            ("documents".to_owned(), Value::from(())),
            ("add_generation_prompt".to_owned(), Value::from(true)),
        ];
        for (name, token) in [
            ("bos_token", &self.bos_token),
            ("eos_token", &self.eos_token),
        ] {
            variables.extend(
                token
                    .as_ref()
                    .map(|token| (name.to_owned(), Value::from(token))),
            );
        }
        for (name, value) in kwargs {
            variables.push((name.clone(), jinja_value(value, guard)?));
        }
        Ok(Value::from_pairs(variables))
    }
}

/// Turns `{% generation %}` blocks, which mark the assistant's words for training, into blocks that do nothing.
fn without_generation_blocks(source: &str) -> String {
    let mut text = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        text.push_str(before);
        let Some(length) = tag["{%".len()..].find("%}") else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at("{%".len() + length + "%}".len());
        let inside = tag["{%".len()..][..length].trim_matches(['-', '+']);
        match inside.trim() {
            word @ "generation" => text.push_str(&tag.replace(word, "if true")),
            word @ "endgeneration" => text.push_str(&tag.replace(word, "endif")),
            _ => text.push_str(tag),
        }
        rest = after;
    }
    text.push_str(rest);
    text
}

/// Calls `visit` for every string in a JSON value, keys included.
fn strings_of(value: &serde_json::Value, visit: &mut impl FnMut(&str)) {
    match value {
        serde_json::Value::String(string) => visit(string),
        serde_json::Value::Array(items) => items.iter().for_each(|item| strings_of(item, visit)),
        serde_json::Value::Object(fields) => fields.iter().for_each(|(name, value)| {
            visit(name);
            strings_of(value, visit);
        }),
        serde_json::Value::Null | serde_json::Value::Bool(_) | serde_json::Value::Number(_) => {}
    }
}

fn jinja_value(value: &serde_json::Value, guard: &mut Guard<'_>) -> Result<Value, NoStandIn> {
    Ok(match value {
        serde_json::Value::Null => Value::from(()),
        serde_json::Value::Bool(value) => Value::from(*value),
        serde_json::Value::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(number), _) => Value::from(number),
            (None, Some(number)) => Value::from(number),
            (None, None) => Value::from(number.as_f64()),
        },
        serde_json::Value::String(string) => Value::from(guard.swap(string, false)?),
        serde_json::Value::Array(items) => items
            .iter()
            .map(|item| jinja_value(item, guard))
            .collect::<Result<Vec<_>, _>>()
            .map(Value::from)?,
        serde_json::Value::Object(fields) => {
            let field = |(name, value): (&String, _)| {
                Ok((guard.swap(name, false)?, jinja_value(value, guard)?))
            };
            fields
                .iter()
                .map(field)
                .collect::<Result<Vec<_>, _>>()
                .map(Value::from_pairs)?
        }
    })
}

/// Takes the rendered text up to the limit.
struct Output(Vec<u8>);

impl io::Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > OUTPUT_LIMIT_BYTES {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What `raise_exception` was called with; tells a template's own refusal from a failure of the template.
#[derive(Debug)]
struct Raised(String);

impl fmt::Display for Raised {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, "raise_exception").with_source(Raised(message)))
}

fn render_error(error: &Error, guard: &Guard<'_>) -> ChatError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(Raised(message)) = error.downcast_ref() {
            return ChatError::Template(guard.restore(message).text);
        }
        if let Some(error) = error.downcast_ref::<Error>() {
            match error.kind() {
                ErrorKind::OutOfFuel => return ChatError::Limit("does too much work"),
                ErrorKind::WriteFailure => return ChatError::Limit("writes too much text"),
                _ => {}
            }
        }
        cause = error.source();
    }
    ChatError::Render(guard.restore(&error.to_string()).text)
}

/// Today's date and time, UTC, in the notation of C's `strftime`.
#[expect(clippy::disallowed_methods, reason = "templates ask for the date")]
fn strftime_now(format: &str) -> Result<String, Error> {
    jiff::fmt::strtime::format(format, jiff::Timestamp::now())
        .map_err(|error| Error::new(ErrorKind::InvalidOperation, "strftime_now").with_source(error))
}

/// Writes booleans and `none` as Python does.
fn python_formatter(
    output: &mut minijinja::Output<'_>,
    state: &mut State<'_, '_>,
    value: &Value,
) -> Result<(), Error> {
    match value.kind() {
        ValueKind::Bool => output
            .write_str(if value.is_true() { "True" } else { "False" })
            .map_err(Error::from),
        ValueKind::None => output.write_str("None").map_err(Error::from),
        _ => minijinja::escape_formatter(output, state, value),
    }
}

/// JSON as Python's `json.dumps(ensure_ascii=False)` writes it.
fn tojson(value: &Value, indent: Option<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    if kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false) {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            "`tojson` does not support `ensure_ascii=True`",
        ));
    }
    let indent = match indent {
        Some(indent) => Some(indent),
        None => kwargs.get("indent")?,
    };
    kwargs.assert_all_used()?;
    let json = minijinja::filters::tojson(
        value,
        indent,
        Kwargs::from_iter(std::iter::empty::<(String, Value)>()),
    )?;
    Ok(Value::from(unescape_html(
        json.as_str().unwrap_or_default(),
    )))
}

/// Undoes the escapes that make JSON safe inside HTML.
fn unescape_html(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    let mut rest = json;
    while let Some(at) = rest.find('\\') {
        text.push_str(&rest[..at]);
        rest = &rest[at..];
        let html = [
            ("\\u003c", "<"),
            ("\\u003e", ">"),
            ("\\u0026", "&"),
            ("\\u0027", "'"),
        ];
        let (taken, written) = match html
            .into_iter()
            .find(|(escape, _)| rest.starts_with(escape))
        {
            Some((escape, character)) => (escape.len(), character),
            // Every other escape begins with the backslash and one ASCII character.
            None => (2, &rest[..2]),
        };
        text.push_str(written);
        rest = &rest[taken..];
    }
    text.push_str(rest);
    text
}
