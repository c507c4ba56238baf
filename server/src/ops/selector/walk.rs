//! The walk through the candidates of a block, and the two rules by which it chooses.

use crate::{
    noise::{self, Noise, Race},
    ops::element::Element,
};

/// Partial sums of a dot product: fixed, so that it does not depend on the processor.
const SUMS: usize = 16;

/// The candidates of consecutive slots.
#[derive(Debug)]
pub struct Lattice<'a> {
    /// Candidates of a slot.
    pub width: usize,
    /// `[slots, width]`.
    pub tokens: &'a [u32],
    /// `[slots, width]`: the logits; the walk makes them scores after the token chosen before.
    pub scores: &'a mut [f32],
}

/// Walks from the anchor through the slots and writes the token chosen in each to `drafted`.
///
/// `extend(slot, predecessor, tokens, scores)` adds to the scores of a slot how well its tokens follow the predecessor.
/// `choose(slot, tokens, scores)` gives the index of the candidate to take; `None` ends the walk, and what is left of `drafted` stays as it is.
pub fn walk(
    lattice: Lattice<'_>,
    anchor: usize,
    mut extend: impl FnMut(usize, usize, &[u32], &mut [f32]),
    mut choose: impl FnMut(usize, &[u32], &[f32]) -> Option<usize>,
    drafted: &mut [i64],
) {
    let Lattice {
        width,
        tokens,
        scores,
    } = lattice;
    let mut predecessor = anchor;
    let slots = tokens
        .chunks_exact(width)
        .zip(scores.chunks_exact_mut(width));
    for (slot, ((tokens, scores), drafted)) in slots.zip(drafted).enumerate() {
        extend(slot, predecessor, tokens, scores);
        let Some(chosen) = choose(slot, tokens, scores) else {
            return;
        };
        *drafted = i64::from(tokens[chosen]);
        predecessor = tokens[chosen] as usize;
    }
}

/// What makes pairs of tokens likely.
#[derive(Clone, Copy, Debug)]
pub struct Codebooks<'a, T> {
    /// `[batch, slots, rank]`: projection of each slot's hidden row.
    pub hidden: &'a [T],
    /// `[vocabulary, rank]`.
    pub predecessor: &'a [T],
    /// `[vocabulary, rank]`.
    pub successor: &'a [T],
}

impl<T: Element> Codebooks<'_, T> {
    /// Adds `⟨predecessor[p] · hidden[row], successor[token]⟩` to the score of each token.
    pub fn add(
        &self,
        rank: usize,
        row: usize,
        predecessor: usize,
        tokens: &[u32],
        scores: &mut [f32],
    ) {
        let wide = |elements: &[T], row: usize| {
            let mut wide = vec![0.0; rank];
            T::widen(&elements[row * rank..(row + 1) * rank], &mut wide);
            wide
        };
        let mut weights = wide(self.predecessor, predecessor);
        for (weight, hidden) in weights.iter_mut().zip(wide(self.hidden, row)) {
            *weight *= hidden;
        }
        for (score, &token) in scores.iter_mut().zip(tokens) {
            *score += dot(&weights, &wide(self.successor, token as usize));
        }
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0_f32; SUMS];
    let (a, a_rest) = a.as_chunks::<SUMS>();
    let (b, b_rest) = b.as_chunks::<SUMS>();
    for (sum, (a, b)) in sums.iter_mut().zip(a_rest.iter().zip(b_rest)) {
        *sum += a * b;
    }
    for (a, b) in a.iter().zip(b) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a * b;
        }
    }
    let mut half = SUMS / 2;
    while half > 0 {
        for index in 0..half {
            sums[index] += sums[index + half];
        }
        half /= 2;
    }
    sums[0]
}

/// How a sequence chooses among the candidates of a slot.
#[derive(Clone, Copy, Debug)]
pub struct Rule<'a> {
    /// 0 takes the largest score, of equal ones the first.
    pub temperature: f32,
    /// The request's noise seed.
    pub seed: u64,
    /// Position of the token that each slot proposes; not negative.
    pub positions: &'a [i64],
}

impl Rule<'_> {
    /// The index of the candidate to take; `None` when a score is NaN or +infinity, or all are -infinity.
    pub fn choose(&self, slot: usize, tokens: &[u32], scores: &[f32]) -> Option<usize> {
        let mut largest = 0;
        for (index, score) in scores.iter().enumerate() {
            if score.is_nan() {
                return None;
            }
            if *score > scores[largest] {
                largest = index;
            }
        }
        if !scores[largest].is_finite() {
            return None;
        }
        if self.temperature == 0.0 {
            return Some(largest);
        }
        let noise = Noise::new(self.seed, self.positions[slot] as u64);
        let inverse_temperature = 1.0 / f64::from(self.temperature);
        let mut race = Race::default();
        for (&token, &score) in tokens.iter().zip(scores) {
            let weight = noise::weight(score, scores[largest], inverse_temperature);
            race.enter(token, weight, noise.word(token));
        }
        let winner = race.winner(tokens[largest]);
        tokens.iter().position(|&token| token == winner)
    }
}
