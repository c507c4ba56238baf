//! `perf`: does drafting pay, and where?
//!
//! A *block* is a few requests of one scenario, a given number in flight, to one side. Blocks of the two sides alternate over the whole run and ask
//! the same, so that each pair of neighbours saw the same machine; [`stats`] makes an interval of the pairs. Every prompt of a pair is asked once
//! before, unmeasured, so that a service that remembers prompts remembers it for both sides.

pub mod report;
pub mod stats;

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::lossless::compare::tokens;
use crate::lossless::plan::{self, Sampling};
use crate::lossless::report::Drafting;
use crate::lossless::{Side, Sides};
use crate::pool;
use crate::prompts::Case;
use crate::service::{CouldNotRun, Found};
use crate::wire::Api;
use report::{Cell, Report};

/// How a run is made and what it takes to pass.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// Requests in flight, one number after the other.
    #[serde(rename = "concurrency")]
    pub concurrencies: Vec<usize>,
    /// Pairs of blocks for each scenario and concurrency.
    pub rounds: usize,
    /// Requests of a block, at least as many as are in flight.
    pub requests: usize,
    /// Most tokens of an answer, where the case does not say.
    pub max_tokens: u64,
    /// Seed of the first request.
    pub seed: u64,
    /// Take a candidate that does not count drafted tokens for one that drafts.
    pub assume_drafting: bool,
    /// A gain or loss of speed below this share is none.
    pub least_effect_share: f64,
    /// An interval that reaches further than this share to either side of its mean says nothing of a neutral effect.
    pub widest_interval_share: f64,
    /// What else is held to bounds.
    pub bounds: Bounds,
}

/// Bounds of a run that passes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Bounds {
    /// Most scenarios in which drafting is harmful.
    pub max_harmful_scenarios: usize,
    /// Most scenarios whose effect stayed unclear.
    pub max_unclear_scenarios: usize,
    /// Least speed with drafting, as a multiple of that without, over everything.
    pub min_ratio: Option<f64>,
    /// Most milliseconds to the first token with drafting, at the 95th percentile of each scenario and concurrency.
    pub max_first_token_p95_ms: Option<f64>,
    /// Most milliseconds of a token behind the first with drafting, as the mean of each scenario and concurrency.
    pub max_inter_token_ms: Option<f64>,
    /// Least tokens per second with drafting in each scenario and concurrency.
    pub min_tokens_per_second: Option<f64>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            concurrencies: vec![1, 4],
            rounds: 5,
            requests: 4,
            max_tokens: 64,
            seed: 20_240_607,
            assume_drafting: false,
            least_effect_share: 0.02,
            widest_interval_share: 0.1,
            bounds: Bounds::default(),
        }
    }
}

/// One request as it was served.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Timed {
    tokens: u64,
    first_token_ms: f64,
    /// Time of a token behind the first; `None` for answers of one.
    inter_token_ms: Option<f64>,
    drafting: Drafting,
}

/// One block as it was served.
#[derive(Clone, Debug, Default)]
pub struct Block {
    /// Tokens generated, over the time from the first request to the end of the last answer.
    pub tokens_per_second: f64,
    /// Time to the first token of each answer.
    pub first_token_ms: Vec<f64>,
    /// Time of a token behind the first, for each answer that has one.
    pub inter_token_ms: Vec<f64>,
    /// What drafting did.
    pub drafting: Drafting,
}

/// A pair of blocks.
#[derive(Clone, Debug)]
pub struct BlockPair {
    /// Without drafting.
    pub off: Block,
    /// With drafting.
    pub on: Block,
}

/// What time it is, so that a measurement can be tested without one.
pub trait Clock: Sync {
    /// Time since some moment in the past.
    fn now(&self) -> Duration;
}

/// The clock of the machine.
#[derive(Clone, Copy, Debug)]
pub struct MachineClock {
    start: Instant,
}

impl MachineClock {
    /// A clock that begins now.
    pub fn start() -> Self {
        Self {
            start: Instant::now(),
        }
    }
}

impl Clock for MachineClock {
    fn now(&self) -> Duration {
        self.start.elapsed()
    }
}

/// Runs the measurement. `progress` is told how many of how many pairs of blocks are done.
pub fn run(
    sides: Sides<'_>,
    cases: &[Case],
    settings: &Settings,
    clock: &dyn Clock,
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Report {
    let mut cells = cells(cases, settings);
    let bench = Bench { sides, clock };
    let outcome = bench.measure(cases, settings, progress, &mut cells);
    let error = outcome.err().map(|error| error.0);
    Report::new(sides, settings, cells, error)
}

/// Scenario and concurrency with the pairs measured so far.
pub(crate) struct Measured {
    pub(crate) scenario: String,
    pub(crate) concurrency: usize,
    pub(crate) pairs: Vec<BlockPair>,
}

fn cells(cases: &[Case], settings: &Settings) -> Vec<Measured> {
    let mut scenarios: Vec<&str> = Vec::new();
    for case in cases {
        if !scenarios.contains(&case.scenario.as_str()) {
            scenarios.push(&case.scenario);
        }
    }
    let cells = scenarios.iter().flat_map(|scenario| {
        settings.concurrencies.iter().map(|&concurrency| Measured {
            scenario: (*scenario).to_owned(),
            concurrency,
            pairs: Vec::new(),
        })
    });
    cells.collect()
}

/// What measures.
struct Bench<'a> {
    sides: Sides<'a>,
    clock: &'a dyn Clock,
}

