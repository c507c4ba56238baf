//! The audit log: a line for each generation request, whatever became of it.

use std::path::{Path, PathBuf};
use std::process::Command;

use outrider_server::audit::AuditLog;
use outrider_server::config;
use outrider_server::engine::{EngineError, Event, SubmitError};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::fake::{FakeBackend, bytes, finished, held, letters, stopped, token};
use crate::server::TestServer;

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

/// A server with an audit log, and the log itself.
struct Audited {
    server: TestServer,
    log: AuditLog,
    path: PathBuf,
    _dir: TempDir,
}

impl Audited {
    fn start(backend: FakeBackend, prompt_text: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.jsonl");
        Self::at(backend, prompt_text, path, dir)
    }

    fn at(backend: FakeBackend, prompt_text: bool, path: PathBuf, dir: TempDir) -> Self {
        let log = AuditLog::open(&config::Audit {
            path: path.clone(),
            prompt_text,
            max_file_bytes: 1 << 20,
            max_files: 2,
        })
        .unwrap();
        Self {
            server: TestServer::audited(backend, log.clone()),
            log,
            path,
            _dir: dir,
        }
    }

    /// The lines once no request is in flight.
    fn lines(&self) -> Vec<Value> {
        actix_web::rt::System::new().block_on(self.server.drain.idle());
        self.log.end();
        lines(&self.path)
    }
}

fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    assert!(text.is_empty() || text.ends_with('\n'));
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect()
}

/// A line without what differs from run to run; its times must make sense.
fn stable(mut line: Value) -> Value {
    let time = line["time"].take();
    assert!(
        time.as_str().is_some_and(
            |time| time.len() == "2026-01-01T00:00:00.000000Z".len() && time.ends_with('Z')
        ),
        "{time}"
    );
    let seconds = line["seconds"].take().as_f64().unwrap();
    let first_token_seconds = line["first_token_seconds"].take();
    if let Some(first) = first_token_seconds.as_f64() {
        assert!(0.0 <= first && first <= seconds, "{first} of {seconds}");
        line["first_token_seconds"] = "[seconds]".into();
    }
    line["time"] = "[time]".into();
    line["seconds"] = "[seconds]".into();
    line["server_version"] = "[version]".into();
    line
}

#[test]
fn an_answer_leaves_a_line_with_all_that_shaped_it() {
    let audited = Audited::start(FakeBackend::new().with_draft(), false);
    let body = json!({
        "model": "fake", "prompt": ["secret", "words"], "n": 2, "max_tokens": 3, "seed": 7, "temperature": 0.25,
        "stop": ["x", "y"], "logit_bias": {"5": 1}, "logprobs": 2,
    });
    let headers = [("x-request-id", "call-1")];
    let reply = audited
        .server
        .send(COMPLETIONS, &headers, body.to_string().as_bytes());
    assert_eq!(reply.status, 200, "{}", reply.body);
    let lines = audited.lines();
    assert_eq!(lines.len(), 1);
    insta::assert_json_snapshot!(stable(lines[0].clone()));
}

