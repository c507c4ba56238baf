//! Attributes and sizes of the attention operators, and what can be wrong with them.

use std::ops::Range;

use super::{
    call::{Sequence, within},
    padded,
};
use crate::ops::error::OperatorError;

/// Which elements of a head a rotation pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RotaryLayout {
    /// Element `i` with element `i + rotary_dim / 2`, as in Llama checkpoints.
    HalfSplit,
    /// Elements `2i` and `2i + 1`.
    Interleaved,
}

/// Attributes of an attention operator.
#[derive(Clone, Debug, PartialEq)]
pub struct Attributes {
    /// Query heads; a multiple of `kv_num_heads`.
    pub num_heads: usize,
    /// Key/value heads. Query head `h` uses key/value head `h / (num_heads / kv_num_heads)`.
    pub kv_num_heads: usize,
    /// Whether a query sees only keys at or before its own place.
    pub is_causal: bool,
    /// A query sees keys less than this many places away; 0 for no limit.
    pub window: usize,
    /// Which elements a rotation pairs.
    pub rotary_layout: RotaryLayout,
    /// Factor on the scores; 0 for `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Added to the mean square in the query and key norms.
    pub norm_epsilon: f32,
    /// Scores become `softcap · tanh(score / softcap)`; 0 for off.
    pub softcap: f32,
}

impl Attributes {
    /// Checks what can be checked without shapes.
    pub fn check(&self) -> Result<(), OperatorError> {
        let invalid = |name, value: String, allowed| {
            Err(OperatorError::Attribute {
                name,
                value,
                allowed,
            })
        };
        if self.num_heads == 0 {
            return invalid("num_heads", self.num_heads.to_string(), "at least 1");
        }
        if self.kv_num_heads == 0 || !self.num_heads.is_multiple_of(self.kv_num_heads) {
            return invalid(
                "kv_num_heads",
                self.kv_num_heads.to_string(),
                "a divisor of num_heads",
            );
        }
        for (name, value) in [
            ("scale", self.scale),
            ("norm_epsilon", self.norm_epsilon),
            ("softcap", self.softcap),
        ] {
            if !value.is_finite() || value < 0.0 {
                return invalid(name, value.to_string(), "a finite number, 0 or above");
            }
        }
        Ok(())
    }
}

/// Shapes of the inputs that both operators have; what they mean is theirs to say.
#[derive(Clone, Copy, Debug)]
pub(super) struct SharedShapes<'a> {
    pub query: &'a [i64],
    pub key_cache: &'a [i64],
    pub value_cache: &'a [i64],
    pub cos: &'a [i64],
    pub sin: &'a [i64],
    pub q_norm: Option<&'a [i64]>,
    pub k_norm: Option<&'a [i64]>,
}

/// Checks the shape of an input that other shapes fix.
pub(super) fn expect(
    input: &'static str,
    shape: &[i64],
    expected: &[i64],
) -> Result<(), OperatorError> {
    if shape != expected {
        return Err(wrong(input, shape, format!("{expected:?}")));
    }
    Ok(())
}

pub(super) fn wrong(input: &'static str, shape: &[i64], expected: String) -> OperatorError {
    OperatorError::Shape {
        input,
        shape: shape.to_vec(),
        expected,
    }
}

/// Sizes of one call, checked against each other.
#[derive(Clone, Debug, PartialEq)]
pub struct Geometry {
    /// Attributes of an attention operator.
    pub attributes: Attributes,
    /// Sequences.
    pub batch: usize,
    /// New tokens of each sequence.
    pub tokens: usize,
    /// Rows of each sequence's cache.
    pub capacity: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Leading elements of a head that are rotated; even, at most `head_dim`.
    pub rotary_dim: usize,
    /// Rows of the rotary tables.
    pub positions: usize,
    /// Factor on the scores, the default resolved.
    pub scale: f32,
}

