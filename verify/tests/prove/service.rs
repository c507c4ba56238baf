//! An OpenAI-compatible service on a real socket whose "model" is a hash: fast, the same every time, and wrong in just the ways that a test asks for.
//!
//! A token follows from the prompt, the seed and every token before it, so that an answer goes another way after a wrong token, as a model's does.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use outrider_verify::perf::Clock;
use serde_json::{Value, json};

/// What the service is like. The default is right in everything and drafts.
#[derive(Clone, Debug)]
pub struct Behaviour {
    /// Whether requests without a switch are drafted for.
    pub drafts: bool,
    /// Whether usage says what was drafted.
    pub counts: bool,
    /// Whether the service knows the switch; one that does not ignores it.
    pub knows_switch: bool,
    /// Whether it returns token ids; one that does not refuses the field.
    pub token_ids: bool,
    /// With drafting, one of so many tokens is another one.
    pub wrong_one_in: Option<u64>,
    /// The same whether drafting or not.
    pub unsteady_one_in: Option<u64>,
    /// With drafting, sampled answers don't depend on the seed.
    pub ignores_seed: bool,
    /// With drafting, the stop string stays in the text.
    pub leaks_stop: bool,
    /// With drafting, a token too many is counted.
    pub miscounts: bool,
    /// With drafting, a choice closer than this is the second best.
    pub flips_below_nats: f64,
    /// By how much figures vary at most, up or down, from one request to the next.
    pub noise_nats: f64,
    /// Status of every answer to a completion request.
    pub status: u16,
    /// Answers what it should refuse.
    pub refuses_nothing: bool,
    /// Fails at characters that are no ASCII.
    pub ascii_only: bool,
    /// Goes wrong for everybody once a client has left.
    pub forgets_leavers: bool,
    /// Resident memory grows by so many bytes with each request.
    pub leaks_bytes: u64,
    /// Every so many requests the counters begin at zero again.
    pub restarts_every: Option<u64>,
    /// Every so many requests fail.
    pub fails_every: Option<u64>,
    /// With drafting, the connection ends in the middle of the answer.
    pub cuts: bool,
    /// Time before an answer.
    pub delay: Duration,
    /// Time of a token without and with drafting.
    pub token_time: [Duration; 2],
    /// Lets the time pass on the clock of [`Fake`] instead of the machine's.
    pub virtual_time: bool,
    /// Starts the random faults.
    pub nonce: u64,
}

impl Default for Behaviour {
    fn default() -> Self {
        Self {
            drafts: true,
            counts: true,
            knows_switch: true,
            token_ids: true,
            wrong_one_in: None,
            unsteady_one_in: None,
            ignores_seed: false,
            leaks_stop: false,
            miscounts: false,
            flips_below_nats: 0.0,
            noise_nats: 0.0,
            status: 200,
            refuses_nothing: false,
            ascii_only: false,
            forgets_leavers: false,
            leaks_bytes: 0,
            restarts_every: None,
            fails_every: None,
            cuts: false,
            delay: Duration::ZERO,
            token_time: [Duration::ZERO; 2],
            virtual_time: false,
            nonce: 1,
        }
    }
}

/// A running service; it lives as long as the test process.
pub struct Fake {
    /// Where it listens.
    pub address: SocketAddr,
    /// The places where it was wrong: prompt and position.
    pub faults: Arc<Mutex<Vec<(String, usize)>>>,
    time_ns: Arc<AtomicU64>,
}

/// The time that the service's tokens took so far, on a machine that is never busy with anything else.
impl Clock for Fake {
    fn now(&self) -> Duration {
        Duration::from_nanos(self.time_ns.load(Ordering::SeqCst))
    }
}

impl Fake {
    /// The address as a URL.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }
}

struct Shared {
    behaviour: Behaviour,
    /// Random faults come from the count of everything that could have been one.
    counter: AtomicU64,
    requests: AtomicU64,
    leavers: AtomicU64,
    time_ns: Arc<AtomicU64>,
    faults: Arc<Mutex<Vec<(String, usize)>>>,
}

