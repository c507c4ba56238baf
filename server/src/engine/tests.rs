//! The engine over a fake target: every completion is compared with a simulation that knows nothing of slots, batches or chunks.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};

use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use proptest::prelude::*;

use super::sampler::{Context, Sampler, logprobs};
use super::*;
use crate::model::fake::{FakeTarget, VOCAB_SIZE};
use crate::model::probe::probe;

mod admission;
mod drafting;
mod prefix;
mod rig;

const EOS: u32 = 63;

/// Text in which token `n` is the letter with that number, so that stop strings are easy to aim at.
struct Letters {
    stop: Vec<String>,
    text: String,
}

fn letter(id: u32) -> char {
    char::from_u32(u32::from(b'A') + id).expect("ids are small")
}

impl TextSink for Letters {
    fn push(&mut self, id: u32) -> (String, bool) {
        self.text.push(letter(id));
        let stopped = self
            .stop
            .iter()
            .any(|stop| self.text.ends_with(stop.as_str()));
        (letter(id).to_string(), stopped)
    }

    fn finish(&mut self) -> String {
        "!".to_owned()
    }
}

fn letters(stop: &[String]) -> Box<dyn TextSink> {
    Box::new(Letters {
        stop: stop.to_vec(),
        text: String::new(),
    })
}

fn start_with(
    target: FakeTarget,
    queue_capacity: usize,
    prefill_chunk_tokens: usize,
) -> (EngineHandle, JoinHandle<()>) {
    let options = options(queue_capacity, prefill_chunk_tokens);
    start_drafting(target, Draft::Unavailable("none".to_owned()), options, EOS)
}

fn options(queue_capacity: usize, prefill_chunk_tokens: usize) -> EngineOptions {
    EngineOptions {
        limits: EngineLimits {
            queue_capacity,
            queue_timeout: Duration::from_secs(3600),
            request_deadline: Duration::from_secs(3600),
            prefill_chunk_tokens,
        },
        clock: Clock::default(),
        prefix_cache: false,
        speculate: true,
        draft_block_size: None,
        adaptive_width: false,
    }
}

fn start_drafting(
    target: FakeTarget,
    draft: Draft,
    options: EngineOptions,
    eos: u32,
) -> (EngineHandle, JoinHandle<()>) {
    let (handle, thread, _) = start_recorded(target, draft, options, eos);
    (handle, thread)
}

/// Starts an engine that records its metrics for itself.
fn start_recorded(
    target: FakeTarget,
    draft: Draft,
    options: EngineOptions,
    eos: u32,
) -> (EngineHandle, JoinHandle<()>, PrometheusHandle) {
    let recorder = PrometheusBuilder::new().build_recorder();
    let recorded = recorder.handle();
    let load = move || {
        // For as long as the thread of the engine lives, which is here.
        let recorder: &'static _ = Box::leak(Box::new(recorder));
        std::mem::forget(metrics::set_default_local_recorder(recorder));
        let mut target = Box::new(target);
        let probe = probe(target.as_mut())?;
        Ok(Loaded {
            target,
            probe,
            draft,
            text: Box::new(letters),
            eos_token_ids: vec![eos],
        })
    };
    let (handle, thread) = start(options, load).expect("a thread can be started");
    wait_until(|| handle.status().phase == Phase::Ready);
    (handle, thread, recorded)
}

/// The value of a series.
fn value(recorded: &PrometheusHandle, series: &str) -> f64 {
    let text = recorded.render();
    let line = text.lines().find_map(|line| line.strip_prefix(series));
    line.map_or(0.0, |value| value.trim().parse().expect("a number"))
}

fn wait_until(condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(
            Instant::now() < deadline,
            "the condition did not come true in time"
        );
        std::thread::yield_now();
    }
}

fn request(prompt: &[u32], max_tokens: usize) -> Request {
    Request {
        id: "test".to_owned(),
        caller: "caller".into(),
        arrived: Instant::now(),
        trace: Trace::default(),
        prompt: prompt.to_vec(),
        max_tokens,
        sampling: Sampling {
            temperature: 0.0,
            ..Sampling::default()
        },
        seed: 0,
        stop: Vec::new(),
        ignore_eos: false,
        logprobs: None,
        prompt_logprobs: None,
        speculative: false,
    }
}

