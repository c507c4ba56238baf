//! The driver: whether it answers, whether its parts fit each other, and whether it is new enough for the runtime.

use super::verdict::Verdict;
use super::{Finding, Scope};
use crate::facts::Reading;
use crate::facts::gpu::{CudaVersion, DeviceState, Libcuda, NvmlFailure, NvmlOutcome};
use crate::facts::runtime::RuntimeFacts;

pub(super) const NVML: &str = "gpu.nvml";
pub(super) const MISMATCH: &str = "gpu.driver_mismatch";
pub(super) const TOO_OLD: &str = "gpu.driver_too_old";
pub(super) const LIBCUDA: &str = "gpu.libcuda";
pub(super) const CAPABILITY: &str = "gpu.compute_capability";

const MISMATCH_REMEDY: &str = "restart the machine, or stop everything that uses a GPU and load the module anew (`rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && modprobe nvidia`); then hold the driver's packages, so that no unattended upgrade parts them again";

/// Lowest driver of each major version of CUDA, from NVIDIA's rule of minor-version compatibility.
const FLOORS: [(u32, u32); 3] = [(13, 580), (12, 525), (11, 450)];

/// The driver that each toolkit came with, from the toolkits' release notes: what to install where the loaded one lacks features.
const SHIPPED: [((u32, u32), [u32; 3]); 12] = [
    ((13, 1), [590, 44, 1]),
    ((13, 0), [580, 65, 6]),
    ((12, 9), [575, 51, 3]),
    ((12, 8), [570, 86, 10]),
    ((12, 6), [560, 28, 3]),
    ((12, 5), [555, 42, 2]),
    ((12, 4), [550, 54, 14]),
    ((12, 3), [545, 23, 6]),
    ((12, 2), [535, 54, 3]),
    ((12, 1), [530, 30, 2]),
    ((12, 0), [525, 60, 13]),
    ((11, 8), [520, 61, 5]),
];

/// Lowest compute capability that a toolkit still compiles for: CUDA 13 dropped what is older than Turing.
const LOWEST_CAPABILITY: [(u32, (u32, u32)); 3] = [(13, (7, 5)), (12, (5, 0)), (11, (3, 5))];

/// The CUDA that a runtime was built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaNeed {
    /// Major version, from the names of the libraries that the runtime needs.
    pub major: u32,
    /// Minor version, where something tells it.
    pub minor: Option<u32>,
}

/// The first number of the lowest driver that runs CUDA of the major version `cuda_major`; `None` for one that is not in the table.
pub fn driver_floor(cuda_major: u32) -> Option<u32> {
    FLOORS
        .iter()
        .find(|(major, _)| *major == cuda_major)
        .map(|(_, floor)| *floor)
}

/// The CUDA that the runtime needs.
pub(super) fn need(runtime: &RuntimeFacts) -> Reading<CudaNeed> {
    let provider = match &runtime.cuda_provider {
        Some(Reading::Known(provider)) => provider,
        Some(Reading::Unknown(reason)) => return Reading::Unknown(reason.clone()),
        None => return Reading::Unknown("the CUDA provider was not read".into()),
    };
    match provider.cuda_major() {
        Some(major) => Reading::Known(CudaNeed {
            major,
            minor: provider.cuda_minor(),
        }),
        None => Reading::Unknown(format!(
            "{} names no library of CUDA that it needs",
            provider.path
        )),
    }
}

