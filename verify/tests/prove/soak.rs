//! `soak` sees what goes wrong with time.

use outrider_verify::client::{Client, ClientOptions};
use outrider_verify::prompts::{built_in, spread};
use outrider_verify::report::Verdict;
use outrider_verify::soak::{self, MetricsPage, Report, Settings};

use crate::connect;
use crate::service::{Behaviour, serve};

fn run(behaviour: Behaviour) -> Report {
    let fake = serve(behaviour);
    let endpoint = format!("{}/metrics", fake.endpoint());
    let client = Client::new(&endpoint, ClientOptions::default()).unwrap();
    let settings = Settings {
        duration_s: 1.5,
        ..Settings::default()
    };
    let cases = spread(built_in(), 1);
    soak::run(
        &connect(&fake),
        Some(&MetricsPage { client }),
        &cases,
        &settings,
        &|_, _| {},
    )
}

#[test]
fn a_steady_service_passes() {
    let report = run(Behaviour::default());
    assert_eq!(report.verdict, Verdict::Pass, "{report}");
    assert!(report.requests > 20, "{report}");
    assert_eq!(report.restarts, Some(0));
    assert_eq!(report.memory.as_ref().unwrap().growth_share, 0.0);
}

#[test]
fn errors_changed_answers_restarts_and_growth_are_named() {
    let check = |behaviour: Behaviour, part: &str| {
        let report = run(behaviour);
        assert_eq!(report.verdict, Verdict::Fail, "{report}");
        assert!(
            report.reasons.iter().any(|reason| reason.contains(part)),
            "{report}"
        );
    };
    check(
        Behaviour {
            fails_every: Some(10),
            ..Behaviour::default()
        },
        "requests failed",
    );
    check(
        Behaviour {
            unsteady_one_in: Some(100),
            ..Behaviour::default()
        },
        "answers differ from the first one",
    );
    check(
        Behaviour {
            restarts_every: Some(20),
            ..Behaviour::default()
        },
        "restarts",
    );
    check(
        Behaviour {
            leaks_bytes: 1 << 20,
            ..Behaviour::default()
        },
        "memory grew by",
    );
}

#[test]
fn a_service_that_is_down_from_the_start_could_not_be_soaked() {
    let report = run(Behaviour {
        status: 500,
        ..Behaviour::default()
    });
    assert_eq!(report.verdict, Verdict::CouldNotRun, "{report}");
}
