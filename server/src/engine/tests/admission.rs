//! Who gets a place and a slot, who waits for how long, and when a slot is free again; time is a clock that the tests move on.

use super::rig::{Fed, GATED, Rig, SECOND};
use super::*;

fn limits(queue_capacity: usize) -> EngineOptions {
    options(queue_capacity, 16)
}

#[test]
fn a_free_slot_goes_to_the_caller_with_the_fewest_running_and_then_by_turns() {
    let rig = Rig::start(2, limits(8), Duration::ZERO);
    let gated = rig.stop_at_a_pass();
    let waiting = [("a", 1), ("a", 2), ("b", 3), ("c", 4)].map(|(caller, first)| {
        rig.submit(caller, &[first], if first == 1 { 40 } else { 5 })
            .expect("fits")
    });
    rig.go_on();
    for (receiver, first) in waiting.into_iter().zip(1..) {
        let expected = rig.request("", &[first], if first == 1 { 40 } else { 5 });
        assert_eq!(collect(receiver), simulate(&expected));
    }
    // The first of a, then those who have none running while a has one, then a again.
    assert_eq!(rig.begun(), [1, 3, 4, 2]);
    drop(gated);
    rig.end();
}

#[test]
fn callers_who_have_as_many_running_take_turns_however_many_of_theirs_wait() {
    let rig = Rig::start(1, limits(8), Duration::ZERO);
    let gated = rig.stop_at_a_pass();
    let waiting = [("a", 1), ("a", 2), ("a", 3), ("b", 4), ("a", 5), ("b", 6)]
        .map(|(caller, first)| rig.submit(caller, &[first], 3).expect("fits"));
    rig.go_on();
    for receiver in waiting {
        assert!(matches!(collect(receiver).end, Some(Ok(_))));
    }
    assert_eq!(rig.begun(), [1, 4, 2, 6, 3, 5]);
    drop(gated);
    rig.end();
}

#[test]
fn a_caller_who_comes_back_is_not_behind_one_who_had_a_slot_meanwhile() {
    let mut queue = Queue::default();
    let mut receivers = Vec::new();
    let mut join = |queue: &mut Queue, caller: &str, first: u32| {
        let (events, receiver) = unbounded_channel();
        receivers.push(receiver);
        let request = Request {
            caller: caller.into(),
            ..request(&[first], 1)
        };
        let since = Instant::now();
        let waiting = Waiting {
            request,
            events,
            since,
        };
        queue.push(&mut vec![waiting], 64).expect("there is room");
    };
    for first in 1..=4 {
        join(&mut queue, "a", first);
    }
    join(&mut queue, "b", 5);
    let mut begun = Vec::new();
    for first in [None, None, Some(6), None, Some(7), None] {
        // The one of b that ran has ended, and one of a has the slot meanwhile.
        begun.extend(queue.next(|_| 0).map(|next| next.request.prompt[0]));
        if let Some(first) = first {
            join(&mut queue, "b", first);
        }
    }
    assert_eq!(begun, [1, 5, 2, 6, 3, 7]);
}

#[test]
fn completions_of_one_request_that_have_no_places_together_take_nobody_elses() {
    let rig = Rig::start(1, limits(4), Duration::ZERO);
    let gated = rig.stop_at_a_pass();
    let waiting = [1, 2, 3, 4].map(|first| rig.submit("a", &[first], 3).expect("fits"));
    let of_b = |count: u32| {
        let mut requests = (11..11 + count).map(|first| rig.request("b", &[first], 3));
        rig.handle.submit_all(&mut requests)
    };
    // A third one would leave a with fewer places than b.
    let refused = of_b(3).err();
    assert!(
        matches!(refused, Some((0, SubmitError::QueueFull { limit: 4, .. }))),
        "{refused:?}"
    );
    assert_eq!(rig.handle.status().waiting, 4);
    let taken = of_b(2).expect("as many for b as for a");
    rig.go_on();
    let ends = waiting.map(|receiver| collect(receiver).end);
    assert!(matches!(ends[..2], [Some(Ok(_)), Some(Ok(_))]), "{ends:?}");
    for end in &ends[2..] {
        assert!(
            matches!(end, Some(Err(EngineError::Displaced { .. }))),
            "{end:?}"
        );
    }
    for receiver in taken {
        assert!(matches!(collect(receiver).end, Some(Ok(_))));
    }
    drop(gated);
    rig.end();
}

