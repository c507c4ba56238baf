//! What the metadata and tensors of a GGUF file of architecture `llama` mean.
//!
//! Refuses every other architecture, and within `llama` every metadata key it doesn't know: a key that changes the arithmetic must not pass unseen.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, bail, ensure};
use outrider_bundle::manifest::GenerationDefaults;

use super::{Gguf, Metadata, tokenizer};
use crate::checkpoint::{Checkpoint, DecoderConfig, Rope, RopeScaling, Weights, inventory, source};

const ROPE_FACTORS: &str = "rope_freqs.weight";

/// The only parameters Llama 3.1 to 3.3 were published with, apart from the factor.
const LLAMA3_LOW_FREQ_FACTOR: f64 = 1.0;
const LLAMA3_HIGH_FREQ_FACTOR: f64 = 4.0;
const LLAMA3_ORIGINAL_CONTEXT: usize = 8192;

/// Keys of the architecture that are read.
const READ_KEYS: &[&str] = &[
    "vocab_size",
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
];

/// Keys of the architecture that are harmless, whatever they say: notes about training.
const IGNORED_KEYS: &[&str] = &["rope.scaling.finetuned"];

/// Keys of the architecture that change the arithmetic unless they are 0, false or 1 as given here.
fn has_neutral_value(key: &str, metadata: &Metadata) -> anyhow::Result<bool> {
    let full = format!("llama.{key}");
    Ok(match key {
        "expert_count" | "expert_used_count" | "attention.sliding_window" => {
            metadata.size(&full)? == Some(0)
        }
        "attention.causal" => metadata.flag(&full)? == Some(true),
        "use_parallel_residual" => metadata.flag(&full)? == Some(false),
        "rope.scaling.yarn_ext_factor" | "embedding_scale" | "residual_scale" | "logit_scale" => {
            metadata.number(&full)? == Some(1.0)
        }
        "rope.scaling.yarn_log_multiplier" => metadata.number(&full)? == Some(0.0),
        "tensor_data_layout" => metadata.text(&full)? == Some("reference"),
        _ => false,
    })
}

/// Reads a GGUF file.
pub fn read(path: &Path) -> anyhow::Result<Checkpoint> {
    let gguf = Gguf::open(path)?;
    let metadata = &gguf.header.metadata;
    let architecture = metadata
        .text("general.architecture")?
        .context("metadata key general.architecture is missing")?;
    ensure!(
        architecture == "llama",
        "architecture {architecture} is not supported, only llama"
    );

    if let Some(kind) = metadata.text("general.type")? {
        ensure!(
            kind == "model",
            "general.type {kind} is not supported, only model"
        );
    }

    let config = config(&gguf)?;
    config.check()?;
    let tokenizer = tokenizer::read(metadata, config.vocab_size)?;
    let licence = metadata.text("general.license")?.and_then(source::spdx);
    let sources = vec![source::describe(path, licence)?];
    Ok(Checkpoint {
        name: model_name(path),
        weights: Box::new(LlamaWeights::new(gguf, &config)?),
        config,
        text: tokenizer.text,
        generation: GenerationDefaults {
            eos_token_ids: tokenizer.eos_token_ids,
            ..GenerationDefaults::default()
        },
        sources,
    })
}

