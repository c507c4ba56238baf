//! How one call is cut into tasks. Nothing here changes a result; see the exactness rule of the parent module.

use std::ops::Range;

use super::{Geometry, call::Sequence, tile::TILE};
use crate::ops::{error::OperatorError, pool::Pool};

/// Keys of a split. Splits begin at multiples of it, counted from the first row of the cache; a row's softmax starts anew in each.
pub const SPLIT: usize = 4 * TILE;

/// Query rows of a task: enough to use every key several times, few enough to spread over the cores.
const TASK_ROWS: usize = 16;

/// Tasks per core that keep all cores busy to the end.
const TASKS_PER_CORE: usize = 2;

/// Partial results of splits are kept below this many bytes; beyond it, tasks take all splits of their rows.
const PARTIAL_BYTES: usize = 16 << 20;

/// Multiplications below which waking other threads costs more than they save.
const SERIAL_WORK: usize = 1 << 15;

/// Some query rows of some kv heads of one sequence, and the splits of keys to look at.
#[derive(Clone, Debug)]
pub struct Task {
    /// The sequence.
    pub batch: usize,
    /// The key/value heads.
    pub kv_heads: Range<usize>,
    /// Which group of rows, counted over the whole call.
    pub group: usize,
    /// Rows of this sequence and each of these heads: `token · group_size + head within the group`.
    pub rows: Range<usize>,
    /// Splits to look at, in this order.
    pub splits: Range<usize>,
}

/// The cut of one call.
#[derive(Debug)]
pub struct Plan<'a> {
    sequences: &'a [Sequence],
    kv_heads: usize,
    heads_per_task: usize,
    /// Rows of one sequence and kv head.
    rows: usize,
    rows_per_group: usize,
    groups_per_head: usize,
    groups: usize,
    /// Splits of the longest sequence.
    splits: usize,
    splits_are_tasks: bool,
    serial: bool,
}

impl<'a> Plan<'a> {
    /// Cuts a call with these sequences for so many cores.
    pub fn new(geometry: &Geometry, sequences: &'a [Sequence], cores: usize) -> Self {
        let rows = geometry.tokens * geometry.group_size();
        // Equal groups, in whole blocks of four rows.
        let rows_per_group = rows
            .div_ceil(rows.div_ceil(TASK_ROWS))
            .next_multiple_of(4)
            .min(rows);
        let groups_per_head = rows.div_ceil(rows_per_group);
        let splits = sequences
            .iter()
            .map(|sequence| splits_of(sequence.keys))
            .max()
            .unwrap_or(0)
            .max(1);
        let keys: usize = sequences.iter().map(|sequence| sequence.keys).sum();
        let serial = keys * rows * geometry.kv_width() <= SERIAL_WORK;

        let kv_heads = geometry.kv_num_heads();
        let enough_tasks = TASKS_PER_CORE * cores;
        let partial_bytes = geometry.batch
            * kv_heads
            * rows
            * splits
            * (geometry.padded_head_dim() + 2)
            * size_of::<f32>();
        let few_rows = groups_per_head == 1;
        let few_groups = geometry.batch * kv_heads * groups_per_head < enough_tasks;
        let splits_are_tasks =
            splits > 1 && !serial && (few_rows || few_groups) && partial_bytes <= PARTIAL_BYTES;

        // With few rows, memory is what takes the time, and it is fastest when whole cache rows are read in order:
        // a task takes as many heads as leaves tasks enough.
        let tasks_per_head = geometry.batch * if splits_are_tasks { splits } else { 1 };
        let leaves_enough = |heads: &usize| {
            kv_heads.is_multiple_of(*heads) && tasks_per_head * kv_heads / heads >= enough_tasks
        };
        let heads_per_task = (1..=kv_heads)
            .rev()
            .find(leaves_enough)
            .filter(|_| few_rows)
            .unwrap_or(1);
        Self {
            sequences,
            kv_heads,
            heads_per_task,
            rows,
            rows_per_group,
            groups_per_head,
            groups: geometry.batch * kv_heads / heads_per_task * groups_per_head,
            splits,
            splits_are_tasks,
            serial,
        }
    }

    /// Whether each split of a group of rows is a task of its own, merged afterwards.
    pub fn splits_are_tasks(&self) -> bool {
        self.splits_are_tasks
    }

