//! One request under load and what is noted of its answer.
//!
//! The client shares the machine with the server it measures, so an event of a stream is searched for a few bytes and never read as JSON.

use std::time::Duration;

use outrider_verify::client::{Client, ClientError, Response, Streamed};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::traffic::Planned;

/// What became of a request.
#[derive(Debug)]
pub enum Outcome {
    /// It was answered to its end.
    Answered(Answered),
    /// The server had no room; it may be asked again after this time.
    NoRoom {
        /// `Retry-After`.
        after: Duration,
    },
    /// Anything else, by its code.
    Failed(String),
}

/// An answer, as far as it is measured.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answered {
    /// Tokens of the answer.
    pub tokens: u64,
    /// From the request to the first token; `None` when the answer came as a whole.
    pub first_token: Option<Duration>,
    /// Between one event with tokens and the next.
    pub gaps: Vec<Duration>,
}

/// The part of a whole answer that is counted.
#[derive(Deserialize)]
struct Whole {
    usage: Usage,
}

#[derive(Deserialize)]
struct Usage {
    completion_tokens: u64,
}

/// The part of an error that is counted.
#[derive(Deserialize)]
struct Refusal {
    error: Error,
}

#[derive(Deserialize)]
struct Error {
    code: String,
}

/// Sends a request and reads its answer to the end; times are those of `clock`.
pub fn send(
    client: &Client,
    model: &str,
    planned: &Planned,
    drafting: bool,
    clock: &dyn Fn() -> Duration,
) -> Outcome {
    let mut body = planned.fields.clone();
    body["model"] = model.into();
    if !drafting {
        body["speculative"] = json!({ "enabled": false });
    }
    let outcome = if planned.streamed {
        streamed(client, planned, body, clock)
    } else {
        whole(client, planned, &body)
    };
    outcome.unwrap_or_else(|error| Outcome::Failed(name(&error)))
}

fn whole(client: &Client, planned: &Planned, body: &Value) -> Result<Outcome, ClientError> {
    let response = client.post(planned.api.path(), body)?;
    if response.status != 200 {
        return Ok(refused(&response));
    }
    Ok(match serde_json::from_slice::<Whole>(&response.body) {
        Ok(whole) => Outcome::Answered(Answered {
            tokens: whole.usage.completion_tokens,
            ..Answered::default()
        }),
        Err(_) => Outcome::Failed("not_an_answer".to_owned()),
    })
}

fn streamed(
    client: &Client,
    planned: &Planned,
    mut body: Value,
    clock: &dyn Fn() -> Duration,
) -> Result<Outcome, ClientError> {
    body["stream"] = true.into();
    body["return_token_ids"] = true.into();
    let began = clock();
    let events = match client.stream(planned.api.path(), &body)? {
        Streamed::Events(events) => events,
        Streamed::Whole(response) => return Ok(refused(&response)),
    };
    let mut answered = Answered::default();
    let mut last = began;
    for event in events {
        let event = event?;
        if event.starts_with("{\"error\"") {
            return Ok(Outcome::Failed(format!(
                "stream: {}",
                code(event.as_bytes())
            )));
        }
        let tokens = tokens(&event);
        if tokens == 0 {
            continue;
        }
        let now = clock();
        match answered.first_token {
            None => answered.first_token = Some(now - began),
            Some(_) => answered.gaps.push(now - last),
        }
        answered.tokens += tokens;
        last = now;
    }
    Ok(Outcome::Answered(answered))
}

fn refused(response: &Response) -> Outcome {
    if let (429, Some(seconds)) = (response.status, response.retry_after_seconds) {
        return Outcome::NoRoom {
            after: Duration::from_secs(seconds),
        };
    }
    Outcome::Failed(format!("{} {}", response.status, code(&response.body)))
}

/// The code in the body of an error.
fn code(body: &[u8]) -> String {
    serde_json::from_slice::<Refusal>(body)
        .map_or_else(|_| "no_code".to_owned(), |refusal| refusal.error.code)
}

/// A short name for an answer that did not come, or not to its end.
fn name(error: &ClientError) -> String {
    match error {
        ClientError::Transport { source, .. } if matches!(**source, ureq::Error::Timeout(_)) => {
            "no_answer_in_time".to_owned()
        }
        ClientError::StreamCut { source, .. } => match source {
            Some(error) if error.kind() == std::io::ErrorKind::TimedOut => "stuck".to_owned(),
            _ => "stream_cut".to_owned(),
        },
        other => other.to_string(),
    }
}

/// Tokens that an event brings. What marks them can't stand inside a text, where its quotes would be escaped.
fn tokens(event: &str) -> u64 {
    let Some((_, ids)) = event.split_once("\"token_ids\":[") else {
        return 0;
    };
    let ids = ids.split(']').next().unwrap_or_default();
    match ids.is_empty() {
        true => 0,
        false => 1 + ids.bytes().filter(|&byte| byte == b',').count() as u64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_counted_without_reading_the_event_and_no_text_is_taken_for_them() {
        for (event, expected) in [
            (
                json!({"choices": [{"delta": {"content": "a"}, "token_ids": [5, 6, 7]}]}),
                3,
            ),
            (
                json!({"choices": [{"delta": {"content": "a"}, "token_ids": [5]}]}),
                1,
            ),
            (json!({"choices": [{"text": "", "token_ids": []}]}), 0),
            (
                json!({"choices": [{"delta": {"role": "assistant"}, "prompt_token_ids": [1, 2]}]}),
                0,
            ),
            (
                json!({"choices": [{"prompt_token_ids": [1, 2], "text": "\"token_ids\":[1,2,3]", "token_ids": [9]}]}),
                1,
            ),
            (json!({"usage": {"completion_tokens": 5}}), 0),
        ] {
            assert_eq!(tokens(&event.to_string()), expected, "{event}");
        }
    }

    #[test]
    fn a_full_server_is_asked_again_and_every_other_refusal_is_named() {
        let response = |status, retry_after_seconds, body: &str| Response {
            status,
            retry_after_seconds,
            body: body.as_bytes().to_vec(),
        };
        let full = response(429, Some(2), r#"{"error":{"code":"queue_full"}}"#);
        assert!(matches!(refused(&full), Outcome::NoRoom { after } if after.as_secs() == 2));
        for (response, expected) in [
            (
                response(429, None, r#"{"error":{"code":"queue_full"}}"#),
                "429 queue_full",
            ),
            (
                response(500, None, r#"{"error":{"code":"internal_error"}}"#),
                "500 internal_error",
            ),
            (response(502, None, "<html>"), "502 no_code"),
        ] {
            match refused(&response) {
                Outcome::Failed(code) => assert_eq!(code, expected),
                other => panic!("{other:?}, expected {expected}"),
            }
        }
    }
}
