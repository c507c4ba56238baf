//! Vectors of `f32` in the widest form the processor has, for kernels whose results must not depend on how work is cut.
//!
//! A kernel is written once, generic over [`Simd`], and compiled for every instruction set; [`InstructionSet::detect`] picks one per process.
//! Within one instruction set every operation here is a fixed sequence of IEEE operations, so equal inputs give equal bits.
//! Between instruction sets the bits may differ: reductions have other trees, and [`Scalar`] has no fused multiply-add.

#[cfg(target_arch = "aarch64")]
mod arm;
mod scalar;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::sync::OnceLock;

#[cfg(target_arch = "aarch64")]
pub use self::arm::Neon;
pub use self::scalar::Scalar;
#[cfg(target_arch = "x86_64")]
pub use self::x86::{Avx2, Avx512};

/// Which implementation of [`Simd`] the kernels run with; always one that this processor has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InstructionSet(Set);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Set {
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
                sets.push(Self(Set::Avx512));
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                sets.push(Self(Set::Avx2));
            }
        }
        #[cfg(target_arch = "aarch64")]
        sets.push(Self(Set::Neon));
        sets.push(Self(Set::Scalar));
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
        // SAFETY: only `available` makes values of this type, and it asks the processor.
        unsafe {
            match self.0 {
                #[cfg(target_arch = "x86_64")]
                Set::Avx512 => run_avx512(kernel),
                #[cfg(target_arch = "x86_64")]
                Set::Avx2 => run_avx2(kernel),
                #[cfg(target_arch = "aarch64")]
                Set::Neon => kernel.run::<Neon>(),
                Set::Scalar => kernel.run::<Scalar>(),
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
