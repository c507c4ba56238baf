//! `outrider-verify lossless`.

use std::path::PathBuf;

use clap::Args;
use clap::builder::PossibleValuesParser;
use outrider_verify::lossless::plan::{MIN_COMPARED_TOKENS, Sampling};
use outrider_verify::lossless::{self, Settings};
use outrider_verify::prompts::{self, Case, PROMPTS_PER_SCENARIO, SCENARIOS};

use super::{Failure, Outcome, Output, Progress, service};

#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    service: service::ServiceArguments,
    #[command(flatten)]
    reference: service::Reference,
    #[command(flatten)]
    prompts: Prompts,
    /// Ways of choosing tokens
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "greedy,seeded",
        value_name = "LIST"
    )]
    sampling: Vec<Sampling>,
    /// Most tokens of an answer; a request of one's own may say otherwise
    #[arg(long, default_value_t = 96, value_parser = clap::value_parser!(u64).range(1..=1_000_000), value_name = "TOKENS")]
    max_tokens: u64,
    /// Seed of the first request; the others count up from it
    #[arg(long, default_value_t = 20_240_607, value_parser = clap::value_parser!(u64).range(..=(1 << 52)), value_name = "NUMBER")]
    seed: u64,
    /// Requests in flight
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=1024), value_name = "NUMBER")]
    concurrency: u16,
    /// How often the candidate is asked each request
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1000), value_name = "TIMES")]
    repeat: u16,
    /// Least tokens to be compared for a pass; 9,211 show a fault in one of 2,000 in 99 of 100 runs
    #[arg(long, default_value_t = MIN_COMPARED_TOKENS, value_name = "TOKENS")]
    min_compared_tokens: u64,
    /// Least drafted tokens for each generated one for a pass
    #[arg(long, default_value_t = 0.01, value_parser = share, value_name = "SHARE")]
    min_drafted_share: f64,
    /// Take a service that does not count drafted tokens for one that drafts
    #[arg(long)]
    assume_drafting: bool,
    /// Most near-ties of a run that passes
    #[arg(long, default_value_t = 0, value_name = "NUMBER")]
    max_near_ties: usize,
    /// Most nats of measured noise that are believed
    #[arg(long, default_value_t = 0.1, value_parser = share, value_name = "NATS")]
    noise_limit_nats: f64,
    #[command(flatten)]
    output: Output,
}

#[derive(Args)]
pub struct Prompts {
    /// File of prompts, messages, request bodies or audit records, one JSON value a line, in place of the built-in set; can be given several times
    #[arg(long, value_name = "FILE", conflicts_with = "scenarios")]
    prompts: Vec<PathBuf>,
    /// Scenarios of the built-in set; all of them when not given
    #[arg(long, value_delimiter = ',', value_parser = PossibleValuesParser::new(SCENARIOS), value_name = "LIST")]
    scenarios: Vec<String>,
    /// Most prompts of a scenario; 14 of the built-in set and all of a file when not given
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..), value_name = "NUMBER")]
    prompts_per_scenario: Option<u32>,
}

impl Prompts {
    /// The cases that are meant.
    pub fn cases(&self) -> Result<Vec<Case>, Failure> {
        let limit = self.prompts_per_scenario.map(|limit| limit as usize);
        if self.prompts.is_empty() {
            let wanted =
                |case: &Case| self.scenarios.is_empty() || self.scenarios.contains(&case.scenario);
            let cases = prompts::built_in().into_iter().filter(wanted).collect();
            return Ok(prompts::spread(
                cases,
                limit.unwrap_or(PROMPTS_PER_SCENARIO),
            ));
        }
        let mut cases = Vec::new();
        for file in &self.prompts {
            cases.extend(prompts::read(file).map_err(|error| Failure::Usage(error.into()))?);
        }
        Ok(prompts::spread(cases, limit.unwrap_or(usize::MAX)))
    }
}

impl Arguments {
    /// Runs the comparison.
    pub fn run(self) -> Outcome {
        let cases = self.prompts.cases()?;
        let settings = Settings {
            samplings: self.sampling,
            max_tokens: self.max_tokens,
            seed: self.seed,
            repeat: self.repeat.into(),
            concurrency: self.concurrency.into(),
            min_compared_tokens: self.min_compared_tokens,
            min_drafted_share: self.min_drafted_share,
            assume_drafting: self.assume_drafting,
            max_near_ties: self.max_near_ties,
            noise_limit_nats: self.noise_limit_nats,
        };
        let candidate = self.service.service()?;
        let reference = self.service.reference(&self.reference)?;
        let sides = service::sides(&candidate, reference.as_ref());
        let progress = Progress::new("lossless");
        let report = lossless::run(sides, &cases, &settings, &|done, total| {
            progress.tell(done, total);
        });
        self.output.print(&report, report.verdict)
    }
}

/// A number from 0 to 1.
pub fn share(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err("a number from 0 to 1 is expected".into()),
    }
}
