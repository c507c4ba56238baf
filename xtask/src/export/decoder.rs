//! The decoder as a graph: embedding, layers, taps, norm and head, with the inputs and outputs of the target contract.
//!
//! Inputs: `input_ids`, `position_ids` i64 `[batch, sequence]`; `write_indices` i64 `[batch]`, the first cache row that each sequence's new tokens are
//! written to; `nonpad_kv_seqlen` i64 `[batch]`, the valid rows after that; `logit_indices` i64 `[batch, n]`, the rows of the call that get logits;
//! for each layer `key_cache.N` and `value_cache.N` `[batch, max, kv_heads * head_dim]`.
//! Outputs: `logits` f32 `[batch, n, vocabulary]`; for each layer `updated_key_cache.N` and `updated_value_cache.N`, for which the caller binds the
//! memory of the input; with taps, `aux_hidden_states` f32 `[batch, sequence, taps * hidden]`, the residual stream behind those layers.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use outrider_bundle::manifest::Precision;
use outrider_bundle::onnx::DataType;

use super::Options;
use super::attention::{Heads, cache_names};
use super::exporter::Exporter;
use super::feed_forward::FeedForward;
use super::graph::{Dim, GraphBuilder, int};
use super::linear::{Linear, Reads};
use super::rotation::Rotation;
use super::tensors::Tensors;
use super::vocabulary::{Ends, EndsShape, MatrixForm};
use crate::checkpoint::DecoderConfig;

const BATCH: Dim = Dim::Symbol("batch");
const SEQUENCE: Dim = Dim::Symbol("sequence");
const MAX: Dim = Dim::Symbol("max");
const LOGITS: Dim = Dim::Symbol("n");

/// The graph input whose axes are those of every row of the decoder.
pub const ROWS: &str = "input_ids";

/// Channels per block of the residual stream's rotation: it is in the weights, so a larger one costs nothing but at the taps and the head.
const LARGEST_RESIDUAL_BLOCK: usize = 256;

/// One decoder on its way into one graph.
pub struct Decoder<'a> {
    /// Shape and arithmetic of the decoder.
    pub config: &'a DecoderConfig,
    /// What is asked for.
    pub options: &'a Options,
    /// The graph and the weights.
    pub exporter: Exporter<'a>,
    /// Windows that have a mask already.
    pub masks: BTreeSet<usize>,
    /// Name of the distances that window masks are made of, once there is one.
    pub distances: Option<String>,
}

impl<'a> Decoder<'a> {
    /// Starts with an empty graph.
    pub fn new(
        config: &'a DecoderConfig,
        options: &'a Options,
        graph: GraphBuilder,
        tensors: Tensors<'a>,
    ) -> Self {
        let mut exporter = Exporter::new(options.precision, config.norm_epsilon, graph, tensors);
        exporter.residual_rotation = ends_form(config.hidden_size, options.precision).rotation;
        Self {
            config,
            options,
            exporter,
            masks: BTreeSet::new(),
            distances: None,
        }
    }

    /// Builds the whole graph; fails if the checkpoint holds more tensors than the decoder has a place for.
    ///
    /// Returns the two ends as well, which a draft shares.
    pub fn build(mut self) -> Result<(GraphBuilder, Ends)> {
        self.inputs();
        self.exporter.rotary_tables(
            &self.config.rope,
            self.config.head_dim,
            self.config.context_tokens,
            self.options.attention,
        )?;
        let (shape, form) = (
            EndsShape::of(self.config),
            ends_form(self.config.hidden_size, self.options.precision),
        );
        let ends = (self.exporter).ends(&shape, form, |exporter, name| {
            exporter.tensors.take(name, &shape.dims())
        })?;
        let mut hidden = self.exporter.embedding("input_ids", &ends.embedding);
        let mut outputs = Vec::new();
        for layer in 0..self.config.layers {
            hidden = self.layer(layer, &hidden)?;
            outputs.push(hidden.clone());
        }
        let taps = self.options.taps.iter();
        let taps: Vec<String> = taps.map(|&layer| outputs[layer].clone()).collect();
        self.taps(&taps)?;
        self.logits(&hidden, &ends)?;
        self.outputs();
        self.exporter.tensors.finish()?;
        Ok((self.exporter.graph, ends))
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
            rows_like: ROWS,
            reads: Reads::Normed(tensor("input_layernorm.weight")),
            writes_residual: false,
            keeps_float: false,
        };
        let joined = self.exporter.linear(input, &projections)?;
        let [query, key, value] = [
            name("attention.q"),
            name("attention.k"),
            name("attention.v"),
        ];
        self.exporter.split(
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
            rows_like: ROWS,
            reads: Reads::Plain,
            writes_residual: true,
            keeps_float: false,
        };
        let attended = self.exporter.linear(&attended, &output)?;
        let residual = self.exporter.graph.node(
            &name("attention.residual"),
            "Add",
            &[input, &attended],
            vec![],
        );

