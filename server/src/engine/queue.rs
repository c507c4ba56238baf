//! Requests that wait for a slot: who may wait, who is next, and who has waited for too long.
//!
//! Callers share slots and places fairly, and nobody needs to be configured for that:
//! a free slot goes to the waiting caller who has the fewest completions running, by turns among equals, and of what that caller asked for to what has waited longest;
//! and when the queue is full, a caller who would still hold no more places than the one who holds most takes the place of that one's newest.
//! The completions of one request get their places together or not at all.
//! The queue reads no clock and owns no lock.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::UnboundedSender;

use super::EngineLimits;
use super::request::{EngineError, Event, Request};

/// Weight of a new sample of the time that a completion holds its slot.
const OCCUPANCY_WEIGHT: f64 = 0.125;

/// Slots that are given before a caller of whom nothing waits is forgotten: one who comes back before has no worse turn than those who waited all along.
const REMEMBERED_TURNS: u64 = 1024;

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
    /// Of each caller who waits, or did so lately: when they last were given a slot, or else began to wait; the lowest number is next among equals.
    turns: HashMap<Arc<str>, u64>,
    latest_turn: u64,
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

    /// Takes completions of one caller over, all of them; in a full queue perhaps in the places of others, which are answered.
    ///
    /// # Errors
    ///
    /// There are not places for all, and they are shared fairly: how long to stay away. Nobody has lost a place, and nothing was taken over.
    pub(super) fn push(
        &mut self,
        arrivals: &mut Vec<Waiting>,
        capacity: usize,
    ) -> Result<(), Duration> {
        let Some(first) = arrivals.first() else {
            return Ok(());
        };
        let caller = Arc::clone(&first.request.caller);
        self.forget_gone();
        let mut given_up = self
            .places_for(&caller, arrivals.len(), capacity)
            .ok_or_else(|| self.retry_after())?;
        if !given_up.is_empty() {
            let retry_after = self.retry_after();
            given_up.sort_unstable();
            for index in given_up.into_iter().rev() {
                if let Some(displaced) = self.waiting.remove(index) {
                    displaced.fail(EngineError::Displaced { retry_after });
                }
            }
        }
        if !self.turns.contains_key(&caller) {
            self.give_turn(&caller);
        }
        self.waiting.extend(arrivals.drain(..));
        Ok(())
    }

    /// Places to be given up for so many arrivals of a caller: each time the newest of the caller who holds most, while the arriving one would still hold
    /// no more; `None` when that is not enough.
    fn places_for(&self, caller: &str, arrivals: usize, capacity: usize) -> Option<Vec<usize>> {
        let free = capacity.saturating_sub(self.waiting.len());
        if arrivals <= free {
            return Some(Vec::new());
        }
        let mut places: HashMap<&str, Vec<usize>> = HashMap::new();
        for (index, waiting) in self.waiting.iter().enumerate() {
            let of_one = places.entry(&waiting.request.caller).or_default();
            of_one.push(index);
        }
        let held = places.get(caller).map_or(0, Vec::len);
        let mut given_up = Vec::new();
        for own in held + free..held + arrivals {
            let largest = places
                .values_mut()
                .max_by_key(|of_one| (of_one.len(), of_one.last().copied()))
                .filter(|of_one| own + 2 <= of_one.len())?;
            given_up.extend(largest.pop());
        }
        Some(given_up)
    }

    /// Takes the request that is next, where `running` tells how many completions of a caller hold a slot.
    pub(super) fn next(&mut self, running: impl Fn(&str) -> usize) -> Option<Waiting> {
        self.forget_gone();
        let mut ranks: HashMap<&str, (usize, u64)> = HashMap::new();
        let mut next = None;
        for (index, waiting) in self.waiting.iter().enumerate() {
            let caller: &str = &waiting.request.caller;
            let rank = *ranks.entry(caller).or_insert_with(|| {
                let turn = self.turns.get(caller).copied().unwrap_or_default();
                (running(caller), turn)
            });
            if next.is_none_or(|(least, _)| rank < least) {
                next = Some((rank, index));
            }
        }
        let (_, index) = next?;
        let next = self.waiting.remove(index)?;
        self.give_turn(&next.request.caller);
        Some(next)
    }

    fn give_turn(&mut self, caller: &Arc<str>) {
        self.latest_turn += 1;
        self.turns.insert(Arc::clone(caller), self.latest_turn);
    }

    /// Forgets requests whose callers are gone, and in the end callers of whom nothing waits.
    fn forget_gone(&mut self) {
        self.waiting.retain(|waiting| !waiting.events.is_closed());
        let waiting = self.waiting.iter();
        let callers: HashSet<&str> = waiting.map(|it| &*it.request.caller).collect();
        let oldest = self.latest_turn.saturating_sub(REMEMBERED_TURNS);
        self.turns
            .retain(|caller, turn| *turn > oldest || callers.contains(&**caller));
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
