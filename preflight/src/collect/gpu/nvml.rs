//! What NVML says, call by call; runs in the process that may be killed.

use std::path::{Path, PathBuf};
use std::time::Duration;

use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{
    ComputeMode as NvmlComputeMode, EccCounter, MemoryError, RetirementCause, TemperatureSensor,
    TemperatureThreshold,
};
use nvml_wrapper::enums::device::{SampleValue, UsedGpuMemory};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::sys_exports::field_id::{
    NVML_FI_DEV_REMAPPED_COR, NVML_FI_DEV_REMAPPED_FAILURE, NVML_FI_DEV_REMAPPED_PENDING,
    NVML_FI_DEV_REMAPPED_UNC,
};
use nvml_wrapper::{Nvml, cuda_driver_version_major, cuda_driver_version_minor};

use super::kernel::pci_address;
use super::reader::{Channel, Message, ReaderArgs};
use crate::facts::Reading;
use crate::facts::gpu::{
    ComputeMode, CudaVersion, Device, DeviceState, EccErrors, Memory, MigInstance, NvmlFailure,
    NvmlSystem, PcieLink, Power, Process, RetiredPages, RowRemap, Setting, ThrottleReason,
};

/// Most NVLinks that a device has had so far.
const MAX_NVLINKS: u32 = 18;

/// Time between two samples of utilisation; the driver's own window is a sixth of a second and more.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(100);

/// Asks what `args` want and tells each answer as it comes.
pub(super) fn tell(args: &ReaderArgs, channel: &mut Channel) -> std::io::Result<()> {
    channel.calling(None, "nvmlInit_v2")?;
    let nvml = match Nvml::builder().lib_path(args.library.as_os_str()).init() {
        Ok(nvml) => nvml,
        Err(error) => return channel.say(&Message::Failed(failure(&error))),
    };
    channel.calling(None, "the driver's version and number of devices")?;
    let device_count = nvml.device_count();
    let indices = 0..*device_count.as_ref().unwrap_or(&0);
    channel.say(&Message::System(Box::new(NvmlSystem {
        library_file: library_file(&args.library).into(),
        driver_version: nvml.sys_driver_version().into(),
        cuda_version: nvml
            .sys_cuda_driver_version()
            .and_then(|version| {
                let part = |value: i32| u32::try_from(value).map_err(|_| NvmlError::NoData);
                Ok(CudaVersion {
                    major: part(cuda_driver_version_major(version))?,
                    minor: part(cuda_driver_version_minor(version))?,
                })
            })
            .into(),
        device_count: device_count.into(),
        devices: Vec::new(),
    })))?;
    let mut devices = Vec::new();
    for index in indices.filter(|index| !args.sick.contains(index)) {
        channel.calling(Some(index), "nvmlDeviceGetHandleByIndex_v2")?;
        match nvml.device_by_index(index) {
            Ok(device) => {
                if !args.known.contains(&index) {
                    let state = Reading::Known(Box::new(state(index, &device, channel)?));
                    channel.say(&Message::Device(Device { index, state }))?;
                }
                devices.push((index, device));
            }
            Err(error) => channel.say(&Message::Device(Device {
                index,
                state: Reading::Unknown(error.to_string()),
            }))?,
        }
    }
    for sample in 0..args.samples {
        if sample > 0 {
            std::thread::sleep(SAMPLE_INTERVAL);
        }
        for (index, device) in &devices {
            channel.calling(Some(*index), "nvmlDeviceGetUtilizationRates")?;
            channel.say(&Message::Utilisation {
                index: *index,
                percent: optional(device.utilization_rates().map(|rates| rates.gpu)),
            })?;
        }
    }
    Ok(())
}

/// A class for an error of loading and initialising.
fn failure(error: &NvmlError) -> NvmlFailure {
    match error {
        NvmlError::LibloadingError(error) => NvmlFailure::NotLoadable(error.to_string()),
        NvmlError::LibraryNotFound | NvmlError::FailedToLoadSymbol(_) => {
            NvmlFailure::NotLoadable(error.to_string())
        }
        NvmlError::DriverNotLoaded => NvmlFailure::DriverNotLoaded,
        NvmlError::LibRmVersionMismatch => NvmlFailure::VersionMismatch,
        NvmlError::NoPermission => NvmlFailure::NoPermission,
        NvmlError::OperatingSystem | NvmlError::Unknown => NvmlFailure::Blocked(error.to_string()),
        _ => NvmlFailure::Other(error.to_string()),
    }
}

/// The file that is mapped under the name of `library`.
fn library_file(library: &Path) -> std::io::Result<PathBuf> {
    let name = library
        .file_name()
        .unwrap_or(library.as_os_str())
        .to_string_lossy();
    let stem = name.split_once(".so").map_or(&*name, |(stem, _)| stem);
    std::fs::read_to_string("/proc/self/maps")?
        .lines()
        .filter_map(|line| line.find('/').map(|start| &line[start..]))
        .find(|path| {
            path.rsplit('/')
                .next()
                .is_some_and(|file| file.starts_with(&format!("{stem}.so")))
        })
        .map(PathBuf::from)
        .ok_or_else(|| std::io::Error::other(format!("no mapped file is called {stem}.so")))
}

