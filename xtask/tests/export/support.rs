//! Checkpoints, bundles and loaded targets of the tests.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use outrider_bundle::VerifiedBundle;
use outrider_bundle::manifest::{Attention, Precision};
use outrider_server::model::{
    Batch, BatchRow, ExecutionProvider, OnnxTarget, SessionOptions, Target, TargetOptions, runtime,
};
use safetensors::SafeTensors;
use tempfile::TempDir;
use xtask::checkpoint::{self, Checkpoint, Weights};
use xtask::export::{Options, write_bundle};

/// Every tiny checkpoint.
pub const CHECKPOINTS: [&str; 8] = [
    "llama",
    "llama-linear",
    "llama-llama3",
    "llama-yarn",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3-yarn",
];

/// Both forms of attention.
pub const ATTENTIONS: [Attention; 2] = [Attention::Native, Attention::Portable];

/// Every precision.
pub const PRECISIONS: [Precision; 5] = [
    Precision::Fp32,
    Precision::Fp16,
    Precision::Bf16,
    Precision::Int8,
    Precision::Int4,
];

/// Directory of a tiny checkpoint.
pub fn checkpoint_dir(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/goldens/hugging_face")
        .join(name)
}

/// A tiny checkpoint.
pub fn checkpoint(name: &str) -> Checkpoint {
    checkpoint::open(&checkpoint_dir(name)).unwrap()
}

/// Options with taps after every layer.
pub fn options(checkpoint: &Checkpoint, precision: Precision, attention: Attention) -> Options {
    Options {
        precision,
        attention,
        taps: (0..checkpoint.config.layers).collect(),
    }
}

/// A tiny checkpoint as a loaded target with four slots.
pub fn target(name: &str, precision: Precision, attention: Attention) -> OnnxTarget {
    target_of(&checkpoint(name), precision, attention)
}

/// A checkpoint as a loaded target with four slots.
pub fn target_of(
    checkpoint: &Checkpoint,
    precision: Precision,
    attention: Attention,
) -> OnnxTarget {
    target_with(checkpoint, &options(checkpoint, precision, attention))
}

/// A checkpoint as a loaded target with four slots and these options.
pub fn target_with(checkpoint: &Checkpoint, options: &Options) -> OnnxTarget {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("bundle");
    write_bundle(checkpoint, options, &out).unwrap();
    load(&out)
}

/// Every file of a directory.
pub fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    fs::read_dir(dir)
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            (name, fs::read(entry.path()).unwrap())
        })
        .collect()
}

/// A random checkpoint whose sizes are multiples of 8 only: no block of 32 fits them.
pub fn odd_checkpoint(tied_embeddings: bool) -> Checkpoint {
    let mut checkpoint = checkpoint("llama");
    let config = &mut checkpoint.config;
    config.layers = 2;
    config.windows = vec![None; 2];
    config.hidden_size = 40;
    config.intermediate_size = 56;
    config.heads = 5;
    config.kv_heads = 1;
    config.head_dim = 8;
    config.tied_embeddings = tied_embeddings;
    let mut shapes = BTreeMap::new();
    let mut add = |name: String, shape: &[usize]| shapes.insert(name, shape.to_vec());
    add("model.embed_tokens.weight".to_owned(), &[128, 40]);
    add("model.norm.weight".to_owned(), &[40]);
    if !tied_embeddings {
        add("lm_head.weight".to_owned(), &[128, 40]);
    }
    for layer in 0..2 {
        for (name, shape) in [
            ("input_layernorm", &[40][..]),
            ("post_attention_layernorm", &[40]),
            ("self_attn.q_proj", &[40, 40]),
            ("self_attn.k_proj", &[8, 40]),
            ("self_attn.v_proj", &[8, 40]),
            ("self_attn.o_proj", &[40, 40]),
            ("mlp.gate_proj", &[56, 40]),
            ("mlp.up_proj", &[56, 40]),
            ("mlp.down_proj", &[40, 56]),
        ] {
            add(format!("model.layers.{layer}.{name}.weight"), shape);
        }
    }
    checkpoint.weights = Box::new(Random(shapes));
    checkpoint
}

/// Weights that are random functions of their names, of the size that keeps activations near 1.
pub struct Random(pub BTreeMap<String, Vec<usize>>);

impl Weights for Random {
    fn names(&self) -> Vec<String> {
        self.0.keys().cloned().collect()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.0.get(name).cloned()
    }

    fn load(&self, name: &str) -> anyhow::Result<Vec<f32>> {
        let shape = &self.0[name];
        let seed = name.bytes().fold(1, |seed: u32, byte| {
            seed.wrapping_mul(31).wrapping_add(byte.into())
        });
        let uniform = tokens(seed, shape.iter().product())
            .into_iter()
            .map(|value| (value as f32 - 63.5) / 37.0);
        let columns = shape[shape.len() - 1];
        Ok(match shape.len() {
            1 => uniform.map(|value| 1.0 + 0.2 * value).collect(),
            _ => uniform
                .map(|value| value / (columns as f32).sqrt())
                .collect(),
        })
    }
}

/// A bundle as a loaded target with four slots.
pub fn load(bundle: &Path) -> OnnxTarget {
    let bundle = VerifiedBundle::open(bundle).unwrap();
    let options = TargetOptions {
        session: SessionOptions {
            library: runtime::library_for_tests(),
            execution_provider: ExecutionProvider::Cpu,
            intra_op_threads: 2,
        },
        slots: 4,
        parking_slots: 0,
        block_size: None,
        context_tokens: None,
        kv_limit_bytes: 1 << 30,
    };
    OnnxTarget::load(&bundle, &options).unwrap()
}

