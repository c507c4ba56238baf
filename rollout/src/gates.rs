//! Gates: asks for the figures of both versions over the same window, and judges them.
//!
//! A figure that is not there proves nothing, and nothing is never a pass.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::json;

use crate::machine::{Finding, Verdict};
use crate::metric::{self, Metric, SAMPLES};
use crate::plan::{Gate, Plan};
use crate::prometheus::{Answer, Prometheus};

/// What one gate saw.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Seen {
    metric: String,
    verdict: Verdict,
    detail: String,
    canary: Option<Answer>,
    stable: Option<Answer>,
}

/// The window that a look is over.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    /// Its end, in seconds since 1970.
    pub end_s: f64,
    /// Its length.
    pub length_s: u64,
    /// The canary's share in it.
    pub percent: u8,
}

/// Looks at every gate. `kept` are stable's figures of an earlier window, for one in which it has no callers.
pub fn look(
    plan: &Plan,
    prometheus: &impl Prometheus,
    window: Window,
    kept: &BTreeMap<String, f64>,
) -> Finding {
    let ask = |template: &str, version: &str| {
        let query = metric::query(template, version, window.length_s);
        prometheus.ask(&query, window.end_s)
    };
    let stable_serves = window.percent < 100;
    let compares = stable_serves && plan.gates.iter().any(Gate::compares);
    let mut samples = Vec::new();
    for version in if compares {
        &["canary", "stable"][..]
    } else {
        &["canary"]
    } {
        match ask(SAMPLES, version) {
            Ok(answer) => samples.push((*version, answer)),
            Err(error) => {
                let detail = format!("Prometheus: {error:#}");
                return Finding::new(Verdict::Inconclusive, detail, json!(null));
            }
        }
    }
    let too_few = samples
        .iter()
        .find(|(_, answer)| answer.value().unwrap_or(0.0) < plan.min_samples as f64);
    if let Some((version, answer)) = too_few {
        let detail = format!(
            "{version} had {:.0} requests in {} s, fewer than {}",
            answer.value().unwrap_or(0.0),
            window.length_s,
            plan.min_samples
        );
        let evidence = json!({ "window_s": window.length_s, "samples": samples });
        return Finding::new(Verdict::Inconclusive, detail, evidence);
    }

    let mut stable_figures = BTreeMap::new();
    let mut all = Vec::new();
    for gate in &plan.gates {
        let named = Metric::named(&gate.metric).map(|metric| metric.query);
        let template = gate.query.as_deref().or(named).unwrap_or_default();
        let canary = ask(template, "canary");
        let stable = if !gate.compares() {
            None
        } else if stable_serves {
            Some(ask(template, "stable"))
        } else {
            let kept = kept.get(&gate.metric).copied();
            Some(Ok(kept.map_or(Answer::Absent, Answer::Value)))
        };
        let figures = canary.and_then(|canary| Ok((canary, stable.transpose()?)));
        let seen = match figures {
            Ok((canary, stable)) => {
                if let Some(Answer::Value(value)) = stable {
                    stable_figures.insert(gate.metric.clone(), value);
                }
                let (verdict, detail) = judge(gate, canary, stable);
                Seen {
                    metric: gate.metric.clone(),
                    verdict,
                    detail,
                    canary: Some(canary),
                    stable,
                }
            }
            Err(error) => Seen {
                metric: gate.metric.clone(),
                verdict: Verdict::Inconclusive,
                detail: format!("Prometheus: {error:#}"),
                canary: None,
                stable: None,
            },
        };
        all.push(seen);
    }
    let with = |verdict| all.iter().filter(move |seen| seen.verdict == verdict);
    let texts = |verdict| {
        let texts = with(verdict).map(|seen| format!("{}: {}", seen.metric, seen.detail));
        texts.collect::<Vec<_>>().join("; ")
    };
    let (verdict, detail) = if with(Verdict::Fail).next().is_some() {
        (Verdict::Fail, texts(Verdict::Fail))
    } else if with(Verdict::Inconclusive).next().is_some() {
        (Verdict::Inconclusive, texts(Verdict::Inconclusive))
    } else {
        (Verdict::Pass, format!("{} gates passed", all.len()))
    };
    Finding {
        verdict,
        detail,
        evidence: json!({
            "window_s": window.length_s,
            "end_s": window.end_s,
            "samples": samples,
            "stable_of_an_earlier_step": !stable_serves,
            "gates": all,
        }),
        drafting_may_be_why: true,
        stable_figures,
    }
}

/// Judges one gate by its figures; `stable` is there for a gate that compares.
pub fn judge(gate: &Gate, canary: Answer, stable: Option<Answer>) -> (Verdict, String) {
    let Some(value) = canary.value() else {
        return (
            Verdict::Inconclusive,
            format!("the canary's figure is {}", word(canary)),
        );
    };
    let mut unknown = None;
    let check = |holds: bool, text: String| (!holds).then_some((Verdict::Fail, text));
    if let Some(failed) = gate
        .min
        .and_then(|min| check(value >= min, format!("{value} is below {min}")))
    {
        return failed;
    }
    if let Some(failed) = gate
        .max
        .and_then(|max| check(value <= max, format!("{value} is above {max}")))
    {
        return failed;
    }
    if gate.compares() {
        match stable.unwrap_or(Answer::Absent) {
            Answer::Value(base) => {
                if let Some(failed) = gate.max_difference.and_then(|most| {
                    let text = format!("{value} is more than {most} above stable's {base}");
                    check(value - base <= most, text)
                }) {
                    return failed;
                }
                if gate.min_ratio.is_some() || gate.max_ratio.is_some() {
                    if base == 0.0 {
                        unknown = Some("stable's figure is 0, so there is no ratio".to_owned());
                    } else {
                        let ratio = value / base;
                        let text = |side: &str, bound: f64| {
                            format!("{value} is {ratio:.3} of stable's {base}, {side} {bound}")
                        };
                        if let Some(failed) = gate
                            .min_ratio
                            .and_then(|min| check(ratio >= min, text("below", min)))
                        {
                            return failed;
                        }
                        if let Some(failed) = gate
                            .max_ratio
                            .and_then(|max| check(ratio <= max, text("above", max)))
                        {
                            return failed;
                        }
                    }
                }
            }
            missing => unknown = Some(format!("stable's figure is {}", word(missing))),
        }
    }
    match unknown {
        Some(reason) => (Verdict::Inconclusive, reason),
        None => (Verdict::Pass, format!("{value}")),
    }
}

fn word(answer: Answer) -> &'static str {
    match answer {
        Answer::Value(_) => "there",
        Answer::Absent => "absent",
        Answer::NotANumber => "not a number",
    }
}
