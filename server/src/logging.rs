//! The log of operators: records of `tracing` as lines of text or JSON, on standard error or in a file.
//!
//! It owns which records are written and where to; [`LogControl`] changes both while the server runs.
//! The spans that [`crate::telemetry`] exports pass through here as well: those of requests always, those of engine steps at level debug.
//! Prompts and completions never come here.

use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal as _, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use tracing::{Level, Subscriber};
use tracing_subscriber::Registry;
use tracing_subscriber::filter::{FilterExt as _, Targets, filter_fn};
use tracing_subscriber::fmt::writer::BoxMakeWriter;
use tracing_subscriber::layer::{Layer as _, SubscriberExt as _};
use tracing_subscriber::reload;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::config::{LogFormat, Logging};
use crate::telemetry::Telemetry;

/// The log file can't be had.
#[derive(Debug, thiserror::Error)]
#[error("cannot append to {} (serving.logging.path): {source}", path.display())]
pub struct LogError {
    /// The file.
    pub path: PathBuf,
    /// Why.
    pub source: io::Error,
}

/// Starts the log of this process.
///
/// # Errors
///
/// The log file can't be appended to.
///
/// # Panics
///
/// The process has a log already.
pub fn start(logging: &Logging, telemetry: Option<&Telemetry>) -> Result<LogControl, LogError> {
    let (subscriber, control) = subscriber(logging, telemetry)?;
    subscriber.init();
    Ok(control)
}

/// Changes a log while it is in use.
#[derive(Clone)]
pub struct LogControl {
    records: reload::Handle<Targets, Registry>,
    spans: reload::Handle<Targets, Registry>,
    file: Option<Arc<LogFile>>,
}

impl LogControl {
    /// Logs records of `level` and more severe ones from now on.
    pub fn set_level(&self, level: Level) {
        // It fails only once the subscriber is gone, when nothing is logged any more.
        let _ = self.records.reload(filter(level));
        let _ = self.spans.reload(filter_of_spans(level));
    }

    /// Opens the log file by its name again, so that one that was moved away is no longer written to. Without a file it does nothing.
    ///
    /// # Errors
    ///
    /// The file can't be appended to; the log goes on in the one that is open.
    pub fn reopen(&self) -> Result<(), LogError> {
        self.file.as_ref().map_or(Ok(()), |file| file.reopen())
    }
}

fn subscriber(
    logging: &Logging,
    telemetry: Option<&Telemetry>,
) -> Result<(impl Subscriber + Send + Sync + use<>, LogControl), LogError> {
    let file = logging.path.as_deref().map(LogFile::open).transpose()?;
    let file = file.map(Arc::new);
    let writer = match &file {
        None => BoxMakeWriter::new(io::stderr),
        Some(file) => BoxMakeWriter::new(Arc::clone(file)),
    };
    let output = tracing_subscriber::fmt::layer()
        .with_target(false)
        .with_ansi(file.is_none() && io::stderr().is_terminal())
        .with_writer(writer);
    let output = match logging.format {
        LogFormat::Text => output.boxed(),
        // A record belongs to one span, that of a request or of a step; they are not nested.
        LogFormat::Json => output
            .json()
            .flatten_event(true)
            .with_span_list(false)
            .boxed(),
    };
    let (records, records_handle) = reload::Layer::new(filter(logging.level));
    let (spans, spans_handle) = reload::Layer::new(filter_of_spans(logging.level));
    let mut layers = vec![output.with_filter(records).boxed()];
    if let Some(telemetry) = telemetry {
        // Records are in the log already.
        let spans = spans.and(filter_fn(|metadata| metadata.is_span()));
        layers.push(telemetry.layer().with_filter(spans).boxed());
    }
    let control = LogControl {
        records: records_handle,
        spans: spans_handle,
        file,
    };
    Ok((tracing_subscriber::registry().with(layers), control))
}

