//! The best candidates of a row of logits, in one pass.

use crate::ops::simd::{InstructionSet, Kernel, Simd};

/// Vectors that are looked at together: when none of their elements can be a candidate, they are done.
const VECTORS: usize = 4;

/// One logit and where it stands.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Candidate {
    /// The logit.
    pub score: f32,
    /// Its column.
    pub column: u32,
}

/// Fills `candidates` with the best logits: larger ones first, of equal ones the lower column first. There are at least as many logits.
///
/// False when a logit is NaN or +infinity, wherever it stands, or all are -infinity; the candidates mean nothing then.
pub fn top_k(instructions: InstructionSet, logits: &[f32], candidates: &mut [Candidate]) -> bool {
    assert!(!candidates.is_empty() && candidates.len() <= logits.len());
    assert!(u32::try_from(logits.len()).is_ok());
    instructions.run(Scan { logits, candidates })
}

struct Scan<'a> {
    logits: &'a [f32],
    candidates: &'a mut [Candidate],
}

impl Kernel for Scan<'_> {
    type Output = bool;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> bool {
        let mut best = Best {
            candidates: self.candidates,
            count: 0,
            limit: f32::NEG_INFINITY,
        };
        let length = VECTORS * S::LANES;
        let mut chunks = self.logits.chunks_exact(length);
        let mut column = 0;
        for chunk in &mut chunks {
            // SAFETY: the chunk has `VECTORS · LANES` elements; the caller vouches for the instruction set.
            let hit = unsafe {
                let (one, limit) = (S::splat(1.0), S::splat(best.limit));
                let mut hits = S::splat(0.0);
                for vector in 0..VECTORS {
                    let x = S::load(chunk.as_ptr().add(vector * S::LANES));
                    // NaN counts as a hit, and +infinity is above every limit.
                    hits = S::max(hits, S::zero_below(one, x, limit));
                }
                S::largest(hits) > 0.0
            };
            if hit && !best.enter(chunk, column) {
                return false;
            }
            column += length;
        }
        best.enter(chunks.remainder(), column) && best.candidates[0].score > f32::NEG_INFINITY
    }
}

/// The best logits so far, in order.
struct Best<'a> {
    candidates: &'a mut [Candidate],
    count: usize,
    /// Smallest logit that changes anything.
    limit: f32,
}

impl Best<'_> {
    /// Enters the logits of some columns; false when one is NaN or +infinity.
    fn enter(&mut self, logits: &[f32], first_column: usize) -> bool {
        for (index, &score) in logits.iter().enumerate() {
            if score < self.limit {
                continue;
            }
            if score.is_nan() || score == f32::INFINITY {
                return false;
            }
            self.insert(Candidate {
                score,
                column: (first_column + index) as u32,
            });
        }
        true
    }

    /// Columns come in ascending order, so an equal score goes behind.
    fn insert(&mut self, candidate: Candidate) {
        if self.count < self.candidates.len() {
            self.count += 1;
        }
        let mut place = self.count - 1;
        while place > 0 && self.candidates[place - 1].score < candidate.score {
            self.candidates[place] = self.candidates[place - 1];
            place -= 1;
        }
        self.candidates[place] = candidate;
        if self.count == self.candidates.len() {
            self.limit = self.candidates[self.count - 1].score.next_up();
        }
    }
}
