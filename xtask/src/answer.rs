//! Asking a server for completions, whole or streamed, and the answer in one form that can be compared bit for bit.

use std::fmt;

use anyhow::{Context, bail};
use outrider_verify::client::{Client, Streamed};
use outrider_verify::wire::Api;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// One choice, however it was delivered. Log-probabilities stay JSON, so that equality is equality of every digit.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    /// The text.
    pub text: String,
    /// Why it ended.
    pub finish_reason: String,
    /// Generated token ids.
    pub token_ids: Vec<u64>,
    /// Token ids of the prompt.
    pub prompt_token_ids: Vec<u64>,
    /// For each generated token its log-probability, and text and log-probability of the most likely ones.
    pub logprobs: Vec<Value>,
    /// The usage object without `speculative`.
    pub usage: Value,
    /// What drafting did: `usage.speculative`, all zero where the server says nothing of it.
    pub drafted: Drafted,
}

/// Equal answers: everything but what drafting did on the way, which may differ from run to run.
impl PartialEq for Answer {
    fn eq(&self, other: &Self) -> bool {
        let Self {
            text,
            finish_reason,
            token_ids,
            prompt_token_ids,
            logprobs,
            usage,
            drafted: _,
        } = self;
        *text == other.text
            && *finish_reason == other.finish_reason
            && *token_ids == other.token_ids
            && *prompt_token_ids == other.prompt_token_ids
            && *logprobs == other.logprobs
            && *usage == other.usage
    }
}

/// What drafting did for one request, or for several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drafted {
    /// Drafted tokens that the target checked.
    pub drafted_tokens: u64,
    /// Those that were the target's choice.
    pub accepted_tokens: u64,
    /// Steps in which drafted tokens were checked.
    pub steps: u64,
}

impl Drafted {
    /// Tokens that a step with drafted tokens brings; `None` without such a step.
    pub fn acceptance_length(&self) -> Option<f64> {
        (self.steps > 0).then(|| 1.0 + self.accepted_tokens as f64 / self.steps as f64)
    }
}

impl std::ops::AddAssign for Drafted {
    fn add_assign(&mut self, other: Self) {
        self.drafted_tokens += other.drafted_tokens;
        self.accepted_tokens += other.accepted_tokens;
        self.steps += other.steps;
    }
}

impl fmt::Display for Drafted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} drafted, {} accepted, {} steps",
            self.drafted_tokens, self.accepted_tokens, self.steps
        )
    }
}

/// A request of `model` with `fields`, token ids and, if streamed, usage included.
pub fn request(model: &str, fields: &Value) -> Value {
    let mut request = fields.clone();
    request["model"] = model.into();
    request["return_token_ids"] = true.into();
    if fields["stream"] == true {
        request["stream_options"] = json!({ "include_usage": true });
    }
    request
}

/// Asks for one choice as a whole.
pub fn whole(client: &Client, model: &str, api: Api, fields: &Value) -> anyhow::Result<Answer> {
    let response = client.post(api.path(), &request(model, fields))?;
    if response.status != 200 {
        bail!("{} {}", response.status, response.text());
    }
    let body = response
        .json()
        .with_context(|| format!("no JSON: {}", response.text()))?;
    let mut answer = Answer::default();
    answer.add(api, &body, "message")?;
    Ok(answer)
}

/// Asks for one choice as a stream. `on_event` is called after each event with the number of events so far.
///
/// Returns the text of each event as well.
pub fn streamed(
    client: &Client,
    model: &str,
    api: Api,
    fields: &Value,
    mut on_event: impl FnMut(usize),
) -> anyhow::Result<(Answer, Vec<String>)> {
    let mut fields = fields.clone();
    fields["stream"] = true.into();
    let events = match client.stream(api.path(), &request(model, &fields))? {
        Streamed::Events(events) => events,
        Streamed::Whole(response) => bail!(
            "{} {} instead of a stream",
            response.status,
            response.text()
        ),
    };
    let mut answer = Answer::default();
    let mut deltas = Vec::new();
    for (index, event) in events.enumerate() {
        let chunk: Value = serde_json::from_str(&event?)?;
        let before = answer.text.len();
        answer.add(api, &chunk, "delta")?;
        deltas.push(answer.text[before..].to_owned());
        on_event(index + 1);
    }
    Ok((answer, deltas))
}

impl Answer {
    /// Adds what a whole answer or a chunk carries; `message` is `message` or `delta`.
    pub fn add(&mut self, api: Api, body: &Value, message: &str) -> anyhow::Result<()> {
        if let Some(error) = body.get("error") {
            bail!("an error inside the answer: {error}");
        }
        if let Some(usage) = body["usage"].as_object() {
            let mut usage = usage.clone();
            if let Some(speculative) = usage.shift_remove("speculative") {
                self.drafted = serde_json::from_value(speculative)
                    .context("`usage.speculative` is not what it should be")?;
            }
            // What was cached depends on the requests before.
            usage.shift_remove("prompt_tokens_details");
            self.usage = usage.into();
        }
        let choice = &body["choices"][0];
        let text = match api {
            Api::Completions => &choice["text"],
            Api::Chat => &choice[message]["content"],
        };
        self.text.push_str(text.as_str().unwrap_or_default());
        self.token_ids.extend(ids(&choice["token_ids"]));
        for prompt_ids in [&choice["prompt_token_ids"], &body["prompt_token_ids"]] {
            if prompt_ids.is_array() {
                self.prompt_token_ids = ids(prompt_ids).collect();
            }
        }
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.finish_reason = reason.to_owned();
        }
        let logprobs = &choice["logprobs"];
        match api {
            Api::Completions => {
                let own = logprobs["token_logprobs"].as_array().into_iter().flatten();
                let tops = logprobs["top_logprobs"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .map(Some)
                    .chain(std::iter::repeat(None));
                let tokens = logprobs["tokens"].as_array().into_iter().flatten();
                self.logprobs.extend(own.zip(tops).zip(tokens).map(
                    |((own, top), token)| json!({ "token": token, "logprob": own, "top": top }),
                ));
            }
            Api::Chat => self.logprobs.extend(
                logprobs["content"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .cloned(),
            ),
        }
        Ok(())
    }
}

fn ids(value: &Value) -> impl Iterator<Item = u64> {
    value
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_u64)
}
