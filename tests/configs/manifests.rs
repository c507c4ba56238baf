//! `configs/kubernetes`, held to the schemas of its kinds, without a cluster.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, ensure};
use outrider_server::config::{ENVIRONMENT_PREFIX, KEYS};
use serde::Deserialize;
use serde_json::{Value, json};
use xtask::python::Python;

use crate::repository;

/// Seconds that a start may take at least: what 40 GB need from a disk that reads 100 MB a second, and some to spare.
const LEAST_LOAD_S: u64 = 600;
const OVERLAYS: [&str; 5] = ["cpu", "cuda", "canary", "image-volume", "argo-rollouts"];

pub fn manifests_pass_and_every_misspelled_field_is_caught() -> anyhow::Result<()> {
    run_python("tests/python/check_manifests.py", &["--typos"])
}

pub fn objects_of_argo_rollouts_made_of_a_plan_pass_the_same_check() -> anyhow::Result<()> {
    let plan = fs::read_to_string(repository("configs/rollout/plan.yaml"))?;
    let mut plan: Value = serde_yaml::from_str(&plan)?;
    plan["gateway"] = json!({ "kubernetes": {
        "address": "http://llm.example.com",
        "namespace": "outrider",
        "route": "outrider",
    }});
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("plan.yaml");
    // JSON is YAML.
    fs::write(&file, plan.to_string())?;
    let made = Command::new(outrider_tests::fixtures::xtask_binary()?)
        .args(["rollout", "argo-rollouts"])
        .arg(&file)
        .output()?;
    ensure!(
        made.status.success(),
        "{}",
        String::from_utf8_lossy(&made.stderr)
    );
    let objects = directory.path().join("objects.yaml");
    fs::write(&objects, made.stdout)?;
    check(
        Python::find(&outrider_tests::fixtures::workspace()?)?
            .command()
            .arg(repository("tests/python/check_manifests.py"))
            .arg(objects)
            .arg("--typos"),
    )
}

pub fn rendered_manifests_are_those_of_the_overlays() -> anyhow::Result<()> {
    run_python("tests/goldens/kubernetes/render.py", &["--check"])
}

pub fn pods_end_after_their_drain_and_run_without_privileges() -> anyhow::Result<()> {
    for (path, documents) in rendered_documents()? {
        for deployment in deployments(&documents) {
            let pod = &deployment["spec"]["template"]["spec"];
            let server = &pod["containers"][0];
            let settings = server["envFrom"][0]["configMapRef"]["name"].as_str();
            let settings = documents
                .iter()
                .find(|document| document["metadata"]["name"].as_str() == settings)
                .context("the settings of a deployment are not rendered with it")?;
            let grace_ms: u64 = settings["data"]["OUTRIDER__SERVING__SHUTDOWN_GRACE_MS"]
                .as_str()
                .context("no OUTRIDER__SERVING__SHUTDOWN_GRACE_MS")?
                .parse()?;
            let pause_s = server["lifecycle"]["preStop"]["sleep"]["seconds"].as_u64();
            let pause_s = pause_s.context("no pause")?;
            let limit_s = pod["terminationGracePeriodSeconds"]
                .as_u64()
                .context("no limit")?;
            // Two seconds are for last words, see docs/operations.md.
            ensure!(
                limit_s > pause_s + grace_ms.div_ceil(1000) + 2,
                "{}: a pod is killed after {limit_s} s, but may drain for {pause_s} s and {grace_ms} ms",
                path.display()
            );
            let image = server["image"].as_str().context("no image")?;
            ensure!(
                image.contains("@sha256:"),
                "{}: {image} is not named by digest",
                path.display()
            );
            for (field, expected) in [
                (
                    "/containers/0/securityContext/readOnlyRootFilesystem",
                    Value::from(true),
                ),
                (
                    "/containers/0/securityContext/allowPrivilegeEscalation",
                    Value::from(false),
                ),
                (
                    "/containers/0/securityContext/capabilities/drop/0",
                    Value::from("ALL"),
                ),
                ("/securityContext/runAsNonRoot", Value::from(true)),
                ("/securityContext/runAsUser", Value::from(10001)),
            ] {
                ensure!(
                    pod.pointer(field) == Some(&expected),
                    "{}: {field} is not {expected}",
                    path.display()
                );
            }
        }
    }
    Ok(())
}

