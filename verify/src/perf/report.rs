//! What `perf` found, as data and as text, and the verdict.

use std::fmt;

use serde::Serialize;

use super::stats::{Interval, interval, percentile};
use super::{Block, BlockPair, Measured, Settings};
use crate::lossless::report::Drafting;
use crate::lossless::{Side, Sides};
use crate::report::{Model, SCHEMA_VERSION, Verdict};

/// What drafting does to the speed of a scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Effect {
    /// Faster beyond doubt.
    WorthIt,
    /// No difference that matters.
    Neutral,
    /// Slower beyond doubt: switch it off here.
    Harmful,
    /// The measurements vary too much to tell; more rounds narrow the interval.
    Unclear,
}

impl fmt::Display for Effect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::WorthIt => "worth it",
            Self::Neutral => "neutral",
            Self::Harmful => "HARMFUL",
            Self::Unclear => "unclear",
        })
    }
}

/// Speed of one side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Speed {
    /// Tokens per second over all answers in flight, median of the blocks.
    pub tokens_per_second: f64,
    /// Time to the first token, median of the answers.
    pub first_token_p50_ms: f64,
    /// The same at the 95th percentile.
    pub first_token_p95_ms: f64,
    /// Time of a token behind the first, mean of an answer, median of the answers; 0 where no answer had two tokens.
    pub inter_token_p50_ms: f64,
    /// The same at the 95th percentile.
    pub inter_token_p95_ms: f64,
}

impl Speed {
    fn of<'a>(blocks: impl Iterator<Item = &'a Block> + Clone) -> Self {
        let rates: Vec<f64> = blocks
            .clone()
            .map(|block| block.tokens_per_second)
            .collect();
        let first: Vec<f64> = blocks
            .clone()
            .flat_map(|block| block.first_token_ms.clone())
            .collect();
        let inter: Vec<f64> = blocks
            .flat_map(|block| block.inter_token_ms.clone())
            .collect();
        let at = |values: &[f64], share| percentile(values, share).unwrap_or_default();
        Self {
            tokens_per_second: at(&rates, 0.5),
            first_token_p50_ms: at(&first, 0.5),
            first_token_p95_ms: at(&first, 0.95),
            inter_token_p50_ms: at(&inter, 0.5),
            inter_token_p95_ms: at(&inter, 0.95),
        }
    }
}

/// One scenario at one concurrency.
#[derive(Clone, Debug, Serialize)]
pub struct Cell {
    /// The scenario.
    pub scenario: String,
    /// Requests in flight.
    pub concurrency: usize,
    /// Without drafting.
    pub off: Speed,
    /// With drafting.
    pub on: Speed,
    /// Tokens per second with drafting, as multiples of those without, pair by pair.
    pub ratios: Vec<f64>,
    /// Their mean, null for fewer than two pairs.
    pub ratio: Option<Interval>,
    /// The same of the time to the first token.
    pub first_token_ratio: Option<Interval>,
    /// The same of the time of a token behind the first.
    pub inter_token_ratio: Option<Interval>,
    /// What drafting did.
    pub drafting: Drafting,
    /// Tokens that a target pass with drafted tokens brought, null without such a pass.
    pub acceptance_length: Option<f64>,
    /// What drafting does to the speed.
    pub effect: Effect,
}

impl Cell {
    /// Sums up the pairs of a cell.
    pub fn new(
        scenario: String,
        concurrency: usize,
        pairs: &[BlockPair],
        settings: &Settings,
    ) -> Self {
        let ratios_of = |value: fn(&Block) -> Option<f64>| -> Vec<f64> {
            let ratio = |pair: &BlockPair| {
                let ratio = value(&pair.on)? / value(&pair.off)?;
                (ratio.is_finite() && ratio > 0.0).then_some(ratio)
            };
            pairs.iter().filter_map(ratio).collect()
        };
        let mut drafting = Drafting::default();
        for pair in pairs {
            drafting += pair.on.drafting;
        }
        let ratios = ratios_of(|block| Some(block.tokens_per_second));
        let ratio = interval(&ratios);
        let first = ratios_of(|block| percentile(&block.first_token_ms, 0.5));
        let inter = ratios_of(|block| percentile(&block.inter_token_ms, 0.5));
        Self {
            scenario,
            concurrency,
            off: Speed::of(pairs.iter().map(|pair| &pair.off)),
            on: Speed::of(pairs.iter().map(|pair| &pair.on)),
            effect: effect(ratio, settings),
            ratios,
            ratio,
            first_token_ratio: interval(&first),
            inter_token_ratio: interval(&inter),
            drafting,
            acceptance_length: drafting.speculative.acceptance_length(),
        }
    }
}

