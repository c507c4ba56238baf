//! What rules and dashboard ask Prometheus for, held to docs/metrics.md.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::process::Command;

use anyhow::{Context, ensure};
use outrider_tests::fixtures::program;
use serde_json::Value;

use crate::repository;

/// Labels that every scraped series has, see configs/prometheus/prometheus.yml.
const SCRAPE_LABELS: [&str; 3] = ["job", "instance", "version"];

/// The labels of each series that can be asked for.
type Series = BTreeMap<String, BTreeSet<String>>;

pub fn rules_and_dashboard_ask_only_for_metrics_that_exist() -> anyhow::Result<()> {
    let mut series = documented_series()?;
    let mut queries = Vec::new();
    for file in ["outrider.rules.yml", "outrider.alerts.yml"] {
        for rule in rules(file)? {
            let query = rule["expr"]
                .as_str()
                .context("a rule has no expr")?
                .to_owned();
            if let Some(name) = rule["record"].as_str() {
                // Each recording rule sums by job and version.
                series.insert(name.to_owned(), labels(&["job", "version"]));
            }
            queries.push((file.to_owned(), query));
        }
    }
    let dashboard = fs::read_to_string(repository("configs/grafana/outrider.json"))?;
    let dashboard: Value = serde_json::from_str(&dashboard)?;
    for panel in dashboard["panels"]
        .as_array()
        .context("the dashboard has no panels")?
    {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let query = target["expr"].as_str().context("a target has no expr")?;
            queries.push((format!("panel {}", panel["title"]), query.to_owned()));
        }
    }
    for variable in dashboard["templating"]["list"]
        .as_array()
        .into_iter()
        .flatten()
    {
        if let Some(definition) = variable["definition"].as_str() {
            queries.push((
                format!("variable {}", variable["name"]),
                definition.to_owned(),
            ));
        }
    }
    let text = fs::read_to_string(repository("configs/kubernetes/argo-rollouts/analysis.yaml"))?;
    let analysis: Value = serde_yaml::from_str(&text)?;
    for metric in analysis["spec"]["metrics"]
        .as_array()
        .context("no metrics")?
    {
        let query = metric["provider"]["prometheus"]["query"]
            .as_str()
            .context("a metric has no query")?;
        queries.push((format!("analysis {}", metric["name"]), query.to_owned()));
    }
    let text = fs::read_to_string(repository("configs/kubernetes/base/autoscaler.yaml"))?;
    let autoscaler: Value = serde_yaml::from_str(&text)?;
    let metric = autoscaler["spec"]["metrics"][0]["pods"]["metric"]["name"].as_str();
    let metric = metric.context("the autoscaler has no metric")?;
    queries.push(("autoscaler".to_owned(), metric.to_owned()));
    ensure!(
        queries.len() > 60,
        "only {} queries were found",
        queries.len()
    );
    let faults: Vec<String> = queries
        .iter()
        .flat_map(|(place, query)| {
            faults(query, &series)
                .into_iter()
                .map(move |fault| format!("{place}: {fault}"))
        })
        .collect();
    ensure!(faults.is_empty(), "{}", faults.join("\n"));
    let codes = documented_codes()?;
    for (place, query) in &queries {
        for code in codes_asked_for(query) {
            ensure!(
                codes.contains(code),
                "{place}: docs/errors.md has no code {code}"
            );
        }
    }
    Ok(())
}

pub fn a_query_for_what_does_not_exist_is_noticed() -> anyhow::Result<()> {
    let series = documented_series()?;
    for (query, expected) in [
        ("rate(outrider_no_such_total[5m])", "outrider_no_such_total"),
        (
            "version:outrider_no_such:rate5m",
            "version:outrider_no_such:rate5m",
        ),
        ("outrider_http_errors_total{cod=\"x\"}", "cod"),
        ("sum by (position) (outrider_ready)", "position"),
        ("outrider_ready_bucket", "outrider_ready_bucket"),
        ("outrider_ready / on (hostname) outrider_slots", "hostname"),
        ("sum by (le) (outrider_step_seconds_sum)", "le"),
    ] {
        let found = faults(query, &series);
        ensure!(
            found.len() == 1 && found[0].contains(expected),
            "{query}: {found:?}"
        );
    }
    let codes = documented_codes()?;
    let asked: Vec<_> =
        codes_asked_for("outrider_http_errors_total{code=~\"queue_full|queue_ful\"}").collect();
    ensure!(asked == ["queue_full", "queue_ful"], "{asked:?}");
    ensure!(codes.contains(asked[0]) && !codes.contains(asked[1]));
    Ok(())
}

