//! Bad input: the right status and an error that names the field, and the next request is served as if nothing had been.

use anyhow::Context;
use outrider_bundle::manifest::Precision;
use outrider_tests::answer::whole;
use outrider_tests::servers::{Server, Servers};
use outrider_verify::wire::{Api, error_of};
use serde_json::{Value, json};

pub fn a_bad_request_is_refused_by_name_and_the_next_one_is_served(
    servers: &Servers,
) -> anyhow::Result<()> {
    let server = servers.of(Precision::Int8)?;
    let first = healthy(server)?;
    for (fields, status, parts) in cases() {
        for api in [Api::Completions, Api::Chat] {
            let mut request = Value::Object(api.request(server.model(), "The sea is"));
            for (name, value) in fields.as_object().into_iter().flatten() {
                request[name] = value.clone();
            }
            refused(server, api, request.to_string().as_bytes(), status, parts)?;
        }
    }
    assert_eq!(healthy(server)?, first);
    Ok(())
}

/// Fields that are wrong in both interfaces, the status, and what the message must name.
fn cases() -> Vec<(Value, u16, &'static [&'static str])> {
    vec![
        (json!({ "max_tokens": -1 }), 400, &["max_tokens", "-1"]),
        (json!({ "max_tokens": 0 }), 400, &["max_tokens"]),
        (json!({ "max_tokens": 1e300 }), 400, &["max_tokens"]),
        (json!({ "max_tokens": u64::MAX }), 400, &["max_tokens"]),
        (json!({ "max_tokens": "ten" }), 400, &["max_tokens"]),
        (json!({ "max_tokens": 1_000_000 }), 400, &["1000000"]),
        (json!({ "n": 0 }), 400, &["`n`"]),
        (json!({ "n": -3 }), 400, &["`n`", "-3"]),
        (json!({ "n": 1_000_000 }), 400, &["1000000"]),
        (
            json!({ "temperature": -0.1 }),
            400,
            &["temperature", "-0.1"],
        ),
        (json!({ "temperature": 999_999.0 }), 400, &["temperature"]),
        (json!({ "temperature": "NaN" }), 400, &["temperature"]),
        (json!({ "temperature": [] }), 400, &["temperature"]),
        (json!({ "top_p": -1.0 }), 400, &["top_p"]),
        (json!({ "top_p": 1.5 }), 400, &["top_p", "1.5"]),
        (json!({ "top_k": -2 }), 400, &["top_k"]),
        (json!({ "min_p": 2 }), 400, &["min_p"]),
        (
            json!({ "repetition_penalty": 0.0 }),
            400,
            &["repetition_penalty"],
        ),
        (
            json!({ "frequency_penalty": 3 }),
            400,
            &["frequency_penalty"],
        ),
        (
            json!({ "presence_penalty": -3 }),
            400,
            &["presence_penalty"],
        ),
        (json!({ "logit_bias": { "x": 1 } }), 400, &["logit_bias"]),
        (json!({ "logit_bias": { "1": 1000 } }), 400, &["logit_bias"]),
        (
            json!({ "logit_bias": { "999999999": 1 } }),
            400,
            &["logit_bias"],
        ),
        (json!({ "seed": 1.5 }), 400, &["seed"]),
        (json!({ "stop": ["a", "b", "c", "d", "e"] }), 400, &["stop"]),
        (json!({ "stop": [""] }), 400, &["stop"]),
        (json!({ "stream": "yes" }), 400, &["stream"]),
        (
            json!({ "stream_options": { "include_usage": true } }),
            400,
            &["stream_options"],
        ),
        (json!({ "no_such_field": 1 }), 400, &["no_such_field"]),
        (json!({ "model": 7 }), 400, &["model"]),
        (json!({ "model": "no-such-model" }), 404, &["no-such-model"]),
    ]
}

