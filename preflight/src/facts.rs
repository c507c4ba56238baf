//! What is known of a machine, a bundle and a configuration; plain data that can be written down and judged elsewhere.

pub mod bundle;
pub mod config;
pub mod gpu;
pub mod host;
pub mod runtime;

use serde::{Deserialize, Serialize};

/// Version of the form that facts are written in.
pub const SCHEMA_VERSION: u32 = 1;

/// What was read, or why it could not be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reading<T> {
    /// It was read.
    Known(T),
    /// It could not be read, and why.
    Unknown(String),
}

impl<T> Reading<T> {
    /// The value, when it was read.
    pub fn known(&self) -> Option<&T> {
        match self {
            Self::Known(value) => Some(value),
            Self::Unknown(_) => None,
        }
    }
}

impl<T> Default for Reading<T> {
    fn default() -> Self {
        Self::Unknown("it was not read".to_owned())
    }
}

impl<T, E: std::fmt::Display> From<Result<T, E>> for Reading<T> {
    fn from(result: Result<T, E>) -> Self {
        match result {
            Ok(value) => Self::Known(value),
            Err(error) => Self::Unknown(error.to_string()),
        }
    }
}

/// Everything that checks may look at.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Facts {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// The configuration; everything else depends on what it asks for.
    pub config: config::ConfigFacts,
    /// GPUs, their driver and what the kernel says of them.
    pub gpu: gpu::GpuFacts,
    /// ONNX Runtime, its execution providers and the libraries that they need.
    pub runtime: runtime::RuntimeFacts,
    /// The bundle.
    pub bundle: bundle::BundleFacts,
    /// The machine without its GPUs.
    pub host: host::HostFacts,
}