/// Everything a caller was told.
#[derive(Clone, Debug, Default, PartialEq)]
struct Answer {
    ids: Vec<u32>,
    text: String,
    logprobs: Vec<TokenLogprobs>,
    prompt_logprobs: Option<Vec<TokenLogprobs>>,
    end: Option<Result<(FinishReason, Usage), EngineError>>,
}

fn collect(mut events: UnboundedReceiver<Event>) -> Answer {
    let mut answer = Answer::default();
    while let Some(event) = events.blocking_recv() {
        assert!(answer.end.is_none(), "{event:?} after the end");
        match event {
            Event::Prompt(logprobs) => answer.prompt_logprobs = Some(logprobs),
            Event::Token { id, text, logprobs } => {
                answer.ids.push(id);
                answer.text += &text;
                answer.logprobs.extend(logprobs);
            }
            Event::Finished {
                reason,
                text,
                usage,
            } => {
                answer.text += &text;
                answer.end = Some(Ok((reason, usage)));
            }
            Event::Failed(error) => answer.end = Some(Err(error)),
        }
    }
    answer
}

/// What the engine must answer: one token after the other, from the whole history each time.
fn simulate(request: &Request) -> Answer {
    simulate_until(request, EOS)
}

fn simulate_until(request: &Request, eos: u32) -> Answer {
    let mut answer = Answer::default();
    let mut tokens = request.prompt.clone();
    if let Some(top) = request.prompt_logprobs {
        let score = |position: usize| {
            logprobs(
                &FakeTarget::logits_after(&tokens[..position]),
                tokens[position],
                top,
            )
            .expect("finite")
        };
        answer.prompt_logprobs = Some((1..tokens.len()).map(score).collect());
    }
    let mut reason = FinishReason::Length;
    while answer.ids.len() < request.max_tokens {
        let logits = FakeTarget::logits_after(&tokens);
        let context = Context {
            sampling: &request.sampling,
            seed: request.seed,
            tokens: &tokens,
            prompt_tokens: request.prompt.len(),
        };
        let id = Sampler::default().choose(&logits, context).expect("finite");
        answer.logprobs.extend(
            request
                .logprobs
                .map(|top| logprobs(&logits, id, top).expect("finite")),
        );
        tokens.push(id);
        answer.ids.push(id);
        if id == eos && !request.ignore_eos {
            reason = FinishReason::Stop;
            break;
        }
        answer.text.push(letter(id));
        if request
            .stop
            .iter()
            .any(|stop| answer.text.ends_with(stop.as_str()))
        {
            reason = FinishReason::Stop;
            break;
        }
    }
    let by_stop_string = reason == FinishReason::Stop && answer.ids.last() != Some(&eos);
    if !by_stop_string {
        answer.text.push('!');
    }
    let usage = Usage {
        prompt_tokens: request.prompt.len(),
        cached_tokens: 0,
        completion_tokens: answer.ids.len(),
        speculative: SpeculativeUsage::default(),
    };
    answer.end = Some(Ok((reason, usage)));
    answer
}

