//! Tokens to text, one at a time: bytes of each token, whole characters of the bytes, text before a stop string of the characters.

use std::sync::Arc;

use super::detokenizer::{Detokenizer, Leading, Utf8Decoder};
use super::stop::StopMatcher;

/// The text of one sequence as its tokens arrive. The cost of a token does not depend on the tokens before it.
#[derive(Clone, Debug)]
pub struct TextStream {
    detokenizer: Arc<Detokenizer>,
    /// Whether no token with text came yet.
    first: bool,
    utf8: Utf8Decoder,
    leading: Leading,
    stop: StopMatcher,
}

/// What one token brought.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pushed {
    /// Text that became final: whole characters, never part of a stop string; may be empty.
    pub text: String,
    /// Whether a stop string is complete. The text before it has all been returned, and nothing follows.
    pub stopped: bool,
}

impl TextStream {
    pub(super) fn new(detokenizer: Arc<Detokenizer>, stop: &[String]) -> Self {
        let leading = detokenizer.leading();
        Self {
            detokenizer,
            first: true,
            utf8: Utf8Decoder::default(),
            leading,
            stop: StopMatcher::new(stop),
        }
    }

    /// Takes the next token. Control tokens and unknown ids bring no text.
    pub fn push(&mut self, id: u32) -> Pushed {
        let mut text = String::new();
        if self.detokenizer.is_text(id) {
            let bytes = if self.first {
                self.detokenizer.first_token_bytes(id)
            } else {
                self.detokenizer.token_bytes(id)
            };
            self.first = false;
            self.utf8.push(bytes, &mut text);
        }
        self.settle(text)
    }

    /// Ends the sequence and returns the text that was held back; bytes of an incomplete character become one U+FFFD.
    pub fn finish(&mut self) -> String {
        let mut text = String::new();
        self.utf8.finish(&mut text);
        let mut text = self.settle(text).text;
        text.push_str(&self.stop.finish());
        text
    }

    fn settle(&mut self, mut text: String) -> Pushed {
        while self.leading.count > 0 && !text.is_empty() {
            if text.starts_with(self.leading.content) {
                text.remove(0);
                self.leading.count -= 1;
            } else {
                self.leading.count = 0;
            }
        }
        let text = self.stop.push(&text);
        Pushed {
            text,
            stopped: self.stop.stopped(),
        }
    }
}
