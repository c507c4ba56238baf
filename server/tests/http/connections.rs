//! Connections: heads behind the first, clients that leave or send what they should not, bodies that nobody reads, and the turns of bodies.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::path::Path;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use outrider_server::http::{Connections, Settings};
use outrider_server::listen::{self, Endpoint, Listener};
use proptest::collection;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::TestRunner;
use serde_json::json;

use crate::fake::{FakeBackend, held, stopped, token};
use crate::server::{BODY_LIMIT_BYTES, Connection, Reply, TestServer};

const COMPLETIONS: &str = "/v1/completions";

/// Longest wait for an answer, far above what it needs.
const PATIENCE: Duration = Duration::from_secs(60);

/// More than what is thrown away of a body that nobody reads, and all that sockets hold.
const MOST_THROWN_AWAY_BYTES: usize = 128 << 20;

const LIVE: &str = "GET /livez HTTP/1.1\r\nhost: x\r\n\r\n";

/// What the admin listener takes at the same time.
const ADMIN_CONNECTIONS: usize = 256;

const HALF_HEAD: &str = "GET / HTTP/1.1\r\nx: ";

const MODELS: &str = "GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n";

fn connect(server: &TestServer) -> TcpStream {
    let stream = TcpStream::connect(server.address()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// A request with this body; `head` is a line of the head, or several.
fn post(version: &str, head: &str, body: &str) -> String {
    format!(
        "POST {COMPLETIONS} HTTP/{version}\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n{head}\r\n{body}",
        body.len()
    )
}

/// The same with a body in chunks.
fn chunked(body: &str) -> String {
    let (start, end) = body.split_at(body.len() / 2);
    format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n{:x}\r\n{start}\r\n{:x};a=b\r\n{end}\r\n0\r\nx: y\r\n\r\n",
        start.len(),
        end.len()
    )
}

fn hi() -> String {
    json!({"model": "fake", "prompt": "hi"}).to_string()
}

/// All that comes until the server closes the connection.
fn rest(stream: &mut (impl Read + ?Sized)) -> String {
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Ok(_) => {}
        // What it had not read when it closed.
        Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
        Err(error) => panic!("{error}: {}", String::from_utf8_lossy(&answer)),
    }
    String::from_utf8(answer).unwrap()
}

/// The head of an answer, and nothing of what is behind it.
fn head(stream: &mut (impl Read + ?Sized)) -> String {
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        let length = stream.read(&mut byte).unwrap();
        assert_ne!(length, 0, "{}", String::from_utf8_lossy(&answer));
        answer.extend_from_slice(&byte);
    }
    String::from_utf8(answer).unwrap()
}

/// An answer that has a length.
fn answer(stream: &mut (impl Read + ?Sized)) -> String {
    let mut answer = head(stream);
    let length = answer
        .lines()
        .find_map(|line| line.strip_prefix("content-length: "))
        .unwrap();
    let mut body = vec![0; length.parse().unwrap()];
    stream.read_exact(&mut body).unwrap();
    answer.push_str(std::str::from_utf8(&body).unwrap());
    answer
}

#[test]
fn a_later_head_that_does_not_arrive_in_time_ends_its_connection_and_a_rest_between_requests_does_not()
 {
    let connections = Connections {
        header_timeout: Duration::from_secs(1),
        ..Connections::default()
    };
    let server = TestServer::connected(FakeBackend::new(), TestServer::settings(), connections);
    // Its body comes by itself, so that it is not taken for the beginning of a head.
    let mut resting = connect(&server);
    let request = post("1.1", "", &hi());
    let (start, body) = request.split_at(request.len() - hi().len());
    resting.write_all(start.as_bytes()).unwrap();
    while server.drain.in_flight() == 0 {
        std::thread::yield_now();
    }
    resting.write_all(body.as_bytes()).unwrap();
    assert!(answer(&mut resting).starts_with("HTTP/1.1 200 "));

    // It begins with the request before it, with the end of that one's body, or after its answer.
    let with_request = format!("{MODELS}{HALF_HEAD}");
    let with_body = format!("{}{HALF_HEAD}", post("1.1", "", &hi()));
    let with_chunks = format!("{}{HALF_HEAD}", chunked(&hi()));
    for first in [with_request, with_body, with_chunks, MODELS.to_owned()] {
        let mut stream = connect(&server);
        stream.write_all(first.as_bytes()).unwrap();
        let answer = answer(&mut stream);
        assert!(answer.starts_with("HTTP/1.1 200 "), "{first}: {answer}");
        if !first.ends_with(HALF_HEAD) {
            stream.write_all(HALF_HEAD.as_bytes()).unwrap();
        }
        assert_eq!(rest(&mut stream), "", "{first}");
    }
    // It has rested for longer than a head may take.
    resting.write_all(MODELS.as_bytes()).unwrap();
    assert!(answer(&mut resting).starts_with("HTTP/1.1 200 "));
}