impl Geometry {
    /// Reads the sizes from the shapes and checks that these shapes agree with them.
    pub(super) fn new(
        attributes: &Attributes,
        shapes: &SharedShapes<'_>,
    ) -> Result<Self, OperatorError> {
        attributes.check()?;
        let (heads, kv_heads) = (attributes.num_heads as i64, attributes.kv_num_heads as i64);
        let &[batch, tokens, query_width] = shapes.query else {
            return Err(wrong(
                "query",
                shapes.query,
                "[batch, tokens, num_heads * head_dim]".to_owned(),
            ));
        };
        if query_width <= 0 || query_width % heads != 0 {
            return Err(wrong(
                "query",
                shapes.query,
                format!("a last dimension that is a multiple of num_heads = {heads}"),
            ));
        }
        let head_dim = query_width / heads;
        let kv_width = kv_heads * head_dim;
        let &[_, capacity, _] = shapes.key_cache else {
            return Err(wrong(
                "key_cache",
                shapes.key_cache,
                format!("[{batch}, capacity, {kv_width}]"),
            ));
        };
        let &[positions, half_rotary] = shapes.cos else {
            return Err(wrong(
                "cos",
                shapes.cos,
                "[positions, rotary_dim / 2]".to_owned(),
            ));
        };
        if positions == 0 && half_rotary > 0 {
            return Err(wrong("cos", shapes.cos, "at least 1 row".to_owned()));
        }
        if 2 * half_rotary > head_dim {
            return Err(wrong(
                "cos",
                shapes.cos,
                format!("at most head_dim / 2 = {} columns", head_dim / 2),
            ));
        }
        let cache = [batch, capacity, kv_width];
        expect("key_cache", shapes.key_cache, &cache)?;
        expect("value_cache", shapes.value_cache, &cache)?;
        expect("sin", shapes.sin, &[positions, half_rotary])?;
        for (input, norm) in [("q_norm", shapes.q_norm), ("k_norm", shapes.k_norm)] {
            if let Some(norm) = norm {
                expect(input, norm, &[head_dim])?;
            }
        }
        // Dimensions of existing tensors are never negative, so none of these casts loses anything.
        let head_dim = head_dim as usize;
        Ok(Self {
            attributes: attributes.clone(),
            batch: batch as usize,
            tokens: tokens as usize,
            capacity: capacity as usize,
            head_dim,
            rotary_dim: 2 * half_rotary as usize,
            positions: positions as usize,
            scale: if attributes.scale == 0.0 {
                1.0 / (head_dim as f32).sqrt()
            } else {
                attributes.scale
            },
        })
    }

    /// Query heads.
    pub fn num_heads(&self) -> usize {
        self.attributes.num_heads
    }

    /// Key/value heads.
    pub fn kv_num_heads(&self) -> usize {
        self.attributes.kv_num_heads
    }

    /// Query heads that share one key/value head.
    pub fn group_size(&self) -> usize {
        self.attributes.num_heads / self.attributes.kv_num_heads
    }

    /// Elements of a token's queries.
    pub fn query_width(&self) -> usize {
        self.attributes.num_heads * self.head_dim
    }

    /// Elements of a token's keys, or of its values.
    pub fn kv_width(&self) -> usize {
        self.attributes.kv_num_heads * self.head_dim
    }

    /// Elements of a head padded to whole vectors.
    pub(super) fn padded_head_dim(&self) -> usize {
        padded(self.head_dim)
    }

    /// Checks one position against the rotary tables.
    pub(super) fn check_position(
        &self,
        input: &'static str,
        index: usize,
        position: i64,
    ) -> Result<(), OperatorError> {
        // Without rotary dimensions the tables are empty and positions mean nothing.
        if self.rotary_dim == 0 {
            return Ok(());
        }
        within(input, index, position, self.positions as i64 - 1)
    }

    /// Cache rows that query `token` of a sequence sees.
    pub(super) fn visible_keys(&self, token: usize, sequence: &Sequence) -> Range<usize> {
        if token >= sequence.queries {
            return 0..0;
        }
        let place = sequence.first_place + token as i64;
        let (mut first, mut end) = (0, sequence.keys as i64);
        if self.attributes.is_causal {
            end = end.min(place + 1);
        }
        if self.attributes.window > 0 {
            let window = i64::try_from(self.attributes.window).unwrap_or(i64::MAX);
            first = first.max(place.saturating_sub(window).saturating_add(1));
            end = end.min(place.saturating_add(window));
        }
        if first < end {
            first as usize..end as usize
        } else {
            0..0
        }
    }
}
