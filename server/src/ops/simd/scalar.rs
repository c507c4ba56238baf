//! Plain Rust, for processors whose instructions are not known here.

use super::Simd;

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
