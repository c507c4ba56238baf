//! A trained tiny target and its drafter, exported as a pair: the whole decode loop against the recorded one.

use std::fs;

use outrider_bundle::manifest::{Attention, Precision};
use tempfile::TempDir;
use xtask::checkpoint::{self, open_draft};
use xtask::export::{Options, write_pair};

use super::support::*;
use crate::support::{forward, load};

const GOLDEN: &str = "dflash2-e2e-tiny";

/// Tokens that every recorded run generates.
const NEW_TOKENS: usize = 40;

fn argmax(logits: &[f32]) -> i64 {
    let best = |best: usize, index: usize| match logits[index] > logits[best] {
        true => index,
        false => best,
    };
    (1..logits.len()).fold(0, best) as i64
}

#[test]
fn an_exported_pair_generates_with_the_recorded_taps_drafts_and_acceptance() {
    let dir = TempDir::new().unwrap();
    let target_dir = dir.path().join("target");
    fs::create_dir(&target_dir).unwrap();
    for file in ["config.json", "model.safetensors"] {
        let golden = draft_dir(GOLDEN).join("target").join(file);
        fs::copy(golden, target_dir.join(file)).unwrap();
    }
    // The model has no text.
    fs::write(
        target_dir.join("tokenizer.json"),
        r#"{"model": {"vocab": {}}}"#,
    )
    .unwrap();
    let checkpoint = checkpoint::open(&target_dir).unwrap();
    let draft = open_draft(&draft_dir(GOLDEN).join("draft"), &[]).unwrap();
    let cases = Cases::of(GOLDEN);
    for form in FORMS {
        let bundle = dir.path().join("bundle");
        let target_options = Options {
            precision: Precision::Fp32,
            attention: Attention::Native,
            taps: draft.config.target_layer_ids.clone(),
        };
        let draft_options = options(form, false);
        let manifest = write_pair(
            &checkpoint,
            &target_options,
            &draft,
            &draft_options,
            &bundle,
        )
        .unwrap();
        let facts = manifest.draft.unwrap();
        let mut target = load(&bundle);
        for run in 0..5 {
            let what = format!("run {run}, {form:?}");
            let recorded = |part: &str| cases.ints(&format!("run{run}.{part}"));
            let mut graph = Graph::open(&bundle, facts.clone(), draft.config.tap_size(), 1);
            let prompt: Vec<u32> = recorded("prompt")
                .values
                .iter()
                .map(|&id| id as u32)
                .collect();
            let rows = forward(&mut target, 0, &[(0, &prompt)]).remove(0);
            let mut taps = rows.taps.concat();
            let expected = &cases.floats(&format!("run{run}.prompt_taps")).values;
            let near = |(a, e): (&f32, &f32)| (a - e).abs() <= 5e-4 + 1e-4 * e.abs();
            assert!(
                taps.len() == expected.len() && taps.iter().zip(expected).all(near),
                "{what}"
            );

            let mut output = vec![argmax(&rows.logits[prompt.len() - 1])];
            let (mut start, mut position) = (0, prompt.len());
            let mut accept_lengths = Vec::new();
            let mut drafts = Vec::new();
            while output.len() < NEW_TOKENS {
                let anchor = output[output.len() - 1];
                let width = draft.config.block_size.min(NEW_TOKENS - output.len() + 1);
                let outputs = graph.run(&[Slot {
                    start,
                    taps,
                    positions: (start as i64..position as i64).collect(),
                    block: [vec![anchor], vec![facts.mask_token_id.into(); width - 1]].concat(),
                    anchor_position: position as i64,
                    ..Slot::default()
                }]);
                let proposed = &outputs.ints["draft_ids"].values;
                let block: Vec<u32> = [&[anchor], &proposed[..]]
                    .concat()
                    .iter()
                    .map(|&id| id as u32)
                    .collect();
                let rows = forward(&mut target, 0, &[(position, &block)]).remove(0);
                let choices: Vec<i64> = rows.logits.iter().map(|row| argmax(row)).collect();
                let agree = proposed.iter().zip(&choices);
                let accepted = agree.take_while(|(id, choice)| id == choice).count();
                output.extend(&choices[..=accepted]);
                accept_lengths.push(accepted as i64 + 1);
                drafts.extend(proposed);
                drafts.resize(accept_lengths.len() * (draft.config.block_size - 1), -1);
                taps = rows.taps[..=accepted].concat();
                start = position;
                position += accepted + 1;
            }
            output.truncate(NEW_TOKENS);
            assert_eq!(output, recorded("output").values, "{what}");
            assert_eq!(drafts, recorded("drafts").values, "{what}");
            assert_eq!(accept_lengths, recorded("accept_lengths").values, "{what}");
        }
    }
}
