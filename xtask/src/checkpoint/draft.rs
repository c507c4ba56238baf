//! Draft checkpoints: directories with a `DFlashDraftModel` or a `DFlash2DraftModel`.
//!
//! Reads `config.json` and the safetensors files as z-lab publishes them, strictly: an unknown setting, a missing or an unknown tensor is an error.
//! A draft has neither embedding nor head, both are the target's. Checkpoints in the Speculators format, whose layer ids count differently, and
//! settings of single vendors are refused by name.
//!
//! Model: DFlash, arXiv 2602.06036; DFlash 2 adds grouped dynamic convolutions and a low-rank candidate selector.

mod config;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, ensure};
use outrider_bundle::manifest::Source;
use rayon::prelude::*;

use super::hugging_face::fields::Fields;
use super::hugging_face::weights::SafetensorsWeights;
use super::{Rope, Weights, hugging_face, inventory, source};

/// A draft checkpoint.
pub struct DraftCheckpoint {
    /// Shape and arithmetic of the draft.
    pub config: DraftConfig,
    /// The weights by their published names, such as `layers.0.self_attn.q_proj.weight`.
    pub weights: Box<dyn Weights>,
    /// The files this checkpoint was read from.
    pub sources: Vec<Source>,
}

/// Shape and arithmetic of a block drafter: Qwen3-like layers over a block of an anchor and masks, which see the target's taps as context.
#[derive(Clone, Debug, PartialEq)]
pub struct DraftConfig {
    /// Rows of the target's embedding and head.
    pub vocab_size: usize,
    /// Hidden size of draft and target.
    pub hidden_size: usize,
    /// Inner size of the feed-forward part.
    pub intermediate_size: usize,
    /// Number of draft layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Size of one head; even.
    pub head_dim: usize,
    /// Epsilon of every RMS norm.
    pub norm_epsilon: f32,
    /// Longest sequence the rotary embedding is meant for, in tokens.
    pub context_tokens: usize,
    /// Rotary embedding, the draft's own.
    pub rope: Rope,
    /// What each layer sees.
    pub attention: Vec<DraftAttention>,
    /// Whether q, k, v and output projections have biases.
    pub attention_bias: bool,
    /// Rows of a block: anchor and masks.
    pub block_size: usize,
    /// Token id of the mask rows.
    pub mask_token_id: u32,
    /// 0-based target layers whose output is the context, in the order of their columns.
    pub target_layer_ids: Vec<usize>,
    /// Layers of the target that the draft was trained for, when the file says so.
    pub num_target_layers: Option<usize>,
    /// Multiplies the embedding of every row of a block.
    pub input_embedding_scale: f32,
    /// Multiplies the logits.
    pub output_multiplier: f32,
    /// `c` of `c * tanh(logit / c)`, which follows the multiplier.
    pub logit_softcap: Option<f32>,
    /// What DFlash 2 adds; `None` is DFlash 1.
    pub dflash2: Option<Dflash2>,
}

/// What one layer of a draft sees of the context and of its block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftAttention {
    /// Whether a row sees no later row of its block.
    pub causal: bool,
    /// Sliding window in rows, the query included. `None` sees all.
    pub window: Option<usize>,
}

/// Sizes of the parts that DFlash 2 adds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dflash2 {
    /// Rows that a convolution reads.
    pub conv_kernel_size: usize,
    /// Channels that share one dynamic coefficient; divides the hidden size.
    pub conv_group_size: usize,
    /// Rank of the candidate selector.
    pub selector_rank: usize,
    /// Candidates per slot.
    pub selector_top_k: usize,
}

