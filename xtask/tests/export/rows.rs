//! A row's result does not depend on how many rows are computed with it: the ground of lossless speculation.

use outrider_bundle::manifest::{Attention, Precision};
use outrider_server::model::OnnxTarget;

use crate::support::*;

/// Feeds three sequences in many ways and expects the same bits of all.
fn check(name: &str, mut target: OnnxTarget, chunk_sizes: &[usize]) {
    let sequences: Vec<Vec<u32>> = (0..3)
        .map(|seed| tokens(seed, 21 + 4 * seed as usize))
        .collect();
    let reference: Vec<Rows> = sequences
        .iter()
        .map(|sequence| run_in_chunks(&mut target, 0, sequence, [sequence.len()]))
        .collect();

    for &size in chunk_sizes {
        for (slot, sequence) in sequences.iter().enumerate() {
            // The rest goes in two: a chunk of one row must not be left over where one row is not allowed.
            let whole = (sequence.len() / size - 2) * size;
            let chunks = vec![size; whole / size]
                .into_iter()
                .chain([sequence.len() - whole]);
            let rows = run_in_chunks(&mut target, slot, sequence, chunks);
            assert!(
                rows == reference[slot],
                "{name}: chunks of {size} change bits"
            );
        }
    }

    // All together, each at its own length.
    let heads = [5, 9, 14];
    for (slot, sequence) in sequences.iter().enumerate() {
        run_in_chunks(&mut target, slot, &sequence[..heads[slot]], [heads[slot]]);
    }
    let parts: Vec<(usize, &[u32])> = sequences
        .iter()
        .zip(heads)
        .map(|(sequence, head)| (head, &sequence[head..]))
        .collect();
    let together = forward(&mut target, 0, &parts);
    for (slot, rows) in together.iter().enumerate() {
        assert!(
            rows.logits == reference[slot].logits[heads[slot]..]
                && rows.taps == reference[slot].taps[heads[slot]..],
            "{name}: company changes bits of sequence {slot}"
        );
    }
}

fn check_all(attention: Attention, chunk_sizes: &[usize]) {
    for precision in [Precision::Fp32, Precision::Int8, Precision::Int4] {
        for name in ["llama", "mistral", "qwen3-yarn"] {
            let target = target(name, precision, attention);
            check(&format!("{name}, {precision:?}"), target, chunk_sizes);
        }
        let target = target_of(&odd_checkpoint(true), precision, attention);
        check(&format!("odd sizes, {precision:?}"), target, chunk_sizes);
    }
}

#[test]
fn native_graphs_give_the_same_bits_for_any_width_and_company() {
    check_all(Attention::Native, &[1, 2, 3, 7]);
}

#[test]
fn portable_graphs_give_the_same_bits_for_any_width_above_one() {
    check_all(Attention::Portable, &[2, 3, 7]);
}
