//! `soak`: does the service hold for hours what it holds for seconds?
//!
//! The prompts are asked over and over, greedy and seeded, whole and streamed, a fixed number in flight, until the time is over.
//! Every answer must be the first answer to that request; errors, restarts and the growth of memory are held to bounds.
//! What goes wrong is the finding, so that an error ends nothing, except before anything was answered.

mod metrics;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::client::Client;
use crate::lossless::compare::first_difference;
use crate::lossless::plan::{self, Ask, Sampling};
use crate::perf::stats::percentile;
use crate::prompts::Case;
use crate::report::{Model, SCHEMA_VERSION, Verdict};
use crate::service::{CouldNotRun, Found, Service};
use crate::wire::shorten;
use metrics::Page;

/// Pause of a caller after an error, so that a service that is down is not asked as fast as the machine can.
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(200);
/// Samples of the metrics over a run.
const SAMPLES: u32 = 240;
/// Least time between two samples.
const LEAST_SAMPLE_INTERVAL: Duration = Duration::from_millis(100);
/// Kinds of errors that are told apart.
const ERROR_KINDS: usize = 20;

/// How a run is made and what it takes to pass.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// How long to ask, in seconds.
    pub duration_s: f64,
    /// Requests in flight.
    pub concurrency: usize,
    /// Most tokens of an answer, where the case does not say.
    pub max_tokens: u64,
    /// Seed of the first request.
    pub seed: u64,
    /// Largest share of requests that may fail.
    pub max_error_share: f64,
    /// Most answers that may differ from the first one to the same request.
    pub max_changed_answers: usize,
    /// Most restarts.
    pub max_restarts: usize,
    /// Largest growth of memory from the second to the last quarter of the run, as a share.
    pub max_memory_growth_share: f64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            duration_s: 600.0,
            concurrency: 4,
            max_tokens: 64,
            seed: 20_240_607,
            max_error_share: 0.0,
            max_changed_answers: 0,
            max_restarts: 0,
            max_memory_growth_share: 0.05,
        }
    }
}

/// Resident memory at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct MemorySample {
    /// Seconds since the start of the run.
    pub at_s: f64,
    /// Resident memory in bytes.
    pub bytes: f64,
}

/// The memory of the service over a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Memory {
    /// Median of the second quarter, in bytes.
    pub early_bytes: f64,
    /// Median of the last quarter, in bytes.
    pub late_bytes: f64,
    /// Growth between them, as a share.
    pub growth_share: f64,
    /// All samples.
    pub samples: Vec<MemorySample>,
}

/// A run of `soak`.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Version of this program.
    pub tool_version: &'static str,
    /// `soak`.
    pub command: &'static str,
    /// Address of the service.
    pub endpoint: String,
    /// Address of its metrics, null when none was given.
    pub metrics_endpoint: Option<String>,
    /// Its model.
    pub model: Model,
    /// How the run was made.
    pub settings: Settings,
    /// Outcome of the run.
    pub verdict: Verdict,
    /// Why it is none of pass.
    pub reasons: Vec<String>,
    /// Why the run ended early.
    pub error: Option<String>,
    /// Requests made.
    pub requests: usize,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Failed requests by cause.
    pub errors: BTreeMap<String, usize>,
    /// Answers that differ from the first one to the same request.
    pub changed_answers: usize,
    /// Requests whose answer changed first.
    pub first_changes: Vec<String>,
    /// Restarts seen in the metrics, null without metrics.
    pub restarts: Option<usize>,
    /// Memory, null without metrics.
    pub memory: Option<Memory>,
    /// Median and 99th percentile of the time of a request, in seconds, null when nothing was answered.
    pub request_seconds: Option<[f64; 2]>,
}

/// Metrics of a service.
pub struct MetricsPage {
    /// The connection; its address is that of the page.
    pub client: Client,
}

impl MetricsPage {
    fn read(&self) -> Result<Page, CouldNotRun> {
        let answer = self.client.get("")?;
        if answer.status != 200 {
            return Err(CouldNotRun(format!(
                "GET {}: {} {}",
                self.client.base(),
                answer.status,
                shorten(&answer.text())
            )));
        }
        Ok(Page::read(&answer.text()))
    }
}

/// What the callers saw.
#[derive(Default)]
struct Seen {
    requests: usize,
    generated_tokens: u64,
    errors: BTreeMap<String, usize>,
    /// The first answer to each request.
    first: Vec<Option<Found>>,
    changed_answers: usize,
    first_changes: Vec<String>,
    seconds: Vec<f64>,
}

/// What the metrics showed.
#[derive(Default)]
struct Watched {
    samples: Vec<MemorySample>,
    restarts: usize,
    unread: usize,
}

