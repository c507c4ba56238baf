//! What a step of attention costs: `outrider.CachedAttention` against `com.microsoft.GroupQueryAttention`, side by side in one run.
//!
//! `cargo run -p outrider-server --example bench_attention -- --check`
//!
//! Both graphs are a chain of attention nodes with the caches bound in place and the rotary embedding inside the node.
//! Runs alternate, and the tenth part of them that was fastest is compared: on a shared machine medians measure the neighbours.
//! With `--check` the command fails where the operator is slower, or where a larger cache buffer makes a step slower.

#![expect(
    clippy::print_stdout,
    reason = "a command-line tool that prints a table"
)]

#[path = "../src/ops/testing/graph.rs"]
mod graph;

use std::{path::PathBuf, process::ExitCode, time::Instant};

use anyhow::Context;
use clap::Parser;
use ort::{
    environment::Environment,
    memory::Allocator,
    session::{IoBinding, Session, builder::GraphOptimizationLevel},
    value::Tensor,
};
use outrider_bundle::onnx::DataType;
use outrider_server::{model::runtime, ops};

use graph::{Attribute, Graph};

/// A larger buffer may cost this much of a step at most.
const GROWTH_LIMIT: f64 = 1.1;

#[derive(Parser)]
struct Arguments {
    /// ONNX Runtime library; the one of the tests when not given.
    #[arg(long)]
    library: Option<PathBuf>,
    /// Threads of each session.
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Seconds to measure each line of the table.
    #[arg(long, default_value_t = 1.5)]
    seconds: f64,
    /// Cache lengths to measure.
    #[arg(long, value_delimiter = ',', default_values_t = [128, 4096])]
    contexts: Vec<usize>,
    /// Numbers of new tokens to measure.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 8])]
    tokens: Vec<usize>,
    /// Fail where the operator is slower than it should be.
    #[arg(long)]
    check: bool,
}

