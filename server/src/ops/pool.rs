//! Where the independent parts of a call run.

use super::error::OperatorError;

/// Runs independent tasks, in any order, on any threads.
pub trait Pool {
    /// Calls `task` once with every number below `tasks` and returns when all calls have returned.
    fn for_each(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) -> Result<(), OperatorError>;
}
