//! The configuration: what the server would refuse, and what it asks of the machine.

use serde::{Deserialize, Serialize};

/// The configuration: what the server would refuse, and what it asks of the machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConfigFacts {
    /// Where the model is to run; [`ExecutionProvider::Cpu`] when the configuration could not be read, which is a failure by itself.
    pub execution_provider: ExecutionProvider,
    /// Number of the CUDA device that the model is to run on, as CUDA counts them.
    pub device_id: u32,
    /// Everything that the server would refuse in the configuration, in its own words.
    pub faults: Vec<String>,
    /// What is wrong with the files of keys and certificates that it names, in the server's own words.
    pub file_faults: Vec<String>,
    /// What it asks for; `None` when it has faults.
    pub settings: Option<Settings>,
}

/// Where a model runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExecutionProvider {
    /// The CPU provider of ONNX Runtime.
    #[default]
    Cpu,
    /// The CUDA provider of ONNX Runtime.
    Cuda,
}

/// What a configuration without faults asks for; fields are named after its keys.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// Directory of the bundle.
    pub bundle: String,
    /// The ONNX Runtime library.
    pub onnxruntime_library: String,
    /// The OpenAI-compatible interface.
    pub listen: Listener,
    /// The admin interface.
    pub admin_listen: Listener,
    /// Whether listeners beyond loopback may do without keys and tokens.
    pub allow_unauthenticated: bool,
    /// Whether the OpenAI-compatible interface speaks TLS.
    pub tls: bool,
    /// Files of keys, tokens and certificates.
    pub secret_files: Vec<NamedPath>,
    /// Connections that are open at the same time.
    pub max_connections: usize,
    /// Drafting.
    pub speculative: Speculative,
    /// Completions that run at the same time.
    pub max_concurrency: usize,
    /// Tokens of one slot, when it is not the model's own context.
    pub context_tokens: Option<usize>,
    /// Share of free memory that the KV memory may take.
    pub kv_cache_ratio: f64,
    /// Prompt tokens that one step feeds.
    pub prefill_chunk_tokens: usize,
    /// Threads of a step; `None` is one for each core.
    pub intra_op_threads: Option<usize>,
    /// Slots beside those that run that keep beginnings of prompts; 0 when none are kept.
    pub prefix_cache_slots: usize,
    /// File of the log; `None` is standard error.
    pub log_path: Option<String>,
    /// The audit log.
    pub audit: Option<Audit>,
}

/// A listener.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Listener {
    /// Where: an address and a port, or `unix:` and a path.
    pub endpoint: String,
    /// Whether others than this machine can reach it.
    pub is_public: bool,
    /// Whether it asks for keys or tokens.
    pub has_keys: bool,
}

/// A path with the key that names it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NamedPath {
    /// The configuration key.
    pub key: String,
    /// The path.
    pub path: String,
}

/// Drafting.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Speculative {
    /// Whether the server drafts.
    pub enabled: bool,
    /// Whether it refuses to start when it can't.
    pub required: bool,
    /// Tokens of one block, when it is not the draft's own.
    pub draft_block_size: Option<usize>,
    /// Candidates per position, when it is not the draft's own.
    pub candidate_topk: Option<usize>,
}

/// The audit log.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Audit {
    /// Its file.
    pub path: String,
    /// Whether it holds prompts and completions.
    pub prompt_text: bool,
    /// Size of one file.
    pub max_file_bytes: u64,
    /// Files that are kept.
    pub max_files: usize,
}
