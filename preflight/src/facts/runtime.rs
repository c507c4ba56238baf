//! ONNX Runtime and the libraries that it loads.

use serde::{Deserialize, Serialize};

use super::Reading;

/// ONNX Runtime and the libraries that it loads.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RuntimeFacts {
    /// The ONNX Runtime library.
    pub library: Reading<Library>,
    /// Oldest version that the server takes, as major and minor.
    pub minimum_version: (u32, u32),
    /// The library of the CUDA provider, where the model is to run on it.
    pub cuda_provider: Option<Reading<Library>>,
    /// A session on the configured provider, without fallback to the CPU.
    pub probe: Reading<Probe>,
    /// What the processor offers.
    pub processor: Reading<Processor>,
}

/// A shared library, as its file says.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Library {
    /// The path that it was asked for by.
    pub path: String,
    /// The file that this leads to.
    pub real_path: String,
    /// Size of the file.
    pub size_bytes: u64,
    /// Architecture that it was built for, spelled as Rust does.
    pub arch: String,
    /// Its own version, where it gives one.
    pub version: Option<String>,
    /// Highest version of the C library that it asks for.
    pub c_library_version: Option<String>,
    /// Directories of its own that libraries are looked for in.
    pub run_paths: Vec<String>,
    /// Libraries that it needs, and those that they need.
    pub needed: Vec<Needed>,
}

/// A library that another one needs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Needed {
    /// Its name.
    pub name: String,
    /// The library that needs it.
    pub by: String,
    /// The file that the loader would take; `None` when there is none.
    pub found: Option<String>,
    /// The file that this leads to, whose name has the whole version.
    pub real_path: Option<String>,
    /// Whether it is loaded when it is first used, and not named in the file.
    pub at_run_time: bool,
}

impl Library {
    /// The CUDA major version that it was built for, by the names of the libraries that it needs.
    pub fn cuda_major(&self) -> Option<u32> {
        ["libcudart.so.", "libcublas.so.", "libcublasLt.so."]
            .iter()
            .find_map(|prefix| {
                let mut names = self.needed.iter().map(|needed| needed.name.as_str());
                names.find_map(|name| name.strip_prefix(prefix)?.parse().ok())
            })
    }

    /// The CUDA minor version that it will run with, where the name of the runtime library's file tells it.
    pub fn cuda_minor(&self) -> Option<u32> {
        let major = self.cuda_major()?;
        let name = format!("libcudart.so.{major}");
        let needed = self.needed.iter().find(|needed| needed.name == name)?;
        let file = needed.real_path.as_ref()?.rsplit('/').next()?;
        let minor = file.strip_prefix(&name)?.strip_prefix('.')?;
        minor.split('.').next()?.parse().ok()
    }

    /// Libraries that the loader would not find.
    pub fn missing(&self) -> impl Iterator<Item = &Needed> {
        self.needed.iter().filter(|needed| needed.found.is_none())
    }
}

/// What a session said.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Probe {
    /// Version that the library gives itself.
    pub version: String,
    /// Time to load the library, make a session and run it, in milliseconds.
    pub elapsed_ms: u64,
}

/// What a processor offers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Processor {
    /// Architecture, spelled as Rust does.
    pub arch: String,
    /// Name of the model.
    pub model: String,
    /// Instruction sets, spelled as the kernel does.
    pub features: Vec<String>,
    /// Processors that this process may run on, by affinity and cgroup quota.
    pub usable_cores: usize,
}
