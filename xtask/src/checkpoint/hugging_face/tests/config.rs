//! Settings of `config.json`, one by one.

use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::*;

#[test]
fn settings_that_the_graph_cannot_express_are_refused_by_name() {
    for (case, changes, expected) in [
        (
            "llama",
            json!({"architectures": ["GemmaForCausalLM"]}),
            "architectures [\"GemmaForCausalLM\"] is not supported",
        ),
        (
            "llama",
            json!({"model_type": "qwen2"}),
            "model_type qwen2 doesn't fit",
        ),
        ("llama", json!({"hidden_act": "gelu"}), "hidden_act gelu"),
        (
            "llama",
            json!({"quantization_config": {"quant_method": "gptq", "bits": 4}}),
            "quantization_config (\"gptq\")",
        ),
        (
            "llama",
            json!({"auto_map": {"AutoModel": "modelling.Mine"}}),
            "auto_map",
        ),
        (
            "llama",
            json!({"partial_rotary_factor": 0.5}),
            "partial_rotary_factor 0.5",
        ),
        (
            "llama",
            json!({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}),
            "partial_rotary_factor 0.25",
        ),
        (
            "llama",
            json!({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
            "rope type dynamic is not supported",
        ),
        (
            "llama",
            json!({"rope_parameters": {"rope_type": "yarn"}}),
            "factor is missing",
        ),
        (
            "llama",
            json!({"rope_parameters": {"rope_type": "linear"}}),
            "factor is missing",
        ),
        (
            "llama",
            json!({"rope_parameters": {"rope_type": "linear", "factor": 0.5}}),
            "factor is 0.5",
        ),
        (
            "llama",
            json!({"rope_parameters": {"rope_type": "default", "factor": 8}}),
            "rope_parameters has settings that are not supported: factor = 8",
        ),
        (
            "llama",
            json!({"rope_parameters": {"full_attention": {"rope_type": "default"}}}),
            "not supported: full_attention",
        ),
        (
            "llama",
            json!({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}, "rope_parameters": null}),
            "rope type mrope",
        ),
        (
            "llama",
            json!({"rope_scaling": {"type": "linear", "factor": 2.0}}),
            "both rope_parameters and rope_scaling",
        ),
        (
            "llama",
            json!({"rope_theta": 5e5}),
            "rope_theta is 500000, but 10000",
        ),
        (
            "llama",
            json!({"sliding_window": 64}),
            "sliding_window = 64",
        ),
        (
            "llama",
            json!({"final_logit_softcapping": 30.0}),
            "final_logit_softcapping = 30.0",
        ),
        (
            "llama",
            json!({"num_local_experts": 8}),
            "num_local_experts = 8",
        ),
        (
            "llama",
            json!({"something_new": {"a": 1}, "another": 2}),
            "another = 2, something_new = {\"a\":1} (`--allow-unknown-config KEY` lets",
        ),
        (
            "llama",
            json!({"num_hidden_layers": 0}),
            "num_hidden_layers is 0",
        ),
        (
            "llama",
            json!({"num_hidden_layers": 99999999}),
            "num_hidden_layers is 99999999",
        ),
        (
            "llama",
            json!({"num_attention_heads": 0, "head_dim": null}),
            "hidden_size 32 is not a multiple of 0 heads",
        ),
        (
            "llama",
            json!({"num_key_value_heads": 3}),
            "4 heads can't share 3",
        ),
        ("llama", json!({"head_dim": 7}), "head size 7 is not even"),
        (
            "llama",
            json!({"vocab_size": "many"}),
            "vocab_size is \"many\", expected a whole number",
        ),
        (
            "llama",
            json!({"intermediate_size": 1.5}),
            "intermediate_size is 1.5",
        ),
        (
            "llama",
            json!({"hidden_size": 9007199254740993u64}),
            "hidden size 9007199254740993 is out of range",
        ),
        ("llama", json!({"rms_norm_eps": -1}), "norm epsilon -1"),
        (
            "llama",
            json!({"rope_parameters": {"rope_theta": 0}}),
            "rope theta 0",
        ),
        (
            "llama-llama3",
            json!({"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}}),
            "low_freq_factor 4",
        ),
        (
            "llama-yarn",
            json!({"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 1, "beta_slow": 2}}),
            "beta_slow 2",
        ),
        (
            "mistral",
            json!({"attention_bias": true}),
            "attention_bias true is not supported for mistral",
        ),
        (
            "mistral",
            json!({"layer_types": ["full_attention", "full_attention"]}),
            "layer_types",
        ),
        (
            "mistral",
            json!({"sliding_window": 0}),
            "sliding window of layer 0 is empty",
        ),
        (
            "qwen2",
            json!({"attention_bias": false}),
            "attention_bias = false",
        ),
        (
            "qwen2",
            json!({"layer_types": ["full_attention"]}),
            "layer_types has 1 entries for 3 layers",
        ),
        (
            "qwen2",
            json!({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}),
            "layer type chunked_attention",
        ),
        (
            "qwen3",
            json!({"layer_types": ["full_attention", "sliding_attention"]}),
            "no sliding_window in use",
        ),
        (
            "qwen3",
            json!({"mlp_bias": true}),
            "mlp_bias true is not supported for qwen3",
        ),
        (
            "qwen3",
            json!({"num_key_value_heads": null, "head_dim": null}),
            "self_attn.q_proj.weight has shape [64, 32] instead of [512, 32]",
        ),
    ] {
        assert_refused(&Edited::copy(case).set("config.json", changes), expected);
    }
    for key in [
        "hidden_size",
        "max_position_embeddings",
        "rms_norm_eps",
        "vocab_size",
        "architectures",
    ] {
        assert_refused(
            &Edited::copy("llama").without("config.json", &[key]),
            &format!("{key} is missing"),
        );
    }
    assert_refused(
        &Edited::copy("qwen2").without("config.json", &["num_key_value_heads"]),
        "num_key_value_heads is missing",
    );
    assert_refused(
        &Edited::copy("llama").write("config.json", "{"),
        "config.json is not JSON",
    );
    assert_refused(
        &Edited::copy("llama").write("config.json", "[]"),
        "config.json is [], expected an object",
    );
    assert_refused(
        &Edited::copy("llama").remove("config.json"),
        "the directory has no config.json",
    );
}

#[test]
fn settings_of_both_generations_of_transformers_mean_the_same() {
    let with =
        |case: &str, changes: Value| Edited::copy(case).set("config.json", changes).open().config;

    let old = json!({"rope_parameters": null, "rope_theta": 500000, "rope_scaling": null});
    assert_eq!(with("llama", old).rope, rope(500_000.0, RopeScaling::None));
    assert_eq!(
        Edited::copy("llama")
            .without("config.json", &["rope_parameters"])
            .open()
            .config
            .rope,
        rope(10_000.0, RopeScaling::None)
    );

    let linear = json!({"rope_parameters": null, "rope_scaling": {"type": "linear", "factor": 2}});
    assert_eq!(
        with("llama", linear).rope.scaling,
        RopeScaling::Linear { factor: 2.0 }
    );

    let yarn = |extra: Value| {
        let mut parameters = json!({"rope_type": "yarn", "rope_theta": 10000, "factor": 4.0, "original_max_position_embeddings": 32});
        for (key, value) in extra.as_object().unwrap() {
            parameters[key] = value.clone();
        }
        match with("llama", json!({"rope_parameters": parameters}))
            .rope
            .scaling
        {
            RopeScaling::Yarn {
                factor,
                original_context,
                attention_factor,
                beta_fast,
                ..
            } => (factor, original_context, attention_factor, beta_fast),
            other => panic!("{other:?}"),
        }
    };
    let growth = 0.1 * 4f64.ln() + 1.0;
    assert_eq!(yarn(json!({})), (4.0, 32, growth, 32.0));
    assert_eq!(
        yarn(json!({"attention_factor": 1.5, "mscale": 2.0, "mscale_all_dim": 3.0})),
        (4.0, 32, 1.5, 32.0)
    );
    assert_eq!(
        yarn(json!({"mscale": 1.0, "mscale_all_dim": 1.0})),
        (4.0, 32, 1.0, 32.0)
    );
    assert_eq!(
        yarn(json!({"mscale": 0.5})),
        (4.0, 32, growth, 32.0),
        "mscale counts only together with mscale_all_dim"
    );
    assert_eq!(
        yarn(json!({"mscale": 0, "mscale_all_dim": 1.0, "beta_fast": 0})),
        (4.0, 32, growth, 32.0),
        "0 means not set"
    );
    assert_eq!(
        yarn(json!({"factor": null})).0,
        4.0,
        "null asks for the ratio of the contexts"
    );
    assert_eq!(
        yarn(json!({"original_max_position_embeddings": null})),
        (4.0, 128, growth, 32.0)
    );
    assert_eq!(yarn(json!({"finetuned": true})), (4.0, 32, growth, 32.0));

    assert_eq!(
        with("llama", json!({"num_key_value_heads": 2, "head_dim": null})),
        llama()
    );
    assert_eq!(
        with("mistral", json!({"sliding_window": null})).windows,
        [None, None]
    );
    assert_eq!(
        Edited::copy("mistral")
            .without("config.json", &["sliding_window"])
            .open()
            .config
            .windows,
        [Some(4096), Some(4096)]
    );
    assert_eq!(
        with("qwen2", json!({"use_sliding_window": false})).windows,
        [None, None, None]
    );
    let types =
        json!({"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]});
    assert_eq!(with("qwen2", types).windows, [Some(6), None, Some(6)]);
    assert_eq!(
        with("qwen2", json!({"max_window_layers": 28})).windows,
        [None, None, None]
    );
}

#[test]
fn an_unknown_setting_passes_only_when_it_is_vouched_for() {
    let edited =
        Edited::copy("llama").set("config.json", json!({"company_tag": "x", "unset": null}));
    assert_refused(&edited, "company_tag = \"x\"");
    let allowing = |keys: &[&str]| {
        let keys: Vec<String> = keys.iter().map(|key| key.to_string()).collect();
        open_allowing(edited.path(), &keys)
            .map(|checkpoint| checkpoint.config)
            .map_err(|error| format!("{error:#}"))
    };
    assert_eq!(allowing(&["company_tag"]), Ok(llama()));
    assert!(
        allowing(&["company_tag", "hidden_size"])
            .unwrap_err()
            .contains("no unknown setting hidden_size")
    );
}

/// Values that a key of some other kind, or of no sane size, may have.
fn odd_value() -> impl Strategy<Value = Value> {
    prop_oneof![
        any::<u64>().prop_map(|number| json!(number)),
        (0u64..300).prop_map(|number| json!(number)),
        any::<i64>().prop_map(|number| json!(number)),
        any::<f64>().prop_map(|number| json!(number)),
        any::<bool>().prop_map(|flag| json!(flag)),
        prop::sample::select(vec![
            json!(null),
            json!("x"),
            json!([]),
            json!({}),
            json!([1, 2]),
            json!({"rope_type": "yarn", "factor": 1e300})
        ]),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_setting_makes_the_reader_panic(
        case in prop::sample::select(vec!["llama-llama3", "mistral", "qwen2", "qwen3-yarn"]),
        picks in prop::collection::vec((any::<prop::sample::Index>(), odd_value()), 1..4),
    ) {
        let path = golden("hugging_face").join(case).join("config.json");
        let config: Map<String, Value> = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        let keys: Vec<&String> = config.keys().collect();
        let changes: Map<String, Value> = picks.into_iter().map(|(pick, value)| (pick.get(&keys).to_string(), value)).collect();
        let _ = open(Edited::copy(case).set("config.json", Value::Object(changes)).path());
    }
}
