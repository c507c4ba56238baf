//! When a transfer that broke is tried again, and when it is given up.

use std::time::Duration;

/// How often something is tried.
#[derive(Clone, Copy, Debug)]
pub struct Retry {
    /// Attempts in a row that bring nothing forward before it is given up.
    pub attempts: u32,
    /// Wait before the second attempt; it doubles with every further one.
    pub first_wait: Duration,
}

impl Default for Retry {
    fn default() -> Self {
        Self {
            attempts: 5,
            first_wait: Duration::from_secs(1),
        }
    }
}

/// The attempts at one transfer.
#[derive(Clone, Debug)]
pub struct Attempts {
    retry: Retry,
    failed: u32,
    reached_bytes: u64,
}

impl Attempts {
    /// None yet at a transfer of which `reached_bytes` are there already.
    pub fn new(retry: Retry, reached_bytes: u64) -> Self {
        Self {
            retry,
            failed: 0,
            reached_bytes,
        }
    }

    /// Attempts in a row that brought nothing forward.
    pub fn failed(&self) -> u32 {
        self.failed
    }

    /// One failed with `reached_bytes` there: how long to wait before the next, or `None` to give up.
    pub fn fail(&mut self, reached_bytes: u64) -> Option<Duration> {
        if reached_bytes > self.reached_bytes {
            self.reached_bytes = reached_bytes;
            self.failed = 0;
        }
        self.failed += 1;
        let factor = 2_u32.saturating_pow(self.failed - 1);
        (self.failed < self.retry.attempts).then(|| self.retry.first_wait.saturating_mul(factor))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_until_it_is_given_up_and_begin_anew_after_every_byte() {
        let second = Duration::from_secs(1);
        let retry = Retry {
            attempts: 3,
            first_wait: second,
        };
        let mut attempts = Attempts::new(retry, 10);
        for (reached_bytes, wait) in [
            (10, Some(second)),
            (9, Some(2 * second)),
            (11, Some(second)),
            (11, Some(2 * second)),
            (11, None),
        ] {
            assert_eq!(attempts.fail(reached_bytes), wait, "{attempts:?}");
        }
        assert_eq!(attempts.failed(), 3);
    }
}
