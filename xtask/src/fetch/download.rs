//! Files from web servers: resumed where an earlier attempt stopped, tried again when the connection drops, never believed without the lock.

use std::fs;
use std::io::{self, Read};
use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use outrider_bundle::lock::LockedFile;
use outrider_bundle::retry::{Attempts, Retry};
use ureq::http::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, ETAG,
    HeaderName, IF_RANGE, RANGE, RETRY_AFTER,
};
use ureq::http::{Response, StatusCode};
use ureq::{Agent, Body};

use super::incoming::Incoming;
use super::progress::Progress;

/// Longest silence of a server before the connection counts as dropped.
const SILENCE: Duration = Duration::from_secs(60);

/// Longest wait before an attempt, whatever a server asks for.
const MAX_WAIT: Duration = Duration::from_secs(60);

/// Why an attempt ended without the file.
enum Failure {
    /// Another attempt may bring the rest; the server may have said when.
    Passing(anyhow::Error, Option<Duration>),
    /// Another attempt brings the same.
    Lasting(anyhow::Error),
}

impl Failure {
    fn passing(error: impl Into<anyhow::Error>) -> Self {
        Self::Passing(error.into(), None)
    }
}

/// Downloads one file into `dir`. `token` is sent as a bearer token.
pub fn download(
    url: &str,
    token: Option<&str>,
    dir: &Path,
    file: &LockedFile,
    retry: Retry,
    progress: Progress,
) -> anyhow::Result<()> {
    if token.is_some() {
        check_private(url)?;
    }
    let client = Client {
        agent: agent(),
        url,
        token,
        file,
        progress,
    };
    let mut incoming = Incoming::resume(dir, file)?;
    // A file put together from two answers may be a mixture of two versions; then one whole answer decides.
    let mut is_stitched = incoming.received_bytes() > 0;
    if is_stitched {
        progress.line(&format!(
            "{}: going on after {} of {} bytes",
            file.name,
            incoming.received_bytes(),
            file.size_bytes
        ));
    }
    let mut attempts = Attempts::new(retry, incoming.received_bytes());
    loop {
        let failure = match client.attempt(&mut incoming) {
            Ok(()) => match incoming.commit() {
                Err(error) if is_stitched => {
                    progress.line(&format!("{error:#}; starting over"));
                    is_stitched = false;
                    incoming = Incoming::resume(dir, file)?;
                    attempts = Attempts::new(retry, 0);
                    continue;
                }
                result => return result.with_context(|| format!("{url} is not the locked file")),
            },
            Err(failure) => failure,
        };
        let (error, asked_wait) = match failure {
            Failure::Lasting(error) => return Err(error),
            Failure::Passing(error, asked_wait) => (error, asked_wait),
        };
        let Some(wait) = attempts.fail(incoming.received_bytes()) else {
            let kept = match incoming.received_bytes() {
                0 => String::new(),
                received => format!(
                    ", {received} of {} bytes are kept for the next run",
                    file.size_bytes
                ),
            };
            return Err(error).with_context(|| {
                let failed = attempts.failed();
                format!("{}: gave up after {failed} attempts{kept}", file.name)
            });
        };
        is_stitched |= incoming.received_bytes() > 0;
        let wait = asked_wait.unwrap_or(wait).min(MAX_WAIT);
        progress.line(&format!(
            "{}: {error:#}; trying again in {:.1} s",
            file.name,
            wait.as_secs_f32()
        ));
        thread::sleep(wait);
    }
}

/// One file at one URL.
struct Client<'a> {
    agent: Agent,
    url: &'a str,
    token: Option<&'a str>,
    file: &'a LockedFile,
    progress: Progress,
}