/// The two kinds of listener that the admin interface can have.
fn admin_listeners(dir: &Path) -> [Listener; 2] {
    [
        Endpoint::Tcp(([127, 0, 0, 1], 0).into()),
        Endpoint::Unix(dir.join("admin.sock")),
    ]
    .map(|endpoint| listen::bind(&endpoint).unwrap())
}

#[test]
fn half_a_head_ends_its_connection_to_the_admin_listener() {
    let dir = tempfile::tempdir().unwrap();
    for listener in admin_listeners(dir.path()) {
        let connections = Connections {
            header_timeout: Duration::from_millis(200),
            ..Connections::default()
        };
        let server = TestServer::administered(TestServer::settings(), connections, listener);
        let mut first = server.connect_admin();
        first.write_all(HALF_HEAD.as_bytes()).unwrap();
        let mut second = server.connect_admin();
        write!(second, "{LIVE}{HALF_HEAD}").unwrap();
        assert!(answer(&mut *second).starts_with("HTTP/1.1 200 "));
        assert_eq!(rest(&mut *second), "");
        assert!(rest(&mut *first).starts_with("HTTP/1.1 408 "));
    }
}

#[test]
fn a_client_that_takes_no_answers_is_cut_off_from_the_admin_listener() {
    let dir = tempfile::tempdir().unwrap();
    for listener in admin_listeners(dir.path()) {
        let settings = Settings {
            write_timeout: Duration::from_millis(200),
            ..TestServer::settings()
        };
        let server = TestServer::administered(settings, Connections::default(), listener);
        let mut stream = server.connect_admin();
        let error = loop {
            if let Err(error) = stream.write_all(LIVE.repeat(1000).as_bytes()) {
                break error;
            }
        };
        assert!(
            [ErrorKind::BrokenPipe, ErrorKind::ConnectionReset].contains(&error.kind()),
            "{error}"
        );
    }
}

#[test]
fn idle_connections_of_one_listener_do_not_take_those_of_the_other() {
    let connections = Connections {
        max: 1,
        ..Connections::default()
    };
    let server = TestServer::connected(FakeBackend::new(), TestServer::settings(), connections);
    let ask = |stream: &mut dyn Connection, request: &str| {
        stream.write_all(request.as_bytes()).unwrap();
        assert!(answer(stream).starts_with("HTTP/1.1 200 "));
    };
    // As many as the admin listener takes; each has been accepted when it has had an answer.
    let mut idle: Vec<_> = (0..ADMIN_CONNECTIONS)
        .map(|_| {
            let mut stream = server.connect_admin();
            ask(&mut *stream, LIVE);
            stream
        })
        .collect();
    let mut only = server.connect();
    ask(&mut *only, MODELS);
    idle.pop();
    ask(&mut *server.connect_admin(), LIVE);
    ask(&mut *only, MODELS);
}

#[test]
fn a_head_whose_lines_end_with_a_line_feed_alone_is_refused_and_ends_its_connection() {
    let server = TestServer::start(FakeBackend::new());
    let body = post("1.1", "", &hi());
    let chunks = chunked(&hi());
    for (admin, request) in [
        (false, MODELS),
        (false, &*body),
        (false, &*chunks),
        (true, LIVE),
    ] {
        let connect = || match admin {
            false => server.connect(),
            true => server.connect_admin(),
        };
        let mut stream = connect();
        // Two at once: where the first ends is understood.
        write!(stream, "{request}\r\n{request}").unwrap();
        for _ in 0..2 {
            let answer = answer(&mut *stream);
            assert!(answer.starts_with("HTTP/1.1 200 "), "{request}: {answer}");
        }
        let (head, body) = request.split_once("\r\n\r\n").unwrap();
        let (first_line, other_lines) = head.split_once("\r\n").unwrap();
        for head in [
            format!("{}\n\n", head.replace("\r\n", "\n")),
            format!("{first_line}\n{other_lines}\r\n\r\n"),
            format!("{head}\n\r\n"),
            format!("{head}\r\n\n"),
            format!("\n{head}\r\n\r\n"),
        ] {
            // On a connection that had another request before, and with one behind.
            let mut stream = connect();
            write!(stream, "{request}{head}{body}{request}").unwrap();
            let before = answer(&mut *stream);
            assert!(before.starts_with("HTTP/1.1 200 "), "{head:?}: {before}");
            let refused = answer(&mut *stream);
            assert!(refused.starts_with("HTTP/1.1 400 "), "{head:?}: {refused}");
            assert!(refused.contains("\r\nconnection: close\r\n"), "{refused}");
            assert!(refused.contains("\"invalid_request_head\""), "{refused}");
            if body.is_empty() {
                assert_eq!(rest(&mut *stream), "", "{head:?}");
            }
        }
    }
}

