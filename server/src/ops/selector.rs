//! The candidate selector of a draft head, as a pure function over slices; no ONNX Runtime.
//!
//! Every slot of a block has logits of its own, computed without knowing what the slots before it propose.
//! The selector takes the best candidates of each slot ([`top_k`]) and walks through them from the anchor on ([`walk()`]):
//! a candidate's score is its logit plus how well it follows the token chosen before it, a product of two codebook rows and the slot's hidden row.
//! Without codebooks the score is the logit.
//!
//! The choice is the largest score, or, at a temperature, the winner of the race that the target's sampler runs, with the same noise.
//!
//! What a sequence gets depends on its own rows alone, and every sum has one order.

pub mod top_k;
pub mod walk;

#[cfg(test)]
pub(in crate::ops) mod tests;

use self::{
    top_k::{Candidate, top_k},
    walk::{Codebooks, Lattice, Rule, walk},
};
use super::{
    element::Element, error::OperatorError, pool::Pool, shared::SharedMut, simd::InstructionSet,
};

/// Logits below which waking other threads costs more than they save.
const SERIAL_LOGITS: usize = 1 << 15;

/// Shapes of the inputs as they arrive.
#[derive(Clone, Copy, Debug)]
pub struct Shapes<'a> {
    /// `[batch, slots, columns]`.
    pub logits: &'a [i64],
    /// `[batch, slots + 1]`.
    pub block_ids: &'a [i64],
    /// `[batch, slots + 1]`.
    pub block_position_ids: &'a [i64],
    /// `[batch]`.
    pub block_rows: &'a [i64],
    /// `[batch]`.
    pub temperature: &'a [i64],
    /// `[batch]`.
    pub seed: &'a [i64],
    /// `[1]`.
    pub candidate_topk: &'a [i64],
    /// `[batch, slots, rank]`, `[vocabulary, rank]` and `[vocabulary, rank]`; all of them or none.
    pub codebooks: [Option<&'a [i64]>; 3],
    /// `[columns]`.
    pub column_token_ids: Option<&'a [i64]>,
}

/// Sizes of one call, checked against each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Most candidates of a slot.
    pub top_k: usize,
    /// Sequences.
    pub batch: usize,
    /// Tokens that are proposed for a sequence.
    pub slots: usize,
    /// Logits of a slot.
    pub columns: usize,
    /// Elements of a codebook row; 0 without codebooks.
    pub rank: usize,
    /// Rows of a codebook; token ids are below it.
    pub vocabulary: Option<usize>,
}

impl Geometry {
    /// Reads the sizes from the shapes and checks that all shapes agree with them.
    pub fn new(top_k: usize, shapes: &Shapes<'_>) -> Result<Self, OperatorError> {
        check_top_k(top_k)?;
        let wrong = |input, shape: &[i64], expected: String| OperatorError::Shape {
            input,
            shape: shape.to_vec(),
            expected,
        };
        let expect = |input, shape: &[i64], expected: &[i64]| {
            if shape == expected {
                Ok(())
            } else {
                Err(wrong(input, shape, format!("{expected:?}")))
            }
        };
        let &[batch, slots, columns] = shapes.logits else {
            return Err(wrong(
                "logits",
                shapes.logits,
                "[batch, slots, columns]".to_owned(),
            ));
        };
        if columns < i64::try_from(top_k).unwrap_or(i64::MAX) || columns > i64::from(u32::MAX) {
            return Err(wrong(
                "logits",
                shapes.logits,
                format!("at least top_k = {top_k} columns, and fewer than 2^32"),
            ));
        }
        let block = [batch, slots + 1];
        expect("block_ids", shapes.block_ids, &block)?;
        expect("block_position_ids", shapes.block_position_ids, &block)?;
        expect("block_rows", shapes.block_rows, &[batch])?;
        expect("temperature", shapes.temperature, &[batch])?;
        expect("seed", shapes.seed, &[batch])?;
        expect("candidate_topk", shapes.candidate_topk, &[1])?;
        if let Some(ids) = shapes.column_token_ids {
            expect("column_token_ids", ids, &[columns])?;
        }
        let (rank, vocabulary) = match shapes.codebooks {
            [None, None, None] => (0, None),
            [Some(hidden), Some(predecessor), Some(successor)] => {
                let &[vocabulary, rank] = predecessor else {
                    return Err(wrong(
                        "predecessor_codebook",
                        predecessor,
                        "[vocabulary, rank]".to_owned(),
                    ));
                };
                expect("successor_codebook", successor, predecessor)?;
                expect("selector_hidden", hidden, &[batch, slots, rank])?;
                if shapes.column_token_ids.is_none() && columns > vocabulary {
                    return Err(wrong(
                        "logits",
                        shapes.logits,
                        format!(
                            "at most {vocabulary} columns, as many as a codebook has rows, where there are no column_token_ids"
                        ),
                    ));
                }
                (rank as usize, Some(vocabulary as usize))
            }
            _ => return Err(OperatorError::PartOfCodebooks),
        };
        // Dimensions of existing tensors are never negative, so none of these casts loses anything.
        Ok(Self {
            top_k,
            batch: batch as usize,
            slots: slots as usize,
            columns: columns as usize,
            rank,
            vocabulary,
        })
    }
}

