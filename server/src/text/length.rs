//! The longest text that could fit into a context, by its bytes alone.
//!
//! Every byte of a text ends up in a token when nothing on the way drops text: no normaliser but those listed, no pre-tokeniser that removes what it
//! splits at, and a vocabulary in which every byte is a token. Then a text of more bytes than all tokens together can stand for does not fit,
//! whatever its tokens are.

use serde_json::Value;

use super::EncodeError;
use super::detokenizer::Detokenizer;

/// How much shorter than itself a text can become in Unicode's canonical composition: the Kelvin sign, three bytes, becomes a `K`.
const COMPOSITION_SHRINKS: usize = 3;

/// Bytes that occur in no UTF-8 text.
const NEVER_IN_UTF8: [std::ops::RangeInclusive<u8>; 2] = [0xc0..=0xc1, 0xf5..=0xff];

/// The stages of a tokenizer that could drop text, as its file describes them.
pub(super) struct Pipeline<'a> {
    pub(super) normalizer: &'a Value,
    pub(super) pre_tokenizer: &'a Value,
    pub(super) byte_fallback: bool,
}

/// By how much a text can shrink before it is cut into tokens; `None` when there is no such number.
pub(super) fn keeps_text(pipeline: &Pipeline<'_>) -> Option<usize> {
    let mut shrinking = 1;
    for step in steps(pipeline.normalizer, "normalizers") {
        match step["type"].as_str()? {
            "NFC" => shrinking = COMPOSITION_SHRINKS,
            "Prepend" => {}
            // The space of SentencePiece, which tokens turn into a space again.
            "Replace" if step["pattern"]["String"] == " " && step["content"] == "\u{2581}" => {}
            _ => return None,
        }
    }
    let mut is_byte_level = false;
    for step in steps(pipeline.pre_tokenizer, "pretokenizers") {
        match step["type"].as_str()? {
            "ByteLevel" => is_byte_level = true,
            "Metaspace" | "Digits" => {}
            "Split" if step["behavior"] != "Removed" => {}
            _ => return None,
        }
    }
    (is_byte_level || pipeline.byte_fallback).then_some(shrinking)
}

/// A stage, or the stages of a sequence of them.
fn steps<'a>(stage: &'a Value, list: &str) -> Vec<&'a Value> {
    match stage {
        Value::Null => Vec::new(),
        _ if stage["type"] == "Sequence" => stage[list]
            .as_array()
            .into_iter()
            .flatten()
            .flat_map(|inner| steps(inner, list))
            .collect(),
        _ => vec![stage],
    }
}

/// Most bytes of a text that one token can stand for; `None` when a byte is in no token of its own, so that it may be dropped.
pub(super) fn token_bytes_limit(detokenizer: &Detokenizer, shrinking: usize) -> Option<usize> {
    let mut longest = 0;
    let mut is_token = [false; 256];
    for id in 0..detokenizer.vocab_size() {
        let bytes = detokenizer.token_bytes(id);
        longest = longest.max(bytes.len());
        if let [byte] = bytes {
            is_token[usize::from(*byte)] = true;
        }
    }
    let is_missing = |byte: u8| {
        !is_token[usize::from(byte)] && !NEVER_IN_UTF8.iter().any(|range| range.contains(&byte))
    };
    let complete = !(0..=u8::MAX).any(is_missing);
    complete.then(|| longest * shrinking)
}

/// The longest text that is tokenised at all; by default there is none.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LengthLimit(Option<Bound>);

#[derive(Clone, Copy, Debug)]
struct Bound {
    context_tokens: usize,
    limit_bytes: usize,
}

impl LengthLimit {
    pub(super) fn of(context_tokens: usize, token_bytes: usize) -> Self {
        Self(Some(Bound {
            context_tokens,
            limit_bytes: context_tokens.saturating_mul(token_bytes),
        }))
    }

    pub(super) fn check(self, text: &str) -> Result<(), EncodeError> {
        match self.0 {
            Some(Bound {
                context_tokens,
                limit_bytes,
            }) if text.len() > limit_bytes => Err(EncodeError::TooLong {
                bytes: text.len(),
                limit_bytes,
                context_tokens,
            }),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_stages_that_drop_nothing_bound_a_text() {
        let byte_level = json!({"type": "ByteLevel"});
        let cases = [
            (json!(null), byte_level.clone(), false, Some(1)),
            (json!({"type": "NFC"}), byte_level.clone(), false, Some(3)),
            (json!({"type": "NFKC"}), byte_level.clone(), false, None),
            (json!({"type": "Strip"}), byte_level.clone(), false, None),
            (
                json!({"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}),
                byte_level.clone(),
                false,
                None,
            ),
            (
                json!({"type": "Sequence", "normalizers": [
                    {"type": "Prepend", "prepend": "\u{2581}"},
                    {"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"},
                ]}),
                json!(null),
                true,
                Some(1),
            ),
            (
                json!({"type": "Replace", "pattern": {"String": "x"}, "content": ""}),
                byte_level.clone(),
                false,
                None,
            ),
            (json!(null), json!(null), false, None),
            (json!(null), json!({"type": "Whitespace"}), true, None),
            (
                json!(null),
                json!({"type": "Sequence", "pretokenizers": [
                    {"type": "Split", "behavior": "Isolated"}, {"type": "ByteLevel"},
                ]}),
                false,
                Some(1),
            ),
            (
                json!(null),
                json!({"type": "Sequence", "pretokenizers": [
                    {"type": "Split", "behavior": "Removed"}, {"type": "ByteLevel"},
                ]}),
                false,
                None,
            ),
        ];
        for (normalizer, pre_tokenizer, byte_fallback, expected) in &cases {
            let pipeline = Pipeline {
                normalizer,
                pre_tokenizer,
                byte_fallback: *byte_fallback,
            };
            assert_eq!(
                keeps_text(&pipeline),
                *expected,
                "{normalizer} {pre_tokenizer}"
            );
        }
    }

    #[test]
    fn a_text_of_exactly_the_bound_is_tokenised() {
        let limit = LengthLimit::of(4, 3);
        assert!(limit.check(&"x".repeat(12)).is_ok());
        assert!(matches!(
            limit.check(&"x".repeat(13)),
            Err(EncodeError::TooLong {
                bytes: 13,
                limit_bytes: 12,
                context_tokens: 4
            })
        ));
        assert!(LengthLimit::default().check(&"x".repeat(13)).is_ok());
    }
}
