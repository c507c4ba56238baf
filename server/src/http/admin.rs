//! The admin listener: `/livez`, `/readyz`, `/metrics` and `/admin/speculation`, on loopback unless told otherwise.
//!
//! `/livez` looks at the engine's heartbeat, not at the HTTP threads; a server that is still loading is alive.
//! `/metrics` and `/admin/speculation` ask for a token where tokens are configured; the two probes never do.
//! `/readyz` is 200 only when every start-up latch has passed, no stop was asked for, and the audit log can be written.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use actix_service::IntoServiceFactory as _;
use actix_web::dev::Server;
use actix_web::middleware::from_fn;
use actix_web::{App, HttpRequest, HttpResponse, web};
use metrics_exporter_prometheus::PrometheusHandle;
use serde::Serialize;
use serde_json::{Map, Value};

use super::State;
use super::authenticate;
use super::error::ApiError;
use super::head;
use super::listener::{self, Limits};
use super::requests;
use super::speculation::{self, Reader, SpeculationBody};
use super::{READ, method_not_allowed, not_found};
use crate::engine::Phase;
use crate::lifecycle::Latch;
use crate::listen::{Listener, SocketFile};
use crate::machine;
use crate::metrics::{self, DraftInfo, EngineSnapshot, Snapshot};
use crate::reload::Outcome;

/// Connections that are open at the same time: probes, a scraper or two, an operator.
const MAX_CONNECTIONS: usize = 256;

#[derive(Serialize)]
struct Liveness {
    alive: bool,
    phase: &'static str,
    heartbeat_age_seconds: Option<f64>,
    heartbeat_limit_seconds: f64,
}

#[derive(Serialize)]
struct Readiness<'a> {
    ready: bool,
    phase: &'static str,
    detail: String,
    draining: bool,
    last_reload: Option<&'static str>,
    latches: Map<String, Value>,
    model: Option<&'a str>,
    bundle_digest: Option<&'a str>,
    lossless_class: Option<&'static str>,
    speculation: Option<SpeculationBody>,
    audit: Option<AuditBody>,
}

#[derive(Serialize)]
struct AuditBody {
    writing: bool,
    detail: Option<String>,
}

/// Starts the admin interface on a bound listener. The caller decides when it stops, and keeps the file of a socket until then.
///
/// # Errors
///
/// The listener can't be used.
pub fn serve(
    state: web::Data<State>,
    listener: Listener,
    header_timeout: Duration,
) -> std::io::Result<(Server, Option<SocketFile>)> {
    let prometheus = web::Data::new(metrics::install().clone());
    let limits = Limits {
        workers: 1,
        max_connections: MAX_CONNECTIONS,
        header_timeout,
        certificate: None,
    };
    let app = {
        let state = state.clone();
        move || {
            App::new()
                .app_data(state.clone())
                .app_data(prometheus.clone())
                // The last one is the outermost.
                .wrap(from_fn(head::check_admin))
                .wrap(from_fn(requests::check_lines))
                .wrap(from_fn(requests::track))
                .configure(routes)
                .default_service(web::to(not_found))
                .into_factory()
        }
    };
    listener::start("admin", listener, &limits, state, app)
}

fn routes(config: &mut web::ServiceConfig) {
    let only = |allow: &'static str| {
        web::to(move |request: HttpRequest| method_not_allowed(request, allow))
    };
    config
        .service(
            web::resource("/livez")
                .route(web::get().to(livez))
                .route(web::head().to(livez))
                .default_service(only(READ)),
        )
        .service(
            web::resource("/readyz")
                .route(web::get().to(readyz))
                .route(web::head().to(readyz))
                .default_service(only(READ)),
        )
        .service(
            web::resource("/metrics")
                .wrap(from_fn(authenticate::operators))
                .route(web::get().to(scrape))
                .route(web::head().to(scrape))
                .default_service(only(READ)),
        )
        .service(
            web::resource("/admin/speculation")
                .wrap(from_fn(authenticate::operators))
                .route(web::get().to(speculation::get))
                .route(web::head().to(speculation::get))
                .route(web::put().to(speculation::put))
                .default_service(only("GET, HEAD, PUT")),
        );
}

fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Starting => "starting",
        Phase::Ready => "ready",
        Phase::Failed => "failed",
    }
}

async fn livez(state: web::Data<State>) -> HttpResponse {
    let limit = state.settings().heartbeat_limit;
    let status = state.backend.get().map(|backend| backend.status());
    let alive = match &status {
        None => true,
        Some(status) => match status.phase {
            Phase::Starting => true,
            Phase::Ready => status.heartbeat_age <= limit,
            Phase::Failed => false,
        },
    };
    let body = Liveness {
        alive,
        phase: status
            .as_ref()
            .map_or("starting", |status| phase_name(status.phase)),
        heartbeat_age_seconds: status.map(|status| status.heartbeat_age.as_secs_f64()),
        heartbeat_limit_seconds: limit.as_secs_f64(),
    };
    respond(alive, &body)
}

async fn readyz(state: web::Data<State>) -> HttpResponse {
    let ready = state.is_ready();
    let backend = state.backend.get();
    let status = backend.map(|backend| backend.status());
    let card = backend.map(|backend| backend.card());
    let body = Readiness {
        ready,
        phase: status
            .as_ref()
            .map_or("starting", |status| phase_name(status.phase)),
        detail: status.as_ref().map_or_else(
            || "loading the bundle".to_owned(),
            |status| status.detail.clone(),
        ),
        draining: state.drain.draining(),
        last_reload: state.last_reload().map(Outcome::as_str),
        latches: Latch::ALL
            .into_iter()
            .map(|latch| {
                (
                    latch.as_str().to_owned(),
                    state.startup.passed(latch).is_some().into(),
                )
            })
            .collect(),
        model: card.map(|card| card.name.as_str()),
        bundle_digest: card.map(|card| card.bundle_digest.as_str()),
        lossless_class: status
            .and_then(|status| status.lossless)
            .map(|class| class.as_str()),
        speculation: backend
            .and_then(|backend| speculation::state_of(&**backend, Reader::Operator)),
        audit: state.audit().map(|log| {
            let detail = log.fault();
            AuditBody {
                writing: detail.is_none(),
                detail,
            }
        }),
    };
    respond(ready, &body)
}

fn respond(good: bool, body: &impl Serialize) -> HttpResponse {
    if good {
        HttpResponse::Ok().json(body)
    } else {
        HttpResponse::ServiceUnavailable().json(body)
    }
}

/// Held from setting gauges to reading them.
static SCRAPE: Mutex<()> = Mutex::new(());

async fn scrape(
    state: web::Data<State>,
    prometheus: web::Data<PrometheusHandle>,
) -> Result<HttpResponse, ApiError> {
    // Gauges are set and then read: two scrapes at the same moment must not mix.
    let _turn = SCRAPE.lock().unwrap_or_else(PoisonError::into_inner);
    let backend = state.backend.get();
    metrics::snapshot(&Snapshot {
        ready: state.is_ready(),
        audit_writing: state.audit().map(|log| log.fault().is_none()),
        in_flight: state.drain.in_flight(),
        resident_memory_bytes: machine::resident_memory_bytes().ok(),
        latches: Latch::ALL
            .into_iter()
            .filter_map(|latch| Some((latch.as_str(), state.startup.passed(latch)?.as_secs_f64())))
            .collect(),
        engine: backend.map(|backend| {
            let status = backend.status();
            EngineSnapshot {
                heartbeat_age_seconds: status.heartbeat_age.as_secs_f64(),
                running: status.running,
                waiting: status.waiting,
                slots: status.slots,
                kv_rows: status.kv_rows,
                model: &backend.card().name,
                bundle_digest: &backend.card().bundle_digest,
                lossless_class: status.lossless.map(|class| class.as_str()),
                drafting: status.speculation.map(|speculation| speculation.drafting),
                draft: backend.card().draft.as_ref().ok().map(|draft| DraftInfo {
                    architecture: &draft.architecture,
                    block_size: draft.block_size,
                    candidate_topk: draft.candidate_topk,
                }),
            }
        }),
    });
    Ok(HttpResponse::Ok()
        .content_type("text/plain; version=0.0.4; charset=utf-8")
        .body(prometheus.render()))
}