/// Checks the attribute.
pub fn check_top_k(top_k: usize) -> Result<(), OperatorError> {
    if top_k == 0 {
        return Err(OperatorError::Attribute {
            name: "top_k",
            value: top_k.to_string(),
            allowed: "at least 1",
        });
    }
    Ok(())
}

/// The inputs of one call; row-major, shapes as in [`Shapes`].
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a, T> {
    /// `[batch, slots, columns]`.
    pub logits: &'a [f32],
    /// `[batch, slots + 1]`: the anchor comes first, and nothing else of it is used.
    pub block_ids: &'a [i64],
    /// `[batch, slots + 1]`: position of the anchor and of every proposed token.
    pub block_position_ids: &'a [i64],
    /// `[batch]`: rows of the block that are not padding, the anchor's included.
    pub block_rows: &'a [i64],
    /// `[batch]`: 0 takes the largest score.
    pub temperature: &'a [f32],
    /// `[batch]`: the bits of the noise seed.
    pub seed: &'a [i64],
    /// `[1]`: candidates of a slot.
    pub candidate_topk: &'a [i64],
    /// The scores of pairs; without them the score of a candidate is its logit.
    pub codebooks: Option<Codebooks<'a, T>>,
    /// `[columns]`: token of each column where it is not the column's number; rising.
    pub column_token_ids: Option<&'a [i64]>,
}

impl<T: Element> Inputs<'_, T> {
    /// Slots of a sequence that are proposed for.
    fn drafted_slots(&self, batch: usize) -> usize {
        (self.block_rows[batch] - 1).max(0) as usize
    }

    fn check(&self, geometry: &Geometry) -> Result<(), OperatorError> {
        let within = |input, index, value, least, most| {
            if (least..=most).contains(&value) {
                Ok(())
            } else {
                Err(OperatorError::Value {
                    input,
                    index,
                    value,
                    least,
                    most,
                })
            }
        };
        let block = geometry.slots + 1;
        within(
            "candidate_topk",
            0,
            self.candidate_topk[0],
            1,
            geometry.top_k as i64,
        )?;
        for batch in 0..geometry.batch {
            within("block_rows", batch, self.block_rows[batch], 0, block as i64)?;
            let temperature = self.temperature[batch];
            if !temperature.is_finite() || temperature < 0.0 {
                return Err(OperatorError::Number {
                    input: "temperature",
                    index: batch,
                    value: temperature.to_string(),
                    allowed: "a finite number, 0 or above",
                });
            }
            let slots = self.drafted_slots(batch);
            if slots == 0 {
                continue;
            }
            if let Some(vocabulary) = geometry.vocabulary {
                let index = batch * block;
                within(
                    "block_ids",
                    index,
                    self.block_ids[index],
                    0,
                    vocabulary as i64 - 1,
                )?;
            }
            for slot in 1..=slots {
                let index = batch * block + slot;
                within(
                    "block_position_ids",
                    index,
                    self.block_position_ids[index],
                    0,
                    i64::MAX,
                )?;
            }
        }
        Ok(())
    }

    /// The token of a column.
    fn token(&self, geometry: &Geometry, column: u32) -> Result<u32, OperatorError> {
        let Some(ids) = self.column_token_ids else {
            return Ok(column);
        };
        let value = ids[column as usize];
        let most = geometry.vocabulary.map_or(i64::from(u32::MAX), |rows| {
            (rows as i64 - 1).min(i64::from(u32::MAX))
        });
        match u32::try_from(value) {
            Ok(token) if value <= most => Ok(token),
            _ => Err(OperatorError::Value {
                input: "column_token_ids",
                index: column as usize,
                value,
                least: 0,
                most,
            }),
        }
    }
}

