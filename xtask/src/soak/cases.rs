//! The requests that callers draw from, each with the answer it had alone.

use anyhow::{Context, ensure};
use outrider_verify::wire::Api;
use serde_json::{Value, json};

use crate::answer::{self, Answer};
use crate::random::Random;
use crate::session::Session;
use crate::traffic::Traffic;

/// Requests without stop strings; half of them come once more with one.
const REQUESTS: u64 = 16;
/// Most tokens of a prompt: long enough for several steps, and room is left for an answer.
const LONGEST_PROMPT_TOKENS: usize = 350;

/// A request and its answer.
#[derive(Clone, Debug)]
pub struct Case {
    /// For reports, such as `code 7 with a stop string`.
    pub name: String,
    /// The interface.
    pub api: Api,
    /// Everything but the model and how the answer is delivered.
    pub fields: Value,
    /// What it is answered when nothing else runs.
    pub answer: Answer,
}

/// Draws the requests and asks each alone.
pub fn prepare(session: &Session, seed: u64) -> anyhow::Result<Vec<Case>> {
    let traffic = Traffic::new(seed)?;
    let mut random = Random::new(seed);
    let mut cases = Vec::new();
    for number in 0.. {
        if cases.len() as u64 >= REQUESTS {
            break;
        }
        let planned = traffic.request(number);
        let Some(answer) = alone(session, planned.api, &planned.fields, &planned.prompt)? else {
            continue;
        };
        cases.push(Case {
            name: planned.prompt,
            api: planned.api,
            fields: planned.fields,
            answer,
        });
    }
    let mut stopped = Vec::new();
    for case in cases.iter().step_by(2) {
        // Some characters from the middle of the answer, where no token need begin.
        let characters: Vec<char> = case.answer.text.chars().collect();
        if characters.len() < 12 {
            continue;
        }
        let begin = 6 + random.below(characters.len() - 9);
        let stop: String = characters[begin..].iter().take(3).collect();
        let mut fields = case.fields.clone();
        fields["stop"] = json!([stop, "\u{1}"]);
        let name = format!("{} with the stop string {stop:?}", case.name);
        let answer = alone(session, case.api, &fields, &name)?
            .with_context(|| format!("{name}: the same prompt was too long a moment ago"))?;
        ensure!(
            case.answer.text.starts_with(&answer.text) && !answer.text.contains(&stop),
            "{name}: the answer is {:?}, without it {:?}",
            answer.text,
            case.answer.text
        );
        stopped.push(Case {
            name,
            fields,
            answer,
            ..case.clone()
        });
    }
    cases.extend(stopped);
    Ok(cases)
}

/// The answer to a request that fits; `None` when its prompt is too long for this run.
fn alone(
    session: &Session,
    api: Api,
    fields: &Value,
    name: &str,
) -> anyhow::Result<Option<Answer>> {
    let request = answer::request(session.model(), fields);
    let response = session.client().post(api.path(), &request)?;
    if response.status == 400 && response.text().contains("context_length_exceeded") {
        return Ok(None);
    }
    ensure!(
        response.status == 200,
        "{name}: {} {}",
        response.status,
        response.text()
    );
    let body = response
        .json()
        .with_context(|| format!("{name}: no JSON"))?;
    let mut answer = Answer::default();
    answer
        .add(api, &body, "message")
        .with_context(|| name.to_owned())?;
    Ok(Some(answer).filter(|answer| answer.prompt_token_ids.len() <= LONGEST_PROMPT_TOKENS))
}
