//! The fewest tokens that a text can make, by its bytes alone.
//!
//! Every byte of a text ends up in a token when nothing on the way drops text: no normaliser but those listed, no pre-tokeniser that removes what it
//! splits at, and a vocabulary in which the byte is a token. A byte then has at least that share of a token which it has in the longest token that it
//! occurs in, and a text makes at least as many tokens as the shares of its bytes add up to, whatever its tokens are.

use serde_json::Value;

use super::EncodeError;
use super::detokenizer::Detokenizer;

/// How much shorter than itself a text can become where characters change: in Unicode's canonical composition the Kelvin sign, three bytes, becomes a
/// `K`, and SentencePiece takes its own sign for a space, three bytes as well, for one.
const CHANGE_SHRINKS: usize = 3;

/// Bytes that occur in no UTF-8 text.
const NEVER_IN_UTF8: [std::ops::RangeInclusive<u8>; 2] = [0xc0..=0xc1, 0xf5..=0xff];

/// The stages of a tokenizer that could drop text, as its file describes them.
pub(super) struct Pipeline<'a> {
    pub(super) normalizer: &'a Value,
    pub(super) pre_tokenizer: &'a Value,
    pub(super) byte_fallback: bool,
}

/// What the stages of a tokenizer leave of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kept {
    /// How much shorter than itself it can become before it is cut into tokens.
    shrinking: usize,
    /// Whether it is cut between bytes, so that one that is no token goes alone.
    by_bytes: bool,
}

