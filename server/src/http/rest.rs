//! The rest of a body, kept until its request has its answer.
//!
//! The library reads a body in chunks that nobody wants to its end, however long that is. Of one that somebody still might want it reads a little ahead,
//! and when the answer is complete it closes the connection, after a moment in which it throws away what still comes: a client whose connection is reset
//! while it sends never sees the answer.

use std::cell::RefCell;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use actix_web::HttpMessage as _;
use actix_web::dev::{Payload, ServiceRequest};
use actix_web::error::PayloadError;
use bytes::Bytes;
use futures_util::Stream;

/// What keeps it; dropped with the answer.
#[derive(Clone)]
pub struct Rest(Rc<RefCell<Payload>>);

impl Rest {
    /// Puts what shares its body with it into the request.
    pub fn of(request: &mut ServiceRequest) -> Self {
        let rest = Self(Rc::new(RefCell::new(request.take_payload())));
        request.set_payload(Payload::Stream {
            payload: Box::pin(rest.clone()),
        });
        rest
    }
}

impl Stream for Rest {
    type Item = Result<Bytes, PayloadError>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Pin::new(&mut *self.0.borrow_mut()).poll_next(cx)
    }
}
