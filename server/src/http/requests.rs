//! What the application tells the stream below the HTTP library about the requests of its connection.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use actix_web::body::{BodySize, BoxBody, MessageBody};
use actix_web::dev::{Payload, ServiceRequest, ServiceResponse};
use actix_web::http::{ConnectionType, Method, header};
use actix_web::middleware::Next;
use actix_web::{Error, HttpMessage as _};
use bytes::Bytes;

use super::error::ApiError;
use super::framing::{Body, Chunks};
use super::rest::Rest;

/// The requests of a connection.
#[derive(Clone, Debug, Default)]
pub struct Requests(Rc<State>);

#[derive(Debug, Default)]
struct State {
    /// Whether the head that the library was given last has line feeds without a carriage return before them.
    has_bare_line_feed: Cell<bool>,
    /// The body of a request that has begun, until the stream knows it.
    begun: RefCell<Option<Body>>,
    is_in_flight: Cell<bool>,
    /// Whether the library has been given what there was of its body when it began.
    is_offered: Cell<bool>,
}

impl Requests {
    /// Notes how the lines of the head end that the library is given.
    pub fn end_head(&self, has_bare_line_feed: bool) {
        self.0.has_bare_line_feed.set(has_bare_line_feed);
    }

    /// The body of a request that has begun since this was asked last.
    pub fn take_begun(&self) -> Option<Body> {
        self.0.begun.take()
    }

    /// Notes that the library gets what there is of the body.
    pub fn offer_body(&self) {
        self.0.is_offered.set(true);
    }

    /// Whether a request has begun whose answer is not complete.
    pub fn is_in_flight(&self) -> bool {
        self.0.is_in_flight.get()
    }
}

/// A request that is in flight until this is dropped.
struct InFlight(Option<Requests>);

impl InFlight {
    fn begin(request: &mut ServiceRequest) -> Self {
        let body = body_of(request);
        let has_body = !body.is_complete();
        let requests = request.conn_data::<Requests>().cloned();
        if let Some(Requests(state)) = &requests {
            state.begun.replace(Some(body));
            state.is_in_flight.set(true);
            state.is_offered.set(!has_body);
        }
        Self(requests)
    }

    /// Returns when what came of the body together with the head has been passed on: an answer that does not wait for it would end the connection.
    async fn body_offered(&self) {
        let Some(Requests(state)) = &self.0 else {
            return;
        };
        // The task of the connection, which polls this, has another turn for the body.
        poll_fn(|_| match state.is_offered.get() {
            true => Poll::Ready(()),
            false => Poll::Pending,
        })
        .await;
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if let Some(Requests(state)) = &self.0 {
            state.is_in_flight.set(false);
        }
    }
}

/// The body of a request as the library reads it: what it can't read has not come this far.
fn body_of(request: &mut ServiceRequest) -> Body {
    if matches!(request.parts_mut().1, Payload::None) {
        return Body::Sized(0);
    }
    let headers = request.headers();
    let length = headers.get(header::CONTENT_LENGTH);
    let length = length.and_then(|value| value.to_str().ok()?.trim().parse().ok());
    let is_websocket = headers
        .get_all(header::UPGRADE)
        .filter_map(|value| value.to_str().ok())
        .any(|value| value.trim().eq_ignore_ascii_case("websocket"));
    match length {
        _ if headers.contains_key(header::TRANSFER_ENCODING) => Body::Chunked(Chunks::default()),
        Some(length) if length > 0 && !is_websocket => Body::Sized(length),
        _ => Body::Endless,
    }
}

/// Has the stream know of every request from its head to the last byte of its answer.
pub async fn track(
    mut request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<BoxBody>, Error> {
    let in_flight = InFlight::begin(&mut request);
    let rest = Rest::of(&mut request);
    let is_last = has_bare_line_feed(&request) || asks_for_another_protocol(&request);
    in_flight.body_offered().await;
    let mut response = next.call(request).await?;
    if is_last {
        // Whatever the answer is: what comes next is not a request, or not to everybody on the way.
        let head = response.response_mut().head_mut();
        head.set_connection_type(ConnectionType::Close);
    }
    Ok(response.map_body(|_, body| {
        BoxBody::new(Tracked {
            body: body.boxed(),
            _in_flight: in_flight,
            _rest: rest,
        })
    }))
}

/// Lets a request pass whose lines end as they must: who reads a bare line feed in another way than this server sees other requests.
pub async fn check_lines(
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<BoxBody>, Error> {
    if has_bare_line_feed(&request) {
        return Ok(request.error_response(ApiError::bare_line_feed()));
    }
    Ok(next.call(request).await?.map_into_boxed_body())
}

fn has_bare_line_feed(request: &ServiceRequest) -> bool {
    let requests = request.conn_data::<Requests>();
    requests.is_some_and(|Requests(state)| state.has_bare_line_feed.get())
}

/// Whether a request is for a tunnel or another protocol, of which there are none here; the library closes its connection in any case.
fn asks_for_another_protocol(request: &ServiceRequest) -> bool {
    request.method() == Method::CONNECT
        || request.head().upgrade()
        || request.headers().contains_key(header::UPGRADE)
}

/// A body that keeps its request in flight.
struct Tracked {
    body: BoxBody,
    _in_flight: InFlight,
    _rest: Rest,
}

impl MessageBody for Tracked {
    type Error = <BoxBody as MessageBody>::Error;

    fn size(&self) -> BodySize {
        self.body.size()
    }

    fn poll_next(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, Self::Error>>> {
        Pin::new(&mut self.body).poll_next(cx)
    }
}
