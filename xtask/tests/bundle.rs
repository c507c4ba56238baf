//! `cargo xtask bundle` as people and scripts see it: texts, JSON, exit status.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use outrider_bundle::onnx::{
    DataLocation, DataType, Dimension, DimensionProto, GraphProto, ModelProto, NodeProto,
    OperatorSetIdProto, StringStringEntryProto, TensorProto, TensorShapeProto, TensorTypeProto,
    TypeProto, ValueInfoProto,
};
use prost::Message;
use serde_json::{Value, json};
use tempfile::TempDir;

/// A directory with a graph directory in it, and the facts beside that.
struct Setup(TempDir);

impl Setup {
    fn new() -> Self {
        let setup = Self(tempfile::tempdir().unwrap());
        let dir = setup.path("graph");
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("model.onnx"), graph().encode_to_vec()).unwrap();
        fs::write(dir.join("model.onnx.data"), [7; 64]).unwrap();
        fs::write(dir.join("tokenizer.json"), "{}").unwrap();
        fs::write(dir.join("chat_template.jinja"), "{{ messages }}").unwrap();
        setup.write_facts(&facts());
        setup
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write_facts(&self, facts: &Value) {
        fs::write(self.path("facts.json"), facts.to_string()).unwrap();
    }

    /// Runs `bundle` in the directory; returns exit status, standard output and standard error.
    fn run(&self, args: &[&str]) -> (i32, String, String) {
        let output = Command::new(env!("CARGO_BIN_EXE_xtask"))
            .arg("bundle")
            .args(args)
            .current_dir(self.0.path())
            .output()
            .unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (
            output.status.code().unwrap(),
            text(output.stdout),
            text(output.stderr),
        )
    }

    fn create(&self) -> (i32, String, String) {
        self.run(&[
            "create",
            "--graph-dir",
            "graph",
            "--out",
            "made/bundle",
            "--facts",
            "facts.json",
        ])
    }

    /// Everything below a directory.
    fn names(&self, dir: &str) -> Vec<String> {
        let mut names: Vec<_> = list(&self.path(dir));
        names.sort();
        names
    }
}

fn list(dir: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(dir) else {
        return Vec::new();
    };
    entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

fn facts() -> Value {
    json!({
        "name": "tiny",
        "target": {
            "graph": "model.onnx", "architecture": "llama", "precision": "fp32", "attention": "native", "layers": 1, "hidden_size": 16,
            "kv_heads": 2, "head_dim": 4, "vocab_size": 32, "context_tokens": 64, "kv_dtype": "float32", "taps": [0],
        },
        "text": { "tokenizer": "tokenizer.json", "chat_template": "chat_template.jinja", "eos_token": "</s>", "add_bos": false },
        "generation": { "eos_token_ids": [2], "temperature": 0.6, "top_p": 0.9, "top_k": 20 },
        "tools": { "exporter": "1.0" },
        "sources": [{ "name": "tiny.gguf", "sha256": "0".repeat(64), "licence": "Apache-2.0" }],
    })
}

/// A target graph of one layer, with a tied weight.
fn graph() -> ModelProto {
    let value = |spec: &str| {
        let mut words = spec.split(' ');
        let name = words.next().unwrap().to_owned();
        let elem_type = if words.next() == Some("int64") {
            DataType::Int64
        } else {
            DataType::Float
        } as i32;
        let dim = |text: &str| {
            text.parse()
                .map_or_else(|_| Dimension::Symbol(text.to_owned()), Dimension::Size)
        };
        let dim = words
            .map(|text| DimensionProto {
                value: Some(dim(text)),
            })
            .collect();
        let tensor_type = TensorTypeProto {
            elem_type,
            shape: Some(TensorShapeProto { dim }),
        };
        ValueInfoProto {
            name,
            r#type: Some(TypeProto {
                tensor_type: Some(tensor_type),
            }),
        }
    };
    let inputs = [
        "input_ids int64 batch sequence",
        "position_ids int64 batch sequence",
        "key_cache.0 float batch max 8",
        "value_cache.0 float batch max 8",
        "write_indices int64 batch",
        "nonpad_kv_seqlen int64 batch",
        "logit_indices int64 batch rows",
    ];
    let outputs = [
        "logits float batch rows 32",
        "updated_key_cache.0 float batch max 8",
        "updated_value_cache.0 float batch max 8",
        "aux_hidden_states float batch sequence 16",
    ];
    let entry = |key: &str, value: &str| StringStringEntryProto {
        key: key.to_owned(),
        value: value.to_owned(),
    };
    let weight = |name: &str| TensorProto {
        dims: vec![4, 4],
        data_type: DataType::Float as i32,
        name: name.to_owned(),
        external_data: vec![
            entry("location", "model.onnx.data"),
            entry("offset", "0"),
            entry("length", "64"),
        ],
        data_location: DataLocation::External as i32,
        ..TensorProto::default()
    };
    let node = |domain: &str, op_type: &str| NodeProto {
        domain: domain.to_owned(),
        op_type: op_type.to_owned(),
        ..NodeProto::default()
    };
    let opset = |domain: &str, version| OperatorSetIdProto {
        domain: domain.to_owned(),
        version,
    };
    ModelProto {
        ir_version: 10,
        opset_import: vec![opset("", 24), opset("outrider", 1)],
        producer_name: "exporter".to_owned(),
        producer_version: "1.0".to_owned(),
        graph: Some(GraphProto {
            node: vec![
                node("", "MatMul"),
                node("outrider", "CachedAttention"),
                node("", "MatMul"),
            ],
            initializer: vec![weight("embedding"), weight("head")],
            input: inputs.map(value).to_vec(),
            output: outputs.map(value).to_vec(),
            ..GraphProto::default()
        }),
        metadata_props: Vec::new(),
    }
}

