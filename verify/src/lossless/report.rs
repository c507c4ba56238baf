//! What `lossless` found, as data and as text, and the verdict.

use std::fmt;

use serde::Serialize;
use serde_json::Value;

use super::compare::{Aspect, common_chars, tokens};
use super::examine::{Margin, Noise};
use super::plan::{Sampling, Settings};
use super::{Side, Sides, drafting_of};
use crate::prompts::Case;
use crate::report::{Model, SCHEMA_VERSION, Verdict};
use crate::service::Found;
use crate::wire::{Generation, Speculative, shorten};

/// Token ids that are shown behind a difference.
const SHOWN_TOKENS: usize = 12;
/// Differences that are shown as text.
const SHOWN_DIFFERENCES: usize = 10;
/// How sure the statement about the smallest fault is.
const CONFIDENCE: f64 = 0.99;

/// How much two answers that are not equal differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// They part where the reference's own figures don't tell the two best tokens apart.
    NearTie,
    /// In any other way.
    Different,
}

/// What one side generated, and what drafting did for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Drafting {
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Completions.
    pub answers: u64,
    /// Completions that say what drafting did (`usage.speculative`).
    pub counted_answers: u64,
    /// The sum of what they say.
    #[serde(flatten)]
    pub speculative: Speculative,
}

impl Drafting {
    /// Counts an answer.
    pub fn add(&mut self, answer: &Generation) {
        self.generated_tokens += tokens(answer);
        self.answers += 1;
        if let Some(speculative) = answer.speculative {
            self.counted_answers += 1;
            self.speculative += speculative;
        }
    }

    /// Drafted tokens for each generated one, 0 when nothing was generated.
    pub fn share(&self) -> f64 {
        self.speculative.drafted_tokens as f64 / self.generated_tokens.max(1) as f64
    }
}

impl std::ops::AddAssign for Drafting {
    fn add_assign(&mut self, other: Self) {
        self.generated_tokens += other.generated_tokens;
        self.answers += other.answers;
        self.counted_answers += other.counted_answers;
        self.speculative += other.speculative;
    }
}

/// The sums of one scenario.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Row {
    /// The scenario.
    pub scenario: String,
    /// Pairs of answers.
    pub comparisons: usize,
    /// Of these, equal in everything.
    pub equal: usize,
    /// Of these, near-ties.
    pub near_tie: usize,
    /// Of these, different.
    pub different: usize,
    /// Of these, refused by both sides with the same status, such as prompts that are too long.
    pub refused: usize,
    /// Tokens compared.
    pub compared_tokens: u64,
    /// What the reference generated.
    pub reference: Drafting,
    /// What the candidate generated.
    pub candidate: Drafting,
    /// Tokens that a target pass with drafted tokens brought on the candidate, null without such a pass.
    pub acceptance_length: Option<f64>,
}

/// What a run has brought so far.
#[derive(Clone, Debug, Default)]
pub struct Evidence {
    /// The sums of each scenario, in the order of the cases.
    pub scenarios: Vec<Row>,
    /// Everything that is not equal.
    pub differences: Vec<Difference>,
    /// The noise, once a difference needed it.
    pub noise: Option<Noise>,
    /// Whether an answer came without token ids.
    pub without_ids: bool,
}

impl Evidence {
    /// The row of a scenario, made when it is new.
    pub fn scenario(&mut self, name: &str) -> &mut Row {
        let known = self.scenarios.iter().position(|row| row.scenario == name);
        let index = known.unwrap_or_else(|| {
            self.scenarios.push(Row {
                scenario: name.to_owned(),
                ..Row::default()
            });
            self.scenarios.len() - 1
        });
        &mut self.scenarios[index]
    }
}

/// How one side goes on from a difference.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Continuation {
    /// Token ids from the position on, where the service returns them.
    pub token_ids: Option<Vec<u64>>,
    /// Text from the first different character on.
    pub text: String,
    /// The whole text, or what was answered instead of one.
    pub full_text: String,
    /// Why it ended.
    pub finish_reason: Option<String>,
    /// Tokens that the service counted.
    pub completion_tokens: Option<u64>,
}

