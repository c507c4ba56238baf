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
//! Attributes: [`Attributes`]. What a query sees: [`attention::attend`].
//!
//! **Caches.** Where a caller binds the same memory as a cache and its updated form, new rows are written in place and nothing is copied.
//! Where not, the valid rows are copied first ([`attention::copy_kept_rows`]); rows behind them are unspecified in the output.
//! Memory that overlaps in any other way is refused.

#[cfg(test)]
mod tests;

use std::{
    any::Any,
    cell::Cell,
    marker::PhantomData,
    ops::{Range, RangeInclusive},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::{AtomicBool, Ordering},
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
    attention::{
        self, AttentionError, Attributes, Element, Geometry, Inputs, Pool, RotaryLayout, Scratch,
        TensorShapes,
    },
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
        let attributes = read_attributes(context)?;
        attributes.check().map_err(ort::Error::wrap)?;
        Ok(CachedAttentionKernel {
            attributes,
            element: PhantomData,
        })
    }

    fn infer_shape(&self, context: &mut ShapeInferenceContext) -> ort::Result<()> {
        // `ort` panics where ONNX Runtime has no type for an input, and a panic must not reach the C caller.
        let inputs = catch_unwind(AssertUnwindSafe(|| context.inputs())).unwrap_or_default();
        for (output, input) in [(0, 0), (1, 3), (2, 4)] {
            if let Some(input) = inputs.get(input) {
                // Fails for outputs the node does not have, which need no shape.
                let _ = context.set_output(output, input);
            }
        }
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
        catch_unwind(AssertUnwindSafe(|| self.run(context))).unwrap_or_else(|panic| {
            Err(ort::Error::new(format!(
                "{NAME} panicked: {}",
                message_of(&*panic)
            )))
        })
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

        let shapes = TensorShapes {
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
        let geometry = Geometry::new(&self.attributes, &shapes).map_err(ort::Error::wrap)?;

        let mut output = RawTensor::<T>::output(context, 0, query.shape())?
            .ok_or_else(|| ort::Error::new("output 0 is missing"))?;
        let updated_keys = RawTensor::<T>::output(context, 1, key_cache.shape())?;
        let updated_values = RawTensor::<T>::output(context, 2, value_cache.shape())?;

        let only_read = [
            query.addresses(),
            key.addresses(),
            value.addresses(),
            position_ids.addresses(),
            write_indices.addresses(),
            nonpad_kv_seqlen.addresses(),
            cos.addresses(),
            sin.addresses(),
            q_norm.map_or(0..0, |tensor| tensor.addresses()),
            k_norm.map_or(0..0, |tensor| tensor.addresses()),
        ];
        let caches = [
            ("updated_key_cache", &key_cache, &updated_keys),
            ("updated_value_cache", &value_cache, &updated_values),
        ];
        let mut written = vec![("output", output.addresses())];
        for (name, _, updated) in caches {
            written.extend(updated.map(|updated| (name, updated.addresses())));
        }
        for (index, (name, memory)) in written.iter().enumerate() {
            let in_place = |cache: &RawTensor<'_, T>| cache.addresses() == *memory;
            let overlaps_cache = caches.iter().any(|(updated_name, cache, _)| {
                overlap(&cache.addresses(), memory) && !(updated_name == name && in_place(cache))
            });
            let overlaps_input = only_read.iter().any(|input| overlap(input, memory));
            let overlaps_output = written[..index]
                .iter()
                .any(|(_, other)| overlap(other, memory));
            if overlaps_cache || overlaps_input || overlaps_output {
                return Err(ort::Error::new(format!(
                    "{name} shares memory with another tensor; only a cache and its updated form may be the same memory"
                )));
            }
        }

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
        let (mut own_keys, mut own_values) = (Vec::new(), Vec::new());
        // SAFETY: a cache and its updated form are the same memory or apart, and both are apart from everything else, by the check above.
        let (keys, values) = unsafe {
            (
                cache_to_update(&geometry, &inputs, key_cache, updated_keys, &mut own_keys)?,
                cache_to_update(
                    &geometry,
                    &inputs,
                    value_cache,
                    updated_values,
                    &mut own_values,
                )?,
            )
        };
        // SAFETY: apart from everything else, by the check above; every bit pattern is a value of the element types.
        let output = unsafe { output.slice_mut() };

        let mut scratch = SCRATCH.take().unwrap_or_default();
        let result = attention::attend(
            &geometry,
            &inputs,
            keys,
            values,
            output,
            &mut scratch,
            &OrtPool(context),
        );
        SCRATCH.set(Some(scratch));
        result.map_err(ort::Error::wrap)
    }
}

thread_local! {
    /// One for all nodes of all sessions that run on this thread: they run one after the other.
    static SCRATCH: Cell<Option<Box<Scratch>>> = const { Cell::new(None) };
}

