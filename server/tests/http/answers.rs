//! Answers: their shapes, whole and streamed, and what reaches the engine.

use serde_json::json;

use crate::fake::{FakeBackend, stopped, token};
use crate::server::TestServer;

#[test]
fn a_completion_has_openais_shape() {
    let server = TestServer::start(FakeBackend::new());
    let reply = server.post(
        "/v1/completions",
        &json!({"model": "fake", "prompt": "hi", "max_tokens": 3, "seed": 7}),
    );
    insta::assert_json_snapshot!(reply.ok());
}

#[test]
fn a_chat_completion_has_openais_shape() {
    let server = TestServer::start(FakeBackend::new());
    let body = json!({"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "seed": 7});
    insta::assert_json_snapshot!(server.post("/v1/chat/completions", &body).ok());
}

#[test]
fn a_chat_stream_is_a_sequence_of_data_events() {
    let server = TestServer::start(FakeBackend::scripted(vec![
        token("He"),
        token(""),
        token("y"),
        stopped("!", 3),
    ]));
    let body = json!({
        "model": "fake", "messages": [{"role": "user", "content": "hi"}], "seed": 7,
        "stream": true, "stream_options": {"include_usage": true},
    });
    let reply = server.post("/v1/chat/completions", &body);
    assert_eq!(
        reply.header("content-type"),
        Some("text/event-stream; charset=utf-8")
    );
    insta::assert_snapshot!(reply.events().join("\n"));
}
