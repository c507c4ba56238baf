//! `outrider.CachedAttention`: query/key norm, rotary embedding, cache write and attention in one ONNX Runtime node, on the CPU.
//!
//! | input | element | shape | |
//! | --- | --- | --- | --- |
//! | 0 `query` | T | `[B, S, NH·D]` | new tokens; T is float, float16 or bfloat16 |
//! | 1 `key`, 2 `value` | T | `[B, S, NKV·D]` | |
//! | 3 `key_cache`, 4 `value_cache` | T | `[B, MAX, NKV·D]` | |
//! | 5 `position_ids` | int64 | `[B, S]` | rows of the rotary tables |
//! | 6 `write_indices` | int64 | `[B]` | cache row of the first new token |
//! | 7 `nonpad_kv_seqlen` | int64 | `[B]` | valid cache rows, the new ones included |
//! | 8 `cos`, 9 `sin` | float | `[P, R/2]` | by position; elements of a head from R on are not rotated |
//! | 10 `q_norm`, 11 `k_norm` | float | `[D]` | optional weights of an RMS norm of each head, before the rotation |
//!
//! Outputs: 0 `[B, S, NH·D]`, 1 the updated key cache, 2 the updated value cache (both optional).
//! Attributes: [`Attributes`]. What a query sees: [`Call::attend`](super::attention::Call::attend).
//!
//! **Caches.** Where a caller binds the same memory as a cache and its updated form, new rows are written in place and nothing is copied.
//! Where not, the valid rows are copied first ([`Call::copy_kept_rows`](super::attention::Call::copy_kept_rows)); rows behind them are unspecified in the output.
//! Memory that overlaps in any other way is refused.

#[cfg(test)]
mod tests;

use std::{marker::PhantomData, ops::RangeInclusive};

use ort::{
    operator::{
        ComputeContext, Kernel, KernelContext, Operator, OperatorInput, OperatorOutput,
        ShapeInferenceContext,
    },
    value::{PrimitiveTensorElementType, TensorElementType},
};

use super::{
    DOMAIN_VERSION,
    adapter::{
        attention::{Cache, read_attributes, run, written},
        check_apart, contain_panics, infer_like,
    },
    attention::{
        Attributes,
        cached::{Inputs, Shapes},
    },
    element::Element,
    tensor::RawTensor,
};

/// Name of the operator in a graph.
pub const NAME: &str = "CachedAttention";

/// The operator for one element type.
pub struct CachedAttention<T>(PhantomData<fn() -> T>);

impl<T> CachedAttention<T> {
    /// The operator.
    #[expect(clippy::new_without_default, reason = "there is nothing to default")]
    pub const fn new() -> Self {
        Self(PhantomData)
    }
}

impl<T: Element + PrimitiveTensorElementType> Operator for CachedAttention<T> {
    type Kernel<'attr> = CachedAttentionKernel<T>;

    // Where a cache is an inner value of the graph that nothing else reads, ONNX Runtime may hand out its memory for the updated form.
    const INPLACES: &[(u32, u32)] = &[(3, 1), (4, 2)];

    fn name(&self) -> &str {
        NAME
    }

    fn versions(&self) -> RangeInclusive<u32> {
        DOMAIN_VERSION..=DOMAIN_VERSION
    }

    fn inputs(&self) -> impl IntoIterator<Item = OperatorInput> {
        use OperatorInput as In;
        let (element, int, float) = (
            T::into_tensor_element_type(),
            TensorElementType::Int64,
            TensorElementType::Float32,
        );
        [
            In::required(element),
            In::required(element),
            In::required(element),
            In::required(element),
            In::required(element),
            In::required(int),
            In::required(int),
            In::required(int),
            In::required(float),
            In::required(float),
            In::optional(float),
            In::optional(float),
        ]
    }

    fn outputs(&self) -> impl IntoIterator<Item = OperatorOutput> {
        let element = T::into_tensor_element_type();
        [
            OperatorOutput::required(element),
            OperatorOutput::optional(element),
            OperatorOutput::optional(element),
        ]
    }

    fn create_kernel<'attr>(
        &self,
        context: &KernelContext<'attr>,
    ) -> ort::Result<Self::Kernel<'attr>> {
        Ok(CachedAttentionKernel {
            attributes: read_attributes(NAME, context)?,
            element: PhantomData,
        })
    }

    fn infer_shape(&self, context: &mut ShapeInferenceContext) -> ort::Result<()> {
        infer_like(context, &[(0, 0), (1, 3), (2, 4)]);
        Ok(())
    }
}

