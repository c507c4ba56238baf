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

/// Looks at every gate. `kept` are stable's figures of an earlier window, for one in which it has no callers; where there are none, because an
/// operator promoted past every step, gates are judged by the canary alone.
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
            kept.map(|kept| Ok(Answer::Value(kept)))
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

/// Judges one gate by its figures; without `stable`'s, nothing is compared.
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
    if let Some(stable) = stable {
        match stable {
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
        None if gate.compares() && stable.is_none() => {
            let text = "not compared, since no step passed while stable had callers";
            (Verdict::Pass, format!("{value}, {text}"))
        }
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

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use anyhow::bail;

    use super::*;
    use crate::metric::METRICS;

    /// Answers by what a query is for: `samples` or the metric's name, and the version.
    struct Fake<F>(F);

    impl<F: Fn(&str, &str) -> anyhow::Result<Answer>> Prometheus for Fake<F> {
        fn ask(&self, query: &str, _: f64) -> anyhow::Result<Answer> {
            for version in ["canary", "stable"] {
                if query == metric::query(SAMPLES, version, WINDOW.length_s) {
                    return (self.0)("samples", version);
                }
                for metric in METRICS {
                    if query == metric::query(metric.query, version, WINDOW.length_s) {
                        return (self.0)(metric.name, version);
                    }
                }
            }
            bail!("not asked by a gate: {query}");
        }
    }

    const WINDOW: Window = Window {
        end_s: 1000.0,
        length_s: 60,
        percent: 25,
    };

    /// The gates of the plan that is shipped, and the others that there are.
    const GATES: [&str; 12] = [
        "{ metric: error_ratio, max: 0.01, max_difference: 0.005 }",
        "{ metric: turned_away_ratio, max: 0.05 }",
        "{ metric: truncated_ratio, max: 0.002 }",
        "{ metric: gateway_error_ratio, max: 0.01 }",
        "{ metric: first_token_p95_s, max_ratio: 1.25 }",
        "{ metric: inter_token_p95_s, max_ratio: 1.25 }",
        "{ metric: inter_token_mean_s, max_ratio: 1.25 }",
        "{ metric: tokens_per_busy_second, min_ratio: 0.8 }",
        "{ metric: acceptance_length_tokens, min_ratio: 0.8, min: 1.2 }",
        "{ metric: restarts, max: 0 }",
        "{ metric: memory_bytes, max_ratio: 1.5 }",
        "{ metric: gpu_memory_mib, max_ratio: 1.1 }",
    ];

    fn plan() -> Plan {
        let text = format!(
            "rollout_version: 1
id: gates
stable: {{ endpoint: 'http://s', admin: 'http://sa', digest: {digest} }}
canary: {{ endpoint: 'http://c', admin: 'http://ca', digest: {digest} }}
gateway: {{ haproxy: {{ address: 'http://g', socket: s, map: m }} }}
prometheus: http://p
min_samples: 20
gates: [{}]
",
            GATES.join(", "),
            digest = "a".repeat(64),
        );
        Plan::parse(&text, PathBuf::from("/")).unwrap()
    }

    fn healthy(name: &str) -> f64 {
        match name {
            "samples" => 20.0,
            "error_ratio"
            | "turned_away_ratio"
            | "truncated_ratio"
            | "gateway_error_ratio"
            | "restarts" => 0.0,
            _ => 2.0,
        }
    }

    /// Looks at a world that is healthy but for one figure of one version.
    fn look_with(odd: &str, of: &str, answer: Option<Answer>) -> Finding {
        let fake = Fake(|name: &str, version: &str| match answer {
            answer if name == odd && version == of => answer.ok_or_else(|| anyhow::anyhow!("gone")),
            _ => Ok(Answer::Value(healthy(name))),
        });
        look(&plan(), &fake, WINDOW, &BTreeMap::new())
    }

    #[test]
    fn a_healthy_canary_passes() {
        let finding = look_with("none", "canary", None);
        assert_eq!(finding.verdict, Verdict::Pass, "{}", finding.detail);
        assert_eq!(finding.stable_figures["memory_bytes"], 2.0);
    }

    #[test]
    fn every_figure_that_gets_worse_fails_its_gate() {
        for (name, value) in [
            ("error_ratio", 0.02),
            ("error_ratio", 0.007),
            ("turned_away_ratio", 0.06),
            ("truncated_ratio", 0.01),
            ("gateway_error_ratio", 0.2),
            ("first_token_p95_s", 2.6),
            ("inter_token_p95_s", 2.6),
            ("inter_token_mean_s", 2.6),
            ("tokens_per_busy_second", 1.5),
            ("acceptance_length_tokens", 1.5),
            ("acceptance_length_tokens", 1.0),
            ("restarts", 1.0),
            ("memory_bytes", 3.1),
            ("gpu_memory_mib", 2.3),
        ] {
            let finding = look_with(name, "canary", Some(Answer::Value(value)));
            assert_eq!(finding.verdict, Verdict::Fail, "{name} {value}");
            assert!(finding.detail.starts_with(name), "{}", finding.detail);
        }
    }

    #[test]
    fn what_is_absent_or_no_number_or_can_not_be_asked_is_inconclusive_and_never_a_pass() {
        for metric in METRICS {
            for answer in [Some(Answer::Absent), Some(Answer::NotANumber), None] {
                let finding = look_with(metric.name, "canary", answer);
                assert_eq!(finding.verdict, Verdict::Inconclusive, "{}", metric.name);
            }
        }
        for name in ["first_token_p95_s", "error_ratio", "memory_bytes"] {
            for answer in [Some(Answer::Absent), Some(Answer::NotANumber), None] {
                let finding = look_with(name, "stable", answer);
                assert_eq!(finding.verdict, Verdict::Inconclusive, "{name} of stable");
            }
        }
        let finding = look_with("first_token_p95_s", "stable", Some(Answer::Value(0.0)));
        assert_eq!(finding.verdict, Verdict::Inconclusive);
    }

    #[test]
    fn too_few_requests_of_either_version_are_inconclusive() {
        for version in ["canary", "stable"] {
            for few in [Some(Answer::Value(19.0)), Some(Answer::Absent), None] {
                let finding = look_with("samples", version, few);
                assert_eq!(finding.verdict, Verdict::Inconclusive, "{version} {few:?}");
            }
        }
    }

    #[test]
    fn a_failed_gate_counts_more_than_an_unknown_one() {
        let fake = Fake(|name: &str, version: &str| match (name, version) {
            ("gateway_error_ratio", "canary") => Ok(Answer::Value(1.0)),
            ("first_token_p95_s", "canary") => Ok(Answer::NotANumber),
            _ => Ok(Answer::Value(healthy(name))),
        });
        let finding = look(&plan(), &fake, WINDOW, &BTreeMap::new());
        assert_eq!(finding.verdict, Verdict::Fail);
    }

    #[test]
    fn at_100_percent_the_canary_is_held_to_what_stable_had_before() {
        let fake = Fake(|name: &str, version: &str| {
            if version == "stable" {
                bail!("stable has no callers and is not asked");
            }
            Ok(Answer::Value(healthy(name)))
        });
        let window = Window {
            percent: 100,
            ..WINDOW
        };
        let kept = |first_token_s: f64| {
            let figures = METRICS.map(|metric| (metric.name.to_owned(), healthy(metric.name)));
            let mut figures = BTreeMap::from(figures);
            figures.insert("first_token_p95_s".to_owned(), first_token_s);
            figures
        };
        let same = look(&plan(), &fake, window, &kept(2.0));
        assert_eq!(same.verdict, Verdict::Pass, "{}", same.detail);
        let slower = look(&plan(), &fake, window, &kept(1.0));
        assert_eq!(slower.verdict, Verdict::Fail);
        // An operator promoted past every step, so there is nothing to compare with.
        let promoted = look(&plan(), &fake, window, &BTreeMap::new());
        assert_eq!(promoted.verdict, Verdict::Pass, "{}", promoted.detail);
        assert!(promoted.evidence.to_string().contains("not compared"));
    }
}
