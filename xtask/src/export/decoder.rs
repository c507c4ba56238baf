//! The decoder as a graph: embedding, layers, taps, norm and head, with the inputs and outputs of the target contract.
//!
//! Inputs: `input_ids`, `position_ids` i64 `[batch, sequence]`; `write_indices` i64 `[batch]`, the first cache row that each sequence's new tokens are
//! written to; `nonpad_kv_seqlen` i64 `[batch]`, the valid rows after that; `logit_indices` i64 `[batch, n]`, the rows of the call that get logits;
//! for each layer `key_cache.N` and `value_cache.N` `[batch, max, kv_heads * head_dim]`.
//! Outputs: `logits` f32 `[batch, n, vocabulary]`; for each layer `updated_key_cache.N` and `updated_value_cache.N`, for which the caller binds the
//! memory of the input; with taps, `aux_hidden_states` f32 `[batch, sequence, taps * hidden]`, the residual stream behind those layers.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use outrider_bundle::manifest::Precision;
use outrider_bundle::onnx::DataType;

use super::Options;
use super::attention::{Heads, cache_names};
use super::convert::{to_bf16, to_f16, transpose};
use super::graph::{Dim, GraphBuilder, Stored, float, int, to};
use super::linear::{Linear, Reads};
use super::rotation::Rotation;
use super::tensors::Tensors;
use super::vocabulary::Table;
use crate::checkpoint::DecoderConfig;

const BATCH: Dim = Dim::Symbol("batch");
const SEQUENCE: Dim = Dim::Symbol("sequence");
const MAX: Dim = Dim::Symbol("max");
const LOGITS: Dim = Dim::Symbol("n");

/// Channels per block of the residual stream's rotation: it is in the weights, so a larger one costs nothing but at the taps and the head.
const LARGEST_RESIDUAL_BLOCK: usize = 256;

/// One decoder on its way into one graph.
pub struct Exporter<'a> {
    /// Shape and arithmetic of the decoder.
    pub config: &'a DecoderConfig,
    /// What is asked for.
    pub options: &'a Options,
    /// The graph.
    pub graph: GraphBuilder,
    /// The weights.
    pub tensors: Tensors<'a>,
    /// Element type of activations and caches.
    pub element: DataType,
    /// Basis of the residual stream, where it isn't the checkpoint's.
    pub residual_rotation: Option<Rotation>,
    /// Graph inputs whose rows have zero points already.
    pub zero_points: BTreeSet<&'static str>,
    /// Windows that have a mask already.
    pub masks: BTreeSet<usize>,
    /// Name of the distances that window masks are made of, once there is one.
    pub distances: Option<String>,
}

impl<'a> Exporter<'a> {
    /// Starts with an empty graph.
    pub fn new(
        config: &'a DecoderConfig,
        options: &'a Options,
        graph: GraphBuilder,
        tensors: Tensors<'a>,
    ) -> Self {
        Self {
            config,
            options,
            graph,
            tensors,
            element: element(options.precision),
            residual_rotation: (options.precision == Precision::Int8)
                .then(|| Rotation::new(config.hidden_size, LARGEST_RESIDUAL_BLOCK)),
            zero_points: BTreeSet::new(),
            masks: BTreeSet::new(),
            distances: None,
        }
    }

    /// Builds the whole graph; fails if the checkpoint holds more tensors than the decoder has a place for.
    pub fn build(mut self) -> Result<GraphBuilder> {
        self.inputs();
        self.rotary_tables()?;
        let (mut hidden, table) = self.embedding("input_ids")?;
        let mut taps = Vec::new();
        for layer in 0..self.config.layers {
            hidden = self.layer(layer, &hidden)?;
            if self.options.taps.contains(&layer) {
                taps.push(hidden.clone());
            }
        }
        self.taps(&taps)?;
        self.logits(&hidden, table)?;
        self.outputs();
        self.tensors.finish()?;
        Ok(self.graph)
    }

