//! GPUs as NVML, the kernel and device nodes show them.
//!
//! Where a driver may rightly lack something, a reading is of an `Option`: `Known(None)` says that the device does not have it, which is not the same as
//! not knowing.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::Reading;

/// GPUs as NVML, the kernel and device nodes show them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuFacts {
    /// What NVML said.
    pub nvml: NvmlFacts,
    /// Version of the loaded kernel module, from `/proc/driver/nvidia/version`; `None` when it is not loaded.
    pub kernel_module: Reading<Option<String>>,
    /// Whether the module of the free driver is loaded.
    pub nouveau_loaded: Reading<bool>,
    /// NVIDIA's functions on the PCI bus.
    pub pci_functions: Reading<Vec<PciFunction>>,
    /// Device nodes of the driver.
    pub device_nodes: Reading<Vec<DeviceNode>>,
    /// What says that this is a container; `None` on the machine itself.
    pub container: Option<String>,
    /// Variables that choose devices.
    pub environment: Environment,
    /// Specifications of the Container Device Interface that name NVIDIA's devices.
    pub cdi_specs: Reading<Vec<CdiSpec>>,
    /// The `libcuda.so.1` that the loader finds first; `None` when it finds none.
    pub libcuda: Reading<Option<Libcuda>>,
    /// What the driver wrote to the kernel log.
    pub kernel_log: Reading<KernelLog>,
    /// The fabric manager; `None` when none runs.
    pub fabric_manager: Reading<Option<FabricManager>>,
}

impl GpuFacts {
    /// Facts of which none was read, because of `reason`.
    pub fn not_read(reason: &str) -> Self {
        fn unknown<T>(reason: &str) -> Reading<T> {
            Reading::Unknown(reason.to_owned())
        }
        Self {
            nvml: NvmlFacts {
                library: PathBuf::new(),
                outcome: NvmlOutcome::NotAsked(reason.to_owned()),
            },
            kernel_module: unknown(reason),
            nouveau_loaded: unknown(reason),
            pci_functions: unknown(reason),
            device_nodes: unknown(reason),
            container: None,
            environment: Environment::default(),
            cdi_specs: unknown(reason),
            libcuda: unknown(reason),
            kernel_log: unknown(reason),
            fabric_manager: unknown(reason),
        }
    }

    /// The devices that NVML listed, when it was read.
    pub fn devices(&self) -> &[Device] {
        match &self.nvml.outcome {
            NvmlOutcome::Read(system) => &system.devices,
            NvmlOutcome::NotAsked(_) | NvmlOutcome::Failed(_) => &[],
        }
    }
}

impl Default for GpuFacts {
    fn default() -> Self {
        Self::not_read("it was not read")
    }
}

/// What NVML said, and which NVML.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NvmlFacts {
    /// The library that was asked for: a path, or a name that the loader resolves.
    pub library: PathBuf,
    /// What came of it.
    pub outcome: NvmlOutcome,
}

/// What came of asking NVML.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NvmlOutcome {
    /// Nobody asked, and why.
    NotAsked(String),
    /// It could not be loaded or initialised.
    Failed(NvmlFailure),
    /// It answered; single values may still be unknown.
    Read(Box<NvmlSystem>),
}

/// Why NVML could not be loaded or initialised.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NvmlFailure {
    /// The library was not found, or the loader refused it; the loader's words.
    NotLoadable(String),
    /// The kernel module is not loaded.
    DriverNotLoaded,
    /// Kernel module and library are of different releases.
    VersionMismatch,
    /// The device nodes may not be opened.
    NoPermission,
    /// The operating system or a device cgroup refused, which NVML calls an unknown error or one of the operating system.
    Blocked(String),
    /// A call did not come back in time; the call.
    TimedOut(String),
    /// Something else; NVML's words, or what became of the process that asked.
    Other(String),
}

impl std::fmt::Display for NvmlFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::DriverNotLoaded => f.write_str("the kernel module of the driver is not loaded"),
            Self::VersionMismatch => {
                f.write_str("kernel module and library are of different releases")
            }
            Self::NoPermission => f.write_str("no permission to open the device nodes"),
            Self::NotLoadable(reason)
            | Self::Blocked(reason)
            | Self::TimedOut(reason)
            | Self::Other(reason) => f.write_str(reason),
        }
    }
}

/// What NVML said of the driver and its devices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NvmlSystem {
    /// The file that the loader took.
    pub library_file: Reading<PathBuf>,
    /// Release of the user part of the driver, for example `580.95.05`.
    pub driver_version: Reading<String>,
    /// Newest CUDA that the driver knows, as major and minor version.
    pub cuda_version: Reading<CudaVersion>,
    /// Devices that the driver drives and this process may see.
    pub device_count: Reading<u32>,
    /// Those devices, in NVML's order, which is that of the PCI bus.
    pub devices: Vec<Device>,
}

