//! `all`: the gate decides, the report holds everything, and the page needs nothing beside it.

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::Output;
use std::time::Duration;

use serde_json::Value;

use crate::service::{Behaviour, serve};
use crate::verify;

/// Every step, as quick as it gets; speed is not what these tests are about, so nothing of it is asked for.
const GATE: &str = "
gate_version: 1
prompts: {scenarios: [chat, code, short_output], per_scenario: 4}
smoke: {}
boundary: {}
lossless: {min_compared_tokens: 1000}
perf: {concurrency: [1, 2], rounds: 3, requests: 2, max_tokens: 8, bounds: {max_harmful_scenarios: 3, max_unclear_scenarios: 3}}
soak: {duration_s: 1}
";

fn run(directory: &Path, endpoint: &str, gate: &str) -> Output {
    let file = directory.join("gate.yaml");
    fs::write(&file, gate).unwrap();
    let metrics = format!("{endpoint}/metrics");
    let path = |path: &Path| path.to_str().unwrap().to_owned();
    let (file, out) = (path(&file), path(&directory.join("out")));
    verify(&[
        "all",
        "--endpoint",
        endpoint,
        "--metrics",
        &metrics,
        "--gate",
        &file,
        "--out",
        &out,
    ])
}

/// Where a page with charts and differences is left for `verify/tests/browser/report.py`, when this is set.
const KEPT_PAGE_VARIABLE: &str = "OUTRIDER_VERIFY_KEPT_PAGE";

/// Runs against a service, and gives exit code, report and page.
fn report(behaviour: Behaviour, gate: &str) -> (i32, Value, String) {
    let directory = tempfile::tempdir().unwrap();
    let output = run(directory.path(), &serve(behaviour).endpoint(), gate);
    let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    let read = |name| fs::read_to_string(directory.path().join("out").join(name)).expect(&text);
    let report = serde_json::from_str(&read("report.json")).unwrap();
    (output.status.code().unwrap(), report, read("report.html"))
}

#[test]
fn a_right_service_passes_every_step_and_the_report_can_be_repeated() {
    let (code, report, page) = report(Behaviour::default(), GATE);
    assert_eq!(code, 0, "{report:#}");
    assert_eq!(report["verdict"], "pass");
    assert_eq!(report["schema_version"], 1);
    assert_eq!(report["model"]["bundle_digest"], "sha256:5ea");
    assert_eq!(report["config_digest"].as_str().unwrap().len(), 64);
    assert_eq!(report["gate"]["lossless"]["max_tokens"], 96);
    assert_eq!(report["arguments"][1], "all");
    for step in ["smoke", "boundary", "lossless", "perf", "soak"] {
        assert!(report[step].is_object(), "{step} is missing");
    }
    check_page(&page);
    // Ratio, speed, acceptance and memory.
    assert_eq!(page.matches("<svg class=\"chart\"").count(), 4);
    assert_eq!(page.matches("<circle class=\"dot ").count(), 6);
    assert!(!page.contains("<mark>"));
}

#[test]
fn every_verdict_has_its_code_and_differences_stand_side_by_side() {
    let check = |behaviour: Behaviour, gate: &str, expected: i32| {
        let (code, report, page) = report(behaviour, gate);
        assert_eq!(code, expected, "{report:#}");
        assert_eq!(report["exit_code"], expected);
        check_page(&page);
        page
    };
    let wrong = Behaviour {
        wrong_one_in: Some(500),
        token_time: [Duration::from_micros(900), Duration::from_micros(500)],
        ..Behaviour::default()
    };
    let page = check(wrong, GATE, 1);
    assert!(page.contains("<h4>reference, length, 96 tokens counted</h4>"));
    assert!(page.matches("<mark>").count() >= 2);
    if let Some(file) = std::env::var_os(KEPT_PAGE_VARIABLE) {
        fs::write(file, page).unwrap();
    }
    let never = Behaviour {
        drafts: false,
        ..Behaviour::default()
    };
    let only_lossless = "gate_version: 1\nlossless: {}\n";
    check(never, only_lossless, 3);
    let fast = "gate_version: 1\nprompts: {scenarios: [chat]}\nperf: {concurrency: [1], rounds: 2, max_tokens: 4, bounds: {max_harmful_scenarios: 1, max_unclear_scenarios: 1, min_tokens_per_second: 1.0e+12}}\n";
    check(Behaviour::default(), fast, 4);
    let unwell = Behaviour {
        status: 500,
        ..Behaviour::default()
    };
    check(unwell, only_lossless, 2);
    // A gate that asks for nothing proves nothing.
    check(Behaviour::default(), "gate_version: 1\n", 3);
}

#[test]
fn what_can_not_be_run_or_read_is_said() {
    let directory = tempfile::tempdir().unwrap();
    let check = |endpoint: &str, gate: &str, code: i32, part: &str| {
        let output = run(directory.path(), endpoint, gate);
        let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        assert_eq!(output.status.code(), Some(code), "{text}");
        assert!(text.contains(part), "{text}");
    };
    let closed = {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        format!("http://{}", listener.local_addr().unwrap())
    };
    check(&closed, GATE, 2, "could not run");
    check(
        &closed,
        "gate_version: 1\nsmoke: {fast: true}\n",
        64,
        "fast",
    );
}

/// The structure of a page: every element is closed, nothing is fetched, and what callers write is text.
fn check_page(page: &str) {
    const VOID: [&str; 7] = ["meta", "link", "line", "rect", "circle", "polyline", "br"];
    let mut open: Vec<&str> = Vec::new();
    for tag in page.split('<').skip(1) {
        let tag = tag.split('>').next().unwrap();
        if tag.starts_with('!') {
            continue;
        }
        let name = tag
            .trim_start_matches('/')
            .split([' ', '/', '\n'])
            .next()
            .unwrap();
        if tag.starts_with('/') {
            assert_eq!(
                open.pop(),
                Some(name),
                "an element is closed that is not open"
            );
        } else if !VOID.contains(&name) {
            open.push(name);
        }
    }
    assert!(open.is_empty(), "{open:?} are not closed");
    for fetched in ["<script", "src=", "@import", "url(", "href=\"http"] {
        assert!(!page.contains(fetched), "the page holds {fetched}");
    }
    // From the prompts of `boundary`.
    assert!(!page.contains("<tag>"));
}
