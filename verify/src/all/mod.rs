//! `all`: every step of a gate in one run, one verdict, and a report that holds all that is needed to repeat it.
//!
//! A step that fails does not keep the next ones from running, so that one run shows everything; the verdict is the worst of them.

mod chart;
pub mod gate;
pub mod html;

use std::fmt;

use serde::Serialize;

use crate::lossless::{self, Sides};
use crate::perf::{self, MachineClock};
use crate::report::{self, Model, SCHEMA_VERSION, Verdict};
use crate::service::Service;
use crate::soak::{self, MetricsPage};
use crate::{boundary, smoke};
use gate::{Gate, GateFile};

/// What a run is made with.
pub struct Inputs<'a> {
    /// The service that is judged.
    pub candidate: &'a Service,
    /// The service it is compared with; the same one with drafting switched off when there is none.
    pub reference: Option<&'a Service>,
    /// Metrics of the candidate.
    pub metrics: Option<&'a MetricsPage>,
    /// What is asked for.
    pub gate: &'a GateFile,
    /// What to ask.
    pub cases: &'a [crate::prompts::Case],
    /// The command line, to repeat the run; keys are never part of it.
    pub arguments: Vec<String>,
    /// When the run began, RFC 3339.
    pub started_at: String,
}

/// A run of `all`.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Version of this program.
    pub tool_version: &'static str,
    /// `all`.
    pub command: &'static str,
    /// Outcome of the run: the worst of its steps.
    pub verdict: Verdict,
    /// The exit code that goes with it.
    pub exit_code: u8,
    /// When the run began, RFC 3339.
    pub started_at: String,
    /// Address of the service.
    pub endpoint: String,
    /// Address of the service it was compared with, null for itself without drafting.
    pub reference_endpoint: Option<String>,
    /// Address of the metrics.
    pub metrics_endpoint: Option<String>,
    /// The model, with the digest of its bundle.
    pub model: Model,
    /// That of the reference.
    pub reference_model: Option<Model>,
    /// Path of the gate.
    pub gate_path: String,
    /// SHA-256 of the gate's bytes: the configuration of the run.
    pub config_digest: String,
    /// What the gate says, defaults filled in.
    pub gate: Gate,
    /// The command line.
    pub arguments: Vec<String>,
    /// Cases asked.
    pub cases: usize,
    /// `smoke`, null when the gate leaves it out, as with the others.
    pub smoke: Option<report::Report>,
    /// `boundary`.
    pub boundary: Option<report::Report>,
    /// `lossless`.
    pub lossless: Option<lossless::report::Report>,
    /// `perf`.
    pub perf: Option<perf::report::Report>,
    /// `soak`.
    pub soak: Option<soak::Report>,
}

/// Runs every step of the gate. `progress` is told of the step, and how many of how many of its parts are done.
pub fn run(inputs: Inputs<'_>, progress: &(dyn Fn(&'static str, usize, usize) + Sync)) -> Report {
    let Inputs {
        candidate,
        reference,
        metrics,
        gate,
        cases,
        arguments,
        started_at,
    } = inputs;
    let sides = match reference {
        None => Sides::Switch(candidate),
        Some(reference) => Sides::Two {
            reference,
            candidate,
        },
    };
    let steps = &gate.gate;
    let tell = |step| move |done, total| progress(step, done, total);
    let smoke = steps.smoke.map(|_| {
        let options = smoke::Options {
            model: Some(candidate.model().id.clone()),
        };
        smoke::run(candidate.client(), &options)
    });
    let boundary = steps.boundary.map(|_| boundary::run(candidate));
    let lossless = steps
        .lossless
        .as_ref()
        .map(|settings| lossless::run(sides, cases, settings, &tell("lossless")));
    let perf = steps.perf.as_ref().map(|settings| {
        perf::run(
            sides,
            cases,
            settings,
            &MachineClock::start(),
            &tell("perf"),
        )
    });
    let soak = steps
        .soak
        .as_ref()
        .map(|settings| soak::run(candidate, metrics, cases, settings, &tell("soak")));
    let verdicts = [
        smoke.as_ref().map(|report| report.verdict),
        boundary.as_ref().map(|report| report.verdict),
        lossless.as_ref().map(|report| report.verdict),
        perf.as_ref().map(|report| report.verdict),
        soak.as_ref().map(|report| report.verdict),
    ];
    let verdict = Verdict::of_all(verdicts.into_iter().flatten());
    Report {
        schema_version: SCHEMA_VERSION,
        tool_version: env!("CARGO_PKG_VERSION"),
        command: "all",
        verdict,
        exit_code: verdict.exit_code(),
        started_at,
        endpoint: candidate.client().base().to_owned(),
        reference_endpoint: reference.map(|reference| reference.client().base().to_owned()),
        metrics_endpoint: metrics.map(|metrics| metrics.client.base().to_owned()),
        model: candidate.model().clone(),
        reference_model: reference.map(|reference| reference.model().clone()),
        gate_path: gate.path.display().to_string(),
        config_digest: gate.digest.clone(),
        gate: steps.clone(),
        arguments,
        cases: cases.len(),
        smoke,
        boundary,
        lossless,
        perf,
        soak,
    }
}

