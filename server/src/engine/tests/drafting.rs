//! Drafting over a fake target and a scripted drafter: whatever is proposed, the answer is the one without a draft.

use std::sync::OnceLock;

use super::rig::{Rig, SECOND};
use super::*;
use crate::draft::fake::{FakeDrafter, Violations};
use crate::draft::{DraftError, Drafter};

pub const BLOCK_SIZE: usize = 5;

/// The target's greedy continuation.
fn continuation(context: &[u32], anchor: u32, count: usize) -> Vec<u32> {
    let mut tokens = [context, &[anchor]].concat();
    for _ in 0..count {
        let logits = FakeTarget::logits_after(&tokens);
        let best = logits
            .iter()
            .enumerate()
            .max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(&a.0)))
            .expect("there are logits");
        tokens.push(best.0 as u32);
    }
    tokens.split_off(context.len() + 1)
}

pub fn perfect(context: &[u32], anchor: u32, count: usize) -> Result<Vec<u32>, DraftError> {
    Ok(continuation(context, anchor, count))
}

fn options(chunk: usize, draft_block_size: Option<usize>) -> EngineOptions {
    EngineOptions {
        draft_block_size,
        ..super::options(64, chunk)
    }
}

fn speculative(request: Request) -> Request {
    Request {
        speculative: true,
        ..request
    }
}

/// A long completion that nothing but its length ends.
pub fn endless(prompt: &[u32], max_tokens: usize) -> Request {
    speculative(Request {
        ignore_eos: true,
        ..request(prompt, max_tokens)
    })
}

/// Starts an engine with this drafter, runs `test`, ends it, and checks that the drafter saw nothing wrong.
pub fn with_drafter(
    target: FakeTarget,
    drafter: FakeDrafter,
    options: EngineOptions,
    eos: u32,
    test: impl FnOnce(&EngineHandle),
) {
    let violations: Violations = drafter.violations();
    let (handle, thread) = start_drafting(target, Draft::Loaded(Box::new(drafter)), options, eos);
    test(&handle);
    handle.drain();
    thread.join().expect("the engine ends");
    assert_eq!(violations.found(), Vec::<String>::new());
}

pub fn run(handle: &EngineHandle, request: &Request) -> Answer {
    collect(handle.submit(request.clone()).expect("fits"))
}

/// The answer without what depends on other requests, and what drafting did.
pub fn split(mut answer: Answer) -> (Answer, SpeculativeUsage) {
    let mut usage = SpeculativeUsage::default();
    if let Some(Ok((_, found))) = &mut answer.end {
        usage = std::mem::take(&mut found.speculative);
        found.cached_tokens = 0;
    }
    (answer, usage)
}

#[test]
fn a_perfect_draft_is_accepted_whole_and_the_answer_is_the_same() {
    let request = endless(&[1, 2, 3], 41);
    let drafter = FakeDrafter::new(2, 128, BLOCK_SIZE, perfect);
    with_drafter(
        FakeTarget::new(2, 128),
        drafter,
        options(16, None),
        EOS,
        |handle| {
            let (answer, usage) = split(run(handle, &request));
            assert_eq!(answer, simulate(&request));
            // One token comes with the prompt, each step gives a whole block.
            let expected = SpeculativeUsage {
                drafted_tokens: 32,
                accepted_tokens: 32,
                steps: 8,
            };
            assert_eq!(usage, expected);
        },
    );
}

#[test]
fn tokens_that_were_sent_before_a_fault_in_their_block_are_counted() {
    let prompt = [1, 2, 3];
    let ids = simulate(&endless(&prompt, 3)).ids;
    let target = FakeTarget::new(1, 128).poisoned_by(&[&prompt, &*ids].concat());
    let drafter = FakeDrafter::new(1, 128, BLOCK_SIZE, perfect);
    let draft = Draft::Loaded(Box::new(drafter));
    let (handle, thread, recorded) = start_recorded(target, draft, options(16, None), EOS);
    let answer = run(&handle, &endless(&prompt, 41));
    assert_eq!(answer.end, Some(Err(EngineError::NonFiniteLogits)));
    assert_eq!(answer.ids, ids);
    handle.drain();
    thread.join().expect("the engine ends");
    let counted = value(&recorded, "outrider_generated_tokens_total");
    assert_eq!(counted, ids.len() as f64);
}

