//! One caller: draws what to do, does it, and compares.

use std::collections::BTreeMap;
use std::io::Write;
use std::net::TcpStream;
use std::thread;
use std::time::Duration;

use outrider_verify::client::{Client, ClientError, ClientOptions, Response, Streamed};
use serde::Serialize;
use serde_json::{Value, json};

use super::cases::Case;
use super::{Run, keys};
use crate::answer::{self, Answer};
use crate::random::Random;

/// Most time of one request.
pub const REQUEST_DEADLINE: Duration = Duration::from_secs(300);
/// Most differences that are told in full.
const TOLD: usize = 10;

/// What callers did and how it ended.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Counts {
    /// Answers that came to their end and were what they had to be, by how they were delivered.
    pub answered: BTreeMap<&'static str, u64>,
    /// Requests that were given up in the middle.
    pub cancelled: u64,
    /// Wrong requests that were refused as they had to be, by status and code.
    pub refused: BTreeMap<String, u64>,
    /// How often there was no room.
    pub no_room: u64,
    /// Answers that differ, and errors that had no reason, in words; not all of them.
    pub unexpected: Vec<String>,
    /// How many of those there were.
    pub unexpected_total: u64,
}

impl Counts {
    /// Adds what another caller counted.
    pub fn add(&mut self, other: Self) {
        for (delivery, count) in other.answered {
            *self.answered.entry(delivery).or_default() += count;
        }
        for (code, count) in other.refused {
            *self.refused.entry(code).or_default() += count;
        }
        self.cancelled += other.cancelled;
        self.no_room += other.no_room;
        self.unexpected_total += other.unexpected_total;
        let room = TOLD.saturating_sub(self.unexpected.len());
        self.unexpected
            .extend(other.unexpected.into_iter().take(room));
    }

    fn unexpected(&mut self, what: String) {
        self.unexpected_total += 1;
        if self.unexpected.len() < TOLD {
            self.unexpected.push(what);
        }
    }
}

/// A request that must be refused: body, path, status and code.
const WRONG: [(&str, &str, u16, &str); 7] = [
    ("/v1/completions", "{\"model\":", 400, "invalid_json"),
    (
        "/v1/completions",
        r#"{"model":"MODEL"}"#,
        400,
        "missing_required_parameter",
    ),
    (
        "/v1/completions",
        r#"{"model":"nobody","prompt":"x"}"#,
        404,
        "model_not_found",
    ),
    (
        "/v1/chat/completions",
        r#"{"model":"MODEL","messages":[],"temprature":1}"#,
        400,
        "unknown_parameter",
    ),
    (
        "/v1/chat/completions",
        r#"{"model":"MODEL","messages":[{"role":"user","content":"x"}],"temperature":9}"#,
        400,
        "value_above_maximum",
    ),
    (
        "/v1/completions",
        r#"{"model":"MODEL","prompt":"x","max_tokens":100000}"#,
        400,
        "context_length_exceeded",
    ),
    ("/v1/nothing", "{}", 404, "not_found"),
];

/// One of the callers of a run.
pub struct Caller<'a> {
    run: &'a Run,
    secret: String,
    client: Client,
    /// One that sends no key.
    stranger: Client,
    random: Random,
    counts: Counts,
}

impl<'a> Caller<'a> {
    /// Caller `number`.
    pub fn new(run: &'a Run, seed: u64, number: u64) -> anyhow::Result<Self> {
        let secret = keys::secret(number);
        let client = |api_key| {
            let options = ClientOptions {
                api_key,
                timeout: REQUEST_DEADLINE,
                ..ClientOptions::default()
            };
            Client::new(&run.session.process().endpoint(), options)
        };
        Ok(Self {
            run,
            client: client(Some(secret.clone()))?,
            stranger: client(None)?,
            secret,
            random: Random::new(seed.wrapping_mul(1000).wrapping_add(number)),
            counts: Counts::default(),
        })
    }

    /// Calls until the run is over, and says what came of it.
    pub fn call_until_over(mut self) -> Counts {
        while !self.run.is_over() {
            match self.random.below(20) {
                0..=8 => self.whole_stream(),
                9..=12 => self.at_once(),
                13..=16 => self.leave_stream(),
                17 => self.hang_up(),
                18 => self.without_key(),
                _ => self.wrong(),
            }
        }
        self.counts
    }

