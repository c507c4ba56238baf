//! Calls of `BlockAttention`: every sequence appends context rows to its cache and puts a block of queries behind them.
//!
//! Sequences have different numbers of context rows and of block rows; the rest of each tensor is padding.

#[cfg(test)]
mod tests;

use super::{
    Attributes, Call, Geometry,
    call::{NewRows, Rotary, Sequence, outside, within},
    geometry::{SharedShapes, expect, wrong},
};
use crate::ops::{element::Element, error::OperatorError};

/// Shapes of the inputs as they arrive.
#[derive(Clone, Copy, Debug)]
pub struct Shapes<'a> {
    /// `[batch, block, num_heads · head_dim]`.
    pub query: &'a [i64],
    /// `[batch, block, kv_num_heads · head_dim]`.
    pub key: &'a [i64],
    /// `[batch, block, kv_num_heads · head_dim]`.
    pub value: &'a [i64],
    /// `[batch, context, kv_num_heads · head_dim]`.
    pub context_key: &'a [i64],
    /// `[batch, context, kv_num_heads · head_dim]`.
    pub context_value: &'a [i64],
    /// `[batch, capacity, kv_num_heads · head_dim]`.
    pub key_cache: &'a [i64],
    /// `[batch, capacity, kv_num_heads · head_dim]`.
    pub value_cache: &'a [i64],
    /// `[batch, block]`.
    pub block_position_ids: &'a [i64],
    /// `[batch, context]`.
    pub context_position_ids: &'a [i64],
    /// `[batch]`.
    pub context_start: &'a [i64],
    /// `[batch]`.
    pub context_rows: &'a [i64],
    /// `[batch]`.
    pub block_rows: &'a [i64],
    /// `[positions, rotary_dim / 2]`.
    pub cos: &'a [i64],
    /// `[positions, rotary_dim / 2]`.
    pub sin: &'a [i64],
    /// `[head_dim]`.
    pub q_norm: Option<&'a [i64]>,
    /// `[head_dim]`.
    pub k_norm: Option<&'a [i64]>,
}

impl Shapes<'_> {
    /// Reads the sizes from the shapes and checks that all shapes agree with them; the tokens of the geometry are the rows of a block.
    pub fn geometry(&self, attributes: &Attributes) -> Result<Geometry, OperatorError> {
        let geometry = Geometry::new(
            attributes,
            &SharedShapes {
                query: self.query,
                key_cache: self.key_cache,
                value_cache: self.value_cache,
                cos: self.cos,
                sin: self.sin,
                q_norm: self.q_norm,
                k_norm: self.k_norm,
            },
        )?;
        let (batch, block) = (geometry.batch as i64, geometry.tokens as i64);
        let kv_width = geometry.kv_width() as i64;
        expect("key", self.key, &[batch, block, kv_width])?;
        expect("value", self.value, &[batch, block, kv_width])?;
        let &[_, context, _] = self.context_key else {
            return Err(wrong(
                "context_key",
                self.context_key,
                format!("[{batch}, context, {kv_width}]"),
            ));
        };
        expect("context_key", self.context_key, &[batch, context, kv_width])?;
        expect(
            "context_value",
            self.context_value,
            &[batch, context, kv_width],
        )?;
        expect(
            "block_position_ids",
            self.block_position_ids,
            &[batch, block],
        )?;
        expect(
            "context_position_ids",
            self.context_position_ids,
            &[batch, context],
        )?;
        expect("context_start", self.context_start, &[batch])?;
        expect("context_rows", self.context_rows, &[batch])?;
        expect("block_rows", self.block_rows, &[batch])?;
        Ok(geometry)
    }
}

/// The inputs of one call but for the caches; row-major, shapes as in [`Shapes`].
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a, T> {
    /// `[batch, block, num_heads · head_dim]`.
    pub query: &'a [T],
    /// `[batch, block, kv_num_heads · head_dim]`.
    pub key: &'a [T],
    /// `[batch, block, kv_num_heads · head_dim]`.
    pub value: &'a [T],
    /// `[batch, context, kv_num_heads · head_dim]`.
    pub context_key: &'a [T],
    /// `[batch, context, kv_num_heads · head_dim]`.
    pub context_value: &'a [T],
    /// `[batch, block]`: row of the rotary tables for each block row.
    pub block_position_ids: &'a [i64],
    /// `[batch, context]`: row of the rotary tables for each context row.
    pub context_position_ids: &'a [i64],
    /// `[batch]`: cache rows that are valid before; the first context row is written behind them.
    pub context_start: &'a [i64],
    /// `[batch]`: context rows that are not padding.
    pub context_rows: &'a [i64],
    /// `[batch]`: block rows that are not padding.
    pub block_rows: &'a [i64],
    /// `[positions, rotary_dim / 2]`.
    pub cos: &'a [f32],
    /// `[positions, rotary_dim / 2]`.
    pub sin: &'a [f32],
    /// `[head_dim]`: weight of the RMS norm of each query head.
    pub q_norm: Option<&'a [f32]>,
    /// `[head_dim]`: weight of the RMS norm of each key head.
    pub k_norm: Option<&'a [f32]>,
}

impl<'a, T: Element> Inputs<'a, T> {
    /// The call with these inputs.
    ///
    /// Query `i` of a sequence stands at cache row `context_start + context_rows + i`, and so does its key.
    pub fn call(&self, geometry: &'a Geometry) -> Result<Call<'a, T>, OperatorError> {
        let (batch, block) = (geometry.batch, geometry.tokens);
        let context = self
            .context_position_ids
            .len()
            .checked_div(batch)
            .unwrap_or(0);
        let mut sequences = Vec::with_capacity(batch);
        let (mut context_written, mut block_written) =
            (Vec::with_capacity(batch), Vec::with_capacity(batch));
        for index in 0..batch {
            let (start, context_rows, block_rows) = (
                self.context_start[index],
                self.context_rows[index],
                self.block_rows[index],
            );
            within("context_rows", index, context_rows, context as i64)?;
            within("block_rows", index, block_rows, block as i64)?;
            // May be negative: then the rows don't fit wherever they begin.
            let last_start = geometry.capacity as i64 - context_rows - block_rows;
            if start < 0 || start > last_start {
                return Err(outside("context_start", index, start, 0, last_start));
            }
            for row in 0..context_rows as usize {
                let element = index * context + row;
                let position = self.context_position_ids[element];
                geometry.check_position("context_position_ids", element, position)?;
            }
            for row in 0..block_rows as usize {
                let element = index * block + row;
                let position = self.block_position_ids[element];
                geometry.check_position("block_position_ids", element, position)?;
            }
            let first = (start + context_rows) as usize;
            let keys = first + block_rows as usize;
            context_written.push(start as usize..first);
            block_written.push(first..keys);
            sequences.push(Sequence {
                keys,
                first_place: first as i64,
                queries: block_rows as usize,
            });
        }
        Ok(Call {
            geometry,
            query: self.query,
            position_ids: self.block_position_ids,
            new_rows: vec![
                NewRows {
                    key: self.context_key,
                    value: self.context_value,
                    position_ids: self.context_position_ids,
                    rows: context,
                    written: context_written,
                },
                NewRows {
                    key: self.key,
                    value: self.value,
                    position_ids: self.block_position_ids,
                    rows: block,
                    written: block_written,
                },
            ],
            sequences,
            rotary: Rotary {
                cos: self.cos,
                sin: self.sin,
            },
            q_norm: self.q_norm,
            k_norm: self.k_norm,
        })
    }
}
