//! Request fields: what reaches the engine, and what is refused and how.

use outrider_server::engine::{Request, Sampling};
use serde_json::{Value, json};

use crate::fake::{CONTEXT_TOKENS, FakeBackend, bytes};
use crate::server::TestServer;

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

fn base(path: &str) -> Value {
    if path == CHAT {
        json!({"model": "fake", "messages": [{"role": "user", "content": "hi"}]})
    } else {
        json!({"model": "fake", "prompt": "hi"})
    }
}

/// The engine request that `fields` lead to.
fn submitted(path: &str, fields: &Value) -> Request {
    let server = TestServer::start(FakeBackend::new().with_draft());
    let mut body = base(path);
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    let reply = server.post(path, &body);
    assert_eq!(reply.status, 200, "{body}: {}", reply.body);
    server.backend.requests().remove(0)
}

#[test]
fn fields_left_out_take_the_models_defaults_then_openais() {
    let expected = Sampling {
        temperature: 0.5,
        top_p: 0.75,
        top_k: 40,
        min_p: 0.125,
        repetition_penalty: 1.25,
        ..Sampling::default()
    };
    for path in [COMPLETIONS, CHAT] {
        let request = submitted(path, &json!({}));
        assert_eq!(request.sampling, expected, "{path}");
        assert!(request.stop.is_empty() && !request.ignore_eos);
        assert_eq!((request.logprobs, request.prompt_logprobs), (None, None));
        assert!(request.speculative);
    }
    assert_eq!(submitted(COMPLETIONS, &json!({})).max_tokens, 16);
    // As many as fit.
    let chat = submitted(CHAT, &json!({}));
    assert_eq!(chat.prompt, bytes("user: hi\n"));
    assert_eq!(chat.max_tokens, CONTEXT_TOKENS - chat.prompt.len());
    // The default of the completions interface is not a wish: it gives way where less fits.
    let long = submitted(
        COMPLETIONS,
        &json!({"prompt": "x".repeat(CONTEXT_TOKENS - 3)}),
    );
    assert_eq!(long.max_tokens, 3);
}

#[test]
fn every_field_reaches_the_engine() {
    let fields = json!({
        "temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.25, "presence_penalty": -2, "frequency_penalty": 2.0,
        "repetition_penalty": 1.5, "logit_bias": {"0": -100, "257": 1.5}, "seed": -1, "stop": ["a", "bc"], "ignore_eos": true,
        "max_tokens": 5, "speculative": {"enabled": false}, "user": "someone",
    });
    for path in [COMPLETIONS, CHAT] {
        let request = submitted(path, &fields);
        let expected = Sampling {
            temperature: 0.0,
            top_p: 0.5,
            top_k: 3,
            min_p: 0.25,
            presence_penalty: -2.0,
            frequency_penalty: 2.0,
            repetition_penalty: 1.5,
            logit_bias: vec![(0, -100.0), (257, 1.5)],
        };
        assert_eq!(request.sampling, expected, "{path}");
        assert_eq!(request.seed, u64::MAX);
        assert_eq!(request.stop, ["a", "bc"]);
        assert_eq!(request.max_tokens, 5);
        assert!(request.ignore_eos && !request.speculative);
    }
}

#[test]
fn each_spelling_of_a_field_means_what_it_says() {
    let check = |path: &str, fields: Value, holds: fn(&Request) -> bool| {
        let request = submitted(path, &fields);
        assert!(holds(&request), "{path} {fields}: {request:?}");
    };
    check(COMPLETIONS, json!({"prompt": [104, 105]}), |r| {
        r.prompt == bytes("hi")
    });
    check(COMPLETIONS, json!({"prompt": ["hi"]}), |r| {
        r.prompt == bytes("hi")
    });
    check(COMPLETIONS, json!({"prompt": [[104, 105]]}), |r| {
        r.prompt == bytes("hi")
    });
    check(COMPLETIONS, json!({"stop": "ab"}), |r| r.stop == ["ab"]);
    check(COMPLETIONS, json!({"stop": []}), |r| r.stop.is_empty());
    check(
        COMPLETIONS,
        json!({"stop": null, "seed": null, "max_tokens": null}),
        |r| r.max_tokens == 16,
    );
    check(COMPLETIONS, json!({"top_k": -1}), |r| r.sampling.top_k == 0);
    check(COMPLETIONS, json!({"logprobs": 0}), |r| {
        r.logprobs == Some(0)
    });
    check(COMPLETIONS, json!({"logprobs": 2, "echo": true}), |r| {
        r.prompt_logprobs == Some(2)
    });
    check(COMPLETIONS, json!({"echo": true}), |r| {
        r.prompt_logprobs.is_none()
    });
    check(CHAT, json!({"max_completion_tokens": 4}), |r| {
        r.max_tokens == 4
    });
    check(CHAT, json!({"logprobs": true}), |r| r.logprobs == Some(0));
    check(CHAT, json!({"logprobs": true, "top_logprobs": 5}), |r| {
        r.logprobs == Some(5)
    });
    check(CHAT, json!({"logprobs": false}), |r| r.logprobs.is_none());
    check(CHAT, json!({"speculative": {"enabled": true}}), |r| {
        r.speculative
    });
    check(
        CHAT,
        json!({"chat_template_kwargs": {"think": false}}),
        |r| r.prompt == bytes("user: hi\n[think=false]\n"),
    );
    check(
        CHAT,
        json!({"messages": [{"role": "system", "content": ""}, {"role": "developer", "name": "dev", "content": "x"}]}),
        |r| r.prompt == bytes("system: \ndev: x\n"),
    );
    check(
        CHAT,
        json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]}),
        |r| r.prompt == bytes("user: hi\n"),
    );
    check(
        CHAT,
        json!({"messages": [{
            "role": "assistant", "content": "hi", "refusal": null, "annotations": [], "audio": null, "function_call": null, "tool_calls": null, "parsed": null,
        }]}),
        |r| r.prompt == bytes("assistant: hi\n"),
    );
}