fn effect(ratio: Option<Interval>, settings: &Settings) -> Effect {
    let Some(Interval { mean, low, high }) = ratio else {
        return Effect::Unclear;
    };
    if low > 1.0 && mean >= 1.0 + settings.least_effect_share {
        Effect::WorthIt
    } else if high < 1.0 && mean <= 1.0 - settings.least_effect_share {
        Effect::Harmful
    } else if high / mean - 1.0 <= settings.widest_interval_share {
        Effect::Neutral
    } else {
        Effect::Unclear
    }
}

/// One scenario over all concurrencies.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ScenarioEffect {
    /// The scenario.
    pub scenario: String,
    /// Harmful where it is at any concurrency; else worth it, unclear or neutral, in this order.
    pub effect: Effect,
    /// Tokens that a target pass with drafted tokens brought, over all concurrencies.
    pub acceptance_length: Option<f64>,
}

/// A run of `perf`.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Version of this program.
    pub tool_version: &'static str,
    /// `perf`.
    pub command: &'static str,
    /// Address of the service without drafting.
    pub off_endpoint: String,
    /// Address of the service with drafting.
    pub on_endpoint: String,
    /// The model of the latter.
    pub model: Model,
    /// How the run was made.
    pub settings: Settings,
    /// Outcome of the run.
    pub verdict: Verdict,
    /// Why it is no pass.
    pub reasons: Vec<String>,
    /// Why the run ended early.
    pub error: Option<String>,
    /// Tokens per second with drafting, as a multiple of those without, over everything; its pairs are the rounds.
    pub ratio: Option<Interval>,
    /// What drafting does in each scenario.
    pub scenarios: Vec<ScenarioEffect>,
    /// Everything by scenario and concurrency.
    pub cells: Vec<Cell>,
}

impl Report {
    /// Sums up a run; `error` says why it ended early.
    pub(super) fn new(
        sides: Sides<'_>,
        settings: &Settings,
        measured: Vec<Measured>,
        error: Option<String>,
    ) -> Self {
        let cells: Vec<Cell> = measured
            .into_iter()
            .map(|cell| cell.cell(settings))
            .collect();
        let endpoint = |side| sides.service(side).client().base().to_owned();
        let mut report = Self {
            schema_version: SCHEMA_VERSION,
            tool_version: env!("CARGO_PKG_VERSION"),
            command: "perf",
            off_endpoint: endpoint(Side::Reference),
            on_endpoint: endpoint(Side::Candidate),
            model: sides.service(Side::Candidate).model().clone(),
            settings: settings.clone(),
            verdict: Verdict::CouldNotRun,
            reasons: Vec::new(),
            error,
            ratio: interval(&round_ratios(&cells)),
            scenarios: scenarios(&cells),
            cells,
        };
        if report.error.is_none() {
            (report.verdict, report.reasons) = judge(&report.cells, &report.scenarios, settings);
        }
        report
    }
}

