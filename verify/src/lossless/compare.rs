//! The first difference of two answers, and how many tokens were compared until there.

use serde::Serialize;

use crate::service::Found;
use crate::wire::Generation;

/// What differs first, in this order of precedence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Aspect {
    /// One side answered with another status, or with something that is no completion.
    Answer,
    /// Token ids of the prompt: the sides did not read the same.
    Prompt,
    /// A token id; the position counts tokens.
    Token,
    /// The text, where there are no token ids or they are equal; the position counts characters.
    Text,
    /// The text holds the stop string that it must end before; the position counts characters.
    StopString,
    /// Why it ended.
    FinishReason,
    /// The token counts.
    Usage,
}

/// Where `candidate` differs first. `stop` is the string that no text may hold.
pub fn first_difference(
    reference: &Found,
    candidate: &Found,
    stop: Option<&str>,
) -> Option<(Aspect, usize)> {
    let (reference, candidate) = match (reference, candidate) {
        (Found::Generation(reference), Found::Generation(candidate)) => (reference, candidate),
        (Found::Refused { status: first, .. }, Found::Refused { status: second, .. })
            if first == second =>
        {
            return None;
        }
        _ => return Some((Aspect::Answer, 0)),
    };
    if let (Some(first), Some(second)) = (&reference.prompt_token_ids, &candidate.prompt_token_ids)
        && first != second
    {
        return Some((Aspect::Prompt, common(first, second)));
    }
    if let (Some(first), Some(second)) = (&reference.token_ids, &candidate.token_ids)
        && first != second
    {
        return Some((Aspect::Token, common(first, second)));
    }
    if let Some(stop) = stop
        && let Some((before, _)) = candidate.text.split_once(stop)
    {
        return Some((Aspect::StopString, before.chars().count()));
    }
    if reference.text != candidate.text {
        return Some((Aspect::Text, common_chars(&reference.text, &candidate.text)));
    }
    let end = tokens(reference) as usize;
    if reference.finish_reason != candidate.finish_reason {
        return Some((Aspect::FinishReason, end));
    }
    (reference.usage != candidate.usage).then_some((Aspect::Usage, end))
}

/// Tokens that were compared: all up to the first difference and the one that differs. What follows was chosen for another text and says nothing.
pub fn compared_tokens(
    reference: &Found,
    candidate: &Found,
    difference: Option<(Aspect, usize)>,
) -> u64 {
    let (Found::Generation(reference), Found::Generation(candidate)) = (reference, candidate)
    else {
        return 0;
    };
    let both = tokens(reference).min(tokens(candidate));
    match difference {
        None | Some((Aspect::FinishReason | Aspect::Usage, _)) => both,
        Some((Aspect::Token, position)) => both.min(position as u64 + 1),
        Some((Aspect::Text | Aspect::StopString, position)) => {
            // Without ids the tokens of the equal beginning can only be estimated.
            let chars = reference.text.chars().count().max(1) as u64;
            (both * position as u64 / chars).min(both)
        }
        Some((Aspect::Answer | Aspect::Prompt, _)) => 0,
    }
}

/// Generated tokens of an answer by its ids, else by its count.
pub fn tokens(generation: &Generation) -> u64 {
    match (&generation.token_ids, generation.usage) {
        (Some(ids), _) => ids.len() as u64,
        (None, Some(usage)) => usage.completion_tokens,
        (None, None) => 0,
    }
}

/// Length of the common beginning in characters.
pub fn common_chars(first: &str, second: &str) -> usize {
    first
        .chars()
        .zip(second.chars())
        .take_while(|(first, second)| first == second)
        .count()
}

fn common(first: &[u64], second: &[u64]) -> usize {
    first
        .iter()
        .zip(second)
        .take_while(|(first, second)| first == second)
        .count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Usage;

    fn answer(text: &str, ids: Option<&[u64]>) -> Generation {
        let completion_tokens = ids.map_or(4, |ids| ids.len() as u64);
        Generation {
            text: text.into(),
            finish_reason: Some("length".into()),
            token_ids: ids.map(<[u64]>::to_vec),
            prompt_token_ids: None,
            usage: Some(Usage {
                prompt_tokens: 2,
                completion_tokens,
                total_tokens: 2 + completion_tokens,
            }),
            speculative: None,
        }
    }

    #[test]
    fn the_first_difference_has_its_place_and_nothing_behind_it_counts_as_compared() {
        let check = |first: Generation, second: Generation, stop, expected, compared| {
            let (first, second) = (
                Found::Generation(Box::new(first)),
                Found::Generation(Box::new(second)),
            );
            let difference = first_difference(&first, &second, stop);
            assert_eq!(difference, expected);
            assert_eq!(compared_tokens(&first, &second, difference), compared);
        };
        let ids = |ids| answer("abcd", Some(ids));
        check(ids(&[1, 2, 3]), ids(&[1, 2, 3]), None, None, 3);
        check(
            ids(&[1, 2, 3, 4]),
            ids(&[1, 9, 3, 4]),
            None,
            Some((Aspect::Token, 1)),
            2,
        );
        check(
            ids(&[1, 2, 3, 4]),
            ids(&[1, 2]),
            None,
            Some((Aspect::Token, 2)),
            2,
        );
        check(
            answer("über", None),
            answer("übel", None),
            None,
            Some((Aspect::Text, 3)),
            3,
        );
        check(
            answer("ab", Some(&[1])),
            answer("ab|", Some(&[1])),
            Some("|"),
            Some((Aspect::StopString, 2)),
            1,
        );
        let mut stopped = ids(&[1, 2]);
        stopped.finish_reason = Some("stop".into());
        check(
            ids(&[1, 2]),
            stopped,
            None,
            Some((Aspect::FinishReason, 2)),
            2,
        );
        let mut counted = ids(&[1, 2]);
        counted.usage.as_mut().unwrap().completion_tokens = 3;
        check(ids(&[1, 2]), counted, None, Some((Aspect::Usage, 2)), 2);
    }

    #[test]
    fn equal_refusals_are_no_difference_and_show_nothing() {
        let refused = |status| Found::Refused {
            status,
            kind: None,
            message: String::new(),
        };
        assert_eq!(first_difference(&refused(400), &refused(400), None), None);
        assert_eq!(
            first_difference(&refused(400), &refused(500), None),
            Some((Aspect::Answer, 0))
        );
        assert_eq!(compared_tokens(&refused(400), &refused(400), None), 0);
    }
}
