//! `outrider-verify smoke` against services with and without faults.

mod fake;

use std::net::TcpListener;
use std::process::{Command, Output};

use fake::Fault;
use outrider_verify::client::{Client, ClientOptions};
use outrider_verify::report::{Outcome, Report, Verdict};
use outrider_verify::smoke;

fn run(fault: Fault) -> Report {
    let endpoint = format!("http://{}", fake::serve(fault));
    let client = Client::new(&endpoint, ClientOptions::default()).unwrap();
    let mut report = smoke::run(&client, &smoke::Options::default());
    report.endpoint = "http://127.0.0.1:PORT".to_owned();
    report
}

fn failed(report: &Report) -> Vec<&'static str> {
    let failed = report
        .checks
        .iter()
        .filter(|check| check.outcome == Outcome::Fail);
    failed.map(|check| check.name).collect()
}

fn verify(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_outrider-verify"))
        .args(arguments)
        .output()
        .unwrap()
}

#[test]
fn a_right_service_passes() {
    let report = run(Fault::None);
    insta::assert_snapshot!("right_text", report);
    insta::assert_json_snapshot!("right_json", report);
}

#[test]
fn each_fault_fails_the_check_that_is_there_for_it() {
    let check = |fault, expected: &[&str]| {
        let report = run(fault);
        assert_eq!(failed(&report), expected, "{fault:?}\n{report}");
        assert_eq!(report.verdict, Verdict::Fail, "{fault:?}");
    };
    // Without a seed nothing sampled can be compared.
    check(
        Fault::SeedIgnored,
        &["seed-repeats", "drafting-keeps-sampled"],
    );
    check(Fault::StopLeaks, &["stop-string", "stop-string-stream"]);
    check(Fault::StopLeaksInStream, &["stop-string-stream"]);
    check(
        Fault::StreamDropsText,
        &["chat-stream-equals-whole", "completion-stream-equals-whole"],
    );
    check(Fault::AcceptsBadTypes, &["bad-request-type"]);
    check(
        Fault::InternalErrors,
        &["bad-request-type", "bad-request-range", "bad-request-json"],
    );
    check(
        Fault::UntypedErrors,
        &[
            "bad-request-type",
            "bad-request-range",
            "bad-request-json",
            "unknown-model",
        ],
    );
    check(Fault::AnyModel, &["unknown-model"]);
    check(
        Fault::Suspended,
        &[
            "drafting-keeps-greedy",
            "drafting-keeps-sampled",
            "drafting-is-counted",
        ],
    );
    check(Fault::DraftChangesGreedy, &["drafting-keeps-greedy"]);
    check(Fault::DraftChangesSampled, &["drafting-keeps-sampled"]);
    check(Fault::NeverDrafts, &["drafting-is-counted"]);
    check(Fault::DraftsUnasked, &["drafting-is-counted"]);
    check(Fault::NoCounts, &["drafting-is-counted"]);
}

#[test]
fn a_wrong_count_is_shown_beside_the_right_one() {
    let report = run(Fault::UsageOffByOne);
    insta::assert_snapshot!("usage_off_by_one", report);
}

#[test]
fn a_service_that_lacks_something_passes_and_the_checks_about_it_are_skipped() {
    let about_drafting = [
        "drafting-keeps-greedy",
        "drafting-keeps-sampled",
        "drafting-is-counted",
    ];
    let check = |fault, expected: &[&str]| {
        let report = run(fault);
        assert_eq!(report.verdict, Verdict::Pass, "{report}");
        let skipped = report
            .checks
            .iter()
            .filter(|check| check.outcome == Outcome::Skip);
        let skipped: Vec<_> = skipped.map(|check| check.name).collect();
        assert_eq!(skipped, expected, "{report}");
    };
    check(Fault::NoTokenIds, &["usage-matches-token-ids"]);
    check(Fault::NoSpeculation, &about_drafting);
    check(Fault::NoDraft, &about_drafting);
    check(Fault::NeverPays, &["drafting-is-counted"]);
}

#[test]
fn without_an_answer_to_judge_there_is_no_pass() {
    let check = |fault, part: &str| {
        let report = run(fault);
        assert_eq!(report.verdict, Verdict::CouldNotRun, "{report}");
        assert!(
            report
                .error
                .as_deref()
                .is_some_and(|error| error.contains(part)),
            "{report}"
        );
    };
    check(Fault::StreamCut, "the stream broke off after 2 events");
    check(
        Fault::Unauthorized,
        "the service answered 401, give a key it accepts in OUTRIDER_VERIFY_API_KEY or --api-key-file",
    );
    check(Fault::NoModels, "no model to ask");
}

#[test]
fn the_exit_code_says_how_it_went() {
    let check = |arguments: &[&str], code: i32| {
        let output = verify(arguments);
        assert_eq!(
            output.status.code(),
            Some(code),
            "{arguments:?}: {output:?}"
        );
        output
    };
    let right = format!("http://{}/v1", fake::serve(Fault::None));
    let wrong = format!("http://{}", fake::serve(Fault::StopLeaks));
    let closed = {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        format!("http://{}", listener.local_addr().unwrap())
    };
    check(&["smoke", "--endpoint", &right], 0);
    check(&["smoke", "--endpoint", &wrong], 1);
    check(&["smoke", "--endpoint", &right, "--model", "another"], 1);
    check(&["smoke", "--endpoint", &closed], 2);
    check(&["smoke", "--endpoint", "localhost:8080"], 64);
    check(&["smoke"], 64);
    check(&["smoke", "--endpoint", &right, "--timeout-s", "0"], 64);
    check(&["--help"], 0);

    let output = check(&["smoke", "--endpoint", &wrong, "--json"], 1);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["verdict"], "fail");
    assert_eq!(report["schema_version"], 1);
}

#[test]
fn help_names_every_exit_code() {
    let output = verify(&["--help"]);
    insta::assert_snapshot!("help", String::from_utf8(output.stdout).unwrap());
    let output = verify(&["smoke", "--help"]);
    insta::assert_snapshot!("help_smoke", String::from_utf8(output.stdout).unwrap());
}
