//! `outrider.BlockAttention` on CUDA; inputs, outputs and attributes are those of [`crate::ops::block_attention`].
//!
//! The kernels are written for short blocks and take no care to share keys between heads; they are right before they are fast.
//! A node has both updated caches here; where one is not the same memory as the cache, the whole cache is copied first.

use std::{marker::PhantomData, ops::RangeInclusive};

use ort::operator::{
    ComputeContext, Kernel, KernelContext, Operator, OperatorInput, OperatorOutput,
    ShapeInferenceContext,
};

use super::{
    CudaElement, CudaError, EXECUTION_PROVIDER, Launch, WARP, at_most, compile::Source,
    device::Stream,
};
use crate::ops::{
    DOMAIN_VERSION,
    adapter::{attention::read_attributes, contain_panics, infer_like},
    attention::{Attributes, Geometry, RotaryLayout},
    block_attention::{self, NAME, Tensors},
};

/// Warps of a block, as the source has it.
const WARPS: usize = 4;

/// Elements of a head at most, as the source has it.
const MOST_HEAD_DIM: usize = 256;

/// Addresses of the tensors of one call, in device memory; 0 for those that are absent.
#[derive(Clone, Copy, Debug)]
pub struct Addresses {
    /// The inputs, in their order; the caches are the updated ones.
    pub inputs: [usize; 16],
    /// The output beside the caches.
    pub output: usize,
}

/// The launches that compute one call, for context tensors of so many rows.
///
/// # Errors
///
/// Heads are too large.
pub fn launches<T: CudaElement>(
    geometry: &Geometry,
    context: usize,
    addresses: &Addresses,
) -> Result<[Launch; 2], CudaError> {
    let head_dim = geometry.head_dim;
    at_most("the number of elements of a head", head_dim, MOST_HEAD_DIM)?;
    let (batch, block) = (geometry.batch, geometry.tokens);
    let (heads, kv_heads) = (geometry.num_heads(), geometry.kv_num_heads());
    let Attributes {
        is_causal,
        window,
        rotary_layout,
        norm_epsilon,
        softcap,
        ..
    } = geometry.attributes;
    let [
        query,
        key,
        value,
        context_key,
        context_value,
        key_cache,
        value_cache,
        block_position_ids,
        context_position_ids,
        context_start,
        context_rows,
        block_rows,
        cos,
        sin,
        q_norm,
        k_norm,
    ] = addresses.inputs;
    let bits = |number: f32| number.to_bits() as usize;
    let places = [
        block_position_ids,
        context_position_ids,
        context_start,
        context_rows,
        block_rows,
        cos,
        sin,
    ];
    let sizes = [batch, block, context, geometry.capacity];
    let rotation = [
        head_dim,
        geometry.rotary_dim / 2,
        geometry.positions,
        usize::from(rotary_layout == RotaryLayout::Interleaved),
        bits(norm_epsilon),
    ];
    let launch = |name: &str, warps: usize, arguments: &[&[usize]]| Launch {
        source: Source::BlockAttention,
        kernel: format!("block_attention_{name}_{}", T::SUFFIX),
        grid: [warps.div_ceil(WARPS), 1],
        threads: WARPS * WARP,
        shared_bytes: WARPS * head_dim * 4,
        arguments: arguments
            .concat()
            .into_iter()
            .map(|argument| argument as u64)
            .collect(),
    };
    Ok([
        launch(
            "append",
            batch * (context + block) * kv_heads,
            &[
                &[
                    key,
                    value,
                    context_key,
                    context_value,
                    key_cache,
                    value_cache,
                ],
                &places,
                &[k_norm],
                &sizes,
                &[kv_heads],
                &rotation,
            ],
        ),
        launch(
            "attend",
            batch * block * heads,
            &[
                &[query, key_cache, value_cache, addresses.output],
                &places,
                &[q_norm],
                &sizes,
                &[heads, kv_heads],
                &rotation,
                &[
                    bits(geometry.scale),
                    bits(softcap),
                    usize::from(is_causal),
                    window,
                ],
            ],
        ),
    ])
}

/// The operator for one element type.
pub struct CudaBlockAttention<T>(PhantomData<fn() -> T>);

impl<T> CudaBlockAttention<T> {
    /// The operator.
    #[expect(clippy::new_without_default, reason = "there is nothing to default")]
    pub const fn new() -> Self {
        Self(PhantomData)
    }
}

impl<T: CudaElement> Operator for CudaBlockAttention<T> {
    type Kernel<'attr> = CudaBlockAttentionKernel<T>;

    // As for the CPU.
    const INPLACES: &[(u32, u32)] = &[(5, 1), (6, 2)];

    fn name(&self) -> &str {
        NAME
    }

    fn versions(&self) -> RangeInclusive<u32> {
        DOMAIN_VERSION..=DOMAIN_VERSION
    }

    fn execution_provider_type(&self) -> Option<&str> {
        Some(EXECUTION_PROVIDER)
    }

    fn inputs(&self) -> impl IntoIterator<Item = OperatorInput> {
        block_attention::inputs(T::into_tensor_element_type())
    }

    fn outputs(&self) -> impl IntoIterator<Item = OperatorOutput> {
        block_attention::outputs(T::into_tensor_element_type())
    }

    fn create_kernel<'attr>(
        &self,
        context: &KernelContext<'attr>,
    ) -> ort::Result<Self::Kernel<'attr>> {
        Ok(CudaBlockAttentionKernel {
            attributes: read_attributes(NAME, context)?,
            element: PhantomData,
        })
    }

    fn infer_shape(&self, context: &mut ShapeInferenceContext) -> ort::Result<()> {
        infer_like(context, &[(0, 0), (1, 5), (2, 6)]);
        Ok(())
    }
}

/// One node of a session.
pub struct CudaBlockAttentionKernel<T> {
    attributes: Attributes,
    element: PhantomData<fn() -> T>,
}

impl<T: CudaElement> Kernel for CudaBlockAttentionKernel<T> {
    fn compute(&mut self, context: &ComputeContext) -> ort::Result<()> {
        contain_panics(NAME, || {
            let tensors = Tensors::<T>::of(context, &self.attributes)?;
            let stream = Stream::of(context)?;
            let mut inputs = tensors.inputs().map(|memory| memory.start);
            for (input, updated) in [(5, &tensors.updated_keys), (6, &tensors.updated_values)] {
                let updated = updated.as_ref().ok_or_else(|| {
                    ort::Error::new("on CUDA a node of BlockAttention has both updated caches")
                })?;
                let (from, to) = (tensors.inputs()[input].clone(), updated.addresses());
                if from != to {
                    // SAFETY: both have the shape of the cache and are apart, by the check of the tensors.
                    unsafe { stream.copy(to.start, from.start, from.len()) }
                        .map_err(ort::Error::wrap)?;
                }
                inputs[input] = to.start;
            }
            let addresses = Addresses {
                inputs,
                output: tensors.output.addresses().start,
            };
            let launches =
                launches::<T>(&tensors.geometry, tensors.most_context_rows(), &addresses)
                    .map_err(ort::Error::wrap)?;
            // SAFETY: ONNX Runtime keeps the tensors until the stream has used them, and their shapes have been checked.
            unsafe { stream.launch(&launches) }.map_err(ort::Error::wrap)
        })
    }
}
