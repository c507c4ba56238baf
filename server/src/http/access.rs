//! One record for each request: its identifier, its log line, its metrics and its line in the audit log, from the first byte in to the last
//! byte out.

use std::cell::RefCell;
use std::fmt;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Instant;

use actix_web::body::{BodySize, BoxBody, MessageBody};
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::header::{HeaderName, HeaderValue};
use actix_web::http::{ConnectionType, Method, Version};
use actix_web::middleware::Next;
use actix_web::{Error, HttpMessage, HttpRequest, ResponseError, web};
use bytes::Bytes;
use jiff::Timestamp;
use opentelemetry::trace::Status;
use tracing::field::Empty;
use tracing::{Instrument as _, Span};
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use super::State;
use super::authenticate;
use super::backend::Backend;
use super::caller::Caller;
use super::choices::{Plan, Prompt};
use super::code::Code;
use super::error::ApiError;
use super::facts::{Facts, is_generation};
use super::params::Generation;
use super::shape::UsageBody;
use crate::audit;
use crate::engine::{Event, Sampling};
use crate::refusals::Refusal;
use crate::{metrics, telemetry};

/// Header that carries the identifier of a request, in and out.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Longest identifier taken from a caller.
const MAX_REQUEST_ID_BYTES: usize = 128;

/// Status in log and metrics of a request whose client left before the answer was complete; it is never sent.
const CLIENT_GONE: u16 = 499;

/// A handle on the record of one request; the record is logged when the last part of the request is gone.
#[derive(Clone)]
pub struct AccessRecord(Rc<RefCell<Record>>);

struct Record {
    span: Span,
    state: web::Data<State>,
    request_id: String,
    caller: Caller,
    /// Whether `caller` is the one that authentication found, if it asks for one.
    caller_is_known: bool,
    method: &'static str,
    route: String,
    time: Timestamp,
    began: Instant,
    status: Option<u16>,
    code: Option<&'static str>,
    usage: UsageBody,
    complete: bool,
    /// For the audit log, where there is one and it wants to know.
    facts: Option<Facts>,
}

impl fmt::Debug for AccessRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("AccessRecord")
            .field(&self.request_id())
            .finish()
    }
}

impl AccessRecord {
    /// The identifier of the request.
    pub fn request_id(&self) -> String {
        self.0.borrow().request_id.clone()
    }

    /// The span of the request.
    pub fn span(&self) -> Span {
        self.0.borrow().span.clone()
    }

    /// Notes who the request is from, once that is known.
    pub fn caller(&self, request: &HttpRequest) {
        let mut record = self.0.borrow_mut();
        if !record.caller_is_known {
            record.caller = Caller::of(request);
            record.caller_is_known = true;
            record.span.record("caller", &*record.caller.0);
        }
    }

    /// Notes the body of the request.
    pub fn body(&self, body: &Bytes) {
        if let Some(facts) = &mut self.0.borrow_mut().facts {
            facts.body(body);
        }
    }

    /// Notes what the request asks for, with the values that are used.
    pub fn asked(
        &self,
        backend: &dyn Backend,
        prompts: &[Prompt],
        generation: &Generation,
        sampling: &Sampling,
        plan: &Plan,
    ) {
        if let Some(facts) = &mut self.0.borrow_mut().facts {
            facts.asked(backend, prompts, generation, sampling, plan);
        }
    }

    /// Notes what a completion has brought.
    pub fn event(&self, index: usize, event: &Event) {
        let mut record = self.0.borrow_mut();
        let elapsed = record.began.elapsed();
        if let Some(facts) = &mut record.facts {
            facts.event(index, event, elapsed);
        }
    }

    /// Notes the token counts of the answer so far.
    pub fn usage(&self, usage: UsageBody) {
        self.0.borrow_mut().usage = usage;
    }

    /// Notes that the answer is, or ends with, an error; logs what operators should know of it.
    pub fn failed(&self, error: &ApiError) {
        let mut record = self.0.borrow_mut();
        record.code = Some(error.code().as_str());
        if let Some(cause) = error.log() {
            tracing::error!(
                parent: &record.span,
                code = error.code().as_str(),
                cause,
                "request failed"
            );
        }
    }
}

impl Record {
    /// What only exported spans say, in the names of OpenTelemetry's conventions; the log has it in the line of the request.
    fn close_span(&self, status: u16) {
        self.span.set_attribute("http.request.method", self.method);
        self.span
            .set_attribute("http.response.status_code", i64::from(status));
        let tokens = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        if self.usage.prompt_tokens > 0 {
            self.span
                .set_attribute("prompt_tokens", tokens(self.usage.prompt_tokens));
            self.span
                .set_attribute("completion_tokens", tokens(self.usage.completion_tokens));
        }
        if let Some(code) = self.code {
            self.span.set_attribute("error.type", code);
            self.span.set_status(Status::error(code));
        }
    }

    /// The line of the audit log, where there is to be one.
    fn line(&mut self, status: u16, seconds: f64) -> Option<audit::Record> {
        let facts = self.facts.take()?;
        let card = self.state.backend().map(|backend| backend.card());
        let mut record = audit::Record {
            time: self.time,
            request_id: self.request_id.clone(),
            refused_requests: None,
            caller: self.caller.0.to_string(),
            endpoint: self.route.clone(),
            server_version: env!("CARGO_PKG_VERSION"),
            model: card.map(|card| card.name.clone()),
            bundle_digest: card.map(|card| card.bundle_digest.clone()),
            stream: None,
            parameters: None,
            prompt_tokens: None,
            cached_tokens: 0,
            speculation: None,
            completion_tokens: 0,
            finish_reasons: Vec::new(),
            status,
            error_code: self.code,
            first_token_seconds: None,
            seconds,
            texts: None,
        };
        facts.fill(&mut record);
        Some(record)
    }

