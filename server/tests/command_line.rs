//! The binary as scripts see it: what it prints, and its exit codes.

use std::io::Write as _;
use std::net::TcpListener;
use std::process::{Command, Output, Stdio};

fn server(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_outrider-server"))
        .args(arguments)
        .env_clear()
        .output()
        .unwrap()
}

const LIBRARY: [&str; 2] = ["--set", "serving.runtime.onnxruntime_library=ort.so"];

fn with_library<'a>(arguments: &[&'a str]) -> Vec<&'a str> {
    arguments.iter().copied().chain(LIBRARY).collect()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// A manifest that can be read; nothing of what it lists is there.
const MANIFEST: &str = r#"{
  "schema_version": 1, "name": "m",
  "files": {
    "model.onnx": {"size_bytes": 1, "sha256": "0000000000000000000000000000000000000000000000000000000000000000"},
    "tokenizer.json": {"size_bytes": 1, "sha256": "0000000000000000000000000000000000000000000000000000000000000000"}
  },
  "target": {
    "graph": "model.onnx", "architecture": "llama", "precision": "fp32", "attention": "native", "layers": 2, "hidden_size": 16,
    "kv_heads": 2, "head_dim": 4, "vocab_size": 32, "context_tokens": 64, "kv_dtype": "float32", "taps": [0, 1]
  },
  "text": {"tokenizer": "tokenizer.json", "eos_token": "</s>", "add_bos": false},
  "generation": {"eos_token_ids": [2]}, "tools": {}, "sources": []
}"#;

#[test]
fn a_configuration_whose_files_are_there_is_printed() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("model");
    std::fs::create_dir(&bundle).unwrap();
    std::fs::write(bundle.join("bundle.json"), MANIFEST).unwrap();
    let library = dir.path().join("ort.so");
    std::fs::write(&library, "").unwrap();
    let bundle = bundle.display().to_string();
    let library = format!("serving.runtime.onnxruntime_library={}", library.display());
    let arguments = [
        "--check-config",
        "--bundle",
        &bundle,
        "--listen",
        "127.0.0.1:1",
        "--set",
        &library,
    ];
    let output = server(&arguments);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let printed = text(&output.stdout);
    assert!(
        printed.contains(&format!("\n  bundle: {bundle}\n"))
            && printed.contains("\n  listen: 127.0.0.1:1\n"),
        "{printed}"
    );
}

#[test]
fn a_check_names_every_file_that_cannot_be_used() {
    let faulty = [
        "--set",
        "serving.auth.api_keys_path=/nowhere/keys",
        "--set",
        "serving.runtime.onnxruntime_library=/nowhere/ort.so",
    ];
    let mut arguments = vec!["--check-config", "--bundle", "/nowhere/model"];
    arguments.extend(faulty);
    let output = server(&arguments);
    assert_eq!(output.status.code(), Some(64));
    let said = text(&output.stderr);
    for path in ["/nowhere/keys", "/nowhere/ort.so", "/nowhere/model"] {
        assert!(said.contains(path), "{path} is missing in {said}");
    }
    assert!(output.stdout.is_empty());

    let library = concat!(
        "serving.runtime.onnxruntime_library=",
        env!("CARGO_MANIFEST_DIR"),
        "/Cargo.toml"
    );
    let arguments = [
        "--check-config",
        "--bundle",
        "/nowhere/model",
        "--set",
        library,
    ];
    assert_eq!(server(&arguments).status.code(), Some(65));
}

#[test]
fn a_bad_configuration_lists_its_faults_and_exits_64() {
    for check in [&["--check-config"][..], &[]] {
        let arguments: Vec<&str> = check
            .iter()
            .copied()
            .chain(["--listen", "here", "--set", "serving.lisen=x"])
            .collect();
        let output = server(&arguments);
        assert_eq!(output.status.code(), Some(64));
        assert!(output.stdout.is_empty());
        insta::assert_snapshot!("faults", text(&output.stderr));
    }
}

#[test]
fn a_bad_command_line_exits_64() {
    for arguments in [
        &["--nothing"][..],
        &["--set", "novalue"],
        &["--check-config", "--reference-config"],
    ] {
        let output = server(arguments);
        assert_eq!(output.status.code(), Some(64), "{arguments:?}");
        assert!(!output.stderr.is_empty());
    }
}

#[test]
fn the_reference_configuration_is_printed() {
    let output = server(&["--reference-config"]);
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(text(&output.stdout), outrider_server::config::reference());
}

