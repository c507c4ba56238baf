//! A target graph in ONNX Runtime: session, KV slab, and the bindings that let a pass read and write the slab in place.
//!
//! The slab of a layer is `[slots, rows, kv_heads * head_dim]`; a batch over consecutive slots is a view of it, bound to the cache input and to the
//! updated-cache output alike. Bindings are kept per slot range, so a step only binds its small inputs and its outputs again.
#![expect(unsafe_code, reason = "binds views of caller-owned memory")]

use std::collections::HashMap;
use std::path::PathBuf;

use ort::ep;
use ort::memory::Allocator;
use ort::session::builder::GraphOptimizationLevel;
use ort::session::{IoBinding, Session};
use ort::value::{Tensor, TensorElementType, ValueType};
use outrider_bundle::VerifiedBundle;
use outrider_bundle::manifest::{Attention, TargetFacts};

use super::memory::{Buffer, release_freed, view};
use super::{Batch, ModelError, Taps, Target, TargetShape, runtime};

/// Cache rows of a slot beyond its context: padding rows of a batched step may be written there.
const HEADROOM_TOKENS: usize = 32;

/// Where graphs run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExecutionProvider {
    /// The CPU.
    #[default]
    Cpu,
    /// The CUDA device with this index. A session that can't run wholly on it is an error.
    Cuda {
        /// Index of the device.
        device: i32,
    },
}

/// How a target is loaded.
#[derive(Clone, Debug)]
pub struct TargetOptions {
    /// The ONNX Runtime library.
    pub library: PathBuf,
    /// Where the graph runs.
    pub execution_provider: ExecutionProvider,
    /// Sequences that can be held at once.
    pub slots: usize,
    /// Longest sequence in tokens; `None` takes the model's own limit.
    pub context_tokens: Option<usize>,
    /// Most bytes the KV slab may take.
    pub kv_limit_bytes: u64,
    /// Threads of one operator; 0 takes one per core.
    pub intra_op_threads: usize,
}

/// A target graph loaded into ONNX Runtime.
pub struct OnnxTarget {
    // Bindings hold views of the buffers below and are declared first so that they are dropped first.
    bindings: HashMap<BindingKey, IoBinding>,
    session: Session,
    allocator: Allocator,
    shape: TargetShape,
    cache: KvLayout,
    /// Key slab and value slab of each layer.
    slabs: Vec<[Buffer; 2]>,
    logits: Buffer,
    taps: Buffer,
    last: Pass,
}

/// What a kept binding was made for: first slot, number of slots, whether taps are bound.
type BindingKey = (usize, usize, bool);

/// Geometry of the KV slab.
#[derive(Clone, Copy, Debug)]
struct KvLayout {
    /// Rows of a slot: its context and the headroom.
    rows: usize,
    /// Values of a row: `kv_heads * head_dim`.
    row_size: usize,
    element: TensorElementType,
    element_bytes: usize,
}

/// Shape of the outputs of the last pass.
#[derive(Clone, Copy, Debug, Default)]
struct Pass {
    rows: usize,
    width: usize,
    logit_width: usize,
    taps: bool,
}

