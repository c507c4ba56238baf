//! A drafter for tests: it proposes what a script says, and takes note when its context is not exactly the tokens the sequence has kept.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use super::{DraftBatch, DraftError, Drafter, DrafterShape};
use crate::model::Taps;

/// What a script sees: the tokens before the anchor, the anchor, and how many tokens are wanted.
type Script = Box<dyn FnMut(&[u32], u32, usize) -> Result<Vec<u32>, DraftError> + Send>;

/// What a [`FakeDrafter`] found wrong. A panic would not do: the engine contains it like any other failure of a drafter.
#[derive(Clone, Debug, Default)]
pub(crate) struct Violations(Arc<Mutex<Vec<String>>>);

impl Violations {
    pub(crate) fn found(&self) -> Vec<String> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn check(&self, holds: bool, what: impl FnOnce() -> String) {
        if !holds {
            self.0
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(what());
        }
    }
}

pub(crate) struct FakeDrafter {
    shape: DrafterShape,
    /// Tokens whose taps each slot holds.
    contexts: Vec<Vec<u32>>,
    proposals: Vec<Vec<u32>>,
    script: Script,
    violations: Violations,
}

impl FakeDrafter {
    pub(crate) fn new(
        slots: usize,
        context_tokens: usize,
        block_size: usize,
        script: impl FnMut(&[u32], u32, usize) -> Result<Vec<u32>, DraftError> + Send + 'static,
    ) -> Self {
        Self {
            shape: DrafterShape {
                slots,
                context_tokens,
                block_size,
                tap_size: 2,
            },
            // Rows of any number of parking slots.
            contexts: vec![Vec::new(); slots + 8],
            proposals: Vec::new(),
            script: Box::new(script),
            violations: Violations::default(),
        }
    }

    pub(crate) fn violations(&self) -> Violations {
        self.violations.clone()
    }
}

impl Drafter for FakeDrafter {
    fn shape(&self) -> &DrafterShape {
        &self.shape
    }

    fn draft(&mut self, batch: &DraftBatch, taps: Taps<'_>) -> Result<(), DraftError> {
        let violations = self.violations.clone();
        let limit = self.shape.context_tokens;
        violations.check(taps.rows == batch.rows.len(), || {
            format!("taps of {} rows for {}", taps.rows, batch.rows.len())
        });
        self.proposals.clear();
        for (index, row) in batch.rows.iter().enumerate() {
            let context = &mut self.contexts[batch.first_slot + index];
            violations.check(row.context_start <= context.len(), || {
                format!(
                    "rows {}..{} were never written",
                    context.len(),
                    row.context_start
                )
            });
            context.resize(row.context_start, u32::MAX);
            for offset in 0..row.context_rows {
                let tap = taps.of(index, offset);
                violations.check(tap[1] as usize == context.len(), || {
                    format!("a tap of position {} at {}", tap[1], context.len())
                });
                violations.check(tap[0].is_finite(), || "the tap of a padding row".to_owned());
                context.push(tap[0] as u32);
            }
            let width = row.block.map_or(0, |block| block.width);
            violations.check(context.len() + width <= limit, || {
                format!("{} + {width} rows of {limit}", context.len())
            });
            let mut proposal = Vec::new();
            if let Some(block) = row.block {
                violations.check((2..=self.shape.block_size).contains(&block.width), || {
                    format!("a block of {}", block.width)
                });
                proposal = (self.script)(context, block.anchor, block.width - 1)?;
                proposal.truncate(block.width - 1);
            }
            self.proposals.push(proposal);
        }
        Ok(())
    }

    fn copy_rows(&mut self, from: usize, to: usize, rows: Range<usize>) {
        let source = &self.contexts[from];
        self.violations.check(rows.end <= source.len(), || {
            format!("rows {rows:?} are copied of {}", source.len())
        });
        let copied = source[rows.start.min(source.len())..rows.end.min(source.len())].to_vec();
        let context = &mut self.contexts[to];
        self.violations.check(rows.start <= context.len(), || {
            format!("rows {rows:?} are copied behind {}", context.len())
        });
        context.truncate(rows.start);
        context.extend(copied);
    }

    fn proposal(&self, row: usize) -> &[u32] {
        &self.proposals[row]
    }
}
