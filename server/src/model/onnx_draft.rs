//! A draft graph in ONNX Runtime: session, the draft's KV slab, and one pass that appends context and proposes a block for a range of slots.
//!
//! The taps are read where the target's pass left them: the input is a view of that memory.
//! The block's own keys and values are written behind the context and taken back by the next pass, which starts at the context's end.
#![expect(unsafe_code, reason = "binds views of caller-owned memory")]

use std::collections::HashMap;
use std::ops::Range;

use ort::memory::Allocator;
use ort::session::{IoBinding, Session};
use ort::value::{Tensor, TensorElementType};
use outrider_bundle::VerifiedBundle;

use super::kv_slab::{KvLayout, KvSlab, element_of, outlets};
use super::memory::{release_freed, view_slice};
use super::session::{self, SessionOptions, graph_fault, typed};
use super::{MAX_BINDINGS, ModelError, Taps};
use crate::draft::{DraftBatch, DraftError, Drafter, DrafterShape};

/// Rows of the narrowest block: the anchor and one candidate.
const MIN_WIDTH: usize = 2;

/// How a draft is loaded.
#[derive(Clone, Debug)]
pub struct DraftOptions {
    /// How the session is made.
    pub session: SessionOptions,
    /// Slots of the target.
    pub slots: usize,
    /// Its parking slots.
    pub parking_slots: usize,
    /// Longest sequence of the target in tokens.
    pub context_tokens: usize,
    /// Candidates per position, when it is not the draft's own; from 1 to the draft's own.
    pub candidate_topk: Option<usize>,
    /// Most bytes the draft's KV slab may take.
    pub kv_limit_bytes: u64,
}

/// A draft graph loaded into ONNX Runtime.
pub struct OnnxDraft {
    // Bindings hold views of the slab and are declared first so that they are dropped first.
    bindings: HashMap<(usize, usize), IoBinding>,
    session: Session,
    allocator: Allocator,
    shape: DrafterShape,
    mask_token_id: u32,
    candidate_topk: usize,
    vocab_size: usize,
    cache: KvSlab,
    proposals: Vec<Vec<u32>>,
}

impl OnnxDraft {
    /// Opens the draft graph of a bundle.
    ///
    /// # Errors
    ///
    /// The bundle has no draft, the library can't be loaded, the graph has other inputs or outputs than the draft contract asks for,
    /// `candidate_topk` is larger than the graph's, or the KV slab exceeds its limit.
    pub fn load(bundle: &VerifiedBundle, options: &DraftOptions) -> Result<Self, ModelError> {
        let manifest = bundle.manifest();
        let facts = manifest
            .draft
            .as_ref()
            .ok_or_else(|| graph_fault("draft", "the bundle has no draft"))?;
        let fault = |fault: String| graph_fault(&facts.graph, fault);
        let candidate_topk = options.candidate_topk.unwrap_or(facts.top_k);
        if candidate_topk == 0 || candidate_topk > facts.top_k {
            return Err(fault(format!(
                "serving.speculative.candidate_topk is {candidate_topk}; the draft supports 1 to {}",
                facts.top_k
            )));
        }
        // A block may reach past the target's last position; its tokens there are never used.
        let context_tokens = facts
            .context_tokens
            .min(options.context_tokens + facts.block_size);
        let layout = KvLayout {
            layers: facts.layers,
            slots: options.slots + options.parking_slots,
            rows: context_tokens,
            row_size: facts.kv_heads * facts.head_dim,
            element: element_of(&facts.kv_dtype).map_err(fault)?,
        };
        let needed_bytes = layout.size_bytes();
        if needed_bytes > options.kv_limit_bytes {
            return Err(ModelError::KvMemory {
                needed_bytes,
                allowed_bytes: options.kv_limit_bytes,
                slots: layout.slots,
                context_tokens,
            });
        }
        let session = session::open(bundle, &facts.graph, facts.form, &options.session)?;
        let mut inputs = outlets(&layout, "");
        inputs.extend(typed(&["taps", "temperature"], TensorElementType::Float32));
        inputs.extend(typed(
            &[
                "context_position_ids",
                "context_start",
                "context_rows",
                "block_ids",
                "block_position_ids",
                "block_rows",
                "seed",
                "candidate_topk",
            ],
            TensorElementType::Int64,
        ));
        let mut outputs = outlets(&layout, "updated_");
        outputs.extend(typed(&["draft_ids"], TensorElementType::Int64));
        session::check_interface(&session, &inputs, &outputs).map_err(fault)?;
        Ok(Self {
            bindings: HashMap::new(),
            session,
            allocator: Allocator::default(),
            shape: DrafterShape {
                slots: options.slots,
                context_tokens,
                block_size: facts.block_size,
                tap_size: facts.target_layer_ids.len() * manifest.target.hidden_size,
            },
            mask_token_id: facts.mask_token_id,
            candidate_topk,
            vocab_size: manifest.target.vocab_size,
            cache: KvSlab::new(layout),
            proposals: Vec::new(),
        })
    }

