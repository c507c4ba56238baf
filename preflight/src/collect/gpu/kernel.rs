//! What the kernel shows of NVIDIA's devices as files.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, accessat};
use rustix::io::Errno;

use crate::facts::gpu::{Access, DeviceNode, PciFunction, PciKind};

/// NVIDIA's number in the list of PCI vendors.
const NVIDIA_VENDOR: &str = "0x10de";

/// Release of the loaded kernel module; `None` when it is not loaded.
pub(super) fn module_version(root: &Path) -> io::Result<Option<String>> {
    let path = root.join("proc/driver/nvidia/version");
    let Some(text) = existing(std::fs::read_to_string(&path))? else {
        return Ok(None);
    };
    text.split_whitespace()
        .find(|word| is_release(word))
        .map(|version| Some(version.to_owned()))
        .ok_or_else(|| io::Error::other(format!("{} names no release", path.display())))
}

/// Whether `text` is a release of the driver, for example `580.95.05`.
pub(super) fn is_release(text: &str) -> bool {
    text.contains('.')
        && text
            .split('.')
            .all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Whether the module of the free driver is loaded.
pub(super) fn nouveau_loaded(root: &Path) -> io::Result<bool> {
    let modules = root.join("sys/module");
    // A missing list of modules says nothing of a module.
    std::fs::metadata(&modules)?;
    modules.join("nouveau").try_exists()
}

/// NVIDIA's GPUs and switches on the PCI bus, by address.
pub(super) fn pci_functions(root: &Path) -> io::Result<Vec<PciFunction>> {
    let mut functions = Vec::new();
    for entry in std::fs::read_dir(root.join("sys/bus/pci/devices"))? {
        let entry = entry?;
        let value = |name: &str| std::fs::read_to_string(entry.path().join(name));
        if value("vendor")?.trim() != NVIDIA_VENDOR {
            continue;
        }
        // The class of a display controller is 03, that of a bridge that is none of the usual ones 0680.
        let kind = match value("class")?.trim() {
            class if class.starts_with("0x03") => PciKind::Gpu,
            class if class.starts_with("0x0680") => PciKind::NvSwitch,
            _ => continue,
        };
        let driver = existing(std::fs::read_link(entry.path().join("driver")))?
            .and_then(|link| Some(link.file_name()?.to_string_lossy().into_owned()));
        functions.push(PciFunction {
            address: entry.file_name().to_string_lossy().into_owned(),
            kind,
            driver,
        });
    }
    functions.sort_by(|a, b| a.address.cmp(&b.address));
    Ok(functions)
}

/// Nodes that computing needs: `nvidiactl`, `nvidia-uvm`, and one for each GPU.
pub(super) fn device_nodes(root: &Path) -> io::Result<Vec<DeviceNode>> {
    let dev = root.join("dev");
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(&dev)? {
        let name = entry?.file_name();
        let name = name.to_string_lossy();
        let is_gpu = name
            .strip_prefix("nvidia")
            .is_some_and(|number| number.parse::<u32>().is_ok());
        if is_gpu || name == "nvidiactl" || name == "nvidia-uvm" {
            paths.push(dev.join(&*name));
        }
    }
    paths.sort();
    paths.iter().map(|path| device_node(root, path)).collect()
}

/// Asks for access rather than opening: it has the same answer, of permission bits and device cgroups alike, and can't wait for a sick device.
fn device_node(root: &Path, path: &Path) -> io::Result<DeviceNode> {
    let metadata = std::fs::metadata(path)?;
    let wanted = rustix::fs::Access::READ_OK | rustix::fs::Access::WRITE_OK;
    Ok(DeviceNode {
        path: shown(root, path),
        mode: metadata.mode() & 0o7777,
        uid: metadata.uid(),
        gid: metadata.gid(),
        access: match accessat(CWD, path, wanted, AtFlags::EACCESS) {
            Ok(()) => Access::Allowed,
            Err(Errno::ACCESS) => Access::PermissionDenied,
            Err(Errno::PERM) => Access::NotPermitted,
            Err(other) => Access::Failed(other.to_string()),
        },
    })
}

/// What says that this is a container.
pub(super) fn container(root: &Path) -> Option<String> {
    ["/.dockerenv", "/run/.containerenv"]
        .into_iter()
        .find(|path| root.join(&path[1..]).exists())
        .map(|path| format!("{path} exists"))
        .or_else(|| {
            std::env::var_os("KUBERNETES_SERVICE_HOST")
                .map(|_| "KUBERNETES_SERVICE_HOST is set".to_owned())
        })
}

/// An address in the form of `/sys/bus/pci/devices`: NVML writes a longer domain and capitals, the kernel log leaves the function out.
pub(super) fn pci_address(address: &str) -> String {
    let address = address.to_ascii_lowercase();
    let (domain, rest) = address.split_once(':').unwrap_or(("0", &address));
    let domain = u32::from_str_radix(domain, 16).unwrap_or(0);
    let function = if rest.contains('.') { "" } else { ".0" };
    format!("{domain:04x}:{rest}{function}")
}

/// `path` as it is called under `root`.
pub(super) fn shown(root: &Path, path: &Path) -> PathBuf {
    path.strip_prefix(root)
        .map_or_else(|_| path.to_owned(), |rest| Path::new("/").join(rest))
}

/// `None` for what does not exist.
pub(super) fn existing<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}
