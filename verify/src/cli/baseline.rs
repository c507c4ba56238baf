//! `outrider-verify baseline record` and `baseline check`.

use std::path::PathBuf;

use anyhow::anyhow;
use clap::{Args, Subcommand};
use outrider_verify::baseline::{self, Baseline};
use outrider_verify::lossless::Settings;
use outrider_verify::lossless::plan::Sampling;
use outrider_verify::report::Verdict;

use super::lossless::Prompts;
use super::{Failure, Outcome, Output, Progress, service};

/// Directory of the baselines.
const DIRECTORY: &str = "configs/verify/baselines";

#[derive(Subcommand)]
pub enum Command {
    /// Ask the prompts and keep the answers in a file that is named after the bundle digest
    Record(Record),
    /// Ask a file's requests once more and compare
    Check(Check),
}

#[derive(Args)]
pub struct Record {
    #[command(flatten)]
    service: service::ServiceArguments,
    #[command(flatten)]
    prompts: Prompts,
    /// Directory of the baselines
    #[arg(long, default_value = DIRECTORY, value_name = "DIR")]
    directory: PathBuf,
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
    #[arg(long, default_value_t = 48, value_parser = clap::value_parser!(u64).range(1..=1_000_000), value_name = "TOKENS")]
    max_tokens: u64,
    /// Requests in flight
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=1024), value_name = "NUMBER")]
    concurrency: u16,
    /// Replace a file that is there already
    #[arg(long)]
    replace: bool,
}

#[derive(Args)]
pub struct Check {
    #[command(flatten)]
    service: service::ServiceArguments,
    /// Directory of the baselines
    #[arg(long, default_value = DIRECTORY, value_name = "DIR")]
    directory: PathBuf,
    /// File to hold the service to, in place of the one for its bundle digest
    #[arg(long, value_name = "FILE", conflicts_with = "directory")]
    file: Option<PathBuf>,
    /// Requests in flight
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=1024), value_name = "NUMBER")]
    concurrency: u16,
    #[command(flatten)]
    output: Output,
}

impl Command {
    /// Records or checks.
    pub fn run(self) -> Outcome {
        match self {
            Self::Record(arguments) => arguments.run(),
            Self::Check(arguments) => arguments.run(),
        }
    }
}

impl Record {
    fn run(self) -> Outcome {
        let cases = self.prompts.cases()?;
        let service = self.service.service()?;
        let file = baseline::file_of(&self.directory, service.model());
        if !self.replace && file.exists() {
            return Err(Failure::Usage(anyhow!(
                "{} is there already, --replace replaces it",
                file.display()
            )));
        }
        let settings = Settings {
            samplings: self.sampling,
            max_tokens: self.max_tokens,
            concurrency: self.concurrency.into(),
            ..Settings::default()
        };
        let progress = Progress::new("baseline record");
        let tell = |done, total| progress.tell(done, total);
        let recorded = baseline::record(&service, &cases, &settings, &tell)
            .map_err(|error| Failure::CouldNotRun(error.into()))?;
        recorded
            .write(&file)
            .map_err(|error| Failure::CouldNotRun(error.into()))?;
        super::say(&format!(
            "{} answers are in {}",
            recorded.records.len(),
            file.display()
        ))?;
        Ok(Verdict::Pass)
    }
}

impl Check {
    fn run(self) -> Outcome {
        let service = self.service.service()?;
        let file = match self.file {
            Some(file) => file,
            None => {
                let file = baseline::file_of(&self.directory, service.model());
                if !file.exists() {
                    return Err(Failure::CouldNotRun(anyhow!(
                        "{} is not there: record it with `outrider-verify baseline record`, or name another with --file",
                        file.display()
                    )));
                }
                file
            }
        };
        let recorded = Baseline::read(&file).map_err(|error| Failure::Usage(error.into()))?;
        let progress = Progress::new("baseline check");
        let tell = |done, total| progress.tell(done, total);
        let report = baseline::check(&service, &recorded, &file, self.concurrency.into(), &tell);
        self.output.print(&report, report.verdict)
    }
}
