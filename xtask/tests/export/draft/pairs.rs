//! Target and draft in one bundle.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use outrider_bundle::VerifiedBundle;
use outrider_bundle::manifest::{Attention, Precision};
use outrider_bundle::onnx::{ModelProto, TensorProto};
use prost::Message;
use tempfile::TempDir;
use xtask::checkpoint::{
    Checkpoint, Dflash2, DraftAttention, DraftCheckpoint, DraftConfig, Rope, RopeScaling, Weights,
};
use xtask::export::{DraftOptions, Options, write_pair};

use super::support::*;
use crate::support::{
    ATTENTIONS, PRECISIONS, Random, checkpoint, files, relative_error, target_with,
};

/// A draft for a tiny checkpoint; it reads layers out of their order.
pub fn config_for(target: &Checkpoint) -> DraftConfig {
    DraftConfig {
        vocab_size: target.config.vocab_size,
        hidden_size: target.config.hidden_size,
        intermediate_size: 40,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 8,
        norm_epsilon: 1e-6,
        context_tokens: 96,
        rope: Rope {
            theta: 1e4,
            scaling: RopeScaling::None,
        },
        attention: vec![
            DraftAttention {
                causal: false,
                window: None
            };
            2
        ],
        attention_bias: true,
        block_size: 5,
        mask_token_id: 7,
        target_layer_ids: vec![1, 0],
        num_target_layers: Some(target.config.layers),
        input_embedding_scale: 1.5,
        output_multiplier: 1.0,
        logit_softcap: None,
        dflash2: Some(Dflash2 {
            conv_kernel_size: 2,
            conv_group_size: 8,
            selector_rank: 6,
            selector_top_k: 4,
        }),
    }
}

/// A random draft.
pub fn draft_for(config: DraftConfig) -> DraftCheckpoint {
    DraftCheckpoint {
        weights: Box::new(Random(config.tensors())),
        config,
        sources: Vec::new(),
    }
}

fn pair(
    target: &Checkpoint,
    draft: &DraftCheckpoint,
    precisions: [Precision; 2],
    form: Attention,
    vocabulary: Option<Vec<u32>>,
    out: &Path,
) -> anyhow::Result<outrider_bundle::Manifest> {
    let options = Options {
        precision: precisions[0],
        attention: form,
        taps: draft.config.target_layer_ids.clone(),
    };
    let draft_options = DraftOptions {
        precision: precisions[1],
        form,
        vocabulary,
        stages: false,
    };
    write_pair(target, &options, draft, &draft_options, out)
}

/// Location and offset of each constant of a graph that is in a data file.
fn places(graph: &Path) -> BTreeMap<String, (String, String)> {
    let model = ModelProto::decode(&fs::read(graph).unwrap()[..]).unwrap();
    let place = |constant: &TensorProto| {
        let entry = |key: &str| {
            let entry = constant.external_data.iter().find(|entry| entry.key == key);
            entry.map(|entry| entry.value.clone())
        };
        Some((
            constant.name.clone(),
            (entry("location")?, entry("offset")?),
        ))
    };
    let constants = model.graph.unwrap().initializer;
    constants.iter().filter_map(place).collect()
}

#[test]
fn every_pair_opens_and_its_ends_are_stored_once() {
    let dir = TempDir::new().unwrap();
    for name in ["llama", "qwen2"] {
        let target = checkpoint(name);
        let draft = draft_for(config_for(&target));
        for precision in PRECISIONS {
            for form in ATTENTIONS {
                let out = dir.path().join("bundle");
                let manifest = pair(&target, &draft, [precision; 2], form, None, &out).unwrap();
                assert_eq!(VerifiedBundle::open(&out).unwrap().manifest(), &manifest);
                let facts = manifest.draft.unwrap();
                assert_eq!((facts.form, facts.precision), (form, precision));
                assert_eq!(facts.context_tokens, 96);

                let of_target = places(&out.join("model.onnx"));
                let of_draft = places(&out.join("draft.onnx"));
                let ends: Vec<&String> = of_draft
                    .iter()
                    .filter(|(_, (file, _))| file == "model.onnx.data")
                    .map(|(name, _)| name)
                    .collect();
                let has = |name: &str| ends.iter().any(|end| end.starts_with(name));
                assert!(has("model.embed_tokens") && has("lm_head"), "{ends:?}");
                for end in ends {
                    assert_eq!(of_draft.get(end), of_target.get(end), "{name}: {end}");
                }
            }
        }
    }
}

#[test]
fn a_draft_beside_its_target_proposes_what_it_proposes_alone() {
    let target = checkpoint("llama");
    let draft = draft_for(config_for(&target));
    let tap_size = draft.config.tap_size();
    let taps = Random(BTreeMap::from([("taps".to_owned(), vec![9, tap_size])]));
    let slot = Slot {
        taps: taps.load("taps").unwrap(),
        positions: (0..9).collect(),
        block: vec![20, 7, 7, 7, 7],
        anchor_position: 9,
        ..Slot::default()
    };
    for form in FORMS {
        let mut alone = Graph::load(&draft, target.weights.as_ref(), &options(form, false), 1);
        let expected = alone.run(std::slice::from_ref(&slot));
        for precision in [
            Precision::Fp32,
            Precision::Fp16,
            Precision::Int8,
            Precision::Int4,
        ] {
            let dir = TempDir::new().unwrap();
            let out = dir.path().join("bundle");
            let precisions = [precision, Precision::Fp32];
            let manifest = pair(&target, &draft, precisions, form, None, &out).unwrap();
            let facts = manifest.draft.unwrap();
            let mut beside = Graph::open(&out, facts, tap_size, 1);
            let outputs = beside.run(std::slice::from_ref(&slot));
            // The valid rows of the caches come from the embedding and the taps.
            let valid = 14 * draft.config.kv_heads * draft.config.head_dim;
            let rows = |caches: &[Vec<f32>; 2]| [0, 1].map(|side| caches[side][..valid].to_vec());
            for (ours, theirs) in beside.caches.iter().zip(&alone.caches) {
                let error = relative_error(&rows(ours), &rows(theirs));
                let most = match precision {
                    Precision::Fp32 => 1e-6,
                    _ => 0.02,
                };
                assert!(
                    error <= most,
                    "{precision:?}, {form:?}: caches are off by {error}"
                );
            }
            if precision == Precision::Fp32 {
                assert_eq!(outputs.ints["draft_ids"], expected.ints["draft_ids"]);
            }
        }
    }
}

