//! Sequences that start from rows of others: what is fed, what is copied, and that nothing of it shows in an answer.

use super::drafting::{
    BLOCK_SIZE, behaviours, drafter, endless, perfect, run, split, switching, with_drafter,
};
use super::rig::{Fed, Rig};
use super::*;
use crate::draft::fake::FakeDrafter;
use crate::engine::slots::SHARED_BLOCK_TOKENS;

fn caching(chunk: usize) -> EngineOptions {
    EngineOptions {
        prefix_cache: true,
        ..options(64, chunk)
    }
}

fn rig(slots: usize, parking_slots: usize, options: EngineOptions) -> Rig {
    let target = FakeTarget::new(slots, 4096).parking(parking_slots);
    let draft = Draft::Unavailable("none".to_owned());
    Rig::over(target, draft, options, Duration::ZERO)
}

/// `count` tokens that begin like no other prompt with another `kind`.
fn prompt(kind: u32, count: usize) -> Vec<u32> {
    (0..count as u32)
        .map(|index| (kind + index * kind) % 50)
        .collect()
}

fn cached_tokens(answer: &Answer) -> usize {
    match &answer.end {
        Some(Ok((_, usage))) => usage.cached_tokens,
        other => panic!("{other:?}"),
    }
}

/// The cached tokens of a request of `caller`, whose answer must be right.
fn ask(rig: &Rig, caller: &str, prompt: &[u32], max_tokens: usize) -> usize {
    let answer = collect(rig.submit(caller, prompt, max_tokens).expect("fits"));
    let cached = cached_tokens(&answer);
    let (answer, _) = split(answer);
    assert_eq!(answer, simulate(&rig.request(caller, prompt, max_tokens)));
    cached
}

fn fed(rig: &Rig) -> Vec<Fed> {
    lock(&rig.passes).iter().flatten().copied().collect()
}

#[test]
fn a_prompt_that_was_fed_before_is_not_fed_again_but_for_its_last_token() {
    let rig = rig(1, 0, caching(64));
    let first = prompt(1, 100);
    assert_eq!(ask(&rig, "a", &first, 5), 0);
    let before = fed(&rig).len();
    assert_eq!(ask(&rig, "a", &first, 1), 99);
    assert_eq!(
        fed(&rig)[before..],
        [Fed {
            start: 99,
            first: first[99],
            count: 1
        }]
    );
    // The next turn of a conversation holds the answer as well, all of which but its last token was fed.
    let answer = simulate(&rig.request("a", &first, 5)).ids;
    let next = [first, answer, prompt(7, 20)].concat();
    assert_eq!(ask(&rig, "a", &next, 3), 100);
    rig.end();
}

#[test]
fn what_another_caller_sent_counts_in_whole_blocks() {
    let rig = rig(1, 0, caching(64));
    let text = prompt(1, 3 * SHARED_BLOCK_TOKENS);
    ask(&rig, "a", &text, 2);
    let mut cached = Vec::new();
    for length in [63, 64, 65, 127, 150, 190] {
        let guess = [&text[..length], &[49, 49]].concat();
        cached.push(ask(&rig, "b", &guess, 1));
        ask(&rig, "a", &text, 2);
    }
    assert_eq!(cached, [0, 64, 64, 64, 128, 128]);
    rig.end();
}

#[test]
fn beginnings_that_would_be_overwritten_are_parked_and_the_least_used_goes_first() {
    let rig = rig(1, 2, caching(64));
    let [one, two, three] = [1, 2, 3].map(|kind| prompt(kind, 80));
    for prompt in [&one, &two, &three] {
        assert_eq!(ask(&rig, "a", prompt, 2), 0);
    }
    assert_eq!(ask(&rig, "a", &one, 2), 79);
    // For the third beginning the second one had to go, which was of use before it.
    assert_eq!(ask(&rig, "a", &two, 2), 0);
    assert_eq!(ask(&rig, "a", &three, 2), 79);
    rig.end();
}

