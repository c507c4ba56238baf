//! `baseline`: does a service still say what it said?
//!
//! A baseline is a file of requests with the token ids of their answers, one JSON object a line, made to be kept under version control: the same
//! service gives the same bytes. Its name is the bundle digest, so that weights, runtime, driver or image can change and be held to it.
//! Answers are recorded without drafting where the service has the switch, and checked as the service answers by itself.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::lossless::compare::{Aspect, compared_tokens, first_difference};
use crate::lossless::plan::{self, Sampling, Settings};
use crate::lossless::report::{ComparedBy, Continuation, smallest_shown_rate};
use crate::pool;
use crate::prompts::Case;
use crate::report::{Model, SCHEMA_VERSION, Verdict};
use crate::service::{CouldNotRun, Found, Service};
use crate::wire::{Api, Generation, Usage, shorten};

/// Version of the file format.
pub const FILE_VERSION: u32 = 1;
/// Differences that are shown as text.
const SHOWN_DIFFERENCES: usize = 10;

/// Why a baseline can't be used.
#[derive(Debug, thiserror::Error)]
pub enum BaselineError {
    /// It can't be read or written.
    #[error("{}", path.display())]
    File {
        /// Which file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// A line is not what it should be.
    #[error("{}, line {line}: {why}", path.display())]
    Line {
        /// Which file.
        path: PathBuf,
        /// Which line, from 1.
        line: usize,
        /// What is wrong with it.
        why: String,
    },
}

/// The first line of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Header {
    /// [`FILE_VERSION`].
    pub baseline_version: u32,
    /// Name of the model.
    pub model: String,
    /// Digest of the bundle, where the service gave one.
    pub bundle_digest: Option<String>,
    /// Version of the program that recorded it.
    pub tool_version: String,
}

/// Every other line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// The case.
    pub case: String,
    /// Its scenario.
    pub scenario: String,
    /// How tokens were chosen.
    pub sampling: Sampling,
    /// The interface.
    pub api: Api,
    /// The request without model and extensions.
    pub request: Map<String, Value>,
    /// Token ids of the answer, where the service returns them.
    pub token_ids: Option<Vec<u64>>,
    /// The text.
    pub text: String,
    /// Why it ended.
    pub finish_reason: Option<String>,
    /// Tokens of the prompt and of the answer.
    pub usage: Option<Usage>,
}

impl Record {
    fn answer(&self) -> Found {
        Found::Generation(Box::new(Generation {
            text: self.text.clone(),
            finish_reason: self.finish_reason.clone(),
            token_ids: self.token_ids.clone(),
            prompt_token_ids: None,
            usage: self.usage,
            speculative: None,
        }))
    }
}

/// A file's content.
#[derive(Clone, Debug, PartialEq)]
pub struct Baseline {
    /// What was recorded.
    pub header: Header,
    /// The answers.
    pub records: Vec<Record>,
}

impl Baseline {
    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self, BaselineError> {
        let text = std::fs::read_to_string(path).map_err(|source| BaselineError::File {
            path: path.to_owned(),
            source,
        })?;
        let fault = |line, why| BaselineError::Line {
            path: path.to_owned(),
            line,
            why,
        };
        let mut lines = text.lines().enumerate();
        let (_, first) = lines
            .next()
            .ok_or_else(|| fault(1, "it is empty".to_owned()))?;
        let header: Header =
            serde_json::from_str(first).map_err(|error| fault(1, error.to_string()))?;
        if header.baseline_version != FILE_VERSION {
            let version = header.baseline_version;
            let why = format!("`baseline_version` is {version}, expected {FILE_VERSION}");
            return Err(fault(1, why));
        }
        let records = lines
            .map(|(index, line)| {
                serde_json::from_str(line).map_err(|error| fault(index + 1, error.to_string()))
            })
            .collect::<Result<_, _>>()?;
        Ok(Self { header, records })
    }

    /// Writes a file: aside, synced and renamed.
    pub fn write(&self, path: &Path) -> Result<(), BaselineError> {
        let write = || -> std::io::Result<()> {
            let mut text = serde_json::to_string(&self.header)?;
            text.push('\n');
            for record in &self.records {
                text.push_str(&serde_json::to_string(record)?);
                text.push('\n');
            }
            crate::files::write(path, text.as_bytes())
        };
        write().map_err(|source| BaselineError::File {
            path: path.to_owned(),
            source,
        })
    }
}

