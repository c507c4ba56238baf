//! How a graph of a bundle becomes an ONNX Runtime session, the same way for the target and for the draft.

use std::io::Cursor;
use std::path::PathBuf;

use ort::ep;
use ort::session::Session;
use ort::session::builder::GraphOptimizationLevel;
use ort::value::{TensorElementType, ValueType};
use outrider_bundle::VerifiedBundle;
use outrider_bundle::facts::GraphFacts;
use outrider_bundle::manifest::Attention;

use super::memory::separate_large_allocations;
use super::{ModelError, runtime};

/// Where graphs run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExecutionProvider {
    /// The CPU.
    #[default]
    Cpu,
    /// The CUDA device with this index. A session that can't run wholly on it is an error.
    Cuda {
        /// Index of the device.
        device: i32,
    },
}

/// How sessions are made.
#[derive(Clone, Debug)]
pub struct SessionOptions {
    /// The ONNX Runtime library.
    pub library: PathBuf,
    /// Where the graph runs.
    pub execution_provider: ExecutionProvider,
    /// Threads of one operator, the same for all sessions of a process; 0 takes one per core.
    pub intra_op_threads: usize,
}

/// An error about one graph of a bundle.
pub(super) fn graph_fault(graph: &str, fault: impl Into<String>) -> ModelError {
    ModelError::Graph {
        graph: graph.to_owned(),
        fault: fault.into(),
    }
}

/// Opens a graph of the bundle; `form` says whether it needs the custom operators.
///
/// ONNX Runtime would map the weights from their file, and what is written into that file later would change the answers of a running server.
/// So it gets bytes instead, and these are the ones that the manifest names.
///
/// # Errors
///
/// The graph can't be read or made a session, or has operators that don't run on the provider.
pub(super) fn open(
    bundle: &VerifiedBundle,
    graph: &str,
    form: Attention,
    options: &SessionOptions,
) -> Result<Session, ModelError> {
    if form == Attention::Native && options.execution_provider != ExecutionProvider::Cpu {
        return Err(graph_fault(
            graph,
            "it has native attention, whose operators run on the CPU only, and serving.runtime.execution_provider is cuda; \
             export the bundle with --attention portable",
        ));
    }
    separate_large_allocations();
    let environment = runtime::environment(&options.library, options.intra_op_threads)?;
    let read = |file: &str| {
        bundle
            .read(file)
            .map_err(|error| graph_fault(graph, error.to_string()))
    };
    let model = read(graph)?;
    let facts = GraphFacts::from_stream(Cursor::new(&model))
        .map_err(|error| graph_fault(graph, error.to_string()))?;
    let mut builder = Session::builder(environment)?
        .with_optimization_level(GraphOptimizationLevel::All)
        .map_err(ort::Error::from)?
        // Step shapes change all the time, so a pattern learnt from one of them would only hold memory.
        .with_memory_pattern(false)
        .map_err(ort::Error::from)?
        // Weights that an operator has packed for itself are given back; an arena would keep their place.
        .with_device_allocated_initializers()
        .map_err(ort::Error::from)?;
    if form == Attention::Native {
        builder = builder
            .with_operators(crate::ops::domain()?)
            .map_err(ort::Error::from)?;
    }
    if let ExecutionProvider::Cuda { device } = options.execution_provider {
        builder = builder
            .with_disable_cpu_fallback()
            .map_err(ort::Error::from)?
            .with_execution_providers([ep::CUDA::default()
                .with_device_id(device)
                .with_tf32(false)
                .build()
                .error_on_failure()])
            .map_err(ort::Error::from)?;
    }
    for (location, file) in facts.external_files.keys().zip(facts.external_paths(graph)) {
        builder = builder
            .with_external_initializer_file_in_memory(location, read(&file)?.into())
            .map_err(ort::Error::from)?;
    }
    let _registration = runtime::registration();
    Ok(builder.commit_from_memory(&model)?)
}

/// Compares the session's inputs and outputs with what the engine drives.
pub(super) fn check_interface(
    session: &Session,
    inputs: &[(String, TensorElementType)],
    outputs: &[(String, TensorElementType)],
) -> Result<(), String> {
    for (kind, wanted, found) in [
        ("input", inputs, session.inputs()),
        ("output", outputs, session.outputs()),
    ] {
        for (name, element) in wanted {
            let outlet = found
                .iter()
                .find(|outlet| outlet.name() == name)
                .ok_or_else(|| format!("the {kind} {name} is missing"))?;
            match outlet.dtype() {
                ValueType::Tensor { ty, .. } if ty == element => {}
                other => {
                    return Err(format!(
                        "the {kind} {name} is {other}; {element} is expected"
                    ));
                }
            }
        }
        if let Some(extra) = found
            .iter()
            .find(|outlet| wanted.iter().all(|(name, _)| name != outlet.name()))
        {
            return Err(format!("the {kind} {} is unknown", extra.name()));
        }
    }
    Ok(())
}

/// Names with one element type.
pub(super) fn typed(
    names: &[&str],
    element: TensorElementType,
) -> impl Iterator<Item = (String, TensorElementType)> {
    names.iter().map(move |name| ((*name).to_owned(), element))
}
