//! Which device the server will run on, and whether it can be spoken to.

use super::verdict::Verdict;
use super::{Finding, Scope, bytes_text, label, no_devices, silence};
use crate::facts::Reading;
use crate::facts::gpu::{Device, DeviceState, GpuFacts, Memory, NvmlOutcome, PciKind};

pub(super) const DEVICES: &str = "gpu.devices";
pub(super) const SELECTION: &str = "gpu.selection";
pub(super) const MIG: &str = "gpu.mig";

/// The device that the server will run on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selected {
    /// NVML's number of it.
    pub index: u32,
    /// The instance of it that was asked for by name.
    pub mig_uuid: Option<String>,
    /// Whether nothing but CUDA's own order of devices could make it another one.
    pub is_certain: bool,
}

/// The device that CUDA numbers `device_id`: `CUDA_VISIBLE_DEVICES` chooses and orders, else CUDA counts them all.
///
/// # Errors
///
/// CUDA will see no device of that number, and why.
pub fn selected(gpu: &GpuFacts, device_id: u32) -> Result<Selected, String> {
    let devices = gpu.devices();
    if devices.is_empty() {
        return Err(silence(gpu));
    }
    let environment = &gpu.environment;
    // By default CUDA counts the fastest device first; NVML counts along the bus.
    let names: Vec<_> = devices
        .iter()
        .map(|device| device.state.known().map(|state| &state.name))
        .collect();
    let same_order = environment.cuda_device_order.as_deref() == Some("PCI_BUS_ID")
        || names
            .windows(2)
            .all(|pair| pair[0] == pair[1] || pair.contains(&None));
    let by_index = |index: u32| {
        let device = devices.iter().find(|device| device.index == index)?;
        Some(Selected {
            index: device.index,
            mig_uuid: None,
            is_certain: same_order,
        })
    };
    let Some(list) = &environment.cuda_visible_devices else {
        return by_index(device_id)
            .ok_or_else(|| format!("there is no device {device_id}, of {}", devices.len()));
    };
    let mut visible = Vec::new();
    for token in list
        .split(',')
        .map(str::trim)
        .filter(|token| !token.is_empty())
    {
        let found = match token.parse() {
            Ok(index) => by_index(index),
            Err(_) => devices.iter().find_map(|device| by_uuid(device, token)),
        };
        match found {
            Some(found) => visible.push(found),
            // CUDA hides everything from the first name on that it does not know.
            None => break,
        }
    }
    let count = visible.len();
    usize::try_from(device_id)
        .ok()
        .and_then(|id| visible.into_iter().nth(id))
        .ok_or_else(|| {
            format!("CUDA_VISIBLE_DEVICES={list:?} leaves {count} of {} devices, and device {device_id} is asked for", devices.len())
        })
}

/// A device whose UUID, or an instance of it whose UUID, begins with `token`.
fn by_uuid(device: &Device, token: &str) -> Option<Selected> {
    let state = device.state.known()?;
    let selected = |mig_uuid| Selected {
        index: device.index,
        mig_uuid,
        is_certain: true,
    };
    if token.starts_with("GPU-") {
        return state
            .uuid
            .known()?
            .starts_with(token)
            .then(|| selected(None));
    }
    let uuid = state
        .mig_instances
        .known()?
        .iter()
        .filter_map(|instance| instance.uuid.known())
        .find(|uuid| *uuid == token)?;
    Some(selected(Some(uuid.clone())))
}

/// Memory of what the server will run on: of the instance where the device is divided.
pub(super) fn memory(state: &DeviceState, mig_uuid: Option<&str>) -> Reading<Memory> {
    let divided = matches!(&state.mig_mode, Reading::Known(Some(mode)) if mode.current);
    if !divided {
        return state.memory.clone();
    }
    let instances = match &state.mig_instances {
        Reading::Known(instances) => instances,
        Reading::Unknown(reason) => return Reading::Unknown(reason.clone()),
    };
    // Without a name CUDA takes the first one.
    instances
        .iter()
        .find(|instance| {
            mig_uuid.is_none() || instance.uuid.known().map(String::as_str) == mig_uuid
        })
        .map_or_else(
            || Reading::Unknown("the device is divided and has no instance".into()),
            |instance| instance.memory.clone(),
        )
}

