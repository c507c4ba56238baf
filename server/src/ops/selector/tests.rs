use half::{bf16, f16};
use proptest::prelude::*;

use super::*;
use crate::{
    engine::{
        request::Sampling,
        sampler::{Context, Sampler},
    },
    ops::testing::{Backwards, Numbers, Threads, exact},
};

/// Sizes and options of one random call.
#[derive(Clone, Debug)]
pub struct Setting {
    pub geometry: Geometry,
    pub candidates: usize,
    pub block_rows: Vec<usize>,
    pub temperature: f32,
    pub seed: u64,
}

prop_compose! {
    /// Any call.
    pub fn settings(has_codebooks: bool)(
        (batch, slots) in (1..4_usize, 1..8_usize),
        columns in prop_oneof![20..100_usize, 500..3000_usize],
        (top_k, rank) in (1..17_usize, 1..40_usize),
        temperature in prop_oneof![Just(0.0_f32), 0.2_f32..2.0],
        seed in any::<u64>(),
    ) -> Setting {
        let mut numbers = Numbers(seed);
        Setting {
            geometry: Geometry {
                top_k,
                batch,
                slots,
                columns,
                rank: if has_codebooks { rank } else { 0 },
                vocabulary: has_codebooks.then_some(columns),
            },
            candidates: 1 + numbers.below(top_k),
            block_rows: (0..batch).map(|_| numbers.below(slots + 2)).collect(),
            temperature,
            seed,
        }
    }
}

pub struct Tensors<T> {
    pub logits: Vec<f32>,
    pub block_ids: Vec<i64>,
    pub block_position_ids: Vec<i64>,
    pub block_rows: Vec<i64>,
    pub temperature: Vec<f32>,
    pub seed: Vec<i64>,
    pub candidate_topk: [i64; 1],
    pub hidden: Vec<T>,
    pub predecessor: Vec<T>,
    pub successor: Vec<T>,
    pub column_token_ids: Option<Vec<i64>>,
}

#[derive(Debug, PartialEq)]
pub struct Proposal {
    pub drafts: Vec<i64>,
    pub candidates: Vec<i64>,
    pub scores: Vec<f32>,
}

impl Setting {
    pub fn tensors<T: Element>(&self) -> Tensors<T> {
        let Geometry {
            batch,
            slots,
            columns,
            rank,
            vocabulary,
            ..
        } = self.geometry;
        let mut numbers = Numbers(self.seed ^ 1);
        let block = slots + 1;
        Tensors {
            // Few values, so that there are ties.
            logits: (0..batch * slots * columns)
                .map(|_| (numbers.float() * 200.0).round() / 20.0)
                .collect(),
            block_ids: (0..batch * block)
                .map(|_| numbers.below(columns) as i64)
                .collect(),
            block_position_ids: (0..batch)
                .flat_map(|batch| (0..block).map(move |row| (1000 * batch + row + 5) as i64))
                .collect(),
            block_rows: self.block_rows.iter().map(|&rows| rows as i64).collect(),
            temperature: vec![self.temperature; batch],
            seed: (0..batch).map(|_| numbers.bits() as i64).collect(),
            candidate_topk: [self.candidates as i64],
            hidden: numbers.elements(batch * slots * rank, 1.0),
            predecessor: numbers.elements(vocabulary.unwrap_or(0) * rank, 1.0),
            successor: numbers.elements(vocabulary.unwrap_or(0) * rank, 1.0),
            column_token_ids: None,
        }
    }

    fn try_run<T: Element>(
        &self,
        tensors: &Tensors<T>,
        pool: &impl Pool,
    ) -> Result<Proposal, OperatorError> {
        let places = self.geometry.batch * self.geometry.slots;
        // What the outputs held before must not matter.
        let mut proposal = Proposal {
            drafts: vec![7; places],
            candidates: vec![7; places * self.geometry.top_k],
            scores: vec![7.0; places * self.geometry.top_k],
        };
        let inputs = Inputs {
            logits: &tensors.logits,
            block_ids: &tensors.block_ids,
            block_position_ids: &tensors.block_position_ids,
            block_rows: &tensors.block_rows,
            temperature: &tensors.temperature,
            seed: &tensors.seed,
            candidate_topk: &tensors.candidate_topk,
            codebooks: self.geometry.vocabulary.map(|_| Codebooks {
                hidden: &tensors.hidden,
                predecessor: &tensors.predecessor,
                successor: &tensors.successor,
            }),
            column_token_ids: tensors.column_token_ids.as_deref(),
        };
        let outputs = Outputs {
            draft_ids: &mut proposal.drafts,
            candidate_ids: Some(&mut proposal.candidates),
            path_scores: Some(&mut proposal.scores),
        };
        select(&self.geometry, &inputs, outputs, pool)?;
        Ok(proposal)
    }

