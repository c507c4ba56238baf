//! A whole life of the server in one process, with a fake loader and real signals.
//!
//! One test only: signals reach every server of the process.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::JoinHandle;

use nix::sys::signal::{Signal, raise};
use outrider_server::config::{Config, Sources};
use outrider_server::launch::Launch;
use outrider_server::lifecycle::Latch;
use outrider_server::listen::Listener;
use outrider_server::service::{self, Ending, LoadContext};
use tempfile::TempDir;
use tokio::sync::mpsc::UnboundedSender;

#[path = "http/fake.rs"]
#[expect(
    dead_code,
    reason = "the fake model has more to offer than this test needs"
)]
mod fake;

use fake::{FakeBackend, held, stopped, token};
use outrider_server::engine::Event;

struct Life {
    audit_path: PathBuf,
    _dir: TempDir,
    address: SocketAddr,
    admin_address: SocketAddr,
    ending: JoinHandle<Ending>,
}

impl Life {
    fn begin(
        grace_ms: &str,
        load: impl FnOnce(LoadContext) -> Result<(), String> + Send + 'static,
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let audit_path = dir.path().join("audit.jsonl");
        let flags = [
            ("serving.bundle", "model"),
            ("serving.runtime.onnxruntime_library", "ort.so"),
            ("serving.listen", "127.0.0.1:0"),
            ("serving.admin_listen", "127.0.0.1:0"),
            ("serving.shutdown_grace_ms", grace_ms),
            ("serving.audit.path", audit_path.to_str().unwrap()),
        ];
        let sources = Sources {
            flags: flags
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
                .to_vec(),
            ..Sources::default()
        };
        let launch = Launch::new(Config::load(&sources).unwrap(), sources, None).unwrap();
        let Listener::Tcp(admin_listener) = &launch.admin_listener else {
            unreachable!("the endpoint is an address")
        };
        Self {
            audit_path,
            _dir: dir,
            address: launch.listener.local_addr().unwrap(),
            admin_address: admin_listener.local_addr().unwrap(),
            ending: std::thread::spawn(move || {
                actix_web::rt::System::new()
                    .block_on(service::run(launch, load))
                    .unwrap()
            }),
        }
    }

    /// Waits for the end; gives the statuses and errors of the generation requests that the audit log holds by then.
    fn end(self) -> (Ending, Vec<(u64, Option<String>)>) {
        let ending = self.ending.join().unwrap();
        let log = std::fs::read_to_string(&self.audit_path).unwrap();
        let lines = log.lines().map(|line| {
            let line: serde_json::Value = serde_json::from_str(line).unwrap();
            let code = line["error_code"].as_str().map(str::to_owned);
            (line["status"].as_u64().unwrap(), code)
        });
        (ending, lines.collect())
    }
}

