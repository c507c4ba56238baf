//! Whether ONNX Runtime and the libraries of its provider can be loaded.

use outrider_bundle::manifest::Precision;

use super::{Finding, bytes_text};
use crate::facts::config::{ExecutionProvider, Settings};
use crate::facts::runtime::{Library, Processor};
use crate::facts::{Facts, Reading};

/// Every check of this part.
pub fn checks(facts: &Facts) -> Vec<Finding> {
    let Some(settings) = &facts.config.settings else {
        return vec![super::needs_settings(
            "runtime.library",
            "which library is meant",
        )];
    };
    let mut findings = vec![library(facts)];
    if let Reading::Known(library) = &facts.runtime.library {
        findings.push(version(library, facts.runtime.minimum_version));
        findings.push(dependencies("runtime.dependencies", library));
    }
    findings.push(provider(facts));
    findings.push(probe(facts));
    findings.extend(processor(facts, settings));
    findings
}

fn library(facts: &Facts) -> Finding {
    let id = "runtime.library";
    let remedy = "name an ONNX Runtime library for this machine with serving.runtime.onnxruntime_library; `cargo xtask fetch` brings the pinned one";
    match &facts.runtime.library {
        Reading::Unknown(reason) => Finding::fail(id, reason, remedy),
        Reading::Known(library) => {
            let arch = facts.runtime.processor.known();
            if let Some(processor) = arch.filter(|processor| processor.arch != library.arch) {
                return Finding::fail(
                    id,
                    format!(
                        "{} is for {}, and this machine is {}",
                        library.path, library.arch, processor.arch
                    ),
                    remedy,
                );
            }
            Finding::pass(
                id,
                format!("{}, {}", library.real_path, bytes_text(library.size_bytes)),
            )
        }
    }
}

fn version(library: &Library, minimum: (u32, u32)) -> Finding {
    let id = "runtime.version";
    let (major, minor) = minimum;
    let remedy = format!("take an ONNX Runtime of {major}.{minor} or newer");
    let Some(version) = &library.version else {
        return Finding::fail(
            id,
            format!(
                "{} names no version, so it is not ONNX Runtime",
                library.path
            ),
            remedy,
        );
    };
    let mut parts = version.split('.').map(|part| part.parse::<u32>().ok());
    match (parts.next().flatten(), parts.next().flatten()) {
        (Some(found_major), Some(found_minor)) if (found_major, found_minor) >= minimum => {
            Finding::pass(id, format!("{version}, at least {major}.{minor} is needed"))
        }
        _ => Finding::fail(
            id,
            format!("{version}, at least {major}.{minor} is needed"),
            remedy,
        ),
    }
}

/// Whether everything that a library needs is found.
fn dependencies(id: &'static str, library: &Library) -> Finding {
    let missing: Vec<String> = library
        .missing()
        .map(|needed| {
            let when = if needed.at_run_time {
                ", loaded when it is first used"
            } else {
                ""
            };
            format!("{} (needed by {}{when})", needed.name, needed.by)
        })
        .collect();
    let place = &library.real_path;
    if missing.is_empty() {
        let c_library = library.c_library_version.as_deref().unwrap_or("any");
        return Finding::pass(
            id,
            format!(
                "{place}: all {} libraries that it needs are found; C library {c_library} or newer",
                library.needed.len()
            ),
        );
    }
    Finding::fail(
        id,
        format!("{place} lacks {}", missing.join(", ")),
        remedy_for_missing(library),
    )
}

fn remedy_for_missing(library: &Library) -> String {
    match library.cuda_major() {
        Some(major) => format!(
            "install the CUDA {major} runtime libraries (cuBLAS, cuRAND, cuFFT, cudart) and cuDNN 9, and the NVIDIA driver for libcuda.so.1; add their directories to LD_LIBRARY_PATH or run ldconfig"
        ),
        None => "install the packages with these libraries; add their directories to LD_LIBRARY_PATH or run ldconfig".to_owned(),
    }
}

fn provider(facts: &Facts) -> Finding {
    let id = "runtime.cuda_provider";
    if facts.config.execution_provider == ExecutionProvider::Cpu {
        return Finding::skip(id, "serving.runtime.execution_provider is cpu");
    }
    match &facts.runtime.cuda_provider {
        None => Finding::unknown(
            id,
            "the CUDA provider was not looked for",
            "record the facts again with this configuration",
        ),
        Some(Reading::Unknown(reason)) => Finding::fail(
            id,
            reason,
            "take the ONNX Runtime that is built with CUDA: the file of its provider must be beside the library",
        ),
        Some(Reading::Known(library)) => dependencies(id, library),
    }
}