/// The file of a service in a directory of baselines: its bundle digest, or the model's name where it gives none.
pub fn file_of(directory: &Path, model: &Model) -> PathBuf {
    let name = model.bundle_digest.as_deref().unwrap_or(&model.id);
    let safe = |char: char| {
        if char.is_ascii_alphanumeric() || matches!(char, '-' | '_' | '.') {
            char
        } else {
            '-'
        }
    };
    directory.join(format!(
        "{}.jsonl",
        name.chars().map(safe).collect::<String>()
    ))
}

/// Asks everything and keeps the answers.
///
/// # Errors
///
/// When a case has no answer: a baseline that silently lacks some would check less than it seems to.
pub fn record(
    service: &Service,
    cases: &[Case],
    settings: &Settings,
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Result<Baseline, CouldNotRun> {
    let asks = plan::asks(cases, settings);
    let answered = AtomicUsize::new(0);
    let records = pool::map(asks.len(), settings.concurrency, |index| {
        let ask = &asks[index];
        let case = &cases[ask.case];
        let found = without_drafting(service, ask.api, &ask.fields)?;
        let Found::Generation(answer) = found else {
            return Err(CouldNotRun(format!(
                "{} can't be recorded: {found}",
                case.id
            )));
        };
        progress(answered.fetch_add(1, Ordering::Relaxed) + 1, asks.len());
        Ok(Record {
            case: case.id.clone(),
            scenario: case.scenario.clone(),
            sampling: ask.sampling,
            api: ask.api,
            request: ask.fields.clone(),
            token_ids: answer.token_ids,
            text: answer.text,
            finish_reason: answer.finish_reason,
            usage: answer.usage,
        })
    })?;
    let model = service.model();
    Ok(Baseline {
        header: Header {
            baseline_version: FILE_VERSION,
            model: model.id.clone(),
            bundle_digest: model.bundle_digest.clone(),
            tool_version: env!("CARGO_PKG_VERSION").to_owned(),
        },
        records,
    })
}

fn without_drafting(
    service: &Service,
    api: Api,
    fields: &Map<String, Value>,
) -> Result<Found, CouldNotRun> {
    let mut fields = fields.clone();
    if service.model().drafting.is_some() {
        fields.insert("speculative".into(), json!({ "enabled": false }));
    }
    service.ask(api, &fields)
}

/// An answer that is not the recorded one.
#[derive(Clone, Debug, Serialize)]
pub struct Difference {
    /// The case.
    pub case: String,
    /// How tokens were chosen.
    pub sampling: Sampling,
    /// What differs first.
    pub aspect: Aspect,
    /// Where: tokens for `token`, characters for `text`, else the number of tokens.
    pub position: usize,
    /// Whether the service gives the recorded answer without drafting: then drafting is at fault, else the target is another one.
    pub recorded_without_drafting: bool,
    /// The prompt's request.
    pub request: Map<String, Value>,
    /// How the record goes on.
    pub recorded: Continuation,
    /// How the service goes on.
    pub found: Continuation,
}

/// A run of `baseline check`.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Version of this program.
    pub tool_version: &'static str,
    /// `baseline check`.
    pub command: &'static str,
    /// Address of the service.
    pub endpoint: String,
    /// Its model.
    pub model: Model,
    /// The file.
    pub file: String,
    /// What was recorded.
    pub baseline: Header,
    /// What answers were compared by.
    pub compared_by: ComparedBy,
    /// Outcome of the run.
    pub verdict: Verdict,
    /// Why the run ended early.
    pub error: Option<String>,
    /// Answers that were checked.
    pub answers: usize,
    /// Of these, equal to the record.
    pub equal: usize,
    /// Tokens compared.
    pub compared_tokens: u64,
    /// The smallest share of wrong tokens that a check of so many shows with a probability of 99 %.
    pub smallest_shown_fault_rate: Option<f64>,
    /// Everything that is not equal.
    pub differences: Vec<Difference>,
}

