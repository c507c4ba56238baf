//! AVX2 with FMA, and AVX-512F.
//!
//! Loads and stores are the masked ones with all lanes on, which compile to plain ones:
//! those named plain go through `ptr::read_unaligned`, and where debug assertions are on that keeps a copy of every vector on the stack.

use std::arch::x86_64::*;

use super::Simd;

/// AVX2 and FMA.
#[derive(Clone, Copy)]
pub struct Avx2;

// SAFETY: every intrinsic belongs to AVX2 or FMA, which the callers vouch for.
unsafe impl Simd for Avx2 {
    type V = __m256;
    const LANES: usize = 8;

    #[inline(always)]
    unsafe fn splat(value: f32) -> __m256 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { _mm256_set1_ps(value) }
    }
    #[inline(always)]
    unsafe fn splat_at(from: *const f32) -> __m256 {
        // SAFETY: the caller vouches for the instruction set and the element.
        unsafe { _mm256_broadcastss_ps(_mm_load_ss(from)) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m256 {
        // SAFETY: the caller vouches for the instruction set and the elements.
        unsafe { _mm256_maskload_ps(from, _mm256_set1_epi32(-1)) }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, v: __m256) {
        // SAFETY: the caller vouches for the instruction set and the elements.
        unsafe { _mm256_maskstore_ps(to, _mm256_set1_epi32(-1), v) }
    }
    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m256, b: __m256) -> __m256 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { _mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: __m256, b: __m256) -> __m256 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { _mm256_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul_add(a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn max(a: __m256, b: __m256) -> __m256 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { _mm256_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn round(a: __m256) -> __m256 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }
    #[inline(always)]
    unsafe fn exp2_integral(n: __m256) -> __m256 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            let biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
        }
    }
    #[inline(always)]
    unsafe fn zero_below(a: __m256, x: __m256, limit: __m256) -> __m256 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(x, limit), a) }
    }
    #[inline(always)]
    unsafe fn sum(v: __m256) -> f32 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
        }
    }
    #[inline(always)]
    unsafe fn largest(v: __m256) -> f32 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            let v = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let v = _mm_max_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)))
        }
    }
    #[inline(always)]
    unsafe fn prefetch(address: *const f32) {
        // SAFETY: the instruction is part of the architecture and ignores addresses it cannot read.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }
    #[inline(always)]
    unsafe fn sums(v: &[__m256], to: *mut f32) {
        // SAFETY: the caller vouches for the instruction set, eight vectors and eight elements.
        unsafe {
            let first = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
            let second = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
            // Each half of `first` and `second` holds four half sums; the halves meet here.
            let low = _mm256_permute2f128_ps::<0x20>(first, second);
            let high = _mm256_permute2f128_ps::<0x31>(first, second);
            Self::store(to, _mm256_add_ps(low, high));
        }
    }
}

// Functions and not closures: closures do not take on the caller's instruction set before they are inlined.

/// Sums of neighbours within each quarter, twice: one sum of each vector in each quarter.
///
/// # Safety
/// The processor has AVX-512F.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn four(a: __m512, b: __m512, c: __m512, d: __m512) -> __m512 {
    const EVEN: i32 = 0b10_00_10_00;
    const ODD: i32 = 0b11_01_11_01;
    let ab = _mm512_add_ps(
        _mm512_shuffle_ps::<EVEN>(a, b),
        _mm512_shuffle_ps::<ODD>(a, b),
    );
    let cd = _mm512_add_ps(
        _mm512_shuffle_ps::<EVEN>(c, d),
        _mm512_shuffle_ps::<ODD>(c, d),
    );
    _mm512_add_ps(
        _mm512_shuffle_ps::<EVEN>(ab, cd),
        _mm512_shuffle_ps::<ODD>(ab, cd),
    )
}

/// Sums of neighbouring quarters: two of `a`, two of `b`.
///
/// # Safety
/// The processor has AVX-512F.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn quarters(a: __m512, b: __m512) -> __m512 {
    _mm512_add_ps(
        _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b),
        _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b),
    )
}

/// AVX-512F.
#[derive(Clone, Copy)]
pub struct Avx512;

// SAFETY: every intrinsic belongs to AVX-512F, which the callers vouch for.
unsafe impl Simd for Avx512 {
    type V = __m512;
    const LANES: usize = 16;

    #[inline(always)]
    unsafe fn splat(value: f32) -> __m512 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { _mm512_set1_ps(value) }
    }
    #[inline(always)]
    unsafe fn splat_at(from: *const f32) -> __m512 {
        // SAFETY: the caller vouches for the instruction set and the element.
        unsafe { _mm512_broadcastss_ps(_mm_load_ss(from)) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m512 {
        // SAFETY: the caller vouches for the instruction set and the elements.
        unsafe { _mm512_maskz_loadu_ps(!0, from) }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, v: __m512) {
        // SAFETY: the caller vouches for the instruction set and the elements.
        unsafe { _mm512_mask_storeu_ps(to, !0, v) }
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul_add(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn round(a: __m512) -> __m512 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }
    #[inline(always)]
    unsafe fn exp2_integral(n: __m512) -> __m512 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            let biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
        }
    }
    #[inline(always)]
    unsafe fn zero_below(a: __m512, x: __m512, limit: __m512) -> __m512 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, limit), a) }
    }
    #[inline(always)]
    unsafe fn sum(v: __m512) -> f32 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            let v = _mm512_add_ps(v, _mm512_shuffle_f32x4::<0b01_00_11_10>(v, v));
            let v = _mm512_add_ps(v, _mm512_shuffle_f32x4::<0b10_11_00_01>(v, v));
            let v = _mm512_castps512_ps128(v);
            let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_add_ss(v, _mm_shuffle_ps::<1>(v, v)))
        }
    }
    #[inline(always)]
    unsafe fn largest(v: __m512) -> f32 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            let v = _mm512_max_ps(v, _mm512_shuffle_f32x4::<0b01_00_11_10>(v, v));
            let v = _mm512_max_ps(v, _mm512_shuffle_f32x4::<0b10_11_00_01>(v, v));
            let v = _mm512_castps512_ps128(v);
            let v = _mm_max_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_max_ss(v, _mm_shuffle_ps::<1>(v, v)))
        }
    }
    #[inline(always)]
    unsafe fn prefetch(address: *const f32) {
        // SAFETY: the instruction is part of the architecture and ignores addresses it cannot read.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }
    #[inline(always)]
    unsafe fn sums(v: &[__m512], to: *mut f32) {
        // SAFETY: the caller vouches for the instruction set, sixteen vectors and sixteen elements.
        unsafe {
            let first = quarters(four(v[0], v[1], v[2], v[3]), four(v[4], v[5], v[6], v[7]));
            let second = quarters(
                four(v[8], v[9], v[10], v[11]),
                four(v[12], v[13], v[14], v[15]),
            );
            let all = quarters(first, second);
            Self::store(to, all);
        }
    }
}
