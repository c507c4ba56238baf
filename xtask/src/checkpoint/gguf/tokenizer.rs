//! The tokenizer of a GGUF file as `tokenizer.json`.
//!
//! What depends on the kind of tokenizer is below; kinds other than byte-level and SentencePiece BPE are refused by name.
//! Control tokens become special added tokens, so that an encoder can be told to treat their text as plain text.

mod byte_level;
mod sentencepiece;

use std::collections::HashMap;

use anyhow::{Context, bail, ensure};
use serde_json::{Map, Value as Json, json};

use super::Metadata;
use crate::checkpoint::TextFiles;

/// What the tokenizer part of the metadata says.
pub struct Tokenizer {
    pub text: TextFiles,
    /// Tokens that end an answer.
    pub eos_token_ids: Vec<u32>,
}

/// `tokenizer.ggml.token_type`.
#[derive(Clone, Copy, Debug, PartialEq)]
enum TokenType {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

/// The vocabulary.
struct Tokens<'a> {
    texts: Vec<&'a str>,
    types: Vec<TokenType>,
    ids: HashMap<&'a str, u32>,
}

/// The parts of `tokenizer.json` that depend on the kind of tokenizer.
struct Parts<'a> {
    normalizer: Json,
    pre_tokenizer: Json,
    /// What comes before the one that adds the beginning-of-sequence token.
    post_processor: Option<Json>,
    decoder: Json,
    bpe: Bpe<'a>,
    /// Whether a prompt starts with the beginning-of-sequence token when the file doesn't say.
    add_bos: bool,
}

/// Settings of the BPE model.
struct Bpe<'a> {
    merges: Vec<(&'a str, &'a str)>,
    /// A piece that is a token is taken whole, without merging.
    ignore_merges: bool,
    /// Characters outside the vocabulary become byte tokens.
    byte_fallback: bool,
    unknown: Option<&'a str>,
}

/// Reads the `tokenizer.*` keys. `vocab_size` is the number of rows of the embedding, which must have one token each.
pub fn read(metadata: &Metadata, vocab_size: usize) -> anyhow::Result<Tokenizer> {
    let tokens = Tokens::read(metadata, vocab_size)?;
    let model = metadata
        .text("tokenizer.ggml.model")?
        .context("metadata key tokenizer.ggml.model is missing")?;
    let parts = match model {
        "gpt2" => byte_level::read(metadata, &tokens)?,
        "llama" => sentencepiece::read(metadata, &tokens)?,
        other => bail!("tokenizer.ggml.model {other} is not supported, only gpt2 and llama"),
    };
    ensure!(
        metadata.flag("tokenizer.ggml.add_eos_token")? != Some(true),
        "tokenizer.ggml.add_eos_token true is not supported"
    );

    let bos = tokens.special(metadata, "bos_token_id")?;
    let eos = tokens.special(metadata, "eos_token_id")?;
    let mut eos_token_ids: Vec<u32> = Vec::new();
    for key in ["eos_token_id", "eot_token_id", "eom_token_id"] {
        if let Some((id, _)) = tokens.special(metadata, key)?
            && !eos_token_ids.contains(&id)
        {
            eos_token_ids.push(id);
        }
    }
    ensure!(
        !eos_token_ids.is_empty(),
        "metadata key tokenizer.ggml.eos_token_id is missing"
    );

    let add_bos = metadata
        .flag("tokenizer.ggml.add_bos_token")?
        .unwrap_or(parts.add_bos);
    ensure!(
        !add_bos || bos.is_some(),
        "tokenizer.ggml.add_bos_token is true, but tokenizer.ggml.bos_token_id is missing"
    );
    let tokenizer_json = tokenizer_json(&tokens, parts, bos.filter(|_| add_bos));
    Ok(Tokenizer {
        text: TextFiles {
            tokenizer_json: serde_json::to_string(&tokenizer_json)?,
            chat_template: metadata
                .text("tokenizer.chat_template")?
                .map(str::to_string),
            bos_token: bos.map(|(_, text)| text.to_string()),
            eos_token: eos.map(|(_, text)| text.to_string()),
            add_bos,
        },
        eos_token_ids,
    })
}