impl Continuation {
    /// Of `found` beside `other`.
    pub fn of(found: &Found, other: &Found, position: usize) -> Self {
        let Found::Generation(generation) = found else {
            return Self {
                token_ids: None,
                text: found.to_string(),
                full_text: found.to_string(),
                finish_reason: None,
                completion_tokens: None,
            };
        };
        let common = match other {
            Found::Generation(other) => common_chars(&generation.text, &other.text),
            _ => 0,
        };
        let ids = generation.token_ids.as_ref();
        Self {
            token_ids: ids.map(|ids| {
                ids.iter()
                    .skip(position)
                    .take(SHOWN_TOKENS)
                    .copied()
                    .collect()
            }),
            text: generation.text.chars().skip(common).collect(),
            full_text: generation.text.clone(),
            finish_reason: generation.finish_reason.clone(),
            completion_tokens: generation.usage.map(|usage| usage.completion_tokens),
        }
    }
}

/// One pair of answers that is not equal.
#[derive(Clone, Debug, Serialize)]
pub struct Difference {
    /// Which case.
    pub case: String,
    /// Its scenario.
    pub scenario: String,
    /// How tokens were chosen.
    pub sampling: Sampling,
    /// Which of the candidate's answers, from 0.
    pub repetition: usize,
    /// What differs first.
    pub aspect: Aspect,
    /// Where: tokens for `token` and `prompt`, characters for `text` and `stop_string`, else the number of tokens.
    pub position: usize,
    /// How much.
    pub class: Class,
    /// How close the choice was, where that can be known.
    pub margin: Option<Margin>,
    /// Whether the reference gave its answer once more.
    pub reference_repeats: bool,
    /// Whether the candidate gave its answer once more.
    pub candidate_repeats: bool,
    /// The prompt as a person reads it.
    pub prompt: String,
    /// How the reference goes on.
    pub reference: Continuation,
    /// How the candidate goes on.
    pub candidate: Continuation,
    /// The request of the reference, to repeat it.
    pub reference_request: Value,
    /// The request of the candidate, to repeat it.
    pub candidate_request: Value,
}

/// What answers were compared by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ComparedBy {
    /// Token ids and text.
    TokenIds,
    /// Text, since a side returns no token ids.
    Text,
}

/// One side of the comparison.
#[derive(Clone, Debug, Serialize)]
pub struct SideReport {
    /// Address of the service.
    pub endpoint: String,
    /// Its model.
    pub model: Model,
    /// Whether its requests switched drafting off.
    pub switched_off: bool,
    /// What it generated.
    pub drafting: Drafting,
}

/// A run of `lossless`.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Version of this program.
    pub tool_version: &'static str,
    /// `lossless`.
    pub command: &'static str,
    /// What was right.
    pub reference: SideReport,
    /// What was judged.
    pub candidate: SideReport,
    /// How the run was made.
    pub settings: Settings,
    /// Cases asked.
    pub cases: usize,
    /// What answers were compared by.
    pub compared_by: ComparedBy,
    /// Outcome of the run.
    pub verdict: Verdict,
    /// Why the verdict is none of pass and fail, or why it is fail.
    pub reasons: Vec<String>,
    /// Why the run ended early.
    pub error: Option<String>,
    /// Tokens compared.
    pub compared_tokens: u64,
    /// The smallest share of wrong tokens that a run over so many shows with a probability of 99 %, null when nothing was compared.
    pub smallest_shown_fault_rate: Option<f64>,
    /// The same among the drafted tokens that were accepted.
    pub smallest_shown_draft_fault_rate: Option<f64>,
    /// The noise that near-ties were held to, null when nothing needed it.
    pub noise: Option<Noise>,
    /// The sums of each scenario.
    pub scenarios: Vec<Row>,
    /// Everything that is not equal.
    pub differences: Vec<Difference>,
}