#[test]
fn a_request_for_another_protocol_is_the_last_of_its_connection_and_is_told_so() {
    let server = TestServer::start(FakeBackend::new());
    let upgrade = |lines: &str| MODELS.replace("host: x\r\n", &format!("host: x\r\n{lines}"));
    for (request, status) in [
        (upgrade("connection: upgrade\r\nupgrade: h2c\r\n"), "200"),
        (
            upgrade("connection: keep-alive, upgrade\r\nupgrade: websocket\r\n"),
            "200",
        ),
        (upgrade("upgrade: h2c\r\n"), "200"),
        ("CONNECT a:80 HTTP/1.1\r\nhost: x\r\n\r\n".to_owned(), "404"),
        (
            "CONNECT a:80 HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello".to_owned(),
            "404",
        ),
    ] {
        let mut stream = connect(&server);
        let bare_line_feeds = MODELS.replace("\r\n", "\n");
        write!(stream, "{request}{bare_line_feeds}").unwrap();
        let answer = rest(&mut stream);
        let expected = format!("HTTP/1.1 {status} ");
        assert!(answer.starts_with(&expected), "{request}: {answer}");
        assert_eq!(
            answer.matches("HTTP/1.1 ").count(),
            1,
            "{request}: {answer}"
        );
        assert!(answer.contains("\r\nconnection: close\r\n"), "{answer}");
    }
}

/// A request whose answer does not depend on how it arrives.
#[derive(Clone, Copy, Debug)]
enum Sort {
    Models,
    HeadOfModels,
    Nothing,
    Sized,
    Chunked,
    Streamed,
    NoJson,
}

impl Sort {
    const ALL: [Self; 7] = [
        Self::Models,
        Self::HeadOfModels,
        Self::Nothing,
        Self::Sized,
        Self::Chunked,
        Self::Streamed,
        Self::NoJson,
    ];

    /// The request with this identifier, and the status of its answer.
    fn request(self, id: &str) -> (String, u16) {
        let streamed = json!({"model": "fake", "prompt": "hi", "stream": true}).to_string();
        let (request, status) = match self {
            Self::Models => (MODELS.to_owned(), 200),
            Self::HeadOfModels => (MODELS.replace("GET", "HEAD"), 200),
            Self::Nothing => (MODELS.replace("models", "nothing"), 404),
            Self::Sized => (post("1.1", "", &hi()), 200),
            Self::Chunked => (chunked(&hi()), 200),
            Self::Streamed => (post("1.1", "", &streamed), 200),
            Self::NoJson => (post("1.1", "", "\r\n\r\nGET / HTTP/1.1\r\n\r\n"), 400),
        };
        let named = format!("host: x\r\nx-request-id: {id}\r\n");
        (request.replacen("host: x\r\n", &named, 1), status)
    }

    /// Reads its answer: the head, after which the next answer begins.
    fn answer(self, stream: &mut dyn Connection) -> String {
        match self {
            Self::HeadOfModels => head(stream),
            Self::Streamed => {
                let head = head(stream);
                let mut chunks = Vec::new();
                while !chunks.ends_with(b"\r\n0\r\n\r\n") {
                    let mut byte = [0];
                    stream.read_exact(&mut byte).unwrap();
                    chunks.extend_from_slice(&byte);
                }
                head
            }
            _ => answer(stream),
        }
    }
}

