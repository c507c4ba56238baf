//! Rejected blocks, cancelled requests and earlier tenants of a slot leave no trace: after any history the rows of a slot are the bits of a fresh run.

use outrider_server::draft::{Block, DraftBatch, DraftRow, Drafter};
use outrider_server::model::probe::probe;
use outrider_server::model::{Batch, BatchRow, OnnxDraft, OnnxTarget, Target, WidthRule};
use proptest::prelude::*;

use crate::pair::tiny_pair;

const SLOTS: usize = 3;

/// Tokens that a sequence of these tests may have.
const LONGEST: usize = 70;

/// A target and a draft that are driven as the engine drives them, with choices that are made up.
struct Driver {
    target: OnnxTarget,
    draft: OnnxDraft,
    rule: WidthRule,
}

/// One step of one slot.
#[derive(Clone, Debug)]
enum Action {
    /// The slot takes no part.
    Rest,
    /// A new sequence takes the slot, whatever was in it.
    Restart(Vec<u32>),
    /// These tokens are drafted behind the newest one, this many of them are kept, and this token follows.
    Step {
        drafted: Vec<u32>,
        accepted: usize,
        next: u32,
    },
}

/// What a slot holds: all tokens, of which the last has not been fed.
type Tokens = Vec<u32>;

impl Driver {
    fn new() -> Self {
        let (mut target, draft) = tiny_pair(SLOTS);
        let rule = probe(&mut target).expect("the probe runs").rule;
        Self {
            target,
            draft,
            rule,
        }
    }

    /// Feeds `fed[i]` of slot `first + i` from `start` on, keeps `kept` of those rows, and appends their taps.
    fn pass(&mut self, first_slot: usize, rows: &[(usize, &[u32], usize, Option<Block>)]) {
        let width = rows.iter().map(|row| row.1.len()).max().unwrap_or(0);
        let batch = Batch {
            first_slot,
            rows: rows
                .iter()
                .map(|&(start, tokens, ..)| BatchRow {
                    start,
                    tokens: tokens.to_vec(),
                    logits: 0..tokens.len(),
                })
                .collect(),
            width: self.rule.width(width),
            logit_width: self.rule.width(width),
            taps: true,
        };
        self.target.forward(&batch).expect("the pass runs");
        let batch = DraftBatch {
            first_slot,
            rows: rows
                .iter()
                .map(|&(context_start, _, context_rows, block)| DraftRow {
                    context_start,
                    context_rows,
                    block,
                })
                .collect(),
        };
        self.draft
            .draft(&batch, self.target.taps())
            .expect("the draft runs");
    }

    /// Feeds all but the newest token to a slot, in chunks of this size, and proposes a block.
    fn fill(&mut self, slot: usize, tokens: &[u32], chunk: usize) {
        let (last, context) = tokens.split_last().expect("a sequence has a token");
        let mut start = 0;
        for part in context.chunks(chunk) {
            let is_last = start + part.len() == context.len();
            self.pass(
                slot,
                &[(start, part, part.len(), is_last.then(|| block(*last)))],
            );
            start += part.len();
        }
    }

    fn state(&self, slot: usize, tokens: &[u32]) -> (Vec<u8>, Vec<u8>) {
        let rows = tokens.len() - 1;
        (
            self.target.cached_bytes(slot, rows),
            self.draft.cached_bytes(slot, rows),
        )
    }
}

fn block(anchor: u32) -> Block {
    Block {
        anchor,
        width: 4,
        temperature: 0.0,
        seed: 0,
    }
}

fn tokens(length: std::ops::Range<usize>) -> impl Strategy<Value = Vec<u32>> {
    proptest::collection::vec(0u32..60, length)
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        1 => Just(Action::Rest),
        1 => tokens(2..20).prop_map(Action::Restart),
        6 => (tokens(0..6), any::<prop::sample::Index>(), 0u32..60).prop_map(|(drafted, kept, next)| Action::Step {
            accepted: kept.index(drafted.len() + 1),
            drafted,
            next,
        }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn a_slot_holds_the_bits_of_a_fresh_run_after_any_history(
        steps in proptest::collection::vec(proptest::array::uniform3(action()), 1..14),
        chunk in 1usize..9,
    ) {
        let mut driver = Driver::new();
        let mut sequences: [Tokens; SLOTS] = std::array::from_fn(|slot| vec![slot as u32 + 1; 3]);
        for (slot, sequence) in sequences.iter().enumerate() {
            driver.fill(slot, sequence, 8);
        }
        for actions in steps {
            for (slot, action) in actions.iter().enumerate() {
                if let Action::Restart(prompt) = action {
                    sequences[slot].clone_from(prompt);
                    driver.fill(slot, prompt, 8);
                }
            }
            // One pass over all slots; those that rest lie in it as gaps.
            let fed: Vec<(Vec<u32>, usize)> = actions.iter().zip(&sequences).map(|(action, sequence)| match action {
                Action::Step { drafted, accepted, .. } if sequence.len() + drafted.len() < LONGEST => {
                    let newest = sequence.last().expect("never empty");
                    ([&[*newest], drafted.as_slice()].concat(), accepted + 1)
                }
                _ => (Vec::new(), 0),
            }).collect();
            let starts: Vec<usize> = sequences.iter().map(|sequence| sequence.len() - 1).collect();
            for ((action, sequence), (tokens, kept)) in actions.iter().zip(&mut sequences).zip(&fed) {
                if let Action::Step { next, .. } = action && !tokens.is_empty() {
                    sequence.extend(&tokens[1..*kept]);
                    sequence.push(*next);
                }
            }
            let rows: Vec<_> = (0..SLOTS).map(|slot| {
                let (tokens, kept) = &fed[slot];
                let newest = *sequences[slot].last().expect("never empty");
                (starts[slot], tokens.as_slice(), *kept, (*kept > 0).then(|| block(newest)))
            }).collect();
            if rows.iter().any(|row| !row.1.is_empty()) {
                driver.pass(0, &rows);
            }
        }
        // A fresh pair, other chunks, other slots.
        let mut fresh = Driver::new();
        for (slot, sequence) in sequences.iter().enumerate() {
            let other = (slot + 1) % SLOTS;
            fresh.fill(other, sequence, chunk);
            prop_assert!(driver.state(slot, sequence) == fresh.state(other, sequence), "slot {slot} with {sequence:?}");
        }
    }
}

#[test]
fn the_bytes_of_a_slot_depend_on_its_tokens() {
    let mut driver = Driver::new();
    driver.fill(0, &[1, 2, 3, 4], 8);
    driver.fill(1, &[1, 2, 5, 4], 8);
    let (first, second) = (
        driver.state(0, &[1, 2, 3, 4]),
        driver.state(1, &[1, 2, 5, 4]),
    );
    assert_ne!(first.0, second.0);
    assert_ne!(first.1, second.1);
}
