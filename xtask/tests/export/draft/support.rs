//! Golden drafts, and exported graphs that are run directly.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use half::f16;
use ort::session::{Session, SessionInputValue};
use ort::value::{DynValue, Tensor};
use outrider_bundle::manifest::{Attention, DraftFacts, Precision};
use outrider_bundle::onnx::ModelProto;
use outrider_server::model::runtime;
use outrider_server::ops;
use prost::Message;
use safetensors::{Dtype, SafeTensors};
use tempfile::TempDir;
use xtask::checkpoint::{DraftCheckpoint, Weights, open_draft};
use xtask::export::{DraftOptions, SharedEnds, write_draft_graph};

/// Every golden draft with a cases file of its own.
pub const DRAFTS: [&str; 4] = [
    "dflash1-tiny",
    "dflash1-swa-tiny",
    "dflash2-tiny",
    "dflash2-scaled-tiny",
];

/// The forms that are held to the goldens.
pub const FORMS: [Attention; 2] = [Attention::Portable, Attention::Native];

/// Directory of a golden draft.
pub fn draft_dir(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/goldens")
        .join(name)
}

/// A golden draft.
pub fn draft(name: &str) -> DraftCheckpoint {
    open_draft(&draft_dir(name), &[]).unwrap()
}

/// Options of a whole fp32 graph.
pub fn options(form: Attention, stages: bool) -> DraftOptions {
    DraftOptions {
        precision: Precision::Fp32,
        form,
        vocabulary: None,
        stages,
    }
}

/// A tensor of a golden file or of a graph.
#[derive(Clone, Debug, PartialEq)]
pub struct Array<T> {
    /// Shape.
    pub shape: Vec<usize>,
    /// Row-major values.
    pub values: Vec<T>,
}

impl<T: Clone> Array<T> {
    /// Values of the first `count` rows.
    pub fn rows(&self, count: usize) -> Vec<T> {
        let width: usize = self.shape[1..].iter().product();
        self.values[..count * width].to_vec()
    }
}

/// The tensors of a golden `cases.safetensors`.
pub struct Cases {
    floats: BTreeMap<String, Array<f32>>,
    ints: BTreeMap<String, Array<i64>>,
}

