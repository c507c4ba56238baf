//! The audit log: one JSON line for each generation request, also for those that are refused, cancelled or cut short.
//!
//! Lines are written by a thread of their own from a bounded queue, so that a slow or full disk holds up no request.
//! While lines can't be written the server says so, in [`AuditLog::fault`] for `/readyz` and in its metrics; the thread tries again until it succeeds.
//! Lines that find no place in the queue are lost, and the next one that does says how many.
//! What a record holds is gathered by `http`; this module knows no request.

mod file;
mod record;

use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub use record::{Body, Parameters, Record, SCHEMA_VERSION, Speculation, Texts};

use crate::config;
use crate::metrics;
use file::RotatingFile;

/// Lines that may wait to be written.
const QUEUE_LINES: usize = 4096;

/// Memory of the lines that may wait; with prompts in them, lines can be megabytes long.
const QUEUE_BYTES: usize = 64 << 20;

/// Between two attempts to write a line.
const RETRY: Duration = Duration::from_millis(500);

/// Longest work on the file, a line or its opening, that is no fault.
const SLOW_WORK: Duration = Duration::from_secs(5);

/// How long whoever has the file opened again waits for it.
const REOPEN: Duration = Duration::from_secs(5);

/// How long the last lines may take when the server ends.
const LAST_LINES: Duration = Duration::from_secs(5);

/// The file of the audit log can't be had.
#[derive(Debug, thiserror::Error)]
#[error("cannot append to {} (serving.audit.path): {source}", path.display())]
pub struct AuditError {
    /// The file.
    pub path: PathBuf,
    /// Why.
    pub source: io::Error,
}

/// The audit log of a server. Dropping the last handle ends it like [`AuditLog::end`].
#[derive(Clone, Debug)]
pub struct AuditLog(Arc<Handle>);

#[derive(Debug)]
struct Handle {
    path: PathBuf,
    keeps_texts: bool,
    shared: Arc<Shared>,
    writer: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug, Default)]
struct Shared {
    queue: Mutex<Queue>,
    /// Signalled when there is something to do for the writer.
    work: Condvar,
    /// Signalled when the writer has done what it was asked for.
    done: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    entries: VecDeque<Entry>,
    bytes: usize,
    /// Lines lost since the last entry.
    lost_lines: u64,
    /// Why the last line was not written.
    fault: Option<String>,
    /// Since when the writer is at work on the file.
    at_work_since: Option<Instant>,
    reopen: Reopen,
    ending: bool,
    ended: bool,
}

#[derive(Debug)]
struct Entry {
    record: Record,
    /// Lines lost before it.
    lost_lines: u64,
}

#[derive(Debug, Default)]
enum Reopen {
    #[default]
    Idle,
    Asked,
    Done(io::Result<()>),
}

impl AuditLog {
    /// Opens the file and starts the thread that writes it.
    ///
    /// # Errors
    ///
    /// The file can't be appended to, or there can be no thread.
    pub fn open(config: &config::Audit) -> Result<Self, AuditError> {
        let error = |source| AuditError {
            path: config.path.clone(),
            source,
        };
        let mut file = RotatingFile::open(&config.path, config.max_file_bytes, config.max_files)
            .map_err(error)?;
        let shared = Arc::new(Shared::default());
        let ended = Ended(Arc::clone(&shared));
        let thread = std::thread::Builder::new()
            .name("audit".to_owned())
            .spawn(move || run(&ended.0, &mut file))
            .map_err(error)?;
        Ok(Self(Arc::new(Handle {
            path: config.path.clone(),
            keeps_texts: config.prompt_text,
            shared,
            writer: Mutex::new(Some(thread)),
        })))
    }

    /// Whether records are to hold prompts and completions.
    pub fn keeps_texts(&self) -> bool {
        self.0.keeps_texts
    }

    /// Has a record written. It waits for nothing.
    pub fn write(&self, record: Record) {
        let mut queue = self.0.shared.lock();
        let bytes = record.bytes();
        // An empty queue takes any record, however long.
        let full = queue.entries.len() >= QUEUE_LINES
            || (!queue.entries.is_empty() && queue.bytes + bytes > QUEUE_BYTES);
        if full || queue.ending || queue.ended {
            queue.lost_lines += 1;
            metrics::audit_line_lost();
            if queue.fault.is_none() {
                let reason = "lines come faster than they can be written";
                tracing::error!(reason, "a line of the audit log is lost");
                queue.fault = Some(reason.to_owned());
            }
            return;
        }
        let lost_lines = std::mem::take(&mut queue.lost_lines);
        queue.bytes += bytes;
        queue.entries.push_back(Entry { record, lost_lines });
        drop(queue);
        self.0.shared.work.notify_one();
    }

    /// Why lines can't be written at present.
    pub fn fault(&self) -> Option<String> {
        let queue = self.0.shared.lock();
        let busy = queue.at_work_since.map(|since| since.elapsed());
        queue.fault.clone().or_else(|| {
            busy.filter(|busy| *busy > SLOW_WORK).map(|busy| {
                let seconds = busy.as_secs();
                format!("the file has not answered for {seconds} seconds")
            })
        })
    }

