//! Drafting in the real server: the recorded pair, losslessness in every pair of settings, and the law that sampled tokens follow.

use std::collections::HashMap;
use std::path::PathBuf;

use anyhow::{Context, ensure};
use outrider_bundle::manifest::Precision;
use outrider_tests::answer::{Drafted, request, whole};
use outrider_tests::fixtures;
use outrider_tests::servers::{Server, Servers};
use outrider_verify::wire::Api;
use serde_json::{Value, json};
use xtask::measure::lossless::cases::{Drafter, Run, ServerKey};
use xtask::measure::lossless::reference_pair::{self, Extent};
use xtask::measure::lossless::tiny_pair::{self, Recorded};
use xtask::measure::lossless::{self, Verdict};
use xtask::reference::{self, precision_name};
use xtask::server_process::ServerCommand;

pub fn the_recorded_pair_gives_its_tokens_and_keeps_as_many_drafts(
    _: &Servers,
) -> anyhow::Result<()> {
    let dir = fixtures::scratch_dir()?;
    let server = tiny_server(dir.path().join("bundle"), Drafter::Trained)?;
    for (number, run) in tiny_pair::recorded(&fixtures::workspace()?)?
        .iter()
        .enumerate()
    {
        let fields = json!({ "prompt": run.prompt, "max_tokens": run.output.len(), "temperature": 0, "ignore_eos": true });
        let answer = whole(&server, Api::Completions, &fields)?;
        let expected: Vec<u64> = run.output.iter().map(|&id| id.into()).collect();
        assert_eq!(answer.token_ids, expected, "run {number}");
        assert_eq!(answer.drafted, expected_drafts(run), "run {number}");
    }
    Ok(())
}

/// What the recorded passes come to in the server, which drafts for no last token and counts no draft behind the end.
fn expected_drafts(run: &Recorded) -> Drafted {
    // The prompt gives the first token.
    let mut left = run.output.len() - 1;
    let mut drafted = Drafted::default();
    for (&proposed, &given) in run.proposed.iter().zip(&run.accept_lengths) {
        if left > 1 {
            drafted.steps += 1;
            drafted.drafted_tokens += proposed as u64;
            drafted.accepted_tokens += (given - 1).min(left) as u64;
        }
        left = left.saturating_sub(given);
    }
    drafted
}

pub fn the_tiny_pair_loses_nothing_in_any_pair_of_settings(_: &Servers) -> anyhow::Result<()> {
    let workspace = fixtures::workspace()?;
    let dir = fixtures::scratch_dir()?;
    let runs = tiny_pair::covering_runs(&workspace)?;
    nothing_differs(runs, |key| {
        lossless::tiny_bundle(&workspace, key, dir.path())
    })
}

pub fn the_reference_pair_loses_nothing(_: &Servers) -> anyhow::Result<()> {
    let workspace = fixtures::workspace()?;
    let runs = reference_pair::runs(Extent::QUICK)?;
    nothing_differs(runs, |key| {
        let precision = reference::PRECISIONS
            .into_iter()
            .find(|&precision| precision_name(precision) == key.bundle);
        reference::find(&workspace, precision.context("no form of the model")?)
    })
}

fn nothing_differs(
    runs: Vec<Run>,
    bundle: impl Fn(&ServerKey) -> anyhow::Result<PathBuf>,
) -> anyhow::Result<()> {
    let library = fixtures::onnxruntime(&fixtures::workspace()?)?;
    let binary = fixtures::server_binary()?;
    let report = lossless::run(
        runs,
        |key| {
            Ok(ServerCommand::new(binary.clone(), &bundle(key)?, &library)?
                .set("serving.runtime.kv_cache_ratio", 0.9)
                .set("serving.logging.level", "warn"))
        },
        |_| {},
    )?;
    ensure!(report.verdict() == Verdict::Pass, "{report}");
    Ok(())
}

/// Completions that the law is tested with.
const SAMPLES: usize = 20_000;
/// Completions of one request.
const SAMPLES_PER_REQUEST: usize = 500;
/// What comes after these is uncertain, 179 pairs are likely enough to be cells of their own, and the drafter is often right all the same.
const SAMPLED_PROMPT: [u32; 2] = [44, 29];
/// Tokens of the vocabulary.
const VOCABULARY: usize = 64;
/// Cells of which fewer samples are expected are put together.
const LEAST_EXPECTED: f64 = 8.0;

