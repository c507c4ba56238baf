//! `outrider.PathSelector`: from the logits of a draft block to the tokens that are proposed, on the CPU.
//!
//! | input | element | shape | |
//! | --- | --- | --- | --- |
//! | 0 `logits` | float | `[B, S, V']` | of every slot |
//! | 1 `block_ids` | int64 | `[B, S + 1]` | the anchor and mask ids |
//! | 2 `block_position_ids` | int64 | `[B, S + 1]` | absolute positions, which key the noise |
//! | 3 `block_rows` | int64 | `[B]` | block rows that are not padding; 0 or 1 proposes nothing |
//! | 4 `temperature` | float | `[B]` | 0 takes the largest score |
//! | 5 `seed` | int64 | `[B]` | the bits of the request's noise seed |
//! | 6 `candidate_topk` | int64 | `[1]` | candidates of a slot, 1 to `top_k` |
//! | 7 `selector_hidden` | T | `[B, S, R]` | optional, together with the next two; T is float, float16 or bfloat16 |
//! | 8 `predecessor_codebook` | T | `[V, R]` | |
//! | 9 `successor_codebook` | T | `[V, R]` | |
//! | 10 `column_token_ids` | int64 | `[V']` | optional: token of each column, rising |
//!
//! Outputs: 0 `draft_ids` int64 `[B, S]`, 1 `candidate_ids` int64 `[B, S, top_k]`, 2 `path_scores` float `[B, S, top_k]` (the last two optional).
//! What they hold: [`selector::Outputs`]. Attribute: `top_k`, the most candidates.

#[cfg(test)]
mod tests;

use std::{
    marker::PhantomData,
    ops::{Range, RangeInclusive},
};

use ort::{
    operator::{ComputeContext, Kernel, KernelContext, Operator, OperatorInput, OperatorOutput},
    value::{PrimitiveTensorElementType, TensorElementType},
};

use super::{
    DOMAIN_VERSION,
    adapter::{AttributeReader, OrtPool, Written, check_apart, contain_panics},
    element::Element,
    selector::{self, Geometry, Inputs, Outputs, Shapes, walk::Codebooks},
    tensor::RawTensor,
};

/// Name of the operator in a graph.
pub const NAME: &str = "PathSelector";

/// The operator for one element type of the codebooks.
pub struct PathSelector<T>(PhantomData<fn() -> T>);

impl<T> PathSelector<T> {
    /// The operator.
    #[expect(clippy::new_without_default, reason = "there is nothing to default")]
    pub const fn new() -> Self {
        Self(PhantomData)
    }
}

/// Reads and checks the attribute of a node.
pub fn read_top_k(context: &KernelContext<'_>) -> ort::Result<usize> {
    let reader = AttributeReader {
        operator: NAME,
        context,
    };
    let top_k = reader.count("top_k", None)?;
    selector::check_top_k(top_k).map_err(ort::Error::wrap)?;
    Ok(top_k)
}

/// The inputs of the operator with codebooks of this type.
pub fn inputs(element: TensorElementType) -> impl IntoIterator<Item = OperatorInput> {
    use TensorElementType::{Float32, Int64};
    let required = [Float32, Int64, Int64, Int64, Float32, Int64, Int64];
    let optional = [element, element, element, Int64];
    required
        .map(OperatorInput::required)
        .into_iter()
        .chain(optional.map(OperatorInput::optional))
}

/// The outputs of the operator.
pub fn outputs() -> impl IntoIterator<Item = OperatorOutput> {
    [
        OperatorOutput::required(TensorElementType::Int64),
        OperatorOutput::optional(TensorElementType::Int64),
        OperatorOutput::optional(TensorElementType::Float32),
    ]
}

impl<T: Element + PrimitiveTensorElementType> Operator for PathSelector<T> {
    type Kernel<'attr> = PathSelectorKernel<T>;

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
        outputs()
    }

    fn create_kernel<'attr>(
        &self,
        context: &KernelContext<'attr>,
    ) -> ort::Result<Self::Kernel<'attr>> {
        Ok(PathSelectorKernel {
            top_k: read_top_k(context)?,
            element: PhantomData,
        })
    }
}

/// One node of a session.
pub struct PathSelectorKernel<T> {
    top_k: usize,
    element: PhantomData<fn() -> T>,
}

impl<T: Element + PrimitiveTensorElementType> Kernel for PathSelectorKernel<T> {
    fn compute(&mut self, context: &ComputeContext) -> ort::Result<()> {
        contain_panics(NAME, || self.run(context))
    }
}

impl<T: Element + PrimitiveTensorElementType> PathSelectorKernel<T> {
    fn run(&self, context: &ComputeContext) -> ort::Result<()> {
        let mut tensors = Tensors::<T>::of(context, self.top_k)?;
        // SAFETY: no output overlaps an input or another output, by the check of the tensors; every bit pattern is a value of the element types.
        let (inputs, outputs) = unsafe {
            let codebooks = match (
                tensors.selector_hidden,
                tensors.predecessor_codebook,
                tensors.successor_codebook,
            ) {
                (Some(hidden), Some(predecessor), Some(successor)) => Some(Codebooks {
                    hidden: hidden.slice(),
                    predecessor: predecessor.slice(),
                    successor: successor.slice(),
                }),
                _ => None,
            };
            let inputs = Inputs {
                logits: tensors.logits.slice(),
                block_ids: tensors.block_ids.slice(),
                block_position_ids: tensors.block_position_ids.slice(),
                block_rows: tensors.block_rows.slice(),
                temperature: tensors.temperature.slice(),
                seed: tensors.seed.slice(),
                candidate_topk: tensors.candidate_topk.slice(),
                codebooks,
                column_token_ids: tensors.column_token_ids.map(|input| input.slice()),
            };
            let outputs = Outputs {
                draft_ids: tensors.draft_ids.slice_mut(),
                candidate_ids: tensors.candidate_ids.map(|mut output| output.slice_mut()),
                path_scores: tensors.path_scores.map(|mut output| output.slice_mut()),
            };
            (inputs, outputs)
        };
        selector::select(&tensors.geometry, &inputs, outputs, &OrtPool(context))
            .map_err(ort::Error::wrap)
    }
}