impl OnnxTarget {
    /// Opens the target graph of a bundle.
    ///
    /// # Errors
    ///
    /// The library can't be loaded, the graph has other inputs or outputs than the target contract asks for, or the KV slab exceeds its limit.
    pub fn load(bundle: &VerifiedBundle, options: &TargetOptions) -> Result<Self, ModelError> {
        let facts = &bundle.manifest().target;
        let environment = runtime::environment(&options.library)?;
        let graph_fault = |fault: String| ModelError::Graph {
            graph: facts.graph.clone(),
            fault,
        };
        let graph = bundle
            .path(&facts.graph)
            .ok_or_else(|| graph_fault("is not a file of the bundle".to_owned()))?;
        let cache = kv_layout(facts, options).map_err(graph_fault)?;
        check_kv_limit(facts, options, &cache)?;

        let mut builder = Session::builder(environment)?
            .with_optimization_level(GraphOptimizationLevel::All)
            .map_err(ort::Error::from)?
            // Step shapes change all the time, so a pattern learnt from one of them would only hold memory.
            .with_memory_pattern(false)
            .map_err(ort::Error::from)?;
        if options.intra_op_threads > 0 {
            builder = builder
                .with_intra_threads(options.intra_op_threads)
                .map_err(ort::Error::from)?;
        }
        if facts.attention == Attention::Native {
            builder = builder
                .with_operators(crate::ops::domain()?)
                .map_err(ort::Error::from)?;
        }
        if let ExecutionProvider::Cuda { device } = options.execution_provider {
            builder = builder
                .with_disable_cpu_fallback()
                .map_err(ort::Error::from)?
                .with_execution_providers([ep::CUDA::default()
                    .with_device_id(device)
                    .with_tf32(false)
                    .build()
                    .error_on_failure()])
                .map_err(ort::Error::from)?;
        }
        let session = builder.commit_from_file(graph)?;
        check_interface(&session, facts, &cache).map_err(graph_fault)?;

        let slab_bytes = options.slots * cache.rows * cache.row_size * cache.element_bytes;
        let slabs = (0..facts.layers)
            .map(|_| [Buffer::zeroed(slab_bytes), Buffer::zeroed(slab_bytes)])
            .collect();
        Ok(Self {
            bindings: HashMap::new(),
            allocator: Allocator::default(),
            shape: TargetShape {
                slots: options.slots,
                context_tokens: options.context_tokens.unwrap_or(facts.context_tokens),
                headroom_tokens: HEADROOM_TOKENS,
                vocab_size: facts.vocab_size,
                tap_size: facts.taps.len() * facts.hidden_size,
            },
            session,
            cache,
            slabs,
            logits: Buffer::zeroed(0),
            taps: Buffer::zeroed(0),
            last: Pass::default(),
        })
    }

    /// Gives back what loading and probing left behind: output buffers of their wide passes, and memory that was freed on the way.
    pub fn settle(&mut self) {
        self.bindings.clear();
        self.logits = Buffer::zeroed(0);
        self.taps = Buffer::zeroed(0);
        self.last = Pass::default();
        release_freed();
    }

    /// Bytes of the KV slab.
    pub fn kv_bytes(&self) -> u64 {
        self.slabs
            .iter()
            .flatten()
            .map(|buffer| buffer.len_bytes() as u64)
            .sum()
    }

    fn check(&self, batch: &Batch) -> Result<(), ModelError> {
        let refuse = |fault: String| Err(ModelError::Batch(fault));
        let slots = self.shape.slots;
        if batch.rows.is_empty() || batch.first_slot + batch.rows.len() > slots {
            return refuse(format!(
                "slots {} + {} of {slots}",
                batch.first_slot,
                batch.rows.len()
            ));
        }
        if batch.width == 0 || batch.logit_width == 0 {
            return refuse(format!(
                "width {} and logit width {} must be at least 1",
                batch.width, batch.logit_width
            ));
        }
        if batch.taps && self.shape.tap_size == 0 {
            return refuse("taps of a graph that has none".to_owned());
        }
        for (index, row) in batch.rows.iter().enumerate() {
            let slot = batch.first_slot + index;
            if row.tokens.len() > batch.width
                || row.logits.len() > batch.logit_width
                || row.logits.end > row.tokens.len()
            {
                return refuse(format!(
                    "slot {slot}: {} tokens, logits of {:?}, width {}",
                    row.tokens.len(),
                    row.logits,
                    batch.width
                ));
            }
            if row.start + row.tokens.len() > self.shape.context_tokens
                || row.start + batch.width > self.cache.rows
            {
                return refuse(format!(
                    "slot {slot}: {} tokens at {} in a width of {}; the context holds {}",
                    row.tokens.len(),
                    row.start,
                    batch.width,
                    self.shape.context_tokens
                ));
            }
            if let Some(id) = row
                .tokens
                .iter()
                .find(|&&id| id as usize >= self.shape.vocab_size)
            {
                return refuse(format!(
                    "slot {slot}: token {id} of {}",
                    self.shape.vocab_size
                ));
            }
        }
        Ok(())
    }

