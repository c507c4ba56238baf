//! The tokenizer of a GGUF file as `tokenizer.json`.
//!
//! Byte-level BPE (`tokenizer.ggml.model` = `gpt2`) with the pre-tokenizers listed in [`pre_tokenizer`]; everything else is refused by name, since
//! a wrong pre-tokenizer gives plausible but wrong token ids.
//! Control tokens become special added tokens, so that an encoder can be told to treat their text as plain text.

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

/// Regex of the GPT-2 pre-tokenizer, without the last alternative for white space, which leaves the same pieces.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// How text is cut before BPE.
struct PreTokenizer {
    /// Regexes applied one after the other, each isolating its matches inside the pieces of the one before.
    splits: &'static [&'static str],
    /// Text is brought to NFC first.
    nfc: bool,
    /// A piece that is a token is taken whole, without merging.
    ignore_merges: bool,
    /// Whether a prompt starts with the beginning-of-sequence token when the file doesn't say.
    add_bos: bool,
}

/// The pre-tokenizer of a `tokenizer.ggml.pre` value.
fn pre_tokenizer(name: &str) -> anyhow::Result<PreTokenizer> {
    let plain = PreTokenizer {
        splits: &[GPT2],
        nfc: false,
        ignore_merges: false,
        add_bos: false,
    };
    Ok(match name {
        // What a file without the key gets.
        "default" => PreTokenizer {
            splits: &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
            ..plain
        },
        "gpt-2" => plain,
        "smollm" => PreTokenizer {
            splits: &[r"\p{N}", GPT2],
            ..plain
        },
        "llama-bpe" | "llama3" | "llama-v3" => PreTokenizer {
            splits: &[LLAMA3],
            ignore_merges: true,
            add_bos: true,
            ..plain
        },
        "qwen2" => PreTokenizer {
            splits: &[QWEN2],
            nfc: true,
            ..plain
        },
        other => bail!(
            "tokenizer.ggml.pre {other} is not supported, only default, gpt-2, smollm, llama-bpe and qwen2"
        ),
    })
}

/// `tokenizer.ggml.token_type`.
#[derive(Clone, Copy, PartialEq)]
enum TokenType {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
}

/// Reads the `tokenizer.*` keys. `vocab_size` is the number of rows of the embedding, which must have one token each.
pub fn read(metadata: &Metadata, vocab_size: usize) -> anyhow::Result<Tokenizer> {
    let model = metadata
        .text("tokenizer.ggml.model")?
        .context("metadata key tokenizer.ggml.model is missing")?;
    ensure!(
        model == "gpt2",
        "tokenizer.ggml.model {model} is not supported, only gpt2 (byte-level BPE)"
    );
    let pre = pre_tokenizer(metadata.text("tokenizer.ggml.pre")?.unwrap_or("default"))?;
    ensure!(
        metadata.flag("tokenizer.ggml.add_space_prefix")? != Some(true),
        "tokenizer.ggml.add_space_prefix true is not supported for byte-level BPE"
    );
    ensure!(
        metadata.flag("tokenizer.ggml.add_eos_token")? != Some(true),
        "tokenizer.ggml.add_eos_token true is not supported"
    );

    let tokens = metadata
        .texts("tokenizer.ggml.tokens")?
        .context("metadata key tokenizer.ggml.tokens is missing")?;
    ensure!(
        tokens.len() == vocab_size,
        "tokenizer.ggml.tokens has {} tokens, but the embedding has {vocab_size} rows",
        tokens.len()
    );
    let types = token_types(metadata, tokens.len())?;
    let vocabulary = vocabulary(&tokens)?;
    let merges = merges(metadata, &vocabulary)?;

    let token = |key: &str| -> anyhow::Result<Option<(u32, String)>> {
        let Some(id) = metadata.token_id(key)? else {
            return Ok(None);
        };
        let text = tokens
            .get(id as usize)
            .with_context(|| format!("{key} is {id}, but there are only {vocab_size} tokens"))?;
        Ok(Some((id, text.to_string())))
    };
    let bos = token("tokenizer.ggml.bos_token_id")?;
    let eos = token("tokenizer.ggml.eos_token_id")?;
    let mut eos_token_ids: Vec<u32> = Vec::new();
    for key in ["eos_token_id", "eot_token_id", "eom_token_id"] {
        if let Some((id, _)) = token(&format!("tokenizer.ggml.{key}"))?
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
        .unwrap_or(pre.add_bos);
    ensure!(
        !add_bos || bos.is_some(),
        "tokenizer.ggml.add_bos_token is true, but tokenizer.ggml.bos_token_id is missing"
    );
    let tokenizer_json = tokenizer_json(
        &tokens,
        &types,
        &vocabulary,
        &merges,
        &pre,
        bos.as_ref().filter(|_| add_bos),
    );
    Ok(Tokenizer {
        text: TextFiles {
            tokenizer_json: serde_json::to_string(&tokenizer_json)?,
            chat_template: metadata
                .text("tokenizer.chat_template")?
                .map(str::to_string),
            bos_token: bos.map(|(_, text)| text),
            eos_token: eos.map(|(_, text)| text),
            add_bos,
        },
        eos_token_ids,
    })
}

fn token_types(metadata: &Metadata, count: usize) -> anyhow::Result<Vec<TokenType>> {
    let values = metadata
        .array("tokenizer.ggml.token_type")?
        .context("metadata key tokenizer.ggml.token_type is missing")?;
    ensure!(
        values.len() == count,
        "tokenizer.ggml.token_type has {} entries for {count} tokens",
        values.len()
    );
    let types = values.iter().enumerate().map(|(id, value)| match value.as_u64() {
        Some(1) => Ok(TokenType::Normal),
        Some(2) => Ok(TokenType::Unknown),
        Some(3) => Ok(TokenType::Control),
        Some(4) => Ok(TokenType::UserDefined),
        Some(5) => Ok(TokenType::Unused),
        _ => bail!("tokenizer.ggml.token_type of token {id} is {value:?}, which byte-level BPE doesn't have"),
    });
    types.collect()
}

fn vocabulary<'a>(tokens: &[&'a str]) -> anyhow::Result<HashMap<&'a str, u32>> {
    let mut ids = HashMap::with_capacity(tokens.len());
    for (id, &token) in tokens.iter().enumerate() {
        if let Some(first) = ids.insert(token, id as u32) {
            bail!("tokenizer.ggml.tokens has {token:?} twice, as {first} and {id}");
        }
    }
    Ok(ids)
}