/// The verdict, and the reasons when it is no pass.
fn judge(
    cells: &[Cell],
    scenarios: &[ScenarioEffect],
    settings: &Settings,
) -> (Verdict, Vec<String>) {
    let bounds = settings.bounds;
    let (mut slow, mut doubts) = (Vec::new(), Vec::new());
    let named = |effect| {
        let of = scenarios.iter().filter(move |row| row.effect == effect);
        of.map(|row| row.scenario.as_str()).collect::<Vec<_>>()
    };
    let harmful = named(Effect::Harmful);
    if harmful.len() > bounds.max_harmful_scenarios {
        slow.push(format!("drafting is harmful in {}", harmful.join(", ")));
    }
    let unclear = named(Effect::Unclear);
    if unclear.len() > bounds.max_unclear_scenarios {
        doubts.push(format!("the effect is unclear in {}", unclear.join(", ")));
    }
    if let (Some(least), Some(ratio)) = (bounds.min_ratio, interval(&round_ratios(cells))) {
        let line = format!(
            "with drafting {:.3} times as fast ({:.3} to {:.3}), at least {least} is asked for",
            ratio.mean, ratio.low, ratio.high
        );
        if ratio.high < least {
            slow.push(line);
        } else if ratio.low < least {
            doubts.push(line);
        }
    }
    for cell in cells {
        let place = format!("{} with {} in flight", cell.scenario, cell.concurrency);
        let over = |what: &str, found: f64, most: Option<f64>| {
            let most = most.filter(|most| found > *most)?;
            Some(format!(
                "{place}: {what} {found:.1} ms, at most {most} is asked for"
            ))
        };
        slow.extend(over(
            "first token at the 95th percentile",
            cell.on.first_token_p95_ms,
            bounds.max_first_token_p95_ms,
        ));
        slow.extend(over(
            "a token behind the first",
            cell.on.inter_token_p50_ms,
            bounds.max_inter_token_ms,
        ));
        if let Some(least) = bounds.min_tokens_per_second
            && cell.on.tokens_per_second < least
        {
            slow.push(format!(
                "{place}: {:.1} tokens per second, at least {least} is asked for",
                cell.on.tokens_per_second
            ));
        }
    }
    let mut drafting = Drafting::default();
    for cell in cells {
        drafting += cell.drafting;
    }
    let silent = drafting.counted_answers == 0 && !settings.assume_drafting;
    let idle = drafting.counted_answers > 0 && drafting.speculative.drafted_tokens == 0;
    if silent || idle {
        doubts.push("nothing says that anything was drafted".to_owned());
    }
    let verdict = match (slow.is_empty(), doubts.is_empty()) {
        (false, _) => Verdict::BelowGate,
        (true, false) => Verdict::Inconclusive,
        (true, true) => Verdict::Pass,
    };
    slow.append(&mut doubts);
    (verdict, slow)
}

/// The geometric mean of each round over all cells, as far as all of them have it.
fn round_ratios(cells: &[Cell]) -> Vec<f64> {
    let rounds = cells
        .iter()
        .map(|cell| cell.ratios.len())
        .min()
        .unwrap_or_default();
    let mean = |round: usize| {
        let logs: f64 = cells.iter().map(|cell| cell.ratios[round].ln()).sum();
        (logs / cells.len() as f64).exp()
    };
    (0..rounds).map(mean).collect()
}

