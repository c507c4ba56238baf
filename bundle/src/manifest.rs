//! `bundle.json`: every file of a model with its size and digest, and the facts a server needs before it opens one.
//!
//! The manifest is the only thing that says what a bundle is.
//! It refuses unknown fields and unknown schema versions, and holds no path that leaves the bundle directory.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Name of the manifest inside a bundle directory.
pub const FILE_NAME: &str = "bundle.json";

/// The schema version this build reads and writes.
pub const SCHEMA_VERSION: u32 = 1;

/// A bundle manifest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Version of this format, [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Model name as callers see it in `/v1/models`.
    pub name: String,
    /// Every file of the bundle except the manifest, keyed by its path relative to the bundle directory, with `/` as separator.
    pub files: BTreeMap<String, FileEntry>,
    /// Facts about the target.
    pub target: TargetFacts,
    /// Facts about the draft, when the bundle holds one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft: Option<DraftFacts>,
    /// Tokenizer and chat template.
    pub text: TextFacts,
    /// Defaults for requests that leave a field out.
    pub generation: GenerationDefaults,
    /// Tools that made the bundle, name to version.
    pub tools: BTreeMap<String, String>,
    /// Inputs the bundle was made from.
    pub sources: Vec<Source>,
}

/// Size and digest of one file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Size in bytes.
    pub size_bytes: u64,
    /// Lower-case hexadecimal SHA-256.
    pub sha256: String,
}

/// How the attention nodes of a target graph are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Attention {
    /// `outrider.CachedAttention`, a custom op of the server.
    Native,
    /// Standard operators of opset 24: `TensorScatter` and `Attention`.
    Portable,
}

/// Numeric form of the weights of a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// fp32 weights and activations.
    Fp32,
    /// fp16 weights and activations.
    Fp16,
    /// bf16 weights and activations.
    Bf16,
    /// int8 weights per output channel, activations quantised per row.
    Int8,
    /// 4-bit weights in blocks of 32, `MatMulNBits`.
    Int4,
}

/// Facts about the target graph; every one is checked against the graph itself when a bundle is made and when it is loaded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TargetFacts {
    /// Path of the graph inside the bundle.
    pub graph: String,
    /// Model family, such as `llama` or `qwen3`.
    pub architecture: String,
    /// Numeric form of the weights.
    pub precision: Precision,
    /// Form of the attention nodes.
    pub attention: Attention,
    /// Number of decoder layers.
    pub layers: usize,
    /// Hidden size.
    pub hidden_size: usize,
    /// Key/value heads per layer.
    pub kv_heads: usize,
    /// Size of one head.
    pub head_dim: usize,
    /// Rows of the embedding and of the logits.
    pub vocab_size: usize,
    /// Longest sequence the model supports, in tokens.
    pub context_tokens: usize,
    /// Element type of the KV cache: `float32`, `float16` or `bfloat16`.
    pub kv_dtype: String,
    /// 0-based ids of the layers whose output `aux_hidden_states` carries, in its order; empty when the graph has no taps.
    #[serde(default)]
    pub taps: Vec<usize>,
}

/// Facts about the draft graph.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DraftFacts {
    /// Path of the graph inside the bundle.
    pub graph: String,
    /// `DFlashDraftModel` or `DFlash2DraftModel`.
    pub architecture: String,
    /// Anchor and mask slots of one draft pass.
    pub block_size: usize,
    /// Candidates per slot.
    pub top_k: usize,
    /// Token id of the mask slots.
    pub mask_token_id: u32,
    /// Target layers whose output the draft reads, in order.
    pub target_layer_ids: Vec<usize>,
    /// Longest context the draft supports, in tokens.
    pub context_tokens: usize,
}

/// Tokenizer and chat template.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TextFacts {
    /// Path of `tokenizer.json` inside the bundle.
    pub tokenizer: String,
    /// Path of the chat template (Jinja), when the model has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chat_template: Option<String>,
    /// Text of the beginning-of-sequence token, as templates refer to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bos_token: Option<String>,
    /// Text of the end-of-sequence token, as templates refer to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eos_token: Option<String>,
    /// Whether the tokenizer puts the beginning-of-sequence token before a plain prompt.
    pub add_bos: bool,
}

/// Defaults for requests that leave a field out, from the model's own generation settings.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GenerationDefaults {
    /// Tokens that end an answer.
    pub eos_token_ids: Vec<u32>,
    /// Softmax temperature.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f32>,
    /// Nucleus bound.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top_p: Option<f32>,
    /// Candidate bound.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top_k: Option<u32>,
}

/// One input a bundle was made from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// What it is, for example `SmolLM2-135M-Instruct.Q4_1.gguf`.
    pub name: String,
    /// Lower-case hexadecimal SHA-256.
    pub sha256: String,
    /// SPDX licence expression, when known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub licence: Option<String>,
}