impl Report {
    /// Sums up a run; `error` says why it ended early.
    pub fn new(
        sides: Sides<'_>,
        settings: &Settings,
        cases: &[Case],
        mut evidence: Evidence,
        error: Option<String>,
    ) -> Self {
        for row in &mut evidence.scenarios {
            row.acceptance_length = row.candidate.speculative.acceptance_length();
        }
        let side = |side| {
            let service = sides.service(side);
            SideReport {
                endpoint: service.client().base().to_owned(),
                model: service.model().clone(),
                switched_off: side == Side::Reference && matches!(sides, Sides::Switch(_)),
                drafting: drafting_of(&evidence, side),
            }
        };
        let (reference, candidate) = (side(Side::Reference), side(Side::Candidate));
        let compared_tokens = evidence
            .scenarios
            .iter()
            .map(|row| row.compared_tokens)
            .sum();
        let mut report = Self {
            schema_version: SCHEMA_VERSION,
            tool_version: env!("CARGO_PKG_VERSION"),
            command: "lossless",
            settings: settings.clone(),
            cases: cases.len(),
            compared_by: if evidence.without_ids {
                ComparedBy::Text
            } else {
                ComparedBy::TokenIds
            },
            verdict: Verdict::CouldNotRun,
            reasons: Vec::new(),
            error,
            compared_tokens,
            smallest_shown_fault_rate: smallest_shown_rate(compared_tokens),
            smallest_shown_draft_fault_rate: smallest_shown_rate(
                candidate.drafting.speculative.accepted_tokens,
            ),
            noise: evidence.noise,
            scenarios: evidence.scenarios,
            differences: evidence.differences,
            reference,
            candidate,
        };
        if report.error.is_none() {
            report.judge();
        }
        report
    }

    fn judge(&mut self) {
        let count = |class, repeats: bool| {
            let of_class = |difference: &&Difference| {
                difference.class == class && difference.reference_repeats == repeats
            };
            self.differences.iter().filter(of_class).count()
        };
        let near_ties = count(Class::NearTie, true) + count(Class::NearTie, false);
        let mut wrong = Vec::new();
        let mut doubts = Vec::new();
        match count(Class::Different, true) {
            0 => {}
            different => wrong.push(format!("{different} answers differ")),
        }
        if near_ties > self.settings.max_near_ties {
            wrong.push(format!(
                "{near_ties} near-ties, at most {} are allowed",
                self.settings.max_near_ties
            ));
        }
        match count(Class::Different, false) {
            0 => {}
            unsteady => doubts.push(format!(
                "{unsteady} answers differ where the reference does not repeat its own answer either"
            )),
        }
        let drafting = &self.candidate.drafting;
        if drafting.counted_answers == 0 && self.settings.assume_drafting {
            // The caller knows better.
        } else if drafting.counted_answers == 0 {
            doubts.push(
                "the candidate does not say whether it drafted (`usage.speculative`)".to_owned(),
            );
        } else if drafting.speculative.drafted_tokens == 0
            || drafting.share() < self.settings.min_drafted_share
        {
            let state = self.candidate.model.drafting.as_deref();
            doubts.push(format!(
                "the candidate drafted {} tokens for {} generated ones, a share of {:.4}, at least {} is needed{}",
                drafting.speculative.drafted_tokens,
                drafting.generated_tokens,
                drafting.share(),
                self.settings.min_drafted_share,
                state.map_or_else(String::new, |state| format!("; it says drafting is {state}")),
            ));
        }
        if self.reference.switched_off && self.reference.drafting.speculative.drafted_tokens > 0 {
            doubts.push(format!(
                "the reference drafted {} tokens although its requests switch drafting off",
                self.reference.drafting.speculative.drafted_tokens
            ));
        }
        if self.compared_tokens < self.settings.min_compared_tokens {
            doubts.push(format!(
                "{} tokens were compared, at least {} are needed",
                self.compared_tokens, self.settings.min_compared_tokens
            ));
        }
        self.verdict = match (wrong.is_empty(), doubts.is_empty()) {
            (false, _) => Verdict::Fail,
            (true, false) => Verdict::Inconclusive,
            (true, true) => Verdict::Pass,
        };
        self.reasons = wrong;
        self.reasons.append(&mut doubts);
    }
}

