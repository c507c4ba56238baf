//! Settings of `config.json`, one by one.

use super::*;
use crate::checkpoint::draft::config::default_target_layer_ids;

#[test]
fn a_setting_is_looked_up_in_dflash_config_then_beside_it_then_has_its_default() {
    let copy = || Edited::copy_of("dflash2-tiny");
    let block_size = |edited: Edited| edited.open_draft().config.block_size;
    assert_eq!(
        block_size(copy().set("config.json", json!({"block_size": 4}))),
        8
    );
    assert_eq!(
        block_size(
            copy()
                .set("config.json", json!({"block_size": 4}))
                .set_nested(json!({"block_size": null}))
        ),
        4
    );
    assert_eq!(
        block_size(copy().set_nested(json!({"block_size": null}))),
        16
    );

    // Every setting of the drafter may stand beside instead.
    let config: Value =
        serde_json::from_slice(&fs::read(golden("dflash2-scaled-tiny/config.json")).unwrap())
            .unwrap();
    let flat = Edited::copy_of("dflash2-scaled-tiny")
        .set("config.json", config["dflash_config"].clone())
        .without("config.json", &["dflash_config"]);
    let [.., (_, expected)] = expected_configs();
    assert_eq!(flat.open_draft().config, expected);

    let config = copy()
        .set(
            "config.json",
            json!({"attention_bias": null, "hidden_act": null, "final_logit_softcapping": 0.0}),
        )
        .open_draft()
        .config;
    assert_eq!((config.attention_bias, config.logit_softcap), (false, None));
}

#[test]
fn layers_are_full_and_not_causal_unless_the_file_says_so() {
    let sees = |causal, window| DraftAttention { causal, window };
    for (changes, expected) in [
        (json!({}), [sees(true, Some(6)), sees(false, None)]),
        (
            json!({"is_causal": false}),
            [sees(false, Some(6)), sees(false, None)],
        ),
        (
            json!({"is_causal": true}),
            [sees(true, Some(6)), sees(true, None)],
        ),
        (
            json!({"layer_types": null}),
            [sees(false, None), sees(false, None)],
        ),
        // Not what says which layers slide.
        (
            json!({"use_sliding_window": false}),
            [sees(true, Some(6)), sees(false, None)],
        ),
    ] {
        let edited = Edited::copy_of("dflash1-swa-tiny").set("config.json", changes.clone());
        assert_eq!(edited.open_draft().config.attention, expected, "{changes}");
    }
}

#[test]
fn both_spellings_of_the_rotary_settings_are_read() {
    for (changes, theta) in [
        (json!({"rope_theta": 2e5, "rope_parameters": null}), 2e5),
        (
            json!({"rope_parameters": {"rope_theta": 3e5, "rope_type": "default"}, "rope_theta": null}),
            3e5,
        ),
        (
            json!({"rope_theta": 4e5, "rope_scaling": null, "rope_parameters": null}),
            4e5,
        ),
    ] {
        let edited = Edited::copy_of("dflash1-tiny").set("config.json", changes.clone());
        assert_eq!(edited.open_draft().config.rope.theta, theta, "{changes}");
    }
    let edited = Edited::copy_of("dflash1-tiny").without("config.json", &["rope_theta"]);
    assert_refused(&edited, "rope_theta is missing");
}

#[test]
fn layers_that_are_tapped_by_default_are_spread_as_python_rounds() {
    for (layers, target_layers, expected) in [
        (1, 36, &[18][..]),
        (1, 7, &[3]),
        (5, 36, &[1, 9, 17, 25, 33]),
        (5, 64, &[1, 16, 31, 46, 61]),
        (5, 24, &[1, 6, 11, 16, 21]),
        (5, 52, &[1, 13, 25, 37, 49]),
        (3, 9, &[1, 4, 6]),
        // 1 + 1.5 and 1 + 4.5: halves go to the even number.
        (3, 7, &[1, 2, 4]),
        (3, 13, &[1, 6, 10]),
        (4, 30, &[1, 10, 18, 27]),
    ] {
        assert_eq!(
            default_target_layer_ids(layers, target_layers),
            expected,
            "{layers} of {target_layers}"
        );
    }
    let edited = Edited::copy_of("dflash1-tiny").set_nested(json!({"target_layer_ids": null}));
    assert_refused(
        &edited,
        "fc.weight has shape [64, 192] instead of [64, 128]",
    );
    let edited = edited.without("config.json", &["num_target_layers"]);
    assert_refused(&edited, "neither target_layer_ids nor num_target_layers");
}