    pub fn run<T: Element>(&self, tensors: &Tensors<T>, pool: &impl Pool) -> Proposal {
        self.try_run(tensors, pool).unwrap()
    }

    fn drafted(&self, batch: usize) -> usize {
        self.block_rows[batch].saturating_sub(1)
    }

    /// Checks a proposal slot by slot against the definition in `f64`, along the path it took.
    pub fn check<T: Element>(&self, tensors: &Tensors<T>, proposal: &Proposal) {
        let Geometry {
            top_k,
            batch,
            slots,
            columns,
            rank,
            vocabulary,
        } = self.geometry;
        let [hidden, predecessor, successor] =
            [&tensors.hidden, &tensors.predecessor, &tensors.successor]
                .map(|elements| exact(elements));
        for batch in 0..batch {
            let mut before = tensors.block_ids[batch * (slots + 1)] as usize;
            for slot in 0..slots {
                let row = batch * slots + slot;
                let candidates = &proposal.candidates[row * top_k..][..top_k];
                let scores = &proposal.scores[row * top_k..][..top_k];
                if slot >= self.drafted(batch) {
                    assert_eq!(proposal.drafts[row], -1);
                    assert!(candidates.iter().all(|&id| id == -1));
                    assert!(scores.iter().all(|&score| score == f32::NEG_INFINITY));
                    continue;
                }
                let logits = &tensors.logits[row * columns..][..columns];
                let mut order: Vec<usize> = (0..columns).collect();
                order.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).unwrap().then(a.cmp(&b)));
                let mut want: Vec<i64> = order[..self.candidates]
                    .iter()
                    .map(|&column| column as i64)
                    .collect();
                want.resize(top_k, -1);
                assert_eq!(candidates, want, "candidates of slot {slot}");

                let score = |token: usize| {
                    let pair: f64 = if vocabulary.is_some() {
                        (0..rank)
                            .map(|r| {
                                predecessor[before * rank + r]
                                    * hidden[row * rank + r]
                                    * successor[token * rank + r]
                            })
                            .sum()
                    } else {
                        0.0
                    };
                    f64::from(logits[token]) + pair
                };
                let exact_scores: Vec<f64> = order[..self.candidates]
                    .iter()
                    .map(|&token| score(token))
                    .collect();
                for (got, want) in scores.iter().zip(&exact_scores) {
                    assert!(
                        (f64::from(*got) - want).abs() < 1e-4,
                        "score {got}, not {want}"
                    );
                }
                assert!(
                    scores[self.candidates..]
                        .iter()
                        .all(|&score| score == f32::NEG_INFINITY)
                );
                let draft = proposal.drafts[row];
                let chosen = candidates.iter().position(|&id| id == draft).unwrap();
                // The Gumbel-max rule; where rounding decides, either is right.
                let noise = crate::noise::Noise::new(
                    tensors.seed[batch] as u64,
                    tensors.block_position_ids[batch * (slots + 1) + slot + 1] as u64,
                );
                let rank_of = |index: usize| {
                    if self.temperature == 0.0 {
                        return exact_scores[index];
                    }
                    let word = noise.word(candidates[index] as u32);
                    let uniform = (f64::from(word) + 0.5) / 4_294_967_296.0;
                    exact_scores[index] / f64::from(self.temperature) - (-uniform.ln()).ln()
                };
                let best = (0..self.candidates)
                    .map(rank_of)
                    .fold(f64::NEG_INFINITY, f64::max);
                assert!(
                    rank_of(chosen) >= best - 1e-3,
                    "slot {slot} took {chosen}, which is {} below the best",
                    best - rank_of(chosen)
                );
                before = draft as usize;
            }
        }
    }
}