const WORDS: [&str; 64] = [
    " sea", " wave", " quiet", " under", " morning", " of", " grey", " light", " salt", " wind",
    " rolls", " home", " the", " a", " boat", " turns", " slow", " tide", " and", " harbour",
    " gull", " cries", " rope", " mast", " over", " cold", " stone", " pier", " lamp", " night",
    " star", " north", " compass", " chart", " captain", " sleeps", " while", " rain", " falls",
    " on", " deck", " wood", " creaks", " softly", " hull", " drifts", " past", " island",
    " green", " hill", " sheep", " graze", " where", " grass", " meets", " sand", " foam",
    " white", " as", " wool", " again", " until", " dawn", " breaks",
];
/// Drafted tokens of a step, and how many of them are accepted.
const DRAFTED_IN_STEP: u64 = 3;
const ACCEPTED_IN_STEP: u64 = 2;

/// Starts a service.
pub fn serve(behaviour: Behaviour) -> Fake {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let faults = Arc::new(Mutex::new(Vec::new()));
    let time_ns = Arc::new(AtomicU64::new(0));
    let shared = Arc::new(Shared {
        behaviour,
        counter: AtomicU64::new(0),
        requests: AtomicU64::new(0),
        leavers: AtomicU64::new(0),
        time_ns: time_ns.clone(),
        faults: faults.clone(),
    });
    thread::spawn(move || {
        for connection in listener.incoming() {
            let shared = shared.clone();
            thread::spawn(move || {
                // A client that is gone is no fault of the service.
                let _ = shared.converse(connection.unwrap());
            });
        }
    });
    Fake {
        address,
        faults,
        time_ns,
    }
}

