//! Whether somebody else is on the device already.

use super::selection::memory;
use super::verdict::Verdict;
use super::{Finding, Scope, bytes_text};
use crate::facts::Reading;
use crate::facts::gpu::{ComputeMode, DeviceState, Process};

pub(super) const COMPUTE_MODE: &str = "gpu.compute_mode";
pub(super) const MEMORY: &str = "gpu.memory";
pub(super) const UTILISATION: &str = "gpu.utilisation";

/// What a CUDA context takes before the first byte of a model.
const CONTEXT_BYTES: u64 = 600 << 20;

/// Mean utilisation from which a newcomer gets half a device or less.
const BUSY_PERCENT: u64 = 50;

pub(super) fn compute_mode(scope: &Scope<'_>) -> Finding {
    scope.each_device(COMPUTE_MODE, |state| {
        let remedy = "let several processes in: `nvidia-smi -i N -c DEFAULT`";
        let (mode, processes) = match (&state.compute_mode, &state.processes) {
            (Reading::Known(mode), processes) => (mode, processes),
            (Reading::Unknown(reason), _) => return Verdict::unknown(reason),
        };
        match (mode, processes) {
            (ComputeMode::Default, _) => Verdict::pass("any number of processes"),
            (ComputeMode::Prohibited, _) => Verdict::fail("no process may use it", remedy),
            (ComputeMode::ExclusiveProcess | ComputeMode::ExclusiveThread, Reading::Known(processes)) => {
                match processes.first() {
                    Some(process) => Verdict::fail(
                        format!("one process may use it, and process {} does", process.pid),
                        format!("end that process, or {remedy}"),
                    ),
                    None => Verdict::warn(
                        "one process may use it, so that no server can start beside the one that it replaces",
                        remedy,
                    ),
                }
            }
            (_, Reading::Unknown(reason)) => Verdict::unknown(format!("one process may use it, and whether one does is unknown: {reason}")),
        }
    })
}

fn occupied(processes: &[Process]) -> String {
    let each: Vec<String> = processes
        .iter()
        .map(|process| match process.used_bytes {
            Some(bytes) => format!("process {} holds {}", process.pid, bytes_text(bytes)),
            None => format!("process {} holds an unknown part", process.pid),
        })
        .collect();
    each.join(", ")
}

pub(super) fn memory_of_others(scope: &Scope<'_>) -> Finding {
    let mig_uuid = scope
        .selected
        .as_ref()
        .ok()
        .and_then(|selected| selected.mig_uuid.clone());
    scope.each_device(MEMORY, |state| judge_memory(state, mig_uuid.as_deref()))
}

fn judge_memory(state: &DeviceState, mig_uuid: Option<&str>) -> Verdict {
    let memory = match memory(state, mig_uuid) {
        Reading::Known(memory) => memory,
        Reading::Unknown(reason) => return Verdict::unknown(reason),
    };
    let free = format!(
        "{} of {} are free",
        bytes_text(memory.free_bytes),
        bytes_text(memory.total_bytes)
    );
    let remedy = "end the processes that are not needed (`nvidia-smi` names them), or give the server a device of its own";
    let (evidence, is_shared) = match &state.processes {
        Reading::Known(processes) if processes.is_empty() => (free, false),
        Reading::Known(processes) => (format!("{free}; {}", occupied(processes)), true),
        Reading::Unknown(reason) => {
            return Verdict::unknown(format!("{free}; who holds the rest is unknown: {reason}"));
        }
    };
    if memory.free_bytes < CONTEXT_BYTES {
        Verdict::fail(
            format!(
                "{evidence}; a CUDA context takes {}",
                bytes_text(CONTEXT_BYTES)
            ),
            remedy,
        )
    } else if is_shared {
        Verdict::warn(evidence, remedy)
    } else {
        Verdict::pass(evidence)
    }
}

pub(super) fn utilisation(scope: &Scope<'_>) -> Finding {
    scope.each_device(UTILISATION, |state| {
        let samples = match &state.utilisation_percent {
            Reading::Known(Some(samples)) if !samples.is_empty() => samples,
            Reading::Known(Some(_)) => return Verdict::unknown("it was not sampled"),
            Reading::Known(None) => return Verdict::skip("it does not measure its utilisation"),
            Reading::Unknown(reason) => return Verdict::unknown(reason),
        };
        let sum: u64 = samples.iter().map(|percent| u64::from(*percent)).sum();
        let count = samples.len();
        let mean = sum / count as u64;
        let most = samples.iter().max().unwrap_or(&0);
        let evidence = format!("busy for {mean} % of the time, at most {most} %, in {count} samples");
        if mean >= BUSY_PERCENT {
            Verdict::warn(
                evidence,
                "find who uses it (`nvidia-smi pmon`), and give the server a device of its own: what they take, every request waits for",
            )
        } else {
            Verdict::pass(evidence)
        }
    })
}
