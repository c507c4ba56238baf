//! `outrider.PathSelector` on CUDA; inputs, outputs and the attribute are those of [`crate::ops::path_selector`].
//!
//! Where the CPU's operator refuses a value, this one proposes nothing for the sequence.

use std::{marker::PhantomData, ops::RangeInclusive};

use ort::operator::{
    ComputeContext, Kernel, KernelContext, Operator, OperatorInput, OperatorOutput,
};

use super::{
    CudaElement, CudaError, EXECUTION_PROVIDER, Launch, SHARED_BYTES, WARP, at_most,
    compile::Source, device::Stream,
};
use crate::ops::{
    DOMAIN_VERSION,
    adapter::contain_panics,
    path_selector::{self, NAME, read_top_k},
    selector::Geometry,
};

/// Warps of a block, as the source has it; each slot needs one.
const WARPS: usize = 32;

/// Addresses of the tensors of one call, in device memory; 0 for those that are absent.
#[derive(Clone, Copy, Debug)]
pub struct Addresses {
    /// The inputs, in their order.
    pub inputs: [usize; 11],
    /// The outputs, in their order.
    pub outputs: [usize; 3],
}

/// The launch that computes one call.
///
/// # Errors
///
/// There are more slots than warps, or more candidates than shared memory has room for.
pub fn launch<T: CudaElement>(
    geometry: &Geometry,
    addresses: &Addresses,
) -> Result<Launch, CudaError> {
    let &Geometry {
        top_k,
        batch,
        slots,
        columns,
        rank,
        vocabulary,
    } = geometry;
    at_most("the number of slots", slots, WARPS)?;
    // In the order of the source: candidates of the warps and of the slots, their tokens, scores, weights, flags, the choice.
    let shared_bytes =
        (WARPS + slots) * top_k * 8 + slots * top_k * 4 + (top_k + rank + WARPS + 1) * 4;
    at_most(
        "the shared memory that top_k and the codebooks' rank ask for, in bytes,",
        shared_bytes,
        SHARED_BYTES,
    )?;
    let sizes = [slots, columns, top_k, rank, vocabulary.unwrap_or(0)];
    let arguments = [&addresses.inputs[..], &addresses.outputs[..], &sizes[..]];
    Ok(Launch {
        source: Source::PathSelector,
        kernel: format!("path_selector_{}", T::SUFFIX),
        grid: [if slots == 0 { 0 } else { batch }, 1],
        threads: WARPS * WARP,
        shared_bytes,
        arguments: arguments
            .concat()
            .into_iter()
            .map(|argument| argument as u64)
            .collect(),
    })
}

/// The operator for one element type of the codebooks.
pub struct CudaPathSelector<T>(PhantomData<fn() -> T>);

impl<T> CudaPathSelector<T> {
    /// The operator.
    #[expect(clippy::new_without_default, reason = "there is nothing to default")]
    pub const fn new() -> Self {
        Self(PhantomData)
    }
}

impl<T: CudaElement> Operator for CudaPathSelector<T> {
    type Kernel<'attr> = CudaPathSelectorKernel<T>;

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
        path_selector::inputs(T::into_tensor_element_type())
    }

    fn outputs(&self) -> impl IntoIterator<Item = OperatorOutput> {
        path_selector::outputs()
    }

    fn create_kernel<'attr>(
        &self,
        context: &KernelContext<'attr>,
    ) -> ort::Result<Self::Kernel<'attr>> {
        Ok(CudaPathSelectorKernel {
            top_k: read_top_k(context)?,
            element: PhantomData,
        })
    }
}

/// One node of a session.
pub struct CudaPathSelectorKernel<T> {
    top_k: usize,
    element: PhantomData<fn() -> T>,
}

impl<T: CudaElement> Kernel for CudaPathSelectorKernel<T> {
    fn compute(&mut self, context: &ComputeContext) -> ort::Result<()> {
        contain_panics(NAME, || {
            let tensors = path_selector::Tensors::<T>::of(context, self.top_k)?;
            let addresses = Addresses {
                inputs: tensors.inputs().map(|memory| memory.start),
                outputs: tensors.outputs().map(|memory| memory.start),
            };
            let launch = launch::<T>(&tensors.geometry, &addresses).map_err(ort::Error::wrap)?;
            // SAFETY: ONNX Runtime keeps the tensors until the stream has used them, and their shapes have been checked.
            unsafe { Stream::of(context)?.launch(&[launch]) }.map_err(ort::Error::wrap)
        })
    }
}
