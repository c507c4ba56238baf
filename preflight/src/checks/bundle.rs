//! Whether the bundle is whole, fits together, and how lossless it can be.

use super::Finding;
use crate::facts::Facts;

/// Every check of this part.
pub fn checks(_: &Facts) -> Vec<Finding> {
    Vec::new()
}
