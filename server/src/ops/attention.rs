//! Rotary embedding, cache write and attention over a static KV cache, as pure functions over slices; no ONNX Runtime.
//!
//! **Exactness.** What a query row gets depends on that row, the keys it sees and their places in the cache, and on nothing else.
//! Keys are taken in tiles and splits that begin at fixed multiples counted from the first row of the cache, each in a fixed order,
//! so the bits of a row are the same for any number of new tokens, any padding, any batch, any cache capacity, any number of threads and any neighbours.
//! How the work is cut into tasks ([`Plan`]) is free: it never changes the order of operations within a row.
//!
//! **Reads.** Only keys and values that some row of the call sees are read; stale rows behind them may hold anything, NaN included.
//!
//! **Two operators.** [`cached`] and [`block`] check their inputs and say what a [`Call`] writes and what its queries see; the rest is the same for both.
//!
//! The 16-bit element types are widened to `f32` tile by tile; all arithmetic is `f32`.

pub mod block;
pub mod cached;
mod call;
mod geometry;
mod plan;
mod prepare;
mod state;
#[cfg(test)]
mod tests;
mod tile;

use std::{cell::Cell, ops::Range, sync::OnceLock};

pub use self::{
    call::Call,
    geometry::{Attributes, Geometry, RotaryLayout},
};
use self::{
    call::Sequence,
    plan::{Plan, SPLIT, Task},
    state::{Finish, Merge, State},
    tile::{TILE, Tile},
};
use super::{
    element::Element,
    error::OperatorError,
    pool::Pool,
    shared::SharedMut,
    simd::{InstructionSet, MAX_LANES},
};

/// Memory that calls reuse; it grows to the largest call and never shrinks.
#[derive(Debug, Default)]
pub struct Scratch {
    queries: Vec<f32>,
    partials: Vec<f32>,
}

impl<T: Element> Call<'_, T> {
    /// Writes the new keys and values into the caches and the attention of every query to `output`.
    ///
    /// `output` is `[batch, tokens, num_heads · head_dim]`, the caches are `[batch, capacity, kv_num_heads · head_dim]`.
    /// A query that stands at cache row `p` of a sequence with `n` valid rows, the new ones included, sees cache row `j` exactly when
    /// `j < n`, `j <= p` if the attention is causal, and `|p - j| < window` if there is a window.
    /// A query that sees no row, or is padding, gives zeros.
    pub fn attend(
        &self,
        key_cache: &mut [T],
        value_cache: &mut [T],
        output: &mut [T],
        scratch: &mut Scratch,
        pool: &impl Pool,
    ) -> Result<(), OperatorError> {
        self.attend_on(
            Machine::this(),
            key_cache,
            value_cache,
            output,
            scratch,
            pool,
        )
    }

    /// One step below the public function, for tests of other machines.
    fn attend_on(
        &self,
        machine: Machine,
        key_cache: &mut [T],
        value_cache: &mut [T],
        output: &mut [T],
        scratch: &mut Scratch,
        pool: &impl Pool,
    ) -> Result<(), OperatorError> {
        let geometry = self.geometry;
        let cache_elements = geometry.batch * geometry.capacity * geometry.kv_width();
        assert!(
            key_cache.len() == cache_elements
                && value_cache.len() == cache_elements
                && output.len() == self.query.len()
        );
        let width = geometry.padded_head_dim();
        grow(
            &mut scratch.queries,
            geometry.batch * geometry.tokens * geometry.num_heads() * width,
        );
        prepare::prepare(self, key_cache, value_cache, &mut scratch.queries, pool)?;
        if output.is_empty() {
            return Ok(());
        }

        let plan = Plan::new(geometry, &self.sequences, machine.cores);
        grow(&mut scratch.partials, plan.partial_elements(width));
        let running = Running {
            instructions: machine.instructions,
            geometry,
            sequences: &self.sequences,
            plan: &plan,
            width,
            queries: &scratch.queries,
            key_cache,
            value_cache,
            output: SharedMut::new(output),
            partials: SharedMut::new(&mut scratch.partials),
        };
        plan.run(plan.tasks(), pool, &|task| {
            with_worker(|worker| running.attend_rows(&plan.task(task), worker))
        })?;
        if plan.splits_are_tasks() {
            plan.run(plan.groups(), pool, &|group| {
                with_worker(|worker| running.merge_group(group, worker))
            })?;
        }
        Ok(())
    }
}

/// What a call may use.
#[derive(Clone, Copy, Debug)]
struct Machine {
    /// Decides the bits of the results.
    instructions: InstructionSet,
    /// Decides how work is cut, and no result.
    cores: usize,
}

impl Machine {
    fn this() -> Self {
        static THIS: OnceLock<Machine> = OnceLock::new();
        *THIS.get_or_init(|| Self {
            instructions: InstructionSet::detect(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
        })
    }
}

/// What all tasks of one call share.
struct Running<'a, T> {
    instructions: InstructionSet,
    geometry: &'a Geometry,
    sequences: &'a [Sequence],
    plan: &'a Plan<'a>,
    /// Elements of a padded head.
    width: usize,
    /// Prepared queries, `[batch, kv_num_heads, tokens · group_size, width]`.
    queries: &'a [f32],
    key_cache: &'a [T],
    value_cache: &'a [T],
    output: SharedMut<'a, T>,
    /// `[group, split, row, width + 2]` where splits are tasks of their own.
    partials: SharedMut<'a, f32>,
}

