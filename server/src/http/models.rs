//! `/v1/models`: who the served model is.
//!
//! `created` is always 0: a bundle carries no date, so that equal inputs give equal bundles.

use actix_web::{HttpResponse, web};
use serde::Serialize;

use super::State;
use super::backend::Backend;
use super::error::ApiError;
use super::speculation::{Reader, SpeculationBody, state_of};

#[derive(Serialize)]
struct ModelBody<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    bundle_digest: &'a str,
    lossless_class: Option<&'static str>,
    context_length: usize,
    speculation: Option<SpeculationBody>,
}

#[derive(Serialize)]
struct ModelList<'a> {
    object: &'static str,
    data: [ModelBody<'a>; 1],
}

fn body(backend: &dyn Backend) -> ModelBody<'_> {
    let card = backend.card();
    ModelBody {
        id: &card.name,
        object: "model",
        created: 0,
        owned_by: "outrider",
        bundle_digest: &card.bundle_digest,
        lossless_class: backend.status().lossless.map(|class| class.as_str()),
        context_length: backend.limits().context_tokens,
        speculation: state_of(backend, Reader::Caller),
    }
}

/// `GET /v1/models`.
pub async fn list(state: web::Data<State>) -> Result<HttpResponse, ApiError> {
    let backend = state.ready()?;
    Ok(HttpResponse::Ok().json(ModelList {
        object: "list",
        data: [body(&**backend)],
    }))
}

/// `GET /v1/models/{id}`.
pub async fn get(state: web::Data<State>, id: web::Path<String>) -> Result<HttpResponse, ApiError> {
    let backend = state.ready()?;
    if *id != backend.card().name {
        return Err(ApiError::model_not_found(&id, &backend.card().name));
    }
    Ok(HttpResponse::Ok().json(body(&**backend)))
}
