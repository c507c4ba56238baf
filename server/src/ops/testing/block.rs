//! Random calls of `BlockAttention`, and its definition in `f64`.

use proptest::prelude::*;

use super::{Numbers, attended, exact, prepared_head, rotary_tables, rounded, settings};
use crate::ops::{
    attention::{Attributes, block::Inputs, block::Shapes},
    element::Element,
};

/// Sizes and options of one random call.
#[derive(Clone, Debug)]
pub struct BlockSetting {
    pub attributes: Attributes,
    /// Rows of a block, padding included.
    pub block: usize,
    /// Context rows of the tensors, padding included.
    pub context: usize,
    pub capacity: usize,
    /// Per sequence: valid cache rows before, context rows, block rows.
    pub sequences: Vec<[usize; 3]>,
    pub head_dim: usize,
    pub rotary_dim: usize,
    pub q_norm: bool,
    pub k_norm: bool,
    pub seed: u64,
}

prop_compose! {
    /// Any call with at most `longest` rows in a cache.
    pub fn block_settings(longest: usize)(
        setting in settings(200),
        (block, context) in (1..12_usize, prop_oneof![Just(0_usize), 0..9_usize, 60..80_usize]),
    ) -> BlockSetting {
        let mut numbers = Numbers(setting.seed);
        let sequences: Vec<[usize; 3]> = (0..setting.batch).map(|_| {
            let (context, block) = (numbers.below(context + 1), numbers.below(block + 1));
            [numbers.below(longest - context - block), context, block]
        }).collect();
        let needed = sequences.iter().map(|rows| rows.iter().sum::<usize>()).max().unwrap_or(0);
        BlockSetting {
            attributes: setting.attributes,
            block,
            context,
            capacity: needed + numbers.below(40),
            sequences,
            head_dim: setting.head_dim,
            rotary_dim: setting.rotary_dim,
            q_norm: setting.q_norm,
            k_norm: setting.k_norm,
            seed: setting.seed,
        }
    }
}

/// The tensors of one call.
#[derive(Clone, Debug)]
pub struct BlockTensors<T> {
    pub query: Vec<T>,
    pub key: Vec<T>,
    pub value: Vec<T>,
    pub context_key: Vec<T>,
    pub context_value: Vec<T>,
    pub key_cache: Vec<T>,
    pub value_cache: Vec<T>,
    pub block_position_ids: Vec<i64>,
    pub context_position_ids: Vec<i64>,
    pub context_start: Vec<i64>,
    pub context_rows: Vec<i64>,
    pub block_rows: Vec<i64>,
    pub cos: Vec<f32>,
    pub sin: Vec<f32>,
    pub q_norm: Option<Vec<f32>>,
    pub k_norm: Option<Vec<f32>>,
}

impl BlockSetting {
    pub fn query_width(&self) -> usize {
        self.attributes.num_heads * self.head_dim
    }

    pub fn kv_width(&self) -> usize {
        self.attributes.kv_num_heads * self.head_dim
    }

    /// The shapes of the inputs, in their order; those of norms that are absent are left out.
    pub fn shapes(&self) -> Vec<(&'static str, Vec<usize>)> {
        let (batch, block, context) = (self.sequences.len(), self.block, self.context);
        let (query, kv) = (self.query_width(), self.kv_width());
        let mut shapes = vec![
            ("query", vec![batch, block, query]),
            ("key", vec![batch, block, kv]),
            ("value", vec![batch, block, kv]),
            ("context_key", vec![batch, context, kv]),
            ("context_value", vec![batch, context, kv]),
            ("key_cache", vec![batch, self.capacity, kv]),
            ("value_cache", vec![batch, self.capacity, kv]),
            ("block_position_ids", vec![batch, block]),
            ("context_position_ids", vec![batch, context]),
            ("context_start", vec![batch]),
            ("context_rows", vec![batch]),
            ("block_rows", vec![batch]),
            ("cos", vec![self.capacity, self.rotary_dim / 2]),
            ("sin", vec![self.capacity, self.rotary_dim / 2]),
        ];
        for (name, present) in [("q_norm", self.q_norm), ("k_norm", self.k_norm)] {
            if present {
                shapes.push((name, vec![self.head_dim]));
            }
        }
        shapes
    }

