//! Element types of activations, caches and weights.

use half::{bf16, f16, slice::HalfFloatSliceExt};

/// A type that the tensors of an operator can have; all arithmetic on them is `f32`.
pub trait Element: Copy + Send + Sync + Default + 'static {
    /// Converts `from` to `f32`; exact. Both have the same length.
    fn widen(from: &[Self], to: &mut [f32]);
    /// Converts `from` to this type, to the nearest value, ties to even. Both have the same length.
    fn narrow(from: &[f32], to: &mut [Self]);
    /// The same elements where no conversion is needed.
    fn as_f32(elements: &[Self]) -> Option<&[f32]>;
}

impl Element for f32 {
    fn widen(from: &[Self], to: &mut [f32]) {
        to.copy_from_slice(from);
    }
    fn narrow(from: &[f32], to: &mut [Self]) {
        to.copy_from_slice(from);
    }
    fn as_f32(elements: &[Self]) -> Option<&[f32]> {
        Some(elements)
    }
}

impl Element for f16 {
    fn widen(from: &[Self], to: &mut [f32]) {
        from.convert_to_f32_slice(to);
    }
    fn narrow(from: &[f32], to: &mut [Self]) {
        to.convert_from_f32_slice(from);
    }
    fn as_f32(_: &[Self]) -> Option<&[f32]> {
        None
    }
}

impl Element for bf16 {
    fn widen(from: &[Self], to: &mut [f32]) {
        from.convert_to_f32_slice(to);
    }
    fn narrow(from: &[f32], to: &mut [Self]) {
        to.convert_from_f32_slice(from);
    }
    fn as_f32(_: &[Self]) -> Option<&[f32]> {
        None
    }
}
