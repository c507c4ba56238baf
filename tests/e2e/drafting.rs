//! The draft as operators meet it: switched while streams run, damaged on disk, narrowed by settings, required or not.

use std::fs;
use std::path::Path;

use anyhow::{Context, ensure};
use outrider_bundle::Manifest;
use outrider_bundle::manifest::Precision;
use outrider_tests::answer::{Drafted, streamed, whole};
use outrider_tests::fixtures;
use outrider_tests::servers::{self, Server, Servers};
use outrider_verify::wire::Api;
use serde_json::{Value, json};
use xtask::reference;

use crate::bundles::{Damage, flip, linked_copy, refused, remove, truncate};

const PROMPT: &str = "Count from one to forty in words: one, two, three,";
const SPECULATION: &str = "/admin/speculation";

pub fn a_switch_in_mid_stream_changes_no_token(_: &Servers) -> anyhow::Result<()> {
    let command = servers::command(Precision::Int8)?
        .set("serving.runtime.context_tokens", 512)
        .set("serving.runtime.max_concurrency", 2)
        .set("serving.speculative.enabled", false)
        // Blocks are checked whether they pay or not.
        .set("serving.speculative.adaptive_width", false);
    let server = Server::start(&command)?;
    let request = |fields: Value| {
        let mut request = json!({ "prompt": PROMPT, "max_tokens": 48, "temperature": 0.7, "seed": 11, "ignore_eos": true, "logprobs": 2 });
        for (name, value) in fields.as_object().into_iter().flatten() {
            request[name] = value.clone();
        }
        request
    };
    let plain = whole(
        &server,
        Api::Completions,
        &request(json!({ "speculative": { "enabled": false } })),
    )?;
    // Off at the start, so nothing was drafted for anybody.
    let off = whole(&server, Api::Completions, &request(json!({})))?;
    assert_eq!(off, plain);
    assert_eq!(off.drafted, Drafted::default());

    // The stream begins without drafting, gets it, and loses it again.
    let mut turns = 0;
    let (stream, _) = streamed(&server, Api::Completions, &request(json!({})), |events| {
        if events % 6 == 0 {
            turns += 1;
            switch(&server, turns % 2 == 1).expect("the switch answers while a stream runs");
        }
    })?;
    ensure!(turns > 2, "the switch was turned {turns} times only");
    assert_eq!(stream, plain);
    assert!(stream.drafted.steps > 0, "nothing was drafted: {stream:?}");

    switch(&server, true)?;
    let on = whole(&server, Api::Completions, &request(json!({})))?;
    assert_eq!(on, plain);
    let Drafted {
        drafted_tokens,
        accepted_tokens,
        steps,
    } = on.drafted;
    assert!((1..=drafted_tokens).contains(&steps), "{:?}", on.drafted);
    assert!(accepted_tokens <= drafted_tokens, "{:?}", on.drafted);
    let unwanted = whole(
        &server,
        Api::Completions,
        &request(json!({ "speculative": { "enabled": false } })),
    )?;
    assert_eq!(unwanted.drafted, Drafted::default());
    let log = server.process().log();
    assert!(
        log.contains("drafting switched") && log.contains("peer=\"127.0.0.1:"),
        "{log}"
    );
    Ok(())
}

pub fn a_damaged_draft_is_served_without_unless_it_is_required(_: &Servers) -> anyhow::Result<()> {
    let bundle = reference::find(&fixtures::workspace()?, Precision::Int8)?;
    let manifest = Manifest::load(&bundle)?;
    let draft = manifest.draft.as_ref().context("the bundle has no draft")?;
    let (graph, weights) = (draft.graph.as_str(), format!("{}.data", draft.graph));
    let damages: [(&str, Damage); 4] = [
        (graph, remove),
        (graph, flip),
        (&weights, truncate),
        (&weights, flip),
    ];
    for (name, apply) in damages {
        let copy = linked_copy(&bundle)?;
        apply(&copy.path().join(name))?;
        let log = refused(copy.path(), &[("serving.speculative.required", "true")])?;
        assert!(
            log.contains("serving.speculative.required") && log.contains(name),
            "{name}: {log}"
        );
    }

    let copy = linked_copy(&bundle)?;
    flip(&copy.path().join(&weights))?;
    serves_without_a_draft(copy.path(), &weights, &manifest.digest())
}

