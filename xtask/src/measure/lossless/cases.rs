//! What is asked in which way: the factors of the suite and the requests made of them.

use std::fmt;

use outrider_verify::wire::Api;
use serde::Serialize;
use serde_json::{Map, Value, json};

/// Where the drafter of a bundle comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Drafter {
    /// Trained for the target.
    Trained,
    /// Random weights.
    Random,
    /// Proposes what it holds for least likely.
    Wrong,
}

/// What happens to the switch while requests run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Switch {
    /// It stays on.
    On,
    /// `PUT /admin/speculation` turns it at random.
    Flipped,
}

impl Drafter {
    /// Every drafter.
    pub const ALL: [Self; 3] = [Self::Trained, Self::Random, Self::Wrong];
}

impl fmt::Display for Drafter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Trained => "trained",
            Self::Random => "random",
            Self::Wrong => "wrong",
        })
    }
}

impl Switch {
    /// Every way.
    pub const ALL: [Self; 2] = [Self::On, Self::Flipped];
}

impl fmt::Display for Switch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::On => "on",
            Self::Flipped => "flipped",
        })
    }
}

/// The factors that belong to a request, each with its values.
pub const REQUEST_FACTORS: [(&str, &[&str]); 5] = [
    ("sampling", &["greedy", "sampled"]),
    ("penalties", &["none", "presence+frequency", "repetition"]),
    ("bias", &["none", "biased"]),
    ("stop", &["none", "strings"]),
    ("delivery", &["whole", "stream"]),
];

/// A request that is made with drafting off and on.
#[derive(Clone, Debug, PartialEq)]
pub struct Ask {
    /// What reports call it.
    pub id: String,
    /// The interface.
    pub api: Api,
    /// The fields of the request.
    pub fields: Value,
    /// Whether the answer is streamed.
    pub stream: bool,
}

/// Values that depend on a pair's vocabulary.
#[derive(Clone, Debug)]
pub struct Vocabulary {
    /// Bias by token id.
    pub bias: Value,
    /// Stop strings.
    pub stop: Value,
}

impl Ask {
    /// A request for `prompt`, with the values that `choices` picks from [`REQUEST_FACTORS`].
    pub fn new(
        id: String,
        api: Api,
        prompt: &Value,
        choices: [usize; 5],
        seed: usize,
        max_tokens: usize,
        vocabulary: &Vocabulary,
    ) -> Self {
        let mut fields: Map<String, Value> = prompt.as_object().cloned().unwrap_or_default();
        let mut set = |name: &str, value: Value| fields.insert(name.to_owned(), value);
        set("max_tokens", json!(max_tokens));
        match api {
            Api::Completions => set("logprobs", json!(3)),
            Api::Chat => {
                set("logprobs", json!(true));
                set("top_logprobs", json!(3))
            }
        };
        let [sampling, penalties, bias, stop, delivery] = choices;
        if sampling == 0 {
            set("temperature", json!(0));
        } else {
            set("temperature", json!(0.8));
            set("top_p", json!(0.95));
            set("seed", json!(seed));
        }
        match penalties {
            0 => {}
            1 => {
                set("presence_penalty", json!(0.4));
                set("frequency_penalty", json!(0.3));
            }
            _ => {
                set("repetition_penalty", json!(1.15));
            }
        }
        if bias == 1 {
            set("logit_bias", vocabulary.bias.clone());
        }
        if stop == 1 {
            set("stop", vocabulary.stop.clone());
        }
        Self {
            id,
            api,
            fields: fields.into(),
            stream: delivery == 1,
        }
    }
}

/// The names of the values that `choices` picks.
pub fn describe(choices: [usize; 5]) -> Vec<(&'static str, String)> {
    REQUEST_FACTORS
        .iter()
        .zip(choices)
        .map(|(&(name, values), choice)| (name, values[choice].to_owned()))
        .collect()
}

/// Every combination of [`REQUEST_FACTORS`].
pub fn every_choice() -> Vec<[usize; 5]> {
    let mut choices = vec![[0; 5]];
    for (factor, (_, values)) in REQUEST_FACTORS.iter().enumerate() {
        choices = (0..values.len())
            .flat_map(|value| {
                choices.iter().map(move |choice| {
                    let mut choice = *choice;
                    choice[factor] = value;
                    choice
                })
            })
            .collect();
    }
    choices
}

/// Which server a run needs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct ServerKey {
    /// Where the drafter comes from.
    pub drafter: Drafter,
    /// The bundle's numeric form.
    pub bundle: &'static str,
    /// How wide blocks are.
    #[serde(flatten)]
    pub block: Block,
}

/// How wide blocks are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Block {
    /// `serving.speculative.draft_block_size`.
    pub block_size: usize,
    /// `serving.speculative.adaptive_width`: whether the server may check less of a block, or nothing.
    pub adaptive_width: bool,
}

/// Blocks of these sizes, all of which are checked, and the last of them adaptive.
pub const fn blocks<const N: usize, const M: usize>(sizes: [usize; N]) -> [Block; M] {
    assert!(M == N + 1, "the last size is there twice");
    let mut blocks = [Block {
        block_size: sizes[N - 1],
        adaptive_width: true,
    }; M];
    let mut index = 0;
    while index < N {
        blocks[index] = Block {
            block_size: sizes[index],
            adaptive_width: false,
        };
        index += 1;
    }
    blocks
}

impl fmt::Display for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = if self.adaptive_width { "≤" } else { "" };
        f.pad(&format!("{sign}{}", self.block_size))
    }
}

/// Requests that are made together.
#[derive(Clone, Debug)]
pub struct Run {
    /// The server.
    pub server: ServerKey,
    /// Requests in flight.
    pub concurrency: usize,
    /// What happens to the switch.
    pub switch: Switch,
    /// Further factors that all requests of the run share, for the report.
    pub factors: Vec<(&'static str, String)>,
    /// Fewer tokens than the requests ask for, with drafting on; the answers are compared as far as they go.
    pub limit_tokens: Option<usize>,
    /// The requests.
    pub asks: Vec<Ask>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_choice_is_there_once_and_makes_another_request() {
        let vocabulary = Vocabulary {
            bias: json!({ "1": 2 }),
            stop: json!(["a"]),
        };
        let asks: HashSet<String> = every_choice()
            .into_iter()
            .map(|choices| {
                let prompt = json!({ "prompt": "x" });
                let ask = Ask::new(
                    String::new(),
                    Api::Completions,
                    &prompt,
                    choices,
                    7,
                    9,
                    &vocabulary,
                );
                format!("{} {}", ask.fields, ask.stream)
            })
            .collect();
        assert_eq!(asks.len(), 2 * 3 * 2 * 2 * 2);
    }
}