/// One node of a session.
pub struct CachedAttentionKernel<T> {
    attributes: Attributes,
    element: PhantomData<fn() -> T>,
}

impl<T: Element + PrimitiveTensorElementType> Kernel for CachedAttentionKernel<T> {
    fn compute(&mut self, context: &ComputeContext) -> ort::Result<()> {
        contain_panics(NAME, || self.run(context))
    }
}

impl<T: Element + PrimitiveTensorElementType> CachedAttentionKernel<T> {
    fn run(&self, context: &ComputeContext) -> ort::Result<()> {
        let query = RawTensor::<T>::required_input(context, 0, "query")?;
        let key = RawTensor::<T>::required_input(context, 1, "key")?;
        let value = RawTensor::<T>::required_input(context, 2, "value")?;
        let key_cache = RawTensor::<T>::required_input(context, 3, "key_cache")?;
        let value_cache = RawTensor::<T>::required_input(context, 4, "value_cache")?;
        let position_ids = RawTensor::<i64>::required_input(context, 5, "position_ids")?;
        let write_indices = RawTensor::<i64>::required_input(context, 6, "write_indices")?;
        let nonpad_kv_seqlen = RawTensor::<i64>::required_input(context, 7, "nonpad_kv_seqlen")?;
        let cos = RawTensor::<f32>::required_input(context, 8, "cos")?;
        let sin = RawTensor::<f32>::required_input(context, 9, "sin")?;
        let q_norm = RawTensor::<f32>::input(context, 10)?;
        let k_norm = RawTensor::<f32>::input(context, 11)?;

        let shapes = Shapes {
            query: query.shape(),
            key: key.shape(),
            value: value.shape(),
            key_cache: key_cache.shape(),
            value_cache: value_cache.shape(),
            position_ids: position_ids.shape(),
            write_indices: write_indices.shape(),
            nonpad_kv_seqlen: nonpad_kv_seqlen.shape(),
            cos: cos.shape(),
            sin: sin.shape(),
            q_norm: q_norm.map(|tensor| tensor.shape()),
            k_norm: k_norm.map(|tensor| tensor.shape()),
        };
        let geometry = shapes
            .geometry(&self.attributes)
            .map_err(ort::Error::wrap)?;

        let mut output = RawTensor::<T>::output(context, 0, query.shape())?
            .ok_or_else(|| ort::Error::new("output 0 is missing"))?;
        let updated_keys = RawTensor::<T>::output(context, 1, key_cache.shape())?;
        let updated_values = RawTensor::<T>::output(context, 2, value_cache.shape())?;

        let read = [
            query.addresses(),
            key.addresses(),
            value.addresses(),
            key_cache.addresses(),
            value_cache.addresses(),
            position_ids.addresses(),
            write_indices.addresses(),
            nonpad_kv_seqlen.addresses(),
            cos.addresses(),
            sin.addresses(),
            RawTensor::addresses_of(&q_norm),
            RawTensor::addresses_of(&k_norm),
        ];
        let updated = [(3, &updated_keys), (4, &updated_values)];
        check_apart(&read, &written(&output, updated))?;

        // SAFETY: none of these overlaps memory that is written, by the check above.
        let inputs = unsafe {
            Inputs {
                query: query.slice(),
                key: key.slice(),
                value: value.slice(),
                position_ids: position_ids.slice(),
                write_indices: write_indices.slice(),
                nonpad_kv_seqlen: nonpad_kv_seqlen.slice(),
                cos: cos.slice(),
                sin: sin.slice(),
                q_norm: q_norm.map(|tensor| tensor.slice()),
                k_norm: k_norm.map(|tensor| tensor.slice()),
            }
        };
        let call = inputs.call(&geometry).map_err(ort::Error::wrap)?;
        let caches = [
            Cache {
                given: key_cache,
                updated: updated_keys,
            },
            Cache {
                given: value_cache,
                updated: updated_values,
            },
        ];
        // SAFETY: apart from everything else, by the check above; every bit pattern is a value of the element types.
        unsafe { run(context, &call, caches, output.slice_mut()) }
    }
}
