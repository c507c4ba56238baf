//! Byte-level BPE (`tokenizer.ggml.model` = `gpt2`): GPT-2 and its heirs.
//!
//! A wrong pre-tokenizer gives plausible but wrong token ids, so a `tokenizer.ggml.pre` that isn't listed here is refused.

use anyhow::{Context, bail, ensure};
use serde_json::{Value as Json, json};

use super::{Bpe, Metadata, Parts, TokenType, Tokens};

/// Regex of the GPT-2 pre-tokenizer, without the last alternative for white space, which leaves the same pieces.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

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

fn pre_tokenizer(name: &str) -> anyhow::Result<PreTokenizer> {
    let cut = |splits| PreTokenizer {
        splits,
        nfc: false,
        ignore_merges: false,
        add_bos: false,
    };
    Ok(match name {
        // What a file without the key gets.
        "default" => cut(&[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"]),
        "gpt-2" => cut(&[GPT2]),
        "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" => cut(&[r"\p{N}", GPT2]),
        "llama-bpe" | "llama3" | "llama-v3" | "falcon3" => PreTokenizer {
            ignore_merges: true,
            add_bos: true,
            ..cut(&[LLAMA3])
        },
        "smaug-bpe" | "dbrx" => cut(&[LLAMA3]),
        "qwen2" => PreTokenizer {
            nfc: true,
            ..cut(&[QWEN2])
        },
        "tekken" => PreTokenizer {
            ignore_merges: true,
            add_bos: true,
            ..cut(&[TEKKEN])
        },
        other => bail!(
            "tokenizer.ggml.pre {other} is not supported, only default, gpt-2, smollm, starcoder, refact, command-r, codeshell, \
             llama-bpe, falcon3, smaug-bpe, dbrx, qwen2 and tekken"
        ),
    })
}

/// Reads the keys of this kind of tokenizer.
pub fn read<'a>(metadata: &'a Metadata, tokens: &Tokens<'a>) -> anyhow::Result<Parts<'a>> {
    let pre = pre_tokenizer(metadata.text("tokenizer.ggml.pre")?.unwrap_or("default"))?;
    ensure!(
        metadata.flag("tokenizer.ggml.add_space_prefix")? != Some(true),
        "tokenizer.ggml.add_space_prefix true is not supported for byte-level BPE"
    );
    let byte = tokens
        .types
        .iter()
        .position(|&kind| kind == TokenType::Byte);
    if let Some(id) = byte {
        bail!("token {id} is a byte token, which byte-level BPE doesn't have");
    }

    let splits = pre.splits.iter().map(
        |regex| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false}),
    );
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    Ok(Parts {
        normalizer: if pre.nfc {
            json!({"type": "NFC"})
        } else {
            Json::Null
        },
        pre_tokenizer: json!({"type": "Sequence", "pretokenizers": splits.chain([bytes.clone()]).collect::<Vec<_>>()}),
        post_processor: Some(bytes.clone()),
        decoder: bytes,
        bpe: Bpe {
            merges: merges(metadata, tokens)?,
            ignore_merges: pre.ignore_merges,
            byte_fallback: false,
            unknown: None,
        },
        add_bos: pre.add_bos,
    })
}

fn merges<'a>(metadata: &'a Metadata, tokens: &Tokens) -> anyhow::Result<Vec<(&'a str, &'a str)>> {
    let merges = metadata
        .texts("tokenizer.ggml.merges")?
        .context("metadata key tokenizer.ggml.merges is missing")?;
    let pairs = merges.iter().enumerate().map(|(index, merge)| {
        let pair = merge.split_once(' ').filter(|(left, right)| {
            let known = |token: &str| tokens.ids.contains_key(token);
            known(left) && known(right) && known(&format!("{left}{right}"))
        });
        pair.with_context(|| format!("tokenizer.ggml.merges: {merge:?} (number {index}) doesn't join two tokens to a third"))
    });
    pairs.collect()
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