/// The outputs of one call.
#[derive(Debug)]
pub struct Outputs<'a> {
    /// `[batch, slots]`: the proposed tokens; -1 from the first slot on whose logits or scores are not finite, and where the block is padding.
    pub draft_ids: &'a mut [i64],
    /// `[batch, slots, top_k]`: the candidates, best first; -1 where there are fewer, or nothing is proposed.
    pub candidate_ids: Option<&'a mut [i64]>,
    /// `[batch, slots, top_k]`: their scores after the token chosen before; -infinity where there is no candidate.
    pub path_scores: Option<&'a mut [f32]>,
}

/// Proposes a token for every slot of every sequence.
pub fn select<T: Element>(
    geometry: &Geometry,
    inputs: &Inputs<'_, T>,
    outputs: Outputs<'_>,
    pool: &impl Pool,
) -> Result<(), OperatorError> {
    inputs.check(geometry)?;
    let &Geometry {
        top_k: outputs_per_slot,
        batch,
        slots,
        columns,
        ..
    } = geometry;
    let Outputs {
        draft_ids,
        mut candidate_ids,
        mut path_scores,
    } = outputs;
    draft_ids.fill(-1);
    if let Some(ids) = &mut candidate_ids {
        ids.fill(-1);
    }
    if let Some(scores) = &mut path_scores {
        scores.fill(f32::NEG_INFINITY);
    }

    let count = inputs.candidate_topk[0] as usize;
    let rows: Vec<usize> = (0..batch)
        .flat_map(|batch| {
            let first = batch * slots;
            first..first + inputs.drafted_slots(batch)
        })
        .collect();
    let mut candidates = vec![Candidate::default(); batch * slots * count];
    let mut finite = vec![false; batch * slots];
    {
        let (candidates, finite) = (SharedMut::new(&mut candidates), SharedMut::new(&mut finite));
        let instructions = InstructionSet::detect();
        run(rows.len(), columns, pool, &|task| {
            let row = rows[task];
            // SAFETY: every row is one task.
            let (candidates, finite) = unsafe {
                (
                    candidates.slice(row * count..(row + 1) * count),
                    finite.slice(row..row + 1),
                )
            };
            finite[0] = top_k(
                instructions,
                &inputs.logits[row * columns..(row + 1) * columns],
                candidates,
            );
        })?;
    }

    let mut tokens = vec![0; candidates.len()];
    for &row in rows.iter().filter(|&&row| finite[row]) {
        for index in row * count..(row + 1) * count {
            tokens[index] = inputs.token(geometry, candidates[index].column)?;
        }
    }

    let mut scores: Vec<f32> = candidates.iter().map(|candidate| candidate.score).collect();
    {
        let (scores, drafted) = (SharedMut::new(&mut scores), SharedMut::new(draft_ids));
        run(batch, slots * count * geometry.rank, pool, &|batch| {
            let first = batch * slots;
            let walked = finite[first..first + inputs.drafted_slots(batch)]
                .iter()
                .take_while(|&&finite| finite)
                .count();
            // SAFETY: every sequence is one task.
            let (scores, drafted) = unsafe {
                (
                    scores.slice(first * count..(first + walked) * count),
                    drafted.slice(first..first + walked),
                )
            };
            let block = batch * (slots + 1);
            let rule = Rule {
                temperature: inputs.temperature[batch],
                seed: inputs.seed[batch] as u64,
                positions: &inputs.block_position_ids[block + 1..block + 1 + walked],
            };
            walk(
                Lattice {
                    width: count,
                    tokens: &tokens[first * count..(first + walked) * count],
                    scores,
                },
                inputs.block_ids[block] as usize,
                |slot, predecessor, tokens, scores| {
                    if let Some(codebooks) = &inputs.codebooks {
                        codebooks.add(geometry.rank, first + slot, predecessor, tokens, scores);
                    }
                },
                |slot, tokens, scores| rule.choose(slot, tokens, scores),
                drafted,
            );
        })?;
    }

    for row in (0..batch * slots).filter(|&row| draft_ids[row] >= 0) {
        let (from, to) = (row * count, row * outputs_per_slot);
        if let Some(ids) = &mut candidate_ids {
            for (id, &token) in ids[to..].iter_mut().zip(&tokens[from..from + count]) {
                *id = i64::from(token);
            }
        }
        if let Some(path) = &mut path_scores {
            path[to..to + count].copy_from_slice(&scores[from..from + count]);
        }
    }
    Ok(())
}

/// Runs tasks of some work each on the pool, or here when there is little to do.
fn run(
    tasks: usize,
    work_per_task: usize,
    pool: &impl Pool,
    task: &(dyn Fn(usize) + Sync),
) -> Result<(), OperatorError> {
    if tasks <= 1 || tasks * work_per_task <= SERIAL_LOGITS {
        (0..tasks).for_each(task);
        return Ok(());
    }
    pool.for_each(tasks, task)
}
