//! Whether ONNX Runtime and the libraries of its provider can be loaded.

use super::Finding;
use crate::facts::Facts;

/// Every check of this part.
pub fn checks(_: &Facts) -> Vec<Finding> {
    Vec::new()
}
