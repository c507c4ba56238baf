//! The figures that gates are made of, each a query for Prometheus.
//!
//! Series of the servers carry `job="outrider"` and the label `version`, those of HAProxy's exporter name the backend, those of the GPU exporter
//! carry `version`.

/// A figure that is known by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    /// Name in a plan.
    pub name: &'static str,
    /// What it is.
    pub meaning: &'static str,
    /// Query; `{version}` stands for `stable` or `canary`, `{window}` for the window with its unit.
    pub query: &'static str,
}

/// By how much counters grew in the window. `increase` takes the first value that it sees for the beginning, so of a series that is not there
/// when the window begins, such as an error that never happened before, all is counted.
macro_rules! grown {
    ($counter:expr) => {
        concat!(
            "sum((",
            $counter,
            " unless ",
            $counter,
            " offset {window}) or increase(",
            $counter,
            "[{window}]))"
        )
    };
}

macro_rules! requests {
    ($labels:literal) => {
        concat!(
            "outrider_http_requests_total{job=\"outrider\",version=\"{version}\",route=~\"/v1/(chat/)?completions\"",
            $labels,
            "}"
        )
    };
}

/// What never happened has no series: 0 of the requests stands for it, so that without requests there is no figure at all.
macro_rules! share_of_requests {
    ($counter:expr) => {
        concat!(
            "(",
            grown!($counter),
            " or 0 * ",
            grown!(requests!("")),
            ") / ",
            grown!(requests!(""))
        )
    };
}

/// Requests that ended in the window, as the servers or HAProxy counted them, whichever is more: a server that is gone counts nothing.
pub const SAMPLES: &str = concat!(
    "max(",
    grown!(requests!("")),
    " or label_replace(sum(increase(haproxy_backend_http_responses_total{proxy=\"{version}\"}[{window}])), \"seen_by\", \"gateway\", \"\", \"\"))"
);

macro_rules! p95 {
    ($name:literal) => {
        concat!(
            "histogram_quantile(0.95, sum by (le) (increase(",
            $name,
            "_bucket{job=\"outrider\",version=\"{version}\"}[{window}])))"
        )
    };
}

macro_rules! quotient_of_sums {
    ($above:literal, $below:literal) => {
        concat!(
            "sum(increase(",
            $above,
            "{job=\"outrider\",version=\"{version}\"}[{window}])) / sum(increase(",
            $below,
            "{job=\"outrider\",version=\"{version}\"}[{window}]))"
        )
    };
}

/// All of them.
pub const METRICS: [Metric; 12] = [
    Metric {
        name: "error_ratio",
        meaning: "faults of the server, also in mid-stream, for each request",
        query: share_of_requests!(
            "outrider_http_errors_total{job=\"outrider\",version=\"{version}\",code=~\"internal_error|non_finite_logits|engine_error|engine_stopped|deadline_exceeded\"}"
        ),
    },
    Metric {
        name: "turned_away_ratio",
        meaning: "answers 429 and 503 for each request",
        query: share_of_requests!(requests!(",status=~\"429|503\"")),
    },
    Metric {
        name: "truncated_ratio",
        meaning: "completions that the server ended early by its own fault, for each request",
        query: share_of_requests!(
            "outrider_completions_failed_total{job=\"outrider\",version=\"{version}\",cause=~\"deadline_exceeded|non_finite_logits|step_failed|stopped\"}"
        ),
    },
    Metric {
        name: "gateway_error_ratio",
        meaning: "answers 5xx that HAProxy passed on or made itself, for each answer of the backend",
        query: "sum(increase(haproxy_backend_http_responses_total{proxy=\"{version}\",code=\"5xx\"}[{window}])) / sum(increase(haproxy_backend_http_responses_total{proxy=\"{version}\"}[{window}]))",
    },
    Metric {
        name: "first_token_p95_s",
        meaning: "time to the first token in seconds, 95th percentile",
        query: p95!("outrider_time_to_first_token_seconds"),
    },
    Metric {
        name: "inter_token_p95_s",
        meaning: "time between two tokens in seconds, 95th percentile; tokens of one step but the first count 0",
        query: p95!("outrider_inter_token_seconds"),
    },
    Metric {
        name: "inter_token_mean_s",
        meaning: "time between two tokens in seconds, mean, which drafting can't hide",
        query: quotient_of_sums!(
            "outrider_inter_token_seconds_sum",
            "outrider_inter_token_seconds_count"
        ),
    },
    Metric {
        name: "tokens_per_busy_second",
        meaning: "generated tokens for each second that the engine was at work, so that versions with unlike shares compare",
        query: quotient_of_sums!(
            "outrider_generated_tokens_total",
            "outrider_step_seconds_sum"
        ),
    },
    Metric {
        name: "acceptance_length_tokens",
        meaning: "tokens committed by a step that checked drafted tokens, mean; 1 is a draft that is never right",
        query: quotient_of_sums!(
            "outrider_acceptance_length_tokens_sum",
            "outrider_acceptance_length_tokens_count"
        ),
    },
    Metric {
        name: "restarts",
        meaning: "times that the counters began anew",
        query: "sum(resets(outrider_generated_tokens_total{job=\"outrider\",version=\"{version}\"}[{window}]))",
    },
    Metric {
        name: "memory_bytes",
        meaning: "greatest resident memory of a process",
        query: "max(max_over_time(outrider_resident_memory_bytes{job=\"outrider\",version=\"{version}\"}[{window}]))",
    },
    Metric {
        name: "gpu_memory_mib",
        meaning: "greatest used memory of a GPU, from NVIDIA's DCGM exporter",
        query: "max(max_over_time(DCGM_FI_DEV_FB_USED{version=\"{version}\"}[{window}]))",
    },
];

impl Metric {
    /// The figure of this name.
    pub fn named(name: &str) -> Option<&'static Self> {
        METRICS.iter().find(|metric| metric.name == name)
    }

    /// All names, for a message.
    pub fn names() -> String {
        METRICS.map(|metric| metric.name).join(", ")
    }
}

/// A query for one version over a window that ends now.
pub fn query(template: &str, version: &str, window_s: u64) -> String {
    template
        .replace("{version}", version)
        .replace("{window}", &format!("{window_s}s"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_names_every_figure_with_its_meaning() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/rollout.md");
        let page = std::fs::read_to_string(page).unwrap();
        let rows = METRICS.map(|metric| format!("| `{}` | {} |\n", metric.name, metric.meaning));
        assert!(page.contains(&rows.concat()), "{}", rows.concat());
    }
}