    /// The binding of a slot range, its caches bound.
    fn bind_caches(&mut self, key: BindingKey) -> Result<IoBinding, ModelError> {
        if let Some(binding) = self.bindings.remove(&key) {
            return Ok(binding);
        }
        let (first_slot, rows, _) = key;
        let KvLayout {
            rows: cache_rows,
            row_size,
            element,
            element_bytes,
        } = self.cache;
        let shape = [rows as i64, cache_rows as i64, row_size as i64];
        let offset_bytes = first_slot * cache_rows * row_size * element_bytes;
        let mut binding = self.session.create_binding()?;
        for (layer, slabs) in self.slabs.iter().enumerate() {
            for (name, slab) in ["key", "value"].iter().zip(slabs) {
                // SAFETY: slabs live as long as `self`, are never replaced, and are not looked at while a run is going on.
                let cache = || unsafe {
                    view(
                        &self.allocator,
                        slab,
                        offset_bytes,
                        element,
                        element_bytes,
                        &shape,
                    )
                };
                binding.bind_input(format!("{name}_cache.{layer}"), &cache()?)?;
                binding.bind_output(format!("updated_{name}_cache.{layer}"), cache()?)?;
            }
        }
        Ok(binding)
    }
}

impl Target for OnnxTarget {
    fn shape(&self) -> &TargetShape {
        &self.shape
    }

    fn forward(&mut self, batch: &Batch) -> Result<(), ModelError> {
        self.check(batch)?;
        let (rows, width, logit_width) = (batch.rows.len(), batch.width, batch.logit_width);
        let last_position = self.shape.context_tokens - 1;
        let mut input_ids = vec![0i64; rows * width];
        let mut position_ids = vec![0i64; rows * width];
        let mut logit_indices = vec![0i64; rows * logit_width];
        for (index, row) in batch.rows.iter().enumerate() {
            for (cell, &token) in input_ids[index * width..].iter_mut().zip(&row.tokens) {
                *cell = i64::from(token);
            }
            for (offset, cell) in position_ids[index * width..][..width]
                .iter_mut()
                .enumerate()
            {
                // Padding rows may lie past the last position; what they compute is never looked at.
                *cell = (row.start + offset).min(last_position) as i64;
            }
            for (offset, cell) in logit_indices[index * logit_width..][..logit_width]
                .iter_mut()
                .enumerate()
            {
                *cell = (row.logits.start + offset).min(row.logits.end.saturating_sub(1)) as i64;
            }
        }
        let write_indices: Vec<i64> = batch.rows.iter().map(|row| row.start as i64).collect();
        let valid_rows: Vec<i64> = batch
            .rows
            .iter()
            .map(|row| (row.start + width) as i64)
            .collect();

        let key = (batch.first_slot, rows, batch.taps);
        let mut binding = self.bind_caches(key)?;
        binding.bind_input(
            "input_ids",
            &Tensor::from_array(([rows, width], input_ids))?,
        )?;
        binding.bind_input(
            "position_ids",
            &Tensor::from_array(([rows, width], position_ids))?,
        )?;
        binding.bind_input(
            "write_indices",
            &Tensor::from_array(([rows], write_indices))?,
        )?;
        binding.bind_input(
            "nonpad_kv_seqlen",
            &Tensor::from_array(([rows], valid_rows))?,
        )?;
        binding.bind_input(
            "logit_indices",
            &Tensor::from_array(([rows, logit_width], logit_indices))?,
        )?;

        let logits_shape = [rows, logit_width, self.shape.vocab_size];
        let logits = bind_output_buffer(&self.allocator, &mut self.logits, logits_shape)?;
        binding.bind_output("logits", logits)?;
        if batch.taps {
            let taps = bind_output_buffer(
                &self.allocator,
                &mut self.taps,
                [rows, width, self.shape.tap_size],
            )?;
            binding.bind_output("aux_hidden_states", taps)?;
        }
        drop(self.session.run_binding(&binding)?);
        self.last = Pass {
            rows,
            width,
            logit_width,
            taps: batch.taps,
        };
        self.bindings.insert(key, binding);
        Ok(())
    }

    fn logits(&self, row: usize, index: usize) -> &[f32] {
        let Pass {
            rows, logit_width, ..
        } = self.last;
        assert!(
            row < rows && index < logit_width,
            "logits {index} of row {row} were not computed"
        );
        let vocab_size = self.shape.vocab_size;
        &self.logits.as_f32(rows * logit_width * vocab_size)
            [(row * logit_width + index) * vocab_size..][..vocab_size]
    }

    fn taps(&self) -> Taps<'_> {
        let Pass {
            rows, width, taps, ..
        } = self.last;
        assert!(taps, "the last pass computed no taps");
        let size = self.shape.tap_size;
        Taps {
            values: self.taps.as_f32(rows * width * size),
            rows,
            width,
            size,
        }
    }
}

