//! Runs the HTTP scenarios of `tests/http`, whose README defines their format.

mod pattern;
mod stream;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use ureq::http;

use crate::fixtures;

/// A long text takes a while to be refused when the machine has other work.
const DEADLINE: Duration = Duration::from_secs(180);
/// Most bytes of one answer.
const ANSWER_LIMIT_BYTES: u64 = 64 << 20;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Scenario {
    steps: Vec<Step>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Step {
    #[serde(default)]
    request: Value,
    #[serde(default)]
    expect: Value,
    #[serde(default)]
    save: BTreeMap<String, String>,
    #[serde(default)]
    cases: Vec<Case>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    request: Option<Value>,
    expect: Option<Value>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    path: String,
    /// Goes to the admin listener.
    #[serde(default)]
    admin: bool,
    method: Option<String>,
    #[serde(default)]
    headers: BTreeMap<String, Option<String>>,
    json: Option<Value>,
    text: Option<String>,
    hex: Option<String>,
}

/// Every scenario file, in the order of their names.
pub fn files() -> anyhow::Result<Vec<PathBuf>> {
    let dir = fixtures::data("http");
    let entries = fs::read_dir(&dir).with_context(|| format!("cannot list {}", dir.display()))?;
    let mut files: Vec<PathBuf> = entries
        .map(|entry| Ok(entry?.path()))
        .collect::<std::io::Result<_>>()?;
    files.retain(|file| {
        file.extension()
            .is_some_and(|extension| extension == "yaml")
    });
    files.sort();
    ensure!(
        !files.is_empty(),
        "there is no scenario in {}",
        dir.display()
    );
    Ok(files)
}

/// Runs one scenario against the service at `endpoint`, whose admin listener is at `admin_endpoint` and whose model is called `model`.
pub fn run(file: &Path, endpoint: &str, admin_endpoint: &str, model: &str) -> anyhow::Result<()> {
    let text =
        fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    let scenario: Scenario = serde_yaml::from_str(&text)
        .with_context(|| format!("cannot understand {}", file.display()))?;
    let mut runner = Runner {
        agent: ureq::Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_global(Some(DEADLINE))
            .build()
            .into(),
        endpoint,
        admin_endpoint,
        model,
        saved: Map::new(),
    };
    for (number, step) in scenario.steps.iter().enumerate() {
        let only = [Case {
            request: None,
            expect: None,
        }];
        let cases = if step.cases.is_empty() {
            &only[..]
        } else {
            &step.cases
        };
        for (case_number, case) in cases.iter().enumerate() {
            let request = case
                .request
                .as_ref()
                .map_or_else(|| step.request.clone(), |over| merged(&step.request, over));
            let expect = case
                .expect
                .as_ref()
                .map_or_else(|| step.expect.clone(), |over| merged(&step.expect, over));
            runner
                .step(&request, &expect, &step.save)
                .with_context(|| {
                    format!(
                        "step {}, case {}: {}",
                        number + 1,
                        case_number + 1,
                        shorten(&request.to_string())
                    )
                })?;
        }
    }
    let plain = json!({ "path": "/v1/completions", "json": { "prompt": "x", "max_tokens": 1 } });
    runner
        .step(&plain, &json!({ "status": 200 }), &BTreeMap::new())
        .context("the plain request after the last step")
}

struct Runner<'a> {
    agent: ureq::Agent,
    endpoint: &'a str,
    admin_endpoint: &'a str,
    model: &'a str,
    saved: Map<String, Value>,
}