/// The file name without its extension and without the name of the quantisation: `SmolLM2-135M-Instruct.Q4_1.gguf` is `SmolLM2-135M-Instruct`.
fn model_name(path: &Path) -> String {
    let stem = path
        .file_stem()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    let is_quantisation = |part: &str| {
        let upper = part.to_ascii_uppercase();
        matches!(upper.as_str(), "F32" | "F16" | "BF16")
            || upper
                .strip_prefix('Q')
                .is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    match stem.rsplit_once(['.', '-']) {
        Some((name, last)) if is_quantisation(last) && !name.is_empty() => name.to_string(),
        _ => stem,
    }
}

fn config(gguf: &Gguf) -> anyhow::Result<DecoderConfig> {
    let metadata = &gguf.header.metadata;
    let tensors = &gguf.header.tensors;
    for key in metadata
        .0
        .keys()
        .filter_map(|key| key.strip_prefix("llama."))
    {
        let known = READ_KEYS.contains(&key)
            || IGNORED_KEYS.contains(&key)
            || has_neutral_value(key, metadata)?;
        ensure!(
            known,
            "metadata key llama.{key} is not supported with the value it has"
        );
    }

    let layers = metadata.required_size("llama.block_count")?;
    let hidden_size = metadata.required_size("llama.embedding_length")?;
    let heads = metadata.required_size("llama.attention.head_count")?;
    let kv_heads = metadata
        .size("llama.attention.head_count_kv")?
        .unwrap_or(heads);
    // Every layer has tensors, so more layers than tensors are nonsense; this bounds what the inventory allocates.
    ensure!(
        (1..=tensors.len()).contains(&layers),
        "llama.block_count is {layers}, but the file has {} tensors",
        tensors.len()
    );

    let head_dim = match metadata.size("llama.attention.key_length")? {
        Some(key_length) => key_length,
        None => {
            ensure!(
                heads > 0 && hidden_size.is_multiple_of(heads),
                "llama.embedding_length {hidden_size} is not a multiple of {heads} heads"
            );
            hidden_size / heads
        }
    };
    if let Some(value_length) = metadata.size("llama.attention.value_length")? {
        ensure!(
            value_length == head_dim,
            "llama.attention.value_length {value_length} differs from the key length {head_dim}"
        );
    }
    let rotated = metadata
        .size("llama.rope.dimension_count")?
        .unwrap_or(head_dim);
    ensure!(
        rotated == head_dim,
        "llama.rope.dimension_count {rotated} differs from the head size {head_dim}: partial rotation is not supported"
    );

    let embedding = tensors
        .get("token_embd.weight")
        .context("tensor token_embd.weight is missing")?;
    let vocab_size = embedding.shape[0];
    if let Some(stated) = metadata.size("llama.vocab_size")? {
        ensure!(
            stated == vocab_size,
            "llama.vocab_size is {stated}, but token_embd.weight has {vocab_size} rows"
        );
    }
    let norm_epsilon = metadata
        .number("llama.attention.layer_norm_rms_epsilon")?
        .context("metadata key llama.attention.layer_norm_rms_epsilon is missing")?;

    Ok(DecoderConfig {
        architecture: "llama".to_string(),
        vocab_size,
        hidden_size,
        intermediate_size: metadata.required_size("llama.feed_forward_length")?,
        layers,
        heads,
        kv_heads,
        head_dim,
        norm_epsilon: norm_epsilon as f32,
        context_tokens: metadata.required_size("llama.context_length")?,
        rope: Rope {
            theta: metadata.number("llama.rope.freq_base")?.unwrap_or(10_000.0),
            scaling: rope_scaling(gguf, head_dim)?,
        },
        windows: vec![None; layers],
        qk_norm: false,
        qkv_bias: tensors.contains_key("blk.0.attn_q.bias"),
        o_bias: tensors.contains_key("blk.0.attn_output.bias"),
        mlp_bias: tensors.contains_key("blk.0.ffn_gate.bias"),
        tied_embeddings: !tensors.contains_key("output.weight"),
    })
}

fn rope_scaling(gguf: &Gguf, head_dim: usize) -> anyhow::Result<RopeScaling> {
    let metadata = &gguf.header.metadata;
    let factor = match metadata.number("llama.rope.scaling.factor")? {
        Some(factor) => Some(factor),
        None => metadata.number("llama.rope.scale_linear")?,
    };
    // A factor of 0 stands for "not set".
    let factor = factor.filter(|&factor| factor != 0.0);
    let kind = metadata
        .text("llama.rope.scaling.type")?
        .unwrap_or(if factor.is_some() { "linear" } else { "none" });
    let factor = factor.unwrap_or(1.0);
    ensure!(
        factor >= 1.0,
        "llama.rope.scaling.factor is {factor}, allowed is 1 and more"
    );

    let scaling = match kind {
        "none" => RopeScaling::None,
        "linear" if factor == 1.0 => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor },
        "yarn" => {
            let number = |key: &str| metadata.number(&format!("llama.rope.scaling.{key}"));
            let attention = number("attn_factor")?
                .or(number("yarn_attn_factor")?)
                .unwrap_or(1.0);
            RopeScaling::Yarn {
                factor,
                original_context: match metadata
                    .size("llama.rope.scaling.original_context_length")?
                {
                    Some(context) => context,
                    None => metadata.required_size("llama.context_length")?,
                },
                beta_fast: number("yarn_beta_fast")?.unwrap_or(32.0),
                beta_slow: number("yarn_beta_slow")?.unwrap_or(1.0),
                attention_factor: attention * (1.0 + 0.1 * libm::log(factor)),
                truncate: true,
            }
        }
        other => {
            bail!("llama.rope.scaling.type {other} is not supported, only none, linear and yarn")
        }
    };

    if !gguf.header.tensors.contains_key(ROPE_FACTORS) {
        return Ok(scaling);
    }
    ensure!(
        scaling == RopeScaling::None,
        "{ROPE_FACTORS} together with llama.rope.scaling.type {kind} is not supported"
    );
    let theta = metadata.number("llama.rope.freq_base")?.unwrap_or(10_000.0);
    llama3_scaling(&gguf.load(ROPE_FACTORS)?, theta, head_dim)
}

