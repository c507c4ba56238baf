//! `outrider-verify all`.

use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use outrider_verify::all::gate::GateFile;
use outrider_verify::all::{self, Inputs, html};
use outrider_verify::files;

use super::{Failure, Outcome, Output, Progress, service};

#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    service: service::ServiceArguments,
    #[command(flatten)]
    reference: service::Reference,
    #[command(flatten)]
    metrics: service::Metrics,
    /// File of steps and thresholds
    #[arg(long, default_value = "configs/verify/gate.yaml", value_name = "FILE")]
    gate: PathBuf,
    /// Directory that report.json and report.html are written to
    #[arg(long, default_value = "verify-report", value_name = "DIR")]
    out: PathBuf,
    #[command(flatten)]
    output: Output,
}

impl Arguments {
    /// Runs every step of the gate and writes the report.
    pub fn run(self) -> Outcome {
        #[expect(clippy::disallowed_methods, reason = "the report tells the date")]
        let started_at = jiff::Timestamp::now().to_string();
        let gate = GateFile::read(&self.gate).map_err(|error| Failure::Usage(error.into()))?;
        let cases = gate.cases().map_err(|error| Failure::Usage(error.into()))?;
        let metrics = self.service.metrics(&self.metrics)?;
        let candidate = self.service.service()?;
        let reference = self.service.reference(&self.reference)?;
        let progress = Progress::new("all");
        let inputs = Inputs {
            candidate: &candidate,
            reference: reference.as_ref(),
            metrics: metrics.as_ref(),
            gate: &gate,
            cases: &cases,
            arguments: std::env::args().collect(),
            started_at,
        };
        let report = all::run(inputs, &|step, done, total| {
            progress.tell_of(step, done, total)
        });
        let write = || -> anyhow::Result<()> {
            let mut json = serde_json::to_vec_pretty(&report)?;
            json.push(b'\n');
            files::write(&self.out.join("report.json"), &json)?;
            let page = html::render(&report)?;
            files::write(&self.out.join("report.html"), page.as_bytes())?;
            Ok(())
        };
        let written = write().with_context(|| format!("cannot write to {}", self.out.display()));
        written.map_err(Failure::CouldNotRun)?;
        self.output.print(&report, report.verdict)
    }
}
