//! Runs `outrider-server` as a child process: start it, wait until it is ready, stop it.
//!
//! Settings travel as environment variables, so that no flag of the server has to be known here.
//! Readiness is asked of `/readyz`, with a deadline, and never guessed from time or log lines.

use std::ffi::OsString;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::NamedTempFile;

/// Between two questions whether the server is ready, or has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Attempts to find two free ports that nobody takes before the server binds them.
const PORT_ATTEMPTS: usize = 5;
/// The server's exit code when a port can't be had.
const EXIT_UNAVAILABLE: i32 = 69;
/// Most of a captured log that an error shows.
const LOG_TAIL_BYTES: usize = 8 << 10;

/// How to start a server.
#[derive(Clone, Debug)]
pub struct ServerCommand {
    /// The `outrider-server` executable.
    pub binary: PathBuf,
    /// Configuration keys by their dotted path; they win over `config`.
    pub settings: Vec<(String, String)>,
    /// Configuration file.
    pub config: Option<PathBuf>,
    /// Further arguments, as they are.
    pub arguments: Vec<OsString>,
    /// Who owns the terminal's output and signals.
    pub terminal: Terminal,
}

/// Who owns the terminal's output and signals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Terminal {
    /// The server writes to it; signals reach this process alone, which passes them on once each.
    Server,
    /// The server's output goes into a file that errors quote.
    Caller,
}

/// The name of the environment variable that sets a configuration key.
pub fn setting_variable(key: &str) -> String {
    format!("OUTRIDER__{}", key.replace('.', "__").to_uppercase())
}

/// A running server. Dropping it kills it.
#[derive(Debug)]
pub struct ServerProcess {
    child: Child,
    listen: SocketAddr,
    admin_listen: SocketAddr,
    log: Option<NamedTempFile>,
    exited: Option<ExitStatus>,
}

impl ServerCommand {
    /// A command for `binary` that serves `bundle` with the library `onnxruntime`.
    pub fn new(binary: PathBuf, bundle: &Path, onnxruntime: &Path) -> anyhow::Result<Self> {
        let text = |path: &Path| {
            let absolute = std::path::absolute(path)
                .with_context(|| format!("{} is no path", path.display()))?;
            let text = absolute.to_str().map(str::to_owned);
            text.with_context(|| format!("{} is not UTF-8", absolute.display()))
        };
        Ok(Self {
            binary,
            settings: vec![
                ("serving.bundle".to_owned(), text(bundle)?),
                (
                    "serving.runtime.onnxruntime_library".to_owned(),
                    text(onnxruntime)?,
                ),
            ],
            config: None,
            arguments: Vec::new(),
            terminal: Terminal::Caller,
        })
    }

    /// The same command with one more configuration key set.
    pub fn set(mut self, key: &str, value: impl ToString) -> Self {
        self.settings.push((key.to_owned(), value.to_string()));
        self
    }

    /// Starts the server on these addresses, without waiting for anything.
    pub fn start(
        &self,
        listen: SocketAddr,
        admin_listen: SocketAddr,
    ) -> anyhow::Result<ServerProcess> {
        let mut command = self.command();
        command
            .env(setting_variable("serving.listen"), listen.to_string())
            .env(
                setting_variable("serving.admin_listen"),
                admin_listen.to_string(),
            )
            .stdin(Stdio::null());
        let log = match self.terminal {
            Terminal::Server => {
                command.process_group(0);
                None
            }
            Terminal::Caller => {
                let log =
                    NamedTempFile::new().context("cannot make a file for the server's log")?;
                let output = log.reopen()?;
                command.stdout(output.try_clone()?).stderr(output);
                Some(log)
            }
        };
        let child = command
            .spawn()
            .with_context(|| format!("cannot run {}", self.binary.display()))?;
        Ok(ServerProcess {
            child,
            listen,
            admin_listen,
            log,
            exited: None,
        })
    }

    /// Starts the server on two free loopback ports and waits until it is ready.
    pub fn start_ready(&self, deadline: Duration) -> anyhow::Result<ServerProcess> {
        for attempt in 1.. {
            let (listen, admin_listen) = free_addresses()?;
            let mut server = self.start(listen, admin_listen)?;
            match server.wait_ready(deadline) {
                Ok(()) => return Ok(server),
                Err(error) => {
                    let port_taken = server
                        .exited
                        .is_some_and(|status| status.code() == Some(EXIT_UNAVAILABLE));
                    if !port_taken || attempt == PORT_ATTEMPTS {
                        return Err(error);
                    }
                }
            }
        }
        unreachable!("the last attempt returns")
    }