pub fn sampled_tokens_follow_the_law_of_the_target(_: &Servers) -> anyhow::Result<()> {
    let dir = fixtures::scratch_dir()?;
    let server = tiny_server(dir.path().join("bundle"), Drafter::Trained)?;
    let prompt = SAMPLED_PROMPT.to_vec();

    // Each seed gives three tokens: the first with the prompt, the second where it was drafted and checked, the third to leave room for that.
    let (mut first, mut pairs) = (HashMap::new(), HashMap::new());
    let mut drafted = Drafted::default();
    for number in 0..SAMPLES / SAMPLES_PER_REQUEST {
        let fields = json!({
            "prompt": prompt, "max_tokens": 3, "ignore_eos": true, "temperature": 1, "n": SAMPLES_PER_REQUEST, "seed": number * 1_000_003,
        });
        let body = post(&server, &fields)?;
        drafted += serde_json::from_value(body["usage"]["speculative"].clone())?;
        let choices = body["choices"].as_array().context("no choices")?;
        for choice in choices {
            let ids: Vec<u32> = serde_json::from_value(choice["token_ids"].clone())?;
            assert_eq!(ids.len(), 3);
            *first.entry(vec![ids[0]]).or_insert(0) += 1;
            *pairs.entry(vec![ids[0], ids[1]]).or_insert(0) += 1;
        }
    }
    assert!(
        drafted.steps >= SAMPLES as u64 / 2 && drafted.accepted_tokens >= SAMPLES as u64 / 4,
        "drafting had too little to do with it: {drafted}"
    );

    let law = laws(&server, std::slice::from_ref(&prompt))?.remove(0);
    let of_first: HashMap<Vec<u32>, f64> = (0..)
        .zip(&law)
        .map(|(id, &probability)| (vec![id], probability))
        .collect();
    assert_follows(&first, &of_first, "the first token");

    let prompts: Vec<Vec<u32>> = (0..VOCABULARY as u32)
        .map(|id| [&prompt[..], &[id]].concat())
        .collect();
    let mut of_pairs = HashMap::new();
    for (first, second) in laws(&server, &prompts)?.iter().enumerate() {
        for (id, probability) in second.iter().enumerate() {
            of_pairs.insert(vec![first as u32, id as u32], law[first] * probability);
        }
    }
    assert_follows(&pairs, &of_pairs, "the first two tokens");
    Ok(())
}

/// Probability of every token behind each of the prompts, from the target's own log-probabilities: each token is scored as part of a prompt.
fn laws(server: &Server, prompts: &[Vec<u32>]) -> anyhow::Result<Vec<Vec<f64>>> {
    prompts
        .iter()
        .map(|prompt| {
            let scored: Vec<Vec<u32>> = (0..VOCABULARY as u32)
                .map(|id| [&prompt[..], &[id]].concat())
                .collect();
            let fields = json!({ "prompt": scored, "echo": true, "max_tokens": 0, "logprobs": 0 });
            let body = post(server, &fields)?;
            let choices = body["choices"].as_array().context("no choices")?;
            let law: Vec<f64> = choices
                .iter()
                .map(|choice| {
                    let scores = choice["logprobs"]["token_logprobs"].as_array();
                    let last = scores.and_then(|scores| scores.last()?.as_f64());
                    last.map(f64::exp).context("no log-probability")
                })
                .collect::<anyhow::Result<_>>()?;
            let sum: f64 = law.iter().sum();
            ensure!((sum - 1.0).abs() < 1e-4, "the probabilities sum to {sum}");
            Ok(law)
        })
        .collect()
}

fn post(server: &Server, fields: &Value) -> anyhow::Result<Value> {
    let path = Api::Completions.path();
    let response = server.client().post(path, &request(server, fields))?;
    ensure!(
        response.status == 200,
        "{} {}",
        response.status,
        response.text()
    );
    response.json().context("no JSON")
}

/// Pearson's chi-squared test at the level 0.001. The seeds are fixed, so the outcome is the same in every run.
fn assert_follows(counts: &HashMap<Vec<u32>, usize>, law: &HashMap<Vec<u32>, f64>, what: &str) {
    let samples = counts.values().sum::<usize>() as f64;
    let (mut chi_squared, mut cells) = (0.0, 0);
    let (mut rare_count, mut rare_expected) = (0.0, 0.0);
    let mut add = |count: f64, expected: f64| {
        chi_squared += (count - expected).powi(2) / expected;
        cells += 1;
    };
    for (ids, probability) in law {
        let count = counts.get(ids).copied().unwrap_or(0) as f64;
        let expected = samples * probability;
        if expected < LEAST_EXPECTED {
            rare_count += count;
            rare_expected += expected;
        } else {
            add(count, expected);
        }
    }
    if rare_expected >= LEAST_EXPECTED {
        add(rare_count, rare_expected);
    }
    assert!(cells >= 50, "{what}: {cells} cells tell little");
    let limit = chi_squared_limit(f64::from(cells - 1));
    assert!(
        chi_squared <= limit,
        "{what}: chi-squared is {chi_squared:.1} in {cells} cells, the limit is {limit:.1}"
    );
}

/// The 0.999 quantile of the chi-squared distribution, after Wilson and Hilferty (1931).
fn chi_squared_limit(degrees: f64) -> f64 {
    const NORMAL_QUANTILE: f64 = 3.0902;
    let spread = 2.0 / (9.0 * degrees);
    degrees * (1.0 - spread + NORMAL_QUANTILE * spread.sqrt()).powi(3)
}

fn tiny_server(bundle: PathBuf, drafter: Drafter) -> anyhow::Result<Server> {
    let workspace = fixtures::workspace()?;
    tiny_pair::export(&workspace, Precision::Fp32, drafter, &bundle)?;
    let library = fixtures::onnxruntime(&workspace)?;
    Server::start(
        &ServerCommand::new(fixtures::server_binary()?, &bundle, &library)?
            .set("serving.speculative.enabled", true)
            .set("serving.speculative.required", true)
            .set("serving.speculative.adaptive_width", false)
            .set("serving.runtime.queue_capacity", SAMPLES_PER_REQUEST)
            .set(
                "serving.runtime.max_completions_per_request",
                SAMPLES_PER_REQUEST,
            )
            .set("serving.logging.level", "warn"),
    )
}