/// The share of wrong tokens of which `count` independent ones hold at least one with a probability of 99 %: p where (1 - p)^n = 1 %.
pub fn smallest_shown_rate(count: u64) -> Option<f64> {
    (count > 0).then(|| 1.0 - (1.0 - CONFIDENCE).powf(1.0 / count as f64))
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "outrider-verify {} lossless {}",
            self.tool_version, self.candidate.endpoint
        )?;
        write!(f, "candidate {}", self.candidate.model)?;
        if self.reference.switched_off {
            writeln!(f, "reference is the same service, drafting switched off")?;
        } else {
            write!(
                f,
                "reference {} {}",
                self.reference.endpoint, self.reference.model
            )?;
        }
        writeln!(
            f,
            "\n{:<20} {:>6} {:>6} {:>8} {:>9} {:>7} {:>8} {:>8} {:>10}",
            "scenario",
            "pairs",
            "equal",
            "near-tie",
            "different",
            "refused",
            "tokens",
            "drafted",
            "acceptance"
        )?;
        for row in &self.scenarios {
            writeln!(
                f,
                "{:<20} {:>6} {:>6} {:>8} {:>9} {:>7} {:>8} {:>8} {:>10}",
                row.scenario,
                row.comparisons,
                row.equal,
                row.near_tie,
                row.different,
                row.refused,
                row.compared_tokens,
                row.candidate.speculative.drafted_tokens,
                row.acceptance_length
                    .map_or_else(|| "-".to_owned(), |length| format!("{length:.2}")),
            )?;
        }
        writeln!(f)?;
        for difference in self.differences.iter().take(SHOWN_DIFFERENCES) {
            write!(f, "{difference}")?;
        }
        if let Some(more) = self.differences.len().checked_sub(SHOWN_DIFFERENCES + 1) {
            writeln!(f, "… and {} more", more + 1)?;
        }
        if let Some(noise) = &self.noise {
            writeln!(
                f,
                "noise of a margin: {:.2e} nats on the reference, {:.2e} between the sides; near-ties are held to {:.2e}",
                noise.reference_nats, noise.candidate_nats, noise.nats
            )?;
        }
        let by = match self.compared_by {
            ComparedBy::TokenIds => "token ids",
            ComparedBy::Text => "text",
        };
        writeln!(f, "{} tokens compared by {by}", self.compared_tokens)?;
        if let Some(rate) = self.smallest_shown_fault_rate {
            writeln!(
                f,
                "a fault in one of {:.0} tokens would show with a probability of 99 %",
                1.0 / rate
            )?;
        }
        if let Some(rate) = self.smallest_shown_draft_fault_rate {
            writeln!(
                f,
                "a fault in one of {:.0} accepted drafts would show with a probability of 99 %",
                1.0 / rate
            )?;
        }
        match &self.error {
            Some(error) => writeln!(f, "could not run to the end: {error}"),
            None if self.reasons.is_empty() => writeln!(f, "{}", self.verdict),
            None => writeln!(f, "{}: {}", self.verdict, self.reasons.join("; ")),
        }
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let class = match self.class {
            Class::NearTie => "near-tie",
            Class::Different => "DIFFERENT",
        };
        let sampling = match self.sampling {
            Sampling::Greedy => "greedy",
            Sampling::Seeded => "seeded",
            Sampling::Stop => "with a stop string",
        };
        let place = match self.aspect {
            Aspect::Answer => "the answer".to_owned(),
            Aspect::Prompt => format!("token {} of the prompt", self.position),
            Aspect::Token => format!("token {}", self.position),
            Aspect::Text => format!("character {}", self.position),
            Aspect::StopString => format!("the stop string at character {}", self.position),
            Aspect::FinishReason => format!("the finish reason after {} tokens", self.position),
            Aspect::Usage => format!("the usage after {} tokens", self.position),
        };
        writeln!(f, "{class}  {}, {sampling}: {place}", self.case)?;
        writeln!(f, "        prompt     {:?}", shorten(&self.prompt))?;
        for (name, side) in [
            ("reference", &self.reference),
            ("candidate", &self.candidate),
        ] {
            write!(f, "        {name}  {:?}", shorten(&side.text))?;
            if let Some(ids) = &side.token_ids {
                write!(f, " {ids:?}")?;
            }
            if matches!(self.aspect, Aspect::FinishReason) {
                write!(f, " finish reason {:?}", side.finish_reason)?;
            }
            if matches!(self.aspect, Aspect::Usage) {
                write!(f, " {:?} tokens counted", side.completion_tokens)?;
            }
            writeln!(f)?;
        }
        if let Some(margin) = &self.margin {
            writeln!(
                f,
                "        margin     {:.3e} nats between {:?} and {:?}",
                margin.nats, margin.first, margin.second
            )?;
        }
        let again = |repeats| {
            if repeats {
                "the same"
            } else {
                "another answer"
            }
        };
        writeln!(
            f,
            "        once more  reference {}, candidate {}",
            again(self.reference_repeats),
            again(self.candidate_repeats)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_fault_that_shows_follows_from_the_number_of_tokens() {
        assert_eq!(smallest_shown_rate(0), None);
        let rate = smallest_shown_rate(super::super::plan::MIN_COMPARED_TOKENS).unwrap();
        assert!((1.0 / rate - 2000.0).abs() < 1.0, "{rate}");
    }
}