fn state(
    index: u32,
    device: &nvml_wrapper::Device<'_>,
    channel: &mut Channel,
) -> std::io::Result<DeviceState> {
    // Each group of calls is announced, so that the one that never comes back can be named.
    let mut calling = |what: &str| channel.calling(Some(index), what);
    calling("its name and address")?;
    let uuid = device.uuid().into();
    let name = device.name().into();
    let pci_address = device.pci_info().map(|pci| pci_address(&pci.bus_id)).into();
    let minor = device.minor_number().into();
    let compute_capability = device
        .cuda_compute_capability()
        .and_then(|capability| {
            let part = |value: i32| u32::try_from(value).map_err(|_| NvmlError::NoData);
            Ok((part(capability.major)?, part(capability.minor)?))
        })
        .into();
    calling("nvmlDeviceGetMemoryInfo_v2")?;
    let memory = memory(device).into();
    calling("nvmlDeviceGetComputeRunningProcesses_v3")?;
    let processes = processes(device).into();
    calling("its error correction")?;
    let ecc_mode = optional(device.is_ecc_enabled().map(|mode| Setting {
        current: mode.currently_enabled,
        pending: mode.pending_enabled,
    }));
    let ecc_errors = optional(ecc_errors(device));
    calling("its retired pages and remapped rows")?;
    let retired_pages = optional(retired_pages(device));
    let row_remap = optional(row_remap(device));
    calling("its clocks, power and temperature")?;
    let throttle_reasons = device
        .current_throttle_reasons()
        .map(throttle_reasons)
        .into();
    let power = optional(power(device));
    let temperature_celsius = device.temperature(TemperatureSensor::Gpu).into();
    let slowdown_celsius = optional(device.temperature_threshold(TemperatureThreshold::Slowdown));
    calling("its links")?;
    let pcie = optional(pcie(device));
    let nvlinks_up = optional(nvlinks_up(device));
    calling("its instances")?;
    let mig_mode = optional(device.mig_mode().map(|mode| Setting {
        current: mode.current == 1,
        pending: mode.pending == 1,
    }));
    let mig_instances = mig_instances(device).into();
    calling("its modes")?;
    let compute_mode = device
        .compute_mode()
        .map(|mode| match mode {
            NvmlComputeMode::Default => ComputeMode::Default,
            NvmlComputeMode::ExclusiveThread => ComputeMode::ExclusiveThread,
            NvmlComputeMode::Prohibited => ComputeMode::Prohibited,
            NvmlComputeMode::ExclusiveProcess => ComputeMode::ExclusiveProcess,
        })
        .into();
    let persistence = device.is_in_persistent_mode().into();
    Ok(DeviceState {
        uuid,
        name,
        pci_address,
        minor,
        compute_capability,
        memory,
        processes,
        ecc_mode,
        ecc_errors,
        retired_pages,
        row_remap,
        throttle_reasons,
        power,
        temperature_celsius,
        slowdown_celsius,
        pcie,
        nvlinks_up,
        mig_mode,
        mig_instances,
        compute_mode,
        persistence,
        utilisation_percent: Reading::Known(Some(Vec::new())),
    })
}

/// What a device may rightly lack.
fn optional<T>(result: Result<T, NvmlError>) -> Reading<Option<T>> {
    match result {
        Ok(value) => Reading::Known(Some(value)),
        Err(NvmlError::NotSupported) => Reading::Known(None),
        Err(error) => Reading::Unknown(error.to_string()),
    }
}

fn memory(device: &nvml_wrapper::Device<'_>) -> Result<Memory, NvmlError> {
    let memory = device.memory_info()?;
    Ok(Memory {
        total_bytes: memory.total,
        free_bytes: memory.free,
        used_bytes: memory.used,
    })
}

/// Processes that compute and that draw; one that does both is told once.
fn processes(device: &nvml_wrapper::Device<'_>) -> Result<Vec<Process>, NvmlError> {
    let mut processes: Vec<Process> = Vec::new();
    let all = [
        device.running_compute_processes()?,
        device.running_graphics_processes()?,
    ];
    for process in all.into_iter().flatten() {
        if processes.iter().all(|known| known.pid != process.pid) {
            processes.push(Process {
                pid: process.pid,
                used_bytes: match process.used_gpu_memory {
                    UsedGpuMemory::Used(bytes) => Some(bytes),
                    UsedGpuMemory::Unavailable => None,
                },
            });
        }
    }
    Ok(processes)
}

fn ecc_errors(device: &nvml_wrapper::Device<'_>) -> Result<EccErrors, NvmlError> {
    Ok(EccErrors {
        corrected: device.total_ecc_errors(MemoryError::Corrected, EccCounter::Volatile)?,
        uncorrected: device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile)?,
    })
}