    /// Runs a pass as wide as any, so that a graph that can't be run is found at load and not in a request.
    ///
    /// # Errors
    ///
    /// The pass failed.
    pub fn warm_up(&mut self) -> Result<(), DraftError> {
        let values = vec![0.0; self.shape.slots * self.shape.block_size * self.shape.tap_size];
        let taps = Taps {
            values: &values,
            rows: self.shape.slots,
            width: self.shape.block_size,
            size: self.shape.tap_size,
        };
        let block = crate::draft::Block {
            anchor: 0,
            width: self
                .shape
                .block_size
                .min(self.shape.context_tokens.saturating_sub(1)),
            temperature: 0.0,
            seed: 0,
        };
        let row = crate::draft::DraftRow {
            context_start: 0,
            context_rows: 1,
            block: Some(block),
        };
        let batch = DraftBatch {
            first_slot: 0,
            rows: vec![row; self.shape.slots],
        };
        self.draft(&batch, taps)?;
        self.bindings.clear();
        release_freed();
        Ok(())
    }

    /// A copy of the first `rows` cache rows of a slot, keys before values, layer by layer: what tests compare bit for bit.
    pub fn cached_bytes(&self, slot: usize, rows: usize) -> Vec<u8> {
        self.cache.cached_bytes(slot, rows)
    }

    /// Bytes of the KV slab.
    pub fn kv_bytes(&self) -> u64 {
        self.cache.layout().size_bytes()
    }

    fn check(&self, batch: &DraftBatch, taps: &Taps<'_>) -> Result<(), DraftError> {
        let refuse = |fault: String| Err(DraftError::Batch(fault));
        let DrafterShape {
            slots,
            context_tokens,
            block_size,
            tap_size,
        } = self.shape;
        let rows = batch.rows.len();
        if rows == 0 || batch.first_slot + rows > slots {
            return refuse(format!("slots {} + {rows} of {slots}", batch.first_slot));
        }
        if taps.rows != rows
            || taps.size != tap_size
            || taps.width == 0
            || taps.values.len() != rows * taps.width * tap_size
        {
            return refuse(format!(
                "taps [{}, {}, {}] for {rows} rows of {tap_size}",
                taps.rows, taps.width, taps.size
            ));
        }
        for (index, row) in batch.rows.iter().enumerate() {
            let slot = batch.first_slot + index;
            if row.context_rows > taps.width {
                return refuse(format!(
                    "slot {slot}: {} context rows of {} taps",
                    row.context_rows, taps.width
                ));
            }
            let width = row.block.map_or(0, |block| block.width);
            if row.anchor_position() + width > context_tokens {
                return refuse(format!(
                    "slot {slot}: a block of {width} at {}; the draft's context holds {context_tokens}",
                    row.anchor_position()
                ));
            }
            if let Some(block) = row.block {
                if !(MIN_WIDTH..=block_size).contains(&block.width) {
                    return refuse(format!(
                        "slot {slot}: a block of {}; {MIN_WIDTH} to {block_size} are possible",
                        block.width
                    ));
                }
                if block.anchor as usize >= self.vocab_size {
                    return refuse(format!(
                        "slot {slot}: token {} of {}",
                        block.anchor, self.vocab_size
                    ));
                }
            }
        }
        Ok(())
    }

    fn bind_caches(&mut self, key: (usize, usize)) -> ort::Result<IoBinding> {
        if let Some(binding) = self.bindings.remove(&key) {
            return Ok(binding);
        }
        let (first_slot, rows) = key;
        let mut binding = self.session.create_binding()?;
        // SAFETY: the slab lives as long as `self`, and only runs touch it.
        unsafe {
            self.cache
                .bind(&mut binding, &self.allocator, first_slot, rows)?;
        }
        Ok(binding)
    }
}

