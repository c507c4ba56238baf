//! The queries of the known figures, evaluated by Prometheus' own engine over series that are made up.

use std::fs;
use std::process::Command;

use outrider_rollout::metric::{METRICS, Metric, SAMPLES, query};
use serde_json::{Value, json};

const WINDOW_S: u64 = 20;
const COMPLETIONS: &str = "route=\"/v1/chat/completions\"";

enum Expected {
    Figure(f64),
    Absent,
    NotANumber,
}
use Expected::{Absent, Figure, NotANumber};

/// A figure, the series it is asked of, and what it must be; series have a sample each second, and the window begins after the tenth.
struct Case {
    metric: &'static str,
    series: Vec<(String, &'static str)>,
    expected: Expected,
}

fn of_canary(name: &str, labels: &str) -> String {
    let labels = if labels.is_empty() {
        String::new()
    } else {
        format!(",{labels}")
    };
    format!("{name}{{job=\"outrider\",version=\"canary\"{labels}}}")
}

fn requests(status: &str) -> String {
    let labels = format!("{COMPLETIONS},status=\"{status}\"");
    of_canary("outrider_http_requests_total", &labels)
}

fn cases() -> Vec<Case> {
    let served = (requests("200"), "0+1x30");
    let errors = |code: &str| of_canary("outrider_http_errors_total", &format!("code=\"{code}\""));
    let failed = |cause: &str| {
        of_canary(
            "outrider_completions_failed_total",
            &format!("cause=\"{cause}\""),
        )
    };
    let answers = |code: &str| {
        format!("haproxy_backend_http_responses_total{{proxy=\"canary\",code=\"{code}\"}}")
    };
    let case = |metric, series, expected| Case {
        metric,
        series,
        expected,
    };
    let plain = |name: &str| of_canary(name, "");
    let bucket = |le: &str| {
        of_canary(
            "outrider_time_to_first_token_seconds_bucket",
            &format!("le=\"{le}\""),
        )
    };
    vec![
        case("samples", vec![], Absent),
        case("samples", vec![served.clone()], Figure(20.0)),
        // Of a series that is new in the window all is counted, its first value too.
        case("samples", vec![(requests("200"), "_x20 7x10")], Figure(7.0)),
        // The server counts nothing any more, but the gateway knows better.
        case(
            "samples",
            vec![(requests("200"), "5x30"), (answers("5xx"), "0+2x30")],
            Figure(40.0),
        ),
        case(
            "samples",
            vec![(requests("200").replace("canary", "stable"), "0+1x30")],
            Absent,
        ),
        case("error_ratio", vec![], Absent),
        case("error_ratio", vec![(requests("200"), "5x30")], NotANumber),
        case("error_ratio", vec![served.clone()], Figure(0.0)),
        case(
            "error_ratio",
            vec![served.clone(), (errors("engine_error"), "_x20 5x10")],
            Figure(0.25),
        ),
        case(
            "error_ratio",
            vec![served.clone(), (errors("engine_error"), "5x30")],
            Figure(0.0),
        ),
        case(
            "error_ratio",
            vec![served.clone(), (errors("invalid_value"), "_x20 5x10")],
            Figure(0.0),
        ),
        case("turned_away_ratio", vec![served.clone()], Figure(0.0)),
        case(
            "turned_away_ratio",
            vec![served.clone(), (requests("503"), "_x20 20x10")],
            Figure(0.5),
        ),
        case(
            "truncated_ratio",
            vec![served.clone(), (failed("step_failed"), "_x25 2x5")],
            Figure(0.1),
        ),
        case(
            "truncated_ratio",
            vec![served, (failed("queue_full"), "_x25 2x5")],
            Figure(0.0),
        ),
        case("gateway_error_ratio", vec![], Absent),
        case(
            "gateway_error_ratio",
            vec![(answers("2xx"), "3x30"), (answers("5xx"), "0x30")],
            NotANumber,
        ),
        case(
            "gateway_error_ratio",
            vec![(answers("2xx"), "0+3x30"), (answers("5xx"), "0+1x30")],
            Figure(0.25),
        ),
        case(
            "first_token_p95_s",
            vec![(bucket("1"), "0x30"), (bucket("+Inf"), "0x30")],
            NotANumber,
        ),
        case(
            "first_token_p95_s",
            vec![(bucket("1"), "0+1x30"), (bucket("+Inf"), "0+1x30")],
            Figure(0.95),
        ),
        case(
            "inter_token_mean_s",
            vec![
                (plain("outrider_inter_token_seconds_sum"), "0+0.5x30"),
                (plain("outrider_inter_token_seconds_count"), "0+5x30"),
            ],
            Figure(0.1),
        ),
        case(
            "tokens_per_busy_second",
            vec![
                (plain("outrider_generated_tokens_total"), "0+30x30"),
                (plain("outrider_step_seconds_sum"), "0+0.5x30"),
            ],
            Figure(60.0),
        ),
        case(
            "acceptance_length_tokens",
            vec![
                (plain("outrider_acceptance_length_tokens_sum"), "0+6x30"),
                (plain("outrider_acceptance_length_tokens_count"), "0+4x30"),
            ],
            Figure(1.5),
        ),
        case("restarts", vec![], Absent),
        case(
            "restarts",
            vec![(plain("outrider_generated_tokens_total"), "0+3x30")],
            Figure(0.0),
        ),
        case(
            "restarts",
            vec![(plain("outrider_generated_tokens_total"), "0+3x15 0+3x15")],
            Figure(1.0),
        ),
        case(
            "memory_bytes",
            vec![(plain("outrider_resident_memory_bytes"), "5x20 9 5x10")],
            Figure(9.0),
        ),
        case(
            "gpu_memory_mib",
            vec![(
                "DCGM_FI_DEV_FB_USED{version=\"canary\",gpu=\"0\"}".to_owned(),
                "7x30",
            )],
            Figure(7.0),
        ),
    ]
}

fn test_of(case: &Case) -> Value {
    let template = match case.metric {
        "samples" => SAMPLES,
        name => Metric::named(name).unwrap().query,
    };
    let asked = query(template, "canary", WINDOW_S);
    // promtool takes no NaN for equal to another one.
    let (expression, value) = match case.expected {
        Figure(value) => (format!("round(sum({asked}), 0.01)"), Some(value)),
        Absent => (asked, None),
        NotANumber => (format!("count(({asked}) != ({asked}))"), Some(1.0)),
    };
    let series = case.series.iter();
    let series: Vec<_> = series
        .map(|(series, values)| json!({ "series": series, "values": values }))
        .collect();
    let samples = value.map(|value| json!({ "labels": "{}", "value": value }));
    json!({
        "interval": "1s",
        "input_series": series,
        "promql_expr_test": [{
            "expr": expression,
            "eval_time": "30s",
            "exp_samples": Vec::from_iter(samples),
        }],
    })
}

#[test]
fn prometheus_itself_finds_the_figures_that_queries_are_meant_to_give() {
    let cases = cases();
    let is_tried = |metric: &Metric| cases.iter().any(|case| case.metric == metric.name);
    let untried: Vec<_> = METRICS.iter().filter(|metric| !is_tried(metric)).collect();
    // It is the same query as that of the other percentile.
    assert_eq!(
        untried.iter().map(|metric| metric.name).collect::<Vec<_>>(),
        ["inter_token_p95_s"]
    );
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("tests.yml");
    let tests: Vec<_> = cases.iter().map(test_of).collect();
    let text = json!({ "rule_files": [], "evaluation_interval": "1s", "tests": tests });
    // JSON is YAML.
    fs::write(&file, text.to_string()).unwrap();
    let output = Command::new("promtool")
        .args(["test", "rules"])
        .arg(&file)
        .output()
        .expect("promtool of the Debian package prometheus must be installed");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
}
