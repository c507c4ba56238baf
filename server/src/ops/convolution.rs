//! The grouped dynamic convolution of a draft block, as a pure function over slices; no ONNX Runtime.
//!
//! It runs along the rows of a block: an output row is a weighted sum of its own input row and the ones before it.
//! The weights are fixed ones of each channel plus dynamic ones that a projection predicts for the output row and a group of channels.
//! Rows before the first one count as zeros: nothing comes from the context or from another sequence.
//!
//! A row depends on itself and the rows before it, so padding behind a block changes nothing; sums have one order, so no bit depends on the batch.

#[cfg(test)]
pub(in crate::ops) mod tests;

use std::cell::Cell;

use super::{element::Element, error::OperatorError, pool::Pool, shared::SharedMut};

/// Products below which waking other threads costs more than they save.
const SERIAL_WORK: usize = 1 << 15;

/// Attributes of the operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// Which of the two convolutions of a sublayer: 0 before it, 1 after it.
    pub side: usize,
    /// Channels that share their dynamic weights; neighbours form a group.
    pub group_size: usize,
}

impl Attributes {
    /// Checks what can be checked without shapes.
    pub fn check(&self) -> Result<(), OperatorError> {
        let invalid = |name, value: usize, allowed| {
            Err(OperatorError::Attribute {
                name,
                value: value.to_string(),
                allowed,
            })
        };
        if self.side > 1 {
            return invalid("side", self.side, "0 or 1");
        }
        if self.group_size == 0 {
            return invalid("group_size", self.group_size, "at least 1");
        }
        Ok(())
    }
}

/// Shapes of the inputs as they arrive.
#[derive(Clone, Copy, Debug)]
pub struct Shapes<'a> {
    /// `[batch, rows, channels]`.
    pub x: &'a [i64],
    /// `[batch, rows, 2 · taps · groups]`.
    pub coefficients: &'a [i64],
    /// `[2, taps, channels]`.
    pub base: &'a [i64],
}

/// Sizes of one call, checked against each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Attributes of the operator.
    pub attributes: Attributes,
    /// Sequences.
    pub batch: usize,
    /// Rows of each sequence's block.
    pub rows: usize,
    /// Elements of a row.
    pub channels: usize,
    /// Rows that are summed: an output row's own and the ones before it.
    pub taps: usize,
}

impl Geometry {
    /// Reads the sizes from the shapes and checks that all shapes agree with them.
    pub fn new(attributes: Attributes, shapes: &Shapes<'_>) -> Result<Self, OperatorError> {
        attributes.check()?;
        let wrong = |input, shape: &[i64], expected: String| OperatorError::Shape {
            input,
            shape: shape.to_vec(),
            expected,
        };
        let &[batch, rows, channels] = shapes.x else {
            return Err(wrong("x", shapes.x, "[batch, rows, channels]".to_owned()));
        };
        let group_size = i64::try_from(attributes.group_size).unwrap_or(i64::MAX);
        if channels % group_size != 0 {
            return Err(wrong(
                "x",
                shapes.x,
                format!("a last dimension that is a multiple of group_size = {group_size}"),
            ));
        }
        let taps = match shapes.base {
            &[2, taps, width] if width == channels && taps > 0 => taps,
            _ => {
                return Err(wrong(
                    "base",
                    shapes.base,
                    format!("[2, taps, {channels}] with at least 1 tap"),
                ));
            }
        };
        let expected = [batch, rows, 2 * taps * (channels / group_size)];
        if shapes.coefficients != expected {
            return Err(wrong(
                "coefficients",
                shapes.coefficients,
                format!("{expected:?}"),
            ));
        }
        // Dimensions of existing tensors are never negative, so none of these casts loses anything.
        Ok(Self {
            attributes,
            batch: batch as usize,
            rows: rows as usize,
            channels: channels as usize,
            taps: taps as usize,
        })
    }

