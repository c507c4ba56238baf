//! What a measurement ran on, and the kernel's figures of a process.

use std::fs;
use std::thread;

use anyhow::Context;
use serde::{Deserialize, Serialize};

/// The machine, as far as it matters for a figure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Model of the processor, as the kernel names it.
    pub processor: String,
    /// Logical processors this process may use.
    pub processors: usize,
    /// Operating system and architecture.
    pub platform: String,
}

impl Machine {
    /// This machine.
    pub fn current() -> Self {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        Self {
            processor: processor(&cpuinfo).unwrap_or_else(|| "unknown".to_owned()),
            processors: thread::available_parallelism().map_or(1, usize::from),
            platform: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
        }
    }
}

fn processor(cpuinfo: &str) -> Option<String> {
    let line = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name"))?;
    Some(line.trim_start().strip_prefix(':')?.trim().to_owned())
}

/// Resident size of a process.
pub fn resident_bytes(process: u32) -> anyhow::Result<u64> {
    memory(process, "VmRSS")
}

/// Largest resident size of a process so far.
pub fn peak_resident_bytes(process: u32) -> anyhow::Result<u64> {
    memory(process, "VmHWM")
}

fn memory(process: u32, name: &str) -> anyhow::Result<u64> {
    let file = format!("/proc/{process}/status");
    let status = fs::read_to_string(&file).with_context(|| format!("cannot read {file}"))?;
    status_bytes(&status, name).with_context(|| format!("{file} has no {name}"))
}

/// A value of `/proc/PID/status`, which counts in units of 1024 bytes.
fn status_bytes(status: &str, name: &str) -> Option<u64> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.trim()
        .strip_suffix(" kB")?
        .trim()
        .parse::<u64>()
        .ok()
        .map(|kilobytes| kilobytes * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_is_the_first_model_name() {
        let cpuinfo = "processor\t: 0\nmodel name\t: Some CPU @ 2.1 GHz\nmodel name\t: Other\n";
        assert_eq!(processor(cpuinfo).as_deref(), Some("Some CPU @ 2.1 GHz"));
        assert_eq!(processor("processor : 0\n"), None);
    }

    #[test]
    fn kernel_figures_are_read_by_their_whole_name() {
        let status = "Name:\tserver\nVmHWM:\t  700 kB\nVmRSS:\t  512 kB\nVmRSSx:\t 1 kB\n";
        assert_eq!(status_bytes(status, "VmRSS"), Some(512 * 1024));
        assert_eq!(status_bytes(status, "VmHWM"), Some(700 * 1024));
        assert_eq!(status_bytes(status, "VmR"), None);
    }
}
