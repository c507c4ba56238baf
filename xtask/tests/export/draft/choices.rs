//! What a request or an export may choose: fewer candidates, a part of the vocabulary, another precision.

use outrider_bundle::manifest::Precision;
use xtask::export::DraftOptions;

use super::goldens::slot_of;
use super::support::*;

/// What a walk with at most `top_k` candidates out of some tokens takes, in plain arithmetic.
struct Walk {
    predecessors: Vec<f32>,
    successors: Vec<f32>,
    rank: usize,
    tokens: Vec<usize>,
    top_k: usize,
}

impl Walk {
    /// Tokens for the slots of a recorded pass.
    fn take(&self, cases: &Cases, case: &str) -> Vec<i64> {
        let logits = cases.floats(&format!("{case}.out.logits"));
        let hidden = cases.floats(&format!("{case}.out.selector_hidden"));
        let mut before = cases.ints(&format!("{case}.in.anchor")).values[0] as usize;
        let mut path = Vec::new();
        for slot in 0..logits.shape[0] {
            let logits = &logits.values[slot * logits.shape[1]..][..logits.shape[1]];
            let hidden = &hidden.values[slot * self.rank..][..self.rank];
            let mut candidates = self.tokens.clone();
            candidates.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
            candidates.truncate(self.top_k);
            let score = |token: usize| -> f32 {
                let edge = (0..self.rank).map(|index| {
                    self.predecessors[before * self.rank + index]
                        * hidden[index]
                        * self.successors[token * self.rank + index]
                });
                logits[token] + edge.sum::<f32>()
            };
            before = candidates
                .into_iter()
                .max_by(|&a, &b| score(a).total_cmp(&score(b)))
                .unwrap();
            path.push(before as i64);
        }
        path
    }
}

#[test]
fn fewer_candidates_and_a_cut_vocabulary_choose_among_what_is_left() {
    for name in ["dflash2-tiny", "dflash2-scaled-tiny"] {
        let (checkpoint, cases) = (draft(name), Cases::of(name));
        let codebook = |which: &str| {
            let tensor = format!("candidate_selector.{which}_codebook");
            checkpoint.weights.load(&tensor).unwrap()
        };
        let dflash2 = checkpoint.config.dflash2.unwrap();
        let all: Vec<usize> = (0..checkpoint.config.vocab_size).collect();
        let part: Vec<usize> = all.iter().copied().filter(|token| token % 3 != 1).collect();
        for (tokens, top_k) in [
            (None, 1),
            (None, 3),
            (Some(part.clone()), dflash2.selector_top_k),
            (Some(part.clone()), 2),
        ] {
            let walk = Walk {
                predecessors: codebook("predecessor"),
                successors: codebook("successor"),
                rank: dflash2.selector_rank,
                tokens: tokens.clone().unwrap_or_else(|| all.clone()),
                top_k,
            };
            for form in FORMS {
                let options = DraftOptions {
                    vocabulary: tokens
                        .as_ref()
                        .map(|tokens| tokens.iter().map(|&token| token as u32).collect()),
                    ..options(form, false)
                };
                let mut graph = Graph::load(&checkpoint, &cases, &options, 1);
                assert_eq!(graph.facts.vocabulary_columns, walk.tokens.len());
                graph.candidate_topk = top_k as i64;
                for case in cases.passes() {
                    if case.starts_with("sampled") {
                        continue;
                    }
                    let slot = slot_of(&cases, &case, graph.facts.mask_token_id.into());
                    let outputs = graph.run(&[slot]);
                    assert_eq!(
                        outputs.ints["draft_ids"].values,
                        walk.take(&cases, &case),
                        "{name}, {form:?}, {case}, {top_k} of {} tokens",
                        walk.tokens.len()
                    );
                }
            }
        }
    }
}

#[test]
fn a_cut_vocabulary_of_a_draft_without_selector_proposes_the_best_token_left() {
    let name = "dflash1-tiny";
    let (checkpoint, cases) = (draft(name), Cases::of(name));
    let tokens: Vec<u32> = (0..128).filter(|token| token % 3 != 1).collect();
    for form in FORMS {
        let options = DraftOptions {
            vocabulary: Some(tokens.clone()),
            ..options(form, false)
        };
        let mut graph = Graph::load(&checkpoint, &cases, &options, 1);
        for case in cases.passes() {
            let slot = slot_of(&cases, &case, graph.facts.mask_token_id.into());
            let logits = cases.floats(&format!("{case}.out.logits"));
            let best = logits.values.chunks(128).map(|row| {
                let better = |a: &&u32, b: &&u32| row[**a as usize].total_cmp(&row[**b as usize]);
                i64::from(*tokens.iter().max_by(better).unwrap())
            });
            let expected: Vec<i64> = best.collect();
            let outputs = graph.run(&[slot]);
            assert_eq!(
                outputs.ints["draft_ids"].values, expected,
                "{form:?}, {case}"
            );
        }
    }
}

#[test]
fn logits_that_are_not_finite_end_the_proposal() {
    for name in DRAFTS {
        let (checkpoint, cases) = (draft(name), Cases::of(name));
        for form in FORMS {
            let mut graph = Graph::load(&checkpoint, &cases, &options(form, false), 2);
            let mask = graph.facts.mask_token_id.into();
            let good = slot_of(&cases, "basic", mask);
            let mut bad = good.clone();
            bad.taps[3] = f32::NAN;
            let outputs = graph.run(&[bad, good]);
            let ids = &outputs.ints["draft_ids"];
            let slots = ids.shape[1];
            assert_eq!(ids.values[..slots], vec![-1; slots], "{name}, {form:?}");
            assert_eq!(
                ids.values[slots..],
                cases.ints("basic.out.draft_ids").values,
                "{name}, {form:?}: one slot reaches another"
            );
        }
    }
}

/// Root mean square of a difference, relative to the expected values.
fn relative_error(actual: &[f32], expected: &[f32]) -> f32 {
    let square = |values: &mut dyn Iterator<Item = f32>| values.map(|v| v * v).sum::<f32>();
    let difference = square(&mut actual.iter().zip(expected).map(|(a, e)| a - e));
    (difference / square(&mut expected.iter().copied())).sqrt()
}

#[test]
fn lower_precisions_stay_near_fp32() {
    // These drafts are random and narrow: rounding shows far more than in a trained one.
    for (precision, most) in [(Precision::Int8, 0.08), (Precision::Int4, 0.35)] {
        for name in DRAFTS {
            let (checkpoint, cases) = (draft(name), Cases::of(name));
            for form in FORMS {
                let options = DraftOptions {
                    precision,
                    ..options(form, true)
                };
                let mut graph = Graph::load(&checkpoint, &cases, &options, 1);
                let slot = slot_of(&cases, "basic", graph.facts.mask_token_id.into());
                let outputs = graph.run(&[slot]);
                for stage in ["block_embed", "fused", "final_hidden", "logits"] {
                    let error = relative_error(
                        &outputs.floats[&format!("stage.{stage}")].values,
                        &cases.floats(&format!("basic.out.{stage}")).values,
                    );
                    assert!(
                        error < most && error > 1e-6,
                        "{name}, {precision:?}, {form:?}: {stage} is off by {error}"
                    );
                }
            }
        }
    }
}
