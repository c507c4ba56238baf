//! Two servers that run in turn, and a clock for each that stands still while it is the other's turn.
//!
//! The speed of a shared machine changes within a second by more than what is to be measured, so sides that are measured one after the other meet
//! two machines. Here the one whose turn it is not is stopped by a signal, its clients waiting, and the turns are far shorter than those changes.
//! A step that is stopped in its middle looks long to its server: at most one in each turn, to both servers alike.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::server_process::Signaller;

/// How long a server runs before the other one does.
const TURN: Duration = Duration::from_millis(300);

/// Who runs, and for how long each has.
#[derive(Debug)]
pub struct Turns {
    servers: [Signaller; 2],
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    running: usize,
    since: Instant,
    ran: [Duration; 2],
    finished: [bool; 2],
}

impl Turns {
    /// Begins with the turn of server `first`, 0 or 1.
    ///
    /// # Errors
    ///
    /// A server can't be signalled, because it is gone.
    pub fn begin(servers: [Signaller; 2], first: usize) -> anyhow::Result<Self> {
        let turns = Self {
            servers,
            state: Mutex::new(State {
                running: first,
                since: Instant::now(),
                ran: [Duration::ZERO; 2],
                finished: [false; 2],
            }),
            changed: Condvar::new(),
        };
        servers[1 - first].send(Signal::SIGSTOP)?;
        Ok(turns)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every change is a few assignments, so a panic elsewhere leaves it whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The clock of a server: how long it has run since the beginning.
    pub fn ran(&self, server: usize) -> Duration {
        let state = self.state();
        let now = if state.running == server {
            state.since.elapsed()
        } else {
            Duration::ZERO
        };
        state.ran[server] + now
    }

    /// Nothing more is asked of a server; the other one keeps the turn from here on.
    pub fn finish(&self, server: usize) {
        self.state().finished[server] = true;
        self.changed.notify_all();
    }

    /// Passes the turn on until both have finished.
    ///
    /// # Errors
    ///
    /// A server can't be signalled, because it is gone.
    pub fn alternate(&self) -> anyhow::Result<()> {
        let passed = self.pass_on();
        if passed.is_err() {
            // What still waits for an answer is not to wait for ever.
            self.wake();
        }
        passed
    }

    /// Lets both run.
    fn wake(&self) {
        for server in self.servers {
            // One that is gone needs no turn.
            let _ = server.send(Signal::SIGCONT);
        }
    }

    fn pass_on(&self) -> anyhow::Result<()> {
        let mut state = self.state();
        loop {
            let left = TURN.saturating_sub(state.since.elapsed());
            (state, _) = self
                .changed
                .wait_timeout_while(state, left, |state| !state.finished[state.running])
                .unwrap_or_else(PoisonError::into_inner);
            let other = 1 - state.running;
            match (state.finished[state.running], state.finished[other]) {
                (true, true) => return Ok(()),
                (false, true) => {
                    state = self
                        .changed
                        .wait_while(state, |state| !state.finished[state.running])
                        .unwrap_or_else(PoisonError::into_inner);
                }
                (_, false) => {
                    let running = state.running;
                    self.servers[running].send(Signal::SIGSTOP)?;
                    let now = Instant::now();
                    let turn = now - state.since;
                    state.ran[running] += turn;
                    (state.running, state.since) = (other, now);
                    self.servers[other].send(Signal::SIGCONT)?;
                }
            }
        }
    }
}

impl Drop for Turns {
    fn drop(&mut self) {
        self.wake();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::process::{Child, Command};
    use std::thread;

    struct Killed(Child);

    impl Drop for Killed {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    fn is_stopped(process: &Killed) -> bool {
        let stat = fs::read_to_string(format!("/proc/{}/stat", process.0.id())).unwrap();
        stat.rsplit_once(") ").unwrap().1.starts_with('T')
    }

    fn wait_until(holds: impl Fn() -> bool) {
        while !holds() {
            thread::yield_now();
        }
    }

    #[test]
    fn one_runs_while_the_other_and_its_clock_stand_still_until_one_has_finished() {
        let processes = [0, 1].map(|_| {
            let child = Command::new("sleep").arg("600").spawn();
            Killed(child.unwrap())
        });
        let servers = [0, 1].map(|server: usize| Signaller::of(&processes[server].0));
        let turns = Turns::begin(servers, 1).unwrap();
        wait_until(|| is_stopped(&processes[0]));
        assert_eq!(turns.ran(0), Duration::ZERO);
        thread::scope(|scope| {
            let alternation = scope.spawn(|| turns.alternate());
            wait_until(|| is_stopped(&processes[1]));
            wait_until(|| turns.ran(0) > Duration::ZERO);
            assert!(turns.ran(1) >= TURN);
            turns.finish(1);
            wait_until(|| turns.ran(0) > 2 * TURN);
            assert!(is_stopped(&processes[1]) && !is_stopped(&processes[0]));
            turns.finish(0);
            alternation.join().unwrap().unwrap();
        });
        drop(turns);
        wait_until(|| !is_stopped(&processes[1]));
    }
}
