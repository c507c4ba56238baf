//! `lossless` catches every fault, names its token, and takes nothing for a pass that is none.

use std::net::TcpListener;
use std::time::Duration;

use outrider_verify::lossless::compare::Aspect;
use outrider_verify::lossless::plan::Sampling;
use outrider_verify::lossless::report::{Class, ComparedBy, Report};
use outrider_verify::lossless::{self, Settings, Sides};
use outrider_verify::prompts::{built_in, spread};
use outrider_verify::report::Verdict;
use serde_json::Value;

use crate::service::{Behaviour, serve};
use crate::{connect, verify};

/// The default set against one service with a switch.
fn run(behaviour: Behaviour, settings: &Settings) -> Report {
    let service = connect(&serve(behaviour));
    let cases = spread(built_in(), 14);
    lossless::run(Sides::Switch(&service), &cases, settings, &|_, _| {})
}

#[test]
fn a_service_that_only_drafts_passes() {
    let report = run(Behaviour::default(), &Settings::default());
    assert_eq!(report.verdict, Verdict::Pass, "{report}");
    assert_eq!(report.compared_by, ComparedBy::TokenIds);
    assert!(report.differences.is_empty());
    // Nine scenarios of 14, greedy and seeded, and two of each once more with a stop string.
    let comparisons: usize = report.scenarios.iter().map(|row| row.comparisons).sum();
    assert_eq!(comparisons, 9 * (14 * 2 + 2), "{report}");
    assert!(report.compared_tokens > 20_000, "{report}");
    let drafting = report.candidate.drafting;
    assert_eq!(report.reference.drafting.speculative.drafted_tokens, 0);
    assert!(drafting.share() > 0.9, "{drafting:?}");
}

#[test]
fn one_wrong_draft_in_a_thousand_is_found_at_its_token() {
    let fake = serve(Behaviour {
        wrong_one_in: Some(1000),
        ..Behaviour::default()
    });
    let service = connect(&fake);
    let cases = spread(built_in(), 14);
    let report = lossless::run(
        Sides::Switch(&service),
        &cases,
        &Settings::default(),
        &|_, _| {},
    );
    assert_eq!(report.verdict, Verdict::Fail, "{report}");
    let faults = fake.faults.lock().unwrap();
    for difference in &report.differences {
        if difference.aspect != Aspect::Token {
            continue;
        }
        assert_eq!(difference.class, Class::Different);
        assert!(difference.reference_repeats, "{report}");
        let messages = &difference.candidate_request["messages"];
        let asked = if messages.is_array() {
            messages
        } else {
            &difference.candidate_request["prompt"]
        };
        let injected = (asked.to_string(), difference.position);
        assert!(
            faults.contains(&injected),
            "{injected:?} is no injected fault\n{report}"
        );
        let first = |ids: &Option<Vec<u64>>| ids.as_ref().unwrap()[0];
        let (right, wrong) = (
            first(&difference.reference.token_ids),
            first(&difference.candidate.token_ids),
        );
        assert_eq!(wrong, (right + 1) % 64);
        if difference.sampling == Sampling::Greedy {
            assert!(difference.margin.is_some(), "{report}");
        }
    }
}

#[test]
fn one_wrong_token_in_two_thousand_is_caught_in_at_least_99_of_100_runs() {
    let caught = (0..100).filter(|nonce| {
        let behaviour = Behaviour {
            wrong_one_in: Some(2000),
            nonce: *nonce,
            ..Behaviour::default()
        };
        run(behaviour, &Settings::default()).verdict == Verdict::Fail
    });
    let caught = caught.count();
    assert!(caught >= 99, "caught in {caught} of 100 runs");
}

