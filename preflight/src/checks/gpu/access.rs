//! Who holds the devices, and who may open them.

use super::verdict::Verdict;
use super::{Finding, Scope};
use crate::facts::Reading;
use crate::facts::gpu::{Access, CdiSpec, DeviceNode, PciFunction, PciKind};
use crate::facts::host::HostFacts;

pub(super) const KERNEL_DRIVER: &str = "gpu.kernel_driver";
pub(super) const DEVICE_NODES: &str = "gpu.device_nodes";
pub(super) const CDI: &str = "gpu.cdi";

/// NVIDIA's kernel driver as the PCI bus names it.
const NVIDIA: &str = "nvidia";

pub(super) fn kernel_driver(scope: &Scope<'_>) -> Finding {
    let functions = match &scope.gpu.pci_functions {
        Reading::Known(functions) => functions,
        Reading::Unknown(reason) => {
            return Finding::unknown(
                KERNEL_DRIVER,
                format!("/sys/bus/pci/devices: {reason}"),
                "make /sys readable for the service user, or run `lspci -k`",
            );
        }
    };
    let (held, others): (Vec<&PciFunction>, Vec<&PciFunction>) = functions
        .iter()
        .filter(|function| function.kind == PciKind::Gpu)
        .partition(|gpu| gpu.driver.as_deref() == Some(NVIDIA));
    let all = held.len() + others.len();
    let others: Vec<String> = others
        .iter()
        .map(|gpu| {
            let driver = gpu.driver.as_deref().unwrap_or("no driver");
            format!("{} is held by {driver}", gpu.address)
        })
        .collect();
    let evidence = |what: &str| {
        let mut parts = vec![what.to_owned()];
        parts.extend(others.iter().cloned());
        parts.join("; ")
    };
    let remedy = "keep nouveau away (`blacklist nouveau` and `options nouveau modeset=0` in /etc/modprobe.d, then rebuild the initial RAM disk), give back what vfio-pci holds for virtual machines, load the module nvidia, and restart the machine";
    let nouveau = match &scope.gpu.nouveau_loaded {
        Reading::Known(loaded) => *loaded,
        Reading::Unknown(reason) => {
            return Finding::unknown(
                KERNEL_DRIVER,
                format!("whether nouveau is loaded: {reason}"),
                "run `lsmod | grep nouveau`",
            );
        }
    };
    let listed = scope.gpu.devices().len();
    if all == 0 && listed > 0 {
        return Finding::unknown(
            KERNEL_DRIVER,
            format!("/sys shows no GPU on the PCI bus, and NVML lists {listed}"),
            "run `lspci -k` on the machine itself: some sandboxes hide the bus",
        );
    }
    if all == 0 {
        return Finding::fail(
            KERNEL_DRIVER,
            "no GPU of NVIDIA is on the PCI bus",
            "run on a machine with a GPU, or pass one through to this virtual machine",
        );
    }
    let count = format!("{} of {all} GPUs are held by nvidia", held.len());
    if held.is_empty() {
        Finding::fail(KERNEL_DRIVER, evidence(&count), remedy)
    } else if nouveau {
        Finding::warn(
            KERNEL_DRIVER,
            evidence(&format!("{count}; nouveau is loaded")),
            remedy,
        )
    } else if !others.is_empty() {
        Finding::warn(KERNEL_DRIVER, evidence(&count), remedy)
    } else {
        Finding::pass(KERNEL_DRIVER, count)
    }
}