#[test]
fn a_bundle_is_made_and_is_intact() {
    let setup = Setup::new();
    let (status, stdout, stderr) = setup.create();
    assert_eq!((status, stderr.as_str()), (0, ""));
    let digest = stdout.strip_suffix("  made/bundle\n").unwrap();
    assert_eq!(setup.names("made"), ["bundle"], "nothing is left aside");
    assert_eq!(
        setup.names("made/bundle"),
        [
            "bundle.json",
            "chat_template.jinja",
            "model.onnx",
            "model.onnx.data",
            "tokenizer.json"
        ]
    );
    assert_eq!(
        setup.run(&["verify", "made/bundle"]),
        (
            0,
            format!("{digest}  ok, 4 files, 801 bytes\n"),
            String::new()
        )
    );
    let (status, stdout, _) = setup.run(&["verify", "--json", "made/bundle"]);
    assert_eq!(status, 0);
    assert_eq!(
        serde_json::from_str::<Value>(&stdout).unwrap(),
        json!({ "ok": true, "digest": digest, "faults": [] })
    );
}

#[test]
fn what_a_bundle_is_can_be_read() {
    let setup = Setup::new();
    setup.create();
    let (status, stdout, stderr) = setup.run(&["show", "made/bundle"]);
    assert_eq!((status, stderr.as_str()), (0, ""));
    insta::assert_snapshot!(stdout);
    let (status, stdout, _) = setup.run(&["show", "--json", "made/bundle"]);
    assert_eq!(status, 0);
    let shown: Value = serde_json::from_str(&stdout).unwrap();
    let manifest: Value =
        serde_json::from_slice(&fs::read(setup.path("made/bundle/bundle.json")).unwrap()).unwrap();
    assert_eq!(shown["manifest"], manifest);
    assert!(stdout.contains("\"temperature\": 0.6,"), "{stdout}");
    assert_eq!(
        shown["graph"]["ops"],
        json!({ "ai.onnx.MatMul": 2, "outrider.CachedAttention": 1 })
    );
    assert_eq!(shown["graph"]["initializer_bytes"], 64);
}

#[test]
fn every_fault_is_listed_and_the_status_is_1() {
    let setup = Setup::new();
    setup.create();
    fs::remove_file(setup.path("made/bundle/tokenizer.json")).unwrap();
    fs::write(setup.path("made/bundle/model.onnx.data"), [8; 64]).unwrap();
    fs::write(setup.path("made/bundle/chat_template.jinja"), "").unwrap();
    fs::write(setup.path("made/bundle/notes.txt"), "").unwrap();
    let (status, stdout, stderr) = setup.run(&["verify", "made/bundle"]);
    assert_eq!(
        (status, stderr.as_str()),
        (1, "error: made/bundle is not intact\n")
    );
    insta::assert_snapshot!("verify", stdout);
    let (status, stdout, _) = setup.run(&["verify", "--json", "made/bundle"]);
    assert_eq!(status, 1);
    insta::assert_snapshot!("verify_json", stdout);
}

#[test]
fn a_manifest_that_is_none_is_one_fault() {
    let setup = Setup::new();
    setup.create();
    let path = setup.path("made/bundle/bundle.json");
    let good = fs::read_to_string(&path).unwrap();
    let long = " ".repeat(100 << 20);
    for (text, expected) in [
        (
            "",
            "bundle.json: the manifest is not of the expected form: EOF while parsing a value at line 1 column 0\n",
        ),
        (
            &good.replacen(": 1,", ": 7,", 1),
            "bundle.json: schema_version is 7, this build reads 1\n",
        ),
        (
            &good.replace("\"tokenizer.json\": {", "\"../tokenizer.json\": {"),
            "files.\"../tokenizer.json\": the path leaves the directory by `..`",
        ),
        (
            &good.replace("\"tokenizer.json\": {", "\"/tokenizer.json\": {"),
            "files.\"/tokenizer.json\": the path is absolute, must be relative",
        ),
        (
            &good.replace("\"tokenizer.json\": {", "\"model.onnx\": {"),
            "duplicate key \"model.onnx\"",
        ),
        (
            &good.replace("\"name\": \"tiny\"", "\"name\": \"tiny\", \"colour\": 1"),
            "unknown field `colour`",
        ),
        (
            &long,
            "bundle.json: the manifest is larger than 4194304 bytes\n",
        ),
    ] {
        fs::write(&path, text).unwrap();
        for command in ["verify", "show"] {
            let (status, stdout, stderr) = setup.run(&[command, "made/bundle"]);
            assert_eq!(status, 1, "{command}: {expected}");
            let said = if command == "verify" { stdout } else { stderr };
            assert!(
                said.contains(expected.trim_start_matches("bundle.json: ")),
                "{command}: {expected}: {said}"
            );
        }
        let (status, stdout, _) = setup.run(&["verify", "--json", "made/bundle"]);
        assert_eq!(status, 1);
        assert_eq!(
            serde_json::from_str::<Value>(&stdout).unwrap()["faults"][0]["fault"],
            "manifest"
        );
    }
}

