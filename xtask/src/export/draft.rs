//! The block drafter as a graph: taps of newly accepted positions and a block of mask tokens in, proposed token ids out.
//!
//! Inputs and outputs are those of the draft contract in `outrider_bundle::contract::draft`. The arithmetic is that of DFlash (arXiv 2602.06036) and DFlash 2.
//!
//! A graph has one of two forms. The native one calls the server's operators for attention, convolutions and the choice of a path. The portable one is made
//! of standard operators only and says in them what the native ones have to compute; it knows no noise, so it always takes the greedy path, and it writes
//! padding rows of the context behind the valid ones, so its cache needs room for all rows of a call.
//!
//! Embedding and head are the target's, and read from the target's own data file where the two are in one bundle. Taps and the draft itself are in the
//! basis of the target's checkpoint; embedding and head are in that of the target's residual stream, so the graph turns the rows on either side.

mod attention;
mod block;
mod convolution;
mod pairing;
mod selector;

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result};
use outrider_bundle::manifest::{Attention, DraftFacts, Precision};
use outrider_bundle::onnx::DataType;

use super::decoder::ends_form;
use super::exporter::Exporter;
use super::graph::{Dim, GraphBuilder};
use super::kv_dtype;
use super::tensors::Tensors;
use super::vocabulary::{Ends, EndsShape, MatrixForm};
use crate::checkpoint::{DecoderConfig, DraftCheckpoint, DraftConfig, Weights};

pub use pairing::check_pair;
pub use pairing::read_vocabulary;

/// Name of the draft's graph file in a bundle.
pub const GRAPH_NAME: &str = "draft.onnx";

/// Name of the file with the draft's own large constants.
pub const DATA_NAME: &str = "draft.onnx.data";

/// Candidates per slot of a DFlash 1 draft, which doesn't say how many: DFlash 2 drafts are published with as many.
const DFLASH_1_TOP_K: usize = 16;

/// What kind of draft graph is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DraftOptions {
    /// Numeric form of the weights.
    pub precision: Precision,
    /// Form of the attention, convolution and selector nodes.
    pub form: Attention,
    /// Tokens that the head is cut to, rising; `None` keeps all.
    pub vocabulary: Option<Vec<u32>>,
    /// Whether the graph also gives out what it computes on the way, as outputs `stage.*`. No server can use such a graph.
    pub stages: bool,
}

/// What a draft shares with its target.
pub struct SharedEnds<'a> {
    /// Holds the target's embedding and head.
    weights: &'a dyn Weights,
    shape: EndsShape,
    form: MatrixForm,
    /// Where their bytes are, when a graph of the same directory has them already.
    stored: Option<Ends>,
    /// Longest sequence of the target, when it is known.
    context_tokens: Option<usize>,
}

impl<'a> SharedEnds<'a> {
    /// Those of a target whose graph has been written beside the draft's.
    pub fn of_target(
        config: &DecoderConfig,
        weights: &'a dyn Weights,
        precision: Precision,
        stored: Ends,
    ) -> Self {
        Self {
            weights,
            shape: EndsShape::of(config),
            form: ends_form(config.hidden_size, precision),
            stored: Some(stored),
            context_tokens: Some(config.context_tokens),
        }
    }

    /// Those of a target of which nothing is there but `model.embed_tokens.weight` and `lm_head.weight`. The draft's own data file takes a copy.
    pub fn alone(config: &DraftConfig, weights: &'a dyn Weights, precision: Precision) -> Self {
        Self {
            weights,
            shape: EndsShape {
                vocab_size: config.vocab_size,
                hidden_size: config.hidden_size,
                tied: false,
            },
            form: ends_form(config.hidden_size, precision),
            stored: None,
            context_tokens: None,
        }
    }
}

/// Writes the graph of a draft, [`GRAPH_NAME`] and [`DATA_NAME`], into a directory and returns what is to be known about it.
pub fn write_draft_graph(
    checkpoint: &DraftCheckpoint,
    ends: &SharedEnds,
    options: &DraftOptions,
    dir: &Path,
) -> Result<DraftFacts> {
    let config = &checkpoint.config;
    let context_tokens = ends.context_tokens.unwrap_or(config.context_tokens);
    let columns = options.vocabulary.as_ref().map(Vec::len);
    let columns = columns.unwrap_or(config.vocab_size);
    let facts = DraftFacts {
        graph: GRAPH_NAME.to_owned(),
        architecture: config.architecture().to_owned(),
        precision: options.precision,
        form: options.form,
        layers: config.layers,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        kv_dtype: kv_dtype(options.precision).to_owned(),
        vocabulary_columns: columns,
        block_size: config.block_size,
        top_k: match &config.dflash2 {
            Some(dflash2) => dflash2.selector_top_k,
            None => DFLASH_1_TOP_K.min(columns),
        },
        mask_token_id: config.mask_token_id,
        target_layer_ids: config.target_layer_ids.clone(),
        context_tokens: config.context_tokens.min(context_tokens),
    };
    pairing::check_vocabulary(
        options.vocabulary.as_deref(),
        config.vocab_size,
        facts.top_k,
    )?;
    let graph = GraphBuilder::create(dir, DATA_NAME)
        .with_context(|| format!("cannot write {}", dir.join(DATA_NAME).display()))?;
    let tensors = Tensors::new(checkpoint.weights.as_ref());
    let graph = Drafter {
        config,
        options,
        facts: &facts,
        exporter: Exporter::new(options.precision, config.norm_epsilon, graph, tensors),
        masks: BTreeSet::new(),
        stages: Vec::new(),
    }
    .build(ends)?;
    graph
        .finish(
            &dir.join(GRAPH_NAME),
            config.architecture(),
            &facts.metadata(),
        )
        .with_context(|| format!("cannot write {}", dir.join(GRAPH_NAME).display()))?;
    Ok(facts)
}