fn mix(first: u64, second: u64) -> u64 {
    let mut mixed = first.wrapping_add(second.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

struct Answer {
    chat: bool,
    ids: Vec<usize>,
    text: String,
    margins: Vec<f64>,
    finish_reason: &'static str,
    usage: Value,
    drafting: bool,
}

impl Shared {
    fn converse(&self, connection: TcpStream) -> std::io::Result<()> {
        connection.set_nodelay(true)?;
        let mut reader = BufReader::new(connection.try_clone()?);
        let mut writer = connection;
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line)? == 0 {
                return Ok(());
            }
            let target = line.split(' ').nth(1).unwrap_or_default().to_owned();
            let mut length = 0;
            loop {
                line.clear();
                reader.read_line(&mut line)?;
                if line.trim().is_empty() {
                    break;
                }
                if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                    length = value.trim().parse().unwrap();
                }
            }
            let mut body = vec![0; length];
            reader.read_exact(&mut body)?;
            if target == "/v1/models" {
                let mut model = json!({ "id": "sea-words", "bundle_digest": "sha256:5ea", "lossless_class": "exact" });
                if self.behaviour.counts {
                    let drafting = if self.behaviour.drafts {
                        "on"
                    } else {
                        "unavailable"
                    };
                    model["speculation"] = json!({ "drafting": drafting });
                }
                whole(&mut writer, 200, &json!({ "data": [model] }).to_string())?;
                continue;
            }
            if target == "/metrics" {
                whole(&mut writer, 200, &self.metrics())?;
                continue;
            }
            thread::sleep(self.behaviour.delay);
            let request = match self.refusal(&body) {
                Ok(request) => request,
                Err((status, message)) => {
                    let body = json!({ "error": { "message": message, "type": "error" } });
                    whole(&mut writer, status, &body.to_string())?;
                    continue;
                }
            };
            let answer = self.generate(target == "/v1/chat/completions", &request);
            if request["stream"] == true {
                let sent = self.stream(&mut writer, &request, &answer);
                if sent.is_err() {
                    self.leavers.fetch_add(1, Ordering::Relaxed);
                }
                return sent;
            }
            self.pass(self.token_time(&answer) * answer.ids.len() as u32);
            let body = whole_body(&request, &answer);
            if self.behaviour.cuts && answer.drafting {
                let half = &body[..body.len() / 2];
                return write!(
                    writer,
                    "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{half}",
                    body.len()
                );
            }
            whole(&mut writer, 200, &body)?;
        }
    }

    fn pass(&self, time: Duration) {
        if self.behaviour.virtual_time {
            self.time_ns
                .fetch_add(time.as_nanos() as u64, Ordering::SeqCst);
        } else {
            thread::sleep(time);
        }
    }

    fn token_time(&self, answer: &Answer) -> Duration {
        self.behaviour.token_time[usize::from(answer.drafting)]
    }

    fn metrics(&self) -> String {
        let requests = self.requests.load(Ordering::Relaxed);
        let counted = match self.behaviour.restarts_every {
            None => requests,
            Some(every) => requests % every,
        };
        let bytes = (100 << 20) + requests * self.behaviour.leaks_bytes;
        format!(
            "# TYPE x counter\nsea_requests_total{{route=\"x\"}} {counted}\nsea_resident_memory_bytes {bytes}\n"
        )
    }

    fn refusal(&self, body: &[u8]) -> Result<Value, (u16, String)> {
        let request: Value =
            serde_json::from_slice(body).map_err(|error| (400, error.to_string()))?;
        if self.behaviour.status != 200 {
            return Err((self.behaviour.status, "this service is not well".into()));
        }
        let served = self.requests.fetch_add(1, Ordering::Relaxed) + 1;
        if self
            .behaviour
            .fails_every
            .is_some_and(|every| served.is_multiple_of(every))
        {
            return Err((500, "this request was unlucky".into()));
        }
        let text = request.to_string();
        if self.behaviour.ascii_only && !text.is_ascii() {
            return Err((500, "worker panicked".into()));
        }
        let empty = request["messages"].as_array().is_some_and(Vec::is_empty);
        if !self.behaviour.refuses_nothing && (empty || body.len() > 400_000) {
            return Err((400, "the prompt is empty or too long".into()));
        }
        if request["model"] != "sea-words" {
            return Err((404, "this model is not served".into()));
        }
        let wrong_type = request["temperature"].is_string();
        if wrong_type || request["max_tokens"].as_i64().is_some_and(|most| most < 1) {
            return Err((400, "a field has a wrong value".into()));
        }
        if !self.behaviour.token_ids && request.get("return_token_ids").is_some() {
            return Err((400, "unknown field `return_token_ids`".into()));
        }
        Ok(request)
    }

    /// True for one of so many calls, at random.
    fn one_in(&self, count: Option<u64>) -> bool {
        count.is_some_and(|count| {
            let drawn = self.counter.fetch_add(1, Ordering::Relaxed);
            mix(self.behaviour.nonce, drawn).is_multiple_of(count)
        })
    }

    fn generate(&self, chat: bool, request: &Value) -> Answer {
        let behaviour = &self.behaviour;
        let switched_off = behaviour.knows_switch && request["speculative"]["enabled"] == false;
        let drafting = behaviour.drafts && !switched_off;
        let prompt = if chat {
            request["messages"].to_string()
        } else {
            request["prompt"].to_string()
        };
        let left = behaviour.forgets_leavers && self.leavers.load(Ordering::Relaxed) > 0;
        let start = if left { 8 } else { 7 };
        let bytes = prompt.bytes().map(u64::from);
        let mut state = bytes.fold(start, mix);
        if request["temperature"].as_f64().unwrap_or(1.0) > 0.0 {
            state = mix(state, request["seed"].as_u64().unwrap_or_default());
            if behaviour.ignores_seed && drafting {
                state = mix(state, self.counter.fetch_add(1, Ordering::Relaxed));
            }
        }
        let tokens = request["max_tokens"].as_u64().unwrap_or(16) as usize;
        let stops: Vec<&str> = request["stop"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .collect();
        let (mut ids, mut margins, mut text) = (Vec::new(), Vec::new(), String::new());
        let mut finish_reason = "length";
        for position in 0..tokens {
            let margin = (state % 10_000) as f64 / 2_000.0;
            let mut id = (state >> 33) as usize % WORDS.len();
            let unsteady = self.one_in(behaviour.unsteady_one_in);
            let wrong = unsteady
                || (drafting && self.one_in(behaviour.wrong_one_in))
                || (drafting && margin < behaviour.flips_below_nats);
            if wrong {
                // An unsteady service gives another wrong token each time.
                let drawn = u64::from(unsteady) * self.counter.fetch_add(1, Ordering::Relaxed);
                let step = 1 + mix(drawn, 5) as usize % (WORDS.len() - 1);
                id = (id + if unsteady { step } else { 1 }) % WORDS.len();
                self.faults.lock().unwrap().push((prompt.clone(), position));
            }
            let noise = if behaviour.noise_nats > 0.0 {
                let drawn = self.counter.fetch_add(1, Ordering::Relaxed);
                behaviour.noise_nats * ((mix(drawn, 3) % 2001) as f64 / 1000.0 - 1.0)
            } else {
                0.0
            };
            state = mix(state, id as u64);
            ids.push(id);
            margins.push(margin + noise);
            text.push_str(WORDS[id]);
            let found = stops
                .iter()
                .filter_map(|stop| Some((text.find(stop)?, stop)));
            if let Some((start, stop)) = found.min() {
                finish_reason = "stop";
                text.truncate(
                    start
                        + if behaviour.leaks_stop && drafting {
                            stop.len()
                        } else {
                            0
                        },
                );
                break;
            }
        }
        let prompt_tokens = prompt.split(' ').count();
        let counted = ids.len() + usize::from(behaviour.miscounts && drafting);
        let mut usage = json!({
            "prompt_tokens": prompt_tokens,
            "completion_tokens": counted,
            "total_tokens": prompt_tokens + counted,
        });
        if behaviour.counts {
            let steps = if drafting {
                ids.len() as u64 / DRAFTED_IN_STEP
            } else {
                0
            };
            usage["speculative"] = json!({
                "drafted_tokens": steps * DRAFTED_IN_STEP,
                "accepted_tokens": steps * ACCEPTED_IN_STEP,
                "steps": steps,
            });
        }
        Answer {
            chat,
            ids,
            text,
            margins,
            finish_reason,
            usage,
            drafting,
        }
    }

    fn stream(
        &self,
        writer: &mut TcpStream,
        request: &Value,
        answer: &Answer,
    ) -> std::io::Result<()> {
        write!(
            writer,
            "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
        )?;
        let object = if answer.chat {
            "chat.completion.chunk"
        } else {
            "text_completion"
        };
        let mut event = |choices: Value, usage: &Value| {
            let body = json!({ "object": object, "choices": choices, "usage": usage });
            write!(writer, "data: {body}\n\n")
        };
        let mut rest = answer.text.as_str();
        for (index, &id) in answer.ids.iter().enumerate() {
            self.pass(self.token_time(answer));
            if self.behaviour.cuts && answer.drafting && index > 1 {
                return Ok(());
            }
            let last = index + 1 == answer.ids.len();
            let end = if last {
                rest.len()
            } else {
                WORDS[id].len().min(rest.len())
            };
            let (delta, behind) = rest.split_at(end);
            rest = behind;
            let mut choice = if answer.chat {
                json!({ "index": 0, "delta": { "content": delta } })
            } else {
                json!({ "index": 0, "text": delta })
            };
            choice["finish_reason"] = if last {
                answer.finish_reason.into()
            } else {
                Value::Null
            };
            if request["return_token_ids"] == true {
                choice["token_ids"] = json!([id]);
            }
            event(json!([choice]), &Value::Null)?;
        }
        event(json!([]), &answer.usage)?;
        write!(writer, "data: [DONE]\n\n")
    }
}

