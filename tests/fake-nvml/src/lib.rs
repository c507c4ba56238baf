//! A stand-in for `libnvidia-ml.so.1` that plays the scenario in the file `scenario.json` beside it.
//!
//! It owns the symbols that preflight reaches through `nvml-wrapper`, so that reading GPUs can be tested through the real wrapper and the real loader on
//! machines without any.
//! It refuses to guess: a scenario that lacks a field, or is not there, ends the process that loaded it.

#![allow(
    unsafe_code,
    reason = "a C library is a set of symbols without name mangling that write through pointers"
)]
#![allow(
    non_snake_case,
    reason = "symbols are spelled as NVIDIA's library spells them"
)]

mod scenario;

use std::ffi::{c_char, c_int, c_uint, c_ulonglong};

use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlFieldValue_t, nvmlMemory_v2_t, nvmlPciInfo_t, nvmlProcessInfo_t,
    nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE as INSUFFICIENT_SIZE,
    nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT as INVALID_ARGUMENT,
    nvmlReturn_enum_NVML_ERROR_NOT_FOUND as NOT_FOUND,
    nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED as NOT_SUPPORTED,
    nvmlReturn_enum_NVML_SUCCESS as SUCCESS, nvmlReturn_t, nvmlUtilization_t, nvmlValue_t,
    nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT as UNSIGNED_INT,
};
use scenario::{Device, Memory, Scenario, scenario};

/// Field of the first of four counts of remapped rows.
const FIRST_REMAP_FIELD: c_uint = 142;

/// Handles of instances are a thousand times that of their device, and their number.
const INSTANCES: usize = 1000;

/// Plays what a scenario says of a call that is of no device, and then `answer`.
fn of_system(symbol: &str, answer: impl FnOnce(&Scenario) -> nvmlReturn_t) -> nvmlReturn_t {
    let scenario = scenario();
    scenario.fate.of(symbol).unwrap_or_else(|| answer(scenario))
}

/// Plays what a scenario says of a call that is of a device, and then `answer`.
fn of_device(
    symbol: &str,
    handle: nvmlDevice_t,
    answer: impl FnOnce(&Device) -> nvmlReturn_t,
) -> nvmlReturn_t {
    let number = match handle.addr() {
        instance if instance >= INSTANCES => instance / INSTANCES,
        device => device,
    };
    match number
        .checked_sub(1)
        .and_then(|index| scenario().devices.get(index))
    {
        Some(device) => device.fate.of(symbol).unwrap_or_else(|| answer(device)),
        None => INVALID_ARGUMENT,
    }
}

/// The instance behind `handle`, when it is one.
fn instance_of(device: &Device, handle: nvmlDevice_t) -> Option<&scenario::Instance> {
    let number = handle.addr();
    if number < INSTANCES {
        return None;
    }
    device.instances.get(number % INSTANCES)
}

fn put<T>(place: *mut T, value: T) -> nvmlReturn_t {
    // SAFETY: a caller of NVML passes places for what it asks for.
    unsafe { place.write(value) };
    SUCCESS
}

/// Writes `text` with its end, or says that `length` is too short.
fn put_text(place: *mut c_char, length: c_uint, text: &str) -> nvmlReturn_t {
    let bytes = text.bytes().chain([0]);
    if bytes.clone().count() > length as usize {
        return INSUFFICIENT_SIZE;
    }
    for (at, byte) in bytes.enumerate() {
        // SAFETY: `at` is less than the length that the caller says its place has.
        unsafe { place.add(at).write(byte.cast_signed() as c_char) };
    }
    SUCCESS
}

/// Defines calls of a device with one place for one value.
macro_rules! values {
    ($($symbol:ident: $type:ty = |$device:ident| $value:expr;)*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $symbol(handle: nvmlDevice_t, place: *mut $type) -> nvmlReturn_t {
            of_device(stringify!($symbol), handle, |$device| put(place, $value))
        }
    )*};
}

