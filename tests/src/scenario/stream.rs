//! The summary of a stream of server-sent events that scenarios compare.

use std::collections::BTreeMap;

use anyhow::{Context, bail, ensure};
use serde_json::{Map, Value, json};

/// One choice, put together from its chunks.
#[derive(Default)]
struct Choice {
    fields: Map<String, Value>,
    text_after_the_end: bool,
}

/// `{events, done, choices, usage, error}` of a stream; an event that is not one `data:` line is an error.
pub fn summary(text: &str) -> anyhow::Result<Value> {
    let mut choices: BTreeMap<u64, Choice> = BTreeMap::new();
    let mut summary = json!({ "events": 0, "done": false });
    let mut events = 0;
    for event in text.split_inclusive("\n\n") {
        let data = event
            .strip_suffix("\n\n")
            .with_context(|| format!("the stream ends inside {event:?}"))?;
        let data = data
            .strip_prefix("data: ")
            .filter(|data| !data.contains('\n'));
        let data = data.with_context(|| format!("not one `data:` line: {event:?}"))?;
        ensure!(summary["done"] == false, "an event after [DONE]: {data}");
        events += 1;
        if data == "[DONE]" {
            summary["done"] = true.into();
            continue;
        }
        let chunk: Value = serde_json::from_str(data)
            .with_context(|| format!("an event that is no JSON: {data}"))?;
        for name in ["usage", "error"] {
            if let Some(value) = chunk.get(name).filter(|value| !value.is_null()) {
                summary[name] = value.clone();
            }
        }
        for choice in chunk["choices"].as_array().into_iter().flatten() {
            let index = choice["index"]
                .as_u64()
                .with_context(|| format!("a choice without an index: {data}"))?;
            choices.entry(index).or_default().add(choice)?;
        }
    }
    summary["events"] = events.into();
    summary["choices"] = choices
        .into_iter()
        .map(|(index, choice)| {
            let mut fields = choice.fields;
            let ended = fields.contains_key("finish_reason");
            fields.insert("index".to_owned(), index.into());
            fields.insert(
                "final".to_owned(),
                (ended && !choice.text_after_the_end).into(),
            );
            Value::Object(fields)
        })
        .collect();
    Ok(summary)
}

impl Choice {
    fn add(&mut self, chunk: &Value) -> anyhow::Result<()> {
        let delta = chunk
            .get("text")
            .or_else(|| chunk["delta"].get("content"))
            .filter(|text| !text.is_null());
        if let Some(delta) = delta {
            let delta = delta
                .as_str()
                .with_context(|| format!("text that is no text: {chunk}"))?;
            // The chunk that carries the finish reason may carry the last text.
            self.text_after_the_end |=
                self.fields.contains_key("finish_reason") && !delta.is_empty();
            let known = self
                .fields
                .get("text")
                .and_then(Value::as_str)
                .unwrap_or_default();
            self.fields
                .insert("text".to_owned(), format!("{known}{delta}").into());
        }
        let once = [
            ("role", chunk["delta"].get("role")),
            ("finish_reason", chunk.get("finish_reason")),
            ("seed", chunk.get("seed")),
        ];
        for (name, value) in once {
            let Some(value) = value.filter(|value| !value.is_null()) else {
                continue;
            };
            if name == "finish_reason" && self.fields.contains_key(name) {
                bail!("a second finish reason: {chunk}");
            }
            self.fields.insert(name.to_owned(), value.clone());
        }
        for name in ["token_ids", "prompt_token_ids"] {
            if let Some(ids) = chunk.get(name).and_then(Value::as_array) {
                let joined = self.fields.entry(name).or_insert_with(|| json!([]));
                joined
                    .as_array_mut()
                    .into_iter()
                    .for_each(|joined| joined.extend(ids.iter().cloned()));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_put_together_by_choice() {
        let text = "data: {\"choices\":[{\"index\":1,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n\
            data: {\"choices\":[{\"index\":0,\"text\":\"a\",\"token_ids\":[1,2]}]}\n\n\
            data: {\"choices\":[{\"index\":1,\"delta\":{\"content\":\"x\"},\"finish_reason\":null}]}\n\n\
            data: {\"choices\":[{\"index\":0,\"text\":\"b\",\"finish_reason\":\"stop\",\"token_ids\":[3]}]}\n\n\
            data: {\"choices\":[],\"usage\":{\"total_tokens\":3}}\n\n\
            data: [DONE]\n\n";
        let expected = json!({
            "events": 6,
            "done": true,
            "usage": { "total_tokens": 3 },
            "choices": [
                { "index": 0, "text": "ab", "finish_reason": "stop", "token_ids": [1, 2, 3], "final": true },
                { "index": 1, "text": "x", "role": "assistant", "final": false },
            ],
        });
        assert_eq!(summary(text).unwrap(), expected);
    }

    #[test]
    fn text_after_the_finish_reason_is_seen() {
        let text = "data: {\"choices\":[{\"index\":0,\"text\":\"a\",\"finish_reason\":\"stop\"}]}\n\n\
            data: {\"choices\":[{\"index\":0,\"text\":\"b\"}]}\n\ndata: [DONE]\n\n";
        assert_eq!(summary(text).unwrap()["choices"][0]["final"], false);
    }

    #[test]
    fn broken_streams_are_refused() {
        for text in [
            "data: {}",
            "data: {}\ndata: {}\n\n",
            "event: x\n\n",
            "data: no json\n\n",
            "data: [DONE]\n\ndata: {}\n\n",
        ] {
            assert!(summary(text).is_err(), "{text:?}");
        }
    }
}
