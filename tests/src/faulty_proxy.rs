//! A proxy before a real server that does one thing wrong where the server drafts, so that what judges services is seen to find it.
//!
//! It passes on whole answers only; streams are not what it is for.

use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use actix_web::dev::ServerHandle;
use actix_web::http::{Method, StatusCode, header};
use actix_web::{App, HttpRequest, HttpResponse, HttpServer, web};
use anyhow::{Context, bail};
use serde_json::{Value, json};

/// What goes wrong, in requests that don't switch drafting off.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    /// One of so many tokens is another one.
    WrongToken {
        /// Counted over all answers.
        one_in: u64,
    },
    /// Each request has a seed of its own.
    IgnoredSeed,
    /// The stop string stays behind the text.
    LeakedStop,
    /// Usage counts a token too many.
    Miscount,
    /// Nothing is drafted.
    NoDrafts,
}

/// A running proxy; it stops when it is dropped.
pub struct FaultyProxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    handle: ServerHandle,
}

/// The most bytes of a request; the prompts of long context are the longest.
const MOST_BODY_BYTES: usize = 1 << 20;
/// Most time of one request, on a machine that does other work.
const REQUEST_DEADLINE: Duration = Duration::from_secs(180);

struct Shared {
    fault: Fault,
    endpoint: String,
    agent: ureq::Agent,
    counter: AtomicU64,
    wrong_tokens: Mutex<Vec<(Value, u64)>>,
}

impl FaultyProxy {
    /// Starts a proxy with `fault` before the service at `endpoint`.
    ///
    /// # Errors
    ///
    /// When it gets no port.
    pub fn before(endpoint: String, fault: Fault) -> anyhow::Result<Self> {
        let agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(REQUEST_DEADLINE))
            .build()
            .into();
        let shared = Arc::new(Shared {
            fault,
            endpoint,
            agent,
            counter: AtomicU64::new(0),
            wrong_tokens: Mutex::default(),
        });
        let data = web::Data::from(Arc::clone(&shared));
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || {
            // A server belongs to the thread that made it.
            actix_web::rt::System::new().block_on(async move {
                let server = HttpServer::new(move || {
                    App::new()
                        .app_data(data.clone())
                        .app_data(web::PayloadConfig::new(MOST_BODY_BYTES))
                        .default_service(web::to(pass_on))
                })
                .workers(1)
                .disable_signals()
                .listen(listener)?
                .run();
                // The receiver waits for nothing else.
                let _ = sender.send(server.handle());
                server.await
            })
        });
        let handle = receiver.recv().context("the proxy did not start")?;
        Ok(Self {
            address,
            shared,
            handle,
        })
    }

    /// Where it listens.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The tokens that it made wrong: the prompt or messages of the request, and the position.
    pub fn wrong_tokens(&self) -> Vec<(Value, u64)> {
        let wrong_tokens = self.shared.wrong_tokens.lock();
        wrong_tokens
            .unwrap_or_else(|poisoned| poisoned.into_inner())
            .clone()
    }
}

impl Drop for FaultyProxy {
    fn drop(&mut self) {
        // Stopping is begun by the call; nobody waits for what it gives.
        drop(self.handle.stop(false));
    }
}

async fn pass_on(
    request: HttpRequest,
    body: web::Bytes,
    shared: web::Data<Shared>,
) -> Result<HttpResponse, actix_web::Error> {
    let method = request.method().clone();
    let url = format!("{}{}", shared.endpoint, request.uri());
    let answer = web::block(move || shared.pass_on(&method, &url, &body)).await?;
    let (status, body) = answer.map_err(actix_web::error::ErrorBadGateway)?;
    Ok(HttpResponse::build(status)
        .insert_header((header::CONTENT_TYPE, "application/json"))
        .body(body))
}

impl Shared {
    fn pass_on(
        &self,
        method: &Method,
        url: &str,
        body: &[u8],
    ) -> anyhow::Result<(StatusCode, Vec<u8>)> {
        if method == Method::GET {
            return read(self.agent.get(url).call()?);
        }
        let mut request: Value = serde_json::from_slice(body)?;
        if request["stream"] == true {
            bail!("this proxy passes on no streams");
        }
        let drafting = request["speculative"]["enabled"] != false;
        if drafting {
            self.spoil_request(&mut request);
        }
        let sent = self
            .agent
            .post(url)
            .content_type("application/json")
            .send(request.to_string())?;
        let (status, body) = read(sent)?;
        if !drafting || status != StatusCode::OK {
            return Ok((status, body));
        }
        let mut answer = serde_json::from_slice(&body)?;
        self.spoil_answer(&request, &mut answer);
        Ok((status, serde_json::to_vec(&answer)?))
    }

    fn spoil_request(&self, request: &mut Value) {
        match self.fault {
            Fault::IgnoredSeed => {
                request["seed"] = self.counter.fetch_add(1, Ordering::Relaxed).into();
            }
            Fault::NoDrafts => request["speculative"] = json!({ "enabled": false }),
            Fault::WrongToken { .. } | Fault::LeakedStop | Fault::Miscount => {}
        }
    }

    fn spoil_answer(&self, request: &Value, answer: &mut Value) {
        match self.fault {
            Fault::WrongToken { one_in } => {
                let ids = answer["choices"][0]["token_ids"].as_array_mut();
                for (id, position) in ids.into_iter().flatten().zip(0..) {
                    let counted = 1 + self.counter.fetch_add(1, Ordering::Relaxed);
                    if !counted.is_multiple_of(one_in) {
                        continue;
                    }
                    *id = (id.as_u64().unwrap_or_default() + 1).into();
                    let prompt = request.get("messages").unwrap_or(&request["prompt"]);
                    let mut wrong_tokens = self
                        .wrong_tokens
                        .lock()
                        .unwrap_or_else(|poisoned| poisoned.into_inner());
                    wrong_tokens.push((prompt.clone(), position));
                }
            }
            Fault::LeakedStop => {
                let Some(stop) = request["stop"][0].as_str() else {
                    return;
                };
                let choice = &mut answer["choices"][0];
                let text = if choice["message"].is_object() {
                    &mut choice["message"]["content"]
                } else {
                    &mut choice["text"]
                };
                *text = format!("{}{stop}", text.as_str().unwrap_or_default()).into();
            }
            Fault::Miscount => {
                for count in ["completion_tokens", "total_tokens"] {
                    let counted = &mut answer["usage"][count];
                    *counted = (counted.as_u64().unwrap_or_default() + 1).into();
                }
            }
            Fault::IgnoredSeed | Fault::NoDrafts => {}
        }
    }
}

fn read(mut answer: ureq::http::Response<ureq::Body>) -> anyhow::Result<(StatusCode, Vec<u8>)> {
    let status = StatusCode::from_u16(answer.status().as_u16())?;
    Ok((status, answer.body_mut().read_to_vec()?))
}
