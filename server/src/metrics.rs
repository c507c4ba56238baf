//! Every metric of the server, in one table, and the functions that record them.
//!
//! Names start with `outrider_`, counters end in `_total`, times are in seconds.
//! The table is the contract: a name that is not in it is not exported, and the documentation is checked against it.

use std::sync::OnceLock;

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};

use crate::engine::{Drafting, EngineError, KvRows};
use crate::http::code::Code;

/// What a metric is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// Only ever grows.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Counts observations in buckets with these upper bounds.
    Histogram(&'static [f64]),
}

/// One metric.
#[derive(Clone, Copy, Debug)]
pub struct Metric {
    /// Name as Prometheus sees it.
    pub name: &'static str,
    /// What it is.
    pub kind: Kind,
    /// Names of its labels.
    pub labels: &'static [&'static str],
    /// What it means.
    pub help: &'static str,
}

/// From a cached answer to a long completion on a slow machine.
const REQUEST_SECONDS: &[f64] = &[
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0,
];

/// From a step of a small model to a long prefill of a large one.
const STEP_SECONDS: &[f64] = &[
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0,
];

/// From a draft pass of a small model to a verify pass of a large one.
const PASS_SECONDS: &[f64] = &[
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0,
];

/// Acceptance lengths of the block sizes in use.
const BLOCK_TOKENS: &[f64] = &[
    1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 16.0, 24.0, 32.0, 64.0,
];

const HTTP_REQUESTS: &str = "outrider_http_requests_total";
const HTTP_ERRORS: &str = "outrider_http_errors_total";
const HTTP_REQUEST_SECONDS: &str = "outrider_http_request_duration_seconds";
const HTTP_IN_FLIGHT: &str = "outrider_http_requests_in_flight";
const CONFIG_RELOADS: &str = "outrider_config_reloads_total";
const COMPLETIONS_CANCELLED: &str = "outrider_completions_cancelled_total";
const AUDIT_LINES: &str = "outrider_audit_lines_total";
const AUDIT_LINES_LOST: &str = "outrider_audit_lines_lost_total";
const AUDIT_ERRORS: &str = "outrider_audit_errors_total";
const AUDIT_WRITING: &str = "outrider_audit_writing";
const READY: &str = "outrider_ready";
const LATCH_SECONDS: &str = "outrider_startup_latch_seconds";
const HEARTBEAT_AGE: &str = "outrider_engine_heartbeat_age_seconds";
const RUNNING: &str = "outrider_completions_running";
const WAITING: &str = "outrider_completions_waiting";
const SLOTS: &str = "outrider_slots";
const KV_ROWS: &str = "outrider_kv_rows";
const KV_ROWS_USED: &str = "outrider_kv_rows_used";
const DRAFTING: &str = "outrider_drafting";
const DRAFT_INFO: &str = "outrider_draft_info";
const MODEL_INFO: &str = "outrider_model_info";
const RESIDENT_MEMORY: &str = "outrider_resident_memory_bytes";
const BUILD_INFO: &str = "outrider_build_info";

