//! Requests in flight: a fixed number of threads that take tasks in order.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::service::CouldNotRun;

/// Does `work` for 0 to `count`, `concurrency` at a time, and gives the results in order. The first error ends it.
pub fn map<T: Send + Sync>(
    count: usize,
    concurrency: usize,
    work: impl Fn(usize) -> Result<T, CouldNotRun> + Sync,
) -> Result<Vec<T>, CouldNotRun> {
    let results: Vec<OnceLock<T>> = (0..count).map(|_| OnceLock::new()).collect();
    let next = AtomicUsize::new(0);
    let stopped = AtomicBool::new(false);
    let error = Mutex::new(None);
    let take = || {
        while !stopped.load(Ordering::Relaxed) {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(slot) = results.get(index) else {
                return;
            };
            match work(index) {
                Ok(result) => {
                    // Each index is taken once.
                    let _ = slot.set(result);
                }
                Err(failure) => {
                    stopped.store(true, Ordering::Relaxed);
                    let mut error = error.lock().unwrap_or_else(PoisonError::into_inner);
                    error.get_or_insert(failure);
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..concurrency.min(count) {
            scope.spawn(take);
        }
    });
    match error.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => Ok(results
            .into_iter()
            .filter_map(OnceLock::into_inner)
            .collect()),
    }
}