pub fn probes_leave_a_large_model_time_to_load() -> anyhow::Result<()> {
    for (path, documents) in rendered_documents()? {
        for deployment in deployments(&documents) {
            let server = &deployment["spec"]["template"]["spec"]["containers"][0];
            let seconds = |probe: &str| -> anyhow::Result<u64> {
                let number = |field: &str| server[probe][field].as_u64();
                let product = number("periodSeconds").zip(number("failureThreshold"));
                let (period_s, failures) =
                    product.with_context(|| format!("{probe} has no limit"))?;
                Ok(period_s * failures)
            };
            let load_s = seconds("startupProbe")?;
            let progress_s = deployment["spec"]["progressDeadlineSeconds"].as_u64();
            let progress_s = progress_s.context("no limit of progress")?;
            let path = path.display();
            ensure!(
                load_s >= LEAST_LOAD_S,
                "{path}: a pod is killed after {load_s} s of loading"
            );
            ensure!(
                progress_s > load_s,
                "{path}: a deployment fails after {progress_s} s, a pod may load for {load_s} s"
            );
            // One missed look at a server under load is no reason to take it out, or to kill it.
            ensure!(
                seconds("readinessProbe")? <= 10,
                "{path}: a dead pod is asked for too long"
            );
            ensure!(
                seconds("livenessProbe")? >= 20,
                "{path}: a busy pod is killed too soon"
            );
            for (probe, page) in [
                ("startupProbe", "/readyz"),
                ("readinessProbe", "/readyz"),
                ("livenessProbe", "/livez"),
            ] {
                ensure!(
                    server[probe]["httpGet"]["path"] == page,
                    "{path}: {probe} does not ask {page}"
                );
            }
        }
    }
    Ok(())
}

pub fn variables_are_keys_of_the_server() -> anyhow::Result<()> {
    for (path, documents) in rendered_documents()? {
        let settings = documents
            .iter()
            .filter(|document| document["kind"] == "ConfigMap")
            .filter_map(|document| document["data"].as_object())
            .flat_map(|data| data.keys().map(String::as_str));
        let variables = deployments(&documents)
            .filter_map(|deployment| {
                deployment
                    .pointer("/spec/template/spec/containers/0/env")?
                    .as_array()
            })
            .flatten()
            .filter_map(|variable| variable["name"].as_str());
        let mut seen = 0;
        for variable in settings.chain(variables) {
            let key = variable
                .strip_prefix(ENVIRONMENT_PREFIX)
                .with_context(|| format!("{}: {variable} is not the server's", path.display()))?;
            let key = key.to_lowercase().replace("__", ".");
            ensure!(
                KEYS.iter().any(|known| known.path == key),
                "{}: {variable}: the server has no key {key}",
                path.display()
            );
            seen += 1;
        }
        let has_servers = deployments(&documents).next().is_some();
        ensure!(seen > 0 || !has_servers, "{} sets nothing", path.display());
    }
    Ok(())
}

pub fn every_way_to_serve_has_its_guards() -> anyhow::Result<()> {
    for (path, documents) in rendered_documents()? {
        let name = path.file_stem().and_then(|name| name.to_str());
        let is_whole = matches!(name, Some("cpu" | "cuda" | "image-volume"));
        for kind in [
            "Deployment",
            "HTTPRoute",
            "HorizontalPodAutoscaler",
            "NetworkPolicy",
            "PodDisruptionBudget",
            "Service",
            "ServiceMonitor",
        ] {
            let has = documents.iter().any(|document| document["kind"] == kind);
            ensure!(has || !is_whole, "{} has no {kind}", path.display());
        }
    }
    Ok(())
}

/// The objects of each rendered overlay.
fn rendered_documents() -> anyhow::Result<Vec<(PathBuf, Vec<Value>)>> {
    rendered()
        .map(|path| {
            let text = fs::read_to_string(&path)?;
            let documents = serde_yaml::Deserializer::from_str(&text)
                .map(Value::deserialize)
                .collect::<Result<_, _>>()?;
            Ok((path, documents))
        })
        .collect()
}

fn deployments(documents: &[Value]) -> impl Iterator<Item = &Value> {
    documents
        .iter()
        .filter(|document| document["kind"] == "Deployment")
}

fn rendered() -> impl Iterator<Item = PathBuf> {
    OVERLAYS
        .iter()
        .map(|overlay| repository("tests/goldens/kubernetes").join(format!("{overlay}.yaml")))
}

fn run_python(script: &str, arguments: &[&str]) -> anyhow::Result<()> {
    check(
        Python::find(&outrider_tests::fixtures::workspace()?)?
            .command()
            .arg(repository(script))
            .args(rendered())
            .args(arguments),
    )
}

fn check(command: &mut Command) -> anyhow::Result<()> {
    let output = command.output()?;
    ensure!(
        output.status.success(),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}
