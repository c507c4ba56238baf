//! One repository of one registry over HTTP: requests, tokens, and answers that are what they should be.

use std::cell::RefCell;
use std::io::{self, Read};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use oci_spec::image::MediaType;
use serde::Deserialize;
use ureq::http::{Request, Response};
use ureq::{Agent, Body, SendBody};

use super::{Credentials, Reference, RegistryError, Retry};
use crate::Error;

/// Longest silence before a connection counts as broken.
const SILENCE: Duration = Duration::from_secs(60);

/// Bytes of a refusal that are told.
const TOLD_BYTES: u64 = 500;

/// Makes the body of a request, again for every attempt: a reader and its size in bytes.
pub(super) type MakeBody<'a> = &'a dyn Fn() -> io::Result<(Box<dyn Read>, u64)>;

/// One repository of one registry.
pub struct Client {
    agent: Agent,
    reference: Reference,
    base: String,
    credentials: Option<Credentials>,
    authorization: RefCell<Option<String>>,
    pub(super) retry: Retry,
}

#[derive(Deserialize)]
struct Token {
    token: Option<String>,
    access_token: Option<String>,
}

impl Client {
    /// A client for the repository of a reference. Plain HTTP is spoken when the registry is on loopback or `plain_http` says so.
    pub fn new(
        reference: &Reference,
        credentials: Option<Credentials>,
        plain_http: bool,
        retry: Retry,
    ) -> Self {
        let agent = Agent::config_builder()
            .http_status_as_error(false)
            .timeout_connect(Some(SILENCE))
            .timeout_recv_response(Some(10 * SILENCE))
            .build()
            .new_agent();
        let scheme = if plain_http || reference.is_loopback() {
            "http"
        } else {
            "https"
        };
        Self {
            agent,
            reference: reference.clone(),
            base: format!("{scheme}://{}", reference.registry),
            credentials,
            authorization: RefCell::new(None),
            retry,
        }
    }

    /// The image that this client was made for.
    pub fn reference(&self) -> &Reference {
        &self.reference
    }

    /// Address of something in the repository, such as `manifests/v1`.
    pub(super) fn url(&self, rest: &str) -> String {
        format!("{}/v2/{}/{rest}", self.base, self.reference.repository)
    }

    /// Sends a request; gets a token when the registry wants one. An answer with another status than those in `allowed` is an error.
    pub(super) fn send(
        &self,
        what: &str,
        (method, url): (&str, &str),
        headers: &[(&str, &str)],
        body: Option<MakeBody<'_>>,
        allowed: &[u16],
    ) -> Result<Response<Body>, RegistryError> {
        let mut response = self.send_once(what, (method, url), headers, body)?;
        if response.status() == 401 && self.is_own(url) {
            self.authorize(what, &response)?;
            response = self.send_once(what, (method, url), headers, body)?;
        }
        let status = response.status().as_u16();
        if allowed.contains(&status) {
            return Ok(response);
        }
        let mut told = Vec::new();
        // What can't be read of a refusal changes nothing about it.
        let _ = response
            .body_mut()
            .as_reader()
            .take(TOLD_BYTES)
            .read_to_end(&mut told);
        Err(RegistryError::Status {
            what: what.to_owned(),
            url: url.to_owned(),
            status,
            body: String::from_utf8_lossy(&told).trim().to_owned(),
        })
    }

    fn send_once(
        &self,
        what: &str,
        (method, url): (&str, &str),
        headers: &[(&str, &str)],
        body: Option<MakeBody<'_>>,
    ) -> Result<Response<Body>, RegistryError> {
        let failed = |source: ureq::Error| RegistryError::Connection {
            what: what.to_owned(),
            url: url.to_owned(),
            source: Box::new(source),
        };
        let mut request = Request::builder().method(method).uri(url);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        // A session may be at another host; it isn't told the token.
        if let (Some(authorization), true) = (&*self.authorization.borrow(), self.is_own(url)) {
            request = request.header("authorization", authorization);
        }
        let made = |source: ureq::http::Error| failed(source.into());
        match body {
            None => self
                .agent
                .run(request.body(()).map_err(made)?)
                .map_err(failed),
            Some(make) => {
                let (mut reader, size_bytes) = make().map_err(|source| failed(source.into()))?;
                let request = request
                    .header("content-length", size_bytes)
                    .body(SendBody::from_reader(&mut reader))
                    .map_err(made)?;
                self.agent.run(request).map_err(failed)
            }
        }
    }

