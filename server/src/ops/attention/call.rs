//! What one call of an attention operator does, whichever operator it is: new rows for the caches, and what each sequence's queries see.

use std::ops::Range;

use super::Geometry;
use crate::ops::{element::Element, error::OperatorError};

/// A call whose values have been checked; made by [`super::cached::Inputs::call`] and [`super::block::Inputs::call`].
#[derive(Debug)]
pub struct Call<'a, T> {
    pub(super) geometry: &'a Geometry,
    /// `[batch, tokens, num_heads · head_dim]`.
    pub(super) query: &'a [T],
    /// `[batch, tokens]`: row of the rotary tables for each query.
    pub(super) position_ids: &'a [i64],
    /// Keys and values that go to the caches; no cache row is written twice.
    pub(super) new_rows: Vec<NewRows<'a, T>>,
    /// One per sequence.
    pub(super) sequences: Vec<Sequence>,
    pub(super) rotary: Rotary<'a>,
    /// `[head_dim]`: weight of the RMS norm of each query head.
    pub(super) q_norm: Option<&'a [f32]>,
    /// `[head_dim]`: weight of the RMS norm of each key head.
    pub(super) k_norm: Option<&'a [f32]>,
}

/// Keys and values of some new tokens of every sequence.
#[derive(Debug)]
pub struct NewRows<'a, T> {
    /// `[batch, rows, kv_num_heads · head_dim]`.
    pub key: &'a [T],
    /// `[batch, rows, kv_num_heads · head_dim]`.
    pub value: &'a [T],
    /// `[batch, rows]`: row of the rotary tables for each.
    pub position_ids: &'a [i64],
    /// Rows of each sequence, those that are padding included.
    pub rows: usize,
    /// The cache rows that the first ones of each sequence are written to; the others are padding and not even read.
    pub written: Vec<Range<usize>>,
}

/// What the queries of one sequence see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// Valid cache rows once the new ones are written.
    pub keys: usize,
    /// Cache row at which the first query stands; negative where queries stand before the first row.
    pub first_place: i64,
    /// Queries that see anything; those behind them are padding and give zeros.
    pub queries: usize,
}

/// Tables of cosines and sines, `[positions, rotary_dim / 2]`.
#[derive(Clone, Copy, Debug)]
pub struct Rotary<'a> {
    /// Cosines.
    pub cos: &'a [f32],
    /// Sines.
    pub sin: &'a [f32],
}

impl<T: Element> Call<'_, T> {
    /// Copies the cache rows a call keeps from the caller's cache to the one the call updates, where they are not the same memory.
    ///
    /// For each sequence these are the valid rows but for those [`Call::attend`] writes anyway.
    /// Rows behind them are left as they are: nothing reads them before they are written.
    pub fn copy_kept_rows(&self, from: &[T], to: &mut [T]) {
        let (capacity, width) = (self.geometry.capacity, self.geometry.kv_width());
        for (batch, sequence) in self.sequences.iter().enumerate() {
            let mut copy = |kept: Range<usize>| {
                if !kept.is_empty() {
                    let elements = (batch * capacity + kept.start) * width
                        ..(batch * capacity + kept.end) * width;
                    to[elements.clone()].copy_from_slice(&from[elements]);
                }
            };
            // Rows are written in ascending order.
            let mut first = 0;
            for rows in &self.new_rows {
                copy(first..rows.written[batch].start.min(sequence.keys));
                first = rows.written[batch].end;
            }
            copy(first..sequence.keys);
        }
    }
}

/// An element of an integer input that is outside its limits.
pub(super) fn outside(
    input: &'static str,
    index: usize,
    value: i64,
    least: i64,
    most: i64,
) -> OperatorError {
    OperatorError::Value {
        input,
        index,
        value,
        least,
        most,
    }
}

/// Checks the element `index` of an integer input.
pub(super) fn within(
    input: &'static str,
    index: usize,
    value: i64,
    most: i64,
) -> Result<(), OperatorError> {
    if value < 0 || value > most {
        return Err(outside(input, index, value, 0, most));
    }
    Ok(())
}
