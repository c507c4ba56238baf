//! A checkpoint, whatever it was stored as: one description of the decoder, one naming of the weights.
//!
//! Readers (GGUF, Hugging Face directories) bring every format to this form: Hugging Face tensor names, `[out, in]` matrices, fp32 values, and rotary
//! rows in half-split order. The exporter knows nothing of formats. A feature that this form can't express is an error in the reader.

mod gguf;
mod inventory;
mod source;
#[cfg(test)]
mod testing;

use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, bail};
use outrider_bundle::manifest::{GenerationDefaults, Source};

/// A decoder-only checkpoint.
pub struct Checkpoint {
    /// Model name as callers will see it.
    pub name: String,
    /// Shape and arithmetic of the decoder.
    pub config: DecoderConfig,
    /// The weights by Hugging Face name, such as `model.layers.0.self_attn.q_proj.weight`.
    pub weights: Box<dyn Weights>,
    /// Tokenizer and chat template.
    pub text: TextFiles,
    /// Defaults for requests that leave a field out.
    pub generation: GenerationDefaults,
    /// The files this checkpoint was read from.
    pub sources: Vec<Source>,
}

/// Shape and arithmetic of a Llama-like decoder: pre-norm RMS, rotary attention with grouped heads, gated SiLU feed-forward.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// Model family: `llama`, `mistral`, `qwen2` or `qwen3`.
    pub architecture: String,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Hidden size.
    pub hidden_size: usize,
    /// Inner size of the feed-forward part.
    pub intermediate_size: usize,
    /// Number of decoder layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Size of one head; even.
    pub head_dim: usize,
    /// Epsilon of every RMS norm.
    pub norm_epsilon: f32,
    /// Longest supported sequence in tokens.
    pub context_tokens: usize,
    /// Rotary embedding.
    pub rope: Rope,
    /// Sliding window of each layer: a query sees this many keys, itself included. `None` sees all.
    pub windows: Vec<Option<usize>>,
    /// Whether q and k heads are RMS-normed before the rotation (`q_norm`, `k_norm`).
    pub qk_norm: bool,
    /// Whether q, k and v projections have biases.
    pub qkv_bias: bool,
    /// Whether the output projection of attention has a bias.
    pub o_bias: bool,
    /// Whether the feed-forward projections have biases.
    pub mlp_bias: bool,
    /// Whether the head is the embedding (then there is no `lm_head.weight`).
    pub tied_embeddings: bool,
}

/// Rotary embedding over the whole head, half-split: channel `i` turns with channel `i + head_dim / 2`.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the geometric series of wavelengths.
    pub theta: f64,
    /// How the frequencies are changed for longer contexts.
    pub scaling: RopeScaling,
}

/// Rotary frequency scaling, by its Hugging Face names.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Frequencies as the base gives them.
    None,
    /// All frequencies divided by `factor`.
    Linear {
        /// Divisor.
        factor: f64,
    },
    /// Llama 3: low frequencies divided, high ones kept, a smooth passage between.
    Llama3 {
        /// Divisor of low frequencies.
        factor: f64,
        /// Wavelengths above `original_context / low_freq_factor` are scaled.
        low_freq_factor: f64,
        /// Wavelengths below `original_context / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Context the model was first trained with.
        original_context: usize,
    },
    /// YaRN (arXiv 2309.00071).
    Yarn {
        /// Divisor of interpolated frequencies.
        factor: f64,
        /// Context the model was first trained with.
        original_context: usize,
        /// Rotations above which a frequency is kept.
        beta_fast: f64,
        /// Rotations below which a frequency is interpolated.
        beta_slow: f64,
        /// Multiplies cos and sin.
        attention_factor: f64,
        /// Whether the bounds of the passage are rounded to whole channels.
        truncate: bool,
    },
}

/// Access to the weights of a checkpoint, one tensor at a time, so that a large model never has to be in memory as a whole.
pub trait Weights: Sync {
    /// Names of all tensors, sorted.
    fn names(&self) -> Vec<String>;
    /// Shape of a tensor, `None` when there is none of that name.
    fn shape(&self, name: &str) -> Option<Vec<usize>>;
    /// All values of a tensor as fp32, row-major.
    fn load(&self, name: &str) -> anyhow::Result<Vec<f32>>;
}

/// Tokenizer and chat template of a checkpoint.
#[derive(Clone, Debug)]
pub struct TextFiles {
    /// `tokenizer.json` in the format of the Hugging Face `tokenizers` library.
    pub tokenizer_json: String,
    /// The chat template (Jinja), when the model has one.
    pub chat_template: Option<String>,
    /// Text of the beginning-of-sequence token.
    pub bos_token: Option<String>,
    /// Text of the end-of-sequence token.
    pub eos_token: Option<String>,
    /// Whether the tokenizer puts the beginning-of-sequence token before a plain prompt.
    pub add_bos: bool,
}

/// Opens a checkpoint: a GGUF file, or a directory as Hugging Face publishes them.
///
/// Reads every weight file once, for its digest; tensors are read when they are asked for.
pub fn open(path: &Path) -> anyhow::Result<Checkpoint> {
    let read = || {
        if path.join("config.json").is_file() {
            bail!("not yet");
        }
        if path.is_dir() {
            bail!("the directory has no config.json");
        }
        let mut start = Vec::new();
        File::open(path)?.take(4).read_to_end(&mut start)?;
        if start != gguf::MAGIC {
            bail!("neither a GGUF file nor a directory with a config.json");
        }
        gguf::read(path)
    };
    read().with_context(|| format!("checkpoint {}", path.display()))
}
