//! Attention of some query rows over one tile of keys, in `f32`, generic over the instruction set.
//!
//! What a row gets out of a tile depends on the row, its visible keys and their places in the tile, and on nothing else:
//! the dot product of a row and a key has one order of operations whichever other rows and keys share the registers,
//! the softmax sums lanes by place in the tile, and values are added key by key in ascending order.

use std::ops::Range;

use crate::ops::simd::{Kernel, MAX_LANES, Simd, exp_nonpositive};

/// Keys of a tile. Tiles begin at multiples of it, counted from the first row of the cache.
pub const TILE: usize = 64;

/// Rows that share the keys a core has in its registers.
const MAX_BLOCK: usize = 4;

/// Running softmax of some rows: numerators, denominators and the largest score so far.
///
/// A row that has seen no key has `max` of minus infinity and 0 elsewhere.
#[derive(Debug)]
pub struct State<'a> {
    /// Largest score, one per row.
    pub max: &'a mut [f32],
    /// Sum of `exp(score - max)`, one per row.
    pub sum: &'a mut [f32],
    /// Sum of `exp(score - max) · value`, `width` elements per row.
    pub values: &'a mut [f32],
}

impl State<'_> {
    /// Forgets everything.
    pub fn clear(&mut self) {
        self.max.fill(f32::NEG_INFINITY);
        self.sum.fill(0.0);
        self.values.fill(0.0);
    }
}

/// One tile of keys for some query rows; running it adds the tile to `state`.
pub struct Tile<'a> {
    /// Elements of a padded row, a multiple of [`MAX_LANES`].
    pub width: usize,
    /// Scaled, rotated queries: `width` elements per row.
    pub queries: &'a [f32],
    /// The keys each row sees, counted from the first one of the tile; may be empty.
    pub visible: &'a [Range<usize>],
    /// Keys of the tile: one row of `width` elements every `stride` elements.
    pub keys: &'a [f32],
    /// Values of the tile, laid out like `keys`.
    pub values: &'a [f32],
    /// Elements from one key to the next.
    pub stride: usize,
    /// Scores are squashed into ±this; 0 for none.
    pub softcap: f32,
    /// Room for the scores: [`TILE`] elements per row.
    pub scores: &'a mut [f32],
    /// What the rows gathered so far.
    pub state: State<'a>,
}

impl Kernel for Tile<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(mut self) {
        let rows = self.visible.len();
        let last = self.visible.iter().map(|keys| keys.end).max().unwrap_or(0);
        // The pointer arithmetic below relies on these.
        assert!(self.width.is_multiple_of(MAX_LANES) && last <= TILE);
        assert!(self.queries.len() >= rows * self.width && self.scores.len() >= rows * TILE);
        assert!(
            self.state.max.len() >= rows
                && self.state.sum.len() >= rows
                && self.state.values.len() >= rows * self.width
        );
        if last == 0 {
            return;
        }
        let needed = (last - 1) * self.stride + self.width;
        assert!(self.keys.len() >= needed && self.values.len() >= needed);

        let mut row = 0;
        while row < rows {
            let block = (rows - row).min(MAX_BLOCK);
            // SAFETY: the caller vouches for the instruction set, the assertions for every slice.
            unsafe {
                match block {
                    4 => self.block::<S, 4>(row),
                    3 => self.block::<S, 3>(row),
                    2 => self.block::<S, 2>(row),
                    _ => self.block::<S, 1>(row),
                }
            }
            row += block;
        }
    }
}

