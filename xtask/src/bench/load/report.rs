//! What the load benchmark found, as data and as text, and what it must hold.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use hdrhistogram::Histogram;
use serde::Serialize;

use super::tally::Tally;
use super::{Args, PAIRS};
use crate::bench::median;
use crate::build::Profile;
use crate::machine::Machine;
use crate::session::Session;

/// Version of the JSON form.
const SCHEMA_VERSION: u32 = 3;
/// Least throughput with drafting on, of that with drafting off.
const LEAST_RATIO: f64 = 0.97;

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
    /// How long each pair of rounds lasted for each server.
    pub seconds: u64,
    /// Which requests were drawn.
    pub seed: u64,
    /// Pairs of rounds that the requests were divided into.
    pub pairs: u32,
    /// Processors that the clients took, on average.
    pub client_processors: f64,
    /// Each number of clients.
    pub cells: Vec<Cell>,
    /// More clients against fewer, with drafting off and on; none where their numbers were not asked for.
    pub growth: Vec<Growth>,
}

/// Two numbers of clients side by side.
#[derive(Clone, Debug, Serialize)]
pub struct Growth {
    /// Clients of the first and of the second server.
    pub from_to: [usize; 2],
    /// Whether answers were drafted.
    pub drafting: bool,
    /// Requests without an answer, by code.
    pub errors: BTreeMap<String, u64>,
    /// Throughput of the second, of that of the first, in each pair of rounds.
    pub pair_ratios: Vec<f64>,
}

/// One number of clients.
#[derive(Clone, Debug, Serialize)]
pub struct Cell {
    /// Clients at once.
    pub clients: usize,
    /// Without drafting.
    pub off: Side,
    /// With drafting.
    pub on: Side,
    /// Throughput with drafting, of that without, in each pair of rounds.
    pub pair_ratios: Vec<f64>,
}

/// One side of a cell. Latencies are those of streams.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Side {
    /// Requests sent, each counted once.
    pub requests: u64,
    /// How often the server had no room and was asked again.
    pub no_room: u64,
    /// Requests without an answer, by code.
    pub errors: BTreeMap<String, u64>,
    /// Tokens of all answers.
    pub tokens: u64,
    /// What the server ran from the first request to the last answer, over the rounds.
    pub running_seconds: f64,
    /// Tokens a second.
    pub tokens_per_second: f64,
    /// From request to first token.
    pub first_token_ms: Quantiles,
    /// Between one event with tokens and the next.
    pub inter_token_ms: Quantiles,
    #[serde(skip)]
    tally: Option<Tally>,
}

/// A latency.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Quantiles {
    /// The median.
    pub p50: f64,
    /// What 99 of 100 stay under.
    pub p99: f64,
}

impl Quantiles {
    fn of(histogram: &Histogram<u64>) -> Self {
        let quantile = |share| histogram.value_at_quantile(share) as f64 / 1e3;
        Self {
            p50: quantile(0.5),
            p99: quantile(0.99),
        }
    }
}

impl Side {
    /// Adds a round.
    pub fn add(&mut self, round: Tally) {
        let tally = match self.tally.take() {
            Some(mut tally) => {
                tally.add(&round);
                tally
            }
            None => round,
        };
        *self = Self {
            requests: tally.requests,
            no_room: tally.no_room,
            errors: tally.errors.clone(),
            tokens: tally.tokens,
            running_seconds: tally.running_seconds,
            tokens_per_second: tally.tokens_per_second(),
            first_token_ms: Quantiles::of(&tally.first_token_us),
            inter_token_ms: Quantiles::of(&tally.gap_us),
            tally: Some(tally),
        };
    }
}

impl Cell {
    /// A cell without figures.
    pub fn new(clients: usize) -> Self {
        Self {
            clients,
            off: Side::default(),
            on: Side::default(),
            pair_ratios: Vec::new(),
        }
    }

