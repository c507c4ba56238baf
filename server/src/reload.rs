//! The configuration, read again while the server runs: all of it takes effect, or nothing does.
//!
//! Which keys may change is in [`crate::config::Key::changes_while_running`]. A fault anywhere, or a change of another key, refuses the whole reload,
//! and the server goes on as it was.

use std::net::TcpListener;
use std::sync::Arc;

use actix_web::web;

use crate::audit::AuditLog;
use crate::config::{Config, ConfigError, Sources};
use crate::http::State;
use crate::http::backend::Backend;
use crate::launch::{FileError, Files};
use crate::listen;
use crate::loader;
use crate::logging::LogControl;
use crate::tls::Certificate;

/// How the last reload went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The new configuration holds.
    Applied,
    /// The old one does.
    Refused,
}

impl Outcome {
    /// Every outcome.
    pub const ALL: [Self; 2] = [Self::Applied, Self::Refused];

    /// The name in `/readyz` and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Applied => "applied",
            Self::Refused => "refused",
        }
    }
}

/// Why a reload was refused.
#[derive(Debug, thiserror::Error)]
pub enum ReloadError {
    /// The configuration has faults.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Keys have changed that can't change while the server runs.
    #[error("{} cannot change while the server runs; restart it, or set {} back", .0.join(", "), if .0.len() == 1 { "it" } else { "them" })]
    Fixed(Vec<&'static str>),
    /// A file that it names can't be used.
    #[error(transparent)]
    File(#[from] FileError),
}

/// Reads the configuration again and puts it in place.
pub struct Reloader {
    sources: Sources,
    config: Arc<Config>,
    state: web::Data<State>,
    certificate: Option<Arc<Certificate>>,
    log: Option<LogControl>,
    /// The socket whose connections have the write timeout.
    listener: TcpListener,
}

impl Reloader {
    /// For a server that runs with `config`.
    pub fn new(
        sources: Sources,
        config: Arc<Config>,
        state: web::Data<State>,
        certificate: Option<Arc<Certificate>>,
        log: Option<LogControl>,
        listener: TcpListener,
    ) -> Self {
        Self {
            sources,
            config,
            state,
            certificate,
            log,
            listener,
        }
    }

    /// The configuration that holds.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Reads the configuration from where it came from and puts it in place; logs and counts how that went.
    pub fn reload(&mut self) {
        let outcome = match self.replace() {
            Ok(changed) => {
                tracing::info!(changed = changed.join(", "), "configuration read again");
                Outcome::Applied
            }
            Err(error) => {
                tracing::error!(%error, "the new configuration is refused, the old one holds");
                Outcome::Refused
            }
        };
        self.state.reloaded(outcome);
    }

    fn replace(&mut self) -> Result<Vec<&'static str>, ReloadError> {
        let config = Config::load(&self.sources)?;
        let changed = self.config.changes_to(&config);
        let fixed: Vec<&'static str> = changed
            .iter()
            .filter(|key| !key.changes_while_running())
            .map(|key| key.path)
            .collect();
        if !fixed.is_empty() {
            return Err(ReloadError::Fixed(fixed));
        }
        let Files { settings, identity } = Files::read(&config)?;

        // From here on nothing can be refused.
        self.state.apply(settings);
        if let (Some(certificate), Some(identity)) = (&self.certificate, identity) {
            certificate.replace(identity);
        }
        if let Some(log) = &self.log {
            log.set_level(config.logging.level);
            if let Err(error) = log.reopen() {
                tracing::error!(%error, "the log goes on in the file that is open");
            }
        }
        if let Some(Err(error)) = self.state.audit().map(AuditLog::reopen) {
            tracing::error!(%error, "the audit log goes on in the file that is open");
        }
        if let Err(error) = listen::set_write_timeout(&self.listener, config.http.write_timeout) {
            tracing::error!(%error, "the write timeout stays as it was");
        }
        if let Some(backend) = self.state.backend() {
            backend.set_limits(loader::engine_limits(&config));
            if config.speculative.enabled != self.config.speculative.enabled {
                switch_drafting(&**backend, config.speculative.enabled);
            }
        }
        self.config = Arc::new(config);
        Ok(changed.into_iter().map(|key| key.path).collect())
    }
}

fn switch_drafting(backend: &dyn Backend, enabled: bool) {
    match backend.set_speculation(enabled) {
        Ok(()) => tracing::info!(enabled, "drafting switched"),
        // As at a start with this setting: the server serves without.
        Err(error) => tracing::warn!(enabled, %error, "drafting not switched"),
    }
}
