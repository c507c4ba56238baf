//! Who may call: the key in `Authorization: Bearer`, checked before anything else of a request is looked at.
//!
//! The name of the key becomes the [`Caller`] of the request. Nothing of the header reaches a log or an answer.

use std::sync::Arc;

use actix_web::body::{BoxBody, MessageBody};
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::header;
use actix_web::middleware::Next;
use actix_web::{Error, HttpMessage as _, web};

use super::caller::Caller;
use super::error::ApiError;
use super::{Settings, State};
use crate::auth::KeyRing;
use crate::refusals::Refusal;

/// Lets a request of the OpenAI-compatible interface pass when it has a key, or when none is asked for.
pub async fn callers(
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<BoxBody>, Error> {
    let settings = settings_of(&request)?;
    if let Some(keys) = &settings.api_keys {
        match name_of(&request, keys, "API key") {
            Ok(name) => {
                request.extensions_mut().insert(Caller(name));
            }
            Err(error) => return Ok(request.error_response(error)),
        }
    }
    Ok(next.call(request).await?.map_into_boxed_body())
}

/// Notes who a request is from that is turned away whoever it is from.
pub fn note_caller(request: &ServiceRequest) {
    let settings = settings_of(request).ok();
    let keys = settings.as_ref().and_then(|it| it.api_keys.as_ref());
    if let Some(name) = keys.and_then(|keys| name_of(request, keys, "API key").ok()) {
        request.extensions_mut().insert(Caller(name));
    }
}

/// Lets a request of the admin interface pass when it has a token, or when none is asked for.
pub async fn operators(
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<BoxBody>, Error> {
    let settings = settings_of(&request)?;
    if let Some(tokens) = &settings.admin_tokens {
        match name_of(&request, tokens, "admin token") {
            Ok(name) => {
                request.extensions_mut().insert(Caller(name));
            }
            Err(error) => {
                if let Some(state) = request.app_data::<web::Data<State>>() {
                    state.refusals().add(Refusal {
                        address: Caller::of(request.request()).0.to_string(),
                        route: request.match_pattern().unwrap_or_default(),
                        request_id: None,
                        line: None,
                    });
                }
                return Ok(request.error_response(error));
            }
        }
    }
    Ok(next.call(request).await?.map_into_boxed_body())
}

fn settings_of(request: &ServiceRequest) -> Result<Arc<Settings>, ApiError> {
    // To let a request pass because the keys can't be found would be the worst of all ways to fail.
    request
        .app_data::<web::Data<State>>()
        .map(|state| state.settings())
        .ok_or_else(|| ApiError::internal("the request has no state"))
}

fn name_of(
    request: &ServiceRequest,
    keys: &KeyRing,
    kind: &'static str,
) -> Result<Arc<str>, ApiError> {
    let mut values = request.headers().get_all(header::AUTHORIZATION);
    let (Some(value), None) = (values.next(), values.next()) else {
        return Err(ApiError::key_missing(kind));
    };
    let secret = bearer(value.as_bytes()).ok_or_else(|| ApiError::key_missing(kind))?;
    keys.name_of(secret)
        .ok_or_else(|| ApiError::key_unknown(kind))
}

/// The token of `Bearer TOKEN`; the scheme is in any case, as RFC 9110 has it.
fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked(b"bearer ".len())?;
    let token = token.trim_ascii();
    (scheme.eq_ignore_ascii_case(b"bearer ") && !token.is_empty()).then_some(token)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_bearer_token_is_a_key() {
        for (value, expected) in [
            ("Bearer abc", Some("abc")),
            ("bearer abc", Some("abc")),
            ("BEARER  abc ", Some("abc")),
            ("Bearer a b", Some("a b")),
            ("Bearer ", None),
            ("Bearer", None),
            ("Bearerabc", None),
            ("Basic abc", None),
            ("abc", None),
            ("", None),
        ] {
            assert_eq!(
                bearer(value.as_bytes()),
                expected.map(str::as_bytes),
                "{value:?}"
            );
        }
    }
}
