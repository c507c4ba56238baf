//! The admin listener.

use std::collections::BTreeMap;
use std::time::Duration;

use outrider_server::engine::{Drafting, LosslessClass, Phase};
use outrider_server::lifecycle::Latch;
use outrider_server::metrics::METRICS;
use serde_json::json;

use crate::fake::FakeBackend;
use crate::server::{Reply, TestServer};

const SPECULATION: &str = "/admin/speculation";

fn switch(server: &TestServer, body: &str) -> Reply {
    server.put_admin(SPECULATION, "application/json", body)
}

#[test]
fn readiness_needs_every_latch() {
    let server = TestServer::starting(FakeBackend::new());
    for latch in Latch::ALL {
        let reply = server.admin("/readyz");
        assert_eq!(reply.status, 503, "ready before {latch}");
        assert_eq!(reply.json()["latches"][latch.as_str()], false);
        server.startup.pass(latch);
    }
    let reply = server.admin("/readyz");
    assert_eq!(reply.status, 200);
    insta::assert_json_snapshot!(reply.json());
}

#[test]
fn readiness_ends_when_the_engine_does() {
    let server = TestServer::start(FakeBackend::new());
    server.backend.set_status(|status| {
        status.phase = Phase::Failed;
        status.detail = "out of memory".to_owned();
        status.lossless = Some(LosslessClass::NearTie);
    });
    let reply = server.admin("/readyz");
    assert_eq!(reply.status, 503);
    insta::assert_json_snapshot!(reply.json());
}

#[test]
fn drafting_is_switched_and_shown() {
    let server = TestServer::start(FakeBackend::new().with_draft());
    insta::assert_json_snapshot!(server.admin(SPECULATION).ok());
    for (body, expected) in [
        ("{\"enabled\": false}", "off"),
        ("{\"enabled\": false}", "off"),
        ("{\"enabled\": true}", "on"),
    ] {
        let state = switch(&server, body).ok();
        assert_eq!(state["drafting"], expected, "{body}");
        assert_eq!(state["enabled"], expected == "on", "{body}");
        assert_eq!(state, server.admin(SPECULATION).ok());
        assert_eq!(state, server.admin("/readyz").ok()["speculation"]);
        assert_eq!(
            state,
            server.get("/v1/models/fake").ok()["speculation"],
            "nothing to hide here"
        );
        let gauge = format!("outrider_drafting{{state=\"{expected}\"}} 1");
        assert!(server.admin("/metrics").body.contains(&gauge), "{gauge}");
    }
    // A request that insists on drafting is served while it is off: its text is the same.
    switch(&server, "{\"enabled\": false}").ok();
    let body = json!({"model": "fake", "prompt": "hi", "speculative": {"enabled": true}});
    assert_eq!(server.post("/v1/completions", &body).status, 200);
    server.backend.set_status(|status| {
        status.speculation.as_mut().unwrap().drafting = Drafting::Suspended;
    });
    assert_eq!(server.post("/v1/completions", &body).status, 200);
}

#[test]
fn a_draft_that_is_not_there_can_be_switched_off_but_not_on() {
    let server = TestServer::start(FakeBackend::new());
    let refused = switch(&server, "{\"enabled\": true}");
    assert_eq!(refused.status, 409);
    insta::assert_json_snapshot!(refused.json());
    assert_eq!(server.admin(SPECULATION).ok()["enabled"], true);
    let state = switch(&server, "{\"enabled\": false}").ok();
    insta::assert_json_snapshot!(state);
}

#[test]
fn a_switch_that_says_something_else_is_refused_by_field() {
    let server = TestServer::start(FakeBackend::new().with_draft());
    let too_long = format!("{{\"enabled\": false{}}}", " ".repeat(5000));
    let bodies = [
        "",
        "false",
        "{}",
        "{\"enabled\": null}",
        "{\"enabled\": \"false\"}",
        "{\"enabled\": 0}",
        "{\"enable\": false}",
        "{\"enabled\": false, \"block_size\": 4}",
        "{\"enabled\": false, \"enabled\": true}",
        &too_long,
    ];
    let mut table = String::new();
    for body in bodies {
        let reply = switch(&server, body);
        let error = &reply.json()["error"];
        table.push_str(&format!(
            "{}\n    {} {} {} {}\n",
            body.trim_end_matches([' ', '}']),
            reply.status,
            error["code"],
            error["param"],
            error["message"]
        ));
    }
    insta::assert_snapshot!(table);
    let form = server.put_admin(SPECULATION, "text/plain", "{\"enabled\": false}");
    assert_eq!(form.status, 415);
    assert_eq!(server.admin(SPECULATION).ok()["enabled"], true);
}

