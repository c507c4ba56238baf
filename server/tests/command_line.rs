//! The binary as scripts see it: what it prints, and its exit codes.

use std::net::TcpListener;
use std::process::{Command, Output};

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

#[test]
fn a_good_configuration_is_printed() {
    let output = server(&with_library(&[
        "--check-config",
        "--bundle",
        "model",
        "--listen",
        "127.0.0.1:1",
    ]));
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let printed = text(&output.stdout);
    assert!(
        printed.contains("\n  bundle: model\n") && printed.contains("\n  listen: 127.0.0.1:1\n"),
        "{printed}"
    );
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