        let feed_forward = FeedForward {
            name: name("mlp"),
            tensors: tensor("mlp"),
            inner,
            hidden,
            biased: mlp_bias,
            reads: Reads::Normed(tensor("post_attention_layernorm.weight")),
            rows_like: ROWS,
        };
        let down = self.exporter.feed_forward(&residual, &feed_forward)?;
        Ok(self
            .exporter
            .graph
            .node(&name("residual"), "Add", &[&residual, &down], vec![]))
    }

    /// The residual stream behind the tapped layers, side by side.
    fn taps(&mut self, taps: &[String]) -> Result<()> {
        if taps.is_empty() {
            return Ok(());
        }
        let inputs: Vec<&str> = taps.iter().map(String::as_str).collect();
        let as_they_are =
            self.exporter.residual_rotation.is_none() && self.exporter.element == DataType::Float;
        let name = if as_they_are {
            "aux_hidden_states"
        } else {
            "taps"
        };
        let joined = self
            .exporter
            .graph
            .node(name, "Concat", &inputs, vec![int("axis", -1)]);
        if let Some(rotation) = self.exporter.residual_rotation {
            let width = taps.len() * self.config.hidden_size;
            self.exporter
                .rotate_back("aux_hidden_states", &joined, rotation, width)?;
        } else if !as_they_are {
            self.exporter.cast_to_fp32("aux_hidden_states", &joined);
        }
        Ok(())
    }

    /// Picks the rows that get logits before the last norm, so that the others cost no head.
    fn logits(&mut self, hidden: &str, ends: &Ends) -> Result<()> {
        let last_axis = self.exporter.graph.ints(&[-1]);
        let indices = self.exporter.graph.node(
            "logit_rows.indices",
            "Unsqueeze",
            &["logit_indices", &last_axis],
            vec![],
        );
        let rows = self.exporter.graph.node(
            "logit_rows",
            "GatherND",
            &[hidden, &indices],
            vec![int("batch_dims", 1)],
        );
        let rows = match self.exporter.residual_rotation {
            Some(rotation) => {
                let hidden = self.config.hidden_size;
                self.exporter
                    .rotate_back("logit_rows.rotated_back", &rows, rotation, hidden)?
            }
            None => rows,
        };
        let hidden = self.config.hidden_size;
        let normed = (self.exporter).weighted_norm("norm", &rows, "model.norm.weight", hidden)?;
        self.exporter
            .head(&normed, &ends.head, "logit_indices", "logits")
    }

    fn inputs(&mut self) {
        let ids = DataType::Int64;
        self.exporter
            .graph
            .input("input_ids", ids, &[BATCH, SEQUENCE]);
        self.exporter
            .graph
            .input("position_ids", ids, &[BATCH, SEQUENCE]);
        self.exporter.graph.input("write_indices", ids, &[BATCH]);
        self.exporter.graph.input("nonpad_kv_seqlen", ids, &[BATCH]);
        self.exporter
            .graph
            .input("logit_indices", ids, &[BATCH, LOGITS]);
        let cache = self.cache_dims();
        for layer in 0..self.config.layers {
            let (key, value) = cache_names("", layer);
            self.exporter
                .graph
                .input(&key, self.exporter.element, &cache);
            self.exporter
                .graph
                .input(&value, self.exporter.element, &cache);
        }
    }

    fn outputs(&mut self) {
        let logits = [BATCH, LOGITS, Dim::Fixed(self.config.vocab_size)];
        self.exporter
            .graph
            .output("logits", DataType::Float, &logits);
        let cache = self.cache_dims();
        for layer in 0..self.config.layers {
            let (key, value) = cache_names("updated_", layer);
            self.exporter
                .graph
                .output(&key, self.exporter.element, &cache);
            self.exporter
                .graph
                .output(&value, self.exporter.element, &cache);
        }
        if !self.options.taps.is_empty() {
            let width = self.options.taps.len() * self.config.hidden_size;
            let taps = [BATCH, SEQUENCE, Dim::Fixed(width)];
            self.exporter
                .graph
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

/// How embedding and head of a decoder are stored: in the basis of its residual stream.
pub fn ends_form(hidden_size: usize, precision: Precision) -> MatrixForm {
    let rotation =
        (precision == Precision::Int8).then(|| Rotation::new(hidden_size, LARGEST_RESIDUAL_BLOCK));
    MatrixForm {
        precision,
        rotation,
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
    let distinct: BTreeSet<usize> = options.taps.iter().copied().collect();
    ensure!(
        distinct.len() == options.taps.len(),
        "taps {:?} name a layer twice",
        options.taps
    );
    Ok(())
}
