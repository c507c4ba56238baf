//! What a measurement ran on, for its report.

use std::fs;
use std::thread;

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_is_the_first_model_name() {
        let cpuinfo = "processor\t: 0\nmodel name\t: Some CPU @ 2.1 GHz\nmodel name\t: Other\n";
        assert_eq!(processor(cpuinfo).as_deref(), Some("Some CPU @ 2.1 GHz"));
        assert_eq!(processor("processor : 0\n"), None);
    }
}
