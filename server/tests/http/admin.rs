//! The admin listener.

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
        "outrider_http_request_duration_seconds_bucket{route=\"/v1/completions\",le=\"+Inf\"}",
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
