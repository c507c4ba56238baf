//! The golden checkpoints as they are, and copies of them with something changed.

mod config;
mod text;
mod weights;

use std::fs;

use safetensors::tensor::SafeTensors;

use crate::checkpoint::testing::{Edited, golden};
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

impl Edited {
    fn copy(case: &str) -> Edited {
        Edited::copy_of(&format!("hugging_face/{case}"))
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
