//! The plan in the words of Argo Rollouts: a `Rollout` that walks the same steps and an `AnalysisTemplate` with the same gates.
//!
//! It is printed for teams that have that controller; this program does not talk to it.
//! Argo stops for a person where a gate is inconclusive, and does not look at gates within a bake time.

use anyhow::Context;
use serde_json::{Value, json};

use crate::metric::{self, Metric, SAMPLES};
use crate::plan::{Gate, Plan};

const ANALYSIS: &str = "outrider-gates";

/// Both objects. The plan's gateway must be `kubernetes`; its namespace, route and services are those of the `Rollout`, and the `Deployment` of
/// the stable service's name gives the pods.
pub fn objects(plan: &Plan) -> anyhow::Result<[Value; 2]> {
    let gateway = plan.gateway.kubernetes.as_ref();
    let gateway = gateway.context(
        "gateway: Argo Rollouts moves the weights of an HTTPRoute, so it must be kubernetes",
    )?;
    let metadata = |name: &str| json!({ "name": name, "namespace": gateway.namespace });
    let bake = format!("{}s", plan.bake_s);
    let looks = json!({ "analysis": { "templates": [{ "templateName": ANALYSIS }] } });
    let mut steps = Vec::new();
    // What has all callers has nothing to be compared with: Argo ends at 100 % by itself.
    for &percent in plan.steps.iter().filter(|&&percent| percent < 100) {
        steps.push(json!({ "setWeight": percent }));
        steps.push(json!({ "pause": { "duration": bake } }));
        steps.push(looks.clone());
    }
    let drain_s = plan.drain_s;
    let rollout = json!({
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Rollout",
        "metadata": metadata(&gateway.stable_service),
        "spec": {
            "progressDeadlineSeconds": plan.ready_s,
            "progressDeadlineAbort": true,
            "workloadRef": {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "name": gateway.stable_service,
                "scaleDown": "onsuccess",
            },
            "strategy": { "canary": {
                "stableService": gateway.stable_service,
                "canaryService": gateway.canary_service,
                "abortScaleDownDelaySeconds": drain_s,
                "scaleDownDelaySeconds": drain_s,
                "trafficRouting": { "plugins": { "argoproj-labs/gatewayAPI": {
                    "httpRoute": gateway.route,
                    "namespace": gateway.namespace,
                }}},
                "steps": steps,
            }},
        },
    });
    let measurement = |name: String, query: String, condition: Condition| {
        let is_number = "len(result) > 0 && !isNaN(result[0]) && !isInf(result[0])";
        json!({
            "name": name,
            "count": 1,
            "failureLimit": 0,
            "inconclusiveLimit": 0,
            "successCondition": format!("{is_number} && {}", condition.holds),
            "failureCondition": condition.fails.map_or("false".to_owned(), |fails| {
                format!("{is_number} && {fails}")
            }),
            "provider": { "prometheus": { "address": plan.prometheus, "query": query } },
        })
    };
    let compares = plan.gates.iter().any(Gate::compares);
    let versions = if compares {
        &["canary", "stable"][..]
    } else {
        &["canary"]
    };
    let samples = versions.iter().map(|version| {
        let condition = Condition {
            holds: format!("result[0] >= {}", plan.min_samples),
            // Too few requests say nothing.
            fails: None,
        };
        let query = metric::query(SAMPLES, version, plan.bake_s);
        measurement(format!("requests-of-{version}"), query, condition)
    });
    let mut metrics: Vec<Value> = samples.collect();
    for gate in &plan.gates {
        for (bound, query, condition) in bounds(gate, plan.bake_s) {
            let name = format!("{}-{bound}", gate.metric).replace('_', "-");
            metrics.push(measurement(name, query, condition));
        }
    }
    let analysis = json!({
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "AnalysisTemplate",
        "metadata": metadata(ANALYSIS),
        "spec": { "metrics": metrics },
    });
    Ok([rollout, analysis])
}

/// What a figure must be, and what ends the rollout.
struct Condition {
    holds: String,
    fails: Option<String>,
}

