//! The operators of a draft head on CUDA devices, beside those for the CPU.
//!
//! The kernels are CUDA C++ in this directory. NVRTC compiles them for the device at hand at their first use ([`compile`]), and they are launched on the stream
//! of the session that runs the node ([`device`]); neither library is needed to build or start the server.
//! After the first run of a node, which compiles and loads, nothing is allocated and nothing waits, so a session may capture later runs into a graph.
//!
//! A device can't report a value that is out of its limits, as the operators for the CPU do: see the sources for what happens instead.
//! Shapes and attributes are checked on the host, by the same code.

pub mod block_attention;
pub mod compile;
pub mod device;
pub mod grouped_dynamic_conv;
pub mod path_selector;

#[cfg(test)]
mod emulator;
#[cfg(test)]
mod tests;

use half::{bf16, f16};
use ort::{operator::OperatorDomain, value::PrimitiveTensorElementType};

use self::{
    block_attention::CudaBlockAttention, compile::Source,
    grouped_dynamic_conv::CudaGroupedDynamicConv, path_selector::CudaPathSelector,
};
use super::element::Element;

/// ONNX Runtime's name of the execution provider.
pub const EXECUTION_PROVIDER: &str = "CUDAExecutionProvider";

/// The operators for the CPU and those for CUDA devices, for sessions that run on one.
///
/// `CachedAttention` has no form for CUDA: there a target's graph is made of standard operators.
pub fn domain() -> ort::Result<OperatorDomain> {
    super::domain()?
        .add(CudaBlockAttention::<f32>::new())?
        .add(CudaBlockAttention::<f16>::new())?
        .add(CudaBlockAttention::<bf16>::new())?
        .add(CudaGroupedDynamicConv::<f32>::new())?
        .add(CudaGroupedDynamicConv::<f16>::new())?
        .add(CudaGroupedDynamicConv::<bf16>::new())?
        .add(CudaPathSelector::<f32>::new())?
        .add(CudaPathSelector::<f16>::new())?
        .add(CudaPathSelector::<bf16>::new())
}

/// An element type that the kernels have.
pub trait CudaElement: Element + PrimitiveTensorElementType {
    /// What the names of its kernels end with.
    const SUFFIX: &str;
}

impl CudaElement for f32 {
    const SUFFIX: &str = "f32";
}

impl CudaElement for f16 {
    const SUFFIX: &str = "f16";
}

impl CudaElement for bf16 {
    const SUFFIX: &str = "bf16";
}

/// One launch of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Where the kernel is.
    pub source: Source,
    /// Its name.
    pub kernel: String,
    /// Blocks along x and y.
    pub grid: [usize; 2],
    /// Threads of a block.
    pub threads: usize,
    /// Dynamic shared memory of a block, in bytes.
    pub shared_bytes: usize,
    /// The arguments: addresses, integers, and the bits of floats.
    pub arguments: Vec<u64>,
}

/// Threads of a warp.
const WARP: usize = 32;

/// Shared memory that every device gives a block without being asked, in bytes.
const SHARED_BYTES: usize = 48 << 10;

/// Why an operator can't run on a device.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// The compiler is not there.
    #[error(
        "the library libnvrtc.so.13 cannot be loaded; it compiles the operators for the device and is part of the Python package nvidia-cuda-nvrtc 13"
    )]
    NoCompiler,
    /// The compiler refused a source.
    #[error("{source_name} does not compile for {architecture}: {log}")]
    Compile {
        /// The source.
        source_name: &'static str,
        /// The device's architecture, such as `sm_90`.
        architecture: String,
        /// What the compiler said.
        log: String,
    },
    /// The driver is not there.
    #[error("the CUDA driver library libcuda.so.1 cannot be loaded")]
    NoDriver,
    /// The thread that runs the node has no device.
    #[error("no CUDA context is current where the node runs")]
    NoContext,
    /// A call of the driver failed.
    #[error("the CUDA driver cannot {what}: {reason}")]
    Driver {
        /// What was asked of it.
        what: &'static str,
        /// Its reason.
        reason: String,
    },
    /// More than the kernels can do.
    #[error("{what} is {value}; on CUDA at most {most} is allowed")]
    Limit {
        /// What is too large.
        what: &'static str,
        /// Its value.
        value: usize,
        /// The largest that is allowed.
        most: usize,
    },
}

/// Checks a size against what the kernels can do.
fn at_most(what: &'static str, value: usize, most: usize) -> Result<(), CudaError> {
    if value > most {
        return Err(CudaError::Limit { what, value, most });
    }
    Ok(())
}
