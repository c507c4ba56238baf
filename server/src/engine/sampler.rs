//! The target's choice of the next token: a pure function of its logits, the request and counter-based noise.
//!
//! There is one rule for greedy and sampled requests. Logits go through the processors (penalties, bias, temperature, top-k, top-p, min-p), then
//! the token with the largest `logit / temperature + gumbel(seed, position, token)` is taken. Because the noise is keyed and not drawn from a
//! running state, the choice at a position does not depend on how it was reached: alone or in a batch, drafted or not.
//!
//! The rule is evaluated as the race of [`crate::noise`], which picks the same token.

use std::cmp::Ordering;
use std::collections::HashMap;

use super::request::{Sampling, TokenLogprobs};
use crate::noise::{self, Noise, Race};

/// Below this many candidates noise is looked up token by token instead of generated for the whole vocabulary.
const RANDOM_ACCESS_LIMIT: usize = 512;

/// The logits hold NaN or +infinity, or nothing above -infinity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the logits are not finite")]
pub struct NonFinite;

/// What the choice depends on besides the logits.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// The request's settings.
    pub sampling: &'a Sampling,
    /// The request's noise key.
    pub seed: u64,
    /// All tokens before the one to choose.
    pub tokens: &'a [u32],
    /// How many of `tokens` are the prompt.
    pub prompt_tokens: usize,
}

impl Context<'_> {
    /// Position of the token to choose, which keys the noise.
    fn position(&self) -> u64 {
        self.tokens.len() as u64
    }
}

/// Chooses tokens; holds scratch memory only.
#[derive(Debug, Default)]
pub struct Sampler {
    logits: Vec<f32>,
    candidates: Vec<u32>,
    weights: Vec<f64>,
    noise: Vec<u8>,
}

impl Sampler {
    /// The target's choice.
    ///
    /// # Errors
    ///
    /// The logits are not finite.
    pub fn choose(&mut self, logits: &[f32], context: Context<'_>) -> Result<u32, NonFinite> {
        maximum(logits)?;
        let sampling = context.sampling;
        let mut scratch = std::mem::take(&mut self.logits);
        let processed = if needs_processing(sampling) {
            scratch.clear();
            scratch.extend_from_slice(logits);
            penalise(&mut scratch, context);
            for &(id, bias) in &sampling.logit_bias {
                scratch[id as usize] += bias;
            }
            scratch.as_slice()
        } else {
            logits
        };
        let chosen = maximum(processed).map(|largest| {
            if sampling.temperature == 0.0 {
                first_index_of(processed, largest)
            } else {
                self.sample(processed, largest, context)
            }
        });
        self.logits = scratch;
        chosen
    }

    fn sample(&mut self, logits: &[f32], largest: f32, context: Context<'_>) -> u32 {
        let sampling = context.sampling;
        let noise = Noise::new(context.seed, context.position());
        let inverse_temperature = 1.0 / f64::from(sampling.temperature);
        let weight = |id: u32| noise::weight(logits[id as usize], largest, inverse_temperature);
        let vocab_size = logits.len();

        let keeps_all = sampling.top_k == 0 && sampling.top_p >= 1.0 && sampling.min_p <= 0.0;
        if keeps_all {
            noise.fill(&mut self.noise, vocab_size);
            let mut race = Race::default();
            for (id, (&logit, word)) in logits.iter().zip(self.noise.chunks_exact(4)).enumerate() {
                let weight = noise::weight(logit, largest, inverse_temperature);
                race.enter(
                    id as u32,
                    weight,
                    u32::from_le_bytes([word[0], word[1], word[2], word[3]]),
                );
            }
            return race.winner(first_index_of(logits, largest));
        }

        let more_likely = |a: &u32, b: &u32| by_logit(logits, *a, *b);
        self.candidates.clear();
        self.candidates
            .extend((0..vocab_size as u32).filter(|&id| logits[id as usize] > f32::NEG_INFINITY));
        let top_k = sampling.top_k as usize;
        if top_k > 0 && top_k < self.candidates.len() {
            self.candidates
                .select_nth_unstable_by(top_k - 1, more_likely);
            self.candidates.truncate(top_k);
            // The selection leaves an order that depends on the algorithm; sums below must not.
            self.candidates.sort_unstable();
        }
        if sampling.top_p < 1.0 {
            self.weights.clear();
            self.weights
                .extend(self.candidates.iter().map(|&id| weight(id)));
            let total: f64 = self.weights.iter().sum();
            let wanted = f64::from(sampling.top_p) * total;
            // Tokens below this weight could all be dropped without touching the nucleus, so they need not be sorted.
            let negligible =
                (1.0 - f64::from(sampling.top_p)) * total / self.candidates.len() as f64;
            let mut weights = self.weights.iter();
            self.candidates
                .retain(|_| *weights.next().expect("one weight per candidate") >= negligible);
            self.candidates.sort_unstable_by(more_likely);
            let mut sum = 0.0;
            let kept = self.candidates.iter().position(|&id| {
                sum += weight(id);
                sum >= wanted
            });
            self.candidates
                .truncate(kept.map_or(self.candidates.len(), |index| index + 1));
        }
        if sampling.min_p > 0.0 {
            self.candidates
                .retain(|&id| weight(id) >= f64::from(sampling.min_p));
        }

        let mut race = Race::default();
        let by_lookup = self.candidates.len() <= RANDOM_ACCESS_LIMIT;
        if !by_lookup {
            noise.fill(&mut self.noise, vocab_size);
        }
        for &id in &self.candidates {
            let word = if by_lookup {
                noise.word(id)
            } else {
                let word = &self.noise[id as usize * 4..][..4];
                u32::from_le_bytes([word[0], word[1], word[2], word[3]])
            };
            race.enter(id, weight(id), word);
        }
        race.winner(first_index_of(logits, largest))
    }
}

