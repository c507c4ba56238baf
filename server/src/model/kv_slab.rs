//! Keys and values of all slots, for the target and for the draft: one slab per layer, `[slots, rows, kv_heads * head_dim]`.
//!
//! A batch over consecutive slots is a view of the slabs, bound to the cache inputs and to the updated-cache outputs alike, so nothing is copied.
#![expect(unsafe_code, reason = "binds views of caller-owned memory")]

use std::ops::Range;

use ort::memory::Allocator;
use ort::session::IoBinding;
use ort::value::TensorElementType;

use super::memory::{Buffer, view};

/// Geometry of a slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KvLayout {
    /// Decoder layers.
    pub layers: usize,
    /// Slots.
    pub slots: usize,
    /// Rows of a slot: its context and what may be written behind it.
    pub rows: usize,
    /// Values of a row: `kv_heads * head_dim`.
    pub row_size: usize,
    /// Element type.
    pub element: TensorElementType,
}

impl KvLayout {
    /// Size of all slabs in bytes.
    pub(super) fn size_bytes(&self) -> u64 {
        2 * self.layers as u64 * self.slab_bytes() as u64
    }

    fn element_bytes(&self) -> usize {
        match self.element {
            TensorElementType::Float32 => 4,
            _ => 2,
        }
    }

    fn slab_bytes(&self) -> usize {
        self.slots * self.rows * self.row_size * self.element_bytes()
    }
}

/// The element type that a manifest's `kv_dtype` names.
pub(super) fn element_of(kv_dtype: &str) -> Result<TensorElementType, String> {
    match kv_dtype {
        "float32" => Ok(TensorElementType::Float32),
        "float16" => Ok(TensorElementType::Float16),
        "bfloat16" => Ok(TensorElementType::Bfloat16),
        other => Err(format!(
            "kv_dtype is {other:?}; float32, float16 and bfloat16 are known"
        )),
    }
}

/// Names of the caches of one layer with their element type, as inputs and as outputs of a graph.
pub(super) fn outlets(layout: &KvLayout, prefix: &str) -> Vec<(String, TensorElementType)> {
    (0..layout.layers)
        .flat_map(|layer| ["key", "value"].map(|name| format!("{prefix}{name}_cache.{layer}")))
        .map(|name| (name, layout.element))
        .collect()
}

/// The memory.
pub(super) struct KvSlab {
    layout: KvLayout,
    /// Keys and values of each layer.
    layers: Vec<[Buffer; 2]>,
}

impl KvSlab {
    pub(super) fn new(layout: KvLayout) -> Self {
        let slab = || Buffer::zeroed(layout.slab_bytes());
        Self {
            layout,
            layers: (0..layout.layers).map(|_| [slab(), slab()]).collect(),
        }
    }

    pub(super) fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// A copy of the first `rows` rows of a slot: keys, then values, layer by layer.
    pub(super) fn cached_bytes(&self, slot: usize, rows: usize) -> Vec<u8> {
        let layout = &self.layout;
        assert!(
            slot < layout.slots && rows <= layout.rows,
            "{rows} rows of slot {slot}"
        );
        let row_bytes = layout.row_size * layout.element_bytes();
        let start = slot * layout.rows * row_bytes;
        let slabs = self.layers.iter().flatten();
        slabs
            .flat_map(|slab| slab.bytes(start..start + rows * row_bytes))
            .copied()
            .collect()
    }

    /// Makes the rows `rows` of slot `to` those of slot `from`.
    pub(super) fn copy_rows(&mut self, from: usize, to: usize, rows: Range<usize>) {
        let layout = self.layout;
        assert!(
            from.max(to) < layout.slots && rows.end <= layout.rows,
            "rows {rows:?} of slots {from} and {to}"
        );
        let row_bytes = layout.row_size * layout.element_bytes();
        let offset = |slot: usize, row: usize| (slot * layout.rows + row) * row_bytes;
        for slab in self.layers.iter_mut().flatten() {
            let source = offset(from, rows.start)..offset(from, rows.end);
            slab.copy_within(source, offset(to, rows.start));
        }
    }

    /// Binds the caches of `rows` slots from `first_slot` on.
    ///
    /// # Safety
    ///
    /// The slab outlives every run of `binding` and is not looked at while one is going on.
    ///
    /// # Panics
    ///
    /// The slots are not all in the slab.
    pub(super) unsafe fn bind(
        &self,
        binding: &mut IoBinding,
        allocator: &Allocator,
        first_slot: usize,
        rows: usize,
    ) -> ort::Result<()> {
        let layout = &self.layout;
        assert!(
            first_slot + rows <= layout.slots,
            "slots {first_slot} + {rows} of {}",
            layout.slots
        );
        let element_bytes = layout.element_bytes();
        let shape = [rows as i64, layout.rows as i64, layout.row_size as i64];
        let offset_bytes = first_slot * layout.rows * layout.row_size * element_bytes;
        for (layer, slabs) in self.layers.iter().enumerate() {
            for (name, slab) in ["key", "value"].iter().zip(slabs) {
                // SAFETY: the caller keeps the slab alive and untouched during runs.
                let cache = || unsafe {
                    view(
                        allocator,
                        slab,
                        offset_bytes,
                        layout.element,
                        element_bytes,
                        &shape,
                    )
                };
                binding.bind_input(format!("{name}_cache.{layer}"), &cache()?)?;
                binding.bind_output(format!("updated_{name}_cache.{layer}"), cache()?)?;
            }
        }
        Ok(())
    }
}