#[test]
fn requests_of_any_sort_are_answered_in_turn_in_whatever_pieces_they_come() {
    let server = TestServer::start(FakeBackend::new());
    let requests = collection::vec((select(&Sort::ALL[..]), any::<bool>()), 1..8);
    let pieces = collection::vec(1usize..600, 1..20);
    let result = TestRunner::new(ProptestConfig::with_cases(200)).run(
        &(requests, pieces),
        |(requests, pieces)| {
            let mut sent = String::new();
            let mut expected = Vec::new();
            for (number, (sort, has_empty_line)) in requests.into_iter().enumerate() {
                let id = format!("request-{number}");
                let (request, status) = sort.request(&id);
                sent.push_str(if has_empty_line { "\r\n" } else { "" });
                sent.push_str(&request);
                expected.push((sort, status, id));
            }
            let mut stream = server.connect();
            let mut bytes = sent.as_bytes();
            for piece_bytes in pieces {
                let (piece, others) = bytes.split_at(piece_bytes.min(bytes.len()));
                stream.write_all(piece).unwrap();
                bytes = others;
            }
            stream.write_all(bytes).unwrap();
            for (sort, status, id) in expected {
                let head = sort.answer(&mut *stream);
                prop_assert!(
                    head.starts_with(&format!("HTTP/1.1 {status} ")),
                    "{sort:?}: {head}"
                );
                let id = format!("x-request-id: {id}\r\n");
                prop_assert!(head.contains(&id), "{sort:?}: {head}");
            }
            Ok(())
        },
    );
    if let Err(error) = result {
        panic!("{error}");
    }
}

#[test]
fn a_client_that_leaves_is_noticed_whatever_it_has_sent_before() {
    let (backend, senders) = held();
    let server = TestServer::start(backend);
    let half_head = format!("GET / HTTP/1.1\r\nx: {}", "a".repeat(60_000));
    let body = format!(
        "POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 400000\r\n\r\n{}",
        "a".repeat(300_000)
    );
    let gets = MODELS.repeat(80_000);
    for junk in ["", MODELS, &half_head, &body, &gets, "no request\r\n\r\n"] {
        let mut stream = connect(&server);
        stream.write_all(post("1.1", "", &hi()).as_bytes()).unwrap();
        let events = senders.recv().unwrap();
        // The server may hang up on it before all is sent.
        let _ = stream.write_all(junk.as_bytes());
        drop(stream);
        wait_closed(&events);
    }
    // Half of a connection that is closed is enough.
    let mut stream = connect(&server);
    stream.write_all(post("1.1", "", &hi()).as_bytes()).unwrap();
    let events = senders.recv().unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    wait_closed(&events);
}

/// Returns when nobody can receive any more.
fn wait_closed(events: &tokio::sync::mpsc::UnboundedSender<outrider_server::engine::Event>) {
    actix_web::rt::System::new().block_on(events.closed());
}

#[test]
fn what_is_sent_ahead_of_an_answer_is_answered_after_it() {
    let (backend, senders) = held();
    let server = TestServer::start(backend);
    for (ahead, status) in [(MODELS, "200"), ("no request\r\n\r\n", "400")] {
        for is_apart in [false, true] {
            let mut stream = connect(&server);
            let request = post("1.1", "", &hi());
            let together = if is_apart { "" } else { ahead };
            write!(stream, "{request}{together}").unwrap();
            let events = senders.recv().unwrap();
            if is_apart {
                stream.write_all(ahead.as_bytes()).unwrap();
            }
            events.send(token("yes")).unwrap();
            events.send(stopped("", 1)).unwrap();
            let first = answer(&mut stream);
            assert!(first.starts_with("HTTP/1.1 200 "), "{first}");
            assert!(first.contains("yes"), "{first}");
            let second = head(&mut stream);
            let expected = format!("HTTP/1.1 {status} ");
            assert!(second.starts_with(&expected), "{second}");
        }
    }
}

#[test]
fn a_body_that_nobody_reads_is_not_taken_for_ever_and_its_answer_is_seen() {
    let server = TestServer::start(FakeBackend::new());
    for length in [
        "transfer-encoding: chunked",
        "content-length: 1000000000000",
    ] {
        let mut stream = connect(&server);
        write!(
            stream,
            "POST /v1/nothing HTTP/1.1\r\nhost: x\r\n{length}\r\n\r\n"
        )
        .unwrap();
        let mut writer = stream.try_clone().unwrap();
        let flood = std::thread::spawn(move || {
            let chunk = format!("10000\r\n{}\r\n", "a".repeat(0x10000));
            let mut chunks = 0;
            while writer.write_all(chunk.as_bytes()).is_ok() {
                chunks += 1;
            }
            chunks * chunk.len()
        });
        let answer = answer(&mut stream);
        assert!(answer.starts_with("HTTP/1.1 404 "), "{answer}");
        assert!(answer.contains("\r\nconnection: close\r\n"), "{answer}");
        let sent_bytes = flood.join().unwrap();
        assert!(sent_bytes < MOST_THROWN_AWAY_BYTES, "{sent_bytes}");
    }
}

