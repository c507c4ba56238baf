//! Runs what can block or crash in a process of its own, with a time limit.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, raise};
use outrider_server::model::runtime::{NO_TELEMETRY, TELEMETRY_VARIABLE};

/// Between two looks whether a child has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Most bytes that are kept of what a child writes.
const OUTPUT_LIMIT_BYTES: u64 = 4 << 20;

/// Most bytes of its complaints that an error repeats.
const COMPLAINT_BYTES: usize = 600;

/// Why a child said nothing of use.
#[derive(Debug, thiserror::Error)]
pub enum ChildError {
    /// It could not be run.
    #[error("cannot run {program}: {source}")]
    Run {
        /// The program.
        program: String,
        /// Why.
        source: io::Error,
    },
    /// It took too long, and was ended.
    #[error("no answer within {limit_ms} ms")]
    Timeout {
        /// The limit in milliseconds.
        limit_ms: u128,
    },
    /// There can be no thread that waits for it.
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
    /// Reading ended in a panic, whose message is on standard error.
    #[error("reading it ended in a fault of this program")]
    Panicked,
    /// It failed.
    #[error("{status}: {complaint}")]
    Failed {
        /// How it ended.
        status: std::process::ExitStatus,
        /// What it wrote to standard error, the end of it.
        complaint: String,
    },
}

/// What `program` with `arguments` writes to standard output within `limit`.
///
/// # Errors
///
/// It can't be run, takes too long (and is killed then), or fails.
pub fn run(program: &Path, arguments: &[&str], limit: Duration) -> Result<String, ChildError> {
    let failed = |source| ChildError::Run {
        program: program.display().to_string(),
        source,
    };
    let mut child = Command::new(program)
        .args(arguments)
        .env(TELEMETRY_VARIABLE, NO_TELEMETRY)
        // Its end tells the child that nobody waits any more, see [`end_with_parent`].
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let mut aside = || {
        let output = read_aside(child.stdout.take())?;
        io::Result::Ok((output, read_aside(child.stderr.take())?))
    };
    let (output, complaints) = match aside() {
        Ok(pipes) => pipes,
        Err(error) => {
            let _ = child.kill();
            let _ = child.wait();
            return Err(ChildError::Thread(error));
        }
    };
    let began = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().map_err(failed)? {
            break status;
        }
        if began.elapsed() >= limit {
            // A child that is stuck in the kernel can't be waited for: it is left to end when it can.
            let _ = child.kill();
            return Err(ChildError::Timeout {
                limit_ms: limit.as_millis(),
            });
        }
        thread::sleep(POLL_INTERVAL);
    };
    // A grandchild could hold the pipes open; nothing is waited for longer than the limit.
    let rest = limit.saturating_sub(began.elapsed()) + POLL_INTERVAL;
    let text = |pipe: mpsc::Receiver<Vec<u8>>| {
        let bytes = pipe.recv_timeout(rest).unwrap_or_default();
        String::from_utf8_lossy(&bytes).trim().to_owned()
    };
    if status.success() {
        return Ok(text(output));
    }
    let complaint = text(complaints);
    let tail_at = complaint
        .char_indices()
        .map(|(at, _)| at)
        .find(|at| complaint.len() - at <= COMPLAINT_BYTES);
    Err(ChildError::Failed {
        status,
        complaint: complaint[tail_at.unwrap_or(0)..].to_owned(),
    })
}

fn read_aside(pipe: Option<impl Read + Send + 'static>) -> io::Result<mpsc::Receiver<Vec<u8>>> {
    let (sender, receiver) = mpsc::channel();
    if let Some(pipe) = pipe {
        thread::Builder::new().spawn(move || {
            let mut bytes = Vec::new();
            let _ = pipe.take(OUTPUT_LIMIT_BYTES).read_to_end(&mut bytes);
            let _ = sender.send(bytes);
        })?;
    }
    Ok(receiver)
}

/// Lets this process end when the one that started it with a pipe as standard input is gone: what it may hang in would outlive it for good.
pub fn end_with_parent() {
    let input = File::from(match io::stdin().as_fd().try_clone_to_owned() {
        Ok(input) => input,
        // Standard input is closed: nobody holds the other end of it.
        Err(_) => return,
    });
    let is_pipe = input
        .metadata()
        .is_ok_and(|metadata| metadata.file_type().is_fifo());
    if is_pipe {
        let (begun, has_begun) = mpsc::channel();
        // Without a thread it ends as it would have: by itself, or at the limit of who waits for it.
        let thread = thread::Builder::new().spawn(move || {
            let _ = begun.send(());
            let _ = io::copy(&mut &input, &mut io::sink());
            // An orderly exit would wait for the loader, and it may be the loader that hangs.
            let _ = raise(Signal::SIGKILL);
        });
        // A thread that begins needs the loader as well.
        if thread.is_ok() {
            let _ = has_begun.recv();
        }
    }
}

/// What `read` gives within `limit`; a reader that does not come back is left alone.
///
/// For what can block in the kernel but cannot crash, such as a file system whose server is gone.
pub fn within<T: Send + 'static>(
    limit: Duration,
    read: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ChildError> {
    let (sender, receiver) = mpsc::channel();
    thread::Builder::new()
        .spawn(move || {
            let _ = sender.send(read());
        })
        .map_err(ChildError::Thread)?;
    receiver.recv_timeout(limit).map_err(|error| match error {
        RecvTimeoutError::Timeout => ChildError::Timeout {
            limit_ms: limit.as_millis(),
        },
        RecvTimeoutError::Disconnected => ChildError::Panicked,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, limit: Duration) -> Result<String, String> {
        run(Path::new("/bin/sh"), &["-c", script], limit).map_err(|error| error.to_string())
    }

    #[test]
    fn an_answer_a_failure_and_a_hang_are_told_apart() {
        let long = Duration::from_secs(60);
        assert_eq!(shell("echo yes", long).unwrap(), "yes");
        let error = shell("echo no >&2; exit 3", long).unwrap_err();
        assert_eq!(error, "exit status: 3: no");
        let error = shell("exec sleep 600", Duration::from_millis(20)).unwrap_err();
        assert_eq!(error, "no answer within 20 ms");
        let error = run(Path::new("/no/such/program"), &[], long).unwrap_err();
        assert!(error.to_string().starts_with("cannot run"), "{error}");
    }

    #[test]
    fn a_reader_that_does_not_come_back_is_an_error() {
        assert_eq!(within(Duration::from_secs(60), || 7).unwrap(), 7);
        let (never, forever) = mpsc::channel::<()>();
        let stuck = within(Duration::from_millis(1), move || forever.recv());
        assert!(
            matches!(stuck, Err(ChildError::Timeout { .. })),
            "{stuck:?}"
        );
        drop(never);
        let fault = within(Duration::from_secs(60), || {
            std::panic::resume_unwind(Box::new("a fault"))
        });
        let fault: Result<(), _> = fault;
        assert!(matches!(fault, Err(ChildError::Panicked)), "{fault:?}");
    }
}
