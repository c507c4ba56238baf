//! The time by which the engine's limits are measured, so that tests can let it pass.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

/// Tells what time it is. Requests carry times of the same clock.
#[derive(Clone)]
pub struct Clock(Arc<dyn Fn() -> Instant + Send + Sync>);

impl Clock {
    /// A clock that shows what `now` returns.
    pub fn new(now: impl Fn() -> Instant + Send + Sync + 'static) -> Self {
        Self(Arc::new(now))
    }

    /// The time.
    pub fn now(&self) -> Instant {
        (self.0)()
    }
}

/// The system's clock.
impl Default for Clock {
    fn default() -> Self {
        Self::new(Instant::now)
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Clock")
    }
}
