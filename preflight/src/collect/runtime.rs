//! Reads ONNX Runtime, its providers and the processor.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use outrider_server::model::runtime::{self, MINIMUM_VERSION};

use super::elf::{self, Search};
use super::{child, probe};
use crate::facts::Reading;
use crate::facts::config::{ConfigFacts, ExecutionProvider};
use crate::facts::runtime::{Library, Processor, RuntimeFacts};

/// File of the CUDA provider, beside the library.
const CUDA_PROVIDER: &str = "libonnxruntime_providers_cuda.so";

/// What every provider in a file of its own is loaded with.
const SHARED_PROVIDER: &str = "libonnxruntime_providers_shared.so";

/// Hundreds of megabytes of libraries on a cold disk are looked at in less.
const LIBRARY_LIMIT: Duration = Duration::from_secs(20);

/// Reads ONNX Runtime as `config` names it; `program` runs the session.
pub fn collect(config: &ConfigFacts, program: &Path) -> RuntimeFacts {
    let mut facts = RuntimeFacts {
        minimum_version: MINIMUM_VERSION,
        processor: processor().into(),
        ..RuntimeFacts::default()
    };
    let Some(settings) = &config.settings else {
        return facts;
    };
    let read = {
        let path = PathBuf::from(&settings.onnxruntime_library);
        let on_cuda = config.execution_provider == ExecutionProvider::Cuda;
        move || {
            let search = Search::of_machine();
            let provider = on_cuda.then(|| cuda_provider(&path, &search));
            (library(&path, &search), provider)
        }
    };
    match child::within(LIBRARY_LIMIT, read) {
        Ok((library, provider)) => {
            facts.library = library.into();
            facts.cuda_provider = provider.map(Reading::from);
        }
        Err(error) => {
            facts.library = Reading::Unknown(format!("{}: {error}", settings.onnxruntime_library));
        }
    }
    facts.probe = match &facts.library {
        Reading::Known(_) => probe::collect(
            program,
            &settings.onnxruntime_library,
            config.execution_provider,
            config.device_id,
            // More threads than processors make a session that computes nothing slow, and show nothing.
            settings
                .intra_op_threads
                .unwrap_or(0)
                .min(facts.processor.known().map_or(1, |it| it.usable_cores)),
        ),
        Reading::Unknown(reason) => Reading::Unknown(reason.clone()),
    };
    facts
}

fn library(path: &Path, search: &Search) -> Result<Library, String> {
    // In the server's own words where there is none.
    runtime::locate(path).map_err(|error| error.to_string())?;
    elf::library(path, search, &[])
}

/// The CUDA provider beside a library, with what it loads when it is first used.
fn cuda_provider(library: &Path, search: &Search) -> Result<Library, String> {
    let library = library.canonicalize().map_err(|error| error.to_string())?;
    let dir = library.parent().unwrap_or(Path::new("/"));
    let shared = dir.join(SHARED_PROVIDER);
    if !shared.is_file() {
        return Err(format!("{} does not exist", shared.display()));
    }
    // The names of cuDNN and cuFFT follow the CUDA major version: CUDA 12 comes with cuFFT 11, CUDA 13 with cuFFT 12; both have cuDNN 9.
    let provider = dir.join(CUDA_PROVIDER);
    let major = elf::library(&provider, search, &[])?.cuda_major();
    let at_run_time: &[&str] = match major {
        Some(12) => &["libcudnn.so.9", "libcufft.so.11"],
        Some(13) => &["libcudnn.so.9", "libcufft.so.12"],
        _ => &["libcudnn.so.9"],
    };
    elf::library(&provider, search, at_run_time)
}

fn processor() -> Result<Processor, String> {
    let path = "/proc/cpuinfo";
    let text = fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?;
    let usable_cores = std::thread::available_parallelism()
        .map_err(|error| format!("cannot count the processors: {error}"))?;
    Ok(processor_in(&text, usable_cores.get()))
}

fn processor_in(cpuinfo: &str, usable_cores: usize) -> Processor {
    let field = |names: &[&str]| {
        cpuinfo.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            names.contains(&name.trim()).then(|| value.trim())
        })
    };
    Processor {
        arch: std::env::consts::ARCH.to_owned(),
        model: field(&["model name", "CPU part"])
            .unwrap_or("unknown")
            .to_owned(),
        features: field(&["flags", "Features"])
            .unwrap_or_default()
            .split_whitespace()
            .map(str::to_owned)
            .collect(),
        usable_cores,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_processor_is_read_as_the_kernel_shows_it() {
        let found = processor_in(
            "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx2 avx512_vnni\n\nprocessor\t: 1\nflags\t: fpu\n",
            2,
        );
        assert_eq!(found.model, "AMD EPYC");
        assert_eq!(found.features, ["fpu", "avx2", "avx512_vnni"]);
        let arm = processor_in("CPU part\t: 0xd4f\nFeatures\t: fp asimd asimddp\n", 4);
        assert_eq!(arm.features, ["fp", "asimd", "asimddp"]);
    }
}
