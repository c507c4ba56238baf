//! Drafting as the interfaces show it, and `/admin/speculation`, where an operator switches it.
//!
//! The switch takes effect from the next step on: no restart, and running requests carry on with the same text.

use std::net::SocketAddr;

use actix_web::{HttpRequest, HttpResponse, web};
use serde::Serialize;

use super::State;
use super::backend::Backend;
use super::body;
use super::caller::Caller;
use super::error::ApiError;
use super::fields::{Fields, Rule};
use crate::engine::{Drafting, SpeculationError};

/// Longest body of a switch; the longest that is meant has twenty bytes.
const BODY_LIMIT_BYTES: usize = 4096;

/// What a caller is told while drafting is suspended; the fault itself is for operators.
const SUSPENDED: &str = "draft passes failed repeatedly; the server tries again by itself";

/// The state of drafting.
#[derive(Serialize)]
pub struct SpeculationBody {
    /// Position of the switch.
    enabled: bool,
    /// What the engine does.
    drafting: &'static str,
    /// Why it can't draft or has suspended drafting.
    detail: Option<String>,
    /// Architecture of the draft.
    architecture: Option<String>,
    /// Tokens of its widest block, the anchor included.
    block_size: Option<usize>,
    /// Candidates per position.
    candidate_topk: Option<usize>,
    /// Whether less than a block is checked, or nothing, where that is faster.
    adaptive_width: Option<bool>,
}

/// Who reads a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reader {
    /// Anyone who may use the model: nothing of the inside.
    Caller,
    /// Whoever reaches the admin listener.
    Operator,
}

/// The state of drafting; `None` until the model is loaded.
pub fn state_of(backend: &dyn Backend, reader: Reader) -> Option<SpeculationBody> {
    let status = backend.status().speculation?;
    let card = &backend.card().draft;
    let draft = card.as_ref().ok();
    let detail = match reader {
        Reader::Operator => Some(status.detail).filter(|detail| !detail.is_empty()),
        Reader::Caller if status.drafting == Drafting::Suspended => Some(SUSPENDED.to_owned()),
        Reader::Caller => card.as_ref().err().cloned(),
    };
    Some(SpeculationBody {
        enabled: backend.speculation(),
        drafting: status.drafting.as_str(),
        detail,
        architecture: draft.map(|draft| draft.architecture.clone()),
        block_size: draft.map(|draft| draft.block_size),
        candidate_topk: draft.map(|draft| draft.candidate_topk),
        adaptive_width: draft.map(|draft| draft.adaptive_width),
    })
}

/// `GET /admin/speculation`.
pub async fn get(state: web::Data<State>) -> Result<HttpResponse, ApiError> {
    Ok(HttpResponse::Ok().json(current(&state)?))
}

/// `PUT /admin/speculation`.
pub async fn put(
    request: HttpRequest,
    payload: web::Payload,
    state: web::Data<State>,
) -> Result<HttpResponse, ApiError> {
    let bytes = body::read(&request, payload, &state, BODY_LIMIT_BYTES).await?;
    let mut fields = Fields::of(body::json(&bytes)?, "")?;
    let enabled = fields.flag("enabled")?;
    let missing = fields.error("enabled", Rule::Missing);
    fields.finish()?;
    let enabled = enabled.ok_or(missing)?;

    let backend = state.backend().ok_or_else(loading)?;
    let peer = request
        .peer_addr()
        .map(|address: SocketAddr| address.to_string());
    let operator = &*Caller::of(&request).0;
    let was = backend.speculation();
    match backend.set_speculation(enabled) {
        Ok(()) => tracing::info!(operator, peer, enabled, was, "drafting switched"),
        Err(error) => {
            tracing::warn!(operator, peer, enabled, %error, "drafting not switched");
            return Err(match error {
                SpeculationError::NotReady => loading(),
                SpeculationError::Unavailable(reason) => ApiError::draft_unavailable(&reason),
            });
        }
    }
    Ok(HttpResponse::Ok().json(current(&state)?))
}

fn current(state: &State) -> Result<SpeculationBody, ApiError> {
    state
        .backend()
        .and_then(|backend| state_of(&**backend, Reader::Operator))
        .ok_or_else(loading)
}

fn loading() -> ApiError {
    ApiError::not_ready("the model is being loaded; try again later")
}