    fn log(&self, status: u16, seconds: f64) {
        tracing::info!(
            parent: &self.span,
            method = self.method,
            status,
            code = self.code,
            prompt_tokens = self.usage.prompt_tokens,
            completion_tokens = self.usage.completion_tokens,
            drafted_tokens = self.usage.speculative.drafted_tokens,
            accepted_tokens = self.usage.speculative.accepted_tokens,
            seconds,
            "request"
        );
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let status = match self.status {
            Some(status) if self.complete => status,
            _ => CLIENT_GONE,
        };
        let seconds = self.began.elapsed().as_secs_f64();
        metrics::http_request(self.method, &self.route, status, self.code, seconds);
        let line = self.line(status, seconds);
        if self.code == Some(Code::InvalidApiKey.as_str()) {
            self.state.refusals().add(Refusal {
                address: self.caller.0.to_string(),
                route: self.route.clone(),
                request_id: Some(self.request_id.clone()),
                line,
            });
        } else {
            self.log(status, seconds);
            if let (Some(log), Some(line)) = (self.state.audit(), line) {
                log.write(line);
            }
        }
        self.close_span(status);
        // Last: who waits for the drain may end the logs next.
        self.state.drain().leave();
    }
}

/// Gives every request an identifier and a record, and turns it away when the server is going down.
pub async fn observe(
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<BoxBody>, Error> {
    let request_id = request_id(&request);
    let state = request
        .app_data::<web::Data<State>>()
        .cloned()
        .ok_or_else(|| ApiError::internal("the application has no state"))?;
    let route = request.match_pattern().map_or_else(
        || "unmatched".to_owned(),
        // Without the expression that says what a parameter may hold.
        |pattern| pattern.replace(":.+}", "}"),
    );
    // At the level of an error, so that errors within it are logged with it at every level.
    let span = tracing::error_span!("request", request_id, route, caller = Empty);
    let header = |name: &str| request.headers().get(name)?.to_str().ok();
    let parent = telemetry::parent(header("traceparent"), header("tracestate"));
    // It fails where no spans are exported, which is no fault.
    let _ = span.set_parent(parent);
    let facts = state
        .audit()
        .filter(|_| is_generation(request.method(), &route))
        .map(|log| Facts::new(log.keeps_texts()));
    state.drain().enter();
    let draining = state.drain().draining();
    #[expect(clippy::disallowed_methods, reason = "the audit log tells the date")]
    let time = Timestamp::now();
    let record = AccessRecord(Rc::new(RefCell::new(Record {
        span: span.clone(),
        state,
        request_id: request_id.clone(),
        caller: Caller::of(request.request()),
        caller_is_known: false,
        method: method_name(request.method()),
        route,
        time,
        began: Instant::now(),
        status: None,
        code: None,
        usage: UsageBody::default(),
        complete: false,
        facts,
    })));
    request.extensions_mut().insert(record.clone());

    let mut response = if draining {
        authenticate::note_caller(&request);
        let error = ApiError::not_ready("the server is going down; try again later");
        let mut response = error.error_response();
        response
            .head_mut()
            .set_connection_type(ConnectionType::Close);
        record.failed(&error);
        request.into_response(response)
    } else {
        let response = next
            .call(request)
            .instrument(span)
            .await?
            .map_into_boxed_body();
        if let Some(error) = response
            .response()
            .error()
            .and_then(|error| error.as_error::<ApiError>())
        {
            record.failed(error);
        }
        response
    };

    record.caller(response.request());
    {
        let mut record = record.0.borrow_mut();
        record.status = Some(response.status().as_u16());
        record.complete = matches!(
            response.response().body().size(),
            BodySize::None | BodySize::Sized(0)
        );
    }
    if response.request().version() < Version::HTTP_11
        && response.response().body().size() == BodySize::Stream
    {
        // Chunks came with HTTP/1.1; before it an answer of unknown length ends with its connection.
        let head = response.response_mut().head_mut();
        head.no_chunking(true);
        head.set_connection_type(ConnectionType::Close);
    }
    if let Ok(value) = HeaderValue::from_str(&request_id) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    Ok(response.map_body(|_, body| BoxBody::new(Observed { body, record })))
}

/// The name of a method in log and metrics; a caller can make up any number of others.
fn method_name(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::PATCH => "PATCH",
        Method::DELETE => "DELETE",
        Method::HEAD => "HEAD",
        Method::OPTIONS => "OPTIONS",
        _ => "other",
    }
}

/// The caller's identifier when it is short and plain, else a new one.
fn request_id(request: &ServiceRequest) -> String {
    request
        .headers()
        .get(REQUEST_ID)
        .and_then(|value| value.to_str().ok())
        .filter(|id| !id.is_empty() && id.len() <= MAX_REQUEST_ID_BYTES)
        .filter(|id| {
            id.bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
        })
        .map_or_else(|| uuid::Uuid::new_v4().simple().to_string(), str::to_owned)
}

/// A body that keeps its request's record alive and knows whether it was read to its end.
struct Observed {
    body: BoxBody,
    record: AccessRecord,
}

impl MessageBody for Observed {
    type Error = <BoxBody as MessageBody>::Error;

    fn size(&self) -> BodySize {
        self.body.size()
    }

    fn poll_next(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, Self::Error>>> {
        let span = self.record.span();
        let polled = span.in_scope(|| Pin::new(&mut self.body).poll_next(cx));
        if let Poll::Ready(None) = polled {
            self.record.0.borrow_mut().complete = true;
        }
        polled
    }
}
