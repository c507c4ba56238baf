//! Weight files with something changed, missing or damaged.

use std::fs;

use proptest::prelude::*;
use safetensors::Dtype;
use serde_json::{Value, json};

use super::*;

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

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_damage_to_a_weight_file_makes_the_reader_panic(
        patches in prop::collection::vec((0usize..2500, prop_oneof![any::<u8>(), prop::sample::select(b"0123456789[]{},:\"".to_vec())]), 1..6),
    ) {
        let mut bytes = fs::read(golden("hugging_face/qwen3/model.safetensors")).unwrap();
        for (at, byte) in patches {
            bytes[at] = byte;
        }
        let edited = Edited::copy("qwen3").write("model.safetensors", bytes);
        if let Ok(checkpoint) = open(edited.path()) {
            for name in checkpoint.weights.names() {
                checkpoint.weights.load(&name).unwrap();
            }
        }
    }
}
