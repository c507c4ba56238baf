//! Custom operators for ONNX Runtime, domain `outrider`.
//!
//! [`attention`], [`convolution`], [`selector`] and [`simd`] are plain computations over slices.
//! [`cached_attention`], [`block_attention`], [`grouped_dynamic_conv`] and [`path_selector`] make them operators; with [`adapter`] and [`tensor`] they are the
//! only modules here that know ONNX Runtime.
//! A session gets all operators with `builder.with_operators(ops::domain()?)`, or [`cuda::domain`] where it runs on a CUDA device.

#![expect(
    unsafe_code,
    reason = "SIMD intrinsics, slices that tasks write in parallel, memory that belongs to ONNX Runtime, and CUDA"
)]

pub mod adapter;
pub mod attention;
pub mod block_attention;
pub mod cached_attention;
pub mod convolution;
pub mod cuda;
pub mod element;
pub mod error;
pub mod grouped_dynamic_conv;
pub mod path_selector;
pub mod pool;
pub mod selector;
pub mod shared;
pub mod simd;
pub mod tensor;
#[cfg(test)]
mod testing;

use half::{bf16, f16};
use ort::operator::OperatorDomain;

use self::{
    block_attention::BlockAttention, cached_attention::CachedAttention,
    grouped_dynamic_conv::GroupedDynamicConv, path_selector::PathSelector,
};

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
        .add(CachedAttention::<bf16>::new())?
        .add(BlockAttention::<f32>::new())?
        .add(BlockAttention::<f16>::new())?
        .add(BlockAttention::<bf16>::new())?
        .add(GroupedDynamicConv::<f32>::new())?
        .add(GroupedDynamicConv::<f16>::new())?
        .add(GroupedDynamicConv::<bf16>::new())?
        .add(PathSelector::<f32>::new())?
        .add(PathSelector::<f16>::new())?
        .add(PathSelector::<bf16>::new())
}
