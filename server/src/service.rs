//! The running server: two listeners, one thread that loads the model and waits for it, and an orderly end.
//!
//! The ports answer from the first moment: 503 until the model is loaded, and 503 again once a stop was asked for, while the answers
//! that are under way are finished within the grace period. A second signal ends the wait.

use std::net::TcpListener;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use actix_web::rt::time::{sleep, timeout};
use actix_web::{rt, web};
use futures_util::future::{Either, select};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;

use crate::audit::AuditLog;
use crate::config::Config;
use crate::http::backend::Backend;
use crate::http::{self, Settings, State, admin};
use crate::lifecycle::{Drain, Startup};
use crate::metrics;

/// How often histograms are compacted when nobody scrapes them.
const METRICS_UPKEEP: Duration = Duration::from_secs(5);

/// How long answers may take to say that the engine is gone.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// What a loader is given.
pub struct LoadContext {
    /// The configuration.
    pub config: Arc<Config>,
    /// The latches to pass on the way.
    pub startup: Arc<Startup>,
    /// Takes the loaded model; requests reach it from then on.
    pub provide: Box<dyn FnOnce(Arc<dyn Backend>) + Send>,
}

/// Why the server ended.
#[derive(Debug, PartialEq, Eq)]
pub enum Ending {
    /// A signal asked for it.
    Stopped,
    /// The model could not be loaded.
    CannotServe(String),
    /// The engine ended by itself after it had started.
    EngineFailed(String),
}

/// Serves until a signal arrives or the model is gone.
///
/// `load` runs on a thread of its own. It loads the model, provides it, and returns when the model is gone, with the reason when nobody
/// asked for that.
///
/// # Errors
///
/// The listeners, the thread or the signal handlers could not be set up.
pub async fn run(
    config: Config,
    listener: TcpListener,
    admin_listener: TcpListener,
    audit: Option<AuditLog>,
    load: impl FnOnce(LoadContext) -> Result<(), String> + Send + 'static,
) -> std::io::Result<Ending> {
    let mut signals = Signals::new()?;
    let prometheus = metrics::install();
    let config = Arc::new(config);
    let startup = Arc::new(Startup::default());
    let drain = Arc::new(Drain::default());
    let state = State::new(Settings::of(&config), startup.clone(), drain.clone());
    let state = web::Data::new(state.with_audit(audit));

    let server = http::serve(state.clone(), listener)?;
    let admin = admin::serve(state.clone(), admin_listener)?;
    let handles = [server.handle(), admin.handle()];
    rt::spawn(server);
    rt::spawn(admin);
    rt::spawn(async move {
        loop {
            sleep(METRICS_UPKEEP).await;
            prometheus.run_upkeep();
        }
    });

    let context = LoadContext {
        config: config.clone(),
        startup: startup.clone(),
        provide: {
            let state = state.clone();
            Box::new(move |backend| state.provide(backend))
        },
    };
    let (report, mut ended) = oneshot::channel();
    std::thread::Builder::new()
        .name("loader".to_owned())
        .spawn(move || {
            // Nobody listens any more once the process is about to exit.
            let _ = report.send(load(context));
        })?;

    let first = match select(pin!(signals.next()), &mut ended).await {
        Either::Left((name, _)) => Either::Left(name),
        Either::Right((result, _)) => Either::Right(result),
    };
    let ending = match first {
        Either::Left(name) => {
            tracing::info!(signal = name, in_flight = drain.in_flight(), "stopping");
            drain.begin();
            finish_requests(&drain, &mut signals, config.shutdown_grace).await;
            Ending::Stopped
        }
        Either::Right(result) => {
            // A loader that panicked drops its end of the channel.
            let result = result.unwrap_or_else(|_| Err("the loader panicked".to_owned()));
            let reason = result
                .err()
                .unwrap_or_else(|| "the engine ended".to_owned());
            drain.begin();
            let _ = timeout(LAST_WORDS, drain.idle()).await;
            if startup.complete() {
                Ending::EngineFailed(reason)
            } else {
                Ending::CannotServe(reason)
            }
        }
    };
    for handle in handles {
        handle.stop(false).await;
    }
    if let Some(audit) = state.audit() {
        // Connections that were closed just now still have their lines to write.
        let _ = timeout(LAST_WORDS, drain.idle()).await;
        audit.end();
    }
    if ending == Ending::Stopped
        && let Some(backend) = state.backend()
    {
        // Sessions are closed on their own thread before the process tears down the runtime under them.
        backend.stop();
        let _ = timeout(LAST_WORDS, ended).await;
    }
    // Any other ending is told by the caller, as the error it is.
    if ending == Ending::Stopped {
        tracing::info!("stopped");
    }
    Ok(ending)
}

async fn finish_requests(drain: &Drain, signals: &mut Signals, grace: Duration) {
    let finished = pin!(timeout(grace, drain.idle()));
    match select(finished, pin!(signals.next())).await {
        Either::Left((Ok(()), _)) => {}
        Either::Left((Err(_), _)) => {
            tracing::warn!(
                in_flight = drain.in_flight(),
                "the grace period is over, requests are cut off"
            );
        }
        Either::Right((name, _)) => {
            tracing::warn!(
                signal = name,
                in_flight = drain.in_flight(),
                "second signal, requests are cut off"
            );
        }
    }
}

/// The signals that stop the server.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    async fn next(&mut self) -> &'static str {
        match select(pin!(self.terminate.recv()), pin!(self.interrupt.recv())).await {
            Either::Left(_) => "SIGTERM",
            Either::Right(_) => "SIGINT",
        }
    }
}