/// What is left of any text; `None` when it can be as little as nothing.
pub(super) fn keeps_text(pipeline: &Pipeline<'_>) -> Option<Kept> {
    let mut shrinking = 1;
    for step in steps(pipeline.normalizer, "normalizers") {
        match step["type"].as_str()? {
            "NFC" => shrinking = CHANGE_SHRINKS,
            "Prepend" => {}
            // The space of SentencePiece, which tokens turn into a space again.
            "Replace" if step["pattern"]["String"] == " " && step["content"] == "\u{2581}" => {
                shrinking = CHANGE_SHRINKS;
            }
            _ => return None,
        }
    }
    let mut by_bytes = false;
    for step in steps(pipeline.pre_tokenizer, "pretokenizers") {
        match step["type"].as_str()? {
            "ByteLevel" => by_bytes = true,
            "Metaspace" => shrinking = CHANGE_SHRINKS,
            "Digits" => {}
            "Split" if step["behavior"] != "Removed" => {}
            _ => return None,
        }
    }
    (by_bytes || pipeline.byte_fallback).then_some(Kept {
        shrinking,
        by_bytes,
    })
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

/// One token, in the unit that shares of it are counted in.
const TOKEN: u64 = 1 << 32;

/// What the bytes of a text are worth in tokens.
#[derive(Clone, Debug)]
pub(super) struct Shares {
    /// For each byte, its share of the longest token that it occurs in, rounded down.
    of: Box<[u64; 256]>,
    /// How much shorter than itself a text can become before it is cut into tokens.
    shrinking: usize,
    /// Bytes of the longest token, when every byte is one.
    longest: Option<usize>,
}

impl Shares {
    /// Those of a vocabulary; `None` when a byte that is no token takes others with it.
    pub(super) fn of(detokenizer: &Detokenizer, kept: Kept) -> Option<Self> {
        let mut longest_with = [0; 256];
        let mut is_token = [false; 256];
        for id in 0..detokenizer.vocab_size() {
            let bytes = detokenizer.token_bytes(id);
            for byte in bytes {
                let longest: &mut usize = &mut longest_with[usize::from(*byte)];
                *longest = bytes.len().max(*longest);
            }
            if let [byte] = bytes {
                is_token[usize::from(*byte)] = true;
            }
        }
        let is_missing = |byte: u8| {
            !is_token[usize::from(byte)] && !NEVER_IN_UTF8.iter().any(|range| range.contains(&byte))
        };
        let is_complete = !(0..=u8::MAX).any(is_missing);
        if !is_complete && !kept.by_bytes {
            return None;
        }
        let mut of = Box::new([0; 256]);
        for (byte, share) in of.iter_mut().enumerate() {
            // One that is no token is dropped.
            if is_token[byte] {
                *share = TOKEN / (longest_with[byte] as u64);
            }
        }
        Some(Self {
            of,
            shrinking: kept.shrinking,
            longest: longest_with.into_iter().max().filter(|_| is_complete),
        })
    }

    /// Fewest tokens that a text can make.
    fn tokens(&self, text: &str) -> usize {
        let bytes = text.as_bytes();
        let share = |byte: &u8| self.of[usize::from(*byte)];
        let sum: u64 = if self.shrinking == 1 {
            bytes.iter().map(share).sum()
        } else {
            // No ASCII character changes but one that a mark follows, and no mark is ASCII.
            bytes
                .windows(2)
                .filter(|pair| pair.is_ascii())
                .map(|pair| share(&pair[0]))
                .sum()
        };
        let by_share = usize::try_from(sum.div_ceil(TOKEN)).unwrap_or(usize::MAX);
        let by_length = self
            .longest
            .map_or(0, |longest| bytes.len().div_ceil(longest * self.shrinking));
        by_share.max(by_length)
    }
}

/// The longest text that is tokenised at all; by default there is none.
#[derive(Clone, Debug, Default)]
pub(super) struct LengthLimit(Option<Bound>);

#[derive(Clone, Debug)]
struct Bound {
    context_tokens: usize,
    shares: Shares,
}

impl LengthLimit {
    pub(super) fn of(context_tokens: usize, shares: Shares) -> Self {
        Self(Some(Bound {
            context_tokens,
            shares,
        }))
    }

    pub(super) fn check(&self, text: &str) -> Result<(), EncodeError> {
        let Some(Bound {
            context_tokens,
            shares,
        }) = &self.0
        else {
            return Ok(());
        };
        let least_tokens = shares.tokens(text);
        if least_tokens > *context_tokens {
            return Err(EncodeError::TooLong {
                bytes: text.len(),
                least_tokens,
                context_tokens: *context_tokens,
            });
        }
        Ok(())
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
                Some(3),
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
                keeps_text(&pipeline).map(|kept| kept.shrinking),
                *expected,
                "{normalizer} {pre_tokenizer}"
            );
        }
    }

    /// Shares of a vocabulary in which `a` has at most three bytes of company, and every other byte none; `!` is no token.
    fn shares(shrinking: usize) -> Shares {
        let mut of = Box::new([TOKEN; 256]);
        of[usize::from(b'a')] = TOKEN / 4;
        of[usize::from(b'!')] = 0;
        Shares {
            of,
            shrinking,
            longest: (shrinking > 1).then_some(4),
        }
    }

    #[test]
    fn the_shares_of_bytes_add_up_to_the_fewest_tokens() {
        for (text, shrinking, tokens) in [
            ("", 1, 0),
            ("aaaa", 1, 1),
            ("aaaaa", 1, 2),
            ("aaaa1", 1, 2),
            ("1111", 1, 4),
            ("!!!!!!!!a", 1, 1),
            ("\u{e9}", 1, 2),
            // The last one may be composed with what follows, and the others not.
            ("1111", 3, 3),
            ("11\u{301}1", 3, 1),
            ("\u{301}\u{301}\u{301}\u{301}\u{301}\u{301}\u{301}", 3, 2),
        ] {
            assert_eq!(shares(shrinking).tokens(text), tokens, "{text:?}");
        }
    }

    #[test]
    fn a_text_of_exactly_the_bound_is_tokenised() {
        let limit = LengthLimit::of(4, shares(1));
        assert!(limit.check(&"a".repeat(16)).is_ok());
        assert!(matches!(
            limit.check(&"a".repeat(17)),
            Err(EncodeError::TooLong {
                bytes: 17,
                least_tokens: 5,
                context_tokens: 4
            })
        ));
        assert!(LengthLimit::default().check(&"a".repeat(17)).is_ok());
    }
}
