//! The Kubernetes Gateway API: the weights of two services in one rule of an `HTTPRoute`, patched through kubectl in one change.
//!
//! Weights divide requests, not callers: the share is neither sticky nor monotonic by caller.

use std::process::Command;

use anyhow::{Context, bail};
use serde_json::{Value, json};

use super::Gateway;
use crate::plan::Kubernetes;

/// Where both services are in a route, and their weights, stable's first.
struct Backends {
    rule: usize,
    stable: usize,
    canary: usize,
    weights: (u64, u64),
}

/// A route.
#[derive(Clone, Debug)]
pub struct Route {
    /// Which one.
    pub settings: Kubernetes,
}

impl Route {
    fn kubectl(&self, arguments: &[&str]) -> anyhow::Result<Value> {
        let (program, first) = self
            .settings
            .kubectl
            .split_first()
            .context("no kubectl command")?;
        let output = Command::new(program)
            .args(first)
            .args(["--namespace", &self.settings.namespace])
            .args(arguments)
            .args(["--output", "json"])
            .output()
            .with_context(|| format!("cannot run {program}"))?;
        if !output.status.success() {
            bail!(
                "{program} {}: {}",
                arguments.join(" "),
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        serde_json::from_slice(&output.stdout).with_context(|| format!("{program} gave no JSON"))
    }

    fn route(&self) -> anyhow::Result<Value> {
        self.kubectl(&["get", "httproute", &self.settings.route])
    }

    /// The rule that has both services, and where they are in it.
    fn backends(&self, route: &Value) -> anyhow::Result<Backends> {
        let settings = &self.settings;
        let rules = route.pointer("/spec/rules").and_then(Value::as_array);
        let rules = rules.with_context(|| format!("route {} has no rules", settings.route))?;
        let mut found = None;
        for (rule, content) in rules.iter().enumerate() {
            let services = content["backendRefs"].as_array();
            let services = services.map_or(&[][..], Vec::as_slice);
            let find = |name: &str| services.iter().position(|service| service["name"] == name);
            let both = (
                find(&settings.stable_service),
                find(&settings.canary_service),
            );
            let (Some(stable), Some(canary)) = both else {
                continue;
            };
            if found.is_some() {
                bail!(
                    "route {}: more than one rule has both {} and {}",
                    settings.route,
                    settings.stable_service,
                    settings.canary_service
                );
            }
            // The interface's own default.
            let weight =
                |index: usize| services[index].get("weight").map_or(Some(1), Value::as_u64);
            let weights = weight(stable).zip(weight(canary));
            found = Some(Backends {
                rule,
                stable,
                canary,
                weights: weights.context("a weight is no whole number")?,
            });
        }
        found.with_context(|| {
            format!(
                "route {}: no rule has both {} and {}",
                settings.route, settings.stable_service, settings.canary_service
            )
        })
    }

    /// One change of both weights, which the cluster refuses when the services have changed places meanwhile.
    fn patch(&self, backends: &Backends, percent: u8) -> Value {
        let operation = |op: &str, index: usize, field: &str, value: Value| {
            let rule = backends.rule;
            let path = format!("/spec/rules/{rule}/backendRefs/{index}/{field}");
            json!({ "op": op, "path": path, "value": value })
        };
        let Backends { stable, canary, .. } = *backends;
        json!([
            operation("test", stable, "name", json!(self.settings.stable_service)),
            operation("test", canary, "name", json!(self.settings.canary_service)),
            operation("add", stable, "weight", json!(100 - percent)),
            operation("add", canary, "weight", json!(percent)),
        ])
    }
}

impl Gateway for Route {
    fn percent(&self) -> anyhow::Result<Option<u8>> {
        let (stable, canary) = self.backends(&self.route()?)?.weights;
        let percent = u8::try_from(canary).ok();
        Ok(percent.filter(|_| stable.checked_add(canary) == Some(100)))
    }

    fn set(&self, percent: u8) -> anyhow::Result<()> {
        let backends = self.backends(&self.route()?)?;
        let patch = self.patch(&backends, percent).to_string();
        let route = &self.settings.route;
        let patched = self.kubectl(&[
            "patch",
            "httproute",
            route,
            "--type=json",
            "--patch",
            &patch,
        ])?;
        let (stable, canary) = self.backends(&patched)?.weights;
        if (stable, canary) != (u64::from(100 - percent), u64::from(percent)) {
            bail!("route {route} came back with the weights {stable} and {canary}");
        }
        Ok(())
    }

    fn describe(&self, percent: u8) -> String {
        let settings = &self.settings;
        format!(
            "{} --namespace {} patch httproute {}: weight {} for {}, {percent} for {}",
            settings.kubectl.join(" "),
            settings.namespace,
            settings.route,
            100 - percent,
            settings.stable_service,
            settings.canary_service,
        )
    }
}
