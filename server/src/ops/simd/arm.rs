//! NEON.

use std::arch::aarch64::*;

use super::Simd;

/// NEON.
#[derive(Clone, Copy)]
pub struct Neon;

// SAFETY: every intrinsic belongs to NEON, which the architecture guarantees.
unsafe impl Simd for Neon {
    type V = float32x4_t;
    const LANES: usize = 4;

    #[inline(always)]
    unsafe fn splat(value: f32) -> float32x4_t {
        // SAFETY: NEON is part of the architecture.
        unsafe { vdupq_n_f32(value) }
    }
    #[inline(always)]
    unsafe fn splat_at(from: *const f32) -> float32x4_t {
        // SAFETY: the caller vouches for the element.
        unsafe { vld1q_dup_f32(from) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> float32x4_t {
        // SAFETY: the caller vouches for the elements.
        unsafe { vld1q_f32(from) }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, v: float32x4_t) {
        // SAFETY: the caller vouches for the elements.
        unsafe { vst1q_f32(to, v) }
    }
    #[inline(always)]
    unsafe fn add(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: NEON is part of the architecture.
        unsafe { vaddq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: NEON is part of the architecture.
        unsafe { vsubq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: NEON is part of the architecture.
        unsafe { vmulq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: NEON is part of the architecture.
        unsafe { vdivq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn mul_add(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        // SAFETY: NEON is part of the architecture.
        unsafe { vfmaq_f32(c, a, b) }
    }
    #[inline(always)]
    unsafe fn max(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: NEON is part of the architecture.
        unsafe { vmaxq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn round(a: float32x4_t) -> float32x4_t {
        // SAFETY: NEON is part of the architecture.
        unsafe { vrndnq_f32(a) }
    }
    #[inline(always)]
    unsafe fn exp2_integral(n: float32x4_t) -> float32x4_t {
        // SAFETY: NEON is part of the architecture.
        unsafe {
            let biased = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
            vreinterpretq_f32_s32(vshlq_n_s32::<23>(biased))
        }
    }
    #[inline(always)]
    unsafe fn zero_below(a: float32x4_t, x: float32x4_t, limit: float32x4_t) -> float32x4_t {
        // SAFETY: NEON is part of the architecture.
        unsafe { vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(a), vcltq_f32(x, limit))) }
    }
    #[inline(always)]
    unsafe fn sum(v: float32x4_t) -> f32 {
        // SAFETY: NEON is part of the architecture.
        unsafe { vaddvq_f32(v) }
    }
    #[inline(always)]
    unsafe fn largest(v: float32x4_t) -> f32 {
        // SAFETY: NEON is part of the architecture.
        unsafe { vmaxvq_f32(v) }
    }
    #[inline(always)]
    unsafe fn prefetch(_: *const f32) {}
    #[inline(always)]
    unsafe fn sums(v: &[float32x4_t], to: *mut f32) {
        // SAFETY: the caller vouches for four vectors and four elements.
        unsafe {
            vst1q_f32(
                to,
                vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3])),
            )
        }
    }
}