#[test]
fn a_full_queue_is_shared_and_no_caller_is_pushed_below_an_equal_share() {
    let rig = Rig::start(1, limits(4), Duration::ZERO);
    let gated = rig.stop_at_a_pass();
    let is_full = |result: Result<_, SubmitError>| {
        assert!(matches!(
            result,
            Err(SubmitError::QueueFull { limit: 4, .. })
        ));
    };
    let mut greedy: Vec<_> = (1..5)
        .map(|first| rig.submit("greedy", &[first], 3).expect("fits"))
        .collect();
    is_full(rig.submit("greedy", &[9], 3));
    let mut modest = vec![rig.submit("modest", &[11], 3).expect("has no place yet")];
    modest.push(rig.submit("modest", &[12], 3).expect("has fewer places"));
    is_full(rig.submit("modest", &[13], 3));
    is_full(rig.submit("greedy", &[9], 3));
    // Two each: a third caller takes the place of the newest of all, and then there is nobody to take another one from.
    let third = rig.submit("third", &[21], 3).expect("has no place yet");
    is_full(rig.submit("third", &[22], 3));
    for displaced in greedy.drain(2..).chain(modest.drain(1..)) {
        let end = collect(displaced).end;
        assert!(
            matches!(end, Some(Err(EngineError::Displaced { .. }))),
            "{end:?}"
        );
    }
    rig.go_on();
    let rest = greedy.into_iter().chain(modest).chain([third]);
    for (receiver, first) in rest.zip([1, 2, 11, 21]) {
        assert_eq!(
            collect(receiver),
            simulate(&rig.request("", &[first], 3)),
            "{first}"
        );
    }
    drop(gated);
    rig.end();
}

#[test]
fn a_free_slot_is_a_place_before_a_step_hands_it_out() {
    let rig = Rig::start(2, limits(1), Duration::ZERO);
    // One of the slots runs, and the step does not end.
    let gated = rig.stop_at_a_pass();
    let taken = [1, 2].map(|first| rig.submit("a", &[first], 3).expect("fits"));
    assert!(matches!(
        rig.submit("a", &[3], 3),
        Err(SubmitError::QueueFull { limit: 1, .. })
    ));
    rig.go_on();
    for (receiver, first) in taken.into_iter().zip(1..) {
        let expected = simulate(&rig.request("", &[first], 3));
        assert_eq!(collect(receiver), expected, "{first}");
    }
    drop(gated);
    rig.end();
}

#[test]
fn a_request_without_a_slot_in_time_fails_and_one_with_a_slot_goes_on() {
    let mut options = limits(8);
    options.limits.queue_timeout = 5 * SECOND;
    let rig = Rig::start(1, options, Duration::ZERO);
    let mut running = rig.submit("a", &[1], 4000).expect("fits");
    assert!(running.blocking_recv().is_some());
    let waiting = rig.submit("b", &[2], 3).expect("fits");
    rig.hands.pass(4 * SECOND);
    let later = rig.submit("b", &[3], 3).expect("fits");
    rig.hands.pass(SECOND);
    assert_eq!(
        collect(waiting).end,
        Some(Err(EngineError::QueueTimeout {
            limit: 5 * SECOND,
            retry_after: SECOND
        }))
    );
    assert_eq!(rig.handle.status().running, 1);
    drop(running);
    assert_eq!(collect(later), simulate(&rig.request("", &[3], 3)));
    rig.end();
}

