//! A round: the same requests for both servers, from clients that send the next one when they have an answer.

use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use outrider_verify::client::Client;

use super::STUCK;
use super::exchange::{Outcome, send};
use super::tally::Tally;
use super::turns::Turns;
use crate::traffic::Traffic;

/// A client that waits needs next to nothing.
const STACK_BYTES: usize = 512 << 10;

/// Who calls one of the servers, and for what.
pub struct Callers<'a> {
    /// Sends to the server.
    pub client: Client,
    /// The model's name in requests.
    pub model: &'a str,
    /// What is asked.
    pub traffic: &'a Traffic,
}

/// How a server is called in a round.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Clients at once.
    pub clients: usize,
    /// Whether answers are drafted.
    pub drafting: bool,
}

impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let drafting = if self.drafting { "on" } else { "off" };
        write!(f, "{} clients with drafting {drafting}", self.clients)
    }
}

/// The requests of a round, which both servers get.
pub struct Course {
    /// Number of the first one.
    first: u64,
    /// How long it goes on, by the clock of the server that gets there first.
    limit: Duration,
    progress: Mutex<Progress>,
}

#[derive(Default)]
struct Progress {
    /// Requests sent to each server.
    sent: [u64; 2],
    /// How many there are, once the time is up.
    requests: Option<u64>,
}

impl Course {
    /// Requests from number `first` on.
    pub fn new(first: u64, limit: Duration) -> Self {
        Self {
            first,
            limit,
            progress: Mutex::default(),
        }
    }

    /// The next request for a server whose clock shows `ran`; `None` when it got as many as the other one will have.
    fn take(&self, server: usize, ran: Duration) -> Option<u64> {
        let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        let Progress { sent, requests } = &mut *progress;
        if requests.is_none() && ran >= self.limit {
            *requests = Some(sent[0].max(sent[1]));
        }
        if requests.is_some_and(|requests| sent[server] >= requests) {
            return None;
        }
        sent[server] += 1;
        Some(self.first + sent[server] - 1)
    }

    /// Asks both servers and gives what each answered.
    ///
    /// # Errors
    ///
    /// A server is gone.
    pub fn run(
        &self,
        callers: &[Callers; 2],
        loads: [Load; 2],
        turns: &Turns,
    ) -> anyhow::Result<[Tally; 2]> {
        thread::scope(|scope| {
            let running = [0, 1].map(|server: usize| {
                let (callers, load) = (&callers[server], loads[server]);
                spawn(scope, move || {
                    let _finish = Finish { turns, server };
                    let clock = || turns.ran(server);
                    let client = || {
                        let mut tally = Tally::new();
                        while let Some(number) = self.take(server, clock()) {
                            callers.answer(number, load.drafting, &clock, &mut tally);
                        }
                        tally
                    };
                    let mut all = thread::scope(|scope| {
                        let clients: Vec<_> =
                            (0..load.clients).map(|_| spawn(scope, client)).collect();
                        let mut all = Tally::new();
                        for client in clients {
                            all.add(&client.join().expect("a client does not panic"));
                        }
                        all
                    });
                    all.running_seconds = clock().as_secs_f64();
                    all
                })
            });
            turns.alternate()?;
            Ok(running.map(|side| side.join().expect("a side does not panic")))
        })
    }
}

/// Gives the other server all turns when dropped.
struct Finish<'a> {
    turns: &'a Turns,
    server: usize,
}

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        self.turns.finish(self.server);
    }
}

fn spawn<'scope, T: Send + 'scope>(
    scope: &'scope thread::Scope<'scope, '_>,
    run: impl FnOnce() -> T + Send + 'scope,
) -> thread::ScopedJoinHandle<'scope, T> {
    thread::Builder::new()
        .stack_size(STACK_BYTES)
        .spawn_scoped(scope, run)
        .expect("a thread can be started")
}

impl Callers<'_> {
    /// Sends one request until there is room for it.
    pub fn answer(
        &self,
        number: u64,
        drafting: bool,
        clock: &dyn Fn() -> Duration,
        tally: &mut Tally,
    ) {
        let planned = self.traffic.request(number);
        tally.requests += 1;
        let began = Instant::now();
        loop {
            match send(&self.client, self.model, &planned, drafting, clock) {
                Outcome::Answered(answered) => return tally.answered(&answered),
                Outcome::NoRoom { after } if began.elapsed() < STUCK => {
                    tally.no_room += 1;
                    thread::sleep(after);
                }
                Outcome::NoRoom { .. } => return tally.failed("never_room".to_owned()),
                Outcome::Failed(code) => return tally.failed(code),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_servers_get_the_same_requests() {
        let second = Duration::from_secs(1);
        let course = Course::new(10, 5 * second);
        assert_eq!(course.take(0, second), Some(10));
        assert_eq!(course.take(1, second), Some(10));
        assert_eq!(course.take(0, 2 * second), Some(11));
        assert_eq!(course.take(0, 4 * second), Some(12));
        assert_eq!(course.take(1, 5 * second), Some(11), "the time is up here");
        assert_eq!(course.take(0, 4 * second), None, "and so it is there");
        assert_eq!(course.take(1, 6 * second), Some(12));
        assert_eq!(course.take(1, 6 * second), None);
    }
}
