//! Whether the server would take the configuration, and what it would regret.

use super::Finding;
use crate::facts::Facts;

/// Every check of this part.
pub fn checks(_: &Facts) -> Vec<Finding> {
    Vec::new()
}
