//! `outrider.BlockAttention`: the attention of a draft head, on the CPU.
//! Context rows and a block behind them are normed, rotated and written to the cache; the block's queries see the cache and the block.
//!
//! | input | element | shape | |
//! | --- | --- | --- | --- |
//! | 0 `query` | T | `[B, W, NH·D]` | the block; T is float, float16 or bfloat16 |
//! | 1 `key`, 2 `value` | T | `[B, W, NKV·D]` | of the block |
//! | 3 `context_key`, 4 `context_value` | T | `[B, N, NKV·D]` | of newly verified tokens |
//! | 5 `key_cache`, 6 `value_cache` | T | `[B, MAX, NKV·D]` | |
//! | 7 `block_position_ids` | int64 | `[B, W]` | rows of the rotary tables |
//! | 8 `context_position_ids` | int64 | `[B, N]` | rows of the rotary tables |
//! | 9 `context_start` | int64 | `[B]` | cache rows that are valid before; the first context row goes behind them |
//! | 10 `context_rows` | int64 | `[B]` | context rows that are not padding |
//! | 11 `block_rows` | int64 | `[B]` | block rows that are not padding |
//! | 12 `cos`, 13 `sin` | float | `[P, R/2]` | by position; elements of a head from R on are not rotated |
//! | 14 `q_norm`, 15 `k_norm` | float | `[D]` | optional weights of an RMS norm of each head, before the rotation |
//!
//! Outputs: 0 `[B, W, NH·D]`, 1 the updated key cache, 2 the updated value cache (both optional).
//! Attributes are those of `CachedAttention`: [`Attributes`].
//! Block row `i` stands at cache row `context_start + context_rows + i`; what it sees there: [`Call::attend`](super::attention::Call::attend).
//! The rows of the block are scratch: the next call of the sequence writes over them.
//!
//! Padding is neither read nor written, and block rows that are padding give zeros.
//! What is said of caches in [`super::cached_attention`] holds here too.

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
        AttributeReader,
        attention::{Cache, read_attributes, run, written},
        check_apart, contain_panics, infer_like,
    },
    attention::{
        Attributes,
        block::{Inputs, Shapes},
    },
    element::Element,
    tensor::RawTensor,
};

/// Name of the operator in a graph.
pub const NAME: &str = "BlockAttention";

/// The operator for one element type.
pub struct BlockAttention<T>(PhantomData<fn() -> T>);

impl<T> BlockAttention<T> {
    /// The operator.
    #[expect(clippy::new_without_default, reason = "there is nothing to default")]
    pub const fn new() -> Self {
        Self(PhantomData)
    }
}

impl<T: Element + PrimitiveTensorElementType> Operator for BlockAttention<T> {
    type Kernel<'attr> = BlockAttentionKernel<T>;

    // As for `CachedAttention`.
    const INPLACES: &[(u32, u32)] = &[(5, 1), (6, 2)];

    fn name(&self) -> &str {
        NAME
    }

    fn versions(&self) -> RangeInclusive<u32> {
        DOMAIN_VERSION..=DOMAIN_VERSION
    }

    fn inputs(&self) -> impl IntoIterator<Item = OperatorInput> {
        let (element, int, float) = (
            T::into_tensor_element_type(),
            TensorElementType::Int64,
            TensorElementType::Float32,
        );
        let required = [[element; 7].as_slice(), &[int; 5], &[float; 2]].concat();
        let optional = [float; 2];
        required
            .into_iter()
            .map(OperatorInput::required)
            .chain(optional.map(OperatorInput::optional))
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
        let reader = AttributeReader {
            operator: NAME,
            context,
        };
        Ok(BlockAttentionKernel {
            attributes: read_attributes(&reader)?,
            element: PhantomData,
        })
    }

    fn infer_shape(&self, context: &mut ShapeInferenceContext) -> ort::Result<()> {
        infer_like(context, &[(0, 0), (1, 5), (2, 6)]);
        Ok(())
    }
}

/// One node of a session.
pub struct BlockAttentionKernel<T> {
    attributes: Attributes,
    element: PhantomData<fn() -> T>,
}

impl<T: Element + PrimitiveTensorElementType> Kernel for BlockAttentionKernel<T> {
    fn compute(&mut self, context: &ComputeContext) -> ort::Result<()> {
        contain_panics(NAME, || self.run(context))
    }
}

impl<T: Element + PrimitiveTensorElementType> BlockAttentionKernel<T> {
    fn run(&self, context: &ComputeContext) -> ort::Result<()> {
        let query = RawTensor::<T>::required_input(context, 0, "query")?;
        let key = RawTensor::<T>::required_input(context, 1, "key")?;
        let value = RawTensor::<T>::required_input(context, 2, "value")?;
        let context_key = RawTensor::<T>::required_input(context, 3, "context_key")?;
        let context_value = RawTensor::<T>::required_input(context, 4, "context_value")?;
        let key_cache = RawTensor::<T>::required_input(context, 5, "key_cache")?;
        let value_cache = RawTensor::<T>::required_input(context, 6, "value_cache")?;
        let integers = |index, name| RawTensor::<i64>::required_input(context, index, name);
        let block_position_ids = integers(7, "block_position_ids")?;
        let context_position_ids = integers(8, "context_position_ids")?;
        let context_start = integers(9, "context_start")?;
        let context_rows = integers(10, "context_rows")?;
        let block_rows = integers(11, "block_rows")?;
        let cos = RawTensor::<f32>::required_input(context, 12, "cos")?;
        let sin = RawTensor::<f32>::required_input(context, 13, "sin")?;
        let q_norm = RawTensor::<f32>::input(context, 14)?;
        let k_norm = RawTensor::<f32>::input(context, 15)?;

        let shapes = Shapes {
            query: query.shape(),
            key: key.shape(),
            value: value.shape(),
            context_key: context_key.shape(),
            context_value: context_value.shape(),
            key_cache: key_cache.shape(),
            value_cache: value_cache.shape(),
            block_position_ids: block_position_ids.shape(),
            context_position_ids: context_position_ids.shape(),
            context_start: context_start.shape(),
            context_rows: context_rows.shape(),
            block_rows: block_rows.shape(),
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
            key_cache.addresses(),
            value_cache.addresses(),
            query.addresses(),
            key.addresses(),
            value.addresses(),
            context_key.addresses(),
            context_value.addresses(),
            block_position_ids.addresses(),
            context_position_ids.addresses(),
            context_start.addresses(),
            context_rows.addresses(),
            block_rows.addresses(),
            cos.addresses(),
            sin.addresses(),
            q_norm.map_or(0..0, |tensor| tensor.addresses()),
            k_norm.map_or(0..0, |tensor| tensor.addresses()),
        ];
        check_apart(&read, &written(&output, [&updated_keys, &updated_values]))?;

        // SAFETY: none of these overlaps memory that is written, by the check above.
        let inputs = unsafe {
            Inputs {
                query: query.slice(),
                key: key.slice(),
                value: value.slice(),
                context_key: context_key.slice(),
                context_value: context_value.slice(),
                block_position_ids: block_position_ids.slice(),
                context_position_ids: context_position_ids.slice(),
                context_start: context_start.slice(),
                context_rows: context_rows.slice(),
                block_rows: block_rows.slice(),
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