    /// Gets a document of which at most `limit_bytes` are read.
    pub(super) fn get(
        &self,
        what: &str,
        url: &str,
        accept: Option<&MediaType>,
        allowed: &[u16],
        limit_bytes: u64,
    ) -> Result<Response<Vec<u8>>, Error> {
        let accept = accept.map(MediaType::to_string);
        let headers: Vec<(&str, &str)> = accept.iter().map(|it| ("accept", it.as_str())).collect();
        let (parts, mut body) = self
            .send(what, ("GET", url), &headers, None, allowed)?
            .into_parts();
        let mut bytes = Vec::new();
        body.as_reader()
            .take(limit_bytes)
            .read_to_end(&mut bytes)
            .map_err(|source| Error::read(url, source))?;
        Ok(Response::from_parts(parts, bytes))
    }

    /// Puts a document where it is to be.
    pub(super) fn put(
        &self,
        what: &str,
        url: &str,
        media_type: &MediaType,
        bytes: &[u8],
    ) -> Result<Response<Body>, RegistryError> {
        let body = || {
            let reader = io::Cursor::new(bytes.to_vec());
            Ok((Box::new(reader) as Box<dyn Read>, bytes.len() as u64))
        };
        let media_type = media_type.to_string();
        let headers = [("content-type", media_type.as_str())];
        self.send(what, ("PUT", url), &headers, Some(&body), &[201])
    }

    /// The value of `Location`, as an absolute address.
    pub(super) fn location(
        &self,
        what: &str,
        response: &Response<Body>,
    ) -> Result<String, RegistryError> {
        self.absolute(what, &header(response, "location").unwrap_or_default())
    }

    /// An address that the registry gives, made absolute.
    pub(super) fn absolute(&self, what: &str, address: &str) -> Result<String, RegistryError> {
        if address.starts_with('/') {
            Ok(format!("{}{address}", self.base))
        } else if address.starts_with("http://") || address.starts_with("https://") {
            Ok(address.to_owned())
        } else {
            Err(RegistryError::Answer {
                what: what.to_owned(),
                problem: format!("gives the address {address:?}, which can't be used"),
            })
        }
    }

    fn is_own(&self, url: &str) -> bool {
        url.strip_prefix(&self.base)
            .is_some_and(|rest| rest.starts_with('/'))
    }

    /// Answers a challenge (RFC 6750, RFC 7617) with what the next requests carry.
    fn authorize(&self, what: &str, response: &Response<Body>) -> Result<(), RegistryError> {
        let fault = |problem: String| RegistryError::Answer {
            what: what.to_owned(),
            problem,
        };
        let challenge = header(response, "www-authenticate").unwrap_or_default();
        let basic = self.credentials.as_ref().map(|credentials| {
            let pair = format!("{}:{}", credentials.user, credentials.secret);
            format!("Basic {}", STANDARD.encode(pair))
        });
        let (scheme, rest) = challenge.split_once(' ').unwrap_or((&challenge, ""));
        if scheme.eq_ignore_ascii_case("basic") {
            let basic = basic.ok_or_else(|| RegistryError::Credentials {
                registry: self.reference.registry.clone(),
                problem: "there are none, and the registry asks for a user and a password"
                    .to_owned(),
            })?;
            *self.authorization.borrow_mut() = Some(basic);
            return Ok(());
        }
        let realm = parameter(rest, "realm").filter(|_| scheme.eq_ignore_ascii_case("bearer"));
        let Some(realm) = realm else {
            return Err(fault(format!(
                "asks for {challenge:?}, only Basic and Bearer are known"
            )));
        };
        if !realm.starts_with("https://") && !self.base.starts_with("http://") {
            return Err(fault(format!(
                "sends callers for a token to {realm}, which is not HTTPS"
            )));
        }
        let mut url = format!(
            "{realm}?scope=repository:{}:pull,push",
            self.reference.repository
        );
        if let Some(service) = parameter(rest, "service") {
            url = format!("{url}&service={service}");
        }
        let headers: Vec<(&str, &str)> = basic
            .iter()
            .map(|basic| ("authorization", basic.as_str()))
            .collect();
        let mut response = self.send_once("a token", ("GET", &url), &headers, None)?;
        if response.status() != 200 {
            return Err(fault(format!(
                "gives no token: {realm} answers {}",
                response.status()
            )));
        }
        let token: Token = response
            .body_mut()
            .read_json()
            .map_err(|error| fault(format!("gives a token that can't be read: {error}")))?;
        let token = token.token.or(token.access_token);
        let token = token.ok_or_else(|| fault("gives an answer without a token".to_owned()))?;
        *self.authorization.borrow_mut() = Some(format!("Bearer {token}"));
        Ok(())
    }
}

/// A header as text.
pub(super) fn header<T>(response: &Response<T>, name: &str) -> Option<String> {
    let value = response.headers().get(name)?.to_str().ok()?;
    Some(value.to_owned())
}

/// One parameter of a challenge: `name="value"`, separated by commas.
fn parameter(challenge: &str, name: &str) -> Option<String> {
    challenge.split(',').find_map(|part| {
        let (key, value) = part.trim().split_once('=')?;
        key.eq_ignore_ascii_case(name)
            .then(|| value.trim_matches('"').to_owned())
    })
}
