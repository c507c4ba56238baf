//! Launching kernels on the device of a running session.

use std::{
    collections::{BTreeMap, HashMap},
    ffi::{CString, c_void},
    ptr::NonNull,
    sync::{Mutex, OnceLock},
};

use cudarc::driver::{result, sys};
use ort::operator::ComputeContext;

use super::{
    CudaError, Launch,
    compile::{Source, compile},
};

/// The stream of a session.
#[derive(Clone, Copy, Debug)]
pub struct Stream(NonNull<c_void>);

impl Stream {
    /// The stream that a node runs on.
    pub fn of(context: &ComputeContext) -> ort::Result<Self> {
        let stream = context.stream()?;
        stream
            .map(Self)
            .ok_or_else(|| ort::Error::new("the session has no CUDA stream"))
    }

    fn raw(self) -> sys::CUstream {
        self.0.as_ptr().cast()
    }

    /// Launches kernels, one after the other; returns before they have run.
    ///
    /// # Safety
    /// The arguments are what the kernels expect, and memory they name is valid until the stream has come to its end.
    pub unsafe fn launch(self, launches: &[Launch]) -> Result<(), CudaError> {
        for launch in launches {
            if launch.grid.contains(&0) {
                continue;
            }
            let function = function(launch.source, &launch.kernel)?;
            let mut arguments: Vec<*mut c_void> = launch
                .arguments
                .iter()
                .map(|argument| std::ptr::from_ref(argument).cast_mut().cast())
                .collect();
            let [grid_x, grid_y] = launch.grid.map(|blocks| blocks as u32);
            // SAFETY: the function belongs to a module that is never unloaded; the caller vouches for the arguments, which the driver copies now.
            unsafe {
                result::launch_kernel(
                    function.0,
                    (grid_x, grid_y, 1),
                    (launch.threads as u32, 1, 1),
                    launch.shared_bytes as u32,
                    self.raw(),
                    &mut arguments,
                )
            }
            .map_err(|error| driver("launch a kernel", error))?;
        }
        Ok(())
    }

    /// Copies device memory to other device memory, in the order of the stream.
    ///
    /// # Safety
    /// Both are device memory of this many bytes, apart from each other, and valid until the stream has come to its end.
    pub unsafe fn copy(self, to: usize, from: usize, bytes: usize) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's.
        unsafe { result::memcpy_dtod_async(to as u64, from as u64, bytes, self.raw()) }
            .map_err(|error| driver("copy memory", error))
    }
}

fn driver(what: &'static str, error: result::DriverError) -> CudaError {
    CudaError::Driver {
        what,
        reason: error.to_string(),
    }
}

/// A loaded kernel.
#[derive(Clone, Copy)]
struct Function(sys::CUfunction);

// SAFETY: a handle that any thread may use.
unsafe impl Send for Function {}

/// A module that is never unloaded.
#[derive(Clone, Copy)]
struct Module(sys::CUmodule);

// SAFETY: a handle that any thread may use.
unsafe impl Send for Module {}

/// What has been compiled and loaded for one context.
#[derive(Default)]
struct Loaded {
    modules: HashMap<Source, Module>,
    functions: HashMap<String, Function>,
}

/// A kernel in the current context; compiled and loaded at the first call.
fn function(source: Source, kernel: &str) -> Result<Function, CudaError> {
    /// By the address of the context.
    static LOADED: Mutex<BTreeMap<usize, Loaded>> = Mutex::new(BTreeMap::new());
    static HAS_DRIVER: OnceLock<bool> = OnceLock::new();
    // SAFETY: looking for a library; nothing of it is called.
    if !HAS_DRIVER.get_or_init(|| unsafe { sys::is_culib_present() }) {
        return Err(CudaError::NoDriver);
    }
    let context = result::ctx::get_current()
        .map_err(|error| driver("name the current context", error))?
        .ok_or(CudaError::NoContext)?;
    let mut loaded = LOADED
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    let loaded = loaded.entry(context as usize).or_default();
    if let Some(function) = loaded.functions.get(kernel) {
        return Ok(*function);
    }
    let module = match loaded.modules.get(&source) {
        Some(module) => *module,
        None => {
            let code = compile(source, &architecture()?)?;
            // SAFETY: the code is what the compiler made for this device.
            let module = unsafe { result::module::load_data(code.as_ptr().cast()) }
                .map_err(|error| driver("load a module", error))?;
            loaded.modules.insert(source, Module(module));
            Module(module)
        }
    };
    let name = CString::new(kernel).map_err(|_| CudaError::Driver {
        what: "find a kernel",
        reason: format!("{kernel:?} is no name"),
    })?;
    // SAFETY: the module is loaded and stays so.
    let function = unsafe { result::module::get_function(module.0, name) }
        .map_err(|error| driver("find a kernel", error))?;
    loaded
        .functions
        .insert(kernel.to_owned(), Function(function));
    Ok(Function(function))
}

/// The architecture of the current device, as the compiler names it.
fn architecture() -> Result<String, CudaError> {
    use sys::CUdevice_attribute_enum::{
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
    };
    let mut device = 0;
    // SAFETY: a context is current, and the device is the one it belongs to.
    let version = unsafe {
        sys::cuCtxGetDevice(&mut device).result().and_then(|()| {
            Ok([
                result::device::get_attribute(device, MAJOR)?,
                result::device::get_attribute(device, MINOR)?,
            ])
        })
    };
    let [major, minor] = version.map_err(|error| driver("describe the device", error))?;
    Ok(format!("sm_{major}{minor}"))
}
