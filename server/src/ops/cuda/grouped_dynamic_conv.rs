//! `outrider.GroupedDynamicConv` on CUDA; inputs, output and attributes are those of [`crate::ops::grouped_dynamic_conv`].

use std::{marker::PhantomData, ops::RangeInclusive};

use ort::operator::{
    ComputeContext, Kernel, KernelContext, Operator, OperatorInput, OperatorOutput,
    ShapeInferenceContext,
};

use super::{CudaElement, EXECUTION_PROVIDER, Launch, compile::Source, device::Stream};
use crate::ops::{
    DOMAIN_VERSION,
    adapter::{Written, check_apart, contain_panics, infer_like},
    convolution::{Attributes, Geometry, Shapes},
    grouped_dynamic_conv::{NAME, read_attributes},
    tensor::RawTensor,
};

/// Threads of a block.
const THREADS: usize = 256;

/// Addresses of the tensors of one call, in device memory.
#[derive(Clone, Copy, Debug)]
pub struct Addresses {
    /// As in [`Shapes`].
    pub x: usize,
    /// As in [`Shapes`].
    pub coefficients: usize,
    /// As in [`Shapes`].
    pub base: usize,
    /// The output, of the shape of `x`.
    pub output: usize,
}

/// The launch that computes one call.
pub fn launch<T: CudaElement>(geometry: &Geometry, addresses: Addresses) -> Launch {
    let &Geometry {
        attributes,
        batch,
        rows,
        channels,
        taps,
    } = geometry;
    let arguments = [
        addresses.x,
        addresses.coefficients,
        addresses.base,
        addresses.output,
        rows,
        channels,
        taps,
        attributes.group_size,
        attributes.side,
    ];
    Launch {
        source: Source::GroupedDynamicConv,
        kernel: format!("grouped_dynamic_conv_{}", T::SUFFIX),
        grid: [batch * rows, channels.div_ceil(THREADS)],
        threads: THREADS,
        shared_bytes: 0,
        arguments: arguments.map(|argument| argument as u64).to_vec(),
    }
}

/// The operator for one element type.
pub struct CudaGroupedDynamicConv<T>(PhantomData<fn() -> T>);

impl<T> CudaGroupedDynamicConv<T> {
    /// The operator.
    #[expect(clippy::new_without_default, reason = "there is nothing to default")]
    pub const fn new() -> Self {
        Self(PhantomData)
    }
}

impl<T: CudaElement> Operator for CudaGroupedDynamicConv<T> {
    type Kernel<'attr> = CudaGroupedDynamicConvKernel<T>;

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
        [T::into_tensor_element_type(); 3].map(OperatorInput::required)
    }

    fn outputs(&self) -> impl IntoIterator<Item = OperatorOutput> {
        [OperatorOutput::required(T::into_tensor_element_type())]
    }

    fn create_kernel<'attr>(
        &self,
        context: &KernelContext<'attr>,
    ) -> ort::Result<Self::Kernel<'attr>> {
        Ok(CudaGroupedDynamicConvKernel {
            attributes: read_attributes(context)?,
            element: PhantomData,
        })
    }

    fn infer_shape(&self, context: &mut ShapeInferenceContext) -> ort::Result<()> {
        infer_like(context, &[(0, 0)]);
        Ok(())
    }
}

/// One node of a session.
pub struct CudaGroupedDynamicConvKernel<T> {
    attributes: Attributes,
    element: PhantomData<fn() -> T>,
}

impl<T: CudaElement> Kernel for CudaGroupedDynamicConvKernel<T> {
    fn compute(&mut self, context: &ComputeContext) -> ort::Result<()> {
        contain_panics(NAME, || {
            let x = RawTensor::<T>::required_input(context, 0, "x")?;
            let coefficients = RawTensor::<T>::required_input(context, 1, "coefficients")?;
            let base = RawTensor::<T>::required_input(context, 2, "base")?;
            let shapes = Shapes {
                x: x.shape(),
                coefficients: coefficients.shape(),
                base: base.shape(),
            };
            let geometry = Geometry::new(self.attributes, &shapes).map_err(ort::Error::wrap)?;
            let output = RawTensor::<T>::output(context, 0, x.shape())?
                .ok_or_else(|| ort::Error::new("output 0 is missing"))?;
            check_apart(
                &[x.addresses(), coefficients.addresses(), base.addresses()],
                &[Written {
                    name: "output",
                    memory: output.addresses(),
                    in_place_of: None,
                }],
            )?;
            let launch = launch::<T>(
                &geometry,
                Addresses {
                    x: x.addresses().start,
                    coefficients: coefficients.addresses().start,
                    base: base.addresses().start,
                    output: output.addresses().start,
                },
            );
            // SAFETY: ONNX Runtime keeps the tensors until the stream has used them, and their shapes have been checked.
            unsafe { Stream::of(context)?.launch(&[launch]) }.map_err(ort::Error::wrap)
        })
    }
}