/// The tensors of one call: their shapes agree, and what is written is apart from everything else.
pub struct Tensors<'a, T> {
    /// The sizes.
    pub geometry: Geometry,
    logits: RawTensor<'a, f32>,
    block_ids: RawTensor<'a, i64>,
    block_position_ids: RawTensor<'a, i64>,
    block_rows: RawTensor<'a, i64>,
    temperature: RawTensor<'a, f32>,
    seed: RawTensor<'a, i64>,
    candidate_topk: RawTensor<'a, i64>,
    selector_hidden: Option<RawTensor<'a, T>>,
    predecessor_codebook: Option<RawTensor<'a, T>>,
    successor_codebook: Option<RawTensor<'a, T>>,
    column_token_ids: Option<RawTensor<'a, i64>>,
    draft_ids: RawTensor<'a, i64>,
    candidate_ids: Option<RawTensor<'a, i64>>,
    path_scores: Option<RawTensor<'a, f32>>,
}

impl<'a, T: PrimitiveTensorElementType> Tensors<'a, T> {
    /// Reads and checks the inputs of a node that runs, and allocates its outputs.
    pub fn of(context: &'a ComputeContext, top_k: usize) -> ort::Result<Self> {
        let integers = |index, name| RawTensor::<i64>::required_input(context, index, name);
        let floats = |index, name| RawTensor::<f32>::required_input(context, index, name);
        let logits = floats(0, "logits")?;
        let block_ids = integers(1, "block_ids")?;
        let block_position_ids = integers(2, "block_position_ids")?;
        let block_rows = integers(3, "block_rows")?;
        let temperature = floats(4, "temperature")?;
        let seed = integers(5, "seed")?;
        let candidate_topk = integers(6, "candidate_topk")?;
        let selector_hidden = RawTensor::<T>::input(context, 7)?;
        let predecessor_codebook = RawTensor::<T>::input(context, 8)?;
        let successor_codebook = RawTensor::<T>::input(context, 9)?;
        let column_token_ids = RawTensor::<i64>::input(context, 10)?;
        let shapes = Shapes {
            logits: logits.shape(),
            block_ids: block_ids.shape(),
            block_position_ids: block_position_ids.shape(),
            block_rows: block_rows.shape(),
            temperature: temperature.shape(),
            seed: seed.shape(),
            candidate_topk: candidate_topk.shape(),
            codebooks: [&selector_hidden, &predecessor_codebook, &successor_codebook]
                .map(|input| input.as_ref().map(RawTensor::shape)),
            column_token_ids: column_token_ids.map(|input| input.shape()),
        };
        let geometry = Geometry::new(top_k, &shapes).map_err(ort::Error::wrap)?;
        let [batch, slots, top_k] =
            [geometry.batch, geometry.slots, geometry.top_k].map(|size| size as i64);
        let tensors = Self {
            geometry,
            draft_ids: RawTensor::output(context, 0, &[batch, slots])?
                .ok_or_else(|| ort::Error::new("output 0 is missing"))?,
            candidate_ids: RawTensor::output(context, 1, &[batch, slots, top_k])?,
            path_scores: RawTensor::output(context, 2, &[batch, slots, top_k])?,
            logits,
            block_ids,
            block_position_ids,
            block_rows,
            temperature,
            seed,
            candidate_topk,
            selector_hidden,
            predecessor_codebook,
            successor_codebook,
            column_token_ids,
        };
        let [draft_ids, candidate_ids, path_scores] = tensors.outputs();
        let written = [
            ("draft_ids", draft_ids),
            ("candidate_ids", candidate_ids),
            ("path_scores", path_scores),
        ]
        .map(|(name, memory)| Written {
            name,
            memory,
            in_place_of: None,
        });
        check_apart(&tensors.inputs(), &written)?;
        Ok(tensors)
    }

    /// The memory of the inputs, in their order.
    pub fn inputs(&self) -> [Range<usize>; 11] {
        [
            self.logits.addresses(),
            self.block_ids.addresses(),
            self.block_position_ids.addresses(),
            self.block_rows.addresses(),
            self.temperature.addresses(),
            self.seed.addresses(),
            self.candidate_topk.addresses(),
            RawTensor::addresses_of(&self.selector_hidden),
            RawTensor::addresses_of(&self.predecessor_codebook),
            RawTensor::addresses_of(&self.successor_codebook),
            RawTensor::addresses_of(&self.column_token_ids),
        ]
    }

    /// The memory of the outputs, in their order.
    pub fn outputs(&self) -> [Range<usize>; 3] {
        [
            self.draft_ids.addresses(),
            RawTensor::addresses_of(&self.candidate_ids),
            RawTensor::addresses_of(&self.path_scores),
        ]
    }
}
