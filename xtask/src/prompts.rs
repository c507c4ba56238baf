//! The built-in prompts of `outrider-verify`, as far as the losslessness suite and the benchmarks ask them.

use anyhow::ensure;
use outrider_verify::prompts::built_in;
use outrider_verify::wire::Api;
use serde_json::Value;

/// The kinds of prompts that are asked, each a scenario of the built-in set.
pub const KINDS: [&str; 5] = ["chat", "code", "structured", "translation", "long_context"];

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

/// Every prompt of a kind, in the order of the file.
///
/// # Errors
///
/// There is no such kind.
pub fn of_kind(kind: &str) -> anyhow::Result<Vec<Prompt>> {
    let prompts: Vec<Prompt> = built_in()
        .into_iter()
        .filter(|case| case.scenario == kind)
        .map(|case| Prompt {
            id: case.id,
            api: case.api,
            fields: case.fields.into(),
        })
        .collect();
    ensure!(!prompts.is_empty(), "there are no prompts of kind {kind:?}");
    Ok(prompts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn there_are_two_hundred_prompts_of_five_kinds_and_none_is_there_twice() {
        let mut seen = HashSet::new();
        for kind in KINDS {
            let prompts = of_kind(kind).unwrap();
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
        let prompt = &of_kind("long_context").unwrap()[0];
        let content = prompt.fields["messages"][0]["content"].as_str().unwrap();
        assert!(content.starts_with("Minutes of the harbour council"));
        assert!(content.ends_with('?'), "{content}");
    }

    #[test]
    fn a_kind_that_is_none_is_named() {
        let error = of_kind("poems").unwrap_err().to_string();
        assert_eq!(error, "there are no prompts of kind \"poems\"");
    }
}