#[test]
fn a_narrower_block_size_is_kept_to() {
    let request = endless(&[1, 2, 3], 41);
    let drafter = FakeDrafter::new(1, 128, BLOCK_SIZE, perfect);
    with_drafter(
        FakeTarget::new(1, 128),
        drafter,
        options(16, Some(3)),
        EOS,
        |handle| {
            let (answer, usage) = split(run(handle, &request));
            assert_eq!(answer, simulate(&request));
            assert_eq!((usage.drafted_tokens, usage.steps), (26, 13));
            assert_eq!(
                handle
                    .status()
                    .speculation
                    .and_then(|status| status.block_size),
                Some(3)
            );
        },
    );
}

#[test]
fn every_end_at_every_position_of_an_accepted_block_gives_the_same_answer() {
    let prompt = [7, 8];
    let free = simulate(&endless(&prompt, 24)).ids;
    for position in 0..free.len() {
        let id = free[position];
        let is_first = !free[..position].contains(&id);
        // The end-of-sequence token, where no earlier token is the same one.
        let by_eos = is_first.then(|| (speculative(request(&prompt, 24)), id));
        // A stop string of one and of two tokens.
        let mut by_text = Vec::new();
        for length in 1..=2 {
            let first = (position + 1).saturating_sub(length);
            let text: String = free[first..=position]
                .iter()
                .map(|&id| letter(id))
                .collect();
            by_text.push((
                speculative(Request {
                    stop: vec![text],
                    ..request(&prompt, 24)
                }),
                u32::MAX,
            ));
        }
        let by_length = (speculative(request(&prompt, position + 1)), u32::MAX);
        for (request, eos) in by_eos.into_iter().chain(by_text).chain([by_length]) {
            let drafter = FakeDrafter::new(1, 128, BLOCK_SIZE, perfect);
            with_drafter(
                FakeTarget::new(1, 128),
                drafter,
                options(16, None),
                eos,
                |handle| {
                    let (answer, usage) = split(run(handle, &request));
                    assert_eq!(
                        answer,
                        simulate_until(&request, eos),
                        "{request:?} with end token {eos}"
                    );
                    assert!(usage.accepted_tokens < answer.ids.len().max(1), "{usage:?}");
                    assert!(
                        answer.ids.len() <= 2 || usage.steps > 0,
                        "nothing was drafted: {request:?}"
                    );
                },
            );
        }
    }
}

#[test]
fn a_wrong_token_at_any_position_ends_what_is_accepted() {
    let request = endless(&[5], 31);
    // Of the 30 tokens behind the first one, a step gives one more than it accepts; a lone last token is not drafted.
    for (wrong, steps) in [29, 15, 10, 8].into_iter().enumerate() {
        let script = move |context: &[u32], anchor, count| {
            let mut tokens = continuation(context, anchor, count);
            if let Some(token) = tokens.get_mut(wrong) {
                *token = (*token + 1) % VOCAB_SIZE as u32;
            }
            Ok(tokens)
        };
        let drafter = FakeDrafter::new(1, 64, BLOCK_SIZE, script);
        with_drafter(
            FakeTarget::new(1, 64),
            drafter,
            options(16, None),
            EOS,
            |handle| {
                let (answer, usage) = split(run(handle, &request));
                assert_eq!(answer, simulate(&request));
                assert_eq!(usage.steps, steps, "wrong at {wrong}");
            },
        );
    }
}

#[test]
fn a_request_or_the_switch_turns_drafting_off() {
    let drafter = FakeDrafter::new(1, 64, BLOCK_SIZE, perfect);
    with_drafter(
        FakeTarget::new(1, 64),
        drafter,
        options(16, None),
        EOS,
        |handle| {
            let plain = Request {
                speculative: false,
                ..endless(&[1], 20)
            };
            assert_eq!(
                split(run(handle, &plain)),
                (simulate(&plain), SpeculativeUsage::default())
            );
            assert_eq!(
                handle.status().speculation.map(|status| status.drafting),
                Some(Drafting::On)
            );
            handle.set_speculation(false).expect("there is a draft");
            assert_eq!(
                handle.status().speculation.map(|status| status.drafting),
                Some(Drafting::Off)
            );
            let request = endless(&[1], 20);
            assert_eq!(
                split(run(handle, &request)),
                (simulate(&request), SpeculativeUsage::default())
            );
            handle.set_speculation(true).expect("there is a draft");
            let (answer, usage) = split(run(handle, &request));
            assert_eq!(answer, simulate(&request));
            assert!(usage.accepted_tokens > 0);
        },
    );
}

