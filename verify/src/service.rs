//! One service under test: which model is asked, which extensions it has, and one form for whatever it answers.
//!
//! This module keeps "the service answered something" ([`Found`]) apart from "there is nothing to judge" ([`CouldNotRun`]).
//! It judges nothing.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Map, Value, json};

use crate::client::{Client, ClientError, Response, Streamed};
use crate::report::{Model, chain};
use crate::wire::{Api, Generation, carries_text, error_of, shorten};

/// Why a run ended before its last check: there was no answer to judge.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct CouldNotRun(pub String);

impl From<ClientError> for CouldNotRun {
    fn from(error: ClientError) -> Self {
        Self(chain(&error))
    }
}

/// What a request was answered with.
#[derive(Clone, Debug, PartialEq)]
pub enum Found {
    /// A completion.
    Generation(Box<Generation>),
    /// A status that is not 200, and the message that came with it.
    Refused {
        /// HTTP status.
        status: u16,
        /// The error's type, `None` when the body is no typed error.
        kind: Option<String>,
        /// The error's message, or the beginning of the body.
        message: String,
    },
    /// A 200 that does not have the shape of its interface, and why.
    Malformed(String),
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Generation(generation) => write!(f, "{:?}", shorten(&generation.text)),
            Self::Refused {
                status, message, ..
            } => write!(f, "{status} {message}"),
            Self::Malformed(why) => write!(f, "200 with {why}"),
        }
    }
}

/// A service with the model that is asked.
pub struct Service {
    client: Client,
    model: Model,
    /// Cleared when the service refuses the extension field.
    returns_token_ids: AtomicBool,
}

/// The extension field by which a service says which tokens it generated.
const TOKEN_IDS: &str = "return_token_ids";

impl Service {
    /// Looks up `wanted` in the service's list of models, or takes the first one.
    pub fn connect(client: Client, wanted: Option<&str>) -> Result<Self, CouldNotRun> {
        let answer = client.get("/v1/models")?;
        let listed = answer
            .json()
            .and_then(|list| list.get("data").and_then(Value::as_array).cloned())
            .unwrap_or_default();
        let models: Vec<Model> = listed.iter().filter_map(Model::from_entry).collect();
        let model = match wanted {
            None => models.into_iter().next().ok_or_else(|| {
                CouldNotRun(format!(
                    "no model to ask: GET {}/v1/models answered {} {}; name one with --model",
                    client.base(),
                    answer.status,
                    shorten(&answer.text())
                ))
            })?,
            Some(wanted) => {
                let names: Vec<&str> = models.iter().map(|model| model.id.as_str()).collect();
                let names = names.join(", ");
                models
                    .into_iter()
                    .find(|model| model.id == wanted)
                    .ok_or_else(|| {
                        CouldNotRun(format!(
                            "{} does not serve `{wanted}`, it serves [{names}]",
                            client.base()
                        ))
                    })?
            }
        };
        Ok(Self {
            client,
            model,
            returns_token_ids: AtomicBool::new(true),
        })
    }

    /// What the service says of its model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The connection.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Asks for one completion as a whole; `fields` is the request without model and extensions.
    pub fn ask(&self, api: Api, fields: &Map<String, Value>) -> Result<Found, CouldNotRun> {
        let answer = self.answer(api, fields)?;
        Ok(found(api, &answer))
    }

    /// The answer as it came.
    ///
    /// # Errors
    ///
    /// When the service is too busy: an answer that was not given says nothing of those that are.
    pub fn answer(&self, api: Api, fields: &Map<String, Value>) -> Result<Response, CouldNotRun> {
        let with_ids = self.returns_token_ids.load(Ordering::Relaxed);
        let mut answer = self
            .client
            .post(api.path(), &self.request(fields, with_ids))?;
        if with_ids && answer.status == 400 && answer.text().contains(TOKEN_IDS) {
            self.returns_token_ids.store(false, Ordering::Relaxed);
            answer = self.client.post(api.path(), &self.request(fields, false))?;
        }
        self.not_busy(api, answer)
    }

    fn not_busy(&self, api: Api, answer: Response) -> Result<Response, CouldNotRun> {
        if !matches!(answer.status, 429 | 503) {
            return Ok(answer);
        }
        Err(CouldNotRun(format!(
            "POST {}{}: the service is too busy: {} {}; ask for less at once with --concurrency",
            self.client.base(),
            api.path(),
            answer.status,
            shorten(&answer.text())
        )))
    }

    /// Asks for one completion as a stream. `seen` is told of each event that carries text; when it returns false, the connection is closed and
    /// what came so far is the answer.
    pub fn stream(
        &self,
        api: Api,
        fields: &Map<String, Value>,
        mut seen: impl FnMut() -> bool,
    ) -> Result<Found, CouldNotRun> {
        let mut fields = fields.clone();
        fields.insert("stream".into(), true.into());
        fields.insert("stream_options".into(), json!({ "include_usage": true }));
        let events = match self.client.stream(api.path(), &self.body(&fields))? {
            Streamed::Events(events) => events,
            Streamed::Whole(answer) => {
                return self.not_busy(api, answer).map(|answer| found(api, &answer));
            }
        };
        let mut chunks = Vec::new();
        for event in events {
            let event = event?;
            let Ok(chunk) = serde_json::from_str::<Value>(&event) else {
                return Ok(Found::Malformed(format!(
                    "an event that is no JSON: {}",
                    shorten(&event)
                )));
            };
            if let Some(error) = chunk.get("error") {
                return Ok(Found::Malformed(format!(
                    "an error inside the stream: {}",
                    shorten(&error.to_string())
                )));
            }
            let carries_text = carries_text(api, &chunk);
            chunks.push(chunk);
            if carries_text && !seen() {
                break;
            }
        }
        Ok(match Generation::from_chunks(api, &chunks) {
            Ok(generation) => Found::Generation(Box::new(generation)),
            Err(error) => Found::Malformed(error.to_string()),
        })
    }

    /// The body of a request: `fields` with the model and, where the service knows it, the wish for token ids.
    pub fn body(&self, fields: &Map<String, Value>) -> Value {
        self.request(fields, self.returns_token_ids.load(Ordering::Relaxed))
    }

    fn request(&self, fields: &Map<String, Value>, with_ids: bool) -> Value {
        let mut request = Map::new();
        request.insert("model".into(), self.model.id.as_str().into());
        request.extend(fields.clone());
        if with_ids {
            request.insert(TOKEN_IDS.into(), true.into());
        }
        request.into()
    }
}

/// Reads an answer.
pub fn found(api: Api, answer: &Response) -> Found {
    let body = answer.json();
    if answer.status != 200 {
        let typed = body.as_ref().and_then(|body| error_of(body).ok());
        let (message, kind) = match typed {
            Some((message, kind)) => (message, Some(kind)),
            None => (answer.text(), None),
        };
        return Found::Refused {
            status: answer.status,
            kind,
            message: shorten(&message),
        };
    }
    let Some(body) = body else {
        return Found::Malformed(format!(
            "a body that is no JSON: {}",
            shorten(&answer.text())
        ));
    };
    match Generation::from_whole(api, &body) {
        Ok(generation) => Found::Generation(Box::new(generation)),
        Err(error) => Found::Malformed(error.to_string()),
    }
}