#[test]
fn a_request_that_takes_too_long_fails_and_its_slot_is_free() {
    let mut options = limits(8);
    options.limits.request_deadline = 5 * SECOND;
    let rig = Rig::start(1, options, Duration::ZERO);
    let mut running = rig.submit("a", &[1], 4000).expect("fits");
    assert!(running.blocking_recv().is_some());
    let waiting = rig.submit("a", &[2], 4000).expect("fits");
    let late = Request {
        arrived: rig.hands.now() + 4 * SECOND,
        ..rig.request("a", &[3], 3)
    };
    let late = rig.handle.submit(late).expect("fits");
    rig.hands.pass(5 * SECOND);
    let exceeded = Some(Err(EngineError::DeadlineExceeded { limit: 5 * SECOND }));
    assert_eq!(collect(running).end, exceeded);
    // The other one never had a slot.
    assert_eq!(collect(waiting).end, exceeded);
    assert_eq!(collect(late), simulate(&rig.request("", &[3], 3)));
    assert!(!rig.begun().contains(&2));
    rig.end();
}

#[test]
fn limits_that_are_set_hold_for_what_waits_and_runs() {
    let rig = Rig::start(1, limits(1), Duration::ZERO);
    let gated = rig.stop_at_a_pass();
    let first = rig.submit("a", &[1; 40], 4000).expect("fits");
    assert!(rig.submit("a", &[2], 3).is_err());
    let limits = EngineLimits {
        queue_capacity: 2,
        queue_timeout: 30 * SECOND,
        request_deadline: 20 * SECOND,
        prefill_chunk_tokens: 7,
    };
    rig.handle.set_limits(limits);
    assert_eq!(rig.handle.engine_limits(), limits);
    let second = rig.submit("a", &[2], 3).expect("two may wait");
    rig.go_on();
    wait_until(|| lock(&rig.passes).len() > 8);
    let chunks: Vec<_> = lock(&rig.passes)[1..7]
        .iter()
        .map(|pass| pass[0].count)
        .collect();
    assert_eq!(chunks, [7, 7, 7, 7, 7, 5]);
    rig.hands.pass(20 * SECOND);
    for receiver in [first, second] {
        assert_eq!(
            collect(receiver).end,
            Some(Err(EngineError::DeadlineExceeded { limit: 20 * SECOND }))
        );
    }
    drop(gated);
    rig.end();
}

#[test]
fn a_refused_caller_is_told_to_stay_away_for_as_long_as_the_queue_takes() {
    let rig = Rig::start(1, limits(2), 2 * SECOND);
    let refused = |waiting: usize| {
        let gated = rig.stop_at_a_pass();
        let receivers: Vec<_> = (0..waiting)
            .map(|_| rig.submit("a", &[1], 1).expect("fits"))
            .collect();
        let found = match rig.submit("a", &[1], 1) {
            Err(SubmitError::QueueFull { retry_after, .. }) => retry_after,
            other => panic!("{other:?}"),
        };
        rig.go_on();
        for receiver in receivers.into_iter().chain([gated]) {
            collect(receiver);
        }
        found
    };
    // Nothing is known yet.
    assert_eq!(refused(2), SECOND);
    // Every completion so far took one pass of two seconds; two wait, and the caller would be the third.
    assert_eq!(refused(2), 6 * SECOND);
    rig.handle.set_limits(EngineLimits {
        queue_capacity: 100,
        ..rig.handle.engine_limits()
    });
    assert_eq!(refused(100), 60 * SECOND);
    rig.end();
}

