//! `perf` says where drafting pays and where it does not. Time is the service's own here, so that a busy machine changes nothing.

use std::time::Duration;

use outrider_verify::lossless::Sides;
use outrider_verify::perf::report::{Effect, Report};
use outrider_verify::perf::{self, Settings};
use outrider_verify::prompts::{SCENARIOS, built_in, spread};
use outrider_verify::report::Verdict;

use crate::connect;
use crate::service::{Behaviour, serve};

/// Two scenarios of the default set.
fn run(behaviour: Behaviour) -> Report {
    let fake = serve(behaviour);
    let mut cases = spread(built_in(), 4);
    cases.retain(|case| SCENARIOS[..2].contains(&case.scenario.as_str()));
    let settings = Settings {
        concurrencies: vec![1, 2],
        rounds: 3,
        requests: 2,
        max_tokens: 16,
        ..Settings::default()
    };
    let service = connect(&fake);
    perf::run(
        Sides::Switch(&service),
        &cases,
        &settings,
        &fake,
        &|_, _| {},
    )
}

/// Time of a token without and with drafting.
fn speed(off_us: u64, on_us: u64) -> Behaviour {
    Behaviour {
        token_time: [off_us, on_us].map(Duration::from_micros),
        virtual_time: true,
        ..Behaviour::default()
    }
}

#[test]
fn a_tenth_less_throughput_with_drafting_is_harmful_and_below_the_gate() {
    let report = run(speed(900, 1000));
    assert_eq!(report.verdict, Verdict::BelowGate, "{report}");
    assert!(
        report
            .scenarios
            .iter()
            .all(|row| row.effect == Effect::Harmful),
        "{report}"
    );
    assert!(
        report.reasons[0].contains("harmful in chat, question_answering"),
        "{report}"
    );
    let ratio = report.ratio.unwrap();
    assert!((ratio.mean - 0.9).abs() < 1e-9, "{report}");
}

#[test]
fn a_faster_service_and_an_equally_fast_one_pass() {
    let check = |behaviour, effect| {
        let report = run(behaviour);
        assert_eq!(report.verdict, Verdict::Pass, "{report}");
        assert!(
            report.scenarios.iter().all(|row| row.effect == effect),
            "{report}"
        );
        assert!(
            report
                .scenarios
                .iter()
                .all(|row| row.acceptance_length == Some(3.0)),
            "{report}"
        );
    };
    check(speed(1000, 500), Effect::WorthIt);
    check(speed(1000, 1000), Effect::Neutral);
}

#[test]
fn what_did_not_draft_or_did_not_answer_is_no_pass() {
    let check = |behaviour: Behaviour, verdict| {
        let report = run(behaviour);
        assert_eq!(report.verdict, verdict, "{report}");
    };
    let usual = speed(1000, 1000);
    check(
        Behaviour {
            drafts: false,
            ..usual.clone()
        },
        Verdict::Inconclusive,
    );
    check(
        Behaviour {
            counts: false,
            ..usual.clone()
        },
        Verdict::Inconclusive,
    );
    check(
        Behaviour {
            cuts: true,
            ..usual.clone()
        },
        Verdict::CouldNotRun,
    );
    check(
        Behaviour {
            status: 400,
            ..usual
        },
        Verdict::CouldNotRun,
    );
}