proptest! {
    #[test]
    fn proposals_are_what_the_definition_says(setting in settings(true)) {
        let tensors = setting.tensors::<f32>();
        setting.check(&tensors, &setting.run(&tensors, &Backwards));
        let tensors = setting.tensors::<f16>();
        setting.check(&tensors, &setting.run(&tensors, &Backwards));
        let tensors = setting.tensors::<bf16>();
        setting.check(&tensors, &setting.run(&tensors, &Backwards));
    }

    #[test]
    fn without_codebooks_the_choice_is_that_of_the_targets_sampler(setting in settings(false)) {
        let tensors = setting.tensors::<f32>();
        let proposal = setting.run(&tensors, &Backwards);
        setting.check(&tensors, &proposal);
        let Geometry { slots, columns, .. } = setting.geometry;
        for (row, &draft) in proposal.drafts.iter().enumerate().filter(|(_, draft)| **draft >= 0) {
            let (batch, slot) = (row / slots, row % slots);
            let sampling = Sampling { temperature: setting.temperature, top_k: setting.candidates as u32, ..Sampling::default() };
            // The position of a token is the number of tokens before it.
            let tokens = vec![1; tensors.block_position_ids[batch * (slots + 1) + slot + 1] as usize];
            let context = Context { sampling: &sampling, seed: tensors.seed[batch] as u64, tokens: &tokens, prompt_tokens: 1 };
            let chosen = Sampler::default().choose(&tensors.logits[row * columns..][..columns], context).unwrap();
            prop_assert_eq!(draft, i64::from(chosen));
        }
    }

    #[test]
    fn a_sequence_gets_alone_what_it_gets_in_a_batch(setting in settings(true)) {
        let tensors = setting.tensors::<f32>();
        let together = setting.run(&tensors, &Threads);
        let Geometry { slots, columns, rank, top_k, batch, .. } = setting.geometry;
        for index in 0..batch {
            let alone = Setting { geometry: Geometry { batch: 1, ..setting.geometry }, block_rows: vec![setting.block_rows[index]], ..setting.clone() };
            let part = |elements: &[f32], width: usize| elements[index * width..(index + 1) * width].to_vec();
            let own = Tensors {
                logits: part(&tensors.logits, slots * columns),
                block_ids: tensors.block_ids[index * (slots + 1)..][..slots + 1].to_vec(),
                block_position_ids: tensors.block_position_ids[index * (slots + 1)..][..slots + 1].to_vec(),
                block_rows: vec![tensors.block_rows[index]],
                temperature: vec![tensors.temperature[index]],
                seed: vec![tensors.seed[index]],
                hidden: part(&tensors.hidden, slots * rank),
                predecessor: tensors.predecessor.clone(),
                successor: tensors.successor.clone(),
                candidate_topk: tensors.candidate_topk,
                column_token_ids: None,
            };
            let places = index * slots * top_k..(index + 1) * slots * top_k;
            prop_assert_eq!(alone.run(&own, &Backwards), Proposal {
                drafts: together.drafts[index * slots..][..slots].to_vec(),
                candidates: together.candidates[places.clone()].to_vec(),
                scores: together.scores[places].to_vec(),
            });
        }
    }

    #[test]
    fn the_best_logits_are_those_a_sort_finds(
        mut logits in proptest::collection::vec(prop_oneof![4 => -3.0_f32..3.0, 1 => (-2..3_i32).prop_map(|x| x as f32), 1 => Just(f32::NEG_INFINITY), 1 => Just(-0.0_f32)], 1..700),
        wanted in 1..40_usize,
        bad in prop_oneof![6 => Just(None), 1 => Just(Some(f32::NAN)), 1 => Just(Some(f32::INFINITY)), 1 => Just(Some(-f32::NAN))],
        place in any::<prop::sample::Index>(),
    ) {
        if let Some(bad) = bad {
            let place = place.index(logits.len());
            logits[place] = bad;
        }
        let any_finite = logits.iter().any(|&logit| logit > f32::NEG_INFINITY);
        let mut got = vec![Candidate::default(); wanted.min(logits.len())];
        for instructions in InstructionSet::available() {
            let finite = top_k(instructions, &logits, &mut got);
            prop_assert_eq!(finite, bad.is_none() && any_finite, "{:?}", instructions);
            if !finite {
                continue;
            }
            let mut order: Vec<usize> = (0..logits.len()).collect();
            order.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).unwrap().then(a.cmp(&b)));
            let columns: Vec<usize> = got.iter().map(|candidate| candidate.column as usize).collect();
            prop_assert_eq!(&columns, &order[..got.len()], "{:?}", instructions);
            prop_assert!(got.iter().all(|candidate| candidate.score.to_bits() == logits[candidate.column as usize].to_bits()));
        }
    }
}

