//! Token ids to bytes, from a table made at load: what a token adds to a text does not depend on the tokens around it, except at the very start.
//!
//! Understands the decoders of byte-level and SentencePiece-like tokenizers (`ByteLevel`, `Metaspace`, and sequences of `Replace`, `ByteFallback`,
//! `Fuse` and a leading `Strip`) and refuses others by name. Where the bytes of a sequence are valid UTF-8 its text equals the library's. Where byte
//! tokens are not, the library gives up on the whole run of them; here only the broken parts are lost.

use std::str;

use tokenizers::decoders::DecoderWrapper;
use tokenizers::pre_tokenizers::metaspace::PrependScheme;
use tokenizers::{Decoder, Tokenizer};

use super::TextError;

#[derive(Debug)]
pub(super) struct Detokenizer {
    pieces: Pieces,
    /// The same for the first token of a sequence, where that differs.
    first_pieces: Option<Pieces>,
    /// Whether an id is a control token, which has no text in an answer.
    control: Vec<bool>,
    leading: Leading,
}

/// What is dropped from the start of a text: up to `count` times the character `content`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Leading {
    pub(super) content: char,
    pub(super) count: usize,
}

impl Detokenizer {
    pub(super) fn new(tokenizer: &Tokenizer) -> Result<Self, TextError> {
        let plan = Plan::new(tokenizer.get_decoder())?;
        let size = tokenizer
            .get_vocab(true)
            .into_values()
            .max()
            .map_or(0, |id| id as usize + 1);
        let mut pieces = Pieces::default();
        let mut first_pieces = plan.first_differs().then(Pieces::default);
        for id in 0..size {
            let token = tokenizer.id_to_token(id as u32);
            pieces.push(&plan.piece(token.as_deref(), false)?);
            if let Some(first_pieces) = &mut first_pieces {
                first_pieces.push(&plan.piece(token.as_deref(), true)?);
            }
        }
        let mut control = vec![false; size];
        for (id, token) in tokenizer.get_added_tokens_decoder() {
            control[id as usize] = token.special;
        }
        Ok(Self {
            pieces,
            first_pieces,
            control,
            leading: plan.leading,
        })
    }

    /// Ids run from 0 to this, exclusive.
    pub(super) fn vocab_size(&self) -> u32 {
        self.control.len() as u32
    }

    /// The bytes of a token in the middle of a text; none for an unknown id.
    pub(super) fn token_bytes(&self, id: u32) -> &[u8] {
        self.pieces.get(id)
    }

    /// The bytes of a token that begins a sequence.
    pub(super) fn first_token_bytes(&self, id: u32) -> &[u8] {
        self.first_pieces.as_ref().unwrap_or(&self.pieces).get(id)
    }

    /// Whether a token counts as text at all: control tokens and unknown ids don't.
    pub(super) fn is_text(&self, id: u32) -> bool {
        self.control
            .get(id as usize)
            .is_some_and(|control| !control)
    }

    pub(super) fn leading(&self) -> Leading {
        self.leading
    }
}

/// Byte strings by token id, in one allocation.
#[derive(Debug, Default)]
struct Pieces {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl Pieces {
    fn push(&mut self, piece: &[u8]) {
        self.bytes.extend_from_slice(piece);
        self.ends.push(self.bytes.len());
    }

    fn get(&self, id: u32) -> &[u8] {
        let id = id as usize;
        match self.ends.get(id) {
            Some(&end) => &self.bytes[if id == 0 { 0 } else { self.ends[id - 1] }..end],
            None => &[],
        }
    }
}

/// The tokenizer's decoder as a rule for single tokens and one for the start of the text.
struct Plan<'a> {
    steps: Vec<Step<'a>>,
    leading: Leading,
}

enum Step<'a> {
    /// Every character of the token stands for one byte.
    ByteLevel,
    /// Tokens such as `<0x0A>` stand for one byte.
    ByteFallback,
    /// A character stands for a space, and for nothing in the first token if `first_drops`.
    Metaspace {
        replacement: char,
        first_drops: bool,
    },
    /// The library's own step, which treats every token alone.
    Replace(&'a DecoderWrapper),
}