/// Every metric.
pub const METRICS: &[Metric] = &[
    Metric {
        name: HTTP_REQUESTS,
        kind: Kind::Counter,
        labels: &["method", "route", "status"],
        help: "Requests that ended, by HTTP status; 499 stands for a client that left before the answer was complete",
    },
    Metric {
        name: HTTP_ERRORS,
        kind: Kind::Counter,
        labels: &["code"],
        help: "Requests that ended with an error object, also in mid-stream, by its code",
    },
    Metric {
        name: HTTP_REQUEST_SECONDS,
        kind: Kind::Histogram(REQUEST_SECONDS),
        labels: &["route", "status"],
        help: "Time from the head of a request to the last byte of its answer",
    },
    Metric {
        name: HTTP_IN_FLIGHT,
        kind: Kind::Gauge,
        labels: &[],
        help: "Requests whose answer is not finished",
    },
    Metric {
        name: COMPLETIONS_CANCELLED,
        kind: Kind::Counter,
        labels: &[],
        help: "Completions given up before they finished: the client left, or another completion of the same request failed",
    },
    Metric {
        name: AUDIT_LINES,
        kind: Kind::Counter,
        labels: &[],
        help: "Lines written to the audit log",
    },
    Metric {
        name: AUDIT_LINES_LOST,
        kind: Kind::Counter,
        labels: &[],
        help: "Lines that the audit log had no room for while they could not be written fast enough, or at all",
    },
    Metric {
        name: AUDIT_ERRORS,
        kind: Kind::Counter,
        labels: &[],
        help: "Failed attempts to write a line of the audit log; it is tried again until it succeeds",
    },
    Metric {
        name: AUDIT_WRITING,
        kind: Kind::Gauge,
        labels: &[],
        help: "1 while lines of the audit log can be written, 0 while they can't or take too long; absent without one",
    },
    Metric {
        name: CONFIG_RELOADS,
        kind: Kind::Counter,
        labels: &["result"],
        help: "Reloads of the configuration while the server ran, by what became of them",
    },
    Metric {
        name: READY,
        kind: Kind::Gauge,
        labels: &[],
        help: "1 when /readyz answers 200, else 0",
    },
    Metric {
        name: LATCH_SECONDS,
        kind: Kind::Gauge,
        labels: &["latch"],
        help: "Time from the start to the moment a start-up latch passed",
    },
    Metric {
        name: HEARTBEAT_AGE,
        kind: Kind::Gauge,
        labels: &[],
        help: "Time since the engine last came round its loop",
    },
    Metric {
        name: RUNNING,
        kind: Kind::Gauge,
        labels: &[],
        help: "Completions that hold a slot",
    },
    Metric {
        name: WAITING,
        kind: Kind::Gauge,
        labels: &[],
        help: "Completions that wait for a slot",
    },
    Metric {
        name: "outrider_completions_failed_total",
        kind: Kind::Counter,
        labels: &["cause"],
        help: "Completions that failed or were not taken, by cause: queue_full, queue_timeout, deadline_exceeded, non_finite_logits, step_failed, stopped",
    },
    Metric {
        name: "outrider_queue_wait_seconds",
        kind: Kind::Histogram(REQUEST_SECONDS),
        labels: &[],
        help: "Time that a completion waited for its slot",
    },
    Metric {
        name: "outrider_time_to_first_token_seconds",
        kind: Kind::Histogram(REQUEST_SECONDS),
        labels: &[],
        help: "Time from the arrival of a request to the first token of a completion",
    },
    Metric {
        name: "outrider_inter_token_seconds",
        kind: Kind::Histogram(PASS_SECONDS),
        labels: &[],
        help: "Time between two tokens of a completion; tokens of one step come together, so all of them but the first count 0",
    },
    Metric {
        name: SLOTS,
        kind: Kind::Gauge,
        labels: &[],
        help: "Completions that can run at a time",
    },
    Metric {
        name: KV_ROWS,
        kind: Kind::Gauge,
        labels: &[],
        help: "Rows of KV memory, one for each token that it can hold",
    },
    Metric {
        name: KV_ROWS_USED,
        kind: Kind::Gauge,
        labels: &["holder"],
        help: "Rows of KV memory that are valid: those of running completions, and those that the prefix cache keeps",
    },
    Metric {
        name: "outrider_prefix_cache_lookups_total",
        kind: Kind::Counter,
        labels: &[],
        help: "Completions whose prompt was looked for in the prefix cache",
    },
    Metric {
        name: "outrider_prefix_cache_tokens_total",
        kind: Kind::Counter,
        labels: &[],
        help: "Prompt tokens that were there already and not computed",
    },
    Metric {
        name: "outrider_step_seconds",
        kind: Kind::Histogram(STEP_SECONDS),
        labels: &[],
        help: "Time of one engine step over all running completions",
    },
    Metric {
        name: "outrider_prompt_tokens_total",
        kind: Kind::Counter,
        labels: &[],
        help: "Prompt tokens computed",
    },
    Metric {
        name: "outrider_generated_tokens_total",
        kind: Kind::Counter,
        labels: &[],
        help: "Tokens generated and committed",
    },
    Metric {
        name: "outrider_step_overhead_seconds",
        kind: Kind::Histogram(PASS_SECONDS),
        labels: &[],
        help: "Time of one engine step outside the target and the draft: choosing tokens, committing, planning",
    },
    Metric {
        name: "outrider_prefill_seconds",
        kind: Kind::Histogram(PASS_SECONDS),
        labels: &[],
        help: "Time one engine step spent in target passes that feed prompts",
    },
    Metric {
        name: "outrider_verify_seconds",
        kind: Kind::Histogram(PASS_SECONDS),
        labels: &[],
        help: "Time one engine step spent in the target pass over all decoding completions, with or without drafted tokens",
    },
    Metric {
        name: "outrider_draft_seconds",
        kind: Kind::Histogram(PASS_SECONDS),
        labels: &[],
        help: "Time one engine step spent in draft passes",
    },
    Metric {
        name: "outrider_speculative_steps_total",
        kind: Kind::Counter,
        labels: &[],
        help: "Steps of a completion in which the target checked drafted tokens",
    },
    Metric {
        name: "outrider_plain_steps_total",
        kind: Kind::Counter,
        labels: &["cause"],
        help: "Steps of a completion without drafted tokens, by cause: unavailable, off, request, suspended, draft_error, non_finite, context, last_token, catching_up, not_worthwhile",
    },
    Metric {
        name: "outrider_drafted_tokens_total",
        kind: Kind::Counter,
        labels: &[],
        help: "Drafted tokens that the target checked",
    },
    Metric {
        name: "outrider_accepted_tokens_total",
        kind: Kind::Counter,
        labels: &["position"],
        help: "Drafted tokens that were the target's choice, by their position behind the anchor",
    },
    Metric {
        name: "outrider_acceptance_length_tokens",
        kind: Kind::Histogram(BLOCK_TOKENS),
        labels: &[],
        help: "Tokens committed by a step of a completion that checked drafted tokens",
    },
    Metric {
        name: "outrider_step_width_tokens",
        kind: Kind::Histogram(BLOCK_TOKENS),
        labels: &[],
        help: "Rows of the widest completion in a step: 1 for a plain step, more with drafted tokens",
    },
    Metric {
        name: "outrider_draft_errors_total",
        kind: Kind::Counter,
        labels: &["cause"],
        help: "Draft passes that failed (cause pass), and blocks cut short because the draft's logits were not finite (cause non_finite)",
    },
    Metric {
        name: DRAFTING,
        kind: Kind::Gauge,
        labels: &["state"],
        help: "1 for the state that drafting is in, 0 for the others: unavailable, off, on, suspended",
    },
    Metric {
        name: DRAFT_INFO,
        kind: Kind::Gauge,
        labels: &["architecture", "block_size", "candidate_topk"],
        help: "Always 1, and there only when a draft is loaded; the labels say which, how many tokens its widest block has, and how many candidates each position",
    },
    Metric {
        name: RESIDENT_MEMORY,
        kind: Kind::Gauge,
        labels: &[],
        help: "Memory that the process has in RAM",
    },
    Metric {
        name: MODEL_INFO,
        kind: Kind::Gauge,
        labels: &["model", "bundle_digest", "lossless_class"],
        help: "Always 1; the labels say which model is served",
    },
    Metric {
        name: BUILD_INFO,
        kind: Kind::Gauge,
        labels: &["version"],
        help: "Always 1; the label says which build serves",
    },
];

