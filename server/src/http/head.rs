//! What holds for the head of every request, before its route is looked for: limits of its size, and no query string.
//!
//! The HTTP library has limits of its own above these (96 headers, 128 KiB) and answers what exceeds them, like all that is not HTTP, by itself:
//! a bare status without a body.

use actix_web::Error;
use actix_web::body::{BoxBody, MessageBody};
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::middleware::Next;

use super::error::ApiError;

/// Most headers of a request.
const MAX_HEADERS: usize = 64;

/// Most bytes of the names and values of its headers.
const MAX_HEADER_BYTES: usize = 32 * 1024;

/// Most bytes of its path and query.
const MAX_TARGET_BYTES: usize = 8 * 1024;

/// Lets a request pass whose head is within the limits and asks for nothing that has no effect.
pub async fn check(
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<BoxBody>, Error> {
    if let Err(error) = fault_of(&request) {
        return Ok(request.error_response(error));
    }
    Ok(next.call(request).await?.map_into_boxed_body())
}

fn fault_of(request: &ServiceRequest) -> Result<(), ApiError> {
    let headers = request.headers();
    let header_bytes: usize = headers
        .iter()
        .map(|(name, value)| name.as_str().len() + value.len())
        .sum();
    let target_bytes = request.uri().to_string().len();
    for (what, count, limit) in [
        ("headers", headers.len(), MAX_HEADERS),
        ("bytes of headers", header_bytes, MAX_HEADER_BYTES),
        ("bytes of path and query", target_bytes, MAX_TARGET_BYTES),
    ] {
        if count > limit {
            return Err(ApiError::head_too_large(what, count, limit));
        }
    }
    let first = request
        .query_string()
        .split('&')
        .find(|pair| !pair.is_empty());
    match first {
        None => Ok(()),
        Some(pair) => Err(ApiError::unknown_query(
            pair.split('=').next().unwrap_or(pair),
        )),
    }
}
