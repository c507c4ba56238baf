//! The golden checkpoints as they are, and copies of them with something changed.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;

use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::checkpoint::testing::golden;
use crate::checkpoint::{
    Checkpoint, DecoderConfig, Rope, RopeScaling, inventory, open, open_allowing,
};

/// The configuration of `llama`, from which the others are described.
fn llama() -> DecoderConfig {
    DecoderConfig {
        architecture: "llama".to_string(),
        vocab_size: 128,
        hidden_size: 32,
        intermediate_size: 48,
        layers: 3,
        heads: 4,
        kv_heads: 2,
        head_dim: 8,
        norm_epsilon: 1e-5,
        context_tokens: 128,
        rope: Rope {
            theta: 10_000.0,
            scaling: RopeScaling::None,
        },
        windows: vec![None; 3],
        qk_norm: false,
        qkv_bias: false,
        o_bias: false,
        mlp_bias: false,
        tied_embeddings: false,
    }
}

fn two_layers() -> DecoderConfig {
    DecoderConfig {
        layers: 2,
        windows: vec![None; 2],
        ..llama()
    }
}

fn rope(theta: f64, scaling: RopeScaling) -> Rope {
    Rope { theta, scaling }
}

fn expected_configs() -> Vec<(&'static str, DecoderConfig)> {
    let name = |architecture: &str| architecture.to_string();
    let llama3 = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 32,
    };
    let yarn = RopeScaling::Yarn {
        factor: 4.0,
        original_context: 32,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: 0.1 * 4f64.ln() + 1.0,
        truncate: true,
    };
    let full_yarn = RopeScaling::Yarn {
        factor: 2.5,
        original_context: 48,
        beta_fast: 24.0,
        beta_slow: 2.0,
        attention_factor: (0.1 * 1.2 * 2.5f64.ln() + 1.0) / (0.1 * 0.7 * 2.5f64.ln() + 1.0),
        truncate: false,
    };
    vec![
        ("llama", llama()),
        (
            "llama-llama3",
            DecoderConfig {
                rope: rope(500_000.0, llama3),
                tied_embeddings: true,
                ..two_layers()
            },
        ),
        (
            "llama-linear",
            DecoderConfig {
                rope: rope(10_000.0, RopeScaling::Linear { factor: 4.0 }),
                qkv_bias: true,
                o_bias: true,
                mlp_bias: true,
                ..two_layers()
            },
        ),
        (
            "llama-yarn",
            DecoderConfig {
                rope: rope(10_000.0, yarn),
                ..two_layers()
            },
        ),
        (
            "mistral",
            DecoderConfig {
                architecture: name("mistral"),
                head_dim: 16,
                windows: vec![Some(5); 2],
                ..two_layers()
            },
        ),
        (
            "qwen2",
            DecoderConfig {
                architecture: name("qwen2"),
                rope: rope(1_000_000.0, RopeScaling::None),
                windows: vec![None, Some(6), Some(6)],
                qkv_bias: true,
                tied_embeddings: true,
                ..llama()
            },
        ),
        (
            "qwen3",
            DecoderConfig {
                architecture: name("qwen3"),
                rope: rope(1_000_000.0, RopeScaling::None),
                head_dim: 16,
                qk_norm: true,
                ..two_layers()
            },
        ),
        (
            "qwen3-yarn",
            DecoderConfig {
                architecture: name("qwen3"),
                rope: rope(10_000.0, full_yarn),
                head_dim: 16,
                qk_norm: true,
                qkv_bias: true,
                o_bias: true,
                tied_embeddings: true,
                ..two_layers()
            },
        ),
    ]
}

/// A copy of a golden checkpoint, to be changed.
struct Edited {
    directory: TempDir,
}