    fn case(&mut self) -> &'a Case {
        let run = self.run;
        &run.cases[self.random.below(run.cases.len())]
    }

    fn body(&self, case: &Case, streamed: bool) -> Value {
        let mut fields = case.fields.clone();
        if streamed {
            fields["stream"] = true.into();
        }
        answer::request(self.run.session.model(), &fields)
    }

    fn whole_stream(&mut self) {
        let case = self.case();
        if let Some(answer) = self.stream(case, usize::MAX) {
            self.compare(case, &answer, "streamed");
        }
    }

    /// Takes some events of a stream, then closes the connection.
    fn leave_stream(&mut self) {
        let case = self.case();
        let events = 1 + self.random.below(20);
        let Some(answer) = self.stream(case, events) else {
            return;
        };
        self.counts.cancelled += 1;
        if !case.answer.token_ids.starts_with(&answer.token_ids)
            || !case.answer.text.starts_with(&answer.text)
        {
            self.counts.unexpected(format!(
                "{}, left after {events} events: {:?} does not begin {:?}",
                case.name, answer.text, case.answer.text
            ));
        }
    }

    /// The first events of a stream; `None` when there was no answer, which is counted.
    fn stream(&mut self, case: &Case, most_events: usize) -> Option<Answer> {
        let body = self.body(case, true);
        let events = match self.client.stream(case.api.path(), &body) {
            Ok(Streamed::Events(events)) => events,
            Ok(Streamed::Whole(response)) => {
                self.refused(case, &response);
                return None;
            }
            Err(error) => {
                self.failed(case, &error.into());
                return None;
            }
        };
        let mut answer = Answer::default();
        for event in events.take(most_events) {
            let added = event.map_err(anyhow::Error::from).and_then(|event| {
                let chunk: Value = serde_json::from_str(&event)?;
                answer.add(case.api, &chunk, "delta")
            });
            if let Err(error) = added {
                self.failed(case, &error);
                return None;
            }
        }
        Some(answer)
    }

    fn at_once(&mut self) {
        let case = self.case();
        let body = self.body(case, false);
        let response = match self.client.post(case.api.path(), &body) {
            Ok(response) => response,
            Err(error) => return self.failed(case, &error.into()),
        };
        let Some(body) = response.json().filter(|_| response.status == 200) else {
            return self.refused(case, &response);
        };
        let mut answer = Answer::default();
        match answer.add(case.api, &body, "message") {
            Ok(()) => self.compare(case, &answer, "whole"),
            Err(error) => self.failed(case, &error),
        }
    }

    /// Sends a whole request and closes the connection without waiting for a byte of the answer.
    fn hang_up(&mut self) {
        let case = self.case();
        let body = self.body(case, false).to_string();
        let endpoint = self.run.session.process().endpoint();
        let host = endpoint.trim_start_matches("http://");
        let head = format!(
            "POST {} HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            case.api.path(),
            self.secret,
            body.len()
        );
        let pause = Duration::from_millis(self.random.below(400) as u64);
        let sent = TcpStream::connect(host).and_then(|mut stream| {
            stream.write_all(head.as_bytes())?;
            stream.write_all(body.as_bytes())?;
            thread::sleep(pause);
            Ok(())
        });
        match sent {
            Ok(()) => self.counts.cancelled += 1,
            Err(error) => self.failed(case, &error.into()),
        }
    }

    fn wrong(&mut self) {
        let (path, body, status, code) = WRONG[self.random.below(WRONG.len())];
        let body = body.replace("MODEL", self.run.session.model());
        match self.client.post_bytes(path, body.as_bytes()) {
            Ok(response) if response.status == status && response.text().contains(code) => {
                let refused = format!("{status} {code}");
                *self.counts.refused.entry(refused).or_default() += 1;
            }
            Ok(response) => self.counts.unexpected(format!(
                "{path} with {body} was answered {} {}, expected is {status} {code}",
                response.status,
                response.text()
            )),
            Err(error) => self.counts.unexpected(format!(
                "{path} with {body}: {:#}",
                anyhow::Error::from(error)
            )),
        }
    }

    fn without_key(&mut self) {
        let case = self.case();
        let body = self.body(case, false);
        match self.stranger.post(case.api.path(), &body) {
            Err(ClientError::Unauthorized { status: 401, .. }) => {
                *self.counts.refused.entry("401".to_owned()).or_default() += 1;
            }
            Err(error) => self.failed(case, &error.into()),
            Ok(response) => self.counts.unexpected(format!(
                "without a key: {} {}",
                response.status,
                response.text()
            )),
        }
    }

    fn compare(&mut self, case: &Case, answer: &Answer, delivery: &'static str) {
        if *answer == case.answer {
            *self.counts.answered.entry(delivery).or_default() += 1;
        } else {
            self.counts.unexpected(format!(
                "{}, {delivery}: {:?} instead of {:?}",
                case.name,
                shown(answer),
                shown(&case.answer)
            ));
        }
    }

    fn refused(&mut self, case: &Case, response: &Response) {
        match (response.status, response.retry_after_seconds) {
            (429, Some(seconds)) => {
                self.counts.no_room += 1;
                thread::sleep(Duration::from_secs(seconds));
            }
            (status, _) => {
                self.counts
                    .unexpected(format!("{}: {status} {}", case.name, response.text()))
            }
        }
    }

    fn failed(&mut self, case: &Case, error: &anyhow::Error) {
        self.counts.unexpected(format!("{}: {error:#}", case.name));
    }
}

/// What a difference is told by.
fn shown(answer: &Answer) -> Value {
    json!([
        answer.text,
        answer.finish_reason,
        answer.token_ids,
        answer.usage
    ])
}