#[test]
fn each_fault_of_drafting_is_named() {
    let check = |behaviour: Behaviour, sampling, aspect| {
        let settings = Settings::default();
        let report = run(behaviour.clone(), &settings);
        assert_eq!(report.verdict, Verdict::Fail, "{behaviour:?}\n{report}");
        for difference in &report.differences {
            assert_eq!(difference.aspect, aspect, "{behaviour:?}\n{report}");
            assert!(difference.reference_repeats);
            if let Some(sampling) = sampling {
                assert_eq!(difference.sampling, sampling, "{report}");
            }
        }
        report
    };
    let ignored = check(
        Behaviour {
            ignores_seed: true,
            ..Behaviour::default()
        },
        Some(Sampling::Seeded),
        Aspect::Token,
    );
    assert!(
        ignored
            .differences
            .iter()
            .all(|difference| !difference.candidate_repeats)
    );
    check(
        Behaviour {
            leaks_stop: true,
            ..Behaviour::default()
        },
        Some(Sampling::Stop),
        Aspect::StopString,
    );
    let miscounts = Behaviour {
        miscounts: true,
        ..Behaviour::default()
    };
    let miscounted = check(miscounts, None, Aspect::Usage);
    let difference = &miscounted.differences[0];
    assert_eq!(difference.reference.completion_tokens, Some(96));
    assert_eq!(difference.candidate.completion_tokens, Some(97));
}

#[test]
fn a_service_without_token_ids_is_compared_by_text() {
    let settings = Settings::default();
    let without = Behaviour {
        token_ids: false,
        ..Behaviour::default()
    };
    let report = run(without.clone(), &settings);
    assert_eq!(report.verdict, Verdict::Pass, "{report}");
    assert_eq!(report.compared_by, ComparedBy::Text);
    let wrong = Behaviour {
        wrong_one_in: Some(1000),
        ..without
    };
    let report = run(wrong, &settings);
    assert_eq!(report.verdict, Verdict::Fail, "{report}");
    let greedy = |sampling| sampling == Sampling::Greedy;
    let found = report
        .differences
        .iter()
        .find(|difference| greedy(difference.sampling));
    assert!(found.unwrap().margin.is_some(), "{report}");
}

#[test]
fn what_proves_nothing_is_inconclusive() {
    let check = |behaviour: Behaviour, settings: &Settings, part: &str| {
        let report = run(behaviour, settings);
        assert_eq!(report.verdict, Verdict::Inconclusive, "{report}");
        assert!(
            report.reasons.iter().any(|reason| reason.contains(part)),
            "{report}"
        );
    };
    let settings = Settings::default();
    let never_drafts = Behaviour {
        drafts: false,
        ..Behaviour::default()
    };
    check(never_drafts, &settings, "drafted 0 tokens for");
    let says_nothing = Behaviour {
        counts: false,
        ..Behaviour::default()
    };
    check(
        says_nothing.clone(),
        &settings,
        "does not say whether it drafted",
    );
    let no_switch = Behaviour {
        knows_switch: false,
        ..Behaviour::default()
    };
    check(
        no_switch,
        &settings,
        "although its requests switch drafting off",
    );
    let little = Settings {
        max_tokens: 8,
        ..Settings::default()
    };
    check(Behaviour::default(), &little, "at least 9211 are needed");
    let unsteady = Behaviour {
        unsteady_one_in: Some(1),
        ..Behaviour::default()
    };
    let few = Settings {
        min_compared_tokens: 1,
        ..Settings::default()
    };
    check(unsteady, &few, "does not repeat its own answer either");
    let told = Settings {
        assume_drafting: true,
        ..settings
    };
    assert_eq!(run(says_nothing, &told).verdict, Verdict::Pass);
}

#[test]
fn a_choice_closer_than_the_noise_is_a_near_tie_and_no_other() {
    let near = Behaviour {
        flips_below_nats: 0.01,
        noise_nats: 0.03,
        ..Behaviour::default()
    };
    let settings = Settings {
        samplings: vec![Sampling::Greedy],
        ..Settings::default()
    };
    let report = run(near.clone(), &settings);
    assert_eq!(report.verdict, Verdict::Fail, "{report}");
    assert!(report.differences.len() > 5, "{report}");
    for difference in report
        .differences
        .iter()
        .filter(|found| found.sampling == Sampling::Greedy)
    {
        assert_eq!(difference.class, Class::NearTie, "{report}");
        assert!(difference.margin.as_ref().unwrap().nats < report.noise.unwrap().nats);
    }
    // The same choices where the figures don't vary at all.
    let exact = Behaviour {
        noise_nats: 0.0,
        ..near
    };
    let report = run(exact, &settings);
    assert!(
        report
            .differences
            .iter()
            .all(|found| found.class == Class::Different),
        "{report}"
    );
    assert_eq!(report.noise.unwrap().nats, 0.0);
    // Noise that is none is not believed.
    let wild = Behaviour {
        flips_below_nats: 3.0,
        noise_nats: 2.0,
        ..Behaviour::default()
    };
    let report = run(wild, &settings);
    assert!(
        report
            .differences
            .iter()
            .any(|found| found.class == Class::Different),
        "{report}"
    );
    assert_eq!(report.noise.unwrap().nats, 0.1);
}

