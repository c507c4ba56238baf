//! What `lossless` asks: every case greedy and sampled with a seed, and some once more with a stop string.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::Pair;
use crate::prompts::Case;
use crate::service::Found;
use crate::wire::Api;

/// How tokens are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Sampling {
    /// The most likely token, `temperature` 0.
    Greedy,
    /// Sampled with a seed.
    Seeded,
    /// Greedy with a stop string out of the answer's middle.
    #[value(skip)]
    Stop,
}

/// How a run is made and what it takes to pass; all of it is in the report.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// Ways of choosing tokens.
    #[serde(rename = "sampling")]
    pub samplings: Vec<Sampling>,
    /// Most tokens of an answer, where the case does not say.
    pub max_tokens: u64,
    /// Seed of the first request; the others count up from it.
    pub seed: u64,
    /// How often the candidate is asked each request.
    pub repeat: usize,
    /// Requests in flight.
    pub concurrency: usize,
    /// Least tokens to be compared.
    pub min_compared_tokens: u64,
    /// Least share of the candidate's tokens that must have been drafted ones, checked by the target.
    pub min_drafted_share: f64,
    /// Take a candidate that does not count drafted tokens for one that drafts.
    pub assume_drafting: bool,
    /// Most near-ties of a run that passes.
    pub max_near_ties: usize,
    /// Most noise in nats that is believed; what is measured beyond it is no rounding.
    pub noise_limit_nats: f64,
}

/// Tokens to compare so that a fault in one of 2,000 is missed in less than one of a hundred runs.
///
/// A run of *n* tokens misses it with probability (1 - p)^n, which is below e^(-np); so n > ln(100) · 2,000 = 9,210.3 is enough.
pub const MIN_COMPARED_TOKENS: u64 = 9_211;

impl Default for Settings {
    fn default() -> Self {
        Self {
            samplings: vec![Sampling::Greedy, Sampling::Seeded],
            max_tokens: 96,
            seed: 20_240_607,
            repeat: 1,
            concurrency: 4,
            min_compared_tokens: MIN_COMPARED_TOKENS,
            min_drafted_share: 0.01,
            assume_drafting: false,
            max_near_ties: 0,
            noise_limit_nats: 0.1,
        }
    }
}

/// One request as both sides get it, but for the switch.
#[derive(Clone, Debug)]
pub struct Ask {
    /// Index of the case.
    pub case: usize,
    /// The interface.
    pub api: Api,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// The request without model and extensions.
    pub fields: Map<String, Value>,
}

impl Ask {
    /// The stop string, where the plan set one.
    pub fn stop(&self) -> Option<&str> {
        match self.sampling {
            Sampling::Stop => self.fields.get("stop")?.get(0)?.as_str(),
            Sampling::Greedy | Sampling::Seeded => None,
        }
    }
}

/// Temperature and nucleus of sampled requests that bring none of their own.
const TEMPERATURE: f64 = 0.8;
const TOP_P: f64 = 0.95;

/// Every case in every way of choosing tokens.
pub fn asks(cases: &[Case], settings: &Settings) -> Vec<Ask> {
    let ways = cases.iter().enumerate().flat_map(|(index, case)| {
        settings
            .samplings
            .iter()
            .map(move |&sampling| (index, case, sampling))
    });
    ways.map(|(index, case, sampling)| Ask {
        case: index,
        api: case.api,
        sampling,
        fields: request(case, sampling, settings, settings.seed + index as u64),
    })
    .collect()
}

/// The request for a case; what a recorded request says of its own length, sampling and seed is kept.
pub fn request(
    case: &Case,
    sampling: Sampling,
    settings: &Settings,
    seed: u64,
) -> Map<String, Value> {
    let mut fields = case.fields.clone();
    let mut default = |name: &str, value: Value| {
        if fields.get(name).is_none_or(Value::is_null) {
            fields.insert(name.to_owned(), value);
        }
    };
    default("seed", seed.into());
    if case.fields.get("max_completion_tokens").is_none() {
        default("max_tokens", settings.max_tokens.into());
    }
    match sampling {
        Sampling::Greedy | Sampling::Stop => {
            fields.insert("temperature".into(), 0.into());
        }
        Sampling::Seeded => {
            let own = case.fields.get("temperature").and_then(Value::as_f64);
            if own.is_none_or(|temperature| temperature == 0.0) {
                fields.insert("temperature".into(), TEMPERATURE.into());
                fields.insert("top_p".into(), TOP_P.into());
            }
        }
    }
    fields
}

