//! What lies around a request: bodies that are no JSON, paths that do not exist, a server that is starting, full or going down, an engine
//! that fails, clients that leave.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::time::Duration;

use outrider_server::engine::{EngineError, Event, SubmitError};
use serde_json::{Value, json};
use tokio::sync::mpsc::UnboundedSender;

use crate::fake::{FakeBackend, held, stopped, token};
use crate::server::{BODY_LIMIT_BYTES, Lines, Reply, TestServer};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

fn hi() -> Value {
    json!({"model": "fake", "prompt": "hi"})
}

fn streamed() -> Value {
    json!({"model": "fake", "prompt": "hi", "stream": true})
}

fn refusal(name: &str, reply: &Reply) -> String {
    let error = &reply.json()["error"];
    let more: Vec<String> = ["retry-after", "allow"]
        .iter()
        .filter_map(|header| Some(format!(" {header}: {}", reply.header(header)?)))
        .collect();
    format!(
        "{name}\n    {} {} {}{} {}\n",
        reply.status,
        error["type"].as_str().unwrap(),
        error["code"].as_str().unwrap(),
        more.concat(),
        error["message"].as_str().unwrap()
    )
}

#[test]
fn bodies_that_cannot_be_read_are_refused() {
    let server = TestServer::start(FakeBackend::new());
    let body = hi().to_string();
    let deep = format!("{}{}", "[".repeat(1000), "]".repeat(1000));
    let plain: &[(&str, &[u8])] = &[
        ("no body", b""),
        ("not JSON", b"prompt=hi"),
        ("half of a body", &body.as_bytes()[..body.len() / 2]),
        ("two bodies", b"{} {}"),
        (
            "NaN",
            br#"{"model": "fake", "prompt": "hi", "temperature": NaN}"#,
        ),
        (
            "Infinity",
            br#"{"model": "fake", "prompt": "hi", "temperature": -Infinity}"#,
        ),
        (
            "a number too large for a double",
            br#"{"model": "fake", "prompt": "hi", "temperature": 1e999}"#,
        ),
        (
            "a key twice",
            br#"{"model": "fake", "prompt": "hi", "prompt": "ho"}"#,
        ),
        (
            "a key twice, further in",
            br#"{"model": "fake", "prompt": "hi", "logit_bias": {"1": 1, "1": 2}}"#,
        ),
        ("a list", b"[]"),
        ("a string", br#""hi""#),
        ("null", b"null"),
        ("not UTF-8", b"{\"model\": \"\xff\xfe\"}"),
        (
            "half a surrogate pair",
            br#"{"model": "fake", "prompt": "\ud83d"}"#,
        ),
        ("nested too deeply", deep.as_bytes()),
    ];
    let mut table: String = plain
        .iter()
        .map(|(name, body)| refusal(name, &server.send(COMPLETIONS, &[], body)))
        .collect();
    let too_large = vec![b' '; BODY_LIMIT_BYTES + 1];
    table.push_str(&refusal(
        "too large",
        &server.send(COMPLETIONS, &[], &too_large),
    ));
    let zipped = server.send(COMPLETIONS, &[("content-encoding", "gzip")], b"\x1f\x8b");
    table.push_str(&refusal("compressed", &zipped));
    insta::assert_snapshot!(table);
    assert_eq!(server.post(COMPLETIONS, &hi()).status, 200);
}

#[test]
fn a_body_of_exactly_the_limit_is_read() {
    let server = TestServer::start(FakeBackend::new());
    let mut body = hi().to_string().into_bytes();
    body.resize(BODY_LIMIT_BYTES, b' ');
    assert_eq!(server.send(COMPLETIONS, &[], &body).status, 200);
}

#[test]
fn a_body_of_another_type_is_refused() {
    let server = TestServer::start(FakeBackend::new());
    let send = |header: &str| {
        raw(
            &server,
            &format!(
                "POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\n{header}content-length: 2\r\nconnection: close\r\n\r\n{{}}"
            ),
        )
    };
    for (header, status) in [
        ("", 415),
        ("content-type: text/plain\r\n", 415),
        ("content-type: application/x-www-form-urlencoded\r\n", 415),
        ("content-type: application/json; charset=utf-8\r\n", 400),
        ("content-type: application/json;charset=\"UTF-8\"\r\n", 400),
        ("content-type: application/json; charset=latin1\r\n", 415),
        (
            "content-type: application/json; charset=utf-8; x=1\r\n",
            415,
        ),
        ("Content-Type: Application/JSON\r\n", 400),
    ] {
        let answer = send(header);
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status} ")),
            "{header}: {answer}"
        );
    }
}

