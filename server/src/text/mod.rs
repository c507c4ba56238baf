//! Text to token ids and back: tokenizer, chat template, incremental detokenizer, stop strings.
//!
//! Owns the rule that text a caller sends is text: a control token (an added token marked `special`, such as `<|im_end|>`) comes only from the chat
//! template's own wording. Added tokens that are not marked special are ordinary vocabulary and are found in any text, as the model was trained.
//!
//! Knows nothing of HTTP, requests or the model. Everything here is pure and may be called from any thread; encoding and templating take time in
//! proportion to the text, so callers keep them off threads that serve sockets.

mod chat;
mod detokenizer;
mod encoder;
mod guard;
mod length;
mod stop;
mod stream;

use std::sync::Arc;

use outrider_bundle::manifest::TextFacts;
use serde::Deserialize;
use serde_json::{Map, Value};
use tokenizers::Tokenizer;

pub use chat::{ChatError, ChatMessage};
pub use encoder::EncodeError;
pub use stream::{Pushed, TextStream};

use chat::ChatTemplate;
use detokenizer::Detokenizer;
use encoder::Encoder;
use length::{LengthLimit, Shares};

/// Tokenizer and chat template of one model.
#[derive(Debug)]
pub struct Text {
    encoder: Encoder,
    detokenizer: Arc<Detokenizer>,
    chat: Option<ChatTemplate>,
    /// Put before a plain prompt.
    bos: Option<u32>,
    /// What bytes are worth in tokens, where that can be said.
    shares: Option<Shares>,
    /// Longest text that is tokenised at all.
    length: LengthLimit,
}

/// Why the tokenizer or the chat template of a bundle can't be used.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// `tokenizer.json` can't be read.
    #[error("the tokenizer can't be read: {0}")]
    Tokenizer(String),
    /// A feature of `tokenizer.json` this build does not implement.
    #[error("the tokenizer uses {0}, which is not supported")]
    Unsupported(String),
    /// An added token has another id than the file says, so the file and the library disagree about the vocabulary.
    #[error(
        "the tokenizer gives the added token {token:?} the id {id}, but its file says {expected}"
    )]
    AddedTokenId {
        /// The token's text.
        token: String,
        /// The id in use.
        id: u32,
        /// The id the file asks for.
        expected: u32,
    },
    /// The tokenizer knows an id the model has no embedding for.
    #[error(
        "the tokenizer's largest token id is {id}; the target's vocabulary has {vocab_size} entries"
    )]
    IdOutOfRange {
        /// Largest id of the tokenizer.
        id: u32,
        /// Entries of the target's vocabulary.
        vocab_size: usize,
    },
    /// A token the manifest names is not in the tokenizer.
    #[error("`text.{field}` is {token:?}, which the tokenizer does not know")]
    UnknownToken {
        /// Field of the manifest.
        field: &'static str,
        /// The token's text.
        token: String,
    },
    /// The manifest asks for a beginning-of-sequence token and names none.
    #[error("`text.add_bos` is true, but `text.bos_token` is missing")]
    NoBosToken,
    /// The chat template is not valid Jinja, or uses what this build does not implement.
    #[error("the chat template can't be compiled: {0}")]
    Template(String),
}

impl Text {
    /// Builds from the bytes of `tokenizer.json`, the chat template when the model has one, and the manifest's facts.
    ///
    /// `vocab_size` is the number of rows of the target's embedding; every id of the tokenizer must be below it.
    pub fn new(
        tokenizer_json: &[u8],
        chat_template: Option<&str>,
        facts: &TextFacts,
        vocab_size: usize,
    ) -> Result<Self, TextError> {
        let file = TokenizerFile::read(tokenizer_json)?;
        let tokenizer = Tokenizer::from_bytes(tokenizer_json)
            .map_err(|error| TextError::Tokenizer(error.to_string()))?;
        if let Some(id) = tokenizer
            .get_vocab(true)
            .into_values()
            .max()
            .filter(|&id| id as usize >= vocab_size)
        {
            return Err(TextError::IdOutOfRange { id, vocab_size });
        }
        let keeps_text = length::keeps_text(&file.pipeline());
        file.check(&tokenizer)?;
        let known = |field, token: &Option<String>| match token {
            None => Ok(None),
            Some(token) => match tokenizer.token_to_id(token) {
                Some(id) => Ok(Some(id)),
                None => Err(TextError::UnknownToken {
                    field,
                    token: token.clone(),
                }),
            },
        };
        let bos = known("bos_token", &facts.bos_token)?;
        known("eos_token", &facts.eos_token)?;
        if facts.add_bos && bos.is_none() {
            return Err(TextError::NoBosToken);
        }

        let detokenizer = Arc::new(Detokenizer::new(&tokenizer)?);
        let encoder = Encoder::new(tokenizer)?;
        let chat = match chat_template {
            Some(source) => Some(ChatTemplate::new(source, facts, encoder.control_texts())?),
            None => None,
        };
        let shares = keeps_text
            .filter(|_| !encoder.swallows_space())
            .and_then(|kept| Shares::of(&detokenizer, kept));
        Ok(Self {
            shares,
            length: LengthLimit::default(),
            encoder,
            detokenizer,
            chat,
            bos: bos.filter(|_| facts.add_bos),
        })
    }

