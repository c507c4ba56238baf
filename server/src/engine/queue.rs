//! Requests that wait for a slot: who may wait, who is next, and who has waited for too long.
//!
//! Callers share slots and places fairly, and nobody needs to be configured for that:
//! a free slot goes to the waiting caller who has the fewest completions running, the longest wait first;
//! and when the queue is full, a caller who would still hold no more places than the one who holds most takes the place of that one's newest.
//! The queue reads no clock and owns no lock.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::UnboundedSender;

use super::EngineLimits;
use super::request::{EngineError, Event, Request};

/// Weight of a new sample of the time that a completion holds its slot.
const OCCUPANCY_WEIGHT: f64 = 0.125;

/// Bounds of the wait that a refused caller is told: a caller who comes back within a second is part of the load,
/// and nobody knows what the load will be in more than a minute.
const RETRY_AFTER: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// A request that waits.
pub(super) struct Waiting {
    pub request: Request,
    pub events: UnboundedSender<Event>,
    /// When it joined the queue.
    pub since: Instant,
}

impl Waiting {
    /// Tells the caller that the request failed.
    pub(super) fn fail(self, error: EngineError) {
        super::count_failure(&error);
        drop(self.request);
        // A caller that is gone needs no answer.
        let _ = self.events.send(Event::Failed(error));
    }
}

/// Requests that wait, the longest wait first.
#[derive(Default)]
pub(super) struct Queue {
    waiting: VecDeque<Waiting>,
    /// Whether requests are taken.
    pub open: bool,
    /// Whether the engine ends when it has nothing left to do.
    pub draining: bool,
    /// Completions that can run at a time, once the model is loaded.
    pub slots: usize,
    /// How long a completion holds its slot, on average over the latest, once one has given it back.
    occupancy: Option<Duration>,
}

impl Queue {
    /// Requests whose callers still wait.
    pub(super) fn len(&self) -> usize {
        self.waiting
            .iter()
            .filter(|waiting| !waiting.events.is_closed())
            .count()
    }

    /// Lets a request wait; in a full queue perhaps in the place of another one, which is answered.
    ///
    /// # Errors
    ///
    /// The queue is full, and its places are shared fairly: how long to stay away.
    pub(super) fn push(&mut self, waiting: Waiting, capacity: usize) -> Result<(), Duration> {
        self.waiting.retain(|other| !other.events.is_closed());
        if self.waiting.len() >= capacity {
            let retry_after = self.retry_after();
            let newest = self
                .newest_of_the_largest_share(&waiting.request.caller)
                .ok_or(retry_after)?;
            if let Some(displaced) = self.waiting.remove(newest) {
                displaced.fail(EngineError::Displaced { retry_after });
            }
        }
        self.waiting.push_back(waiting);
        Ok(())
    }

    /// The newest request of the caller who holds most places, when `newcomer` would hold no more with one of them.
    fn newest_of_the_largest_share(&self, newcomer: &str) -> Option<usize> {
        let mut places: HashMap<&str, usize> = HashMap::new();
        for waiting in &self.waiting {
            *places.entry(&waiting.request.caller).or_default() += 1;
        }
        let newest = |caller: &str| {
            let is_theirs = |waiting: &Waiting| &*waiting.request.caller == caller;
            self.waiting.iter().rposition(is_theirs)
        };
        let (largest, share) = places
            .iter()
            .max_by_key(|(caller, share)| (**share, newest(caller)))?;
        let own = places.get(newcomer).copied().unwrap_or_default();
        (own + 2 <= *share).then(|| newest(largest)).flatten()
    }

    /// Takes the request that is next, where `running` tells how many completions of a caller hold a slot.
    pub(super) fn next(&mut self, running: impl Fn(&str) -> usize) -> Option<Waiting> {
        self.waiting.retain(|waiting| !waiting.events.is_closed());
        let mut counts: HashMap<&str, usize> = HashMap::new();
        let mut next = None;
        for (index, waiting) in self.waiting.iter().enumerate() {
            let caller: &str = &waiting.request.caller;
            let count = *counts.entry(caller).or_insert_with(|| running(caller));
            if next.is_none_or(|(fewest, _)| count < fewest) {
                next = Some((count, index));
            }
        }
        let (_, index) = next?;
        self.waiting.remove(index)
    }

    /// Answers the requests that have waited for too long, and forgets those whose callers are gone.
    pub(super) fn expire(&mut self, limits: &EngineLimits, now: Instant) {
        let retry_after = self.retry_after();
        for waiting in std::mem::take(&mut self.waiting) {
            let arrived = waiting.request.arrived;
            if waiting.events.is_closed() {
                continue;
            }
            if now.saturating_duration_since(arrived) >= limits.request_deadline {
                waiting.fail(EngineError::DeadlineExceeded {
                    limit: limits.request_deadline,
                });
            } else if now.saturating_duration_since(waiting.since) >= limits.queue_timeout {
                waiting.fail(EngineError::QueueTimeout {
                    limit: limits.queue_timeout,
                    retry_after,
                });
            } else {
                self.waiting.push_back(waiting);
            }
        }
    }

    /// Answers everything that waits with `error`.
    pub(super) fn fail_all(&mut self, error: &EngineError) {
        for waiting in self.waiting.drain(..) {
            waiting.fail(error.clone());
        }
    }

    /// Takes in how long a completion held its slot.
    pub(super) fn record_occupancy(&mut self, held: Duration) {
        let average = self.occupancy.unwrap_or(held);
        let change = OCCUPANCY_WEIGHT * (held.as_secs_f64() - average.as_secs_f64());
        self.occupancy = Some(Duration::from_secs_f64(average.as_secs_f64() + change));
    }

    /// How long a caller who can't be served should stay away: as long as the slots take for what waits, and for one more.
    fn retry_after(&self) -> Duration {
        let (shortest, longest) = RETRY_AFTER;
        let per_slot = (self.waiting.len() + 1) as f64 / self.slots.max(1) as f64;
        let seconds = self.occupancy.unwrap_or_default().as_secs_f64() * per_slot;
        Duration::from_secs_f64(seconds.clamp(shortest.as_secs_f64(), longest.as_secs_f64()))
    }
}
