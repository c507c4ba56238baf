//! The log as a whole: what is in the files after what was written, and after what went wrong.

use std::os::unix::fs::symlink;
use std::path::Path;

use bytes::Bytes;
use serde_json::Value;

use super::*;

fn config(path: &Path) -> config::Audit {
    config::Audit {
        path: path.to_owned(),
        prompt_text: true,
        max_file_bytes: 1 << 20,
        max_files: 3,
    }
}

fn record(request_id: &str) -> Record {
    Record {
        time: "2026-11-29T22:15:03.25Z".parse().unwrap(),
        request_id: request_id.to_owned(),
        refused_requests: None,
        caller: "alice".to_owned(),
        endpoint: "/v1/completions".to_owned(),
        server_version: "0.0.0",
        model: Some("tiny".to_owned()),
        bundle_digest: Some("abc".to_owned()),
        stream: Some(false),
        parameters: None,
        prompt_tokens: Some(2),
        cached_tokens: 1,
        speculation: Some(Speculation::default()),
        completion_tokens: 3,
        finish_reasons: vec![Some("stop"), None],
        status: 200,
        error_code: None,
        first_token_seconds: Some(0.5),
        seconds: 1.5,
        texts: None,
    }
}

/// A record that takes `bytes` in the queue.
fn long_record(request_id: &str, bytes: usize) -> Record {
    Record {
        texts: Some(Texts {
            request: Some(Body(Bytes::from(vec![b'x'; bytes]))),
            completions: Vec::new(),
        }),
        ..record(request_id)
    }
}

fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    assert!(text.is_empty() || text.ends_with('\n'));
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect()
}

fn ids(path: &Path) -> Vec<String> {
    lines(path)
        .iter()
        .map(|line| line["request_id"].as_str().unwrap().to_owned())
        .collect()
}

/// Asks until it is so; the writer decides when.
fn until(mut so: impl FnMut() -> bool) {
    while !so() {
        std::thread::yield_now();
    }
}

#[test]
fn a_line_says_what_it_is_and_holds_the_record() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("audit.jsonl");
    let log = AuditLog::open(&config(&path)).unwrap();
    log.write(Record {
        texts: Some(Texts {
            request: Some(Body(Bytes::from_static(b"{\"prompt\": \"hi\\n\"}"))),
            completions: vec!["ho\n".to_owned()],
        }),
        ..record("first")
    });
    log.write(Record {
        texts: Some(Texts {
            request: Some(Body(Bytes::from_static(b"\xff{"))),
            completions: Vec::new(),
        }),
        ..record("second")
    });
    log.end();
    insta::assert_snapshot!(std::fs::read_to_string(path).unwrap());
}

#[test]
fn a_drained_log_holds_every_line_in_order_over_its_files() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("audit.jsonl");
    let log = AuditLog::open(&config::Audit {
        max_file_bytes: 2048,
        max_files: 1000,
        ..config(&path)
    })
    .unwrap();
    let expected: Vec<String> = (0..200).map(|number| number.to_string()).collect();
    for id in &expected {
        log.write(record(id));
    }
    log.end();
    let mut files: Vec<_> = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    let age = |path: &PathBuf| {
        let extension = path.extension().unwrap().to_str().unwrap().to_owned();
        extension.parse::<usize>().unwrap_or(0)
    };
    files.sort_by_key(|path| std::cmp::Reverse(age(path)));
    assert!(files.len() > 10, "{files:?}");
    for file in &files {
        assert!(std::fs::metadata(file).unwrap().len() <= 2048, "{file:?}");
    }
    let found: Vec<String> = files.iter().flat_map(|file| ids(file)).collect();
    assert_eq!(found, expected);
}

#[test]
fn a_full_disk_is_told_and_no_line_is_lost_once_there_is_room() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("audit.jsonl");
    symlink("/dev/full", &path).unwrap();
    let log = AuditLog::open(&config(&path)).unwrap();
    log.write(record("first"));
    log.write(record("second"));
    until(|| log.fault().is_some());
    let fault = log.fault().unwrap();
    assert!(fault.contains("No space left"), "{fault}");
    std::fs::remove_file(&path).unwrap();
    log.reopen().unwrap();
    until(|| log.fault().is_none());
    log.write(record("third"));
    log.end();
    assert_eq!(ids(&path), ["first", "second", "third"]);
    assert!(
        lines(&path)
            .iter()
            .all(|line| line.get("lost_lines").is_none())
    );
}