/// Cases of a scenario that are asked with a stop string.
const STOPS_IN_SCENARIO: usize = 2;
/// Characters of a stop string: longer than most tokens' tails, so that it tends to cross a token's edge.
const STOP_CHARS: usize = 5;

/// Requests whose answer runs into a stop string in its middle.
pub fn stops(cases: &[Case], pairs: &[Pair], settings: &Settings) -> Vec<Ask> {
    let mut asks: Vec<Ask> = Vec::new();
    for pair in pairs {
        let (Sampling::Greedy, Found::Generation(answer)) = (pair.ask.sampling, &pair.reference)
        else {
            continue;
        };
        let case = &cases[pair.ask.case];
        let of_scenario = |ask: &&Ask| cases[ask.case].scenario == case.scenario;
        if asks.iter().filter(of_scenario).count() == STOPS_IN_SCENARIO
            || case.fields.contains_key("stop")
        {
            continue;
        }
        let chars: Vec<char> = answer.text.chars().collect();
        let middle = chars.len() / 2;
        let Some(stop) = chars.get(middle..middle + STOP_CHARS) else {
            continue;
        };
        let stop: String = stop.iter().collect();
        // Half a character at the end of a cut answer is no text to stop at.
        if stop.trim().is_empty() || stop.contains('\u{fffd}') {
            continue;
        }
        let mut fields = request(case, Sampling::Stop, settings, settings.seed);
        fields.insert("stop".into(), vec![stop].into());
        asks.push(Ask {
            case: pair.ask.case,
            api: case.api,
            sampling: Sampling::Stop,
            fields,
        });
    }
    asks
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn case(fields: Value) -> Case {
        let Value::Object(fields) = fields else {
            panic!("fields are an object")
        };
        Case {
            id: "own 1".into(),
            scenario: "own".into(),
            api: Api::Completions,
            fields,
        }
    }

    #[test]
    fn recorded_settings_are_kept_and_missing_ones_are_filled_in() {
        let check = |fields, sampling, expected| {
            let settings = Settings::default();
            let request = request(&case(fields), sampling, &settings, 7);
            assert_eq!(Value::Object(request), expected);
        };
        check(
            json!({ "prompt": "a" }),
            Sampling::Greedy,
            json!({ "prompt": "a", "seed": 7, "max_tokens": 96, "temperature": 0 }),
        );
        check(
            json!({ "prompt": "a", "temperature": 1.5, "top_k": 3, "seed": 1, "max_completion_tokens": 5 }),
            Sampling::Seeded,
            json!({ "prompt": "a", "temperature": 1.5, "top_k": 3, "seed": 1, "max_completion_tokens": 5 }),
        );
        check(
            json!({ "prompt": "a", "temperature": 1.5, "max_tokens": 4 }),
            Sampling::Greedy,
            json!({ "prompt": "a", "temperature": 0, "max_tokens": 4, "seed": 7 }),
        );
        check(
            json!({ "prompt": "a", "temperature": 0 }),
            Sampling::Seeded,
            json!({ "prompt": "a", "temperature": 0.8, "seed": 7, "max_tokens": 96, "top_p": 0.95 }),
        );
    }

    #[test]
    fn the_least_number_of_tokens_misses_the_fault_in_less_than_one_of_a_hundred_runs() {
        let missed = (1.0 - 1.0 / 2000.0_f64).powf(MIN_COMPARED_TOKENS as f64);
        assert!((0.0099..0.01).contains(&missed), "{missed}");
    }
}
