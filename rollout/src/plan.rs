//! The plan of a rollout: a YAML file in which an unknown key or a value out of bounds is an error, all of them reported at once.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use outrider_bundle::digest::is_sha256;
use serde::{Deserialize, Serialize};

use crate::metric::Metric;

/// The one version of the format.
pub const ROLLOUT_VERSION: u32 = 1;

/// What shall happen, and what must hold.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Version of this format, [`ROLLOUT_VERSION`].
    pub rollout_version: u32,
    /// Name of the rollout.
    pub id: String,
    /// The version that serves.
    pub stable: Version,
    /// The version that shall serve.
    pub canary: Version,
    /// What divides the callers.
    pub gateway: Gateway,
    /// Base URL of Prometheus.
    pub prometheus: String,
    /// Command that must succeed before anything else.
    #[serde(default)]
    pub preflight: Option<Vec<String>>,
    /// File with the key for requests through the gateway.
    #[serde(default)]
    pub api_key_file: Option<PathBuf>,
    /// Command that judges the canary by the exit codes of `outrider-verify`.
    #[serde(default)]
    pub verify: Option<Vec<String>>,
    /// Most time from the start command to a canary that is ready.
    #[serde(default = "ready_s")]
    pub ready_s: u64,
    /// Shares of the callers in percent, growing, the last 100.
    #[serde(default = "steps")]
    pub steps: Vec<u8>,
    /// Time of a step before it may end.
    #[serde(default = "bake_s")]
    pub bake_s: u64,
    /// Between two looks at the gates within a bake time.
    #[serde(default = "check_s")]
    pub check_s: u64,
    /// Requests that a version must have had for a look that says yes or no.
    #[serde(default = "min_samples")]
    pub min_samples: u64,
    /// Most time for streams to end before a version is stopped.
    #[serde(default = "drain_s")]
    pub drain_s: u64,
    /// What the first failed gate does.
    #[serde(default)]
    pub on_failure: OnFailure,
    /// What must hold.
    pub gates: Vec<Gate>,
    /// The folder of the file: relative paths and commands start there.
    #[serde(skip)]
    pub directory: PathBuf,
}

/// One of the two versions.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Version {
    /// Base URL of the service.
    pub endpoint: String,
    /// Base URL of the admin listener.
    pub admin: String,
    /// Digest of the bundle that it must serve, 64 hexadecimal digits.
    pub digest: String,
    /// File with the token for the admin listener.
    #[serde(default)]
    pub admin_token_file: Option<PathBuf>,
    /// Command that starts it, and returns.
    #[serde(default)]
    pub start: Option<Vec<String>>,
    /// Command that stops it, and returns.
    #[serde(default)]
    pub stop: Option<Vec<String>>,
}

/// What divides the callers: one of these.
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Gateway {
    /// HAProxy with a map.
    #[serde(default)]
    pub haproxy: Option<Haproxy>,
    /// nginx with `split_clients`.
    #[serde(default)]
    pub nginx: Option<Nginx>,
    /// An `HTTPRoute` of the Kubernetes Gateway API.
    #[serde(default)]
    pub kubernetes: Option<Kubernetes>,
}

/// HAProxy as `configs/haproxy/outrider.cfg` sets it up.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Haproxy {
    /// Base URL for callers.
    pub address: String,
    /// Socket of the runtime interface.
    pub socket: PathBuf,
    /// The map file, by the name that the configuration has for it.
    pub map: PathBuf,
}

/// nginx as `configs/nginx/outrider.conf` sets it up.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Nginx {
    /// Base URL for callers.
    pub address: String,
    /// The program.
    #[serde(default = "nginx")]
    pub program: PathBuf,
    /// Its prefix, `-p`.
    pub prefix: PathBuf,
    /// Its configuration, `-c`.
    pub config: PathBuf,
    /// The included file that has the split.
    pub split: PathBuf,
    /// The file with the process id of the master.
    pub pid: PathBuf,
}

