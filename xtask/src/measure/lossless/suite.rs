//! Runs requests with drafting off and on, and compares the answers.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::Context;
use serde_json::json;

use super::cases::{Ask, Drafter, Run, ServerKey, Switch};
use super::compare::compare;
use super::report::{Difference, Report, RunReport, ServedBundle};
use crate::answer::{Answer, Drafted, streamed, whole};
use crate::random::Random;
use crate::server_process::ServerCommand;
use crate::session::Session;

/// An answer of this many tokens has room for a drafted one: the first comes from the prompt, and the last is never drafted for.
const DRAFTABLE_TOKENS: usize = 3;
/// One event of a stream in so many turns the switch.
const EVENTS_FOR_A_FLIP: usize = 3;
/// What is least likely is sampled once in a while; the drafter that proposes it is right no more often than this.
const WRONG_DRAFTS_FOR_A_RIGHT_ONE: u64 = 200;
/// Differences that are asked for once more, each alone.
const REPEATED_DIFFERENCES: usize = 20;

/// Whether a pass drafts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pass {
    /// Each request says no.
    Off,
    /// The server's setting holds.
    On(Switch),
}

/// Runs everything; `command` says how to start a server, `progress` is told of each run.
///
/// An answer without drafting is asked for once, in the first run that needs it, at the concurrency of that run.
pub fn run(
    mut runs: Vec<Run>,
    command: impl Fn(&ServerKey) -> anyhow::Result<ServerCommand>,
    progress: impl Fn(&RunReport),
) -> anyhow::Result<Report> {
    let mut report = Report::default();
    let mut baselines: HashMap<String, Answer> = HashMap::new();
    runs.sort_by(|a, b| a.server.cmp(&b.server));
    for same_server in runs.chunk_by(|a, b| a.server == b.server) {
        let key = &same_server[0].server;
        let command = command(key)?
            .set("serving.speculative.enabled", true)
            .set("serving.speculative.draft_block_size", key.block.block_size)
            // Whole blocks are the stronger proof; what a server without settings does is the other value.
            .set(
                "serving.speculative.adaptive_width",
                key.block.adaptive_width,
            )
            // A prompt found in the cache of a request without drafting has no draft context yet, and a short answer can end before there is one.
            .set("serving.runtime.prefix_cache", key.block.adaptive_width);
        let session = Session::start(&command)
            .with_context(|| format!("cannot start the server for {key:?}"))?;
        report.bundle(ServedBundle {
            drafter: key.drafter,
            bundle: key.bundle.to_owned(),
            digest: session.fact("bundle_digest").to_owned(),
            lossless_class: session.fact("lossless_class").to_owned(),
        });
        let unavailable = session.unavailable();
        for run in same_server {
            if let Some(reason) = &unavailable {
                report.runs.push(RunReport::invalid(
                    run,
                    format!("nothing was drafted: {reason}"),
                ));
                continue;
            }
            let one = run_one(&session, run, &mut baselines, &mut report.differences)
                .with_context(|| format!("{key:?}{}", session.process().log_tail()))?;
            progress(&one);
            report.runs.push(one);
        }
    }
    Ok(report)
}