/// Finds the Llama 3 scaling that divides the frequencies by exactly these factors, one a pair of channels.
fn llama3_scaling(factors: &[f32], theta: f64, head_dim: usize) -> anyhow::Result<RopeScaling> {
    ensure!(
        factors.len() == head_dim / 2,
        "{ROPE_FACTORS} has {} values, expected one for each of {} channel pairs",
        factors.len(),
        head_dim / 2
    );
    ensure!(
        factors.iter().all(|factor| factor.is_finite()),
        "{ROPE_FACTORS} has values that are not finite"
    );
    let factor = factors.iter().copied().fold(1.0, f32::max);
    if factors.iter().all(|&factor| factor == 1.0) {
        return Ok(RopeScaling::None);
    }
    let original = LLAMA3_ORIGINAL_CONTEXT as f64;
    for (pair, &found) in factors.iter().enumerate() {
        let wavelength =
            std::f64::consts::TAU * libm::pow(theta, (2 * pair) as f64 / head_dim as f64);
        let smooth = (original / wavelength - LLAMA3_LOW_FREQ_FACTOR)
            / (LLAMA3_HIGH_FREQ_FACTOR - LLAMA3_LOW_FREQ_FACTOR);
        let smooth = smooth.clamp(0.0, 1.0);
        let expected = 1.0 / ((1.0 - smooth) / f64::from(factor) + smooth);
        ensure!(
            (f64::from(found) - expected).abs() <= 1e-4 * expected,
            "{ROPE_FACTORS} has {found} at {pair} where llama3 scaling (factor {factor}, low 1, high 4, original context 8192) has {expected}: \
             no other scaling by a tensor is supported"
        );
    }
    Ok(RopeScaling::Llama3 {
        factor: factor.into(),
        low_freq_factor: LLAMA3_LOW_FREQ_FACTOR,
        high_freq_factor: LLAMA3_HIGH_FREQ_FACTOR,
        original_context: LLAMA3_ORIGINAL_CONTEXT,
    })
}

/// The GGUF name of a tensor of the inventory.
fn gguf_name(name: &str) -> String {
    match name {
        inventory::EMBEDDING => return "token_embd.weight".to_string(),
        inventory::HEAD => return "output.weight".to_string(),
        "model.norm.weight" => return "output_norm.weight".to_string(),
        _ => {}
    }
    name.replace("model.layers.", "blk.")
        .replace("input_layernorm", "attn_norm")
        .replace("post_attention_layernorm", "ffn_norm")
        .replace("self_attn.o_proj", "attn_output")
        .replace("self_attn.q_proj", "attn_q")
        .replace("self_attn.k_proj", "attn_k")
        .replace("self_attn.v_proj", "attn_v")
        .replace("mlp.gate_proj", "ffn_gate")
        .replace("mlp.up_proj", "ffn_up")
        .replace("mlp.down_proj", "ffn_down")
}

struct LlamaWeights {
    gguf: Gguf,
    shapes: BTreeMap<String, Vec<usize>>,
    head_dim: usize,
}

impl LlamaWeights {
    fn new(gguf: Gguf, config: &DecoderConfig) -> anyhow::Result<LlamaWeights> {
        let shapes = inventory::expected(config);
        let expected = shapes
            .iter()
            .map(|(name, shape)| (gguf_name(name), shape.clone()))
            .collect();
        let found = gguf
            .header
            .tensors
            .iter()
            .filter(|(name, _)| *name != ROPE_FACTORS);
        let found = found
            .map(|(name, info)| (name.clone(), info.shape.clone()))
            .collect();
        inventory::check(&expected, &found)?;
        Ok(LlamaWeights {
            gguf,
            shapes,
            head_dim: config.head_dim,
        })
    }
}

impl Weights for LlamaWeights {
    fn names(&self) -> Vec<String> {
        self.shapes.keys().cloned().collect()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.shapes.get(name).cloned()
    }

    fn load(&self, name: &str) -> anyhow::Result<Vec<f32>> {
        ensure!(
            self.shapes.contains_key(name),
            "tensor {name} is not part of this checkpoint"
        );
        let values = self.gguf.load(&gguf_name(name))?;
        if name.contains("self_attn.q_proj") || name.contains("self_attn.k_proj") {
            let rows = self.shapes[name][0];
            return Ok(to_half_split(&values, rows, self.head_dim));
        }
        Ok(values)
    }
}

/// GGUF stores the rows of a head so that rows `2i` and `2i + 1` turn together; half-split order has them at `i` and `i + head_dim / 2`.
fn to_half_split(values: &[f32], rows: usize, head_dim: usize) -> Vec<f32> {
    let columns = values.len() / rows;
    let mut split = Vec::with_capacity(values.len());
    for head in values.chunks_exact(head_dim * columns) {
        for row in (0..head_dim).step_by(2).chain((1..head_dim).step_by(2)) {
            split.extend_from_slice(&head[row * columns..][..columns]);
        }
    }
    split
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_named_after_its_file_without_the_quantisation() {
        for (file, expected) in [
            ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
            ("Llama-3.2-1B-Instruct-Q4_K_M.gguf", "Llama-3.2-1B-Instruct"),
            ("mine-f16.gguf", "mine"),
            ("Llama-3.2-1B.gguf", "Llama-3.2-1B"),
            ("Qwen.gguf", "Qwen"),
        ] {
            assert_eq!(model_name(Path::new(file)), expected);
        }
    }
}
