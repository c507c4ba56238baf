//! A checkpoint, whatever it was stored as: one description of the decoder, one naming of the weights.
//!
//! Readers (GGUF, Hugging Face directories) bring every format to this form: Hugging Face tensor names, `[out, in]` matrices, fp32 values, and rotary
//! rows in half-split order. The exporter knows nothing of formats. A feature that this form can't express is an error in the reader.

mod draft;
mod gguf;
mod hugging_face;
mod inventory;
mod source;
#[cfg(test)]
mod testing;

use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, ensure};
use outrider_bundle::manifest::{GenerationDefaults, Source};

pub use draft::{Dflash2, DraftAttention, DraftCheckpoint, DraftConfig, open_draft};

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

impl DecoderConfig {
    /// More layers than any model has; a bound on what a damaged file can ask for.
    const MAX_LAYERS: usize = 4096;
    /// Bound on every size, so that no product of two of them overflows.
    const MAX_SIZE: usize = i32::MAX as usize;

    /// Refuses sizes that no decoder can have.
    fn check(&self) -> anyhow::Result<()> {
        check_sizes(&[
            ("vocabulary", self.vocab_size),
            ("hidden size", self.hidden_size),
            ("feed-forward size", self.intermediate_size),
            ("number of layers", self.layers),
            ("number of heads", self.heads),
            ("number of key/value heads", self.kv_heads),
            ("head size", self.head_dim),
            ("context length", self.context_tokens),
        ])?;
        ensure!(
            self.layers <= Self::MAX_LAYERS,
            "number of layers {} is out of range, allowed are 1 to {}",
            self.layers,
            Self::MAX_LAYERS
        );
        ensure!(
            self.heads.is_multiple_of(self.kv_heads),
            "{} heads can't share {} key/value heads",
            self.heads,
            self.kv_heads
        );
        ensure!(
            self.head_dim.is_multiple_of(2),
            "head size {} is not even, so it can't be rotated",
            self.head_dim
        );
        ensure!(
            self.norm_epsilon.is_finite() && self.norm_epsilon > 0.0,
            "norm epsilon {} is not positive",
            self.norm_epsilon
        );
        ensure!(
            self.rope.theta.is_finite() && self.rope.theta > 1.0,
            "rope theta {} is not above 1",
            self.rope.theta
        );
        let empty = self.windows.iter().position(|window| *window == Some(0));
        ensure!(
            empty.is_none(),
            "the sliding window of layer {} is empty",
            empty.unwrap_or_default()
        );
        Ok(())
    }
}

/// Refuses sizes that are 0, or so large that a product of two of them overflows.
fn check_sizes(sizes: &[(&str, usize)]) -> anyhow::Result<()> {
    for (what, size) in sizes {
        ensure!(
            (1..=DecoderConfig::MAX_SIZE).contains(size),
            "{what} {size} is out of range, allowed are 1 to {}",
            DecoderConfig::MAX_SIZE
        );
    }
    Ok(())
}

/// Opens a checkpoint: a GGUF file, or a directory as Hugging Face publishes them.
///
/// Reads every weight file once, for its digest; tensors are read when they are asked for.
pub fn open(path: &Path) -> anyhow::Result<Checkpoint> {
    open_allowing(path, &[])
}

/// As [`open`], but lets the keys in `unknown_config` stand in `config.json` although the reader doesn't know what they mean.
///
/// For keys that the caller knows to change nothing in the forward pass; a key that isn't there, or is known, is an error.
pub fn open_allowing(path: &Path, unknown_config: &[String]) -> anyhow::Result<Checkpoint> {
    let read = || {
        if path.is_dir() {
            ensure!(
                path.join("config.json").is_file(),
                "the directory has no config.json"
            );
            return hugging_face::read(path, unknown_config);
        }
        ensure!(
            unknown_config.is_empty(),
            "only a directory with a config.json can have unknown settings"
        );
        let mut start = Vec::new();
        File::open(path)?.take(4).read_to_end(&mut start)?;
        ensure!(
            start == gguf::MAGIC,
            "neither a GGUF file nor a directory with a config.json"
        );
        gguf::read(path)
    };
    read().with_context(|| format!("checkpoint {}", path.display()))
}
