//! The OpenAI-compatible interface, and the admin listener beside it: the only place that knows HTTP or OpenAI's shapes.
//!
//! A request is read field by field ([`params`]), tokenised off the workers, submitted to the [`backend`], and answered whole or as a
//! stream. Whatever is not supported is refused by name, never ignored.
//! Handlers hold channel ends only; when a client leaves, its connection's state is dropped and the engine sees the channel close.

mod access;
pub mod admin;
mod authenticate;
pub mod backend;
mod body;
mod caller;
mod choices;
pub mod code;
mod connection;
pub mod error;
mod facts;
mod fields;
mod framing;
mod generate;
mod head;
mod listener;
mod models;
mod params;
mod requests;
mod rest;
mod shape;
mod speculation;
mod sse;
mod turns;

pub use generate::{chat_prompts, completion_prompts};

use std::net::TcpListener;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use actix_cors::Cors;
use actix_service::IntoServiceFactory as _;
use actix_web::dev::Server;
use actix_web::http::{Method, header};
use actix_web::middleware::{Condition, from_fn};
use actix_web::{App, HttpRequest, web};
use arc_swap::{ArcSwap, ArcSwapOption};

use crate::audit::AuditLog;
use crate::auth::KeyRing;
use crate::config::Config;
use crate::engine::Phase;
use crate::launch::FileError;
use crate::lifecycle::{Drain, Startup};
use crate::listen::{Endpoint, Listener};
use crate::metrics;
use crate::refusals::Refusals;
use crate::reload::Outcome;
use crate::tls::Certificate;
use backend::Backend;
use error::ApiError;
use listener::Limits;
use turns::Turns;

/// How long browsers may keep what they were told about another origin.
const PREFLIGHT_SECONDS: usize = 3600;

/// Methods of routes that only tell; the answer to `HEAD` is that to `GET` without its body.
const READ: &str = "GET, HEAD";

/// What handlers share.
pub struct State {
    settings: ArcSwap<Settings>,
    startup: Arc<Startup>,
    drain: Arc<Drain>,
    backend: OnceLock<Arc<dyn Backend>>,
    /// Taken while a body is parsed and tokenised, see [`generate`].
    turns: Turns,
    /// The same for large bodies.
    large_turns: Turns,
    audit: Option<AuditLog>,
    refusals: Refusals,
    last_reload: ArcSwapOption<Outcome>,
}

/// The part of the configuration that handlers need. All of it can change while the server runs.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Keys of callers; `None` asks for none.
    pub api_keys: Option<KeyRing>,
    /// Tokens of operators; `None` asks for none.
    pub admin_tokens: Option<KeyRing>,
    /// Whether callers must call this machine by its own name or by an address.
    pub local_hosts: bool,
    /// Whether operators must.
    pub local_admin_hosts: bool,
    /// Longest request body.
    pub body_limit_bytes: usize,
    /// Most completions of one request.
    pub max_completions_per_request: usize,
    /// Time for the body of a request.
    pub body_timeout: Duration,
    /// Longest time in which a client takes none of its answer, for connections that are made from now on.
    pub write_timeout: Duration,
    /// Large bodies that may wait to be parsed and tokenised.
    pub queue_capacity: usize,
    /// Longest wait of a body for that.
    pub queue_timeout: Duration,
    /// Time for a whole request.
    pub request_deadline: Duration,
    /// Oldest heartbeat of an engine that counts as alive.
    pub heartbeat_limit: Duration,
    /// Oldest heartbeat of an engine that the process goes on with.
    pub stall_limit: Duration,
}

/// A server that asks for no keys, with limits in the middle of what a configuration allows.
impl Default for Settings {
    fn default() -> Self {
        Self {
            api_keys: None,
            admin_tokens: None,
            local_hosts: false,
            local_admin_hosts: false,
            body_limit_bytes: 1 << 20,
            max_completions_per_request: 8,
            body_timeout: Duration::from_secs(60),
            write_timeout: Duration::from_secs(60),
            queue_capacity: 64,
            queue_timeout: Duration::from_secs(60),
            request_deadline: Duration::from_secs(600),
            heartbeat_limit: Duration::from_secs(60),
            stall_limit: Duration::from_secs(600),
        }
    }
}

impl Settings {
    /// Takes what handlers need out of the configuration, and reads the keys it names.
    ///
    /// # Errors
    ///
    /// A file of keys can't be used.
    pub fn of(config: &Config) -> Result<Self, FileError> {
        let keys = |key, path: &Option<PathBuf>| {
            path.as_deref()
                .map(KeyRing::read)
                .transpose()
                .map_err(|source| FileError::Keys { key, source })
        };
        let auth = &config.auth;
        // Who need no key because they are on this machine may be a page in its browser, which the owner of a name has sent here.
        let asks_local = |keys: &Option<PathBuf>, endpoint: &Endpoint| {
            keys.is_none() && !auth.allow_unauthenticated && matches!(endpoint, Endpoint::Tcp(_))
        };
        let listen = Endpoint::Tcp(config.listen);
        Ok(Self {
            local_hosts: asks_local(&auth.api_keys_path, &listen),
            local_admin_hosts: asks_local(&auth.admin_tokens_path, &config.admin_listen),
            api_keys: keys("serving.auth.api_keys_path", &auth.api_keys_path)?,
            admin_tokens: keys("serving.auth.admin_tokens_path", &auth.admin_tokens_path)?,
            body_limit_bytes: config.runtime.request_body_limit_bytes,
            max_completions_per_request: config.runtime.max_completions_per_request,
            body_timeout: config.http.body_timeout,
            write_timeout: config.http.write_timeout,
            queue_capacity: config.runtime.queue_capacity,
            queue_timeout: config.runtime.queue_timeout,
            request_deadline: config.runtime.request_deadline,
            heartbeat_limit: config.runtime.heartbeat_limit,
            stall_limit: config.runtime.stall_limit,
        })
    }
}

