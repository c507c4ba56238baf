//! Turns for work that a request needs before the engine is asked: how many are taken at a time, who is next, and who waits in vain.
//!
//! Callers take turns one after the other, however many requests each of them has waiting; a caller's own requests keep their order.
//! When too many wait, a caller who would still hold no more places than the one who holds most takes the place of that one's newest,
//! as in the engine's queue.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot::{self, Receiver, Sender};

/// A number of turns that callers share.
#[derive(Clone, Debug)]
pub struct Turns(Arc<Mutex<Inner>>);

#[derive(Debug)]
struct Inner {
    free: usize,
    /// The caller who is next stands first.
    callers: VecDeque<(Arc<str>, VecDeque<Sender<Turn>>)>,
}

/// A turn, over when this is dropped.
#[derive(Debug)]
pub struct Turn(Option<Turns>);

/// More wait than may, and the places are shared fairly.
#[derive(Debug, PartialEq, Eq)]
pub struct Full;

impl Turns {
    /// `count` turns at a time.
    pub fn new(count: usize) -> Self {
        Self(Arc::new(Mutex::new(Inner {
            free: count,
            callers: VecDeque::new(),
        })))
    }

    /// Lets `caller` wait for a turn; the sender is dropped when another caller takes the place.
    ///
    /// # Errors
    ///
    /// `capacity` requests wait already.
    pub fn join(&self, caller: &Arc<str>, capacity: usize) -> Result<Receiver<Turn>, Full> {
        let mut inner = self.lock();
        inner.forget_who_left();
        let waiting: usize = inner.callers.iter().map(|(_, places)| places.len()).sum();
        // With a free turn nobody waits.
        if inner.free == 0 && waiting >= capacity {
            inner.displace(caller)?;
        }
        let (sender, receiver) = oneshot::channel();
        match inner.callers.iter_mut().find(|(name, _)| name == caller) {
            Some((_, places)) => places.push_back(sender),
            None => inner.callers.push_back((caller.clone(), [sender].into())),
        }
        self.hand_out(&mut inner);
        Ok(receiver)
    }

    fn hand_out(&self, inner: &mut Inner) {
        while inner.free > 0 {
            let Some((caller, mut places)) = inner.callers.pop_front() else {
                return;
            };
            let next = places.pop_front();
            if !places.is_empty() {
                inner.callers.push_back((caller, places));
            }
            let Some(next) = next else { continue };
            match next.send(Turn(Some(self.clone()))) {
                Ok(()) => inner.free -= 1,
                // The lock is held, and the turn was never counted.
                Err(mut unwanted) => unwanted.0 = None,
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn forget_who_left(&mut self) {
        for (_, places) in &mut self.callers {
            places.retain(|sender| !sender.is_closed());
        }
        self.callers.retain(|(_, places)| !places.is_empty());
    }

    fn displace(&mut self, newcomer: &Arc<str>) -> Result<(), Full> {
        let own = self.callers.iter().find(|(name, _)| name == newcomer);
        let own = own.map_or(0, |(_, places)| places.len());
        let largest = self.callers.iter_mut().map(|(_, places)| places);
        match largest.max_by_key(|places| places.len()) {
            Some(places) if own + 2 <= places.len() => {
                places.pop_back();
                Ok(())
            }
            _ => Err(Full),
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(turns) = self.0.take() {
            let mut inner = turns.lock();
            inner.free += 1;
            turns.hand_out(&mut inner);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(name: &str) -> Arc<str> {
        name.into()
    }

    #[test]
    fn callers_take_turns_however_many_requests_each_has_waiting() {
        let turns = Turns::new(1);
        let held = turns.join(&caller("flood"), 9).unwrap().try_recv().unwrap();
        let mut waiting: Vec<_> = ["flood", "flood", "flood", "other", "third"]
            .map(|name| (name, turns.join(&caller(name), 9).unwrap()))
            .into();
        let mut order = Vec::new();
        let mut turn = Some(held);
        while turn.take().is_some() {
            for (name, receiver) in &mut waiting {
                if let Ok(next) = receiver.try_recv() {
                    order.push(*name);
                    turn = Some(next);
                }
            }
        }
        assert_eq!(order, ["flood", "other", "third", "flood", "flood"]);
    }

    #[test]
    fn who_has_left_gets_no_turn_and_holds_no_place() {
        let turns = Turns::new(1);
        let held = turns.join(&caller("a"), 1).unwrap().try_recv().unwrap();
        drop(turns.join(&caller("a"), 1).unwrap());
        let mut waiting = turns.join(&caller("a"), 1).unwrap();
        assert_eq!(turns.join(&caller("a"), 1).unwrap_err(), Full);
        drop(held);
        let got = waiting.try_recv().unwrap();
        let left_late = turns.join(&caller("b"), 1).unwrap();
        drop(got);
        // It was handed over, and nobody took it.
        drop(left_late);
        assert!(turns.join(&caller("c"), 1).unwrap().try_recv().is_ok());
    }

    #[test]
    fn a_full_house_makes_room_for_a_caller_with_a_smaller_share() {
        let turns = Turns::new(1);
        let held = turns.join(&caller("flood"), 2).unwrap().try_recv().unwrap();
        let mut first = turns.join(&caller("flood"), 2).unwrap();
        let mut newest = turns.join(&caller("flood"), 2).unwrap();
        assert_eq!(turns.join(&caller("flood"), 2).unwrap_err(), Full);
        let mut other = turns.join(&caller("other"), 2).unwrap();
        assert_eq!(
            newest.try_recv().unwrap_err(),
            oneshot::error::TryRecvError::Closed
        );
        assert_eq!(turns.join(&caller("other"), 2).unwrap_err(), Full);
        drop(held);
        drop(first.try_recv().unwrap());
        assert!(other.try_recv().is_ok());
    }
}
