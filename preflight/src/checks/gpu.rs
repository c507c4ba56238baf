//! Whether the GPUs, their driver and their devices are fit for use.
//!
//! The server runs on one device.
//! What is wrong with another one is a warning here, since it may take the machine down with it, and no reason to refuse.

mod access;
mod driver;
mod health;
mod occupancy;
mod selection;
mod speed;
mod verdict;
mod xid;

use super::{Finding, Outcome, bytes_text};
use crate::facts::config::ExecutionProvider;
use crate::facts::gpu::{Device, DeviceState, GpuFacts, NvmlOutcome};
use crate::facts::host::HostFacts;
use crate::facts::{Facts, Reading};
pub use driver::{CudaNeed, driver_floor};
pub use selection::{Selected, free_bytes, selected};
use verdict::Verdict;

/// A check: its name, whether a server can't do without it, and what judges.
type Check = (&'static str, bool, fn(&Scope<'_>) -> Finding);

const REQUIRED: bool = true;
const OPTIONAL: bool = false;

/// Every check, in the order in which one rests on another.
const CHECKS: [Check; 22] = [
    (driver::NVML, REQUIRED, driver::nvml),
    (driver::MISMATCH, REQUIRED, driver::mismatch),
    (driver::TOO_OLD, REQUIRED, driver::too_old),
    (driver::LIBCUDA, REQUIRED, driver::libcuda),
    (access::KERNEL_DRIVER, OPTIONAL, access::kernel_driver),
    (access::DEVICE_NODES, REQUIRED, access::device_nodes),
    (access::CDI, OPTIONAL, access::cdi),
    (selection::DEVICES, REQUIRED, selection::devices),
    (selection::SELECTION, REQUIRED, selection::selection),
    (driver::CAPABILITY, REQUIRED, driver::capability),
    (selection::MIG, REQUIRED, selection::mig),
    (occupancy::COMPUTE_MODE, REQUIRED, occupancy::compute_mode),
    (occupancy::MEMORY, REQUIRED, occupancy::memory_of_others),
    (occupancy::UTILISATION, OPTIONAL, occupancy::utilisation),
    (health::ECC, OPTIONAL, health::ecc),
    (health::ROW_REMAP, OPTIONAL, health::row_remap),
    (health::XID, OPTIONAL, health::xid),
    (speed::THROTTLE, OPTIONAL, speed::throttle),
    (speed::POWER, OPTIONAL, speed::power),
    (speed::LINKS, OPTIONAL, speed::links),
    (speed::FABRIC, OPTIONAL, speed::fabric),
    (speed::PERSISTENCE, OPTIONAL, speed::persistence),
];

/// Every check of this part.
pub fn checks(facts: &Facts) -> Vec<Finding> {
    let scope = Scope::new(facts);
    CHECKS
        .iter()
        .map(|(id, is_required, judge)| {
            let finding = match facts.config.execution_provider {
                // Without settings the provider is not known.
                _ if !facts.config.faults.is_empty() && *id == driver::NVML => {
                    super::needs_settings(id, "whether it uses a GPU")
                }
                _ if !facts.config.faults.is_empty() => {
                    Finding::skip(id, "the configuration has faults, see config.faults")
                }
                ExecutionProvider::Cpu => {
                    Finding::skip(id, "serving.runtime.execution_provider is cpu")
                }
                ExecutionProvider::Cuda => judge(&scope),
            };
            if *is_required {
                finding
            } else {
                finding.optional()
            }
        })
        .collect()
}

/// What checks look at.
struct Scope<'a> {
    gpu: &'a GpuFacts,
    host: &'a HostFacts,
    /// The CUDA that the runtime was built for.
    need: Reading<CudaNeed>,
    /// The device that the server will run on, or why that is not known.
    selected: Result<Selected, String>,
}

impl<'a> Scope<'a> {
    fn new(facts: &'a Facts) -> Self {
        Self {
            gpu: &facts.gpu,
            host: &facts.host,
            need: driver::need(&facts.runtime),
            selected: selected(&facts.gpu, facts.config.device_id),
        }
    }

    /// Whether the server may run on `device`.
    fn may_use(&self, device: &Device) -> bool {
        self.selected
            .as_ref()
            .map_or(true, |selected| selected.index == device.index)
    }

    /// Judges every device that could be read, and sums that up: the worst of the device that the server uses, and at most a warning of the others.
    fn each_device(&self, id: &'static str, judge: impl Fn(&DeviceState) -> Verdict) -> Finding {
        let mut verdicts = Vec::new();
        for device in self.gpu.devices() {
            let label = label(device);
            match (device.state.known(), self.may_use(device)) {
                (Some(state), true) => verdicts.push(judge(state).of(&label)),
                (Some(state), false) => verdicts.push(judge(state).of_another(&label)),
                (None, true) => verdicts.push(Verdict::waits(
                    format!("{label} can't be spoken to"),
                    format!("see to {} first", selection::DEVICES),
                )),
                // One finding about a device that can't be spoken to is enough.
                (None, false) => {}
            }
        }
        if verdicts.is_empty() {
            return no_devices(id, self.gpu);
        }
        Verdict::sum(verdicts).into_finding(id)
    }
}

/// What is said of devices when none was read.
fn no_devices(id: &'static str, gpu: &GpuFacts) -> Finding {
    let remedy = format!("see to {} and {} first", driver::NVML, selection::DEVICES);
    Finding::unknown(id, silence(gpu), remedy)
}

/// Why NVML says nothing of any device.
fn silence(gpu: &GpuFacts) -> String {
    match &gpu.nvml.outcome {
        NvmlOutcome::NotAsked(reason) => format!("NVML was not asked: {reason}"),
        // Its own finding says why.
        NvmlOutcome::Failed(_) => "NVML does not answer".to_owned(),
        NvmlOutcome::Read(_) => "NVML lists no device".to_owned(),
    }
}

fn label(device: &Device) -> String {
    let name = device.state.known().and_then(|state| state.name.known());
    match name {
        Some(name) => format!("GPU {} ({name})", device.index),
        None => format!("GPU {}", device.index),
    }
}
