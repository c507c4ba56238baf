//! Who a request is from, for fairness between callers and for the audit log.

use std::sync::Arc;

use actix_web::{HttpMessage as _, HttpRequest};

/// The name of whoever sent a request: the identifier of the key it came with, or the address it came from where no keys are asked for.
///
/// Authentication puts it into the extensions of the request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller(pub Arc<str>);

impl Caller {
    /// The caller of `request`.
    pub fn of(request: &HttpRequest) -> Self {
        if let Some(caller) = request.extensions().get::<Self>() {
            return caller.clone();
        }
        let address = request.peer_addr().map(|address| address.ip().to_string());
        Self(address.as_deref().unwrap_or("local").into())
    }
}