impl Runner<'_> {
    fn step(
        &mut self,
        request: &Value,
        expect: &Value,
        save: &BTreeMap<String, String>,
    ) -> anyhow::Result<()> {
        let request = Request::deserialize(request).context("the request is not of the format")?;
        let wants_stream = expect.get("stream").is_some();
        let answer = self.send(request, wants_stream)?;
        for (name, pattern) in expect.as_object().context("the expectation is no map")? {
            if !matches!(name.as_str(), "status" | "headers" | "json" | "stream") {
                bail!("`expect.{name}` is not of the format");
            }
            let value = answer.get(name);
            if let Err(mismatch) = pattern::matches(pattern, value, &self.saved) {
                bail!(
                    "{name}{mismatch}; the answer was {}",
                    shorten(&answer.to_string())
                );
            }
        }
        ensure!(
            expect.get("status").is_some(),
            "`expect.status` is required"
        );
        for (name, path) in save {
            let value = at_path(&answer, path).with_context(|| {
                format!(
                    "{path} is not in the answer {}",
                    shorten(&answer.to_string())
                )
            })?;
            self.saved.insert(name.clone(), value.clone());
        }
        Ok(())
    }

    fn send(&self, request: Request, wants_stream: bool) -> anyhow::Result<Value> {
        let body = match (request.json, request.text, request.hex) {
            (Some(json), None, None) => Some(self.body(json, request.admin)?.into_bytes()),
            (None, Some(text), None) => Some(text.into_bytes()),
            (None, None, Some(hex)) => {
                Some(hex::decode(hex).context("`hex` is no hexadecimal text")?)
            }
            (None, None, None) => None,
            _ => bail!("a request has one of `json`, `text` and `hex`"),
        };
        let endpoint = if request.admin {
            self.admin_endpoint
        } else {
            self.endpoint
        };
        let default_method = if body.is_some() { "POST" } else { "GET" };
        let mut headers: BTreeMap<String, String> = BTreeMap::new();
        if body.is_some() {
            headers.insert("content-type".to_owned(), "application/json".to_owned());
        }
        for (name, value) in request.headers {
            match value {
                Some(value) => headers.insert(name, value),
                None => headers.remove(&name),
            };
        }
        let mut builder = http::Request::builder()
            .method(request.method.as_deref().unwrap_or(default_method))
            .uri(format!("{endpoint}{}", request.path));
        for (name, value) in headers {
            builder = builder.header(name, value);
        }
        let response = match body {
            Some(body) => self.agent.run(builder.body(body)?),
            None => self.agent.run(builder.body(())?),
        };
        answer_of(response.context("there was no answer")?, wants_stream)
    }

    /// The body with its directives carried out, and the model filled in where it is for one.
    fn body(&self, mut json: Value, admin: bool) -> anyhow::Result<String> {
        self.substitute(&mut json)?;
        if let Some(map) = json.as_object_mut()
            && !admin
            && !map.contains_key("model")
        {
            map.insert("model".to_owned(), self.model.into());
        }
        Ok(json.to_string())
    }

    fn substitute(&self, value: &mut Value) -> anyhow::Result<()> {
        if let Some(directive) = value.as_object().filter(|map| map.len() == 1)
            && let Some((name, argument)) = directive.iter().next()
        {
            match name.as_str() {
                "$repeat" => {
                    *value = repeated(argument)
                        .with_context(|| format!("`$repeat` is not of the format: {argument}"))?;
                    return Ok(());
                }
                "$saved" => {
                    let saved = argument.as_str().and_then(|name| self.saved.get(name));
                    *value = saved
                        .with_context(|| format!("nothing is saved as {argument}"))?
                        .clone();
                    return Ok(());
                }
                _ => {}
            }
        }
        match value {
            Value::Array(entries) => entries
                .iter_mut()
                .try_for_each(|entry| self.substitute(entry)),
            Value::Object(map) => map
                .values_mut()
                .try_for_each(|entry| self.substitute(entry)),
            _ => Ok(()),
        }
    }
}

fn repeated(argument: &Value) -> Option<Value> {
    let [what, times] = argument.as_array()?.as_slice() else {
        return None;
    };
    let times = usize::try_from(times.as_u64()?).ok()?;
    match what {
        Value::String(text) => Some(text.repeat(times).into()),
        Value::Array(entries) if entries.len() == 1 => {
            Some(Value::Array(vec![entries[0].clone(); times]))
        }
        _ => None,
    }
}