impl Edited {
    fn copy(case: &str) -> Edited {
        let directory = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(golden("hugging_face").join(case)).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), directory.path().join(entry.file_name())).unwrap();
        }
        Edited { directory }
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Sets top-level keys of a JSON file.
    fn set(self, file: &str, changes: Value) -> Edited {
        let path = self.path().join(file);
        let mut object: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        for (key, value) in changes.as_object().unwrap() {
            object[key] = value.clone();
        }
        fs::write(path, serde_json::to_vec(&object).unwrap()).unwrap();
        self
    }

    fn without(self, file: &str, keys: &[&str]) -> Edited {
        let path = self.path().join(file);
        let mut object: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        for key in keys {
            object.as_object_mut().unwrap().remove(*key).unwrap();
        }
        fs::write(path, serde_json::to_vec(&object).unwrap()).unwrap();
        self
    }

    fn write(self, file: &str, content: impl AsRef<[u8]>) -> Edited {
        fs::write(self.path().join(file), content).unwrap();
        self
    }

    fn remove(self, file: &str) -> Edited {
        fs::remove_file(self.path().join(file)).unwrap();
        self
    }

    /// Rewrites `model.safetensors`.
    fn tensors(
        self,
        change: impl FnOnce(&mut BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>),
    ) -> Edited {
        let path = self.path().join("model.safetensors");
        let bytes = fs::read(&path).unwrap();
        let parsed = SafeTensors::deserialize(&bytes).unwrap();
        let mut tensors = parsed
            .iter()
            .map(|(name, view)| {
                (
                    name.to_string(),
                    (view.dtype(), view.shape().to_vec(), view.data().to_vec()),
                )
            })
            .collect();
        change(&mut tensors);
        let views = tensors.iter().map(|(name, (dtype, shape, data))| {
            (name, TensorView::new(*dtype, shape.clone(), data).unwrap())
        });
        fs::write(
            path,
            safetensors::serialize(views, None::<HashMap<String, String>>).unwrap(),
        )
        .unwrap();
        self
    }

    fn open(&self) -> Checkpoint {
        open(self.path()).unwrap()
    }

    fn error(&self) -> String {
        match open(self.path()) {
            Ok(_) => panic!("the checkpoint was accepted"),
            Err(error) => format!("{error:#}"),
        }
    }
}

#[track_caller]
fn assert_refused(edited: &Edited, expected: &str) {
    let error = edited.error();
    assert!(
        error.contains(expected),
        "{error:?} doesn't contain {expected:?}"
    );
}

#[test]
fn golden_checkpoints_have_the_configuration_they_were_made_with() {
    for (case, expected) in expected_configs() {
        let checkpoint = open(&golden("hugging_face").join(case)).unwrap();
        assert_eq!(checkpoint.config, expected, "{case}");
        assert_eq!(checkpoint.name, case);
    }
}

#[test]
fn golden_checkpoints_give_every_tensor_of_the_inventory_unchanged() {
    for (case, config) in expected_configs() {
        let directory = golden("hugging_face").join(case);
        let checkpoint = open(&directory).unwrap();
        let inventory = inventory::expected(&config);
        assert_eq!(
            checkpoint.weights.names(),
            inventory.keys().cloned().collect::<Vec<_>>(),
            "{case}"
        );

        let mut files: Vec<_> = fs::read_dir(&directory)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        files.retain(|path| {
            path.file_name().is_some_and(|name| {
                name.to_string_lossy().starts_with("model")
                    && !name.to_string_lossy().ends_with("json")
            })
        });
        files.sort();
        let names: Vec<_> = files
            .iter()
            .map(|path| path.file_name().unwrap().to_string_lossy().into_owned())
            .collect();
        assert_eq!(
            checkpoint
                .sources
                .iter()
                .map(|source| source.name.clone())
                .collect::<Vec<_>>(),
            names,
            "{case}"
        );
        for path in files {
            let bytes = fs::read(path).unwrap();
            for (name, view) in SafeTensors::deserialize(&bytes).unwrap().iter() {
                assert_eq!(
                    checkpoint.weights.shape(name).as_deref(),
                    Some(view.shape()),
                    "{case} {name}"
                );
                let values: Vec<u8> = checkpoint
                    .weights
                    .load(name)
                    .unwrap()
                    .into_iter()
                    .flat_map(f32::to_le_bytes)
                    .collect();
                assert_eq!(values, view.data(), "{case} {name}");
            }
        }
    }
}

