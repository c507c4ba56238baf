//! Vectors of `f32` in the widest form the processor has, for kernels whose results must not depend on how work is cut.
//!
//! A kernel is written once, generic over [`Simd`], and compiled for every instruction set; [`InstructionSet::detect`] picks one per process.
//! Within one instruction set every operation here is a fixed sequence of IEEE operations, so equal inputs give equal bits.
//! Between instruction sets the bits may differ: reductions have other trees, and [`Scalar`] has no fused multiply-add.

use std::sync::OnceLock;

/// Which implementation of [`Simd`] the kernels run with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstructionSet {
    /// 16 lanes; AVX-512F.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// 8 lanes; AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// 4 lanes; every 64-bit Arm processor has it.
    #[cfg(target_arch = "aarch64")]
    Neon,
    /// Plain Rust; runs everywhere.
    Scalar,
}

impl InstructionSet {
    /// The best one this processor has; the same for the whole life of the process.
    pub fn detect() -> Self {
        static DETECTED: OnceLock<InstructionSet> = OnceLock::new();
        *DETECTED.get_or_init(|| Self::available()[0])
    }

    /// All this processor has, the best first.
    pub fn available() -> Vec<Self> {
        let mut sets = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") {
                sets.push(Self::Avx512);
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                sets.push(Self::Avx2);
            }
        }
        #[cfg(target_arch = "aarch64")]
        sets.push(Self::Neon);
        sets.push(Self::Scalar);
        sets
    }
}

/// Most lanes any implementation has. Rows that kernels read are padded with zeros to a multiple of it.
pub const MAX_LANES: usize = 16;

/// One vector type and the operations the kernels need.
///
/// # Safety
/// The functions may only run on a processor that has the implementation's instruction set,
/// and pointers must be valid for [`Simd::LANES`] elements (they need not be aligned).
#[expect(
    clippy::missing_safety_doc,
    reason = "the trait's own section speaks for all its functions"
)]
pub unsafe trait Simd: Copy {
    /// The vector.
    type V: Copy;
    /// Elements of a vector; divides [`MAX_LANES`].
    const LANES: usize;

    /// All lanes `value`.
    unsafe fn splat(value: f32) -> Self::V;
    /// All lanes the element at `from`.
    unsafe fn splat_at(from: *const f32) -> Self::V;
    /// Reads a vector.
    unsafe fn load(from: *const f32) -> Self::V;
    /// Writes a vector.
    unsafe fn store(to: *mut f32, v: Self::V);
    /// `a + b`.
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    /// `a - b`.
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    /// `a · b`.
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    /// `a / b`.
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// `a · b + c`, rounded once where the processor can.
    unsafe fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger one; which one is returned when either is NaN differs between implementations.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// Rounds to the nearest integer, ties to even; |a| < 2³¹.
    unsafe fn round(a: Self::V) -> Self::V;
    /// 2ⁿ for integral lanes from -126 to 127.
    unsafe fn exp2_integral(n: Self::V) -> Self::V;
    /// Lanes of `a` where `x >= limit` or `x` is NaN, 0 elsewhere.
    unsafe fn zero_below(a: Self::V, x: Self::V, limit: Self::V) -> Self::V;
    /// The sum of the lanes, by a fixed tree.
    unsafe fn sum(v: Self::V) -> f32;
    /// The largest lane.
    unsafe fn largest(v: Self::V) -> f32;
    /// Asks for the cache line at `address` ahead of its use; never faults, whatever the address.
    unsafe fn prefetch(address: *const f32);
    /// Lane `i` of the result is the sum of the lanes of `v[i]`, by a tree that is the same for every `i`.
    /// Writes [`Simd::LANES`] elements; `v` has as many vectors.
    unsafe fn sums(v: &[Self::V], to: *mut f32);
}

/// `eˣ` for `x <= 0`: below 2 ulp for results that are normal numbers, exactly 0 where they would not be, NaN for NaN.
///
/// Argument reduction by ln 2 in two parts and a polynomial of degree 6, the minimax fit of the Cephes library.
///
/// # Safety
/// As for [`Simd`].
#[inline(always)]
pub unsafe fn exp_nonpositive<S: Simd>(x: S::V) -> S::V {
    /// Smallest argument whose result is a normal number: -126 · ln 2, rounded towards 0.
    const LOWEST: f32 = -87.336_54;
    // SAFETY: the caller vouches for the instruction set; no memory is touched.
    unsafe {
        // The order of the operands lets NaN through on x86, where `max` returns the second operand then; Arm returns NaN anyway.
        let reduced = S::max(S::splat(LOWEST), x);
        let n = S::round(S::mul(reduced, S::splat(std::f32::consts::LOG2_E)));
        let r = S::mul_add(n, S::splat(-355.0 / 512.0), reduced);
        let r = S::mul_add(n, S::splat(2.121_944_4e-4), r);
        let mut p = S::splat(1.987_569_1e-4);
        for coefficient in [
            1.398_2e-3,
            8.333_452e-3,
            4.166_579_6e-2,
            1.666_666_5e-1,
            0.5,
        ] {
            p = S::mul_add(p, r, S::splat(coefficient));
        }
        let p = S::add(S::mul_add(p, S::mul(r, r), r), S::splat(1.0));
        S::zero_below(S::mul(p, S::exp2_integral(n)), x, S::splat(LOWEST))
    }
}

