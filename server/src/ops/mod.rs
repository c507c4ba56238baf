//! Custom operators for ONNX Runtime, domain `outrider`.
//!
//! [`attention`] and [`simd`] are plain computations over slices; [`cached_attention`] and [`tensor`] are the only ones that know ONNX Runtime.
//! A session gets all operators with `builder.with_operators(ops::domain()?)`.

#![expect(
    unsafe_code,
    reason = "SIMD intrinsics, slices that tasks write in parallel, and memory that belongs to ONNX Runtime"
)]

pub mod attention;
pub mod cached_attention;
pub mod simd;
pub mod tensor;
#[cfg(test)]
mod testing;

use half::{bf16, f16};
use ort::operator::OperatorDomain;

use self::cached_attention::CachedAttention;

/// Domain of the operators in a graph.
pub const DOMAIN: &str = "outrider";

/// Version of the domain in a graph's opset imports.
pub const DOMAIN_VERSION: u32 = 1;

/// All operators, for one session or, in an `Arc`, for several.
///
/// The ONNX Runtime environment must exist already: see [`crate::model::runtime::environment`].
pub fn domain() -> ort::Result<OperatorDomain> {
    OperatorDomain::new(DOMAIN)?
        .add(CachedAttention::<f32>::new())?
        .add(CachedAttention::<f16>::new())?
        .add(CachedAttention::<bf16>::new())
}