/// Memory of one worker, reused from task to task.
#[derive(Default)]
struct WorkerScratch {
    visible: Vec<Range<usize>>,
    in_tile: Vec<Range<usize>>,
    scores: Vec<f32>,
    split: Gathered,
    total: Gathered,
    keys: Vec<f32>,
    values: Vec<f32>,
}

/// Backing memory of a [`State`].
#[derive(Default)]
struct Gathered {
    max: Vec<f32>,
    sum: Vec<f32>,
    values: Vec<f32>,
}

impl Gathered {
    fn state(&mut self, rows: usize, width: usize) -> State<'_> {
        grow(&mut self.max, rows);
        grow(&mut self.sum, rows);
        grow(&mut self.values, rows * width);
        State {
            max: &mut self.max[..rows],
            sum: &mut self.sum[..rows],
            values: &mut self.values[..rows * width],
        }
    }
}

/// Calls `work` with this thread's memory.
fn with_worker(work: impl FnOnce(&mut WorkerScratch)) {
    thread_local! {
        static WORKER: Cell<Option<Box<WorkerScratch>>> = const { Cell::new(None) };
    }
    // Taken, not borrowed: a task that starts within another one on this thread then gets its own.
    let mut worker = WORKER.take().unwrap_or_default();
    work(&mut worker);
    WORKER.set(Some(worker));
}