impl Client<'_> {
    /// Asks for what is missing and takes it in.
    fn attempt(&self, incoming: &mut Incoming) -> Result<(), Failure> {
        if incoming.is_complete() {
            return Ok(());
        }
        let response = self.request(incoming)?;
        let body = self.judge(response, incoming)?;
        self.receive(body, incoming)
    }

    fn request(&self, incoming: &Incoming) -> Result<Response<Body>, Failure> {
        // Bytes and sizes of a lock are those of the file itself, not of a compressed form.
        let mut request = self.agent.get(self.url).header(ACCEPT_ENCODING, "identity");
        if let Some(token) = self.token {
            request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        let received = incoming.received_bytes();
        if received > 0 {
            request = request.header(RANGE, format!("bytes={received}-"));
            // A weak tag can't stand for bytes; then the tag of the answer is compared.
            if let Some(etag) = read_etag(incoming).filter(|etag| !etag.starts_with("W/")) {
                request = request.header(IF_RANGE, etag);
            }
        }
        let fail = |error: ureq::Error| {
            let is_passing = is_passing(&error);
            let error = anyhow!(error).context(format!("no answer from {}", self.url));
            if is_passing {
                Failure::passing(error)
            } else {
                Failure::Lasting(error)
            }
        };
        request.call().map_err(fail)
    }

    /// Looks at the head of an answer; returns the body when it goes on where the partial file ends.
    fn judge(&self, response: Response<Body>, incoming: &mut Incoming) -> Result<Body, Failure> {
        let lasting = |error: anyhow::Error| Failure::Lasting(error);
        let status = response.status();
        let etag = text_of(&response, ETAG).map(str::to_owned);
        match status {
            StatusCode::OK => {
                if incoming.received_bytes() > 0 {
                    self.progress.line(&format!(
                        "{}: the server sends the whole file again",
                        self.file.name
                    ));
                }
                incoming.restart().map_err(lasting)?;
                let length = text_of(&response, CONTENT_LENGTH)
                    .and_then(|length| length.parse::<u64>().ok());
                let is_encoded = response.headers().contains_key(CONTENT_ENCODING);
                self.check_size(length.filter(|_| !is_encoded))
                    .map_err(lasting)?;
                write_etag(incoming, etag.as_deref()).map_err(lasting)?;
                Ok(response.into_body())
            }
            StatusCode::PARTIAL_CONTENT => {
                let range = text_of(&response, CONTENT_RANGE).and_then(parse_content_range);
                let total = range.and_then(|(_, total)| total);
                if let Err(error) = self.check_size(total) {
                    incoming.restart().map_err(lasting)?;
                    return Err(lasting(error));
                }
                let starts_here =
                    range.is_some_and(|(start, _)| start == incoming.received_bytes());
                let known = read_etag(incoming);
                let is_same = known.is_none() || etag.is_none() || known == etag;
                if starts_here && is_same {
                    return Ok(response.into_body());
                }
                incoming.restart().map_err(lasting)?;
                let reason = if is_same {
                    "the answer is for another range"
                } else {
                    "the file on the server has changed"
                };
                Err(Failure::passing(anyhow!("{reason}, starting over")))
            }
            StatusCode::RANGE_NOT_SATISFIABLE => {
                incoming.restart().map_err(lasting)?;
                Err(Failure::passing(anyhow!(
                    "the server has no such range, starting over"
                )))
            }
            StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS => {
                Err(self.later(&response))
            }
            _ if status.is_server_error() => Err(self.later(&response)),
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                let hint = if self.token.is_some() {
                    "the token of HF_TOKEN may not read it"
                } else {
                    "it may want a token, which HF_TOKEN gives for `hf` sources"
                };
                Err(Failure::Lasting(anyhow!(
                    "{} answers {status}: {hint}",
                    self.url
                )))
            }
            _ => Err(Failure::Lasting(anyhow!("{} answers {status}", self.url))),
        }
    }

    fn later(&self, response: &Response<Body>) -> Failure {
        let wait = text_of(response, RETRY_AFTER)
            .and_then(|seconds| seconds.parse().ok())
            .map(Duration::from_secs);
        Failure::Passing(anyhow!("{} answers {}", self.url, response.status()), wait)
    }

    fn check_size(&self, size_bytes: Option<u64>) -> anyhow::Result<()> {
        match size_bytes {
            Some(size_bytes) if size_bytes != self.file.size_bytes => {
                bail!(
                    "{} has {size_bytes} bytes at {}, the lock says {}",
                    self.file.name,
                    self.url,
                    self.file.size_bytes
                )
            }
            _ => Ok(()),
        }
    }

    fn receive(&self, body: Body, incoming: &mut Incoming) -> Result<(), Failure> {
        let bar = self.progress.bytes(&self.file.name, self.file.size_bytes);
        bar.set(incoming.received_bytes());
        let mut stream = body.into_reader();
        let mut chunk = vec![0; 256 << 10];
        loop {
            let count = stream.read(&mut chunk).map_err(|error| {
                Failure::passing(anyhow!(error).context("the connection dropped"))
            })?;
            if count == 0 {
                break;
            }
            incoming.write(&chunk[..count]).map_err(Failure::Lasting)?;
            bar.set(incoming.received_bytes());
        }
        if incoming.is_complete() {
            return Ok(());
        }
        let (received, size_bytes) = (incoming.received_bytes(), self.file.size_bytes);
        Err(Failure::passing(anyhow!(
            "the answer ended after {received} of {size_bytes} bytes"
        )))
    }
}