/// Bytes that are free where the server will run, as CUDA's device `device_id`.
pub fn free_bytes(gpu: &GpuFacts, device_id: u32) -> Reading<u64> {
    let selected = match selected(gpu, device_id) {
        Ok(selected) => selected,
        Err(reason) => return Reading::Unknown(reason),
    };
    let device = gpu
        .devices()
        .iter()
        .find(|device| device.index == selected.index);
    let state = match device.map(|device| &device.state) {
        Some(Reading::Known(state)) => state,
        Some(Reading::Unknown(reason)) => return Reading::Unknown(reason.clone()),
        None => return Reading::Unknown(silence(gpu)),
    };
    match memory(state, selected.mig_uuid.as_deref()) {
        Reading::Known(memory) => Reading::Known(memory.free_bytes),
        Reading::Unknown(reason) => Reading::Unknown(reason),
    }
}

pub(super) fn devices(scope: &Scope<'_>) -> Finding {
    let NvmlOutcome::Read(system) = &scope.gpu.nvml.outcome else {
        return no_devices(DEVICES, scope.gpu);
    };
    let count = match &system.device_count {
        Reading::Known(count) => *count,
        Reading::Unknown(reason) => {
            return Finding::unknown(
                DEVICES,
                format!("the number of devices: {reason}"),
                "run `nvidia-smi -L`",
            );
        }
    };
    if count == 0 {
        return Finding::fail(
            DEVICES,
            "NVML lists no device",
            "see to gpu.kernel_driver and gpu.device_nodes; in a container, start it with devices (NVIDIA_VISIBLE_DEVICES, `--device nvidia.com/gpu=all`)",
        );
    }
    let mut verdicts = vec![Verdict::pass(format!("NVML lists {count}"))];
    for device in &system.devices {
        let Reading::Unknown(reason) = &device.state else {
            continue;
        };
        let verdict = Verdict::fail(
            format!("it can't be spoken to: {reason}"),
            "read `dmesg` for Xid lines of it, drain it and reset it (`nvidia-smi --gpu-reset -i N`); where that fails or it fell off the bus, turn the machine off and on, and have the device replaced if it happens again",
        );
        let label = label(device);
        verdicts.push(if scope.may_use(device) {
            verdict.of(&label)
        } else {
            verdict.of_another(&label)
        });
    }
    verdicts.extend(unlisted(scope.gpu, &system.devices));
    Verdict::sum(verdicts).into_finding(DEVICES)
}

/// GPUs of the bus that NVML does not list. A container shows the bus of its machine and only some of its devices, so nothing follows from it there.
fn unlisted(gpu: &GpuFacts, devices: &[Device]) -> Option<Verdict> {
    let functions = gpu
        .pci_functions
        .known()
        .filter(|_| gpu.container.is_none())?;
    let on_bus = functions.iter().filter(|function| {
        function.kind == PciKind::Gpu && function.driver.as_deref() == Some("nvidia")
    });
    let listed: Vec<_> = devices
        .iter()
        .filter_map(|device| device.state.known()?.pci_address.known())
        .collect();
    let missing: Vec<_> = on_bus
        .map(|function| &function.address)
        .filter(|address| !listed.contains(address))
        .map(String::as_str)
        .collect();
    // Devices that can't be spoken to have no address, and were judged already.
    let silent = devices.len() - listed.len();
    (missing.len() > silent).then(|| {
        Verdict::warn(
            format!("the bus also has GPUs at {}", missing.join(", ")),
            "read `dmesg` for why the driver does not take them; a device that fell off the bus comes back when the machine is turned off and on",
        )
    })
}

