//! What the tests of the operators share: random calls, and the definition of the operator in `f64`.

pub mod block;
pub mod draft;
pub mod graph;
pub mod session;

use proptest::prelude::*;

use self::graph::Attribute;
use super::{
    attention::{Attributes, Geometry, RotaryLayout, cached::Inputs},
    element::Element,
    error::OperatorError,
    pool::Pool,
};

/// Numbers that look random and are the same everywhere (SplitMix64).
#[derive(Clone)]
pub struct Numbers(pub u64);

impl Numbers {
    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// The next number from -1 to 1.
    pub fn float(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// The next number below `limit`.
    pub fn below(&mut self, limit: usize) -> usize {
        (self.bits() % limit as u64) as usize
    }

    /// `count` elements within ±`scale`.
    pub fn elements<T: Element>(&mut self, count: usize, scale: f32) -> Vec<T> {
        let wide: Vec<f32> = (0..count).map(|_| self.float() * scale).collect();
        let mut elements = vec![T::default(); count];
        T::narrow(&wide, &mut elements);
        elements
    }
}

/// Sizes and options of one random call.
#[derive(Clone, Debug)]
pub struct Setting {
    pub attributes: Attributes,
    pub batch: usize,
    pub tokens: usize,
    /// Cache rows before the new ones, per sequence.
    pub past: Vec<usize>,
    /// Valid rows behind the new ones, per sequence; not 0 only without causality.
    pub ahead: Vec<usize>,
    pub capacity: usize,
    pub head_dim: usize,
    pub rotary_dim: usize,
    pub q_norm: bool,
    pub k_norm: bool,
    pub seed: u64,
}

prop_compose! {
    /// Any call with at most `longest` rows in a cache.
    pub fn settings(longest: usize)(
        (kv_num_heads, group_size) in (1..4_usize, prop_oneof![Just(1_usize), Just(2), Just(3), Just(4), Just(7)]),
        head_dim in prop_oneof![Just(16_usize), Just(64), Just(128), 1..80_usize],
        rotary in 0..=4_usize,
        (batch, tokens) in (1..4_usize, prop_oneof![Just(1_usize), Just(2), 1..20_usize, 60..70_usize]),
        (is_causal, interleaved, q_norm, k_norm) in any::<(bool, bool, bool, bool)>(),
        window in prop_oneof![Just(0_usize), 1..8_usize, 1..200_usize],
        (scale, softcap) in (prop_oneof![Just(0.0_f32), 0.3_f32..1.5], prop_oneof![4 => Just(0.0_f32), 1 => 5.0_f32..60.0]),
        seed in any::<u64>(),
    ) -> Setting {
        let mut numbers = Numbers(seed);
        let room = longest - tokens;
        let past: Vec<usize> = (0..batch).map(|_| match numbers.below(4) {
            0 => 0,
            1 => numbers.below(room.min(70) + 1),
            _ => numbers.below(room + 1),
        }).collect();
        let ahead = past.iter().map(|past| if is_causal { 0 } else { numbers.below((room - past).min(9) + 1) }).collect::<Vec<_>>();
        let needed = past.iter().zip(&ahead).map(|(past, ahead)| past + tokens + ahead).max().unwrap_or(0);
        Setting {
            attributes: Attributes {
                num_heads: kv_num_heads * group_size,
                kv_num_heads,
                is_causal,
                window,
                rotary_layout: if interleaved { RotaryLayout::Interleaved } else { RotaryLayout::HalfSplit },
                // Around the usual one: much larger scores magnify the rounding of any order of operations.
                scale: scale / (head_dim as f32).sqrt(),
                norm_epsilon: 1e-6,
                softcap,
            },
            batch,
            tokens,
            capacity: needed + numbers.below(40),
            past,
            ahead,
            head_dim,
            rotary_dim: head_dim * rotary / 4 / 2 * 2,
            q_norm,
            k_norm,
            seed,
        }
    }
}

/// The tensors of one call.
#[derive(Clone, Debug)]
pub struct Tensors<T> {
    pub query: Vec<T>,
    pub key: Vec<T>,
    pub value: Vec<T>,
    pub key_cache: Vec<T>,
    pub value_cache: Vec<T>,
    pub position_ids: Vec<i64>,
    pub write_indices: Vec<i64>,
    pub nonpad_kv_seqlen: Vec<i64>,
    pub cos: Vec<f32>,
    pub sin: Vec<f32>,
    pub q_norm: Option<Vec<f32>>,
    pub k_norm: Option<Vec<f32>>,
}

impl Setting {
    /// The sizes as the operator sees them.
    pub fn geometry(&self) -> Geometry {
        Geometry {
            attributes: self.attributes.clone(),
            batch: self.batch,
            tokens: self.tokens,
            capacity: self.capacity,
            head_dim: self.head_dim,
            rotary_dim: self.rotary_dim,
            positions: self.capacity,
            scale: if self.attributes.scale == 0.0 {
                1.0 / (self.head_dim as f32).sqrt()
            } else {
                self.attributes.scale
            },
        }
    }

