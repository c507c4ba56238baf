//! What the suite found, as data and as text.

use std::fmt;

use serde::Serialize;
use serde_json::Value;

use super::cases::{Drafter, Run, ServerKey, Switch};
use super::compare::Disagreement;
use crate::answer::Drafted;
use crate::machine::Machine;

/// Version of the JSON form.
const SCHEMA_VERSION: u32 = 1;
/// Differences that the text shows; the data has all.
const SHOWN_DIFFERENCES: usize = 10;

/// Everything the suite found.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Version of this form.
    pub schema_version: u32,
    /// Version of the tool that wrote it.
    pub tool_version: &'static str,
    /// What it ran on.
    pub machine: Machine,
    /// The bundles that were served.
    pub bundles: Vec<ServedBundle>,
    /// Each run.
    pub runs: Vec<RunReport>,
    /// Every difference.
    pub differences: Vec<Difference>,
}

/// A bundle that was served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ServedBundle {
    /// Where its drafter comes from.
    pub drafter: Drafter,
    /// Its numeric form.
    pub bundle: String,
    /// Digest of its manifest.
    pub digest: String,
    /// What the probe found at load.
    pub lossless_class: String,
}

/// One run.
#[derive(Clone, Debug, Serialize)]
pub struct RunReport {
    /// The server.
    #[serde(flatten)]
    pub server: ServerKey,
    /// Requests in flight.
    pub concurrency: usize,
    /// What happened to the switch.
    pub switch: Switch,
    /// Values of further factors that all its requests share.
    pub factors: Vec<(String, String)>,
    /// Requests.
    pub requests: usize,
    /// Tokens generated with drafting on.
    pub tokens: usize,
    /// What was drafted.
    #[serde(flatten)]
    pub drafted: Drafted,
    /// Answers that differ.
    pub differences: usize,
    /// Why the run proves nothing; empty when it does.
    pub faults: Vec<String>,
    /// Time of the requests without drafting that no earlier run had made.
    pub off_seconds: f64,
    /// Time of the requests with drafting.
    pub on_seconds: f64,
}

/// One request whose answers differ.
#[derive(Clone, Debug, Serialize)]
pub struct Difference {
    /// The server.
    #[serde(flatten)]
    pub server: ServerKey,
    /// Requests in flight.
    pub concurrency: usize,
    /// What happened to the switch.
    pub switch: Switch,
    /// Name of the request.
    pub prompt: String,
    /// The request, without model and drafting.
    pub request: Value,
    /// Whether the answers differ as well when the request is the only one; unknown when it was not tried.
    pub repeats_alone: Option<bool>,
    /// Where they differ.
    #[serde(flatten)]
    pub disagreement: Disagreement,
}

/// What a report comes to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Everything was equal, and drafting was at work.
    Pass,
    /// Answers differ.
    Fail(String),
    /// The runs prove nothing.
    Invalid(String),
}

impl RunReport {
    /// A report of `run` before anything was asked.
    pub fn of(run: &Run) -> Self {
        let factors = run.factors.iter();
        Self {
            server: run.server.clone(),
            concurrency: run.concurrency,
            switch: run.switch,
            factors: factors
                .map(|(name, value)| ((*name).to_owned(), value.clone()))
                .collect(),
            requests: 0,
            tokens: 0,
            drafted: Drafted::default(),
            differences: 0,
            faults: Vec::new(),
            off_seconds: 0.0,
            on_seconds: 0.0,
        }
    }

    /// A report of `run`, which was not made because it would prove nothing.
    pub fn invalid(run: &Run, fault: String) -> Self {
        Self {
            faults: vec![fault],
            ..Self::of(run)
        }
    }
}

impl Default for Report {
    fn default() -> Self {
        Self {
            schema_version: SCHEMA_VERSION,
            tool_version: env!("CARGO_PKG_VERSION"),
            machine: Machine::current(),
            bundles: Vec::new(),
            runs: Vec::new(),
            differences: Vec::new(),
        }
    }
}

impl Report {
    /// Notes a bundle, once.
    pub fn bundle(&mut self, bundle: ServedBundle) {
        if !self.bundles.contains(&bundle) {
            self.bundles.push(bundle);
        }
    }