pub(super) fn selection(scope: &Scope<'_>) -> Finding {
    let devices = scope.gpu.devices();
    if devices.is_empty() {
        return no_devices(SELECTION, scope.gpu);
    }
    let environment = &scope.gpu.environment;
    let remedy = "set CUDA_VISIBLE_DEVICES to the UUID of the device that is meant, as `nvidia-smi -L` prints it";
    let selected = match &scope.selected {
        Ok(selected) => selected,
        Err(reason) => return Finding::fail(SELECTION, reason, remedy),
    };
    let device = devices.iter().find(|device| device.index == selected.index);
    let name = device.map(label).unwrap_or_default();
    let of = match (&selected.mig_uuid, &environment.cuda_visible_devices) {
        (Some(uuid), _) => format!("instance {uuid} of {name}"),
        (None, Some(list)) => format!("{name}, by CUDA_VISIBLE_DEVICES={list:?}"),
        (None, None) => format!("{name}, the first of {}", devices.len()),
    };
    if selected.is_certain {
        Finding::pass(SELECTION, format!("the server will run on {of}"))
    } else {
        Finding::warn(
            SELECTION,
            format!(
                "the server will run on {of}, unless CUDA counts the devices, which are of different kinds, in another order"
            ),
            format!("{remedy}, or CUDA_DEVICE_ORDER to PCI_BUS_ID"),
        )
    }
}

pub(super) fn mig(scope: &Scope<'_>) -> Finding {
    let mig_uuid = scope
        .selected
        .as_ref()
        .ok()
        .and_then(|selected| selected.mig_uuid.clone());
    scope.each_device(MIG, |state| judge_mig(state, mig_uuid.as_deref()))
}

fn judge_mig(state: &DeviceState, mig_uuid: Option<&str>) -> Verdict {
    let mode = match &state.mig_mode {
        Reading::Known(Some(mode)) => mode,
        Reading::Known(None) => return Verdict::pass("it can't be divided"),
        Reading::Unknown(reason) => return Verdict::unknown(reason),
    };
    if mode.current != mode.pending {
        let (now, then) = if mode.pending {
            ("whole", "divided")
        } else {
            ("divided", "whole")
        };
        return Verdict::warn(
            format!("it is {now}, and will be {then} from the next reset on"),
            "reset the device while nothing uses it (`nvidia-smi --gpu-reset -i N`), or take the change back (`nvidia-smi -i N -mig 0|1`)",
        );
    }
    if !mode.current {
        return Verdict::pass("it is not divided");
    }
    let instances = match &state.mig_instances {
        Reading::Known(instances) => instances,
        Reading::Unknown(reason) => return Verdict::unknown(reason),
    };
    let size = match memory(state, mig_uuid) {
        Reading::Known(memory) => format!("{} of memory", bytes_text(memory.total_bytes)),
        Reading::Unknown(reason) => format!("memory unknown ({reason})"),
    };
    let names: Vec<_> = instances
        .iter()
        .filter_map(|instance| instance.uuid.known())
        .map(String::as_str)
        .collect();
    match (mig_uuid, names.as_slice()) {
        (_, []) => Verdict::fail(
            "it is divided, and has no instance that can be seen from here",
            "create instances (`nvidia-smi mig -cgi PROFILE -C`) or end the division (`nvidia-smi -i N -mig 0`); in a container, pass one to it",
        ),
        (Some(uuid), names) if names.contains(&uuid) => {
            Verdict::pass(format!("instance {uuid}, {size}"))
        }
        (None, [uuid]) => Verdict::pass(format!("its only instance {uuid}, {size}")),
        (_, names) => Verdict::warn(
            format!(
                "it is divided into {} instances, none is chosen, and CUDA takes one of them: {}",
                names.len(),
                names.join(", ")
            ),
            "set CUDA_VISIBLE_DEVICES to the UUID of the instance that is meant",
        ),
    }
}
