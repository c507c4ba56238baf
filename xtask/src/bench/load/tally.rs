//! Sums over the requests of one side of a round.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use anyhow::Context;
use hdrhistogram::Histogram;

use super::exchange::Answered;

/// Significant digits of a latency.
const DIGITS: u8 = 3;
/// The unit of times in `/proc`, fixed by the kernel's interface.
const TICKS_PER_SECOND: f64 = 100.0;

/// What was counted and measured; latencies in microseconds.
#[derive(Clone, Debug)]
pub struct Tally {
    /// Requests sent, each counted once.
    pub requests: u64,
    /// How often the server had no room.
    pub no_room: u64,
    /// Requests without an answer, by code.
    pub errors: BTreeMap<String, u64>,
    /// Tokens of all answers.
    pub tokens: u64,
    /// From the first request sent to the last answer, on the server's clock.
    pub running_seconds: f64,
    /// From request to first token, of streams.
    pub first_token_us: Histogram<u64>,
    /// Between one event with tokens and the next, of streams.
    pub gap_us: Histogram<u64>,
}

impl Tally {
    /// Nothing yet.
    pub fn new() -> Self {
        let histogram = || Histogram::new(DIGITS).expect("hdrhistogram has three digits");
        Self {
            requests: 0,
            no_room: 0,
            errors: BTreeMap::new(),
            tokens: 0,
            running_seconds: 0.0,
            first_token_us: histogram(),
            gap_us: histogram(),
        }
    }

    /// Throughput of the round.
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.running_seconds
    }

    /// Counts an answer.
    pub fn answered(&mut self, answered: &Answered) {
        self.tokens += answered.tokens;
        if let Some(first) = answered.first_token {
            self.first_token_us += microseconds(first);
        }
        for &gap in &answered.gaps {
            self.gap_us += microseconds(gap);
        }
    }

    /// Counts a request without an answer.
    pub fn failed(&mut self, code: String) {
        *self.errors.entry(code).or_default() += 1;
    }

    /// Adds what another client, or another round, counted.
    pub fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.no_room += other.no_room;
        for (code, count) in &other.errors {
            *self.errors.entry(code.clone()).or_default() += count;
        }
        self.tokens += other.tokens;
        self.running_seconds += other.running_seconds;
        self.first_token_us += &other.first_token_us;
        self.gap_us += &other.gap_us;
    }
}

fn microseconds(time: Duration) -> u64 {
    time.as_micros().try_into().unwrap_or(u64::MAX)
}

/// Processor time of this process so far.
pub fn client_cpu() -> anyhow::Result<Duration> {
    let text = fs::read_to_string("/proc/self/stat").context("cannot read /proc/self/stat")?;
    cpu_time(&text).with_context(|| format!("/proc/self/stat is {text:?}"))
}

/// User and system time, the 14th and 15th field; the second field is a name in brackets that may hold anything.
fn cpu_time(stat: &str) -> Option<Duration> {
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<f64>().ok();
    Some(Duration::from_secs_f64(
        (ticks()? + ticks()?) / TICKS_PER_SECOND,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_is_read_past_any_name() {
        let stat = "7 (a ) b) S 1 7 7 0 -1 4194304 100 0 0 0 250 50 0 0 20 0 1 0 100 1000 10";
        assert_eq!(cpu_time(stat), Some(Duration::from_secs(3)));
        assert_eq!(cpu_time("7 (a) S 1"), None);
        assert!(client_cpu().is_ok());
    }
}