#[test]
fn without_a_draft_the_switch_says_why() {
    let (handle, thread) = start_with(FakeTarget::new(1, 64), 8, 16);
    assert_eq!(
        handle.set_speculation(true),
        Err(SpeculationError::Unavailable("none".to_owned()))
    );
    assert_eq!(handle.set_speculation(false), Ok(()));
    let status = handle.status().speculation.expect("the model is loaded");
    assert_eq!(
        (status.drafting, status.detail.as_str()),
        (Drafting::Unavailable, "none")
    );
    let request = endless(&[1], 20);
    assert_eq!(run(&handle, &request), simulate(&request));
    handle.drain();
    thread.join().expect("the engine ends");
}

/// A target that turns the switch of its engine over before every `period`-th pass.
pub fn switching(target: FakeTarget, period: usize) -> (FakeTarget, Arc<OnceLock<EngineHandle>>) {
    let engine = Arc::new(OnceLock::<EngineHandle>::new());
    let handle = Arc::clone(&engine);
    let mut passes = 0;
    let target = target.before(move |_| {
        if let Some(handle) = handle.get() {
            passes += 1;
            if usize::is_multiple_of(passes, period) {
                let on = (passes / period).is_multiple_of(2);
                handle.set_speculation(on).expect("there is a draft");
            }
        }
        Ok(())
    });
    (target, engine)
}

#[test]
fn a_switch_in_mid_answer_changes_nothing_and_drafting_resumes() {
    for (period, chunk) in [(1, 16), (2, 3), (3, 1), (9, 5), (13, 64)] {
        let (target, engine) = switching(FakeTarget::new(3, 256), period);
        let drafter = FakeDrafter::new(3, 256, BLOCK_SIZE, perfect);
        with_drafter(target, drafter, options(chunk, None), EOS, |handle| {
            engine.get_or_init(|| handle.clone());
            let requests = [
                endless(&[1; 20], 150),
                endless(&[2, 9], 60),
                endless(&[3], 99),
            ];
            let mut steps = 0;
            let receivers = requests
                .each_ref()
                .map(|request| handle.submit(request.clone()).expect("fits"));
            for (request, receiver) in requests.iter().zip(receivers) {
                let (answer, usage) = split(collect(receiver));
                assert_eq!(answer, simulate(request));
                steps += usage.steps;
            }
            // Switched in almost every pass nothing may ever be drafted and checked; otherwise drafting comes back again and again.
            assert!(period < 5 || steps > 6, "period {period}: {steps} steps");
        });
    }
}

#[test]
fn failing_drafts_are_suspended_and_tried_again() {
    for panics in [false, true] {
        let mut passes = 0;
        let script = move |context: &[u32], anchor, count| {
            passes += 1;
            assert!(!panics || passes > 4, "broken");
            if passes <= 4 {
                return Err(DraftError::Batch("broken".to_owned()));
            }
            perfect(context, anchor, count)
        };
        // Long enough for two suspensions, of 64 and 128 steps.
        let request = endless(&[1, 2], 400);
        let drafter = FakeDrafter::new(1, 512, BLOCK_SIZE, script);
        let (target, engine) = (
            FakeTarget::new(1, 512),
            Arc::new(OnceLock::<EngineHandle>::new()),
        );
        let seen = Arc::new(Mutex::new(Vec::new()));
        let target = {
            let (engine, seen) = (Arc::clone(&engine), Arc::clone(&seen));
            target.before(move |_| {
                if let Some(status) = engine.get().and_then(|engine| engine.status().speculation) {
                    let mut seen = lock(&seen);
                    if seen.last() != Some(&status.drafting) {
                        seen.push(status.drafting);
                    }
                }
                Ok(())
            })
        };
        with_drafter(target, drafter, options(16, None), EOS, |handle| {
            engine.get_or_init(|| handle.clone());
            let (answer, usage) = split(run(handle, &request));
            assert_eq!(answer, simulate(&request));
            // Three failures, 64 steps, one more failure, 128 steps; the rest is drafted.
            assert_eq!(
                *lock(&seen),
                [
                    Drafting::On,
                    Drafting::Suspended,
                    Drafting::On,
                    Drafting::Suspended,
                    Drafting::On
                ]
            );
            assert!((30..50).contains(&usage.steps), "{usage:?}");
        });
    }
}