#[test]
fn a_target_gives_out_its_taps_in_the_order_of_the_draft() {
    let target = checkpoint("llama");
    let tokens = crate::support::tokens(3, 6);
    let taps_of = |taps: Vec<usize>| {
        let options = Options {
            precision: Precision::Fp32,
            attention: Attention::Native,
            taps,
        };
        let mut loaded = target_with(&target, &options);
        crate::support::run_in_chunks(&mut loaded, 0, &tokens, [6]).taps
    };
    let (rising, falling) = (taps_of(vec![0, 2]), taps_of(vec![2, 0]));
    let hidden = target.config.hidden_size;
    for (rising, falling) in rising.iter().zip(&falling) {
        assert_eq!(rising[..hidden], falling[hidden..]);
        assert_eq!(rising[hidden..], falling[..hidden]);
    }
}

#[test]
fn a_pair_that_does_not_belong_together_is_refused_with_both_numbers() {
    type Change = fn(&mut DraftConfig);
    let changes: [Change; 7] = [
        |config| config.hidden_size = 64,
        |config| config.vocab_size = 256,
        |config| config.num_target_layers = Some(30),
        |config| config.target_layer_ids = vec![1, 3],
        |config| config.mask_token_id = 128,
        |config| config.block_size = 129,
        |config| {
            config.hidden_size = 16;
            config.vocab_size = 64;
            config.num_target_layers = Some(2);
        },
    ];
    let target = checkpoint("llama");
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("bundle");
    let refusal = |draft: &DraftCheckpoint, vocabulary: Option<Vec<u32>>| {
        let precisions = [Precision::Fp32; 2];
        let error = pair(
            &target,
            draft,
            precisions,
            Attention::Native,
            vocabulary,
            &out,
        );
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        format!("{:#}", error.unwrap_err())
    };
    let mut refusals: Vec<String> = changes
        .iter()
        .map(|change| {
            let mut draft = draft_for(config_for(&target));
            change(&mut draft.config);
            refusal(&draft, None)
        })
        .collect();
    for vocabulary in [vec![1, 2, 128], vec![1, 3, 2, 4], vec![1, 2, 3]] {
        refusals.push(refusal(&draft_for(config_for(&target)), Some(vocabulary)));
    }
    let draft = draft_for(config_for(&target));
    let options = Options {
        precision: Precision::Fp32,
        attention: Attention::Native,
        taps: vec![0, 1],
    };
    let error = write_pair(
        &target,
        &options,
        &draft,
        &super::support::options(Attention::Native, false),
        &out,
    );
    refusals.push(format!("{:#}", error.unwrap_err()));
    insta::assert_snapshot!(refusals.join("\n"));
}

#[test]
fn a_pair_has_the_same_bytes_for_any_number_of_threads() {
    let dir = TempDir::new().unwrap();
    for precision in PRECISIONS {
        for form in ATTENTIONS {
            for vocabulary in [None, Some(vec![3, 4, 5, 60, 100])] {
                let exports = [1, 2, 5].map(|threads| {
                    let target = checkpoint("llama");
                    let draft = draft_for(config_for(&target));
                    let out = dir.path().join(format!("{threads}"));
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
                    let pool = pool.build().unwrap();
                    let vocabulary = vocabulary.clone();
                    pool.install(|| {
                        pair(&target, &draft, [precision; 2], form, vocabulary, &out).unwrap()
                    });
                    files(&out)
                });
                assert!(exports[0].contains_key("draft.onnx.data"));
                assert!(
                    exports[0] == exports[1] && exports[0] == exports[2],
                    "{precision:?}, {form:?}"
                );
            }
        }
    }
}

#[test]
fn the_nodes_of_each_form_of_a_draft_are_these() {
    let target = checkpoint("llama");
    let draft = draft_for(config_for(&target));
    let mut text = String::new();
    for precision in PRECISIONS {
        for form in ATTENTIONS {
            let dir = TempDir::new().unwrap();
            let out = dir.path().join("bundle");
            pair(&target, &draft, [precision; 2], form, None, &out).unwrap();
            let facts = outrider_bundle::facts::GraphFacts::read(&out.join("draft.onnx")).unwrap();
            text += &format!("{precision:?}, {form:?}:\n");
            for (key, value) in facts.metadata {
                text += &format!("  {key} = {value}\n");
            }
            for (op, count) in facts.ops {
                text += &format!("  {count:3} {op}\n");
            }
        }
    }
    insta::assert_snapshot!(text);
}
