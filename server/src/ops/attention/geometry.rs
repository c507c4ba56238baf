//! Attributes and shapes of the operator, and everything that can be wrong with them.

use super::{Inputs, padded};

/// Which elements of a head a rotation pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RotaryLayout {
    /// Element `i` with element `i + rotary_dim / 2`, as in Llama checkpoints.
    HalfSplit,
    /// Elements `2i` and `2i + 1`.
    Interleaved,
}

/// Attributes of the operator.
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
    pub fn check(&self) -> Result<(), AttentionError> {
        let invalid = |name, value: String, allowed| {
            Err(AttentionError::Attribute {
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

/// Shapes of the inputs as they arrive.
#[derive(Clone, Copy, Debug)]
pub struct TensorShapes<'a> {
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

/// Sizes of one call, checked against each other.
#[derive(Clone, Debug, PartialEq)]
pub struct Geometry {
    /// Attributes of the operator.
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
    /// Reads the sizes from the shapes and checks that all shapes agree with them.
    pub fn new(attributes: &Attributes, shapes: &TensorShapes<'_>) -> Result<Self, AttentionError> {
        attributes.check()?;
        let wrong = |input, shape: &[i64], expected: String| AttentionError::Shape {
            input,
            shape: shape.to_vec(),
            expected,
        };
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
        if tokens > capacity {
            return Err(wrong(
                "query",
                shapes.query,
                format!("at most {capacity} tokens, as many as a cache has rows"),
            ));
        }
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
        let check = |input, shape: Option<&[i64]>, expected: &[i64]| match shape {
            Some(shape) if shape != expected => Err(wrong(input, shape, format!("{expected:?}"))),
            _ => Ok(()),
        };
        check("key", Some(shapes.key), &[batch, tokens, kv_width])?;
        check("value", Some(shapes.value), &[batch, tokens, kv_width])?;
        check(
            "key_cache",
            Some(shapes.key_cache),
            &[batch, capacity, kv_width],
        )?;
        check(
            "value_cache",
            Some(shapes.value_cache),
            &[batch, capacity, kv_width],
        )?;
        check("position_ids", Some(shapes.position_ids), &[batch, tokens])?;
        check("write_indices", Some(shapes.write_indices), &[batch])?;
        check("nonpad_kv_seqlen", Some(shapes.nonpad_kv_seqlen), &[batch])?;
        check("sin", Some(shapes.sin), &[positions, half_rotary])?;
        check("q_norm", shapes.q_norm, &[head_dim])?;
        check("k_norm", shapes.k_norm, &[head_dim])?;
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

    /// Checks the integer inputs against the cache and the rotary tables.
    pub fn check_values<T>(&self, inputs: &Inputs<'_, T>) -> Result<(), AttentionError> {
        let outside = |input, index, value, least, most| AttentionError::Value {
            input,
            index,
            value,
            least,
            most,
        };
        let last_write = self.capacity as i64 - self.tokens as i64;
        for (index, &value) in inputs.write_indices.iter().enumerate() {
            if value < 0 || value > last_write {
                return Err(outside("write_indices", index, value, 0, last_write));
            }
        }
        for (index, &value) in inputs.nonpad_kv_seqlen.iter().enumerate() {
            if value < 0 || value > self.capacity as i64 {
                return Err(outside(
                    "nonpad_kv_seqlen",
                    index,
                    value,
                    0,
                    self.capacity as i64,
                ));
            }
        }
        if self.rotary_dim > 0 {
            for (index, &value) in inputs.position_ids.iter().enumerate() {
                if value < 0 || value >= self.positions as i64 {
                    return Err(outside(
                        "position_ids",
                        index,
                        value,
                        0,
                        self.positions as i64 - 1,
                    ));
                }
            }
        }
        Ok(())
    }

    /// Cache rows the query of new token `token` sees when `nonpad` rows are valid.
    pub(super) fn visible_keys(&self, token: usize, nonpad: usize) -> std::ops::Range<usize> {
        let place = token as i64 + nonpad as i64 - self.tokens as i64;
        let (mut first, mut end) = (0, nonpad as i64);
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

/// What is wrong with a call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AttentionError {
    /// An attribute of the node.
    #[error("attribute {name} is {value}; allowed is {allowed}")]
    Attribute {
        /// Name of the attribute.
        name: &'static str,
        /// Its value.
        value: String,
        /// What it may be.
        allowed: &'static str,
    },
    /// A shape that does not agree with the others.
    #[error("input {input} has shape {shape:?}; expected is {expected}")]
    Shape {
        /// Name of the input.
        input: &'static str,
        /// Its shape.
        shape: Vec<i64>,
        /// What the other shapes and the attributes ask for.
        expected: String,
    },
    /// An integer outside its limits.
    #[error("input {input}[{index}] is {value}; allowed is {least} to {most}")]
    Value {
        /// Name of the input.
        input: &'static str,
        /// Index of the element, row-major.
        index: usize,
        /// Its value.
        value: i64,
        /// Smallest value allowed.
        least: i64,
        /// Largest value allowed.
        most: i64,
    },
    /// The tasks of a call could not be run to their end.
    #[error("the thread pool failed: {0}")]
    Pool(String),
}