/// Runs the soak. `progress` is told how many of how many seconds are over.
pub fn run(
    service: &Service,
    metrics: Option<&MetricsPage>,
    cases: &[Case],
    settings: &Settings,
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Report {
    let asks = asks(cases, settings);
    let seen = Mutex::new(Seen {
        first: vec![None; asks.len()],
        ..Seen::default()
    });
    let mut report = Report {
        schema_version: SCHEMA_VERSION,
        tool_version: env!("CARGO_PKG_VERSION"),
        command: "soak",
        endpoint: service.client().base().to_owned(),
        metrics_endpoint: metrics.map(|metrics| metrics.client.base().to_owned()),
        model: service.model().clone(),
        settings: settings.clone(),
        verdict: Verdict::CouldNotRun,
        reasons: Vec::new(),
        error: None,
        requests: 0,
        generated_tokens: 0,
        errors: BTreeMap::new(),
        changed_answers: 0,
        first_changes: Vec::new(),
        restarts: None,
        memory: None,
        request_seconds: None,
    };
    // Before the load: a service that can't be asked at all is no finding of a soak.
    let first = asks.first().map(|ask| service.ask(ask.api, &ask.fields));
    let page = metrics.map(MetricsPage::read).transpose();
    let page = match (first, page) {
        (Some(Ok(Found::Generation(_))), Ok(page)) => page,
        (Some(Ok(found)), _) => {
            report.error = Some(format!("the first request was answered with {found}"));
            return report;
        }
        (Some(Err(error)), _) | (_, Err(error)) => {
            report.error = Some(error.0);
            return report;
        }
        (None, _) => {
            report.error = Some("there is nothing to ask".to_owned());
            return report;
        }
    };
    let watched = ask_until_over(
        service,
        metrics.zip(page),
        cases,
        &asks,
        settings,
        &seen,
        progress,
    );
    let seen = seen.into_inner().unwrap_or_else(PoisonError::into_inner);
    report.requests = seen.requests;
    report.generated_tokens = seen.generated_tokens;
    report.errors = seen.errors;
    report.changed_answers = seen.changed_answers;
    report.first_changes = seen.first_changes;
    report.request_seconds = percentile(&seen.seconds, 0.5)
        .zip(percentile(&seen.seconds, 0.99))
        .map(|(median, slow)| [median, slow]);
    if let Some(watched) = watched {
        report.restarts = Some(watched.restarts);
        if watched.unread > 0 {
            let unread = format!("metrics, {} times not answered", watched.unread);
            report.reasons.push(unread);
        }
        report.memory = memory_of(watched.samples);
    }
    report.judge();
    report
}

fn asks(cases: &[Case], settings: &Settings) -> Vec<Ask> {
    let settings = plan::Settings {
        max_tokens: settings.max_tokens,
        seed: settings.seed,
        samplings: vec![Sampling::Greedy, Sampling::Seeded],
        ..plan::Settings::default()
    };
    plan::asks(cases, &settings)
}

fn ask_until_over(
    service: &Service,
    metrics: Option<(&MetricsPage, Page)>,
    cases: &[Case],
    asks: &[Ask],
    settings: &Settings,
    seen: &Mutex<Seen>,
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Option<Watched> {
    let start = Instant::now();
    let duration = Duration::from_secs_f64(settings.duration_s);
    let next = AtomicUsize::new(0);
    let over = AtomicBool::new(false);
    let caller = || {
        while start.elapsed() < duration {
            let turn = next.fetch_add(1, Ordering::Relaxed);
            let index = turn % asks.len();
            // Every other round of the same request is a stream.
            let streamed = (turn / asks.len() + index) % 2 == 1;
            let asked = Instant::now();
            let ask = &asks[index];
            let found = if streamed {
                service.stream(ask.api, &ask.fields, || true)
            } else {
                service.ask(ask.api, &ask.fields)
            };
            let name = &cases[ask.case].id;
            let failed = lock(seen).add(index, name, found, asked.elapsed());
            if failed {
                thread::sleep(PAUSE_AFTER_ERROR);
            }
            progress(
                start.elapsed().as_secs() as usize,
                duration.as_secs() as usize,
            );
        }
    };
    let watcher = || {
        let (metrics, mut last) = metrics?;
        let mut watched = Watched::default();
        let interval = (duration / SAMPLES).max(LEAST_SAMPLE_INTERVAL);
        loop {
            // The last look is after the last answer.
            let ending = over.load(Ordering::Acquire);
            match metrics.read() {
                Ok(page) => {
                    watched.restarts += usize::from(page.restarted_since(&last));
                    let at_s = start.elapsed().as_secs_f64();
                    let sample = page
                        .resident_bytes()
                        .map(|bytes| MemorySample { at_s, bytes });
                    watched.samples.extend(sample);
                    last = page;
                }
                Err(_) => watched.unread += 1,
            }
            if ending {
                return Some(watched);
            }
            thread::park_timeout(interval);
        }
    };
    thread::scope(|scope| {
        let watcher = scope.spawn(watcher);
        let callers: Vec<_> = (0..settings.concurrency)
            .map(|_| scope.spawn(caller))
            .collect();
        for caller in callers {
            if let Err(panic) = caller.join() {
                over.store(true, Ordering::Release);
                std::panic::resume_unwind(panic);
            }
        }
        over.store(true, Ordering::Release);
        watcher.thread().unpark();
        watcher
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn lock(seen: &Mutex<Seen>) -> MutexGuard<'_, Seen> {
    seen.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Seen {
    /// Counts an answer; true when it is an error.
    fn add(
        &mut self,
        index: usize,
        name: &str,
        found: Result<Found, CouldNotRun>,
        took: Duration,
    ) -> bool {
        self.requests += 1;
        let mut found = match found {
            Ok(found @ Found::Generation(_)) => found,
            Ok(other) => return self.failed(other.to_string()),
            Err(error) => return self.failed(error.0),
        };
        self.seconds.push(took.as_secs_f64());
        if let Found::Generation(generation) = &mut found {
            self.generated_tokens += crate::lossless::compare::tokens(generation);
            // Streams and whole answers put them into different places, if anywhere.
            generation.prompt_token_ids = None;
        }
        match &self.first[index] {
            None => self.first[index] = Some(found),
            Some(first) => {
                if let Some((aspect, position)) = first_difference(first, &found, None) {
                    self.changed_answers += 1;
                    if self.first_changes.len() < ERROR_KINDS {
                        self.first_changes
                            .push(format!("{name}: {aspect:?} at {position}"));
                    }
                }
            }
        }
        false
    }

    fn failed(&mut self, cause: String) -> bool {
        let known = self.errors.contains_key(&cause) || self.errors.len() < ERROR_KINDS;
        let cause = if known { cause } else { "others".to_owned() };
        *self.errors.entry(cause).or_default() += 1;
        true
    }
}

/// Early and late memory; `None` for fewer samples than quarters.
fn memory_of(samples: Vec<MemorySample>) -> Option<Memory> {
    let quarter = samples.len() / 4;
    let median = |samples: &[MemorySample]| {
        let bytes: Vec<f64> = samples.iter().map(|sample| sample.bytes).collect();
        percentile(&bytes, 0.5)
    };
    // The first quarter warms up.
    let early_bytes = median(samples.get(quarter..2 * quarter)?)?;
    let late_bytes = median(&samples[samples.len() - quarter..])?;
    Some(Memory {
        early_bytes,
        late_bytes,
        growth_share: late_bytes / early_bytes - 1.0,
        samples,
    })
}

impl Report {
    fn judge(&mut self) {
        let failed: usize = self.errors.values().sum();
        let mut wrong = Vec::new();
        let mut doubts = std::mem::take(&mut self.reasons);
        let share = failed as f64 / self.requests.max(1) as f64;
        if share > self.settings.max_error_share {
            wrong.push(format!("{failed} of {} requests failed", self.requests));
        }
        if self.changed_answers > self.settings.max_changed_answers {
            wrong.push(format!(
                "{} answers differ from the first one to the same request",
                self.changed_answers
            ));
        }
        match self.restarts {
            Some(restarts) if restarts > self.settings.max_restarts => {
                wrong.push(format!("{restarts} restarts"));
            }
            _ => {}
        }
        match &self.memory {
            Some(memory) if memory.growth_share > self.settings.max_memory_growth_share => {
                wrong.push(format!(
                    "memory grew by {:.1} %, at most {:.1} % is allowed",
                    100.0 * memory.growth_share,
                    100.0 * self.settings.max_memory_growth_share
                ));
            }
            None if self.metrics_endpoint.is_some() => doubts.push(
                "the metrics say nothing, or not often enough, of resident memory".to_owned(),
            ),
            _ => {}
        }
        self.verdict = match (wrong.is_empty(), doubts.is_empty()) {
            (false, _) => Verdict::Fail,
            (true, false) => Verdict::Inconclusive,
            (true, true) => Verdict::Pass,
        };
        self.reasons = wrong;
        self.reasons.append(&mut doubts);
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "outrider-verify {} soak {}",
            self.tool_version, self.endpoint
        )?;
        writeln!(f, "{}", self.model)?;
        writeln!(
            f,
            "{} requests and {} tokens in {:.0} s, {} in flight",
            self.requests,
            self.generated_tokens,
            self.settings.duration_s,
            self.settings.concurrency
        )?;
        if let Some([median, slow]) = self.request_seconds {
            writeln!(
                f,
                "a request took {median:.2} s, one of a hundred {slow:.2} s and more"
            )?;
        }
        for (cause, count) in &self.errors {
            writeln!(f, "failed {count} times: {cause}")?;
        }
        for change in &self.first_changes {
            writeln!(f, "changed: {change}")?;
        }
        match (&self.memory, self.restarts) {
            (Some(memory), Some(restarts)) => writeln!(
                f,
                "memory {:.1} MiB, then {:.1} MiB ({:+.1} %), {restarts} restarts",
                memory.early_bytes / f64::from(1 << 20),
                memory.late_bytes / f64::from(1 << 20),
                100.0 * memory.growth_share
            )?,
            (None, Some(restarts)) => writeln!(f, "{restarts} restarts")?,
            _ => writeln!(
                f,
                "memory and restarts were not looked at, give --metrics for that"
            )?,
        }
        match &self.error {
            Some(error) => writeln!(f, "could not run: {error}"),
            None if self.reasons.is_empty() => writeln!(f, "{}", self.verdict),
            None => writeln!(f, "{}: {}", self.verdict, self.reasons.join("; ")),
        }
    }
}