    /// Random tensors. Rows that no query may read hold NaN.
    pub fn tensors<T: Element>(&self) -> Tensors<T> {
        let geometry = self.geometry();
        let mut numbers = Numbers(self.seed ^ 1);
        let (tokens, cache_rows) = (self.batch * self.tokens, self.batch * self.capacity);
        let norm = |present: bool, numbers: &mut Numbers| {
            present.then(|| numbers.elements(self.head_dim, 1.5))
        };
        let [cos, sin] = rotary_tables(self.capacity, self.rotary_dim / 2, 10_000.0);
        let mut tensors = Tensors {
            query: numbers.elements(tokens * geometry.query_width(), 3.0),
            key: numbers.elements(tokens * geometry.kv_width(), 3.0),
            value: numbers.elements(tokens * geometry.kv_width(), 1.0),
            key_cache: numbers.elements(cache_rows * geometry.kv_width(), 3.0),
            value_cache: numbers.elements(cache_rows * geometry.kv_width(), 1.0),
            position_ids: self
                .past
                .iter()
                .flat_map(|&past| (past..past + self.tokens).map(|position| position as i64))
                .collect(),
            write_indices: self.past.iter().map(|&past| past as i64).collect(),
            nonpad_kv_seqlen: self
                .past
                .iter()
                .zip(&self.ahead)
                .map(|(past, ahead)| (past + self.tokens + ahead) as i64)
                .collect(),
            cos,
            sin,
            q_norm: norm(self.q_norm, &mut numbers),
            k_norm: norm(self.k_norm, &mut numbers),
        };
        let mut nan = vec![T::default(); geometry.kv_width()];
        T::narrow(&vec![f32::NAN; geometry.kv_width()], &mut nan);
        for batch in 0..self.batch {
            let seen = (0..self.tokens)
                .map(|token| self.seen(batch, token))
                .collect::<Vec<_>>();
            for row in (0..self.capacity).filter(|row| !seen.iter().any(|seen| seen.contains(row)))
            {
                let elements = (batch * self.capacity + row) * nan.len()
                    ..(batch * self.capacity + row + 1) * nan.len();
                tensors.key_cache[elements.clone()].copy_from_slice(&nan);
                tensors.value_cache[elements].copy_from_slice(&nan);
            }
        }
        tensors
    }

    /// The cache rows a query sees, by the definition.
    fn seen(&self, batch: usize, token: usize) -> std::ops::Range<usize> {
        let nonpad = (self.past[batch] + self.tokens + self.ahead[batch]) as i64;
        let place = token as i64 + nonpad - self.tokens as i64;
        let window = self.attributes.window as i64;
        let seen: Vec<usize> = (0..nonpad)
            .filter(|&key| !self.attributes.is_causal || key <= place)
            .filter(|&key| window == 0 || (place - key).abs() < window)
            .map(|key| key as usize)
            .collect();
        seen.first()
            .map_or(0..0, |&first| first..first + seen.len())
    }

