//! From start to stop: the latches that make the server ready, and the drain that lets it go.
//!
//! [`Startup`] is filled in by whoever loads the model and read by `/readyz` and the request path; a latch never opens again.
//! [`Drain`] counts the requests in flight, turns new ones away once a stop was asked for, and ends those that take too long.

use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, watch};

/// A step of the start that must have passed before the first request is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Latch {
    /// Every file that is served from has the digest its manifest states.
    WeightsVerified,
    /// The sessions are built and the KV memory is allocated.
    SessionsBuilt,
    /// The width probe ran and its class is acceptable.
    ProbePassed,
    /// The first real step has run.
    Warm,
}

impl Latch {
    /// Every latch, in the order they pass.
    pub const ALL: [Self; 4] = [
        Self::WeightsVerified,
        Self::SessionsBuilt,
        Self::ProbePassed,
        Self::Warm,
    ];

    /// The name in `/readyz` and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::WeightsVerified => "weights_verified",
            Self::SessionsBuilt => "sessions_built",
            Self::ProbePassed => "probe_passed",
            Self::Warm => "warm",
        }
    }
}

impl fmt::Display for Latch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The latches of one start, each with the time it took to get there.
#[derive(Debug)]
pub struct Startup {
    began: Instant,
    passed: [OnceLock<Duration>; Latch::ALL.len()],
}

impl Default for Startup {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            passed: Default::default(),
        }
    }
}

impl Startup {
    /// Closes `latch`; a second call changes nothing.
    pub fn pass(&self, latch: Latch) {
        let elapsed = self.began.elapsed();
        if self.passed[latch as usize].set(elapsed).is_ok() {
            tracing::info!(%latch, seconds = elapsed.as_secs_f64(), "start-up latch passed");
        }
    }

    /// Time from the start to the moment `latch` passed, once it has.
    pub fn passed(&self, latch: Latch) -> Option<Duration> {
        self.passed[latch as usize].get().copied()
    }

    /// Whether every latch has passed.
    pub fn complete(&self) -> bool {
        self.passed.iter().all(|latch| latch.get().is_some())
    }
}

/// How far the server is on its way down.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    /// Requests are taken.
    #[default]
    Serving,
    /// New requests are turned away.
    Draining,
    /// Those that are left end with an error.
    Cutting,
}

/// Counts requests in flight, refuses new ones once the server is asked to stop, and tells the rest when their time is over.
#[derive(Debug, Default)]
pub struct Drain {
    stage: watch::Sender<Stage>,
    in_flight: AtomicUsize,
    idle: Notify,
}

impl Drain {
    /// Turns new requests away from now on.
    pub fn begin(&self) {
        self.advance(Stage::Draining);
    }

    /// Ends the requests that are in flight with an error, as soon as they notice.
    pub fn cut(&self) {
        self.advance(Stage::Cutting);
    }

    fn advance(&self, to: Stage) {
        self.stage.send_if_modified(|stage| {
            let later = *stage < to;
            *stage = to.max(*stage);
            later
        });
    }

    /// Whether new requests are turned away.
    pub fn draining(&self) -> bool {
        *self.stage.borrow() >= Stage::Draining
    }

    /// Returns when new requests are turned away.
    pub async fn begun(&self) {
        self.reached(Stage::Draining).await;
    }

    /// Returns when requests in flight must end.
    pub async fn cut_off(&self) {
        self.reached(Stage::Cutting).await;
    }

    async fn reached(&self, stage: Stage) {
        // The sender lives as long as this, so waiting can't fail.
        let _ = self.stage.subscribe().wait_for(|now| *now >= stage).await;
    }

    /// Requests whose response is not finished.
    pub fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::SeqCst)
    }

    /// Counts one request in; the caller must call [`Drain::leave`] exactly once.
    pub fn enter(&self) {
        self.in_flight.fetch_add(1, Ordering::SeqCst);
    }

    /// Counts one request out.
    pub fn leave(&self) {
        if self.in_flight.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.idle.notify_waiters();
        }
    }

    /// Returns when no request is in flight.
    pub async fn idle(&self) {
        loop {
            let mut notified = std::pin::pin!(self.idle.notified());
            // Registered before the count is read, so that a request which leaves in between is not missed.
            notified.as_mut().enable();
            if self.in_flight() == 0 {
                return;
            }
            notified.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn start_up_is_complete_only_after_every_latch() {
        let startup = Startup::default();
        for latch in Latch::ALL {
            assert!(!startup.complete(), "complete before {latch}");
            startup.pass(latch);
        }
        assert!(startup.complete());
    }

    #[test]
    fn a_latch_keeps_the_time_it_first_passed() {
        let startup = Startup::default();
        startup.pass(Latch::Warm);
        let first = startup.passed(Latch::Warm);
        startup.pass(Latch::Warm);
        assert_eq!(startup.passed(Latch::Warm), first);
        assert_eq!(startup.passed(Latch::ProbePassed), None);
    }

    #[actix_web::test]
    async fn a_drain_waits_for_the_last_request() {
        let drain = std::sync::Arc::new(Drain::default());
        drain.enter();
        drain.enter();
        drain.begin();
        let idle = {
            let drain = drain.clone();
            actix_web::rt::spawn(async move { drain.idle().await })
        };
        drain.leave();
        actix_web::rt::task::yield_now().await;
        assert!(!idle.is_finished());
        drain.leave();
        idle.await.unwrap();
        assert_eq!(drain.in_flight(), 0);
    }

    #[actix_web::test]
    async fn a_drain_never_goes_back() {
        let drain = Drain::default();
        assert!(!drain.draining());
        drain.cut();
        drain.begin();
        drain.begun().await;
        drain.cut_off().await;
        assert!(drain.draining());
    }
}
