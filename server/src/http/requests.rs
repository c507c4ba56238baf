//! What the application tells the stream below the HTTP library about the requests of its connection.

use std::cell::Cell;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use actix_web::body::{BodySize, BoxBody, MessageBody};
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::middleware::Next;
use actix_web::{Error, HttpRequest};
use bytes::Bytes;

use super::rest::Rest;

/// The requests of a connection.
#[derive(Clone, Debug, Default)]
pub struct Requests(Rc<State>);

#[derive(Debug, Default)]
struct State {
    begun: Cell<u64>,
    is_in_flight: Cell<bool>,
    /// Whether all of it has arrived.
    is_read: Cell<bool>,
    /// Whether something has arrived that is no part of it.
    has_more: Cell<bool>,
}

/// A request that is in flight until this is dropped.
#[derive(Debug)]
struct InFlight(Option<Requests>);

impl Requests {
    /// Those of the connection of this request, where it has any.
    fn of(request: &HttpRequest) -> Option<&Self> {
        request.conn_data()
    }

    fn begin(request: &HttpRequest) -> InFlight {
        let requests = Self::of(request).cloned();
        if let Some(Self(state)) = &requests {
            state.begun.set(state.begun.get() + 1);
            state.is_in_flight.set(true);
            state.is_read.set(false);
            state.has_more.set(false);
        }
        InFlight(requests)
    }

    /// Notes that all of a request has arrived.
    pub fn read(request: &HttpRequest) {
        if let Some(Self(state)) = Self::of(request) {
            state.is_read.set(true);
            state.has_more.set(false);
        }
    }

    /// Notes that something has arrived.
    pub fn receive(&self) {
        self.0.has_more.set(true);
    }

    /// How many have begun.
    pub fn begun(&self) -> u64 {
        self.0.begun.get()
    }

    /// Whether one has begun whose answer is not complete.
    pub fn is_in_flight(&self) -> bool {
        self.0.is_in_flight.get()
    }

    /// Whether one has arrived whole whose answer is not complete.
    pub fn is_answering(&self) -> bool {
        self.0.is_in_flight.get() && self.0.is_read.get()
    }

    /// Whether the next one has begun to arrive.
    pub fn is_arriving(&self) -> bool {
        !self.0.is_in_flight.get() && self.0.has_more.get()
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if let Some(Requests(state)) = &self.0 {
            state.is_in_flight.set(false);
        }
    }
}

/// Has the stream know of every request from its head to the last byte of its answer.
pub async fn track(
    mut request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<BoxBody>, Error> {
    let in_flight = Requests::begin(request.request());
    let rest = Rest::of(&mut request);
    let response = next.call(request).await?;
    Ok(response.map_body(|_, body| {
        BoxBody::new(Tracked {
            body: body.boxed(),
            _in_flight: in_flight,
            _rest: rest,
        })
    }))
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
