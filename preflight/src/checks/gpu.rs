//! Whether the GPUs, their driver and their devices are fit for use.

use super::Finding;
use crate::facts::Facts;

/// Every check of this part.
pub fn checks(_: &Facts) -> Vec<Finding> {
    Vec::new()
}