/// The cache that new rows are written to: in place, or the output with the kept rows copied to it, or `own` where nothing wants the output.
///
/// # Safety
/// `cache` and `updated` are the same memory or do not overlap, and nothing else uses either.
unsafe fn cache_to_update<'c, T: Element + PrimitiveTensorElementType>(
    geometry: &Geometry,
    inputs: &Inputs<'_, T>,
    cache: RawTensor<'c, T>,
    updated: Option<RawTensor<'c, T>>,
    own: &'c mut Vec<T>,
) -> ort::Result<&'c mut [T]> {
    let to = match updated {
        Some(mut updated) => {
            // SAFETY: every bit pattern is a value of the element types; the caller vouches for the rest.
            let elements = unsafe { updated.slice_mut() };
            if updated.addresses() == cache.addresses() {
                return Ok(elements);
            }
            elements
        }
        None => {
            own.resize(
                geometry.batch * geometry.capacity * geometry.kv_width(),
                T::default(),
            );
            &mut own[..]
        }
    };
    // SAFETY: `to` is other memory, or this function would have returned.
    attention::copy_kept_rows(geometry, inputs, unsafe { cache.slice() }, to)
        .map_err(ort::Error::wrap)?;
    Ok(to)
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start.max(b.start) < a.end.min(b.end)
}

/// The threads of the session that runs the node.
struct OrtPool<'a>(&'a ComputeContext);

impl Pool for OrtPool<'_> {
    fn for_each(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) -> Result<(), AttentionError> {
        let panicked = AtomicBool::new(false);
        let run = |index| {
            // A panic in a thread of ONNX Runtime would end the process.
            if catch_unwind(AssertUnwindSafe(|| task(index))).is_err() {
                panicked.store(true, Ordering::Relaxed);
            }
        };
        self.0
            .par_for(tasks, 0, run)
            .map_err(|error| AttentionError::Pool(error.to_string()))?;
        if panicked.into_inner() {
            return Err(AttentionError::Pool("a task panicked".to_owned()));
        }
        Ok(())
    }
}

fn read_attributes(context: &KernelContext<'_>) -> ort::Result<Attributes> {
    Ok(Attributes {
        num_heads: count(context, "num_heads", None)?,
        kv_num_heads: count(context, "kv_num_heads", None)?,
        is_causal: flag(context, "is_causal", true)?,
        window: count(context, "window", Some(0))?,
        rotary_layout: if flag(context, "rotary_interleaved", false)? {
            RotaryLayout::Interleaved
        } else {
            RotaryLayout::HalfSplit
        },
        scale: float(context, "scale", 0.0)?,
        norm_epsilon: float(context, "norm_epsilon", 1e-6)?,
        softcap: float(context, "softcap", 0.0)?,
    })
}

fn integer(context: &KernelContext<'_>, name: &str) -> ort::Result<Option<i64>> {
    let value = context.get::<i64>(name);
    // ONNX Runtime does not tell an absent attribute from one of another type.
    if value.is_none()
        && (context.get::<f32>(name).is_some() || context.get::<String>(name).is_some())
    {
        return Err(ort::Error::new(format!(
            "attribute {name} of {NAME} is not an integer"
        )));
    }
    Ok(value)
}

fn count(
    context: &KernelContext<'_>,
    name: &'static str,
    default: Option<usize>,
) -> ort::Result<usize> {
    match (integer(context, name)?, default) {
        (Some(value), _) => usize::try_from(value).map_err(|_| {
            ort::Error::wrap(AttentionError::Attribute {
                name,
                value: value.to_string(),
                allowed: "0 or above",
            })
        }),
        (None, Some(default)) => Ok(default),
        (None, None) => Err(ort::Error::new(format!(
            "attribute {name} of {NAME} is missing"
        ))),
    }
}

fn flag(context: &KernelContext<'_>, name: &'static str, default: bool) -> ort::Result<bool> {
    match integer(context, name)? {
        None => Ok(default),
        Some(0) => Ok(false),
        Some(1) => Ok(true),
        Some(value) => Err(ort::Error::wrap(AttentionError::Attribute {
            name,
            value: value.to_string(),
            allowed: "0 or 1",
        })),
    }
}

fn float(context: &KernelContext<'_>, name: &str, default: f32) -> ort::Result<f32> {
    let value = context.get::<f32>(name);
    if value.is_none()
        && (context.get::<i64>(name).is_some() || context.get::<String>(name).is_some())
    {
        return Err(ort::Error::new(format!(
            "attribute {name} of {NAME} is not a float"
        )));
    }
    Ok(value.unwrap_or(default))
}

/// The text of a panic, without zero bytes: `ort` could not pass those on.
fn message_of(panic: &(dyn Any + Send)) -> String {
    let message = panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned());
    message
        .unwrap_or_else(|| "no message".to_owned())
        .replace('\0', " ")
}
