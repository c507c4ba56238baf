//! The golden drafts as they are, and copies of them with something changed.

mod config;
mod weights;

use std::fs;

use serde_json::{Value, json};

use super::{Dflash2, DraftAttention, DraftCheckpoint, DraftConfig, open_draft};
use crate::checkpoint::testing::{Edited, golden};
use crate::checkpoint::{Rope, RopeScaling};

impl Edited {
    /// Sets keys of `dflash_config`.
    fn set_nested(self, changes: Value) -> Edited {
        let path = self.path().join("config.json");
        let config: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        let mut nested = config["dflash_config"].clone();
        for (key, value) in changes.as_object().unwrap() {
            nested[key] = value.clone();
        }
        self.set("config.json", json!({ "dflash_config": nested }))
    }

    fn open_draft(&self) -> DraftCheckpoint {
        open_draft(self.path(), &[]).unwrap()
    }
}

#[track_caller]
fn assert_refused(edited: &Edited, expected: &str) {
    let error = match open_draft(edited.path(), &[]) {
        Ok(_) => panic!("the checkpoint was accepted, expected {expected:?}"),
        Err(error) => format!("{error:#}"),
    };
    assert!(
        error.contains(expected),
        "{error:?} doesn't contain {expected:?}"
    );
}

fn first() -> DraftConfig {
    DraftConfig {
        vocab_size: 128,
        hidden_size: 64,
        intermediate_size: 96,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        norm_epsilon: 1e-6,
        context_tokens: 32768,
        rope: Rope {
            theta: 1e6,
            scaling: RopeScaling::None,
        },
        attention: vec![
            DraftAttention {
                causal: false,
                window: None
            };
            2
        ],
        attention_bias: false,
        block_size: 8,
        mask_token_id: 126,
        target_layer_ids: vec![1, 4, 7],
        num_target_layers: Some(10),
        input_embedding_scale: 1.0,
        output_multiplier: 1.0,
        logit_softcap: None,
        dflash2: None,
    }
}

fn expected_configs() -> [(&'static str, DraftConfig); 4] {
    let sees = |causal, window| DraftAttention { causal, window };
    let rope = |theta| Rope {
        theta,
        scaling: RopeScaling::None,
    };
    [
        ("dflash1-tiny", first()),
        (
            "dflash1-swa-tiny",
            DraftConfig {
                rope: rope(1e7),
                attention: vec![sees(true, Some(6)), sees(false, None)],
                block_size: 4,
                target_layer_ids: vec![1, 3],
                num_target_layers: Some(6),
                ..first()
            },
        ),
        (
            "dflash2-tiny",
            DraftConfig {
                rope: rope(1e7),
                attention: vec![sees(false, Some(12)); 2],
                target_layer_ids: vec![1, 3, 5],
                num_target_layers: Some(8),
                dflash2: Some(Dflash2 {
                    conv_kernel_size: 2,
                    conv_group_size: 16,
                    selector_rank: 16,
                    selector_top_k: 8,
                }),
                ..first()
            },
        ),
        (
            "dflash2-scaled-tiny",
            DraftConfig {
                norm_epsilon: 1e-5,
                rope: rope(5e5),
                attention: vec![sees(false, Some(8)), sees(false, None)],
                block_size: 6,
                target_layer_ids: vec![0, 5],
                num_target_layers: Some(6),
                input_embedding_scale: 2.0,
                output_multiplier: 0.4,
                logit_softcap: Some(5.0),
                dflash2: Some(Dflash2 {
                    conv_kernel_size: 3,
                    conv_group_size: 8,
                    selector_rank: 12,
                    selector_top_k: 5,
                }),
                ..first()
            },
        ),
    ]
}

#[test]
fn golden_drafts_have_the_configuration_they_were_made_with() {
    for (case, expected) in expected_configs() {
        let checkpoint = open_draft(&golden(case), &[]).unwrap();
        assert_eq!(checkpoint.config, expected, "{case}");
        let count = match expected.dflash2 {
            None => 3 + 11 * expected.layers,
            Some(_) => 6 + 15 * expected.layers,
        };
        assert_eq!(checkpoint.weights.names().len(), count, "{case}");
        assert_eq!(checkpoint.sources[0].name, "draft/model.safetensors");
    }
}