/// An `HTTPRoute` that names two services.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Kubernetes {
    /// Base URL for callers.
    pub address: String,
    /// kubectl and its arguments that say which cluster.
    #[serde(default = "kubectl")]
    pub kubectl: Vec<String>,
    /// Namespace of the route.
    pub namespace: String,
    /// Name of the route.
    pub route: String,
    /// Name of the stable service; one rule of the route has both.
    #[serde(default = "stable_service")]
    pub stable_service: String,
    /// Name of the canary service.
    #[serde(default = "canary_service")]
    pub canary_service: String,
}

/// What the first failed gate does.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum OnFailure {
    /// It rolls back.
    #[default]
    RollBack,
    /// It switches drafting off on the canary and begins the step again; the second one rolls back.
    SpeculationOffFirst,
}

/// A condition on one figure.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Gate {
    /// A figure that is known, or the name of an own one.
    pub metric: String,
    /// An own query; `{version}` stands for `stable` or `canary`, `{window}` for the window with its unit.
    #[serde(default)]
    pub query: Option<String>,
    /// Least value of the canary.
    #[serde(default)]
    pub min: Option<f64>,
    /// Greatest value of the canary.
    #[serde(default)]
    pub max: Option<f64>,
    /// Least value of the canary as a multiple of that of stable.
    #[serde(default)]
    pub min_ratio: Option<f64>,
    /// Greatest value of the canary as a multiple of that of stable.
    #[serde(default)]
    pub max_ratio: Option<f64>,
    /// Greatest value of the canary above that of stable.
    #[serde(default)]
    pub max_difference: Option<f64>,
}

impl Gate {
    /// Whether it compares the canary with stable.
    pub fn compares(&self) -> bool {
        self.min_ratio.is_some() || self.max_ratio.is_some() || self.max_difference.is_some()
    }
}

fn ready_s() -> u64 {
    900
}
fn steps() -> Vec<u8> {
    vec![1, 5, 25, 50, 100]
}
fn bake_s() -> u64 {
    900
}
fn check_s() -> u64 {
    30
}
fn min_samples() -> u64 {
    200
}
fn drain_s() -> u64 {
    620
}
fn nginx() -> PathBuf {
    "nginx".into()
}
fn kubectl() -> Vec<String> {
    vec!["kubectl".to_owned()]
}
fn stable_service() -> String {
    "outrider".to_owned()
}
fn canary_service() -> String {
    "outrider-canary".to_owned()
}

impl Plan {
    /// Reads and checks a file.
    pub fn read(file: &Path) -> anyhow::Result<Self> {
        let text =
            fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        let absolute = std::path::absolute(file)?;
        let directory = absolute.parent().unwrap_or(Path::new("/")).to_owned();
        Self::parse(&text, directory).with_context(|| file.display().to_string())
    }

    /// Reads and checks the text of a file of `directory`.
    pub fn parse(text: &str, directory: PathBuf) -> anyhow::Result<Self> {
        let mut plan: Self = serde_yaml::from_str(text)?;
        plan.directory = directory;
        let faults = plan.faults();
        if !faults.is_empty() {
            bail!("{}", faults.join("\n"));
        }
        Ok(plan)
    }

    /// A path of the plan, as it is from anywhere.
    pub fn path(&self, path: &Path) -> PathBuf {
        self.directory.join(path)
    }

    /// Base URL for callers.
    pub fn gateway_address(&self) -> &str {
        let gateway = &self.gateway;
        let haproxy = gateway.haproxy.as_ref().map(|haproxy| &haproxy.address);
        let nginx = gateway.nginx.as_ref().map(|nginx| &nginx.address);
        let kubernetes = gateway.kubernetes.as_ref().map(|route| &route.address);
        haproxy.or(nginx).or(kubernetes).map_or("", String::as_str)
    }

    fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        let mut fault = |key: &str, value: &dyn std::fmt::Debug, allowed: &str| {
            faults.push(format!("{key}: {value:?} must be {allowed}"));
        };
        if self.rollout_version != ROLLOUT_VERSION {
            fault("rollout_version", &self.rollout_version, "1");
        }
        let is_name = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        if self.id.is_empty() || self.id.len() > 40 || !self.id.bytes().all(is_name) {
            fault(
                "id",
                &self.id,
                "1 to 40 lower-case letters, digits and hyphens",
            );
        }
        for (name, version) in [("stable", &self.stable), ("canary", &self.canary)] {
            for (key, url) in [("endpoint", &version.endpoint), ("admin", &version.admin)] {
                if !is_url(url) {
                    fault(&format!("{name}.{key}"), url, URL);
                }
            }
            if !is_sha256(&version.digest) {
                let allowed = "a bundle digest, 64 lower-case hexadecimal digits";
                fault(&format!("{name}.digest"), &version.digest, allowed);
            }
            for (key, command) in [("start", &version.start), ("stop", &version.stop)] {
                if command.as_ref().is_some_and(Vec::is_empty) {
                    fault(&format!("{name}.{key}"), command, COMMAND);
                }
            }
        }
        if self.stable.endpoint == self.canary.endpoint {
            let allowed = "another address than stable.endpoint";
            fault("canary.endpoint", &self.canary.endpoint, allowed);
        }
        for (key, command) in [("preflight", &self.preflight), ("verify", &self.verify)] {
            if command.as_ref().is_some_and(Vec::is_empty) {
                fault(key, command, COMMAND);
            }
        }
        let gateway = &self.gateway;
        let kinds = usize::from(gateway.haproxy.is_some())
            + usize::from(gateway.nginx.is_some())
            + usize::from(gateway.kubernetes.is_some());
        if kinds != 1 {
            let allowed = "exactly one of haproxy, nginx and kubernetes";
            fault("gateway", &format!("{kinds} kinds"), allowed);
        } else if !is_url(self.gateway_address()) {
            fault("gateway.*.address", &self.gateway_address(), URL);
        }
        if let Some(route) = &gateway.kubernetes
            && route.kubectl.is_empty()
        {
            fault("gateway.kubernetes.kubectl", &route.kubectl, COMMAND);
        }
        if !is_url(&self.prometheus) {
            fault("prometheus", &self.prometheus, URL);
        }
        let grows = self.steps.windows(2).all(|pair| pair[0] < pair[1]);
        if !grows || self.steps.first() == Some(&0) || self.steps.last() != Some(&100) {
            let allowed = "percentages from 1, each greater than the one before, the last 100";
            fault("steps", &self.steps, allowed);
        }
        if self.steps.len() == 1 && self.gates.iter().any(Gate::compares) {
            let allowed =
                "at least two steps where a gate compares: at 100 % stable has no figures";
            fault("steps", &self.steps, allowed);
        }
        for (key, value, most) in [
            ("ready_s", self.ready_s, 86_400),
            ("bake_s", self.bake_s, 604_800),
            ("check_s", self.check_s, 3600),
            ("drain_s", self.drain_s, 86_400),
            ("min_samples", self.min_samples, 1_000_000_000),
        ] {
            if value == 0 || value > most {
                fault(key, &value, &format!("a whole number from 1 to {most}"));
            }
        }
        if self.gates.is_empty() {
            fault(
                "gates",
                &"none",
                "at least one gate: without one nothing stops a bad canary",
            );
        }
        for (index, gate) in self.gates.iter().enumerate() {
            let key = format!("gates[{index}]");
            match &gate.query {
                None if Metric::named(&gate.metric).is_none() => {
                    let allowed = format!("one of {}, or come with a query", Metric::names());
                    fault(&format!("{key}.metric"), &gate.metric, &allowed);
                }
                Some(query) if !query.contains("{version}") => {
                    fault(&format!("{key}.query"), query, "a query with {version}");
                }
                Some(_) if Metric::named(&gate.metric).is_some() => {
                    let allowed = "another name than a known metric's, since it has a query";
                    fault(&format!("{key}.metric"), &gate.metric, allowed);
                }
                _ => {}
            }
            let bounds = [
                ("min", gate.min),
                ("max", gate.max),
                ("min_ratio", gate.min_ratio),
                ("max_ratio", gate.max_ratio),
                ("max_difference", gate.max_difference),
            ];
            if bounds.iter().all(|(_, bound)| bound.is_none()) {
                let allowed = "a gate with min, max, min_ratio, max_ratio or max_difference";
                fault(&key, &gate.metric, allowed);
            }
            for (name, bound) in bounds {
                if let Some(bound) = bound
                    && (!bound.is_finite() || bound < 0.0)
                {
                    fault(&format!("{key}.{name}"), &bound, "a number from 0");
                }
            }
        }
        faults
    }
}