/// Heads of a model and how many of its layers are timed.
#[derive(Clone, Copy)]
struct Model {
    name: &'static str,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

impl Model {
    /// Attributes that both operators share.
    fn attributes(&self) -> Vec<(&'static str, Attribute)> {
        vec![
            ("num_heads", Attribute::Int(self.heads as i64)),
            ("kv_num_heads", Attribute::Int(self.kv_heads as i64)),
            (
                "scale",
                Attribute::Float(1.0 / (self.head_dim as f32).sqrt()),
            ),
        ]
    }
}

const MODELS: [Model; 2] = [
    Model {
        name: "9 heads, 3 kv, 64",
        layers: 30,
        heads: 9,
        kv_heads: 3,
        head_dim: 64,
    },
    Model {
        name: "32 heads, 8 kv, 128",
        layers: 8,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
    },
];

fn main() -> anyhow::Result<ExitCode> {
    let arguments = Arguments::parse();
    let library = arguments
        .library
        .clone()
        .unwrap_or_else(runtime::library_for_tests);
    let environment = runtime::environment(&library, 0)?;
    let mut slower = false;

    println!(
        "{:<20} {:>7} {:>6} {:>12} {:>12} {:>6}",
        "model", "context", "tokens", "cached us", "gqa us", "ratio"
    );
    for model in MODELS {
        for &context in &arguments.contexts {
            for &tokens in &arguments.tokens {
                let capacity = context + 64;
                let mut cached = Chain::cached(
                    environment,
                    model,
                    context,
                    tokens,
                    capacity,
                    arguments.threads,
                )?;
                let mut grouped = Chain::grouped_query(
                    environment,
                    model,
                    context,
                    tokens,
                    capacity,
                    arguments.threads,
                )?;
                let [cached_us, grouped_us] =
                    compare(&mut cached, &mut grouped, arguments.seconds)?;
                let ratio = cached_us / grouped_us;
                slower |= ratio > 1.0;
                println!(
                    "{:<20} {context:>7} {tokens:>6} {cached_us:>12.1} {grouped_us:>12.1} {ratio:>6.2}",
                    model.name
                );
            }
        }
    }

    println!(
        "\n{:<20} {:>7} {:>6} {:>12} {:>12} {:>6}",
        "model", "context", "tokens", "8192 rows us", "512 rows us", "ratio"
    );
    for model in MODELS {
        for tokens in [1, 8] {
            let mut large =
                Chain::cached(environment, model, 128, tokens, 8192, arguments.threads)?;
            let mut small = Chain::cached(environment, model, 128, tokens, 512, arguments.threads)?;
            let [large_us, small_us] = compare(&mut large, &mut small, arguments.seconds)?;
            let ratio = large_us / small_us;
            slower |= ratio > GROWTH_LIMIT;
            println!(
                "{:<20} {:>7} {tokens:>6} {large_us:>12.1} {small_us:>12.1} {ratio:>6.2}",
                model.name, 128
            );
        }
    }
    println!(
        "\nmicroseconds per node, lower deciles of alternating runs, {} threads",
        arguments.threads
    );
    Ok(if arguments.check && slower {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

fn session(environment: &Environment, model: &[u8], threads: usize) -> ort::Result<Session> {
    Session::builder(environment)?
        .with_operators(ops::domain()?)?
        .with_optimization_level(GraphOptimizationLevel::All)?
        .with_independent_thread_pool()?
        .with_intra_threads(threads)?
        .commit_from_memory(model)
}

/// A session over a chain of attention nodes and everything bound to it.
struct Chain {
    session: Session,
    binding: IoBinding,
    layers: usize,
    _values: Vec<Tensor<f32>>,
}

impl Chain {
    fn cached(
        environment: &Environment,
        model: Model,
        context: usize,
        tokens: usize,
        capacity: usize,
        threads: usize,
    ) -> anyhow::Result<Self> {
        let mut graph = Graph::default();
        add_inputs(&mut graph, model, capacity);
        graph.input("position_ids", DataType::Int64, &["B", "S"]);
        graph.input("write_indices", DataType::Int64, &["B"]);
        graph.input("nonpad_kv_seqlen", DataType::Int64, &["B"]);
        let attributes = || model.attributes();
        add_layers(
            &mut graph,
            model,
            &["B", "MAX", "KV"],
            |graph, query, [key, value], outputs| {
                let inputs = [
                    query,
                    "key",
                    "value",
                    key,
                    value,
                    "position_ids",
                    "write_indices",
                    "nonpad_kv_seqlen",
                    "cos",
                    "sin",
                ];
                graph.node(
                    ops::DOMAIN,
                    ops::cached_attention::NAME,
                    &inputs,
                    outputs,
                    &attributes(),
                );
            },
        );
        let first = (context - tokens) as i64;
        let cache_shape = [1, capacity, model.kv_heads * model.head_dim];
        let mut chain = Self::new(environment, graph, model, tokens, &cache_shape, threads)?;
        chain.binding.bind_input(
            "position_ids",
            &Tensor::from_array(([1, tokens], (first..context as i64).collect::<Vec<_>>()))?,
        )?;
        chain
            .binding
            .bind_input("write_indices", &Tensor::from_array(([1], vec![first]))?)?;
        chain.binding.bind_input(
            "nonpad_kv_seqlen",
            &Tensor::from_array(([1], vec![context as i64]))?,
        )?;
        Ok(chain)
    }

    fn grouped_query(
        environment: &Environment,
        model: Model,
        context: usize,
        tokens: usize,
        capacity: usize,
        threads: usize,
    ) -> anyhow::Result<Self> {
        let mut graph = Graph::default();
        add_inputs(&mut graph, model, capacity);
        graph.input("seqlens_k", DataType::Int32, &["B"]);
        graph.input("total_sequence_length", DataType::Int32, &[]);
        let attributes = || {
            let mut attributes = model.attributes();
            attributes.push(("do_rotary", Attribute::Int(1)));
            attributes
        };
        add_layers(
            &mut graph,
            model,
            &["B", "NKV", "MAX", "D"],
            |graph, query, [key, value], outputs| {
                let inputs = [
                    query,
                    "key",
                    "value",
                    key,
                    value,
                    "seqlens_k",
                    "total_sequence_length",
                    "cos",
                    "sin",
                ];
                graph.node(
                    "com.microsoft",
                    "GroupQueryAttention",
                    &inputs,
                    outputs,
                    &attributes(),
                );
            },
        );
        let cache_shape = [1, model.kv_heads, capacity, model.head_dim];
        let mut chain = Self::new(environment, graph, model, tokens, &cache_shape, threads)?;
        chain.binding.bind_input(
            "seqlens_k",
            &Tensor::from_array(([1], vec![context as i32 - 1]))?,
        )?;
        chain.binding.bind_input(
            "total_sequence_length",
            &Tensor::from_array(((), vec![context as i32]))?,
        )?;
        Ok(chain)
    }

    fn new(
        environment: &Environment,
        graph: Graph,
        model: Model,
        tokens: usize,
        cache_shape: &[usize],
        threads: usize,
    ) -> anyhow::Result<Self> {
        let session = session(environment, &graph.model(), threads).context("loading the graph")?;
        let mut binding = session.create_binding()?;
        let allocator = Allocator::default();
        let mut values = Vec::new();
        let tensor = |shape: &[usize]| -> anyhow::Result<Tensor<f32>> {
            let mut tensor = Tensor::<f32>::new(&allocator, shape.to_vec())?;
            // Any values will do, but not such that the softmax picks one key.
            tensor
                .extract_tensor_mut()
                .1
                .iter_mut()
                .enumerate()
                .for_each(|(i, element)| {
                    *element = ((i * 2_654_435_761) % 1009) as f32 / 1009.0 - 0.5
                });
            Ok(tensor)
        };
        for (name, heads) in [
            ("query", model.heads),
            ("key", model.kv_heads),
            ("value", model.kv_heads),
        ] {
            let value = tensor(&[1, tokens, heads * model.head_dim])?;
            binding.bind_input(name, &value)?;
            values.push(value);
        }
        for layer in 0..model.layers {
            for cache in ["key", "value"] {
                let mut value = tensor(cache_shape)?;
                binding.bind_input(format!("{cache}_cache.{layer}"), &value)?;
                binding.bind_output(format!("updated_{cache}_cache.{layer}"), &mut value)?;
                values.push(value);
            }
        }
        let mut output = tensor(&[1, tokens, model.heads * model.head_dim])?;
        binding.bind_output("output", &mut output)?;
        values.push(output);
        Ok(Self {
            session,
            binding,
            layers: model.layers,
            _values: values,
        })
    }

    /// Runs the chain once; microseconds per node.
    fn run(&mut self) -> anyhow::Result<f64> {
        let start = Instant::now();
        self.session.run_binding(&self.binding)?;
        Ok(start.elapsed().as_secs_f64() * 1e6 / self.layers as f64)
    }
}

fn add_inputs(graph: &mut Graph, model: Model, capacity: usize) {
    graph.input("query", DataType::Float, &["B", "S", "Q"]);
    graph.input("key", DataType::Float, &["B", "S", "KV"]);
    graph.input("value", DataType::Float, &["B", "S", "KV"]);
    let half = model.head_dim / 2;
    let angle = |i: usize| (i / half) as f32 * 10_000_f32.powf(-((i % half) as f32) / half as f32);
    let table = |of: fn(f32) -> f32| {
        (0..capacity * half)
            .map(|i| of(angle(i)))
            .collect::<Vec<_>>()
    };
    let dims = [capacity as i64, half as i64];
    graph.constant("cos", &dims, &table(f32::cos));
    graph.constant("sin", &dims, &table(f32::sin));
}

/// Adds the layers with their caches; the output of each is the query of the next.
fn add_layers(
    graph: &mut Graph,
    model: Model,
    cache: &[&str],
    node: impl Fn(&mut Graph, &str, [&str; 2], &[&str]),
) {
    let mut query = "query".to_owned();
    for layer in 0..model.layers {
        let caches = ["key", "value"].map(|cache| format!("{cache}_cache.{layer}"));
        let updated = caches.each_ref().map(|cache| format!("updated_{cache}"));
        for name in &caches {
            graph.input(name, DataType::Float, cache);
        }
        let output = if layer + 1 == model.layers {
            "output".to_owned()
        } else {
            format!("output.{layer}")
        };
        node(
            graph,
            &query,
            [&caches[0], &caches[1]],
            &[&output, &updated[0], &updated[1]],
        );
        for name in &updated {
            graph.output(name, DataType::Float, cache);
        }
        query = output;
    }
    graph.output("output", DataType::Float, &["B", "S", "Q"]);
}

/// Lower deciles of alternating runs of two chains, for about this long.
fn compare(first: &mut Chain, second: &mut Chain, seconds: f64) -> anyhow::Result<[f64; 2]> {
    for _ in 0..3 {
        first.run()?;
        second.run()?;
    }
    let mut times = [Vec::new(), Vec::new()];
    let start = Instant::now();
    while start.elapsed().as_secs_f64() < seconds || times[0].len() < 9 {
        times[0].push(first.run()?);
        times[1].push(second.run()?);
    }
    Ok(times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 10]
    }))
}