#[test]
fn until_the_model_is_loaded_there_is_nothing_to_switch() {
    let server = TestServer::start(FakeBackend::new());
    server
        .backend
        .set_status(|status| status.speculation = None);
    for reply in [
        server.admin(SPECULATION),
        switch(&server, "{\"enabled\": true}"),
        switch(&server, "{\"enabled\": false}"),
    ] {
        assert_eq!((reply.status, reply.code()), (503, "not_ready".to_owned()));
    }
}

#[test]
fn liveness_follows_the_engines_heartbeat() {
    let server = TestServer::start(FakeBackend::new());
    let cases = [
        (Phase::Ready, 0, 200),
        (Phase::Ready, 1000, 200),
        (Phase::Ready, 1001, 503),
        // A model that takes long to load must not be killed on the way.
        (Phase::Starting, 600_000, 200),
        (Phase::Failed, 0, 503),
    ];
    for (phase, age_ms, expected) in cases {
        server.backend.set_status(|status| {
            status.phase = phase;
            status.heartbeat_age = Duration::from_millis(age_ms);
        });
        let reply = server.admin("/livez");
        assert_eq!(reply.status, expected, "{phase:?} {age_ms} {}", reply.body);
        assert_eq!(reply.json()["alive"], expected == 200);
    }
}

#[test]
fn every_exported_metric_is_in_the_table_and_described() {
    let server = TestServer::start(FakeBackend::new().with_draft());
    let body = json!({"model": "fake", "prompt": "hi"});
    assert_eq!(server.post("/v1/completions", &body).status, 200);
    assert_eq!(server.post("/v1/completions", &json!({})).status, 400);
    let reply = server.admin("/metrics");
    assert_eq!(
        reply.header("content-type"),
        Some("text/plain; version=0.0.4; charset=utf-8")
    );

    for line in reply.body.lines().filter(|line| !line.is_empty()) {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').unwrap();
            let metric = METRICS
                .iter()
                .find(|metric| metric.name == name)
                .unwrap_or_else(|| panic!("{name} is not in the table"));
            assert_eq!(metric.help, help);
        } else if !line.starts_with('#') {
            let name = line.split(['{', ' ']).next().unwrap();
            let series = |metric: &outrider_server::metrics::Metric| {
                name == metric.name
                    || ["_sum", "_count", "_bucket"]
                        .iter()
                        .any(|suffix| name.strip_suffix(suffix) == Some(metric.name))
            };
            let metric = METRICS
                .iter()
                .find(|metric| series(metric))
                .unwrap_or_else(|| panic!("{name} is not in the table"));
            let labels: Vec<&str> = line
                .split_once('{')
                .map(|(_, rest)| rest.split_once('}').unwrap().0)
                .into_iter()
                .flat_map(|labels| labels.split(','))
                .map(|label| label.split('=').next().unwrap())
                .filter(|label| *label != "le")
                .collect();
            assert!(
                labels.iter().all(|label| metric.labels.contains(label)),
                "{line}"
            );
        }
    }
    for expected in [
        "outrider_http_requests_total{method=\"POST\",route=\"/v1/completions\",status=\"200\"}",
        "outrider_http_errors_total{code=\"missing_required_parameter\"}",
        "outrider_drafting{state=\"on\"} 1",
        "outrider_drafting{state=\"suspended\"} 0",
        "outrider_draft_info{architecture=\"DFlash2DraftModel\",block_size=\"8\",candidate_topk=\"4\"} 1",
        "outrider_completions_running 1",
        "outrider_completions_waiting 2",
        "outrider_ready 1",
        "outrider_startup_latch_seconds{latch=\"warm\"}",
        "outrider_http_request_duration_seconds_bucket{route=\"/v1/completions\",status=\"200\",le=\"+Inf\"}",
    ] {
        assert!(
            reply.body.contains(expected),
            "{expected} is missing in\n{}",
            reply.body
        );
    }
}

#[test]
fn the_metrics_are_a_contract() {
    let table: Vec<String> = METRICS
        .iter()
        .map(|metric| {
            format!(
                "{} {:?} {:?}\n    {}",
                metric.name, metric.kind, metric.labels, metric.help
            )
        })
        .collect();
    insta::assert_snapshot!(table.join("\n"));
    for metric in METRICS {
        assert!(metric.name.starts_with("outrider_"));
        assert_eq!(
            metric.name.ends_with("_total"),
            metric.kind == outrider_server::metrics::Kind::Counter,
            "{}",
            metric.name
        );
    }
}

/// A sample of the text format: its name, its labels and its value.
type Sample = (String, Vec<(String, String)>, f64);