const URL: &str = "an address such as http://127.0.0.1:8080";
const COMMAND: &str = "a list of a program and its arguments, or null";

fn is_url(text: &str) -> bool {
    let rest = text
        .strip_prefix("http://")
        .or_else(|| text.strip_prefix("https://"));
    rest.is_some_and(|rest| !rest.is_empty() && !rest.contains(char::is_whitespace))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shipped() -> String {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/rollout/plan.yaml");
        fs::read_to_string(file).unwrap()
    }

    fn parse(text: &str) -> anyhow::Result<Plan> {
        Plan::parse(text, PathBuf::from("/"))
    }

    #[test]
    fn the_shipped_plan_shows_every_default_and_reads_back_from_what_is_kept_of_it() {
        let plan = parse(&shipped()).unwrap();
        let needed = [
            "rollout_version:",
            "id:",
            "stable:",
            "canary:",
            "gateway:",
            "prometheus:",
            "gates:",
        ];
        let mut keeps = false;
        let mut least = String::new();
        for line in shipped().lines() {
            if line.starts_with(|first: char| first.is_ascii_lowercase()) {
                keeps = needed.iter().any(|key| line.starts_with(key));
            }
            if keeps {
                least += line;
                least.push('\n');
            }
        }
        let mut least = parse(&least).unwrap();
        assert!(plan.verify.is_some() && least.verify.is_none());
        least.verify = plan.verify.clone();
        assert_eq!(least, plan);
        assert_eq!(parse(&serde_yaml::to_string(&plan).unwrap()).unwrap(), plan);
    }

    #[test]
    fn everything_that_is_wrong_is_said_at_once_with_its_key() {
        for (from, to, key) in [
            (
                "rollout_version: 1",
                "rollout_version: 2",
                "rollout_version",
            ),
            ("id: example", "id: Example", "id: "),
            (
                "http://127.0.0.1:8090\n  admin",
                "http://127.0.0.1:8080\n  admin",
                "canary.endpoint",
            ),
            (
                "http://127.0.0.1:8091\n",
                "127.0.0.1:8091\n",
                "canary.admin",
            ),
            ("digest: 7a1d", "digest: 7A1D", "stable.digest"),
            ("stop: null\n\n", "stop: []\n\n", "canary.stop"),
            ("[1, 5, 25, 50, 100]", "[5, 1, 100]", "steps"),
            ("[1, 5, 25, 50, 100]", "[1, 50]", "steps"),
            ("[1, 5, 25, 50, 100]", "[0, 100]", "steps"),
            ("[1, 5, 25, 50, 100]", "[100]", "steps"),
            ("bake_s: 900", "bake_s: 0", "bake_s"),
            ("min_samples: 200", "min_samples: 0", "min_samples"),
            ("metric: restarts", "metric: restart", "gates[8].metric"),
            ("restarts, max: 0", "restarts", "gates[8]"),
            ("restarts, max: 0", "restarts, max: -1", "gates[8].max"),
            ("restarts, max: 0", "restarts, max: .nan", "gates[8].max"),
            (
                "restarts, max: 0",
                "own, query: up, max: 0",
                "gates[8].query",
            ),
            (
                "restarts, max: 0",
                "restarts, query: 'up{version=\"{version}\"}', max: 0",
                "gates[8].metric",
            ),
            ("haproxy:", "nginx:", "socket"),
            ("check_s: 30", "chek_s: 30", "chek_s"),
        ] {
            let text = shipped();
            assert!(text.contains(from), "{from}");
            let wrong = text.replacen(from, to, 1);
            let error = format!("{:#}", parse(&wrong).expect_err(to));
            assert!(error.contains(key), "{to}: {error}");
        }
        let two = shipped()
            .replace("bake_s: 900", "bake_s: 0")
            .replace("drain_s: 620", "drain_s: 0");
        let error = format!("{:#}", parse(&two).unwrap_err());
        assert_eq!(error.lines().count(), 2, "{error}");
    }
}