#[test]
fn text_files_and_generation_defaults_are_read() {
    let checkpoint = open(&golden("hugging_face/llama")).unwrap();
    assert!(checkpoint.text.add_bos);
    assert_eq!(checkpoint.text.bos_token.as_deref(), Some("<s>"));
    assert_eq!(checkpoint.text.eos_token.as_deref(), Some("</s>"));
    assert!(
        checkpoint
            .text
            .chat_template
            .unwrap()
            .starts_with("{% for message")
    );
    assert_eq!(checkpoint.generation.eos_token_ids, [2]);
    assert_eq!(checkpoint.generation.temperature, None);

    let checkpoint = open(&golden("hugging_face/llama-llama3")).unwrap();
    assert_eq!(
        checkpoint.text.bos_token.as_deref(),
        Some("<s>"),
        "the token is written as an object"
    );
    assert!(
        checkpoint
            .text
            .chat_template
            .unwrap()
            .starts_with("{% for message"),
        "the template is the one named default"
    );
    assert_eq!(checkpoint.generation.eos_token_ids, [2, 4]);
    assert_eq!(
        (
            checkpoint.generation.temperature,
            checkpoint.generation.top_p,
            checkpoint.generation.top_k
        ),
        (Some(0.6), Some(0.9), None)
    );

    let checkpoint = open(&golden("hugging_face/qwen2")).unwrap();
    assert!(!checkpoint.text.add_bos);
    assert_eq!(checkpoint.text.bos_token, None);
    assert!(
        checkpoint
            .text
            .chat_template
            .unwrap()
            .starts_with("{% for message"),
        "the template file wins"
    );
    assert_eq!(checkpoint.generation.top_k, Some(20));

    let checkpoint = open(&golden("hugging_face/qwen3")).unwrap();
    assert_eq!(checkpoint.text.chat_template, None);
    let encoder: tokenizers::Tokenizer = checkpoint.text.tokenizer_json.parse().unwrap();
    assert_eq!(
        encoder
            .decode(encoder.encode("the and", false).unwrap().get_ids(), false)
            .unwrap(),
        "the and"
    );
}

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
            "something_new = {\"a\":1}, another = 2",
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

#[test]
fn tensors_that_do_not_fit_the_configuration_are_listed() {
    let missing = Edited::copy("qwen3").tensors(|tensors| {
        tensors
            .remove("model.layers.1.self_attn.k_norm.weight")
            .unwrap();
        tensors.insert(
            "model.layers.0.mlp.router.weight".to_string(),
            (Dtype::F32, vec![1], vec![0; 4]),
        );
        tensors.insert(
            "model.norm.weight".to_string(),
            (Dtype::F32, vec![16], vec![0; 64]),
        );
    });
    assert_refused(
        &missing,
        "missing model.layers.1.self_attn.k_norm.weight, unknown model.layers.0.mlp.router.weight, model.norm.weight has shape [16] instead of [32]",
    );
    let no_head = Edited::copy("qwen3").tensors(|tensors| {
        tensors.remove("lm_head.weight").unwrap();
    });
    assert_refused(&no_head, "missing lm_head.weight");
    let more_layers = Edited::copy("llama").set("config.json", json!({"num_hidden_layers": 4}));
    assert_refused(
        &more_layers,
        "missing model.layers.3.input_layernorm.weight",
    );
    let fp8 = Edited::copy("qwen3").tensors(|tensors| {
        tensors.insert(
            "model.norm.weight".to_string(),
            (Dtype::F8_E4M3, vec![32], vec![0; 32]),
        );
    });
    assert_refused(&fp8, "tensor model.norm.weight has type F8_E4M3");
}

#[test]
fn a_tied_checkpoint_may_repeat_the_embedding_as_head_but_nothing_else() {
    let repeat = |first_byte: u8| {
        Edited::copy("qwen2").tensors(|tensors| {
            let mut head = tensors["model.embed_tokens.weight"].clone();
            head.2[0] ^= first_byte;
            tensors.insert("lm_head.weight".to_string(), head);
        })
    };
    let checkpoint = repeat(0).open();
    assert!(checkpoint.config.tied_embeddings);
    assert_eq!(checkpoint.weights.shape("lm_head.weight"), None);
    assert_refused(
        &repeat(1),
        "tie_word_embeddings true, but lm_head.weight differs",
    );
}