#[test]
fn an_answer_that_does_not_wait_for_a_body_that_is_there_keeps_its_connection() {
    let server = TestServer::start(FakeBackend::new());
    let mut stream = connect(&server);
    for request in [post("1.1", "", &hi()), chunked(&hi())] {
        let request = request.replace(COMPLETIONS, "/v1/nothing");
        stream.write_all(request.as_bytes()).unwrap();
        let answer = answer(&mut stream);
        assert!(answer.starts_with("HTTP/1.1 404 "), "{answer}");
        assert!(!answer.contains("connection: close"), "{answer}");
    }
}

#[test]
fn before_http_1_1_a_stream_has_no_chunks_and_ends_with_its_connection() {
    let server = TestServer::start(FakeBackend::new());
    let body =
        json!({"model": "fake", "prompt": "hi", "stream": true, "max_tokens": 3}).to_string();
    for head in ["", "connection: keep-alive\r\n"] {
        let mut stream = connect(&server);
        stream
            .write_all(post("1.0", head, &body).as_bytes())
            .unwrap();
        let answer = rest(&mut stream);
        let (head, events) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.0 200 "), "{head}");
        assert!(!head.contains("transfer-encoding"), "{head}");
        assert!(!head.contains("keep-alive"), "{head}");
        assert!(events.starts_with("data: "), "{events}");
        assert!(events.ends_with("data: [DONE]\n\n"), "{events}");
    }
}

#[test]
fn a_body_that_says_it_is_too_long_is_not_waited_for() {
    let server = TestServer::start(FakeBackend::new());
    let mut stream = connect(&server);
    write!(
        stream,
        "POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        BODY_LIMIT_BYTES + 1
    )
    .unwrap();
    let answer = answer(&mut stream);
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
}

#[test]
fn every_encoding_of_a_body_counts() {
    let server = TestServer::start(FakeBackend::new());
    for (encodings, status) in [
        (&["identity", "identity"][..], "200"),
        (&["identity", "gzip"], "415"),
        (&["gzip", "identity"], "415"),
    ] {
        let lines: String = encodings
            .iter()
            .map(|encoding| format!("content-encoding: {encoding}\r\n"))
            .collect();
        let mut stream = connect(&server);
        stream
            .write_all(post("1.1", &lines, &hi()).as_bytes())
            .unwrap();
        let answer = answer(&mut stream);
        let expected = format!("HTTP/1.1 {status} ");
        assert!(answer.starts_with(&expected), "{encodings:?}: {answer}");
    }
}

/// A model that says when it encodes a prompt, and does so once it is let or nobody is left to let it.
fn gated() -> (FakeBackend, Receiver<()>, Sender<()>) {
    let (began, begun) = channel();
    let (let_go, gate) = channel::<()>();
    let gate = Mutex::new(gate);
    let mut backend = FakeBackend::new();
    backend.on_encode = Box::new(move || {
        let _ = began.send(());
        let _ = gate.lock().unwrap().recv();
    });
    (backend, begun, let_go)
}

/// What is answered to one of two large bodies while the prompt of the other one is being encoded.
fn beside_a_large_body(settings: Settings) -> Reply {
    let (backend, begun, let_go) = gated();
    let server = TestServer::with(backend, settings);
    let body = json!({"model": "fake", "prompt": "hi", "user": "x".repeat(BODY_LIMIT_BYTES - 100)});
    std::thread::scope(|scope| {
        let (answers, answered) = channel();
        for _ in 0..2 {
            let answers = answers.clone();
            let (server, body) = (&server, &body);
            scope.spawn(move || answers.send(server.post(COMPLETIONS, body)).unwrap());
        }
        begun.recv().unwrap();
        let first = answered.recv().unwrap();
        drop(let_go);
        answered.recv().unwrap();
        first
    })
}

#[test]
fn waiting_to_be_tokenised_has_an_end() {
    let settings = TestServer::settings();
    let reply = beside_a_large_body(Settings {
        queue_timeout: Duration::from_millis(1),
        ..settings.clone()
    });
    assert_eq!(
        (reply.status, reply.code().as_str()),
        (503, "queue_timeout")
    );
    let reply = beside_a_large_body(Settings {
        request_deadline: Duration::from_millis(200),
        ..settings.clone()
    });
    assert_eq!(
        (reply.status, reply.code().as_str()),
        (504, "deadline_exceeded")
    );
    let reply = beside_a_large_body(Settings {
        queue_capacity: 0,
        ..settings
    });
    assert_eq!((reply.status, reply.code().as_str()), (429, "queue_full"));
    assert_eq!(reply.header("retry-after"), Some("1"));
}
