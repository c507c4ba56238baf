//! Requests as callers mix them: short and long prompts, conversations and texts, greedy and sampled, streamed and whole.

use outrider_verify::wire::Api;
use serde_json::{Value, json};

use crate::prompts::{self, Prompt};
use crate::random::Random;

/// Tokens of a slot in which the longest prompt and its answer fit.
pub const CONTEXT_TOKENS: usize = 2048;
/// Least and most tokens of an answer.
const ANSWER_TOKENS: [usize; 2] = [16, 96];
/// Of ten requests, so many are sampled.
const SAMPLED_OF_TEN: usize = 5;
/// Of ten requests, so many are streamed.
const STREAMED_OF_TEN: usize = 8;

/// The built-in prompts, one list for each kind.
#[derive(Debug)]
pub struct Traffic {
    kinds: Vec<Vec<Prompt>>,
    seed: u64,
}

/// One request.
#[derive(Clone, Debug)]
pub struct Planned {
    /// Its prompt, such as `code 7`.
    pub prompt: String,
    /// The interface it is for.
    pub api: Api,
    /// Whether it asks for a stream.
    pub streamed: bool,
    /// Its fields, without the model, `stream` and what a measurement adds.
    pub fields: Value,
}

impl Traffic {
    /// Requests that differ with the seed.
    pub fn new(seed: u64) -> anyhow::Result<Self> {
        let kinds = prompts::KINDS.iter().map(|kind| prompts::of_kind(kind));
        Ok(Self {
            kinds: kinds.collect::<anyhow::Result<_>>()?,
            seed,
        })
    }

    /// Request `number`: always the same one, so that two sides can be asked the same.
    pub fn request(&self, number: u64) -> Planned {
        let mut random = Random::new(self.seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let kind = &self.kinds[random.below(self.kinds.len())];
        let prompt = &kind[random.below(kind.len())];
        let mut fields = prompt.fields.clone();
        let [least, most] = ANSWER_TOKENS;
        fields["max_tokens"] = json!(least + random.below(most - least + 1));
        let sampled = random.below(10) < SAMPLED_OF_TEN;
        fields["temperature"] = json!(if sampled { 0.8 } else { 0.0 });
        fields["seed"] = json!(random.below(1 << 30));
        Planned {
            prompt: prompt.id.clone(),
            api: prompt.api,
            streamed: random.below(10) < STREAMED_OF_TEN,
            fields,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn the_same_number_is_the_same_request_and_all_sorts_come() {
        let traffic = Traffic::new(5).unwrap();
        let mut sorts = HashSet::new();
        for number in 0..200 {
            let planned = traffic.request(number);
            assert_eq!(planned.fields, traffic.request(number).fields);
            let kind = planned.prompt.split(' ').next().unwrap().to_owned();
            sorts.insert((kind, planned.streamed, planned.fields["temperature"] == 0.0));
        }
        assert_eq!(sorts.len(), prompts::KINDS.len() * 4);
    }
}