#[test]
fn fields_without_effect_are_taken_with_the_value_that_asks_for_nothing() {
    let common = json!({"store": false, "metadata": {}, "service_tier": "auto", "user": "x", "n": 1, "speculative": null});
    submitted(COMPLETIONS, &common);
    submitted(CHAT, &common);
    submitted(
        COMPLETIONS,
        &json!({"best_of": 1, "suffix": null, "logprobs": null}),
    );
    submitted(
        CHAT,
        &json!({
            "response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "parallel_tool_calls": true, "functions": [],
            "function_call": "none", "modalities": ["text"], "audio": null, "prediction": null, "reasoning_effort": null,
        }),
    );
}

/// The answers to `bodies`, as a table that people can read.
fn refusals(path: &str, bodies: &[Value]) -> String {
    let server = TestServer::start(FakeBackend::new());
    let mut table = String::new();
    for fields in bodies {
        let mut body = base(path);
        for (name, value) in fields.as_object().unwrap() {
            body[name] = value.clone();
        }
        let reply = server.post(path, &body);
        let error = &reply.json()["error"];
        table.push_str(&format!(
            "{fields}\n    {} {} {} [{}] {}\n",
            reply.status,
            error["type"].as_str().unwrap(),
            error["code"].as_str().unwrap(),
            error["param"].as_str().unwrap_or("-"),
            error["message"].as_str().unwrap(),
        ));
    }
    assert!(
        server.backend.requests().is_empty(),
        "a refused request reached the engine"
    );
    // The next request is served.
    assert_eq!(server.post(path, &base(path)).status, 200);
    table
}

#[test]
fn every_broken_rule_of_a_completion_is_named() {
    let table = refusals(
        COMPLETIONS,
        &[
            json!({"model": null}),
            json!({"model": 3}),
            json!({"model": "other"}),
            json!({"prompt": null}),
            json!({"prompt": ""}),
            json!({"prompt": []}),
            json!({"prompt": [""]}),
            json!({"prompt": ["a", ""]}),
            json!({"prompt": [[]]}),
            json!({"prompt": 5}),
            json!({"prompt": {"a": 1}}),
            json!({"prompt": [true]}),
            json!({"prompt": ["a", 5]}),
            json!({"prompt": [1, "a"]}),
            json!({"prompt": [-1]}),
            json!({"prompt": [258]}),
            json!({"prompt": [[1], [1.5]]}),
            json!({"prompt": ["a", "b", "c"], "n": 2}),
            json!({"prompt": "x".repeat(200)}),
            json!({"prompt": "x".repeat(100), "max_tokens": 101}),
            json!({"max_tokens": 0}),
            json!({"max_tokens": -1}),
            json!({"max_tokens": 1.0}),
            json!({"max_tokens": "5"}),
            json!({"max_tokens": 200}),
            json!({"max_tokens": 4_294_967_296_u64}),
            json!({"max_tokens": 18_446_744_073_709_551_615_u64}),
            json!({"max_tokens": 1e30}),
            json!({"max_tokens": -1e20}),
            json!({"max_completion_tokens": 5}),
            json!({"temperature": -0.1}),
            json!({"temperature": 2.001}),
            json!({"temperature": 999999.0}),
            json!({"temperature": 1e300}),
            json!({"temperature": "hot"}),
            json!({"top_p": 0}),
            json!({"top_p": -1.0}),
            json!({"top_p": 1e-300}),
            json!({"top_p": 1.01}),
            json!({"top_k": -2}),
            json!({"top_k": 1.5}),
            json!({"min_p": -0.1}),
            json!({"min_p": 1.1}),
            json!({"presence_penalty": 2.1}),
            json!({"frequency_penalty": -2.1}),
            json!({"repetition_penalty": 0.0}),
            json!({"repetition_penalty": 11}),
            json!({"n": 0}),
            json!({"n": 5}),
            json!({"n": true}),
            json!({"best_of": 2}),
            json!({"best_of": 1, "n": 2}),
            json!({"seed": 9_223_372_036_854_775_808_u64}),
            json!({"seed": 1.5}),
            json!({"seed": "x"}),
            json!({"stop": ""}),
            json!({"stop": ["a", ""]}),
            json!({"stop": ["a", "b", "c", "d", "e"]}),
            json!({"stop": 5}),
            json!({"stop": [5]}),
            json!({"logprobs": -1}),
            json!({"logprobs": 21}),
            json!({"logprobs": true}),
            json!({"top_logprobs": 1}),
            json!({"logit_bias": []}),
            json!({"logit_bias": {"a": 1}}),
            json!({"logit_bias": {"01": 1}}),
            json!({"logit_bias": {"-1": 1}}),
            json!({"logit_bias": {"258": 1}}),
            json!({"logit_bias": {"1": 101}}),
            json!({"logit_bias": {"1": "x"}}),
            json!({"echo": "yes"}),
            json!({"stream": 1}),
            json!({"stream_options": {"include_usage": true}}),
            json!({"stream": true, "stream_options": {"include_usage": "yes"}}),
            json!({"stream": true, "stream_options": {"include_obfuscation": true}}),
            json!({"stream": true, "stream_options": {"usage": true}}),
            json!({"stream": true, "stream_options": []}),
            json!({"suffix": "x"}),
            json!({"speculative": true}),
            json!({"speculative": {}}),
            json!({"speculative": {"enabled": 1}}),
            json!({"speculative": {"enabled": true, "tokens": 4}}),
            json!({"speculative": {"enabled": true}}),
            json!({"return_token_ids": 1}),
            json!({"ignore_eos": "x"}),
            json!({"user": 3}),
            json!({"store": true}),
            json!({"metadata": {"a": "b"}}),
            json!({"service_tier": "flex"}),
            json!({"messages": []}),
            json!({"temprature": 1}),
            json!({"response_format": {"type": "text"}}),
            json!({"min_tokens": 3}),
        ],
    );
    insta::assert_snapshot!(table);
}