    /// Calls `work` with the shapes as the operator sees them.
    pub fn with_shapes<R>(&self, work: impl FnOnce(Shapes<'_>) -> R) -> R {
        let shapes: Vec<(&str, Vec<i64>)> = self
            .shapes()
            .into_iter()
            .map(|(name, shape)| (name, shape.into_iter().map(|size| size as i64).collect()))
            .collect();
        let optional = |wanted: &str| {
            let found = shapes.iter().find(|(name, _)| *name == wanted);
            found.map(|(_, shape)| shape.as_slice())
        };
        let of = |wanted: &str| optional(wanted).unwrap();
        work(Shapes {
            query: of("query"),
            key: of("key"),
            value: of("value"),
            context_key: of("context_key"),
            context_value: of("context_value"),
            key_cache: of("key_cache"),
            value_cache: of("value_cache"),
            block_position_ids: of("block_position_ids"),
            context_position_ids: of("context_position_ids"),
            context_start: of("context_start"),
            context_rows: of("context_rows"),
            block_rows: of("block_rows"),
            cos: of("cos"),
            sin: of("sin"),
            q_norm: optional("q_norm"),
            k_norm: optional("k_norm"),
        })
    }

    /// Random tensors. Padding and cache rows that are not valid before the call hold NaN, positions of padding are impossible.
    pub fn tensors<T: Element>(&self) -> BlockTensors<T> {
        let mut numbers = Numbers(self.seed ^ 1);
        let batch = self.sequences.len();
        let mut rows =
            |per_sequence: usize, width: usize, scale: f32, valid: &dyn Fn([usize; 3]) -> usize| {
                let mut elements = numbers.elements::<T>(batch * per_sequence * width, scale);
                let mut nan = [T::default()];
                T::narrow(&[f32::NAN], &mut nan);
                for (index, &sequence) in self.sequences.iter().enumerate() {
                    elements[(index * per_sequence + valid(sequence)) * width
                        ..(index + 1) * per_sequence * width]
                        .fill(nan[0]);
                }
                elements
            };
        let (start, context, block) = (
            &|[start, _, _]: [usize; 3]| start,
            &|[_, context, _]: [usize; 3]| context,
            &|[_, _, block]: [usize; 3]| block,
        );
        let (query_width, kv_width) = (self.query_width(), self.kv_width());
        let query = rows(self.block, query_width, 3.0, block);
        let key = rows(self.block, kv_width, 3.0, block);
        let value = rows(self.block, kv_width, 1.0, block);
        let context_key = rows(self.context, kv_width, 3.0, context);
        let context_value = rows(self.context, kv_width, 1.0, context);
        let key_cache = rows(self.capacity, kv_width, 3.0, start);
        let value_cache = rows(self.capacity, kv_width, 1.0, start);
        let positions = |per_sequence: usize,
                         first: &dyn Fn([usize; 3]) -> usize,
                         valid: &dyn Fn([usize; 3]) -> usize| {
            self.sequences
                .iter()
                .flat_map(|&sequence| (0..per_sequence).map(move |row| (row, sequence)))
                .map(|(row, sequence)| {
                    if row < valid(sequence) {
                        (first(sequence) + row) as i64
                    } else {
                        i64::MIN
                    }
                })
                .collect::<Vec<i64>>()
        };
        let block_position_ids =
            positions(self.block, &|[start, context, _]| start + context, block);
        let context_position_ids = positions(self.context, start, context);
        let integers = |index: usize| {
            self.sequences
                .iter()
                .map(|rows| rows[index] as i64)
                .collect()
        };
        let [cos, sin] = rotary_tables(self.capacity, self.rotary_dim / 2, 10_000.0);
        let mut norm = |present: bool| present.then(|| numbers.elements(self.head_dim, 1.5));
        let (q_norm, k_norm) = (norm(self.q_norm), norm(self.k_norm));
        BlockTensors {
            query,
            key,
            value,
            context_key,
            context_value,
            key_cache,
            value_cache,
            block_position_ids,
            context_position_ids,
            context_start: integers(0),
            context_rows: integers(1),
            block_rows: integers(2),
            cos,
            sin,
            q_norm,
            k_norm,
        }
    }

    /// The output by the definition, in `f64`: dense, one sequence after the other; new keys are rounded to `T` as the cache stores them.
    pub fn reference<T: Element>(&self, tensors: &BlockTensors<T>) -> Vec<f64> {
        let (head_dim, kv_width, half) = (self.head_dim, self.kv_width(), self.rotary_dim / 2);
        let group = self.attributes.num_heads / self.attributes.kv_num_heads;
        let scale = if self.attributes.scale == 0.0 {
            1.0 / (head_dim as f32).sqrt()
        } else {
            self.attributes.scale
        };
        let head_of = |elements: &[T], row: usize, width: usize, head: usize| {
            elements[row * width + head * head_dim..][..head_dim].to_vec()
        };
        let prepared = |head: &[T], norm: &Option<Vec<f32>>, position: usize| {
            let angles = position * half..(position + 1) * half;
            prepared_head(
                &self.attributes,
                head,
                norm.as_deref(),
                &tensors.cos[angles.clone()],
                &tensors.sin[angles],
            )
        };
        let mut output = vec![0.0; tensors.query.len()];
        for (index, &[start, context, block]) in self.sequences.iter().enumerate() {
            let first = start + context;
            for head in 0..self.attributes.num_heads {
                let kv_head = head / group;
                let (mut keys, mut values) = (Vec::new(), Vec::new());
                for row in 0..start {
                    let row = index * self.capacity + row;
                    keys.push(exact(&head_of(&tensors.key_cache, row, kv_width, kv_head)));
                    values.push(exact(&head_of(
                        &tensors.value_cache,
                        row,
                        kv_width,
                        kv_head,
                    )));
                }
                for row in 0..context {
                    let from = index * self.context + row;
                    let key = head_of(&tensors.context_key, from, kv_width, kv_head);
                    keys.push(rounded::<T>(prepared(&key, &tensors.k_norm, start + row)));
                    values.push(exact(&head_of(
                        &tensors.context_value,
                        from,
                        kv_width,
                        kv_head,
                    )));
                }
                for row in 0..block {
                    let from = index * self.block + row;
                    let key = head_of(&tensors.key, from, kv_width, kv_head);
                    keys.push(rounded::<T>(prepared(&key, &tensors.k_norm, first + row)));
                    values.push(exact(&head_of(&tensors.value, from, kv_width, kv_head)));
                }
                for row in 0..block {
                    let from = index * self.block + row;
                    let place = (first + row) as i64;
                    let window = self.attributes.window as i64;
                    let sees = |key: &usize| {
                        let distance = place - *key as i64;
                        (!self.attributes.is_causal || distance >= 0)
                            && (window == 0 || distance.abs() < window)
                    };
                    let seen = |rows: &[Vec<f64>]| -> Vec<Vec<f64>> {
                        (0..rows.len())
                            .filter(sees)
                            .map(|key| rows[key].clone())
                            .collect()
                    };
                    let query = head_of(&tensors.query, from, self.query_width(), head);
                    let attended = attended(
                        &prepared(&query, &tensors.q_norm, first + row),
                        &seen(&keys),
                        &seen(&values),
                        scale,
                        self.attributes.softcap,
                    );
                    output[from * self.query_width() + head * head_dim..][..head_dim]
                        .copy_from_slice(&attended);
                }
            }
        }
        output
    }
}

impl<T> BlockTensors<T> {
    /// The inputs but for the caches.
    pub fn inputs(&self) -> Inputs<'_, T> {
        Inputs {
            query: &self.query,
            key: &self.key,
            value: &self.value,
            context_key: &self.context_key,
            context_value: &self.context_value,
            block_position_ids: &self.block_position_ids,
            context_position_ids: &self.context_position_ids,
            context_start: &self.context_start,
            context_rows: &self.context_rows,
            block_rows: &self.block_rows,
            cos: &self.cos,
            sin: &self.sin,
            q_norm: self.q_norm.as_deref(),
            k_norm: self.k_norm.as_deref(),
        }
    }
}
