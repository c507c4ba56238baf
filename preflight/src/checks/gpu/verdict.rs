//! What is said of one device, and how that of several becomes one finding.

use super::{Finding, Outcome};

/// What a device should be asked by hand when the driver did not say something.
const UNKNOWN_REMEDY: &str = "ask for the same value with `nvidia-smi -q`; where that has no answer either, update the driver or reset the device";

/// What a check came to for one device.
pub(super) struct Verdict {
    outcome: Outcome,
    evidence: String,
    remedy: Option<String>,
}

impl Verdict {
    pub(super) fn pass(evidence: impl Into<String>) -> Self {
        Self::new(Outcome::Pass, evidence, None)
    }

    pub(super) fn skip(evidence: impl Into<String>) -> Self {
        Self::new(Outcome::Skip, evidence, None)
    }

    pub(super) fn warn(evidence: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(Outcome::Warn, evidence, Some(remedy.into()))
    }

    pub(super) fn fail(evidence: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(Outcome::Fail, evidence, Some(remedy.into()))
    }

    pub(super) fn unknown(evidence: impl Into<String>) -> Self {
        Self::new(Outcome::Unknown, evidence, Some(UNKNOWN_REMEDY.into()))
    }

    /// Nothing can be said before something else is seen to.
    pub(super) fn waits(evidence: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(Outcome::Unknown, evidence, Some(remedy.into()))
    }

    fn new(outcome: Outcome, evidence: impl Into<String>, remedy: Option<String>) -> Self {
        Self {
            outcome,
            evidence: evidence.into(),
            remedy,
        }
    }

    /// Says which device it is of.
    pub(super) fn of(self, label: &str) -> Self {
        Self {
            evidence: format!("{label}: {}", self.evidence),
            ..self
        }
    }

    /// Says which device it is of, and that the server does not use it: nothing of it can keep the server from running.
    pub(super) fn of_another(self, label: &str) -> Self {
        let outcome = match self.outcome {
            Outcome::Fail | Outcome::Unknown => Outcome::Warn,
            outcome => outcome,
        };
        Self {
            outcome,
            evidence: format!("{label}, which the server does not use: {}", self.evidence),
            remedy: self.remedy,
        }
    }

    /// The worst of all; where that is no pass, the evidence and the remedies of those that are none.
    pub(super) fn sum(verdicts: Vec<Self>) -> Self {
        // What does not apply to one device says nothing of the others.
        let rank = |outcome| (outcome != Outcome::Skip, outcome);
        let worst = verdicts
            .iter()
            .map(|verdict| verdict.outcome)
            .max_by_key(|outcome| rank(*outcome))
            .unwrap_or(Outcome::Skip);
        let mut evidence = Vec::new();
        let mut remedies: Vec<String> = Vec::new();
        for verdict in verdicts {
            let is_fine = matches!(verdict.outcome, Outcome::Pass | Outcome::Skip);
            if worst < Outcome::Warn || !is_fine {
                evidence.push(verdict.evidence);
            }
            if let Some(remedy) = verdict.remedy
                && !remedies.contains(&remedy)
            {
                remedies.push(remedy);
            }
        }
        let remedy = (!remedies.is_empty()).then(|| remedies.join("; "));
        Self::new(worst, evidence.join("; "), remedy)
    }

    pub(super) fn into_finding(self, id: &'static str) -> Finding {
        Finding {
            id,
            outcome: self.outcome,
            required: true,
            evidence: self.evidence,
            remedy: self.remedy,
        }
    }
}