impl Bench<'_> {
    fn measure(
        &self,
        cases: &[Case],
        settings: &Settings,
        progress: &(dyn Fn(usize, usize) + Sync),
        cells: &mut [Measured],
    ) -> Result<(), CouldNotRun> {
        let total = settings.rounds * cells.len();
        for round in 0..settings.rounds {
            for index in 0..cells.len() {
                let cell = &mut cells[index];
                let of_scenario = cases.iter().filter(|case| case.scenario == cell.scenario);
                let requests = settings.requests.max(cell.concurrency);
                // Other prompts each round, as far as there are any.
                let asked: Vec<(Api, Map<String, Value>)> = of_scenario
                    .cycle()
                    .skip(round * requests)
                    .take(requests)
                    .map(|case| {
                        let fields = plan::request(
                            case,
                            Sampling::Greedy,
                            &plan::Settings {
                                max_tokens: settings.max_tokens,
                                ..plan::Settings::default()
                            },
                            settings.seed,
                        );
                        (case.api, fields)
                    })
                    .collect();
                self.prime(&asked, cell.concurrency)?;
                let block = |side| self.block(side, &asked, cell.concurrency);
                // What warms up or cools down meets each side first as often as last.
                let pair = if (round + index).is_multiple_of(2) {
                    let off = block(Side::Reference)?;
                    BlockPair {
                        off,
                        on: block(Side::Candidate)?,
                    }
                } else {
                    let on = block(Side::Candidate)?;
                    BlockPair {
                        off: block(Side::Reference)?,
                        on,
                    }
                };
                cell.pairs.push(pair);
                progress(round * cells.len() + index + 1, total);
            }
        }
        Ok(())
    }

    /// Shows the prompts to both sides.
    fn prime(
        &self,
        asked: &[(Api, Map<String, Value>)],
        concurrency: usize,
    ) -> Result<(), CouldNotRun> {
        let services = match self.sides {
            Sides::Switch(service) => vec![service],
            Sides::Two {
                reference,
                candidate,
            } => vec![reference, candidate],
        };
        for service in services {
            pool::map(asked.len(), concurrency, |index| {
                let (api, fields) = &asked[index];
                let mut fields = fields.clone();
                fields.shift_remove("max_completion_tokens");
                fields.insert("max_tokens".into(), 1.into());
                service.ask(*api, &fields)
            })?;
        }
        Ok(())
    }

    fn block(
        &self,
        side: Side,
        asked: &[(Api, Map<String, Value>)],
        concurrency: usize,
    ) -> Result<Block, CouldNotRun> {
        let start = self.clock.now();
        let timed = pool::map(asked.len(), concurrency, |index| {
            let (api, fields) = &asked[index];
            self.request(side, *api, fields)
        })?;
        let seconds = (self.clock.now() - start).as_secs_f64();
        let mut block = Block::default();
        let mut tokens = 0;
        for timed in timed {
            tokens += timed.tokens;
            block.first_token_ms.push(timed.first_token_ms);
            block.inter_token_ms.extend(timed.inter_token_ms);
            block.drafting += timed.drafting;
        }
        block.tokens_per_second = tokens as f64 / seconds;
        Ok(block)
    }

    fn request(
        &self,
        side: Side,
        api: Api,
        fields: &Map<String, Value>,
    ) -> Result<Timed, CouldNotRun> {
        let service = self.sides.service(side);
        let start = self.clock.now();
        let (mut first, mut last) = (None, start);
        let found = service.stream(api, &self.sides.fields(side, fields), || {
            last = self.clock.now();
            first.get_or_insert(last);
            true
        })?;
        let Found::Generation(answer) = found else {
            return Err(CouldNotRun(format!(
                "POST {}{}: there is nothing to time: {found}",
                service.client().base(),
                api.path()
            )));
        };
        let tokens = tokens(&answer);
        if tokens == 0 {
            return Err(CouldNotRun(format!(
                "POST {}{}: the service counts no tokens in its streams (`stream_options.include_usage`)",
                service.client().base(),
                api.path()
            )));
        }
        // An answer without text, such as a stop token alone, ends when it begins.
        let first = first.unwrap_or_else(|| self.clock.now());
        let last = last.max(first);
        let mut drafting = Drafting::default();
        drafting.add(&answer);
        Ok(Timed {
            tokens,
            first_token_ms: 1000.0 * (first - start).as_secs_f64(),
            inter_token_ms: (tokens > 1)
                .then(|| 1000.0 * (last - first).as_secs_f64() / (tokens - 1) as f64),
            drafting,
        })
    }
}

impl Measured {
    fn cell(self, settings: &Settings) -> Cell {
        Cell::new(self.scenario, self.concurrency, &self.pairs, settings)
    }
}