#[test]
fn half_precision_weights_are_widened_and_old_rotary_tables_dropped() {
    let edited = Edited::copy("qwen3").tensors(|tensors| {
        let halves = |values: [u16; 32]| values.into_iter().flat_map(u16::to_le_bytes).collect();
        tensors.insert(
            "model.norm.weight".to_string(),
            (Dtype::BF16, vec![32], halves([0x3fc0; 32])),
        );
        tensors.insert(
            "model.layers.0.input_layernorm.weight".to_string(),
            (Dtype::F16, vec![32], halves([0xc100; 32])),
        );
        tensors.insert(
            "model.layers.0.self_attn.rotary_emb.inv_freq".to_string(),
            (Dtype::F32, vec![8], vec![0; 32]),
        );
    });
    let weights = edited.open().weights;
    assert_eq!(weights.load("model.norm.weight").unwrap(), [1.5; 32]);
    assert_eq!(
        weights
            .load("model.layers.0.input_layernorm.weight")
            .unwrap(),
        [-2.5; 32]
    );
    assert!(
        weights
            .load("model.layers.0.self_attn.rotary_emb.inv_freq")
            .is_err()
    );
}

#[test]
fn damaged_weight_files_are_refused() {
    let bytes = fs::read(golden("hugging_face/qwen3/model.safetensors")).unwrap();
    let with = |bytes: &[u8]| Edited::copy("qwen3").write("model.safetensors", bytes);
    assert_refused(&with(&bytes[..bytes.len() - 1]), "truncated?");
    assert_refused(&with(&bytes[..100]), "model.safetensors: the header claims");
    assert_refused(&with(&bytes[..4]), "the file has no header");
    assert_refused(
        &with(&[bytes.as_slice(), b"x"].concat()),
        "model.safetensors: the header describes",
    );
    assert_refused(
        &with(&[0xff; 64]),
        "the header claims 18446744073709551615 bytes",
    );
    let mut damaged = bytes.clone();
    damaged[8] = b'[';
    assert_refused(&with(&damaged), "the header is damaged");

    let index = "model.safetensors.index.json";
    assert_refused(
        &Edited::copy("llama").remove("model-00002-of-00003.safetensors"),
        "model-00002-of-00003.safetensors",
    );
    assert_refused(
        &Edited::copy("llama").remove(index),
        "neither model.safetensors nor model.safetensors.index.json",
    );
    for name in [
        "../model.safetensors",
        "/etc/passwd",
        "",
        "sub/model.safetensors",
        "..",
    ] {
        assert_refused(
            &Edited::copy("llama").write(
                index,
                json!({"weight_map": {"lm_head.weight": name}}).to_string(),
            ),
            "leaves the directory",
        );
    }
    let map =
        json!({"weight_map": {"lm_head.weight": "model-00001-of-00003.safetensors"}}).to_string();
    assert_refused(
        &Edited::copy("llama").write(index, map),
        "says that model-00001-of-00003.safetensors has lm_head.weight, but it doesn't",
    );
    let twice = Edited::copy("llama");
    fs::copy(
        twice.path().join("model-00001-of-00003.safetensors"),
        twice.path().join("z.safetensors"),
    )
    .unwrap();
    let mut map: Value =
        serde_json::from_slice(&fs::read(twice.path().join(index)).unwrap()).unwrap();
    map["weight_map"]["model.embed_tokens.weight"] = json!("z.safetensors");
    assert_refused(&twice.write(index, map.to_string()), "is in");
}

