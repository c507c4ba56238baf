//! Asks NVML in a process of its own, and ends that process when a call does not come back.
//!
//! The reading process announces each call before it makes it and tells each answer when it has it, one line of JSON each, so that a device that hangs
//! costs only what it has not said yet, and can be named.
//! The other devices are then asked by another process.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::{Options, nvml};
use crate::facts::Reading;
use crate::facts::gpu::{Device, DeviceState, NvmlFacts, NvmlFailure, NvmlOutcome, NvmlSystem};

/// The hidden subcommand under which this program asks NVML.
const SUBCOMMAND: &str = "collect-gpu";

/// How long a killed process may take to be gone. One that waits in the kernel for a device may never be, and nobody waits for it.
const KILL_LIMIT: Duration = Duration::from_secs(1);

/// What the reading process is asked.
#[derive(Debug, clap::Args)]
pub struct ReaderArgs {
    /// NVML: a path, or a name that the loader resolves.
    #[arg(long)]
    pub(super) library: PathBuf,
    /// Devices of which only the utilisation is wanted.
    #[arg(long, value_delimiter = ',')]
    pub(super) known: Vec<u32>,
    /// Devices that are not to be spoken to.
    #[arg(long, value_delimiter = ',')]
    pub(super) sick: Vec<u32>,
    /// Samples of utilisation.
    #[arg(long)]
    pub(super) samples: u32,
}

/// One line of the reading process.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Message {
    /// What it does next, and on which device.
    Calling { device: Option<u32>, what: String },
    /// NVML could not be loaded or initialised; the last line.
    Failed(NvmlFailure),
    /// What NVML says of the driver, still without devices.
    System(Box<NvmlSystem>),
    /// One device, still without samples of its utilisation.
    Device(Device),
    /// One sample of a device's utilisation.
    Utilisation {
        index: u32,
        percent: Reading<Option<u32>>,
    },
    /// All is told.
    Done,
}

/// Where the reading process tells what it knows.
pub(super) struct Channel(std::io::Stdout);

impl Channel {
    /// Says what is done next.
    pub(super) fn calling(&mut self, device: Option<u32>, what: &str) -> std::io::Result<()> {
        self.say(&Message::Calling {
            device,
            what: what.to_owned(),
        })
    }

    /// Tells something.
    pub(super) fn say(&mut self, message: &Message) -> std::io::Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        let mut out = self.0.lock();
        out.write_all(&line)?;
        out.flush()
    }
}

/// Does the work of the reading process: asks NVML and writes each answer to standard output.
///
/// # Errors
///
/// Nobody listens any more.
pub fn tell(args: &ReaderArgs) -> std::io::Result<()> {
    let mut channel = Channel(std::io::stdout());
    nvml::tell(args, &mut channel)?;
    channel.say(&Message::Done)
}

/// Asks NVML, within the limits of `options`.
pub(super) fn read(options: &Options) -> NvmlFacts {
    NvmlFacts {
        library: options.nvml_library.clone(),
        outcome: outcome(options),
    }
}

fn outcome(options: &Options) -> NvmlOutcome {
    let deadline = Instant::now() + options.total_limit;
    let mut told = Told::default();
    loop {
        let end = match run(options, deadline, &mut told) {
            Ok(end) => end,
            Err(error) => {
                let program = options.program.display();
                return NvmlOutcome::Failed(NvmlFailure::Other(format!(
                    "{program} {SUBCOMMAND} can't be started: {error}"
                )));
            }
        };
        let failure = match end {
            End::Done => None,
            End::Failed(failure) => Some(failure),
            End::Hung => Some(NvmlFailure::TimedOut(format!(
                "{} did not come back within {} s",
                told.call(),
                options.call_limit.as_secs_f64()
            ))),
            End::Broken(reason) => Some(NvmlFailure::Other(format!(
                "{} ended with {reason}",
                told.call()
            ))),
        };
        match (failure, told.device) {
            (Some(failure), Some(index))
                if told.system.is_some() && !told.sick.contains(&index) =>
            {
                told.give_up(index, &failure.to_string());
                if Instant::now() < deadline {
                    continue;
                }
            }
            (Some(failure), _) if told.system.is_none() => return NvmlOutcome::Failed(failure),
            _ => {}
        }
        return told.into_outcome();
    }
}

/// What reading processes have told so far.
#[derive(Default)]
struct Told {
    system: Option<Box<NvmlSystem>>,
    devices: Vec<Device>,
    /// Devices at which a process was lost.
    sick: Vec<u32>,
    /// The device of the last call.
    device: Option<u32>,
    /// The last call.
    what: String,
}

impl Told {
    fn call(&self) -> String {
        match self.device {
            Some(index) => format!("asking GPU {index} for {}", self.what),
            None => format!("asking for {}", self.what),
        }
    }

    fn take(&mut self, message: Message) -> Option<End> {
        match message {
            Message::Calling { device, what } => {
                self.device = device;
                self.what = what;
            }
            Message::Failed(failure) => return Some(End::Failed(failure)),
            Message::System(system) => self.system = Some(system),
            Message::Device(device) => self.devices.push(device),
            Message::Utilisation { index, percent } => self.add_sample(index, percent),
            Message::Done => return Some(End::Done),
        }
        None
    }

