//! What a server and its clients do when something outside breaks: kills, stops, files changed underneath, clients that hold connections.

use std::ffi::OsString;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Command;
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::Signal;
use outrider_bundle::Manifest;
use outrider_bundle::digest::{hash_file, write_atomic};
use outrider_bundle::manifest::Precision;
use outrider_tests::answer::{Answer, request, streamed, whole};
use outrider_tests::fixtures;
use outrider_tests::servers::{Server, Servers, command};
use outrider_verify::client::{ClientError, Streamed};
use outrider_verify::wire::Api;
use serde_json::{Value, json};
use xtask::machine::resident_bytes;
use xtask::reference;
use xtask::server_process::ServerCommand;

use crate::bundles::refused;

/// Clients at once, as many as the slots of these servers.
const CLIENTS: usize = 4;
/// Events after which a client says that its stream is under way.
const UNDER_WAY_EVENTS: usize = 3;
/// Most time for a server to end.
const STOP_DEADLINE: Duration = Duration::from_secs(120);

/// A small server of the reference pair.
fn small() -> anyhow::Result<ServerCommand> {
    Ok(command(Precision::Int8)?
        .set("serving.runtime.max_concurrency", CLIENTS)
        .set("serving.runtime.context_tokens", 512))
}

/// A request that takes many steps.
fn long_request(tokens: usize) -> Value {
    json!({
        "prompt": "The harbour lay quiet in the morning, and",
        "max_tokens": tokens,
        "temperature": 0.7,
        "seed": 11,
        "ignore_eos": true,
    })
}

/// How a stream ended.
#[derive(Debug)]
enum End {
    /// With `[DONE]`.
    Done,
    /// With an event that holds an error of this code.
    Error(String),
    /// The connection closed before.
    Cut,
}

/// Reads a stream to its end, whatever that is, and says when it is under way.
fn stream(
    server: &Server,
    fields: &Value,
    under_way: &Sender<()>,
) -> anyhow::Result<(Answer, End)> {
    let mut fields = fields.clone();
    fields["stream"] = true.into();
    let body = request(server, &fields);
    let events = match server.client().stream(Api::Completions.path(), &body)? {
        Streamed::Events(events) => events,
        Streamed::Whole(response) => bail!("{} {}", response.status, response.text()),
    };
    let mut answer = Answer::default();
    for (number, event) in events.enumerate() {
        let event = match event {
            Ok(event) => event,
            Err(ClientError::StreamCut { .. }) => return Ok((answer, End::Cut)),
            Err(error) => return Err(error.into()),
        };
        let event: Value = serde_json::from_str(&event)?;
        if let Some(code) = event["error"]["code"].as_str() {
            return Ok((answer, End::Error(code.to_owned())));
        }
        answer.add(Api::Completions, &event, "delta")?;
        if number == UNDER_WAY_EVENTS {
            // Nobody waits for it when the run has failed already.
            let _ = under_way.send(());
        }
    }
    Ok((answer, End::Done))
}

/// Streams to `CLIENTS` clients, sends a signal when all are under way, and returns how each ended.
fn signalled(
    server: &Server,
    fields: &Value,
    signal: Signal,
) -> anyhow::Result<Vec<(Answer, End)>> {
    thread::scope(|scope| {
        let (sender, under_way) = channel();
        let clients: Vec<_> = (0..CLIENTS)
            .map(|_| {
                let sender = sender.clone();
                scope.spawn(move || stream(server, fields, &sender))
            })
            .collect();
        drop(sender);
        // A client that fails drops its sender; what it has to say comes below.
        let ready = under_way.iter().take(CLIENTS).count();
        server.process().signaller().send(signal)?;
        let ends = clients
            .into_iter()
            .map(|client| client.join().expect("a client does not panic"))
            .collect::<anyhow::Result<Vec<_>>>()?;
        ensure!(
            ready == CLIENTS,
            "{ready} of {CLIENTS} streams came under way"
        );
        Ok(ends)
    })
}

fn assert_begins(answer: &Answer, reference: &Answer) {
    assert!(
        reference.token_ids.starts_with(&answer.token_ids),
        "{:?} does not begin {:?}",
        answer.token_ids,
        reference.token_ids
    );
    assert!(
        reference.text.starts_with(&answer.text),
        "{:?} does not begin {:?}",
        answer.text,
        reference.text
    );
}

pub fn a_killed_server_cuts_its_streams_off_and_starts_again_as_before(
    _: &Servers,
) -> anyhow::Result<()> {
    let command = small()?;
    let server = Server::start(&command)?;
    let fields = long_request(300);
    let reference = whole(&server, Api::Completions, &fields)?;
    for (answer, end) in signalled(&server, &fields, Signal::SIGKILL)? {
        assert!(matches!(end, End::Cut), "{end:?}");
        assert!(answer.token_ids.len() >= UNDER_WAY_EVENTS);
        assert_begins(&answer, &reference);
    }
    drop(server);
    let again = Server::start(&command)?;
    assert_eq!(whole(&again, Api::Completions, &fields)?, reference);
    Ok(())
}

