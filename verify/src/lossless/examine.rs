//! How close was a choice that came out differently?
//!
//! A difference is a *near-tie* when the reference found its best two tokens nearer to each other than its own figures vary, and the two sides
//! took one of them each. The noise is measured in the same run, once a difference needs it: the same requests alone and together, and on both
//! sides, as far as the tokens are the same.
//! Only greedy answers can be near-ties: the margin of a sampled choice is not in the answer.

use serde::Serialize;
use serde_json::{Map, Value};

use super::compare::{Aspect, common_chars, first_difference};
use super::plan::{Sampling, Settings};
use super::report::{Class, Continuation, Difference};
use super::{Finding, Pair, Side, Sides};
use crate::prompts::Case;
use crate::service::{CouldNotRun, Found, found};
use crate::wire::{Alternatives, Api, alternatives};

/// Requests by which the noise is measured.
const NOISE_REQUESTS: usize = 8;

/// The two most likely tokens where the answers part.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Margin {
    /// Text of the most likely token by the reference.
    pub first: String,
    /// Text of the second.
    pub second: String,
    /// Log-probability of the first less that of the second, in nats.
    pub nats: f64,
}

/// By how much the margin of a choice varies where nothing should change it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Noise {
    /// Largest change between a request alone and among others, on the reference, in nats.
    pub reference_nats: f64,
    /// Largest change between reference and candidate, in nats.
    pub candidate_nats: f64,
    /// The noise that a near-tie is held to: the larger of the two, at most the limit of the settings.
    pub nats: f64,
    /// Positions that were measured.
    pub positions: usize,
}

/// Asks once more about what differed.
pub struct Examiner<'a> {
    sides: Sides<'a>,
    settings: &'a Settings,
    pairs: &'a [Pair],
}

impl<'a> Examiner<'a> {
    /// An examiner of `pairs`.
    pub fn new(sides: Sides<'a>, settings: &'a Settings, pairs: &'a [Pair]) -> Self {
        Self {
            sides,
            settings,
            pairs,
        }
    }

    /// Classes a difference. `noise` is measured when the first one needs it.
    pub fn examine(
        &self,
        cases: &[Case],
        finding: Finding<'_>,
        noise: &mut Option<Noise>,
    ) -> Result<Difference, CouldNotRun> {
        let Finding {
            pair,
            repetition,
            aspect,
            position,
        } = finding;
        let (ask, candidate) = (&pair.ask, &pair.candidates[repetition]);
        let repeats = |side, answer: &Found| {
            let again = self.sides.ask(side, ask)?;
            Ok::<_, CouldNotRun>(first_difference(answer, &again, None).is_none())
        };
        let request = |side| {
            let fields = self.sides.fields(side, &ask.fields);
            self.sides.service(side).body(&fields)
        };
        let case = &cases[ask.case];
        let mut difference = Difference {
            case: case.id.clone(),
            scenario: case.scenario.clone(),
            sampling: ask.sampling,
            repetition,
            aspect,
            position,
            class: Class::Different,
            margin: None,
            reference_repeats: repeats(Side::Reference, &pair.reference)?,
            candidate_repeats: repeats(Side::Candidate, candidate)?,
            prompt: case.excerpt(),
            reference: Continuation::of(&pair.reference, candidate, position),
            candidate: Continuation::of(candidate, &pair.reference, position),
            reference_request: request(Side::Reference),
            candidate_request: request(Side::Candidate),
        };
        if ask.sampling != Sampling::Greedy || !matches!(aspect, Aspect::Token | Aspect::Text) {
            return Ok(difference);
        }
        difference.margin = self.margin(pair, aspect, position)?;
        if let Some(margin) = &difference.margin {
            let noise = match *noise {
                Some(noise) => noise,
                None => *noise.insert(self.noise()?),
            };
            if margin.nats < noise.nats && took_one_each(&pair.reference, candidate, margin) {
                difference.class = Class::NearTie;
            }
        }
        Ok(difference)
    }

    /// The margin at a position of the reference, `None` when it gives no log-probabilities or another answer.
    fn margin(
        &self,
        pair: &Pair,
        aspect: Aspect,
        position: usize,
    ) -> Result<Option<Margin>, CouldNotRun> {
        let Found::Generation(known) = &pair.reference else {
            return Ok(None);
        };
        let mut fields = pair.ask.fields.clone();
        if aspect == Aspect::Token {
            fields.shift_remove("max_completion_tokens");
            fields.insert("max_tokens".into(), (position + 1).into());
        }
        let Some((again, entries)) =
            self.with_alternatives(Side::Reference, pair.ask.api, &fields)?
        else {
            return Ok(None);
        };
        let index = match (aspect, &known.token_ids, &again) {
            (Aspect::Token, Some(known), Found::Generation(again)) => {
                let same = again.token_ids.as_ref().is_some_and(|again| {
                    again.len() > position && known.starts_with(&again[..=position])
                });
                same.then_some(position)
            }
            _ => token_at(&entries, &known.text, position),
        };
        let entry = index.and_then(|index| entries.get(index));
        Ok(entry.and_then(|entry| {
            let [(first, _), (second, _), ..] = entry.top.as_slice() else {
                return None;
            };
            Some(Margin {
                first: first.clone(),
                second: second.clone(),
                nats: entry.margin()?,
            })
        }))
    }

    fn with_alternatives(
        &self,
        side: Side,
        api: Api,
        fields: &Map<String, Value>,
    ) -> Result<Option<(Found, Vec<Alternatives>)>, CouldNotRun> {
        let mut fields = self.sides.fields(side, fields);
        api.ask_alternatives(&mut fields);
        let answer = self.sides.service(side).answer(api, &fields)?;
        let entries = answer.json().and_then(|body| alternatives(api, &body));
        Ok(entries.map(|entries| (found(api, &answer), entries)))
    }