fn agent() -> Agent {
    use ureq::config::RedirectAuthHeaders::SameHost;
    use ureq::tls::{RootCerts, TlsConfig};
    // The machine's own roots: a company's mirror is signed by a company's own authority.
    let tls = TlsConfig::builder()
        .root_certs(RootCerts::PlatformVerifier)
        .build();
    Agent::config_builder()
        .tls_config(tls)
        .http_status_as_error(false)
        .redirect_auth_headers(SameHost)
        .timeout_connect(Some(SILENCE))
        .timeout_per_read(Some(SILENCE))
        .user_agent(concat!("outrider-fetch/", env!("CARGO_PKG_VERSION")))
        .build()
        .into()
}

/// Whether a request that failed so may succeed when it is made again.
fn is_passing(error: &ureq::Error) -> bool {
    use ureq::Error::{ConnectionFailed, HostNotFound, Io, Protocol, Timeout};
    match error {
        // A certificate that isn't trusted comes as invalid data, and stays untrusted.
        Io(error) => error.kind() != io::ErrorKind::InvalidData,
        ConnectionFailed | HostNotFound | Protocol(_) | Timeout(_) => true,
        _ => false,
    }
}

/// A token goes over encrypted connections, or doesn't leave the machine.
fn check_private(url: &str) -> anyhow::Result<()> {
    let uri: ureq::http::Uri = url.parse().with_context(|| format!("{url} is no URL"))?;
    let is_local = matches!(uri.host(), Some("localhost" | "127.0.0.1" | "[::1]"));
    if uri.scheme_str() != Some("https") && !is_local {
        bail!("{url} would carry the token unencrypted; use https, or unset the token");
    }
    Ok(())
}

fn text_of(response: &Response<Body>, name: HeaderName) -> Option<&str> {
    response.headers().get(name)?.to_str().ok()
}

/// First byte and, when given, total size of `bytes 5-9/10`.
fn parse_content_range(text: &str) -> Option<(u64, Option<u64>)> {
    let (range, total) = text.trim().strip_prefix("bytes ")?.split_once('/')?;
    let (start, _) = range.split_once('-')?;
    let total = if total == "*" {
        None
    } else {
        Some(total.parse().ok()?)
    };
    Some((start.parse().ok()?, total))
}

fn read_etag(incoming: &Incoming) -> Option<String> {
    fs::read_to_string(incoming.note_path())
        .ok()
        .filter(|etag| !etag.is_empty())
}

fn write_etag(incoming: &Incoming, etag: Option<&str>) -> anyhow::Result<()> {
    let path = incoming.note_path();
    match etag {
        Some(etag) => {
            fs::write(&path, etag).with_context(|| format!("cannot write {}", path.display()))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_ranges_are_read() {
        for (text, expected) in [
            ("bytes 5-9/10", Some((5, Some(10)))),
            ("bytes 5-9/*", Some((5, None))),
            ("bytes */10", None),
            ("bytes 5-9", None),
            ("lines 5-9/10", None),
            ("", None),
        ] {
            assert_eq!(parse_content_range(text), expected, "{text}");
        }
    }

    #[test]
    fn an_untrusted_certificate_is_not_tried_again() {
        let error = |kind: io::ErrorKind| ureq::Error::Io(kind.into());
        assert!(!is_passing(&error(io::ErrorKind::InvalidData)));
        assert!(is_passing(&error(io::ErrorKind::ConnectionReset)));
        assert!(!is_passing(&ureq::Error::BadUri(String::new())));
    }

    #[test]
    fn a_token_is_not_sent_in_the_clear() {
        for (url, is_private) in [
            ("https://host.example/x", true),
            ("http://127.0.0.1:8000/x", true),
            ("http://localhost/x", true),
            ("http://host.example/x", false),
            ("http://127.0.0.1.host.example/x", false),
        ] {
            assert_eq!(check_private(url).is_ok(), is_private, "{url}");
        }
    }
}