pub fn a_stop_under_load_lets_every_stream_end_whole_or_with_an_error(
    _: &Servers,
) -> anyhow::Result<()> {
    for (grace_ms, tokens) in [(60_000, 40), (50, 300)] {
        let command = small()?.set("serving.shutdown_grace_ms", grace_ms);
        let server = Server::start(&command)?;
        let fields = long_request(tokens);
        let reference = whole(&server, Api::Completions, &fields)?;
        for (answer, end) in signalled(&server, &fields, Signal::SIGTERM)? {
            match end {
                End::Done => assert_eq!(answer.token_ids, reference.token_ids),
                End::Error(code) => {
                    assert_eq!(code, "engine_stopped");
                    assert!(grace_ms < 60_000, "there was time for the answer");
                    assert_begins(&answer, &reference);
                }
                End::Cut => panic!("grace {grace_ms} ms: a stream ended without a word"),
            }
        }
        let status = server.wait(STOP_DEADLINE)?;
        assert_eq!(status.code(), Some(0), "grace {grace_ms} ms");
    }
    Ok(())
}

pub fn files_overwritten_under_a_running_server_change_no_answer_and_refuse_the_next_start(
    _: &Servers,
) -> anyhow::Result<()> {
    let bundle = reference::find(&fixtures::workspace()?, Precision::Int8)?;
    let manifest = Manifest::load(&bundle)?;
    let copy = fixtures::scratch_dir()?;
    for entry in fs::read_dir(&bundle)? {
        let entry = entry?;
        fs::copy(entry.path(), copy.path().join(entry.file_name()))?;
    }
    let command = small()?.set("serving.bundle", copy.path().display());
    let server = Server::start(&command)?;
    let fields = long_request(60);
    let reference = whole(&server, Api::Completions, &fields)?;

    let changed = format!("{}.data", manifest.target.graph);
    let file = copy.path().join(&changed);
    let bytes = fs::read(&file)?;
    let damaged: Vec<u8> = bytes.iter().map(|byte| byte ^ 0x55).collect();
    // Into the file itself, as `cp` does it: shorter first, so that a mapping would lose its pages.
    fs::write(&file, [])?;
    assert_eq!(whole(&server, Api::Completions, &fields)?, reference);
    fs::write(&file, damaged)?;
    assert_eq!(whole(&server, Api::Completions, &fields)?, reference);
    drop(server);

    let (_, found) = hash_file(&file)?;
    let log = refused(copy.path(), &[])?;
    for digest in [&manifest.files[&changed].sha256, &found] {
        assert!(
            log.contains(digest.as_str()),
            "{digest} is not named: {log}"
        );
    }
    Ok(())
}

/// More than any gateway keeps open.
const IDLE_CONNECTIONS: usize = 10_000;

pub fn ten_thousand_idle_connections_keep_nobody_from_an_answer(_: &Servers) -> anyhow::Result<()> {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most)?;
    ensure!(
        most > IDLE_CONNECTIONS as u64 + 1000,
        "this test needs {IDLE_CONNECTIONS} connections, but the limit of open files is {most}"
    );
    let command = small()?
        .set("serving.http.max_connections", IDLE_CONNECTIONS + 100)
        .set("serving.http.header_timeout_ms", 600_000);
    let server = Server::start(&command)?;
    let fields = long_request(20);
    let reference = whole(&server, Api::Completions, &fields)?;
    let endpoint = server.endpoint();
    let address = endpoint.trim_start_matches("http://");
    let idle = (0..IDLE_CONNECTIONS)
        .map(|number| TcpStream::connect(address).with_context(|| format!("connection {number}")))
        .collect::<anyhow::Result<Vec<_>>>()?;
    assert_eq!(whole(&server, Api::Completions, &fields)?, reference);
    let ready = server.admin()?.get("/readyz")?;
    assert_eq!(ready.status, 200, "{}", ready.text());
    // The last connection is as good as the first.
    for mut connection in [&idle[0], &idle[IDLE_CONNECTIONS - 1]] {
        connection.write_all(
            b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
        )?;
        let mut answer = String::new();
        connection.read_to_string(&mut answer)?;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
    Ok(())
}

