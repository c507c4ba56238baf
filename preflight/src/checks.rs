//! Judges facts: pure functions, one file for each part of the facts.

pub mod bundle;
pub mod config;
pub mod gpu;
pub mod host;
pub mod memory;
pub mod runtime;

use serde::Serialize;

use crate::facts::Facts;

/// What a check came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It holds.
    Pass,
    /// It does not apply here.
    Skip,
    /// The server would run, and somebody would regret it.
    Warn,
    /// What it needs could not be read.
    Unknown,
    /// The server would not run, or not as configured.
    Fail,
}

/// One check with what it came to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Stable name, `part.subject`, for example `gpu.driver_mismatch`.
    pub id: &'static str,
    /// What it came to.
    #[serde(rename = "status")]
    pub outcome: Outcome,
    /// Whether a server can do without it: what is unknown then counts as a warning, not as a failure.
    pub required: bool,
    /// What was found: the values that it rests on.
    pub evidence: String,
    /// What to do about it; for everything but a pass and a skip.
    pub remedy: Option<String>,
}

impl Finding {
    /// It holds.
    pub fn pass(id: &'static str, evidence: impl Into<String>) -> Self {
        Self::new(id, Outcome::Pass, evidence, None)
    }

    /// It does not apply, because of `evidence`.
    pub fn skip(id: &'static str, evidence: impl Into<String>) -> Self {
        Self::new(id, Outcome::Skip, evidence, None)
    }

    /// The server would run, and somebody would regret it.
    pub fn warn(id: &'static str, evidence: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(id, Outcome::Warn, evidence, Some(remedy.into()))
    }

    /// What it needs could not be read, because of `evidence`.
    pub fn unknown(
        id: &'static str,
        evidence: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self::new(id, Outcome::Unknown, evidence, Some(remedy.into()))
    }

    /// The server would not run, or not as configured.
    pub fn fail(id: &'static str, evidence: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(id, Outcome::Fail, evidence, Some(remedy.into()))
    }

    fn new(
        id: &'static str,
        outcome: Outcome,
        evidence: impl Into<String>,
        remedy: Option<String>,
    ) -> Self {
        Self {
            id,
            outcome,
            required: true,
            evidence: evidence.into(),
            remedy,
        }
    }

    /// The same check as one that a server can do without.
    pub fn optional(self) -> Self {
        Self {
            required: false,
            ..self
        }
    }

    /// The part that it belongs to: its id up to the dot.
    pub fn part(&self) -> &'static str {
        self.id.split('.').next().unwrap_or(self.id)
    }
}

/// Runs every check, in the order in which a person reads them.
pub fn run(facts: &Facts) -> Vec<Finding> {
    let parts: [fn(&Facts) -> Vec<Finding>; 6] = [
        config::checks,
        host::checks,
        gpu::checks,
        runtime::checks,
        bundle::checks,
        memory::checks,
    ];
    parts.iter().flat_map(|checks| checks(facts)).collect()
}

/// What is said in place of checks that rest on a configuration which has faults.
pub(crate) fn needs_settings(id: &'static str, what: &str) -> Finding {
    Finding::unknown(
        id,
        format!("the configuration has faults, so nobody can tell {what}"),
        "correct what config.faults says first",
    )
}

/// Bytes as people read them.
pub(crate) fn bytes_text(bytes: u64) -> String {
    let (value, unit) = match bytes {
        0..1024 => return format!("{bytes} B"),
        1024..1_048_576 => (bytes as f64 / 1024.0, "KiB"),
        1_048_576..1_073_741_824 => (bytes as f64 / 1_048_576.0, "MiB"),
        _ => (bytes as f64 / 1_073_741_824.0, "GiB"),
    };
    format!("{value:.1} {unit}")
}