impl Tile<'_> {
    /// # Safety
    /// Rows `row..row + R` exist and the assertions of [`Tile::run`] hold.
    #[inline(always)]
    unsafe fn block<S: Simd, const R: usize>(&mut self, row: usize) {
        let visible: [Range<usize>; R] = std::array::from_fn(|r| self.visible[row + r].clone());
        let seeing = || visible.iter().filter(|keys| !keys.is_empty());
        let Some(first) = seeing().map(|keys| keys.start).min() else {
            return;
        };
        let last = seeing().map(|keys| keys.end).max().unwrap_or(first);
        // SAFETY: `first..last` is within the tile; the number of keys at a time is what the registers hold.
        unsafe {
            match (S::LANES, R) {
                (16, 1) => self.dots::<S, R, 16>(row, first..last),
                (16, 2) | (4, 1) | (8, 1) => self.dots::<S, R, 8>(row, first..last),
                (8, 3 | 4) => self.dots::<S, R, 2>(row, first..last),
                _ => self.dots::<S, R, 4>(row, first..last),
            }
            for (r, keys) in visible.iter().enumerate() {
                if !keys.is_empty() {
                    self.softmax::<S>(row + r, keys.clone());
                }
            }
            self.accumulate_block::<S, R>(row, &visible);
        }
    }

    /// Writes the scores of `R` rows and `keys` to `scores`; `K` keys at a time.
    ///
    /// # Safety
    /// As for [`Tile::block`]; `keys` is within the tile and not empty; `R · K <= 16`.
    #[inline(always)]
    unsafe fn dots<S: Simd, const R: usize, const K: usize>(
        &mut self,
        row: usize,
        keys: Range<usize>,
    ) {
        let mut key = keys.start;
        while key < keys.end {
            let count = (keys.end - key).min(K);
            // SAFETY: rows and keys are within their slices; keys past the last one repeat it.
            unsafe {
                let key_rows: [*const f32; K] = std::array::from_fn(|k| {
                    self.keys
                        .as_ptr()
                        .add((key + k.min(count - 1)) * self.stride)
                });
                let query_rows: [*const f32; R] =
                    std::array::from_fn(|r| self.queries.as_ptr().add((row + r) * self.width));
                let mut sums = [[S::splat(0.0); K]; R];
                let mut column = 0;
                while column < self.width {
                    let key_parts: [S::V; K] =
                        std::array::from_fn(|k| S::load(key_rows[k].add(column)));
                    for r in 0..R {
                        let query = S::load(query_rows[r].add(column));
                        for k in 0..K {
                            sums[r][k] = S::mul_add(query, key_parts[k], sums[r][k]);
                        }
                    }
                    column += S::LANES;
                }
                let mut vectors = [S::splat(0.0); MAX_LANES];
                for r in 0..R {
                    for k in 0..K {
                        vectors[r * K + k] = sums[r][k];
                    }
                }
                let mut dots = [0.0_f32; MAX_LANES];
                let mut done = 0;
                while done < R * K {
                    S::sums(&vectors[done..done + S::LANES], dots.as_mut_ptr().add(done));
                    done += S::LANES;
                }
                for r in 0..R {
                    let scores = self.scores.as_mut_ptr().add((row + r) * TILE + key);
                    scores.copy_from_nonoverlapping(dots.as_ptr().add(r * K), count);
                }
            }
            key += count;
        }
    }

    /// Turns the scores of one row into weights relative to its new maximum and rescales what it gathered before.
    ///
    /// # Safety
    /// As for [`Tile::block`]; `keys` is within the tile and not empty.
    #[inline(always)]
    unsafe fn softmax<S: Simd>(&mut self, row: usize, keys: Range<usize>) {
        let scores = &mut self.scores[row * TILE..(row + 1) * TILE];
        // Whole vectors around the visible keys; the places of the other ones weigh nothing.
        let whole = keys.start / S::LANES * S::LANES..keys.end.next_multiple_of(S::LANES);
        scores[whole.start..keys.start].fill(f32::NEG_INFINITY);
        scores[keys.end..whole.end].fill(f32::NEG_INFINITY);
        if self.softcap > 0.0 {
            for score in &mut scores[keys] {
                *score = self.softcap * (*score / self.softcap).tanh();
            }
        }
        let scores = &mut scores[whole];
        // SAFETY: chunks have `LANES` elements, and so does `values` at every column.
        unsafe {
            let mut largest = S::splat(f32::NEG_INFINITY);
            for chunk in scores.chunks_exact(S::LANES) {
                largest = S::max(largest, S::load(chunk.as_ptr()));
            }
            let old_max = self.state.max[row];
            let new_max = old_max.max(S::largest(largest));
            let mut sum = S::splat(0.0);
            for chunk in scores.chunks_exact_mut(S::LANES) {
                let weights =
                    exp_nonpositive::<S>(S::sub(S::load(chunk.as_ptr()), S::splat(new_max)));
                S::store(chunk.as_mut_ptr(), weights);
                sum = S::add(sum, weights);
            }
            let mut old_sum = self.state.sum[row];
            if old_max != new_max && old_sum != 0.0 {
                let factor = exp_scalar::<S>(old_max - new_max);
                old_sum *= factor;
                scale::<S>(
                    &mut self.state.values[row * self.width..(row + 1) * self.width],
                    factor,
                );
            }
            self.state.sum[row] = old_sum + S::sum(sum);
            self.state.max[row] = new_max;
        }
    }

    /// Adds the weighted values of `R` rows.
    ///
    /// # Safety
    /// As for [`Tile::block`]; `visible` is within the tile.
    #[inline(always)]
    unsafe fn accumulate_block<S: Simd, const R: usize>(
        &mut self,
        row: usize,
        visible: &[Range<usize>; R],
    ) {
        let shared_start = visible.iter().map(|keys| keys.start).max().unwrap_or(0);
        let shared_end = visible.iter().map(|keys| keys.end).min().unwrap_or(0);
        // SAFETY: all ranges are parts of visible ones.
        unsafe {
            if R == 1 || shared_start >= shared_end {
                for (r, keys) in visible.iter().enumerate() {
                    self.accumulate::<S, 1>(row + r, keys.clone());
                }
                return;
            }
            // Each row adds its keys in ascending order: its own first ones, those all rows see, its own last ones.
            for (r, keys) in visible.iter().enumerate() {
                self.accumulate::<S, 1>(row + r, keys.start..shared_start);
            }
            self.accumulate::<S, R>(row, shared_start..shared_end);
            for (r, keys) in visible.iter().enumerate() {
                self.accumulate::<S, 1>(row + r, shared_end..keys.end);
            }
        }
    }

    /// Adds the weighted values of `keys` to `R` rows, column by column as wide as the registers allow.
    ///
    /// # Safety
    /// As for [`Tile::block`]; `keys` is within the tile.
    #[inline(always)]
    unsafe fn accumulate<S: Simd, const R: usize>(&mut self, row: usize, keys: Range<usize>) {
        if keys.is_empty() {
            return;
        }
        // Sixteen sums fit where there are 32 registers, eight where there are 16.
        let widest = if S::LANES == 8 { 8 } else { 16 } / R.next_power_of_two();
        let mut column = 0;
        while column < self.width {
            let left = (self.width - column) / S::LANES;
            // SAFETY: columns are below `width`.
            unsafe {
                let vectors = if left >= 8 && widest >= 8 {
                    self.accumulate_columns::<S, R, 8>(row, keys.clone(), column);
                    8
                } else if left >= 4 && widest >= 4 {
                    self.accumulate_columns::<S, R, 4>(row, keys.clone(), column);
                    4
                } else if left >= 2 {
                    self.accumulate_columns::<S, R, 2>(row, keys.clone(), column);
                    2
                } else {
                    self.accumulate_columns::<S, R, 1>(row, keys.clone(), column);
                    1
                };
                column += vectors * S::LANES;
            }
        }
    }

    /// # Safety
    /// As for [`Tile::accumulate`]; `column + C · LANES <= width`.
    #[inline(always)]
    unsafe fn accumulate_columns<S: Simd, const R: usize, const C: usize>(
        &mut self,
        row: usize,
        keys: Range<usize>,
        column: usize,
    ) {
        // SAFETY: rows, keys and columns are within their slices.
        unsafe {
            let gathered: [*mut f32; R] = std::array::from_fn(|r| {
                self.state
                    .values
                    .as_mut_ptr()
                    .add((row + r) * self.width + column)
            });
            let weights: [*const f32; R] =
                std::array::from_fn(|r| self.scores.as_ptr().add((row + r) * TILE));
            let mut sums: [[S::V; C]; R] = std::array::from_fn(|r| {
                std::array::from_fn(|c| S::load(gathered[r].add(c * S::LANES)))
            });
            let mut value_row = self.values.as_ptr().add(keys.start * self.stride + column);
            for key in keys {
                let value_parts: [S::V; C] =
                    std::array::from_fn(|c| S::load(value_row.add(c * S::LANES)));
                for r in 0..R {
                    let weight = S::splat(*weights[r].add(key));
                    for c in 0..C {
                        sums[r][c] = S::mul_add(weight, value_parts[c], sums[r][c]);
                    }
                }
                value_row = value_row.wrapping_add(self.stride);
            }
            for r in 0..R {
                for (c, &sum) in sums[r].iter().enumerate() {
                    S::store(gathered[r].add(c * S::LANES), sum);
                }
            }
        }
    }
}

