//! The two forms of a graph against each other, where the goldens have nothing: biases, settings that no golden mixes, and passes that only append.

use outrider_bundle::manifest::{Attention, Precision};
use xtask::checkpoint::{Checkpoint, DraftAttention, DraftConfig};
use xtask::export::DraftOptions;

use super::pairs::{config_for, draft_for};
use super::support::*;
use crate::support::{checkpoint, tokens};

/// Numbers from -1 to 1 that look random.
fn numbers(seed: u32, count: usize) -> Vec<f32> {
    let tokens = tokens(seed, count).into_iter();
    tokens.map(|token| token as f32 / 64.0 - 1.0).collect()
}

/// Passes over four slots that are at different lengths: each one's new context rows and its block, in order.
fn passes() -> [[(usize, usize); 4]; 4] {
    [
        [(9, 5), (1, 2), (0, 0), (14, 0)],
        [(1, 5), (3, 4), (6, 3), (0, 5)],
        [(0, 1), (2, 5), (5, 2), (4, 5)],
        [(5, 3), (0, 5), (1, 5), (1, 2)],
    ]
}

/// The ids of every pass, and the valid rows of the caches at the end.
fn run(target: &Checkpoint, config: &DraftConfig, options: &DraftOptions) -> (Vec<i64>, Vec<f32>) {
    let draft = draft_for(config.clone());
    let mut graph = Graph::load(&draft, target.weights.as_ref(), options, 4);
    let mut lengths = [0; 4];
    let mut ids = Vec::new();
    for (pass, parts) in passes().iter().enumerate() {
        let slots: Vec<Slot> = parts
            .iter()
            .enumerate()
            .map(|(slot, &(rows, block))| {
                let start = lengths[slot];
                lengths[slot] += rows;
                let position = lengths[slot] as i64;
                let seed = (100 * pass + slot) as u32;
                let anchor = tokens(seed, 1)[0].into();
                Slot {
                    start,
                    taps: numbers(seed, rows * config.tap_size()),
                    positions: (start as i64..position).collect(),
                    block: std::iter::once(anchor)
                        .chain([config.mask_token_id.into(); 4])
                        .take(block)
                        .collect(),
                    anchor_position: position,
                    ..Slot::default()
                }
            })
            .collect();
        graph.candidate_topk = 1 + (pass as i64 + 1) % graph.facts.top_k as i64;
        ids.extend(graph.run(&slots).ints["draft_ids"].values.clone());
    }
    let width = config.kv_heads * config.head_dim;
    let sides = graph.caches.iter().flatten();
    let valid = sides.flat_map(|cache| {
        (0..4).flat_map(|slot| cache[slot * MAX * width..][..lengths[slot] * width].to_vec())
    });
    (ids, valid.collect())
}

#[test]
fn both_forms_of_any_draft_propose_and_keep_the_same() {
    let sees = |causal, window| DraftAttention { causal, window };
    type Change = Box<dyn Fn(&mut DraftConfig)>;
    let changes: Vec<(&str, Change)> = vec![
        ("as it is", Box::new(|_| {})),
        (
            "causal, and a narrow window both ways",
            Box::new(move |config| {
                config.attention = vec![sees(true, None), sees(false, Some(3))];
            }),
        ),
        (
            "a narrow causal window, no biases",
            Box::new(move |config| {
                config.attention = vec![sees(true, Some(2)), sees(true, Some(4))];
                config.attention_bias = false;
            }),
        ),
        (
            "DFlash 1 with soft cap",
            Box::new(|config| {
                config.dflash2 = None;
                config.output_multiplier = 0.5;
                config.logit_softcap = Some(3.0);
            }),
        ),
        (
            "long convolutions over single channels",
            Box::new(|config| {
                let dflash2 = config.dflash2.as_mut().unwrap();
                dflash2.conv_kernel_size = 4;
                dflash2.conv_group_size = 1;
            }),
        ),
    ];
    let target = checkpoint("llama");
    for (what, change) in changes {
        let mut config = config_for(&target);
        change(&mut config);
        for vocabulary in [None, Some((0..128).step_by(3).collect::<Vec<u32>>())] {
            for precision in [Precision::Fp32, Precision::Int8] {
                let [(ids, caches), (expected_ids, expected_caches)] =
                    [Attention::Native, Attention::Portable].map(|form| {
                        let options = DraftOptions {
                            precision,
                            form,
                            vocabulary: vocabulary.clone(),
                            stages: false,
                        };
                        run(&target, &config, &options)
                    });
                let difference = disagreement(&caches, &expected_caches);
                assert_eq!(difference, None, "{what}, {precision:?}");
                assert_eq!(ids, expected_ids, "{what}, {precision:?}");
                assert!(ids.iter().any(|&id| id >= 0) && ids.contains(&-1));
            }
        }
    }
}
