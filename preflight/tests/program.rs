//! The program itself: exit codes, what it prints, facts out and in. It needs no model.

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};

fn preflight(dir: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_outrider-preflight"))
        .current_dir(dir)
        .args(arguments)
        .output()
        .unwrap()
}

fn text_of(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn a_configuration_with_faults_fails_with_all_of_them_and_nothing_depends_on_it() {
    let dir = tempfile::tempdir().unwrap();
    let set = ["--set", "serving.runtime.kv_cache_ratio=2"];
    let output = preflight(dir.path(), &[&set[..], &["--only", "config"]].concat());
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    insta::assert_snapshot!(text_of(&output.stdout));
}

#[test]
fn facts_that_were_written_down_are_judged_as_they_were() {
    let dir = tempfile::tempdir().unwrap();
    let first = preflight(dir.path(), &["--json", "--facts-out", "facts.json"]);
    assert_eq!(first.status.code(), Some(1));
    let second = preflight(dir.path(), &["--json", "--facts-in", "facts.json"]);
    assert_eq!(text_of(&first.stdout), text_of(&second.stdout));
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
    let third = preflight(dir.path(), &["--facts-in", "facts.json"]);
    assert_eq!(third.status.code(), Some(2));
    assert_eq!(
        text_of(&third.stderr),
        "outrider-preflight: facts.json: schema_version is 2, this build reads 1\n"
    );
}

/// What of `value` is not as `schema` says, with where it is; a keyword that is not known here is a fault of this test.
fn faults(schema: &Value, value: &Value, place: &str) -> Vec<String> {
    let mut faults = Vec::new();
    let mut require = |holds: bool, what: &str| {
        if !holds {
            faults.push(format!("{place}: {what}: {value}"));
        }
    };
    let is_of = |kind: &str| match kind {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "integer" => value.is_u64() || value.is_i64(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        other => panic!("{place}: type {other}"),
    };
    let mut inner = Vec::new();
    for (keyword, wanted) in schema.as_object().unwrap() {
        match keyword.as_str() {
            "$schema" | "title" | "description" => {}
            "type" => {
                let one = std::slice::from_ref(wanted);
                let kinds = wanted.as_array().map_or(one, Vec::as_slice);
                let holds = kinds.iter().any(|kind| is_of(kind.as_str().unwrap()));
                require(holds, "is of another type");
            }
            "const" => require(value == wanted, "is another value"),
            "enum" => require(
                wanted.as_array().unwrap().contains(value),
                "is none of these",
            ),
            "minimum" => require(value.as_f64() >= wanted.as_f64(), "is too small"),
            // The only pattern there is.
            "pattern" => {
                assert_eq!(wanted, "^[a-z]+\\.[a-z_]+$");
                let id = value.as_str().unwrap_or_default().split_once('.');
                let holds = id.is_some_and(|(part, subject)| {
                    let is_name = |text: &str, allowed: fn(u8) -> bool| {
                        !text.is_empty() && text.bytes().all(allowed)
                    };
                    is_name(part, |byte| byte.is_ascii_lowercase())
                        && is_name(subject, |byte| byte.is_ascii_lowercase() || byte == b'_')
                });
                require(holds, "has another form");
            }
            "required" => {
                for name in wanted.as_array().unwrap() {
                    let holds = value.get(name.as_str().unwrap()).is_some();
                    require(holds, &format!("has no {name}"));
                }
            }
            "additionalProperties" => {
                assert_eq!(wanted, false);
                for name in value
                    .as_object()
                    .into_iter()
                    .flat_map(|object| object.keys())
                {
                    let holds = schema["properties"].get(name).is_some();
                    require(holds, &format!("has {name}"));
                }
            }
            "properties" => {
                for (name, schema) in wanted.as_object().unwrap() {
                    if let Some(value) = value.get(name) {
                        inner.push((schema, value, format!("{place}.{name}")));
                    }
                }
            }
            "items" => {
                for (index, value) in value.as_array().into_iter().flatten().enumerate() {
                    inner.push((wanted, value, format!("{place}[{index}]")));
                }
            }
            other => panic!("{place}: keyword {other}"),
        }
    }
    for (schema, value, place) in inner {
        faults.extend(self::faults(schema, value, &place));
    }
    faults
}

#[test]
fn a_report_is_valid_against_the_published_schema() {
    let dir = tempfile::tempdir().unwrap();
    let report = preflight(dir.path(), &["--json"]);
    let report: Value = serde_json::from_slice(&report.stdout).unwrap();
    let schema: Value =
        serde_json::from_str(include_str!("../../docs/preflight.schema.json")).unwrap();
    assert_eq!(faults(&schema, &report, "report"), Vec::<String>::new());
    for (pointer, wrong) in [
        ("/schema_version", json!(2)),
        ("/verdict", json!("good")),
        ("/counts/pass", json!(-1)),
        ("/checks/0/status", json!("ok")),
        ("/checks/0/id", json!("Config")),
        ("/checks/0/remedy", json!(7)),
        ("/checks/0", json!({})),
        ("/counts", json!({"pass": 1, "more": 2})),
    ] {
        let mut report = report.clone();
        *report.pointer_mut(pointer).unwrap() = wrong;
        let found = faults(&schema, &report, "report");
        assert!(!found.is_empty(), "{pointer} would pass");
    }
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
fn a_log_is_looked_for_where_the_server_would_open_it() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir_all(dir.path().join("logs")).unwrap();
    std::os::unix::fs::symlink("logs/audit.jsonl", dir.path().join("good")).unwrap();
    std::os::unix::fs::symlink("none/audit.jsonl", dir.path().join("lost")).unwrap();
    for (path, status) in [
        ("audit.jsonl", "pass"),
        ("./audit.jsonl", "pass"),
        ("logs/../audit.jsonl", "pass"),
        ("good", "pass"),
        ("none/audit.jsonl", "fail"),
        ("lost", "fail"),
        ("logs", "fail"),
    ] {
        let log = format!("serving.logging.path={path}");
        let audit = format!("serving.audit.path={path}");
        for (id, setting) in [("host.log", &log), ("host.audit", &audit)] {
            let bundle = "serving.bundle=bundle";
            let library = "serving.runtime.onnxruntime_library=none.so";
            let output = preflight(
                dir.path(),
                &[
                    "--set", bundle, "--set", library, "--set", setting, "--only", id, "--json",
                ],
            );
            let report: Value = serde_json::from_slice(&output.stdout).unwrap();
            assert_eq!(report["checks"][0]["status"], status, "{path}: {report}");
        }
    }
}

#[test]
fn a_password_in_a_url_is_in_no_report_and_no_facts() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(
        dir.path().join("broken.yaml"),
        "serving:\n  telemetry: {otlp_endpoint: \"http://user:hunter2@collector/\"\n",
    )
    .unwrap();
    let key = "serving.telemetry.otlp_endpoint";
    let set = |url: &str| vec!["--set".to_owned(), format!("{key}={url}")];
    let complete = [
        "serving.bundle=bundle",
        "serving.runtime.onnxruntime_library=none.so",
    ];
    let complete = complete.map(|it| vec!["--set".to_owned(), it.to_owned()]);
    for (arguments, words) in [
        (
            [complete.concat(), set("http://user:hunter2@collector/")].concat(),
            "bundle.manifest",
        ),
        (set("http://user:hunter2@collector/"), "serving.bundle"),
        (set("ftp://user:hunter2@collector/"), key),
        (set("user:hunter2@collector:4318"), key),
        (vec!["--config".into(), "broken.yaml".into()], "broken.yaml"),
    ] {
        for form in [&[][..], &["--json"]] {
            let output = Command::new(env!("CARGO_BIN_EXE_outrider-preflight"))
                .current_dir(dir.path())
                .args(&arguments)
                .args(form)
                .args(["--facts-out", "facts.json"])
                .env("https_proxy", "http://user:hunter2@proxy:3128")
                .env("HTTPS_PROXY", "http://user:hunter2@proxy:3128")
                .output()
                .unwrap();
            let shown = text_of(&output.stdout);
            assert!(shown.contains(words), "{arguments:?}: {shown}");
            let facts = fs::read_to_string(dir.path().join("facts.json")).unwrap();
            for text in [shown, text_of(&output.stderr), facts] {
                assert!(!text.contains("hunter2"), "{arguments:?}: {text}");
            }
        }
    }
}

#[test]
fn a_check_is_explained_and_what_is_none_is_wrong_usage() {
    let dir = tempfile::tempdir().unwrap();
    let explained = preflight(dir.path(), &["--explain", "memory.kv_share"]);
    assert_eq!(explained.status.code(), Some(0));
    insta::assert_snapshot!(text_of(&explained.stdout));
    for arguments in [
        &["--explain", "memory.kv"][..],
        &["--only", "hots"],
        &["--facts-in", "no-such-file.json"],
        &["--no-such-option"],
        &["--user", "outrider"],
        &["--facts-in", "facts.json", "--quick"],
    ] {
        let output = preflight(dir.path(), arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {output:?}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
    }
}

#[test]
fn what_is_no_file_of_facts_is_refused_with_its_reason() {
    let dir = tempfile::tempdir().unwrap();
    let first = preflight(dir.path(), &["--facts-out", "facts.json"]);
    assert_eq!(first.status.code(), Some(1));
    let good: Value =
        serde_json::from_slice(&fs::read(dir.path().join("facts.json")).unwrap()).unwrap();
    let with = |pointer: &str, name: &str| {
        let mut facts = good.clone();
        let place = facts.pointer_mut(pointer).unwrap();
        place[name] = json!(1);
        facts.to_string()
    };
    let without = |name: &str| {
        let mut facts = good.clone();
        facts.as_object_mut().unwrap().remove(name);
        facts.to_string()
    };
    for (name, text, reason) in [
        ("empty", String::new(), "EOF"),
        ("prose", "GPUs are fine".to_owned(), "expected value"),
        ("list", "[]".to_owned(), "schema_version is null"),
        ("deep", "[".repeat(100_000), "recursion limit"),
        ("more", with("", "more"), "unknown field `more`"),
        ("host", with("/host", "more"), "unknown field `more`"),
        (
            "memory",
            with("/host/memory", "more"),
            "unknown field `more`",
        ),
        ("gpu", with("/gpu", "more"), "unknown field `more`"),
        ("config", with("/config", "more"), "unknown field `more`"),
        ("bundle", with("/bundle", "more"), "unknown field `more`"),
        ("runtime", with("/runtime", "more"), "unknown field `more`"),
        ("less", without("runtime"), "missing field `runtime`"),
        (
            "negative",
            with("/config", "device_id").replace("\"device_id\":1", "\"device_id\":-1"),
            "invalid value",
        ),
    ] {
        fs::write(dir.path().join(name), text).unwrap();
        let output = preflight(dir.path(), &["--facts-in", name]);
        let error = text_of(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{name}: {error}");
        assert!(output.stdout.is_empty(), "{name}");
        let begins = format!(
            "outrider-preflight: {}",
            if name == "list" {
                ""
            } else {
                "cannot read the facts in "
            }
        );
        assert!(
            error.starts_with(&begins) && error.contains(reason),
            "{name}: {error}"
        );
    }
    let directory = preflight(dir.path(), &["--facts-in", "."]);
    assert_eq!(directory.status.code(), Some(2));
    let endless = preflight(dir.path(), &["--facts-in", "/dev/zero"]);
    assert_eq!(endless.status.code(), Some(2));
    assert!(
        text_of(&endless.stderr).contains("has more than"),
        "{endless:?}"
    );
}

#[test]
fn a_device_that_facts_go_to_is_written_and_not_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let output = preflight(dir.path(), &["--json", "--facts-out", "/dev/full"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let kind = fs::metadata("/dev/full").unwrap().file_type();
    assert!(!kind.is_file());
}

/// A pipe that nobody writes to, which whoever opens it waits for.
fn pipe(path: &Path) {
    let made = Command::new("mkfifo").arg(path).status().unwrap();
    assert!(made.success());
}

#[test]
fn what_never_ends_is_given_up_and_named() {
    let dir = tempfile::tempdir().unwrap();
    pipe(&dir.path().join("pipe"));
    fs::create_dir(dir.path().join("bundle")).unwrap();
    pipe(&dir.path().join("bundle/bundle.json"));
    let bundle = ["--set", "serving.bundle=bundle"];
    let library = ["--set", "serving.runtime.onnxruntime_library=pipe"];
    for (arguments, id, words) in [
        (
            vec!["--config", "pipe"],
            "config.faults",
            "is a pipe, but must be a regular file",
        ),
        (
            vec!["--config", "."],
            "config.faults",
            "is a directory, but must be a regular file",
        ),
        (
            vec!["--config", "/dev/zero"],
            "config.faults",
            "must be a regular file",
        ),
        (
            [&bundle[..], &library[..]].concat(),
            "bundle.manifest",
            "no answer within",
        ),
        (
            ["--set", "serving.bundle=.", library[0], library[1]].to_vec(),
            "runtime.library",
            "does not exist or is not a file",
        ),
        (
            [
                "--set",
                "serving.bundle=.",
                "--set",
                "serving.runtime.onnxruntime_library=x",
                "--set",
                "serving.tls.certificate_path=/dev/zero",
                "--set",
                "serving.tls.private_key_path=/dev/zero",
            ]
            .to_vec(),
            "config.files",
            "must be a regular file",
        ),
    ] {
        let output = preflight(dir.path(), &[&arguments[..], &["--json"]].concat());
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {output:?}");
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let checks = report["checks"].as_array().unwrap();
        let finding = checks.iter().find(|check| check["id"] == id).unwrap();
        assert_eq!(finding["status"], "fail", "{arguments:?}: {finding}");
        let evidence = finding["evidence"].as_str().unwrap();
        assert!(evidence.contains(words), "{arguments:?}: {evidence}");
    }
}

#[test]
fn with_faults_in_the_configuration_no_part_of_the_checks_is_ready() {
    let dir = tempfile::tempdir().unwrap();
    for arguments in [
        &["--only", "gpu,runtime"][..],
        &["--only", "gpu.nvml"],
        &["--only", "gpu.devices"],
        &["--only", "memory"],
        &["--only", "bundle"],
        &["--only", "host"],
        &["--skip", "config"],
        &["--only", "gpu", "--skip", "gpu"],
    ] {
        let output = preflight(dir.path(), arguments);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {output:?}");
        let text = text_of(&output.stdout);
        assert!(
            !text.contains("ready to start:") || text.contains("not ready"),
            "{text}"
        );
        assert!(!text.contains("execution_provider is cpu"), "{text}");
    }
}

#[test]
fn a_file_of_facts_takes_the_place_of_a_planted_link_and_a_pipe_is_given_up() {
    let dir = tempfile::tempdir().unwrap();
    let victim = dir.path().join("victim");
    fs::write(&victim, "mine").unwrap();
    std::os::unix::fs::symlink(&victim, dir.path().join("facts.json.partial")).unwrap();
    let output = preflight(dir.path(), &["--facts-out", "facts.json"]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert_eq!(fs::read_to_string(&victim).unwrap(), "mine");
    assert!(fs::metadata(dir.path().join("facts.json")).unwrap().len() > 0);

    pipe(&dir.path().join("pipe"));
    let output = preflight(dir.path(), &["--facts-out", "pipe"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(
        text_of(&output.stderr).contains("no answer within"),
        "{output:?}"
    );
}

#[test]
fn limits_of_a_process_are_read_and_bytes_of_them_judged() {
    let dir = tempfile::tempdir().unwrap();
    let script = format!(
        "ulimit -v 8000000; ulimit -d 6000000; exec {} --facts-out facts.json",
        env!("CARGO_BIN_EXE_outrider-preflight")
    );
    let status = Command::new("sh")
        .current_dir(dir.path())
        .args(["-c", &script])
        .output()
        .unwrap();
    assert_eq!(status.status.code(), Some(1), "{status:?}");
    let facts = fs::read(dir.path().join("facts.json")).unwrap();
    let facts: Value = serde_json::from_slice(&facts).unwrap();
    let limits = &facts["host"]["limits"];
    assert_eq!(limits["address_space_bytes"], 8_000_000 * 1024u64);
    assert_eq!(limits["data_bytes"], 6_000_000 * 1024u64);
}

#[test]
fn a_child_that_hangs_ends_when_its_parent_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    pipe(&dir.path().join("library.so"));
    let mut child = Command::new(env!("CARGO_BIN_EXE_outrider-preflight"))
        .current_dir(dir.path())
        // The loader waits for a writer of the pipe.
        .args(["collect-gpu", "--library", "./library.so", "--samples", "1"])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    drop(child.stdin.take());
    assert_eq!(child.wait().unwrap().signal(), Some(9));
}

#[test]
fn a_reader_that_went_away_is_a_fault_and_no_panic() {
    let dir = tempfile::tempdir().unwrap();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = Command::new(env!("CARGO_BIN_EXE_outrider-preflight"))
        .current_dir(dir.path())
        .stdout(writer)
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap()
        .wait_with_output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(
        text_of(&output.stderr).contains("cannot write to standard output"),
        "{output:?}"
    );
}