    /// Opens the file by its name again, so that one that was moved away is no longer written to. Blocks until that is done, or for a few seconds
    /// when the disk hangs.
    ///
    /// # Errors
    ///
    /// The file can't be appended to, and the log goes on in the one that is open; or it is not done yet, and will be once the disk answers.
    pub fn reopen(&self) -> Result<(), AuditError> {
        let mut queue = self.0.shared.lock();
        queue.reopen = Reopen::Asked;
        self.0.shared.work.notify_one();
        let waits = |queue: &mut Queue| !queue.ended && matches!(queue.reopen, Reopen::Asked);
        let waited = self.0.shared.done.wait_timeout_while(queue, REOPEN, waits);
        let (mut queue, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let source = match std::mem::take(&mut queue.reopen) {
            Reopen::Done(result) => return result.map_err(|source| self.0.error(source)),
            _ if queue.ended => io::Error::other("the audit log has ended"),
            waiting => {
                queue.reopen = waiting;
                let reason = "the open file does not answer";
                io::Error::new(io::ErrorKind::TimedOut, reason)
            }
        };
        Err(self.0.error(source))
    }

    /// Writes what waits, brings it to the disk and ends the log. Blocks until that is done, or for a few seconds when the disk hangs.
    pub fn end(&self) {
        self.0.end();
    }
}

impl Handle {
    fn error(&self, source: io::Error) -> AuditError {
        AuditError {
            path: self.path.clone(),
            source,
        }
    }

    fn end(&self) {
        let Some(thread) = self
            .writer
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
        else {
            return;
        };
        let mut queue = self.shared.lock();
        queue.ending = true;
        self.shared.work.notify_one();
        let running = |queue: &mut Queue| !queue.ended;
        let waited = self
            .shared
            .done
            .wait_timeout_while(queue, LAST_LINES, running);
        let (queue, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if queue.ended {
            drop(queue);
            // It has nothing left to do but to return.
            let _ = thread.join();
        } else {
            tracing::error!(
                waiting_lines = queue.entries.len(),
                path = %self.path.display(),
                "the audit log could not be brought to its end in time"
            );
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.end();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Works on the file, so that all can see since when.
    fn at_work<T>(&self, work: impl FnOnce() -> T) -> T {
        self.lock().at_work_since = Some(Instant::now());
        let result = work();
        self.lock().at_work_since = None;
        result
    }
}

/// Tells that the writer is gone, whichever way it ends.
struct Ended(Arc<Shared>);

impl Drop for Ended {
    fn drop(&mut self) {
        let mut queue = self.0.lock();
        queue.ended = true;
        if !queue.ending {
            queue.fault = Some("the thread that writes has ended".to_owned());
        }
        self.0.done.notify_all();
    }
}

fn run(shared: &Shared, file: &mut RotatingFile) {
    while let Some(entry) = next(shared, file) {
        write(shared, file, &entry);
    }
    if let Err(error) = file.sync() {
        tracing::error!(%error, "the audit log could not be brought to the disk");
    }
    let lost_lines = shared.lock().lost_lines;
    if lost_lines > 0 {
        tracing::error!(lost_lines, "the last lines of the audit log are lost");
    }
}

/// Waits for a line; `None` when there will be no more.
fn next(shared: &Shared, file: &mut RotatingFile) -> Option<Entry> {
    let mut queue = shared.lock();
    loop {
        if matches!(queue.reopen, Reopen::Asked) {
            drop(queue);
            reopen(shared, file);
            queue = shared.lock();
        } else if let Some(entry) = queue.entries.pop_front() {
            queue.bytes -= entry.record.bytes();
            return Some(entry);
        } else if queue.ending {
            return None;
        } else {
            let waited = shared.work.wait(queue);
            queue = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Writes a line, however many attempts it takes, unless the log is to end.
fn write(shared: &Shared, file: &mut RotatingFile, entry: &Entry) {
    let line = entry.record.line(entry.lost_lines);
    while let Err(error) = shared.at_work(|| file.append(&line)) {
        metrics::audit_error();
        let reason = error.to_string();
        let mut queue = shared.lock();
        if queue.fault.as_ref() != Some(&reason) {
            tracing::error!(reason, "the audit log can't be written");
            queue.fault = Some(reason);
        }
        if queue.ending {
            let waiting = std::mem::take(&mut queue.entries);
            let lost = std::iter::once(entry).chain(&waiting);
            let lost_lines: u64 = lost.map(|entry| 1 + entry.lost_lines).sum();
            queue.lost_lines += lost_lines;
            queue.bytes = 0;
            return;
        }
        let idle = |queue: &mut Queue| !queue.ending && !matches!(queue.reopen, Reopen::Asked);
        let waited = shared.work.wait_timeout_while(queue, RETRY, idle);
        let (queue, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let asked = matches!(queue.reopen, Reopen::Asked);
        drop(queue);
        if asked {
            reopen(shared, file);
        }
    }
    metrics::audit_line();
    let mut queue = shared.lock();
    // Half empty: a queue that is full again with the next line is no better.
    if queue.entries.len() <= QUEUE_LINES / 2
        && queue.bytes <= QUEUE_BYTES / 2
        && queue.fault.take().is_some()
    {
        tracing::info!("the audit log is written again");
    }
}

fn reopen(shared: &Shared, file: &mut RotatingFile) {
    let result = shared.at_work(|| file.reopen());
    shared.lock().reopen = Reopen::Done(result);
    shared.done.notify_all();
}

#[cfg(test)]
mod tests;