#[test]
fn short_prompts_take_no_place_from_long_ones() {
    let rig = rig(1, 1, caching(64));
    let long = prompt(1, 80);
    ask(&rig, "a", &long, 2);
    for kind in 2..6 {
        ask(&rig, "a", &prompt(kind, 10), 2);
    }
    assert_eq!(ask(&rig, "a", &long, 2), 79);
    rig.end();
}

#[test]
fn completions_of_one_prompt_that_run_together_feed_it_once() {
    let rig = rig(4, 0, caching(16));
    let gated = rig.stop_at_a_pass();
    let text = prompt(1, 100);
    let receivers: Vec<_> = (0..4)
        .map(|_| rig.submit("a", &text, 3).expect("fits"))
        .collect();
    rig.go_on();
    for receiver in receivers {
        let (answer, _) = split(collect(receiver));
        assert_eq!(answer, simulate(&rig.request("a", &text, 3)));
    }
    drop(gated);
    let prompt_tokens: usize = fed(&rig)
        .iter()
        .filter(|fed| fed.start < 100 && fed.count > 1 || fed.start == 99)
        .map(|fed| fed.count)
        .sum();
    // Each feeds its last token, or the chunk that it is in, by itself.
    assert!(prompt_tokens <= 100 + 3 * 16, "{:?}", fed(&rig));
    rig.end();
}

#[test]
fn rows_are_not_used_where_they_may_differ_or_are_to_be_scored() {
    let text = prompt(1, 100);
    let mut target = FakeTarget::new(1, 256);
    // Kernels that depend on the width in a way that no rule helps against.
    target.disturb(|batch| batch.width as f32 / 100.0);
    let draft = || Draft::Unavailable("none".to_owned());
    let (handle, thread) = start_drafting(target, draft(), caching(16), EOS);
    for _ in 0..2 {
        let answer = run(&handle, &request(&text, 2));
        assert_eq!(cached_tokens(&answer), 0);
    }
    handle.drain();
    thread.join().expect("the engine ends");

    let (handle, thread) = start_drafting(FakeTarget::new(1, 256), draft(), caching(16), EOS);
    for prompt_logprobs in [None, Some(2)] {
        let request = Request {
            prompt_logprobs,
            ..request(&text, 2)
        };
        assert_eq!(run(&handle, &request), simulate(&request));
    }
    handle.drain();
    thread.join().expect("the engine ends");
}

#[test]
fn a_request_that_failed_leaves_nothing_to_build_upon() {
    let failing = Arc::new(AtomicUsize::new(usize::MAX));
    let target = {
        let failing = Arc::clone(&failing);
        FakeTarget::new(1, 256).before(move |batch| {
            if batch.rows[0].start >= failing.load(Ordering::SeqCst) {
                return Err(ModelError::Batch("failing".to_owned()));
            }
            Ok(())
        })
    };
    let draft = Draft::Unavailable("none".to_owned());
    let (handle, thread) = start_drafting(target, draft, caching(16), EOS);
    let request = request(&prompt(1, 100), 2);
    failing.store(64, Ordering::SeqCst);
    let failed = run(&handle, &request);
    assert!(matches!(failed.end, Some(Err(EngineError::StepFailed(_)))));
    failing.store(usize::MAX, Ordering::SeqCst);
    assert_eq!(run(&handle, &request), simulate(&request));
    handle.drain();
    thread.join().expect("the engine ends");
}

#[test]
fn observers_see_the_rows_that_are_held() {
    let rig = rig(1, 1, caching(64));
    ask(&rig, "a", &prompt(1, 80), 3);
    let rows = || rig.handle.status().kv_rows;
    // The last token was never fed.
    wait_until(|| rows().kept == 82);
    assert_eq!((rows().capacity, rows().running), (2 * 4096, 0));
    assert_eq!(rig.handle.status().slots, 1);
    rig.end();
}

