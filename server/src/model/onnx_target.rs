//! A target graph in ONNX Runtime: session, KV slab, and the bindings that let a pass read and write the slab in place.
//!
//! Bindings are kept per slot range, so a step only binds its small inputs and its outputs again.
#![expect(unsafe_code, reason = "binds views of caller-owned memory")]

use std::collections::HashMap;
use std::ops::Range;

use ort::memory::Allocator;
use ort::session::{IoBinding, Session};
use ort::value::{Tensor, TensorElementType};
use outrider_bundle::VerifiedBundle;
use outrider_bundle::manifest::TargetFacts;

use super::kv_slab::{KvLayout, KvSlab, element_of, outlets};
use super::memory::{Buffer, release_freed, view};
use super::session::{self, SessionOptions, graph_fault, typed};
use super::{Batch, MAX_BINDINGS, ModelError, Taps, Target, TargetShape};

/// Fewest cache rows of a slot beyond its context: the rows of a batched step, padding included, may be written there.
const HEADROOM_TOKENS: usize = 32;

/// How a target is loaded.
#[derive(Clone, Debug)]
pub struct TargetOptions {
    /// How the session is made.
    pub session: SessionOptions,
    /// Sequences that can be run at once.
    pub slots: usize,
    /// Slots beside them that keep beginnings of prompts.
    pub parking_slots: usize,
    /// Widest block that is drafted, when there is a draft.
    pub block_size: Option<usize>,
    /// Longest sequence in tokens; `None` takes the model's own limit.
    pub context_tokens: Option<usize>,
    /// Most bytes the KV slab may take.
    pub kv_limit_bytes: u64,
}

/// A target graph loaded into ONNX Runtime.
pub struct OnnxTarget {
    // Bindings hold views of the buffers below and are declared first so that they are dropped first.
    bindings: HashMap<BindingKey, IoBinding>,
    session: Session,
    allocator: Allocator,
    shape: TargetShape,
    cache: KvSlab,
    logits: Buffer,
    taps: Buffer,
    last: Pass,
}

/// What a kept binding was made for: first slot, number of slots, whether taps are bound.
type BindingKey = (usize, usize, bool);

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
        let fault = |fault: String| graph_fault(&facts.graph, fault);
        let layout = kv_layout(facts, options).map_err(fault)?;
        let needed_bytes = layout.size_bytes();
        if needed_bytes > options.kv_limit_bytes {
            return Err(ModelError::KvMemory {
                needed_bytes,
                allowed_bytes: options.kv_limit_bytes,
                slots: layout.slots,
                context_tokens: layout.rows - headroom_tokens(options),
            });
        }
        let session = session::open(bundle, &facts.graph, facts.attention, &options.session)?;
        check_interface(&session, facts, &layout).map_err(fault)?;
        Ok(Self {
            bindings: HashMap::new(),
            allocator: Allocator::default(),
            shape: TargetShape {
                slots: options.slots,
                parking_slots: options.parking_slots,
                context_tokens: options.context_tokens.unwrap_or(facts.context_tokens),
                headroom_tokens: headroom_tokens(options),
                vocab_size: facts.vocab_size,
                tap_size: facts.taps.len() * facts.hidden_size,
            },
            session,
            cache: KvSlab::new(layout),
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

    /// A copy of the first `rows` cache rows of a slot, keys before values, layer by layer: what tests compare bit for bit.
    pub fn cached_bytes(&self, slot: usize, rows: usize) -> Vec<u8> {
        self.cache.cached_bytes(slot, rows)
    }

    /// Bytes of the KV slab.
    pub fn kv_bytes(&self) -> u64 {
        self.cache.layout().size_bytes()
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
                || row.start + batch.width > self.cache.layout().rows
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
        let mut binding = self.session.create_binding()?;
        // SAFETY: the slab lives as long as `self`, and only runs touch it.
        unsafe {
            self.cache
                .bind(&mut binding, &self.allocator, first_slot, rows)?;
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
        if self.bindings.len() >= MAX_BINDINGS {
            self.bindings.clear();
        }
        self.bindings.insert(key, binding);
        Ok(())
    }

    fn copy_rows(&mut self, from: usize, to: usize, rows: Range<usize>) {
        self.cache.copy_rows(from, to, rows);
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

/// Room for a whole block, at an even width where the width rule asks for one.
fn headroom_tokens(options: &TargetOptions) -> usize {
    let block_rows = options
        .block_size
        .map_or(0, |size| size.next_multiple_of(2));
    block_rows.max(HEADROOM_TOKENS)
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
    let context_tokens = options.context_tokens.unwrap_or(facts.context_tokens);
    super::check_context(options.context_tokens, facts.context_tokens)?;
    Ok(KvLayout {
        layers: facts.layers,
        slots: options.slots + options.parking_slots,
        rows: context_tokens + headroom_tokens(options),
        row_size: facts.kv_heads * facts.head_dim,
        element: element_of(&facts.kv_dtype)?,
    })
}

/// Compares the session's inputs and outputs with the target contract.
fn check_interface(
    session: &Session,
    facts: &TargetFacts,
    layout: &KvLayout,
) -> Result<(), String> {
    let mut inputs = outlets(layout, "");
    inputs.extend(typed(
        &[
            "input_ids",
            "position_ids",
            "write_indices",
            "nonpad_kv_seqlen",
            "logit_indices",
        ],
        TensorElementType::Int64,
    ));
    let mut outputs = outlets(layout, "updated_");
    let has_taps = !facts.taps.is_empty();
    let floats = if has_taps {
        &["logits", "aux_hidden_states"][..]
    } else {
        &["logits"]
    };
    outputs.extend(typed(floats, TensorElementType::Float32));
    session::check_interface(session, &inputs, &outputs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_has_room_for_a_block_of_any_size_at_an_even_width() {
        let options = |block_size| TargetOptions {
            session: SessionOptions {
                library: "library".into(),
                execution_provider: crate::model::ExecutionProvider::Cpu,
                intra_op_threads: 1,
            },
            slots: 1,
            parking_slots: 0,
            block_size,
            context_tokens: None,
            kv_limit_bytes: 0,
        };
        for (block_size, rows) in [(None, 32), (Some(16), 32), (Some(33), 34), (Some(64), 64)] {
            assert_eq!(
                headroom_tokens(&options(block_size)),
                rows,
                "{block_size:?}"
            );
        }
    }
}
