//! What holds for the head of every request, before its route is looked for: limits of its size, no query string, and a host that is this machine where
//! nobody is asked for a key.
//!
//! The HTTP library has limits of its own above these (96 headers, 128 KiB) and answers what exceeds them, like all that is not HTTP, by itself:
//! a bare status without a body.

use std::net::IpAddr;
use std::str::FromStr;

use actix_web::body::{BoxBody, MessageBody};
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::header;
use actix_web::http::uri::Authority;
use actix_web::middleware::Next;
use actix_web::{Error, web};

use super::error::ApiError;
use super::{Settings, State};

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
    let fault = fault_of(&request).and_then(|()| check_host(&request, |it| it.local_hosts));
    if let Err(error) = fault {
        return Ok(request.error_response(error));
    }
    Ok(next.call(request).await?.map_into_boxed_body())
}

/// Lets a request of the admin interface pass that is for this machine, or when that need not be.
pub async fn check_admin(
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<BoxBody>, Error> {
    if let Err(error) = check_host(&request, |it| it.local_admin_hosts) {
        return Ok(request.error_response(error));
    }
    Ok(next.call(request).await?.map_into_boxed_body())
}

fn check_host(request: &ServiceRequest, is_asked: fn(&Settings) -> bool) -> Result<(), ApiError> {
    let state = request.app_data::<web::Data<State>>();
    if !state.is_some_and(|state| is_asked(&state.settings())) {
        return Ok(());
    }
    let headers = request.headers().get_all(header::HOST);
    let of_headers = headers.map(|value| value.to_str().unwrap_or("not text"));
    let of_target = request.uri().authority().map(Authority::as_str);
    match of_headers.chain(of_target).find(|host| !is_local(host)) {
        None => Ok(()),
        Some(host) => Err(ApiError::misdirected(host)),
    }
}

/// Whether a host, with a port or without, is this machine by its own name or by an address: no name that somebody else owns leads to either.
fn is_local(host: &str) -> bool {
    let Ok(authority) = Authority::from_str(host) else {
        return false;
    };
    let host = authority.host();
    let address = host.trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost") || IpAddr::from_str(address).is_ok()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_machine_and_addresses_are_local() {
        for host in [
            "localhost",
            "LOCALHOST:8000",
            "127.0.0.1",
            "127.0.0.1:8000",
            "[::1]",
            "[::1]:8000",
            "192.0.2.7:80",
        ] {
            assert!(is_local(host), "{host}");
        }
        for host in [
            "",
            "example.com",
            "example.com:8000",
            "localhost.example.com",
            "127.0.0.1.example.com",
            "example.com@127.0.0.1.example.com",
            "not text",
        ] {
            assert!(!is_local(host), "{host}");
        }
    }
}
