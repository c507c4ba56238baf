//! Memory that ONNX Runtime reads and writes in place, and views of parts of it.
//!
//! `ort` can bind only tensors that it allocated itself; a view of a slab, of a range of its slots or of a growing output buffer is none of these.
//! [`view`] makes such a view through the C interface.
#![expect(
    unsafe_code,
    reason = "ONNX Runtime takes raw addresses of caller-owned memory"
)]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::Range;
use std::ptr::NonNull;

use ort::AsPointer;
use ort::memory::Allocator;
use ort::ortsys;
use ort::value::{DynTensor, DynTensorValueType, TensorElementType, Value};

/// Alignment of every buffer: one cache line, and the widest vector register.
const ALIGNMENT_BYTES: usize = 64;

/// Zeroed, aligned memory of fixed size. Pages are taken from the system only when they are first touched.
#[derive(Debug)]
pub(super) struct Buffer {
    allocation: NonNull<u8>,
    layout: Layout,
    /// The first aligned byte of the allocation.
    address: NonNull<u8>,
    len_bytes: usize,
}

// SAFETY: the buffer owns its memory and hands out addresses only to callers that hold a reference to it.
unsafe impl Send for Buffer {}

impl Buffer {
    /// Allocates `size_bytes`, at least one alignment unit.
    pub(super) fn zeroed(size_bytes: usize) -> Self {
        let len_bytes = size_bytes.max(ALIGNMENT_BYTES);
        // Aligned by hand: an allocation with an alignment of its own is zeroed by writing to it, which would touch every page.
        let layout = Layout::array::<u8>(len_bytes + ALIGNMENT_BYTES)
            .expect("buffer sizes are far below isize::MAX");
        // SAFETY: the layout has a size above zero.
        let allocation = unsafe { alloc_zeroed(layout) };
        let allocation = NonNull::new(allocation).unwrap_or_else(|| handle_alloc_error(layout));
        // SAFETY: the offset is below ALIGNMENT_BYTES, which the layout has in excess.
        let address = unsafe { allocation.add(allocation.align_offset(ALIGNMENT_BYTES)) };
        Self {
            allocation,
            layout,
            address,
            len_bytes,
        }
    }

    /// Size in bytes.
    pub(super) fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Part of the memory.
    pub(super) fn bytes(&self, range: Range<usize>) -> &[u8] {
        assert!(
            range.end <= self.len_bytes(),
            "bytes {range:?} of a buffer of {}",
            self.len_bytes()
        );
        // SAFETY: the memory is initialised (zeroed) and long enough.
        unsafe { std::slice::from_raw_parts(self.address.as_ptr().add(range.start), range.len()) }
    }

    /// Copies part of the memory to another place in it, `to` bytes in.
    pub(super) fn copy_within(&mut self, from: Range<usize>, to: usize) {
        assert!(
            from.end <= self.len_bytes() && to + from.len() <= self.len_bytes(),
            "bytes {from:?} to {to} of a buffer of {}",
            self.len_bytes()
        );
        // SAFETY: both ranges are inside the buffer, as was checked, and `copy` allows them to overlap.
        unsafe {
            let source = self.address.as_ptr().add(from.start);
            std::ptr::copy(source, self.address.as_ptr().add(to), from.len());
        }
    }

    /// The first `len` values as fp32.
    pub(super) fn as_f32(&self, len: usize) -> &[f32] {
        assert!(
            len * size_of::<f32>() <= self.len_bytes(),
            "view of {len} values is longer than the buffer"
        );
        // SAFETY: the memory is initialised (zeroed), aligned, long enough, and every bit pattern is a valid f32.
        unsafe { std::slice::from_raw_parts(self.address.as_ptr().cast::<f32>(), len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `zeroed` with this layout.
        unsafe { dealloc(self.allocation.as_ptr(), self.layout) }
    }
}

/// Gives memory that was freed back to the system: reading and compiling a model frees as much as it keeps.
pub(super) fn release_freed() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: `malloc_trim` touches free memory only and may be called at any time from any thread.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Allocations from this size on have pages of their own, which are the system's again as soon as they are freed.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const OWN_PAGES_BYTES: libc::c_int = 1 << 20;

/// Keeps large allocations apart from small ones.
///
/// Left to itself, glibc puts ever larger ones among the small ones once some were freed, and a model's weights leave holes there that stay resident.
pub(super) fn separate_large_allocations() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: `mallopt` changes how later allocations are made and may be called at any time from any thread.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, OWN_PAGES_BYTES);
    }
}

