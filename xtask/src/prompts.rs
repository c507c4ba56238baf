//! The prompts of `tests/data/prompts`: what the losslessness suite and the benchmarks ask.

use std::fs;

use anyhow::{Context, bail, ensure};
use outrider_verify::wire::Api;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::workspace::Workspace;

/// The kinds of prompts, which are the names of their files.
pub const KINDS: [&str; 5] = ["chat", "code", "structured", "translation", "long_context"];

/// Where the files are, relative to the workspace.
const DIRECTORY: &str = "tests/data/prompts";

/// One prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Prompt {
    /// Kind and number, such as `code 7`; numbers are lines of the file.
    pub id: String,
    /// The interface it is meant for.
    pub api: Api,
    /// The fields of a request that hold it.
    pub fields: Value,
}

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

/// Every prompt of a kind, in the order of the file.
pub fn read(workspace: &Workspace, kind: &str) -> anyhow::Result<Vec<Prompt>> {
    let directory = workspace.root().join(DIRECTORY);
    let file = directory.join(format!("{kind}.jsonl"));
    let text =
        fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
    let read_line = |(number, line): (usize, &str)| -> anyhow::Result<Prompt> {
        let line: Line = serde_json::from_str(line)?;
        let document = match &line.document {
            None => String::new(),
            Some(name) => {
                let path = directory.join("documents").join(name);
                let text = fs::read_to_string(&path)
                    .with_context(|| format!("cannot read {}", path.display()))?;
                format!("{text}\n")
            }
        };
        let (api, fields) = match (line.prompt, line.messages) {
            (Some(prompt), messages) if messages.is_empty() => (
                Api::Completions,
                json!({ "prompt": format!("{document}{prompt}") }),
            ),
            (None, mut messages) => {
                let last = messages.last_mut().context("there is no message")?;
                last.content.insert_str(0, &document);
                let messages: Vec<Value> = messages
                    .into_iter()
                    .map(|message| json!({ "role": message.role, "content": message.content }))
                    .collect();
                (Api::Chat, json!({ "messages": messages }))
            }
            (Some(_), _) => bail!("a line has either `prompt` or `messages`"),
        };
        Ok(Prompt {
            id: format!("{kind} {}", number + 1),
            api,
            fields,
        })
    };
    let prompts: Vec<Prompt> = text
        .lines()
        .enumerate()
        .map(|numbered| {
            read_line(numbered)
                .with_context(|| format!("{}, line {}", file.display(), numbered.0 + 1))
        })
        .collect::<anyhow::Result<_>>()?;
    ensure!(!prompts.is_empty(), "{} is empty", file.display());
    Ok(prompts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn there_are_two_hundred_prompts_of_five_kinds_and_none_is_there_twice() {
        let workspace = Workspace::find().unwrap();
        let mut seen = HashSet::new();
        for kind in KINDS {
            let prompts = read(&workspace, kind).unwrap();
            assert!(prompts.len() >= 40, "{kind} has {}", prompts.len());
            for prompt in prompts {
                assert!(
                    seen.insert(prompt.fields.to_string()),
                    "{} is there twice",
                    prompt.id
                );
            }
        }
        assert!(seen.len() >= 200);
    }

    #[test]
    fn a_document_stands_before_the_question() {
        let workspace = Workspace::find().unwrap();
        let prompt = &read(&workspace, "long_context").unwrap()[0];
        let content = prompt.fields["messages"][0]["content"].as_str().unwrap();
        assert!(content.starts_with("Minutes of the harbour council"));
        assert!(content.ends_with('?'), "{content}");
    }
}
