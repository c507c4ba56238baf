//! Perplexity: how surprised a model is by a text, from the log-probabilities the server gives for a prompt that it only scores.
//!
//! The text is cut at paragraph borders into windows that are scored one by one, so that the context stays small; the first token of a window has no
//! probability. Two forms of one model see the same windows and the same tokens, so their figures can be compared.

use std::fmt;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};
use outrider_verify::client::{Client, ClientOptions};
use outrider_verify::wire::Api;
use serde_json::{Value, json};

use crate::server_process::ServerCommand;

/// The text of the repository, relative to its root.
pub const DEFAULT_TEXT: &str = "tests/data/alice-chapter-1.txt";

/// Most bytes of one window, about 900 tokens of English; a longer paragraph makes a longer window.
const WINDOW_BYTES: usize = 4000;
const CONTEXT_TOKENS: usize = 2048;
const START_DEADLINE: Duration = Duration::from_secs(180);

/// Perplexity of a model on a text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Perplexity {
    /// Tokens that were scored.
    pub tokens: usize,
    /// Windows the text was cut into.
    pub windows: usize,
    /// Mean negative log-likelihood of a token, in nats.
    pub mean_nll: f64,
}

impl Perplexity {
    /// The perplexity itself.
    pub fn value(&self) -> f64 {
        self.mean_nll.exp()
    }
}

impl fmt::Display for Perplexity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "perplexity {:.4} over {} tokens in {} windows",
            self.value(),
            self.tokens,
            self.windows
        )
    }
}

/// Starts the server and scores the text in a file.
pub fn measure_perplexity(command: &ServerCommand, text: &Path) -> anyhow::Result<Perplexity> {
    let text =
        fs::read_to_string(text).with_context(|| format!("cannot read {}", text.display()))?;
    let windows = windows(&text);
    if windows.is_empty() {
        bail!("the text is empty");
    }
    let server = command
        .clone()
        .set("serving.runtime.context_tokens", CONTEXT_TOKENS)
        .set("serving.runtime.max_concurrency", 1)
        .start_ready(START_DEADLINE)?;
    let client = Client::new(
        &server.endpoint(),
        ClientOptions {
            timeout: Duration::from_secs(600),
            ..ClientOptions::default()
        },
    )?;
    let models = client
        .get("/v1/models")?
        .json()
        .context("/v1/models is no JSON")?;
    let model = models["data"][0]["id"]
        .as_str()
        .context("/v1/models lists no model")?
        .to_owned();

    let (mut tokens, mut nll) = (0, 0.0);
    for window in &windows {
        let request = json!({ "model": model, "prompt": window, "echo": true, "max_tokens": 0, "logprobs": 0 });
        let response = client.post(Api::Completions.path(), &request)?;
        if response.status != 200 {
            bail!(
                "the server answered {} {}",
                response.status,
                response.text()
            );
        }
        let answer = response.json().context("the answer is no JSON")?;
        let scores = answer
            .pointer("/choices/0/logprobs/token_logprobs")
            .and_then(Value::as_array);
        let (first, scored) = scores
            .and_then(|scores| scores.split_first())
            .context("the answer has no `token_logprobs`")?;
        if !first.is_null() || scored.is_empty() {
            bail!("`token_logprobs` must begin with null and go on: {scores:?}");
        }
        for score in scored {
            nll -= score
                .as_f64()
                .filter(|score| score.is_finite())
                .context("a token has no log-probability")?;
        }
        tokens += scored.len();
    }
    Ok(Perplexity {
        tokens,
        windows: windows.len(),
        mean_nll: nll / tokens as f64,
    })
}

/// Whole paragraphs, as many in one window as fit.
fn windows(text: &str) -> Vec<String> {
    let mut windows: Vec<String> = Vec::new();
    for paragraph in text
        .split("\n\n")
        .map(str::trim)
        .filter(|paragraph| !paragraph.is_empty())
    {
        match windows.last_mut() {
            Some(window) if window.len() + paragraph.len() + 2 <= WINDOW_BYTES => {
                window.push_str("\n\n");
                window.push_str(paragraph);
            }
            _ => windows.push(paragraph.to_owned()),
        }
    }
    windows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_keep_every_paragraph_whole_and_in_order() {
        let long = "x".repeat(WINDOW_BYTES + 1);
        let half = "y".repeat(WINDOW_BYTES / 2 - 1);
        let text = format!("\n\none\n\n\n\ntwo\n\n{long}\n\n{half}\n\n{half}\n\nend\n");
        assert_eq!(
            windows(&text),
            [
                "one\n\ntwo".to_owned(),
                long,
                format!("{half}\n\n{half}"),
                "end".to_owned()
            ]
        );
        assert_eq!(windows(" \n\n \n"), Vec::<String>::new());
    }
}