/// Adds what one row gathered from later keys to what it gathered from earlier ones.
///
/// Rows that saw no key change nothing. `values` have the same length, a multiple of [`MAX_LANES`].
pub struct Merge<'a> {
    /// Largest score, sum and values of the earlier keys; updated.
    pub into: (&'a mut f32, &'a mut f32, &'a mut [f32]),
    /// The same of the later keys.
    pub from: (f32, f32, &'a [f32]),
}

impl Kernel for Merge<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let (max, sum, values) = self.into;
        let (from_max, from_sum, from_values) = self.from;
        assert!(values.len() == from_values.len() && values.len().is_multiple_of(S::LANES));
        if from_sum == 0.0 {
            return;
        }
        if *sum == 0.0 {
            (*max, *sum) = (from_max, from_sum);
            values.copy_from_slice(from_values);
            return;
        }
        // SAFETY: the caller vouches for the instruction set; chunks have `LANES` elements.
        unsafe {
            let new_max = max.max(from_max);
            let (factor, from_factor) = (
                exp_scalar::<S>(*max - new_max),
                exp_scalar::<S>(from_max - new_max),
            );
            *sum = *sum * factor + from_sum * from_factor;
            *max = new_max;
            let (factor, from_factor) = (S::splat(factor), S::splat(from_factor));
            for (to, from) in values
                .chunks_exact_mut(S::LANES)
                .zip(from_values.chunks_exact(S::LANES))
            {
                let scaled = S::mul(S::load(to.as_ptr()), factor);
                S::store(
                    to.as_mut_ptr(),
                    S::mul_add(S::load(from.as_ptr()), from_factor, scaled),
                );
            }
        }
    }
}