/// Holds a service to a baseline that was read from `file`.
pub fn check(
    service: &Service,
    baseline: &Baseline,
    file: &Path,
    concurrency: usize,
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Report {
    let mut report = Report {
        schema_version: SCHEMA_VERSION,
        tool_version: env!("CARGO_PKG_VERSION"),
        command: "baseline check",
        endpoint: service.client().base().to_owned(),
        model: service.model().clone(),
        file: file.display().to_string(),
        baseline: baseline.header.clone(),
        compared_by: ComparedBy::TokenIds,
        verdict: Verdict::CouldNotRun,
        error: None,
        answers: 0,
        equal: 0,
        compared_tokens: 0,
        smallest_shown_fault_rate: None,
        differences: Vec::new(),
    };
    match compare(service, baseline, concurrency, progress, &mut report) {
        Ok(()) if report.answers == 0 => report.verdict = Verdict::Inconclusive,
        Ok(()) if report.differences.is_empty() => report.verdict = Verdict::Pass,
        Ok(()) => report.verdict = Verdict::Fail,
        Err(error) => report.error = Some(error.0),
    }
    report.smallest_shown_fault_rate = smallest_shown_rate(report.compared_tokens);
    report
}

fn compare(
    service: &Service,
    baseline: &Baseline,
    concurrency: usize,
    progress: &(dyn Fn(usize, usize) + Sync),
    report: &mut Report,
) -> Result<(), CouldNotRun> {
    let records = &baseline.records;
    let answered = AtomicUsize::new(0);
    let answers = pool::map(records.len(), concurrency, |index| {
        let record = &records[index];
        let mut found = service.ask(record.api, &record.request)?;
        if let Found::Generation(found) = &mut found {
            // Prompts are recorded as text.
            found.prompt_token_ids = None;
        }
        progress(answered.fetch_add(1, Ordering::Relaxed) + 1, records.len());
        Ok(found)
    })?;
    for (record, found) in records.iter().zip(answers) {
        let recorded = record.answer();
        let difference = first_difference(&recorded, &found, None);
        report.answers += 1;
        report.compared_tokens += compared_tokens(&recorded, &found, difference);
        let ids = |found: &Found| match found {
            Found::Generation(found) => found.token_ids.is_some(),
            _ => true,
        };
        if !ids(&recorded) || !ids(&found) {
            report.compared_by = ComparedBy::Text;
        }
        let Some((aspect, position)) = difference else {
            report.equal += 1;
            continue;
        };
        let mut again = without_drafting(service, record.api, &record.request)?;
        if let Found::Generation(again) = &mut again {
            again.prompt_token_ids = None;
        }
        report.differences.push(Difference {
            case: record.case.clone(),
            sampling: record.sampling,
            aspect,
            position,
            recorded_without_drafting: first_difference(&recorded, &again, None).is_none(),
            request: record.request.clone(),
            recorded: Continuation::of(&recorded, &found, position),
            found: Continuation::of(&found, &recorded, position),
        });
    }
    Ok(())
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "outrider-verify {} baseline check {}",
            self.tool_version, self.endpoint
        )?;
        write!(f, "{}", self.model)?;
        writeln!(
            f,
            "baseline {}\n  bundle digest   {}\n",
            self.file,
            self.baseline
                .bundle_digest
                .as_deref()
                .unwrap_or("not given")
        )?;
        for difference in self.differences.iter().take(SHOWN_DIFFERENCES) {
            writeln!(
                f,
                "DIFFERENT  {}, {:?} at {}",
                difference.case, difference.aspect, difference.position
            )?;
            for (name, side) in [
                ("recorded", &difference.recorded),
                ("found", &difference.found),
            ] {
                write!(f, "        {name:<9} {:?}", shorten(&side.text))?;
                if let Some(ids) = &side.token_ids {
                    write!(f, " {ids:?}")?;
                }
                writeln!(f)?;
            }
            let cause = if difference.recorded_without_drafting {
                "drafting: without it the recorded answer comes"
            } else {
                "the target: without drafting it is not the recorded answer either"
            };
            writeln!(f, "        cause     {cause}")?;
        }
        if let Some(more) = self.differences.len().checked_sub(SHOWN_DIFFERENCES + 1) {
            writeln!(f, "… and {} more", more + 1)?;
        }
        writeln!(
            f,
            "{} of {} answers are equal, {} tokens compared",
            self.equal, self.answers, self.compared_tokens
        )?;
        match &self.error {
            Some(error) => writeln!(f, "could not run to the end: {error}"),
            None => writeln!(f, "{}", self.verdict),
        }
    }
}
