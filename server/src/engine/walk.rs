//! The acceptance rule: which tokens the logits of one pass add to a sequence.
//!
//! The same walk serves prompts, plain steps and drafted blocks, greedy and sampled, so that none of them can differ from the others.

use std::ops::Range;
use std::time::Instant;

use super::request::EngineError;
use super::sampler::{Sampler, logprobs};
use super::sequence::{Progress, Sequence};
use crate::model::{BatchRow, Target};

/// A walk over the rows of logits that one sequence got in a pass, and what it led to.
pub(super) struct Walk<'s> {
    pub target: &'s dyn Target,
    pub sampler: &'s mut Sampler,
    /// Tokens that end a completion.
    pub eos: &'s [u32],
    /// When the pass was over.
    pub now: Instant,
    /// Tokens committed.
    pub committed: usize,
    /// Drafted tokens among them.
    pub accepted: usize,
}

impl Walk<'_> {
    /// Walks token by token.
    ///
    /// Row `i` of `row.tokens` judges position `start + i + 1`. Where the sequence has a token there already (the prompt), it is scored.
    /// Where it has none, the target chooses; if the row after it was fed with another token than the choice, that row and all later ones are void.
    pub(super) fn run(
        &mut self,
        sequence: &mut Sequence,
        index: usize,
        row: &BatchRow,
    ) -> Result<Progress, EngineError> {
        let Range { start: first, end } = row.logits.clone();
        let prompt_tokens = sequence.request().prompt.len();
        // Everything that was fed from the sequence itself is valid whatever the logits say.
        sequence.set_cached(row.start + row.tokens.len().min(sequence.pending().len()));
        for fed in first..end {
            let logits = self.target.logits(index, fed - first);
            let position = row.start + fed + 1;
            if let Some(id) = sequence.token_at(position) {
                if let Some(top) = sequence.request().prompt_logprobs {
                    let scored =
                        logprobs(logits, id, top).map_err(|_| EngineError::NonFiniteLogits)?;
                    sequence.record_prompt_logprobs(scored);
                }
                continue;
            }
            if position == prompt_tokens && sequence.prompt_done() == Progress::Finished {
                return Ok(Progress::Finished);
            }
            let id = self
                .sampler
                .choose(logits, sequence.context())
                .map_err(|_| EngineError::NonFiniteLogits)?;
            let scored = match sequence.request().logprobs {
                Some(top) => {
                    Some(logprobs(logits, id, top).map_err(|_| EngineError::NonFiniteLogits)?)
                }
                None => None,
            };
            let is_drafted = row.tokens.get(fed + 1) == Some(&id);
            if is_drafted {
                self.accepted += 1;
                sequence.record_accepted();
            }
            self.committed += 1;
            if sequence.commit(id, scored, self.eos, self.now) == Progress::Finished {
                return Ok(Progress::Finished);
            }
            if !is_drafted {
                break;
            }
            sequence.set_cached(position + 1);
        }
        Ok(Progress::Running)
    }
}