impl<T: Element> Running<'_, T> {
    fn attend_rows(&self, task: &Task, worker: &mut WorkerScratch) {
        let (rows, width) = (task.kv_heads.len() * task.rows.len(), self.width);
        let sequence = &self.sequences[task.batch];
        worker.visible.clear();
        let tokens = task
            .rows
            .clone()
            .map(|row| row / self.geometry.group_size());
        worker
            .visible
            .extend(tokens.map(|token| self.geometry.visible_keys(token, sequence)));
        grow(&mut worker.scores, rows * TILE);

        let mut total = worker.total.state(rows, width);
        total.clear();
        for split in task.splits.clone() {
            let mut state = worker.split.state(rows, width);
            state.clear();
            let keys = split * SPLIT..(split + 1) * SPLIT;
            self.attend_split(
                task,
                keys,
                &worker.visible,
                &mut worker.in_tile,
                &mut worker.scores,
                &mut state,
                [&mut worker.keys, &mut worker.values],
            );
            if self.plan.splits_are_tasks() {
                self.store_partial(task, split, &state);
                return;
            }
            for row in 0..rows {
                let values = row * width..(row + 1) * width;
                self.instructions.run(Merge {
                    into: (
                        &mut total.max[row],
                        &mut total.sum[row],
                        &mut total.values[values.clone()],
                    ),
                    from: (state.max[row], state.sum[row], &state.values[values]),
                });
            }
        }
        self.finish(task, &mut total);
    }

    /// Gathers what the rows of `task` see among `keys`.
    #[expect(
        clippy::too_many_arguments,
        reason = "the parts of the worker's memory are borrowed one by one"
    )]
    fn attend_split(
        &self,
        task: &Task,
        keys: Range<usize>,
        visible: &[Range<usize>],
        in_tile: &mut Vec<Range<usize>>,
        scores: &mut [f32],
        state: &mut State<'_>,
        [wide_keys, wide_values]: [&mut Vec<f32>; 2],
    ) {
        let seeing = || visible.iter().filter(|keys| !keys.is_empty());
        let first = seeing()
            .map(|seen| seen.start)
            .min()
            .unwrap_or(usize::MAX)
            .max(keys.start);
        let last = seeing()
            .map(|seen| seen.end)
            .max()
            .unwrap_or(0)
            .min(keys.end);
        let mut tile = first / TILE * TILE;
        while tile < last {
            in_tile.clear();
            in_tile.extend(visible.iter().map(|seen| clip(seen, tile)));
            let seeing = || in_tile.iter().filter(|keys| !keys.is_empty());
            let used = seeing().map(|keys| keys.start).min().unwrap_or(0)
                ..seeing().map(|keys| keys.end).max().unwrap_or(0);
            if !used.is_empty() {
                let (keys, values) = (
                    self.tile_rows(self.key_cache, task, tile, used.end),
                    self.tile_rows(self.value_cache, task, tile, used.end),
                );
                let (keys, values, stride) = match (T::as_f32(keys), T::as_f32(values)) {
                    (Some(keys), Some(values)) if self.geometry.head_dim == self.width => {
                        (keys, values, self.geometry.kv_width())
                    }
                    _ => {
                        self.widen(keys, task, &used, wide_keys);
                        self.widen(values, task, &used, wide_values);
                        (
                            &wide_keys[..],
                            &wide_values[..],
                            task.kv_heads.len() * self.width,
                        )
                    }
                };
                let rows_of_head = self.geometry.tokens * self.geometry.group_size();
                let first_row = (task.batch * self.geometry.kv_num_heads() + task.kv_heads.start)
                    * rows_of_head
                    + task.rows.start;
                self.instructions.run(Tile {
                    heads: task.kv_heads.len(),
                    width: self.width,
                    queries: &self.queries[first_row * self.width..],
                    query_stride: rows_of_head * self.width,
                    visible: in_tile,
                    keys,
                    values,
                    stride,
                    softcap: self.geometry.attributes.softcap,
                    scores,
                    state: State {
                        max: state.max,
                        sum: state.sum,
                        values: state.values,
                    },
                });
            }
            tile += TILE;
        }
    }

    /// The heads of `task` in the first `count` rows of a tile: from the first element of the first row to the last of the last one.
    fn tile_rows<'c>(&self, cache: &'c [T], task: &Task, tile: usize, count: usize) -> &'c [T] {
        let (head_dim, stride) = (self.geometry.head_dim, self.geometry.kv_width());
        let first =
            (task.batch * self.geometry.capacity + tile) * stride + task.kv_heads.start * head_dim;
        &cache[first..first + (count - 1) * stride + task.kv_heads.len() * head_dim]
    }

    /// Copies rows `used` of a tile as `f32`, each head padded with zeros.
    fn widen(&self, rows: &[T], task: &Task, used: &Range<usize>, wide: &mut Vec<f32>) {
        let (head_dim, heads) = (self.geometry.head_dim, task.kv_heads.len());
        grow(wide, TILE * heads * self.width);
        for row in used.clone() {
            let from = &rows[row * self.geometry.kv_width()..][..heads * head_dim];
            let to = &mut wide[row * heads * self.width..][..heads * self.width];
            if head_dim == self.width {
                T::widen(from, to);
                continue;
            }
            for (from, to) in from
                .chunks_exact(head_dim)
                .zip(to.chunks_exact_mut(self.width))
            {
                let (to, padding) = to.split_at_mut(head_dim);
                T::widen(from, to);
                padding.fill(0.0);
            }
        }
    }

    fn store_partial(&self, task: &Task, split: usize, state: &State<'_>) {
        for row in 0..state.max.len() {
            let range = self.plan.partial(task.group, split, row, self.width);
            // SAFETY: no other task has this group and split.
            let partial = unsafe { self.partials.slice(range) };
            partial[..self.width]
                .copy_from_slice(&state.values[row * self.width..(row + 1) * self.width]);
            partial[self.width..].copy_from_slice(&[state.max[row], state.sum[row]]);
        }
    }

    /// Merges the splits of one group of rows in the order in which a single task would have.
    fn merge_group(&self, group: usize, worker: &mut WorkerScratch) {
        let task = self.plan.task(group * self.plan.splits());
        let width = self.width;
        let rows = task.kv_heads.len() * task.rows.len();
        let mut total = worker.total.state(rows, width);
        total.clear();
        for split in 0..self.plan.splits_of(task.batch) {
            for row in 0..rows {
                // SAFETY: the tasks that wrote the partials have ended, and each group is merged by one task.
                let partial = unsafe {
                    self.partials
                        .slice(self.plan.partial(group, split, row, width))
                };
                self.instructions.run(Merge {
                    into: (
                        &mut total.max[row],
                        &mut total.sum[row],
                        &mut total.values[row * width..(row + 1) * width],
                    ),
                    from: (partial[width], partial[width + 1], &partial[..width]),
                });
            }
        }
        self.finish(&task, &mut total);
    }

    fn finish(&self, task: &Task, total: &mut State<'_>) {
        let (geometry, width) = (self.geometry, self.width);
        let group_size = geometry.group_size();
        let rows = task
            .kv_heads
            .clone()
            .flat_map(|kv_head| task.rows.clone().map(move |row| (kv_head, row)));
        for (index, (kv_head, row)) in rows.enumerate() {
            let values = &mut total.values[index * width..(index + 1) * width];
            self.instructions.run(Finish {
                sum: total.sum[index],
                values,
            });
            let (token, head) = (row / group_size, kv_head * group_size + row % group_size);
            let start = ((task.batch * geometry.tokens + token) * geometry.num_heads() + head)
                * geometry.head_dim;
            // SAFETY: every row of every head of every sequence belongs to exactly one group, and each group is finished by one task.
            let output = unsafe { self.output.slice(start..start + geometry.head_dim) };
            T::narrow(&values[..geometry.head_dim], output);
        }
    }
}

/// `seen` within the tile that begins at `tile`, counted from there.
fn clip(seen: &Range<usize>, tile: usize) -> Range<usize> {
    let start = seen.start.max(tile);
    let end = seen.end.min(tile + TILE);
    if start < end {
        start - tile..end - tile
    } else {
        0..0
    }
}

fn grow(memory: &mut Vec<f32>, elements: usize) {
    if memory.len() < elements {
        memory.resize(elements, 0.0);
    }
}

/// Elements of a head padded to whole vectors of any instruction set.
fn padded(head_dim: usize) -> usize {
    head_dim.next_multiple_of(MAX_LANES)
}
