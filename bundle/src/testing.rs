//! A small bundle for the tests of this crate.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use tempfile::TempDir;

use crate::digest::sha256_hex;
use crate::manifest::{
    Attention, FileEntry, GenerationDefaults, Manifest, Precision, SCHEMA_VERSION, Source,
    TargetFacts, TextFacts,
};

/// Name and content of the files of the sample.
fn sample_files() -> Vec<(&'static str, Vec<u8>)> {
    vec![
        ("chat_template.jinja", b"{{ messages }}".to_vec()),
        ("model.onnx", b"graph".to_vec()),
        ("model.onnx.data", vec![7; 5000]),
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