    /// Measures the noise.
    fn noise(&self) -> Result<Noise, CouldNotRun> {
        let greedy = |pair: &&Pair| {
            pair.ask.sampling == Sampling::Greedy && matches!(pair.reference, Found::Generation(_))
        };
        let pairs: Vec<&Pair> = self.pairs.iter().filter(greedy).collect();
        let step = pairs.len().div_ceil(NOISE_REQUESTS).max(1);
        let pairs: Vec<&Pair> = pairs.into_iter().step_by(step).collect();
        let ask = |side: Side, pair: &Pair| {
            let answer = self.with_alternatives(side, pair.ask.api, &pair.ask.fields)?;
            Ok::<_, CouldNotRun>(answer.map(|(_, entries)| entries).unwrap_or_default())
        };
        let mut alone = Vec::new();
        let mut candidate = Vec::new();
        for pair in &pairs {
            alone.push(ask(Side::Reference, pair)?);
            candidate.push(ask(Side::Candidate, pair)?);
        }
        let together = std::thread::scope(|scope| {
            let threads: Vec<_> = pairs
                .iter()
                .map(|pair| scope.spawn(|| ask(Side::Reference, pair)))
                .collect();
            let answers = threads.into_iter().map(|thread| {
                let answer = thread.join();
                answer.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            });
            answers.collect::<Result<Vec<_>, _>>()
        })?;
        let mut positions = 0;
        let mut largest = |others: &[Vec<Alternatives>]| {
            let mut nats = 0.0_f64;
            for (first, second) in alone.iter().zip(others) {
                for change in changes(first, second) {
                    positions += 1;
                    nats = nats.max(change);
                }
            }
            nats
        };
        let (reference_nats, candidate_nats) = (largest(&together), largest(&candidate));
        Ok(Noise {
            reference_nats,
            candidate_nats,
            nats: reference_nats
                .max(candidate_nats)
                .min(self.settings.noise_limit_nats),
            positions,
        })
    }
}

/// Changes of the margin over the positions up to which both chose the same tokens from the same two.
fn changes(first: &[Alternatives], second: &[Alternatives]) -> impl Iterator<Item = f64> {
    first
        .iter()
        .zip(second)
        .take_while(|(first, second)| first.token == second.token)
        .filter(|(first, second)| {
            let names = |entry: &Alternatives| {
                let mut names: Vec<String> =
                    entry.top.iter().take(2).map(|top| top.0.clone()).collect();
                names.sort();
                names
            };
            names(first) == names(second)
        })
        .filter_map(|(first, second)| Some((first.margin()? - second.margin()?).abs()))
        // Some servers report no figures for accepted drafts; that is no noise.
        .filter(|change| change.is_finite())
}

/// The entry whose token holds character `position` of `text`, `None` when the tokens spell another text.
fn token_at(entries: &[Alternatives], text: &str, position: usize) -> Option<usize> {
    let mut spelt = String::new();
    for (index, entry) in entries.iter().enumerate() {
        spelt.push_str(&entry.token);
        if spelt.chars().count() > position {
            return (common_chars(&spelt, text) >= position).then_some(index);
        }
    }
    None
}

/// Whether one text goes on with the best token and the other one with the second.
fn took_one_each(reference: &Found, candidate: &Found, margin: &Margin) -> bool {
    let (Found::Generation(reference), Found::Generation(candidate)) = (reference, candidate)
    else {
        return false;
    };
    // A token may begin before the character at which the texts part.
    let common: Vec<char> = reference
        .text
        .chars()
        .take(common_chars(&reference.text, &candidate.text))
        .collect();
    let goes_on = |text: &str, token: &str, back: usize| {
        let rest: String = text.chars().skip(common.len() - back).collect();
        !token.is_empty() && (rest.starts_with(token) || token.starts_with(&rest))
    };
    (0..=common.len().min(margin.first.chars().count())).any(|back| {
        let one_each = |first: &str, second: &str| {
            goes_on(&reference.text, first, back) && goes_on(&candidate.text, second, back)
        };
        one_each(&margin.first, &margin.second) || one_each(&margin.second, &margin.first)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(token: &str, top: &[(&str, f64)]) -> Alternatives {
        Alternatives {
            token: token.into(),
            top: top
                .iter()
                .map(|&(text, logprob)| (text.to_owned(), logprob))
                .collect(),
        }
    }

    #[test]
    fn noise_is_the_change_of_a_margin_up_to_the_first_other_token() {
        let first = [
            entry("a", &[("a", -0.5), ("b", -1.0)]),
            entry("b", &[("b", -0.1), ("c", -3.0)]),
            entry("c", &[("c", -0.1), ("d", -9.0)]),
        ];
        let second = [
            entry("a", &[("a", -0.5), ("b", -1.25)]),
            entry("b", &[("b", -0.1), ("x", -4.0)]),
            entry("d", &[("d", -0.1), ("c", -9.0)]),
        ];
        assert_eq!(changes(&first, &second).collect::<Vec<_>>(), [0.25]);
    }

    #[test]
    fn the_token_of_a_character_is_found_where_the_tokens_spell_the_text() {
        let entries = [entry("The", &[]), entry(" sea", &[]), entry(" is", &[])];
        assert_eq!(token_at(&entries, "The sea is", 5), Some(1));
        assert_eq!(token_at(&entries, "The sea is", 7), Some(2));
        assert_eq!(token_at(&entries, "The sky is", 7), None);
        assert_eq!(token_at(&entries, "The sea is", 40), None);
    }
}