fn whole_body(request: &Value, answer: &Answer) -> String {
    let mut choice = if answer.chat {
        json!({ "message": { "role": "assistant", "content": answer.text } })
    } else {
        json!({ "text": answer.text })
    };
    choice["finish_reason"] = answer.finish_reason.into();
    if request["return_token_ids"] == true {
        choice["token_ids"] = json!(answer.ids);
    }
    let top = |index: usize| {
        let id = answer.ids[index];
        [
            (WORDS[id], -0.1),
            (WORDS[(id + 1) % WORDS.len()], -0.1 - answer.margins[index]),
        ]
    };
    if request["logprobs"] == true {
        let entry = |index| {
            let top =
                top(index).map(|(token, logprob)| json!({ "token": token, "logprob": logprob }));
            json!({ "token": WORDS[answer.ids[index]], "logprob": -0.1, "top_logprobs": top })
        };
        let content: Vec<Value> = (0..answer.ids.len()).map(entry).collect();
        choice["logprobs"] = json!({ "content": content });
    } else if request["logprobs"].is_u64() {
        let tokens: Vec<&str> = answer.ids.iter().map(|&id| WORDS[id]).collect();
        let tops: Vec<Value> = (0..answer.ids.len())
            .map(|index| json!(std::collections::BTreeMap::from(top(index))))
            .collect();
        choice["logprobs"] = json!({ "tokens": tokens, "top_logprobs": tops });
    }
    let object = if answer.chat {
        "chat.completion"
    } else {
        "text_completion"
    };
    json!({ "object": object, "choices": [choice], "usage": answer.usage }).to_string()
}

fn whole(writer: &mut TcpStream, status: u16, body: &str) -> std::io::Result<()> {
    let length = body.len();
    let answer = format!(
        "HTTP/1.1 {status} Status\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    );
    writer.write_all(answer.as_bytes())
}