/// Plain Rust on eight lanes, which compilers turn into whatever the baseline has.
#[derive(Clone, Copy)]
pub struct Scalar;

const SCALAR_LANES: usize = 8;

#[inline(always)]
fn lanewise(
    a: [f32; SCALAR_LANES],
    b: [f32; SCALAR_LANES],
    operation: impl Fn(f32, f32) -> f32,
) -> [f32; SCALAR_LANES] {
    std::array::from_fn(|i| operation(a[i], b[i]))
}

// SAFETY: needs no particular instruction set.
unsafe impl Simd for Scalar {
    type V = [f32; SCALAR_LANES];
    const LANES: usize = SCALAR_LANES;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::V {
        [value; SCALAR_LANES]
    }
    #[inline(always)]
    unsafe fn splat_at(from: *const f32) -> Self::V {
        // SAFETY: the caller vouches for the element.
        unsafe { Self::splat(*from) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::V {
        // SAFETY: the caller vouches for `LANES` elements; unaligned is allowed.
        unsafe { from.cast::<Self::V>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, v: Self::V) {
        // SAFETY: as in `load`.
        unsafe { to.cast::<Self::V>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        lanewise(a, b, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        lanewise(a, b, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        lanewise(a, b, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        lanewise(a, b, |a, b| a / b)
    }
    #[inline(always)]
    unsafe fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // Not `f32::mul_add`: without the instruction it is a slow call.
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        lanewise(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn round(a: Self::V) -> Self::V {
        // Adding and taking away 1.5 · 2²³ rounds to an integer, ties to even; |a| < 2²² here.
        a.map(|a| (a + 12_582_912.0) - 12_582_912.0)
    }
    #[inline(always)]
    unsafe fn exp2_integral(n: Self::V) -> Self::V {
        n.map(|n| f32::from_bits(((n as i32).wrapping_add(127) as u32).wrapping_shl(23)))
    }
    #[inline(always)]
    unsafe fn zero_below(a: Self::V, x: Self::V, limit: Self::V) -> Self::V {
        std::array::from_fn(|i| if x[i] < limit[i] { 0.0 } else { a[i] })
    }
    #[inline(always)]
    unsafe fn sum(v: Self::V) -> f32 {
        ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]))
    }
    #[inline(always)]
    unsafe fn largest(v: Self::V) -> f32 {
        v.iter().copied().fold(f32::NEG_INFINITY, f32::max)
    }
    #[inline(always)]
    unsafe fn prefetch(_: *const f32) {}
    #[inline(always)]
    unsafe fn sums(v: &[Self::V], to: *mut f32) {
        for (i, &v) in v.iter().enumerate() {
            // SAFETY: the caller vouches for as many elements as there are vectors.
            unsafe { to.add(i).write(Self::sum(v)) }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
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
}

#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2, Avx512};

#[cfg(target_arch = "aarch64")]
mod arm {
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
            unsafe {
                vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(a), vcltq_f32(x, limit)))
            }
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
}

#[cfg(target_arch = "aarch64")]
pub use arm::Neon;

/// A computation written once for every instruction set.
pub trait Kernel {
    /// What it returns.
    type Output;

    /// Runs it. Implementations are `#[inline(always)]`, so that they are compiled with the caller's instruction set.
    ///
    /// # Safety
    /// The processor has the instruction set of `S`.
    unsafe fn run<S: Simd>(self) -> Self::Output;
}

impl InstructionSet {
    /// Runs `kernel` with this instruction set.
    pub fn run<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: values of this type come from `available`, which asks the processor.
        unsafe {
            match self {
                #[cfg(target_arch = "x86_64")]
                Self::Avx512 => run_avx512(kernel),
                #[cfg(target_arch = "x86_64")]
                Self::Avx2 => run_avx2(kernel),
                #[cfg(target_arch = "aarch64")]
                Self::Neon => kernel.run::<Neon>(),
                Self::Scalar => kernel.run::<Scalar>(),
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn run_avx512<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: the caller vouches for AVX-512F.
    unsafe { kernel.run::<Avx512>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn run_avx2<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: the caller vouches for AVX2 and FMA.
    unsafe { kernel.run::<Avx2>() }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Exp<'a>(&'a mut [f32]);

    impl Kernel for Exp<'_> {
        type Output = ();

        #[inline(always)]
        unsafe fn run<S: Simd>(self) {
            for chunk in self.0.chunks_exact_mut(S::LANES) {
                // SAFETY: the chunk has `LANES` elements; the caller vouches for the instruction set.
                unsafe {
                    S::store(
                        chunk.as_mut_ptr(),
                        exp_nonpositive::<S>(S::load(chunk.as_ptr())),
                    )
                }
            }
        }
    }

    fn exp(set: InstructionSet, values: &[f32]) -> Vec<f32> {
        let mut padded = values.to_vec();
        padded.resize(values.len().next_multiple_of(MAX_LANES), 0.0);
        set.run(Exp(&mut padded));
        padded.truncate(values.len());
        padded
    }

    #[test]
    fn exp_is_within_two_ulp_and_exact_at_the_ends() {
        let arguments: Vec<f32> = (0..200_000)
            .map(|i| -(i as f32) * (87.3 / 200_000.0))
            .collect();
        for set in InstructionSet::available() {
            for (&x, &y) in arguments.iter().zip(&exp(set, &arguments)) {
                let exact = f64::from(x).exp();
                let ulp = f64::from(f32::from_bits((exact as f32).to_bits() + 1))
                    - f64::from(exact as f32);
                assert!(
                    (f64::from(y) - exact).abs() <= 2.0 * ulp,
                    "{set:?}: exp({x}) = {y}, not {exact}"
                );
            }
            assert_eq!(
                exp(set, &[0.0, -0.0, -87.4, -1e30, f32::NEG_INFINITY]),
                [1.0, 1.0, 0.0, 0.0, 0.0],
                "{set:?}"
            );
            assert!(exp(set, &[f32::NAN])[0].is_nan(), "{set:?}");
        }
    }

    struct Sums<'a> {
        vectors: &'a [f32],
        all: &'a mut [f32],
        single: &'a mut [f32],
        largest: &'a mut [f32],
    }

    impl Kernel for Sums<'_> {
        type Output = usize;

        #[inline(always)]
        unsafe fn run<S: Simd>(self) -> usize {
            // SAFETY: the slices have at least `MAX_LANES²` or `MAX_LANES` elements.
            unsafe {
                let mut vectors = [S::splat(0.0); MAX_LANES];
                for (i, vector) in vectors[..S::LANES].iter_mut().enumerate() {
                    *vector = S::load(self.vectors.as_ptr().add(i * S::LANES));
                    self.single[i] = S::sum(*vector);
                    self.largest[i] = S::largest(*vector);
                }
                S::sums(&vectors[..S::LANES], self.all.as_mut_ptr());
            }
            S::LANES
        }
    }

    #[test]
    fn lane_sums_keep_their_order_and_do_not_depend_on_the_slot() {
        for set in InstructionSet::available() {
            let mut vectors: Vec<f32> = (0..MAX_LANES * MAX_LANES)
                .map(|i| ((i * 7919) % 1013) as f32 / 1013.0 - 0.4)
                .collect();
            let mut outputs = [[0.0; MAX_LANES]; 3];
            let mut run = |vectors: &[f32]| {
                let [all, single, largest] = &mut outputs;
                let lanes = set.run(Sums {
                    vectors,
                    all,
                    single,
                    largest,
                });
                (
                    lanes,
                    all[..lanes].to_vec(),
                    single[..lanes].to_vec(),
                    largest[..lanes].to_vec(),
                )
            };
            let (lanes, all, single, largest) = run(&vectors);
            for (i, vector) in vectors.chunks(lanes).take(lanes).enumerate() {
                let exact: f64 = vector.iter().map(|&v| f64::from(v)).sum();
                assert!(
                    (f64::from(all[i]) - exact).abs() < 1e-6,
                    "{set:?}: vector {i}"
                );
                assert!(
                    (f64::from(single[i]) - exact).abs() < 1e-6,
                    "{set:?}: vector {i}"
                );
                assert_eq!(
                    largest[i],
                    vector.iter().copied().fold(f32::MIN, f32::max),
                    "{set:?}: vector {i}"
                );
            }
            // The same vector in every slot: every sum has the same bits.
            for i in 0..lanes {
                vectors.copy_within(0..lanes, i * lanes);
            }
            let (_, all, ..) = run(&vectors);
            assert!(
                all.iter().all(|sum| sum.to_bits() == all[0].to_bits()),
                "{set:?}: {all:?}"
            );
        }
    }
}