fn merges<'a>(
    metadata: &'a Metadata,
    vocabulary: &HashMap<&str, u32>,
) -> anyhow::Result<Vec<(&'a str, &'a str)>> {
    let merges = metadata
        .texts("tokenizer.ggml.merges")?
        .context("metadata key tokenizer.ggml.merges is missing")?;
    let pairs = merges.iter().enumerate().map(|(index, merge)| {
        let pair = merge.split_once(' ').filter(|(left, right)| {
            let known = |token: &str| vocabulary.contains_key(token);
            known(left) && known(right) && known(&format!("{left}{right}"))
        });
        pair.with_context(|| format!("tokenizer.ggml.merges: {merge:?} (number {index}) doesn't join two tokens to a third"))
    });
    pairs.collect()
}

fn tokenizer_json(
    tokens: &[&str],
    types: &[TokenType],
    vocabulary: &HashMap<&str, u32>,
    merges: &[(&str, &str)],
    pre: &PreTokenizer,
    first: Option<&(u32, String)>,
) -> Json {
    let added_tokens = tokens
        .iter()
        .zip(types)
        .enumerate()
        .filter(|(_, (_, kind))| !matches!(kind, TokenType::Normal | TokenType::Unused));
    let added_tokens: Vec<Json> = added_tokens
        .map(|(id, (token, kind))| {
            json!({
                "id": id,
                "content": token,
                "single_word": false,
                "lstrip": false,
                "rstrip": false,
                "normalized": false,
                "special": *kind != TokenType::UserDefined,
            })
        })
        .collect();

    let splits = pre.splits.iter().map(|regex| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false}));
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    let post_processor = match first {
        None => json!(bytes),
        Some((id, bos)) => json!({
            "type": "Sequence",
            "processors": [
                bytes,
                {
                    "type": "TemplateProcessing",
                    "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                    "pair": [
                        {"SpecialToken": {"id": bos, "type_id": 0}},
                        {"Sequence": {"id": "A", "type_id": 0}},
                        {"SpecialToken": {"id": bos, "type_id": 1}},
                        {"Sequence": {"id": "B", "type_id": 1}},
                    ],
                    "special_tokens": {bos: {"id": bos, "ids": [id], "tokens": [bos]}},
                },
            ],
        }),
    };
    let vocab: Map<String, Json> = tokens
        .iter()
        .map(|token| (token.to_string(), json!(vocabulary[token])))
        .collect();
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added_tokens,
        "normalizer": if pre.nfc { json!({"type": "NFC"}) } else { Json::Null },
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits.chain([bytes.clone()]).collect::<Vec<_>>()},
        "post_processor": post_processor,
        "decoder": bytes,
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": pre.ignore_merges,
            "vocab": vocab,
            "merges": merges,
        },
    })
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;
    use tokenizers::Tokenizer as Encoder;

    use crate::checkpoint::testing::{golden, reference_gguf};

    #[derive(Deserialize)]
    struct Case {
        text: String,
        plain: Vec<u32>,
        with_specials: Vec<u32>,
    }

    #[test]
    fn the_reference_tokenizer_gives_the_ids_of_all_golden_strings() {
        let checkpoint = crate::checkpoint::open(&reference_gguf()).unwrap();
        let mut encoder: Encoder = checkpoint.text.tokenizer_json.parse().unwrap();
        let cases: Vec<Case> =
            serde_json::from_slice(&std::fs::read(golden("smollm2-135m/tokenizer.json")).unwrap())
                .unwrap();
        assert_eq!(cases.len(), 25);
        for case in cases {
            for (as_text, expected) in [(true, &case.plain), (false, &case.with_specials)] {
                encoder.set_encode_special_tokens(as_text);
                let encoding = encoder.encode(case.text.as_str(), true).unwrap();
                assert_eq!(
                    encoding.get_ids(),
                    expected,
                    "{:?}, special tokens as text: {as_text}",
                    case.text
                );
                assert_eq!(encoder.decode(expected, false).unwrap(), case.text);
            }
        }
        assert_eq!(checkpoint.generation.eos_token_ids, [2]);
        assert_eq!(checkpoint.text.bos_token.as_deref(), Some("<|im_start|>"));
        assert_eq!(checkpoint.text.eos_token.as_deref(), Some("<|im_end|>"));
        assert!(!checkpoint.text.add_bos);
        assert!(
            checkpoint
                .text
                .chat_template
                .unwrap()
                .contains("add_generation_prompt")
        );
    }
}
