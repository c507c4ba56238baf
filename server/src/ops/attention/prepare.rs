//! What happens to new queries, keys and values before the attention: RMS norm, rotary embedding, scale, cache write.

use super::{Call, RotaryLayout, call::NewRows, grow, with_worker};
use crate::ops::{element::Element, error::OperatorError, pool::Pool, shared::SharedMut};

/// Elements a task prepares at least; below it the dispatch costs more than the work.
const TASK_ELEMENTS: usize = 1 << 14;

/// Partial sums of the mean square: fixed, so that it does not depend on the processor.
const SUMS: usize = 8;

/// Normalises, rotates and scales the queries into `queries` (`[batch, kv_num_heads, tokens · group_size, padded head_dim]`),
/// normalises and rotates the new keys and writes keys and values into the caches.
pub fn prepare<T: Element>(
    call: &Call<'_, T>,
    key_cache: &mut [T],
    value_cache: &mut [T],
    queries: &mut [f32],
    pool: &impl Pool,
) -> Result<(), OperatorError> {
    let geometry = call.geometry;
    let prepare = Prepare {
        call,
        key_cache: SharedMut::new(key_cache),
        value_cache: SharedMut::new(value_cache),
        queries: SharedMut::new(queries),
    };
    let new_rows = call.new_rows.iter().map(|new| new.rows).sum::<usize>();
    let rows = geometry.batch * (geometry.tokens + new_rows);
    let rows_per_task = TASK_ELEMENTS.div_ceil(geometry.query_width().max(2 * geometry.kv_width()));
    let tasks = rows.div_ceil(rows_per_task);
    let task = |task: usize| {
        let first = task * rows_per_task;
        with_worker(|worker| {
            (first..(first + rows_per_task).min(rows))
                .for_each(|row| prepare.row(row, &mut worker.keys))
        });
    };
    if tasks <= 1 {
        (0..tasks).for_each(task);
        return Ok(());
    }
    pool.for_each(tasks, &task)
}

struct Prepare<'a, T> {
    call: &'a Call<'a, T>,
    key_cache: SharedMut<'a, T>,
    value_cache: SharedMut<'a, T>,
    queries: SharedMut<'a, f32>,
}

impl<T: Element> Prepare<'_, T> {
    /// Prepares one row: those of the queries are counted first, then those of the new keys and values; `wide` is room for a head.
    fn row(&self, row: usize, wide: &mut Vec<f32>) {
        let geometry = self.call.geometry;
        let queries = geometry.batch * geometry.tokens;
        if row < queries {
            return self.query(row);
        }
        let mut row = row - queries;
        for new in &self.call.new_rows {
            let rows = geometry.batch * new.rows;
            if row < rows {
                return self.key_and_value(new, row, wide);
            }
            row -= rows;
        }
    }

    /// Prepares the queries of one token, counted over the whole batch.
    fn query(&self, token: usize) {
        let (call, geometry) = (self.call, self.call.geometry);
        let (batch, index) = (token / geometry.tokens, token % geometry.tokens);
        let (head_dim, width) = (geometry.head_dim, geometry.padded_head_dim());
        let group_size = geometry.group_size();
        let is_padding = index >= call.sequences[batch].queries;
        for (head, query) in call.query[token * geometry.query_width()..][..geometry.query_width()]
            .chunks_exact(head_dim)
            .enumerate()
        {
            let row = ((batch * geometry.kv_num_heads() + head / group_size) * geometry.tokens
                + index)
                * group_size
                + head % group_size;
            // SAFETY: every query row belongs to one token, and every token to one task.
            let prepared = unsafe { self.queries.slice(row * width..(row + 1) * width) };
            if is_padding {
                // Rows are multiplied in blocks: what is left of earlier calls must not be.
                prepared.fill(0.0);
                continue;
            }
            let (prepared, padding) = prepared.split_at_mut(head_dim);
            padding.fill(0.0);
            T::widen(query, prepared);
            self.normalise_and_rotate(prepared, call.q_norm, call.position_ids[token]);
            prepared
                .iter_mut()
                .for_each(|element| *element *= geometry.scale);
        }
    }

    /// Writes one new row, counted over the whole batch, into the caches; padding is left where it is.
    fn key_and_value(&self, new: &NewRows<'_, T>, row: usize, wide: &mut Vec<f32>) {
        let (call, geometry) = (self.call, self.call.geometry);
        let (head_dim, width) = (geometry.head_dim, geometry.kv_width());
        let (batch, index) = (row / new.rows, row % new.rows);
        let Some(cache_row) = new.written[batch].clone().nth(index) else {
            return;
        };
        let cache_row = batch * geometry.capacity + cache_row;
        let written = cache_row * width..(cache_row + 1) * width;
        // SAFETY: every cache row is written for one new row: those of a sequence are apart and within its cache, by the check of the call.
        let (key_row, value_row) = unsafe {
            (
                self.key_cache.slice(written.clone()),
                self.value_cache.slice(written),
            )
        };
        value_row.copy_from_slice(&new.value[row * width..][..width]);
        grow(wide, head_dim);
        let wide = &mut wide[..head_dim];
        let keys = new.key[row * width..][..width].chunks_exact(head_dim);
        for (key, written) in keys.zip(key_row.chunks_exact_mut(head_dim)) {
            T::widen(key, wide);
            self.normalise_and_rotate(wide, call.k_norm, new.position_ids[row]);
            T::narrow(wide, written);
        }
    }

    fn normalise_and_rotate(&self, head: &mut [f32], norm: Option<&[f32]>, position: i64) {
        let (geometry, rotary) = (self.call.geometry, self.call.rotary);
        let half = geometry.rotary_dim / 2;
        // Without rotary dimensions the tables are empty and positions mean nothing.
        let position = if half == 0 { 0 } else { position as usize };
        let cos = &rotary.cos[position * half..(position + 1) * half];
        let sin = &rotary.sin[position * half..(position + 1) * half];
        if let Some(weight) = norm {
            rms_norm(head, weight, geometry.attributes.norm_epsilon);
        }
        match geometry.attributes.rotary_layout {
            RotaryLayout::HalfSplit => {
                let (first, second) = head[..2 * cos.len()].split_at_mut(cos.len());
                for (((a, b), &cos), &sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
                    (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
                }
            }
            RotaryLayout::Interleaved => {
                for ((pair, &cos), &sin) in head.chunks_exact_mut(2).zip(cos).zip(sin) {
                    let (a, b) = (pair[0], pair[1]);
                    (pair[0], pair[1]) = (a * cos - b * sin, b * cos + a * sin);
                }
            }
        }
    }
}

/// `head · weight / sqrt(mean(head²) + epsilon)`, in place.
fn rms_norm(head: &mut [f32], weight: &[f32], epsilon: f32) {
    let mut sums = [0.0_f32; SUMS];
    let chunks = head.chunks_exact(SUMS);
    for (sum, element) in sums.iter_mut().zip(chunks.remainder()) {
        *sum += element * element;
    }
    for chunk in chunks {
        for (sum, element) in sums.iter_mut().zip(chunk) {
            *sum += element * element;
        }
    }
    let square =
        ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
    let factor = 1.0 / (square / head.len() as f32 + epsilon).sqrt();
    for (element, weight) in head.iter_mut().zip(weight) {
        *element = *element * factor * weight;
    }
}
