//! What the benchmark found, as data and as text, and what it must hold.

use std::fmt;
use std::path::Path;

use serde::Serialize;

use super::{Args, Sample, Timed};
use crate::answer::Drafted;
use crate::bench::median;
use crate::build::Profile;
use crate::machine::Machine;
use crate::session::Session;

/// Version of the JSON form.
const SCHEMA_VERSION: u32 = 1;

/// Least gain of drafting for greedy chat at concurrency 1, by the form of the bundle.
const LEAST_RATIOS: [(&str, f64); 2] = [("int8", 1.6), ("fp32", 1.5)];
/// Acceptance length from which on the gain is asked for.
const LEAST_ACCEPTANCE_LENGTH: f64 = 2.5;
/// Share of a step that everything outside the two models stays under.
const OVERHEAD_LIMIT: f64 = 0.05;

/// Everything the benchmark found.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Version of this form.
    pub schema_version: u32,
    /// Version of the tool that wrote it.
    pub tool_version: &'static str,
    /// What it ran on.
    pub machine: Machine,
    /// Name of the model.
    pub model: String,
    /// Name of the bundle's directory.
    pub bundle: String,
    /// Digest of the bundle's manifest.
    pub bundle_digest: String,
    /// What the probe found at load.
    pub lossless_class: String,
    /// Build of the server: `release` or `dev`.
    pub profile: &'static str,
    /// Tokens of the widest draft block.
    pub block_size: Option<u64>,
    /// Softmax temperature of the requests.
    pub temperature: f64,
    /// Most tokens of an answer.
    pub max_tokens: u32,
    /// Rounds.
    pub rounds: u32,
    /// Each kind at each concurrency.
    pub cells: Vec<Cell>,
}

/// One kind of prompts at one concurrency.
#[derive(Clone, Debug, Serialize)]
pub struct Cell {
    /// Kind of prompts.
    pub kind: String,
    /// Requests in flight.
    pub concurrency: usize,
    /// Without drafting.
    pub off: Side,
    /// With drafting.
    pub on: Side,
    /// What the figures come to; `None` until every round was measured.
    pub summary: Option<Summary>,
}

/// What the figures of a cell come to.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Median decoding speed without drafting.
    pub off_tokens_per_second: f64,
    /// Median decoding speed with drafting.
    pub on_tokens_per_second: f64,
    /// Median over the rounds of the gain in decoding speed.
    pub ratio: f64,
    /// The same from the first request to the last answer.
    pub end_to_end_ratio: f64,
    /// Tokens that a step with drafted tokens brings.
    pub acceptance_length: Option<f64>,
    /// Share of the time outside the two models without drafting.
    pub off_overhead_share: f64,
    /// Share of the time outside the two models with drafting.
    pub on_overhead_share: f64,
}

/// One side of a cell.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Side {
    /// Tokens after the first of each answer, a second of decoding steps, for each round.
    pub decode_tokens_per_second: Vec<f64>,
    /// All tokens, a second from the first request to the last answer, prompts included, for each round.
    pub tokens_per_second: Vec<f64>,
    /// Tokens of all answers of all rounds.
    pub tokens: usize,
    /// What was drafted.
    #[serde(flatten)]
    pub drafted: Drafted,
    /// Times of draft passes.
    pub draft: Part,
    /// Times of target passes over decoding sequences.
    pub verify: Part,
    /// Times outside the two models.
    pub overhead: Part,
}

/// The time of one part of a step.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Part {
    /// Steps that had it.
    pub steps: u64,
    /// Its mean time in them.
    pub mean_ms: f64,
}

impl Part {
    fn add(&mut self, timed: Timed) {
        let sum_ms = self.sum_ms() + timed.seconds * 1e3;
        self.steps += timed.count as u64;
        self.mean_ms = if self.steps == 0 {
            0.0
        } else {
            sum_ms / self.steps as f64
        };
    }

    fn sum_ms(&self) -> f64 {
        self.mean_ms * self.steps as f64
    }
}

impl Side {
    pub(super) fn add(&mut self, sample: Sample) {
        let decoded = (sample.tokens - sample.answers.min(sample.tokens)) as f64;
        self.decode_tokens_per_second
            .push(decoded / sample.decode_seconds);
        self.tokens_per_second
            .push(sample.tokens as f64 / sample.wall_seconds);
        self.tokens += sample.tokens;
        self.drafted += sample.drafted;
        self.draft.add(sample.draft);
        self.verify.add(sample.verify);
        self.overhead.add(sample.overhead);
    }

    /// Median of the decoding speed.
    pub fn speed(&self) -> f64 {
        median(&self.decode_tokens_per_second)
    }

