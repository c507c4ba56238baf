//! `lossless`: does drafting change the output?
//!
//! Every request is made twice, to the *reference* (the service with drafting switched off for that request, or a second service) and to the
//! *candidate*, and the answers are compared token by token. [`plan`] says what is asked, [`compare`] finds the first difference, [`examine`]
//! measures how close the choice was that came out differently, [`report`] sums up.
//! A run in which the candidate did not draft, or in which too few tokens were compared, is inconclusive and never a pass.

pub mod compare;
pub mod examine;
pub mod plan;
pub mod report;

use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Map, Value};

use crate::pool;
use crate::prompts::Case;
use crate::service::{CouldNotRun, Found, Service};
use compare::{Aspect, first_difference};
use examine::Examiner;
use plan::{Ask, Sampling};
use report::{Class, Drafting, Evidence, Report};

pub use plan::Settings;

/// The two sides of a comparison.
#[derive(Clone, Copy)]
pub enum Sides<'a> {
    /// One service that can do without drafting for a single request (`"speculative": {"enabled": false}`).
    Switch(&'a Service),
    /// Two services that are asked the same.
    Two {
        /// The one that is known to be right.
        reference: &'a Service,
        /// The one that drafts.
        candidate: &'a Service,
    },
}

/// One side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// What is right.
    Reference,
    /// What is judged.
    Candidate,
}

impl<'a> Sides<'a> {
    /// The service of a side.
    pub fn service(self, side: Side) -> &'a Service {
        match (self, side) {
            (Self::Switch(service), _) => service,
            (Self::Two { reference, .. }, Side::Reference) => reference,
            (Self::Two { candidate, .. }, Side::Candidate) => candidate,
        }
    }

    /// The fields of a request as a side gets it.
    pub fn fields(self, side: Side, fields: &Map<String, Value>) -> Map<String, Value> {
        let mut fields = fields.clone();
        if matches!((self, side), (Self::Switch(_), Side::Reference)) {
            fields.insert(
                "speculative".into(),
                serde_json::json!({ "enabled": false }),
            );
        }
        fields
    }

    /// Asks a side.
    pub fn ask(self, side: Side, ask: &Ask) -> Result<Found, CouldNotRun> {
        let found = self
            .service(side)
            .ask(ask.api, &self.fields(side, &ask.fields))?;
        match found {
            Found::Refused {
                status, message, ..
            } if self.lacks_switch(side, &message) => Err(CouldNotRun(format!(
                "the service has no switch for drafting in requests, give a second service with --reference: {status} {message}"
            ))),
            found => Ok(found),
        }
    }

    fn lacks_switch(self, side: Side, message: &str) -> bool {
        matches!((self, side), (Self::Switch(_), Side::Reference))
            && message.contains("speculative")
    }
}

/// Runs the comparison. `progress` is told how many of how many requests are answered.
pub fn run(
    sides: Sides<'_>,
    cases: &[Case],
    settings: &Settings,
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Report {
    let mut evidence = Evidence::default();
    let outcome = compare_all(sides, cases, settings, progress, &mut evidence);
    let error = outcome.err().map(|error| error.0);
    Report::new(sides, settings, cases, evidence, error)
}

fn compare_all(
    sides: Sides<'_>,
    cases: &[Case],
    settings: &Settings,
    progress: &(dyn Fn(usize, usize) + Sync),
    evidence: &mut Evidence,
) -> Result<(), CouldNotRun> {
    let asks = plan::asks(cases, settings);
    let mut pairs = ask_all(sides, &asks, settings, progress)?;
    if settings.samplings.contains(&Sampling::Greedy) {
        let stops = plan::stops(cases, &pairs, settings);
        pairs.extend(ask_all(sides, &stops, settings, progress)?);
    }
    let mut found = Vec::new();
    for pair in &pairs {
        judge(cases, pair, evidence, &mut found)?;
    }
    let examiner = Examiner::new(sides, settings, &pairs);
    for finding in found {
        let difference = examiner.examine(cases, finding, &mut evidence.noise)?;
        let row = evidence.scenario(&difference.scenario);
        match difference.class {
            Class::NearTie => row.near_tie += 1,
            Class::Different => row.different += 1,
        }
        evidence.differences.push(difference);
    }
    Ok(())
}

/// One request with the answers of both sides.
#[derive(Clone, Debug)]
pub struct Pair {
    /// What was asked.
    pub ask: Ask,
    /// What is right.
    pub reference: Found,
    /// One answer for each repetition.
    pub candidates: Vec<Found>,
}

/// Where a pair differs.
#[derive(Clone, Copy, Debug)]
pub struct Finding<'a> {
    /// The pair.
    pub pair: &'a Pair,
    /// Which of the candidate's answers.
    pub repetition: usize,
    /// What differs first.
    pub aspect: Aspect,
    /// Where.
    pub position: usize,
}