    /// The output by the definition, in `f64`; new keys are rounded to `T` as the cache stores them.
    pub fn reference<T: Element>(&self, tensors: &Tensors<T>) -> Vec<f64> {
        let geometry = self.geometry();
        let (kv_width, head_dim) = (geometry.kv_width(), self.head_dim);
        let mut output = Vec::new();
        for batch in 0..self.batch {
            let prepare = |elements: &[T], token: usize, norm: &Option<Vec<f32>>| {
                let half = self.rotary_dim / 2;
                let position = tensors.position_ids[batch * self.tokens + token] as usize;
                let angles = position * half..(position + 1) * half;
                prepared_head(
                    &self.attributes,
                    elements,
                    norm.as_deref(),
                    &tensors.cos[angles.clone()],
                    &tensors.sin[angles],
                )
            };
            let row = |new: &[T], cache: &[T], kv_head: usize, key: usize, is_key: bool| {
                let new_token = key
                    .checked_sub(self.past[batch])
                    .filter(|&token| token < self.tokens);
                match new_token {
                    Some(token) => {
                        let elements = &new
                            [(batch * self.tokens + token) * kv_width + kv_head * head_dim..]
                            [..head_dim];
                        if is_key {
                            rounded::<T>(prepare(elements, token, &tensors.k_norm))
                        } else {
                            exact(elements)
                        }
                    }
                    None => exact(
                        &cache[(batch * self.capacity + key) * kv_width + kv_head * head_dim..]
                            [..head_dim],
                    ),
                }
            };
            let cache_of = |new: &[T], cache: &[T], is_key: bool| -> Vec<Vec<Vec<f64>>> {
                let valid = tensors.nonpad_kv_seqlen[batch] as usize;
                (0..geometry.kv_num_heads())
                    .map(|kv_head| {
                        (0..valid)
                            .map(|key| row(new, cache, kv_head, key, is_key))
                            .collect()
                    })
                    .collect()
            };
            let keys = cache_of(&tensors.key, &tensors.key_cache, true);
            let values = cache_of(&tensors.value, &tensors.value_cache, false);
            for token in 0..self.tokens {
                for head in 0..geometry.num_heads() {
                    let elements = &tensors.query[(batch * self.tokens + token)
                        * geometry.query_width()
                        + head * head_dim..][..head_dim];
                    let query = prepare(elements, token, &tensors.q_norm);
                    let kv_head = head / geometry.group_size();
                    let seen = self.seen(batch, token);
                    output.extend(attended(
                        &query,
                        &keys[kv_head][seen.clone()],
                        &values[kv_head][seen],
                        geometry.scale,
                        self.attributes.softcap,
                    ));
                }
            }
        }
        output
    }
}

/// A head after norm and rotation, in `f64`.
pub fn prepared_head<T: Element>(
    attributes: &Attributes,
    elements: &[T],
    norm: Option<&[f32]>,
    cos: &[f32],
    sin: &[f32],
) -> Vec<f64> {
    let mut head = exact(elements);
    if let Some(weight) = norm {
        let square = head.iter().map(|element| element * element).sum::<f64>() / head.len() as f64;
        for (element, &weight) in head.iter_mut().zip(weight) {
            *element *= f64::from(weight) / (square + f64::from(attributes.norm_epsilon)).sqrt();
        }
    }
    let half = cos.len();
    for i in 0..half {
        let (a, b) = match attributes.rotary_layout {
            RotaryLayout::HalfSplit => (i, i + half),
            RotaryLayout::Interleaved => (2 * i, 2 * i + 1),
        };
        let (cos, sin) = (f64::from(cos[i]), f64::from(sin[i]));
        (head[a], head[b]) = (head[a] * cos - head[b] * sin, head[b] * cos + head[a] * sin);
    }
    head
}

/// The elements in `f64`.
pub fn exact<T: Element>(elements: &[T]) -> Vec<f64> {
    widened(elements).into_iter().map(f64::from).collect()
}

/// The numbers as `T` stores them.
pub fn rounded<T: Element>(numbers: Vec<f64>) -> Vec<f64> {
    let narrow: Vec<f32> = numbers.iter().map(|&number| number as f32).collect();
    let mut rounded = vec![T::default(); numbers.len()];
    T::narrow(&narrow, &mut rounded);
    exact(&rounded)
}

/// Attention of one query over the keys it sees, in `f64`; zeros where there are none.
pub fn attended(
    query: &[f64],
    keys: &[Vec<f64>],
    values: &[Vec<f64>],
    scale: f32,
    softcap: f32,
) -> Vec<f64> {
    let softcap = f64::from(softcap);
    let scores: Vec<f64> = keys
        .iter()
        .map(|key| {
            let score = query.iter().zip(key).map(|(q, k)| q * k).sum::<f64>() * f64::from(scale);
            if softcap > 0.0 {
                softcap * (score / softcap).tanh()
            } else {
                score
            }
        })
        .collect();
    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let mut output = vec![0.0; query.len()];
    for (value, weight) in values.iter().zip(&weights) {
        for (output, value) in output.iter_mut().zip(value) {
            *output += weight * value / sum;
        }
    }
    output
}

/// Cosines and sines, `[positions, half]`.
pub fn rotary_tables(positions: usize, half: usize, base: f64) -> [Vec<f32>; 2] {
    let angles: Vec<f64> = (0..positions * half)
        .map(|i| (i / half) as f64 * base.powf(-((i % half) as f64) / half as f64))
        .collect();
    [
        angles.iter().map(|angle| angle.cos() as f32).collect(),
        angles.iter().map(|angle| angle.sin() as f32).collect(),
    ]
}

/// All tasks on this thread, the last one first: an order no thread pool would use.
pub struct Backwards;

impl Pool for Backwards {
    fn for_each(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) -> Result<(), OperatorError> {
        (0..tasks).rev().for_each(task);
        Ok(())
    }
}

/// Every task on a thread of its own.
pub struct Threads;

impl Pool for Threads {
    fn for_each(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) -> Result<(), OperatorError> {
        std::thread::scope(|scope| {
            for index in 0..tasks {
                scope.spawn(move || task(index));
            }
        });
        Ok(())
    }
}

impl<T: Element> Tensors<T> {
    /// The inputs but for the caches.
    pub fn inputs(&self) -> Inputs<'_, T> {
        Inputs {
            query: &self.query,
            key: &self.key,
            value: &self.value,
            position_ids: &self.position_ids,
            write_indices: &self.write_indices,
            nonpad_kv_seqlen: &self.nonpad_kv_seqlen,
            cos: &self.cos,
            sin: &self.sin,
            q_norm: self.q_norm.as_deref(),
            k_norm: self.k_norm.as_deref(),
        }
    }
}