/// Starts a server on a bundle with a damaged draft and checks every place where it must say so.
fn serves_without_a_draft(bundle: &Path, damaged: &str, digest: &str) -> anyhow::Result<()> {
    let mut command = servers::command(Precision::Int8)?
        .set("serving.runtime.context_tokens", 512)
        .set("serving.runtime.max_concurrency", 2);
    let path = bundle.to_str().context("the path is not UTF-8")?;
    command = command.set("serving.bundle", path);
    let server = Server::start(&command)?;
    let admin = server.admin()?;

    let ready = admin.get("/readyz")?.json().context("no JSON")?;
    assert_eq!(ready["ready"], true);
    assert_eq!(ready["bundle_digest"], digest);
    let state = &ready["speculation"];
    assert_eq!(state["drafting"], "unavailable", "{state}");
    let detail = state["detail"].as_str().unwrap_or_default();
    assert!(detail.contains(damaged), "{detail}");
    let metrics = admin.get("/metrics")?.text();
    assert!(metrics.contains("outrider_drafting{state=\"unavailable\"} 1"));
    assert!(!metrics.contains("outrider_draft_info{"));
    let log = server.process().log();
    assert!(
        log.contains("WARN") && log.contains("serving without a draft") && log.contains(damaged),
        "{log}"
    );

    // Callers learn that there is none, and nothing of the disk.
    let models = server.client().get("/v1/models")?;
    let listed = models.json().context("no JSON")?;
    let speculation = &listed["data"][0]["speculation"];
    assert_eq!(speculation["drafting"], "unavailable");
    assert_eq!(speculation["detail"], "the draft is damaged");
    assert!(!models.text().contains(damaged), "{}", models.text());

    let refusal = server.put_admin(SPECULATION, &json!({ "enabled": true }))?;
    assert_eq!(refusal.status, 409, "{}", refusal.text());
    assert!(refusal.text().contains(damaged), "{}", refusal.text());
    let request = |speculative: Value| json!({ "model": server.model(), "prompt": PROMPT, "max_tokens": 8, "speculative": speculative });
    let insisting = server
        .client()
        .post("/v1/completions", &request(json!({ "enabled": true })))?;
    assert_eq!(insisting.status, 400, "{}", insisting.text());
    assert!(insisting.text().contains("the draft is damaged"));
    let plain = server
        .client()
        .post("/v1/completions", &request(Value::Null))?;
    assert_eq!(plain.status, 200, "{}", plain.text());
    let usage = &plain.json().context("no JSON")?["usage"]["speculative"];
    assert_eq!(
        *usage,
        json!({ "drafted_tokens": 0, "accepted_tokens": 0, "steps": 0 })
    );
    Ok(())
}

pub fn settings_above_the_drafts_own_stop_the_start(_: &Servers) -> anyhow::Result<()> {
    let bundle = reference::find(&fixtures::workspace()?, Precision::Int8)?;
    let manifest = Manifest::load(&bundle)?;
    let draft = manifest.draft.as_ref().context("the bundle has no draft")?;
    for (key, own) in [
        ("serving.speculative.draft_block_size", draft.block_size),
        ("serving.speculative.candidate_topk", draft.top_k),
    ] {
        // Whether it is required or not: nobody gets another block than the one that was asked for.
        let value = (own + 1).to_string();
        let log = refused(&bundle, &[(key, &value)])?;
        assert!(
            log.contains(&format!("{key} is {value}")) && log.contains(&format!("at most {own}")),
            "{log}"
        );
    }
    Ok(())
}

pub fn a_bundle_without_a_draft_is_refused_where_one_is_required(
    _: &Servers,
) -> anyhow::Result<()> {
    let bundle = reference::find(&fixtures::workspace()?, Precision::Int8)?;
    let mut manifest = Manifest::load(&bundle)?;
    let draft = manifest.draft.take().context("the bundle has no draft")?;
    let copy = linked_copy(&bundle)?;
    for name in [draft.graph.clone(), format!("{}.data", draft.graph)] {
        fs::remove_file(copy.path().join(&name))?;
        manifest.files.remove(&name);
    }
    fs::remove_file(copy.path().join("bundle.json"))?;
    manifest.write(copy.path())?;
    let log = refused(copy.path(), &[("serving.speculative.required", "true")])?;
    assert!(
        log.contains("serving.speculative.required is true, but the bundle has no draft"),
        "{log}"
    );
    Ok(())
}

fn switch(server: &Server, enabled: bool) -> anyhow::Result<()> {
    let answer = server.put_admin(SPECULATION, &json!({ "enabled": enabled }))?;
    let state = answer
        .json()
        .with_context(|| format!("no JSON: {}", answer.text()))?;
    let drafting = if enabled { "on" } else { "off" };
    ensure!(
        answer.status == 200 && state["enabled"] == enabled && state["drafting"] == drafting,
        "{} {state}",
        answer.status
    );
    Ok(())
}
