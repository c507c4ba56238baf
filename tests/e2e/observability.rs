//! One request, as its caller, a collector of spans, the log and the audit log know it.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};

use anyhow::{Context, ensure};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value as AnyValue;
use opentelemetry_proto::tonic::trace::v1::Span;
use outrider_bundle::manifest::Precision;
use outrider_tests::fixtures;
use outrider_tests::servers::{Server, Servers, command};
use prost::Message;
use serde_json::{Value, json};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";
const SECRET: &str = "porcupine";

/// A collector on a port of its own; gives what it is sent.
fn collector() -> anyhow::Result<(String, Receiver<Vec<Span>>)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let endpoint = format!("http://{}/v1/traces", listener.local_addr()?);
    let (sender, spans) = channel();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let sender = sender.clone();
            // Connections are kept, so each has a thread; a fault shows as spans that are missing.
            std::thread::spawn(move || collect(stream, &sender));
        }
    });
    Ok((endpoint, spans))
}

fn collect(stream: TcpStream, spans: &Sender<Vec<Span>>) -> anyhow::Result<()> {
    let mut answers = stream.try_clone()?;
    let mut reader = BufReader::new(stream);
    loop {
        let mut length = None;
        loop {
            let mut line = String::new();
            ensure!(reader.read_line(&mut line)? > 0, "the connection ended");
            let line = line.trim().to_lowercase();
            if let Some(value) = line.strip_prefix("content-length:") {
                length = Some(value.trim().parse()?);
            }
            if line.is_empty() {
                break;
            }
        }
        let mut body = vec![0; length.context("no content-length")?];
        reader.read_exact(&mut body)?;
        let request = ExportTraceServiceRequest::decode(body.as_slice())?;
        let resources = request.resource_spans.into_iter();
        let scopes = resources.flat_map(|resource| resource.scope_spans);
        spans.send(scopes.flat_map(|scope| scope.spans).collect())?;
        answers.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")?;
    }
}

fn number(span: &Span, name: &str) -> Option<i64> {
    let pair = span.attributes.iter().find(|pair| pair.key == name)?;
    match pair.value.as_ref()?.value.as_ref()? {
        AnyValue::IntValue(number) => Some(*number),
        _ => None,
    }
}

pub fn a_request_can_be_followed_from_caller_to_collector_log_and_audit_log(
    _: &Servers,
) -> anyhow::Result<()> {
    let (endpoint, exported) = collector()?;
    let dir = fixtures::scratch_dir()?;
    let audit_path = dir.path().join("audit.jsonl");
    let log_path = dir.path().join("log");
    let command = command(Precision::Int8)?
        .set("serving.runtime.context_tokens", 512)
        .set("serving.telemetry.otlp_endpoint", &endpoint)
        .set("serving.audit.path", audit_path.display())
        .set("serving.audit.prompt_text", true)
        .set("serving.logging.format", "json")
        .set("serving.logging.path", log_path.display());
    let server = Server::start(&command)?;
    let body = json!({
        "model": server.model(), "prompt": format!("A {SECRET} and"), "max_tokens": 9, "temperature": 1, "ignore_eos": true, "return_token_ids": true,
    });
    let agent: ureq::Agent = ureq::Agent::config_builder()
        .http_status_as_error(false)
        .build()
        .into();
    let send = |body: &Value| {
        agent
            .post(format!("{}/v1/completions", server.endpoint()))
            .content_type("application/json")
            .header("x-request-id", "followed")
            .header("traceparent", format!("00-{TRACE}-{PARENT}-01"))
            .send(body.to_string())
    };
    let mut answer = send(&body)?;
    assert_eq!(answer.status().as_u16(), 200);
    assert_eq!(
        answer.headers().get("x-request-id").context("no id")?,
        "followed"
    );
    let answer: Value = answer.body_mut().read_json()?;

    // The line of the audit log is enough to have the answer again: the seed was drawn by the server.
    let mut again = body;
    again["seed"] = answer["seed"].clone();
    let repeated: Value = send(&again)?.body_mut().read_json()?;
    assert_eq!(repeated["choices"], answer["choices"]);
    server.stop()?;

    let lines: Vec<Value> = fs::read_to_string(&audit_path)?
        .lines()
        .map(serde_json::from_str)
        .collect::<Result<_, _>>()?;
    assert_eq!(lines.len(), 2);
    let line = &lines[0];
    assert_eq!(line["request_id"], "followed");
    assert_eq!(line["parameters"]["seed"], answer["seed"]);
    assert_eq!(line["completions"], json!([answer["choices"][0]["text"]]));
    assert_eq!(line["prompt_tokens"], answer["usage"]["prompt_tokens"]);
    assert_eq!(line["completion_tokens"], 9);
    assert_eq!(line["finish_reasons"], json!(["length"]));

    let spans: Vec<Span> = exported.try_iter().flatten().collect();
    let of_trace = |span: &&Span| hex::encode(&span.trace_id) == TRACE;
    let named: BTreeMap<&str, &Span> = spans
        .iter()
        .filter(of_trace)
        .map(|span| (span.name.as_str(), span))
        .collect();
    assert_eq!(
        named.keys().copied().collect::<Vec<_>>(),
        ["decode", "prefill", "queue", "request"]
    );
    let request = named["request"];
    assert_eq!(hex::encode(&request.parent_span_id), PARENT);
    assert_eq!(number(request, "http.response.status_code"), Some(200));
    let requests: Vec<&[u8]> = spans
        .iter()
        .filter(|span| span.name == "request")
        .map(|span| span.span_id.as_slice())
        .collect();
    let mut end = 0;
    for name in ["queue", "prefill", "decode"] {
        let span = named[name];
        assert!(
            requests.contains(&span.parent_span_id.as_slice()),
            "{name} is not within its request"
        );
        assert!(span.end_time_unix_nano >= end, "{name} is out of order");
        end = span.end_time_unix_nano;
    }
    assert_eq!(
        number(named["prefill"], "prompt_tokens").map(Value::from),
        Some(answer["usage"]["prompt_tokens"].clone())
    );
    assert_eq!(number(named["decode"], "completion_tokens"), Some(9));

    let log = fs::read_to_string(&log_path)?;
    let of_request = |line: &&str| {
        serde_json::from_str::<Value>(line).is_ok_and(|record| {
            record["message"] == "request" && record["span"]["request_id"] == "followed"
        })
    };
    assert_eq!(log.lines().filter(of_request).count(), 2, "{log}");
    assert!(!log.contains(SECRET), "{log}");
    assert!(!format!("{spans:?}").contains(SECRET));
    Ok(())
}
