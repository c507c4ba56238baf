//! Calls of `CachedAttention`: every sequence feeds the same number of new tokens, which stand at the end of its valid rows.

use super::{
    Attributes, Call, Geometry,
    call::{NewRows, Rotary, Sequence, within},
    geometry::{SharedShapes, expect, wrong},
};
use crate::ops::{element::Element, error::OperatorError};

/// Shapes of the inputs as they arrive.
#[derive(Clone, Copy, Debug)]
pub struct Shapes<'a> {
    /// `[batch, tokens, num_heads · head_dim]`.
    pub query: &'a [i64],
    /// `[batch, tokens, kv_num_heads · head_dim]`.
    pub key: &'a [i64],
    /// `[batch, tokens, kv_num_heads · head_dim]`.
    pub value: &'a [i64],
    /// `[batch, capacity, kv_num_heads · head_dim]`.
    pub key_cache: &'a [i64],
    /// `[batch, capacity, kv_num_heads · head_dim]`.
    pub value_cache: &'a [i64],
    /// `[batch, tokens]`.
    pub position_ids: &'a [i64],
    /// `[batch]`.
    pub write_indices: &'a [i64],
    /// `[batch]`.
    pub nonpad_kv_seqlen: &'a [i64],
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
    /// Reads the sizes from the shapes and checks that all shapes agree with them.
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
        if geometry.tokens > geometry.capacity {
            return Err(wrong(
                "query",
                self.query,
                format!(
                    "at most {} tokens, as many as a cache has rows",
                    geometry.capacity
                ),
            ));
        }
        let (batch, tokens) = (geometry.batch as i64, geometry.tokens as i64);
        let rows = [batch, tokens, geometry.kv_width() as i64];
        expect("key", self.key, &rows)?;
        expect("value", self.value, &rows)?;
        expect("position_ids", self.position_ids, &[batch, tokens])?;
        expect("write_indices", self.write_indices, &[batch])?;
        expect("nonpad_kv_seqlen", self.nonpad_kv_seqlen, &[batch])?;
        Ok(geometry)
    }
}

/// The inputs of one call but for the caches; row-major, shapes as in [`Shapes`].
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a, T> {
    /// `[batch, tokens, num_heads · head_dim]`.
    pub query: &'a [T],
    /// `[batch, tokens, kv_num_heads · head_dim]`.
    pub key: &'a [T],
    /// `[batch, tokens, kv_num_heads · head_dim]`.
    pub value: &'a [T],
    /// `[batch, tokens]`: row of the rotary tables for each new token.
    pub position_ids: &'a [i64],
    /// `[batch]`: cache row of the first new token.
    pub write_indices: &'a [i64],
    /// `[batch]`: valid cache rows, the new ones included.
    pub nonpad_kv_seqlen: &'a [i64],
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
    /// Query `i` of a sequence stands at cache row `i + nonpad_kv_seqlen - tokens`.
    pub fn call(&self, geometry: &'a Geometry) -> Result<Call<'a, T>, OperatorError> {
        let (tokens, capacity) = (geometry.tokens, geometry.capacity as i64);
        let mut written = Vec::with_capacity(geometry.batch);
        for (index, &value) in self.write_indices.iter().enumerate() {
            within("write_indices", index, value, capacity - tokens as i64)?;
            written.push(value as usize..value as usize + tokens);
        }
        let mut sequences = Vec::with_capacity(geometry.batch);
        for (index, &value) in self.nonpad_kv_seqlen.iter().enumerate() {
            within("nonpad_kv_seqlen", index, value, capacity)?;
            sequences.push(Sequence {
                keys: value as usize,
                first_place: value - tokens as i64,
                queries: tokens,
            });
        }
        for (index, &position) in self.position_ids.iter().enumerate() {
            geometry.check_position("position_ids", index, position)?;
        }
        Ok(Call {
            geometry,
            query: self.query,
            position_ids: self.position_ids,
            new_rows: vec![NewRows {
                key: self.key,
                value: self.value,
                position_ids: self.position_ids,
                rows: tokens,
                written,
            }],
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
