//! The prompts of `tests/data/prompts`, built into the program so that one file is enough to judge a service.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::Case;
use crate::wire::Api;

/// The scenarios of the built-in set.
pub const SCENARIOS: [&str; 9] = [
    "chat",
    "question_answering",
    "summary",
    "code",
    "structured",
    "translation",
    "long_tail",
    "short_output",
    "long_context",
];

macro_rules! text {
    ($file:literal) => {
        include_str!(concat!("../../../tests/data/prompts/", $file))
    };
}

/// The files, in the order of [`SCENARIOS`].
const FILES: [&str; 9] = [
    text!("chat.jsonl"),
    text!("question_answering.jsonl"),
    text!("summary.jsonl"),
    text!("code.jsonl"),
    text!("structured.jsonl"),
    text!("translation.jsonl"),
    text!("long_tail.jsonl"),
    text!("short_output.jsonl"),
    text!("long_context.jsonl"),
];

const DOCUMENTS: [(&str, &str); 6] = [
    (
        "clockmaker-story.txt",
        text!("documents/clockmaker-story.txt"),
    ),
    (
        "dishwasher-manual.txt",
        text!("documents/dishwasher-manual.txt"),
    ),
    (
        "harbour-minutes.txt",
        text!("documents/harbour-minutes.txt"),
    ),
    ("interview.txt", text!("documents/interview.txt")),
    (
        "inventory-module.txt",
        text!("documents/inventory-module.txt"),
    ),
    (
        "weather-station.txt",
        text!("documents/weather-station.txt"),
    ),
];

/// One line of a file: a conversation or a text to go on from, after a document where one is named.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    prompt: Option<String>,
    #[serde(default)]
    messages: Vec<Message>,
    document: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Message {
    role: String,
    content: String,
}

/// Every case of the built-in set, scenario by scenario.
pub fn built_in() -> Vec<Case> {
    let scenarios = SCENARIOS.iter().zip(FILES);
    let cases = scenarios.flat_map(|(scenario, text)| {
        text.lines()
            .enumerate()
            .map(|(index, line)| case(scenario, index + 1, line))
    });
    cases.collect()
}

fn case(scenario: &str, number: usize, line: &str) -> Case {
    let line: Line = serde_json::from_str(line).expect("the unit tests read every line");
    let document = line.document.map_or_else(String::new, |name| {
        let found = DOCUMENTS.iter().find(|(document, _)| *document == name);
        format!("{}\n", found.expect("the unit tests read every line").1)
    });
    let mut fields = Map::new();
    let api = match line.prompt {
        Some(prompt) => {
            fields.insert("prompt".into(), format!("{document}{prompt}").into());
            Api::Completions
        }
        None => {
            let last = line.messages.len().saturating_sub(1);
            let messages: Vec<Value> = line
                .messages
                .into_iter()
                .enumerate()
                .map(|(index, Message { role, content })| {
                    let before = if index == last { &document } else { "" };
                    json!({ "role": role, "content": format!("{before}{content}") })
                })
                .collect();
            fields.insert("messages".into(), messages.into());
            Api::Chat
        }
    };
    Case {
        id: format!("{scenario} {number}"),
        scenario: scenario.to_owned(),
        api,
        fields,
    }
}
