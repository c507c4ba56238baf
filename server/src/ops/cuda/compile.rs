//! Compiling the sources with NVRTC; no device is needed.

use std::ffi::{CStr, CString};

use cudarc::nvrtc::{result, sys};

use super::CudaError;

/// A source with kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// `block_attention.cu`.
    BlockAttention,
    /// `grouped_dynamic_conv.cu`.
    GroupedDynamicConv,
    /// `path_selector.cu`.
    PathSelector,
}

const COMMON: &str = include_str!("common.cuh");

impl Source {
    /// All of them.
    pub const ALL: [Self; 3] = [
        Self::BlockAttention,
        Self::GroupedDynamicConv,
        Self::PathSelector,
    ];

    /// The name of the file.
    pub fn name(self) -> &'static str {
        match self {
            Self::BlockAttention => "block_attention.cu",
            Self::GroupedDynamicConv => "grouped_dynamic_conv.cu",
            Self::PathSelector => "path_selector.cu",
        }
    }

    /// The whole text, with what all sources share.
    pub fn text(self) -> String {
        let own = match self {
            Self::BlockAttention => include_str!("block_attention.cu"),
            Self::GroupedDynamicConv => include_str!("grouped_dynamic_conv.cu"),
            Self::PathSelector => include_str!("path_selector.cu"),
        };
        format!("{COMMON}#line 1 \"{}\"\n{own}", self.name())
    }
}

/// Compiles a source to machine code for an architecture, such as `sm_90`.
pub fn compile(source: Source, architecture: &str) -> Result<Vec<u8>, CudaError> {
    // SAFETY: looking for a library; nothing of it is called.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoCompiler);
    }
    let failed = |log: String| CudaError::Compile {
        source_name: source.name(),
        architecture: architecture.to_owned(),
        log,
    };
    let text = CString::new(source.text()).map_err(|error| failed(error.to_string()))?;
    let name = CString::new(source.name()).map_err(|error| failed(error.to_string()))?;
    let program = Program(
        result::create_program(&text, Some(&name)).map_err(|error| failed(error.to_string()))?,
    );
    let options = [
        format!("--gpu-architecture={architecture}"),
        "--std=c++17".to_owned(),
    ];
    // SAFETY: the program exists until the end of this function, and so do its text and name.
    unsafe {
        if let Err(error) = result::compile_program(program.0, &options) {
            let log = result::get_program_log(program.0)
                .map(|log| CStr::from_ptr(log.as_ptr()).to_string_lossy().into_owned());
            return Err(failed(log.unwrap_or_else(|_| error.to_string())));
        }
        let mut size = 0;
        sys::nvrtcGetCUBINSize(program.0, &mut size)
            .result()
            .map_err(|error| failed(error.to_string()))?;
        let mut code = vec![0_u8; size];
        sys::nvrtcGetCUBIN(program.0, code.as_mut_ptr().cast())
            .result()
            .map_err(|error| failed(error.to_string()))?;
        Ok(code)
    }
}

/// A program of the compiler.
struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made by `create_program` and destroyed here only. A failure leaks a little memory.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}