/// What connections of the OpenAI-compatible interface are held to.
#[derive(Clone, Debug)]
pub struct Connections {
    /// Connections that are open at the same time.
    pub max: usize,
    /// Time for the head of a request, and for the TLS handshake.
    pub header_timeout: Duration,
    /// Origins whose pages may call.
    pub cors_allowed_origins: Vec<String>,
    /// What TLS is spoken with; `None` is plain HTTP.
    pub certificate: Option<Arc<Certificate>>,
}

/// Plain HTTP, with limits in the middle of what a configuration allows.
impl Default for Connections {
    fn default() -> Self {
        Self {
            max: 1024,
            header_timeout: Duration::from_secs(60),
            cors_allowed_origins: Vec::new(),
            certificate: None,
        }
    }
}

impl Connections {
    /// Takes the limits out of the configuration.
    pub fn of(config: &Config, certificate: Option<Arc<Certificate>>) -> Self {
        Self {
            max: config.http.max_connections,
            header_timeout: config.http.header_timeout,
            cors_allowed_origins: config.http.cors_allowed_origins.clone(),
            certificate,
        }
    }
}

impl State {
    /// The state of a server that is starting.
    pub fn new(settings: Settings, startup: Arc<Startup>, drain: Arc<Drain>) -> Self {
        Self {
            settings: ArcSwap::from_pointee(settings),
            startup,
            drain,
            backend: OnceLock::new(),
            turns: Turns::new(small_body_turns()),
            large_turns: Turns::new(1),
            audit: None,
            refusals: Refusals::default(),
            last_reload: ArcSwapOption::empty(),
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

    /// Requests without a valid key that are still to be told in the logs.
    pub fn refusals(&self) -> &Refusals {
        &self.refusals
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

    /// The settings that hold now.
    pub fn settings(&self) -> Arc<Settings> {
        self.settings.load_full()
    }

    /// Puts other settings in place; requests that are under way keep those they began with.
    pub fn apply(&self, settings: Settings) {
        self.settings.store(Arc::new(settings));
    }

    /// Notes how a reload of the configuration went.
    pub fn reloaded(&self, outcome: Outcome) {
        metrics::config_reloaded(outcome.as_str());
        self.last_reload.store(Some(Arc::new(outcome)));
    }

    /// How the last reload of the configuration went; `None` before the first.
    pub fn last_reload(&self) -> Option<Outcome> {
        self.last_reload.load().as_deref().copied()
    }

    /// Requests in flight, and how far the server is on its way down.
    pub fn drain(&self) -> &Arc<Drain> {
        &self.drain
    }

    /// Whether requests are served: every latch has passed, the engine runs, no stop was asked for and the audit log can be written.
    pub fn is_ready(&self) -> bool {
        self.startup.complete()
            && !self.drain.draining()
            && self.audit().and_then(AuditLog::fault).is_none()
            && self
                .backend
                .get()
                .is_some_and(|backend| backend.status().phase == Phase::Ready)
    }

    /// The model, once it may be used.
    fn ready(&self) -> Result<&Arc<dyn Backend>, ApiError> {
        self.backend
            .get()
            .filter(|_| self.startup.complete())
            .ok_or_else(|| ApiError::not_ready("the model is being loaded; try again later"))
    }
}

/// Small bodies that are parsed and tokenised at a time; the other cores are the engine's.
fn small_body_turns() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    (cores / 2).max(1)
}

/// Starts the OpenAI-compatible interface on a bound listener. The caller decides when it stops.
///
/// # Errors
///
/// TLS can't be set up, or the listener can't be used.
pub fn serve(
    state: web::Data<State>,
    listener: TcpListener,
    connections: &Connections,
) -> std::io::Result<Server> {
    let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let limits = Limits {
        workers: cores.min(connections.max),
        max_connections: connections.max,
        header_timeout: connections.header_timeout,
        certificate: connections.certificate.as_ref(),
    };
    let origins = connections.cors_allowed_origins.clone();
    let app = {
        let state = state.clone();
        move || {
            App::new()
                .app_data(state.clone())
                // The last one is the outermost.
                .wrap(from_fn(head::check))
                .wrap(from_fn(requests::check_lines))
                .wrap(from_fn(authenticate::callers))
                .wrap(Condition::new(!origins.is_empty(), cors(&origins)))
                .wrap(from_fn(access::observe))
                .wrap(from_fn(requests::track))
                .configure(routes)
                .default_service(web::to(not_found))
                .into_factory()
        }
    };
    let (server, _) = listener::start("api", Listener::Tcp(listener), &limits, state, app)?;
    Ok(server)
}

/// Lets pages of these origins call. No cookies: a caller is known by its key.
fn cors(origins: &[String]) -> Cors {
    let cors = Cors::default()
        .allowed_methods([Method::GET, Method::HEAD, Method::POST])
        // OpenAI's client sends a dozen of its own, which say nothing here.
        .allow_any_header()
        .expose_headers([access::REQUEST_ID, header::RETRY_AFTER])
        .max_age(PREFLIGHT_SECONDS);
    origins
        .iter()
        .fold(cors, |cors, origin| cors.allowed_origin(origin))
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
