//! The running server: two listeners, one thread that loads the model and waits for it, one that watches over it, and an orderly end.
//!
//! The ports answer from the first moment: 503 until the model is loaded, and 503 again once a stop was asked for, while the answers
//! that are under way are finished within the grace period. Those that are not finished by then, or when a second signal comes, end with an
//! error that says so, sent and logged like any other.
//!
//! `SIGTERM` and `SIGINT` stop the server, `SIGHUP` reads its configuration again.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use actix_web::dev::ServerHandle;
use actix_web::rt::time::{sleep, timeout};
use actix_web::{rt, web};
use futures_util::future::{Either, join_all, select};
use sd_notify::NotifyState;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::config::Config;
use crate::http::backend::Backend;
use crate::http::{self, State, admin};
use crate::launch::Launch;
use crate::lifecycle::{Drain, Startup};
use crate::reload::{Reloader, Reloads};
use crate::{metrics, systemd, watch};

/// How often histograms are compacted when nobody scrapes them, refused requests are told in the logs, and a reload that hangs is looked for.
const UPKEEP: Duration = Duration::from_secs(5);

/// How long answers that are cut off may take to say so.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// How long the engine may take to close its sessions.
const ENGINE_END: Duration = Duration::from_secs(2);

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
    /// A signal asked for it, and the thread of the model is still in the middle of a load or a step: the process must end without the handlers of an
    /// orderly exit, which take the runtime down under it or wait for it.
    Abandoned,
    /// The model could not be loaded.
    CannotServe(String),
    /// The engine ended by itself after it had started.
    EngineFailed(String),
}

/// What can happen to a running server.
enum Happening {
    /// This signal asks it to stop.
    Stop(&'static str),
    /// `SIGHUP`.
    Reload,
    /// The model is ready, for the first time.
    Ready,
    /// The loader has returned.
    Ended(Result<(), String>),
}

/// Serves until a signal arrives or the model is gone.
///
/// `load` runs on a thread of its own. It loads the model, provides it, and returns when the model is gone, with the reason when nobody
/// asked for that.
///
/// # Errors
///
/// The listeners, the threads or the signal handlers could not be set up.
pub async fn run(
    launch: Launch,
    load: impl FnOnce(LoadContext) -> Result<(), String> + Send + 'static,
) -> std::io::Result<Ending> {
    let Launch {
        config,
        sources,
        log,
        audit,
        settings,
        connections,
        listener,
        admin_listener,
    } = launch;
    let (happen, mut happenings) = unbounded_channel();
    forward_signals(&happen)?;
    let prometheus = metrics::install();
    let config = Arc::new(config);
    let startup = Arc::new(Startup::default());
    let drain = Arc::new(Drain::default());
    let state = State::new(settings, startup.clone(), drain.clone()).with_audit(audit);
    let state = web::Data::new(state);
    let reloads = Reloader::new(
        sources,
        config.clone(),
        state.clone(),
        connections.certificate.clone(),
        log,
    )
    .start()?;

    let server = http::serve(state.clone(), listener, &connections)?;
    let (admin, socket_file) =
        admin::serve(state.clone(), admin_listener, connections.header_timeout)?;
    let handles = [server.handle(), admin.handle()];
    rt::spawn(server);
    rt::spawn(admin);
    let upkeep = rt::spawn({
        let (state, reloads) = (state.clone(), reloads.clone());
        async move {
            loop {
                sleep(UPKEEP).await;
                prometheus.run_upkeep();
                state.refusals().tell(state.audit());
                reloads.tell_if_slow();
            }
        }
    });

    systemd::notify(&[NotifyState::Status("loading the model")]);
    start_loader(
        LoadContext {
            config,
            startup: startup.clone(),
            provide: {
                let state = state.clone();
                Box::new(move |backend| state.provide(backend))
            },
        },
        load,
        happen.clone(),
    )?;
    let watch = watch::start(state.clone(), move || {
        let _ = happen.send(Happening::Ready);
    })?;

    let mut has_ended = false;
    let ending = match serve(&mut happenings, &reloads, &state).await {
        Either::Left(name) => {
            tracing::info!(signal = name, in_flight = drain.in_flight(), "stopping");
            reloads.stop();
            systemd::notify(&[NotifyState::Stopping, NotifyState::Status("stopping")]);
            drain.begin();
            let grace = reloads.config().shutdown_grace;
            has_ended = finish_requests(&drain, &mut happenings, grace).await;
            Ending::Stopped
        }
        Either::Right(result) => {
            let reason = result
                .err()
                .unwrap_or_else(|| "the engine ended".to_owned());
            drain.begin();
            drain.cut();
            let _ = timeout(LAST_WORDS, drain.idle()).await;
            if startup.complete() {
                Ending::EngineFailed(reason)
            } else {
                Ending::CannotServe(reason)
            }
        }
    };
    // From here on the engine may well stand still, and nobody is to wait in the queue of a socket.
    upkeep.abort();
    drop((watch, reloads));
    stop_listening(&handles).await;
    drop(socket_file);
    // Connections that were closed just now still have their lines to write.
    let _ = timeout(LAST_WORDS, drain.idle()).await;
    state.refusals().tell(state.audit());
    if let Some(audit) = state.audit() {
        audit.end();
    }
    if ending == Ending::Stopped && !has_ended {
        // Sessions are closed on their own thread before the process tears down the runtime under them; a load knows no stop.
        let limit = state.backend().map_or(Duration::ZERO, |backend| {
            backend.stop();
            ENGINE_END
        });
        let ended = pin!(async {
            while let Some(happening) = happenings.recv().await {
                if matches!(happening, Happening::Ended(_)) {
                    return;
                }
            }
        });
        has_ended = timeout(limit, ended).await.is_ok();
    }
    // Any other ending is told by the caller, as the error it is.
    if ending != Ending::Stopped {
        return Ok(ending);
    }
    if has_ended {
        tracing::info!("stopped");
        Ok(Ending::Stopped)
    } else {
        tracing::warn!("stopped without the end of the load or step that is under way");
        Ok(Ending::Abandoned)
    }
}

/// Has the configuration read again when asked; returns the signal that stops the server, or how the loader ended.
async fn serve(
    happenings: &mut UnboundedReceiver<Happening>,
    reloads: &Reloads,
    state: &State,
) -> Either<&'static str, Result<(), String>> {
    let mut ready = false;
    let mut reload_waits = false;
    loop {
        let happening = happenings.recv().await;
        match happening {
            Some(Happening::Stop(name)) => return Either::Left(name),
            Some(Happening::Ended(result)) => return Either::Right(result),
            // The state has a sender, so the channel stays open.
            None => return Either::Right(Err("nothing is left to wait for".to_owned())),
            Some(Happening::Ready) => {
                ready = true;
                if let Some(backend) = state.backend() {
                    let status = format!("serving {}", backend.card().name);
                    systemd::notify(&[NotifyState::Ready, NotifyState::Status(&status)]);
                }
                if std::mem::take(&mut reload_waits) {
                    reloads.ask();
                }
            }
            Some(Happening::Reload) if ready => reloads.ask(),
            Some(Happening::Reload) => {
                tracing::info!("the configuration is read again once the model is loaded");
                reload_waits = true;
            }
        }
    }
}