pub fn a_client_that_reads_a_byte_at_a_time_holds_up_nobody(_: &Servers) -> anyhow::Result<()> {
    let server = Server::start(&small()?)?;
    let fields = long_request(60);
    let reference = whole(&server, Api::Completions, &fields)?;

    let mut slow_fields = long_request(400);
    for (name, value) in [
        ("stream", json!(true)),
        ("logprobs", json!(20)),
        ("n", json!(2)),
    ] {
        slow_fields[name] = value;
    }
    let body = request(&server, &slow_fields).to_string();
    let endpoint = server.endpoint();
    let mut slow = TcpStream::connect(endpoint.trim_start_matches("http://"))?;
    write!(
        slow,
        "POST {} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        Api::Completions.path(),
        body.len()
    )?;
    let mut byte = [0];
    slow.read_exact(&mut byte)?;
    let before = resident_bytes(server.process().id())?;
    for _ in 0..6 {
        assert_eq!(whole(&server, Api::Completions, &fields)?, reference);
        slow.read_exact(&mut byte)?;
    }
    let after = resident_bytes(server.process().id())?;
    assert!(
        after < before + (64 << 20),
        "memory went from {before} to {after} bytes"
    );
    Ok(())
}

/// Ten years.
const JUMP_SECONDS: i64 = 315_360_000;

pub fn a_wall_clock_that_jumps_touches_no_request(_: &Servers) -> anyhow::Result<()> {
    let dir = fixtures::scratch_dir()?;
    let source = fixtures::workspace()?.root().join("tests/e2e/wall_clock.c");
    let library = dir.path().join("wall_clock.so");
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .args([&library, &source])
        .status()
        .context("cannot run cc")?;
    ensure!(compiled.success(), "cc: {compiled}");
    let offset = dir.path().join("offset");
    let jump = |seconds: i64| {
        write_atomic(
            &offset,
            &dir.path().join("aside"),
            seconds.to_string().as_bytes(),
        )
        .expect("the folder can be written to");
    };
    jump(0);

    // Shorter than every jump, and longer than every answer.
    let patience_ms = 60_000;
    let mut command = small()?
        .set("serving.runtime.queue_timeout_ms", patience_ms)
        .set("serving.runtime.request_deadline_ms", patience_ms)
        .set("serving.http.write_timeout_ms", patience_ms);
    let mut preload = OsString::from("LD_PRELOAD=");
    preload.push(&library);
    let mut offset_file = OsString::from("WALL_CLOCK_OFFSET_FILE=");
    offset_file.push(&offset);
    let server = std::mem::replace(&mut command.binary, PathBuf::from("env"));
    command.arguments = vec![preload, offset_file, server.into()];
    let server = Server::start(&command)?;

    let fields = long_request(60);
    let reference = whole(&server, Api::Completions, &fields)?;
    let (answer, _) = streamed(&server, Api::Completions, &fields, |event| match event {
        5 => jump(JUMP_SECONDS),
        20 => jump(-JUMP_SECONDS),
        _ => {}
    })?;
    assert_eq!(answer, reference);
    let live = server.admin()?.get("/livez")?;
    assert_eq!(live.status, 200, "{}", live.text());

    // The server's wall clock did jump.
    let created = |server: &Server| {
        let body = request(server, &long_request(1));
        let answer = server.client().post(Api::Completions.path(), &body)?.json();
        let created = answer
            .as_ref()
            .and_then(|answer| answer["created"].as_i64());
        created.with_context(|| format!("no date in {answer:?}"))
    };
    let past = created(&server)?;
    jump(0);
    let present = created(&server)?;
    let jumped = present - past;
    assert!(
        (JUMP_SECONDS..JUMP_SECONDS + 60).contains(&jumped),
        "{past} to {present}"
    );
    Ok(())
}

pub fn a_full_disk_under_the_audit_log_ends_readiness_and_no_request(
    _: &Servers,
) -> anyhow::Result<()> {
    let dir = fixtures::scratch_dir()?;
    let path = dir.path().join("audit.jsonl");
    symlink("/dev/full", &path)?;
    let server = Server::start(&small()?.set("serving.audit.path", path.display()))?;
    let readiness_turns = |expected: u16| {
        let deadline = Instant::now() + STOP_DEADLINE;
        loop {
            let ready = server.admin()?.get("/readyz")?;
            if ready.status == expected {
                return Ok(ready.text());
            }
            ensure!(
                Instant::now() < deadline,
                "{} {}",
                ready.status,
                ready.text()
            );
            thread::yield_now();
        }
    };
    let fields = long_request(20);
    let reference = whole(&server, Api::Completions, &fields)?;
    let reason = readiness_turns(503)?;
    assert!(reason.contains("No space left"), "{reason}");
    // A gateway sends no more requests; those that come all the same are answered.
    assert_eq!(whole(&server, Api::Completions, &fields)?, reference);

    fs::remove_file(&path)?;
    server.process().signaller().send(Signal::SIGHUP)?;
    readiness_turns(200)?;
    server.stop()?;
    let lines = fs::read_to_string(&path)?;
    assert_eq!(lines.lines().count(), 2, "{lines}");
    Ok(())
}