fn scenarios(cells: &[Cell]) -> Vec<ScenarioEffect> {
    let weight = |effect: Effect| match effect {
        Effect::Neutral => 0,
        Effect::Unclear => 1,
        Effect::WorthIt => 2,
        Effect::Harmful => 3,
    };
    let same = cells.chunk_by(|first, second| first.scenario == second.scenario);
    let sum = |cells: &[Cell]| {
        let mut drafting = Drafting::default();
        for cell in cells {
            drafting += cell.drafting;
        }
        let effects = cells.iter().map(|cell| cell.effect);
        Some(ScenarioEffect {
            scenario: cells.first()?.scenario.clone(),
            effect: effects.max_by_key(|&effect| weight(effect))?,
            acceptance_length: drafting.speculative.acceptance_length(),
        })
    };
    same.filter_map(sum).collect()
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "outrider-verify {} perf {}",
            self.tool_version, self.on_endpoint
        )?;
        write!(f, "{}", self.model)?;
        if self.off_endpoint != self.on_endpoint {
            writeln!(f, "compared with {}", self.off_endpoint)?;
        }
        writeln!(
            f,
            "\n{:<20} {:>9} {:>15} {:>15} {:>24} {:>17} {:>17} {:>10}  effect",
            "",
            "in flight",
            "tokens/s off",
            "on",
            "ratio (95 %)",
            "first token ms",
            "inter-token ms",
            "acceptance"
        )?;
        for cell in &self.cells {
            let ratio = cell.ratio.map_or_else(
                || "-".to_owned(),
                |ratio| format!("{:.3} ({:.3}-{:.3})", ratio.mean, ratio.low, ratio.high),
            );
            let both = |off: f64, on: f64| format!("{off:.1} / {on:.1}");
            writeln!(
                f,
                "{:<20} {:>9} {:>15.1} {:>15.1} {:>24} {:>17} {:>17} {:>10}  {}",
                cell.scenario,
                cell.concurrency,
                cell.off.tokens_per_second,
                cell.on.tokens_per_second,
                ratio,
                both(cell.off.first_token_p50_ms, cell.on.first_token_p50_ms),
                both(cell.off.inter_token_p50_ms, cell.on.inter_token_p50_ms),
                cell.acceptance_length
                    .map_or_else(|| "-".to_owned(), |length| format!("{length:.2}")),
                cell.effect
            )?;
        }
        writeln!(f)?;
        for row in &self.scenarios {
            writeln!(f, "{:<20} {}", row.scenario, row.effect)?;
        }
        if let Some(ratio) = self.ratio {
            writeln!(
                f,
                "\nwith drafting {:.3} times as fast, 95 % interval {:.3} to {:.3}",
                ratio.mean, ratio.low, ratio.high
            )?;
        }
        match &self.error {
            Some(error) => writeln!(f, "could not run to the end: {error}"),
            None if self.reasons.is_empty() => writeln!(f, "{}", self.verdict),
            None => writeln!(f, "{}: {}", self.verdict, self.reasons.join("; ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Bounds;
    use super::*;

    fn pair(off: f64, on: f64) -> BlockPair {
        let block = |tokens_per_second| Block {
            tokens_per_second,
            first_token_ms: vec![10.0],
            inter_token_ms: vec![1000.0 / tokens_per_second],
            drafting: Drafting::default(),
        };
        BlockPair {
            off: block(off),
            on: block(on),
        }
    }

    #[test]
    fn what_is_slower_than_its_bound_is_named() {
        let check = |bounds: Bounds, part: &str| {
            let settings = Settings {
                assume_drafting: true,
                bounds,
                ..Settings::default()
            };
            let pairs = [pair(10.0, 12.0), pair(10.0, 12.1), pair(10.0, 11.9)];
            let cells = vec![Cell::new("chat".into(), 1, &pairs, &settings)];
            let (verdict, reasons) = judge(&cells, &scenarios(&cells), &settings);
            assert_eq!(verdict, Verdict::BelowGate, "{reasons:?}");
            assert!(reasons[0].contains(part), "{reasons:?}");
        };
        let bounds = Bounds::default();
        check(
            Bounds {
                min_ratio: Some(1.5),
                ..bounds
            },
            "at least 1.5 is asked for",
        );
        check(
            Bounds {
                max_inter_token_ms: Some(50.0),
                ..bounds
            },
            "chat with 1 in flight: a token behind the first 83.3 ms, at most 50 is asked for",
        );
        check(
            Bounds {
                max_first_token_p95_ms: Some(9.0),
                ..bounds
            },
            "first token at the 95th percentile 10.0 ms",
        );
        check(
            Bounds {
                min_tokens_per_second: Some(20.0),
                ..bounds
            },
            "12.0 tokens per second, at least 20 is asked for",
        );
    }

    #[test]
    fn an_effect_must_be_beyond_doubt_and_large_enough() {
        let check = |pairs: &[(f64, f64)], effect| {
            let pairs: Vec<BlockPair> = pairs.iter().map(|&(off, on)| pair(off, on)).collect();
            let cell = Cell::new("chat".into(), 1, &pairs, &Settings::default());
            assert_eq!(cell.effect, effect, "{:?}", cell.ratio);
        };
        check(&[(10.0, 9.0), (11.0, 9.9), (9.0, 8.15)], Effect::Harmful);
        check(&[(10.0, 12.0), (11.0, 13.0), (9.0, 11.0)], Effect::WorthIt);
        check(&[(10.0, 10.1), (11.0, 11.1), (9.0, 9.1)], Effect::Neutral);
        check(&[(10.0, 9.0), (10.0, 12.0), (10.0, 10.0)], Effect::Unclear);
        check(&[(10.0, 5.0)], Effect::Unclear);
    }
}
