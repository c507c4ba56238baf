//! The reference model against values from an independent fp32 implementation: logits, taps and greedy tokens, by way of the target alone.

use anyhow::Context;
use outrider_bundle::VerifiedBundle;
use outrider_bundle::manifest::Precision;
use outrider_server::model::{Batch, BatchRow, OnnxTarget, Target};
use outrider_tests::fixtures;
use safetensors::SafeTensors;
use serde::Deserialize;

use crate::options;

/// Largest difference of a logit.
const LOGIT_TOLERANCE: f32 = 2e-3;

/// Largest difference of a tap, relative to the largest value of its row.
const TAP_TOLERANCE: f32 = 1e-2;

#[derive(Deserialize)]
struct Case {
    prompt_ids: Vec<u32>,
    greedy_ids: Vec<u32>,
}

/// Feeds `tokens` at `start` and returns the logits of the last one.
fn feed(
    target: &mut OnnxTarget,
    start: usize,
    tokens: &[u32],
    taps: bool,
) -> anyhow::Result<Vec<f32>> {
    let row = BatchRow {
        start,
        tokens: tokens.to_vec(),
        logits: tokens.len() - 1..tokens.len(),
    };
    let width = tokens.len().max(2);
    target.forward(&Batch {
        first_slot: 0,
        rows: vec![row],
        width,
        logit_width: 2,
        taps,
    })?;
    Ok(target.logits(0, 0).to_vec())
}

fn argmax(logits: &[f32]) -> u32 {
    let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]).then(b.cmp(&a)));
    best.expect("a vocabulary") as u32
}

#[test]
fn logits_taps_and_greedy_tokens_of_the_reference_model() -> anyhow::Result<()> {
    let cases: Vec<Case> = fixtures::json("goldens/smollm2-135m/cases.json")?;
    let bytes = std::fs::read(fixtures::data("goldens/smollm2-135m/cases.safetensors"))?;
    let goldens = SafeTensors::deserialize(&bytes)?;
    let golden = |name: String| -> anyhow::Result<Vec<f32>> {
        let (values, _) = goldens
            .tensor(&name)
            .with_context(|| name)?
            .data()
            .as_chunks::<4>();
        Ok(values
            .iter()
            .map(|value| f32::from_le_bytes(*value))
            .collect())
    };

    let bundle = VerifiedBundle::open(&xtask::reference::find(
        &fixtures::workspace()?,
        Precision::Fp32,
    )?)?;
    let mut target = OnnxTarget::load(&bundle, &options())?;
    let tap_size = target.shape().tap_size;
    for (index, case) in cases.iter().enumerate() {
        let logits = feed(&mut target, 0, &case.prompt_ids, true)?;
        let expected = golden(format!("case{index}.logits_last"))?;
        let difference = logits
            .iter()
            .zip(&expected)
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, f32::max);
        assert!(
            difference <= LOGIT_TOLERANCE,
            "case {index}: logits differ by {difference}"
        );

        let expected = golden(format!("case{index}.taps_last4"))?;
        for (offset, expected) in expected.chunks_exact(tap_size).enumerate() {
            let taps = target.taps().of(0, case.prompt_ids.len() - 4 + offset);
            let scale = expected.iter().map(|value| value.abs()).fold(0.0, f32::max);
            let difference = taps
                .iter()
                .zip(expected)
                .map(|(a, b)| (a - b).abs())
                .fold(0.0, f32::max);
            assert!(
                difference <= TAP_TOLERANCE * scale,
                "case {index}, position -{}: taps differ by {difference} of {scale}",
                4 - offset
            );
        }

        let mut logits = logits;
        let mut tokens = Vec::new();
        for start in case.prompt_ids.len()..case.prompt_ids.len() + case.greedy_ids.len() {
            let token = argmax(&logits);
            tokens.push(token);
            logits = feed(&mut target, start, &[token], false)?;
        }
        assert_eq!(tokens, case.greedy_ids, "case {index}");
    }
    Ok(())
}
