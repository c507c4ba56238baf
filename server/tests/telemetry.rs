//! Spans as a collector gets them, and the log beside them.
//!
//! One test only: a process has one log.

use std::net::TcpListener;
use std::sync::mpsc::{Receiver, channel};

use actix_web::{App, HttpResponse, HttpServer, rt, web};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value as AnyValue;
use opentelemetry_proto::tonic::trace::v1::Span;
use outrider_server::config::{LogFormat, Logging};
use outrider_server::engine::{EngineError, Event};
use outrider_server::logging;
use outrider_server::telemetry::Telemetry;
use prost::Message as _;
use serde_json::{Value, json};

#[path = "http/fake.rs"]
#[expect(
    dead_code,
    reason = "the fake model has more to offer than this test needs"
)]
mod fake;
#[path = "http/server.rs"]
#[expect(dead_code, reason = "and so has the server")]
mod server;

use fake::{FakeBackend, finished, letters, token};
use server::TestServer;

const COMPLETIONS: &str = "/v1/completions";
const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";

/// A collector on a port of its own; gives what it is sent.
fn collector() -> (String, Receiver<Vec<Span>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}/v1/traces", listener.local_addr().unwrap());
    let (sender, spans) = channel();
    std::thread::spawn(move || {
        rt::System::new().block_on(async move {
            let take = move |body: web::Bytes| {
                let sender = sender.clone();
                async move {
                    let request = ExportTraceServiceRequest::decode(body).unwrap();
                    let resources = request.resource_spans.into_iter();
                    let scopes = resources.flat_map(|resource| resource.scope_spans);
                    // The test may have seen enough.
                    let _ = sender.send(scopes.flat_map(|scope| scope.spans).collect());
                    HttpResponse::Ok().finish()
                }
            };
            let app = move || App::new().route("/v1/traces", web::post().to(take.clone()));
            let server = HttpServer::new(app).workers(1).listen(listener).unwrap();
            server.disable_signals().run().await.unwrap();
        });
    });
    (endpoint, spans)
}

fn attribute(span: &Span, name: &str) -> Value {
    let value = span.attributes.iter().find(|pair| pair.key == name);
    match value.and_then(|pair| pair.value.clone()?.value) {
        Some(AnyValue::StringValue(text)) => text.into(),
        Some(AnyValue::IntValue(number)) => number.into(),
        Some(other) => panic!("{name} is {other:?}"),
        None => Value::Null,
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn spans_of_requests_reach_the_collector_and_records_name_their_request() {
    let (endpoint, exported) = collector();
    let telemetry = Telemetry::start(&endpoint).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let control = logging::start(
        &Logging {
            level: tracing::Level::ERROR,
            format: LogFormat::Json,
            path: Some(path.clone()),
        },
        Some(&telemetry),
    )
    .unwrap();
    let server = TestServer::start(FakeBackend::answering(|request| {
        let fails = request.prompt[0] == u32::from(b'f');
        Ok(if fails {
            finished(&[token("a"), Event::Failed(EngineError::NonFiniteLogits)])
        } else {
            finished(&letters(request))
        })
    }));
    let body =
        |prompt: &str| json!({"model": "fake", "prompt": prompt, "max_tokens": 3}).to_string();
    let traceparent = format!("00-{TRACE}-{PARENT}-01");
    let headers = [("x-request-id", "good"), ("traceparent", &*traceparent)];
    let reply = server.send(COMPLETIONS, &headers, body("porcupine").as_bytes());
    assert_eq!(reply.status, 200);
    let headers = [("x-request-id", "bad")];
    let reply = server.send(COMPLETIONS, &headers, body("fine until").as_bytes());
    assert_eq!(reply.status, 500);
    control.set_level(tracing::Level::INFO);
    let headers = [("x-request-id", "logged")];
    assert_eq!(server.send("/v1/nothing", &headers, b"").status, 404);
    rt::System::new().block_on(server.drain.idle());
    telemetry.end();

    let spans: Vec<Span> = exported.try_iter().flatten().collect();
    let span_of = |request_id: &str| {
        let is_it = |span: &&Span| attribute(span, "request_id") == request_id;
        spans.iter().find(is_it).unwrap()
    };
    let good = span_of("good");
    assert_eq!(good.name, "request");
    assert_eq!(hex(&good.trace_id), TRACE);
    assert_eq!(hex(&good.parent_span_id), PARENT);
    let described = |span: &Span| {
        let names = [
            "route",
            "caller",
            "http.request.method",
            "http.response.status_code",
            "prompt_tokens",
            "completion_tokens",
            "error.type",
        ];
        json!(names.map(|name| attribute(span, name)))
    };
    assert_eq!(
        described(good),
        json!([COMPLETIONS, "127.0.0.1", "POST", 200, 9, 3, null])
    );
    let bad = span_of("bad");
    assert!(bad.parent_span_id.is_empty());
    assert_eq!(bad.status.as_ref().unwrap().code, 2);
    assert_eq!(attribute(bad, "error.type"), "non_finite_logits");
    assert_eq!(attribute(span_of("logged"), "route"), "unmatched");
    let all = format!("{spans:?}");
    assert!(!all.contains("porcupine") && !all.contains("abc"), "{all}");

    let log = std::fs::read_to_string(&path).unwrap();
    assert!(!log.contains("porcupine"), "{log}");
    let records: Vec<Value> = log
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let of = |request_id: &str| -> Vec<&Value> {
        let of_request = |record: &&Value| record["span"]["request_id"] == request_id;
        records.iter().filter(of_request).collect()
    };
    assert!(of("good").is_empty());
    // Also where spans themselves are below the level of the log.
    assert_eq!(of("bad").len(), 1, "{log}");
    assert_eq!(of("bad")[0]["level"], "ERROR");
    assert_eq!(of("bad")[0]["span"]["route"], COMPLETIONS);
    assert_eq!(of("bad")[0]["span"]["caller"], "127.0.0.1");
    assert_eq!(of("logged")[0]["message"], "request");
}
