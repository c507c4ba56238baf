//! What happens to new queries, keys and values before the attention: RMS norm, rotary embedding, scale, cache write.

use super::{
    AttentionError, Element, Geometry, Inputs, Pool, RotaryLayout, grow, shared::SharedMut,
    with_worker,
};

/// Elements a task prepares at least; below it the dispatch costs more than the work.
const TASK_ELEMENTS: usize = 1 << 14;

/// Partial sums of the mean square: fixed, so that it does not depend on the processor.
const SUMS: usize = 8;

/// Normalises, rotates and scales the queries into `queries` (`[batch, kv_num_heads, tokens · group_size, padded head_dim]`),
/// normalises and rotates the new keys and writes keys and values into the caches.
pub fn prepare<T: Element>(
    geometry: &Geometry,
    inputs: &Inputs<'_, T>,
    key_cache: &mut [T],
    value_cache: &mut [T],
    queries: &mut [f32],
    pool: &impl Pool,
) -> Result<(), AttentionError> {
    let call = Prepare {
        geometry,
        inputs,
        key_cache: SharedMut::new(key_cache),
        value_cache: SharedMut::new(value_cache),
        queries: SharedMut::new(queries),
    };
    let tokens = geometry.batch * geometry.tokens;
    let tokens_per_task = TASK_ELEMENTS.div_ceil(geometry.query_width() + 2 * geometry.kv_width());
    let tasks = tokens.div_ceil(tokens_per_task);
    let task = |task: usize| {
        let first = task * tokens_per_task;
        with_worker(|worker| {
            (first..(first + tokens_per_task).min(tokens))
                .for_each(|token| call.token(token, &mut worker.keys))
        });
    };
    if tasks == 1 {
        task(0);
        return Ok(());
    }
    pool.for_each(tasks, &task)
}

struct Prepare<'a, T> {
    geometry: &'a Geometry,
    inputs: &'a Inputs<'a, T>,
    key_cache: SharedMut<'a, T>,
    value_cache: SharedMut<'a, T>,
    queries: SharedMut<'a, f32>,
}

impl<T: Element> Prepare<'_, T> {
    /// Prepares one token, counted over the whole batch; `wide` is room for a head.
    fn token(&self, token: usize, wide: &mut Vec<f32>) {
        let (geometry, inputs) = (self.geometry, self.inputs);
        let (batch, index) = (token / geometry.tokens, token % geometry.tokens);
        let (head_dim, width) = (geometry.head_dim, geometry.padded_head_dim());
        let half = geometry.rotary_dim / 2;
        // Without rotary dimensions the tables are empty and positions mean nothing.
        let position = if half == 0 {
            0
        } else {
            inputs.position_ids[token] as usize
        };
        let cos = &inputs.cos[position * half..(position + 1) * half];
        let sin = &inputs.sin[position * half..(position + 1) * half];

        let group_size = geometry.group_size();
        for (head, query) in inputs.query[token * geometry.query_width()..]
            [..geometry.query_width()]
            .chunks_exact(head_dim)
            .enumerate()
        {
            let row = ((batch * geometry.kv_num_heads() + head / group_size) * geometry.tokens
                + index)
                * group_size
                + head % group_size;
            // SAFETY: every query row belongs to one token, and every token to one task.
            let prepared = unsafe { self.queries.slice(row * width..(row + 1) * width) };
            let (prepared, padding) = prepared.split_at_mut(head_dim);
            padding.fill(0.0);
            T::widen(query, prepared);
            self.normalise_and_rotate(prepared, inputs.q_norm, cos, sin);
            prepared
                .iter_mut()
                .for_each(|element| *element *= geometry.scale);
        }

        let cache_row = batch * geometry.capacity + inputs.write_indices[batch] as usize + index;
        let written = cache_row * geometry.kv_width()..(cache_row + 1) * geometry.kv_width();
        // SAFETY: every cache row is written for one token: rows of a sequence are consecutive and those of sequences are apart.
        let (key_row, value_row) = unsafe {
            (
                self.key_cache.slice(written.clone()),
                self.value_cache.slice(written),
            )
        };
        value_row
            .copy_from_slice(&inputs.value[token * geometry.kv_width()..][..geometry.kv_width()]);
        grow(wide, head_dim);
        let wide = &mut wide[..head_dim];
        let keys =
            inputs.key[token * geometry.kv_width()..][..geometry.kv_width()].chunks_exact(head_dim);
        for (key, written) in keys.zip(key_row.chunks_exact_mut(head_dim)) {
            T::widen(key, wide);
            self.normalise_and_rotate(wide, inputs.k_norm, cos, sin);
            T::narrow(wide, written);
        }
    }

    fn normalise_and_rotate(
        &self,
        head: &mut [f32],
        norm: Option<&[f32]>,
        cos: &[f32],
        sin: &[f32],
    ) {
        if let Some(weight) = norm {
            rms_norm(head, weight, self.geometry.attributes.norm_epsilon);
        }
        match self.geometry.attributes.rotary_layout {
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
