//! What query rows gather from keys: the running softmax, how two are merged and how one is finished.

use crate::ops::simd::{Kernel, MAX_LANES, Simd, exp_nonpositive};

/// Running softmax of some rows: numerators, denominators and the largest score so far.
///
/// A row that has seen no key has `max` of minus infinity and 0 elsewhere.
#[derive(Debug)]
pub struct State<'a> {
    /// Largest score, one per row.
    pub max: &'a mut [f32],
    /// Sum of `exp(score - max)`, one per row.
    pub sum: &'a mut [f32],
    /// Sum of `exp(score - max) · value`, `width` elements per row.
    pub values: &'a mut [f32],
}

impl State<'_> {
    /// Forgets everything.
    pub fn clear(&mut self) {
        self.max.fill(f32::NEG_INFINITY);
        self.sum.fill(0.0);
        self.values.fill(0.0);
    }
}

/// Adds what one row gathered from later keys to what it gathered from earlier ones.
///
/// Rows that saw no key change nothing. `values` have the same length, a multiple of [`MAX_LANES`].
pub struct Merge<'a> {
    /// Largest score, sum and values of the earlier keys; updated.
    pub into: (&'a mut f32, &'a mut f32, &'a mut [f32]),
    /// The same of the later keys.
    pub from: (f32, f32, &'a [f32]),
}

impl Kernel for Merge<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let (max, sum, values) = self.into;
        let (from_max, from_sum, from_values) = self.from;
        assert!(values.len() == from_values.len() && values.len().is_multiple_of(S::LANES));
        if from_sum == 0.0 {
            return;
        }
        if *sum == 0.0 {
            (*max, *sum) = (from_max, from_sum);
            values.copy_from_slice(from_values);
            return;
        }
        // SAFETY: the caller vouches for the instruction set; chunks have `LANES` elements.
        unsafe {
            let new_max = max.max(from_max);
            let (factor, from_factor) = (
                exp_scalar::<S>(*max - new_max),
                exp_scalar::<S>(from_max - new_max),
            );
            *sum = *sum * factor + from_sum * from_factor;
            *max = new_max;
            let (factor, from_factor) = (S::splat(factor), S::splat(from_factor));
            for (to, from) in values
                .chunks_exact_mut(S::LANES)
                .zip(from_values.chunks_exact(S::LANES))
            {
                let scaled = S::mul(S::load(to.as_ptr()), factor);
                S::store(
                    to.as_mut_ptr(),
                    S::mul_add(S::load(from.as_ptr()), from_factor, scaled),
                );
            }
        }
    }
}

/// Divides what one row gathered by the sum of its weights, in place; rows that saw no key become 0.
pub struct Finish<'a> {
    /// Sum of the row's weights.
    pub sum: f32,
    /// The weighted values; a multiple of [`MAX_LANES`].
    pub values: &'a mut [f32],
}

impl Kernel for Finish<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        if self.sum == 0.0 {
            self.values.fill(0.0);
            return;
        }
        for chunk in self.values.chunks_exact_mut(S::LANES) {
            // SAFETY: the caller vouches for the instruction set; the chunk has `LANES` elements.
            unsafe {
                S::store(
                    chunk.as_mut_ptr(),
                    S::div(S::load(chunk.as_ptr()), S::splat(self.sum)),
                )
            }
        }
    }
}

/// `eˣ` for one `x <= 0`, as [`exp_nonpositive`] gives it.
///
/// # Safety
/// As for [`Simd`].
#[inline(always)]
pub unsafe fn exp_scalar<S: Simd>(x: f32) -> f32 {
    let mut lanes = [0.0; MAX_LANES];
    // SAFETY: the caller vouches for the instruction set; no vector is longer than `lanes`.
    unsafe { S::store(lanes.as_mut_ptr(), exp_nonpositive::<S>(S::splat(x))) }
    lanes[0]
}

/// Multiplies `values` by `factor`.
///
/// # Safety
/// As for [`Simd`]; `values` is a multiple of the lanes.
#[inline(always)]
pub unsafe fn scale<S: Simd>(values: &mut [f32], factor: f32) {
    // SAFETY: the caller vouches for the instruction set; chunks have `LANES` elements.
    unsafe {
        for chunk in values.chunks_exact_mut(S::LANES) {
            S::store(
                chunk.as_mut_ptr(),
                S::mul(S::load(chunk.as_ptr()), S::splat(factor)),
            );
        }
    }
}