#[test]
fn two_services_are_compared_as_they_are() {
    let reference = connect(&serve(Behaviour {
        drafts: false,
        ..Behaviour::default()
    }));
    let check = |behaviour, verdict| {
        let candidate = connect(&serve(behaviour));
        let sides = Sides::Two {
            reference: &reference,
            candidate: &candidate,
        };
        let settings = Settings::default();
        let report = lossless::run(sides, &spread(built_in(), 14), &settings, &|_, _| {});
        assert_eq!(report.verdict, verdict, "{report}");
        for difference in &report.differences {
            assert!(difference.reference_request.get("speculative").is_none());
        }
    };
    check(Behaviour::default(), Verdict::Pass);
    let wrong = Behaviour {
        wrong_one_in: Some(1000),
        ..Behaviour::default()
    };
    check(wrong, Verdict::Fail);
}

#[test]
fn without_an_answer_to_judge_there_is_no_pass() {
    let check = |behaviour: Behaviour, part: &str| {
        let report = run(behaviour, &Settings::default());
        assert_eq!(report.verdict, Verdict::CouldNotRun, "{report}");
        let error = report.error.as_deref().unwrap_or_default();
        assert!(error.contains(part), "{error}");
    };
    let status = |status| Behaviour {
        status,
        ..Behaviour::default()
    };
    check(
        status(401),
        "the service answered 401, give a key it accepts",
    );
    check(
        status(500),
        "the reference gives nothing to compare with: 500",
    );
    check(status(429), "too busy");
    check(
        Behaviour {
            cuts: true,
            ..Behaviour::default()
        },
        "POST http://",
    );
}

#[test]
fn the_exit_code_says_how_it_went() {
    let check = |arguments: &[&str], code: i32, part: &str| {
        let output = verify(arguments);
        let text = format!(
            "{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {text}");
        assert!(text.contains(part), "{arguments:?}: {text}");
        output
    };
    let right = serve(Behaviour::default()).endpoint();
    let wrong = serve(Behaviour {
        wrong_one_in: Some(100),
        ..Behaviour::default()
    })
    .endpoint();
    let slow = serve(Behaviour {
        delay: Duration::from_secs(600),
        ..Behaviour::default()
    })
    .endpoint();
    let closed = {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        format!("http://{}", listener.local_addr().unwrap())
    };
    let right_as_tls = right.replace("http:", "https:");
    check(&["lossless", "--endpoint", &right], 0, "pass");
    check(&["lossless", "--endpoint", &wrong], 1, "DIFFERENT");
    check(&["lossless", "--endpoint", &closed], 2, "could not run");
    check(
        &["lossless", "--endpoint", &right_as_tls],
        2,
        "could not run",
    );
    check(
        &["lossless", "--endpoint", &slow, "--timeout-s", "1"],
        2,
        "timeout",
    );
    check(
        &["lossless", "--endpoint", &right, "--model", "another"],
        2,
        "it serves [sea-words]",
    );
    check(
        &["lossless", "--endpoint", &right, "--scenarios", "chat"],
        3,
        "inconclusive",
    );
    check(
        &[
            "lossless",
            "--endpoint",
            &right,
            "--prompts",
            "no-such-file",
        ],
        64,
        "cannot read no-such-file",
    );
    check(
        &[
            "lossless",
            "--endpoint",
            &right,
            "--api-key-file",
            "/dev/null",
        ],
        64,
        "/dev/null holds no key",
    );
    check(
        &["lossless", "--endpoint", &right, "--ca-file", "/dev/null"],
        64,
        "CA certificates",
    );
    check(
        &["lossless", "--endpoint", &right, "--min-drafted-share", "2"],
        64,
        "from 0 to 1",
    );
    check(&["lossless"], 64, "--endpoint");

    let output = check(&["lossless", "--endpoint", &right, "--json"], 0, "");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["verdict"], "pass");
    assert_eq!(report["schema_version"], 1);
    assert_eq!(report["candidate"]["model"]["bundle_digest"], "sha256:5ea");
}