/// One step on one line.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepSummary {
    /// Name of the step.
    pub step: &'static str,
    /// Its verdict.
    pub verdict: Verdict,
    /// What it says of itself.
    pub text: String,
}

impl Report {
    /// Every step that ran, on one line each.
    pub fn steps(&self) -> Vec<StepSummary> {
        let of = |step, verdict, error: &Option<String>, reasons: String, fine: String| {
            let text = match error {
                Some(error) => error.clone(),
                None if reasons.is_empty() => fine,
                None => reasons,
            };
            StepSummary {
                step,
                verdict,
                text,
            }
        };
        let checks = |step, report: &report::Report| {
            let failed = report
                .checks
                .iter()
                .filter(|check| check.outcome == report::Outcome::Fail);
            let failed: Vec<&str> = failed.map(|check| check.name).collect();
            let fine = format!("{} checks", report.checks.len());
            let reasons = if failed.is_empty() {
                String::new()
            } else {
                format!("failed: {}", failed.join(", "))
            };
            of(step, report.verdict, &report.error, reasons, fine)
        };
        let mut steps = Vec::new();
        steps.extend(self.smoke.as_ref().map(|report| checks("smoke", report)));
        steps.extend(
            self.boundary
                .as_ref()
                .map(|report| checks("boundary", report)),
        );
        steps.extend(self.lossless.as_ref().map(|report| {
            let fine = format!("{} tokens compared, all equal", report.compared_tokens);
            of(
                "lossless",
                report.verdict,
                &report.error,
                report.reasons.join("; "),
                fine,
            )
        }));
        steps.extend(self.perf.as_ref().map(|report| {
            let fine = report.ratio.map_or_else(String::new, |ratio| {
                format!(
                    "{:.2} times as fast with drafting ({:.2} to {:.2})",
                    ratio.mean, ratio.low, ratio.high
                )
            });
            of(
                "perf",
                report.verdict,
                &report.error,
                report.reasons.join("; "),
                fine,
            )
        }));
        steps.extend(self.soak.as_ref().map(|report| {
            let fine = format!(
                "{} requests in {:.0} s",
                report.requests, report.settings.duration_s
            );
            of(
                "soak",
                report.verdict,
                &report.error,
                report.reasons.join("; "),
                fine,
            )
        }));
        steps
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "outrider-verify {} all {}",
            self.tool_version, self.endpoint
        )?;
        write!(f, "{}", self.model)?;
        writeln!(f, "gate {} sha256 {}\n", self.gate_path, self.config_digest)?;
        for StepSummary {
            step,
            verdict,
            text,
        } in self.steps()
        {
            writeln!(f, "{:<15} {step:<10} {text}", verdict.to_string())?;
        }
        writeln!(f, "\n{}", self.verdict)
    }
}