    /// Refuses texts that can't fit into a context of this many tokens before they are tokenised, which takes over a hundred times their size.
    ///
    /// It has no effect on a tokenizer that can make any amount of text one token or none.
    pub fn with_context(mut self, context_tokens: usize) -> Self {
        if let Some(shares) = self.shares.take() {
            self.length = LengthLimit::of(context_tokens, shares);
        }
        self
    }

    /// Token ids of a completion prompt: [`Self::encode_plain`] after the beginning-of-sequence token, when the model wants one. May be empty.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, EncodeError> {
        let mut ids: Vec<u32> = self.bos.into_iter().collect();
        ids.extend(self.encode_plain(text)?);
        Ok(ids)
    }

    /// Token ids of a text in which nothing is a control token.
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>, EncodeError> {
        self.length.check(text)?;
        self.encoder.encode_plain(text)
    }

    /// Token ids of a conversation, through the model's chat template, up to where the assistant's answer begins.
    ///
    /// `kwargs` are further variables for the template, such as `enable_thinking`. No byte of a message's content or name ever becomes part of a
    /// control token.
    pub fn encode_chat(
        &self,
        messages: &[ChatMessage],
        kwargs: Map<String, Value>,
    ) -> Result<Vec<u32>, ChatError> {
        let rendered = self
            .chat
            .as_ref()
            .ok_or(ChatError::NoTemplate)?
            .render(messages, kwargs)?;
        self.length.check(&rendered.text)?;
        Ok(self.encoder.encode(&rendered.text, &rendered.user_ranges)?)
    }

    /// Starts turning the tokens of one sequence into text that ends before any of the `stop` strings. Empty stop strings are ignored.
    pub fn stream(&self, stop: &[String]) -> TextStream {
        TextStream::new(Arc::clone(&self.detokenizer), stop)
    }

    /// The bytes a token stands for; they need not be whole characters. Control tokens give their own text, unknown ids nothing.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        self.detokenizer.token_bytes(id).to_vec()
    }

    /// The text of a whole sequence. Control tokens are left out; bytes that are no UTF-8 become U+FFFD, one for each maximal broken part.
    pub fn decode(&self, ids: &[u32]) -> String {
        let mut stream = self.stream(&[]);
        let mut text: String = ids.iter().map(|&id| stream.push(id).text).collect();
        text.push_str(&stream.finish());
        text
    }
}

/// What is read from `tokenizer.json` apart from the library.
#[derive(Deserialize)]
struct TokenizerFile {
    #[serde(default)]
    added_tokens: Vec<AddedTokenEntry>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    model: ModelEntry,
    /// Read only to be sure that it can be: the library panics where it can't.
    #[serde(default, rename = "decoder")]
    _decoder: Value,
}

/// The one thing that is read from the model, which holds the whole vocabulary.
#[derive(Default, Deserialize)]
struct ModelEntry {
    #[serde(default)]
    byte_fallback: bool,
}

#[derive(Deserialize)]
struct AddedTokenEntry {
    id: u32,
    content: String,
}

impl TokenizerFile {
    fn read(tokenizer_json: &[u8]) -> Result<Self, TextError> {
        let unreadable = |error: &dyn std::fmt::Display| TextError::Tokenizer(error.to_string());
        let tokenizer_json =
            std::str::from_utf8(tokenizer_json).map_err(|error| unreadable(&error))?;
        let file: Self =
            serde_json::from_str(tokenizer_json).map_err(|error| unreadable(&error))?;
        // SentencePiece's own tables come with Unigram models; the library panics on damaged ones.
        let steps = file.normalizer["normalizers"]
            .as_array()
            .into_iter()
            .flatten();
        if steps
            .chain([&file.normalizer])
            .any(|step| step["type"] == "Precompiled")
        {
            return Err(TextError::Unsupported(
                "a `Precompiled` normaliser".to_owned(),
            ));
        }
        Ok(file)
    }

    /// What could keep text from its tokens.
    fn pipeline(&self) -> length::Pipeline<'_> {
        length::Pipeline {
            normalizer: &self.normalizer,
            pre_tokenizer: &self.pre_tokenizer,
            byte_fallback: self.model.byte_fallback,
        }
    }

    /// Holds the file against what the library made of it: the library numbers added tokens that are not in the vocabulary itself.
    fn check(self, tokenizer: &Tokenizer) -> Result<(), TextError> {
        for AddedTokenEntry {
            id: expected,
            content: token,
        } in self.added_tokens
        {
            match tokenizer.token_to_id(&token) {
                Some(id) if id != expected => {
                    return Err(TextError::AddedTokenId {
                        token,
                        id,
                        expected,
                    });
                }
                _ => {}
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
