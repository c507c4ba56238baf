//! The Kubernetes Gateway API: the weights of two services in one rule of an `HTTPRoute`, patched through kubectl in one change.
//!
//! Weights divide requests, not callers: the share is neither sticky nor monotonic by caller.

use std::process::Command;

use anyhow::{Context, bail};
use serde_json::{Value, json};

use super::Gateway;
use crate::plan::Kubernetes;

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

    /// Index and weight of the stable and the canary service.
    fn services(&self, route: &Value) -> anyhow::Result<[(usize, u64); 2]> {
        let settings = &self.settings;
        let pointer = format!("/spec/rules/{}/backendRefs", settings.rule);
        let services = route.pointer(&pointer).and_then(Value::as_array);
        let services =
            services.with_context(|| format!("route {} has no {pointer}", settings.route))?;
        let find = |name: &str| {
            let index = services.iter().position(|service| service["name"] == name);
            let index = index
                .with_context(|| format!("route {}: no {name} in {pointer}", settings.route))?;
            // The interface's own default.
            let weight = services[index].get("weight").map_or(Some(1), Value::as_u64);
            anyhow::Ok((index, weight.context("a weight is no whole number")?))
        };
        Ok([
            find(&settings.stable_service)?,
            find(&settings.canary_service)?,
        ])
    }

    fn patch(&self, [stable, canary]: [usize; 2], percent: u8) -> Value {
        let weight = |index: usize, weight: u8| {
            let path = format!(
                "/spec/rules/{}/backendRefs/{index}/weight",
                self.settings.rule
            );
            json!({ "op": "add", "path": path, "value": weight })
        };
        json!([weight(stable, 100 - percent), weight(canary, percent)])
    }
}

impl Gateway for Route {
    fn percent(&self) -> anyhow::Result<Option<u8>> {
        let [(_, stable), (_, canary)] = self.services(&self.route()?)?;
        let percent = u8::try_from(canary).ok();
        Ok(percent.filter(|_| stable + canary == 100))
    }

    fn set(&self, percent: u8) -> anyhow::Result<()> {
        let [(stable, _), (canary, _)] = self.services(&self.route()?)?;
        let patch = self.patch([stable, canary], percent).to_string();
        let route = &self.settings.route;
        let patched = self.kubectl(&[
            "patch",
            "httproute",
            route,
            "--type=json",
            "--patch",
            &patch,
        ])?;
        let [(_, stable), (_, canary)] = self.services(&patched)?;
        if (stable, canary) != (u64::from(100 - percent), u64::from(percent)) {
            bail!("after the patch route {route} has the weights {stable} and {canary}");
        }
        Ok(())
    }

    fn describe(&self, percent: u8) -> String {
        let settings = &self.settings;
        format!(
            "{} --namespace {} patch httproute {} --type=json --patch '{}' (with the indices of {} and {} in rule {})",
            settings.kubectl.join(" "),
            settings.namespace,
            settings.route,
            self.patch([0, 1], percent),
            settings.stable_service,
            settings.canary_service,
            settings.rule
        )
    }
}
