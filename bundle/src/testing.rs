//! A small bundle for the tests of this crate.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use prost::Message;
use tempfile::TempDir;

use crate::digest::sha256_hex;
use crate::manifest::{
    Attention, DraftFacts, FileEntry, GenerationDefaults, Manifest, Precision, SCHEMA_VERSION,
    Source, TargetFacts, TextFacts,
};
use crate::onnx::{
    DataLocation, DataType, Dimension, DimensionProto, GraphProto, ModelProto, NodeProto,
    OperatorSetIdProto, StringStringEntryProto, TensorProto, TensorShapeProto, TensorTypeProto,
    TypeProto, ValueInfoProto,
};

/// Bytes of the external weights of the sample graph.
pub const WEIGHT_BYTES: usize = 5000;

/// Name and content of the files of the sample.
fn sample_files() -> Vec<(&'static str, Vec<u8>)> {
    vec![
        ("chat_template.jinja", b"{{ messages }}".to_vec()),
        ("model.onnx", sample_graph().encode_to_vec()),
        ("model.onnx.data", vec![7; WEIGHT_BYTES]),
        ("tokenizer.json", b"{\"version\": \"1.0\"}".to_vec()),
    ]
}

/// Facts of a two-layer model.
pub fn sample_target() -> TargetFacts {
    TargetFacts {
        graph: "model.onnx".to_owned(),
        architecture: "llama".to_owned(),
        precision: Precision::Fp32,
        attention: Attention::Portable,
        layers: 2,
        hidden_size: 16,
        kv_heads: 2,
        head_dim: 4,
        vocab_size: 32,
        context_tokens: 64,
        kv_dtype: "float32".to_owned(),
        taps: vec![0, 1],
    }
}

/// Facts of a DFlash 2 draft with one layer for [`sample_target`].
pub fn sample_draft() -> DraftFacts {
    DraftFacts {
        graph: "draft.onnx".to_owned(),
        architecture: "DFlash2DraftModel".to_owned(),
        precision: Precision::Fp32,
        form: Attention::Native,
        layers: 1,
        kv_heads: 1,
        head_dim: 4,
        kv_dtype: "float32".to_owned(),
        vocabulary_columns: 32,
        block_size: 4,
        top_k: 3,
        mask_token_id: 31,
        target_layer_ids: vec![0, 1],
        context_tokens: 48,
    }
}

/// Text facts of the sample.
pub fn sample_text() -> TextFacts {
    TextFacts {
        tokenizer: "tokenizer.json".to_owned(),
        chat_template: Some("chat_template.jinja".to_owned()),
        bos_token: None,
        eos_token: Some("</s>".to_owned()),
        add_bos: false,
    }
}

/// A manifest that lists [`sample_files`].
pub fn sample_manifest() -> Manifest {
    let entry = |bytes: &[u8]| FileEntry {
        size_bytes: bytes.len() as u64,
        sha256: sha256_hex(bytes),
    };
    Manifest {
        schema_version: SCHEMA_VERSION,
        name: "tiny".to_owned(),
        files: sample_files()
            .into_iter()
            .map(|(name, bytes)| (name.to_owned(), entry(&bytes)))
            .collect(),
        target: sample_target(),
        draft: None,
        text: sample_text(),
        generation: GenerationDefaults {
            eos_token_ids: vec![2],
            ..GenerationDefaults::default()
        },
        tools: BTreeMap::from([("outrider".to_owned(), "0.1.0".to_owned())]),
        sources: vec![Source {
            name: "tiny.gguf".to_owned(),
            sha256: sha256_hex(b"tiny"),
            licence: Some("Apache-2.0".to_owned()),
        }],
    }
}

/// The text of [`sample_manifest`] as a `bundle.json` has it.
pub fn manifest_json() -> String {
    serde_json::to_string_pretty(&sample_manifest()).unwrap()
}

/// Writes [`sample_files`].
pub fn write_sample_files(dir: &Path) {
    for (name, bytes) in sample_files() {
        fs::write(dir.join(name), bytes).unwrap();
    }
}

/// An intact bundle directory.
pub fn sample_bundle() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    write_sample_files(dir.path());
    sample_manifest().write(dir.path()).unwrap();
    dir
}

/// A float tensor type; a dimension is a number or a symbol.
fn value(name: &str, elem_type: DataType, dims: &[&str]) -> ValueInfoProto {
    let dim = |text: &&str| DimensionProto {
        value: Some(
            text.parse()
                .map_or_else(|_| Dimension::Symbol((*text).to_owned()), Dimension::Size),
        ),
    };
    let shape = TensorShapeProto {
        dim: dims.iter().map(dim).collect(),
    };
    let tensor_type = TensorTypeProto {
        elem_type: elem_type as i32,
        shape: Some(shape),
    };
    ValueInfoProto {
        name: name.to_owned(),
        r#type: Some(TypeProto {
            tensor_type: Some(tensor_type),
        }),
    }
}