pub(super) fn nvml(scope: &Scope<'_>) -> Finding {
    let library = scope.gpu.nvml.library.display();
    let failure = match &scope.gpu.nvml.outcome {
        NvmlOutcome::NotAsked(reason) => {
            return Finding::unknown(NVML, reason, "run on the machine that is to serve");
        }
        NvmlOutcome::Read(system) => {
            let text = |reading: &Reading<String>| match reading {
                Reading::Known(value) => value.clone(),
                Reading::Unknown(reason) => format!("unknown ({reason})"),
            };
            let cuda = match &system.cuda_version {
                Reading::Known(version) => version.to_string(),
                Reading::Unknown(reason) => format!("unknown ({reason})"),
            };
            let file = match &system.library_file {
                Reading::Known(path) => path.display().to_string(),
                Reading::Unknown(_) => library.to_string(),
            };
            let driver = text(&system.driver_version);
            return Finding::pass(NVML, format!("{file}, driver {driver}, CUDA {cuda}"));
        }
        NvmlOutcome::Failed(failure) => failure,
    };
    let remedy = match failure {
        NvmlFailure::NotLoadable(_) => {
            "install NVIDIA's driver; in a container, start it with the devices and libraries of the driver (`--gpus all`, or `--device nvidia.com/gpu=all`)"
        }
        NvmlFailure::DriverNotLoaded => {
            "load the module (`modprobe nvidia`) and read `dmesg` if that fails; after a new kernel the module may have to be built for it, and with Secure Boot signed"
        }
        NvmlFailure::VersionMismatch => MISMATCH_REMEDY,
        NvmlFailure::NoPermission => {
            "let the service user open /dev/nvidiactl and /dev/nvidia*: add it to their group, or set NVreg_DeviceFileMode of the module"
        }
        NvmlFailure::Blocked(_) => {
            "in a container, start it anew: `systemctl daemon-reload` takes the devices of running containers away, which the Container Device Interface with NVIDIA's toolkit 1.18 or newer prevents; elsewhere read `dmesg`, since the driver itself failed"
        }
        NvmlFailure::TimedOut(_) => {
            "read `dmesg` for Xid lines: a device hangs and takes the driver's lock with it; drain the machine and restart it"
        }
        NvmlFailure::Other(_) => {
            "run `nvidia-smi` and read `dmesg`; reinstall the driver if it says the same"
        }
    };
    let evidence = match failure {
        // The loader names the file.
        NvmlFailure::NotLoadable(reason) => reason.clone(),
        _ => format!("{library}: {failure}"),
    };
    Finding::fail(NVML, evidence, remedy)
}

pub(super) fn mismatch(scope: &Scope<'_>) -> Finding {
    let module = match &scope.gpu.kernel_module {
        Reading::Known(module) => module.as_deref(),
        Reading::Unknown(reason) => {
            return Finding::unknown(
                MISMATCH,
                format!("/proc/driver/nvidia/version: {reason}"),
                "read that file as the service user",
            );
        }
    };
    let library = match &scope.gpu.nvml.outcome {
        NvmlOutcome::Failed(NvmlFailure::VersionMismatch) => {
            let module = module.unwrap_or("of an unknown release");
            return Finding::fail(
                MISMATCH,
                format!("the kernel module is {module}, and the library is of another release"),
                MISMATCH_REMEDY,
            );
        }
        NvmlOutcome::Read(system) => system.driver_version.known(),
        NvmlOutcome::NotAsked(_) | NvmlOutcome::Failed(_) => None,
    };
    match (module, library) {
        (Some(module), Some(library)) if module == library => {
            Finding::pass(MISMATCH, format!("module and library are {module}"))
        }
        (Some(module), Some(library)) => Finding::fail(
            MISMATCH,
            format!("the kernel module is {module}, the library {library}"),
            MISMATCH_REMEDY,
        ),
        (None, Some(library)) => Finding::unknown(
            MISMATCH,
            format!(
                "the library is {library}, and /proc/driver/nvidia/version, which names the module's release, is not there"
            ),
            "compare with `cat /proc/driver/nvidia/version` on the machine itself: some sandboxes hide it",
        ),
        (None, None) => Finding::fail(
            MISMATCH,
            "the kernel module is not loaded",
            "load the module (`modprobe nvidia`) and read `dmesg` if that fails",
        ),
        (Some(module), None) => Finding::unknown(
            MISMATCH,
            format!("the kernel module is {module}, the library did not say its release"),
            format!("see to {NVML} first"),
        ),
    }
}

