//! Reads the facts of this machine.

mod bundle;
pub mod child;
mod config;
mod elf;
pub mod gpu;
mod host;
mod live;
mod permission;
pub mod probe;
mod runtime;

use std::path::{Path, PathBuf};
use std::time::Duration;

use outrider_server::config::Sources;

use crate::facts::config::ExecutionProvider;
use crate::facts::gpu::GpuFacts;
use crate::facts::{Facts, SCHEMA_VERSION};

/// A file system that does not answer for this long is a fault, and so is a pipe that nobody writes to.
const FILE_LIMIT: Duration = Duration::from_secs(5);

/// What facts are read of.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Where the configuration is.
    pub sources: Sources,
    /// User that the server will run as; `None` is the user of this process.
    pub user_id: Option<u32>,
    /// Whether files of the bundle are only measured, and not hashed.
    pub quick: bool,
    /// The `outrider-preflight` executable: what can block or crash is read by a child of it.
    pub program: PathBuf,
    /// NVIDIA's management library, where it is not the one that the loader finds.
    pub nvml_library: Option<PathBuf>,
}

impl Options {
    fn gpu(&self) -> gpu::Options {
        let options = gpu::Options::new(self.program.clone());
        match &self.nvml_library {
            Some(nvml_library) => gpu::Options {
                nvml_library: nvml_library.clone(),
                ..options
            },
            None => options,
        }
    }
}

/// Reads every fact.
pub fn collect(options: &Options) -> Facts {
    let config = config::collect(&options.sources);
    let bundle = match &config.settings {
        Some(settings) => bundle::collect(Path::new(&settings.bundle), options.quick),
        None => Default::default(),
    };
    Facts {
        schema_version: SCHEMA_VERSION,
        gpu: match config.execution_provider {
            ExecutionProvider::Cpu => {
                GpuFacts::not_read("serving.runtime.execution_provider is cpu")
            }
            ExecutionProvider::Cuda => gpu::collect(&options.gpu()),
        },
        runtime: runtime::collect(&config, &options.program),
        host: host::collect(&config, &bundle.manifest, options.user_id),
        bundle,
        config,
    }
}
