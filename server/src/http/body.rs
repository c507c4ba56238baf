//! Request bodies: the bytes of a JSON body within a limit, and the value they hold.

use actix_web::http::header;
use actix_web::{HttpRequest, web};
use bytes::Bytes;
use serde_json::Value;

use super::error::ApiError;
use super::fields::StrictJson;

/// The bytes of a body that is declared as plain JSON and has at most `limit_bytes`.
pub async fn read(
    request: &HttpRequest,
    payload: web::Payload,
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
    let essence = content_type.split(';').next().unwrap_or_default().trim();
    if !essence.eq_ignore_ascii_case("application/json") {
        return Err(ApiError::unsupported_media_type(
            "content-type",
            content_type,
            "application/json",
        ));
    }
    if let Some(encoding) = header_text(header::CONTENT_ENCODING)
        && !encoding.eq_ignore_ascii_case("identity")
    {
        return Err(ApiError::unsupported_media_type(
            "content-encoding",
            encoding,
            "identity or left out",
        ));
    }
    match payload.to_bytes_limited(limit_bytes).await {
        Ok(Ok(body)) => Ok(body),
        Ok(Err(_)) => Err(ApiError::unreadable_body()),
        Err(_) => Err(ApiError::body_too_large(limit_bytes)),
    }
}

/// The value of a body.
pub fn json(body: &[u8]) -> Result<Value, ApiError> {
    let StrictJson(value) = serde_json::from_slice(body).map_err(ApiError::invalid_json)?;
    Ok(value)
}
