//! GPUs as NVML, the kernel and device nodes show them.

use serde::{Deserialize, Serialize};

/// GPUs as NVML, the kernel and device nodes show them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GpuFacts {}