pub(super) fn device_nodes(scope: &Scope<'_>) -> Finding {
    let nodes = match &scope.gpu.device_nodes {
        Reading::Known(nodes) => nodes,
        Reading::Unknown(reason) => {
            return Finding::unknown(
                DEVICE_NODES,
                format!("/dev: {reason}"),
                "run `ls -l /dev/nvidia*`",
            );
        }
    };
    let mut required = vec!["/dev/nvidiactl".to_owned(), "/dev/nvidia-uvm".to_owned()];
    let minor = scope.selected.as_ref().ok().and_then(|selected| {
        let device = scope
            .gpu
            .devices()
            .iter()
            .find(|device| device.index == selected.index);
        device?.state.known()?.minor.known().copied()
    });
    match minor {
        Some(minor) => required.push(format!("/dev/nvidia{minor}")),
        // Which one the server will open is not known, so it must be able to open each.
        None => required.extend(nodes.iter().map(|node| node.path.display().to_string())),
    }
    required.dedup();
    let (create, permit, cgroup) = (
        "load the driver's modules and create the nodes (`nvidia-modprobe -c 0 -u`); in a container, pass them to it",
        "add the service user to the nodes' group, or set NVreg_DeviceFileMode=0666 of the module nvidia",
        "the device cgroup refuses: start the container anew with the devices named (`--device nvidia.com/gpu=all`, NVIDIA's toolkit 1.18 or newer), since a reload of systemd takes them away from one that was given them otherwise",
    );
    let mut verdicts = Vec::new();
    for path in &required {
        let node = nodes
            .iter()
            .find(|node| node.path.as_os_str() == path.as_str());
        verdicts.push(match node.map(|node| (node, access(node, scope.host))) {
            None => Verdict::fail(format!("{path} is missing"), create),
            Some((node, Access::Allowed)) => {
                Verdict::pass(format!("{path} has mode {:03o}", node.mode))
            }
            Some((node, Access::PermissionDenied)) => Verdict::fail(
                format!(
                    "{path} has mode {:03o}, owner {} and group {}, and user {} can't open it for reading and writing",
                    node.mode, node.uid, node.gid, scope.host.user.id
                ),
                permit,
            ),
            Some((_, Access::NotPermitted)) => {
                Verdict::fail(format!("{path} can't be opened in spite of its mode"), cgroup)
            }
            Some((_, Access::Failed(reason))) => {
                Verdict::fail(format!("{path} can't be opened: {reason}"), create)
            }
        });
    }
    if !nodes.iter().any(is_gpu) {
        verdicts.push(Verdict::fail("there is no node of a GPU", create));
    }
    Verdict::sum(verdicts).into_finding(DEVICE_NODES)
}

fn is_gpu(node: &DeviceNode) -> bool {
    let name = node.path.to_string_lossy();
    let number = name.strip_prefix("/dev/nvidia");
    number.is_some_and(|number| number.parse::<u32>().is_ok())
}

/// What the service user may do with `node`. For one who did not read the facts that follows from permission bits; a cgroup refuses all users alike.
fn access(node: &DeviceNode, host: &HostFacts) -> Access {
    let user = &host.user;
    if host.read_by_user || matches!(node.access, Access::NotPermitted | Access::Failed(_)) {
        return node.access.clone();
    }
    let shift = if user.id == node.uid {
        6
    } else if user.group_ids.contains(&node.gid) {
        3
    } else {
        0
    };
    if user.id == 0 || (node.mode >> shift) & 0o6 == 0o6 {
        Access::Allowed
    } else {
        Access::PermissionDenied
    }
}

pub(super) fn cdi(scope: &Scope<'_>) -> Finding {
    let specs = match &scope.gpu.cdi_specs {
        Reading::Known(specs) => specs,
        Reading::Unknown(reason) => {
            return Finding::unknown(
                CDI,
                reason,
                "make /etc/cdi and /var/run/cdi readable for the service user",
            );
        }
    };
    if specs.is_empty() {
        return Finding::skip(
            CDI,
            "neither /etc/cdi nor /var/run/cdi has a specification of NVIDIA's devices",
        );
    }
    let module = scope.gpu.kernel_module.known().and_then(Option::as_deref);
    let verdicts = specs
        .iter()
        .map(|spec| judge_spec(spec, module).of(&spec.path.display().to_string()))
        .collect();
    Verdict::sum(verdicts).into_finding(CDI)
}

fn judge_spec(spec: &CdiSpec, module: Option<&str>) -> Verdict {
    let remedy = "write it anew after each upgrade of the driver: `nvidia-ctk cdi generate --output=/var/run/cdi/nvidia.yaml`, or enable nvidia-cdi-refresh.service";
    let content = match &spec.content {
        Reading::Known(content) => content,
        Reading::Unknown(reason) => {
            return Verdict::warn(format!("it can't be read: {reason}"), remedy);
        }
    };
    let versions = content.driver_versions.join(", ");
    let stale = module.filter(|module| {
        !content.driver_versions.is_empty()
            && !content
                .driver_versions
                .iter()
                .any(|version| version == module)
    });
    if let Some(module) = stale {
        return Verdict::warn(
            format!("it mounts libraries of {versions}, and the kernel module is {module}"),
            remedy,
        );
    }
    if !content.missing_nodes.is_empty() {
        let nodes: Vec<_> = content
            .missing_nodes
            .iter()
            .map(|node| node.display().to_string())
            .collect();
        return Verdict::warn(
            format!("it passes on what does not exist: {}", nodes.join(", ")),
            remedy,
        );
    }
    if content.devices.is_empty() {
        return Verdict::warn("it names no device", remedy);
    }
    let (kind, devices) = (&content.kind, content.devices.join(", "));
    Verdict::pass(format!("{kind} with {devices}, driver {versions}"))
}
