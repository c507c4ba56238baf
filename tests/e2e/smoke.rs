//! `outrider-verify` against the real server.

use std::process::Command;

use anyhow::Context;
use outrider_bundle::manifest::Precision;
use outrider_tests::faulty_proxy::{Fault, FaultyProxy};
use outrider_tests::fixtures;
use outrider_tests::servers::Servers;
use serde_json::{Value, json};

pub fn the_server_passes_the_smoke_checks(servers: &Servers) -> anyhow::Result<()> {
    let server = servers.of(Precision::Int8)?;
    let output = Command::new(fixtures::verify_binary()?)
        .args(["smoke", "--json", "--endpoint", &server.endpoint()])
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{text}");
    let report: Value = serde_json::from_str(&text)?;
    let checks = report["checks"].as_array().context("no checks")?;
    // The server has every extension and a draft, so nothing may be skipped.
    assert!(
        checks.iter().all(|check| check["outcome"] == "pass"),
        "{text}"
    );
    assert_eq!(report["model"]["drafting"], "on", "{text}");
    assert_eq!(report["model"]["lossless_class"], "exact", "{text}");
    assert!(report["model"]["bundle_digest"].is_string(), "{text}");
    Ok(())
}

pub fn the_server_passes_at_the_edges(servers: &Servers) -> anyhow::Result<()> {
    let server = servers.of(Precision::Int8)?;
    let output = Command::new(fixtures::verify_binary()?)
        .args(["boundary", "--json", "--endpoint", &server.endpoint()])
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{text}");
    let report: Value = serde_json::from_str(&text)?;
    let checks = report["checks"].as_array().context("no checks")?;
    let passed = |check: &Value| check["outcome"] == "pass";
    assert!(checks.iter().all(passed), "{text}");
    Ok(())
}

pub fn drafting_changes_no_answer_by_the_judgement_of_verify(
    servers: &Servers,
) -> anyhow::Result<()> {
    let server = servers.of(Precision::Int8)?;
    let (code, report) = lossless(&server.endpoint())?;
    assert_eq!(code, Some(0), "{report}");
    assert_eq!(report["verdict"], "pass", "{report}");
    assert_eq!(report["differences"], json!([]), "{report}");
    assert_eq!(report["compared_by"], "token_ids", "{report}");
    assert!(report["compared_tokens"].as_u64() >= Some(100), "{report}");
    assert_eq!(
        report["reference"]["drafting"]["drafted_tokens"], 0,
        "{report}"
    );
    Ok(())
}

pub fn verify_finds_each_fault_before_the_real_server(servers: &Servers) -> anyhow::Result<()> {
    let server = servers.of(Precision::Int8)?;
    let judge = |fault, code, verdict: &str| -> anyhow::Result<(FaultyProxy, Value)> {
        let proxy = FaultyProxy::before(server.endpoint(), fault)?;
        let (found, report) = lossless(&proxy.endpoint())?;
        assert_eq!(found, Some(code), "{fault:?}: {report}");
        assert_eq!(report["verdict"], verdict, "{fault:?}: {report}");
        Ok((proxy, report))
    };
    let differences = |report: &Value, aspect: &str| -> anyhow::Result<Vec<Value>> {
        let found = report["differences"].as_array().context("no differences")?;
        assert!(!found.is_empty(), "{report}");
        for difference in found {
            assert_eq!(difference["aspect"], aspect, "{report}");
            assert_eq!(difference["class"], "different", "{report}");
            assert_eq!(difference["reference_repeats"], true, "{report}");
        }
        Ok(found.clone())
    };

    let (proxy, report) = judge(Fault::WrongToken { one_in: 50 }, 1, "fail")?;
    let wrong_tokens = proxy.wrong_tokens();
    for difference in differences(&report, "token")? {
        let request = &difference["candidate_request"];
        let prompt = request.get("messages").unwrap_or(&request["prompt"]);
        let position = difference["position"].as_u64().context("no position")?;
        assert!(
            wrong_tokens.contains(&(prompt.clone(), position)),
            "{position} of {prompt} was right, {report}"
        );
    }

    let (_, report) = judge(Fault::IgnoredSeed, 1, "fail")?;
    for difference in differences(&report, "token")? {
        assert_eq!(difference["sampling"], "seeded", "{report}");
        assert_eq!(difference["candidate_repeats"], false, "{report}");
    }

    let (_, report) = judge(Fault::LeakedStop, 1, "fail")?;
    for difference in differences(&report, "stop_string")? {
        assert_eq!(difference["sampling"], "stop", "{report}");
    }

    let (_, report) = judge(Fault::Miscount, 1, "fail")?;
    for difference in differences(&report, "usage")? {
        let count = |side: &str| difference[side]["completion_tokens"].as_u64();
        assert_eq!(
            count("candidate"),
            count("reference").map(|count| count + 1),
            "{report}"
        );
    }

    let (_, report) = judge(Fault::NoDrafts, 3, "inconclusive")?;
    assert_eq!(report["differences"], json!([]), "{report}");
    let reasons = report["reasons"].to_string();
    assert!(reasons.contains("drafted 0 tokens"), "{report}");
    Ok(())
}

/// Exit code and report of a small `outrider-verify lossless`.
fn lossless(endpoint: &str) -> anyhow::Result<(Option<i32>, Value)> {
    let output = Command::new(fixtures::verify_binary()?)
        .args(["lossless", "--json", "--endpoint", endpoint])
        .args(["--scenarios", "code,structured"])
        .args(["--prompts-per-scenario", "2"])
        .args(["--max-tokens", "24", "--min-compared-tokens", "100"])
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let report = serde_json::from_str(&text).with_context(|| text.into_owned())?;
    Ok((output.status.code(), report))
}