    /// What was drafted in all.
    pub fn drafted(&self) -> Drafted {
        let mut sum = Drafted::default();
        for run in &self.runs {
            sum += run.drafted;
        }
        sum
    }

    /// What it comes to.
    pub fn verdict(&self) -> Verdict {
        if !self.differences.is_empty() {
            return Verdict::Fail(format!("{} answers differ", self.differences.len()));
        }
        let drafted = self.drafted();
        if drafted.drafted_tokens == 0 {
            return Verdict::Invalid("nothing was drafted".to_owned());
        }
        if drafted.accepted_tokens == 0 {
            return Verdict::Invalid("no drafted token was accepted".to_owned());
        }
        let faults: Vec<&str> = self
            .runs
            .iter()
            .flat_map(|run| run.faults.iter().map(String::as_str))
            .collect();
        match faults.first() {
            Some(first) => Verdict::Invalid(format!("{first} ({} such faults)", faults.len())),
            None => Verdict::Pass,
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pass => write!(f, "pass: no answer differs"),
            Self::Fail(why) => write!(f, "fail: {why}"),
            Self::Invalid(why) => write!(f, "invalid: {why}"),
        }
    }
}

impl fmt::Display for RunReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let length = match self.drafted.acceptance_length() {
            Some(length) => format!("{length:.2}"),
            None => "-".to_owned(),
        };
        let factors: Vec<&str> = self
            .factors
            .iter()
            .map(|(_, value)| value.as_str())
            .collect();
        write!(
            f,
            "{:<8} {:<5} {:>5} {:>6} {:<8} {:>8} {:>7} {:>7} {:>8} {:>6} {:>6}  {}",
            self.server.drafter,
            self.server.bundle,
            self.server.block,
            self.concurrency,
            self.switch,
            self.requests,
            self.tokens,
            self.drafted.drafted_tokens,
            self.drafted.accepted_tokens,
            length,
            self.differences,
            factors.join(", ")
        )?;
        for fault in &self.faults {
            write!(f, "  INVALID: {fault}")?;
        }
        Ok(())
    }
}

/// The heading above the lines of runs.
pub const HEADING: &str = "drafter  form  block in-air switch   requests  tokens drafted accepted length differ  requests";

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{}, {} processors, {}",
            self.machine.processor, self.machine.processors, self.machine.platform
        )?;
        for bundle in &self.bundles {
            writeln!(
                f,
                "{} with the {} drafter: sha256 {}, lossless class {}",
                bundle.bundle, bundle.drafter, bundle.digest, bundle.lossless_class
            )?;
        }
        writeln!(f, "\n{HEADING}")?;
        for run in &self.runs {
            writeln!(f, "{run}")?;
        }
        for difference in self.differences.iter().take(SHOWN_DIFFERENCES) {
            writeln!(f, "\n{difference}")?;
        }
        if self.differences.len() > SHOWN_DIFFERENCES {
            writeln!(
                f,
                "\nand {} more differences",
                self.differences.len() - SHOWN_DIFFERENCES
            )?;
        }
        let sum = |count: fn(&RunReport) -> f64| self.runs.iter().map(count).sum::<f64>();
        write!(
            f,
            "\n{} requests, {} tokens, {}, {} differences, {:.0} s off and {:.0} s on\n{}",
            self.runs.iter().map(|run| run.requests).sum::<usize>(),
            self.runs.iter().map(|run| run.tokens).sum::<usize>(),
            self.drafted(),
            self.differences.len(),
            sum(|run| run.off_seconds),
            sum(|run| run.on_seconds),
            self.verdict()
        )
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let found = &self.disagreement;
        write!(
            f,
            "{}, {} drafter, {}, blocks of {}, {} in flight, switch {}: {}",
            self.prompt,
            self.server.drafter,
            self.server.bundle,
            self.server.block,
            self.concurrency,
            self.switch,
            found.part
        )?;
        if let Some(position) = found.position {
            write!(f, " from token {position} on")?;
        }
        let alone = match self.repeats_alone {
            Some(true) => ", also alone",
            Some(false) => ", not alone",
            None => "",
        };
        write!(
            f,
            "{alone}\n  off {}\n  on  {}\n  off {:?}\n  on  {:?}",
            found.off, found.on, found.off_text, found.on_text
        )
    }
}
