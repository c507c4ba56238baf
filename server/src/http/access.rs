//! One record for each request: its identifier, its log line and its metrics, from the first byte in to the last byte out.

use std::cell::RefCell;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use actix_web::body::{BodySize, BoxBody, MessageBody};
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::Method;
use actix_web::http::header::{HeaderName, HeaderValue};
use actix_web::middleware::Next;
use actix_web::{Error, HttpMessage, ResponseError, web};
use bytes::Bytes;

use super::State;
use super::error::ApiError;
use super::shape::UsageBody;
use crate::lifecycle::Drain;
use crate::metrics;

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
    request_id: String,
    method: &'static str,
    route: String,
    began: Instant,
    status: Option<u16>,
    code: Option<&'static str>,
    usage: UsageBody,
    complete: bool,
    drain: Arc<Drain>,
}

impl AccessRecord {
    /// The identifier of the request.
    pub fn request_id(&self) -> String {
        self.0.borrow().request_id.clone()
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
                request_id = record.request_id,
                code = error.code().as_str(),
                cause,
                "request failed"
            );
        }
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        self.drain.leave();
        let status = match self.status {
            Some(status) if self.complete => status,
            _ => CLIENT_GONE,
        };
        let seconds = self.began.elapsed().as_secs_f64();
        metrics::http_request(self.method, &self.route, status, self.code, seconds);
        tracing::info!(
            request_id = self.request_id,
            method = self.method,
            route = self.route,
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

/// Gives every request an identifier and a record, and turns it away when the server is going down.
pub async fn observe(
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<BoxBody>, Error> {
    let request_id = request_id(&request);
    let drain = request
        .app_data::<web::Data<State>>()
        .map(|state| state.drain().clone())
        .unwrap_or_default();
    drain.enter();
    let draining = drain.draining();
    let record = AccessRecord(Rc::new(RefCell::new(Record {
        request_id: request_id.clone(),
        method: method_name(request.method()),
        route: "unmatched".to_owned(),
        began: Instant::now(),
        status: None,
        code: None,
        usage: UsageBody::default(),
        complete: false,
        drain,
    })));
    request.extensions_mut().insert(record.clone());

    let mut response = if draining {
        let error = ApiError::not_ready("the server is going down; try again later");
        let mut response = error.error_response();
        response
            .head_mut()
            .set_connection_type(actix_web::http::ConnectionType::Close);
        record.failed(&error);
        request.into_response(response)
    } else {
        let response = next.call(request).await?.map_into_boxed_body();
        if let Some(error) = response
            .response()
            .error()
            .and_then(|error| error.as_error::<ApiError>())
        {
            record.failed(error);
        }
        response
    };

    {
        let mut record = record.0.borrow_mut();
        record.status = Some(response.status().as_u16());
        record.complete = matches!(
            response.response().body().size(),
            BodySize::None | BodySize::Sized(0)
        );
        if let Some(route) = response.request().match_pattern() {
            // Without the expression that says what a parameter may hold.
            record.route = route.replace(":.+}", "}");
        }
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
        let polled = Pin::new(&mut self.body).poll_next(cx);
        if let Poll::Ready(None) = polled {
            self.record.0.borrow_mut().complete = true;
        }
        polled
    }
}
