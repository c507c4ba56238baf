//! Graphs of every family and form compute what the checkpoint's own library computes.

use outrider_bundle::manifest::{Attention, Precision};

use crate::support::*;

#[test]
fn fp32_graphs_compute_what_transformers_computes() {
    for name in CHECKPOINTS {
        for attention in ATTENTIONS {
            let mut target = target(name, Precision::Fp32, attention);
            for (slot, golden) in goldens(name).iter().enumerate() {
                let whole = run_in_chunks(&mut target, slot, &golden.tokens, [usize::MAX >> 1]);
                let cached = run_in_chunks(
                    &mut target,
                    slot,
                    &golden.tokens,
                    golden.chunks.iter().copied(),
                );
                for (what, actual, expect) in [
                    ("logits", &whole.logits, &golden.logits),
                    ("taps", &whole.taps, &golden.taps),
                    ("cached logits", &cached.logits, &golden.cached_logits),
                    ("cached taps", &cached.taps, &golden.taps),
                ] {
                    let difference = largest_difference(actual, expect);
                    assert!(
                        difference < 1e-4,
                        "{name}, {attention:?}, sequence {slot}: {what} differ by {difference}"
                    );
                }
            }
        }
    }
}

#[test]
fn ragged_batches_compute_what_transformers_computes() {
    for name in CHECKPOINTS {
        for attention in ATTENTIONS {
            let mut target = target(name, Precision::Fp32, attention);
            let goldens = goldens(name);
            let [long, short] = &goldens[..] else {
                panic!("two sequences are recorded");
            };
            // The sequences stand at different lengths when they are stepped together.
            let (first_long, first_short) = (12, 3);
            let mut long_rows =
                run_in_chunks(&mut target, 1, &long.tokens[..first_long], [first_long]);
            let mut short_rows =
                run_in_chunks(&mut target, 2, &short.tokens[..first_short], [first_short]);
            let parts = [
                (first_long, &long.tokens[first_long..]),
                (first_short, &short.tokens[first_short..]),
            ];
            let together = forward(&mut target, 1, &parts);
            long_rows.logits.extend(together[0].logits.clone());
            short_rows.logits.extend(together[1].logits.clone());
            for (rows, golden) in [(long_rows, long), (short_rows, short)] {
                let difference = largest_difference(&rows.logits, &golden.logits);
                assert!(
                    difference < 1e-4,
                    "{name}, {attention:?}: logits differ by {difference}"
                );
            }
        }
    }
}

#[test]
fn lower_precisions_stay_near_fp32() {
    // These checkpoints are random and narrow: rounding shows far more than in a trained model.
    for (precision, most) in [
        (Precision::Fp16, 0.004),
        (Precision::Int8, 0.06),
        (Precision::Int4, 0.35),
    ] {
        for name in CHECKPOINTS {
            for attention in ATTENTIONS {
                let mut target = target(name, precision, attention);
                for (slot, golden) in goldens(name).iter().enumerate() {
                    let chunks = [golden.tokens.len() - 4, 2, 2];
                    let rows = run_in_chunks(&mut target, slot, &golden.tokens, chunks);
                    for (what, actual, expect) in [
                        ("logits", &rows.logits, &golden.logits),
                        ("taps", &rows.taps, &golden.taps),
                    ] {
                        let error = relative_error(actual, expect);
                        assert!(
                            error < most,
                            "{name}, {precision:?}, {attention:?}: {what} are off by {error}"
                        );
                        assert!(
                            error > 1e-6,
                            "{name}, {precision:?}: {what} are those of fp32"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn sizes_that_are_no_multiple_of_a_block_are_padded_without_effect() {
    for tied in [true, false] {
        let checkpoint = odd_checkpoint(tied);
        let sequence = tokens(7, 12);
        let rows = |precision| {
            let mut target = target_of(&checkpoint, precision, Attention::Native);
            run_in_chunks(&mut target, 0, &sequence, [7, 5])
        };
        let exact = rows(Precision::Fp32);
        for (precision, most) in [
            (Precision::Fp16, 0.004),
            (Precision::Int8, 0.06),
            (Precision::Int4, 0.35),
        ] {
            let rows = rows(precision);
            for (what, actual, expect) in [
                ("logits", &rows.logits, &exact.logits),
                ("taps", &rows.taps, &exact.taps),
            ] {
                let error = relative_error(actual, expect);
                assert!(
                    error < most && error > 1e-6,
                    "tied {tied}, {precision:?}: {what} are off by {error}"
                );
            }
        }
    }
}