#[test]
fn every_generation_request_leaves_one_line_and_no_other_request_does() {
    let audited = Audited::start(
        FakeBackend::answering(|request| {
            let first = char::from_u32(request.prompt[0]).unwrap_or(' ');
            match first {
                'f' => Ok(finished(&[
                    token("a"),
                    Event::Failed(EngineError::NonFiniteLogits),
                ])),
                'r' => Err(SubmitError::NotReady),
                _ => Ok(finished(&letters(request))),
            }
        }),
        false,
    );
    let server = &audited.server;
    let prompt = |text: &str| json!({"model": "fake", "prompt": text, "max_tokens": 2});
    let streamed =
        |text: &str| json!({"model": "fake", "prompt": text, "max_tokens": 2, "stream": true});
    server.post(COMPLETIONS, &prompt("hi"));
    server.post(COMPLETIONS, &streamed("hi"));
    server.post(
        CHAT,
        &json!({"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
    );
    server.send(COMPLETIONS, &[], b"no JSON");
    server.post(
        COMPLETIONS,
        &json!({"model": "fake", "prompt": "hi", "n": 0}),
    );
    server.post(COMPLETIONS, &json!({"model": "other", "prompt": "hi"}));
    server.post(COMPLETIONS, &prompt("refused"));
    server.post(COMPLETIONS, &prompt("fails"));
    server.post(COMPLETIONS, &streamed("fails"));
    server.get("/v1/models");
    server.get(COMPLETIONS);
    server.post("/v1/embeddings", &json!({}));

    let told: Vec<String> = audited
        .lines()
        .into_iter()
        .map(|line| {
            let fields = [
                "endpoint",
                "stream",
                "status",
                "error_code",
                "prompt_tokens",
                "completion_tokens",
                "finish_reasons",
            ];
            fields.map(|field| line[field].to_string()).join(" ")
        })
        .collect();
    insta::assert_snapshot!(told.join("\n"));
}

#[test]
fn a_caller_who_leaves_has_a_line_with_what_came_before() {
    let (backend, senders) = held();
    let audited = Audited::start(backend, true);
    let body = json!({"model": "fake", "prompt": "hi", "stream": true});
    let (mut stream, events) = std::thread::scope(|scope| {
        let stream = scope.spawn(|| audited.server.open(COMPLETIONS, &body));
        let events = senders.recv().unwrap();
        // A stream begins with its first token.
        events.send(token("one")).unwrap();
        (stream.join().unwrap(), events)
    });
    stream.next();
    events.send(token("two")).unwrap();
    stream.next();
    drop(stream);
    actix_web::rt::System::new().block_on(events.closed());
    let lines = audited.lines();
    let expected = json!({
        "status": 499, "error_code": null, "completion_tokens": 2, "finish_reasons": [null], "completions": ["onetwo"],
    });
    for (field, value) in expected.as_object().unwrap() {
        assert_eq!(lines[0][field], *value, "{field}");
    }
    assert!(lines[0]["first_token_seconds"].is_number());
}

#[test]
fn texts_are_written_only_when_asked_for() {
    for prompt_text in [false, true] {
        let audited = Audited::start(
            FakeBackend::scripted(vec![token("marmalade"), stopped("", 1)]),
            prompt_text,
        );
        let body = json!({"model": "fake", "prompt": "porcupine"}).to_string();
        audited.server.send(COMPLETIONS, &[], body.as_bytes());
        audited.server.send(COMPLETIONS, &[], b"porcupine {");
        audited.lines();
        let text = std::fs::read_to_string(&audited.path).unwrap();
        assert_eq!(text.contains("porcupine"), prompt_text, "{text}");
        assert_eq!(text.contains("marmalade"), prompt_text, "{text}");
    }
}

#[test]
fn a_line_with_texts_is_enough_to_ask_again() {
    let audited = Audited::start(FakeBackend::new(), true);
    // White space and an escape that a parsed body would lose.
    let body = "{\"model\": \"fake\",\n  \"prompt\": \"h\\u0069\", \"max_tokens\": 4}";
    let reply = audited.server.send(COMPLETIONS, &[], body.as_bytes());
    let text = reply.json()["choices"][0]["text"].clone();
    let lines = audited.lines();
    assert_eq!(lines[0]["request_body"], body);
    assert_eq!(lines[0]["completions"], json!([text]));

    // The seed was drawn by the server.
    let mut again: Value =
        serde_json::from_str(lines[0]["request_body"].as_str().unwrap()).unwrap();
    again["seed"] = lines[0]["parameters"]["seed"].clone();
    let reply = audited.server.post(COMPLETIONS, &again);
    assert_eq!(reply.json()["choices"][0]["text"], text);
    assert_eq!(audited.server.backend.requests()[1].prompt, bytes("hi"));
}

#[test]
fn a_log_that_cannot_be_written_takes_the_server_out_of_service_and_fails_no_request() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("audit.jsonl");
    std::os::unix::fs::symlink("/dev/full", &path).unwrap();
    let audited = Audited::at(FakeBackend::new(), false, path.clone(), dir);
    let server = &audited.server;
    assert_eq!(server.admin("/readyz").json()["audit"]["writing"], true);

    let body = json!({"model": "fake", "prompt": "hi", "max_tokens": 2});
    let errors = counter(server, "outrider_audit_errors_total");
    assert_eq!(server.post(COMPLETIONS, &body).status, 200);
    let unready = until(server, 503);
    assert_eq!(unready["audit"]["writing"], false);
    let detail = unready["audit"]["detail"].as_str().unwrap();
    assert!(detail.contains("No space left"), "{detail}");
    assert!(counter(server, "outrider_audit_errors_total") > errors);
    assert_eq!(server.post(COMPLETIONS, &body).status, 200);

    std::fs::remove_file(&path).unwrap();
    audited.log.reopen().unwrap();
    let ready = until(server, 200);
    assert_eq!(ready["audit"], json!({"writing": true, "detail": null}));
    assert_eq!(audited.lines().len(), 2);
}

/// Asks until `/readyz` answers so; the writer of the log decides when.
fn until(server: &TestServer, status: u16) -> Value {
    loop {
        let reply = server.admin("/readyz");
        if reply.status == status {
            return reply.json();
        }
        std::thread::yield_now();
    }
}

fn counter(server: &TestServer, name: &str) -> f64 {
    let text = server.admin("/metrics").body;
    let value = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    value.unwrap_or_else(|| panic!("no {name}"))
}

/// A disk that fills up within a line, played by a limit on the size of files. The limit holds for a process, so the test runs itself once
/// more, in one that has it.
#[test]
fn a_line_that_the_disk_cut_short_is_taken_back_and_written_whole() {
    const INNER: &str = "OUTRIDER_TEST_WITH_A_FILE_SIZE_LIMIT";
    if let Some(path) = std::env::var_os(INNER) {
        return with_a_file_size_limit(Path::new(&path));
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("audit.jsonl");
    let output = Command::new("sh")
        // In blocks of 512 bytes. The signal would end the process; the write fails then.
        .args(["-c", "trap '' XFSZ; ulimit -S -f 8; exec \"$0\" \"$@\""])
        .arg(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "audit::a_line_that_the_disk_cut_short_is_taken_back_and_written_whole",
        ])
        .env(INNER, &path)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    let old = lines(&path.with_extension("old"));
    let new = lines(&path);
    assert!(!old.is_empty() && !new.is_empty());
    let ids: Vec<&str> = old
        .iter()
        .chain(&new)
        .map(|line| line["request_id"].as_str().unwrap())
        .collect();
    let expected: Vec<String> = (0..ids.len()).map(|number| number.to_string()).collect();
    assert_eq!(ids, expected);
}

fn with_a_file_size_limit(path: &Path) {
    let dir = tempfile::tempdir().unwrap();
    let audited = Audited::at(FakeBackend::new(), false, path.to_owned(), dir);
    let body = json!({"model": "fake", "prompt": "hi", "max_tokens": 2}).to_string();
    let mut sent = 0;
    while audited.log.fault().is_none() {
        let id = sent.to_string();
        let headers = [("x-request-id", id.as_str())];
        let reply = audited.server.send(COMPLETIONS, &headers, body.as_bytes());
        assert_eq!(reply.status, 200);
        sent += 1;
    }
    std::fs::rename(path, path.with_extension("old")).unwrap();
    audited.log.reopen().unwrap();
    until(&audited.server, 200);
    audited.lines();
}
