//! Answers: their shapes, whole and streamed.

use outrider_server::engine::{
    Drafting, Event, FinishReason, SpeculativeUsage, TokenLogprobs, Usage,
};
use serde_json::{Value, json};

use crate::fake::{EOS, FakeBackend, THE, stopped, token};
use crate::server::TestServer;

fn completion(fields: &Value) -> Value {
    with(
        json!({"model": "fake", "prompt": "hi", "max_tokens": 3, "seed": 7}),
        fields,
    )
}

fn chat(fields: &Value) -> Value {
    with(
        json!({"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "seed": 7}),
        fields,
    )
}

fn with(mut body: Value, fields: &Value) -> Value {
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

fn scored(id: u32, logprob: f32, top: &[(u32, f32)]) -> TokenLogprobs {
    TokenLogprobs {
        id,
        logprob,
        top: top.to_vec(),
    }
}

#[test]
fn a_completion_has_openais_shape() {
    let server = TestServer::start(FakeBackend::new());
    insta::assert_json_snapshot!(server.post("/v1/completions", &completion(&json!({}))).ok());
}

#[test]
fn a_chat_completion_has_openais_shape() {
    let server = TestServer::start(FakeBackend::new());
    insta::assert_json_snapshot!(server.post("/v1/chat/completions", &chat(&json!({}))).ok());
}

#[test]
fn a_chat_stream_is_a_sequence_of_data_events() {
    let server = TestServer::start(FakeBackend::scripted(vec![
        token("He"),
        token(""),
        token("y"),
        stopped("!", 3),
    ]));
    let body = chat(&json!({"stream": true, "stream_options": {"include_usage": true}}));
    let reply = server.post("/v1/chat/completions", &body);
    assert_eq!(
        reply.header("content-type"),
        Some("text/event-stream; charset=utf-8")
    );
    insta::assert_snapshot!(reply.events().join("\n"));
}

#[test]
fn a_completion_stream_without_usage_has_no_usage_field() {
    let server = TestServer::start(FakeBackend::new());
    let reply = server.post("/v1/completions", &completion(&json!({"stream": true})));
    insta::assert_snapshot!(reply.events().join("\n"));
}

#[test]
fn line_breaks_and_quotes_in_text_do_not_break_an_event() {
    let text = "a\nb\r\n\n\"c\"\u{2028}데이터: 👩‍🚀";
    let server = TestServer::start(FakeBackend::scripted(vec![token(text), stopped("", 1)]));
    let events = server
        .post("/v1/completions", &completion(&json!({"stream": true})))
        .events();
    let first: Value = serde_json::from_str(&events[0]).unwrap();
    assert_eq!(first["choices"][0]["text"], text);
    assert_eq!(events.len(), 3, "{events:?}");
}

#[test]
fn several_choices_keep_their_index_and_get_seeds_of_their_own() {
    let server = TestServer::start(FakeBackend::new());
    let whole = server
        .post(
            "/v1/completions",
            &completion(&json!({"n": 3, "best_of": 3})),
        )
        .ok();
    let seeds: Vec<i64> = whole["choices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| c["seed"].as_i64().unwrap())
        .collect();
    assert_eq!(seeds[0], 7);
    assert!(seeds[1] != seeds[2] && seeds.iter().all(|seed| *seed < 1 << 53));
    insta::assert_json_snapshot!(whole);

    // A choice can be made again alone, by its own seed.
    let alone = server
        .post("/v1/completions", &completion(&json!({"seed": seeds[2]})))
        .ok();
    assert_eq!(alone["choices"][0]["text"], whole["choices"][2]["text"]);
    assert_eq!(server.backend.requests()[2].seed, seeds[2].cast_unsigned());
}

#[test]
fn the_choices_of_a_stream_together_are_the_whole_answer() {
    let server = TestServer::start(FakeBackend::new());
    let body = completion(
        &json!({"prompt": ["ab", "cde"], "n": 2, "logprobs": 1, "return_token_ids": true}),
    );
    let whole = server.post("/v1/completions", &body).ok();
    let streamed = server
        .post("/v1/completions", &with(body, &json!({"stream": true})))
        .events();
    let mut joined: Vec<Value> = vec![Value::Null; 4];
    for event in streamed.iter().filter(|event| *event != "[DONE]") {
        let choice = serde_json::from_str::<Value>(event).unwrap()["choices"][0].clone();
        let index = usize::try_from(choice["index"].as_u64().unwrap()).unwrap();
        join(&mut joined[index], choice);
    }
    assert_eq!(Value::Array(joined), whole["choices"]);
    // A prompt counts once, whatever `n` is.
    assert_eq!(whole["usage"]["prompt_tokens"], 5);
    assert_eq!(whole["usage"]["completion_tokens"], 12);
}

/// Puts a later part of a choice behind an earlier one: texts and lists are joined, the last value of anything else counts.
fn join(earlier: &mut Value, later: Value) {
    match (earlier, later) {
        (Value::String(earlier), Value::String(later)) => earlier.push_str(&later),
        (Value::Array(earlier), Value::Array(later)) => earlier.extend(later),
        (Value::Object(earlier), Value::Object(later)) => {
            for (name, value) in later {
                join(earlier.entry(name).or_insert(Value::Null), value);
            }
        }
        (_, Value::Null) => {}
        (earlier, later) => *earlier = later,
    }
}

#[test]
fn a_request_without_a_seed_reports_the_one_it_got() {
    let server = TestServer::start(FakeBackend::new());
    let body = json!({"model": "fake", "prompt": "hi", "max_tokens": 3});
    let seeds: Vec<i64> = (0..4)
        .map(|_| {
            let answer = server.post("/v1/completions", &body).ok();
            assert_eq!(answer["seed"], answer["choices"][0]["seed"]);
            answer["seed"].as_i64().unwrap()
        })
        .collect();
    assert!(seeds.iter().all(|seed| (0..1 << 53).contains(seed)));
    assert!(seeds.windows(2).any(|pair| pair[0] != pair[1]), "{seeds:?}");
    let used: Vec<i64> = server
        .backend
        .requests()
        .iter()
        .map(|request| request.seed.cast_signed())
        .collect();
    assert_eq!(used, seeds);
}

#[test]
fn completion_logprobs_have_texts_offsets_and_the_chosen_token() {
    // "é" comes in two tokens that are no characters alone; the second alternative of the first token has the same text as the first.
    let events = vec![
        Event::Token {
            id: 0xc3,
            text: String::new(),
            logprobs: Some(scored(
                0xc3,
                -0.5,
                &[(0xc3, -0.5), (0x61, f32::NEG_INFINITY)],
            )),
        },
        Event::Token {
            id: 0xa9,
            text: "é".to_owned(),
            logprobs: Some(scored(0xa9, -2.5, &[(0x62, -0.25), (0x62, -0.75)])),
        },
        Event::Token {
            id: THE,
            text: "the".to_owned(),
            logprobs: Some(scored(THE, -0.125, &[])),
        },
        Event::Token {
            id: EOS,
            text: String::new(),
            logprobs: Some(scored(EOS, -0.25, &[])),
        },
        stopped("", 4),
    ];
    let server = TestServer::start(FakeBackend::scripted(events));
    let answer = server
        .post(
            "/v1/completions",
            &completion(&json!({"logprobs": 2, "return_token_ids": true})),
        )
        .ok();
    insta::assert_json_snapshot!(answer["choices"][0]);
}

#[test]
fn chat_logprobs_have_bytes_and_alternatives() {
    let server = TestServer::start(FakeBackend::new());
    let answer = server
        .post(
            "/v1/chat/completions",
            &chat(&json!({"logprobs": true, "top_logprobs": 2, "max_tokens": 2})),
        )
        .ok();
    insta::assert_json_snapshot!(answer["choices"][0]["logprobs"]);
    let without_alternatives = server
        .post(
            "/v1/chat/completions",
            &chat(&json!({"logprobs": true, "max_tokens": 1})),
        )
        .ok();
    assert_eq!(
        without_alternatives["choices"][0]["logprobs"]["content"][0]["top_logprobs"],
        json!([])
    );
}

#[test]
fn logprobs_of_held_back_text_are_streamed_with_empty_text() {
    let held_back = Event::Token {
        id: 0xc3,
        text: String::new(),
        logprobs: Some(scored(0xc3, -0.5, &[])),
    };
    let server = TestServer::start(FakeBackend::scripted(vec![
        held_back,
        stopped("\u{fffd}", 1),
    ]));
    let body = chat(&json!({"stream": true, "logprobs": true}));
    insta::assert_snapshot!(
        server
            .post("/v1/chat/completions", &body)
            .events()
            .join("\n")
    );
}

#[test]
fn echo_puts_the_prompt_before_the_completion_with_its_logprobs() {
    let server = TestServer::start(FakeBackend::new());
    let body = completion(&json!({"echo": true, "logprobs": 1, "max_tokens": 2}));
    let whole = server.post("/v1/completions", &body).ok();
    assert_eq!(whole["choices"][0]["text"], "hihi");
    insta::assert_json_snapshot!(whole["choices"][0]["logprobs"]);

    let streamed = server
        .post("/v1/completions", &with(body, &json!({"stream": true})))
        .events();
    let first: Value = serde_json::from_str(&streamed[0]).unwrap();
    assert_eq!(first["choices"][0]["text"], "hi");
    assert_eq!(first["choices"][0]["logprobs"]["tokens"], json!(["h", "i"]));
}

#[test]
fn echo_of_a_prompt_of_token_ids_gives_their_text() {
    let server = TestServer::start(FakeBackend::new());
    let body =
        completion(&json!({"prompt": [[THE, 0x21], [0xc3, 0xa9]], "echo": true, "max_tokens": 1}));
    let answer = server.post("/v1/completions", &body).ok();
    assert_eq!(answer["choices"][0]["text"], "the!h");
    assert_eq!(answer["choices"][1]["text"], "éh");
}

#[test]
fn a_text_can_be_scored_without_generating() {
    let server = TestServer::start(FakeBackend::new());
    let answer = server
        .post(
            "/v1/completions",
            &completion(&json!({"echo": true, "logprobs": 0, "max_tokens": 0})),
        )
        .ok();
    insta::assert_json_snapshot!(answer);
    // Without `logprobs` the engine is still asked to score, as it takes no request for nothing.
    let answer = server
        .post(
            "/v1/completions",
            &completion(&json!({"echo": true, "max_tokens": 0})),
        )
        .ok();
    assert_eq!(answer["choices"][0]["text"], "hi");
    assert_eq!(answer["choices"][0]["logprobs"], Value::Null);
    assert_eq!(server.backend.requests()[1].prompt_logprobs, Some(0));
}

#[test]
fn token_ids_are_reported_when_asked_for() {
    let server = TestServer::start(FakeBackend::new());
    let body = chat(&json!({"return_token_ids": true, "max_tokens": 2}));
    let whole = server.post("/v1/chat/completions", &body).ok();
    insta::assert_json_snapshot!(whole["choices"][0]);
    let streamed = server
        .post(
            "/v1/chat/completions",
            &with(body, &json!({"stream": true})),
        )
        .events();
    insta::assert_snapshot!(streamed.join("\n"));
}

#[test]
fn the_finish_reason_and_the_usage_are_the_engines() {
    let events = vec![
        token("a"),
        Event::Finished {
            reason: FinishReason::Stop,
            text: "b".to_owned(),
            usage: Usage {
                prompt_tokens: 2,
                cached_tokens: 1,
                completion_tokens: 9,
                speculative: SpeculativeUsage {
                    drafted_tokens: 12,
                    accepted_tokens: 5,
                    steps: 3,
                },
            },
        },
    ];
    let server = TestServer::start(FakeBackend::scripted(events));
    let answer = server.post("/v1/completions", &completion(&json!({}))).ok();
    assert_eq!(answer["choices"][0]["text"], "ab");
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert_eq!(
        answer["usage"],
        json!({"prompt_tokens": 2, "completion_tokens": 9, "total_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 1},
            "speculative": {"drafted_tokens": 12, "accepted_tokens": 5, "steps": 3}})
    );
}

#[test]
fn what_drafting_did_is_summed_over_the_choices_and_what_was_cached_is_not() {
    let server = TestServer::start(FakeBackend::new().with_draft());
    let three = json!({"drafted_tokens": 21, "accepted_tokens": 9, "steps": 6});
    let none = json!({"drafted_tokens": 0, "accepted_tokens": 0, "steps": 0});
    for (fields, expected) in [
        (json!({"n": 3}), &three),
        (json!({"n": 3, "speculative": {"enabled": true}}), &three),
        (json!({"n": 3, "speculative": {"enabled": false}}), &none),
    ] {
        for (path, body) in [
            ("/v1/completions", completion(&fields)),
            ("/v1/chat/completions", chat(&fields)),
        ] {
            let whole = server.post(path, &body).ok();
            assert_eq!(&whole["usage"]["speculative"], expected, "{body}");
            // A prompt counts once, so what was cached of it does as well.
            let prompt_tokens = whole["usage"]["prompt_tokens"].as_u64().unwrap();
            let cached = json!({"cached_tokens": prompt_tokens - 1});
            assert_eq!(whole["usage"]["prompt_tokens_details"], cached, "{body}");
            let streamed = with(
                body,
                &json!({"stream": true, "stream_options": {"include_usage": true}}),
            );
            let events = server.post(path, &streamed).events();
            let last: Value = serde_json::from_str(&events[events.len() - 2]).unwrap();
            assert_eq!(last["usage"], whole["usage"], "{streamed}");
        }
    }
}

#[test]
fn a_model_says_whether_it_drafts() {
    let server = TestServer::start(FakeBackend::new().with_draft());
    insta::assert_json_snapshot!(server.get("/v1/models/fake").ok()["speculation"]);
    // What broke is for operators.
    server.backend.set_status(|status| {
        let speculation = status.speculation.as_mut().unwrap();
        speculation.drafting = Drafting::Suspended;
        speculation.detail = "onnx runtime: /secret/draft.onnx".to_owned();
    });
    let public = server.get("/v1/models");
    assert!(!public.body.contains("secret"), "{}", public.body);
    assert_eq!(
        public.ok()["data"][0]["speculation"]["drafting"],
        "suspended"
    );
    assert!(server.admin("/readyz").body.contains("secret"));
}

#[test]
fn models_are_listed_and_found_by_name() {
    let server = TestServer::start(FakeBackend::new());
    let list = server.get("/v1/models").ok();
    insta::assert_json_snapshot!(list);
    assert_eq!(server.get("/v1/models/fake").ok(), list["data"][0]);
    let unknown = server.get("/v1/models/org%2Fother");
    assert_eq!(
        (unknown.status, unknown.code()),
        (404, "model_not_found".to_owned())
    );
}