impl<'a> Tokens<'a> {
    fn read(metadata: &'a Metadata, vocab_size: usize) -> anyhow::Result<Tokens<'a>> {
        let texts = metadata
            .texts("tokenizer.ggml.tokens")?
            .context("metadata key tokenizer.ggml.tokens is missing")?;
        ensure!(
            texts.len() == vocab_size,
            "tokenizer.ggml.tokens has {} tokens, but the embedding has {vocab_size} rows",
            texts.len()
        );
        let mut ids = HashMap::with_capacity(texts.len());
        for (id, &text) in texts.iter().enumerate() {
            if let Some(first) = ids.insert(text, id as u32) {
                bail!("tokenizer.ggml.tokens has {text:?} twice, as {first} and {id}");
            }
        }

        let types = metadata
            .array("tokenizer.ggml.token_type")?
            .context("metadata key tokenizer.ggml.token_type is missing")?;
        ensure!(
            types.len() == texts.len(),
            "tokenizer.ggml.token_type has {} entries for {} tokens",
            types.len(),
            texts.len()
        );
        let types = types
            .iter()
            .enumerate()
            .map(|(id, value)| match value.as_u64() {
                Some(1) => Ok(TokenType::Normal),
                Some(2) => Ok(TokenType::Unknown),
                Some(3) => Ok(TokenType::Control),
                Some(4) => Ok(TokenType::UserDefined),
                Some(5) => Ok(TokenType::Unused),
                Some(6) => Ok(TokenType::Byte),
                _ => bail!(
                    "tokenizer.ggml.token_type of token {id} is {value:?}, allowed are 1 to 6"
                ),
            });
        Ok(Tokens {
            types: types.collect::<anyhow::Result<_>>()?,
            texts,
            ids,
        })
    }

    /// The token that a key names.
    fn special(&self, metadata: &Metadata, key: &str) -> anyhow::Result<Option<(u32, &'a str)>> {
        let key = format!("tokenizer.ggml.{key}");
        let Some(id) = metadata.token_id(&key)? else {
            return Ok(None);
        };
        let count = self.texts.len();
        let text = self.texts.get(id as usize);
        let text =
            text.with_context(|| format!("{key} is {id}, but there are only {count} tokens"))?;
        Ok(Some((id, text)))
    }
}

fn tokenizer_json(tokens: &Tokens, parts: Parts, first: Option<(u32, &str)>) -> Json {
    let added_tokens = tokens.texts.iter().zip(&tokens.types).enumerate();
    let added_tokens = added_tokens.filter_map(|(id, (text, kind))| {
        let special = match kind {
            TokenType::Normal | TokenType::Unused | TokenType::Byte => return None,
            TokenType::Unknown | TokenType::Control => true,
            TokenType::UserDefined => false,
        };
        Some(json!({
            "id": id,
            "content": text,
            "single_word": false,
            "lstrip": false,
            "rstrip": false,
            "normalized": false,
            "special": special,
        }))
    });

    let template = first.map(|(id, text)| {
        let first = |type_id| json!({"SpecialToken": {"id": text, "type_id": type_id}});
        let sequence = |name, type_id| json!({"Sequence": {"id": name, "type_id": type_id}});
        json!({
            "type": "TemplateProcessing",
            "single": [first(0), sequence("A", 0)],
            "pair": [first(0), sequence("A", 0), first(1), sequence("B", 1)],
            "special_tokens": {text: {"id": text, "ids": [id], "tokens": [text]}},
        })
    });
    let post_processor = match (parts.post_processor, template) {
        (Some(one), Some(other)) => json!({"type": "Sequence", "processors": [one, other]}),
        (one, other) => one.or(other).unwrap_or(Json::Null),
    };

    let vocab = tokens
        .texts
        .iter()
        .enumerate()
        .map(|(id, text)| (text.to_string(), json!(id)));
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added_tokens.collect::<Vec<_>>(),
        "normalizer": parts.normalizer,
        "pre_tokenizer": parts.pre_tokenizer,
        "post_processor": post_processor,
        "decoder": parts.decoder,
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": parts.bpe.unknown,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": parts.bpe.unknown.is_some(),
            "byte_fallback": parts.bpe.byte_fallback,
            "ignore_merges": parts.bpe.ignore_merges,
            "vocab": vocab.collect::<Map<_, _>>(),
            "merges": parts.bpe.merges,
        },
    })
}