/// What one row of a call gave.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rows {
    /// Logits of every token.
    pub logits: Vec<Vec<f32>>,
    /// Taps of every token.
    pub taps: Vec<Vec<f32>>,
}

/// Feeds tokens to consecutive slots in one call and returns what each slot's tokens gave. Each part is a start position and tokens.
pub fn forward(target: &mut OnnxTarget, first_slot: usize, parts: &[(usize, &[u32])]) -> Vec<Rows> {
    let width = parts.iter().map(|(_, tokens)| tokens.len()).max().unwrap();
    let batch = Batch {
        first_slot,
        rows: parts
            .iter()
            .map(|&(start, tokens)| BatchRow {
                start,
                tokens: tokens.to_vec(),
                logits: 0..tokens.len(),
            })
            .collect(),
        width,
        logit_width: width,
        taps: true,
    };
    target.forward(&batch).unwrap();
    let rows = |(row, (_, tokens)): (usize, &(usize, &[u32]))| Rows {
        logits: (0..tokens.len())
            .map(|index| target.logits(row, index).to_vec())
            .collect(),
        taps: (0..tokens.len())
            .map(|index| target.taps().of(row, index).to_vec())
            .collect(),
    };
    parts.iter().enumerate().map(rows).collect()
}

/// Feeds a sequence to one slot in chunks.
pub fn run_in_chunks(
    target: &mut OnnxTarget,
    slot: usize,
    tokens: &[u32],
    chunks: impl IntoIterator<Item = usize>,
) -> Rows {
    let mut all = Rows::default();
    let mut start = 0;
    for chunk in chunks {
        let end = (start + chunk).min(tokens.len());
        if start == end {
            break;
        }
        let rows = forward(target, slot, &[(start, &tokens[start..end])]).remove(0);
        all.logits.extend(rows.logits);
        all.taps.extend(rows.taps);
        start = end;
    }
    assert_eq!(all.logits.len(), tokens.len());
    all
}

/// A fixed sequence of tokens below 128.
pub fn tokens(seed: u32, length: usize) -> Vec<u32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    (0..length)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 25
        })
        .collect()
}

/// Recorded results of transformers for one sequence of a tiny checkpoint.
pub struct Golden {
    /// The sequence.
    pub tokens: Vec<u32>,
    /// Logits of the whole sequence in one call.
    pub logits: Vec<Vec<f32>>,
    /// Residual stream after all layers, side by side, per token.
    pub taps: Vec<Vec<f32>>,
    /// How a run with a cache cuts the sequence.
    pub chunks: Vec<usize>,
    /// Logits of that run.
    pub cached_logits: Vec<Vec<f32>>,
}

/// The recorded sequences of a tiny checkpoint.
pub fn goldens(name: &str) -> Vec<Golden> {
    let bytes = fs::read(checkpoint_dir(name).join("cases.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let ints = |name: String| -> Vec<i64> {
        let data = file.tensor(&name).unwrap().data().to_vec();
        data.chunks_exact(8)
            .map(|bytes| i64::from_le_bytes(bytes.try_into().unwrap()))
            .collect()
    };
    let floats = |name: String| -> (Vec<usize>, Vec<f32>) {
        let tensor = file.tensor(&name).unwrap();
        let values = tensor.data().chunks_exact(4);
        let values = values.map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
        (tensor.shape().to_vec(), values.collect())
    };
    let matrix = |name: String| -> Vec<Vec<f32>> {
        let (shape, values) = floats(name);
        values.chunks(shape[1]).map(<[f32]>::to_vec).collect()
    };
    (0..2)
        .map(|case| {
            let (shape, hidden) = floats(format!("{case}.hidden"));
            let [layers, length, size] = shape[..] else {
                panic!("hidden has three dimensions");
            };
            let tap =
                |layer: usize, token: usize| &hidden[(layer * length + token) * size..][..size];
            Golden {
                tokens: ints(format!("{case}.input_ids"))
                    .into_iter()
                    .map(|id| id as u32)
                    .collect(),
                logits: matrix(format!("{case}.logits")),
                taps: (0..length)
                    .map(|token| {
                        (0..layers)
                            .flat_map(|layer| tap(layer, token).to_vec())
                            .collect()
                    })
                    .collect(),
                chunks: ints(format!("{case}.chunks"))
                    .into_iter()
                    .map(|chunk| chunk as usize)
                    .collect(),
                cached_logits: matrix(format!("{case}.cached_logits")),
            }
        })
        .collect()
}

/// Largest difference of two matrices; a NaN counts as infinite.
pub fn largest_difference(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .flat_map(|(a, b)| {
            assert_eq!(a.len(), b.len());
            a.iter().zip(b)
        })
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, |largest, difference| {
            if difference.is_nan() {
                f32::INFINITY
            } else {
                largest.max(difference)
            }
        })
}

/// Root mean square of a matrix.
pub fn rms(values: &[Vec<f32>]) -> f32 {
    let count = values.iter().map(Vec::len).sum::<usize>();
    let squares: f32 = values.iter().flatten().map(|value| value * value).sum();
    (squares / count as f32).sqrt()
}

/// Root mean square of a difference, relative to the second matrix.
pub fn relative_error(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    let difference = |(a, b): (&Vec<f32>, &Vec<f32>)| -> Vec<f32> {
        a.iter().zip(b).map(|(a, b)| a - b).collect()
    };
    let differences: Vec<Vec<f32>> = a.iter().zip(b).map(difference).collect();
    rms(&differences) / rms(b)
}
