//! Completions that start from rows of earlier ones are the same to the bit, with a real pair of target and draft.

use std::time::{Duration, Instant};

use outrider_server::engine::{
    self, Clock, Draft, EngineLimits, EngineOptions, Event, Loaded, Phase, Request, Sampling,
    SpeculativeUsage, TextSink, TokenLogprobs, Trace,
};
use outrider_server::model::probe::probe;

use crate::pair::tiny_pair_parking;

/// Text is no part of this.
struct NoText;

impl TextSink for NoText {
    fn push(&mut self, _: u32) -> (String, bool) {
        (String::new(), false)
    }

    fn finish(&mut self) -> String {
        String::new()
    }
}

/// What must not depend on the cache, and how many tokens of the prompt were cached.
#[derive(Debug, PartialEq)]
struct Answer {
    tokens: Vec<(u32, TokenLogprobs)>,
    speculative: SpeculativeUsage,
}

/// Answers to these requests one after the other, and the cached tokens of all of them.
fn answers(requests: &[Request], prefix_cache: bool) -> (Vec<Answer>, usize) {
    let options = EngineOptions {
        limits: EngineLimits {
            queue_capacity: 8,
            queue_timeout: Duration::from_secs(3600),
            request_deadline: Duration::from_secs(3600),
            prefill_chunk_tokens: 16,
        },
        clock: Clock::default(),
        prefix_cache,
        speculate: true,
        draft_block_size: None,
        adaptive_width: false,
    };
    let (handle, thread) = engine::start(options, || {
        let (mut target, draft) = tiny_pair_parking(2, 2);
        let probe = probe(&mut target)?;
        Ok(Loaded {
            target: Box::new(target),
            probe,
            draft: Draft::Loaded(Box::new(draft)),
            text: Box::new(|_| Box::new(NoText)),
            eos_token_ids: Vec::new(),
        })
    })
    .expect("a thread can be started");
    while handle.status().phase == Phase::Starting {
        std::thread::yield_now();
    }
    let mut cached_tokens = 0;
    let answers = requests.iter().map(|request| {
        let mut events = handle.submit(request.clone()).expect("the request fits");
        let mut tokens = Vec::new();
        loop {
            match events.blocking_recv().expect("the completion ends") {
                Event::Token { id, logprobs, .. } => {
                    tokens.push((id, logprobs.expect("they were asked for")));
                }
                Event::Finished { usage, .. } => {
                    cached_tokens += usage.cached_tokens;
                    return Answer {
                        tokens,
                        speculative: usage.speculative,
                    };
                }
                other => panic!("{other:?}"),
            }
        }
    });
    let answers = answers.collect();
    handle.drain();
    thread.join().expect("the engine ends");
    (answers, cached_tokens)
}

/// Conversations that begin alike, taken up in turns, greedy and sampled.
fn requests(speculative: bool) -> Vec<Request> {
    let tokens =
        |kind: u32, count: u32| (0..count).map(move |index| (kind * 17 + index * kind) % 60);
    let mut requests = Vec::new();
    for turn in 0..4u32 {
        for kind in [3, 5, 7] {
            for temperature in [0.0, 0.8] {
                requests.push(Request {
                    id: "test".to_owned(),
                    caller: "caller".into(),
                    arrived: Instant::now(),
                    prompt: tokens(1, 12).chain(tokens(kind, 8 + 6 * turn)).collect(),
                    max_tokens: 14,
                    sampling: Sampling {
                        temperature,
                        ..Sampling::default()
                    },
                    seed: u64::from(turn),
                    stop: Vec::new(),
                    ignore_eos: true,
                    logprobs: Some(3),
                    prompt_logprobs: None,
                    speculative,
                    trace: Trace::default(),
                });
            }
        }
    }
    requests
}

#[test]
fn ids_logprobs_and_what_the_draft_proposes_are_the_same_with_and_without_the_cache() {
    for speculative in [false, true] {
        let requests = requests(speculative);
        let (fresh, none) = answers(&requests, false);
        let (reused, cached_tokens) = answers(&requests, true);
        assert_eq!(none, 0);
        assert!(cached_tokens > 300, "{cached_tokens}");
        assert_eq!(reused, fresh);
        let drafted = fresh
            .iter()
            .any(|answer| answer.speculative.accepted_tokens > 0);
        assert_eq!(drafted, speculative);
    }
}