values! {
    nvmlDeviceGetMinorNumber: c_uint = |device| device.minor;
    nvmlDeviceGetCurrentClocksThrottleReasons: c_ulonglong = |device| device.throttle_reasons;
    nvmlDeviceGetPowerUsage: c_uint = |device| device.power_mw[0];
    nvmlDeviceGetEnforcedPowerLimit: c_uint = |device| device.power_mw[1];
    nvmlDeviceGetPowerManagementDefaultLimit: c_uint = |device| device.power_mw[2];
    nvmlDeviceGetCurrPcieLinkGeneration: c_uint = |device| device.pcie_generation[0];
    nvmlDeviceGetMaxPcieLinkGeneration: c_uint = |device| device.pcie_generation[1];
    nvmlDeviceGetCurrPcieLinkWidth: c_uint = |device| device.pcie_width[0];
    nvmlDeviceGetMaxPcieLinkWidth: c_uint = |device| device.pcie_width[1];
    nvmlDeviceGetMaxMigDeviceCount: c_uint = |device| device.most_instances;
    nvmlDeviceGetComputeMode: c_uint = |device| device.compute_mode;
    nvmlDeviceGetPersistenceMode: c_uint = |device| u32::from(device.persistence);
    nvmlDeviceGetRetiredPagesPendingStatus: c_uint = |_device| 0;
    nvmlDeviceGetUtilizationRates: nvmlUtilization_t = |device| nvmlUtilization_t {
        gpu: device.utilisation_percent,
        memory: 0,
    };
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInit_v2() -> nvmlReturn_t {
    of_system("nvmlInit_v2", |_| SUCCESS)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlShutdown() -> nvmlReturn_t {
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn nvmlSystemGetDriverVersion(place: *mut c_char, length: c_uint) -> nvmlReturn_t {
    of_system("nvmlSystemGetDriverVersion", |scenario| {
        put_text(place, length, &scenario.driver_version)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlSystemGetCudaDriverVersion_v2(place: *mut c_int) -> nvmlReturn_t {
    of_system("nvmlSystemGetCudaDriverVersion_v2", |scenario| {
        put(place, scenario.cuda_version)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetCount_v2(place: *mut c_uint) -> nvmlReturn_t {
    of_system("nvmlDeviceGetCount_v2", |scenario| {
        put(place, scenario.devices.len() as c_uint)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetHandleByIndex_v2(
    index: c_uint,
    place: *mut nvmlDevice_t,
) -> nvmlReturn_t {
    let handle = std::ptr::without_provenance_mut(index as usize + 1);
    of_device("nvmlDeviceGetHandleByIndex_v2", handle, |_| {
        put(place, handle)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetName(
    handle: nvmlDevice_t,
    place: *mut c_char,
    length: c_uint,
) -> nvmlReturn_t {
    of_device("nvmlDeviceGetName", handle, |device| {
        put_text(place, length, &device.name)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetUUID(
    handle: nvmlDevice_t,
    place: *mut c_char,
    length: c_uint,
) -> nvmlReturn_t {
    of_device("nvmlDeviceGetUUID", handle, |device| {
        let uuid = instance_of(device, handle).map_or(&device.uuid, |instance| &instance.uuid);
        put_text(place, length, uuid)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetPciInfo_v3(
    handle: nvmlDevice_t,
    place: *mut nvmlPciInfo_t,
) -> nvmlReturn_t {
    of_device("nvmlDeviceGetPciInfo_v3", handle, |device| {
        let mut info = nvmlPciInfo_t {
            busIdLegacy: [0; 16],
            domain: 0,
            bus: 0,
            device: 0,
            pciDeviceId: 0x2330_10de,
            pciSubSystemId: 0,
            busId: [0; 32],
        };
        for (to, from) in info.busId.iter_mut().zip(device.bus_id.bytes()) {
            *to = from.cast_signed() as c_char;
        }
        put(place, info)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetCudaComputeCapability(
    handle: nvmlDevice_t,
    major: *mut c_int,
    minor: *mut c_int,
) -> nvmlReturn_t {
    of_device("nvmlDeviceGetCudaComputeCapability", handle, |device| {
        put(major, device.compute_capability[0]);
        put(minor, device.compute_capability[1])
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMemoryInfo_v2(
    handle: nvmlDevice_t,
    place: *mut nvmlMemory_v2_t,
) -> nvmlReturn_t {
    of_device("nvmlDeviceGetMemoryInfo_v2", handle, |device| {
        let Memory { total, free, used } =
            instance_of(device, handle).map_or(device.memory, |instance| instance.memory);
        put(
            place,
            nvmlMemory_v2_t {
                version: 2,
                total,
                reserved: total - free - used,
                free,
                used,
            },
        )
    })
}

/// Writes the processes, or says how many there are when there is no place for them.
fn put_processes(
    processes: &[(u32, u64)],
    count: *mut c_uint,
    place: *mut nvmlProcessInfo_t,
) -> nvmlReturn_t {
    // SAFETY: a caller of NVML says there for how many it has a place.
    let room = unsafe { count.read() } as usize;
    put(count, processes.len() as c_uint);
    if room < processes.len() {
        return INSUFFICIENT_SIZE;
    }
    for (at, (pid, bytes)) in processes.iter().enumerate() {
        let process = nvmlProcessInfo_t {
            pid: *pid,
            usedGpuMemory: *bytes,
            gpuInstanceId: u32::MAX,
            computeInstanceId: u32::MAX,
        };
        // SAFETY: `at` is less than the number that there is a place for.
        unsafe { place.add(at).write(process) };
    }
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(
    handle: nvmlDevice_t,
    count: *mut c_uint,
    place: *mut nvmlProcessInfo_t,
) -> nvmlReturn_t {
    of_device(
        "nvmlDeviceGetComputeRunningProcesses_v3",
        handle,
        |device| put_processes(&device.processes, count, place),
    )
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetGraphicsRunningProcesses_v3(
    handle: nvmlDevice_t,
    count: *mut c_uint,
    place: *mut nvmlProcessInfo_t,
) -> nvmlReturn_t {
    of_device("nvmlDeviceGetGraphicsRunningProcesses_v3", handle, |_| {
        put_processes(&[], count, place)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetEccMode(
    handle: nvmlDevice_t,
    current: *mut c_uint,
    pending: *mut c_uint,
) -> nvmlReturn_t {
    of_device("nvmlDeviceGetEccMode", handle, |device| {
        put(current, u32::from(device.ecc[0]));
        put(pending, u32::from(device.ecc[1]))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetTotalEccErrors(
    handle: nvmlDevice_t,
    error: c_uint,
    _counter: c_uint,
    place: *mut c_ulonglong,
) -> nvmlReturn_t {
    of_device("nvmlDeviceGetTotalEccErrors", handle, |device| match device
        .ecc_errors
        .get(error as usize)
    {
        Some(errors) => put(place, *errors),
        None => INVALID_ARGUMENT,
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetRetiredPages(
    handle: nvmlDevice_t,
    _cause: c_uint,
    count: *mut c_uint,
    _addresses: *mut c_ulonglong,
) -> nvmlReturn_t {
    of_device("nvmlDeviceGetRetiredPages", handle, |_| put(count, 0))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetRetiredPages_v2(
    handle: nvmlDevice_t,
    _cause: c_uint,
    count: *mut c_uint,
    _addresses: *mut c_ulonglong,
    _times: *mut c_ulonglong,
) -> nvmlReturn_t {
    of_device("nvmlDeviceGetRetiredPages_v2", handle, |_| put(count, 0))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetFieldValues(
    handle: nvmlDevice_t,
    count: c_int,
    values: *mut nvmlFieldValue_t,
) -> nvmlReturn_t {
    of_device("nvmlDeviceGetFieldValues", handle, |device| {
        for at in 0..usize::try_from(count).unwrap_or(0) {
            // SAFETY: the caller passes as many values as it says, each with the field that it asks for.
            let value = unsafe { &mut *values.add(at) };
            let remap = value
                .fieldId
                .checked_sub(FIRST_REMAP_FIELD)
                .and_then(|field| device.remapped_rows.get(field as usize));
            match remap {
                Some(rows) => {
                    value.nvmlReturn = SUCCESS;
                    value.valueType = UNSIGNED_INT;
                    value.value = nvmlValue_t { uiVal: *rows };
                }
                None => value.nvmlReturn = NOT_SUPPORTED,
            }
        }
        SUCCESS
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetTemperature(
    handle: nvmlDevice_t,
    _sensor: c_uint,
    place: *mut c_uint,
) -> nvmlReturn_t {
    of_device("nvmlDeviceGetTemperature", handle, |device| {
        put(place, device.temperature_celsius[0])
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetTemperatureThreshold(
    handle: nvmlDevice_t,
    _threshold: c_uint,
    place: *mut c_uint,
) -> nvmlReturn_t {
    of_device("nvmlDeviceGetTemperatureThreshold", handle, |device| {
        put(place, device.temperature_celsius[1])
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetNvLinkState(
    handle: nvmlDevice_t,
    link: c_uint,
    place: *mut c_uint,
) -> nvmlReturn_t {
    of_device("nvmlDeviceGetNvLinkState", handle, |device| {
        match device.nvlinks.get(link as usize) {
            Some(up) => put(place, u32::from(*up)),
            None if device.nvlinks.is_empty() => NOT_SUPPORTED,
            None => INVALID_ARGUMENT,
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMigMode(
    handle: nvmlDevice_t,
    current: *mut c_uint,
    pending: *mut c_uint,
) -> nvmlReturn_t {
    of_device("nvmlDeviceGetMigMode", handle, |device| {
        put(current, u32::from(device.mig[0]));
        put(pending, u32::from(device.mig[1]))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMigDeviceHandleByIndex(
    handle: nvmlDevice_t,
    index: c_uint,
    place: *mut nvmlDevice_t,
) -> nvmlReturn_t {
    of_device("nvmlDeviceGetMigDeviceHandleByIndex", handle, |device| {
        let index = index as usize;
        if index < device.instances.len() {
            put(
                place,
                std::ptr::without_provenance_mut(handle.addr() * INSTANCES + index),
            )
        } else {
            NOT_FOUND
        }
    })
}