fn setting() -> Setting {
    Setting {
        geometry: Geometry {
            top_k: 4,
            batch: 2,
            slots: 3,
            columns: 200,
            rank: 8,
            vocabulary: Some(200),
        },
        candidates: 4,
        block_rows: vec![4, 4],
        temperature: 0.0,
        seed: 3,
    }
}

#[test]
fn a_slot_that_is_not_finite_ends_the_proposal_of_its_sequence_only() {
    let setting = setting();
    let clean = setting.run(&setting.tensors::<f32>(), &Backwards);
    let width = setting.geometry.columns;
    for (bad, places) in [
        (f32::NAN, 5..6),
        (f32::INFINITY, 199..200),
        (f32::NEG_INFINITY, 0..200),
    ] {
        let mut tensors = setting.tensors::<f32>();
        tensors.logits[width..2 * width][places].fill(bad);
        let drafts = setting.run(&tensors, &Backwards).drafts;
        assert_eq!(drafts[0], clean.drafts[0], "{bad}");
        assert_eq!(drafts[1..3], [-1, -1], "{bad}");
        assert_eq!(drafts[3..], clean.drafts[3..], "{bad}");
    }
    // The same for what the codebooks make of it.
    let mut tensors = setting.tensors::<f32>();
    tensors.hidden[2 * 8] = f32::NAN;
    let proposal = setting.run(&tensors, &Backwards);
    assert_eq!(proposal.drafts[..2], clean.drafts[..2]);
    assert_eq!(proposal.drafts[2], -1);
    assert!(
        proposal.scores[2 * 4..3 * 4]
            .iter()
            .all(|&score| score == f32::NEG_INFINITY)
    );
}

#[test]
fn masked_columns_are_never_proposed() {
    let setting = Setting {
        temperature: 2.0,
        ..setting()
    };
    let mut tensors = setting.tensors::<f32>();
    tensors.logits.fill(f32::NEG_INFINITY);
    for row in 0..6 {
        tensors.logits[row * 200 + 17 + row] = -3.0;
    }
    assert_eq!(
        setting.run(&tensors, &Backwards).drafts,
        [17, 18, 19, 20, 21, 22]
    );
}

#[test]
fn a_partial_head_proposes_the_tokens_of_its_columns() {
    let setting = setting();
    let whole = setting.tensors::<f32>();
    // Every second token has a column: the whole head with the others masked proposes the same.
    let (mut partial, mut masked) = (setting.tensors::<f32>(), setting.tensors::<f32>());
    partial.logits = whole.logits.iter().copied().step_by(2).collect();
    partial.column_token_ids = Some((0..200).step_by(2).collect());
    for (column, logit) in masked.logits.iter_mut().enumerate() {
        if column % 2 == 1 {
            *logit = f32::NEG_INFINITY;
        }
    }
    let narrow = Setting {
        geometry: Geometry {
            columns: 100,
            ..setting.geometry
        },
        ..setting.clone()
    };
    for temperature in [0.0, 0.7] {
        (partial.temperature, masked.temperature) = (vec![temperature; 2], vec![temperature; 2]);
        assert_eq!(
            narrow.run(&partial, &Backwards),
            setting.run(&masked, &Backwards)
        );
    }
    partial.column_token_ids = Some((0..100).map(|column| column + 150).collect());
    let error = narrow.try_run(&partial, &Backwards).unwrap_err();
    assert!(
        error.to_string().starts_with("input column_token_ids[")
            && error.to_string().ends_with("; allowed is 0 to 199"),
        "{error}"
    );
}

