//! The configuration, read again while the server runs: all of it takes effect, or nothing does.
//!
//! Which keys may change is in [`crate::config::Key::changes_while_running`]. A fault anywhere, or a change of another key, refuses the whole reload,
//! and the server goes on as it was.
//!
//! It is done on a thread of its own: a file on a disk that hangs holds up the reload, and nothing else.

use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use arc_swap::ArcSwap;
use sd_notify::NotifyState;

use actix_web::web;

use crate::audit::AuditLog;
use crate::config::{Config, ConfigError, Sources};
use crate::http::State;
use crate::http::backend::Backend;
use crate::launch::{FileError, Files};
use crate::listen;
use crate::loader;
use crate::logging::LogControl;
use crate::systemd;
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
    config: Arc<ArcSwap<Config>>,
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
            config: Arc::new(ArcSwap::new(config)),
            state,
            certificate,
            log,
            listener,
        }
    }

    /// Starts the thread that reads the configuration whenever it is asked to. It ends when nobody can ask any more.
    ///
    /// # Errors
    ///
    /// There can be no thread.
    pub fn start(self) -> io::Result<Reloads> {
        let (ask, asked) = channel();
        let config = Arc::clone(&self.config);
        thread::Builder::new()
            .name("reload".to_owned())
            .spawn(move || self.run(&asked))?;
        Ok(Reloads { ask, config })
    }

    fn run(self, asked: &Receiver<()>) {
        while asked.recv().is_ok() {
            // Whoever asked since the last one began asks for the same.
            while asked.try_recv().is_ok() {}
            systemd::notify_reloading();
            self.reload();
            systemd::notify(&[NotifyState::Ready]);
        }
    }

    /// Reads the configuration from where it came from and puts it in place; logs and counts how that went.
    fn reload(&self) {
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

    fn replace(&self) -> Result<Vec<&'static str>, ReloadError> {
        let config = Config::load(&self.sources)?;
        let old = self.config.load_full();
        let changed = old.changes_to(&config);
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
            if config.speculative.enabled != old.speculative.enabled {
                switch_drafting(&**backend, config.speculative.enabled);
            }
        }
        self.config.store(Arc::new(config));
        Ok(changed.into_iter().map(|key| key.path).collect())
    }
}

/// The running reloads.
pub struct Reloads {
    ask: Sender<()>,
    config: Arc<ArcSwap<Config>>,
}

impl Reloads {
    /// The configuration that holds.
    pub fn config(&self) -> Arc<Config> {
        self.config.load_full()
    }

    /// Has the configuration read again. It waits for nothing.
    pub fn ask(&self) {
        if self.ask.send(()).is_err() {
            tracing::error!("the thread that reads the configuration again has ended");
        }
    }
}

fn switch_drafting(backend: &dyn Backend, enabled: bool) {
    match backend.set_speculation(enabled) {
        Ok(()) => tracing::info!(enabled, "drafting switched"),
        // As at a start with this setting: the server serves without.
        Err(error) => tracing::warn!(enabled, %error, "drafting not switched"),
    }
}