    /// Share of the time outside the two models; passes that feed prompts are left out.
    pub fn overhead_share(&self) -> f64 {
        let overhead = self.overhead.sum_ms();
        let all = overhead + self.draft.sum_ms() + self.verify.sum_ms();
        if all > 0.0 { overhead / all } else { 0.0 }
    }
}

impl Cell {
    pub(super) fn new(kind: &str, concurrency: usize) -> Self {
        Self {
            kind: kind.to_owned(),
            concurrency,
            off: Side::default(),
            on: Side::default(),
            summary: None,
        }
    }

    fn summarised(mut self) -> Self {
        self.summary = Some(Summary {
            off_tokens_per_second: self.off.speed(),
            on_tokens_per_second: self.on.speed(),
            ratio: self.ratio(),
            end_to_end_ratio: self.end_to_end_ratio(),
            acceptance_length: self.on.drafted.acceptance_length(),
            off_overhead_share: self.off.overhead_share(),
            on_overhead_share: self.on.overhead_share(),
        });
        self
    }

    pub(super) fn side_mut(&mut self, drafting: bool) -> &mut Side {
        if drafting {
            &mut self.on
        } else {
            &mut self.off
        }
    }

    /// Median over the rounds of the speed with drafting for each of the speed without.
    pub fn ratio(&self) -> f64 {
        ratio(
            &self.on.decode_tokens_per_second,
            &self.off.decode_tokens_per_second,
        )
    }

    /// The same from the first request to the last answer.
    pub fn end_to_end_ratio(&self) -> f64 {
        ratio(&self.on.tokens_per_second, &self.off.tokens_per_second)
    }
}

fn ratio(on: &[f64], off: &[f64]) -> f64 {
    let ratios: Vec<f64> = on.iter().zip(off).map(|(on, off)| on / off).collect();
    median(&ratios)
}

/// What the figures must hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checks(Vec<(bool, String)>);

impl Checks {
    /// What does not hold.
    pub fn failed(&self) -> Vec<String> {
        let failed = self.0.iter().filter(|(holds, _)| !holds);
        failed.map(|(_, text)| text.clone()).collect()
    }
}

impl Report {
    pub(super) fn new(
        session: &Session,
        bundle: &Path,
        profile: Profile,
        args: &Args,
        cells: Vec<Cell>,
    ) -> Self {
        let name = bundle.file_name().unwrap_or(bundle.as_os_str());
        Self {
            schema_version: SCHEMA_VERSION,
            tool_version: env!("CARGO_PKG_VERSION"),
            machine: Machine::current(),
            model: session.model().to_owned(),
            bundle: name.to_string_lossy().into_owned(),
            bundle_digest: session.fact("bundle_digest").to_owned(),
            lossless_class: session.fact("lossless_class").to_owned(),
            profile: match profile {
                Profile::Dev => "dev",
                Profile::Release => "release",
            },
            block_size: session.block_size(),
            temperature: args.temperature,
            max_tokens: args.max_tokens,
            rounds: args.rounds,
            cells: cells.into_iter().map(Cell::summarised).collect(),
        }
    }

    /// Whether drafting was at work in every cell.
    pub fn has_drafted(&self) -> bool {
        let drafted = |cell: &Cell| cell.on.drafted.drafted_tokens > 0;
        !self.cells.is_empty() && self.cells.iter().all(drafted)
    }