pub fn a_bad_prompt_is_refused_by_name_and_the_next_one_is_served(
    servers: &Servers,
) -> anyhow::Result<()> {
    let server = servers.of(Precision::Int8)?;
    let first = healthy(server)?;
    let long = "word ".repeat(4000);
    let mebibyte = "a sentence of words. ".repeat((1 << 20) / 21);
    for (prompt, parts) in [
        (json!(""), vec!["prompt"]),
        (json!([]), vec!["prompt"]),
        (json!([""]), vec!["prompt"]),
        (json!([1, "two"]), vec!["prompt"]),
        (json!([-1]), vec!["prompt"]),
        (json!([999_999_999]), vec!["prompt", "999999999"]),
        (json!({ "text": "x" }), vec!["prompt"]),
        (json!(null), vec!["prompt"]),
        (json!(long), vec!["tokens"]),
        (json!(mebibyte), vec!["tokens"]),
    ] {
        let request = json!({ "model": server.model(), "prompt": prompt, "max_tokens": 4 });
        refused(
            server,
            Api::Completions,
            request.to_string().as_bytes(),
            400,
            &parts,
        )?;
    }
    for (messages, part) in [
        (json!([]), "messages"),
        (json!("hello"), "messages"),
        (json!([{ "role": "user" }]), "content"),
        (json!([{ "content": "x" }]), "role"),
        (json!([{ "role": "king", "content": "x" }]), "role"),
        (json!([{ "role": "user", "content": 7 }]), "content"),
        (
            json!([{ "role": "user", "content": [{ "type": "image_url", "image_url": { "url": "x" } }] }]),
            "type",
        ),
        (
            json!([{ "role": "user", "content": "x", "no_such_field": 1 }]),
            "no_such_field",
        ),
        (json!([{ "role": "user", "content": long }]), "tokens"),
        (json!([{ "role": "user", "content": mebibyte }]), "tokens"),
    ] {
        let request = json!({ "model": server.model(), "messages": messages, "max_tokens": 4 });
        refused(
            server,
            Api::Chat,
            request.to_string().as_bytes(),
            400,
            &[part],
        )?;
    }
    assert_eq!(healthy(server)?, first);
    Ok(())
}

pub fn a_body_that_is_no_request_is_refused_and_the_next_one_is_served(
    servers: &Servers,
) -> anyhow::Result<()> {
    let server = servers.of(Precision::Int8)?;
    let first = healthy(server)?;
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    let with_nan = format!(
        r#"{{"model": "{}", "prompt": "x", "temperature": NaN}}"#,
        server.model()
    );
    let bodies: [&[u8]; 8] = [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\"text\"",
        b"{\"model\": \"\xff\xfe\"}",
        with_nan.as_bytes(),
        deep.as_bytes(),
    ];
    for body in bodies {
        for api in [Api::Completions, Api::Chat] {
            refused(server, api, body, 400, &[])?;
        }
    }
    let huge = vec![b' '; 5 << 20];
    refused(server, Api::Chat, &huge, 413, &[])?;
    for (method_path, status) in [("/v1/no-such-path", 404), ("/v1/chat/completions", 405)] {
        let response = server.client().get(method_path)?;
        assert_eq!(
            response.status,
            status,
            "GET {method_path}: {}",
            response.text()
        );
        error_of(&response.json().context("no JSON")?)?;
    }
    assert_eq!(healthy(server)?, first);
    Ok(())
}

/// A short answer that any disturbance would change.
fn healthy(server: &Server) -> anyhow::Result<String> {
    let request = json!({ "prompt": "The sea is", "max_tokens": 8, "temperature": 0 });
    Ok(whole(server, Api::Completions, &request)?.text)
}

fn refused(
    server: &Server,
    api: Api,
    body: &[u8],
    status: u16,
    parts: &[&str],
) -> anyhow::Result<()> {
    let shown: String = String::from_utf8_lossy(body).chars().take(200).collect();
    let response = server
        .client()
        .post_bytes(api.path(), body)
        .with_context(|| shown.clone())?;
    let text = response.text();
    assert_eq!(response.status, status, "{} {shown}: {text}", api.path());
    let (message, kind) = error_of(
        &response
            .json()
            .with_context(|| format!("{shown}: no JSON: {text}"))?,
    )?;
    assert_eq!(kind, "invalid_request_error", "{shown}: {text}");
    assert!(
        message.len() < 1000,
        "{shown}: the message repeats the request: {message}"
    );
    for part in parts {
        assert!(
            message.contains(part),
            "{} {shown}: {part} is not in {message:?}",
            api.path()
        );
    }
    Ok(())
}