fn run_one(
    session: &Session,
    run: &Run,
    baselines: &mut HashMap<String, Answer>,
    differences: &mut Vec<Difference>,
) -> anyhow::Result<RunReport> {
    let began = Instant::now();
    let key = |ask: &Ask| format!("{} {:?} {}", run.server.bundle, ask.api, ask.fields);
    let missing: Vec<&Ask> = run
        .asks
        .iter()
        .filter(|ask| !baselines.contains_key(&key(ask)))
        .collect();
    let mut faults = Vec::new();
    let off = ask_all(session, &missing, run.concurrency, Pass::Off, None)?;
    for (ask, answer) in missing.into_iter().zip(off) {
        if answer.drafted.drafted_tokens > 0 {
            faults.push(format!("drafted although it was off: {}", ask.id));
        }
        baselines.insert(key(ask), answer);
    }
    let off_seconds = began.elapsed().as_secs_f64();

    let asks: Vec<&Ask> = run.asks.iter().collect();
    let on = ask_all(
        session,
        &asks,
        run.concurrency,
        Pass::On(run.switch),
        run.limit_tokens,
    )?;
    let mut drafted = Drafted::default();
    let (mut tokens, mut plain) = (0, 0);
    let differences_before = differences.len();
    for (ask, answer) in asks.iter().zip(&on) {
        tokens += answer.token_ids.len();
        drafted += answer.drafted;
        if answer.drafted.drafted_tokens == 0 && answer.token_ids.len() >= DRAFTABLE_TOKENS {
            plain += 1;
        }
        let off = &baselines[&key(ask)];
        let Some(disagreement) = compare(off, answer, run.limit_tokens) else {
            continue;
        };
        let repeats_alone = if differences.len() < REPEATED_DIFFERENCES {
            let off = ask_all(session, &[*ask], 1, Pass::Off, None)?;
            let on = ask_all(session, &[*ask], 1, Pass::On(Switch::On), run.limit_tokens)?;
            Some(compare(&off[0], &on[0], run.limit_tokens).is_some())
        } else {
            None
        };
        differences.push(Difference {
            server: run.server.clone(),
            concurrency: run.concurrency,
            switch: run.switch,
            prompt: ask.id.clone(),
            request: ask.fields.clone(),
            repeats_alone,
            disagreement,
        });
    }
    match run.switch {
        // Where little is accepted, not to draft can be what pays.
        _ if run.server.block.adaptive_width => {}
        Switch::On if plain > 0 => faults.push(format!("nothing was drafted for {plain} answers")),
        Switch::Flipped if drafted.drafted_tokens == 0 => {
            faults.push("nothing was drafted".to_owned());
        }
        _ => {}
    }
    if run.server.drafter == Drafter::Wrong
        && drafted.accepted_tokens * WRONG_DRAFTS_FOR_A_RIGHT_ONE > drafted.drafted_tokens
    {
        faults.push("the drafter that is to be wrong was right".to_owned());
    }
    Ok(RunReport {
        requests: run.asks.len(),
        tokens,
        drafted,
        differences: differences.len() - differences_before,
        faults,
        off_seconds,
        on_seconds: began.elapsed().as_secs_f64() - off_seconds,
        ..RunReport::of(run)
    })
}

/// The answers in the order of the requests, of which `concurrency` are in flight.
fn ask_all(
    session: &Session,
    asks: &[&Ask],
    concurrency: usize,
    pass: Pass,
    limit_tokens: Option<usize>,
) -> anyhow::Result<Vec<Answer>> {
    let next = AtomicUsize::new(0);
    let work = || -> anyhow::Result<Vec<(usize, Answer)>> {
        let mut answers = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(ask) = asks.get(index) else {
                return Ok(answers);
            };
            let answer = ask_one(session, ask, pass, limit_tokens, index as u64)
                .with_context(|| ask.id.clone())?;
            answers.push((index, answer));
        }
    };
    let mut answers: Vec<(usize, Answer)> = thread::scope(|scope| {
        let workers: Vec<_> = (0..concurrency).map(|_| scope.spawn(work)).collect();
        let answers: anyhow::Result<Vec<_>> = workers
            .into_iter()
            .map(|worker| worker.join().expect("a worker does not panic"))
            .collect();
        answers
    })?
    .into_iter()
    .flatten()
    .collect();
    if pass == Pass::On(Switch::Flipped) {
        session.set_speculation(true)?;
    }
    answers.sort_by_key(|(index, _)| *index);
    Ok(answers.into_iter().map(|(_, answer)| answer).collect())
}

fn ask_one(
    session: &Session,
    ask: &Ask,
    pass: Pass,
    limit_tokens: Option<usize>,
    seed: u64,
) -> anyhow::Result<Answer> {
    let mut fields = ask.fields.clone();
    if pass == Pass::Off {
        fields["speculative"] = json!({ "enabled": false });
    }
    if let (Pass::On(_), Some(limit)) = (pass, limit_tokens) {
        fields["max_tokens"] = json!(limit);
    }
    let (client, model) = (session.client(), session.model());
    let flipped = pass == Pass::On(Switch::Flipped);
    if !ask.stream && !flipped {
        return whole(client, model, ask.api, &fields);
    }
    let mut random = Random::new(seed);
    let mut fault = None;
    let (answer, _) = streamed(client, model, ask.api, &fields, |_| {
        if flipped && random.below(EVENTS_FOR_A_FLIP) == 0 {
            let outcome = session.set_speculation(random.below(2) == 1);
            fault = fault.take().or(outcome.err());
        }
    })?;
    match fault {
        Some(fault) => Err(fault),
        None => Ok(answer),
    }
}