    /// The figures held to what is asked of them.
    pub fn checks(&self) -> Checks {
        let mut checks = Vec::new();
        let form = LEAST_RATIOS
            .iter()
            .find(|(form, _)| self.bundle.ends_with(form));
        for cell in &self.cells {
            let name = format!("{} with {} in flight", cell.kind, cell.concurrency);
            if let Some((form, least)) = form
                && cell.kind == "chat"
                && cell.concurrency == 1
                && self.temperature == 0.0
            {
                let length = cell.on.drafted.acceptance_length().unwrap_or(0.0);
                let ratio = cell.ratio();
                checks.push((
                    length < LEAST_ACCEPTANCE_LENGTH || ratio >= *least,
                    format!(
                        "{name}: drafting makes decoding {ratio:.2} times as fast; at an acceptance length of {length:.2} ({LEAST_ACCEPTANCE_LENGTH} or more) the {form} bundle must reach {least}"
                    ),
                ));
            }
            for (side, figures) in [("off", &cell.off), ("on", &cell.on)] {
                let share = figures.overhead_share();
                checks.push((
                    share < OVERHEAD_LIMIT,
                    format!(
                        "{name}, drafting {side}: {:.1} % of a step is outside the models; allowed is under {:.0} %",
                        share * 100.0,
                        OVERHEAD_LIMIT * 100.0
                    ),
                ));
            }
        }
        Checks(checks)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} ({}, sha256 {}), {} build, {} rounds, at most {} tokens, temperature {}",
            self.model,
            self.bundle,
            self.bundle_digest,
            self.profile,
            self.rounds,
            self.max_tokens,
            self.temperature
        )?;
        writeln!(
            f,
            "{}, {} processors, {}\n",
            self.machine.processor, self.machine.processors, self.machine.platform
        )?;
        writeln!(
            f,
            "                     tokens/s decoding          end to end  accept.   draft  verify  overhead   overhead %"
        )?;
        writeln!(
            f,
            "prompts       flight     off      on  ratio         ratio   length      ms      ms        ms      off    on"
        )?;
        for cell in &self.cells {
            let length = match cell.on.drafted.acceptance_length() {
                Some(length) => format!("{length:.2}"),
                None => "-".to_owned(),
            };
            writeln!(
                f,
                "{:<14}{:>6}{:>8.1}{:>8.1}{:>7.2}{:>14.2}{:>9}{:>8.2}{:>8.2}{:>10.3}{:>9.1}{:>6.1}",
                cell.kind,
                cell.concurrency,
                cell.off.speed(),
                cell.on.speed(),
                cell.ratio(),
                cell.end_to_end_ratio(),
                length,
                cell.on.draft.mean_ms,
                cell.on.verify.mean_ms,
                cell.on.overhead.mean_ms,
                cell.off.overhead_share() * 100.0,
                cell.on.overhead_share() * 100.0,
            )?;
        }
        let failed = self.checks().failed();
        if failed.is_empty() {
            write!(f, "\nevery limit holds")?;
        }
        for text in failed {
            write!(f, "\nnot held: {text}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
pub(in crate::bench) mod tests {
    use super::*;

    fn sample(decode_seconds: f64, drafted: Drafted) -> Sample {
        let timed = |seconds, count| Timed { seconds, count };
        Sample {
            tokens: 104,
            answers: 4,
            wall_seconds: 2.0 * decode_seconds,
            decode_seconds,
            drafted,
            draft: timed(0.2 * decode_seconds, 40.0),
            verify: timed(0.76 * decode_seconds, 40.0),
            overhead: timed(0.04 * decode_seconds, 44.0),
        }
    }

    pub(in crate::bench) fn report(bundle: &str, accepted_tokens: u64, on_seconds: f64) -> Report {
        let mut cell = Cell::new("chat", 1);
        for off_seconds in [1.0, 5.0, 1.0] {
            cell.off.add(sample(off_seconds, Drafted::default()));
        }
        for _ in 0..3 {
            cell.on.add(sample(
                on_seconds,
                Drafted {
                    drafted_tokens: 280,
                    accepted_tokens,
                    steps: 40,
                },
            ));
        }
        Report {
            schema_version: SCHEMA_VERSION,
            tool_version: "0",
            machine: Machine {
                processor: "a processor".to_owned(),
                processors: 2,
                platform: "linux".to_owned(),
            },
            model: "model".to_owned(),
            bundle: bundle.to_owned(),
            bundle_digest: "00".to_owned(),
            lossless_class: "exact".to_owned(),
            profile: "release",
            block_size: Some(8),
            temperature: 0.0,
            max_tokens: 32,
            rounds: 3,
            cells: vec![cell],
        }
    }

    #[test]
    fn medians_ignore_one_slow_round_and_first_tokens_do_not_count() {
        let report = report("x-int8", 64, 0.5);
        let cell = &report.cells[0];
        assert_eq!((cell.off.speed(), cell.on.speed()), (100.0, 200.0));
        assert_eq!(cell.ratio(), 2.0);
        assert_eq!(cell.off.tokens_per_second, [52.0, 10.4, 52.0]);
        assert!((cell.on.draft.mean_ms - 2.5).abs() < 1e-9, "{cell:?}");
        assert!((cell.on.overhead_share() - 0.04).abs() < 1e-9, "{cell:?}");
    }

    #[test]
    fn the_gain_is_asked_for_only_where_enough_is_accepted() {
        let holds = |bundle, accepted_tokens, on_seconds| {
            report(bundle, accepted_tokens, on_seconds)
                .checks()
                .failed()
                .is_empty()
        };
        assert!(holds("x-int8", 60, 0.62));
        assert!(!holds("x-int8", 60, 0.64));
        assert!(holds("x-fp32", 60, 0.64));
        assert!(!holds("x-fp32", 60, 0.68));
        assert!(holds("x-int8", 59, 2.0));
    }

    #[test]
    fn overhead_of_a_twentieth_of_a_step_is_too_much() {
        let mut report = report("x-int8", 60, 0.5);
        report.cells[0].on.overhead.mean_ms *= 1.4;
        let failed = report.checks().failed();
        assert_eq!(failed.len(), 1, "{failed:?}");
        assert!(failed[0].contains("drafting on"), "{failed:?}");
    }
}
