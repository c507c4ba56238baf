//! GPUs, without any: recorded facts judged, and NVML played by a stand-in.

mod nvml;
mod recorded;

use outrider_preflight::checks::{self, Finding, Outcome};
use outrider_preflight::facts::config::{ConfigFacts, ExecutionProvider};
use outrider_preflight::facts::gpu::GpuFacts;
use outrider_preflight::facts::host::{HostFacts, User};
use outrider_preflight::facts::runtime::{Library, Needed, RuntimeFacts};
use outrider_preflight::facts::{Facts, Reading, SCHEMA_VERSION};
use serde::Deserialize;
use serde_json::Value;

/// One case of a file of cases: a base with some values changed.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    /// What the case is.
    name: String,
    /// The file that it starts from.
    base: Option<String>,
    /// Whether somebody else than the service user read the facts.
    #[serde(default)]
    read_by_another: bool,
    /// Values by their JSON pointer.
    #[serde(default)]
    set: serde_json::Map<String, Value>,
}

impl Case {
    fn apply_to(&self, mut base: Value) -> Value {
        for (pointer, value) in &self.set {
            let place = base
                .pointer_mut(pointer)
                .unwrap_or_else(|| panic!("{}: nothing is at {pointer}", self.name));
            *place = value.clone();
        }
        base
    }
}

fn cases(yaml: &str) -> Vec<Case> {
    serde_yaml::from_str(yaml).unwrap()
}

/// Facts of a machine with `gpu` whose runtime was built for CUDA 13, and whose service user read them.
fn facts(gpu: GpuFacts) -> Facts {
    Facts {
        schema_version: SCHEMA_VERSION,
        config: ConfigFacts {
            execution_provider: ExecutionProvider::Cuda,
            ..Default::default()
        },
        gpu,
        runtime: runtime(13),
        bundle: Default::default(),
        host: HostFacts {
            user: User {
                id: 10_001,
                name: None,
                group_ids: vec![10_001],
            },
            read_by_user: true,
            ..Default::default()
        },
    }
}

/// A runtime that was built for CUDA `cuda_major`.
fn runtime(cuda_major: u32) -> RuntimeFacts {
    let needed = Needed {
        name: format!("libcudart.so.{cuda_major}"),
        ..Default::default()
    };
    let provider = Library {
        path: "libonnxruntime_providers_cuda.so".to_owned(),
        needed: vec![needed],
        ..Default::default()
    };
    RuntimeFacts {
        cuda_provider: Some(Reading::Known(provider)),
        ..Default::default()
    }
}

/// What is said of GPUs.
fn judge(facts: &Facts) -> Vec<Finding> {
    let mut findings = checks::run(facts);
    findings.retain(|finding| finding.part() == "gpu");
    findings
}

/// Findings as text for a snapshot; neighbours of which the same is said share it.
fn text(findings: &[Finding]) -> String {
    let mut text = String::new();
    let same = |a: &Finding, b: &Finding| {
        (a.outcome, a.required, &a.evidence, &a.remedy)
            == (b.outcome, b.required, &b.evidence, &b.remedy)
    };
    for group in findings.chunk_by(same) {
        let ids: Vec<_> = group.iter().map(|finding| finding.id).collect();
        let Finding {
            outcome,
            required,
            evidence,
            remedy,
            ..
        } = &group[0];
        let outcome = format!("{outcome:?}").to_lowercase();
        let required = if *required { "" } else { " (optional)" };
        text += &format!("{} {outcome}{required}\n    {evidence}\n", ids.join(" "));
        if let Some(remedy) = remedy {
            text += &format!("    > {remedy}\n");
        }
    }
    text
}

/// Findings that are neither a pass nor left out, each with a remedy.
fn complaints(findings: Vec<Finding>) -> Vec<Finding> {
    for finding in &findings {
        let is_fine = matches!(finding.outcome, Outcome::Pass | Outcome::Skip);
        assert_eq!(finding.remedy.is_none(), is_fine, "{finding:?}");
    }
    findings
        .into_iter()
        .filter(|finding| finding.remedy.is_some())
        .collect()
}
