//! `outrider-verify perf`.

use clap::Args;
use outrider_verify::perf::{self, Bounds, MachineClock, Settings};

use super::lossless::{Prompts, share};
use super::{Outcome, Output, Progress, service};

#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    service: service::ServiceArguments,
    #[command(flatten)]
    reference: service::Reference,
    #[command(flatten)]
    prompts: Prompts,
    /// Requests in flight, one number after the other
    #[arg(long, value_delimiter = ',', default_value = "1,4", value_parser = clap::value_parser!(u16).range(1..=1024), value_name = "LIST")]
    concurrency: Vec<u16>,
    /// Pairs of measurements for each scenario and concurrency
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(2..=1000), value_name = "NUMBER")]
    rounds: u16,
    /// Requests of a measurement, at least as many as are in flight
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=10_000), value_name = "NUMBER")]
    requests: u16,
    /// Most tokens of an answer; a request of one's own may say otherwise
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u64).range(2..=1_000_000), value_name = "TOKENS")]
    max_tokens: u64,
    /// Take a service that does not count drafted tokens for one that drafts
    #[arg(long)]
    assume_drafting: bool,
    /// A gain or loss below this share is none
    #[arg(long, default_value_t = 0.02, value_parser = share, value_name = "SHARE")]
    least_effect_share: f64,
    /// Most scenarios in which drafting may be harmful
    #[arg(long, default_value_t = 0, value_name = "NUMBER")]
    max_harmful_scenarios: usize,
    /// Most scenarios whose effect may stay unclear; more rounds make it clearer
    #[arg(long, default_value_t = 0, value_name = "NUMBER")]
    max_unclear_scenarios: usize,
    /// Least speed with drafting over everything, as a multiple of that without
    #[arg(long, value_name = "RATIO")]
    min_ratio: Option<f64>,
    #[command(flatten)]
    output: Output,
}

impl Arguments {
    /// Runs the measurement.
    pub fn run(self) -> Outcome {
        let cases = self.prompts.cases()?;
        let settings = Settings {
            concurrencies: self.concurrency.into_iter().map(usize::from).collect(),
            rounds: self.rounds.into(),
            requests: self.requests.into(),
            max_tokens: self.max_tokens,
            assume_drafting: self.assume_drafting,
            least_effect_share: self.least_effect_share,
            bounds: Bounds {
                max_harmful_scenarios: self.max_harmful_scenarios,
                max_unclear_scenarios: self.max_unclear_scenarios,
                min_ratio: self.min_ratio,
                ..Bounds::default()
            },
            ..Settings::default()
        };
        let candidate = self.service.service()?;
        let reference = self.service.reference(&self.reference)?;
        let sides = service::sides(&candidate, reference.as_ref());
        let clock = MachineClock::start();
        let progress = Progress::new("perf");
        let report = perf::run(sides, &cases, &settings, &clock, &|done, total| {
            progress.tell(done, total);
        });
        self.output.print(&report, report.verdict)
    }
}