#[test]
fn lines_that_find_no_place_are_counted_in_the_next_one() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("audit.jsonl");
    symlink("/dev/full", &path).unwrap();
    let log = AuditLog::open(&config::Audit {
        max_file_bytes: u64::MAX,
        ..config(&path)
    })
    .unwrap();
    log.write(record("held"));
    until(|| log.fault().is_some());
    log.write(long_record("waits", QUEUE_BYTES - 4096));
    log.write(long_record("lost", 4096));
    log.write(long_record("lost", 4096));
    log.write(record("fits"));
    std::fs::remove_file(&path).unwrap();
    log.reopen().unwrap();
    log.end();
    assert_eq!(ids(&path), ["held", "waits", "fits"]);
    let lost: Vec<Value> = lines(&path)
        .iter_mut()
        .map(|line| line["lost_lines"].take())
        .collect();
    assert_eq!(lost, [Value::Null, Value::Null, 2.into()]);
}

#[test]
fn an_end_waits_for_no_disk_that_is_full() {
    let log = AuditLog::open(&config(Path::new("/dev/full"))).unwrap();
    log.write(record("first"));
    log.write(record("second"));
    log.end();
    log.write(record("too late"));
    assert_eq!(log.0.shared.lock().lost_lines, 3);
    assert!(log.reopen().is_err());
}

#[test]
fn a_file_that_cannot_be_had_is_named_with_its_key() {
    let error = AuditLog::open(&config(Path::new("/nowhere/audit.jsonl"))).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("/nowhere/audit.jsonl") && text.contains("serving.audit.path"),
        "{text}"
    );
}

#[test]
fn prompts_are_for_the_server_alone_to_read() {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("audit.jsonl");
    AuditLog::open(&config(&path)).unwrap().end();
    let mode = std::fs::metadata(path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn every_field_of_a_line_is_documented_and_no_other_is() {
    let document = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/audit.md");
    let text = std::fs::read_to_string(document).unwrap();
    let rows = text.lines().filter_map(|line| line.strip_prefix("| `"));
    let mut documented: Vec<&str> = rows
        .flat_map(|row| row.split(" |").next().unwrap().split(", "))
        .map(|name| name.trim_matches('`'))
        .collect();
    let texts = |body: &'static [u8]| Texts {
        request: Some(Body(Bytes::from_static(body))),
        completions: Vec::new(),
    };
    let mut written: Vec<String> = Vec::new();
    for body in [&b"text"[..], b"\xff"] {
        let line = Record {
            texts: Some(texts(body)),
            refused_requests: Some(1),
            ..record("any")
        }
        .line(1);
        let line: Value = serde_json::from_slice(&line).unwrap();
        for name in line.as_object().unwrap().keys() {
            if !written.contains(name) {
                written.push(name.clone());
            }
        }
    }
    written.sort();
    documented.sort_unstable();
    assert_eq!(documented, written);
}

#[test]
fn a_write_that_hangs_is_a_fault_and_holds_up_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&path).status();
    assert!(made.unwrap().success());
    let log = AuditLog::open(&config(&path)).unwrap();
    let mut reader = std::fs::File::open(&path).unwrap();
    // More than a pipe can hold.
    log.write(long_record("long", 1 << 20));
    let mut first = [0];
    io::Read::read_exact(&mut reader, &mut first).unwrap();
    let error = log.reopen().unwrap_err().to_string();
    assert!(error.contains("the open file does not answer"), "{error}");
    let fault = log.fault().unwrap();
    assert!(fault.contains("has not answered for"), "{fault}");

    let ended = std::thread::spawn(move || log.end());
    let mut read = vec![0; 1 << 20];
    io::Read::read_exact(&mut reader, &mut read).unwrap();
    // What is left of the line fits into the pipe.
    ended.join().unwrap();
}
