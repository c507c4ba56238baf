//! Two answers to one request, held against each other.

use serde::Serialize;
use serde_json::{Value, json};

use crate::answer::Answer;

/// Tokens of a continuation that a difference shows.
const SHOWN_TOKENS: usize = 24;
/// Characters of a text that a difference shows.
const SHOWN_CHARACTERS: usize = 400;

/// The first thing in which two answers differ.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Disagreement {
    /// Which part of the answer: `token_ids`, `finish_reason` and so on.
    pub part: &'static str,
    /// Index of the first token that differs, for parts with one entry a token.
    pub position: Option<usize>,
    /// The part from there on without drafting.
    pub off: Value,
    /// The part from there on with drafting.
    pub on: Value,
    /// The text without drafting.
    pub off_text: String,
    /// The text with drafting.
    pub on_text: String,
}

/// What is left of an answer when it is cut to `limit` tokens, and whether anything was cut.
///
/// The text of an answer that is cut is not known: part of it may have been held back because a stop string could begin there.
pub fn cut(answer: &Answer, limit: Option<usize>) -> (Answer, bool) {
    let Some(limit) = limit.filter(|&limit| limit < answer.token_ids.len()) else {
        return (answer.clone(), false);
    };
    let mut cut = answer.clone();
    cut.token_ids.truncate(limit);
    cut.logprobs.truncate(limit);
    cut.finish_reason = "length".to_owned();
    let prompt_tokens = answer.prompt_token_ids.len();
    cut.usage = json!({
        "prompt_tokens": prompt_tokens,
        "completion_tokens": limit,
        "total_tokens": prompt_tokens + limit,
    });
    (cut, true)
}

/// What the two answers disagree about, what drafting reports of itself left out; `None` when they are equal bit for bit.
///
/// `off` is cut to `limit` tokens before.
pub fn compare(off: &Answer, on: &Answer, limit: Option<usize>) -> Option<Disagreement> {
    let (off, is_cut) = cut(off, limit);
    let list = |values: &[u64]| values.iter().map(|&id| json!(id)).collect::<Vec<_>>();
    let (part, position, off_value, on_value) = if off.prompt_token_ids != on.prompt_token_ids {
        let (off, on) = (list(&off.prompt_token_ids), list(&on.prompt_token_ids));
        from_first("prompt_token_ids", &off, &on)
    } else if off.token_ids != on.token_ids {
        from_first("token_ids", &list(&off.token_ids), &list(&on.token_ids))
    } else if off.finish_reason != on.finish_reason {
        (
            "finish_reason",
            None,
            json!(off.finish_reason),
            json!(on.finish_reason),
        )
    } else if off.usage != on.usage {
        ("usage", None, off.usage.clone(), on.usage.clone())
    } else if off.logprobs != on.logprobs {
        from_first("logprobs", &off.logprobs, &on.logprobs)
    } else if !is_cut && off.text != on.text {
        ("text", None, Value::Null, Value::Null)
    } else {
        return None;
    };
    let shown = |text: &str| text.chars().take(SHOWN_CHARACTERS).collect();
    Some(Disagreement {
        part,
        position,
        off: off_value,
        on: on_value,
        off_text: shown(&off.text),
        on_text: shown(&on.text),
    })
}

/// Both lists from the first entry on in which they differ.
fn from_first(
    part: &'static str,
    off: &[Value],
    on: &[Value],
) -> (&'static str, Option<usize>, Value, Value) {
    let position = off.iter().zip(on).take_while(|(off, on)| off == on).count();
    let rest = |values: &[Value]| {
        Value::from_iter(values.iter().skip(position).take(SHOWN_TOKENS).cloned())
    };
    (part, Some(position), rest(off), rest(on))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::answer::Drafted;

    fn answer() -> Answer {
        Answer {
            text: "abc".to_owned(),
            finish_reason: "stop".to_owned(),
            token_ids: vec![7, 8, 9],
            prompt_token_ids: vec![1, 2],
            logprobs: vec![json!(-0.5), json!(-0.25), json!(-1.5)],
            usage: json!({ "prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5 }),
            drafted: Drafted::default(),
        }
    }

    #[test]
    fn what_drafting_reports_of_itself_is_no_difference() {
        let mut on = answer();
        on.drafted.drafted_tokens = 4;
        assert_eq!(compare(&answer(), &on, None), None);
    }

    #[test]
    fn each_part_that_differs_is_named_with_its_position() {
        type Change = fn(&mut Answer);
        let changes: [(&str, Option<usize>, Change); 6] = [
            ("prompt_token_ids", Some(1), |on| on.prompt_token_ids[1] = 3),
            ("token_ids", Some(2), |on| on.token_ids[2] = 1),
            ("finish_reason", None, |on| {
                on.finish_reason = "length".to_owned()
            }),
            ("usage", None, |on| on.usage["completion_tokens"] = json!(4)),
            ("logprobs", Some(1), |on| {
                on.logprobs[1] = json!(-0.250_000_03)
            }),
            ("text", None, |on| on.text.push('d')),
        ];
        for (part, position, change) in changes {
            let mut on = answer();
            change(&mut on);
            let found = compare(&answer(), &on, None).expect(part);
            assert_eq!((found.part, found.position), (part, position));
        }
    }

    #[test]
    fn an_answer_that_is_shorter_shows_what_is_missing() {
        let mut on = answer();
        on.token_ids.pop();
        let found = compare(&answer(), &on, None).unwrap();
        assert_eq!(
            (found.position, found.off, found.on),
            (Some(2), json!([9]), json!([]))
        );
    }

    #[test]
    fn a_limit_cuts_what_is_expected_and_not_what_was_answered() {
        let mut on = answer();
        on.token_ids.truncate(2);
        on.logprobs.truncate(2);
        on.finish_reason = "length".to_owned();
        on.usage = json!({ "prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4 });
        on.text = "ab".to_owned();
        assert_eq!(compare(&answer(), &on, Some(2)), None);
        assert!(compare(&answer(), &on, None).is_some());
        // Three tokens are within the limit, so the answer ends as it did.
        assert_eq!(compare(&answer(), &answer(), Some(3)), None);
        assert!(compare(&answer(), &answer(), Some(2)).is_some());
    }
}