/// Makes the process's recorder and describes every metric; further calls return the same handle.
///
/// # Panics
/// When another recorder was installed in this process.
pub fn install() -> &'static PrometheusHandle {
    static HANDLE: OnceLock<PrometheusHandle> = OnceLock::new();
    HANDLE.get_or_init(|| {
        let mut builder = PrometheusBuilder::new();
        for metric in METRICS {
            if let Kind::Histogram(bounds) = metric.kind {
                builder = builder
                    .set_buckets_for_metric(Matcher::Full(metric.name.to_owned()), bounds)
                    .expect("the table gives every histogram bounds");
            }
        }
        let handle = builder
            .install_recorder()
            .expect("the server is the only one to install a recorder");
        for metric in METRICS {
            match metric.kind {
                Kind::Counter => metrics::describe_counter!(metric.name, metric.help),
                Kind::Gauge => metrics::describe_gauge!(metric.name, metric.help),
                Kind::Histogram(_) => metrics::describe_histogram!(metric.name, metric.help),
            }
        }
        metrics::gauge!(BUILD_INFO, "version" => env!("CARGO_PKG_VERSION")).set(1.0);
        // Counted from zero, so that a rate exists before the first event.
        for cause in EngineError::CAUSES {
            metrics::counter!("outrider_completions_failed_total", "cause" => cause).absolute(0);
        }
        for cause in ["pass", "non_finite"] {
            metrics::counter!("outrider_draft_errors_total", "cause" => cause).absolute(0);
        }
        for name in [
            COMPLETIONS_CANCELLED,
            AUDIT_LINES,
            AUDIT_LINES_LOST,
            AUDIT_ERRORS,
            "outrider_prefix_cache_lookups_total",
            "outrider_prefix_cache_tokens_total",
        ] {
            metrics::counter!(name).absolute(0);
        }
        for name in [
            "outrider_prompt_tokens_total",
            "outrider_generated_tokens_total",
            "outrider_drafted_tokens_total",
            "outrider_speculative_steps_total",
        ] {
            metrics::counter!(name).absolute(0);
        }
        for code in Code::ALL {
            metrics::counter!(HTTP_ERRORS, "code" => code.as_str()).absolute(0);
        }
        for result in ["applied", "refused"] {
            metrics::counter!(CONFIG_RELOADS, "result" => result).absolute(0);
        }
        handle
    })
}

