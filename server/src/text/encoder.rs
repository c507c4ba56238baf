//! Text to token ids with the tokenizer's own stages, where the caller says which parts may hold control tokens.
//!
//! The stages are those of the `tokenizers` library (added tokens, normaliser, pre-tokeniser, model) and the ids equal the library's for the same
//! text. Only the search for added tokens is done here, since the library can switch control tokens on or off for a whole text, not for a part.

use std::ops::Range;

use aho_corasick::{AhoCorasick, MatchKind};
use tokenizers::models::ModelWrapper;
use tokenizers::tokenizer::normalizer::Range as SliceRange;
use tokenizers::{
    AddedToken, Model, NormalizedString, Normalizer, OffsetReferential, OffsetType,
    PreTokenizedString, PreTokenizer, Token, Tokenizer,
};

use super::TextError;

/// Why a text has no token ids.
#[derive(Debug, thiserror::Error)]
pub enum EncodeError {
    /// The tokenizer could not take it, with the library's reason.
    #[error("the text can't be tokenised: {0}")]
    Refused(String),
    /// It is longer than any text that fits into the context, whatever its tokens are.
    #[error(
        "the prompt has {bytes} bytes, which make at least {least_tokens} tokens; the maximum context length is {context_tokens} tokens"
    )]
    TooLong {
        /// Its length.
        bytes: usize,
        /// Fewest tokens that it can make.
        least_tokens: usize,
        /// Tokens that the context holds.
        context_tokens: usize,
    },
}

/// Where control tokens may be found in a text.
#[derive(Clone, Copy)]
enum Control<'a> {
    Nowhere,
    /// Anywhere but on these sorted, disjoint byte ranges.
    Outside(&'a [Range<usize>]),
}

#[derive(Debug)]
pub(super) struct Encoder {
    tokenizer: Tokenizer,
    /// Control tokens, and ordinary added tokens that are found before normalisation.
    raw: Matcher,
    /// Ordinary added tokens that are found after normalisation.
    normalized: Matcher,
}

impl Encoder {
    pub(super) fn new(tokenizer: Tokenizer) -> Result<Self, TextError> {
        let unknown_token = match tokenizer.get_model() {
            ModelWrapper::BPE(bpe) if bpe.dropout.is_some_and(|dropout| dropout > 0.0) => {
                return Err(TextError::Unsupported(
                    "random merges (`dropout`)".to_owned(),
                ));
            }
            ModelWrapper::BPE(bpe) => bpe.get_unk_token().clone(),
            ModelWrapper::Unigram(_) => {
                return Err(TextError::Unsupported("a `Unigram` model".to_owned()));
            }
            ModelWrapper::WordLevel(_) => {
                return Err(TextError::Unsupported("a `WordLevel` model".to_owned()));
            }
            ModelWrapper::WordPiece(_) => {
                return Err(TextError::Unsupported("a `WordPiece` model".to_owned()));
            }
        };
        let mut added: Vec<(u32, AddedToken)> =
            tokenizer.get_added_tokens_decoder().into_iter().collect();
        added.sort_by_key(|(id, _)| *id);
        if let Some((_, token)) = added.iter().find(|(_, token)| token.single_word) {
            return Err(TextError::Unsupported(format!(
                "`single_word` in the added token {:?}",
                token.content
            )));
        }

        let (normalized, raw): (Vec<_>, Vec<_>) = added
            .into_iter()
            .partition(|(_, token)| token.normalized && !token.special);
        let raw = raw
            .into_iter()
            .map(|(id, token)| (token.content.clone(), id, token))
            .collect();
        let normalized = normalized
            .into_iter()
            .map(|(id, token)| {
                let mut pattern = NormalizedString::from(token.content.as_str());
                normalize(&tokenizer, &mut pattern)
                    .map_err(|error| TextError::Tokenizer(error.to_string()))?;
                Ok((pattern.get().to_owned(), id, token))
            })
            .collect::<Result<_, TextError>>()?;

        let encoder = Self {
            raw: Matcher::new(raw)?,
            normalized: Matcher::new(normalized)?,
            tokenizer,
        };
        for entry in encoder.raw.entries.iter().filter(|entry| entry.control) {
            // Text with characters the vocabulary lacks becomes the unknown token, so for that one the ids say nothing.
            if unknown_token.as_ref() == Some(&entry.pattern) {
                continue;
            }
            let ids = encoder
                .encode_plain(&entry.pattern)
                .map_err(|error| TextError::Tokenizer(error.to_string()))?;
            if ids.contains(&entry.id) {
                return Err(TextError::Unsupported(format!(
                    "a vocabulary in which the control token {:?} can't be told from its text",
                    entry.pattern
                )));
            }
        }
        Ok(encoder)
    }

    /// The texts of all control tokens.
    pub(super) fn control_texts(&self) -> impl Iterator<Item = &str> {
        self.raw
            .entries
            .iter()
            .filter(|entry| entry.control)
            .map(|entry| entry.pattern.as_str())
    }

    /// Whether an added token swallows white space around it, of any length.
    pub(super) fn swallows_space(&self) -> bool {
        self.raw
            .entries
            .iter()
            .chain(&self.normalized.entries)
            .any(|entry| entry.strip_left || entry.strip_right)
    }

    pub(super) fn encode_plain(&self, text: &str) -> Result<Vec<u32>, EncodeError> {
        self.run(text, Control::Nowhere)
    }

