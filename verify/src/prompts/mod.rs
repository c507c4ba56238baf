//! What the service is asked: the built-in set, a file of one's own, or a sample of recorded traffic.
//!
//! A [`Case`] is a prompt without its settings: how long the answer may be and how tokens are chosen is for the command that asks.

mod built_in;
mod file;

use serde_json::{Map, Value};

pub use built_in::{SCENARIOS, built_in};
pub use file::{PromptError, read};

use crate::wire::Api;

/// Prompts of each scenario that are asked when nothing else is said: enough to show one wrong token in 2,000, few enough for minutes.
pub const PROMPTS_PER_SCENARIO: usize = 14;

/// One prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// Scenario and line, such as `code 7`.
    pub id: String,
    /// What kind of use it stands for.
    pub scenario: String,
    /// The interface it is meant for.
    pub api: Api,
    /// The fields of a request that hold it, and the settings that came with it.
    pub fields: Map<String, Value>,
}

impl Case {
    /// The prompt as a person reads it: the text, or the last message.
    pub fn excerpt(&self) -> String {
        match self.api {
            Api::Completions => match self.fields.get("prompt") {
                Some(Value::String(text)) => text.clone(),
                Some(other) => other.to_string(),
                None => String::new(),
            },
            Api::Chat => {
                let content = self
                    .fields
                    .get("messages")
                    .and_then(Value::as_array)
                    .and_then(|messages| messages.last())
                    .and_then(|message| message.get("content"));
                match content {
                    Some(Value::String(text)) => text.clone(),
                    Some(other) => other.to_string(),
                    None => String::new(),
                }
            }
        }
    }
}

/// At most `limit` cases of each scenario, spread evenly over those that there are.
pub fn spread(cases: Vec<Case>, limit: usize) -> Vec<Case> {
    let mut scenarios: Vec<(String, Vec<Case>)> = Vec::new();
    for case in cases {
        match scenarios
            .iter_mut()
            .find(|(scenario, _)| *scenario == case.scenario)
        {
            Some((_, cases)) => cases.push(case),
            None => scenarios.push((case.scenario.clone(), vec![case])),
        }
    }
    let pick = |(_, cases): (String, Vec<Case>)| {
        let (count, kept) = (cases.len(), cases.len().min(limit));
        let mut picked = (0..kept).map(move |index| index * count / kept).peekable();
        let keep = move |(index, case)| (picked.next_if_eq(&index).is_some()).then_some(case);
        cases
            .into_iter()
            .enumerate()
            .filter_map(keep)
            .collect::<Vec<_>>()
    };
    scenarios.into_iter().flat_map(pick).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_set_has_every_scenario_and_no_prompt_twice() {
        let cases = built_in();
        for scenario in SCENARIOS {
            let found = cases.iter().filter(|case| case.scenario == scenario);
            assert!(found.count() >= 16, "{scenario}");
        }
        let mut prompts: Vec<String> = cases
            .iter()
            .map(|case| Value::Object(case.fields.clone()).to_string())
            .collect();
        prompts.sort();
        prompts.dedup();
        assert_eq!(prompts.len(), cases.len());
    }

    #[test]
    fn fewer_cases_are_spread_over_all_of_a_scenario() {
        let cases = spread(built_in(), 2);
        assert_eq!(cases.len(), 2 * SCENARIOS.len());
        let ids: Vec<&str> = cases.iter().map(|case| case.id.as_str()).collect();
        assert_eq!(ids[..2], ["chat 1", "chat 22"]);
        assert_eq!(spread(built_in(), 1000), built_in());
    }

    #[test]
    fn a_document_stands_before_the_question() {
        let cases = built_in();
        let case = cases.iter().find(|case| case.scenario == "long_context");
        let content = case.unwrap().excerpt();
        assert!(content.starts_with("Minutes of the harbour council"));
        assert!(content.ends_with('?'), "{content}");
    }
}