/// A version of CUDA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CudaVersion {
    /// For example 13.
    pub major: u32,
    /// For example 0.
    pub minor: u32,
}

impl std::fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// One GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// NVML's number of it.
    pub index: u32,
    /// What was read of it, or why it can't be spoken to.
    pub state: Reading<Box<DeviceState>>,
}

/// What NVML said of one GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceState {
    /// `GPU-` and a UUID.
    pub uuid: Reading<String>,
    /// For example `NVIDIA H200`.
    pub name: Reading<String>,
    /// Address on the PCI bus, `0000:1b:00.0`, in lower case.
    pub pci_address: Reading<String>,
    /// Number of its device node.
    pub minor: Reading<u32>,
    /// Compute capability, major and minor.
    pub compute_capability: Reading<(u32, u32)>,
    /// Memory; what the driver reserves for itself counts as neither free nor used.
    pub memory: Reading<Memory>,
    /// Processes with memory on it, without names: another namespace's can't be known.
    pub processes: Reading<Vec<Process>>,
    /// Error correction, now and after the next reset; `None` where there is none.
    pub ecc_mode: Reading<Option<Setting>>,
    /// Errors since the driver was loaded; `None` without error correction.
    pub ecc_errors: Reading<Option<EccErrors>>,
    /// Retired pages of GPUs before Ampere; `None` on later ones.
    pub retired_pages: Reading<Option<RetiredPages>>,
    /// Rows of memory that were remapped; `None` on GPUs before Ampere.
    pub row_remap: Reading<Option<RowRemap>>,
    /// What holds clocks down now.
    pub throttle_reasons: Reading<Vec<ThrottleReason>>,
    /// Power; `None` where it can't be measured.
    pub power: Reading<Option<Power>>,
    /// Temperature of the chip.
    pub temperature_celsius: Reading<u32>,
    /// Temperature from which the hardware slows itself down; `None` where it is not told.
    pub slowdown_celsius: Reading<Option<u32>>,
    /// The link to the host; `None` for a device that is not behind PCI Express.
    pub pcie: Reading<Option<PcieLink>>,
    /// Whether each NVLink is up; `None` without NVLink.
    pub nvlinks_up: Reading<Option<Vec<bool>>>,
    /// Division into instances; `None` where it can't be divided.
    pub mig_mode: Reading<Option<Setting>>,
    /// Instances that this process may see.
    pub mig_instances: Reading<Vec<MigInstance>>,
    /// Who may use the device.
    pub compute_mode: Reading<ComputeMode>,
    /// Whether the driver keeps the device ready while nobody uses it.
    pub persistence: Reading<bool>,
    /// Share of time in which a kernel ran, in percent, sampled over a short window; `None` where it is not measured, as on a divided device.
    pub utilisation_percent: Reading<Option<Vec<u32>>>,
}

/// Memory of a device, or of an instance of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Memory {
    /// All of it.
    pub total_bytes: u64,
    /// What can be taken.
    pub free_bytes: u64,
    /// What is taken.
    pub used_bytes: u64,
}

/// A process with memory on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Process {
    /// Its number, in the namespace of the machine.
    pub pid: u32,
    /// Its memory; `None` when the driver does not say.
    pub used_bytes: Option<u64>,
}

/// A mode that takes effect at the next reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Setting {
    /// Whether it is on.
    pub current: bool,
    /// Whether it will be.
    pub pending: bool,
}

/// Memory errors since the driver was loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EccErrors {
    /// Errors that were corrected.
    pub corrected: u64,
    /// Errors that were not.
    pub uncorrected: u64,
}

/// Pages of memory that are no longer used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RetiredPages {
    /// Pages retired after several single-bit errors.
    pub single_bit: u32,
    /// Pages retired after a double-bit error.
    pub double_bit: u32,
    /// Whether some wait for the next reset.
    pub pending: bool,
}

/// Rows of memory that spare rows stand in for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RowRemap {
    /// Rows remapped after errors that were corrected.
    pub corrected: u32,
    /// Rows remapped after errors that were not.
    pub uncorrected: u32,
    /// Whether some wait for the next reset.
    pub pending: bool,
    /// Whether a row could not be remapped.
    pub failed: bool,
}

