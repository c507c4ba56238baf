//! The configuration: what the server would refuse, and what it asks of the machine.

use serde::{Deserialize, Serialize};

/// The configuration: what the server would refuse, and what it asks of the machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ConfigFacts {
    /// Where the model is to run; [`ExecutionProvider::Cpu`] when the configuration could not be read, which is a failure by itself.
    pub execution_provider: ExecutionProvider,
    /// Number of the CUDA device that the model is to run on, as CUDA counts them.
    pub device_id: u32,
}

/// Where a model runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExecutionProvider {
    /// The CPU provider of ONNX Runtime.
    #[default]
    Cpu,
    /// The CUDA provider of ONNX Runtime.
    Cuda,
}
