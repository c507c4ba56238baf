//! What a drill runs on: two places for servers, HAProxy and Prometheus with the shipped configurations, all on free loopback ports.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use outrider_rollout::gateway::Gateway as _;
use outrider_rollout::gateway::haproxy::Haproxy;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::damage;
use crate::server_process::free_addresses;
use crate::workspace::Workspace;

/// Between two looks at something that is waited for.
pub const POLL: Duration = Duration::from_millis(20);
/// Most time of a start, on a machine that does other work.
const DEADLINE: Duration = Duration::from_secs(180);

/// Starts a server unless it runs, and comes back at once.
const START: &str = r#"#!/bin/sh
# Started once, however often this is called.
set -eu
cd "$(dirname "$0")"
if [ -e NAME.pid ] && grep -qs '^State:[[:space:]]*[^Z]' "/proc/$(cat NAME.pid)/status"; then exit 0; fi
COMMAND >> NAME.log 2>&1 &
echo $! > NAME.pid
"#;

/// Stops a server and comes back when it has ended.
const STOP: &str = r#"#!/bin/sh
set -eu
cd "$(dirname "$0")"
[ -e NAME.pid ] || exit 0
pid=$(cat NAME.pid)
kill -TERM "$pid" 2> /dev/null || true
while grep -qs '^State:[[:space:]]*[^Z]' "/proc/$pid/status"; do sleep 0.1; done
rm -f NAME.pid
"#;

/// A proxy before a version that answers one request in five with an error, when the map of `FOLDER` says so.
const ERRORS: &str = r#"global
  stats socket FOLDER/errors.sock mode 600 level admin
defaults
  mode http
  timeout connect 5s
  timeout client 120s
  timeout server 120s
frontend errors
  bind OUTSIDE
  http-request track-sc0 int(1) table counter if METH_POST
  http-request set-var(txn.percent) "str(canary),map_str_int(FOLDER/errors.map,0)"
  http-request set-var(txn.number) sc0_inc_gpc0(counter),mod(5) if METH_POST
  http-request return status 500 content-type application/json string "{\"error\":{\"message\":\"drill\"}}" if METH_POST { var(txn.percent) -m int gt 0 } { var(txn.number) -m int 0 }
  default_backend version
backend version
  server version INSIDE
backend counter
  stick-table type integer size 1 store gpc0
"#;

/// A process with its children, killed when it is dropped.
pub struct Process(Child);

impl Process {
    /// Starts a program of a Debian package, its output into a file.
    pub fn start(command: &mut Command, log: &Path) -> anyhow::Result<Self> {
        let output = fs::File::create(log)?;
        command
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .process_group(0);
        let program = command.get_program().to_owned();
        let child = command.spawn();
        let explain = || {
            format!(
                "cannot run {program:?}: the drill needs the Debian packages haproxy and prometheus"
            )
        };
        child.map(Self).with_context(explain)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself; then there is nothing left to do.
        let _ = killpg(Pid::from_raw(self.0.id().cast_signed()), Signal::SIGKILL);
        let _ = self.0.wait();
    }
}

/// A place for a server.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Name of its files.
    pub name: &'static str,
    /// Address of the service.
    pub listen: SocketAddr,
    /// Address of its admin listener.
    pub admin: SocketAddr,
}

/// Programs and inputs.
pub struct Inputs {
    /// `outrider-server`.
    pub server: PathBuf,
    /// `outrider-verify`.
    pub verify: PathBuf,
    /// The ONNX Runtime library.
    pub onnxruntime: PathBuf,
    /// The reference pair.
    pub bundle: PathBuf,
}

/// Everything that runs.
pub struct World {
    inputs: Inputs,
    /// Digest of the reference pair.
    pub digest: String,
    /// The version that serves.
    pub stable: Place,
    /// The version that shall serve.
    pub canary: Place,
    /// Where callers connect.
    pub gateway_address: SocketAddr,
    /// What divides them.
    pub gateway: Haproxy,
    prometheus_address: SocketAddr,
    agent: ureq::Agent,
    _processes: Vec<Process>,
    // Last, so that the processes are gone before their files.
    directory: TempDir,
}

