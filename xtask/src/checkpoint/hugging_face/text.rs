//! Tokenizer and chat template of a checkpoint directory.
//!
//! `tokenizer.json` is taken as it is. Its post-processor says whether a prompt starts with the beginning-of-sequence token; one that adds anything
//! else is refused.

use std::fs;
use std::path::Path;

use anyhow::{Context, bail, ensure};
use serde_json::Value;

use super::fields::{Fields, as_size};
use crate::checkpoint::TextFiles;

const TOKENIZER: &str = "tokenizer.json";
const CONFIG: &str = "tokenizer_config.json";
const SPECIAL_TOKENS: &str = "special_tokens_map.json";
const TEMPLATE: &str = "chat_template.jinja";

/// Reads the text files. `vocab_size` is the number of rows of the embedding: no token may be beyond it.
pub fn read(directory: &Path, vocab_size: usize) -> anyhow::Result<TextFiles> {
    let tokenizer_json = fs::read_to_string(directory.join(TOKENIZER)).context(TOKENIZER)?;
    let tokenizer: Value = serde_json::from_str(&tokenizer_json)
        .with_context(|| format!("{TOKENIZER} is not JSON"))?;
    require_rows(&tokenizer, vocab_size)?;

    let mut config = Fields::read_optional(directory, CONFIG)?;
    let mut special = Fields::read_optional(directory, SPECIAL_TOKENS)?;
    let mut token = |key: &str| -> anyhow::Result<Option<String>> {
        for fields in [&mut config, &mut special].into_iter().flatten() {
            // A null in the first file says that there is no such token, whatever the older second file says.
            let decided = fields.contains(key);
            if let Some(value) = fields.take(key) {
                return token_text(key, value).map(Some);
            }
            if decided {
                return Ok(None);
            }
        }
        Ok(None)
    };
    let mut bos_token = token("bos_token")?;
    let eos_token = token("eos_token")?;

    let stated_bos = config
        .as_mut()
        .map(|config| config.flag("add_bos_token"))
        .transpose()?
        .flatten();
    let stated_eos = config
        .as_mut()
        .map(|config| config.flag("add_eos_token"))
        .transpose()?
        .flatten();
    ensure!(
        stated_eos != Some(true),
        "{CONFIG}: add_eos_token true is not supported"
    );
    let add_bos = match tokenizer
        .get("post_processor")
        .filter(|processor| !processor.is_null())
    {
        None => stated_bos.unwrap_or(false),
        Some(processor) => {
            let first = first_token(processor)?;
            let adds = first.is_some();
            if let Some(stated) = stated_bos {
                ensure!(
                    stated == adds,
                    "{CONFIG} has add_bos_token {stated}, but the post_processor of {TOKENIZER} says {adds}: make them agree"
                );
            }
            if let (Some(first), Some(bos)) = (&first, &bos_token) {
                ensure!(
                    first == bos,
                    "the post_processor of {TOKENIZER} starts a prompt with {first}, but bos_token is {bos}"
                );
            }
            bos_token = bos_token.or(first);
            adds
        }
    };
    ensure!(
        !add_bos || bos_token.is_some(),
        "{CONFIG}: add_bos_token is true, but there is no bos_token"
    );

    let chat_template = if directory.join(TEMPLATE).exists() {
        Some(fs::read_to_string(directory.join(TEMPLATE)).context(TEMPLATE)?)
    } else {
        let template = config
            .as_mut()
            .and_then(|config| config.take("chat_template"));
        template.map(named_template).transpose()?
    };
    Ok(TextFiles {
        tokenizer_json,
        chat_template,
        bos_token,
        eos_token,
        add_bos,
    })
}

/// The embedding must have a row for every token.
fn require_rows(tokenizer: &Value, vocab_size: usize) -> anyhow::Result<()> {
    let model = tokenizer
        .get("model")
        .with_context(|| format!("{TOKENIZER} has no model"))?;
    let highest = match model.get("vocab") {
        Some(Value::Object(vocab)) => vocab.values().filter_map(as_size).max(),
        Some(Value::Array(vocab)) => vocab.len().checked_sub(1),
        _ => bail!("{TOKENIZER}: model has no vocab"),
    };
    let added = tokenizer
        .get("added_tokens")
        .and_then(Value::as_array)
        .into_iter()
        .flatten();
    let highest = added
        .filter_map(|token| token.get("id").and_then(as_size))
        .max()
        .max(highest);
    if let Some(highest) = highest {
        ensure!(
            highest < vocab_size,
            "{TOKENIZER} has token id {highest}, but the embedding has only {vocab_size} rows"
        );
    }
    Ok(())
}

/// A special token is its text, or an object that has it as `content`.
fn token_text(key: &str, value: Value) -> anyhow::Result<String> {
    match &value {
        Value::String(text) => Ok(text.clone()),
        Value::Object(token) => match token.get("content") {
            Some(Value::String(text)) => Ok(text.clone()),
            _ => bail!("{key} has no content: {value}"),
        },
        _ => bail!("{key} is {value}, expected a string or an object with a content"),
    }
}

/// The template itself, or the one named `default` of a list.
fn named_template(value: Value) -> anyhow::Result<String> {
    let templates = match value {
        Value::String(template) => return Ok(template),
        Value::Array(templates) => templates,
        other => bail!(
            "{CONFIG}: chat_template is {other}, expected a string or a list of named templates"
        ),
    };
    let named = |template: &Value, key: &str| {
        template
            .get(key)
            .and_then(Value::as_str)
            .map(str::to_string)
    };
    let default = templates
        .iter()
        .find(|template| named(template, "name").as_deref() == Some("default"));
    default
        .and_then(|template| named(template, "template"))
        .with_context(|| {
            let names: Vec<String> = templates
                .iter()
                .filter_map(|template| named(template, "name"))
                .collect();
            format!("{CONFIG}: chat_template has no template named default, only {names:?}")
        })
}

/// The token a post-processor puts before a text, if any.
fn first_token(processor: &Value) -> anyhow::Result<Option<String>> {
    let kind = processor
        .get("type")
        .and_then(Value::as_str)
        .unwrap_or("without type");
    match kind {
        "ByteLevel" => Ok(None),
        "Sequence" => {
            let processors = processor
                .get("processors")
                .and_then(Value::as_array)
                .into_iter()
                .flatten();
            let mut first = None;
            for processor in processors {
                if let Some(token) = first_token(processor)? {
                    ensure!(
                        first.is_none(),
                        "{TOKENIZER}: post_processor puts more than one token before a prompt"
                    );
                    first = Some(token);
                }
            }
            Ok(first)
        }
        "TemplateProcessing" => {
            let pieces: Vec<&Value> = processor
                .get("single")
                .and_then(Value::as_array)
                .into_iter()
                .flatten()
                .collect();
            let token = |piece: &Value| {
                piece
                    .pointer("/SpecialToken/id")
                    .and_then(Value::as_str)
                    .map(str::to_string)
            };
            let is_text = |piece: &Value| piece.pointer("/Sequence/id").is_some();
            match pieces[..] {
                [text] if is_text(text) => Ok(None),
                [first, text] if token(first).is_some() && is_text(text) => Ok(token(first)),
                _ => bail!(
                    "{TOKENIZER}: a post_processor that adds more than one token before a prompt is not supported: {}",
                    processor["single"]
                ),
            }
        }
        other => bail!(
            "{TOKENIZER}: post_processor {other} is not supported, only ByteLevel, TemplateProcessing and Sequence"
        ),
    }
}