#[test]
fn a_long_prompt_holds_up_a_short_one_for_one_chunk_and_streams_for_none() {
    let rig = Rig::start(4, limits(8), Duration::ZERO);
    let mut stream = rig.submit("a", &[7], 4000).expect("fits");
    assert!(stream.blocking_recv().is_some());
    let gated = rig.stop_at_a_pass();
    let since = lock(&rig.passes).len();
    let long = rig.submit("a", &[1; 400], 2).expect("fits");
    let short = rig.submit("a", &[2; 5], 2).expect("fits");
    rig.go_on();
    assert_eq!(collect(short), simulate(&rig.request("", &[2; 5], 2)));
    assert_eq!(collect(long), simulate(&rig.request("", &[1; 400], 2)));
    drop((stream, gated));
    let passes = lock(&rig.passes).clone();
    let position = |of: &dyn Fn(&Fed) -> bool| {
        let found = passes[since..].iter().position(|pass| pass.iter().any(of));
        found.expect("there is such a pass")
    };
    let short_fed = position(&|row| row.start == 0 && row.first == 2);
    let second_chunk = position(&|row| row.start >= 16 && row.count > 1);
    assert!(short_fed < second_chunk, "{passes:?}");
    // Between two passes over the running streams no more is fed than the budget of a step.
    let mut fed = 0;
    for pass in &passes[since..] {
        if pass.iter().all(|row| row.count == 1) {
            fed = 0;
        } else {
            fed += pass.iter().map(|row| row.count).sum::<usize>();
            assert!(fed <= 16, "{passes:?}");
        }
    }
    rig.end();
}

#[test]
fn a_caller_that_leaves_gives_back_place_and_slot_within_one_step() {
    let rig = Rig::start(1, limits(8), Duration::ZERO);
    let gated = rig.submit("a", &[GATED], 4000).expect("fits");
    wait_until(|| lock(&rig.passes).len() == 1);
    let left = rig.submit("a", &[1], 5).expect("fits");
    let stays = rig.submit("a", &[2], 5).expect("fits");
    assert_eq!(rig.handle.status().waiting, 2);
    drop(left);
    assert_eq!(rig.handle.status().waiting, 1);
    drop(gated);
    rig.go_on();
    assert_eq!(collect(stays), simulate(&rig.request("", &[2], 5)));
    // The pass that was going on is the only one that the caller who left still had.
    let firsts: Vec<_> = lock(&rig.passes)
        .iter()
        .map(|pass| (pass[0].start, pass[0].first))
        .collect();
    assert_eq!(firsts[..2], [(0, GATED), (0, 2)]);
    rig.end();
}

#[test]
fn who_knows_that_a_completion_has_ended_never_sees_it_counted() {
    let (handle, thread) = start_with(FakeTarget::new(2, 64), 8, 16);
    for first in 0..200 {
        let receiver = handle.submit(request(&[first % 64], 2)).expect("fits");
        collect(receiver);
        let status = handle.status();
        assert_eq!((status.running, status.waiting), (0, 0));
    }
    handle.drain();
    thread.join().expect("the engine ends");
}

#[test]
fn times_are_counted_from_the_arrival_and_from_token_to_token() {
    let rig = Rig::start(1, limits(8), SECOND);
    // Three chunks of the prompt, the last of which gives the first of four tokens.
    let request = rig.request("a", &[1; 40], 4);
    collect(rig.handle.submit(request).expect("fits"));
    for (name, count, seconds) in [
        ("outrider_queue_wait_seconds", 1.0, 0.0),
        ("outrider_time_to_first_token_seconds", 1.0, 3.0),
        ("outrider_inter_token_seconds", 3.0, 3.0),
    ] {
        let found = ["count", "sum"].map(|part| value(&rig.recorded, &format!("{name}_{part}")));
        assert_eq!(found, [count, seconds], "{name}");
    }
    rig.end();
}

#[test]
fn failures_are_counted_by_cause() {
    let mut options = limits(1);
    options.limits.queue_timeout = SECOND;
    options.limits.request_deadline = 2 * SECOND;
    let rig = Rig::start(1, options, Duration::ZERO);
    let mut running = rig.submit("a", &[1], 4000).expect("fits");
    assert!(running.blocking_recv().is_some());
    let waiting = rig.submit("a", &[2], 4000).expect("fits");
    rig.hands.pass(SECOND);
    collect(waiting);
    rig.hands.pass(SECOND);
    collect(running);
    for cause in ["queue_timeout", "deadline_exceeded"] {
        let series = format!("outrider_completions_failed_total{{cause=\"{cause}\"}}");
        assert_eq!(value(&rig.recorded, &series), 1.0, "{cause}");
    }
    rig.end();
}
