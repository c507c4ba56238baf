//! The running fp32 server against values of an independent implementation, see `goldens/smollm2-135m`.

use std::collections::HashMap;

use anyhow::Context;
use outrider_bundle::manifest::Precision;
use outrider_tests::answer::whole;
use outrider_tests::fixtures;
use outrider_tests::servers::Servers;
use outrider_verify::wire::Api;
use serde::Deserialize;
use serde_json::json;

/// Two logits may each be off by 2e-3, and the reference values are given to 1e-4.
const LOGIT_DIFFERENCE_TOLERANCE: f64 = 2.0 * 2e-3 + 1e-4;

#[derive(Deserialize)]
struct Case {
    prompt: String,
    prompt_ids: Vec<u64>,
    top10_ids: Vec<u64>,
    top10_logits: Vec<f64>,
    greedy_ids: Vec<u64>,
}

fn cases() -> anyhow::Result<Vec<Case>> {
    let cases: Vec<Case> = fixtures::json("goldens/smollm2-135m/cases.json")?;
    assert_eq!(cases.len(), 4);
    Ok(cases)
}

pub fn greedy_tokens_equal_the_reference_implementation(servers: &Servers) -> anyhow::Result<()> {
    let server = servers.of(Precision::Fp32)?;
    for case in cases()? {
        let request = json!({ "prompt": case.prompt_ids, "max_tokens": 64, "temperature": 0, "ignore_eos": true });
        let answer = whole(server, Api::Completions, &request)?;
        assert_eq!(answer.prompt_token_ids, case.prompt_ids, "{}", case.prompt);
        assert_eq!(
            answer.token_ids, case.greedy_ids,
            "{}: {}",
            case.prompt, answer.text
        );
    }
    Ok(())
}

pub fn chat_renders_the_prompt_of_the_reference_implementation(
    servers: &Servers,
) -> anyhow::Result<()> {
    let server = servers.of(Precision::Fp32)?;
    for case in cases()? {
        let request = json!({
            "messages": [{ "role": "user", "content": case.prompt }],
            "max_tokens": 64, "temperature": 0, "ignore_eos": true,
        });
        let answer = whole(server, Api::Chat, &request)?;
        assert_eq!(answer.prompt_token_ids, case.prompt_ids, "{}", case.prompt);
        assert_eq!(
            answer.token_ids, case.greedy_ids,
            "{}: {}",
            case.prompt, answer.text
        );
    }
    Ok(())
}

/// HTTP gives log-probabilities, which are logits less one number; so their differences are those of the logits.
pub fn first_logits_differ_as_those_of_the_reference_implementation(
    servers: &Servers,
) -> anyhow::Result<()> {
    let server = servers.of(Precision::Fp32)?;
    for case in cases()? {
        let request = json!({
            "prompt": case.prompt_ids, "max_tokens": 1, "temperature": 0, "ignore_eos": true, "logprobs": 20,
        });
        let answer = whole(server, Api::Completions, &request)?;
        let top = answer.logprobs[0]["top"]
            .as_object()
            .context("no top log-probabilities")?;
        let by_text: HashMap<&str, f64> = top
            .iter()
            .filter_map(|(text, value)| Some((text.as_str(), value.as_f64()?)))
            .collect();
        let logprob = |id: u64| -> anyhow::Result<f64> {
            // The reference names tokens by id, the interface by text: a prompt of that one token, echoed, tells the text.
            let echo = json!({ "prompt": [id], "echo": true, "max_tokens": 1, "temperature": 0, "logprobs": 0 });
            let echoed = whole(server, Api::Completions, &echo)?;
            let text = echoed.logprobs[0]["token"]
                .as_str()
                .context("no token text")?
                .to_owned();
            by_text
                .get(text.as_str())
                .copied()
                .with_context(|| format!("token {id} ({text:?}) is not among {by_text:?}"))
        };
        let best = logprob(case.top10_ids[0])?;
        for (&id, &logit) in case.top10_ids.iter().zip(&case.top10_logits) {
            let difference = logprob(id)? - best;
            let expected = logit - case.top10_logits[0];
            assert!(
                (difference - expected).abs() <= LOGIT_DIFFERENCE_TOLERANCE,
                "{}: token {id}: {difference} below the best, the reference says {expected}",
                case.prompt
            );
        }
    }
    Ok(())
}