pub fn each_alert_names_a_page_that_exists() -> anyhow::Result<()> {
    for rule in rules("outrider.alerts.yml")? {
        let page = rule["annotations"]["runbook"].as_str();
        let page = page.with_context(|| format!("{} has no runbook", rule["alert"]))?;
        ensure!(
            repository(page).is_file(),
            "{} names {page}, which does not exist",
            rule["alert"]
        );
        let severity = rule["labels"]["severity"].as_str();
        ensure!(
            matches!(severity, Some("page" | "ticket")),
            "{}: severity {severity:?}",
            rule["alert"]
        );
    }
    Ok(())
}

pub fn each_alert_fires_and_stays_silent() -> anyhow::Result<()> {
    let directory = repository("configs/prometheus");
    let text = fs::read_to_string(directory.join("outrider.alerts.test.yml"))?;
    let tests: Value = serde_yaml::from_str(&text)?;
    let mut fires = BTreeSet::new();
    let mut silent = BTreeSet::new();
    for test in tests["tests"].as_array().context("no tests")? {
        for check in test["alert_rule_test"]
            .as_array()
            .context("no alert_rule_test")?
        {
            let name = check["alertname"].as_str().context("no alertname")?;
            let expects_none = check["exp_alerts"].as_array().is_some_and(Vec::is_empty);
            if expects_none {
                &mut silent
            } else {
                &mut fires
            }
            .insert(name.to_owned());
        }
    }
    for rule in rules("outrider.alerts.yml")? {
        let name = rule["alert"].as_str().context("a rule has no name")?;
        ensure!(fires.contains(name), "no test sees {name} fire");
        ensure!(silent.contains(name), "no test sees {name} stay silent");
    }
    let promtool = program("promtool", "prometheus")?;
    for arguments in [
        ["check", "config", "prometheus.yml"],
        ["test", "rules", "outrider.alerts.test.yml"],
    ] {
        let output = Command::new(&promtool)
            .args(arguments)
            .current_dir(&directory)
            .output()?;
        ensure!(
            output.status.success(),
            "promtool {arguments:?}\n{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(())
}

pub fn a_misspelled_key_fails_promtool() -> anyhow::Result<()> {
    let promtool = program("promtool", "prometheus")?;
    let scratch = tempfile::tempdir()?;
    let files = [
        "prometheus.yml",
        "outrider.rules.yml",
        "outrider.alerts.yml",
    ];
    for file in files {
        let source = repository("configs/prometheus").join(file);
        fs::copy(source, scratch.path().join(file))?;
    }
    // The tests of one alert; all of them take long.
    let tests = fs::read_to_string(repository("configs/prometheus/outrider.alerts.test.yml"))?;
    let separator = "  - name: ";
    let mut parts = tests.split(separator);
    let mut few = parts.next().context("no tests")?.to_owned();
    for part in parts.filter(|part| part.starts_with("\"OutriderNotReady")) {
        few.push_str(separator);
        few.push_str(part);
    }
    fs::write(scratch.path().join("test.yml"), few)?;

    let accepts = |arguments: &[&str]| -> anyhow::Result<bool> {
        let mut command = Command::new(&promtool);
        command.args(arguments).current_dir(scratch.path());
        Ok(command.output()?.status.success())
    };
    let check = ["check", "config", "prometheus.yml"];
    let test = ["test", "rules", "test.yml"];
    ensure!(
        accepts(&check)? && accepts(&test)?,
        "promtool refuses configs/prometheus"
    );
    for (file, word, arguments) in [
        ("prometheus.yml", "scrape_timeout", check),
        ("outrider.rules.yml", "record", check),
        ("outrider.alerts.yml", "annotations", check),
        ("test.yml", "exp_alerts", test),
        // A metric of another name is no fault of the file, but its alert no longer fires.
        ("outrider.alerts.yml", "outrider_ready", test),
    ] {
        let path = scratch.path().join(file);
        let text = fs::read_to_string(&path)?;
        ensure!(text.contains(word), "{file} has no {word}");
        fs::write(&path, text.replace(word, &format!("{word}x")))?;
        ensure!(!accepts(&arguments)?, "promtool accepts {word}x in {file}");
        fs::write(&path, text)?;
    }
    Ok(())
}

/// Every series of docs/metrics.md, and `up`, which Prometheus makes.
fn documented_series() -> anyhow::Result<Series> {
    let page = fs::read_to_string(repository("docs/metrics.md"))?;
    let mut series = Series::from([("up".to_owned(), labels(&SCRAPE_LABELS))]);
    for row in page.lines().filter(|line| line.starts_with("| `outrider_")) {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let (name, kind) = (cells[1].trim_matches('`'), cells[2]);
        let mut own = labels(&SCRAPE_LABELS);
        own.extend(
            cells[3]
                .split(',')
                .map(|label| label.trim().trim_matches('`').to_owned()),
        );
        own.remove("");
        if kind == "histogram" {
            for suffix in ["_sum", "_count"] {
                series.insert(format!("{name}{suffix}"), own.clone());
            }
            own.insert("le".to_owned());
            series.insert(format!("{name}_bucket"), own);
        } else {
            series.insert(name.to_owned(), own);
        }
    }
    ensure!(
        series.len() > 40,
        "docs/metrics.md has only {} series",
        series.len()
    );
    Ok(series)
}

/// Every code of docs/errors.md.
fn documented_codes() -> anyhow::Result<BTreeSet<String>> {
    let page = fs::read_to_string(repository("docs/errors.md"))?;
    let codes: BTreeSet<String> = page
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once('`'))
        .map(|(code, _)| code.to_owned())
        .collect();
    ensure!(codes.len() > 20, "docs/errors.md has only {codes:?}");
    Ok(codes)
}

/// The codes in matchers such as `code=~"a|b"`.
fn codes_asked_for(query: &str) -> impl Iterator<Item = &str> {
    query
        .split("code=")
        .skip(1)
        .filter_map(|behind| {
            behind
                .trim_start_matches('~')
                .strip_prefix('"')?
                .split_once('"')
        })
        .flat_map(|(codes, _)| codes.split('|'))
}

fn labels(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

/// The rules of a file of configs/prometheus.
fn rules(file: &str) -> anyhow::Result<Vec<Value>> {
    let text = fs::read_to_string(repository("configs/prometheus").join(file))?;
    let rules: Value = serde_yaml::from_str(&text)?;
    let groups = rules["groups"].as_array().context("no groups")?;
    Ok(groups
        .iter()
        .filter_map(|group| group["rules"].as_array())
        .flatten()
        .cloned()
        .collect())
}

/// What of a query does not exist: series, labels in matchers, labels in clauses such as `by (version)`.
fn faults(query: &str, series: &Series) -> Vec<String> {
    let mut faults = Vec::new();
    let mut known = BTreeSet::new();
    let mut clauses = Vec::new();
    let mut rest = query;
    while let Some(first) = rest.chars().next() {
        if first == '"' {
            rest = after_string(rest);
            continue;
        }
        let length = rest.find(|c: char| !is_name(c)).unwrap_or(rest.len());
        if length == 0 {
            rest = &rest[first.len_utf8()..];
            continue;
        }
        let (name, behind) = rest.split_at(length);
        rest = behind;
        let next = behind.trim_start();
        if name.starts_with("outrider_") || name.contains(":") || series.contains_key(name) {
            let Some(own) = series.get(name) else {
                faults.push(format!("{name} does not exist"));
                continue;
            };
            known.extend(own.iter().cloned());
            if let Some(matchers) = next.strip_prefix('{') {
                let (names, behind) = matcher_labels(matchers);
                for label in names.into_iter().filter(|label| !own.contains(*label)) {
                    faults.push(format!("{name} has no label {label}"));
                }
                rest = behind;
            }
        } else if let (
            "by" | "on" | "ignoring" | "without" | "group_left" | "group_right",
            Some(list),
        ) = (name, next.strip_prefix('('))
        {
            let (list, behind) = list.split_once(')').unwrap_or((list, ""));
            clauses.extend(
                list.split(',')
                    .map(str::trim)
                    .filter(|label| !label.is_empty()),
            );
            rest = behind;
        }
    }
    if known.is_empty() {
        // A series that does not exist is fault enough.
        return faults;
    }
    for label in clauses.into_iter().filter(|label| !known.contains(*label)) {
        faults.push(format!(
            "no series of this query has a label {label}: {query}"
        ));
    }
    faults
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || c == ':'
}

/// What follows a quoted text.
fn after_string(text: &str) -> &str {
    text[1..].split_once('"').map_or("", |(_, behind)| behind)
}

/// The labels of matchers up to their `}`, and what follows that.
fn matcher_labels(mut rest: &str) -> (Vec<&str>, &str) {
    let mut names = Vec::new();
    while let Some(first) = rest.chars().next() {
        match first {
            '}' => return (names, &rest[1..]),
            '"' => rest = after_string(rest),
            _ => {
                let length = rest.find(|c: char| !is_name(c)).unwrap_or(rest.len());
                if length > 0 {
                    names.push(&rest[..length]);
                }
                rest = &rest[length.max(first.len_utf8())..];
            }
        }
    }
    (names, rest)
}