    fn sides(&self) -> [(&'static str, &Side); 2] {
        [("off", &self.off), ("on", &self.on)]
    }

    /// Throughput with drafting, of that without: the median of the pairs.
    pub fn ratio(&self) -> f64 {
        median(&self.pair_ratios)
    }
}

impl Growth {
    /// The median of the pairs.
    fn ratio(&self) -> f64 {
        median(&self.pair_ratios)
    }
}

impl fmt::Display for Growth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [from, to] = self.from_to;
        let drafting = if self.drafting { "on" } else { "off" };
        write!(
            f,
            "{to} clients get {:.3} of the tokens a second that {from} get, drafting {drafting}",
            self.ratio()
        )
    }
}

impl Report {
    pub(super) fn new(
        session: &Session,
        bundle: &Path,
        profile: Profile,
        args: &Args,
        client_processors: f64,
        cells: Vec<Cell>,
        growth: Vec<Growth>,
    ) -> Self {
        Self {
            schema_version: SCHEMA_VERSION,
            tool_version: env!("CARGO_PKG_VERSION"),
            machine: Machine::current(),
            model: session.model().to_owned(),
            bundle: bundle
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned(),
            bundle_digest: session.fact("bundle_digest").to_owned(),
            lossless_class: session.fact("lossless_class").to_owned(),
            profile: match profile {
                Profile::Dev => "dev",
                Profile::Release => "release",
            },
            seconds: args.seconds,
            seed: args.seed,
            pairs: PAIRS,
            client_processors,
            cells,
            growth,
        }
    }