/// A view of exactly `shape` fp32 values at the start of `buffer`, which grows when it is too small.
fn bind_output_buffer(
    allocator: &Allocator,
    buffer: &mut Buffer,
    shape: [usize; 3],
) -> ort::Result<ort::value::DynTensor> {
    let size_bytes = shape.iter().product::<usize>() * size_of::<f32>();
    if buffer.len_bytes() < size_bytes {
        *buffer = Buffer::zeroed(size_bytes);
    }
    // SAFETY: outputs are bound anew before every run, so no run can use a view of a buffer that was replaced here.
    unsafe {
        view(
            allocator,
            buffer,
            0,
            TensorElementType::Float32,
            size_of::<f32>(),
            &shape.map(|dim| dim as i64),
        )
    }
}

fn kv_layout(facts: &TargetFacts, options: &TargetOptions) -> Result<KvLayout, String> {
    let (element, element_bytes) = match facts.kv_dtype.as_str() {
        "float32" => (TensorElementType::Float32, 4),
        "float16" => (TensorElementType::Float16, 2),
        "bfloat16" => (TensorElementType::Bfloat16, 2),
        other => {
            return Err(format!(
                "kv_dtype is {other:?}; float32, float16 and bfloat16 are known"
            ));
        }
    };
    let context_tokens = options.context_tokens.unwrap_or(facts.context_tokens);
    if context_tokens == 0 || context_tokens > facts.context_tokens {
        return Err(format!(
            "serving.runtime.context_tokens is {context_tokens}; the model supports 1 to {}",
            facts.context_tokens
        ));
    }
    Ok(KvLayout {
        rows: context_tokens + HEADROOM_TOKENS,
        row_size: facts.kv_heads * facts.head_dim,
        element,
        element_bytes,
    })
}

fn check_kv_limit(
    facts: &TargetFacts,
    options: &TargetOptions,
    cache: &KvLayout,
) -> Result<(), ModelError> {
    let row_bytes = (2 * facts.layers * cache.row_size * cache.element_bytes) as u64;
    let needed_bytes = row_bytes * cache.rows as u64 * options.slots as u64;
    if needed_bytes > options.kv_limit_bytes {
        return Err(ModelError::KvMemory {
            needed_bytes,
            allowed_bytes: options.kv_limit_bytes,
            slots: options.slots,
            context_tokens: cache.rows - HEADROOM_TOKENS,
        });
    }
    Ok(())
}

/// Compares the session's inputs and outputs with the target contract.
fn check_interface(session: &Session, facts: &TargetFacts, cache: &KvLayout) -> Result<(), String> {
    let mut inputs: Vec<(String, TensorElementType)> = [
        "input_ids",
        "position_ids",
        "write_indices",
        "nonpad_kv_seqlen",
        "logit_indices",
    ]
    .iter()
    .map(|name| ((*name).to_owned(), TensorElementType::Int64))
    .collect();
    let mut outputs = vec![("logits".to_owned(), TensorElementType::Float32)];
    for layer in 0..facts.layers {
        for name in ["key", "value"] {
            inputs.push((format!("{name}_cache.{layer}"), cache.element));
            outputs.push((format!("updated_{name}_cache.{layer}"), cache.element));
        }
    }
    if !facts.taps.is_empty() {
        outputs.push(("aux_hidden_states".to_owned(), TensorElementType::Float32));
    }
    for (kind, wanted, found) in [
        ("input", &inputs, session.inputs()),
        ("output", &outputs, session.outputs()),
    ] {
        for (name, element) in wanted {
            let outlet = found
                .iter()
                .find(|outlet| outlet.name() == name)
                .ok_or_else(|| format!("the {kind} {name} is missing"))?;
            match outlet.dtype() {
                ValueType::Tensor { ty, .. } if ty == element => {}
                other => {
                    return Err(format!(
                        "the {kind} {name} is {other}; {element} is expected"
                    ));
                }
            }
        }
        if let Some(extra) = found
            .iter()
            .find(|outlet| wanted.iter().all(|(name, _)| name != outlet.name()))
        {
            return Err(format!("the {kind} {} is unknown", extra.name()));
        }
    }
    Ok(())
}
