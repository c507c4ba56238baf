//! SentencePiece BPE (`tokenizer.ggml.model` = `llama`): Llama 1 and 2, the first Mistral models, TinyLlama.
//!
//! Pieces have scores instead of merges: text is joined to the piece of the highest score first. The merges that do the same are every way to
//! put a piece together from two others, in the order of the scores of the results.
//! Text outside the vocabulary falls back to byte tokens.

use anyhow::{Context, ensure};
use serde_json::{Value as Json, json};

use super::{Bpe, Metadata, Parts, TokenType, Tokens};
use crate::checkpoint::gguf::Value;

/// Stands for a space inside tokens.
const SPACE: &str = "\u{2581}";

/// Reads the keys of this kind of tokenizer.
pub fn read<'a>(metadata: &'a Metadata, tokens: &Tokens<'a>) -> anyhow::Result<Parts<'a>> {
    if let Some(pre) = metadata.text("tokenizer.ggml.pre")? {
        ensure!(
            pre == "default",
            "tokenizer.ggml.pre {pre} is not supported for SentencePiece, only default"
        );
    }
    ensure!(
        metadata.flag("tokenizer.ggml.remove_extra_whitespaces")? != Some(true),
        "tokenizer.ggml.remove_extra_whitespaces true is not supported"
    );
    ensure!(
        metadata
            .array("tokenizer.ggml.precompiled_charsmap")?
            .is_none_or(<[_]>::is_empty),
        "tokenizer.ggml.precompiled_charsmap is not supported"
    );
    let missing =
        (0..=u8::MAX).find(|byte| !tokens.ids.contains_key(format!("<0x{byte:02X}>").as_str()));
    if let Some(byte) = missing {
        anyhow::bail!(
            "tokenizer.ggml.tokens has no byte token <0x{byte:02X}>, and SentencePiece without byte fallback is not supported"
        );
    }
    let unknown = tokens
        .types
        .iter()
        .position(|&kind| kind == TokenType::Unknown);
    let unknown = unknown.context("tokenizer.ggml.token_type marks no token as unknown")?;

    let prefix = metadata
        .flag("tokenizer.ggml.add_space_prefix")?
        .unwrap_or(true);
    let mut normalizers =
        vec![json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})];
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if prefix {
        normalizers.insert(0, json!({"type": "Prepend", "prepend": SPACE}));
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    Ok(Parts {
        normalizer: json!({"type": "Sequence", "normalizers": normalizers}),
        pre_tokenizer: Json::Null,
        post_processor: None,
        decoder: json!({"type": "Sequence", "decoders": decoders}),
        bpe: Bpe {
            merges: merges(&scores(metadata, tokens)?, tokens),
            ignore_merges: false,
            byte_fallback: true,
            unknown: Some(tokens.texts[unknown]),
        },
        add_bos: true,
    })
}

fn scores(metadata: &Metadata, tokens: &Tokens) -> anyhow::Result<Vec<f32>> {
    let values = metadata
        .array("tokenizer.ggml.scores")?
        .context("metadata key tokenizer.ggml.scores is missing")?;
    ensure!(
        values.len() == tokens.texts.len(),
        "tokenizer.ggml.scores has {} entries for {} tokens",
        values.len(),
        tokens.texts.len()
    );
    let scores = values.iter().enumerate().map(|(id, value)| match value {
        Value::F32(score) if !score.is_nan() => Ok(*score),
        other => {
            anyhow::bail!("tokenizer.ggml.scores of token {id} is {other:?}, expected a number")
        }
    });
    scores.collect()
}

/// Every way to put a normal piece together from two others, best result first.
fn merges<'a>(scores: &[f32], tokens: &Tokens<'a>) -> Vec<(&'a str, &'a str)> {
    let is_normal = |text: &str| {
        tokens
            .ids
            .get(text)
            .is_some_and(|&id| tokens.types[id as usize] == TokenType::Normal)
    };
    let mut ranked = Vec::new();
    for (id, &text) in tokens.texts.iter().enumerate() {
        if tokens.types[id] != TokenType::Normal {
            continue;
        }
        for (at, _) in text.char_indices().skip(1) {
            let (left, right) = text.split_at(at);
            if is_normal(left) && is_normal(right) {
                ranked.push((-scores[id], id, left, right));
            }
        }
    }
    ranked.sort_by(|one, other| {
        let by_score = one.0.total_cmp(&other.0);
        by_score.then_with(|| (one.1, one.2).cmp(&(other.1, other.2)))
    });
    ranked
        .into_iter()
        .map(|(_, _, left, right)| (left, right))
        .collect()
}
