//! How a real server goes down while it works, what a stop does to a stream that is running, and what a server leaves behind.

use std::io::{BufRead, BufReader, Read};
use std::time::Duration;

use anyhow::{Context, ensure};
use nix::sys::signal::Signal;
use outrider_bundle::manifest::Precision;
use outrider_tests::servers::{self, Servers};
use serde_json::{Value, json};
use xtask::server_process::ServerProcess;

/// Most time of a start, and of an end.
const DEADLINE: Duration = Duration::from_secs(180);

/// Tokens of the stream, more than are generated before the signal arrives.
const STREAM_TOKENS: usize = 480;

fn start(grace_ms: u64) -> anyhow::Result<ServerProcess> {
    servers::command(Precision::Int8)?
        .set("serving.runtime.context_tokens", 512)
        .set("serving.runtime.max_concurrency", 2)
        .set("serving.shutdown_grace_ms", grace_ms)
        .set("serving.logging.format", "json")
        .start_ready(DEADLINE)
}

/// A long stream of which the first chunk with text was read.
fn open_stream(server: &ServerProcess) -> anyhow::Result<impl BufRead + use<>> {
    let url = format!("{}/v1/models", server.endpoint());
    let models: Value = ureq::get(&url).call()?.body_mut().read_json()?;
    let model = models["data"][0]["id"].clone();
    let body = json!({
        "model": model, "prompt": "Once upon a time", "stream": true, "max_tokens": STREAM_TOKENS, "temperature": 0, "ignore_eos": true,
    });
    let response = ureq::post(format!("{}/v1/completions", server.endpoint()))
        .content_type("application/json")
        .send(body.to_string())?;
    let mut reader = BufReader::new(response.into_body().into_reader());
    let mut line = String::new();
    while !line.starts_with("data: ") {
        line.clear();
        ensure!(reader.read_line(&mut line)? > 0, "the stream ended");
    }
    Ok(reader)
}

fn rest(mut stream: impl Read) -> anyhow::Result<String> {
    let mut rest = String::new();
    stream
        .read_to_string(&mut rest)
        .context("the stream broke off")?;
    Ok(rest)
}

/// The record of the stream in the log.
fn record(log: &str) -> anyhow::Result<Value> {
    log.lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .find(|record| {
            record["message"] == "request" && record["span"]["route"] == "/v1/completions"
        })
        .with_context(|| format!("the stream is not in the log: {log}"))
}

pub fn a_stop_tells_the_stream_that_it_cuts_off_and_logs_its_tokens(
    _: &Servers,
) -> anyhow::Result<()> {
    for (grace_ms, signals) in [(1, 1), (600_000, 2)] {
        let mut server = start(grace_ms)?;
        let stream = open_stream(&server)?;
        for _ in 0..signals {
            server.signaller().send(Signal::SIGTERM)?;
            while ureq_status(&format!("{}/readyz", server.admin_endpoint())) == Some(200) {
                std::thread::yield_now();
            }
        }
        let rest = rest(stream)?;
        ensure!(rest.contains("\"code\":\"engine_stopped\""), "{rest}");
        ensure!(!rest.contains("[DONE]"), "{rest}");
        let status = server.wait(DEADLINE)?;
        let log = server.log();
        ensure!(status.code() == Some(0), "{status}: {log}");
        let record = record(&log)?;
        ensure!(record["status"] == 200, "{record}");
        ensure!(record["code"] == "engine_stopped", "{record}");
        let tokens = record["completion_tokens"].as_u64().unwrap_or(0);
        ensure!((1..STREAM_TOKENS as u64).contains(&tokens), "{record}");
    }
    Ok(())
}

/// The status of an answer; `None` when there is none.
fn ureq_status(url: &str) -> Option<u16> {
    let agent: ureq::Agent = ureq::Agent::config_builder()
        .http_status_as_error(false)
        .build()
        .into();
    Some(agent.get(url).call().ok()?.status().as_u16())
}

pub fn a_stop_lets_a_stream_come_to_its_end(_: &Servers) -> anyhow::Result<()> {
    let mut server = start(600_000)?;
    let stream = open_stream(&server)?;
    server.signaller().send(Signal::SIGINT)?;
    let rest = rest(stream)?;
    ensure!(rest.trim_end().ends_with("data: [DONE]"), "{rest}");
    let status = server.wait(DEADLINE)?;
    ensure!(status.code() == Some(0), "{status}: {}", server.log());
    let record = record(&server.log())?;
    ensure!(record["status"] == 200, "{record}");
    ensure!(record["completion_tokens"] == STREAM_TOKENS, "{record}");
    Ok(())
}

pub fn nothing_is_reported_to_the_makers_of_the_runtime_or_kept_for_them(
    _: &Servers,
) -> anyhow::Result<()> {
    let home = outrider_tests::fixtures::scratch_dir()?;
    let mut command = servers::command(Precision::Int8)?
        .set("serving.runtime.context_tokens", 512)
        .set("serving.runtime.max_concurrency", 2);
    let server = std::mem::replace(&mut command.binary, "env".into());
    // ONNX Runtime reports nothing where it takes itself to be under test.
    let environment = "-u CI -u GITHUB_ACTIONS -u TF_BUILD -u XDG_CACHE_HOME";
    command.arguments = environment.split(' ').map(Into::into).collect();
    let mut set = std::ffi::OsString::from("HOME=");
    set.push(home.path());
    command.arguments.extend([
        set,
        "ORT_DISABLE_TELEMETRY=0".into(),
        server.into_os_string(),
    ]);
    let server = command.start_ready(DEADLINE)?;
    drop(open_stream(&server)?);
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", server.id()))?;
    ensure!(maps.contains("libonnxruntime"), "{maps}");
    let status = server.stop(DEADLINE)?;
    ensure!(status.success(), "{status}");
    let left: Vec<_> = std::fs::read_dir(home.path())?
        .map(|entry| Ok(entry?.file_name()))
        .collect::<std::io::Result<_>>()?;
    ensure!(left.is_empty(), "in the home directory: {left:?}");
    Ok(())
}
