//! The configuration, read again while the server runs: all of it takes effect, or nothing does.
//!
//! Which keys may change is in [`crate::config::Key::changes_while_running`]. A fault anywhere, or a change of another key, refuses the whole reload,
//! and the server goes on as it was.
//!
//! It is done on a thread of its own: a file on a disk that hangs holds up the reload, and nothing else.

use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use sd_notify::NotifyState;

use actix_web::web;

use crate::audit::AuditLog;
use crate::auth::KeyRing;
use crate::config::{Config, ConfigError, Sources};
use crate::http::State;
use crate::http::backend::Backend;
use crate::launch::{FileError, Files};
use crate::loader;
use crate::logging::LogControl;
use crate::systemd;
use crate::tls::Certificate;

/// A reload that takes longer is told of while it lasts: some file does not answer.
const SLOW: Duration = Duration::from_secs(10);

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
    /// It would let callers in without the keys that they need now.
    #[error(
        "{0} is no longer set, so that everyone who reaches the listener could use it; set it again, or serving.auth.allow_unauthenticated as well"
    )]
    Opens(&'static str),
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
}

impl Reloader {
    /// For a server that runs with `config`.
    pub fn new(
        sources: Sources,
        config: Arc<Config>,
        state: web::Data<State>,
        certificate: Option<Arc<Certificate>>,
        log: Option<LogControl>,
    ) -> Self {
        Self {
            sources,
            config: Arc::new(ArcSwap::new(config)),
            state,
            certificate,
            log,
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
        let progress = Arc::new(Mutex::new(Progress::default()));
        let reloads = Reloads {
            ask,
            config,
            progress: Arc::clone(&progress),
        };
        thread::Builder::new()
            .name("reload".to_owned())
            .spawn(move || self.run(&asked, &progress))?;
        Ok(reloads)
    }

    fn run(self, asked: &Receiver<()>, progress: &Mutex<Progress>) {
        while asked.recv().is_ok() {
            // Whoever asked since the last one began asks for the same.
            while asked.try_recv().is_ok() {}
            {
                let mut progress = lock(progress);
                if progress.is_stopping {
                    return;
                }
                systemd::notify_reloading();
                progress.began = Some(Instant::now());
            }
            self.reload();
            let mut progress = lock(progress);
            *progress = Progress {
                is_stopping: progress.is_stopping,
                ..Progress::default()
            };
            if !progress.is_stopping {
                systemd::notify(&[NotifyState::Ready]);
            }
        }
    }

    /// Reads the configuration from where it came from and puts it in place; logs and counts how that went.
    fn reload(&self) {
        let outcome = match self.replace() {
            Ok(changed) => {
                let settings = self.state.settings();
                tracing::info!(
                    changed = changed.join(", "),
                    api_keys = settings.api_keys.as_ref().map(KeyRing::len),
                    admin_tokens = settings.admin_tokens.as_ref().map(KeyRing::len),
                    "configuration read again"
                );
                Outcome::Applied
            }
            Err(error) => {
                // Each fault has a line of its own, and a record is one line.
                let error = error.to_string();
                let error: Vec<&str> = error.lines().map(str::trim).collect();
                let error = error.join("; ").replace(":; ", ": ");
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
        let (was, is) = (&old.auth, &config.auth);
        for (key, was, is) in [
            (
                "serving.auth.api_keys_path",
                &was.api_keys_path,
                &is.api_keys_path,
            ),
            (
                "serving.auth.admin_tokens_path",
                &was.admin_tokens_path,
                &is.admin_tokens_path,
            ),
        ] {
            if was.is_some() && is.is_none() && !config.auth.allow_unauthenticated {
                return Err(ReloadError::Opens(key));
            }
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
#[derive(Clone)]
pub struct Reloads {
    ask: Sender<()>,
    config: Arc<ArcSwap<Config>>,
    progress: Arc<Mutex<Progress>>,
}

#[derive(Debug, Default)]
struct Progress {
    /// When the reload that runs began.
    began: Option<Instant>,
    /// Whether it was told that it takes long.
    is_told: bool,
    /// Whether the server stops; systemd must not hear of readiness any more.
    is_stopping: bool,
}

fn lock(progress: &Mutex<Progress>) -> MutexGuard<'_, Progress> {
    progress.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// Logs a reload that takes long, once.
    pub fn tell_if_slow(&self) {
        let mut progress = lock(&self.progress);
        if let Some(seconds) = progress.began.map(|began| began.elapsed())
            && seconds > SLOW
            && !progress.is_told
        {
            progress.is_told = true;
            tracing::error!(
                seconds = seconds.as_secs(),
                "the configuration is still being read again: one of its files, or a log, does not answer"
            );
        }
    }

    /// From here on no reload begins, and systemd is told of none.
    pub fn stop(&self) {
        lock(&self.progress).is_stopping = true;
    }
}

fn switch_drafting(backend: &dyn Backend, enabled: bool) {
    match backend.set_speculation(enabled) {
        Ok(()) => tracing::info!(enabled, "drafting switched"),
        // As at a start with this setting: the server serves without.
        Err(error) => tracing::warn!(enabled, %error, "drafting not switched"),
    }
}