    fn groups(&self) -> usize {
        self.channels / self.attributes.group_size
    }
}

/// The inputs of one call; row-major, shapes as in [`Shapes`].
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a, T> {
    /// `[batch, rows, channels]`.
    pub x: &'a [T],
    /// `[batch, rows, 2 · taps · groups]`: by side, tap and group.
    pub coefficients: &'a [T],
    /// `[2, taps, channels]`: by side; tap 0 belongs to the output row itself.
    pub base: &'a [T],
}

/// Writes `y[i, c] = Σₜ (base[side, t, c] + coefficients[i, side, t, c / group_size]) · x[i - t, c]` for every row `i` of every sequence.
///
/// Sums run over ascending `t` in `f32`; `output` has the shape of `x`.
pub fn convolve<T: Element>(
    geometry: &Geometry,
    inputs: &Inputs<'_, T>,
    output: &mut [T],
    pool: &impl Pool,
) -> Result<(), OperatorError> {
    assert!(inputs.x.len() == output.len());
    let rows = geometry.batch * geometry.rows;
    let output = SharedMut::new(output);
    let task = |row: usize| {
        // SAFETY: every row is one task.
        let to = unsafe { output.slice(row * geometry.channels..(row + 1) * geometry.channels) };
        with_buffers(|buffers| convolve_row(geometry, inputs, row, to, buffers));
    };
    if rows == 1 || rows * geometry.channels * geometry.taps <= SERIAL_WORK {
        (0..rows).for_each(task);
        return Ok(());
    }
    pool.for_each(rows, &task)
}

/// Room for rows as `f32`.
#[derive(Default)]
struct Buffers {
    sums: Vec<f32>,
    x: Vec<f32>,
    base: Vec<f32>,
    coefficients: Vec<f32>,
}

/// Calls `work` with this thread's memory.
fn with_buffers(work: impl FnOnce(&mut Buffers)) {
    thread_local! {
        static BUFFERS: Cell<Option<Box<Buffers>>> = const { Cell::new(None) };
    }
    let mut buffers = BUFFERS.take().unwrap_or_default();
    work(&mut buffers);
    BUFFERS.set(Some(buffers));
}

/// Computes one row, counted over the whole batch.
fn convolve_row<T: Element>(
    geometry: &Geometry,
    inputs: &Inputs<'_, T>,
    row: usize,
    to: &mut [T],
    buffers: &mut Buffers,
) {
    let (channels, groups, taps) = (geometry.channels, geometry.groups(), geometry.taps);
    let Attributes { side, group_size } = geometry.attributes;
    let Buffers {
        sums,
        x,
        base,
        coefficients,
    } = buffers;
    sums.clear();
    sums.resize(channels, 0.0);
    for tap in 0..taps.min(row % geometry.rows + 1) {
        let x = wide(&inputs.x[(row - tap) * channels..][..channels], x);
        let base = wide(
            &inputs.base[(side * taps + tap) * channels..][..channels],
            base,
        );
        let first = (row * 2 * taps + side * taps + tap) * groups;
        let coefficients = wide(&inputs.coefficients[first..][..groups], coefficients);
        for (((sums, x), base), &coefficient) in sums
            .chunks_exact_mut(group_size)
            .zip(x.chunks_exact(group_size))
            .zip(base.chunks_exact(group_size))
            .zip(coefficients)
        {
            for ((sum, x), base) in sums.iter_mut().zip(x).zip(base) {
                *sum += (base + coefficient) * x;
            }
        }
    }
    T::narrow(sums, to);
}

/// The elements as `f32`, in `room` where they have to be converted.
fn wide<'a, T: Element>(elements: &'a [T], room: &'a mut Vec<f32>) -> &'a [f32] {
    match T::as_f32(elements) {
        Some(elements) => elements,
        None => {
            room.resize(elements.len(), 0.0);
            T::widen(elements, room);
            room
        }
    }
}