/// Log-probability of `id` and of the `top` most likely tokens under the unmodified logits.
///
/// # Errors
///
/// The logits are not finite.
pub fn logprobs(logits: &[f32], id: u32, top: usize) -> Result<TokenLogprobs, NonFinite> {
    let largest = maximum(logits)?;
    let sum: f64 = logits
        .iter()
        .map(|&logit| f64::from(logit - largest).exp())
        .sum();
    let normaliser = f64::from(largest) + sum.ln();
    let logprob = |id: u32| (f64::from(logits[id as usize]) - normaliser) as f32;
    let mut ids: Vec<u32> = Vec::new();
    if top > 0 {
        ids.extend(0..logits.len() as u32);
        let top = top.min(ids.len());
        ids.select_nth_unstable_by(top - 1, |&a, &b| by_logit(logits, a, b));
        ids.truncate(top);
        ids.sort_unstable_by(|&a, &b| by_logit(logits, a, b));
    }
    Ok(TokenLogprobs {
        id,
        logprob: logprob(id),
        top: ids.into_iter().map(|id| (id, logprob(id))).collect(),
    })
}

/// Larger logits first, equal ones by lower id: a total order, so every selection by it is unique.
fn by_logit(logits: &[f32], a: u32, b: u32) -> Ordering {
    logits[b as usize]
        .total_cmp(&logits[a as usize])
        .then(a.cmp(&b))
}

fn needs_processing(sampling: &Sampling) -> bool {
    !sampling.logit_bias.is_empty()
        || sampling.presence_penalty != 0.0
        || sampling.frequency_penalty != 0.0
        || sampling.repetition_penalty != 1.0
}

fn penalise(logits: &mut [f32], context: Context<'_>) {
    let sampling = context.sampling;
    if sampling.repetition_penalty != 1.0 {
        let mut seen = context.tokens.to_vec();
        seen.sort_unstable();
        seen.dedup();
        for id in seen {
            let logit = &mut logits[id as usize];
            *logit = if *logit > 0.0 {
                // A penalty close to 0 asks for more than there is; that is no fault of the model.
                (*logit / sampling.repetition_penalty).min(f32::MAX)
            } else {
                *logit * sampling.repetition_penalty
            };
        }
    }
    if sampling.presence_penalty != 0.0 || sampling.frequency_penalty != 0.0 {
        let mut counts: HashMap<u32, u32> = HashMap::new();
        for &id in &context.tokens[context.prompt_tokens..] {
            *counts.entry(id).or_default() += 1;
        }
        for (id, count) in counts {
            logits[id as usize] -=
                sampling.presence_penalty + sampling.frequency_penalty * count as f32;
        }
    }
}