#[test]
fn tokenizers_that_cannot_be_served_as_they_are_are_refused() {
    let config = |changes: Value| Edited::copy("llama").set("tokenizer_config.json", changes);
    assert_refused(
        &config(json!({"add_eos_token": true})),
        "add_eos_token true is not supported",
    );
    assert_refused(
        &config(json!({"add_bos_token": false})),
        "add_bos_token false, but the post_processor of tokenizer.json says true",
    );
    assert_refused(
        &config(json!({"bos_token": "</s>"})),
        "starts a prompt with <s>, but bos_token is </s>",
    );
    assert_refused(
        &config(json!({"eos_token": 2})),
        "eos_token is 2, expected a string",
    );
    assert_refused(
        &config(json!({"chat_template": [{"name": "rag", "template": ""}]})),
        "no template named default, only [\"rag\"]",
    );
    assert!(config(json!({"add_bos_token": true})).open().text.add_bos);

    let processor = |single: Value| {
        Edited::copy("llama").set(
            "tokenizer.json",
            json!({"post_processor": {"type": "TemplateProcessing", "single": single}}),
        )
    };
    let (text, special) = (
        json!({"Sequence": {"id": "A"}}),
        json!({"SpecialToken": {"id": "<s>"}}),
    );
    assert!(!processor(json!([text])).open().text.add_bos);
    assert_refused(
        &processor(json!([special, text, special])),
        "adds more than one token",
    );
    let bert = json!({"post_processor": {"type": "BertProcessing"}});
    assert_refused(
        &Edited::copy("llama").set("tokenizer.json", bert),
        "post_processor BertProcessing is not supported",
    );

    assert_refused(
        &Edited::copy("llama").remove("tokenizer.json"),
        "tokenizer.json",
    );
    let added = json!({"added_tokens": [{"id": 128, "content": "<extra>"}]});
    assert_refused(
        &Edited::copy("llama").set("tokenizer.json", added),
        "token id 128, but the embedding has only 128 rows",
    );
}

#[test]
fn token_names_may_come_from_the_older_file() {
    let edited = Edited::copy("qwen3").remove("tokenizer_config.json").write(
        "special_tokens_map.json",
        r#"{"eos_token": {"content": "</s>"}, "bos_token": "<s>"}"#,
    );
    let text = edited.open().text;
    assert_eq!(
        (text.bos_token.as_deref(), text.eos_token.as_deref()),
        (Some("<s>"), Some("</s>"))
    );
    let text = edited
        .write("tokenizer_config.json", r#"{"bos_token": null}"#)
        .open()
        .text;
    assert_eq!(
        (text.bos_token.as_deref(), text.eos_token.as_deref()),
        (None, Some("</s>"))
    );
}

#[test]
fn generation_settings_are_checked() {
    let file = "generation_config.json";
    for (changes, expected) in [
        (
            json!({"eos_token_id": [2, 128]}),
            "eos_token_id 128 is not a token id, allowed are 0 to 127",
        ),
        (
            json!({"eos_token_id": "</s>"}),
            "eos_token_id \"</s>\" is not a token id",
        ),
        (json!({"eos_token_id": []}), "eos_token_id is an empty list"),
        (
            json!({"do_sample": true, "temperature": -1}),
            "temperature is -1",
        ),
        (json!({"do_sample": true, "top_p": 0}), "top_p is 0"),
        (json!({"do_sample": true, "top_k": -1}), "top_k is -1"),
    ] {
        assert_refused(&Edited::copy("llama").set(file, changes), expected);
    }
    assert_eq!(
        Edited::copy("llama")
            .remove(file)
            .open()
            .generation
            .eos_token_ids,
        [2],
        "config.json says it too"
    );
    assert_refused(
        &Edited::copy("llama")
            .remove(file)
            .without("config.json", &["eos_token_id"]),
        "has an eos_token_id",
    );
    assert_eq!(
        Edited::copy("llama")
            .set(file, json!({"temperature": -1}))
            .open()
            .generation
            .temperature,
        None,
        "without sampling it has no effect"
    );
}

#[test]
fn the_model_card_names_the_licence() {
    let licence = |card: &str| {
        Edited::copy("llama")
            .write("README.md", card)
            .open()
            .sources[0]
            .licence
            .clone()
    };
    assert_eq!(
        licence("---\nlanguage: en\nlicense: apache-2.0\n---\n# Model\n").as_deref(),
        Some("Apache-2.0")
    );
    assert_eq!(licence("---\nlicense: other\n---\n"), None);
    assert_eq!(
        licence("---\nlanguage: en\n---\nlicense: mit\n"),
        None,
        "only the front matter counts"
    );
    assert_eq!(licence("# Model\n"), None);
}
