//! `boundary` names the edge at which a service goes wrong.

use std::time::Duration;

use outrider_verify::boundary;
use outrider_verify::report::{Outcome, Report, Verdict};

use crate::connect;
use crate::service::{Behaviour, serve};

fn run(behaviour: Behaviour) -> Report {
    boundary::run(&connect(&serve(behaviour)))
}

#[test]
fn a_right_service_passes_and_nothing_is_skipped() {
    let report = run(Behaviour::default());
    assert_eq!(report.verdict, Verdict::Pass, "{report}");
    let passed = |outcome| outcome == Outcome::Pass;
    assert!(
        report.checks.iter().all(|check| passed(check.outcome)),
        "{report}"
    );
}

#[test]
fn a_service_without_switch_and_token_ids_passes_as_well() {
    let report = run(Behaviour {
        counts: false,
        knows_switch: false,
        token_ids: false,
        ..Behaviour::default()
    });
    assert_eq!(report.verdict, Verdict::Pass, "{report}");
}

#[test]
fn each_fault_fails_the_checks_that_are_there_for_it() {
    let check = |behaviour: Behaviour, expected: &[&str]| {
        let report = run(behaviour.clone());
        let failed = report
            .checks
            .iter()
            .filter(|check| check.outcome == Outcome::Fail);
        let failed: Vec<&str> = failed.map(|check| check.name).collect();
        assert_eq!(failed, expected, "{behaviour:?}\n{report}");
        assert_eq!(report.verdict, Verdict::Fail);
    };
    check(
        Behaviour {
            leaks_stop: true,
            ..Behaviour::default()
        },
        &["stop-string", "stop-at-once", "several-stop-strings"],
    );
    check(
        Behaviour {
            refuses_nothing: true,
            ..Behaviour::default()
        },
        &["no-messages", "over-long-prompt"],
    );
    check(
        Behaviour {
            ascii_only: true,
            ..Behaviour::default()
        },
        &[
            "special-characters",
            "mixed-scripts",
            "several-stop-strings",
        ],
    );
    check(
        Behaviour {
            forgets_leavers: true,
            // An answer must take long enough to be left.
            token_time: [Duration::from_millis(1); 2],
            ..Behaviour::default()
        },
        &["clients-that-leave"],
    );
    check(
        Behaviour {
            ignores_seed: true,
            ..Behaviour::default()
        },
        &["high-temperature"],
    );
}

#[test]
fn a_count_that_is_one_too_high_is_shown_with_the_token_ids() {
    let report = run(Behaviour {
        miscounts: true,
        ..Behaviour::default()
    });
    assert_eq!(report.verdict, Verdict::Fail, "{report}");
    let actual = &report.checks[0].actual;
    assert!(
        actual.contains("+ 25 =") && actual.contains("24 token ids"),
        "{actual}"
    );
}

#[test]
fn a_service_that_hangs_up_could_not_be_checked() {
    let report = run(Behaviour {
        cuts: true,
        ..Behaviour::default()
    });
    assert_eq!(report.verdict, Verdict::CouldNotRun, "{report}");
}