#[test]
fn the_failure_that_suspends_drafting_is_counted_as_one() {
    let broken = |_: &[u32], _, _| Err(DraftError::Batch("broken".to_owned()));
    let draft = Draft::Loaded(Box::new(FakeDrafter::new(1, 128, BLOCK_SIZE, broken)));
    let (handle, thread, recorded) =
        start_recorded(FakeTarget::new(1, 128), draft, options(16, None), EOS);
    run(&handle, &endless(&[1, 2], 20));
    handle.drain();
    thread.join().expect("the engine ends");
    let plain = |cause| {
        value(
            &recorded,
            &format!("outrider_plain_steps_total{{cause=\"{cause}\"}}"),
        )
    };
    // The first pass fails behind the prompt, which has no step of its own to count; the third one suspends drafting.
    assert_eq!((plain("draft_error"), plain("suspended")), (2.0, 17.0));
}

#[test]
fn a_sequence_beyond_the_drafts_context_goes_on_plain() {
    let drafter = FakeDrafter::new(2, 48, BLOCK_SIZE, perfect);
    with_drafter(
        FakeTarget::new(2, 128),
        drafter,
        options(16, None),
        EOS,
        |handle| {
            let crosses = endless(&[1; 20], 60);
            let (answer, usage) = split(run(handle, &crosses));
            assert_eq!(answer, simulate(&crosses));
            assert!((20..=28).contains(&usage.accepted_tokens), "{usage:?}");
            let starts_beyond = endless(&[1; 48], 20);
            assert_eq!(
                split(run(handle, &starts_beyond)),
                (simulate(&starts_beyond), SpeculativeUsage::default())
            );
        },
    );
}

#[test]
fn proposals_that_stop_short_are_taken_as_far_as_they_go() {
    let mut passes = 0;
    let script = move |context: &[u32], anchor, count: usize| {
        passes += 1;
        Ok(continuation(context, anchor, count.min(passes % 4)))
    };
    let request = endless(&[1], 90);
    let drafter = FakeDrafter::new(1, 128, BLOCK_SIZE, script);
    with_drafter(
        FakeTarget::new(1, 128),
        drafter,
        options(16, None),
        EOS,
        |handle| {
            let (answer, usage) = split(run(handle, &request));
            assert_eq!(answer, simulate(&request));
            assert_eq!(usage.drafted_tokens, usage.accepted_tokens);
            assert!(usage.steps > 10);
        },
    );
}

#[test]
fn a_draft_that_never_pays_is_left_alone_and_taken_up_again_without_a_gap() {
    // Wrong for the first half of the answer, right after it.
    let script = |context: &[u32], anchor, count| {
        let mut tokens = continuation(context, anchor, count);
        if context.len() < 600 {
            for token in &mut tokens {
                *token = (*token + 1) % VOCAB_SIZE as u32;
            }
        }
        Ok(tokens)
    };
    let request = endless(&[1, 2], 1600);
    let drafter = FakeDrafter::new(1, 2048, BLOCK_SIZE, script);
    let options = EngineOptions {
        adaptive_width: true,
        ..options(16, None)
    };
    with_drafter(FakeTarget::new(1, 2048), drafter, options, EOS, |handle| {
        let (answer, usage) = split(run(handle, &request));
        assert_eq!(answer, simulate(&request));
        // The drafter of these tests notes every context row that is missing or wrong; here it matters that it was asked at all.
        assert!(usage.steps > 4, "{usage:?}");
        assert!(usage.steps < 1200, "{usage:?}");
    });
}

#[test]
fn sequences_that_begin_while_drafting_does_not_pay_do_without() {
    let slots = 4;
    // Never right, and far dearer than a pass of the target.
    let script = |context: &[u32], anchor, count| {
        std::thread::sleep(Duration::from_millis(2));
        let tokens = continuation(context, anchor, count);
        let wrong = |token: &u32| (token + 1) % VOCAB_SIZE as u32;
        Ok(tokens.iter().map(wrong).collect())
    };
    let drafter = FakeDrafter::new(slots, 2048, BLOCK_SIZE, script);
    let violations = drafter.violations();
    let options = EngineOptions {
        adaptive_width: true,
        ..options(16, None)
    };
    let draft = Draft::Loaded(Box::new(drafter));
    let rig = Rig::over(FakeTarget::new(slots, 2048), draft, options, SECOND / 1000);
    // All begin in the same step, however slowly they are submitted.
    let drafted = |tokens| {
        let gated = rig.stop_at_a_pass();
        let submit = |first| rig.handle.submit(endless(&[first, 2], tokens));
        let receivers: Vec<_> = (1..=slots as u32)
            .map(|first| submit(first).expect("fits"))
            .collect();
        rig.go_on();
        drop(gated);
        let usages = receivers
            .into_iter()
            .map(|receiver| split(collect(receiver)).1);
        usages.filter(|usage| usage.drafted_tokens > 0).count()
    };
    assert_eq!(drafted(400), slots, "each takes part in finding out");
    // The first is alone when it begins, which says nothing about four; the others rest to their end, however long.
    assert_eq!(drafted(1600), 1);
    rig.end();
    assert_eq!(violations.found(), Vec::<String>::new());
}