/// A tensor over `shape` elements of `buffer`, starting `offset_bytes` in. ONNX Runtime reads and writes the memory itself; nothing is copied.
///
/// # Safety
///
/// The caller keeps `buffer` alive for as long as the tensor, or any binding that holds it, can be used in a run,
/// and does not look at the memory while a run is going on.
pub(super) unsafe fn view(
    allocator: &Allocator,
    buffer: &Buffer,
    offset_bytes: usize,
    element: TensorElementType,
    element_bytes: usize,
    shape: &[i64],
) -> ort::Result<DynTensor> {
    let elements = shape.iter().try_fold(1usize, |product, &dim| {
        usize::try_from(dim)
            .ok()
            .and_then(|dim| product.checked_mul(dim))
    });
    let size_bytes = elements
        .and_then(|elements| elements.checked_mul(element_bytes))
        .filter(|size| {
            offset_bytes
                .checked_add(*size)
                .is_some_and(|end| end <= buffer.len_bytes())
        })
        .ok_or_else(|| {
            ort::Error::new(format!(
                "a view of shape {shape:?} at byte {offset_bytes} leaves its buffer of {} bytes",
                buffer.len_bytes()
            ))
        })?;
    // SAFETY: address and size stay inside the buffer, as was checked above; the caller answers for its life.
    unsafe {
        let address = buffer.address.as_ptr().add(offset_bytes);
        tensor_over(allocator, address, size_bytes, element, shape)
    }
}

/// A tensor over `values`, for a graph input.
///
/// # Safety
///
/// The caller keeps `values` borrowed for as long as the tensor, or any binding that holds it, can be used in a run, and binds it as an input only.
///
/// # Errors
///
/// `values` has another length than `shape` asks for.
pub(super) unsafe fn view_slice(
    allocator: &Allocator,
    values: &[f32],
    shape: &[i64],
) -> ort::Result<DynTensor> {
    if shape.iter().product::<i64>() != values.len() as i64 {
        return Err(ort::Error::new(format!(
            "a view of shape {shape:?} over {} values",
            values.len()
        )));
    }
    let address = values.as_ptr().cast::<u8>().cast_mut();
    // SAFETY: address and size are those of the slice; the caller answers for its life, and that nothing writes to it.
    unsafe {
        tensor_over(
            allocator,
            address,
            size_of_val(values),
            TensorElementType::Float32,
            shape,
        )
    }
}

/// A tensor over memory that belongs to somebody else.
///
/// # Safety
///
/// `size_bytes` from `address` on are valid memory, as large as `shape` asks for, for as long as the tensor can be used in a run.
unsafe fn tensor_over(
    allocator: &Allocator,
    address: *mut u8,
    size_bytes: usize,
    element: TensorElementType,
    shape: &[i64],
) -> ort::Result<DynTensor> {
    let info = allocator.memory_info();
    let mut value: *mut ort::sys::OrtValue = std::ptr::null_mut();
    // SAFETY: the caller vouches for address and size; the shape pointer is valid for the call.
    ortsys![unsafe CreateTensorWithDataAsOrtValue(
        info.ptr(),
        address.cast(),
        size_bytes,
        shape.as_ptr(),
        shape.len(),
        element.into(),
        &mut value
    )?];
    let value =
        NonNull::new(value).ok_or_else(|| ort::Error::new("ONNX Runtime made no tensor"))?;
    // SAFETY: the value was just made, is a tensor, and is owned by nobody else; the allocator is only kept alive by it, never asked to free the memory.
    Ok(unsafe { Value::<DynTensorValueType>::from_ptr(value, Some(allocator)) })
}