fn retired_pages(device: &nvml_wrapper::Device<'_>) -> Result<RetiredPages, NvmlError> {
    let count = |cause| {
        device
            .retired_pages(cause)
            .map(|pages| u32::try_from(pages.len()).unwrap_or(u32::MAX))
    };
    Ok(RetiredPages {
        single_bit: count(RetirementCause::MultipleSingleBitEccErrors)?,
        double_bit: count(RetirementCause::DoubleBitEccError)?,
        pending: device.are_pages_pending_retired()?,
    })
}

/// Field values rather than `nvmlDeviceGetRemappedRows`, which has no safe wrapper.
fn row_remap(device: &nvml_wrapper::Device<'_>) -> Result<RowRemap, NvmlError> {
    let fields = [
        NVML_FI_DEV_REMAPPED_COR,
        NVML_FI_DEV_REMAPPED_UNC,
        NVML_FI_DEV_REMAPPED_PENDING,
        NVML_FI_DEV_REMAPPED_FAILURE,
    ]
    .map(FieldId);
    let values = device
        .field_values_for(&fields)?
        .into_iter()
        .map(|sample| match sample?.value? {
            SampleValue::U32(value) => Ok(value),
            SampleValue::U64(value) => Ok(u32::try_from(value).unwrap_or(u32::MAX)),
            SampleValue::F64(_) | SampleValue::I64(_) => Err(NvmlError::NoData),
        })
        .collect::<Result<Vec<u32>, NvmlError>>()?;
    let [corrected, uncorrected, pending, failed] = values[..] else {
        return Err(NvmlError::NoData);
    };
    Ok(RowRemap {
        corrected,
        uncorrected,
        pending: pending != 0,
        failed: failed != 0,
    })
}

fn throttle_reasons(reasons: ThrottleReasons) -> Vec<ThrottleReason> {
    [
        (ThrottleReasons::GPU_IDLE, ThrottleReason::GpuIdle),
        (
            ThrottleReasons::APPLICATIONS_CLOCKS_SETTING,
            ThrottleReason::ApplicationsClocksSetting,
        ),
        (ThrottleReasons::SW_POWER_CAP, ThrottleReason::SwPowerCap),
        (ThrottleReasons::HW_SLOWDOWN, ThrottleReason::HwSlowdown),
        (ThrottleReasons::SYNC_BOOST, ThrottleReason::SyncBoost),
        (
            ThrottleReasons::SW_THERMAL_SLOWDOWN,
            ThrottleReason::SwThermalSlowdown,
        ),
        (
            ThrottleReasons::HW_THERMAL_SLOWDOWN,
            ThrottleReason::HwThermalSlowdown,
        ),
        (
            ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN,
            ThrottleReason::HwPowerBrakeSlowdown,
        ),
        (
            ThrottleReasons::DISPLAY_CLOCK_SETTING,
            ThrottleReason::DisplayClockSetting,
        ),
    ]
    .into_iter()
    .filter(|(flag, _)| reasons.contains(*flag))
    .map(|(_, reason)| reason)
    .collect()
}

fn power(device: &nvml_wrapper::Device<'_>) -> Result<Power, NvmlError> {
    Ok(Power {
        draw_mw: device.power_usage()?,
        limit_mw: device.enforced_power_limit()?,
        default_limit_mw: device.power_management_limit_default()?,
    })
}

fn pcie(device: &nvml_wrapper::Device<'_>) -> Result<PcieLink, NvmlError> {
    Ok(PcieLink {
        generation: device.current_pcie_link_gen()?,
        max_generation: device.max_pcie_link_gen()?,
        width: device.current_pcie_link_width()?,
        max_width: device.max_pcie_link_width()?,
    })
}

/// A link past the last one is an invalid argument; a device without any does not support the call.
fn nvlinks_up(device: &nvml_wrapper::Device<'_>) -> Result<Vec<bool>, NvmlError> {
    let mut up = Vec::new();
    for link in 0..MAX_NVLINKS {
        match device.link_wrapper_for(link).is_active() {
            Ok(active) => up.push(active),
            Err(NvmlError::InvalidArg) => break,
            Err(NvmlError::NotSupported) if link > 0 => break,
            Err(error) => return Err(error),
        }
    }
    Ok(up)
}

fn mig_instances(device: &nvml_wrapper::Device<'_>) -> Result<Vec<MigInstance>, NvmlError> {
    let most = match device.mig_device_count() {
        Err(NvmlError::NotSupported) => 0,
        other => other?,
    };
    let mut instances = Vec::new();
    for index in 0..most {
        match device.mig_device_by_index(index) {
            Ok(instance) => instances.push(MigInstance {
                uuid: instance.uuid().into(),
                memory: memory(&instance).into(),
            }),
            Err(NvmlError::NotFound | NvmlError::InvalidArg | NvmlError::NotSupported) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(instances)
}