fn sample(line: &str) -> Sample {
    let (series, value) = line.rsplit_once(' ').unwrap();
    let value = value
        .parse()
        .unwrap_or_else(|_| panic!("no number: {line}"));
    let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
    let is_name = |text: &str| {
        text.bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
            && !text.starts_with(|first: char| first.is_ascii_digit())
    };
    assert!(is_name(name) && !name.is_empty(), "{line}");
    let labels = labels.strip_suffix('}').unwrap();
    let labels = labels.split_terminator(',').map(|label| {
        let (name, value) = label.split_once('=').unwrap();
        let value = value
            .strip_prefix('"')
            .and_then(|value| value.strip_suffix('"'));
        let value = value.unwrap_or_else(|| panic!("a label without quotes: {line}"));
        assert!(
            is_name(name) && !value.contains(['"', '\\', '\n']),
            "{line}"
        );
        (name.to_owned(), value.to_owned())
    });
    (name.to_owned(), labels.collect(), value)
}

#[test]
fn the_exposition_can_be_read_and_callers_add_no_series() {
    let server = TestServer::start(FakeBackend::new().with_draft());
    let ask_all = |round: usize| {
        for (path, body) in [
            ("/v1/completions", json!({"model": "fake", "prompt": "hi"})),
            (
                "/v1/completions",
                json!({"model": format!("model-{round}"), "prompt": "hi"}),
            ),
            ("/v1/completions", json!({ format!("field-{round}"): 1 })),
        ] {
            server.post(path, &body);
        }
        server.get(&format!("/v1/models/{round}"));
        server.get(&format!("/nothing/{round}"));
        let id = format!("call-{round}");
        server.send("/v1/completions", &[("x-request-id", id.as_str())], b"{");
    };
    ask_all(0);
    let first = server.admin("/metrics").body;
    (1..20).for_each(ask_all);
    let text = server.admin("/metrics").body;

    let mut kinds: BTreeMap<&str, &str> = BTreeMap::new();
    let mut samples: Vec<Sample> = Vec::new();
    for line in text.lines().filter(|line| !line.is_empty()) {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert_eq!(kinds.insert(name, kind), None, "{name} has two types");
        } else if !line.starts_with("# HELP ") {
            let (name, labels, value) = sample(line);
            let of = |suffix: &str| name.strip_suffix(suffix).and_then(|base| kinds.get(base));
            let is_histogram = ["_bucket", "_sum", "_count"]
                .iter()
                .any(|suffix| of(suffix) == Some(&"histogram"));
            match kinds.get(&*name) {
                Some(&"counter") => assert!(name.ends_with("_total") && value >= 0.0, "{line}"),
                Some(&"gauge") => assert!(!name.ends_with("_total"), "{line}"),
                _ => assert!(is_histogram, "{line} has no type before it"),
            }
            let twice = |(other, others, _): &Sample| *other == name && *others == labels;
            assert!(!samples.iter().any(twice), "{line} is there twice");
            samples.push((name, labels, value));
        }
    }
    let mut buckets: BTreeMap<(String, String), Vec<(f64, f64)>> = BTreeMap::new();
    for (name, labels, value) in &samples {
        let Some(base) = name.strip_suffix("_bucket") else {
            continue;
        };
        let (bounds, others): (Vec<_>, Vec<_>) = labels.iter().partition(|(name, _)| name == "le");
        let bound = bounds[0].1.replace("+Inf", "inf").parse().unwrap();
        let series = (base.to_owned(), format!("{others:?}"));
        buckets.entry(series).or_default().push((bound, *value));
    }
    assert!(!buckets.is_empty());
    for ((base, labels), buckets) in buckets {
        assert!(buckets.is_sorted(), "{base} {labels}: {buckets:?}");
        let counts: Vec<f64> = buckets.iter().map(|(_, count)| *count).collect();
        assert!(counts.is_sorted(), "{base} {labels}: {counts:?}");
        assert!(buckets.last().unwrap().0.is_infinite());
        let count = samples.iter().find(|(name, others, _)| {
            *name == format!("{base}_count")
                && format!("{:?}", others.iter().collect::<Vec<_>>()) == labels
        });
        assert_eq!(count.unwrap().2, *counts.last().unwrap(), "{base} {labels}");
    }
    // Of other tests, which share the process and may add series meanwhile, only what this one could have added.
    let made_up = |text: &str| {
        let lines = text
            .lines()
            .filter(|line| line.contains("unmatched") || line.contains("{id}"));
        lines.filter(|line| !line.contains("_bucket")).count()
    };
    assert!(!text.contains("model-7") && !text.contains("call-7") && !text.contains("field-7"));
    assert!(made_up(&text) <= made_up(&first) + 20, "{text}");
}