pub(super) fn too_old(scope: &Scope<'_>) -> Finding {
    let NvmlOutcome::Read(system) = &scope.gpu.nvml.outcome else {
        return super::no_devices(TOO_OLD, scope.gpu);
    };
    match (&system.driver_version, &scope.need) {
        (Reading::Known(driver), Reading::Known(need)) => {
            judge_release(driver, system.cuda_version.known().copied(), *need)
        }
        (Reading::Known(driver), Reading::Unknown(reason)) => Finding::unknown(
            TOO_OLD,
            format!("the driver is {driver}; the CUDA that the runtime needs is unknown: {reason}"),
            "see to the checks of the runtime first",
        ),
        (Reading::Unknown(reason), _) => Finding::unknown(
            TOO_OLD,
            format!("the driver's release is unknown: {reason}"),
            "run `nvidia-smi`",
        ),
    }
}

/// Whether the driver of release `driver`, which says that it has `own` features, runs a program that was built for `need`.
///
/// Within a major version of CUDA every driver from the first one on runs what was built for any minor version; features of a newer minor version it
/// lacks, and code that is compiled at run time fails.
fn judge_release(driver: &str, own: Option<CudaVersion>, need: CudaNeed) -> Finding {
    let parts = parse(driver);
    let Some(first) = parts.first() else {
        return Finding::unknown(
            TOO_OLD,
            format!("the driver's release {driver:?} is not one of numbers"),
            "run `nvidia-smi`",
        );
    };
    let major = need.major;
    let Some(floor) = driver_floor(major) else {
        let newest = FLOORS[0].0;
        return Finding::unknown(
            TOO_OLD,
            format!(
                "the driver is {driver}; CUDA {major} is not in the table, which ends at {newest}"
            ),
            format!(
                "look up the lowest driver of CUDA {major} in NVIDIA's page on minor-version compatibility"
            ),
        );
    };
    let rule = format!("the driver is {driver}, CUDA {major} needs {floor} or newer");
    if *first < floor {
        return Finding::fail(
            TOO_OLD,
            rule,
            format!(
                "install driver {floor} or newer, or use an ONNX Runtime that was built for an older CUDA (up to 1.26: CUDA 12)"
            ),
        );
    }
    let Some(minor) = need.minor else {
        return Finding::pass(
            TOO_OLD,
            format!("{rule}; the rule of the major version applies, the minor one is not told"),
        );
    };
    let shipped = SHIPPED
        .iter()
        .find(|(version, _)| *version == (major, minor))
        .map(|(_, release)| release);
    let shipped_text = shipped.map(|[a, b, c]| format!("{a}.{b:02}.{c:02}"));
    let has_all = match (own, shipped) {
        (Some(own), _) => (own.major, own.minor) >= (major, minor),
        (None, Some(shipped)) => parts.as_slice() >= shipped.as_slice(),
        (None, None) => {
            return Finding::unknown(
                TOO_OLD,
                format!(
                    "{rule}; CUDA {major}.{minor} is not in the table, and the driver does not say what it has: only the rule of the major version applies"
                ),
                format!("look up the driver of CUDA {major}.{minor} in its release notes"),
            );
        }
    };
    if has_all {
        return Finding::pass(TOO_OLD, format!("{rule}; it has all of {major}.{minor}"));
    }
    let own = own.map_or_else(
        || "an older version".to_owned(),
        |own| format!("CUDA {own}"),
    );
    let newer = shipped_text.map_or_else(
        || format!("a driver of CUDA {major}.{minor} or newer"),
        |release| format!("driver {release} or newer"),
    );
    Finding::warn(
        TOO_OLD,
        format!("{rule}; it has the features of {own}, and the libraries are of {major}.{minor}"),
        format!(
            "install {newer}: with an older one of the same major version, code that is compiled at run time and some features fail"
        ),
    )
}

