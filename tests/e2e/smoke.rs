//! `outrider-verify smoke` against the real server.

use std::process::Command;

use anyhow::Context;
use outrider_bundle::manifest::Precision;
use outrider_tests::fixtures;
use outrider_tests::servers::Servers;
use serde_json::Value;

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
