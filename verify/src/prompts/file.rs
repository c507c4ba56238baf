//! Prompts from files, one JSON value a line: a text, a list of messages, a request body, or a line of an audit log that holds one.
//!
//! A line that is none of these is an error with its number: a prompt that is silently left out would count as compared.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::Case;
use crate::wire::Api;

/// Fields that the commands set themselves, or that ask for what can't be compared.
const NOT_KEPT: [&str; 14] = [
    "model",
    "stream",
    "stream_options",
    "n",
    "best_of",
    "echo",
    "user",
    "speculative",
    "return_token_ids",
    "logprobs",
    "top_logprobs",
    "store",
    "metadata",
    "service_tier",
];

/// Why a file gives no prompts.
#[derive(Debug, thiserror::Error)]
pub enum PromptError {
    /// It can't be read.
    #[error("cannot read {}", path.display())]
    Unreadable {
        /// Which file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// A line is not a prompt.
    #[error("{}, line {line}: {why}", path.display())]
    Line {
        /// Which file.
        path: PathBuf,
        /// Which line, from 1.
        line: usize,
        /// What is wrong with it.
        why: String,
    },
    /// There is nothing in it.
    #[error("{} holds no prompt", path.display())]
    Empty {
        /// Which file.
        path: PathBuf,
    },
}

/// Every prompt of a file. The scenario is the line's `scenario`, else the name of the file without its ending.
///
/// Empty lines are skipped, and of an audit log the lines about anything but a request for a completion.
pub fn read(path: &Path) -> Result<Vec<Case>, PromptError> {
    let text = std::fs::read_to_string(path).map_err(|source| PromptError::Unreadable {
        path: path.to_owned(),
        source,
    })?;
    let scenario = path.file_stem().map_or_else(
        || "own".to_owned(),
        |stem| stem.to_string_lossy().into_owned(),
    );
    let mut cases = Vec::new();
    for (index, line) in text.lines().enumerate() {
        if line.trim().is_empty() {
            continue;
        }
        let fault = |why| PromptError::Line {
            path: path.to_owned(),
            line: index + 1,
            why,
        };
        let value: Value = serde_json::from_str(line).map_err(|error| fault(error.to_string()))?;
        cases.push(case(value, &scenario, index + 1).map_err(fault)?);
    }
    if cases.is_empty() {
        return Err(PromptError::Empty {
            path: path.to_owned(),
        });
    }
    Ok(cases)
}

fn case(value: Value, scenario: &str, number: usize) -> Result<Case, String> {
    let mut fields = match value {
        Value::String(prompt) => Map::from_iter([("prompt".to_owned(), prompt.into())]),
        Value::Array(messages) => Map::from_iter([("messages".to_owned(), messages.into())]),
        Value::Object(fields) => fields,
        other => {
            return Err(format!(
                "{other} is no prompt, list of messages or request body"
            ));
        }
    };
    let scenario = match fields.shift_remove("scenario") {
        None => scenario.to_owned(),
        Some(Value::String(scenario)) if !scenario.is_empty() => scenario,
        Some(other) => return Err(format!("`scenario` is {other}, expected a name")),
    };
    for name in NOT_KEPT {
        fields.shift_remove(name);
    }
    let api = match (
        fields.contains_key("prompt"),
        fields.contains_key("messages"),
    ) {
        (true, false) => Api::Completions,
        (false, true) => Api::Chat,
        (true, true) => return Err("it has both `prompt` and `messages`".into()),
        (false, false) => return Err("it has neither `prompt` nor `messages`".into()),
    };
    let one = match fields.get("prompt") {
        None | Some(Value::String(_)) => true,
        // One list of token ids.
        Some(Value::Array(ids)) => !ids.is_empty() && ids.iter().all(Value::is_u64),
        Some(_) => false,
    };
    if !one {
        return Err("`prompt` must be one text or one list of token ids".into());
    }
    Ok(Case {
        id: format!("{scenario} {number}"),
        scenario,
        api,
        fields,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn texts_conversations_and_request_bodies_are_prompts() {
        let check = |line: Value, api, kept: Value| {
            let case = case(line, "own", 3).unwrap();
            assert_eq!(case.api, api);
            assert_eq!(Value::Object(case.fields), kept);
            assert_eq!(case.id, "own 3");
        };
        let messages = json!([{ "role": "user", "content": "hi" }]);
        check(json!("Once"), Api::Completions, json!({ "prompt": "Once" }));
        check(messages.clone(), Api::Chat, json!({ "messages": messages }));
        check(
            json!({ "model": "x", "messages": messages, "stream": true, "temperature": 0.3, "max_tokens": 9 }),
            Api::Chat,
            json!({ "messages": messages, "temperature": 0.3, "max_tokens": 9 }),
        );
        check(
            json!({ "prompt": [1, 2, 3] }),
            Api::Completions,
            json!({ "prompt": [1, 2, 3] }),
        );
    }

    #[test]
    fn a_line_that_is_no_prompt_is_refused_with_the_reason() {
        let check = |line: Value, part: &str| {
            let error = case(line, "own", 1).unwrap_err();
            assert!(error.contains(part), "{error}");
        };
        check(json!(3), "3 is no prompt");
        check(json!({ "text": "hi" }), "neither");
        check(json!({ "prompt": "a", "messages": [] }), "both");
        check(json!({ "prompt": ["a", "b"] }), "one text");
        check(json!({ "prompt": "a", "scenario": 1 }), "`scenario` is 1");
    }
}