impl<'a> Plan<'a> {
    fn new(decoder: Option<&'a DecoderWrapper>) -> Result<Self, TextError> {
        let decoder = decoder.ok_or_else(|| TextError::Unsupported("no decoder".to_owned()))?;
        let sequence = match decoder {
            DecoderWrapper::Sequence(sequence) => sequence.get_decoders(),
            single => std::slice::from_ref(single),
        };
        let unsupported =
            |what: &str| Err(TextError::Unsupported(format!("{what} in its decoder")));

        let mut plan = Self {
            steps: Vec::new(),
            leading: Leading {
                content: ' ',
                count: 0,
            },
        };
        let (mut bytes, mut fused, mut stripped) = (false, false, false);
        for decoder in sequence {
            let ready = !bytes && !fused;
            match decoder {
                DecoderWrapper::ByteLevel(_) if ready => {
                    plan.steps.push(Step::ByteLevel);
                    (bytes, fused) = (true, true);
                }
                DecoderWrapper::ByteFallback(_) if ready => {
                    plan.steps.push(Step::ByteFallback);
                    bytes = true;
                }
                DecoderWrapper::Metaspace(metaspace) if ready => plan.steps.push(Step::Metaspace {
                    replacement: metaspace.get_replacement(),
                    first_drops: metaspace.get_prepend_scheme() != PrependScheme::Never,
                }),
                DecoderWrapper::Replace(_) if ready => plan.steps.push(Step::Replace(decoder)),
                DecoderWrapper::Fuse(_) => fused = true,
                DecoderWrapper::Strip(strip) if fused && !stripped && strip.stop == 0 => {
                    plan.leading = Leading {
                        content: strip.content,
                        count: strip.start,
                    };
                    stripped = true;
                }
                DecoderWrapper::Strip(_) => {
                    return unsupported("`Strip` at the end of tokens or of the text");
                }
                DecoderWrapper::BPE(_) => return unsupported("`BPEDecoder`"),
                DecoderWrapper::WordPiece(_) => return unsupported("`WordPiece`"),
                DecoderWrapper::CTC(_) => return unsupported("`CTC`"),
                DecoderWrapper::Sequence(_) => {
                    return unsupported("a sequence within the sequence");
                }
                DecoderWrapper::ByteLevel(_) => {
                    return unsupported("`ByteLevel` after other bytes");
                }
                DecoderWrapper::ByteFallback(_) => {
                    return unsupported("`ByteFallback` after other bytes");
                }
                DecoderWrapper::Metaspace(_) => {
                    return unsupported("`Metaspace` after bytes or `Fuse`");
                }
                DecoderWrapper::Replace(_) => {
                    return unsupported("`Replace` after bytes or `Fuse`");
                }
            }
        }
        Ok(plan)
    }

    fn first_differs(&self) -> bool {
        self.steps.iter().any(|step| {
            matches!(
                step,
                Step::Metaspace {
                    first_drops: true,
                    ..
                }
            )
        })
    }

    fn piece(&self, token: Option<&str>, first: bool) -> Result<Vec<u8>, TextError> {
        let mut piece = token.unwrap_or_default().to_owned();
        for step in &self.steps {
            match step {
                Step::ByteLevel => {
                    if let Some(bytes) = piece.chars().map(byte_of_char).collect() {
                        return Ok(bytes);
                    }
                }
                Step::ByteFallback => {
                    if let Some(byte) = byte_fallback(&piece) {
                        return Ok(vec![byte]);
                    }
                }
                Step::Metaspace {
                    replacement,
                    first_drops,
                } => {
                    let space = if first && *first_drops { "" } else { " " };
                    piece = piece.replace(*replacement, space);
                }
                Step::Replace(decoder) => {
                    let replaced = decoder
                        .decode_chain(vec![piece])
                        .map_err(|error| TextError::Tokenizer(error.to_string()))?;
                    piece = replaced.concat();
                }
            }
        }
        Ok(piece.into_bytes())
    }
}