/// Each bound of a gate with the query of what it binds.
fn bounds(gate: &Gate, window_s: u64) -> Vec<(&'static str, String, Condition)> {
    let named = Metric::named(&gate.metric).map(|metric| metric.query);
    let template = gate.query.as_deref().or(named).unwrap_or_default();
    let of = |version: &str| metric::query(template, version, window_s);
    let (canary, stable) = (of("canary"), of("stable"));
    let least = |bound: f64| Condition {
        holds: format!("result[0] >= {bound}"),
        fails: Some(format!("result[0] < {bound}")),
    };
    let most = |bound: f64| Condition {
        holds: format!("result[0] <= {bound}"),
        fails: Some(format!("result[0] > {bound}")),
    };
    let ratio = || format!("({canary}) / ({stable})");
    let difference = || format!("({canary}) - ({stable})");
    let all = [
        gate.min.map(|bound| ("min", canary.clone(), least(bound))),
        gate.max.map(|bound| ("max", canary.clone(), most(bound))),
        gate.min_ratio
            .map(|bound| ("min-ratio", ratio(), least(bound))),
        gate.max_ratio
            .map(|bound| ("max-ratio", ratio(), most(bound))),
        gate.max_difference
            .map(|bound| ("max-difference", difference(), most(bound))),
    ];
    all.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn plan(gateway: &str) -> anyhow::Result<Plan> {
        let text = format!(
            "rollout_version: 1
id: argo
stable: {{ endpoint: 'http://s', admin: 'http://sa', digest: {digest} }}
canary: {{ endpoint: 'http://c', admin: 'http://ca', digest: {digest} }}
gateway: {gateway}
prometheus: http://p
steps: [5, 50, 100]
bake_s: 300
min_samples: 20
gates:
  - {{ metric: error_ratio, max: 0.01, max_difference: 0.005 }}
  - {{ metric: acceptance_length_tokens, min: 1.5, min_ratio: 0.8 }}
  - {{ metric: first_token_p95_s, max_ratio: 1.25 }}
",
            digest = "a".repeat(64)
        );
        Plan::parse(&text, PathBuf::from("/"))
    }

    #[test]
    fn every_step_and_every_bound_of_a_plan_is_in_the_objects_of_argo_and_nothing_is_never_a_pass()
    {
        let gateway = "{ kubernetes: { address: 'http://g', namespace: llm, route: outrider } }";
        let [rollout, analysis] = objects(&plan(gateway).unwrap()).unwrap();
        let steps = &rollout["spec"]["strategy"]["canary"]["steps"];
        let look = json!({ "analysis": { "templates": [{ "templateName": "outrider-gates" }] } });
        assert_eq!(
            *steps,
            json!([
                { "setWeight": 5 }, { "pause": { "duration": "300s" } }, look,
                { "setWeight": 50 }, { "pause": { "duration": "300s" } }, look,
            ])
        );
        assert_eq!(
            analysis["metadata"],
            json!({ "name": "outrider-gates", "namespace": "llm" })
        );
        let metrics = analysis["spec"]["metrics"].as_array().unwrap();
        let number = "len(result) > 0 && !isNaN(result[0]) && !isInf(result[0])";
        let found: Vec<_> = metrics
            .iter()
            .map(|metric| {
                let text =
                    |field: &str| metric[field].as_str().unwrap().replace(number, "is number");
                (
                    text("name"),
                    text("successCondition"),
                    text("failureCondition"),
                )
            })
            .collect();
        let expected = [
            ("requests-of-canary", ">= 20", ""),
            ("requests-of-stable", ">= 20", ""),
            ("error-ratio-max", "<= 0.01", "> 0.01"),
            ("error-ratio-max-difference", "<= 0.005", "> 0.005"),
            ("acceptance-length-tokens-min", ">= 1.5", "< 1.5"),
            ("acceptance-length-tokens-min-ratio", ">= 0.8", "< 0.8"),
            ("first-token-p95-s-max-ratio", "<= 1.25", "> 1.25"),
        ];
        let expected = expected.map(|(name, holds, fails)| {
            let condition = |text: &str| match text {
                "" => "false".to_owned(),
                text => format!("is number && result[0] {text}"),
            };
            (name.to_owned(), condition(holds), condition(fails))
        });
        assert_eq!(found, expected);
        let query = metrics[6]["provider"]["prometheus"]["query"]
            .as_str()
            .unwrap();
        assert!(query.contains("version=\"canary\"") && query.contains("version=\"stable\""));
        assert!(query.contains("[300s]") && !query.contains("{version}"));
    }

    #[test]
    fn only_a_route_can_be_moved_by_argo() {
        let gateway = "{ haproxy: { address: 'http://g', socket: s, map: m } }";
        let error = objects(&plan(gateway).unwrap()).unwrap_err().to_string();
        assert!(error.contains("must be kubernetes"), "{error}");
    }
}
