//! Tensors that are missing, unknown or of another type, and files in parts.

use std::collections::{BTreeMap, HashMap};

use half::{bf16, f16};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};

use super::*;

#[test]
fn the_tensors_must_be_those_of_the_architecture() {
    let tensor = |shape: &[usize]| {
        let values: usize = shape.iter().product();
        (Dtype::F32, shape.to_vec(), vec![0; 4 * values])
    };
    type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;
    type Change = fn(&mut Tensors);
    let rename: Change = |tensors| {
        let moved = tensors
            .remove("candidate_selector.predecessor_codebook")
            .unwrap();
        tensors.insert(
            "candidate_selector.predecessor_codebook.weight".to_owned(),
            moved,
        );
    };
    assert_refused(
        &Edited::copy_of("dflash2-tiny").tensors(rename),
        "missing candidate_selector.predecessor_codebook, unknown candidate_selector.predecessor_codebook.weight",
    );
    for (name, expected) in [
        ("d2t", "unknown d2t"),
        ("embed_tokens.weight", "unknown embed_tokens.weight"),
        (
            "layers.0.self_attn.q_proj.bias",
            "unknown layers.0.self_attn.q_proj.bias",
        ),
    ] {
        let edited = Edited::copy_of("dflash1-tiny").tensors(|tensors| {
            tensors.insert(name.to_owned(), tensor(&[64]));
        });
        assert_refused(&edited, expected);
    }
    // With attention_bias all four projections have one.
    let biases = [
        ("q_proj", 64),
        ("k_proj", 32),
        ("v_proj", 32),
        ("o_proj", 64),
    ];
    let edited = Edited::copy_of("dflash1-tiny")
        .set("config.json", json!({"attention_bias": true}))
        .tensors(|tensors| {
            for layer in 0..2 {
                for (projection, rows) in biases {
                    let name = format!("layers.{layer}.self_attn.{projection}.bias");
                    tensors.insert(name, tensor(&[rows]));
                }
            }
        });
    assert!(edited.open_draft().config.attention_bias);
    let edited = edited.tensors(|tensors| {
        tensors.remove("layers.1.self_attn.o_proj.bias").unwrap();
    });
    assert_refused(&edited, "missing layers.1.self_attn.o_proj.bias");
    let edited = Edited::copy_of("dflash2-tiny").tensors(|tensors| {
        tensors.insert("norm.weight".to_owned(), tensor(&[1, 64]));
    });
    assert_refused(&edited, "norm.weight has shape [1, 64] instead of [64]");
}

#[test]
fn files_in_parts_and_in_half_precision_are_read() {
    let whole = open_draft(&golden("dflash2-tiny"), &[]).unwrap();
    let parts = Edited::copy_of("dflash2-tiny");
    let bytes = fs::read(parts.path().join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let names = whole.weights.names();
    let (first, second) = names.split_at(10);
    let mut map = serde_json::Map::new();
    for (part, names) in [("a.safetensors", first), ("b.safetensors", second)] {
        let views = names.iter().map(|name| (name, file.tensor(name).unwrap()));
        let bytes = safetensors::serialize(views, None::<HashMap<String, String>>).unwrap();
        fs::write(parts.path().join(part), bytes).unwrap();
        map.extend(names.iter().map(|name| (name.clone(), json!(part))));
    }
    let parts = parts.remove("model.safetensors").write(
        "model.safetensors.index.json",
        json!({ "weight_map": map }).to_string(),
    );
    let read = parts.open_draft();
    assert_eq!(read.sources.len(), 2);
    for name in &names {
        assert_eq!(
            read.weights.load(name).unwrap(),
            whole.weights.load(name).unwrap()
        );
    }

    for (dtype, narrow) in [
        (
            Dtype::BF16,
            (|value| bf16::from_f32(value).to_le_bytes()) as fn(f32) -> [u8; 2],
        ),
        (Dtype::F16, |value| f16::from_f32(value).to_le_bytes()),
    ] {
        let views: Vec<(String, Vec<usize>, Vec<u8>)> = names
            .iter()
            .map(|name| {
                let values = whole.weights.load(name).unwrap();
                let bytes = values.into_iter().flat_map(narrow).collect();
                (name.clone(), whole.weights.shape(name).unwrap(), bytes)
            })
            .collect();
        let views = views.iter().map(|(name, shape, bytes)| {
            (name, TensorView::new(dtype, shape.clone(), bytes).unwrap())
        });
        let bytes = safetensors::serialize(views, None::<HashMap<String, String>>).unwrap();
        let edited = Edited::copy_of("dflash2-tiny").write("model.safetensors", bytes);
        let read = edited.open_draft();
        let (wide, narrow) = (
            whole.weights.load("fc.weight").unwrap(),
            read.weights.load("fc.weight").unwrap(),
        );
        let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-6 + a.abs() / 128.0;
        assert!(
            wide.iter().zip(&narrow).all(close) && wide != narrow,
            "{dtype:?}"
        );
    }
}