/// Divides what one row gathered by the sum of its weights, in place; rows that saw no key become 0.
pub struct Finish<'a> {
    /// Sum of the row's weights.
    pub sum: f32,
    /// The weighted values; a multiple of [`MAX_LANES`].
    pub values: &'a mut [f32],
}

impl Kernel for Finish<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        if self.sum == 0.0 {
            self.values.fill(0.0);
            return;
        }
        for chunk in self.values.chunks_exact_mut(S::LANES) {
            // SAFETY: the caller vouches for the instruction set; the chunk has `LANES` elements.
            unsafe {
                S::store(
                    chunk.as_mut_ptr(),
                    S::div(S::load(chunk.as_ptr()), S::splat(self.sum)),
                )
            }
        }
    }
}

/// # Safety
/// As for [`Simd`].
#[inline(always)]
unsafe fn exp_scalar<S: Simd>(x: f32) -> f32 {
    let mut lanes = [0.0; MAX_LANES];
    // SAFETY: the caller vouches for the instruction set; no vector is longer than `lanes`.
    unsafe { S::store(lanes.as_mut_ptr(), exp_nonpositive::<S>(S::splat(x))) }
    lanes[0]
}

/// # Safety
/// As for [`Simd`]; `values` is a multiple of the lanes.
#[inline(always)]
unsafe fn scale<S: Simd>(values: &mut [f32], factor: f32) {
    // SAFETY: the caller vouches for the instruction set; chunks have `LANES` elements.
    unsafe {
        for chunk in values.chunks_exact_mut(S::LANES) {
            S::store(
                chunk.as_mut_ptr(),
                S::mul(S::load(chunk.as_ptr()), S::splat(factor)),
            );
        }
    }
}
