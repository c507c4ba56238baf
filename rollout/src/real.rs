//! The world as it is: commands, the versions' admin listeners, the gateway, Prometheus.

use std::fs;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::clock;
use crate::gates::{self, Window};
use crate::gateway::{self, Gateway};
use crate::machine::{self, Finding, Phase, State, Verdict};
use crate::plan::{Plan, Version};
use crate::prometheus::Server;
use crate::runner::World;
use crate::store::{Request, Store};

/// Most time of a question to an admin listener.
const ADMIN_TIMEOUT: Duration = Duration::from_secs(5);
/// Most time of the smoke request.
const SMOKE_TIMEOUT: Duration = Duration::from_secs(120);
/// Most time from a canary that is ready to a gateway that knows.
const SMOKE_PATIENCE: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(200);
/// The metric that says how many answers a version still gives.
const IN_FLIGHT: &str = "outrider_http_requests_in_flight";

/// The world of a plan.
pub struct Real<'a> {
    plan: &'a Plan,
    store: &'a Store,
    gateway: Box<dyn Gateway>,
    prometheus: Server,
    agent: ureq::Agent,
}

impl<'a> Real<'a> {
    /// The world of `plan`, with its state in `store`.
    pub fn new(plan: &'a Plan, store: &'a Store) -> anyhow::Result<Self> {
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(ADMIN_TIMEOUT))
            .build();
        Ok(Self {
            plan,
            store,
            gateway: gateway::of(plan)?,
            prometheus: Server::new(&plan.prometheus),
            agent: config.into(),
        })
    }

    fn admin_token(&self, version: &Version) -> anyhow::Result<Option<String>> {
        let file = version.admin_token_file.as_ref();
        file.map(|file| secret(&self.plan.path(file))).transpose()
    }

    fn admin(&self, version: &Version, path: &str) -> anyhow::Result<(u16, String)> {
        let url = format!("{}{path}", version.admin.trim_end_matches('/'));
        let mut request = self.agent.get(&url);
        if let Some(token) = self.admin_token(version)? {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let mut response = request.call().with_context(|| url.clone())?;
        let text = response.body_mut().read_to_string().context(url)?;
        Ok((response.status().as_u16(), text))
    }

    /// What is wrong with a version: not ready, or another bundle.
    fn fault(&self, version: &Version) -> Option<String> {
        let (status, text) = match self.admin(version, "/readyz") {
            Ok(answer) => answer,
            Err(error) => return Some(format!("{error:#}")),
        };
        let body: Value = serde_json::from_str(&text).unwrap_or_default();
        if status != 200 {
            let detail = body["detail"].as_str().unwrap_or("no reason given");
            return Some(format!("{}/readyz is {status}: {detail}", version.admin));
        }
        let digest = body["bundle_digest"].as_str().unwrap_or_default();
        (digest != version.digest).then(|| {
            format!(
                "{} serves the bundle {digest:?}, and the plan says {}",
                version.admin, version.digest
            )
        })
    }

    /// Runs a command to its end, or to an operator's request to abort.
    fn command(&self, command: &[String]) -> anyhow::Result<Option<ExitStatus>> {
        let (program, arguments) = command.split_first().context("an empty command")?;
        let mut run = Command::new(program);
        run.args(arguments)
            .current_dir(&self.plan.directory)
            .stdin(Stdio::null())
            .process_group(0);
        if let Some(file) = &self.plan.api_key_file {
            run.env("OUTRIDER_VERIFY_API_KEY", secret(&self.plan.path(file))?);
        }
        let mut child = run
            .spawn()
            .with_context(|| format!("cannot run {program}"))?;
        loop {
            if let Some(status) = child.try_wait()? {
                return Ok(Some(status));
            }
            let request = self.store.request()?;
            if request.is_some_and(|request| request.command == machine::Command::Abort) {
                end(&mut child)?;
                return Ok(None);
            }
            thread::sleep(POLL);
        }
    }

    /// Runs a command of the plan that passes by succeeding; one that the plan leaves out passes too.
    fn must_succeed(&self, name: &str, command: Option<&Vec<String>>) -> Finding {
        let Some(command) = command else {
            return pass(format!("no {name} command"));
        };
        let text = command.join(" ");
        match self.command(command) {
            Ok(Some(status)) if status.success() => pass(format!("{text}: {status}")),
            Ok(Some(status)) => {
                let detail = format!("{name} failed: {text}: {status}");
                Finding::new(Verdict::Fail, detail, json!(status.code()))
            }
            Ok(None) => aborted(name),
            Err(error) => fail(format!("{name} failed: {error:#}")),
        }
    }

    fn preflight(&self) -> Finding {
        match self.gateway.percent() {
            Err(error) => return fail(format!("the gateway: {error:#}")),
            Ok(Some(0)) => {}
            Ok(found) => {
                let found = found.map_or("no clear share".to_owned(), |percent| {
                    format!("{percent} %")
                });
                return fail(format!(
                    "the gateway gives the canary {found}, and must give it 0 % before a rollout"
                ));
            }
        }
        if let Some(fault) = self.fault(&self.plan.stable) {
            return fail(format!("stable: {fault}"));
        }
        self.must_succeed("preflight", self.plan.preflight.as_ref())
    }

    fn start(&self) -> Finding {
        let canary = &self.plan.canary;
        let ready = |how: &str| {
            let detail = format!("the canary {how}ready with the bundle of the plan");
            Finding::new(Verdict::Pass, detail, json!(canary.digest))
        };
        let Some(mut fault) = self.fault(canary) else {
            return ready("is ");
        };
        let started = self.must_succeed("start", canary.start.as_ref());
        if started.verdict != Verdict::Pass {
            return started;
        }
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(self.plan.ready_s) {
            let request = self.store.request().ok().flatten();
            if request.is_some_and(|request| request.command == machine::Command::Abort) {
                return aborted("start");
            }
            match self.fault(canary) {
                None => return ready("was started and is "),
                Some(now) => fault = now,
            }
            thread::sleep(POLL);
        }
        fail(format!(
            "the canary is not ready after {} s: {fault}",
            self.plan.ready_s
        ))
    }

    /// One completion on the forced road.
    fn smoke(&self) -> anyhow::Result<Finding> {
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(SMOKE_TIMEOUT))
            .build();
        let agent: ureq::Agent = config.into();
        let base = self.plan.gateway_address().trim_end_matches('/');
        let key = self.plan.api_key_file.as_ref();
        let key = key.map(|file| secret(&self.plan.path(file))).transpose()?;
        let bearer = key.map(|key| format!("Bearer {key}"));
        let url = format!("{base}/v1/models");
        let began = Instant::now();
        let mut models = loop {
            let mut request = agent.get(&url).header("X-Outrider-Version", "canary");
            if let Some(bearer) = &bearer {
                request = request.header("authorization", bearer);
            }
            let models = request.call().with_context(|| url.clone())?;
            // A gateway that checks a version's health needs a moment to see that it is there.
            if models.status() != 503 || began.elapsed() > SMOKE_PATIENCE {
                break models;
            }
            thread::sleep(POLL);
        };
        let by = models.headers().get("x-outrider-version").cloned();
        let by = by.as_ref().and_then(|by| by.to_str().ok());
        // A gateway that doesn't say who answered is believed about the header it was asked by.
        if by.is_some_and(|by| by != "canary") {
            let detail = format!("{url}: {by:?} answered in place of the canary");
            return Ok(fail(detail));
        }
        let text = models.body_mut().read_to_string()?;
        let body: Value = serde_json::from_str(&text).unwrap_or_default();
        let Some(model) = body.pointer("/data/0/id").and_then(Value::as_str) else {
            return Ok(fail(format!("{url}: {} {text:.200}", models.status())));
        };
        let url = format!("{base}/v1/completions");
        let mut request = agent
            .post(&url)
            .header("X-Outrider-Version", "canary")
            .content_type("application/json");
        if let Some(bearer) = &bearer {
            request = request.header("authorization", bearer);
        }
        let ask = json!({ "model": model, "prompt": "The sea", "max_tokens": 8, "temperature": 0 });
        let mut answer = request.send(ask.to_string()).with_context(|| url.clone())?;
        let status = answer.status().as_u16();
        let text = answer.body_mut().read_to_string()?;
        let body: Value = serde_json::from_str(&text).unwrap_or_default();
        let completion = body.pointer("/choices/0/text").and_then(Value::as_str);
        Ok(match completion {
            Some(completion) if status == 200 && !completion.is_empty() => Finding::new(
                Verdict::Pass,
                "the canary answers through the gateway",
                json!({ "status": status, "answered_by": by }),
            ),
            _ => fail(format!("{url}: {status} {text:.200}")),
        })
    }

    fn verify(&self) -> Finding {
        let Some(command) = &self.plan.verify else {
            let detail = "no verify command in the plan";
            return Finding::new(Verdict::Pass, detail, Value::Null);
        };
        match self.command(command) {
            Ok(None) => aborted("verify"),
            Err(error) => fail(format!("verify: {error:#}")),
            Ok(Some(status)) => {
                let (verdict, meaning) = match status.code() {
                    Some(0) => (Verdict::Pass, "pass"),
                    Some(1) => (Verdict::Fail, "a check failed, or an answer differs"),
                    Some(2) => (Verdict::Inconclusive, "could not run"),
                    Some(3) => (Verdict::Inconclusive, "inconclusive"),
                    Some(4) => (Verdict::Fail, "below the gate"),
                    _ => (Verdict::Fail, "not an exit code of a verdict"),
                };
                let evidence = json!({ "command": command, "exit_code": status.code() });
                Finding::new(verdict, format!("verify: {meaning}"), evidence)
            }
        }
    }

    /// Waits until a version has no answer left to give, then stops it.
    fn stop(&self, version: &Version, name: &str, since_ms: u64) -> Finding {
        let until_ms = since_ms + self.plan.drain_s * 1000;
        let mut left = None;
        while clock::now_ms() < until_ms {
            match self.in_flight(version) {
                Ok(0) => {
                    left = Some(Ok(0));
                    break;
                }
                // Who can't be asked any more can't be waited for.
                Err(error) => {
                    left = Some(Err(format!("{error:#}")));
                    break;
                }
                Ok(requests) => left = Some(Ok(requests)),
            }
            thread::sleep(POLL);
        }
        let drained = match &left {
            Some(Ok(0)) => format!("{name} has no request left"),
            Some(Ok(requests)) => {
                format!("{name} still had {requests} requests after the drain time")
            }
            Some(Err(error)) => format!("{name} can't be asked for its requests: {error}"),
            None => format!("the drain time of {name} is over"),
        };
        let mut stopped = self.must_succeed("stop", version.stop.as_ref());
        stopped.detail = format!("{drained}; {}", stopped.detail);
        stopped
    }

    fn in_flight(&self, version: &Version) -> anyhow::Result<u64> {
        let (status, text) = self.admin(version, "/metrics")?;
        if status != 200 {
            bail!("{}/metrics is {status}", version.admin);
        }
        let value = text.lines().find_map(|line| {
            let (name, value) = line.rsplit_once(' ')?;
            (name == IN_FLIGHT).then(|| value.parse::<f64>().ok())?
        });
        Ok(value.with_context(|| format!("{}/metrics has no {IN_FLIGHT}", version.admin))? as u64)
    }
}