/// Status, headers, and the body as JSON or as the summary of a stream.
fn answer_of(response: http::Response<ureq::Body>, wants_stream: bool) -> anyhow::Result<Value> {
    let (head, body) = response.into_parts();
    let bytes = body
        .into_with_config()
        .limit(ANSWER_LIMIT_BYTES)
        .read_to_vec()
        .context("the answer broke off")?;
    let text = String::from_utf8(bytes).context("the answer is not UTF-8")?;
    let mut headers = Map::new();
    for (name, value) in &head.headers {
        headers.insert(
            name.as_str().to_owned(),
            value.to_str().unwrap_or_default().into(),
        );
    }
    let mut answer = json!({ "status": head.status.as_u16(), "headers": headers });
    let is_stream = answer["headers"]["content-type"]
        .as_str()
        .is_some_and(|kind| kind.starts_with("text/event-stream"));
    if is_stream && wants_stream {
        answer["stream"] = stream::summary(&text)?;
    } else {
        // A body that is no JSON stays text, which no pattern for a map matches.
        answer["json"] = serde_json::from_str(&text).unwrap_or(Value::String(text));
    }
    Ok(answer)
}

/// `over` laid over `base`: maps key by key, anything else as a whole.
fn merged(base: &Value, over: &Value) -> Value {
    match (base, over) {
        (Value::Object(base), Value::Object(over)) => {
            let mut result = base.clone();
            for (key, value) in over {
                let value = match base.get(key) {
                    Some(below) => merged(below, value),
                    None => value.clone(),
                };
                result.insert(key.clone(), value);
            }
            Value::Object(result)
        }
        (_, over) => over.clone(),
    }
}

fn at_path<'a>(answer: &'a Value, path: &str) -> Option<&'a Value> {
    answer.pointer(&format!("/{}", path.replace('.', "/")))
}

fn shorten(text: &str) -> String {
    match text.char_indices().nth(600) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_is_merged_over_its_step_key_by_key() {
        let base = json!({ "path": "/x", "json": { "a": 1, "b": [1, 2], "c": { "d": 1 } } });
        let over = json!({ "json": { "a": null, "b": [3], "c": { "e": 2 } } });
        let expected =
            json!({ "path": "/x", "json": { "a": null, "b": [3], "c": { "d": 1, "e": 2 } } });
        assert_eq!(merged(&base, &over), expected);
        assert_eq!(
            merged(&base, &json!({ "json": { "c": null } })),
            json!({ "path": "/x", "json": { "a": 1, "b": [1, 2], "c": null } })
        );
        assert_eq!(merged(&Value::Null, &over), over);
    }

    #[test]
    fn directives_are_carried_out_anywhere_in_a_body() {
        let runner = Runner {
            agent: ureq::agent(),
            endpoint: "",
            admin_endpoint: "",
            model: "m",
            saved: Map::from_iter([("seed".to_owned(), json!(7))]),
        };
        let body = json!({ "prompt": [{ "$repeat": ["ab", 2] }, { "$repeat": [[[1]], 2] }], "seed": { "$saved": "seed" } });
        let sent: Value = serde_json::from_str(&runner.body(body, false).unwrap()).unwrap();
        assert_eq!(
            sent,
            json!({ "prompt": ["abab", [[1], [1]]], "seed": 7, "model": "m" })
        );
        assert!(
            runner
                .body(json!({ "seed": { "$saved": "no" } }), false)
                .is_err()
        );
        assert!(
            runner
                .body(json!({ "prompt": { "$repeat": "x" } }), false)
                .is_err()
        );
        let sent: Value =
            serde_json::from_str(&runner.body(json!({ "model": null }), false).unwrap()).unwrap();
        assert_eq!(sent, json!({ "model": null }));
    }
}
