//! A thread of its own that looks after the engine while every other thread may hang: it tells systemd how the server is, and ends the process
//! when the engine has stalled.
//!
//! An engine that is still loading has no heartbeat and can't stall; one that serves shows its heartbeat even when it has nothing to do.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use actix_web::web;
use sd_notify::NotifyState;

use crate::http::State;
use crate::systemd;

/// How often the engine is looked at.
const INTERVAL: Duration = Duration::from_millis(100);

/// How long a process that ends because of a stall may take to say so to its log and to its callers.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Exit code of a process that ends because of a stall: an internal fault.
const STALLED: i32 = 70;

/// The thread; it ends when this is dropped.
#[derive(Debug)]
pub struct Watch(
    #[expect(dead_code, reason = "dropping it is what ends the thread")] mpsc::Sender<()>,
);

/// Starts the thread. `on_ready` is called once, when the server is ready for the first time.
///
/// # Errors
///
/// The thread can't be started.
pub fn start(
    state: web::Data<State>,
    on_ready: impl FnOnce() + Send + 'static,
) -> std::io::Result<Watch> {
    let (alive, ended) = mpsc::channel();
    std::thread::Builder::new()
        .name("watch".to_owned())
        .spawn(move || {
            let mut watcher = Watcher {
                state,
                on_ready: Some(on_ready),
                looks: Looks::begin(Instant::now()),
                ping: systemd::watchdog_interval().map(|interval| (interval, Instant::now())),
            };
            while ended.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                watcher.look();
            }
        })?;
    Ok(Watch(alive))
}

struct Watcher<F> {
    state: web::Data<State>,
    on_ready: Option<F>,
    looks: Looks,
    /// How often systemd wants to hear from the server, and when it is time again.
    ping: Option<(Duration, Instant)>,
}

impl<F: FnOnce()> Watcher<F> {
    fn look(&mut self) {
        if self.on_ready.is_some()
            && self.state.is_ready()
            && let Some(on_ready) = self.on_ready.take()
        {
            on_ready();
        }
        let settings = self.state.settings();
        let age = self
            .state
            .backend()
            .and_then(|backend| backend.heartbeat_age());
        let looks = &mut self.looks;
        let age = age.map(|age| looks.look(Instant::now(), age, settings.stall_limit));
        if let Some(age) = age.filter(|age| *age > settings.stall_limit) {
            end(&self.state, age, settings.stall_limit);
        }
        let is_fresh = age.is_none_or(|age| age <= settings.heartbeat_limit);
        if let Some((interval, due)) = &mut self.ping
            && is_fresh
            && Instant::now() >= *due
        {
            systemd::notify(&[NotifyState::Watchdog]);
            *due = Instant::now() + *interval;
        }
    }
}

/// The looks at the engine, and the latest gap between two of them: in a gap the whole process stood still, or its machine, and the engine is not to
/// blame.
#[derive(Clone, Copy, Debug)]
struct Looks {
    latest: Instant,
    resumed: Option<Instant>,
}

impl Looks {
    fn begin(now: Instant) -> Self {
        Self {
            latest: now,
            resumed: None,
        }
    }

    /// Another look; for how long an engine has stood still that was last heard of `age` ago.
    fn look(&mut self, now: Instant, age: Duration, stall_limit: Duration) -> Duration {
        // What is shorter is no stall, and a busy machine holds up a look now and then.
        let longest = (stall_limit / 2).max(10 * INTERVAL);
        if now.saturating_duration_since(self.latest) > longest {
            self.resumed = Some(now);
        }
        self.latest = now;
        match self.resumed {
            Some(resumed) => age.min(now.saturating_duration_since(resumed)),
            None => age,
        }
    }
}

/// Ends the process, after some last words that can't hold it up.
fn end(state: &web::Data<State>, age: Duration, limit: Duration) -> ! {
    let (said, heard) = mpsc::channel();
    let state = state.clone();
    // On a thread of its own: a thread that hangs may hold the lock of the log.
    let words = std::thread::Builder::new().spawn(move || {
        tracing::error!(
            heartbeat_age_seconds = age.as_secs_f64(),
            stall_limit_seconds = limit.as_secs_f64(),
            running = state.drain().in_flight(),
            "the engine has stalled, the process ends"
        );
        systemd::notify(&[NotifyState::Status("the engine has stalled")]);
        state.drain().begin();
        state.drain().cut();
        while state.drain().in_flight() > 0 {
            std::thread::sleep(Duration::from_millis(10));
        }
        if let Some(audit) = state.audit() {
            audit.end();
        }
        let _ = said.send(());
    });
    if words.is_ok() {
        let _ = heard.recv_timeout(LAST_WORDS);
    }
    // Without the handlers of an orderly exit: they wait for the thread that hangs.
    signal_hook::low_level::exit(STALLED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_in_which_the_whole_process_stood_still_is_no_stall() {
        let second = Duration::from_secs(1);
        let began = Instant::now();
        for (limit, slow_look) in [(10 * second, 5 * second), (second / 10, second)] {
            let mut looks = Looks::begin(began);
            let mut look = |at, age| looks.look(began + at, age, limit);
            let hour = 3600 * second;
            assert_eq!(look(second / 10, hour), hour);
            let at = second / 10 + slow_look;
            assert_eq!(look(at, hour), hour, "a slow look is one");
            // Behind an hour asleep time counts from the first look.
            let woken = at + hour;
            assert_eq!(look(woken, hour), Duration::ZERO);
            assert_eq!(look(woken + second / 2, hour), second / 2);
            assert_eq!(look(woken + second, second / 4), second / 4);
            assert_eq!(look(woken + 2 * second, hour), 2 * second);
        }
    }
}
