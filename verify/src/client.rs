//! Talks HTTP to the service under test: JSON in, JSON or server-sent events out.
//!
//! This module tells "the service answered" from "there was no answer to judge".
//! It knows no model interface; that is [`crate::wire`].

use std::io::{BufRead, BufReader};
use std::time::Duration;

use serde_json::Value;
use ureq::http;
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};

/// Most bytes of one answer that is not a stream; more is an error, so that a broken service can't fill the memory.
const ANSWER_LIMIT_BYTES: u64 = 64 << 20;

/// The environment variable that holds the key of the service.
pub const API_KEY_VARIABLE: &str = "OUTRIDER_VERIFY_API_KEY";

/// A connection to one service.
pub struct Client {
    agent: ureq::Agent,
    base: String,
    authorization: Option<String>,
}

/// What a request needs beside its body.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// Sent as `Authorization: Bearer`.
    pub api_key: Option<String>,
    /// Most time for one request, its whole answer included.
    pub timeout: Duration,
    /// Certificates in PEM form of the authorities to trust, in place of the system's.
    pub ca_certificates: Option<Vec<u8>>,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            api_key: None,
            timeout: Duration::from_secs(120),
            ca_certificates: None,
        }
    }
}

/// Why there is no answer to judge.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The endpoint is not one.
    #[error("`{endpoint}` is not an endpoint: {why}")]
    Endpoint {
        /// The text given.
        endpoint: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// The certificates of the authorities to trust are none.
    #[error("the CA certificates are no PEM file with at least one certificate")]
    CaCertificates,
    /// No connection, no TLS, no answer in time, or an answer that broke off.
    #[error("{method} {url}")]
    Transport {
        /// HTTP method.
        method: &'static str,
        /// Where the request went.
        url: String,
        /// The cause.
        #[source]
        source: Box<ureq::Error>,
    },
    /// The service wants another key.
    #[error(
        "{method} {url}: the service answered {status}, give a key it accepts in {API_KEY_VARIABLE} or --api-key-file"
    )]
    Unauthorized {
        /// HTTP method.
        method: &'static str,
        /// Where the request went.
        url: String,
        /// 401 or 403.
        status: u16,
    },
    /// A stream ended without its end marker, or inside an event.
    #[error("{url}: the stream broke off after {events} events, before `data: [DONE]`")]
    StreamCut {
        /// Where the request went.
        url: String,
        /// Whole events received before.
        events: usize,
        /// The cause, when the connection gave one.
        #[source]
        source: Option<std::io::Error>,
    },
}

/// A complete answer.
#[derive(Clone, Debug)]
pub struct Response {
    /// HTTP status.
    pub status: u16,
    /// The header `Retry-After`, where it is there and counts seconds.
    pub retry_after_seconds: Option<u64>,
    /// The body as it came.
    pub body: Vec<u8>,
}

impl Response {
    /// The body as JSON, `None` when it is not.
    pub fn json(&self) -> Option<Value> {
        serde_json::from_slice(&self.body).ok()
    }

    /// The body as text, bad UTF-8 replaced.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// What a request for a stream was answered with.
pub enum Streamed {
    /// A stream of events.
    Events(EventStream),
    /// Anything else: an error status, or no `text/event-stream`.
    Whole(Response),
}

impl Client {
    /// A client for `endpoint`, the address of the service with or without `/v1`, for example `http://127.0.0.1:8080`.
    pub fn new(endpoint: &str, options: ClientOptions) -> Result<Self, ClientError> {
        let base = base_of(endpoint)?;
        let roots = match &options.ca_certificates {
            None => RootCerts::PlatformVerifier,
            Some(pem) => certificates(pem)?,
        };
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_global(Some(options.timeout))
            .tls_config(TlsConfig::builder().root_certs(roots).build())
            .user_agent(concat!("outrider-verify/", env!("CARGO_PKG_VERSION")))
            .build();
        Ok(Self {
            agent: config.into(),
            base,
            authorization: options.api_key.map(|key| format!("Bearer {key}")),
        })
    }

