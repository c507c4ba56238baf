//! Whether the operators of a draft head compute on a CUDA device what they compute on the CPU.
//!
//! `tests/gpu/run` starts it with the libraries it needs. Each case is one node in two sessions, one for each, with the same inputs.

#![expect(
    clippy::print_stdout,
    reason = "a command-line tool that prints a table"
)]

#[path = "../src/ops/testing/graph.rs"]
mod graph;

use std::{path::PathBuf, process::ExitCode};

use clap::Parser;
use half::{bf16, f16};
use ort::{
    environment::Environment,
    ep,
    session::{Session, SessionInputValue},
    value::{DynValue, PrimitiveTensorElementType, Tensor},
};
use outrider_bundle::onnx::DataType;
use outrider_server::{model::runtime, ops};

use graph::{Attribute, Graph};

#[derive(Parser)]
struct Arguments {
    /// ONNX Runtime library with the CUDA execution provider beside it.
    #[arg(long)]
    library: PathBuf,
}

/// The elements of an input.
#[derive(Clone)]
enum Elements {
    /// Of the case's element type.
    Activations(Vec<f32>),
    Floats(Vec<f32>),
    Integers(Vec<i64>),
}

struct Input {
    name: &'static str,
    shape: Vec<usize>,
    elements: Elements,
}