#[test]
fn values_outside_their_limits_are_named() {
    let check = |change: &dyn Fn(&mut Tensors<f32>), message: &str| {
        let setting = setting();
        let mut tensors = setting.tensors::<f32>();
        change(&mut tensors);
        let error = setting.try_run(&tensors, &Backwards).unwrap_err();
        assert_eq!(error.to_string(), message);
    };
    check(
        &|tensors| tensors.candidate_topk = [5],
        "input candidate_topk[0] is 5; allowed is 1 to 4",
    );
    check(
        &|tensors| tensors.candidate_topk = [0],
        "input candidate_topk[0] is 0; allowed is 1 to 4",
    );
    check(
        &|tensors| tensors.block_rows[1] = 5,
        "input block_rows[1] is 5; allowed is 0 to 4",
    );
    check(
        &|tensors| tensors.block_rows[0] = -1,
        "input block_rows[0] is -1; allowed is 0 to 4",
    );
    check(
        &|tensors| tensors.temperature[1] = f32::NAN,
        "input temperature[1] is NaN; allowed is a finite number, 0 or above",
    );
    check(
        &|tensors| tensors.temperature[0] = -0.5,
        "input temperature[0] is -0.5; allowed is a finite number, 0 or above",
    );
    check(
        &|tensors| tensors.block_ids[4] = 200,
        "input block_ids[4] is 200; allowed is 0 to 199",
    );
    check(
        &|tensors| tensors.block_position_ids[3] = -1,
        "input block_position_ids[3] is -1; allowed is 0 to 9223372036854775807",
    );
}

#[test]
fn shapes_that_disagree_are_named() {
    let check = |top_k: usize, change: &dyn Fn(&mut Shapes<'_>), message: &str| {
        let mut shapes = Shapes {
            logits: &[2, 3, 50],
            block_ids: &[2, 4],
            block_position_ids: &[2, 4],
            block_rows: &[2],
            temperature: &[2],
            seed: &[2],
            candidate_topk: &[1],
            codebooks: [Some(&[2, 3, 8]), Some(&[50, 8]), Some(&[50, 8])],
            column_token_ids: None,
        };
        assert!(Geometry::new(4, &shapes).is_ok());
        change(&mut shapes);
        assert_eq!(
            Geometry::new(top_k, &shapes).unwrap_err().to_string(),
            message
        );
    };
    check(0, &|_| {}, "attribute top_k is 0; allowed is at least 1");
    check(
        51,
        &|_| {},
        "input logits has shape [2, 3, 50]; expected is at least top_k = 51 columns, and fewer than 2^32",
    );
    check(
        4,
        &|shapes| shapes.logits = &[6, 50],
        "input logits has shape [6, 50]; expected is [batch, slots, columns]",
    );
    check(
        4,
        &|shapes| shapes.block_ids = &[2, 3],
        "input block_ids has shape [2, 3]; expected is [2, 4]",
    );
    check(
        4,
        &|shapes| shapes.seed = &[1],
        "input seed has shape [1]; expected is [2]",
    );
    check(
        4,
        &|shapes| shapes.candidate_topk = &[2],
        "input candidate_topk has shape [2]; expected is [1]",
    );
    check(
        4,
        &|shapes| shapes.codebooks[0] = Some(&[2, 4, 8]),
        "input selector_hidden has shape [2, 4, 8]; expected is [2, 3, 8]",
    );
    check(
        4,
        &|shapes| shapes.codebooks[2] = Some(&[50, 7]),
        "input successor_codebook has shape [50, 7]; expected is [50, 8]",
    );
    check(
        4,
        &|shapes| shapes.codebooks[1] = None,
        "only some of the inputs selector_hidden, predecessor_codebook and successor_codebook are there; allowed is all or none",
    );
    check(
        4,
        &|shapes| {
            shapes.codebooks = [Some(&[2, 3, 8]), Some(&[49, 8]), Some(&[49, 8])];
        },
        "input logits has shape [2, 3, 50]; expected is at most 49 columns, as many as a codebook has rows, where there are no column_token_ids",
    );
    check(
        4,
        &|shapes| shapes.column_token_ids = Some(&[49]),
        "input column_token_ids has shape [49]; expected is [50]",
    );
}