#[test]
fn a_key_is_made_and_its_secret_gives_the_same_line_again() {
    let made = server(&["--new-key", "alice"]);
    assert_eq!(made.status.code(), Some(0), "{}", text(&made.stderr));
    let (line, secret) = (text(&made.stdout), text(&made.stderr));
    assert!(line.starts_with("alice ") && line.ends_with('\n'), "{line}");
    assert!(!line.contains(secret.trim()), "{line}");

    let hash = |secret: &str| {
        let mut child = Command::new(env!("CARGO_BIN_EXE_outrider-server"))
            .args(["--hash-key", "alice"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child
            .stdin
            .take()
            .unwrap()
            .write_all(secret.as_bytes())
            .unwrap();
        child.wait_with_output().unwrap()
    };
    assert_eq!(text(&hash(&secret).stdout), line);
    let short = hash("password\n");
    assert_eq!(short.status.code(), Some(64));
    assert!(!text(&short.stderr).contains("password"));
    assert_eq!(server(&["--new-key", "a b"]).status.code(), Some(64));
}

#[test]
fn a_file_of_keys_that_cannot_be_read_exits_64_and_is_named() {
    let output = server(&with_library(&[
        "--bundle",
        "model",
        "--set",
        "serving.auth.api_keys_path=/nowhere/keys",
    ]));
    assert_eq!(output.status.code(), Some(64));
    assert!(text(&output.stderr).contains("/nowhere/keys"));
}

#[test]
fn help_and_version_are_no_errors() {
    for flag in ["--help", "--version"] {
        assert_eq!(server(&[flag]).status.code(), Some(0));
    }
}

#[test]
fn a_bundle_that_is_not_there_exits_65() {
    let output = server(&with_library(&[
        "--bundle",
        "/nowhere/model",
        "--listen",
        "127.0.0.1:0",
        "--admin-listen",
        "127.0.0.1:0",
    ]));
    let log = text(&output.stderr);
    assert_eq!(output.status.code(), Some(65), "{log}");
    assert!(
        log.contains("the model cannot be served") && log.contains("/nowhere/model"),
        "{log}"
    );
    // The error is the last word, not a message as after a stop that was asked for.
    assert!(!log.contains("stopped"), "{log}");
}

#[test]
fn a_port_in_use_exits_69_and_names_the_key() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let output = server(&with_library(&[
        "--bundle",
        "model",
        "--listen",
        "127.0.0.1:0",
        "--admin-listen",
        &address,
    ]));
    let log = text(&output.stderr);
    assert_eq!(output.status.code(), Some(69), "{log}");
    assert!(
        log.contains("serving.admin_listen") && log.contains("in use"),
        "{log}"
    );
}

#[test]
fn a_log_file_that_cannot_be_had_exits_69() {
    let output = server(&with_library(&[
        "--bundle",
        "model",
        "--set",
        "serving.logging.path=/nowhere/log",
    ]));
    assert_eq!(output.status.code(), Some(69));
    assert!(text(&output.stderr).contains("serving.logging.path"));
}

#[test]
fn an_audit_log_that_cannot_be_had_exits_69_and_names_file_and_key() {
    let output = server(&with_library(&[
        "--bundle",
        "model",
        "--set",
        "serving.audit.path=/nowhere/audit.jsonl",
    ]));
    let log = text(&output.stderr);
    assert_eq!(output.status.code(), Some(69), "{log}");
    assert!(
        log.contains("/nowhere/audit.jsonl") && log.contains("serving.audit.path"),
        "{log}"
    );
}

#[test]
fn every_line_of_a_json_log_is_an_object_with_fields() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let setting = format!("serving.logging.path={}", path.display());
    let arguments = [
        "--bundle",
        "/nowhere/model",
        "--listen",
        "127.0.0.1:0",
        "--admin-listen",
        "127.0.0.1:0",
        "--set",
        "serving.logging.format=json",
        "--set",
        &setting,
    ];
    assert_eq!(server(&with_library(&arguments)).status.code(), Some(65));
    let log = std::fs::read_to_string(path).unwrap();
    let records: Vec<serde_json::Value> = log
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let configured = |record: &&serde_json::Value| {
        record["message"] == "configured" && record["key"] == "serving.bundle"
    };
    let bundle = records.iter().find(configured).unwrap();
    assert_eq!(bundle["value"], "/nowhere/model");
    assert_eq!(bundle["origin"], "command line");
    let whole: serde_json::Value =
        serde_json::from_str(records[0]["configuration"].as_str().unwrap()).unwrap();
    assert_eq!(whole["serving"]["runtime"]["max_concurrency"], 8);
}
