//! A session with ONNX Runtime on one provider and nothing else, in a process of its own: a library that crashes or hangs takes only that.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use ort::environment::Environment;
use ort::ep;
use ort::session::Session;
use ort::session::builder::SessionBuilder;
use ort::value::Tensor;
use outrider_bundle::onnx::{
    DataType, Dimension, DimensionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto,
    TensorProto, TensorShapeProto, TensorTypeProto, TypeProto, ValueInfoProto,
};
use outrider_server::model::runtime;
use prost::Message as _;

use super::child;
use crate::facts::Reading;
use crate::facts::config::ExecutionProvider;
use crate::facts::runtime::Probe;

/// The hidden subcommand that runs the session.
const SUBCOMMAND: &str = "probe-runtime";

/// A CUDA context on a cold machine takes seconds; more than this is a fault.
const LIMIT: Duration = Duration::from_secs(60);

/// What the session is made with.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The ONNX Runtime library
    #[arg(long)]
    library: PathBuf,
    /// CUDA device, where it is to run on one
    #[arg(long)]
    cuda_device: Option<i32>,
    /// Threads; 0 is one for each core
    #[arg(long)]
    threads: usize,
}

/// Runs a session in a child of `program`.
pub fn collect(
    program: &Path,
    library: &str,
    provider: ExecutionProvider,
    device_id: u32,
    threads: usize,
) -> Reading<Probe> {
    let threads = threads.to_string();
    let device_id = device_id.to_string();
    let mut arguments = vec![SUBCOMMAND, "--library", library, "--threads", &threads];
    if provider == ExecutionProvider::Cuda {
        arguments.extend(["--cuda-device", &device_id]);
    }
    let answer = child::run(program, &arguments, LIMIT).map_err(|error| error.to_string());
    let probe = answer.and_then(|json| {
        serde_json::from_str(&json).map_err(|error| format!("the child wrote no facts: {error}"))
    });
    probe.into()
}

/// Makes the session, runs it, and returns the facts as JSON; what the subcommand does.
///
/// # Errors
///
/// The library can't be loaded, or the session can't be made or run wholly on its provider.
pub fn run(args: &Args) -> anyhow::Result<String> {
    let began = Instant::now();
    let environment = runtime::environment(&args.library, args.threads)?;
    let mut session = session(environment, args.cuda_device).context("cannot make a session")?;
    let input = Tensor::from_array(([2usize, 2], vec![1f32, 2.0, 3.0, 4.0]))?;
    let outputs = session
        .run(ort::inputs!["x" => input])
        .context("cannot run a session")?;
    let (_, values) = outputs["y"].try_extract_tensor::<f32>()?;
    if values != [7.0, 10.0, 15.0, 22.0] {
        anyhow::bail!("a product of small whole numbers came out as {values:?}");
    }
    let probe = Probe {
        version: ort::info().to_string(),
        elapsed_ms: u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX),
    };
    Ok(serde_json::to_string(&probe)?)
}

fn session(environment: &'static Environment, cuda_device: Option<i32>) -> ort::Result<Session> {
    let mut builder = Session::builder(environment)?;
    if let Some(device) = cuda_device {
        builder = builder
            .with_disable_cpu_fallback()
            .map_err(without_builder)?
            .with_execution_providers([ep::CUDA::default()
                .with_device_id(device)
                .build()
                .error_on_failure()])
            .map_err(without_builder)?;
    }
    builder.commit_from_memory(&product().encode_to_vec())
}

/// Errors of the builder's methods carry the builder.
fn without_builder(error: ort::Error<SessionBuilder>) -> ort::Error {
    error.into()
}

/// A graph that multiplies `x [2,2]` with itself.
fn product() -> ModelProto {
    let value = |name: &str| {
        let dim = DimensionProto {
            value: Some(Dimension::Size(2)),
        };
        ValueInfoProto {
            name: name.to_owned(),
            r#type: Some(TypeProto {
                tensor_type: Some(TensorTypeProto {
                    elem_type: DataType::Float.into(),
                    shape: Some(TensorShapeProto {
                        dim: vec![dim.clone(), dim],
                    }),
                }),
            }),
        }
    };
    ModelProto {
        ir_version: 9,
        opset_import: vec![OperatorSetIdProto {
            domain: String::new(),
            version: 17,
        }],
        graph: Some(GraphProto {
            node: vec![NodeProto {
                input: vec!["x".to_owned(), "x".to_owned()],
                output: vec!["y".to_owned()],
                name: "product".to_owned(),
                op_type: "MatMul".to_owned(),
                ..NodeProto::default()
            }],
            name: "probe".to_owned(),
            initializer: Vec::<TensorProto>::new(),
            input: vec![value("x")],
            output: vec![value("y")],
            value_info: Vec::new(),
        }),
        ..ModelProto::default()
    }
}
