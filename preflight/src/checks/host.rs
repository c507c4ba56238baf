//! Whether the machine has what the server needs beside a GPU.

use super::Finding;
use crate::facts::Facts;

/// Every check of this part.
pub fn checks(_: &Facts) -> Vec<Finding> {
    Vec::new()
}