/// What holds clocks down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ThrottleReason {
    /// Nothing runs.
    GpuIdle,
    /// Somebody fixed the clocks.
    ApplicationsClocksSetting,
    /// The limit of power is reached.
    SwPowerCap,
    /// Heat, power or the supply: clocks are at half or less.
    HwSlowdown,
    /// Another GPU of a group is slower.
    SyncBoost,
    /// Chip or memory are hotter than they may be.
    SwThermalSlowdown,
    /// Too hot: clocks are at half or less.
    HwThermalSlowdown,
    /// The power supply asks for less: clocks are at half or less.
    HwPowerBrakeSlowdown,
    /// A display holds them.
    DisplayClockSetting,
}

/// Power of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Power {
    /// What it draws now.
    pub draw_mw: u32,
    /// What it may draw.
    pub limit_mw: u32,
    /// What it may draw when nobody changed that.
    pub default_limit_mw: u32,
}

/// A link of PCI Express.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PcieLink {
    /// Its generation now; idle links fall back to save power.
    pub generation: u32,
    /// The generation that device and slot can do.
    pub max_generation: u32,
    /// Its lanes now.
    pub width: u32,
    /// The lanes that device and slot can do.
    pub max_width: u32,
}

/// An instance of a divided device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigInstance {
    /// `MIG-` and a UUID.
    pub uuid: Reading<String>,
    /// Its share of the memory.
    pub memory: Reading<Memory>,
}

/// Who may use a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ComputeMode {
    /// Any number of processes.
    Default,
    /// One thread.
    ExclusiveThread,
    /// Nobody.
    Prohibited,
    /// One process.
    ExclusiveProcess,
}

/// One of NVIDIA's functions on the PCI bus.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PciFunction {
    /// Its address, `0000:1b:00.0`.
    pub address: String,
    /// What it is.
    pub kind: PciKind,
    /// The kernel driver that holds it; `None` when none does.
    pub driver: Option<String>,
}

/// Functions on the PCI bus that matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PciKind {
    /// A GPU.
    Gpu,
    /// A switch between GPUs.
    NvSwitch,
}

/// A device node of the driver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceNode {
    /// Where it is.
    pub path: PathBuf,
    /// Its permission bits.
    pub mode: u32,
    /// Its owner.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// Whether the process that read the facts may open it for reading and writing.
    pub access: Access,
}

/// Whether something may be opened for reading and writing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Access {
    /// It may.
    Allowed,
    /// Its permission bits forbid it.
    PermissionDenied,
    /// Its permission bits allow it, and a device cgroup or a security module does not.
    NotPermitted,
    /// Another reason, in the words of the system.
    Failed(String),
}

/// Variables that choose devices, as they are for the process that read the facts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Environment {
    /// `CUDA_VISIBLE_DEVICES`.
    pub cuda_visible_devices: Option<String>,
    /// `CUDA_DEVICE_ORDER`.
    pub cuda_device_order: Option<String>,
    /// `NVIDIA_VISIBLE_DEVICES`.
    pub nvidia_visible_devices: Option<String>,
}

/// A specification of the Container Device Interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CdiSpec {
    /// The file.
    pub path: PathBuf,
    /// What it holds, or why it can't be read.
    pub content: Reading<CdiContent>,
}

/// What a specification of the Container Device Interface holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CdiContent {
    /// Its kind, for example `nvidia.com/gpu`.
    pub kind: String,
    /// Names of its devices.
    pub devices: Vec<String>,
    /// Releases of the driver in the names of libraries that it mounts.
    pub driver_versions: Vec<String>,
    /// Device nodes that it passes on and that do not exist.
    pub missing_nodes: Vec<PathBuf>,
}

/// The library of the CUDA driver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Libcuda {
    /// Where the loader finds it.
    pub path: PathBuf,
    /// The file behind its links.
    pub file: PathBuf,
    /// Its release, from the name of the file; `None` when that has none.
    pub version: Option<String>,
}

/// What the driver wrote to the kernel log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelLog {
    /// Time from the start of the machine to the oldest record that is still there.
    pub begins_at_seconds: u64,
    /// Time from the start of the machine to now.
    pub read_at_seconds: u64,
    /// Faults of GPUs and switches.
    pub faults: Vec<Fault>,
}

/// A fault that the driver wrote to the kernel log, once or many times.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fault {
    /// Whether it is one of a switch (SXid) rather than of a GPU (Xid).
    pub of_switch: bool,
    /// Address on the PCI bus, `0000:1b:00.0`.
    pub pci_address: String,
    /// Its number in NVIDIA's catalogue.
    pub number: u32,
    /// How often it is in the log.
    pub count: u32,
    /// Time from the start of the machine to the last time.
    pub last_at_seconds: u64,
    /// The rest of the last line.
    pub text: String,
}

/// The service that sets up a fabric of switches.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FabricManager {
    /// Its process.
    pub pid: u32,
    /// Its release, from its log.
    pub version: Reading<String>,
}