/// Sends connections what they still have to get, for a moment, and closes them.
async fn stop_listening(handles: &[ServerHandle]) {
    join_all(handles.iter().map(|handle| handle.stop(true))).await;
}

fn start_loader(
    context: LoadContext,
    load: impl FnOnce(LoadContext) -> Result<(), String> + Send + 'static,
    happen: UnboundedSender<Happening>,
) -> std::io::Result<()> {
    std::thread::Builder::new()
        .name("loader".to_owned())
        .spawn(move || {
            // What a panic leaves behind is not used again: the server ends.
            let result = catch_unwind(AssertUnwindSafe(|| load(context)))
                .unwrap_or_else(|_| Err("the loader panicked".to_owned()));
            let _ = happen.send(Happening::Ended(result));
        })?;
    Ok(())
}

/// Waits for the requests in flight, no longer than `grace` and no longer than to the next signal or the end of the engine; then ends them.
/// Returns whether the engine has ended.
async fn finish_requests(
    drain: &Drain,
    happenings: &mut UnboundedReceiver<Happening>,
    grace: Duration,
) -> bool {
    let finished = pin!(timeout(grace, drain.idle()));
    let second = pin!(async {
        loop {
            match happenings.recv().await {
                Some(Happening::Stop(name)) => return Some(name),
                Some(Happening::Ended(_)) | None => return None,
                Some(Happening::Reload | Happening::Ready) => {}
            }
        }
    });
    let mut has_ended = false;
    match select(finished, second).await {
        Either::Left((Ok(()), _)) => return has_ended,
        Either::Left((Err(_), _)) => {
            tracing::warn!(
                in_flight = drain.in_flight(),
                "the grace period is over, requests are cut off"
            );
        }
        Either::Right((Some(name), _)) => {
            tracing::warn!(
                signal = name,
                in_flight = drain.in_flight(),
                "second signal, requests are cut off"
            );
        }
        Either::Right((None, _)) => {
            has_ended = true;
            tracing::error!(
                in_flight = drain.in_flight(),
                "the engine ended before the requests did, they are cut off"
            );
        }
    }
    drain.cut();
    if timeout(LAST_WORDS, drain.idle()).await.is_err() {
        tracing::warn!(
            in_flight = drain.in_flight(),
            "requests did not end in time, their connections are closed"
        );
    }
    has_ended
}

/// Makes signals happenings, for as long as the runtime lives.
fn forward_signals(happen: &UnboundedSender<Happening>) -> std::io::Result<()> {
    let signals: [(SignalKind, fn() -> Happening); 3] = [
        (SignalKind::terminate(), || Happening::Stop("SIGTERM")),
        (SignalKind::interrupt(), || Happening::Stop("SIGINT")),
        (SignalKind::hangup(), || Happening::Reload),
    ];
    for (kind, happening) in signals {
        let mut signal = signal(kind)?;
        let happen = happen.clone();
        rt::spawn(async move {
            while signal.recv().await.is_some() && happen.send(happening()).is_ok() {}
        });
    }
    Ok(())
}