/// The largest logit.
fn maximum(logits: &[f32]) -> Result<f32, NonFinite> {
    const LANES: usize = 16;
    // Independent lanes let the compiler use vector registers; the result does not depend on the order.
    let mut largest = [f32::NEG_INFINITY; LANES];
    let mut not_a_number = [false; LANES];
    let (chunks, rest) = logits.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            largest[lane] = if chunk[lane] > largest[lane] {
                chunk[lane]
            } else {
                largest[lane]
            };
            not_a_number[lane] |= chunk[lane].is_nan();
        }
    }
    let largest = largest
        .iter()
        .chain(rest)
        .copied()
        .fold(f32::NEG_INFINITY, f32::max);
    let any_nan = not_a_number.contains(&true) || rest.iter().any(|logit| logit.is_nan());
    if any_nan || !largest.is_finite() {
        Err(NonFinite)
    } else {
        Ok(largest)
    }
}

fn first_index_of(logits: &[f32], value: f32) -> u32 {
    logits
        .iter()
        .position(|&logit| logit == value)
        .expect("the value was found in these logits") as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn context<'a>(sampling: &'a Sampling, seed: u64, tokens: &'a [u32]) -> Context<'a> {
        Context {
            sampling,
            seed,
            tokens,
            prompt_tokens: 1,
        }
    }

    fn greedy() -> Sampling {
        Sampling {
            temperature: 0.0,
            ..Sampling::default()
        }
    }

    #[test]
    fn a_penalty_close_to_zero_is_no_fault_of_the_logits() {
        for temperature in [0.0, 1.0] {
            let sampling = Sampling {
                temperature,
                repetition_penalty: 1e-38,
                logit_bias: vec![(0, 100.0)],
                ..Sampling::default()
            };
            let chosen = Sampler::default().choose(&[1.0, 5.0, -2.0], context(&sampling, 3, &[1]));
            assert_eq!(chosen, Ok(1), "{temperature}");
        }
    }

    /// The rule as it is written down, evaluated for every token.
    fn by_definition(logits: &[f32], sampling: &Sampling, seed: u64, tokens: &[u32]) -> u32 {
        let mut adjusted: Vec<f64> = logits.iter().map(|&logit| f64::from(logit)).collect();
        for (id, value) in adjusted.iter_mut().enumerate() {
            if tokens.contains(&(id as u32)) {
                let penalty = f64::from(sampling.repetition_penalty);
                *value = if *value > 0.0 {
                    *value / penalty
                } else {
                    *value * penalty
                };
            }
            let count = tokens[1..]
                .iter()
                .filter(|&&token| token as usize == id)
                .count() as f64;
            if count > 0.0 {
                *value -= f64::from(sampling.presence_penalty)
                    + f64::from(sampling.frequency_penalty) * count;
            }
        }
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| adjusted[b].total_cmp(&adjusted[a]).then(a.cmp(&b)));
        if sampling.temperature == 0.0 {
            return order[0] as u32;
        }
        let largest = adjusted[order[0]];
        let weight = |id: usize| ((adjusted[id] - largest) / f64::from(sampling.temperature)).exp();
        if sampling.top_k > 0 {
            order.truncate(sampling.top_k as usize);
        }
        if sampling.top_p < 1.0 {
            let total: f64 = order.iter().map(|&id| weight(id)).sum();
            let mut sum = 0.0;
            let mut kept = 0;
            while kept < order.len() && sum < f64::from(sampling.top_p) * total {
                sum += weight(order[kept]);
                kept += 1;
            }
            order.truncate(kept.max(1));
        }
        order.retain(|&id| weight(id) >= f64::from(sampling.min_p));
        let noise = Noise::new(seed, tokens.len() as u64);
        let gumbel =
            |id: usize| -(-((f64::from(noise.word(id as u32)) + 0.5) / 4_294_967_296.0).ln()).ln();
        let score = |id: usize| adjusted[id] / f64::from(sampling.temperature) + gumbel(id);
        order
            .into_iter()
            .max_by(|&a, &b| score(a).total_cmp(&score(b)).then(b.cmp(&a)))
            .expect("one token is left") as u32
    }

    proptest! {
        #[test]
        fn the_choice_is_the_gumbel_max_rule(
            logits in proptest::collection::vec(-8.0f32..8.0, 40..1200),
            seed: u64,
            tokens in proptest::collection::vec(0u32..40, 1..12),
            temperature in prop_oneof![Just(0.0f32), 0.2f32..2.0],
            top_k in prop_oneof![Just(0u32), 1u32..50],
            top_p in prop_oneof![Just(1.0f32), 0.05f32..1.0],
            min_p in prop_oneof![Just(0.0f32), 0.0f32..0.5],
            penalties in prop_oneof![Just((0.0f32, 0.0f32, 1.0f32)), (-2.0f32..2.0, -2.0f32..2.0, 0.5f32..2.0)],
        ) {
            let (presence_penalty, frequency_penalty, repetition_penalty) = penalties;
            let sampling = Sampling { temperature, top_p, top_k, min_p, presence_penalty, frequency_penalty, repetition_penalty, logit_bias: Vec::new() };
            let chosen = Sampler::default().choose(&logits, context(&sampling, seed, &tokens)).expect("finite logits");
            // Where the two evaluations round differently at a border of the nucleus, both choices are right; that needs a coincidence of 1e-7.
            prop_assert_eq!(chosen, by_definition(&logits, &sampling, seed, &tokens));
        }
    }

    #[test]
    fn one_logit_that_is_not_finite_is_an_error() {
        for bad in [f32::NAN, f32::INFINITY] {
            for position in [0, 15, 16, 40] {
                let mut logits = vec![0.5; 41];
                logits[position] = bad;
                assert_eq!(
                    Sampler::default().choose(&logits, context(&greedy(), 0, &[1])),
                    Err(NonFinite),
                    "{bad} at {position}"
                );
                assert_eq!(
                    logprobs(&logits, 0, 0),
                    Err(NonFinite),
                    "{bad} at {position}"
                );
            }
        }
        assert_eq!(
            Sampler::default().choose(&[f32::NEG_INFINITY; 3], context(&greedy(), 0, &[1])),
            Err(NonFinite)
        );
    }

    #[test]
    fn masked_tokens_are_never_chosen() {
        let mut logits = vec![f32::NEG_INFINITY; 100];
        logits[7] = -3.0;
        let sampling = Sampling {
            temperature: 2.0,
            ..Sampling::default()
        };
        for seed in 0..50 {
            assert_eq!(
                Sampler::default().choose(&logits, context(&sampling, seed, &[1])),
                Ok(7)
            );
        }
    }

    #[test]
    fn equal_logits_go_to_the_lowest_id_when_greedy() {
        assert_eq!(
            Sampler::default().choose(&[1.0, 3.0, 3.0], context(&greedy(), 0, &[1])),
            Ok(1)
        );
    }

    #[test]
    fn a_tiny_temperature_is_greedy() {
        let sampling = Sampling {
            temperature: 1e-6,
            ..Sampling::default()
        };
        for seed in 0..20 {
            assert_eq!(
                Sampler::default().choose(&[1.0, 3.0, 2.9, -1.0], context(&sampling, seed, &[1])),
                Ok(1)
            );
        }
    }

    #[test]
    fn frequencies_follow_the_softmax() {
        let logits = [0.0f32, 1.0, 2.0, -1.0];
        let sampling = Sampling::default();
        let mut counts = [0usize; 4];
        let draws = 20_000;
        for seed in 0..draws {
            counts[Sampler::default()
                .choose(&logits, context(&sampling, seed, &[1]))
                .expect("finite") as usize] += 1;
        }
        let total: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
        let chi_squared: f64 = logits
            .iter()
            .zip(counts)
            .map(|(&logit, count)| {
                let expected = draws as f64 * f64::from(logit).exp() / total;
                (count as f64 - expected).powi(2) / expected
            })
            .sum();
        // 0.999 quantile of the chi-squared distribution with three degrees of freedom.
        assert!(
            chi_squared < 16.27,
            "chi-squared {chi_squared} with counts {counts:?}"
        );
    }

    #[test]
    fn logprobs_are_normalised_and_ordered() {
        let found = logprobs(&[0.0, 2.0, 1.0, 2.0], 2, 3).expect("finite");
        let total: f32 = logprobs(&[0.0, 2.0, 1.0, 2.0], 0, 4)
            .expect("finite")
            .top
            .iter()
            .map(|(_, logprob)| logprob.exp())
            .sum();
        assert_eq!(
            found.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(),
            [1, 3, 2]
        );
        assert_eq!(found.logprob, found.top[2].1);
        assert!((total - 1.0).abs() < 1e-6, "{total}");
    }
}