pub(super) fn libcuda(scope: &Scope<'_>) -> Finding {
    let library = match &scope.gpu.libcuda {
        Reading::Known(Some(library)) => library,
        Reading::Known(None) => {
            return Finding::fail(
                LIBCUDA,
                "the loader finds no libcuda.so.1",
                "install the driver's CUDA library (libcuda1, or nvidia-driver-cuda); in a container, start it with the capability `compute` (NVIDIA_DRIVER_CAPABILITIES=compute,utility)",
            );
        }
        Reading::Unknown(reason) => {
            return Finding::unknown(LIBCUDA, reason, "run `ldconfig -p | grep libcuda.so.1`");
        }
    };
    let Libcuda {
        path,
        file,
        version,
    } = library;
    let (path, file) = (path.display(), file.display());
    let module = scope.gpu.kernel_module.known().and_then(Option::as_deref);
    let found = format!("{path} is {file}");
    match (version.as_deref(), module) {
        (Some(version), Some(module)) if version == module => {
            Finding::pass(LIBCUDA, format!("{found}, the driver's"))
        }
        (Some(version), Some(module)) => {
            let found = format!("{found}, and the kernel module is {module}");
            let remedy = "take the directory of the compatibility package out of LD_LIBRARY_PATH and of /etc/ld.so.conf.d, or remove the package (cuda-compat), so that the driver's own library is found";
            // Outside of a compatibility package's directory it is the driver's own, of another release.
            if !library
                .file
                .components()
                .any(|part| part.as_os_str() == "compat")
            {
                return Finding::fail(LIBCUDA, found, MISMATCH_REMEDY);
            }
            let newer = parse(version) > parse(module);
            let gaming = scope.gpu.devices().iter().any(|device| {
                let name = device.state.known().and_then(|state| state.name.known());
                name.is_some_and(|name| name.contains("GeForce"))
            });
            // A newer library than the module is forward compatibility, which NVIDIA supports on data-centre GPUs alone.
            if newer && !gaming {
                Finding::warn(LIBCUDA, format!("{found}: forward compatibility"), remedy)
            } else {
                Finding::fail(LIBCUDA, found, remedy)
            }
        }
        _ => Finding::unknown(
            LIBCUDA,
            format!("{found}; whether it belongs to the loaded module can't be told"),
            "compare its release with `cat /proc/driver/nvidia/version`",
        ),
    }
}

/// The numbers of a release, for comparing.
fn parse(release: &str) -> Vec<u32> {
    release
        .split('.')
        .map_while(|part| part.parse().ok())
        .collect()
}

pub(super) fn capability(scope: &Scope<'_>) -> Finding {
    let need = scope.need.clone();
    scope.each_device(CAPABILITY, |state| judge_capability(state, &need))
}

fn judge_capability(state: &DeviceState, need: &Reading<CudaNeed>) -> Verdict {
    let (major, minor) = match &state.compute_capability {
        Reading::Known(capability) => *capability,
        Reading::Unknown(reason) => return Verdict::unknown(reason),
    };
    let found = format!("compute capability {major}.{minor}");
    let need = match need {
        Reading::Known(need) => need,
        Reading::Unknown(reason) => {
            return Verdict::unknown(format!(
                "{found}; the CUDA that the runtime needs is unknown: {reason}"
            ));
        }
    };
    let cuda = need.major;
    let lowest = LOWEST_CAPABILITY
        .iter()
        .find(|(major, _)| *major == cuda)
        .map(|(_, lowest)| *lowest);
    match lowest {
        None => Verdict::unknown(format!(
            "{found}; what CUDA {cuda} needs is not in the table"
        )),
        Some((a, b)) if (major, minor) < (a, b) => Verdict::fail(
            format!("{found}, CUDA {cuda} has code from {a}.{b} on"),
            "use a newer GPU, or an ONNX Runtime that was built for an older CUDA",
        ),
        Some((a, b)) => Verdict::pass(format!("{found}, CUDA {cuda} has code from {a}.{b} on")),
    }
}