/// A graph with the inputs, outputs and attention nodes of [`sample_target`] and weights in `model.onnx.data`.
pub fn sample_graph() -> ModelProto {
    let entry = |key: &str, value: &str| StringStringEntryProto {
        key: key.to_owned(),
        value: value.to_owned(),
    };
    let int64 = DataType::Int64;
    let mut input = vec![
        value("input_ids", int64, &["batch", "sequence"]),
        value("position_ids", int64, &["batch", "sequence"]),
        value("write_indices", int64, &["batch"]),
        value("nonpad_kv_seqlen", int64, &["batch"]),
        value("logit_indices", int64, &["batch", "rows"]),
    ];
    let mut output = vec![
        value("logits", DataType::Float, &["batch", "rows", "32"]),
        value(
            "aux_hidden_states",
            DataType::Float,
            &["batch", "sequence", "32"],
        ),
    ];
    let mut node = Vec::new();
    for layer in 0..2 {
        for side in ["key", "value"] {
            let dims = ["batch", "max_rows", "8"];
            input.push(value(
                &format!("{side}_cache.{layer}"),
                DataType::Float,
                &dims,
            ));
            output.push(value(
                &format!("updated_{side}_cache.{layer}"),
                DataType::Float,
                &dims,
            ));
        }
        for op_type in ["TensorScatter", "TensorScatter", "Attention", "MatMul"] {
            node.push(NodeProto {
                op_type: op_type.to_owned(),
                ..NodeProto::default()
            });
        }
    }
    let external = TensorProto {
        dims: vec![25, 50],
        data_type: DataType::Float as i32,
        name: "weight".to_owned(),
        external_data: vec![
            entry("location", "model.onnx.data"),
            entry("offset", "0"),
            entry("length", &WEIGHT_BYTES.to_string()),
        ],
        data_location: DataLocation::External as i32,
        ..TensorProto::default()
    };
    let inline = TensorProto {
        dims: vec![2],
        data_type: DataType::Float as i32,
        raw_data: vec![0; 8],
        ..TensorProto::default()
    };
    ModelProto {
        ir_version: 10,
        opset_import: vec![OperatorSetIdProto {
            domain: String::new(),
            version: 24,
        }],
        producer_name: "sample".to_owned(),
        producer_version: "1".to_owned(),
        graph: Some(GraphProto {
            node,
            initializer: vec![external, inline],
            input,
            output,
            ..GraphProto::default()
        }),
        metadata_props: vec![entry("taps", "0,1")],
    }
}

/// A graph with the inputs, outputs, nodes and metadata of [`sample_draft`].
pub fn sample_draft_graph() -> ModelProto {
    let (int64, float) = (DataType::Int64, DataType::Float);
    let mut input = vec![
        value("taps", float, &["batch", "context", "32"]),
        value("context_position_ids", int64, &["batch", "context"]),
        value("context_start", int64, &["batch"]),
        value("context_rows", int64, &["batch"]),
        value("block_ids", int64, &["batch", "block"]),
        value("block_position_ids", int64, &["batch", "block"]),
        value("block_rows", int64, &["batch"]),
        value("temperature", float, &["batch"]),
        value("seed", int64, &["batch"]),
        value("candidate_topk", int64, &["1"]),
    ];
    let mut output = vec![value("draft_ids", int64, &["batch", "slots"])];
    for side in ["key", "value"] {
        let dims = ["batch", "max", "4"];
        input.push(value(&format!("{side}_cache.0"), float, &dims));
        output.push(value(&format!("updated_{side}_cache.0"), float, &dims));
    }
    let ops = [
        ("BlockAttention", 1),
        ("GroupedDynamicConv", 4),
        ("PathSelector", 1),
    ];
    let node = ops.iter().flat_map(|&(op_type, count)| {
        let node = NodeProto {
            op_type: op_type.to_owned(),
            domain: "outrider".to_owned(),
            ..NodeProto::default()
        };
        std::iter::repeat_n(node, count)
    });
    let opset = |domain: &str, version| OperatorSetIdProto {
        domain: domain.to_owned(),
        version,
    };
    let metadata = sample_draft().metadata().into_iter();
    ModelProto {
        ir_version: 12,
        opset_import: vec![opset("", 24), opset("outrider", 1)],
        producer_name: "sample".to_owned(),
        graph: Some(GraphProto {
            node: node.collect(),
            input,
            output,
            ..GraphProto::default()
        }),
        metadata_props: metadata
            .map(|(key, value)| StringStringEntryProto {
                key: key.to_owned(),
                value,
            })
            .collect(),
        ..ModelProto::default()
    }
}

/// An intact bundle directory with a draft.
pub fn sample_pair() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    write_sample_files(dir.path());
    let graph = sample_draft_graph().encode_to_vec();
    fs::write(dir.path().join("draft.onnx"), &graph).unwrap();
    let mut manifest = sample_manifest();
    manifest.draft = Some(sample_draft());
    let entry = FileEntry {
        size_bytes: graph.len() as u64,
        sha256: sha256_hex(&graph),
    };
    manifest.files.insert("draft.onnx".to_owned(), entry);
    manifest.write(dir.path()).unwrap();
    dir
}
