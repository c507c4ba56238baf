//! Reads the facts of GPUs.
//!
//! Nothing here writes to a device or changes a setting.
//! NVML may block for good on a sick device, so [`reader`] asks it in a process of its own; what the kernel shows as files ([`kernel`], [`log`], [`fabric`])
//! and what lies on disk ([`cdi`]) is read in this one.

mod cdi;
mod fabric;
mod kernel;
mod log;
mod nvml;
mod reader;
#[cfg(test)]
mod tests;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::elf::Search;
use crate::facts::gpu::{Environment, GpuFacts, Libcuda};
pub use reader::{ReaderArgs, tell};

/// What to read and how long to wait for it.
#[derive(Clone, Debug)]
pub struct Options {
    /// NVML: a path, or a name that the loader resolves.
    pub nvml_library: PathBuf,
    /// The `outrider-preflight` executable, a child of which asks NVML.
    pub program: PathBuf,
    /// Longest wait for one call of NVML.
    pub call_limit: Duration,
    /// Longest wait for all of NVML.
    pub total_limit: Duration,
    /// Samples of utilisation, one every tenth of a second.
    pub utilisation_samples: u32,
}

impl Options {
    /// The name of NVML's library, limits that a healthy machine keeps far from, and one second of utilisation.
    pub fn new(program: PathBuf) -> Self {
        Self {
            nvml_library: PathBuf::from("libnvidia-ml.so.1"),
            program,
            // A driver without persistence mode sets every device up for the first call, seconds for each.
            call_limit: Duration::from_secs(20),
            total_limit: Duration::from_secs(60),
            utilisation_samples: 10,
        }
    }
}

/// Reads everything about the GPUs of this machine.
pub fn collect(options: &Options) -> GpuFacts {
    let root = Path::new("/");
    GpuFacts {
        nvml: reader::read(options),
        kernel_module: kernel::module_version(root).into(),
        nouveau_loaded: kernel::nouveau_loaded(root).into(),
        pci_functions: kernel::pci_functions(root).into(),
        device_nodes: kernel::device_nodes(root).into(),
        container: kernel::container(root),
        environment: environment(),
        cdi_specs: cdi::specs(root).into(),
        libcuda: libcuda(&Search::of_machine()).into(),
        kernel_log: log::read(root).into(),
        fabric_manager: fabric::manager(root),
    }
}

fn environment() -> Environment {
    let text = |name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    Environment {
        cuda_visible_devices: text("CUDA_VISIBLE_DEVICES"),
        cuda_device_order: text("CUDA_DEVICE_ORDER"),
        nvidia_visible_devices: text("NVIDIA_VISIBLE_DEVICES"),
    }
}

/// The driver's library that a program gets which asks for it by name, with the release that the name of its file ends with.
fn libcuda(search: &Search) -> io::Result<Option<Libcuda>> {
    let Some(path) = search.by_name("libcuda.so.1") else {
        return Ok(None);
    };
    let file = path.canonicalize()?;
    let version = file
        .file_name()
        .and_then(|name| name.to_str()?.strip_prefix("libcuda.so."))
        .filter(|version| kernel::is_release(version))
        .map(str::to_owned);
    Ok(Some(Libcuda {
        path,
        file,
        version,
    }))
}
