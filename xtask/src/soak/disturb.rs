//! What operators do meanwhile: drafting switched off and on, files read again.

use std::thread;
use std::time::Duration;

use nix::sys::signal::Signal;
use serde::Serialize;

use super::Run;
use crate::random::Random;

/// Shortest time between two disturbances, in milliseconds, and what is drawn on top of it.
const PAUSE_MS: [usize; 2] = [500, 3000];

/// How often what was done.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Disturbances {
    /// Drafting was switched.
    pub switched: u64,
    /// The process was told to read its files again.
    pub reloads: u64,
    /// What of this failed, in words.
    pub failed: Vec<String>,
}

/// The operator of a run.
pub struct Disturber<'a> {
    run: &'a Run,
    random: Random,
    done: Disturbances,
}

impl<'a> Disturber<'a> {
    /// An operator who draws from `seed`.
    pub fn new(run: &'a Run, seed: u64) -> Self {
        Self {
            run,
            random: Random::new(!seed),
            done: Disturbances::default(),
        }
    }

    /// Disturbs until the run is over; drafting is on in the end.
    pub fn disturb_until_over(mut self) -> Disturbances {
        let mut enabled = true;
        while !self.run.is_over() {
            let [least, range] = PAUSE_MS;
            let pause = least + self.random.below(range);
            thread::sleep(Duration::from_millis(pause as u64));
            match self.random.below(3) {
                0 => self.reload(),
                _ => {
                    enabled = !enabled;
                    self.switch(enabled);
                }
            }
        }
        if !enabled {
            self.switch(true);
        }
        self.done
    }

    fn switch(&mut self, enabled: bool) {
        match self.run.session.set_speculation(enabled) {
            Ok(()) => self.done.switched += 1,
            Err(error) => self.done.failed.push(format!("{error:#}")),
        }
    }

    fn reload(&mut self) {
        match self.run.session.process().signaller().send(Signal::SIGHUP) {
            Ok(()) => self.done.reloads += 1,
            Err(error) => self.done.failed.push(format!("{error:#}")),
        }
    }
}