    fn layer(&mut self, layer: usize, input: &str) -> Result<String> {
        let DecoderConfig {
            hidden_size: hidden,
            intermediate_size: inner,
            heads,
            kv_heads,
            head_dim,
            qkv_bias,
            o_bias,
            mlp_bias,
            ..
        } = *self.config;
        let name = |part: &str| format!("layers.{layer}.{part}");
        let tensor = |part: &str| format!("model.layers.{layer}.{part}");
        let tensors = |block: &str, kind: &str, parts: &[(&str, usize)]| {
            let tensor =
                |(part, rows): &(&str, usize)| (tensor(&format!("{block}.{part}.{kind}")), *rows);
            parts.iter().map(tensor).collect::<Vec<_>>()
        };
        let biases = |exists: bool, block: &str, parts: &[(&str, usize)]| {
            if exists {
                tensors(block, "bias", parts)
            } else {
                Vec::new()
            }
        };

        let (query_width, kv_width) = (heads * head_dim, kv_heads * head_dim);
        let parts = [
            ("q_proj", query_width),
            ("k_proj", kv_width),
            ("v_proj", kv_width),
        ];
        let projections = Linear {
            name: name("attention.qkv"),
            weights: tensors("self_attn", "weight", &parts),
            biases: biases(qkv_bias, "self_attn", &parts),
            columns: hidden,
            reads: Reads::Normed(tensor("input_layernorm.weight")),
            writes_residual: false,
        };
        let joined = self.linear(input, &projections)?;
        let [query, key, value] = [
            name("attention.q"),
            name("attention.k"),
            name("attention.v"),
        ];
        self.split(
            &joined,
            &[(&query, query_width), (&key, kv_width), (&value, kv_width)],
        );
        let heads = Heads {
            query: &query,
            key: &key,
            value: &value,
        };
        let attended = self.attention(layer, &heads)?;
        let parts = [("o_proj", hidden)];
        let output = Linear {
            name: name("attention.output"),
            weights: tensors("self_attn", "weight", &parts),
            biases: biases(o_bias, "self_attn", &parts),
            columns: query_width,
            reads: Reads::Plain,
            writes_residual: true,
        };
        let attended = self.linear(&attended, &output)?;
        let residual = self.graph.node(
            &name("attention.residual"),
            "Add",
            &[input, &attended],
            vec![],
        );

        let parts = [("gate_proj", inner), ("up_proj", inner)];
        let gated = Linear {
            name: name("mlp.gate_up"),
            weights: tensors("mlp", "weight", &parts),
            biases: biases(mlp_bias, "mlp", &parts),
            columns: hidden,
            reads: Reads::Normed(tensor("post_attention_layernorm.weight")),
            writes_residual: false,
        };
        let joined = self.linear(&residual, &gated)?;
        let (gate, up) = (name("mlp.gate"), name("mlp.up"));
        self.split(&joined, &[(&gate, inner), (&up, inner)]);
        let sigmoid = self
            .graph
            .node(&name("mlp.sigmoid"), "Sigmoid", &[&gate], vec![]);
        let silu = self
            .graph
            .node(&name("mlp.silu"), "Mul", &[&gate, &sigmoid], vec![]);
        let product = self
            .graph
            .node(&name("mlp.product"), "Mul", &[&silu, &up], vec![]);
        let parts = [("down_proj", hidden)];
        let down = Linear {
            name: name("mlp.down"),
            weights: tensors("mlp", "weight", &parts),
            biases: biases(mlp_bias, "mlp", &parts),
            columns: inner,
            reads: Reads::Outliers,
            writes_residual: true,
        };
        let down = self.linear(&product, &down)?;
        Ok(self
            .graph
            .node(&name("residual"), "Add", &[&residual, &down], vec![]))
    }

    /// The residual stream behind the tapped layers, side by side.
    fn taps(&mut self, taps: &[String]) -> Result<()> {
        if taps.is_empty() {
            return Ok(());
        }
        let inputs: Vec<&str> = taps.iter().map(String::as_str).collect();
        let as_they_are = self.residual_rotation.is_none() && self.element == DataType::Float;
        let name = if as_they_are {
            "aux_hidden_states"
        } else {
            "taps"
        };
        let joined = self
            .graph
            .node(name, "Concat", &inputs, vec![int("axis", -1)]);
        if let Some(rotation) = self.residual_rotation {
            let width = taps.len() * self.config.hidden_size;
            self.rotate_back("aux_hidden_states", &joined, rotation, width)?;
        } else if !as_they_are {
            self.cast_to_fp32("aux_hidden_states", &joined);
        }
        Ok(())
    }