impl Cases {
    /// Reads those of a golden draft.
    pub fn of(name: &str) -> Self {
        let bytes = fs::read(draft_dir(name).join("cases.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let (mut floats, mut ints) = (BTreeMap::new(), BTreeMap::new());
        for (name, view) in file.iter() {
            let shape = view.shape().to_vec();
            match view.dtype() {
                Dtype::F32 => {
                    let values = view.data().chunks_exact(4);
                    let values = values.map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
                    let values = values.collect();
                    floats.insert(name.to_owned(), Array { shape, values });
                }
                Dtype::I64 => {
                    let values = view.data().chunks_exact(8);
                    let values = values.map(|bytes| i64::from_le_bytes(bytes.try_into().unwrap()));
                    let values = values.collect();
                    ints.insert(name.to_owned(), Array { shape, values });
                }
                other => panic!("{name} has type {other:?}"),
            }
        }
        Self { floats, ints }
    }

    /// A float tensor.
    pub fn floats(&self, name: &str) -> &Array<f32> {
        self.floats
            .get(name)
            .unwrap_or_else(|| panic!("there is no {name}"))
    }

    /// An integer tensor.
    pub fn ints(&self, name: &str) -> &Array<i64> {
        self.find_ints(name)
            .unwrap_or_else(|| panic!("there is no {name}"))
    }

    /// An integer tensor, if there is one.
    pub fn find_ints(&self, name: &str) -> Option<&Array<i64>> {
        self.ints.get(name)
    }

    /// Names of the tensors that begin with a prefix, without it.
    pub fn below(&self, prefix: &str) -> Vec<String> {
        let names = self.floats.keys().chain(self.ints.keys());
        names
            .filter_map(|name| Some(name.strip_prefix(prefix)?.to_owned()))
            .collect()
    }

    /// Names of the cases that are one draft pass.
    pub fn passes(&self) -> Vec<String> {
        let names = self.floats.keys();
        let names = names.filter_map(|name| Some(name.strip_suffix(".in.taps")?.to_owned()));
        names.collect()
    }
}

/// The target's two matrices, as [`SharedEnds::alone`] takes them.
impl Weights for Cases {
    fn names(&self) -> Vec<String> {
        ["lm_head.weight", "model.embed_tokens.weight"]
            .map(str::to_owned)
            .into()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        let name = name.trim_start_matches("model.");
        Some(self.floats(&format!("target.{name}")).shape.clone())
    }

    fn load(&self, name: &str) -> anyhow::Result<Vec<f32>> {
        let name = name.trim_start_matches("model.");
        Ok(self.floats(&format!("target.{name}")).values.clone())
    }
}

/// What one slot has in a pass.
#[derive(Clone, Debug, Default)]
pub struct Slot {
    /// Rows of its cache that are valid.
    pub start: usize,
    /// Taps of the new context rows.
    pub taps: Vec<f32>,
    /// Positions of the new context rows; the block follows the last one.
    pub positions: Vec<i64>,
    /// The anchor and masks, without padding.
    pub block: Vec<i64>,
    /// Position of the anchor.
    pub anchor_position: i64,
    /// Temperature of the walk.
    pub temperature: f32,
    /// Noise seed.
    pub seed: i64,
}

/// An exported draft in a session of its own, with a cache for several slots.
pub struct Graph {
    /// What the exporter says about it.
    pub facts: DraftFacts,
    session: Session,
    tap_size: usize,
    slots: usize,
    /// Key and value cache of each layer, `[slots, max, kv_heads * head_dim]`.
    pub caches: Vec<[Vec<f32>; 2]>,
    /// Most candidates per slot of the next calls.
    pub candidate_topk: i64,
    /// Rows beyond the needed ones in the next calls, of context and block.
    pub padding: [usize; 2],
}

/// Rows of each slot's cache.
pub const MAX: usize = 128;

/// What a pass gave.
pub struct Outputs {
    /// Outputs of floats by name.
    pub floats: BTreeMap<String, Array<f32>>,
    /// Outputs of integers by name.
    pub ints: BTreeMap<String, Array<i64>>,
}

impl Graph {
    /// Exports and loads a draft whose target is two matrices.
    pub fn load(
        checkpoint: &DraftCheckpoint,
        ends: &dyn Weights,
        options: &DraftOptions,
        slots: usize,
    ) -> Self {
        Self::load_changed(checkpoint, ends, options, slots, |_| {})
    }

    /// As [`Graph::load`], after a change of the graph file.
    pub fn load_changed(
        checkpoint: &DraftCheckpoint,
        ends: &dyn Weights,
        options: &DraftOptions,
        slots: usize,
        change: impl FnOnce(&mut ModelProto),
    ) -> Self {
        let dir = TempDir::new().unwrap();
        let ends = SharedEnds::alone(&checkpoint.config, ends, options.precision);
        let facts = write_draft_graph(checkpoint, &ends, options, dir.path()).unwrap();
        let file = dir.path().join(&facts.graph);
        let mut model = ModelProto::decode(&fs::read(&file).unwrap()[..]).unwrap();
        change(&mut model);
        fs::write(&file, model.encode_to_vec()).unwrap();
        Self::open(dir.path(), facts, checkpoint.config.tap_size(), slots)
    }

    /// Loads the draft graph in a directory.
    pub fn open(dir: &Path, facts: DraftFacts, tap_size: usize, slots: usize) -> Self {
        let environment = runtime::environment(&runtime::library_for_tests(), 2).unwrap();
        let registration = runtime::registration();
        let session = Session::builder(environment)
            .unwrap()
            .with_operators(ops::domain().unwrap())
            .unwrap()
            .commit_from_file(dir.join(&facts.graph))
            .unwrap();
        drop(registration);
        let cache = slots * MAX * facts.kv_heads * facts.head_dim;
        Self {
            session,
            tap_size,
            slots,
            caches: vec![[vec![0.0; cache], vec![0.0; cache]]; facts.layers],
            candidate_topk: facts.top_k as i64,
            padding: [0, 0],
            facts,
        }
    }

    /// Runs a pass; its updated caches become the caches.
    pub fn run(&mut self, slots: &[Slot]) -> Outputs {
        assert_eq!(slots.len(), self.slots);
        let most = |size: fn(&Slot) -> usize| slots.iter().map(size).max().unwrap();
        let context = most(|slot| slot.positions.len()) + self.padding[0];
        let block = most(|slot| slot.block.len()).max(2) + self.padding[1];
        let batch = slots.len();
        // Padding is unlike anything a case has.
        let mut taps = vec![9.0; batch * context * self.tap_size];
        let mut context_positions = vec![3; batch * context];
        let mut blocks = vec![5; batch * block];
        let mut block_positions = vec![2; batch * block];
        for (index, slot) in slots.iter().enumerate() {
            taps[index * context * self.tap_size..][..slot.taps.len()].copy_from_slice(&slot.taps);
            context_positions[index * context..][..slot.positions.len()]
                .copy_from_slice(&slot.positions);
            blocks[index * block..][..slot.block.len()].copy_from_slice(&slot.block);
            for row in 0..slot.block.len() {
                block_positions[index * block + row] = slot.anchor_position + row as i64;
            }
        }
        let per_slot = |value: fn(&Slot) -> i64| -> DynValue {
            let values: Vec<i64> = slots.iter().map(value).collect();
            Tensor::from_array(([batch], values)).unwrap().into_dyn()
        };
        let ids = |shape: [usize; 2], values: Vec<i64>| -> DynValue {
            Tensor::from_array((shape, values)).unwrap().into_dyn()
        };
        let floats = |shape: Vec<usize>, values: Vec<f32>| -> DynValue {
            Tensor::from_array((shape, values)).unwrap().into_dyn()
        };
        let temperatures = slots.iter().map(|slot| slot.temperature).collect();
        let mut inputs: Vec<(String, DynValue)> = [
            ("taps", floats(vec![batch, context, self.tap_size], taps)),
            (
                "context_position_ids",
                ids([batch, context], context_positions),
            ),
            ("context_start", per_slot(|slot| slot.start as i64)),
            ("context_rows", per_slot(|slot| slot.positions.len() as i64)),
            ("block_ids", ids([batch, block], blocks)),
            ("block_position_ids", ids([batch, block], block_positions)),
            ("block_rows", per_slot(|slot| slot.block.len() as i64)),
            ("temperature", floats(vec![batch], temperatures)),
            ("seed", per_slot(|slot| slot.seed)),
            (
                "candidate_topk",
                Tensor::from_array(([1], vec![self.candidate_topk]))
                    .unwrap()
                    .into_dyn(),
            ),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into();
        let width = self.facts.kv_heads * self.facts.head_dim;
        for (layer, caches) in self.caches.iter().enumerate() {
            for (side, cache) in ["key", "value"].iter().zip(caches) {
                let shape = vec![batch, MAX, width];
                let cache = match self.facts.kv_dtype.as_str() {
                    "float16" => {
                        let halves: Vec<f16> = cache.iter().copied().map(f16::from_f32).collect();
                        Tensor::from_array((shape, halves)).unwrap().into_dyn()
                    }
                    _ => floats(shape, cache.clone()),
                };
                inputs.push((format!("{side}_cache.{layer}"), cache));
            }
        }
        let inputs: Vec<(String, SessionInputValue)> = inputs
            .into_iter()
            .map(|(name, value)| (name, value.into()))
            .collect();
        let results = self.session.run(inputs).unwrap();
        let mut outputs = Outputs {
            floats: BTreeMap::new(),
            ints: BTreeMap::new(),
        };
        for (name, value) in results.iter() {
            let shape = |shape: &[i64]| shape.iter().map(|&size| size as usize).collect();
            let mut insert = |dims: &[i64], values: Vec<f32>| {
                let shape = shape(dims);
                outputs
                    .floats
                    .insert(name.to_owned(), Array { shape, values });
            };
            if let Ok((dims, values)) = value.try_extract_tensor::<f32>() {
                insert(dims, values.to_vec());
            } else if let Ok((dims, values)) = value.try_extract_tensor::<f16>() {
                insert(dims, values.iter().map(|value| value.to_f32()).collect());
            } else {
                let (dims, values) = value.try_extract_tensor::<i64>().unwrap();
                let array = Array {
                    shape: shape(dims),
                    values: values.to_vec(),
                };
                outputs.ints.insert(name.to_owned(), array);
            }
        }
        drop(results);
        for (layer, caches) in self.caches.iter_mut().enumerate() {
            for (side, cache) in ["key", "value"].iter().zip(caches) {
                *cache = outputs.floats[&format!("updated_{side}_cache.{layer}")]
                    .values
                    .clone();
            }
        }
        outputs
    }
}

/// The part of one slot of an output.
pub fn of_slot<T: Clone>(array: &Array<T>, slot: usize) -> Array<T> {
    let size: usize = array.shape[1..].iter().product();
    Array {
        shape: array.shape[1..].to_vec(),
        values: array.values[slot * size..][..size].to_vec(),
    }
}

/// The first value that is farther from the expected one than fp32 explains, or a NaN.
pub fn disagreement(actual: &[f32], expected: &[f32]) -> Option<String> {
    assert_eq!(actual.len(), expected.len());
    let near = |(a, e): (&f32, &f32)| (a - e).abs() <= 2e-4 + 1e-4 * e.abs();
    let mut pairs = actual.iter().zip(expected);
    let index = pairs.position(|pair| !near(pair))?;
    Some(format!(
        "value {index} is {}, expected {}",
        actual[index], expected[index]
    ))
}