#[test]
fn a_draft_proposes_the_same_from_rows_that_were_copied() {
    let conversations = [prompt(1, 90), prompt(2, 70), prompt(1, 60), prompt(2, 130)];
    let usages = [false, true].map(|prefix_cache| {
        let options = EngineOptions {
            prefix_cache,
            ..options(64, 16)
        };
        let mut usages = Vec::new();
        let drafter = FakeDrafter::new(1, 512, BLOCK_SIZE, perfect);
        let target = FakeTarget::new(1, 512).parking(2);
        with_drafter(target, drafter, options, EOS, |handle| {
            let mut cached = 0;
            for text in &conversations {
                let mut text = text.clone();
                for _ in 0..3 {
                    let request = endless(&text, 23);
                    let answer = run(handle, &request);
                    cached += cached_tokens(&answer);
                    let (answer, usage) = split(answer);
                    assert_eq!(answer, simulate(&request));
                    usages.push(usage);
                    text = [text, answer.ids, prompt(5, 9)].concat();
                }
            }
            assert_eq!(cached > 500, prefix_cache, "{cached}");
        });
        usages
    });
    assert_eq!(usages[0], usages[1]);
}

/// A request whose prompt begins like those of others.
fn related_request() -> impl Strategy<Value = Request> {
    let tail = proptest::collection::vec(0..VOCAB_SIZE as u32, 0..6);
    (any_request(), 1u32..4, 1usize..90, tail, any::<bool>()).prop_map(
        |(request, kind, length, tail, is_other)| {
            let mut text = prompt(kind, length);
            text.extend(tail);
            Request {
                prompt: text,
                caller: if is_other { "a" } else { "b" }.into(),
                // Scoring a prompt is rare, and leaves nothing to reuse.
                prompt_logprobs: request.prompt_logprobs.filter(|&top| top == 0),
                ..request
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]
    #[test]
    fn no_row_of_another_sequence_shows_in_an_answer(
        requests in proptest::collection::vec((related_request(), any::<bool>(), 0u8..6), 1..24),
        slots in 1usize..4,
        parking_slots in 0usize..3,
        chunk in 1usize..40,
        behaviour in behaviours(),
        period in prop_oneof![Just(usize::MAX), 1usize..20],
        even in any::<bool>(),
        adaptive_width in any::<bool>(),
        seed: u64,
    ) {
        let mut target = FakeTarget::new(slots, 128).parking(parking_slots);
        if even {
            target.disturb(|batch| if batch.width % 2 == 1 || batch.logit_width % 2 == 1 { 0.5 } else { 0.0 });
        }
        let (target, engine) = switching(target, period);
        let drafter = drafter(slots, behaviour, seed);
        let options = EngineOptions { adaptive_width, ..caching(chunk) };
        with_drafter(target, drafter, options, EOS, |handle| {
            engine.get_or_init(|| handle.clone());
            let mut waiting = Vec::new();
            for (request, speculative, fate) in requests {
                let request = Request { speculative, ..request };
                let mut receiver = handle.submit(request.clone()).expect("fits");
                match fate {
                    // Some callers leave at once, some after the first they hear, and some let nobody run beside them.
                    0 => drop(receiver),
                    1 => drop(receiver.blocking_recv()),
                    2 => check(&request, collect(receiver)),
                    _ => waiting.push((request, receiver)),
                }
            }
            for (request, receiver) in waiting {
                check(&request, collect(receiver));
            }
        });
    }
}

fn check(request: &Request, answer: Answer) {
    let cached = cached_tokens(&answer);
    assert!(cached < request.prompt.len());
    assert!(cached == 0 || request.prompt_logprobs.is_none());
    let (answer, usage) = split(answer);
    assert_eq!(answer, simulate(request));
    assert!(usage.accepted_tokens <= usage.drafted_tokens);
}
