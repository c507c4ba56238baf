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

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

use serde_json::{Map, Value};

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
            Found::Refused { status, message } if self.lacks_switch(side, &message) => {
                Err(CouldNotRun(format!(
                    "the service has no switch for drafting in requests, give a second service with --reference: {status} {message}"
                )))
            }
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
                "{}: the reference gives nothing to compare with: {}",
                case.id,
                compare::describe(other)
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
    let answers: Vec<OnceLock<Found>> = (0..total).map(|_| OnceLock::new()).collect();
    let next = AtomicUsize::new(0);
    let answered = AtomicUsize::new(0);
    let stopped = AtomicBool::new(false);
    let error = Mutex::new(None);
    let work = || {
        while !stopped.load(Ordering::Relaxed) {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= total {
                return;
            }
            let (ask, turn) = (index / per_ask, index % per_ask);
            // The sides take turns in going first.
            let slot = if ask % 2 == 0 {
                turn
            } else {
                per_ask - 1 - turn
            };
            let side = if slot == 0 {
                Side::Reference
            } else {
                Side::Candidate
            };
            match sides.ask(side, &asks[ask]) {
                Ok(found) => {
                    let _ = answers[ask * per_ask + slot].set(found);
                    progress(answered.fetch_add(1, Ordering::Relaxed) + 1, total);
                }
                Err(failure) => {
                    stopped.store(true, Ordering::Relaxed);
                    let mut error = error
                        .lock()
                        .unwrap_or_else(std::sync::PoisonError::into_inner);
                    error.get_or_insert(failure);
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..settings.concurrency.min(total) {
            scope.spawn(work);
        }
    });
    let error = error
        .into_inner()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    if let Some(error) = error {
        return Err(error);
    }
    let mut answers = answers.into_iter().filter_map(OnceLock::into_inner);
    let mut pairs = Vec::with_capacity(asks.len());
    for ask in asks {
        let Some(reference) = answers.next() else {
            break;
        };
        pairs.push(Pair {
            ask: ask.clone(),
            reference,
            candidates: answers.by_ref().take(settings.repeat).collect(),
        });
    }
    Ok(pairs)
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