/// What is logged at a level of ours. The libraries below have much to say that is of no use to an operator, until one looks for a fault.
fn filter(level: Level) -> Targets {
    let of_libraries = if level > Level::INFO {
        level
    } else {
        level.min(Level::WARN)
    };
    Targets::new()
        .with_default(of_libraries)
        // It calls it an error when a caller speaks bad HTTP or hangs up, and has nothing else to say of use to an operator.
        .with_target(
            "actix_http::h1::dispatcher",
            (level > Level::INFO).then_some(level),
        )
        .with_target("outrider", level)
}

/// Spans that are exported at a level of ours; those of requests are of use however little is logged.
fn filter_of_spans(level: Level) -> Targets {
    Targets::new().with_target("outrider", level.max(Level::INFO))
}

/// A file that records are appended to, each by one writer at a time.
struct LogFile {
    path: PathBuf,
    file: Mutex<File>,
}

impl LogFile {
    fn open(path: &Path) -> Result<Self, LogError> {
        Ok(Self {
            path: path.to_owned(),
            file: Mutex::new(append_to(path)?),
        })
    }

    fn reopen(&self) -> Result<(), LogError> {
        let file = append_to(&self.path)?;
        *self.file.lock().unwrap_or_else(PoisonError::into_inner) = file;
        Ok(())
    }
}

fn append_to(path: &Path) -> Result<File, LogError> {
    OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)
        .map_err(|source| LogError {
            path: path.to_owned(),
            source,
        })
}

impl Write for &LogFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .write(bytes)
    }

    /// Holds the file to the end of the record.
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .write_all(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_http_of_callers_is_no_error_of_ours() {
        let spoken = |level, target, of: Level| filter(level).would_enable(target, &of);
        let dispatcher = "actix_http::h1::dispatcher";
        assert!(!spoken(Level::INFO, dispatcher, Level::ERROR));
        assert!(spoken(Level::DEBUG, dispatcher, Level::ERROR));
        assert!(spoken(Level::INFO, "actix_http", Level::ERROR));
        assert!(spoken(Level::INFO, "ort", Level::WARN));
        assert!(!spoken(Level::INFO, "ort", Level::INFO));
        assert!(spoken(Level::INFO, "outrider_server::loader", Level::INFO));
        assert!(!spoken(
            Level::ERROR,
            "outrider_server::loader",
            Level::WARN
        ));
    }

    #[test]
    fn a_log_takes_another_level_and_a_new_file_while_it_is_in_use() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let moved = dir.path().join("log.1");
        let (subscriber, control) = subscriber(
            &Logging {
                level: Level::INFO,
                format: LogFormat::Text,
                path: Some(path.clone()),
            },
            None,
        )
        .unwrap();
        tracing::subscriber::with_default(subscriber, || {
            tracing::debug!("too much");
            control.set_level(Level::DEBUG);
            tracing::debug!("asked for");
            std::fs::rename(&path, &moved).unwrap();
            control.reopen().unwrap();
            control.set_level(Level::WARN);
            tracing::info!("no longer asked for");
            tracing::warn!("in the new file");
        });
        let messages = |path| {
            let text = std::fs::read_to_string(path).unwrap();
            text.lines()
                .map(|line| line.split_once(" ").unwrap().1.trim().to_owned())
                .collect::<Vec<_>>()
        };
        assert_eq!(messages(&moved), ["DEBUG asked for"]);
        assert_eq!(messages(&path), ["WARN in the new file"]);
    }

    #[test]
    fn a_log_that_cannot_be_opened_again_goes_on_in_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("logs").join("log");
        let moved = dir.path().join("moved");
        std::fs::create_dir(path.parent().unwrap()).unwrap();
        let (subscriber, control) = subscriber(
            &Logging {
                level: Level::INFO,
                format: LogFormat::Text,
                path: Some(path.clone()),
            },
            None,
        )
        .unwrap();
        tracing::subscriber::with_default(subscriber, || {
            std::fs::rename(path.parent().unwrap(), &moved).unwrap();
            let error = control.reopen().unwrap_err().to_string();
            assert!(
                error.contains(path.to_str().unwrap()) && error.contains("serving.logging.path"),
                "{error}"
            );
            tracing::info!("still here");
        });
        let text = std::fs::read_to_string(moved.join("log")).unwrap();
        assert!(text.contains("still here"), "{text}");
    }
}
