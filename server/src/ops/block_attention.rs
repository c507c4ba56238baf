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

use std::{
    marker::PhantomData,
    ops::{Range, RangeInclusive},
};

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
        Attributes, Geometry,
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

/// The inputs of the operator for one element type.
pub fn inputs(element: TensorElementType) -> impl IntoIterator<Item = OperatorInput> {
    let (int, float) = (TensorElementType::Int64, TensorElementType::Float32);
    let required = [[element; 7].as_slice(), &[int; 5], &[float; 2]].concat();
    let optional = [float; 2];
    required
        .into_iter()
        .map(OperatorInput::required)
        .chain(optional.map(OperatorInput::optional))
}

/// The outputs of the operator for one element type.
pub fn outputs(element: TensorElementType) -> impl IntoIterator<Item = OperatorOutput> {
    [
        OperatorOutput::required(element),
        OperatorOutput::optional(element),
        OperatorOutput::optional(element),
    ]
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
        inputs(T::into_tensor_element_type())
    }

    fn outputs(&self) -> impl IntoIterator<Item = OperatorOutput> {
        outputs(T::into_tensor_element_type())
    }

    fn create_kernel<'attr>(
        &self,
        context: &KernelContext<'attr>,
    ) -> ort::Result<Self::Kernel<'attr>> {
        Ok(BlockAttentionKernel {
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
        let tensors = Tensors::<T>::of(context, &self.attributes)?;
        // SAFETY: none of these overlaps memory that is written, by the check of the tensors.
        let inputs = unsafe {
            Inputs {
                query: tensors.query.slice(),
                key: tensors.key.slice(),
                value: tensors.value.slice(),
                context_key: tensors.context_key.slice(),
                context_value: tensors.context_value.slice(),
                block_position_ids: tensors.block_position_ids.slice(),
                context_position_ids: tensors.context_position_ids.slice(),
                context_start: tensors.context_start.slice(),
                context_rows: tensors.context_rows.slice(),
                block_rows: tensors.block_rows.slice(),
                cos: tensors.cos.slice(),
                sin: tensors.sin.slice(),
                q_norm: tensors.q_norm.map(|tensor| tensor.slice()),
                k_norm: tensors.k_norm.map(|tensor| tensor.slice()),
            }
        };
        let call = inputs.call(&tensors.geometry).map_err(ort::Error::wrap)?;
        let caches = [
            Cache {
                given: tensors.key_cache,
                updated: tensors.updated_keys,
            },
            Cache {
                given: tensors.value_cache,
                updated: tensors.updated_values,
            },
        ];
        let mut output = tensors.output;
        // SAFETY: apart from everything else, by the check of the tensors; every bit pattern is a value of the element types.
        unsafe { run(context, &call, caches, output.slice_mut()) }
    }
}

/// The tensors of one call: their shapes agree, and what is written is apart from everything else.
pub struct Tensors<'a, T> {
    /// The sizes.
    pub geometry: Geometry,
    query: RawTensor<'a, T>,
    key: RawTensor<'a, T>,
    value: RawTensor<'a, T>,
    context_key: RawTensor<'a, T>,
    context_value: RawTensor<'a, T>,
    key_cache: RawTensor<'a, T>,
    value_cache: RawTensor<'a, T>,
    block_position_ids: RawTensor<'a, i64>,
    context_position_ids: RawTensor<'a, i64>,
    context_start: RawTensor<'a, i64>,
    context_rows: RawTensor<'a, i64>,
    block_rows: RawTensor<'a, i64>,
    cos: RawTensor<'a, f32>,
    sin: RawTensor<'a, f32>,
    q_norm: Option<RawTensor<'a, f32>>,
    k_norm: Option<RawTensor<'a, f32>>,
    /// Output 0.
    pub output: RawTensor<'a, T>,
    /// Output 1.
    pub updated_keys: Option<RawTensor<'a, T>>,
    /// Output 2.
    pub updated_values: Option<RawTensor<'a, T>>,
}

impl<'a, T: PrimitiveTensorElementType> Tensors<'a, T> {
    /// Reads and checks the inputs of a node that runs, and allocates its outputs.
    pub fn of(context: &'a ComputeContext, attributes: &Attributes) -> ort::Result<Self> {
        let elements = |index, name| RawTensor::<T>::required_input(context, index, name);
        let integers = |index, name| RawTensor::<i64>::required_input(context, index, name);
        let floats = |index, name| RawTensor::<f32>::required_input(context, index, name);
        let query = elements(0, "query")?;
        let key = elements(1, "key")?;
        let value = elements(2, "value")?;
        let context_key = elements(3, "context_key")?;
        let context_value = elements(4, "context_value")?;
        let key_cache = elements(5, "key_cache")?;
        let value_cache = elements(6, "value_cache")?;
        let block_position_ids = integers(7, "block_position_ids")?;
        let context_position_ids = integers(8, "context_position_ids")?;
        let context_start = integers(9, "context_start")?;
        let context_rows = integers(10, "context_rows")?;
        let block_rows = integers(11, "block_rows")?;
        let cos = floats(12, "cos")?;
        let sin = floats(13, "sin")?;
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
        let tensors = Self {
            geometry: shapes.geometry(attributes).map_err(ort::Error::wrap)?,
            output: RawTensor::<T>::output(context, 0, query.shape())?
                .ok_or_else(|| ort::Error::new("output 0 is missing"))?,
            updated_keys: RawTensor::<T>::output(context, 1, key_cache.shape())?,
            updated_values: RawTensor::<T>::output(context, 2, value_cache.shape())?,
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
        };
        let updated = [(5, &tensors.updated_keys), (6, &tensors.updated_values)];
        check_apart(&tensors.inputs(), &written(&tensors.output, updated))?;
        Ok(tensors)
    }

    /// The memory of the inputs, in their order.
    pub fn inputs(&self) -> [Range<usize>; 16] {
        [
            self.query.addresses(),
            self.key.addresses(),
            self.value.addresses(),
            self.context_key.addresses(),
            self.context_value.addresses(),
            self.key_cache.addresses(),
            self.value_cache.addresses(),
            self.block_position_ids.addresses(),
            self.context_position_ids.addresses(),
            self.context_start.addresses(),
            self.context_rows.addresses(),
            self.block_rows.addresses(),
            self.cos.addresses(),
            self.sin.addresses(),
            RawTensor::addresses_of(&self.q_norm),
            RawTensor::addresses_of(&self.k_norm),
        ]
    }

    /// Context rows of each sequence, padding included.
    pub fn most_context_rows(&self) -> usize {
        // Its shape has been checked.
        self.context_key.shape()[1] as usize
    }
}
