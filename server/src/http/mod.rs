//! The OpenAI-compatible interface, and the admin listener beside it: the only place that knows HTTP or OpenAI's shapes.
//!
//! A request is read field by field ([`params`]), tokenised off the workers, submitted to the [`backend`], and answered whole or as a
//! stream. Whatever is not supported is refused by name, never ignored.
//! Handlers hold channel ends only; when a client leaves, its connection's state is dropped and the engine sees the channel close.

mod access;
pub mod admin;
pub mod backend;
mod body;
mod caller;
mod choices;
pub mod code;
pub mod error;
mod facts;
mod fields;
mod generate;
mod models;
mod params;
mod shape;
mod speculation;
mod sse;

pub use generate::{chat_prompts, completion_prompts};

use std::net::TcpListener;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use actix_web::dev::Server;
use actix_web::http::KeepAlive;
use actix_web::middleware::from_fn;
use actix_web::{App, HttpRequest, HttpServer, web};
use tokio::sync::Semaphore;

use crate::audit::AuditLog;
use crate::config::Config;
use crate::lifecycle::{Drain, Startup};
use backend::Backend;
use error::ApiError;

/// Longer than the idle time of common gateways, so that they close an idle connection first and never send into a closing one.
const KEEP_ALIVE: Duration = Duration::from_secs(75);

/// Methods of routes that only tell; the answer to `HEAD` is that to `GET` without its body.
const READ: &str = "GET, HEAD";

/// What handlers share.
pub struct State {
    settings: Settings,
    startup: Arc<Startup>,
    drain: Arc<Drain>,
    backend: OnceLock<Arc<dyn Backend>>,
    /// Held while a large body is parsed and tokenised, see [`generate`].
    large_body: Arc<Semaphore>,
    audit: Option<AuditLog>,
}

/// The part of the configuration that handlers need.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Longest request body.
    pub body_limit_bytes: usize,
    /// Most completions of one request.
    pub max_completions_per_request: usize,
    /// Oldest heartbeat of an engine that counts as alive.
    pub heartbeat_limit: Duration,
}

impl Settings {
    /// Takes what handlers need out of the configuration.
    pub fn of(config: &Config) -> Self {
        Self {
            body_limit_bytes: config.runtime.request_body_limit_bytes,
            max_completions_per_request: config.runtime.max_completions_per_request,
            heartbeat_limit: config.runtime.heartbeat_limit,
        }
    }
}

impl State {
    /// The state of a server that is starting.
    pub fn new(settings: Settings, startup: Arc<Startup>, drain: Arc<Drain>) -> Self {
        Self {
            settings,
            startup,
            drain,
            backend: OnceLock::new(),
            large_body: Arc::new(Semaphore::new(1)),
            audit: None,
        }
    }

    /// The same with an audit log, which has a line for each generation request.
    pub fn with_audit(self, audit: Option<AuditLog>) -> Self {
        Self { audit, ..self }
    }

    /// The audit log.
    pub fn audit(&self) -> Option<&AuditLog> {
        self.audit.as_ref()
    }

    /// Puts the loaded model in place; requests reach it once every start-up latch has passed.
    pub fn provide(&self, backend: Arc<dyn Backend>) {
        // A second model would be a bug of the caller; the first one stays.
        let _ = self.backend.set(backend);
    }

    /// The model, once it was provided.
    pub fn backend(&self) -> Option<&Arc<dyn Backend>> {
        self.backend.get()
    }

    fn drain(&self) -> &Arc<Drain> {
        &self.drain
    }

    /// The model, once it may be used.
    fn ready(&self) -> Result<&Arc<dyn Backend>, ApiError> {
        self.backend
            .get()
            .filter(|_| self.startup.complete())
            .ok_or_else(|| ApiError::not_ready("the model is being loaded; try again later"))
    }
}

/// Starts the OpenAI-compatible interface on a bound listener. The caller decides when it stops.
pub fn serve(state: web::Data<State>, listener: TcpListener) -> std::io::Result<Server> {
    let server = HttpServer::new(move || {
        App::new()
            .app_data(state.clone())
            .wrap(from_fn(access::observe))
            .configure(routes)
            .default_service(web::to(not_found))
    })
    .keep_alive(KeepAlive::Timeout(KEEP_ALIVE))
    // A client that closes its side has gone away: what it asked for is dropped at once.
    .h1_allow_half_closed(false)
    .disable_signals()
    .listen(listener)?;
    Ok(server.run())
}

fn routes(config: &mut web::ServiceConfig) {
    config
        .service(
            web::resource("/v1/completions")
                .route(web::post().to(generate::completions))
                .default_service(web::to(|request: HttpRequest| {
                    method_not_allowed(request, "POST")
                })),
        )
        .service(
            web::resource("/v1/chat/completions")
                .route(web::post().to(generate::chat_completions))
                .default_service(web::to(|request: HttpRequest| {
                    method_not_allowed(request, "POST")
                })),
        )
        .service(
            web::resource("/v1/models")
                .route(web::get().to(models::list))
                .route(web::head().to(models::list))
                .default_service(web::to(|request: HttpRequest| {
                    method_not_allowed(request, READ)
                })),
        )
        .service(
            web::resource("/v1/models/{id:.+}")
                .route(web::get().to(models::get))
                .route(web::head().to(models::get))
                .default_service(web::to(|request: HttpRequest| {
                    method_not_allowed(request, READ)
                })),
        );
}

async fn method_not_allowed(
    request: HttpRequest,
    allow: &'static str,
) -> Result<&'static str, ApiError> {
    Err(ApiError::method_not_allowed(
        request.method().as_str(),
        request.path(),
        allow,
    ))
}

async fn not_found(request: HttpRequest) -> Result<&'static str, ApiError> {
    Err(ApiError::not_found(
        request.method().as_str(),
        request.path(),
    ))
}