impl World {
    /// Starts the gateway and Prometheus.
    pub fn start(workspace: &Workspace, inputs: Inputs) -> anyhow::Result<Self> {
        // Beside the bundles, so that their files can be linked.
        let directory = tempfile::Builder::new()
            .prefix(".drill-")
            .tempdir_in(workspace.bundles())?;
        let folder = directory.path();
        let place = |name| {
            let (listen, admin) = free_addresses()?;
            anyhow::Ok(Place {
                name,
                listen,
                admin,
            })
        };
        let (stable, canary) = (place("stable")?, place("canary")?);
        let (gateway_address, gateway_metrics) = free_addresses()?;
        let (prometheus_address, _) = free_addresses()?;
        let configs = workspace.root().join("configs");
        let gateway = Haproxy {
            socket: folder.join("haproxy.sock"),
            map: folder.join("split.map"),
        };
        fs::copy(configs.join("haproxy/split.map"), &gateway.map)?;
        let haproxy = Process::start(
            Command::new("haproxy")
                .args(["-db", "-f"])
                .arg(configs.join("haproxy/outrider.cfg"))
                .env("OUTRIDER_GATEWAY", gateway_address.to_string())
                .env("OUTRIDER_STABLE", stable.listen.to_string())
                .env(
                    "OUTRIDER_STABLE_ADMIN_PORT",
                    stable.admin.port().to_string(),
                )
                .env("OUTRIDER_CANARY", canary.listen.to_string())
                .env(
                    "OUTRIDER_CANARY_ADMIN_PORT",
                    canary.admin.port().to_string(),
                )
                .env("OUTRIDER_SPLIT_MAP", &gateway.map)
                .env("OUTRIDER_GATEWAY_SOCKET", &gateway.socket)
                .env("OUTRIDER_GATEWAY_METRICS", gateway_metrics.to_string()),
            &folder.join("haproxy.log"),
        )?;
        let rules = configs.join("prometheus");
        let mut config = fs::read_to_string(rules.join("prometheus.yml"))?;
        for (from, to) in [
            ("127.0.0.1:8081", stable.admin.to_string()),
            ("127.0.0.1:8091", canary.admin.to_string()),
            ("127.0.0.1:8405", gateway_metrics.to_string()),
            // Bake times are seconds here.
            ("interval: 5s", "interval: 1s".to_owned()),
            ("scrape_timeout: 4s", "scrape_timeout: 1s".to_owned()),
        ] {
            if !config.contains(from) {
                bail!("configs/prometheus/prometheus.yml has no {from}");
            }
            config = config.replace(from, &to);
        }
        fs::write(folder.join("prometheus.yml"), config)?;
        for file in ["outrider.rules.yml", "outrider.alerts.yml"] {
            fs::copy(rules.join(file), folder.join(file))?;
        }
        let prometheus = Process::start(
            Command::new("prometheus")
                .arg(format!(
                    "--config.file={}",
                    folder.join("prometheus.yml").display()
                ))
                .arg(format!(
                    "--storage.tsdb.path={}",
                    folder.join("series").display()
                ))
                .arg(format!("--web.listen-address={prometheus_address}")),
            &folder.join("prometheus.log"),
        )?;
        let agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(Duration::from_secs(5)))
            .build();
        let world = Self {
            digest: damage::load(&inputs.bundle)?.digest(),
            inputs,
            stable,
            canary,
            gateway_address,
            gateway,
            prometheus_address,
            agent: agent.into(),
            _processes: vec![haproxy, prometheus],
            directory,
        };
        world.write_scripts(stable, &world.inputs.bundle, stable.listen, &[])?;
        let ready = format!("http://{prometheus_address}/-/ready");
        world.wait("Prometheus", || world.status(&ready, None) == Some(200))?;
        Ok(world)
    }

    /// A file of the drill.
    pub fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The reference pair.
    pub fn bundle(&self) -> &Path {
        &self.inputs.bundle
    }

    /// Stable serves everybody, and no canary is there.
    pub fn reset(&self) -> anyhow::Result<()> {
        self.script(self.stable, "start")?;
        let ready = format!("http://{}/readyz", self.stable.admin);
        self.wait("stable", || self.status(&ready, None) == Some(200))?;
        let models = format!("http://{}/v1/models", self.gateway_address);
        self.wait("the gateway's way to stable", || {
            self.status(&models, Some("stable")) == Some(200)
        })?;
        self.gateway.set(0)?;
        self.stop_canary()
    }

    /// Stops the canary, if one is there.
    pub fn stop_canary(&self) -> anyhow::Result<()> {
        if self.file("canary-stop").exists() {
            self.script(self.canary, "stop")?;
        }
        Ok(())
    }

    /// What the next canary is: `bundle` on `listen` with further settings.
    pub fn write_canary(
        &self,
        bundle: &Path,
        listen: SocketAddr,
        settings: &[&str],
    ) -> anyhow::Result<()> {
        self.write_scripts(self.canary, bundle, listen, settings)
    }

    fn write_scripts(
        &self,
        place: Place,
        bundle: &Path,
        listen: SocketAddr,
        settings: &[&str],
    ) -> anyhow::Result<()> {
        let quoted = |path: &Path| format!("'{}'", path.display());
        let mut command = format!(
            "{} --bundle {} --listen {listen} --admin-listen {}",
            quoted(&self.inputs.server),
            quoted(bundle),
            place.admin
        );
        let library = format!(
            "serving.runtime.onnxruntime_library={}",
            self.inputs.onnxruntime.display()
        );
        let common = [
            library.as_str(),
            "serving.runtime.max_concurrency=4",
            "serving.runtime.context_tokens=1024",
            // Drafts are checked whether they pay or not, so that their acceptance is measured.
            "serving.speculative.adaptive_width=false",
        ];
        for setting in common.iter().chain(settings) {
            command += &format!(" --set '{setting}'");
        }
        for (task, text) in [("start", START), ("stop", STOP)] {
            let text = text
                .replace("NAME", place.name)
                .replace("COMMAND", &command);
            fs::write(self.file(&format!("{}-{task}", place.name)), text)?;
        }
        Ok(())
    }

    fn script(&self, place: Place, task: &str) -> anyhow::Result<()> {
        let file = self.file(&format!("{}-{task}", place.name));
        let status = Command::new("sh").arg(&file).status()?;
        if !status.success() {
            bail!("{}: {status}", file.display());
        }
        Ok(())
    }

    /// A proxy in the canary's place before `inside`, and the map that switches its errors on.
    pub fn start_errors(&self, inside: SocketAddr) -> anyhow::Result<(Process, Haproxy)> {
        let folder = self.directory.path().display().to_string();
        let text = ERRORS
            .replace("FOLDER", &folder)
            .replace("OUTSIDE", &self.canary.listen.to_string())
            .replace("INSIDE", &inside.to_string());
        let config = self.file("errors.cfg");
        fs::write(&config, text)?;
        let switch = Haproxy {
            socket: self.file("errors.sock"),
            map: self.file("errors.map"),
        };
        fs::write(&switch.map, "canary 0\n")?;
        let process = Process::start(
            Command::new("haproxy").args(["-db", "-f"]).arg(config),
            &self.file("errors.log"),
        )?;
        self.wait("the proxy of errors", || switch.percent().is_ok())?;
        Ok((process, switch))
    }

    /// Process id of the canary.
    pub fn canary_pid(&self) -> anyhow::Result<Pid> {
        let text = fs::read_to_string(self.file("canary.pid"))?;
        Ok(Pid::from_raw(text.trim().parse()?))
    }

    /// The plan of a rollout to `digest`.
    pub fn plan(
        &self,
        id: &str,
        digest: &str,
        bake_s: u64,
        steps: &[u8],
        min_samples: u64,
    ) -> Value {
        let version = |place: Place, digest: &str| {
            let script = |task| {
                [
                    "sh".to_owned(),
                    self.file(&format!("{}-{task}", place.name))
                        .display()
                        .to_string(),
                ]
            };
            json!({
                "endpoint": format!("http://{}", place.listen),
                "admin": format!("http://{}", place.admin),
                "digest": digest,
                "start": script("start"),
                "stop": script("stop"),
            })
        };
        json!({
            "rollout_version": 1,
            "id": id,
            "stable": version(self.stable, &self.digest),
            "canary": version(self.canary, digest),
            "gateway": { "haproxy": {
                "address": format!("http://{}", self.gateway_address),
                "socket": self.gateway.socket,
                "map": self.gateway.map,
            }},
            "prometheus": format!("http://{}", self.prometheus_address),
            "verify": [
                self.inputs.verify, "lossless",
                "--endpoint", format!("http://{}", self.canary.listen),
                "--reference", format!("http://{}", self.stable.listen),
                "--scenarios", "chat", "--prompts-per-scenario", "1", "--max-tokens", "16",
                "--min-compared-tokens", "20", "--assume-drafting",
            ],
            "ready_s": DEADLINE.as_secs(),
            "steps": steps,
            "bake_s": bake_s,
            "check_s": 1,
            "min_samples": min_samples,
            "drain_s": 60,
            "gates": [
                { "metric": "error_ratio", "max": 0.01 },
                { "metric": "gateway_error_ratio", "max": 0.05 },
                { "metric": "truncated_ratio", "max": 0.01 },
                { "metric": "turned_away_ratio", "max": 0.05 },
                // Wide, since the machine is shared: a version that is slow here is ten times slower.
                { "metric": "inter_token_mean_s", "max_ratio": 4 },
                // A bound of its own, since a ratio of two means over a handful of requests says little: a draft that is never right has 1.
                { "metric": "acceptance_length_tokens", "min": 1.2 },
                { "metric": "restarts", "max": 0 },
                { "metric": "memory_bytes", "max_ratio": 3 },
            ],
        })
    }

    fn status(&self, url: &str, version: Option<&str>) -> Option<u16> {
        let mut request = self.agent.get(url);
        if let Some(version) = version {
            request = request.header("X-Outrider-Version", version);
        }
        Some(request.call().ok()?.status().as_u16())
    }

    fn wait(&self, what: &str, holds: impl Fn() -> bool) -> anyhow::Result<()> {
        let began = Instant::now();
        while !holds() {
            if began.elapsed() > DEADLINE {
                let logs = ["haproxy", "prometheus", "stable", "errors"].map(|name| {
                    let log = fs::read_to_string(self.file(&format!("{name}.log")));
                    let log = log.unwrap_or_default();
                    let tail = log.lines().rev().take(10).collect::<Vec<_>>();
                    format!("{name}: {tail:#?}")
                });
                bail!(
                    "{what} is not ready after {DEADLINE:?}\n{}",
                    logs.join("\n")
                );
            }
            thread::sleep(POLL);
        }
        Ok(())
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for place in [self.stable, self.canary] {
            let pid = fs::read_to_string(self.file(&format!("{}.pid", place.name)));
            if let Some(pid) = pid.ok().and_then(|text| text.trim().parse().ok()) {
                // It may have ended by itself; then there is nothing left to do.
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
        }
    }
}
