//! Callers who stream without a pause through the gateway, and what each of them met.

use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, bail};
use outrider_rollout::clock;
use serde_json::{Value, json};

use crate::prompts::Prompt;
use crate::random::Random;

/// Streams in flight.
pub const STREAMS: usize = 4;
/// Callers of each stream, with a key each: a caller has one request at a time, so that their order is known.
const CALLERS_OF_A_STREAM: usize = 250;
/// Callers in all.
pub const CALLERS: usize = STREAMS * CALLERS_OF_A_STREAM;
const MAX_TOKENS: u32 = 12;
/// Most time of one request, on a machine that does other work and before a version that is slow on purpose.
const DEADLINE: Duration = Duration::from_secs(120);

/// How a request went.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// The whole answer, and the one it should be.
    Whole,
    /// The whole answer, and another one than it should be.
    Wrong(String),
    /// No answer, or one that ended early.
    Failed(String),
}

/// A request.
#[derive(Clone, Debug)]
pub struct Request {
    /// Who asked.
    pub caller: usize,
    /// When, in milliseconds since 1970.
    pub began_ms: u64,
    /// Who answered, by the gateway's word.
    pub version: Option<String>,
    /// How it went.
    pub outcome: Outcome,
}

/// Running callers.
pub struct Callers {
    threads: Vec<JoinHandle<()>>,
    stop: Arc<AtomicBool>,
    requests: Arc<Mutex<Vec<Request>>>,
}

/// A prompt and the one answer to it.
#[derive(Clone, Debug)]
pub struct Question {
    fields: Value,
    answer: String,
}

impl Question {
    /// Asks a version that is known to be good.
    pub fn learn(prompts: &[Prompt], address: SocketAddr) -> anyhow::Result<Vec<Self>> {
        let ask = |prompt: &Prompt| {
            let mut fields = prompt.fields.clone();
            fields["max_tokens"] = json!(MAX_TOKENS);
            fields["temperature"] = json!(0);
            fields["stream"] = json!(true);
            let (_, answer) = ask(&agent(), address, 0, &fields);
            let answer = answer?;
            anyhow::Ok(Self { fields, answer })
        };
        prompts.iter().map(ask).collect()
    }
}

impl Callers {
    /// Begins to ask the gateway at `address`.
    pub fn begin(address: SocketAddr, questions: &[Question]) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let requests = Arc::new(Mutex::new(Vec::new()));
        let threads = (0..STREAMS).map(|stream| {
            let (stop, requests) = (Arc::clone(&stop), Arc::clone(&requests));
            let questions = questions.to_vec();
            thread::spawn(move || {
                let mut random = Random::new(stream as u64 + 1);
                let agent = agent();
                while !stop.load(Ordering::Relaxed) {
                    let caller = stream * CALLERS_OF_A_STREAM + random.below(CALLERS_OF_A_STREAM);
                    let question = &questions[random.below(questions.len())];
                    let began_ms = clock::now_ms();
                    let (version, answer) = ask(&agent, address, caller, &question.fields);
                    let outcome = match answer {
                        Ok(text) if text == question.answer => Outcome::Whole,
                        Ok(text) => Outcome::Wrong(text),
                        Err(error) => Outcome::Failed(format!("{error:#}")),
                    };
                    let mut requests = requests.lock().unwrap_or_else(PoisonError::into_inner);
                    requests.push(Request {
                        caller,
                        began_ms,
                        version,
                        outcome,
                    });
                }
            })
        });
        Self {
            threads: threads.collect(),
            stop,
            requests,
        }
    }

    /// Lets every request come to its end; requests in the order of each caller.
    pub fn end(self) -> anyhow::Result<Vec<Request>> {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            if thread.join().is_err() {
                bail!("a caller panicked");
            }
        }
        let requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(requests.clone())
    }
}

fn agent() -> ureq::Agent {
    ureq::Agent::config_builder()
        .http_status_as_error(false)
        .timeout_global(Some(DEADLINE))
        .build()
        .into()
}

/// Streams one answer: who gave it, and its text where it is whole.
fn ask(
    agent: &ureq::Agent,
    address: SocketAddr,
    caller: usize,
    fields: &Value,
) -> (Option<String>, anyhow::Result<String>) {
    let mut body = fields.clone();
    body["model"] = json!("SmolLM2-135M-Instruct");
    let request = agent
        .post(format!("http://{address}/v1/chat/completions"))
        .header("authorization", format!("Bearer drill-{caller:04}"))
        .content_type("application/json");
    let mut answer = match request.send(body.to_string()) {
        Ok(answer) => answer,
        Err(error) => return (None, Err(error.into())),
    };
    let version = answer.headers().get("x-outrider-version");
    let version = version.and_then(|version| version.to_str().ok());
    let version = version.map(str::to_owned);
    let text = if answer.status() == 200 {
        read(answer.body_mut().as_reader())
    } else {
        let status = answer.status();
        let text = answer.body_mut().read_to_string().unwrap_or_default();
        Err(anyhow::anyhow!("{status}: {text:.200}"))
    };
    (version, text)
}

fn read(body: impl std::io::Read) -> anyhow::Result<String> {
    let mut text = String::new();
    let mut finished = false;
    for line in BufReader::new(body).lines() {
        let line = line.context("the stream was cut")?;
        let Some(data) = line.strip_prefix("data: ") else {
            continue;
        };
        if data == "[DONE]" {
            if !finished {
                bail!("the stream ended without a finish reason");
            }
            return Ok(text);
        }
        let event: Value = serde_json::from_str(data).with_context(|| data.to_owned())?;
        if event.get("error").is_some() {
            bail!("{}", event["error"]);
        }
        let choice = &event["choices"][0];
        text += choice["delta"]["content"].as_str().unwrap_or_default();
        finished |= choice["finish_reason"].is_string();
    }
    bail!("the stream was cut after {text:?}")
}