    /// Encodes a text in which control tokens may stand anywhere but on the given sorted, disjoint byte ranges.
    pub(super) fn encode(
        &self,
        text: &str,
        user_ranges: &[Range<usize>],
    ) -> Result<Vec<u32>, EncodeError> {
        self.run(text, Control::Outside(user_ranges))
    }

    fn run(&self, text: &str, control: Control<'_>) -> Result<Vec<u32>, EncodeError> {
        self.stages(text, control)
            .map_err(|error| EncodeError::Refused(error.to_string()))
    }

    fn stages(&self, text: &str, control: Control<'_>) -> tokenizers::Result<Vec<u32>> {
        let mut pieces = PreTokenizedString::from(text);
        pieces.split(|_, piece| self.raw.split(piece, control))?;
        pieces.split(|_, mut piece| {
            normalize(&self.tokenizer, &mut piece)?;
            self.normalized.split(piece, Control::Nowhere)
        })?;
        if let Some(pre_tokenizer) = self.tokenizer.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut pieces)?;
        }
        pieces.tokenize(|piece| self.tokenizer.get_model().tokenize(piece.get()))?;
        let splits = pieces.get_splits(OffsetReferential::Normalized, OffsetType::None);
        Ok(splits
            .into_iter()
            .filter_map(|(_, _, tokens)| tokens.as_ref())
            .flatten()
            .map(|token| token.id)
            .collect())
    }
}

fn normalize(tokenizer: &Tokenizer, text: &mut NormalizedString) -> tokenizers::Result<()> {
    match tokenizer.get_normalizer() {
        Some(normalizer) => normalizer.normalize(text),
        None => Ok(()),
    }
}

/// Finds added tokens in a text, the longest of those that begin first.
#[derive(Debug)]
struct Matcher {
    entries: Vec<Entry>,
    automaton: Option<AhoCorasick>,
}

#[derive(Debug)]
struct Entry {
    pattern: String,
    id: u32,
    control: bool,
    strip_left: bool,
    strip_right: bool,
}

impl Matcher {
    fn new(patterns: Vec<(String, u32, AddedToken)>) -> Result<Self, TextError> {
        let entries: Vec<Entry> = patterns
            .into_iter()
            .filter(|(pattern, ..)| !pattern.is_empty())
            .map(|(pattern, id, token)| Entry {
                pattern,
                id,
                control: token.special,
                strip_left: token.lstrip,
                strip_right: token.rstrip,
            })
            .collect();
        let automaton = match entries.is_empty() {
            true => None,
            false => Some(
                AhoCorasick::builder()
                    .match_kind(MatchKind::Standard)
                    .build(entries.iter().map(|entry| &entry.pattern))
                    .map_err(|error| TextError::Tokenizer(error.to_string()))?,
            ),
        };
        Ok(Self { entries, automaton })
    }

    /// Cuts a piece at the tokens it holds; the parts that are tokens carry their id.
    fn split(
        &self,
        piece: NormalizedString,
        control: Control<'_>,
    ) -> tokenizers::Result<Vec<(NormalizedString, Option<Vec<Token>>)>> {
        let found = self.find(piece.get(), control);
        if found.is_empty() {
            return Ok(vec![(piece, None)]);
        }
        let cut = |range: Range<usize>| {
            piece
                .slice(SliceRange::Normalized(range))
                .ok_or("an added token was found inside a character")
        };
        let mut parts = Vec::with_capacity(2 * found.len() + 1);
        let mut end = 0;
        for (range, id) in found {
            if end < range.start {
                parts.push((cut(end..range.start)?, None));
            }
            end = range.end;
            let token = cut(range)?;
            let value = token.get().to_owned();
            let length = value.len();
            parts.push((token, Some(vec![Token::new(id, value, (0, length))])));
        }
        if end < piece.get().len() {
            parts.push((cut(end..piece.get().len())?, None));
        }
        Ok(parts)
    }

    /// The byte ranges of the tokens in a text, with the white space around them that they swallow, in order and disjoint.
    fn find(&self, text: &str, control: Control<'_>) -> Vec<(Range<usize>, u32)> {
        let Some(automaton) = &self.automaton else {
            return Vec::new();
        };
        let mut candidates: Vec<(Range<usize>, &Entry)> = automaton
            .find_overlapping_iter(text)
            .map(|found| (found.range(), &self.entries[found.pattern().as_usize()]))
            .filter(|(range, entry)| !entry.control || control.allows(range))
            .collect();
        candidates.sort_by(|(a, _), (b, _)| a.start.cmp(&b.start).then(b.end.cmp(&a.end)));

        let mut found = Vec::new();
        let mut end = 0;
        for (range, entry) in candidates {
            if range.start < end {
                continue;
            }
            let start = match entry.strip_left {
                true => end + text[end..range.start].trim_end().len(),
                false => range.start,
            };
            end = match entry.strip_right {
                true => text.len() - text[range.end..].trim_start().len(),
                false => range.end,
            };
            found.push((start..end, entry.id));
        }
        found
    }
}

impl Control<'_> {
    fn allows(self, range: &Range<usize>) -> bool {
        match self {
            Self::Nowhere => false,
            Self::Outside(closed) => {
                let next = closed.partition_point(|closed| closed.end <= range.start);
                closed
                    .get(next)
                    .is_none_or(|closed| range.end <= closed.start)
            }
        }
    }
}
