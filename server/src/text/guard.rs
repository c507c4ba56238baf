//! Keeps what callers write apart from what the chat template writes, through a template that may trim, move or repeat it.
//!
//! Before rendering, every part of a caller's string that is a control token's text, or could become part of one next to other text, is swapped for
//! a private-use character that occurs nowhere else. After rendering these stand-ins are swapped back and their places noted. So the template works
//! on nearly the original strings, and whatever looks like a control token but touches a noted place was not written by the template.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ops::{Range, RangeInclusive};

use aho_corasick::{AhoCorasick, BuildError, MatchKind};

/// The private-use planes 15 and 16, where stand-ins are taken from.
const STAND_INS: [RangeInclusive<char>; 2] =
    ['\u{F0000}'..='\u{FFFFD}', '\u{100000}'..='\u{10FFFD}'];

/// The texts of a model's control tokens, prepared for finding them and their parts.
#[derive(Debug)]
pub(super) struct ControlTexts {
    texts: Vec<String>,
    automaton: Option<AhoCorasick>,
    /// Proper prefixes: a string that ends with one may be completed by the text after it.
    heads: Parts,
    /// Proper suffixes: a string that begins with one may complete the text before it.
    tails: Parts,
}

/// Parts of control tokens, with the lengths that occur.
#[derive(Debug)]
struct Parts {
    parts: HashSet<String>,
    lengths: BTreeSet<usize>,
}

impl ControlTexts {
    pub(super) fn new<'a>(texts: impl Iterator<Item = &'a str>) -> Result<Self, BuildError> {
        let texts: Vec<String> = texts.map(str::to_owned).collect();
        let automaton = match texts.is_empty() {
            true => None,
            false => Some(
                AhoCorasick::builder()
                    .match_kind(MatchKind::Standard)
                    .build(&texts)?,
            ),
        };
        let cuts = || {
            texts.iter().flat_map(|text| {
                text.char_indices()
                    .skip(1)
                    .map(move |(cut, _)| text.split_at(cut))
            })
        };
        let heads = Parts::new(cuts().map(|(head, _)| head));
        let tails = Parts::new(cuts().map(|(_, tail)| tail));
        Ok(Self {
            texts,
            automaton,
            heads,
            tails,
        })
    }

    /// The sorted, disjoint parts of a string to be swapped. `alone` also swaps a string that is nothing but an inner part of a control token.
    fn risks(&self, string: &str, alone: bool) -> Vec<Range<usize>> {
        let Some(automaton) = &self.automaton else {
            return Vec::new();
        };
        let mut risks: Vec<Range<usize>> = automaton
            .find_overlapping_iter(string)
            .map(|found| found.range())
            .collect();
        // A template may trim what it is given, so the ends that count are those with and without white space.
        let trimmed_start = string.len() - string.trim_start().len();
        for (offset, view) in [(0, string), (trimmed_start, string.trim())] {
            let tail = self.tails.lengths.iter().rev().find(|&&length| {
                view.get(..length)
                    .is_some_and(|part| self.tails.parts.contains(part))
            });
            risks.extend(tail.map(|length| offset..offset + length));
            let head = self.heads.lengths.iter().rev().find(|&&length| {
                view.len()
                    .checked_sub(length)
                    .and_then(|start| view.get(start..))
                    .is_some_and(|part| self.heads.parts.contains(part))
            });
            risks.extend(head.map(|length| offset + view.len() - length..offset + view.len()));
            if alone && !view.is_empty() && self.texts.iter().any(|text| text.contains(view)) {
                risks.push(offset..offset + view.len());
            }
        }
        risks.sort_by_key(|risk| risk.start);
        let mut merged: Vec<Range<usize>> = Vec::with_capacity(risks.len());
        for risk in risks {
            match merged.last_mut() {
                Some(last) if risk.start < last.end => last.end = last.end.max(risk.end),
                _ => merged.push(risk),
            }
        }
        merged
    }
}

impl Parts {
    fn new<'a>(parts: impl Iterator<Item = &'a str>) -> Self {
        let parts: HashSet<String> = parts.map(str::to_owned).collect();
        let lengths = parts.iter().map(String::len).collect();
        Self { parts, lengths }
    }
}

/// The callers' strings use up the private-use characters.
#[derive(Debug)]
pub(super) struct NoStandIn;

/// A rendered text in its original wording.
#[derive(Debug)]
pub(super) struct Rendered {
    pub(super) text: String,
    /// Sorted, disjoint byte ranges of `text` that callers wrote and no control token may touch.
    pub(super) user_ranges: Vec<Range<usize>>,
}

/// The stand-ins of one rendering.
pub(super) struct Guard<'a> {
    controls: &'a ControlTexts,
    /// Private-use characters that occur in the strings themselves.
    taken: HashSet<char>,
    free: Box<dyn Iterator<Item = char>>,
    stand_ins: HashMap<String, char>,
    originals: HashMap<char, String>,
}

impl<'a> Guard<'a> {
    /// Starts with the private-use characters that must not be used as stand-ins.
    pub(super) fn new(controls: &'a ControlTexts, taken: HashSet<char>) -> Self {
        let free = Box::new(STAND_INS.into_iter().flatten());
        Self {
            controls,
            taken,
            free,
            stand_ins: HashMap::new(),
            originals: HashMap::new(),
        }
    }

    /// The characters of a string that could be mistaken for stand-ins.
    pub(super) fn taken(string: &str) -> impl Iterator<Item = char> {
        string
            .chars()
            .filter(|character| STAND_INS.iter().any(|range| range.contains(character)))
    }

    /// Swaps the risky parts of a caller's string. `alone` says that the string is free text, which has no business inside a control token.
    pub(super) fn swap(&mut self, string: &str, alone: bool) -> Result<String, NoStandIn> {
        let mut swapped = String::with_capacity(string.len());
        let mut end = 0;
        for risk in self.controls.risks(string, alone) {
            swapped.push_str(&string[end..risk.start]);
            end = risk.end;
            swapped.push(self.stand_in(&string[risk])?);
        }
        swapped.push_str(&string[end..]);
        Ok(swapped)
    }

    fn stand_in(&mut self, original: &str) -> Result<char, NoStandIn> {
        if let Some(&stand_in) = self.stand_ins.get(original) {
            return Ok(stand_in);
        }
        let stand_in = self
            .free
            .find(|character| !self.taken.contains(character))
            .ok_or(NoStandIn)?;
        self.stand_ins.insert(original.to_owned(), stand_in);
        self.originals.insert(stand_in, original.to_owned());
        Ok(stand_in)
    }

    /// Swaps everything back.
    pub(super) fn restore(&self, rendered: &str) -> Rendered {
        let mut text = String::with_capacity(rendered.len());
        let mut user_ranges = Vec::new();
        for character in rendered.chars() {
            match self.originals.get(&character) {
                Some(original) => {
                    user_ranges.push(text.len()..text.len() + original.len());
                    text.push_str(original);
                }
                None => text.push(character),
            }
        }
        Rendered { text, user_ranges }
    }
}
