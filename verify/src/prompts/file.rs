//! Prompts from files, one JSON value a line: a text, a list of messages, a request body, or a line of an audit log that holds one.
//!
//! A line that is none of these is an error with its number: a prompt that is silently left out would count as compared.
//! A body with several prompts is several cases. Of an audit log only requests that were answered are taken.

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
        let Some((value, seed)) = request_of(value).map_err(fault)? else {
            continue;
        };
        cases.extend(cases_of(value, seed, &scenario, index + 1).map_err(fault)?);
    }
    if cases.is_empty() {
        return Err(PromptError::Empty {
            path: path.to_owned(),
        });
    }
    Ok(cases)
}

/// What a line asks, and the seed that it was answered with; `None` for an audit record of a request that was not answered.
fn request_of(value: Value) -> Result<Option<(Value, Option<u64>)>, String> {
    let is_record = value.get("request_id").is_some() && value.get("schema_version").is_some();
    if !is_record {
        return Ok(Some((value, None)));
    }
    if value.get("status").and_then(Value::as_u64) != Some(200) {
        return Ok(None);
    }
    let Some(body) = value.get("request_body").and_then(Value::as_str) else {
        return Err(
            "an audit record without `request_body`, which `serving.audit.prompt_text: true` keeps"
                .into(),
        );
    };
    let body = serde_json::from_str(body).map_err(|error| format!("`request_body`: {error}"))?;
    let seed = value.pointer("/parameters/seed").and_then(Value::as_u64);
    Ok(Some((body, seed)))
}

fn cases_of(
    value: Value,
    seed: Option<u64>,
    scenario: &str,
    number: usize,
) -> Result<Vec<Case>, String> {
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
    if let (Some(seed), None) = (seed, fields.get("seed")) {
        fields.insert("seed".into(), seed.into());
    }
    let case = |id, api, fields| Case {
        id,
        scenario: scenario.clone(),
        api,
        fields,
    };
    let id = format!("{scenario} {number}");
    match (fields.get("prompt"), fields.contains_key("messages")) {
        (Some(_), true) => Err("it has both `prompt` and `messages`".into()),
        (None, false) => Err("it has neither `prompt` nor `messages`".into()),
        (None, true) => Ok(vec![case(id, Api::Chat, fields)]),
        (Some(prompt), false) => {
            let prompts = prompts_of(prompt)?;
            if prompts.len() == 1 {
                return Ok(vec![case(id, Api::Completions, fields)]);
            }
            let one = |(index, prompt): (usize, Value)| {
                let mut fields = fields.clone();
                fields.insert("prompt".into(), prompt);
                case(format!("{id}.{}", index + 1), Api::Completions, fields)
            };
            Ok(prompts.into_iter().enumerate().map(one).collect())
        }
    }
}

/// A text, a list of token ids, or several of them.
fn prompts_of(prompt: &Value) -> Result<Vec<Value>, String> {
    let is_ids = |ids: &[Value]| !ids.is_empty() && ids.iter().all(Value::is_u64);
    let is_one =
        |prompt: &Value| prompt.is_string() || prompt.as_array().is_some_and(|ids| is_ids(ids));
    match prompt {
        one if is_one(one) => Ok(vec![one.clone()]),
        Value::Array(several) if !several.is_empty() && several.iter().all(is_one) => {
            Ok(several.clone())
        }
        _ => Err("`prompt` must be texts or lists of token ids".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn cases(line: Value) -> Result<Vec<Case>, String> {
        match request_of(line)? {
            Some((request, seed)) => cases_of(request, seed, "own", 3),
            None => Ok(Vec::new()),
        }
    }

    #[test]
    fn texts_conversations_and_request_bodies_are_prompts() {
        let check = |line: Value, api, kept: Value| {
            let cases = cases(line).unwrap();
            assert_eq!(cases.len(), 1);
            assert_eq!(cases[0].api, api);
            assert_eq!(Value::Object(cases[0].fields.clone()), kept);
            assert_eq!(cases[0].id, "own 3");
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
    fn a_body_with_several_prompts_is_several_cases() {
        let cases = cases(json!({ "prompt": ["a", [1, 2]], "max_tokens": 3 })).unwrap();
        let ids: Vec<&str> = cases.iter().map(|case| case.id.as_str()).collect();
        assert_eq!(ids, ["own 3.1", "own 3.2"]);
        assert_eq!(cases[1].fields["prompt"], json!([1, 2]));
        assert_eq!(cases[1].fields["max_tokens"], 3);
    }

    #[test]
    fn answered_requests_of_an_audit_log_are_asked_with_the_seed_they_had() {
        let record = |status: u64, body: Option<&str>| {
            let mut record = json!({ "schema_version": 1, "request_id": "r", "status": status, "parameters": { "seed": 77 } });
            if let Some(body) = body {
                record["request_body"] = body.into();
            }
            record
        };
        let body = r#"{"model": "m", "prompt": "a", "temperature": 0.5}"#;
        let found = cases(record(200, Some(body))).unwrap();
        let expected = json!({ "prompt": "a", "temperature": 0.5, "seed": 77 });
        assert_eq!(Value::Object(found[0].fields.clone()), expected);
        assert!(cases(record(400, None)).unwrap().is_empty());
        let error = cases(record(200, None)).unwrap_err();
        assert!(error.contains("serving.audit.prompt_text"), "{error}");
    }

    #[test]
    fn a_line_that_is_no_prompt_is_refused_with_the_reason() {
        let check = |line: Value, part: &str| {
            let error = cases(line).unwrap_err();
            assert!(error.contains(part), "{error}");
        };
        check(json!(3), "3 is no prompt");
        check(json!({ "text": "hi" }), "neither");
        check(json!({ "prompt": "a", "messages": [] }), "both");
        check(json!({ "prompt": ["a", 1] }), "texts or lists");
        check(json!({ "prompt": "a", "scenario": 1 }), "`scenario` is 1");
    }
}