    fn state_of(&mut self, index: u32) -> Option<&mut DeviceState> {
        self.devices
            .iter_mut()
            .filter(|device| device.index == index)
            .find_map(|device| match &mut device.state {
                Reading::Known(state) => Some(&mut **state),
                Reading::Unknown(_) => None,
            })
    }

    fn add_sample(&mut self, index: u32, percent: Reading<Option<u32>>) {
        if let Some(state) = self.state_of(index) {
            match (&mut state.utilisation_percent, percent) {
                (Reading::Known(Some(samples)), Reading::Known(Some(percent))) => {
                    samples.push(percent);
                }
                (samples, Reading::Known(None)) => *samples = Reading::Known(None),
                (samples, Reading::Unknown(reason)) => *samples = Reading::Unknown(reason),
                (_, Reading::Known(Some(_))) => {}
            }
        }
    }

    /// Notes that `index` can't be asked, or, when everything else of it is known, that its utilisation can't.
    fn give_up(&mut self, index: u32, reason: &str) {
        self.sick.push(index);
        if let Some(state) = self.state_of(index) {
            state.utilisation_percent = Reading::Unknown(reason.to_owned());
        } else if self.devices.iter().all(|device| device.index != index) {
            self.devices.push(Device {
                index,
                state: Reading::Unknown(reason.to_owned()),
            });
        }
    }

    /// Everything that was told; what was not told for want of time is unknown.
    fn into_outcome(mut self) -> NvmlOutcome {
        let Some(mut system) = self.system.take() else {
            return NvmlOutcome::Failed(NvmlFailure::Other(
                "the process that asks NVML told nothing".into(),
            ));
        };
        for index in 0..*system.device_count.known().unwrap_or(&0) {
            if self.devices.iter().all(|device| device.index != index) {
                self.give_up(index, "the time for NVML was used up before it was asked");
            }
            if let Some(state) = self.state_of(index)
                && matches!(&state.utilisation_percent, Reading::Known(Some(samples)) if samples.is_empty())
            {
                state.utilisation_percent = Reading::Unknown("it was not sampled".into());
            }
        }
        self.devices.sort_by_key(|device| device.index);
        system.devices = self.devices;
        NvmlOutcome::Read(system)
    }
}

/// How a reading process ended.
enum End {
    /// It told everything.
    Done,
    /// NVML is not to be had.
    Failed(NvmlFailure),
    /// A call did not come back.
    Hung,
    /// It ended too early, or told what nobody understands.
    Broken(String),
}

/// Runs one reading process and takes what it tells.
fn run(options: &Options, deadline: Instant, told: &mut Told) -> std::io::Result<End> {
    let list = |indices: Vec<u32>| -> String {
        let names: Vec<String> = indices.iter().map(u32::to_string).collect();
        names.join(",")
    };
    let known = told.devices.iter().map(|device| device.index).collect();
    let mut command = Command::new(&options.program);
    command
        .arg(SUBCOMMAND)
        .arg("--library")
        .arg(&options.nvml_library)
        .args(["--samples", &options.utilisation_samples.to_string()])
        // Its end tells the process that nobody waits any more.
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    // A list without members has no form on a command line.
    for (flag, indices) in [("--known", known), ("--sick", told.sick.clone())] {
        if !indices.is_empty() {
            command.args([flag, &list(indices)]);
        }
    }
    let mut process = command.spawn()?;
    let lines = match lines_of(&mut process) {
        Ok(lines) => lines,
        Err(error) => {
            end_process(&mut process, true);
            return Err(error);
        }
    };
    let end = loop {
        let wait = deadline
            .saturating_duration_since(Instant::now())
            .min(options.call_limit);
        match lines.recv_timeout(wait) {
            Ok(line) => match serde_json::from_str(&line) {
                Ok(message) => {
                    if let Some(end) = told.take(message) {
                        break end;
                    }
                }
                Err(error) => break End::Broken(format!("a line that is none: {error}")),
            },
            Err(RecvTimeoutError::Timeout) => break End::Hung,
            Err(RecvTimeoutError::Disconnected) => break End::Broken("no answer".into()),
        }
    };
    let status = end_process(&mut process, !matches!(end, End::Broken(_)));
    Ok(match (end, status) {
        (End::Broken(_), Some(status)) if !status.success() => {
            End::Broken(match (status.signal(), status.code()) {
                (Some(signal), _) => format!("signal {signal}"),
                (None, code) => format!("exit code {}", code.unwrap_or_default()),
            })
        }
        (end, _) => end,
    })
}

/// The lines of `process`, read by a thread that ends with it.
fn lines_of(process: &mut Child) -> std::io::Result<Receiver<String>> {
    let (sender, receiver) = channel();
    if let Some(out) = process.stdout.take() {
        std::thread::Builder::new().spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        })?;
    }
    Ok(receiver)
}

/// Ends `process`, at once if `kill`, and says how it ended; `None` when it can't even be killed, since it waits in the kernel.
fn end_process(process: &mut Child, kill: bool) -> Option<std::process::ExitStatus> {
    if kill {
        // It may have ended by itself.
        let _ = process.kill();
    }
    let deadline = Instant::now() + KILL_LIMIT;
    loop {
        match process.try_wait() {
            Ok(Some(status)) => return Some(status),
            Ok(None) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Ok(None) | Err(_) => {
                let _ = process.kill();
                return None;
            }
        }
    }
}
