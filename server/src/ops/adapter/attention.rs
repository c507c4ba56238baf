//! What the two attention operators share beyond their computation: attributes, and caches that are updated in place or copied.

use std::cell::Cell;

use ort::{
    operator::{ComputeContext, KernelContext},
    value::PrimitiveTensorElementType,
};

use super::{AttributeReader, OrtPool, Written};
use crate::ops::{
    attention::{Attributes, Call, RotaryLayout, Scratch},
    element::Element,
    tensor::RawTensor,
};

/// Reads and checks the attributes of a node.
pub fn read_attributes(
    operator: &'static str,
    context: &KernelContext<'_>,
) -> ort::Result<Attributes> {
    let reader = AttributeReader { operator, context };
    let attributes = Attributes {
        num_heads: reader.count("num_heads", None)?,
        kv_num_heads: reader.count("kv_num_heads", None)?,
        is_causal: reader.flag("is_causal", true)?,
        window: reader.count("window", Some(0))?,
        rotary_layout: if reader.flag("rotary_interleaved", false)? {
            RotaryLayout::Interleaved
        } else {
            RotaryLayout::HalfSplit
        },
        scale: reader.float("scale", 0.0)?,
        norm_epsilon: reader.float("norm_epsilon", 1e-6)?,
        softcap: reader.float("softcap", 0.0)?,
    };
    attributes.check().map_err(ort::Error::wrap)?;
    Ok(attributes)
}

/// A cache as it is given and, where a node wants that, as it is updated.
pub struct Cache<'a, T> {
    /// The input.
    pub given: RawTensor<'a, T>,
    /// The output.
    pub updated: Option<RawTensor<'a, T>>,
}

/// The outputs of a node: the attention, then the updated caches, each with the number of the input that it may be the same memory as.
pub fn written<T: PrimitiveTensorElementType>(
    output: &RawTensor<'_, T>,
    updated: [(usize, &Option<RawTensor<'_, T>>); 2],
) -> Vec<Written> {
    let mut written = vec![Written {
        name: "output",
        memory: output.addresses(),
        in_place_of: None,
    }];
    let names = ["updated_key_cache", "updated_value_cache"];
    for (name, (input, updated)) in names.into_iter().zip(updated) {
        written.extend(updated.as_ref().map(|updated| Written {
            name,
            memory: updated.addresses(),
            in_place_of: Some(input),
        }));
    }
    written
}

thread_local! {
    /// One for all nodes of all sessions that run on this thread: they run one after the other.
    static SCRATCH: Cell<Option<Box<Scratch>>> = const { Cell::new(None) };
}

/// Runs a call on the session's threads.
///
/// Where a cache and its updated form are the same memory, rows are written in place; where not, the rows that are kept are copied first.
///
/// # Safety
/// A cache and its updated form are the same memory or apart, and both are apart from everything else that the call uses.
pub unsafe fn run<T: Element + PrimitiveTensorElementType>(
    context: &ComputeContext,
    call: &Call<'_, T>,
    [key_cache, value_cache]: [Cache<'_, T>; 2],
    output: &mut [T],
) -> ort::Result<()> {
    let (mut own_keys, mut own_values) = (Vec::new(), Vec::new());
    // SAFETY: the caller's.
    let (keys, values) = unsafe {
        (
            to_update(call, key_cache, &mut own_keys),
            to_update(call, value_cache, &mut own_values),
        )
    };
    let mut scratch = SCRATCH.take().unwrap_or_default();
    let result = call.attend(keys, values, output, &mut scratch, &OrtPool(context));
    SCRATCH.set(Some(scratch));
    result.map_err(ort::Error::wrap)
}

/// The memory that new rows are written to: the cache itself, or the output with the kept rows copied to it, or `own` where nothing wants the output.
///
/// # Safety
/// As for [`run`].
unsafe fn to_update<'c, T: Element + PrimitiveTensorElementType>(
    call: &Call<'_, T>,
    cache: Cache<'c, T>,
    own: &'c mut Vec<T>,
) -> &'c mut [T] {
    let Cache { given, updated } = cache;
    let to = match updated {
        Some(mut updated) => {
            // SAFETY: every bit pattern is a value of the element types; the caller vouches for the rest.
            let elements = unsafe { updated.slice_mut() };
            if updated.addresses() == given.addresses() {
                return elements;
            }
            elements
        }
        None => {
            own.resize(given.elements(), T::default());
            &mut own[..]
        }
    };
    // SAFETY: `to` is other memory, or this function would have returned.
    call.copy_kept_rows(unsafe { given.slice() }, to);
    to
}