/// The attributes as a node of an attention operator has them.
pub fn attention_attributes(attributes: &Attributes) -> Vec<(&'static str, Attribute)> {
    vec![
        ("num_heads", Attribute::Int(attributes.num_heads as i64)),
        (
            "kv_num_heads",
            Attribute::Int(attributes.kv_num_heads as i64),
        ),
        ("is_causal", Attribute::Int(i64::from(attributes.is_causal))),
        ("window", Attribute::Int(attributes.window as i64)),
        (
            "rotary_interleaved",
            Attribute::Int(i64::from(
                attributes.rotary_layout == RotaryLayout::Interleaved,
            )),
        ),
        ("scale", Attribute::Float(attributes.scale)),
        ("norm_epsilon", Attribute::Float(attributes.norm_epsilon)),
        ("softcap", Attribute::Float(attributes.softcap)),
    ]
}

/// The elements as `f32`.
pub fn widened<T: Element>(elements: &[T]) -> Vec<f32> {
    let mut wide = vec![0.0; elements.len()];
    T::widen(elements, &mut wide);
    wide
}

/// The largest difference, as a share of the largest magnitude.
pub fn relative_error<T: Element>(got: &[T], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let largest = want
        .iter()
        .fold(0.0_f64, |largest, value| largest.max(value.abs()));
    let error = widened(got)
        .iter()
        .zip(want)
        .fold(0.0_f64, |error, (&got, want)| {
            let difference = (f64::from(got) - want).abs();
            // `max` would drop NaN.
            if difference.is_nan() {
                f64::INFINITY
            } else {
                error.max(difference)
            }
        });
    if error == 0.0 { 0.0 } else { error / largest }
}

/// The bits of the elements, for comparisons that know no tolerance.
pub fn bits<T: Element>(elements: &[T]) -> Vec<u32> {
    widened(elements)
        .iter()
        .map(|element| element.to_bits())
        .collect()
}