    /// Splits of the longest sequence.
    pub fn splits(&self) -> usize {
        self.splits
    }

    /// Splits of one sequence.
    pub fn splits_of(&self, batch: usize) -> usize {
        splits_of(self.sequences[batch].keys)
    }

    /// Groups of rows in the call.
    pub fn groups(&self) -> usize {
        self.groups
    }

    /// Tasks of the call.
    pub fn tasks(&self) -> usize {
        if self.splits_are_tasks {
            self.groups * self.splits
        } else {
            self.groups
        }
    }

    /// One task, by its number.
    pub fn task(&self, number: usize) -> Task {
        let (group, split) = if self.splits_are_tasks {
            (number / self.splits, number % self.splits)
        } else {
            (number, 0)
        };
        let (heads, group_of_head) = (group / self.groups_per_head, group % self.groups_per_head);
        let first_head = heads * self.heads_per_task;
        let (batch, kv_head) = (first_head / self.kv_heads, first_head % self.kv_heads);
        let first = group_of_head * self.rows_per_group;
        let splits = if self.splits_are_tasks {
            split..split + 1
        } else {
            0..self.splits_of(batch)
        };
        Task {
            batch,
            kv_heads: kv_head..kv_head + self.heads_per_task,
            group,
            rows: first..(first + self.rows_per_group).min(self.rows),
            splits,
        }
    }

    /// Most rows of a task, those of all its heads.
    fn rows_per_task(&self) -> usize {
        self.heads_per_task * self.rows_per_group
    }

    /// Elements of scratch memory that partial results take, for padded heads of `width` elements.
    pub fn partial_elements(&self, width: usize) -> usize {
        if self.splits_are_tasks {
            self.groups * self.splits * self.rows_per_task() * (width + 2)
        } else {
            0
        }
    }

    /// Where the values, the largest score and the sum of one row of one split of one group are; rows are counted over the heads of a task.
    pub fn partial(&self, group: usize, split: usize, row: usize, width: usize) -> Range<usize> {
        let start = ((group * self.splits + split) * self.rows_per_task() + row) * (width + 2);
        start..start + width + 2
    }

    /// Runs tasks on the pool, or here when there is little to do.
    pub fn run(
        &self,
        tasks: usize,
        pool: &impl Pool,
        task: &(dyn Fn(usize) + Sync),
    ) -> Result<(), OperatorError> {
        if self.serial || tasks == 1 {
            (0..tasks).for_each(task);
            return Ok(());
        }
        pool.for_each(tasks, task)
    }
}

fn splits_of(keys: usize) -> usize {
    keys.div_ceil(SPLIT)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;
    use crate::ops::testing::settings;

    proptest! {
        #[test]
        fn every_row_of_every_head_belongs_to_one_task_per_split(setting in settings(1500), cores in prop_oneof![1..5_usize, Just(64)]) {
            let geometry = setting.geometry();
            let tensors = setting.tensors::<f32>();
            let sequences = tensors.inputs().call(&geometry).expect("a call").sequences;
            let plan = Plan::new(&geometry, &sequences, cores);
            let width = geometry.padded_head_dim();
            let (mut seen, mut partials) = (HashSet::new(), HashSet::new());
            for number in 0..plan.tasks() {
                let task = plan.task(number);
                let mut index = 0;
                for kv_head in task.kv_heads {
                    for row in task.rows.clone() {
                        for split in task.splits.clone() {
                            prop_assert!(seen.insert((task.batch, kv_head, row, split)), "a row is in two tasks");
                        }
                        if plan.splits_are_tasks() {
                            let partial = plan.partial(task.group, task.splits.start, index, width);
                            prop_assert!(partial.end <= plan.partial_elements(width));
                            prop_assert_eq!(partial.start % (width + 2), 0);
                            prop_assert!(partials.insert(partial.start), "two rows have one place");
                        }
                        index += 1;
                    }
                }
            }
            for (batch, sequence) in sequences.iter().enumerate() {
                for kv_head in 0..geometry.kv_num_heads() {
                    for row in 0..setting.tokens * geometry.group_size() {
                        for split in 0..splits_of(sequence.keys) {
                            prop_assert!(seen.contains(&(batch, kv_head, row, split)), "a row is in no task");
                        }
                    }
                }
            }
        }
    }
}
