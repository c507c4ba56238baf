//! `outrider.GroupedDynamicConv`: the convolution along a draft block, on the CPU.
//!
//! | input | element | shape | |
//! | --- | --- | --- | --- |
//! | 0 `x` | T | `[B, W, C]` | T is float, float16 or bfloat16 |
//! | 1 `coefficients` | T | `[B, W, 2·k·G]` | dynamic weights by side, tap and group, from a projection of the sublayer's input |
//! | 2 `base` | T | `[2, k, C]` | fixed weights by side, tap and channel |
//!
//! Output: 0 `[B, W, C]`. What it computes: [`convolution::convolve`].
//! Attributes: `side` (0 before the sublayer, 1 after it) and `group_size`, with C = G · `group_size`.

#[cfg(test)]
mod tests;

use std::{marker::PhantomData, ops::RangeInclusive};

use ort::{
    operator::{
        ComputeContext, Kernel, KernelContext, Operator, OperatorInput, OperatorOutput,
        ShapeInferenceContext,
    },
    value::PrimitiveTensorElementType,
};

use super::{
    DOMAIN_VERSION,
    adapter::{AttributeReader, OrtPool, Written, check_apart, contain_panics, infer_like},
    convolution::{self, Attributes, Geometry, Inputs, Shapes},
    element::Element,
    tensor::RawTensor,
};

/// Name of the operator in a graph.
pub const NAME: &str = "GroupedDynamicConv";

/// The operator for one element type.
pub struct GroupedDynamicConv<T>(PhantomData<fn() -> T>);

impl<T> GroupedDynamicConv<T> {
    /// The operator.
    #[expect(clippy::new_without_default, reason = "there is nothing to default")]
    pub const fn new() -> Self {
        Self(PhantomData)
    }
}

/// Reads and checks the attributes of a node.
pub fn read_attributes(context: &KernelContext<'_>) -> ort::Result<Attributes> {
    let reader = AttributeReader {
        operator: NAME,
        context,
    };
    let attributes = Attributes {
        side: reader.count("side", None)?,
        group_size: reader.count("group_size", None)?,
    };
    attributes.check().map_err(ort::Error::wrap)?;
    Ok(attributes)
}

impl<T: Element + PrimitiveTensorElementType> Operator for GroupedDynamicConv<T> {
    type Kernel<'attr> = GroupedDynamicConvKernel<T>;

    fn name(&self) -> &str {
        NAME
    }

    fn versions(&self) -> RangeInclusive<u32> {
        DOMAIN_VERSION..=DOMAIN_VERSION
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
        Ok(GroupedDynamicConvKernel {
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
pub struct GroupedDynamicConvKernel<T> {
    attributes: Attributes,
    element: PhantomData<fn() -> T>,
}

impl<T: Element + PrimitiveTensorElementType> Kernel for GroupedDynamicConvKernel<T> {
    fn compute(&mut self, context: &ComputeContext) -> ort::Result<()> {
        contain_panics(NAME, || self.run(context))
    }
}

impl<T: Element + PrimitiveTensorElementType> GroupedDynamicConvKernel<T> {
    fn run(&self, context: &ComputeContext) -> ort::Result<()> {
        let x = RawTensor::<T>::required_input(context, 0, "x")?;
        let coefficients = RawTensor::<T>::required_input(context, 1, "coefficients")?;
        let base = RawTensor::<T>::required_input(context, 2, "base")?;
        let shapes = Shapes {
            x: x.shape(),
            coefficients: coefficients.shape(),
            base: base.shape(),
        };
        let geometry = Geometry::new(self.attributes, &shapes).map_err(ort::Error::wrap)?;
        let mut output = RawTensor::<T>::output(context, 0, x.shape())?
            .ok_or_else(|| ort::Error::new("output 0 is missing"))?;
        check_apart(
            &[x.addresses(), coefficients.addresses(), base.addresses()],
            &[Written {
                name: "output",
                memory: output.addresses(),
                in_place_of: None,
            }],
        )?;
        // SAFETY: the output is apart from the inputs, by the check above; every bit pattern is a value of the element types.
        let (inputs, output) = unsafe {
            (
                Inputs {
                    x: x.slice(),
                    coefficients: coefficients.slice(),
                    base: base.slice(),
                },
                output.slice_mut(),
            )
        };
        convolution::convolve(&geometry, &inputs, output, &OrtPool(context))
            .map_err(ort::Error::wrap)
    }
}
