//! The program itself: exit codes, what it prints, facts out and in. It needs no model.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn preflight(dir: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_outrider-preflight"))
        .current_dir(dir)
        .args(arguments)
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn a_configuration_with_faults_fails_with_all_of_them_and_nothing_depends_on_it() {
    let dir = tempfile::tempdir().unwrap();
    let set = ["--set", "serving.runtime.kv_cache_ratio=2"];
    let output = preflight(dir.path(), &[&set[..], &["--only", "config"]].concat());
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    insta::assert_snapshot!(text(&output.stdout));
}

#[test]
fn facts_that_were_written_down_are_judged_as_they_were() {
    let dir = tempfile::tempdir().unwrap();
    let first = preflight(dir.path(), &["--json", "--facts-out", "facts.json"]);
    assert_eq!(first.status.code(), Some(1));
    let second = preflight(dir.path(), &["--json", "--facts", "facts.json"]);
    assert_eq!(text(&first.stdout), text(&second.stdout));
    assert_eq!(second.status.code(), Some(1));

    let report: Value = serde_json::from_slice(&first.stdout).unwrap();
    assert_eq!(report["schema_version"], 1);
    assert_eq!(report["verdict"], "fail");
    let faults = &report["checks"][0];
    assert_eq!(
        (&faults["id"], &faults["status"]),
        (&"config.faults".into(), &"fail".into())
    );

    // Another form is refused before anything of it is believed.
    let facts = fs::read_to_string(dir.path().join("facts.json")).unwrap();
    let other = facts.replace("\"schema_version\": 1", "\"schema_version\": 2");
    fs::write(dir.path().join("facts.json"), other).unwrap();
    let third = preflight(dir.path(), &["--facts", "facts.json"]);
    assert_eq!(third.status.code(), Some(2));
    assert_eq!(
        text(&third.stderr),
        "outrider-preflight: facts.json: schema_version is 2, this build reads 1\n"
    );
}

#[test]
fn the_reports_fields_are_those_of_the_published_schema() {
    let dir = tempfile::tempdir().unwrap();
    let report = preflight(dir.path(), &["--json"]);
    let report: Value = serde_json::from_slice(&report.stdout).unwrap();
    let schema: Value =
        serde_json::from_str(include_str!("../../docs/preflight.schema.json")).unwrap();
    let names = |value: &Value| {
        let names = value.as_object().unwrap().keys().cloned();
        names.collect::<std::collections::BTreeSet<String>>()
    };
    let check = &schema["properties"]["checks"]["items"];
    assert_eq!(names(&report), names(&schema["properties"]));
    assert_eq!(
        names(&report["counts"]),
        names(&schema["properties"]["counts"]["properties"])
    );
    let statuses = check["properties"]["status"]["enum"].as_array().unwrap();
    for finding in report["checks"].as_array().unwrap() {
        assert_eq!(names(finding), names(&check["properties"]), "{finding}");
        assert!(statuses.contains(&finding["status"]), "{finding}");
    }
    assert_eq!(
        schema["properties"]["schema_version"]["const"],
        report["schema_version"]
    );
}

#[test]
fn warnings_count_only_where_they_are_asked_to() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("bundle")).unwrap();
    let arguments = [
        "--set",
        "serving.bundle=bundle",
        "--set",
        "serving.runtime.onnxruntime_library=none.so",
        "--set",
        "serving.audit.path=audit.jsonl",
        "--set",
        "serving.audit.prompt_text=true",
        "--only",
        "config",
    ];
    assert_eq!(preflight(dir.path(), &arguments).status.code(), Some(0));
    let strict = preflight(dir.path(), &[&arguments[..], &["--strict"]].concat());
    assert_eq!(strict.status.code(), Some(3));
    let skipped = preflight(
        dir.path(),
        &[
            &arguments[..],
            &["--strict", "--skip", "config.prompt_text"],
        ]
        .concat(),
    );
    assert_eq!(skipped.status.code(), Some(0));
}

#[test]
fn a_check_is_explained_and_what_is_none_is_wrong_usage() {
    let dir = tempfile::tempdir().unwrap();
    let explained = preflight(dir.path(), &["--explain", "memory.kv_share"]);
    assert_eq!(explained.status.code(), Some(0));
    insta::assert_snapshot!(text(&explained.stdout));
    for arguments in [
        &["--explain", "memory.kv"][..],
        &["--only", "hots"],
        &["--facts", "no-such-file.json"],
        &["--no-such-option"],
        &["--user", "outrider"],
        &["--facts", "facts.json", "--quick"],
    ] {
        let output = preflight(dir.path(), arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {output:?}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
    }
}