    /// The address requests go to, without `/v1`.
    pub fn base(&self) -> &str {
        &self.base
    }

    /// `GET path`.
    pub fn get(&self, path: &str) -> Result<Response, ClientError> {
        let url = self.url(path);
        let mut request = self.agent.get(&url);
        if let Some(authorization) = &self.authorization {
            request = request.header(http::header::AUTHORIZATION, authorization);
        }
        let answer = request
            .call()
            .map_err(|source| transport("GET", &url, source))?;
        whole("GET", &url, answer)
    }

    /// `POST path` with a JSON body.
    pub fn post(&self, path: &str, body: &Value) -> Result<Response, ClientError> {
        self.post_bytes(path, body.to_string().as_bytes())
    }

    /// `POST path` with a body that is called JSON, whatever it holds.
    pub fn post_bytes(&self, path: &str, body: &[u8]) -> Result<Response, ClientError> {
        let url = self.url(path);
        let answer = self.send(&url, body)?;
        whole("POST", &url, answer)
    }

    /// `POST path` with a JSON body that asks for a stream.
    pub fn stream(&self, path: &str, body: &Value) -> Result<Streamed, ClientError> {
        let url = self.url(path);
        let answer = self.send(&url, body.to_string().as_bytes())?;
        let is_stream = answer
            .headers()
            .get(http::header::CONTENT_TYPE)
            .and_then(|value| value.to_str().ok())
            .is_some_and(|value| value.starts_with("text/event-stream"));
        if answer.status() != http::StatusCode::OK || !is_stream {
            return whole("POST", &url, answer).map(Streamed::Whole);
        }
        Ok(Streamed::Events(EventStream {
            url,
            lines: BufReader::new(answer.into_body().into_reader()),
            events: 0,
            done: false,
        }))
    }

    fn send(&self, url: &str, body: &[u8]) -> Result<http::Response<ureq::Body>, ClientError> {
        let mut request = self.agent.post(url).content_type("application/json");
        if let Some(authorization) = &self.authorization {
            request = request.header(http::header::AUTHORIZATION, authorization);
        }
        request
            .send(body)
            .map_err(|source| transport("POST", url, source))
    }

    fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }
}

/// The data of a stream's events, one after the other, without the final `[DONE]`. Dropping it closes the connection.
pub struct EventStream {
    url: String,
    lines: BufReader<ureq::BodyReader<'static>>,
    events: usize,
    done: bool,
}

impl Iterator for EventStream {
    type Item = Result<String, ClientError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.done {
            return None;
        }
        let data = match read_event(&mut self.lines) {
            Ok(Some(data)) if data == "[DONE]" => {
                self.done = true;
                return None;
            }
            Ok(Some(data)) => data,
            outcome => {
                self.done = true;
                return Some(Err(ClientError::StreamCut {
                    url: self.url.clone(),
                    events: self.events,
                    source: outcome.err(),
                }));
            }
        };
        self.events += 1;
        Some(Ok(data))
    }
}

/// The data of the next event as the event stream format of the HTML standard defines it, `None` at the end of the stream; an event that the end cuts
/// off is dropped, as the standard wants it. Fields other than `data` and comments are skipped.
fn read_event(lines: &mut impl BufRead) -> std::io::Result<Option<String>> {
    let mut data: Option<String> = None;
    let mut line = String::new();
    loop {
        line.clear();
        if lines.read_line(&mut line)? == 0 || !line.ends_with('\n') {
            return Ok(None);
        }
        let text = line.trim_end_matches('\n').trim_end_matches('\r');
        if text.is_empty() {
            if data.is_some() {
                return Ok(data);
            }
        } else if let Some(value) = text.strip_prefix("data:") {
            let value = value.strip_prefix(' ').unwrap_or(value);
            match &mut data {
                None => data = Some(value.to_owned()),
                Some(data) => {
                    data.push('\n');
                    data.push_str(value);
                }
            }
        }
    }
}

