//! The date: what is kept must mean the same after a restart of the machine, so it is told in milliseconds since 1970.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Time since 1970; 0 on a machine that believes to be before that.
#[expect(
    clippy::disallowed_methods,
    reason = "a bake time outlives the process, and the journal tells the date"
)]
pub fn since_1970() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}

/// Milliseconds since 1970.
pub fn now_ms() -> u64 {
    since_1970().as_millis() as u64
}
