//! `outrider-verify soak`.

use clap::Args;
use outrider_verify::soak::{self, Settings};

use super::lossless::{Prompts, share};
use super::{Outcome, Output, Progress, service};

#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    service: service::ServiceArguments,
    #[command(flatten)]
    metrics: service::Metrics,
    #[command(flatten)]
    prompts: Prompts,
    /// How long to ask
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=2_592_000), value_name = "SECONDS")]
    duration_s: u64,
    /// Requests in flight
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=1024), value_name = "NUMBER")]
    concurrency: u16,
    /// Most tokens of an answer; a request of one's own may say otherwise
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..=1_000_000), value_name = "TOKENS")]
    max_tokens: u64,
    /// Largest share of requests that may fail
    #[arg(long, default_value_t = 0.0, value_parser = share, value_name = "SHARE")]
    max_error_share: f64,
    /// Most answers that may differ from the first one to the same request
    #[arg(long, default_value_t = 0, value_name = "NUMBER")]
    max_changed_answers: usize,
    /// Most restarts
    #[arg(long, default_value_t = 0, value_name = "NUMBER")]
    max_restarts: usize,
    /// Largest growth of memory from the second to the last quarter
    #[arg(long, default_value_t = 0.05, value_parser = share, value_name = "SHARE")]
    max_memory_growth_share: f64,
    #[command(flatten)]
    output: Output,
}

impl Arguments {
    /// Runs the soak.
    pub fn run(self) -> Outcome {
        let cases = self.prompts.cases()?;
        let settings = Settings {
            duration_s: self.duration_s as f64,
            concurrency: self.concurrency.into(),
            max_tokens: self.max_tokens,
            max_error_share: self.max_error_share,
            max_changed_answers: self.max_changed_answers,
            max_restarts: self.max_restarts,
            max_memory_growth_share: self.max_memory_growth_share,
            ..Settings::default()
        };
        let metrics = self.service.metrics(&self.metrics)?;
        let service = self.service.service()?;
        let progress = Progress::new("soak, seconds");
        let report = soak::run(
            &service,
            metrics.as_ref(),
            &cases,
            &settings,
            &|done, total| {
                progress.tell(done, total);
            },
        );
        self.output.print(&report, report.verdict)
    }
}