struct Case {
    name: String,
    operator: &'static str,
    attributes: Vec<(&'static str, Attribute)>,
    inputs: Vec<Input>,
    /// Names and whether they are integers, and which of their elements count.
    outputs: Vec<(&'static str, bool, Vec<usize>)>,
}

/// An element type of activations.
trait Activation: PrimitiveTensorElementType + Copy + std::fmt::Debug + 'static {
    const DATA_TYPE: DataType;
    /// The largest difference allowed, as a share of the largest magnitude.
    const TOLERANCE: f32;
    fn narrow(x: f32) -> Self;
    fn wide(self) -> f32;
}

impl Activation for f32 {
    const DATA_TYPE: DataType = DataType::Float;
    const TOLERANCE: f32 = 2e-5;
    fn narrow(x: f32) -> Self {
        x
    }
    fn wide(self) -> f32 {
        self
    }
}

impl Activation for f16 {
    const DATA_TYPE: DataType = DataType::Float16;
    const TOLERANCE: f32 = 3e-3;
    fn narrow(x: f32) -> Self {
        Self::from_f32(x)
    }
    fn wide(self) -> f32 {
        self.to_f32()
    }
}

impl Activation for bf16 {
    const DATA_TYPE: DataType = DataType::Bfloat16;
    const TOLERANCE: f32 = 2e-2;
    fn narrow(x: f32) -> Self {
        Self::from_f32(x)
    }
    fn wide(self) -> f32 {
        self.to_f32()
    }
}

fn main() -> anyhow::Result<ExitCode> {
    let arguments = Arguments::parse();
    let environment = runtime::environment(&arguments.library, 0)?;
    let mut failed = false;
    for case in [
        convolution(1, 8, 4096),
        convolution(7, 16, 5120),
        selector(1, 7, 49_152, true, 0.0),
        selector(5, 7, 151_936, true, 0.8),
        selector(3, 15, 32_000, false, 1.0),
        attention(1, 8, 32, 700, 0),
        attention(6, 8, 5, 3000, 2048),
    ] {
        failed |= check::<f32>(environment, &case)?;
        failed |= check::<f16>(environment, &case)?;
        failed |= check::<bf16>(environment, &case)?;
    }
    Ok(if failed {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

/// Numbers that look random and are the same everywhere.
struct Numbers(u64);

impl Numbers {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn floats(&mut self, count: usize, scale: f32) -> Vec<f32> {
        (0..count)
            .map(|_| ((self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0) * scale)
            .collect()
    }
}

fn input(name: &'static str, shape: &[usize], elements: Elements) -> Input {
    Input {
        name,
        shape: shape.to_vec(),
        elements,
    }
}

fn convolution(batch: usize, rows: usize, channels: usize) -> Case {
    let (taps, group_size) = (2, 16);
    let dynamic = 2 * taps * channels / group_size;
    let mut numbers = Numbers(1);
    let x = numbers.floats(batch * rows * channels, 2.0);
    let coefficients = numbers.floats(batch * rows * dynamic, 1.0);
    let base = numbers.floats(2 * taps * channels, 1.0);
    Case {
        name: format!("{batch} x {rows} x {channels}"),
        operator: ops::grouped_dynamic_conv::NAME,
        attributes: vec![
            ("side", Attribute::Int(1)),
            ("group_size", Attribute::Int(group_size as i64)),
        ],
        outputs: vec![("y", false, (0..x.len()).collect())],
        inputs: vec![
            input("x", &[batch, rows, channels], Elements::Activations(x)),
            input(
                "coefficients",
                &[batch, rows, dynamic],
                Elements::Activations(coefficients),
            ),
            input("base", &[2, taps, channels], Elements::Activations(base)),
        ],
    }
}

fn selector(
    batch: usize,
    slots: usize,
    columns: usize,
    has_codebooks: bool,
    temperature: f32,
) -> Case {
    let (rank, top_k, block) = (256, 16, slots + 1);
    let mut numbers = Numbers(2);
    let logits = numbers.floats(batch * slots * columns, 8.0);
    let ids = (0..batch * block)
        .map(|_| (numbers.bits() % columns as u64) as i64)
        .collect();
    let positions = (0..batch * block).map(|row| row as i64 + 1000).collect();
    // One slot less from one sequence to the next.
    let rows = (0..batch)
        .map(|index| block.saturating_sub(index) as i64)
        .collect();
    let seeds = (0..batch).map(|_| numbers.bits() as i64).collect();
    let mut inputs = vec![
        input("logits", &[batch, slots, columns], Elements::Floats(logits)),
        input("block_ids", &[batch, block], Elements::Integers(ids)),
        input(
            "block_position_ids",
            &[batch, block],
            Elements::Integers(positions),
        ),
        input("block_rows", &[batch], Elements::Integers(rows)),
        input(
            "temperature",
            &[batch],
            Elements::Floats(vec![temperature; batch]),
        ),
        input("seed", &[batch], Elements::Integers(seeds)),
        input(
            "candidate_topk",
            &[1],
            Elements::Integers(vec![top_k as i64]),
        ),
    ];
    if has_codebooks {
        for (name, shape) in [
            ("selector_hidden", vec![batch, slots, rank]),
            ("predecessor_codebook", vec![columns, rank]),
            ("successor_codebook", vec![columns, rank]),
        ] {
            let elements = numbers.floats(shape.iter().product(), 0.5);
            inputs.push(input(name, &shape, Elements::Activations(elements)));
        }
    }
    let places = batch * slots * top_k;
    Case {
        name: format!("{batch} x {slots} x {columns} at {temperature}"),
        operator: ops::path_selector::NAME,
        attributes: vec![("top_k", Attribute::Int(top_k as i64))],
        inputs,
        outputs: vec![
            ("draft_ids", true, (0..batch * slots).collect()),
            ("candidate_ids", true, (0..places).collect()),
            ("path_scores", false, (0..places).collect()),
        ],
    }
}

fn attention(batch: usize, block: usize, context: usize, start: usize, window: usize) -> Case {
    let (heads, kv_heads, head_dim) = (32, 8, 128);
    let capacity = start + context + block + 10;
    let (query_width, kv_width, half) = (heads * head_dim, kv_heads * head_dim, head_dim / 2);
    let mut numbers = Numbers(3);
    let mut rows = |rows: usize, width: usize, scale: f32| {
        Elements::Activations(numbers.floats(batch * rows * width, scale))
    };
    let [query, key, value] = [
        rows(block, query_width, 3.0),
        rows(block, kv_width, 3.0),
        rows(block, kv_width, 1.0),
    ];
    let [context_key, context_value] = [rows(context, kv_width, 3.0), rows(context, kv_width, 1.0)];
    let [key_cache, value_cache] = [rows(capacity, kv_width, 3.0), rows(capacity, kv_width, 1.0)];
    // Sequences of different lengths, with padding in context and block.
    let starts: Vec<i64> = (0..batch)
        .map(|index| (start - 100 * index) as i64)
        .collect();
    let context_rows: Vec<i64> = (0..batch)
        .map(|index| (context - index % 3) as i64)
        .collect();
    let block_rows: Vec<i64> = (0..batch).map(|index| (block - index % 2) as i64).collect();
    let positions = |rows: usize, first: &dyn Fn(usize) -> i64| {
        let of_sequence = |index| (0..rows as i64).map(move |row| (index, row));
        Elements::Integers(
            (0..batch)
                .flat_map(of_sequence)
                .map(|(index, row)| (first(index) + row).min(capacity as i64 - 1))
                .collect(),
        )
    };
    let block_positions = positions(block, &|index| starts[index] + context_rows[index]);
    let context_positions = positions(context, &|index| starts[index]);
    let angles: Vec<f64> = (0..capacity * half)
        .map(|i| (i / half) as f64 * 1e6_f64.powf(-((i % half) as f64) / half as f64))
        .collect();
    let table = |of: fn(f64) -> f64| {
        Elements::Floats(angles.iter().map(|&angle| of(angle) as f32).collect())
    };
    // Rows behind the valid ones are unspecified.
    let valid: Vec<usize> = (0..batch)
        .flat_map(|index| {
            let rows = (starts[index] + context_rows[index] + block_rows[index]) as usize;
            let first = index * capacity * kv_width;
            first..first + rows * kv_width
        })
        .collect();
    Case {
        name: format!("{batch} x {block} after {context} after {start}, window {window}"),
        operator: ops::block_attention::NAME,
        attributes: vec![
            ("num_heads", Attribute::Int(heads as i64)),
            ("kv_num_heads", Attribute::Int(kv_heads as i64)),
            ("is_causal", Attribute::Int(0)),
            ("window", Attribute::Int(window as i64)),
            ("norm_epsilon", Attribute::Float(1e-5)),
        ],
        outputs: vec![
            ("output", false, (0..batch * block * query_width).collect()),
            ("updated_key_cache", false, valid.clone()),
            ("updated_value_cache", false, valid),
        ],
        inputs: vec![
            input("query", &[batch, block, query_width], query),
            input("key", &[batch, block, kv_width], key),
            input("value", &[batch, block, kv_width], value),
            input("context_key", &[batch, context, kv_width], context_key),
            input("context_value", &[batch, context, kv_width], context_value),
            input("key_cache", &[batch, capacity, kv_width], key_cache),
            input("value_cache", &[batch, capacity, kv_width], value_cache),
            input("block_position_ids", &[batch, block], block_positions),
            input("context_position_ids", &[batch, context], context_positions),
            input("context_start", &[batch], Elements::Integers(starts)),
            input("context_rows", &[batch], Elements::Integers(context_rows)),
            input("block_rows", &[batch], Elements::Integers(block_rows)),
            input("cos", &[capacity, half], table(f64::cos)),
            input("sin", &[capacity, half], table(f64::sin)),
            input(
                "q_norm",
                &[head_dim],
                Elements::Floats(vec![1.25; head_dim]),
            ),
            input(
                "k_norm",
                &[head_dim],
                Elements::Floats(vec![0.75; head_dim]),
            ),
        ],
    }
}

fn session_on_cpu(environment: &Environment, model: &[u8]) -> ort::Result<Session> {
    Session::builder(environment)?
        .with_operators(ops::domain()?)?
        .commit_from_memory(model)
}

/// Nothing may fall back to the CPU.
fn session_on_cuda(environment: &Environment, model: &[u8]) -> ort::Result<Session> {
    let cuda = ep::CUDA::default().with_tf32(false).build();
    Session::builder(environment)?
        .with_operators(ops::cuda::domain()?)?
        .with_execution_providers([cuda.error_on_failure()])?
        .with_disable_cpu_fallback()?
        .commit_from_memory(model)
}

/// Runs a case on both and prints a line; whether they differ.
fn check<T: Activation>(environment: &Environment, case: &Case) -> anyhow::Result<bool> {
    let model = model::<T>(case);
    let want = run::<T>(session_on_cpu(environment, &model)?, case)?;
    let got = run::<T>(session_on_cuda(environment, &model)?, case)?;
    let mut failed = false;
    for (((name, is_integer, counted), want), got) in case.outputs.iter().zip(&want).zip(&got) {
        let tolerance = match (*is_integer, *name) {
            (true, _) => 0.0,
            (false, "path_scores") => f32::TOLERANCE,
            (false, _) => T::TOLERANCE,
        };
        let largest = counted
            .iter()
            .map(|&index| want[index].abs())
            .filter(|magnitude| magnitude.is_finite())
            .fold(0.0, f32::max);
        let error = counted
            .iter()
            .map(|&index| (want[index], got[index]))
            // Equal infinities have no difference.
            .filter(|(want, got)| want != got)
            .map(|(want, got)| (want - got).abs() / largest)
            .fold(
                0.0,
                |a, b| if b.is_nan() { f32::INFINITY } else { b.max(a) },
            );
        let is_bad = error > tolerance;
        failed |= is_bad;
        println!(
            "{:<20} {:<40} {:<9} {name:<20} {error:>9.1e} of {tolerance:>7.0e} {}",
            case.operator,
            case.name,
            format!("{:?}", T::DATA_TYPE),
            if is_bad { "DIFFERS" } else { "" }
        );
    }
    Ok(failed)
}

fn model<T: Activation>(case: &Case) -> Vec<u8> {
    let mut graph = Graph::default();
    for input in &case.inputs {
        let data_type = match input.elements {
            Elements::Activations(_) => T::DATA_TYPE,
            Elements::Floats(_) => DataType::Float,
            Elements::Integers(_) => DataType::Int64,
        };
        let dimensions: Vec<String> = (0..input.shape.len())
            .map(|index| format!("{}_{index}", input.name))
            .collect();
        let dimensions: Vec<&str> = dimensions.iter().map(String::as_str).collect();
        graph.input(input.name, data_type, &dimensions);
    }
    let inputs: Vec<&str> = case.inputs.iter().map(|input| input.name).collect();
    let outputs: Vec<&str> = case.outputs.iter().map(|output| output.0).collect();
    graph.node(
        ops::DOMAIN,
        case.operator,
        &inputs,
        &outputs,
        &case.attributes,
    );
    for &(name, is_integer, _) in &case.outputs {
        let (data_type, dimensions) = match name {
            _ if is_integer => (DataType::Int64, vec!["B", "S"]),
            "path_scores" => (DataType::Float, vec!["B", "S", "K"]),
            _ => (T::DATA_TYPE, vec!["B", "ROWS", "WIDTH"]),
        };
        let dimensions = if name == "candidate_ids" {
            vec!["B", "S", "K"]
        } else {
            dimensions
        };
        graph.output(name, data_type, &dimensions);
    }
    graph.model()
}

/// All outputs as `f32`; ids are far from where that would lose a bit.
fn run<T: Activation>(mut session: Session, case: &Case) -> anyhow::Result<Vec<Vec<f32>>> {
    let mut feeds: Vec<(&str, SessionInputValue<'_>)> = Vec::new();
    for input in &case.inputs {
        let shape = input.shape.clone();
        let value: DynValue = match &input.elements {
            Elements::Activations(elements) => {
                let narrow: Vec<T> = elements.iter().map(|&x| T::narrow(x)).collect();
                Tensor::from_array((shape, narrow))?.into_dyn()
            }
            Elements::Floats(elements) => Tensor::from_array((shape, elements.clone()))?.into_dyn(),
            Elements::Integers(elements) => {
                Tensor::from_array((shape, elements.clone()))?.into_dyn()
            }
        };
        feeds.push((input.name, value.into()));
    }
    let outputs = session.run(feeds)?;
    let mut all = Vec::new();
    for &(name, is_integer, _) in &case.outputs {
        let value = &outputs[name];
        all.push(if is_integer {
            let ids = value.try_extract_tensor::<i64>()?.1;
            ids.iter().map(|&id| id as f32).collect()
        } else if name == "path_scores" {
            value.try_extract_tensor::<f32>()?.1.to_vec()
        } else {
            let elements = value.try_extract_tensor::<T>()?.1;
            elements.iter().map(|x| x.wide()).collect()
        });
    }
    Ok(all)
}