/// One request ended.
pub fn http_request(
    method: &'static str,
    route: &str,
    status: u16,
    code: Option<&'static str>,
    seconds: f64,
) {
    metrics::counter!(
        HTTP_REQUESTS,
        "method" => method, "route" => route.to_owned(), "status" => status.to_string()
    )
    .increment(1);
    metrics::histogram!(
        HTTP_REQUEST_SECONDS, "route" => route.to_owned(), "status" => status.to_string()
    )
    .record(seconds);
    if let Some(code) = code {
        metrics::counter!(HTTP_ERRORS, "code" => code).increment(1);
    }
}

/// Counts a reload of the configuration; `result` is what became of it.
pub fn config_reloaded(result: &'static str) {
    metrics::counter!(CONFIG_RELOADS, "result" => result).increment(1);
}

/// Completions were given up.
pub fn completions_cancelled(count: usize) {
    metrics::counter!(COMPLETIONS_CANCELLED).increment(count as u64);
}

/// A line of the audit log was written.
pub fn audit_line() {
    metrics::counter!(AUDIT_LINES).increment(1);
}

/// A line of the audit log found no place.
pub fn audit_line_lost() {
    metrics::counter!(AUDIT_LINES_LOST).increment(1);
}

/// A line of the audit log could not be written.
pub fn audit_error() {
    metrics::counter!(AUDIT_ERRORS).increment(1);
}

/// Values that are read when a scrape asks for them.
#[derive(Clone, Debug)]
pub struct Snapshot<'a> {
    /// Whether the server is ready.
    pub ready: bool,
    /// Whether lines of the audit log can be written, where there is one.
    pub audit_writing: Option<bool>,
    /// Requests in flight.
    pub in_flight: usize,
    /// Memory that the process has in RAM, where the machine says so.
    pub resident_memory_bytes: Option<u64>,
    /// Latches that have passed, with the time each took.
    pub latches: Vec<(&'static str, f64)>,
    /// The engine, once there is one.
    pub engine: Option<EngineSnapshot<'a>>,
}

/// The engine at the time of a scrape.
#[derive(Clone, Debug)]
pub struct EngineSnapshot<'a> {
    /// Age of the heartbeat in seconds.
    pub heartbeat_age_seconds: f64,
    /// Completions that hold a slot.
    pub running: usize,
    /// Completions that wait.
    pub waiting: usize,
    /// Completions that can run.
    pub slots: usize,
    /// Rows of KV memory.
    pub kv_rows: KvRows,
    /// Name of the model.
    pub model: &'a str,
    /// Digest of the bundle.
    pub bundle_digest: &'a str,
    /// Lossless class, once the probe ran.
    pub lossless_class: Option<&'static str>,
    /// State of drafting, once the model is loaded.
    pub drafting: Option<Drafting>,
    /// The draft, when one is loaded.
    pub draft: Option<DraftInfo<'a>>,
}

/// Which draft is loaded.
#[derive(Clone, Copy, Debug)]
pub struct DraftInfo<'a> {
    /// Its architecture.
    pub architecture: &'a str,
    /// Tokens of its widest block in use, the anchor included.
    pub block_size: usize,
    /// Candidates per position in use.
    pub candidate_topk: usize,
}