/// The byte a token such as `<0x0A>` stands for.
fn byte_fallback(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() != 2 {
        None
    } else {
        u8::from_str_radix(digits, 16).ok()
    }
}

/// The byte a character of a byte-level vocabulary stands for: printable Latin-1 for itself, the rest, in order, from U+0100 (the GPT-2 alphabet).
fn byte_of_char(character: char) -> Option<u8> {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    match u8::try_from(character) {
        Ok(byte) => printable(byte).then_some(byte),
        Err(_) => (0..=u8::MAX)
            .filter(|&byte| !printable(byte))
            .nth((character as usize).checked_sub(0x100)?),
    }
}

/// Bytes that arrive in any portions, turned into text as a lossy conversion of all of them at once would, whole characters at a time.
#[derive(Clone, Debug, Default)]
pub(super) struct Utf8Decoder {
    /// The beginning of a character, at most three bytes.
    incomplete: Vec<u8>,
}

impl Utf8Decoder {
    /// Adds the text that became final with these bytes to `text`.
    pub(super) fn push(&mut self, bytes: &[u8], text: &mut String) {
        self.incomplete.extend_from_slice(bytes);
        let mut rest = self.incomplete.as_slice();
        loop {
            let error = match str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(error) => error,
            };
            let (valid, broken) = rest.split_at(error.valid_up_to());
            text.push_str(str::from_utf8(valid).unwrap_or_default());
            match error.error_len() {
                Some(length) => {
                    text.push(char::REPLACEMENT_CHARACTER);
                    rest = &broken[length..];
                }
                None => {
                    rest = broken;
                    break;
                }
            }
        }
        let kept = self.incomplete.len() - rest.len();
        self.incomplete.drain(..kept);
    }

    /// Ends the text: the beginning of a character that never came becomes one U+FFFD.
    pub(super) fn finish(&mut self, text: &mut String) {
        if !self.incomplete.is_empty() {
            self.incomplete.clear();
            text.push(char::REPLACEMENT_CHARACTER);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn decoded(portions: &[Vec<u8>]) -> String {
        let mut decoder = Utf8Decoder::default();
        let mut text = String::new();
        portions
            .iter()
            .for_each(|portion| decoder.push(portion, &mut text));
        decoder.finish(&mut text);
        text
    }

    /// Bytes that begin, continue and break characters more often than random ones do.
    fn utf8_like_bytes() -> impl Strategy<Value = Vec<u8>> {
        let bytes = prop_oneof![
            any::<u8>(),
            prop::sample::select(
                &[
                    0xF0_u8, 0x9F, 0x91, 0xA9, 0xE2, 0x80, 0x8D, 0xC3, 0xA9, 0xED, 0xA0, 0xF4,
                    0x90, b'a'
                ][..]
            ),
        ];
        prop_oneof![
            prop::collection::vec(bytes, 0..6),
            any::<char>().prop_map(|character| character.to_string().into_bytes())
        ]
    }

    proptest! {
        #[test]
        fn portions_of_bytes_give_the_text_of_all_of_them(portions in prop::collection::vec(utf8_like_bytes(), 0..12)) {
            let all = portions.concat();
            prop_assert_eq!(decoded(&portions), String::from_utf8_lossy(&all));
        }

        #[test]
        fn a_portion_never_ends_inside_a_character(text in any::<String>()) {
            let mut decoder = Utf8Decoder::default();
            let mut decoded = String::new();
            for &byte in text.as_bytes() {
                decoder.push(&[byte], &mut decoded);
                prop_assert!(text.starts_with(&decoded));
            }
            prop_assert_eq!(decoded, text);
        }
    }

    #[test]
    fn byte_level_characters_name_every_byte_once() {
        let mut bytes: Vec<u8> = (0..0x400)
            .filter_map(char::from_u32)
            .filter_map(byte_of_char)
            .collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=u8::MAX).collect::<Vec<u8>>());
        assert_eq!(byte_of_char('Ġ'), Some(b' '));
        assert_eq!(byte_of_char('Ċ'), Some(b'\n'));
        assert_eq!(byte_of_char('a'), Some(b'a'));
    }
}
