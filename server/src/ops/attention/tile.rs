//! Attention of some query rows over one tile of keys, in `f32`, generic over the instruction set.
//!
//! What a row gets out of a tile depends on the row, its visible keys and their places in the tile, and on nothing else:
//! the dot product of a row and a key has one order of operations whichever other rows and keys share the registers,
//! the softmax sums lanes by place in the tile, and values are added key by key in ascending order.

#![expect(
    clippy::needless_range_loop,
    reason = "rows, keys and columns of a block are counted alike in all arrays of registers"
)]

use std::ops::Range;

use super::state::{State, exp_scalar, scale};
use crate::ops::simd::{Kernel, MAX_LANES, Simd, exp_nonpositive};

/// Keys of a tile. Tiles begin at multiples of it, counted from the first row of the cache.
pub const TILE: usize = 64;

/// Elements of a cache line.
const CACHE_LINE: usize = 16;

/// Keys whose cache rows are read for several heads at a time: few enough to stay near the core until the last head wants its part.
const TOUCHED_KEYS: usize = 16;

/// Rows that share the keys a core has in its registers.
const MAX_BLOCK: usize = 4;

/// One tile of keys for some query rows of some heads; running it adds the tile to `state`.
///
/// Rows of scores and state are counted over the heads: all rows of the first head, all rows of the second, ….
pub struct Tile<'a> {
    /// Key/value heads.
    pub heads: usize,
    /// Elements of a padded head, a multiple of [`MAX_LANES`].
    pub width: usize,
    /// Scaled, rotated queries: `width` elements per row.
    pub queries: &'a [f32],
    /// Elements from the queries of one head to those of the next.
    pub query_stride: usize,
    /// The keys each row sees, counted from the first one of the tile, the same for every head; may be empty.
    pub visible: &'a [Range<usize>],
    /// Keys of the tile: `heads · width` elements every `stride` elements.
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

/// Calls one of the functions of [`Tile`] for each block of up to [`MAX_BLOCK`] rows of each head.
macro_rules! for_each_block {
    ($tile:ident.$function:ident($($argument:expr),*)) => {
        for head in 0..$tile.heads {
            let mut row = 0;
            while row < $tile.visible.len() {
                match $tile.visible.len() - row {
                    1 => $tile.$function::<S, 1>(head, row, $($argument),*),
                    2 => $tile.$function::<S, 2>(head, row, $($argument),*),
                    3 => $tile.$function::<S, 3>(head, row, $($argument),*),
                    _ => $tile.$function::<S, 4>(head, row, $($argument),*),
                }
                row += MAX_BLOCK;
            }
        }
    };
}

impl Kernel for Tile<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(mut self) {
        let Some(used) = union(self.visible) else {
            return;
        };
        let rows = self.heads * self.visible.len();
        let needed = (used.end - 1) * self.stride + self.heads * self.width;
        // The pointer arithmetic below relies on these.
        assert!(self.width.is_multiple_of(MAX_LANES) && used.end <= TILE);
        assert!(
            self.queries.len()
                >= (self.heads - 1) * self.query_stride + self.visible.len() * self.width
        );
        assert!(
            self.keys.len() >= needed
                && self.values.len() >= needed
                && self.scores.len() >= rows * TILE
        );
        assert!(
            self.state.max.len() >= rows
                && self.state.sum.len() >= rows
                && self.state.values.len() >= rows * self.width
        );

        let step = if self.heads == 1 { TILE } else { TOUCHED_KEYS };
        // SAFETY: the caller vouches for the instruction set, the assertions for every slice.
        unsafe {
            for keys in steps(&used, step) {
                self.touch(self.keys, &keys);
                for_each_block!(self.dots(&keys));
            }
            for head in 0..self.heads {
                for row in 0..self.visible.len() {
                    self.softmax::<S>(head, row);
                }
            }
            for keys in steps(&used, step) {
                self.touch(self.values, &keys);
                for_each_block!(self.accumulate(&keys));
            }
        }
    }
}

/// From the first key that any row sees to the last one; `None` when no row sees any.
#[inline(always)]
fn union(visible: &[Range<usize>]) -> Option<Range<usize>> {
    let seeing = || visible.iter().filter(|keys| !keys.is_empty());
    let first = seeing().map(|keys| keys.start).min()?;
    let last = seeing().map(|keys| keys.end).max()?;
    Some(first..last)
}

#[inline(always)]
fn intersection(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    a.start.max(b.start)..a.end.min(b.end)
}

/// `keys` cut at multiples of `step`.
#[inline(always)]
fn steps(keys: &Range<usize>, step: usize) -> impl Iterator<Item = Range<usize>> {
    let keys = keys.clone();
    (keys.start / step..keys.end.div_ceil(step))
        .map(move |index| intersection(&keys, &(index * step..(index + 1) * step)))
}