impl Drafter for OnnxDraft {
    fn shape(&self) -> &DrafterShape {
        &self.shape
    }

    fn draft(&mut self, batch: &DraftBatch, taps: Taps<'_>) -> Result<(), DraftError> {
        self.check(batch, &taps)?;
        let rows = batch.rows.len();
        let widths = batch
            .rows
            .iter()
            .map(|row| row.block.map_or(0, |block| block.width));
        let width = widths.max().unwrap_or(0).max(MIN_WIDTH);
        let last_position = self.shape.context_tokens - 1;
        // Padding may lie past the last position; what it computes is never looked at.
        let positions = |start: usize, count: usize| {
            (start..start + count).map(move |position| position.min(last_position) as i64)
        };
        let mut context_position_ids = Vec::with_capacity(rows * taps.width);
        let mut block_position_ids = Vec::with_capacity(rows * width);
        let mut block_ids = vec![i64::from(self.mask_token_id); rows * width];
        let mut temperature = vec![0f32; rows];
        let mut seed = vec![0i64; rows];
        let mut block_rows = vec![0i64; rows];
        for (index, row) in batch.rows.iter().enumerate() {
            context_position_ids.extend(positions(row.context_start, taps.width));
            block_position_ids.extend(positions(row.anchor_position(), width));
            if let Some(block) = row.block {
                block_ids[index * width] = i64::from(block.anchor);
                temperature[index] = block.temperature;
                seed[index] = block.seed.cast_signed();
                block_rows[index] = block.width as i64;
            }
        }
        let per_row = |value: fn(&crate::draft::DraftRow) -> usize| -> Vec<i64> {
            batch.rows.iter().map(|row| value(row) as i64).collect()
        };
        let context_start = per_row(|row| row.context_start);
        let context_rows = per_row(|row| row.context_rows);

        let key = (batch.first_slot, rows);
        let mut binding = self.bind_caches(key)?;
        // SAFETY: the input is bound anew before every run, so no run can use a view of memory that is no longer borrowed here;
        // the graph only reads it.
        let tap_view = unsafe {
            view_slice(
                &self.allocator,
                taps.values,
                &[rows as i64, taps.width as i64, taps.size as i64],
            )?
        };
        binding.bind_input("taps", &tap_view)?;
        let grid = [
            ("context_position_ids", taps.width, context_position_ids),
            ("block_position_ids", width, block_position_ids),
            ("block_ids", width, block_ids),
        ];
        for (name, columns, values) in grid {
            binding.bind_input(name, &Tensor::from_array(([rows, columns], values))?)?;
        }
        let vectors = [
            ("context_start", context_start),
            ("context_rows", context_rows),
            ("block_rows", block_rows),
            ("seed", seed),
            ("candidate_topk", vec![self.candidate_topk as i64]),
        ];
        for (name, values) in vectors {
            binding.bind_input(name, &Tensor::from_array(([values.len()], values))?)?;
        }
        binding.bind_input("temperature", &Tensor::from_array(([rows], temperature))?)?;
        binding.bind_output_to_device("draft_ids", self.allocator.memory_info())?;

        self.proposals.clear();
        {
            let outputs = self.session.run_binding(&binding)?;
            let (shape, ids) = outputs["draft_ids"].try_extract_tensor::<i64>()?;
            if **shape != [rows as i64, width as i64 - 1] {
                return Err(DraftError::Batch(format!(
                    "draft_ids has shape {shape}, [{rows}, {}] is expected",
                    width - 1
                )));
            }
            for (row, ids) in batch.rows.iter().zip(ids.chunks_exact(width - 1)) {
                let wanted = row.block.map_or(0, |block| block.width - 1);
                let known = |&id: &i64| {
                    u32::try_from(id)
                        .ok()
                        .filter(|&id| (id as usize) < self.vocab_size)
                };
                self.proposals
                    .push(ids[..wanted].iter().map_while(known).collect());
            }
        }
        if self.bindings.len() >= MAX_BINDINGS {
            self.bindings.clear();
        }
        self.bindings.insert(key, binding);
        Ok(())
    }

    fn copy_rows(&mut self, from: usize, to: usize, rows: Range<usize>) {
        self.cache.copy_rows(from, to, rows);
    }

    fn proposal(&self, row: usize) -> &[u32] {
        &self.proposals[row]
    }
}