/// Records what a scrape reads from the state of the server.
pub fn snapshot(snapshot: &Snapshot<'_>) {
    metrics::gauge!(READY).set(if snapshot.ready { 1.0 } else { 0.0 });
    metrics::gauge!(HTTP_IN_FLIGHT).set(snapshot.in_flight as f64);
    if let Some(writing) = snapshot.audit_writing {
        metrics::gauge!(AUDIT_WRITING).set(if writing { 1.0 } else { 0.0 });
    }
    if let Some(bytes) = snapshot.resident_memory_bytes {
        metrics::gauge!(RESIDENT_MEMORY).set(bytes as f64);
    }
    for (latch, seconds) in &snapshot.latches {
        metrics::gauge!(LATCH_SECONDS, "latch" => *latch).set(*seconds);
    }
    if let Some(engine) = &snapshot.engine {
        metrics::gauge!(HEARTBEAT_AGE).set(engine.heartbeat_age_seconds);
        metrics::gauge!(RUNNING).set(engine.running as f64);
        metrics::gauge!(WAITING).set(engine.waiting as f64);
        metrics::gauge!(SLOTS).set(engine.slots as f64);
        metrics::gauge!(KV_ROWS).set(engine.kv_rows.capacity as f64);
        for (holder, rows) in [
            ("running", engine.kv_rows.running),
            ("prefix_cache", engine.kv_rows.kept),
        ] {
            metrics::gauge!(KV_ROWS_USED, "holder" => holder).set(rows as f64);
        }
        if let Some(current) = engine.drafting {
            for state in Drafting::ALL {
                metrics::gauge!(DRAFTING, "state" => state.as_str()).set(if state == current {
                    1.0
                } else {
                    0.0
                });
            }
        }
        if let Some(draft) = engine.draft {
            metrics::gauge!(
                DRAFT_INFO,
                "architecture" => draft.architecture.to_owned(),
                "block_size" => draft.block_size.to_string(),
                "candidate_topk" => draft.candidate_topk.to_string()
            )
            .set(1.0);
        }
        if let Some(class) = engine.lossless_class {
            metrics::gauge!(
                MODEL_INFO,
                "model" => engine.model.to_owned(),
                "bundle_digest" => engine.bundle_digest.to_owned(),
                "lossless_class" => class
            )
            .set(1.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names of metrics in the source of `dir`, tests and this file left out.
    fn names_in(dir: &std::path::Path, names: &mut Vec<String>) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                names_in(&path, names);
            } else if !path.ends_with("src/metrics.rs")
                && path.extension().is_some_and(|extension| extension == "rs")
            {
                let text = std::fs::read_to_string(&path).unwrap();
                let quoted = text.split('"').skip(1).step_by(2);
                let is_metric = |name: &&str| {
                    name.starts_with("outrider_")
                        && name
                            .bytes()
                            .all(|byte| byte.is_ascii_lowercase() || byte == b'_')
                };
                names.extend(quoted.filter(is_metric).map(str::to_owned));
            }
        }
    }

    #[test]
    fn every_metric_is_documented_and_no_other_is() {
        let document = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/metrics.md");
        let text = std::fs::read_to_string(document).unwrap();
        let rows: Vec<&str> = text
            .lines()
            .filter(|line| line.starts_with("| `outrider_"))
            .collect();
        let table: Vec<String> = METRICS
            .iter()
            .map(|metric| {
                let kind = match metric.kind {
                    Kind::Counter => "counter",
                    Kind::Gauge => "gauge",
                    Kind::Histogram(_) => "histogram",
                };
                let labels: Vec<String> = metric
                    .labels
                    .iter()
                    .map(|label| format!("`{label}`"))
                    .collect();
                format!(
                    "| `{}` | {kind} | {} | {} |",
                    metric.name,
                    labels.join(", "),
                    metric.help
                )
            })
            .collect();
        assert_eq!(
            rows,
            table,
            "docs/metrics.md must hold these rows:\n{}",
            table.join("\n")
        );
    }

    #[test]
    fn a_metric_recorded_anywhere_is_in_the_table() {
        let mut names = Vec::new();
        names_in(
            std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/src")),
            &mut names,
        );
        assert!(!names.is_empty());
        for name in names {
            assert!(
                METRICS.iter().any(|metric| metric.name == name),
                "{name} is not in the table"
            );
        }
    }
}