#[test]
fn every_broken_rule_of_a_chat_is_named() {
    let message = |message: Value| json!({"messages": [message]});
    let table = refusals(
        CHAT,
        &[
            json!({"messages": null}),
            json!({"messages": []}),
            json!({"messages": "hi"}),
            json!({"messages": ["hi"]}),
            json!({"messages": [{"role": "user", "content": "x".repeat(300)}]}),
            message(json!({"content": "x"})),
            message(json!({"role": "user"})),
            message(json!({"role": "user", "content": null})),
            message(json!({"role": "user", "content": 5})),
            message(json!({"role": "robot", "content": "x"})),
            message(json!({"role": 5, "content": "x"})),
            message(json!({"role": "user", "content": "x", "weight": 1})),
            message(json!({"role": "user", "content": "x", "name": 1})),
            message(json!({"role": "user", "content": ["x"]})),
            message(json!({"role": "user", "content": [{"text": "x"}]})),
            message(json!({"role": "user", "content": [{"type": "text"}]})),
            message(
                json!({"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]}),
            ),
            message(
                json!({"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "x"}}]}),
            ),
            message(json!({"role": "user", "content": [{"type": "input_audio"}]})),
            message(json!({"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]})),
            message(json!({"role": "tool", "content": "x", "tool_call_id": "1"})),
            message(json!({"role": "tool", "content": "x"})),
            json!({"max_tokens": 0}),
            json!({"max_tokens": 5, "max_completion_tokens": 5}),
            json!({"max_completion_tokens": -5}),
            json!({"max_completion_tokens": 200}),
            json!({"logprobs": 3}),
            json!({"top_logprobs": 3}),
            json!({"logprobs": true, "top_logprobs": 21}),
            json!({"n": 5}),
            json!({"echo": true}),
            json!({"best_of": 1}),
            json!({"prompt": "x"}),
            json!({"chat_template_kwargs": [1]}),
            json!({"chat_template_kwargs": {"messages": []}}),
            json!({"response_format": {"type": "json_object"}}),
            json!({"tools": [{"type": "function"}]}),
            json!({"tool_choice": "required"}),
            json!({"parallel_tool_calls": 1}),
            json!({"functions": [{}]}),
            json!({"function_call": "auto"}),
            json!({"modalities": ["text", "audio"]}),
            json!({"audio": {"voice": "x"}}),
            json!({"prediction": {"type": "content"}}),
            json!({"reasoning_effort": "high"}),
            json!({"web_search_options": {}}),
            json!({"verbosity": "low"}),
            json!({"max_token": 5}),
        ],
    );
    insta::assert_snapshot!(table);
}

#[test]
fn the_one_of_several_prompts_that_does_not_fit_is_named() {
    let server = TestServer::start(FakeBackend::new());
    let reply = server.post(
        COMPLETIONS,
        &json!({"model": "fake", "prompt": ["x", "x".repeat(300)]}),
    );
    assert_eq!(
        (reply.status, reply.code()),
        (400, "context_length_exceeded".to_owned())
    );
    assert_eq!(reply.json()["error"]["param"], "prompt[1]");
}