    /// Picks the rows that get logits before the last norm, so that the others cost no head.
    fn logits(&mut self, hidden: &str, table: Table) -> Result<()> {
        let last_axis = self.graph.ints(&[-1]);
        let indices = self.graph.node(
            "logit_rows.indices",
            "Unsqueeze",
            &["logit_indices", &last_axis],
            vec![],
        );
        let rows = self.graph.node(
            "logit_rows",
            "GatherND",
            &[hidden, &indices],
            vec![int("batch_dims", 1)],
        );
        let rows = match self.residual_rotation {
            Some(rotation) => {
                let hidden = self.config.hidden_size;
                self.rotate_back("logit_rows.rotated_back", &rows, rotation, hidden)?
            }
            None => rows,
        };
        let normed = self.weighted_norm("norm", &rows, "model.norm.weight")?;
        if self.element == DataType::Float {
            self.head(&normed, table, "logits")
        } else {
            self.head(&normed, table, "lm_head.product")?;
            self.cast_to_fp32("logits", "lm_head.product");
            Ok(())
        }
    }

    fn cast_to_fp32(&mut self, name: &str, input: &str) {
        self.graph
            .node(name, "Cast", &[input], vec![to(DataType::Float)]);
    }

    /// Adds an RMS norm of the residual stream with its weight.
    pub fn weighted_norm(&mut self, name: &str, input: &str, tensor: &str) -> Result<String> {
        let dims = [self.config.hidden_size];
        let weight = self.tensors.take(tensor, &dims)?;
        let weight = self.float_constant(tensor, &weight, &dims)?;
        Ok(self.rms_norm(name, input, &weight))
    }

    /// Adds an RMS norm of the residual stream whose weight has gone into the product behind it.
    pub fn unweighted_norm(&mut self, name: &str, input: &str) -> Result<String> {
        let hidden = self.config.hidden_size;
        let ones = "constants.ones";
        if !self.graph.has_constant(ones) {
            self.float_constant(ones, &vec![1.0; hidden], &[hidden])?;
        }
        Ok(self.rms_norm(name, input, ones))
    }

    /// Names a vector or matrix of the activations' element type as a constant.
    pub fn float_constant(&mut self, name: &str, values: &[f32], dims: &[usize]) -> Result<String> {
        let stored = self.store_floats(values).context(name.to_owned())?;
        self.graph.constant(name, self.element, dims, &stored);
        Ok(name.to_owned())
    }

    /// Stores values in the element type of the activations.
    pub fn store_floats(&mut self, values: &[f32]) -> Result<Stored> {
        Ok(match self.element {
            DataType::Float16 => self.graph.store(&to_f16(values)?)?,
            DataType::Bfloat16 => self.graph.store(&to_bf16(values))?,
            _ => self.graph.store(values)?,
        })
    }

    /// Stores a matrix `[rows, columns]` in the element type of the activations as `[columns, rows]`.
    pub fn store_transposed(&mut self, values: Vec<f32>, columns: usize) -> Result<Stored> {
        Ok(match self.element {
            DataType::Float16 => {
                let halves = to_f16(&values)?;
                drop(values);
                self.graph.store(&transpose(&halves, columns))?
            }
            DataType::Bfloat16 => {
                let halves = to_bf16(&values);
                drop(values);
                self.graph.store(&transpose(&halves, columns))?
            }
            _ => self.graph.store(&transpose(&values, columns))?,
        })
    }

    /// Adds an RMS norm over the last axis, its statistics in fp32.
    pub fn rms_norm(&mut self, name: &str, input: &str, weight: &str) -> String {
        self.graph.node(
            name,
            "RMSNormalization",
            &[input, weight],
            vec![
                int("axis", -1),
                float("epsilon", self.config.norm_epsilon),
                int("stash_type", i32::from(DataType::Float).into()),
            ],
        )
    }

