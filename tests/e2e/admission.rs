//! Limits and the prefix cache as the configuration sets them.

use anyhow::Context;
use outrider_bundle::manifest::Precision;
use outrider_tests::answer::{request, streamed};
use outrider_tests::servers::{self, Server, Servers};
use outrider_verify::wire::Api;
use serde_json::{Value, json};
use xtask::server_process::ServerCommand;

/// An answer that takes far longer than the times below.
const LONG_TOKENS: usize = 450;

fn command() -> anyhow::Result<ServerCommand> {
    Ok(servers::command(Precision::Int8)?
        .set("serving.runtime.context_tokens", 512)
        .set("serving.runtime.max_concurrency", 1))
}

pub fn waits_and_answers_that_take_too_long_end_with_their_code(_: &Servers) -> anyhow::Result<()> {
    let fields = |max_tokens: usize| json!({ "prompt": "Once", "max_tokens": max_tokens, "ignore_eos": true });
    let post = |server: &Server, max_tokens: usize| {
        let body = request(server, &fields(max_tokens));
        server.client().post(Api::Completions.path(), &body)
    };

    let server = Server::start(&command()?.set("serving.runtime.queue_timeout_ms", 500))?;
    let mut waited = None;
    let long = streamed(&server, Api::Completions, &fields(LONG_TOKENS), |event| {
        if event == 1 {
            waited = Some(post(&server, 1));
        }
    })?;
    let waited = waited.context("the stream had no event")??;
    assert_eq!(waited.status, 503, "{}", waited.text());
    assert!(waited.text().contains("queue_timeout"), "{}", waited.text());
    assert_eq!(long.0.token_ids.len(), LONG_TOKENS);

    let server = Server::start(&command()?.set("serving.runtime.request_deadline_ms", 1))?;
    let late = post(&server, LONG_TOKENS)?;
    assert_eq!(late.status, 504, "{}", late.text());
    assert!(late.text().contains("deadline_exceeded"), "{}", late.text());
    Ok(())
}

pub fn a_prompt_that_was_answered_is_cached_unless_the_cache_is_off(
    _: &Servers,
) -> anyhow::Result<()> {
    for prefix_cache in [true, false] {
        let command = command()?.set("serving.runtime.prefix_cache", prefix_cache);
        let server = Server::start(&command)?;
        let body = request(
            &server,
            &json!({ "prompt": "The harbour master keeps a list of every ship.", "max_tokens": 3, "temperature": 0 }),
        );
        let mut answers = Vec::new();
        for _ in 0..2 {
            let response = server.client().post(Api::Completions.path(), &body)?;
            answers.push(response.json().context("no JSON")?);
        }
        let usage = |answer: &Value, field: &str| answer["usage"].pointer(field).cloned();
        let cached = |answer| usage(answer, "/prompt_tokens_details/cached_tokens");
        assert_eq!(cached(&answers[0]), Some(json!(0)), "{answers:?}");
        let prompt_tokens = usage(&answers[1], "/prompt_tokens").and_then(|count| count.as_u64());
        let expected = if prefix_cache {
            prompt_tokens.context("no count")? - 1
        } else {
            0
        };
        assert_eq!(cached(&answers[1]), Some(json!(expected)), "{answers:?}");
        assert_eq!(
            answers[0]["choices"][0]["token_ids"],
            answers[1]["choices"][0]["token_ids"]
        );
    }
    Ok(())
}