    /// Every way in which the server failed.
    pub fn failed_checks(&self) -> Vec<String> {
        let mut failed = Vec::new();
        for cell in &self.cells {
            let clients = cell.clients;
            for (drafting, side) in cell.sides() {
                for (code, count) in &side.errors {
                    failed.push(format!(
                        "{clients} clients, drafting {drafting}: {count} requests ended with {code}, allowed is none"
                    ));
                }
            }
            if self.lossless_class == "exact"
                && cell.on.errors.is_empty()
                && cell.off.errors.is_empty()
                && cell.on.tokens != cell.off.tokens
            {
                failed.push(format!(
                    "{clients} clients: the same requests brought {} tokens with drafting off and {} with drafting on",
                    cell.off.tokens, cell.on.tokens
                ));
            }
            if cell.ratio() < LEAST_RATIO {
                failed.push(format!(
                    "{clients} clients: drafting brings {:.3} of the throughput without, required are {LEAST_RATIO}",
                    cell.ratio()
                ));
            }
        }
        for growth in &self.growth {
            for (code, count) in &growth.errors {
                failed.push(format!(
                    "{growth}, but {count} requests ended with {code}, allowed is none"
                ));
            }
            if growth.ratio() < 1.0 {
                failed.push(format!("{growth}, required is 1"));
            }
        }
        failed
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{}, {} build, {} s for each pair of rounds and server, seed {}",
            self.bundle, self.profile, self.seconds, self.seed
        )?;
        writeln!(
            f,
            "{}, {} processors, of which the clients took {:.2}",
            self.machine.processor, self.machine.processors, self.client_processors
        )?;
        writeln!(f)?;
        writeln!(
            f,
            "{:>7} {:>8} {:>8} {:>6} {:>6} {:>8} {:>20} {:>20} {:>7}",
            "clients",
            "drafting",
            "requests",
            "429",
            "errors",
            "tokens/s",
            "first token ms",
            "next token ms",
            "on/off"
        )?;
        for cell in &self.cells {
            for (drafting, side) in cell.sides() {
                let quantiles =
                    |latency: Quantiles| format!("{:.1} / {:.1}", latency.p50, latency.p99);
                write!(
                    f,
                    "{:>7} {drafting:>8} {:>8} {:>6} {:>6} {:>8.1} {:>20} {:>20}",
                    cell.clients,
                    side.requests,
                    side.no_room,
                    side.errors.values().sum::<u64>(),
                    side.tokens_per_second,
                    quantiles(side.first_token_ms),
                    quantiles(side.inter_token_ms),
                )?;
                match drafting {
                    "on" => writeln!(f, " {:>7.3}", cell.ratio())?,
                    _ => writeln!(f)?,
                }
            }
        }
        write!(
            f,
            "\ntwo servers in turn; latencies are p50 / p99 of streams, ratios are medians of {} pairs of rounds, between which the servers change places",
            self.pairs
        )?;
        for growth in &self.growth {
            write!(f, "\n{growth}")?;
        }
        for failed in self.failed_checks() {
            write!(f, "\nnot held: {failed}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::load::exchange::Answered;
    use std::time::Duration;

    fn side(tokens: u64, running_seconds: f64, errors: &[&str]) -> Side {
        let mut tally = Tally::new();
        tally.answered(&Answered {
            tokens,
            first_token: Some(Duration::from_millis(250)),
            gaps: vec![Duration::from_millis(20), Duration::from_millis(40)],
        });
        (tally.requests, tally.running_seconds) = (3, running_seconds);
        errors
            .iter()
            .for_each(|code| tally.failed((*code).to_owned()));
        let mut side = Side::default();
        side.add(tally);
        side
    }

    fn growth(drafting: bool, pair_ratios: &[f64]) -> Growth {
        Growth {
            from_to: [4, 16],
            drafting,
            errors: BTreeMap::new(),
            pair_ratios: pair_ratios.to_vec(),
        }
    }

    fn report(cells: Vec<(usize, Side, Side)>, growth: Vec<Growth>) -> Report {
        Report {
            schema_version: SCHEMA_VERSION,
            tool_version: "0.1.0",
            machine: Machine {
                processor: "Some CPU".to_owned(),
                processors: 2,
                platform: "linux x86_64".to_owned(),
            },
            model: "tiny".to_owned(),
            bundle: "tiny-int8".to_owned(),
            bundle_digest: "0".repeat(64),
            lossless_class: "exact".to_owned(),
            profile: "dev",
            seconds: 60,
            seed: 1,
            pairs: PAIRS,
            client_processors: 0.04,
            cells: cells
                .into_iter()
                .map(|(clients, off, on)| Cell {
                    pair_ratios: vec![on.tokens_per_second / off.tokens_per_second],
                    clients,
                    off,
                    on,
                })
                .collect(),
            growth,
        }
    }

    #[test]
    fn a_server_that_holds_has_no_failed_check() {
        let cells = vec![
            (4, side(100, 2.0, &[]), side(100, 1.6, &[])),
            (16, side(100, 1.5, &[]), side(100, 1.5, &[])),
        ];
        let growth = [false, true].map(|drafting| growth(drafting, &[0.9, 1.05, 1.1]));
        let report = report(cells, growth.to_vec());
        assert!(report.failed_checks().is_empty());
        insta::assert_snapshot!(report.to_string());
    }

    #[test]
    fn every_breach_is_named() {
        let cells = vec![
            (4, side(100, 1.0, &["stuck"]), side(100, 1.1, &[])),
            (16, side(100, 2.0, &[]), side(99, 1.0, &[])),
        ];
        let mut growth = vec![growth(false, &[0.99, 1.2, 0.98]), growth(true, &[1.0])];
        growth[1].errors.insert("stuck".to_owned(), 2);
        insta::assert_snapshot!(report(cells, growth).failed_checks().join("\n"));
    }

    #[test]
    fn rounds_are_summed() {
        let mut sum = side(100, 2.0, &["stuck"]);
        sum.add(
            side(50, 1.0, &["stuck", "500 internal_error"])
                .tally
                .unwrap(),
        );
        assert_eq!((sum.requests, sum.tokens), (6, 150));
        assert_eq!(sum.tokens_per_second, 50.0);
        assert_eq!(sum.errors["stuck"], 2);
        assert_eq!(sum.errors["500 internal_error"], 1);
    }
}