impl World for Real<'_> {
    fn now_ms(&mut self) -> u64 {
        clock::now_ms()
    }

    fn wait(&mut self, ms: u64) {
        thread::sleep(Duration::from_millis(ms));
    }

    fn save(&mut self, state: &State) -> anyhow::Result<()> {
        self.store.save(state)?;
        self.store.follow(&state.record)
    }

    fn request(&mut self) -> anyhow::Result<Option<Request>> {
        self.store.request()
    }

    fn clear_request(&mut self) -> anyhow::Result<()> {
        self.store.clear_request()
    }

    fn gateway(&mut self) -> anyhow::Result<Option<u8>> {
        self.gateway.percent()
    }

    fn set_gateway(&mut self, percent: u8) -> anyhow::Result<()> {
        self.gateway.set(percent)
    }

    fn switch_speculation_off(&mut self) -> anyhow::Result<()> {
        let canary = &self.plan.canary;
        let url = format!("{}/admin/speculation", canary.admin.trim_end_matches('/'));
        let mut request = self.agent.put(&url).content_type("application/json");
        if let Some(token) = self.admin_token(canary)? {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let mut response = request
            .send(json!({ "enabled": false }).to_string())
            .with_context(|| url.clone())?;
        if response.status() != 200 {
            let text = response.body_mut().read_to_string().unwrap_or_default();
            bail!("PUT {url}: {} {text:.200}", response.status());
        }
        Ok(())
    }

    fn perform(&mut self, state: &State) -> Finding {
        match state.phase {
            Phase::Preflight => self.preflight(),
            Phase::Start => self.start(),
            Phase::Smoke => self
                .smoke()
                .unwrap_or_else(|error| fail(format!("smoke: {error:#}"))),
            Phase::Verify => self.verify(),
            Phase::Retire => self.stop(&self.plan.stable, "stable", state.window_from_ms),
            Phase::RollBack => self.stop(&self.plan.canary, "the canary", state.window_from_ms),
            Phase::Step(_) | Phase::Complete | Phase::RolledBack => {
                unreachable!("steps are looked at, and after the end nothing is done")
            }
        }
    }

    fn look(&mut self, state: &State) -> Finding {
        let now_ms = self.now_ms();
        let window = Window {
            end_s: now_ms as f64 / 1000.0,
            length_s: (now_ms.saturating_sub(state.window_from_ms) / 1000).max(1),
            percent: state.percent(self.plan).unwrap_or(0),
        };
        gates::look(self.plan, &self.prometheus, window, &state.stable_figures)
    }

    fn canary_fault(&mut self) -> Option<String> {
        self.fault(&self.plan.canary)
    }

    fn tell(&mut self, text: &str) {
        crate::cli::tell(text);
    }
}

fn pass(detail: String) -> Finding {
    Finding::new(Verdict::Pass, detail, Value::Null)
}

fn fail(detail: String) -> Finding {
    Finding::new(Verdict::Fail, detail, Value::Null)
}

fn aborted(name: &str) -> Finding {
    let detail = format!("{name} was ended by an operator's request");
    Finding::new(Verdict::Inconclusive, detail, Value::Null)
}

fn end(child: &mut Child) -> anyhow::Result<()> {
    killpg(Pid::from_raw(child.id().cast_signed()), Signal::SIGKILL)
        .context("cannot end a command")?;
    child.wait()?;
    Ok(())
}

fn secret(file: &std::path::Path) -> anyhow::Result<String> {
    let text =
        fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    Ok(text.trim().to_owned())
}