    /// The program with its arguments and settings, for a run that ends by itself.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.binary);
        for (key, value) in &self.settings {
            command.env(setting_variable(key), value);
        }
        if let Some(config) = &self.config {
            command.arg("--config").arg(config);
        }
        command.args(&self.arguments);
        command
    }
}

impl ServerProcess {
    /// Base URL of the OpenAI-compatible interface.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.listen)
    }

    /// Base URL of the admin interface.
    pub fn admin_endpoint(&self) -> String {
        format!("http://{}", self.admin_listen)
    }

    /// Process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits until `/readyz` answers 200. An error if the server ends before, or is not ready in time.
    pub fn wait_ready(&mut self, deadline: Duration) -> anyhow::Result<()> {
        let agent: ureq::Agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(Duration::from_secs(5)))
            .build()
            .into();
        let url = format!("{}/readyz", self.admin_endpoint());
        let began = Instant::now();
        loop {
            if let Some(status) = self.try_wait()? {
                bail!(
                    "the server ended before it was ready: {status}{}",
                    self.log_tail()
                );
            }
            let answer = match agent.get(&url).call() {
                // If another process held the port, this one has ended, and the next turn says so.
                Ok(answer) if answer.status() == 200 && self.try_wait()?.is_none() => return Ok(()),
                Ok(answer) => answer.status().to_string(),
                Err(error) => error.to_string(),
            };
            if began.elapsed() > deadline {
                let seconds = deadline.as_secs();
                bail!(
                    "the server was not ready after {seconds} s; {url}: {answer}{}",
                    self.log_tail()
                );
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// How the server ended, if it has.
    pub fn try_wait(&mut self) -> anyhow::Result<Option<ExitStatus>> {
        if self.exited.is_none() {
            self.exited = self
                .child
                .try_wait()
                .context("cannot wait for the server")?;
        }
        Ok(self.exited)
    }

    /// Waits for the server to end, at most until `deadline`.
    pub fn wait(&mut self, deadline: Duration) -> anyhow::Result<ExitStatus> {
        let began = Instant::now();
        loop {
            if let Some(status) = self.try_wait()? {
                return Ok(status);
            }
            if began.elapsed() > deadline {
                bail!(
                    "the server still runs after {} s{}",
                    deadline.as_secs(),
                    self.log_tail()
                );
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Waits for the server to end, however long it takes.
    pub fn wait_forever(&mut self) -> anyhow::Result<ExitStatus> {
        let status = self.child.wait().context("cannot wait for the server")?;
        self.exited = Some(status);
        Ok(status)
    }

    /// What sends signals to the server, from any thread.
    pub fn signaller(&self) -> Signaller {
        Signaller::of(&self.child)
    }

    /// Asks the server to stop and waits until it has.
    pub fn stop(mut self, deadline: Duration) -> anyhow::Result<ExitStatus> {
        self.signaller().send(Signal::SIGTERM)?;
        self.wait(deadline)
    }

    /// Everything the server wrote so far; empty when its output is not captured.
    pub fn log(&self) -> String {
        let Some(log) = &self.log else {
            return String::new();
        };
        match fs::read(log.path()) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(error) => format!("the log cannot be read: {error}"),
        }
    }

    /// The end of the log, for an error message; empty when the output is not captured.
    pub fn log_tail(&self) -> String {
        let log = self.log();
        if log.is_empty() {
            return String::new();
        }
        let start = log.ceil_char_boundary(log.len().saturating_sub(LOG_TAIL_BYTES));
        format!("\n--- the server's log ---\n{}", log[start..].trim_end())
    }
}

/// Sends signals to a server. Only of use while its [`ServerProcess`] is there: later the number may be another process's.
#[derive(Clone, Copy, Debug)]
pub struct Signaller(Pid);

impl Signaller {
    /// For a child process.
    pub(crate) fn of(child: &Child) -> Self {
        // The kernel's process ids are positive 32-bit numbers.
        Self(Pid::from_raw(child.id().cast_signed()))
    }

    /// Sends `signal`.
    pub fn send(self, signal: Signal) -> anyhow::Result<()> {
        kill(self.0, signal).context("cannot signal the server")
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        if self.exited.is_none() {
            // It may have ended by itself just now; then there is nothing left to do.
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Two loopback addresses that were free a moment ago.
pub fn free_addresses() -> anyhow::Result<(SocketAddr, SocketAddr)> {
    let bind = || {
        TcpListener::bind((IpAddr::V4(Ipv4Addr::LOCALHOST), 0)).context("cannot find a free port")
    };
    let (first, second) = (bind()?, bind()?);
    Ok((first.local_addr()?, second.local_addr()?))
}