impl Tile<'_> {
    /// Reads a little of every cache line of some rows, in the order of their addresses, when several heads share them.
    ///
    /// Memory is fastest when it is read in order, and the heads that follow read their parts of one row after the other.
    #[inline(always)]
    fn touch(&self, rows: &[f32], keys: &Range<usize>) {
        if self.heads == 1 {
            return;
        }
        for key in keys.clone() {
            for element in rows[key * self.stride..][..self.heads * self.width]
                .iter()
                .step_by(CACHE_LINE)
            {
                // SAFETY: a reference can be read; volatile, because nothing uses the value.
                unsafe { std::ptr::from_ref(element).read_volatile() };
            }
        }
    }

    /// Index of a row in the scores and the state.
    #[inline(always)]
    fn index(&self, head: usize, row: usize) -> usize {
        head * self.visible.len() + row
    }

    /// Writes the scores of `R` rows and `keys`.
    ///
    /// # Safety
    /// Rows `row..row + R` exist, `keys` is within the tile, and the assertions of [`Tile::run`] hold.
    #[inline(always)]
    unsafe fn dots<S: Simd, const R: usize>(
        &mut self,
        head: usize,
        row: usize,
        keys: &Range<usize>,
    ) {
        let Some(seen) = union(&self.visible[row..row + R]) else {
            return;
        };
        let keys = intersection(&seen, keys);
        // SAFETY: the caller's; the number of keys at a time is what the registers hold.
        unsafe {
            match (S::LANES, R) {
                (16, 1) => self.dots_by::<S, R, 16>(head, row, keys),
                (16, 2) | (4, 1) | (8, 1) => self.dots_by::<S, R, 8>(head, row, keys),
                (8, 3 | 4) => self.dots_by::<S, R, 2>(head, row, keys),
                _ => self.dots_by::<S, R, 4>(head, row, keys),
            }
        }
    }

    /// The same, `K` keys at a time; places before and after `keys`, up to multiples of `K`, get something as well.
    ///
    /// # Safety
    /// As for [`Tile::dots`]; `K` divides [`TILE`] and [`TOUCHED_KEYS`], and `R · K <= 16`.
    #[inline(always)]
    unsafe fn dots_by<S: Simd, const R: usize, const K: usize>(
        &mut self,
        head: usize,
        row: usize,
        keys: Range<usize>,
    ) {
        let queries = self
            .queries
            .as_ptr()
            .wrapping_add(head * self.query_stride + row * self.width);
        let scores = self
            .scores
            .as_mut_ptr()
            .wrapping_add(self.index(head, row) * TILE);
        let first_row = self.keys.as_ptr().wrapping_add(head * self.width);
        let mut key = keys.start / K * K;
        while key < keys.end {
            // Keys outside the range are not read: the nearest one stands in for them.
            let mut key_rows = [first_row; K];
            for (k, key_row) in key_rows.iter_mut().enumerate() {
                *key_row =
                    key_row.wrapping_add((key + k).clamp(keys.start, keys.end - 1) * self.stride);
            }
            // SAFETY: rows and keys are within their slices, and `key + K <= TILE`.
            unsafe {
                if row == 0 {
                    for k in 0..K {
                        self.prefetch_row::<S>(self.values, key + k);
                    }
                }
                let mut sums = [[S::splat(0.0); K]; R];
                let mut column = 0;
                while column < self.width {
                    let mut key_parts = [S::splat(0.0); K];
                    for k in 0..K {
                        key_parts[k] = S::load(key_rows[k].wrapping_add(column));
                    }
                    for r in 0..R {
                        let query = S::load(queries.wrapping_add(r * self.width + column));
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
                    S::sums(
                        &vectors[done..done + S::LANES],
                        dots.as_mut_ptr().wrapping_add(done),
                    );
                    done += S::LANES;
                }
                for r in 0..R {
                    let dots: [f32; K] = std::array::from_fn(|k| dots[r * K + k]);
                    scores
                        .wrapping_add(r * TILE + key)
                        .cast::<[f32; K]>()
                        .write(dots);
                }
            }
            key += K;
        }
    }

    /// Asks for a row of keys or values that is used next, where it will not be touched; the row need not exist.
    ///
    /// # Safety
    /// As for [`Simd`].
    #[inline(always)]
    unsafe fn prefetch_row<S: Simd>(&self, rows: &[f32], row: usize) {
        if self.heads > 1 {
            return;
        }
        let row = rows.as_ptr().wrapping_add(row * self.stride);
        let mut column = 0;
        while column < self.width {
            // SAFETY: any address will do.
            unsafe { S::prefetch(row.wrapping_add(column)) }
            column += CACHE_LINE;
        }
    }

    /// Turns the scores of one row into weights relative to its new maximum and rescales what it gathered before.
    ///
    /// # Safety
    /// As for [`Tile::dots`].
    #[inline(always)]
    unsafe fn softmax<S: Simd>(&mut self, head: usize, row: usize) {
        let keys = self.visible[row].clone();
        if keys.is_empty() {
            return;
        }
        let row = self.index(head, row);
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

    /// Adds the weighted values of those of `keys` that `R` rows see.
    ///
    /// Each row adds its keys in ascending order: first those that not all of the rows see, then those they share, then the rest.
    ///
    /// # Safety
    /// As for [`Tile::dots`].
    #[inline(always)]
    unsafe fn accumulate<S: Simd, const R: usize>(
        &mut self,
        head: usize,
        row: usize,
        keys: &Range<usize>,
    ) {
        let visible: [Range<usize>; R] =
            std::array::from_fn(|r| intersection(&self.visible[row + r], keys));
        let shared_start = visible.iter().map(|keys| keys.start).max().unwrap_or(0);
        let shared_end = visible.iter().map(|keys| keys.end).min().unwrap_or(0);
        // SAFETY: all ranges are parts of visible ones.
        unsafe {
            if shared_start >= shared_end {
                for (r, keys) in visible.iter().enumerate() {
                    self.accumulate_rows::<S, 1>(head, row + r, keys.clone());
                }
                return;
            }
            for (r, keys) in visible.iter().enumerate() {
                self.accumulate_rows::<S, 1>(head, row + r, keys.start..shared_start);
            }
            self.accumulate_rows::<S, R>(head, row, shared_start..shared_end);
            for (r, keys) in visible.iter().enumerate() {
                self.accumulate_rows::<S, 1>(head, row + r, shared_end..keys.end);
            }
        }
    }

    /// Adds the weighted values of `keys` to `R` rows, as many columns at a time as the registers allow.
    ///
    /// # Safety
    /// As for [`Tile::dots`].
    #[inline(always)]
    unsafe fn accumulate_rows<S: Simd, const R: usize>(
        &mut self,
        head: usize,
        row: usize,
        keys: Range<usize>,
    ) {
        if keys.is_empty() {
            return;
        }
        // Sixteen sums fit where there are 32 registers, eight where there are 16.
        let sums = if S::LANES == 8 { 8 } else { 16 };
        let widest = sums / R.next_power_of_two();
        let mut column = 0;
        while column < self.width {
            let left = (self.width - column) / S::LANES;
            // SAFETY: columns are below `width`.
            unsafe {
                let vectors = if left >= 8 && widest >= 8 {
                    self.accumulate_columns::<S, R, 8>(head, row, keys.clone(), column);
                    8
                } else if left >= 4 && widest >= 4 {
                    self.accumulate_columns::<S, R, 4>(head, row, keys.clone(), column);
                    4
                } else if left >= 2 {
                    self.accumulate_columns::<S, R, 2>(head, row, keys.clone(), column);
                    2
                } else {
                    self.accumulate_columns::<S, R, 1>(head, row, keys.clone(), column);
                    1
                };
                column += vectors * S::LANES;
            }
        }
    }

    /// # Safety
    /// As for [`Tile::dots`]; `column + C · LANES <= width`.
    #[inline(always)]
    unsafe fn accumulate_columns<S: Simd, const R: usize, const C: usize>(
        &mut self,
        head: usize,
        row: usize,
        keys: Range<usize>,
        column: usize,
    ) {
        let index = self.index(head, row);
        let gathered = self
            .state
            .values
            .as_mut_ptr()
            .wrapping_add(index * self.width + column);
        let weights = self.scores.as_ptr().wrapping_add(index * TILE);
        let values = self
            .values
            .as_ptr()
            .wrapping_add(head * self.width + column);
        // SAFETY: rows, keys and columns are within their slices.
        unsafe {
            let mut sums = [[S::splat(0.0); C]; R];
            for r in 0..R {
                for c in 0..C {
                    sums[r][c] = S::load(gathered.wrapping_add(r * self.width + c * S::LANES));
                }
            }
            let mut value_row = values.wrapping_add(keys.start * self.stride);
            for key in keys {
                if row == 0 && column == 0 {
                    self.prefetch_row::<S>(self.keys, key + TILE);
                }
                let mut value_parts = [S::splat(0.0); C];
                for c in 0..C {
                    value_parts[c] = S::load(value_row.wrapping_add(c * S::LANES));
                }
                for r in 0..R {
                    let weight = S::splat_at(weights.wrapping_add(r * TILE + key));
                    for c in 0..C {
                        sums[r][c] = S::mul_add(weight, value_parts[c], sums[r][c]);
                    }
                }
                value_row = value_row.wrapping_add(self.stride);
            }
            for r in 0..R {
                for c in 0..C {
                    S::store(
                        gathered.wrapping_add(r * self.width + c * S::LANES),
                        sums[r][c],
                    );
                }
            }
        }
    }
}