/// Counts what a pair shows, and collects where it differs.
fn judge<'a>(
    cases: &[Case],
    pair: &'a Pair,
    evidence: &mut Evidence,
    found: &mut Vec<Finding<'a>>,
) -> Result<(), CouldNotRun> {
    let case = &cases[pair.ask.case];
    match &pair.reference {
        Found::Generation(_) => {}
        Found::Refused { status, .. } if (400..500).contains(status) => {}
        other => {
            return Err(CouldNotRun(format!(
                "{}: the reference gives nothing to compare with: {other}",
                case.id
            )));
        }
    }
    let row = evidence.scenario(&case.scenario);
    let mut without_ids = false;
    if let Found::Generation(generation) = &pair.reference {
        row.reference.add(generation);
        without_ids |= generation.token_ids.is_none();
    }
    for (repetition, candidate) in pair.candidates.iter().enumerate() {
        row.comparisons += 1;
        if let Found::Generation(generation) = candidate {
            row.candidate.add(generation);
            without_ids |= generation.token_ids.is_none();
        }
        let difference = first_difference(&pair.reference, candidate, pair.ask.stop());
        row.compared_tokens += compare::compared_tokens(&pair.reference, candidate, difference);
        match difference {
            Some((aspect, position)) => found.push(Finding {
                pair,
                repetition,
                aspect,
                position,
            }),
            None if matches!(candidate, Found::Refused { .. }) => row.refused += 1,
            None => row.equal += 1,
        }
    }
    evidence.without_ids |= without_ids;
    Ok(())
}

/// Asks both sides everything, mixed with each other, so that what one side meets the other one meets as well.
fn ask_all(
    sides: Sides<'_>,
    asks: &[Ask],
    settings: &Settings,
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Result<Vec<Pair>, CouldNotRun> {
    let per_ask = 1 + settings.repeat;
    let total = asks.len() * per_ask;
    let answered = AtomicUsize::new(0);
    let answers = pool::map(total, settings.concurrency, |index| {
        let (ask, turn) = (index / per_ask, index % per_ask);
        let side = side_of(ask, turn, per_ask);
        let found = sides.ask(side, &asks[ask])?;
        progress(answered.fetch_add(1, Ordering::Relaxed) + 1, total);
        Ok(found)
    })?;
    let mut answers = answers.into_iter();
    let mut pairs = Vec::with_capacity(asks.len());
    for (index, ask) in asks.iter().enumerate() {
        let mut candidates: Vec<Found> = answers.by_ref().take(per_ask).collect();
        let turn = (0..per_ask).find(|&turn| side_of(index, turn, per_ask) == Side::Reference);
        pairs.push(Pair {
            ask: ask.clone(),
            reference: candidates.remove(turn.unwrap_or_default()),
            candidates,
        });
    }
    Ok(pairs)
}

/// The sides take turns in going first.
fn side_of(ask: usize, turn: usize, per_ask: usize) -> Side {
    let first = if ask.is_multiple_of(2) {
        0
    } else {
        per_ask - 1
    };
    if turn == first {
        Side::Reference
    } else {
        Side::Candidate
    }
}

/// What drafting did on one side of a whole run.
pub fn drafting_of(evidence: &Evidence, side: Side) -> Drafting {
    let mut sum = Drafting::default();
    for row in &evidence.scenarios {
        sum += match side {
            Side::Reference => row.reference,
            Side::Candidate => row.candidate,
        };
    }
    sum
}