/// One draft on its way into one graph.
struct Drafter<'a> {
    config: &'a DraftConfig,
    options: &'a DraftOptions,
    facts: &'a DraftFacts,
    exporter: Exporter<'a>,
    /// Masks of the portable form that are there already, by name.
    masks: BTreeSet<String>,
    /// Name, element type and shape of each stage that becomes an output.
    stages: Vec<(String, DataType, Vec<Dim>)>,
}

const BATCH: Dim = Dim::Symbol("batch");
const CONTEXT: Dim = Dim::Symbol("context");
const BLOCK: Dim = Dim::Symbol("block");
const SLOTS: Dim = Dim::Symbol("slots");
const MAX: Dim = Dim::Symbol("max");

/// The graph inputs whose axes are those of every context row and of every block row.
const CONTEXT_ROWS: &str = "context_position_ids";
const BLOCK_ROWS: &str = "block_ids";
/// The ids of the mask rows, whose axes are those of every slot.
const SLOT_ROWS: &str = "slot_ids";

impl Drafter<'_> {
    fn build(mut self, shared: &SharedEnds) -> Result<GraphBuilder> {
        self.inputs();
        self.exporter.rotary_tables(
            &self.config.rope,
            self.config.head_dim,
            self.facts.context_tokens,
            self.options.form,
        )?;
        let ends = self.ends(shared)?;
        let fused = self.fuse_taps()?;
        let mut hidden = self.block_embedding(&ends)?;
        for layer in 0..self.config.layers {
            hidden = self.layer(layer, &fused, &hidden)?;
        }
        let slots = self.slots(&hidden)?;
        let logits = self.logits(&slots, &ends)?;
        self.select(&logits, &slots)?;
        self.outputs();
        self.exporter.tensors.finish()?;
        Ok(self.exporter.graph)
    }

    /// The target's embedding, and as much of its head as the draft proposes from.
    fn ends(&mut self, shared: &SharedEnds) -> Result<Ends> {
        let (shape, form) = (&shared.shape, shared.form);
        let mut target = Tensors::new(shared.weights);
        let mut ends = match &shared.stored {
            Some(stored) => stored.clone(),
            None => self
                .exporter
                .ends(shape, form, |_, name| target.take(name, &shape.dims()))?,
        };
        if let Some(tokens) = &self.options.vocabulary {
            let mut target = Tensors::new(shared.weights);
            ends.head = self
                .exporter
                .head_of_tokens(&mut target, shape, form, tokens)?;
        }
        Ok(ends)
    }

    /// Makes a value an output, if stages are asked for.
    fn stage(&mut self, name: &str, value: &str, data_type: DataType, dims: &[Dim]) {
        if !self.options.stages {
            return;
        }
        let name = format!("stage.{name}");
        self.exporter
            .graph
            .node(&name, "Identity", &[value], vec![]);
        self.stages.push((name, data_type, dims.to_vec()));
    }

    /// Makes rows of a block an output, if stages are asked for.
    fn block_stage(&mut self, name: &str, value: &str, width: usize) {
        let element = self.exporter.element;
        self.stage(name, value, element, &[BATCH, BLOCK, Dim::Fixed(width)]);
    }

    fn inputs(&mut self) {
        let graph = &mut self.exporter.graph;
        let ids = DataType::Int64;
        let taps = [BATCH, CONTEXT, Dim::Fixed(self.config.tap_size())];
        graph.input("taps", DataType::Float, &taps);
        graph.input("context_position_ids", ids, &[BATCH, CONTEXT]);
        graph.input("context_start", ids, &[BATCH]);
        graph.input("context_rows", ids, &[BATCH]);
        graph.input("block_ids", ids, &[BATCH, BLOCK]);
        graph.input("block_position_ids", ids, &[BATCH, BLOCK]);
        graph.input("block_rows", ids, &[BATCH]);
        graph.input("temperature", DataType::Float, &[BATCH]);
        graph.input("seed", ids, &[BATCH]);
        graph.input("candidate_topk", ids, &[Dim::Fixed(1)]);
        let cache = self.cache_dims();
        for layer in 0..self.config.layers {
            let (key, value) = super::attention::cache_names("", layer);
            let element = self.exporter.element;
            self.exporter.graph.input(&key, element, &cache);
            self.exporter.graph.input(&value, element, &cache);
        }
    }

    fn outputs(&mut self) {
        let (cache, element) = (self.cache_dims(), self.exporter.element);
        let graph = &mut self.exporter.graph;
        graph.output("draft_ids", DataType::Int64, &[BATCH, SLOTS]);
        for layer in 0..self.config.layers {
            let (key, value) = super::attention::cache_names("updated_", layer);
            graph.output(&key, element, &cache);
            graph.output(&value, element, &cache);
        }
        for (name, data_type, dims) in &self.stages {
            graph.output(name, *data_type, dims);
        }
    }

    fn cache_dims(&self) -> [Dim; 3] {
        [BATCH, MAX, Dim::Fixed(self.kv_width())]
    }

    fn kv_width(&self) -> usize {
        self.config.kv_heads * self.config.head_dim
    }
}
