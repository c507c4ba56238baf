//! ONNX Runtime and the libraries that it loads.

use serde::{Deserialize, Serialize};

/// ONNX Runtime and the libraries that it loads.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RuntimeFacts {}