#[test]
fn settings_that_are_not_supported_are_refused_by_name() {
    let top = |changes: Value, expected: &'static str| {
        assert_refused(
            &Edited::copy_of("dflash2-tiny").set("config.json", changes),
            expected,
        );
    };
    top(
        json!({"architectures": ["Qwen3ForCausalLM"]}),
        "is no draft, only DFlashDraftModel and DFlash2DraftModel",
    );
    top(json!({"architectures": null}), "architectures is missing");
    top(
        json!({"speculators_model_type": "dflash"}),
        "speculators_model_type is of another format",
    );
    top(
        json!({"aux_hidden_state_layer_ids": [2, 4]}),
        "aux_hidden_state_layer_ids is of another format",
    );
    top(
        json!({"eagle_aux_hidden_state_layer_ids": [2, 4]}),
        "eagle_aux_hidden_state_layer_ids is of another format",
    );
    top(
        json!({"transformer_layer_config": {}}),
        "transformer_layer_config is of another format",
    );
    top(
        json!({"draft_vocab_size": 64}),
        "draft_vocab_size is not supported: it asks for a head of the draft's own",
    );
    top(
        json!({"quantization_config": {"bits": 4}}),
        "quantization_config is not supported",
    );
    top(json!({"is_neox_style": false}), "is_neox_style false");
    top(
        json!({"target_hidden_size": 128}),
        "target_hidden_size is 128, but hidden_size is 64",
    );
    top(json!({"hidden_act": "gelu"}), "hidden_act gelu");
    top(
        json!({"something_new": 7}),
        "something_new = 7 (`--allow-unknown-draft-config KEY` lets",
    );
    top(
        json!({"rope_parameters": {"rope_theta": 1e4, "rope_type": "mrope"}}),
        "rope type mrope",
    );
    top(
        json!({"sliding_window": null}),
        "there is no sliding_window",
    );
    top(
        json!({"layer_types": ["full_attention"]}),
        "1 entries for 2 layers",
    );
    top(
        json!({"layer_types": ["full_attention", "linear_attention"]}),
        "layer type linear_attention",
    );
    top(json!({"num_hidden_layers": 0}), "num_hidden_layers is 0");
    top(
        json!({"num_key_value_heads": 3}),
        "4 num_attention_heads can't share 3",
    );
    top(json!({"head_dim": 15}), "head_dim 15 is not even");
    top(
        json!({"rms_norm_eps": 0.0}),
        "rms_norm_eps 0 is not positive",
    );
    top(json!({"hidden_size": null}), "hidden_size is missing");
    top(
        json!({"vocab_size": 100}),
        "mask_token_id 126 is no token, vocab_size is 100",
    );
    top(
        json!({"max_position_embeddings": 4}),
        "block_size is 8, allowed are 2 to max_position_embeddings, 4",
    );

    let nested = |changes: Value, expected: &'static str| {
        assert_refused(
            &Edited::copy_of("dflash2-tiny").set_nested(changes),
            expected,
        );
    };
    for (key, value) in [
        ("causal", json!(true)),
        ("use_swa", json!(true)),
        ("swa_window_size", json!(2048)),
        ("attention_sink_bias", json!(true)),
        ("sample_from_anchor", json!(true)),
    ] {
        let expected = format!("dflash_config.{key} is not supported: it asks for");
        assert_refused(
            &Edited::copy_of("dflash2-tiny").set_nested(json!({ key: value })),
            &expected,
        );
    }
    nested(
        json!({"something_new": 7}),
        "dflash_config has settings that are not supported: something_new = 7",
    );
    nested(json!({"mask_token_id": null}), "mask_token_id is missing");
    nested(
        json!({"mask_token_id": 1_u64 << 40}),
        "mask_token_id 1099511627776 is no token, vocab_size is 128",
    );
    nested(
        json!({"conv_kernel_size": null}),
        "conv_kernel_size is missing",
    );
    nested(
        json!({"conv_kernel_size": 9}),
        "conv_kernel_size is 9, allowed are 1 to block_size, 8",
    );
    nested(
        json!({"conv_group_size": 24}),
        "conv_group_size 24 does not divide hidden_size 64",
    );
    nested(
        json!({"selector_top_k": 129}),
        "selector_top_k is 129, allowed are 1 to vocab_size, 128",
    );
    nested(
        json!({"selector_rank": 0}),
        "selector_rank 0 is out of range",
    );
    nested(json!({"block_size": 1}), "block_size is 1");
    nested(
        json!({"target_layer_ids": [1, 1, 3]}),
        "target_layer_ids is [1, 1, 3]",
    );
    nested(json!({"target_layer_ids": []}), "target_layer_ids is []");
    nested(
        json!({"target_layer_ids": [1, -3, 5]}),
        "expected a list of layers",
    );
    nested(json!({"output_multiplier": 0.0}), "output_multiplier is 0");
    assert_refused(
        &Edited::copy_of("dflash2-tiny").write("mask_embedding.pt", "weights"),
        "mask_embedding.pt is not supported",
    );
    assert_refused(
        &Edited::copy_of("dflash2-tiny").remove("config.json"),
        "there is no config.json",
    );
    // A DFlash 1 file has no place for what DFlash 2 adds.
    assert_refused(
        &Edited::copy_of("dflash2-tiny").set(
            "config.json",
            json!({"architectures": ["DFlashDraftModel"]}),
        ),
        "dflash_config has settings that are not supported: conv_group_size = 16, conv_kernel_size = 2",
    );
}

#[test]
fn an_unknown_setting_passes_when_the_caller_vouches_for_it() {
    let edited = Edited::copy_of("dflash1-tiny").set("config.json", json!({"something_new": 7}));
    let config = open_draft(edited.path(), &["something_new".to_owned()]).unwrap();
    assert_eq!(config.config, first());
    let error = open_draft(&golden("dflash1-tiny"), &["something_new".to_owned()]);
    assert!(format!("{:#}", error.err().unwrap()).contains("no unknown setting something_new"));
}