/// The bytes that come back for these bytes.
fn raw(server: &TestServer, request: &str) -> String {
    let mut stream = TcpStream::connect(server.address()).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn unknown_paths_and_methods_are_refused() {
    let server = TestServer::start(FakeBackend::new());
    let table = [
        refusal("GET /", &server.get("/")),
        refusal("GET /v1/completions", &server.get(COMPLETIONS)),
        refusal("GET /v1/chat/completions", &server.get(CHAT)),
        refusal("POST /v1/models", &server.post("/v1/models", &json!({}))),
        refusal(
            "POST /v1/models/fake",
            &server.post("/v1/models/fake", &json!({})),
        ),
        refusal(
            "POST /v1/embeddings",
            &server.post("/v1/embeddings", &json!({})),
        ),
        refusal("GET /metrics on the main listener", &server.get("/metrics")),
        refusal(
            "GET /admin/speculation on the main listener",
            &server.get("/admin/speculation"),
        ),
        refusal(
            "PUT /metrics on the admin listener",
            &server.put_admin("/metrics", "application/json", "{}"),
        ),
        refusal(
            "GET /v1/models on the admin listener",
            &server.admin("/v1/models"),
        ),
    ];
    insta::assert_snapshot!(table.concat());
}

#[test]
fn the_answer_to_head_is_that_to_get_without_a_body() {
    let server = TestServer::start(FakeBackend::new());
    let gets = [
        ("/v1/models", server.get("/v1/models")),
        ("/v1/models/fake", server.get("/v1/models/fake")),
        ("/v1/models/other", server.get("/v1/models/other")),
        ("/livez", server.admin("/livez")),
        ("/readyz", server.admin("/readyz")),
        ("/admin/speculation", server.admin("/admin/speculation")),
    ];
    for (path, get) in gets {
        let head = server.head(path);
        assert_eq!(head.status, get.status, "{path}");
        assert!(head.body.is_empty(), "{path}: {}", head.body);
        assert_eq!(
            head.header("content-type"),
            get.header("content-type"),
            "{path}"
        );
    }
    assert_eq!(server.head("/metrics").status, 200);
}

#[test]
fn until_the_model_is_ready_everything_is_answered_503() {
    let server = TestServer::starting(FakeBackend::new());
    let table = [
        refusal("completions", &server.post(COMPLETIONS, &hi())),
        refusal("chat", &server.post(CHAT, &json!({}))),
        refusal("models", &server.get("/v1/models")),
        refusal("model", &server.get("/v1/models/fake")),
    ];
    insta::assert_snapshot!(table.concat());
}

#[test]
fn refusals_of_the_engine_have_their_own_status() {
    let errors = [
        SubmitError::EmptyPrompt,
        SubmitError::QueueFull {
            limit: 64,
            retry_after: Duration::from_millis(6001),
        },
        SubmitError::NotReady,
        SubmitError::UnknownToken {
            id: 7,
            vocab_size: 5,
        },
    ];
    let table: String = errors
        .into_iter()
        .map(|error| {
            let name = format!("{error:?}");
            let server = TestServer::start(FakeBackend::answering(move |_| Err(error.clone())));
            refusal(&name, &server.post(COMPLETIONS, &hi()))
        })
        .collect();
    insta::assert_snapshot!(table);
}

#[test]
fn when_the_queue_fills_up_in_the_middle_of_a_request_its_other_completions_are_cancelled() {
    let (first, taken) = std::sync::mpsc::channel();
    let taken_already = std::sync::atomic::AtomicBool::new(false);
    let server = TestServer::start(FakeBackend::answering(move |_| {
        if taken_already.swap(true, Ordering::SeqCst) {
            return Err(SubmitError::QueueFull {
                limit: 1,
                retry_after: Duration::ZERO,
            });
        }
        let (sender, receiver) = tokio::sync::mpsc::unbounded_channel();
        first.send(sender).unwrap();
        Ok(receiver)
    }));
    let reply = server.post(COMPLETIONS, &json!({"model": "fake", "prompt": ["a", "b"]}));
    assert_eq!(reply.status, 429);
    assert!(taken.recv().unwrap().is_closed());
}

#[test]
fn failures_of_the_engine_say_nothing_of_the_inside() {
    let errors = [
        EngineError::NonFiniteLogits,
        EngineError::StepFailed("onnx runtime: /secret/path/model.onnx".to_owned()),
        EngineError::QueueTimeout {
            limit: Duration::from_secs(60),
            retry_after: Duration::from_secs(3),
        },
        EngineError::Displaced {
            retry_after: Duration::from_secs(4),
        },
        EngineError::DeadlineExceeded {
            limit: Duration::from_secs(600),
        },
        EngineError::Stopped,
    ];
    let mut table = String::new();
    for error in errors {
        let server = TestServer::start(FakeBackend::scripted(vec![
            token("a"),
            Event::Failed(error.clone()),
        ]));
        let whole = server.post(COMPLETIONS, &hi());
        let events = server.post(COMPLETIONS, &streamed()).events();
        assert!(!whole.body.contains("secret") && !events.concat().contains("secret"));
        table.push_str(&refusal(&error.to_string(), &whole));
        table.push_str(&format!("    streamed: {}\n", events.last().unwrap()));
        assert_eq!(events.len(), 2, "text, then the error, and no [DONE]");
    }
    insta::assert_snapshot!(table);
}

#[test]
fn a_stream_that_fails_before_its_first_event_has_the_status_of_the_failure() {
    let error = EngineError::QueueTimeout {
        limit: Duration::from_secs(60),
        retry_after: Duration::from_secs(3),
    };
    let server = TestServer::start(FakeBackend::scripted(vec![Event::Failed(error)]));
    let reply = server.post(COMPLETIONS, &streamed());
    assert_eq!(
        (reply.status, reply.code(), reply.header("retry-after")),
        (503, "queue_timeout".to_owned(), Some("3"))
    );
}

#[test]
fn an_engine_that_drops_a_request_without_a_word_is_an_error() {
    let server = TestServer::start(FakeBackend::scripted(vec![token("a")]));
    let reply = server.post(COMPLETIONS, &hi());
    assert_eq!(
        (reply.status, reply.code()),
        (503, "engine_stopped".to_owned())
    );
}

/// A stream that has sent its first text, and what sends the rest.
fn begun(
    server: &TestServer,
    senders: &std::sync::mpsc::Receiver<UnboundedSender<Event>>,
) -> (Lines, UnboundedSender<Event>) {
    let (mut lines, events) = std::thread::scope(|scope| {
        let lines = scope.spawn(|| server.open(COMPLETIONS, &streamed()));
        let events = senders.recv().unwrap();
        events.send(token("one")).unwrap();
        (lines.join().unwrap(), events)
    });
    assert!(lines.next().contains("one"));
    (lines, events)
}

#[test]
fn text_reaches_the_client_before_the_completion_has_finished() {
    let (backend, senders) = held();
    let server = TestServer::start(backend);
    let (mut lines, events) = begun(&server, &senders);
    events.send(token("two")).unwrap();
    assert!(lines.next().contains("two"));
    events.send(stopped("", 2)).unwrap();
    assert!(lines.next().contains("\"finish_reason\":\"stop\""));
    assert_eq!(lines.next(), "data: [DONE]");
}

#[test]
fn a_client_that_leaves_a_stream_cancels_its_completions() {
    let (backend, senders) = held();
    let server = TestServer::start(backend);
    let body = json!({"model": "fake", "messages": [{"role": "user", "content": "hi"}], "stream": true, "n": 2});
    let (lines, first, second) = std::thread::scope(|scope| {
        let lines = scope.spawn(|| server.open(CHAT, &body));
        let first = senders.recv().unwrap();
        let second = senders.recv().unwrap();
        second.send(token("a")).unwrap();
        (lines.join().unwrap(), first, second)
    });
    assert!(!first.is_closed());
    drop(lines);
    wait_closed(&first);
    wait_closed(&second);
}

#[test]
fn a_client_that_leaves_while_it_waits_for_an_answer_cancels_it() {
    let (backend, senders) = held();
    let server = TestServer::start(backend);
    // Neither a whole answer nor a stream has sent anything at this point.
    for body in [hi(), streamed()] {
        leave_after_submitting(&server, &body.to_string(), &senders);
    }
}

fn leave_after_submitting(
    server: &TestServer,
    body: &str,
    senders: &std::sync::mpsc::Receiver<UnboundedSender<Event>>,
) {
    let mut stream = TcpStream::connect(server.address()).unwrap();
    write!(
        stream,
        "POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let events = senders.recv().unwrap();
    drop(stream);
    wait_closed(&events);
}

/// Returns when nobody can receive any more.
fn wait_closed(events: &UnboundedSender<Event>) {
    actix_web::rt::System::new().block_on(events.closed());
}

#[test]
fn a_request_keeps_its_identifier() {
    let server = TestServer::start(FakeBackend::new());
    let body = hi().to_string();
    let reply = server.send(
        COMPLETIONS,
        &[("x-request-id", "call-7.a_b")],
        body.as_bytes(),
    );
    assert_eq!(reply.header("x-request-id"), Some("call-7.a_b"));
    assert_eq!(reply.json()["id"], "cmpl-call-7.a_b");
    assert_eq!(server.backend.requests()[0].id, "call-7.a_b/0");

    // What could break a log line or a header is not taken over.
    for bad in ["", "a b", "a\"b", &"x".repeat(129)] {
        let reply = server.send(COMPLETIONS, &[("x-request-id", bad)], body.as_bytes());
        let id = reply.header("x-request-id").unwrap();
        assert!(
            id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit()),
            "{bad:?} became {id}"
        );
    }
    // Refusals have one too.
    assert!(server.get("/nothing").header("x-request-id").is_some());
}

#[test]
fn a_server_that_goes_down_finishes_what_it_has_and_takes_nothing_new() {
    let (backend, senders) = held();
    let server = TestServer::start(backend);
    let (mut lines, events) = begun(&server, &senders);
    server.drain.begin();

    let refused = server.post(COMPLETIONS, &hi());
    assert_eq!(
        (refused.status, refused.code()),
        (503, "not_ready".to_owned())
    );
    assert_eq!(refused.header("connection"), Some("close"));
    assert_eq!(server.admin("/readyz").status, 503);
    assert_eq!(server.admin("/livez").status, 200);

    events.send(stopped("the end", 1)).unwrap();
    assert!(lines.next().contains("the end"));
    assert_eq!(lines.next(), "data: [DONE]");
    drop(lines);
    actix_web::rt::System::new().block_on(server.drain.idle());
}

#[test]
fn large_bodies_are_tokenised_one_at_a_time() {
    let server = TestServer::start(FakeBackend::new());
    let prompt = "x".repeat(BODY_LIMIT_BYTES - 100);
    std::thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                let reply = server.post(
                    "/v1/completions",
                    &json!({"model": "fake", "prompt": prompt}),
                );
                assert_eq!(reply.status, 400, "{}", reply.body);
            });
        }
    });
    assert_eq!(server.backend.most_encoding.load(Ordering::SeqCst), 1);
}