#[test]
fn a_graph_that_does_not_fit_makes_no_bundle() {
    let setup = Setup::new();
    let mut graph = graph();
    graph.graph.as_mut().unwrap().input.remove(0);
    fs::write(setup.path("graph/model.onnx"), graph.encode_to_vec()).unwrap();
    let mut facts = facts();
    facts["target"]["vocab_size"] = json!(33);
    setup.write_facts(&facts);
    let (status, stdout, stderr) = setup.create();
    assert_eq!((status, stdout.as_str()), (1, ""));
    insta::assert_snapshot!(stderr);
    assert_eq!(setup.names("made"), [""; 0]);
}

#[test]
fn bad_facts_name_the_field() {
    let setup = Setup::new();
    let mut colourful = facts();
    colourful["colour"] = json!("red");
    let mut incomplete = facts();
    incomplete["target"]
        .as_object_mut()
        .unwrap()
        .shift_remove("layers");
    for (facts, expected) in [
        (
            colourful,
            "error: facts facts.json are unusable: unknown field `colour`",
        ),
        (
            incomplete,
            "error: facts facts.json are unusable: missing field `layers`",
        ),
        (
            json!({ "files": {} }),
            "error: facts facts.json are unusable: the manifest is not of the expected form: missing field `schema_version`",
        ),
    ] {
        setup.write_facts(&facts);
        let (status, _, stderr) = setup.create();
        assert_eq!(status, 1);
        assert!(stderr.starts_with(expected), "{stderr}");
    }
}

#[test]
fn a_bundle_is_never_overwritten() {
    let setup = Setup::new();
    setup.create();
    assert_eq!(
        setup.create().2,
        "error: --out made/bundle exists already\n"
    );
}

#[test]
fn a_bundle_made_of_another_has_its_facts_and_its_own_files() {
    let setup = Setup::new();
    let (_, first, _) = setup.create();
    let facts = "made/bundle/bundle.json";
    let (status, second, stderr) = setup.run(&[
        "create",
        "--graph-dir",
        "made/bundle",
        "--out",
        "made/second",
        "--facts",
        facts,
    ]);
    assert_eq!((status, stderr.as_str()), (0, ""));
    assert_eq!(
        first.split("  ").next(),
        second.split("  ").next(),
        "same files, same digest"
    );

    fs::write(setup.path("made/second/chat_template.jinja"), "changed").unwrap();
    assert_eq!(setup.run(&["verify", "made/second"]).0, 1);
    let in_place = [
        "create",
        "--graph-dir",
        "made/second",
        "--out",
        "made/second",
        "--facts",
        "made/second/bundle.json",
        "--name",
        "other",
    ];
    let (status, third, stderr) = setup.run(&in_place);
    assert_eq!((status, stderr.as_str()), (0, ""));
    assert_ne!(first.split("  ").next(), third.split("  ").next());
    assert_eq!(setup.run(&["verify", "made/second"]).0, 0);
    assert!(
        setup
            .run(&["show", "made/second"])
            .1
            .starts_with("bundle      other\n")
    );
}

#[test]
fn a_directory_that_is_no_bundle_is_named() {
    let setup = Setup::new();
    for command in ["verify", "show"] {
        let (status, stdout, stderr) = setup.run(&[command, "gone"]);
        assert_eq!(status, 1);
        assert!(
            (stdout + &stderr).contains("cannot read gone/bundle.json: No such file or directory"),
            "{stderr}"
        );
    }
}

#[test]
fn the_facts_may_lie_beside_the_graph_and_links_may_not() {
    let setup = Setup::new();
    fs::rename(setup.path("facts.json"), setup.path("graph/facts.json")).unwrap();
    let args = [
        "create",
        "--graph-dir",
        "graph",
        "--out",
        "made/bundle",
        "--facts",
        "graph/facts.json",
    ];
    assert_eq!(setup.run(&args).0, 0);
    assert!(
        !setup
            .names("made/bundle")
            .contains(&"facts.json".to_owned())
    );

    fs::remove_dir_all(setup.path("made")).unwrap();
    std::os::unix::fs::symlink("/etc/hostname", setup.path("graph/link")).unwrap();
    let (status, _, stderr) = setup.run(&args);
    assert_eq!(
        (status, stderr.as_str()),
        (
            1,
            "error: graph/link is no plain file, a bundle holds plain files only\n"
        )
    );
    assert_eq!(setup.names("made"), [""; 0]);
}
