use super::*;
use crate::ops::selector::walk::{Lattice, walk};

const NAMES: [&str; 4] = [
    "dflash1-tiny",
    "dflash1-swa-tiny",
    "dflash2-tiny",
    "dflash2-scaled-tiny",
];

#[test]
fn a_draft_head_made_of_the_operators_computes_what_the_goldens_say() {
    for name in NAMES {
        let mut head = Head::load(name);
        for case in [
            "basic",
            "offset_positions",
            "long_context",
            "one_token_context",
            "short_block",
        ] {
            if !head.cases.0.contains_key(&format!("{case}.in.anchor")) {
                continue;
            }
            let block_ids = head
                .cases
                .integers(&format!("{case}.in.block_ids"))
                .to_vec();
            let taps = head.cases.floats(&format!("{case}.in.taps")).to_vec();
            head.clear_caches();
            let context = taps.len() / head.weights.get("fc.weight").shape[1];
            let offset = head.cases.scalar(&format!("{case}.in.context_start")) as usize;
            head.forward(Place { start: 0, offset }, &taps, &block_ids);
            head.check_stages(case);
            let top_k = if head.has_selector() {
                head.size("selector_top_k")
            } else {
                1
            };
            let proposal = head.select(&block_ids, offset + context, top_k);
            let want = |stage: &str| head.cases.get(&format!("{case}.out.{stage}"));
            assert_eq!(proposal.drafts, want("draft_ids").integers, "{name} {case}");
            if !head.has_selector() {
                continue;
            }
            assert_eq!(
                proposal.candidates,
                want("topk_ids").integers,
                "{name} {case}"
            );
            let slots = &want("draft_slots").integers;
            for slot in 0..slots.len() {
                let before = if slot == 0 {
                    0
                } else {
                    slots[slot - 1] as usize
                };
                let edges = &want("edge_scores").floats[(slot * top_k + before) * top_k..][..top_k];
                assert_close(
                    &format!("{name} {case} slot {slot}"),
                    &proposal.scores[slot * top_k..][..top_k],
                    edges,
                );
            }
        }
    }
}

#[test]
fn the_decode_loop_proposes_what_the_goldens_say() {
    for name in NAMES {
        let mut head = Head::load(name);
        head.clear_caches();
        let (width, mask) = (
            head.weights.get("fc.weight").shape[1],
            head.size("mask_token_id") as i64,
        );
        let mut anchor = head.cases.scalar("multi.prefill.anchor");
        let mut taps = head.cases.floats("multi.prefill.taps").to_vec();
        let mut start = 0;
        for step in 0.. {
            let key = |what: &str| format!("multi.step{step}.{what}");
            if !head.cases.0.contains_key(&key("anchor")) {
                assert!(step >= 3, "{name} has {step} steps");
                break;
            }
            let context = taps.len() / width;
            assert_eq!(
                head.cases.scalar(&key("anchor")),
                anchor,
                "{name} step {step}"
            );
            assert_eq!(
                head.cases.scalar(&key("block_start")) as usize,
                start + context,
                "{name} step {step}"
            );
            let want = head.cases.integers(&key("out.draft_ids")).to_vec();
            let mut block_ids = vec![mask; want.len() + 1];
            block_ids[0] = anchor;
            head.forward(Place { start, offset: 0 }, &taps, &block_ids);
            head.check_stages(&format!("multi.step{step}"));
            let top_k = if head.has_selector() {
                head.size("selector_top_k")
            } else {
                1
            };
            assert_eq!(
                head.select(&block_ids, start + context, top_k).drafts,
                want,
                "{name} step {step}"
            );
            if !head.cases.0.contains_key(&key("verify.accepted")) {
                continue;
            }
            let kept = head.cases.scalar(&key("verify.accepted")) as usize + 1;
            start += context;
            taps = head.cases.floats(&key("verify.taps"))[..kept * width].to_vec();
            anchor = head.cases.scalar(&key("verify.bonus"));
        }
    }
}

#[test]
fn the_sampled_walk_takes_what_the_recorded_uniforms_say() {
    for name in ["dflash2-tiny", "dflash2-scaled-tiny"] {
        let mut head = Head::load(name);
        for case in ["sampled_full", "sampled_partial"] {
            let input = |stage: &str| format!("{case}.in.{stage}");
            let taps = head.cases.floats(&input("taps")).to_vec();
            let mask = head.size("mask_token_id") as i64;
            let uniforms = head.cases.floats(&input("walk_uniforms")).to_vec();
            let slots = uniforms.len();
            let mut block_ids = vec![mask; slots + 1];
            block_ids[0] = head.cases.scalar(&input("anchor"));
            head.clear_caches();
            let offset = head.cases.scalar(&input("context_start")) as usize;
            head.forward(Place { start: 0, offset }, &taps, &block_ids);
            let top_k = head.size("selector_top_k");
            let candidates = head.select(&block_ids, 0, top_k).candidates;
            let want = |stage: &str| head.cases.get(&format!("{case}.out.{stage}"));
            assert_eq!(candidates, want("topk_ids").integers, "{name} {case}");

            let tokens: Vec<u32> = candidates.iter().map(|&id| id as u32).collect();
            let (logits, vocabulary) = (&head.stages["logits"], head.size("vocab_size"));
            let mut scores: Vec<f32> = tokens
                .iter()
                .enumerate()
                .map(|(index, &token)| logits[index / top_k * vocabulary + token as usize])
                .collect();
            let temperature = f64::from(head.cases.floats(&input("temperature"))[0]);
            let softmax = |scores: &[f32]| -> Vec<f64> {
                let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let weights: Vec<f64> = scores
                    .iter()
                    .map(|&score| (f64::from(score - largest) / temperature).exp())
                    .collect();
                let sum: f64 = weights.iter().sum();
                weights.iter().map(|weight| weight / sum).collect()
            };
            let codebooks = head.codebooks().unwrap();
            let rank = codebooks.hidden.len() / slots;
            let mut drafts = vec![-1; slots];
            walk(
                Lattice {
                    width: top_k,
                    tokens: &tokens,
                    scores: &mut scores,
                },
                block_ids[0] as usize,
                |slot, predecessor, tokens, scores| {
                    codebooks.add(rank, slot, predecessor, tokens, scores)
                },
                |slot, _, scores| {
                    let mut sum = 0.0;
                    softmax(scores).iter().position(|q| {
                        sum += q;
                        sum > f64::from(uniforms[slot])
                    })
                },
                &mut drafts,
            );
            assert_eq!(drafts, want("draft_ids").integers, "{name} {case}");
            let q: Vec<f32> = scores
                .chunks(top_k)
                .flat_map(softmax)
                .map(|q| q as f32)
                .collect();
            assert_close(&format!("{name} {case} q"), &q, &want("q").floats);
        }
    }
}