fn any_request() -> impl Strategy<Value = Request> {
    let prompt = proptest::collection::vec(0..VOCAB_SIZE as u32, 1..70);
    let stop = proptest::collection::vec("[A-Z]{1,2}", 0..3);
    let logprobs = || proptest::option::of(0usize..4);
    (
        prompt,
        0usize..30,
        prop_oneof![Just(0.0f32), Just(0.8f32)],
        any::<u64>(),
        stop,
        any::<bool>(),
        logprobs(),
        logprobs(),
    )
        .prop_map(
            |(
                prompt,
                max_tokens,
                temperature,
                seed,
                stop,
                ignore_eos,
                logprobs,
                prompt_logprobs,
            )| Request {
                sampling: Sampling {
                    temperature,
                    presence_penalty: 0.3,
                    frequency_penalty: 0.1,
                    ..Sampling::default()
                },
                seed,
                stop,
                ignore_eos,
                logprobs,
                prompt_logprobs,
                ..request(&prompt, max_tokens)
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn batches_chunks_and_slots_never_show_in_an_answer(
        requests in proptest::collection::vec(any_request(), 1..12),
        slots in 1usize..5,
        chunk in 1usize..40,
        disturbance in prop_oneof![
            Just((|_| 0.0) as fn(&crate::model::Batch) -> f32),
            Just((|batch| if batch.width == 1 { 0.5 } else { 0.0 }) as fn(&crate::model::Batch) -> f32),
            Just((|batch| if batch.width % 2 == 1 || batch.logit_width % 2 == 1 { 0.5 } else { 0.0 }) as fn(&crate::model::Batch) -> f32),
        ],
    ) {
        let mut target = FakeTarget::new(slots, 128);
        target.disturb(disturbance);
        let (handle, thread) = start_with(target, 64, chunk);
        let receivers: Vec<_> = requests.iter().map(|request| handle.submit(request.clone()).expect("fits")).collect();
        for (request, receiver) in requests.iter().zip(receivers) {
            prop_assert_eq!(collect(receiver), simulate(request));
        }
        handle.drain();
        thread.join().expect("the engine ends");
    }
}

#[test]
fn a_dropped_receiver_frees_its_slot_and_harms_nobody() {
    let (handle, thread) = start_with(FakeTarget::new(2, 4096), 8, 16);
    let endless = Request {
        ignore_eos: true,
        ..request(&[1, 2, 3], 4000)
    };
    let mut cancelled = handle.submit(endless.clone()).expect("fits");
    let other = Request {
        ignore_eos: true,
        ..request(&[4, 5], 300)
    };
    let receiver = handle.submit(other.clone()).expect("fits");
    assert!(cancelled.blocking_recv().is_some());
    drop(cancelled);
    let third = handle.submit(request(&[9], 5)).expect("fits");
    assert_eq!(collect(third), simulate(&request(&[9], 5)));
    assert_eq!(collect(receiver), simulate(&other));
    wait_until(|| handle.status().running == 0);
    handle.drain();
    thread.join().expect("the engine ends");
}

#[test]
fn one_logit_that_is_no_number_fails_its_request_only_and_nothing_of_it_is_sent() {
    let (handle, thread) = start_with(FakeTarget::new(4, 256).poisoned_by(&[7, 42]), 8, 16);
    let good = Request {
        ignore_eos: true,
        ..request(&[1, 2], 100)
    };
    let before = handle.submit(good.clone()).expect("fits");
    let bad = collect(handle.submit(request(&[7, 42], 5)).expect("fits"));
    assert_eq!(bad.end, Some(Err(EngineError::NonFiniteLogits)));
    assert!(bad.ids.is_empty());
    assert_eq!(collect(before), simulate(&good));
    assert_eq!(
        collect(handle.submit(good.clone()).expect("fits")),
        simulate(&good)
    );
    handle.drain();
    thread.join().expect("the engine ends");
}

#[test]
fn a_failed_or_panicking_pass_fails_its_requests_only() {
    for panics in [false, true] {
        let target = FakeTarget::new(4, 256).before(move |batch| {
            let poisoned = batch
                .rows
                .iter()
                .any(|row| row.start == 0 && row.tokens.first() == Some(&42));
            assert!(!(poisoned && panics), "poisoned");
            if poisoned {
                Err(ModelError::Batch("poisoned".to_owned()))
            } else {
                Ok(())
            }
        });
        let (handle, thread) = start_with(target, 8, 16);
        let good = Request {
            ignore_eos: true,
            ..request(&[1, 2], 100)
        };
        let before = handle.submit(good.clone()).expect("fits");
        let bad = collect(handle.submit(request(&[42, 7], 5)).expect("fits"));
        assert!(
            matches!(&bad.end, Some(Err(EngineError::StepFailed(text))) if text.contains("poisoned")),
            "{bad:?}"
        );
        assert!(bad.ids.is_empty());
        assert_eq!(collect(before), simulate(&good));
        assert_eq!(
            collect(handle.submit(good.clone()).expect("fits")),
            simulate(&good)
        );
        handle.drain();
        thread.join().expect("the engine ends");
    }
}

#[test]
fn requests_that_do_not_fit_are_refused_with_the_numbers() {
    let (handle, _thread) = start_with(FakeTarget::new(1, 16), 8, 16);
    let biased = |id| Request {
        sampling: Sampling {
            logit_bias: vec![(id, 1.0)],
            ..Sampling::default()
        },
        ..request(&[1], 1)
    };
    let cases = [
        (request(&[], 1), SubmitError::EmptyPrompt),
        (
            request(&[1; 16], 1),
            SubmitError::PromptTooLong {
                prompt_tokens: 16,
                limit_tokens: 15,
            },
        ),
        (
            request(&[1; 17], 0),
            SubmitError::PromptTooLong {
                prompt_tokens: 17,
                limit_tokens: 16,
            },
        ),
        (
            request(&[1; 10], 7),
            SubmitError::ContextExceeded {
                prompt_tokens: 10,
                max_tokens: 7,
                context_tokens: 16,
            },
        ),
        (
            request(&[1], usize::MAX),
            SubmitError::ContextExceeded {
                prompt_tokens: 1,
                max_tokens: usize::MAX,
                context_tokens: 16,
            },
        ),
        (
            request(&[64], 1),
            SubmitError::UnknownToken {
                id: 64,
                vocab_size: 64,
            },
        ),
        (
            biased(64),
            SubmitError::UnknownToken {
                id: 64,
                vocab_size: 64,
            },
        ),
    ];
    for (request, expected) in cases {
        assert_eq!(handle.submit(request).err(), Some(expected));
    }
    let full = Request {
        ignore_eos: true,
        ..request(&[1; 10], 6)
    };
    assert_eq!(
        collect(handle.submit(full.clone()).expect("fits exactly")),
        simulate(&full)
    );
    handle.stop();
}

#[test]
fn a_full_queue_refuses_and_cancelled_requests_give_their_place_back() {
    let (release, gate) = mpsc::channel::<()>();
    let passes = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&passes);
    let target = FakeTarget::new(1, 64).before(move |batch| {
        if batch.rows[0].tokens.first() == Some(&50) {
            counter.fetch_add(1, Ordering::SeqCst);
            let _ = gate.recv();
        }
        Ok(())
    });
    let (handle, thread) = start_with(target, 2, 16);
    let running = handle.submit(request(&[50], 1)).expect("fits");
    wait_until(|| passes.load(Ordering::SeqCst) == 1);
    let first = handle.submit(request(&[1], 3)).expect("waits");
    let second = handle.submit(request(&[2], 3)).expect("waits");
    assert_eq!(
        handle.submit(request(&[3], 3)).err(),
        Some(SubmitError::QueueFull {
            limit: 2,
            retry_after: Duration::from_secs(1)
        })
    );
    drop(first);
    let third = handle
        .submit(request(&[3], 3))
        .expect("the cancelled request gave its place back");
    release.send(()).expect("the pass waits");
    let answers: BTreeMap<u32, Answer> = [(50, running), (2, second), (3, third)]
        .into_iter()
        .map(|(id, receiver)| (id, collect(receiver)))
        .collect();
    assert_eq!(answers[&2], simulate(&request(&[2], 3)));
    assert_eq!(answers[&3], simulate(&request(&[3], 3)));
    handle.drain();
    thread.join().expect("the engine ends");
}

#[test]
fn draining_finishes_what_was_taken_and_stopping_answers_it() {
    let (handle, thread) = start_with(FakeTarget::new(1, 4096), 8, 16);
    let taken: Vec<_> = (0..3)
        .map(|id| handle.submit(request(&[id], 20)).expect("fits"))
        .collect();
    handle.drain();
    assert_eq!(
        handle.submit(request(&[9], 1)).err(),
        Some(SubmitError::NotReady)
    );
    for (id, receiver) in (0..3).zip(taken) {
        assert_eq!(collect(receiver), simulate(&request(&[id], 20)));
    }
    thread.join().expect("the engine ends");
    assert_eq!(handle.status().detail, "stopped");

    let (handle, thread) = start_with(FakeTarget::new(1, 1 << 20), 8, 16);
    let endless = Request {
        ignore_eos: true,
        ..request(&[1], 1 << 19)
    };
    let taken: Vec<_> = (0..3)
        .map(|_| handle.submit(endless.clone()).expect("fits"))
        .collect();
    handle.stop();
    for receiver in taken {
        assert_eq!(collect(receiver).end, Some(Err(EngineError::Stopped)));
    }
    thread.join().expect("the engine ends");
}

#[test]
fn a_model_that_cannot_be_loaded_leaves_a_reason() {
    let (handle, thread) = start(options(1, 1), || {
        Err(ModelError::Batch("no such graph".to_owned()))
    })
    .expect("a thread can be started");
    thread.join().expect("the engine ends");
    let status = handle.status();
    assert_eq!(status.phase, Phase::Failed);
    assert!(status.detail.contains("no such graph"), "{}", status.detail);
    assert_eq!(
        handle.submit(request(&[1], 1)).err(),
        Some(SubmitError::NotReady)
    );
}