fn probe(facts: &Facts) -> Finding {
    let id = "runtime.session";
    let (on, remedy) = match facts.config.execution_provider {
        ExecutionProvider::Cpu => (
            "on the CPU",
            "correct what runtime.library and runtime.dependencies say; a library that crashes here is damaged or for another machine",
        ),
        ExecutionProvider::Cuda => (
            "on the CUDA device without fallback to the CPU",
            "correct what the checks of gpu and runtime.cuda_provider say first; then compare the driver with the CUDA of the library",
        ),
    };
    match &facts.runtime.probe {
        Reading::Known(probe) => Finding::pass(
            id,
            format!(
                "a session {on} gave the right result after {} ms; {}",
                probe.elapsed_ms, probe.version
            ),
        ),
        Reading::Unknown(reason) => Finding::fail(id, format!("no session {on}: {reason}"), remedy),
    }
}

fn processor(facts: &Facts, settings: &Settings) -> Vec<Finding> {
    let (instructions, threads) = ("runtime.instructions", "runtime.threads");
    let processor = match &facts.runtime.processor {
        Reading::Known(processor) => processor,
        Reading::Unknown(reason) => {
            return vec![Finding::unknown(
                instructions,
                format!("the processor could not be read: {reason}"),
                "run this where /proc is mounted",
            )];
        }
    };
    vec![
        instruction_sets(instructions, facts, processor),
        thread_count(threads, settings, processor),
    ]
}

fn instruction_sets(id: &'static str, facts: &Facts, processor: &Processor) -> Finding {
    if facts.config.execution_provider == ExecutionProvider::Cuda {
        return Finding::skip(id, "serving.runtime.execution_provider is cuda");
    }
    let has = |name: &str| processor.features.iter().any(|feature| feature == name);
    let manifest = facts.bundle.manifest.known();
    let precisions = manifest.map(|manifest| {
        let of_draft = manifest.draft.as_ref().map(|draft| draft.precision);
        [Some(manifest.target.precision), of_draft]
    });
    let is_integer = precisions.is_some_and(|precisions| {
        precisions.contains(&Some(Precision::Int8)) || precisions.contains(&Some(Precision::Int4))
    });
    let model = &processor.model;
    if processor.arch == "x86_64" {
        if !has("avx2") {
            return Finding::warn(
                id,
                format!("{model} has no AVX2: products take several times as long"),
                "serve from a processor with AVX2 or newer",
            );
        }
        if is_integer && !has("avx512_vnni") && !has("avx_vnni") {
            return Finding::warn(
                id,
                format!(
                    "{model} has no VNNI: products of 8-bit integers are slower, and may saturate where neighbouring products overflow 16 bits"
                ),
                "serve from a processor with AVX-512 VNNI or AVX-VNNI, or serve the model in fp32 here",
            );
        }
    }
    if processor.arch == "aarch64" && is_integer && !has("asimddp") {
        return Finding::warn(
            id,
            format!("{model} has no dot-product instructions: 8-bit products are slower"),
            "serve from a processor with the asimddp feature, or serve the model in fp32 here",
        );
    }
    let known = [
        "avx2",
        "fma",
        "avx512f",
        "avx512_vnni",
        "avx_vnni",
        "amx_int8",
        "avx512_bf16",
        "asimd",
        "asimddp",
        "i8mm",
        "bf16",
        "sve",
    ];
    let found: Vec<&str> = known.into_iter().filter(|name| has(name)).collect();
    Finding::pass(id, format!("{model}: {}", found.join(", ")))
}

fn thread_count(id: &'static str, settings: &Settings, processor: &Processor) -> Finding {
    let usable = processor.usable_cores;
    match settings.intra_op_threads {
        Some(threads) if threads > usable => Finding::warn(
            id,
            format!(
                "serving.runtime.intra_op_threads is {threads}, and this process may use {usable} processors: threads that wait for each other take turns"
            ),
            format!("set serving.runtime.intra_op_threads to {usable} or less, or leave it out"),
        ),
        Some(threads) => Finding::pass(id, format!("{threads} threads on {usable} processors")),
        None => Finding::pass(id, format!("a thread for each of {usable} processors")),
    }
}
