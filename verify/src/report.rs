//! What a run found, as data for a pipeline and as text for a person. It judges nothing but the sum of its checks.

use std::fmt;

use serde::Serialize;
use serde_json::Value;

/// Version of the JSON form of a report.
pub const SCHEMA_VERSION: u32 = 1;

/// Outcome of one check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// What was expected is what was found.
    Pass,
    /// It is not.
    Fail,
    /// The service lacks what the check is about: an extension, or a draft.
    Skip,
}

/// Outcome of a run, and the exit code that goes with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Every check passed, or was skipped because the service lacks what it is about: exit code 0.
    Pass,
    /// At least one check failed, or at least one answer differs: exit code 1.
    Fail,
    /// The run ended before its last check, whatever the others said: exit code 2.
    CouldNotRun,
    /// Nothing wrong was seen, but what was seen does not prove the promise: exit code 3.
    Inconclusive,
    /// The output is right, and too slow: exit code 4.
    BelowGate,
}

impl Verdict {
    /// The exit code of a run with this verdict.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Pass => 0,
            Self::Fail => 1,
            Self::CouldNotRun => 2,
            Self::Inconclusive => 3,
            Self::BelowGate => 4,
        }
    }

    /// The verdict of several runs together: that of the one which says most against the service.
    pub fn of_all(verdicts: impl IntoIterator<Item = Self>) -> Self {
        let weight = |verdict: &Self| match verdict {
            Self::Pass => 0,
            Self::Inconclusive => 1,
            Self::BelowGate => 2,
            Self::CouldNotRun => 3,
            Self::Fail => 4,
        };
        let worst = verdicts.into_iter().max_by_key(weight);
        // A run of nothing proves nothing.
        worst.unwrap_or(Self::Inconclusive)
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pass => "pass",
            Self::Fail => "fail",
            Self::CouldNotRun => "could not run",
            Self::Inconclusive => "inconclusive",
            Self::BelowGate => "below the gate",
        })
    }
}

/// One check with its evidence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// Stable name.
    pub name: &'static str,
    /// Outcome.
    pub outcome: Outcome,
    /// What a right service does.
    pub expected: String,
    /// What this one did.
    pub actual: String,
}

/// What the service says of its model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Model {
    /// Name in requests.
    pub id: String,
    /// Digest of the bundle, where the service gives it.
    pub bundle_digest: Option<String>,
    /// Lossless class, where the service gives it.
    pub lossless_class: Option<String>,
    /// State of drafting, where the service gives it.
    pub drafting: Option<String>,
    /// Longest prompt and completion together in tokens, where the service gives it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context_tokens: Option<u64>,
}

impl Model {
    /// Reads an entry of `/v1/models`, `None` when it has no name.
    pub fn from_entry(entry: &Value) -> Option<Self> {
        let text = |pointer: &str| {
            entry
                .pointer(pointer)
                .and_then(Value::as_str)
                .map(str::to_owned)
        };
        Some(Self {
            id: text("/id")?,
            bundle_digest: text("/bundle_digest"),
            lossless_class: text("/lossless_class"),
            drafting: text("/speculation/drafting"),
            context_tokens: ["/context_length", "/max_model_len"]
                .iter()
                .find_map(|pointer| entry.pointer(pointer)?.as_u64()),
        })
    }
}

impl fmt::Display for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let facts = [
            ("bundle digest", &self.bundle_digest),
            ("lossless class", &self.lossless_class),
            ("drafting", &self.drafting),
        ];
        writeln!(f, "model {}", self.id)?;
        for (name, value) in facts {
            writeln!(
                f,
                "  {name:<15} {}",
                value.as_deref().unwrap_or("not given")
            )?;
        }
        Ok(())
    }
}

/// A run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Version of this program.
    pub tool_version: &'static str,
    /// Name of the command.
    pub command: &'static str,
    /// Address of the service.
    pub endpoint: String,
    /// The model that was asked, once it is known.
    pub model: Option<Model>,
    /// Outcome of the run.
    pub verdict: Verdict,
    /// Why the run ended before its last check.
    pub error: Option<String>,
    /// Every check that ran, in order.
    pub checks: Vec<Check>,
}

impl Report {
    /// A report of `checks`; `error` says why there are no more of them, when there should be.
    pub fn new(
        command: &'static str,
        endpoint: &str,
        model: Option<Model>,
        checks: Vec<Check>,
        error: Option<String>,
    ) -> Self {
        let failed = checks.iter().any(|check| check.outcome == Outcome::Fail);
        let verdict = match (&error, failed) {
            (Some(_), _) => Verdict::CouldNotRun,
            (None, true) => Verdict::Fail,
            (None, false) => Verdict::Pass,
        };
        Self {
            schema_version: SCHEMA_VERSION,
            tool_version: env!("CARGO_PKG_VERSION"),
            command,
            endpoint: endpoint.to_owned(),
            model,
            verdict,
            error,
            checks,
        }
    }

    fn count(&self, outcome: Outcome) -> usize {
        self.checks
            .iter()
            .filter(|check| check.outcome == outcome)
            .count()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "outrider-verify {} {} {}",
            self.tool_version, self.command, self.endpoint
        )?;
        if let Some(model) = &self.model {
            write!(f, "{model}")?;
        }
        writeln!(f)?;
        for check in &self.checks {
            match check.outcome {
                Outcome::Pass => writeln!(f, "pass  {:<28} {}", check.name, check.actual)?,
                Outcome::Skip => writeln!(f, "skip  {:<28} {}", check.name, check.actual)?,
                Outcome::Fail => {
                    writeln!(f, "FAIL  {}", check.name)?;
                    writeln!(f, "        expected  {}", check.expected)?;
                    writeln!(f, "        actual    {}", check.actual)?;
                }
            }
        }
        writeln!(
            f,
            "\n{} passed, {} failed, {} skipped",
            self.count(Outcome::Pass),
            self.count(Outcome::Fail),
            self.count(Outcome::Skip)
        )?;
        match (&self.error, self.verdict) {
            (Some(error), _) => writeln!(f, "could not run to the end: {error}"),
            (None, Verdict::Pass) => writeln!(f, "the service passes"),
            (None, _) => writeln!(f, "the service fails"),
        }
    }
}

/// An error with all its causes on one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}
