//! A drafter for tests: it proposes what a script says and checks on the way that its context is exactly the tokens the sequence has kept.

use super::{DraftBatch, DraftError, Drafter, DrafterShape};
use crate::model::Taps;

/// What a script sees: the tokens before the anchor, the anchor, and the widest proposal that will be looked at.
pub(crate) type Script = Box<dyn FnMut(&[u32], u32, usize) -> Result<Vec<u32>, DraftError> + Send>;

pub(crate) struct FakeDrafter {
    shape: DrafterShape,
    /// Tokens whose taps each slot holds.
    contexts: Vec<Vec<u32>>,
    proposals: Vec<Vec<u32>>,
    script: Script,
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
            contexts: vec![Vec::new(); slots],
            proposals: Vec::new(),
            script: Box::new(script),
        }
    }
}

impl Drafter for FakeDrafter {
    fn shape(&self) -> &DrafterShape {
        &self.shape
    }

    fn draft(&mut self, batch: &DraftBatch, taps: Taps<'_>) -> Result<(), DraftError> {
        assert_eq!(taps.rows, batch.rows.len());
        self.proposals.clear();
        for (index, row) in batch.rows.iter().enumerate() {
            let context = &mut self.contexts[batch.first_slot + index];
            assert!(
                row.context_start <= context.len(),
                "context rows {}..{} were never written",
                context.len(),
                row.context_start
            );
            context.truncate(row.context_start);
            for offset in 0..row.context_rows {
                let &[token, position] = taps.of(index, offset) else {
                    panic!("a tap has two values");
                };
                assert_eq!(position as usize, context.len(), "taps of another position");
                context.push(token as u32);
            }
            assert!(context.len() <= self.shape.context_tokens);
            let mut proposal = Vec::new();
            if let Some(block) = row.block {
                assert!((2..=self.shape.block_size).contains(&block.width));
                assert!(context.len() + block.width <= self.shape.context_tokens);
                proposal = (self.script)(context, block.anchor, block.width - 1)?;
                proposal.truncate(block.width - 1);
            }
            self.proposals.push(proposal);
        }
        Ok(())
    }

    fn proposal(&self, row: usize) -> &[u32] {
        &self.proposals[row]
    }
}