fn get(address: SocketAddr, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn stream_completion(address: SocketAddr) -> TcpStream {
    let body = r#"{"model": "fake", "prompt": "hi", "stream": true}"#;
    let mut stream = TcpStream::connect(address).unwrap();
    write!(
        stream,
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    stream
}

/// What a test tells its loader.
struct Loader {
    /// Provide the model.
    go: mpsc::Sender<()>,
    /// End with this result.
    end: mpsc::Sender<Result<(), String>>,
}

/// A life whose loader provides `backend` when told to and stays until told to end.
fn begin_with(mut backend: FakeBackend, grace_ms: &str) -> (Life, Loader) {
    let (go, may_go) = mpsc::channel();
    let (end, may_end) = mpsc::channel();
    let stop = end.clone();
    backend.on_stop = Box::new(move || stop.send(Ok(())).unwrap());
    let life = Life::begin(grace_ms, move |context| {
        may_go.recv().unwrap();
        (context.provide)(Arc::new(backend));
        for latch in Latch::ALL {
            context.startup.pass(latch);
        }
        may_end.recv().unwrap()
    });
    (life, Loader { go, end })
}

/// Asks until the answer begins with this status; the server decides when.
fn until(address: SocketAddr, path: &str, status: &str) {
    while !get(address, path).starts_with(&format!("HTTP/1.1 {status} ")) {
        std::thread::yield_now();
    }
}

fn running(grace_ms: &str) -> (Life, TcpStream, UnboundedSender<Event>, Loader) {
    let (backend, senders) = held();
    let (life, loader) = begin_with(backend, grace_ms);
    // The port answers before there is a model.
    assert!(get(life.address, "/v1/models").starts_with("HTTP/1.1 503 "));
    assert!(get(life.admin_address, "/livez").starts_with("HTTP/1.1 200 "));
    assert!(get(life.admin_address, "/readyz").starts_with("HTTP/1.1 503 "));
    loader.go.send(()).unwrap();
    until(life.admin_address, "/readyz", "200");
    let stream = stream_completion(life.address);
    let events = senders.recv().unwrap();
    events.send(token("first")).unwrap();
    (life, stream, events, loader)
}

fn rest(mut stream: TcpStream) -> String {
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

/// The stream was cut off with a last event, and its chunks are complete.
fn ends_with_an_error(stream: TcpStream) {
    let text = rest(stream);
    assert!(text.contains("\"code\":\"engine_stopped\""), "{text}");
    assert!(text.ends_with("\r\n0\r\n\r\n"), "{text}");
}

#[test]
fn the_server_starts_answers_and_ends_in_order() {
    // A stop lets a running stream finish.
    let (life, stream, events, _loader) = running("60000");
    raise(Signal::SIGTERM).unwrap();
    until(life.admin_address, "/readyz", "503");
    events.send(stopped("last", 2)).unwrap();
    let text = rest(stream);
    assert!(text.contains("last") && text.contains("[DONE]"), "{text}");
    assert_eq!(life.end(), (Ending::Stopped, vec![(200, None)]));

    // The grace period bounds the wait for one that does not, and the stream says so.
    let (life, stream, events, _loader) = running("1");
    raise(Signal::SIGINT).unwrap();
    ends_with_an_error(stream);
    let stopped = (200, Some("engine_stopped".to_owned()));
    assert_eq!(life.end(), (Ending::Stopped, vec![stopped.clone()]));
    actix_web::rt::System::new().block_on(events.closed());

    // So does a second signal.
    let (life, stream, events, _loader) = running("60000");
    raise(Signal::SIGTERM).unwrap();
    until(life.admin_address, "/readyz", "503");
    raise(Signal::SIGTERM).unwrap();
    ends_with_an_error(stream);
    assert_eq!(life.end(), (Ending::Stopped, vec![stopped.clone()]));
    actix_web::rt::System::new().block_on(events.closed());

    // A load that is under way is left behind, and so is an engine that does not come out of its step.
    for provides in [false, true] {
        let (leave, may_leave) = mpsc::channel::<()>();
        let life = Life::begin("1", move |context| {
            if provides {
                (context.provide)(Arc::new(held().0));
                for latch in Latch::ALL {
                    context.startup.pass(latch);
                }
            }
            // An error says that the test is over.
            let _ = may_leave.recv();
            Ok(())
        });
        until(
            life.admin_address,
            "/readyz",
            if provides { "200" } else { "503" },
        );
        raise(Signal::SIGTERM).unwrap();
        assert_eq!(life.end(), (Ending::Abandoned, vec![]));
        drop(leave);
    }

    // An engine that ends by itself ends the server; requests are told.
    let (life, stream, events, loader) = running("60000");
    drop(events);
    loader.end.send(Err("a step panicked".to_owned())).unwrap();
    assert!(rest(stream).contains("engine_stopped"));
    assert_eq!(
        life.end(),
        (
            Ending::EngineFailed("a step panicked".to_owned()),
            vec![stopped]
        )
    );

    // A model that cannot be loaded ends it too.
    let life = Life::begin("1", |_| Err("bundle.json is missing".to_owned()));
    assert_eq!(
        life.ending.join().unwrap(),
        Ending::CannotServe("bundle.json is missing".to_owned())
    );
    let life = Life::begin("1", |_| panic!("a fault of the loader"));
    assert_eq!(
        life.ending.join().unwrap(),
        Ending::CannotServe("the loader panicked".to_owned())
    );
}