impl DraftConfig {
    /// The name that `config.json` gives to the architecture.
    pub fn architecture(&self) -> &'static str {
        match self.dflash2 {
            None => config::DFLASH_1,
            Some(_) => config::DFLASH_2,
        }
    }

    /// Names and shapes of all tensors.
    pub fn tensors(&self) -> BTreeMap<String, Vec<usize>> {
        let config = self;
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let query = config.heads * config.head_dim;
        let key_value = config.kv_heads * config.head_dim;
        let mut tensors = BTreeMap::new();
        let mut add = |name: String, shape: &[usize]| tensors.insert(name, shape.to_vec());
        add("fc.weight".to_owned(), &[hidden, config.tap_size()]);
        add("hidden_norm.weight".to_owned(), &[hidden]);
        add("norm.weight".to_owned(), &[hidden]);
        for layer in 0..config.layers {
            let name = |part: &str| format!("layers.{layer}.{part}");
            for norm in ["input_layernorm", "post_attention_layernorm"] {
                add(name(&format!("{norm}.weight")), &[hidden]);
            }
            for (projection, rows, columns) in [
                ("q_proj", query, hidden),
                ("k_proj", key_value, hidden),
                ("v_proj", key_value, hidden),
                ("o_proj", hidden, query),
            ] {
                add(
                    name(&format!("self_attn.{projection}.weight")),
                    &[rows, columns],
                );
                if config.attention_bias {
                    add(name(&format!("self_attn.{projection}.bias")), &[rows]);
                }
            }
            for norm in ["q_norm", "k_norm"] {
                add(
                    name(&format!("self_attn.{norm}.weight")),
                    &[config.head_dim],
                );
            }
            for (projection, rows, columns) in [
                ("gate_proj", inner, hidden),
                ("up_proj", inner, hidden),
                ("down_proj", hidden, inner),
            ] {
                add(name(&format!("mlp.{projection}.weight")), &[rows, columns]);
            }
            if let Some(dflash2) = &config.dflash2 {
                let taps = dflash2.conv_kernel_size;
                let coefficients = 2 * taps * (hidden / dflash2.conv_group_size);
                for conv in ["attention_conv", "mlp_conv"] {
                    add(name(&format!("{conv}.base_kernel")), &[2, taps, hidden]);
                    add(
                        name(&format!("{conv}.kernel_projection.weight")),
                        &[coefficients, hidden],
                    );
                }
            }
        }
        if let Some(dflash2) = &config.dflash2 {
            let rank = dflash2.selector_rank;
            for codebook in ["predecessor_codebook", "successor_codebook"] {
                // Published without the suffix `.weight`.
                add(
                    format!("candidate_selector.{codebook}"),
                    &[config.vocab_size, rank],
                );
            }
            add(
                "candidate_selector.hidden_projection.weight".to_owned(),
                &[rank, hidden],
            );
        }
        tensors
    }

    /// Size of the taps of one position.
    pub fn tap_size(&self) -> usize {
        self.target_layer_ids.len() * self.hidden_size
    }
}

/// Opens a draft checkpoint. `allowed` are keys of `config.json` that the reader doesn't know and the caller vouches for.
///
/// Reads every weight file once, for its digest; tensors are read when they are asked for.
pub fn open_draft(directory: &Path, allowed: &[String]) -> anyhow::Result<DraftCheckpoint> {
    read(directory, allowed).with_context(|| format!("draft checkpoint {}", directory.display()))
}

fn read(directory: &Path, allowed: &[String]) -> anyhow::Result<DraftCheckpoint> {
    ensure!(
        directory.join("config.json").is_file(),
        "there is no config.json: a draft checkpoint is a directory with a config.json and safetensors files"
    );
    let config = config::read(Fields::read(directory, "config.json")?, allowed)?;
    let mask_embedding = "mask_embedding.pt";
    ensure!(
        !directory.join(mask_embedding).exists(),
        "{mask_embedding} is not supported: the mask's embedding must be the target's row of mask_token_id"
    );
    let weights = SafetensorsWeights::open_files(directory)?;
    inventory::check(&config.tensors(), &weights.shapes())?;
    let licence = hugging_face::licence(directory)?;
    let sources = weights
        .paths()
        .par_iter()
        .map(|path| {
            let source = source::describe(path, licence.clone())?;
            // The target's files have the same names.
            Ok(Source {
                name: format!("draft/{}", source.name),
                ..source
            })
        })
        .collect::<anyhow::Result<_>>()?;
    Ok(DraftCheckpoint {
        config,
        weights: Box::new(weights),
        sources,
    })
}
