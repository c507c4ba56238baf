//! Request bodies: the bytes of a JSON body within a limit, and the value they hold.

use std::pin::pin;

use actix_web::http::header;
use actix_web::rt::time::timeout;
use actix_web::{HttpRequest, web};
use bytes::Bytes;
use futures_util::future::{Either, select};
use serde_json::Value;

use super::State;
use super::error::ApiError;
use super::fields::StrictJson;

/// The bytes of a body that is declared as plain JSON, has at most `limit_bytes` and arrives in time.
///
/// A body that is still on its way when the server is told to stop is not waited for.
pub async fn read(
    request: &HttpRequest,
    payload: web::Payload,
    state: &State,
    limit_bytes: usize,
) -> Result<Bytes, ApiError> {
    let header_text = |name| {
        request
            .headers()
            .get(name)
            .map(|value| value.to_str().unwrap_or("not text"))
    };
    // Browsers send other types across origins without asking; a page must not be able to use a server on its reader's machine.
    let content_type = header_text(header::CONTENT_TYPE).unwrap_or("missing");
    if !is_json(content_type) {
        return Err(ApiError::unsupported_media_type(
            "content-type",
            content_type,
            "application/json, in UTF-8",
        ));
    }
    for encoding in request.headers().get_all(header::CONTENT_ENCODING) {
        if !encoding.as_bytes().eq_ignore_ascii_case(b"identity") {
            return Err(ApiError::unsupported_media_type(
                "content-encoding",
                encoding.to_str().unwrap_or("not text"),
                "identity or left out",
            ));
        }
    }
    let announced = header_text(header::CONTENT_LENGTH).and_then(|length| length.parse().ok());
    if announced.is_some_and(|length: usize| length > limit_bytes) {
        return Err(ApiError::body_too_large(limit_bytes));
    }
    let limit = state.settings().body_timeout;
    let arrival = pin!(timeout(limit, payload.to_bytes_limited(limit_bytes)));
    match select(arrival, pin!(state.drain().begun())).await {
        Either::Left((Ok(Ok(Ok(body))), _)) => Ok(body),
        Either::Left((Ok(Ok(Err(_))), _)) => Err(ApiError::unreadable_body()),
        Either::Left((Ok(Err(_)), _)) => Err(ApiError::body_too_large(limit_bytes)),
        Either::Left((Err(_), _)) => Err(ApiError::body_timeout(limit)),
        Either::Right(_) => Err(ApiError::going_down()),
    }
}

/// Whether a content type is JSON in the one encoding that it has.
fn is_json(content_type: &str) -> bool {
    let mut parts = content_type.split(';').map(str::trim);
    let essence = parts.next().unwrap_or_default();
    essence.eq_ignore_ascii_case("application/json")
        && parts.all(|parameter| {
            let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
            name.eq_ignore_ascii_case("charset")
                && value.trim_matches('"').eq_ignore_ascii_case("utf-8")
        })
}

/// The value of a body.
pub fn json(body: &[u8]) -> Result<Value, ApiError> {
    let StrictJson(value) = serde_json::from_slice(body).map_err(ApiError::invalid_json)?;
    Ok(value)
}