fn whole(
    method: &'static str,
    url: &str,
    answer: http::Response<ureq::Body>,
) -> Result<Response, ClientError> {
    let status = answer.status().as_u16();
    if status == 401 || status == 403 {
        return Err(ClientError::Unauthorized {
            method,
            url: url.to_owned(),
            status,
        });
    }
    let retry_after_seconds = answer
        .headers()
        .get(http::header::RETRY_AFTER)
        .and_then(|value| value.to_str().ok()?.parse().ok());
    let body = answer
        .into_body()
        .into_with_config()
        .limit(ANSWER_LIMIT_BYTES)
        .read_to_vec()
        .map_err(|source| transport(method, url, source))?;
    Ok(Response {
        status,
        retry_after_seconds,
        body,
    })
}

fn transport(method: &'static str, url: &str, source: ureq::Error) -> ClientError {
    ClientError::Transport {
        method,
        url: url.to_owned(),
        source: Box::new(source),
    }
}

fn certificates(pem: &[u8]) -> Result<RootCerts, ClientError> {
    let items: Result<Vec<_>, _> = parse_pem(pem).collect();
    let certificates: Vec<_> = items
        .map_err(|_| ClientError::CaCertificates)?
        .into_iter()
        .filter_map(|item| match item {
            PemItem::Certificate(certificate) => Some(certificate),
            _ => None,
        })
        .collect();
    if certificates.is_empty() {
        return Err(ClientError::CaCertificates);
    }
    Ok(certificates.into())
}

fn base_of(endpoint: &str) -> Result<String, ClientError> {
    let fault = |why| {
        Err(ClientError::Endpoint {
            endpoint: endpoint.to_owned(),
            why,
        })
    };
    let Ok(uri) = endpoint.parse::<http::Uri>() else {
        return fault("it is no URL");
    };
    if !matches!(uri.scheme_str(), Some("http" | "https")) {
        return fault("it must begin with http:// or https://");
    }
    let Some(authority) = uri.authority() else {
        return fault("it names no host");
    };
    if authority.as_str().contains('@') {
        return fault("it must hold no user or password, give a key with --api-key-file");
    }
    if uri.query().is_some() {
        return fault("it must hold no query");
    }
    let base = endpoint.trim_end_matches('/');
    Ok(base.strip_suffix("/v1").unwrap_or(base).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_taken_with_and_without_the_version_and_refused_with_a_reason() {
        let check = |endpoint: &str, expected: Result<&str, &str>| {
            let base = base_of(endpoint).map_err(|error| error.to_string());
            match (base, expected) {
                (Ok(base), Ok(expected)) => assert_eq!(base, expected),
                (Err(error), Err(part)) => assert!(error.contains(part), "{error}"),
                (base, expected) => panic!("{endpoint}: {base:?}, expected {expected:?}"),
            }
        };
        check("http://127.0.0.1:8080", Ok("http://127.0.0.1:8080"));
        check("http://127.0.0.1:8080/", Ok("http://127.0.0.1:8080"));
        check(
            "https://models.example/gateway/v1/",
            Ok("https://models.example/gateway"),
        );
        check("127.0.0.1:8080", Err("http://"));
        check("ftp://models.example", Err("http://"));
        check("http://user:secret@models.example", Err("--api-key-file"));
        check("http://models.example?x=1", Err("query"));
        check("not a url", Err("no URL"));
    }

    #[test]
    fn events_are_read_as_the_standard_defines_them() {
        let text =
            ": comment\r\ndata: one\r\n\r\nevent: x\ndata:two\ndata: lines\n\n\n\ndata: cut off\n";
        let mut lines = text.as_bytes();
        let mut events = Vec::new();
        while let Some(event) = read_event(&mut lines).unwrap() {
            events.push(event);
        }
        assert_eq!(events, ["one", "two\nlines"]);
    }
}