    /// Cuts the last axis of a value into named parts.
    fn split(&mut self, input: &str, parts: &[(&str, usize)]) {
        let sizes: Vec<i64> = parts.iter().map(|&(_, size)| size as i64).collect();
        let sizes = self.graph.ints(&sizes);
        let outputs: Vec<&str> = parts.iter().map(|&(name, _)| name).collect();
        self.graph.call(super::graph::Call {
            domain: "",
            op_type: "Split",
            inputs: &[input, &sizes],
            outputs: &outputs,
            attributes: vec![int("axis", -1)],
        });
    }

    fn inputs(&mut self) {
        let ids = DataType::Int64;
        self.graph.input("input_ids", ids, &[BATCH, SEQUENCE]);
        self.graph.input("position_ids", ids, &[BATCH, SEQUENCE]);
        self.graph.input("write_indices", ids, &[BATCH]);
        self.graph.input("nonpad_kv_seqlen", ids, &[BATCH]);
        self.graph.input("logit_indices", ids, &[BATCH, LOGITS]);
        let cache = self.cache_dims();
        for layer in 0..self.config.layers {
            let (key, value) = cache_names("", layer);
            self.graph.input(&key, self.element, &cache);
            self.graph.input(&value, self.element, &cache);
        }
    }

    fn outputs(&mut self) {
        let logits = [BATCH, LOGITS, Dim::Fixed(self.config.vocab_size)];
        self.graph.output("logits", DataType::Float, &logits);
        let cache = self.cache_dims();
        for layer in 0..self.config.layers {
            let (key, value) = cache_names("updated_", layer);
            self.graph.output(&key, self.element, &cache);
            self.graph.output(&value, self.element, &cache);
        }
        if !self.options.taps.is_empty() {
            let width = self.options.taps.len() * self.config.hidden_size;
            let taps = [BATCH, SEQUENCE, Dim::Fixed(width)];
            self.graph
                .output("aux_hidden_states", DataType::Float, &taps);
        }
    }

    fn cache_dims(&self) -> [Dim; 3] {
        [
            BATCH,
            MAX,
            Dim::Fixed(self.config.kv_heads * self.config.head_dim),
        ]
    }
}

/// Element type of activations and caches.
pub fn element(precision: Precision) -> DataType {
    match precision {
        Precision::Fp32 | Precision::Int8 | Precision::Int4 => DataType::Float,
        Precision::Fp16 => DataType::Float16,
        Precision::Bf16 => DataType::Bfloat16,
    }
}

/// Fails if a configuration has sizes that no graph can be made of.
pub fn check(config: &DecoderConfig, options: &Options) -> Result<()> {
    for (name, size) in [
        ("vocab_size", config.vocab_size),
        ("hidden_size", config.hidden_size),
        ("intermediate_size", config.intermediate_size),
        ("layers", config.layers),
        ("heads", config.heads),
        ("kv_heads", config.kv_heads),
        ("head_dim", config.head_dim),
        ("context_tokens", config.context_tokens),
    ] {
        ensure!(size > 0, "{name} is 0, must be at least 1");
    }
    ensure!(
        config.heads.is_multiple_of(config.kv_heads),
        "heads is {}, must be a multiple of kv_heads, {}",
        config.heads,
        config.kv_heads
    );
    ensure!(
        config.head_dim.is_multiple_of(2),
        "head_dim is {}, must be even",
        config.head_dim
    );
    ensure!(
        config.windows.len() == config.layers,
        "there are {} windows for {} layers",
        config.windows.len(),
        config.layers
    );
    if let Some(layer) = config.windows.iter().position(|&window| window == Some(0)) {
        anyhow::bail!("the window of layer {layer} is 0, must be at least 1");
    }
    ensure!(
        config.norm_epsilon.is_finite() && config.norm_epsilon > 0.0,
        "norm_epsilon is {}, must be a positive number",
        config.norm_epsilon
    );
    if let Some(&tap) = options.taps.iter().find(|&&tap| tap >= config.layers) {
        anyhow::bail!(
            "tap {tap} is out of range, the model has layers 0 to {}",
            config.layers - 1
        );
    }
    ensure!(
        options.taps.is_sorted_by(|a, b| a < b),
        "taps {:?} must rise",
        options.taps
    );
    Ok(())
}