/// How a drafter behaves in a property test.
#[derive(Clone, Copy, Debug)]
pub struct Behaviour {
    /// Of 8 proposed tokens, how many are wrong.
    wrong: u64,
    /// Of 16 passes, how many fail.
    failing: u64,
    block_size: usize,
    context_tokens: usize,
}

pub fn behaviours() -> impl Strategy<Value = Behaviour> {
    (
        0u64..=8,
        prop_oneof![Just(0u64), 0u64..6],
        2usize..10,
        prop_oneof![Just(128usize), 10usize..90],
    )
        .prop_map(|(wrong, failing, block_size, context_tokens)| Behaviour {
            wrong,
            failing,
            block_size,
            context_tokens,
        })
}

pub fn drafter(slots: usize, behaviour: Behaviour, mut state: u64) -> FakeDrafter {
    let mut random = move |below: u64| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let script = move |context: &[u32], anchor, count| {
        if random(16) < behaviour.failing {
            assert!(random(2) == 0, "a panicking drafter");
            return Err(DraftError::Batch("a failing drafter".to_owned()));
        }
        let mut tokens = continuation(context, anchor, count);
        for token in &mut tokens {
            if random(8) < behaviour.wrong {
                *token = random(VOCAB_SIZE as u64) as u32;
            }
        }
        Ok(tokens)
    };
    FakeDrafter::new(
        slots,
        behaviour.context_tokens,
        behaviour.block_size,
        script,
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(80))]
    #[test]
    fn no_drafter_no_switch_and_no_neighbour_shows_in_an_answer(
        requests in proptest::collection::vec((any_request(), any::<bool>(), 0u8..5), 1..12),
        slots in 1usize..5,
        chunk in 1usize..40,
        behaviour in behaviours(),
        period in prop_oneof![Just(usize::MAX), 1usize..20],
        even in any::<bool>(),
        adaptive_width in any::<bool>(),
        seed: u64,
    ) {
        let mut target = FakeTarget::new(slots, 128);
        if even {
            target.disturb(|batch| if batch.width % 2 == 1 || batch.logit_width % 2 == 1 { 0.5 } else { 0.0 });
        }
        let (target, engine) = switching(target, period);
        let drafter = drafter(slots, behaviour, seed);
        let options = EngineOptions { adaptive_width, ..options(chunk, None) };
        with_drafter(target, drafter, options, EOS, |handle| {
            engine.get_or_init(|| handle.clone());
            let mut waiting = Vec::new();
            for (request, speculative, fate) in requests {
                let request = Request { speculative, ..request };
                let receiver = handle.submit(request.clone()).expect("fits");
                // Some callers leave at once: what they leave behind in a slot must not show in the next sequence.
                if fate > 0 {
                    waiting.push((request, receiver));
                }
            }
            for (request, receiver) in waiting {
                let (answer, usage) = split(collect(receiver));
                assert_eq!(answer, simulate(&request));
                assert!(usage.accepted_tokens <= usage.drafted_tokens);
                assert!(usage.accepted_tokens <= answer.ids.len());
            }
        });
    }
}

#[test]
fn the_drafter_of_these_tests_takes_note_of_a_wrong_context() {
    let mut drafter = FakeDrafter::new(1, 8, 4, perfect);
    let violations = drafter.violations();
    let taps = crate::model::Taps {
        values: &[4.0, 1.0],
        rows: 1,
        width: 1,
        size: 2,
    };
    let row = crate::draft::DraftRow {
        context_start: 0,
        context_rows: 1,
        block: None,
    };
    let batch = crate::draft::DraftBatch {
        first_slot: 0,
        rows: vec![row],
    };
    drafter
        .draft(&batch, taps)
        .expect("the script is not asked");
    assert_eq!(violations.found(), ["a tap of position 1 at 0"]);
}
