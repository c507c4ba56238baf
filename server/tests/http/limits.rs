//! What a client may take: bytes of the head, time for its body, connections, a stream that it doesn't read, and the time that is left when the
//! server goes down.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use outrider_server::http::{Connections, Settings};
use serde_json::json;

use crate::fake::{FakeBackend, held, token};
use crate::server::TestServer;

/// More than any socket buffers.
const FLOOD_BYTES: usize = 64 << 20;

const COMPLETIONS: &str = "/v1/completions";

/// A request whose body stops half way.
fn stalled(server: &TestServer) -> TcpStream {
    let mut stream = TcpStream::connect(server.address()).unwrap();
    stream
        .write_all(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{\"model\":")
        .unwrap();
    stream
}

fn rest(mut stream: TcpStream) -> String {
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn a_head_beyond_its_limits_is_refused_with_a_reason() {
    let server = TestServer::start(FakeBackend::new());
    let long = "x".repeat(33 << 10);
    let names: Vec<String> = (0..70).map(|index| format!("x-{index}")).collect();
    let many: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "1")).collect();
    let path = format!("/v1/{}", "x".repeat(9 << 10));
    let mut table = String::new();
    for (path, headers) in [
        ("/v1/models", vec![("x-long", long.as_str())]),
        ("/v1/models", many),
        (path.as_str(), Vec::new()),
    ] {
        let reply = server.ask("GET", path, &headers, "");
        assert_eq!(reply.status, 431, "{}", reply.body);
        assert_eq!(reply.code(), "request_head_too_large");
        assert!(reply.header("x-request-id").is_some());
        let message = reply.json()["error"]["message"].to_string();
        let limit = message.split("; ").nth(1).unwrap();
        table.push_str(&format!("{limit}\n"));
    }
    insta::assert_snapshot!(table);
}

#[test]
fn a_query_that_would_have_no_effect_is_refused_by_name() {
    let server = TestServer::start(FakeBackend::new());
    for (path, name) in [
        ("/v1/models?limit=5", "limit"),
        ("/v1/models/fake?a=1&b", "a"),
        ("/v1/completions?&&api-version=1", "api-version"),
    ] {
        let reply = server.ask("GET", path, &[], "");
        assert_eq!(
            (reply.status, reply.code()),
            (400, "unknown_parameter".to_owned()),
            "{path}"
        );
        assert_eq!(reply.json()["error"]["param"], name, "{path}");
    }
    assert_eq!(server.get("/v1/models?").status, 200);
}

#[test]
fn a_first_head_that_does_not_arrive_in_time_ends_its_connection() {
    let connections = Connections {
        header_timeout: Duration::from_millis(1),
        ..Connections::default()
    };
    let server = TestServer::connected(FakeBackend::new(), TestServer::settings(), connections);
    let mut stream = TcpStream::connect(server.address()).unwrap();
    stream
        .write_all(b"GET /v1/models HTTP/1.1\r\nhost: ")
        .unwrap();
    assert!(rest(stream).starts_with("HTTP/1.1 408 "));
}

#[test]
fn a_client_that_takes_none_of_its_answer_is_cut_off_and_its_completion_cancelled() {
    let (backend, senders) = held();
    let settings = Settings {
        write_timeout: Duration::from_millis(200),
        ..TestServer::settings()
    };
    let server = TestServer::with(backend, settings);
    let body = json!({"model": "fake", "prompt": "hi", "stream": true}).to_string();
    let mut stream = TcpStream::connect(server.address()).unwrap();
    write!(
        stream,
        "POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let events = senders.recv().unwrap();
    let text = "x".repeat(1 << 20);
    for _ in 0..FLOOD_BYTES / text.len() {
        // It may have been cut off by now.
        let _ = events.send(token(&text));
    }
    // The client stays connected and reads nothing.
    actix_web::rt::System::new().block_on(events.closed());
    actix_web::rt::System::new().block_on(server.drain.idle());
    drop(stream);
}

#[test]
fn connections_beyond_the_limit_wait_until_others_have_gone() {
    let connections = Connections {
        max: 1,
        ..Connections::default()
    };
    let server = TestServer::connected(FakeBackend::new(), TestServer::settings(), connections);
    let ask = |stream: &mut TcpStream| {
        stream
            .write_all(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
            .unwrap();
    };
    let mut first = TcpStream::connect(server.address()).unwrap();
    ask(&mut first);
    let mut status = [0; 12];
    first.read_exact(&mut status).unwrap();
    assert_eq!(&status, b"HTTP/1.1 200");

    let mut second = TcpStream::connect(server.address()).unwrap();
    ask(&mut second);
    drop(first);
    second.read_exact(&mut status).unwrap();
    assert_eq!(&status, b"HTTP/1.1 200");
}

#[test]
fn a_body_that_does_not_arrive_in_time_is_refused_and_its_connection_closed() {
    let server = TestServer::with(
        FakeBackend::new(),
        Settings {
            body_timeout: Duration::from_millis(1),
            ..TestServer::settings()
        },
    );
    let answer = rest(stalled(&server));
    assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
    for part in [
        "\"code\":\"request_timeout\"",
        "\r\nx-request-id: ",
        "\r\nconnection: close",
    ] {
        assert!(answer.contains(part), "{part} is missing in {answer}");
    }
}

#[test]
fn a_body_on_its_way_does_not_hold_up_a_stop() {
    let server = TestServer::start(FakeBackend::new());
    let stream = stalled(&server);
    // The request is under way once it is counted.
    while server.drain.in_flight() == 0 {
        std::thread::yield_now();
    }
    server.drain.begin();
    let answer = rest(stream);
    assert!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
    assert!(answer.contains("\"code\":\"not_ready\""), "{answer}");
    actix_web::rt::System::new().block_on(server.drain.idle());
}

#[test]
fn when_time_is_over_streams_end_with_an_error_and_whole_answers_become_one() {
    let (backend, senders) = held();
    let server = TestServer::start(backend);
    let body = json!({"model": "fake", "prompt": "hi", "stream": true});
    let (mut lines, streamed) = std::thread::scope(|scope| {
        // The head of a stream comes with its first text.
        let lines = scope.spawn(|| server.open(COMPLETIONS, &body));
        let streamed = senders.recv().unwrap();
        streamed.send(token("one")).unwrap();
        (lines.join().unwrap(), streamed)
    });
    assert!(lines.next().contains("one"));
    std::thread::scope(|scope| {
        let whole =
            scope.spawn(|| server.post(COMPLETIONS, &json!({"model": "fake", "prompt": "hi"})));
        let events = senders.recv().unwrap();
        events.send(token("two")).unwrap();
        server.drain.begin();
        server.drain.cut();
        let whole = whole.join().unwrap();
        assert_eq!(
            (whole.status, whole.code()),
            (503, "engine_stopped".to_owned())
        );
    });
    assert!(lines.next().contains("\"code\":\"engine_stopped\""));
    actix_web::rt::System::new().block_on(server.drain.idle());
    assert!(streamed.is_closed(), "the completion is cancelled");
    let metrics = server.admin("/metrics").body;
    assert!(
        metrics.contains(
            "outrider_http_requests_total{method=\"POST\",route=\"/v1/completions\",status=\"503\"}"
        ),
        "{metrics}"
    );
}
