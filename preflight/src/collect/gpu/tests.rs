//! What is read of a file system, which a directory stands in for.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use super::{cdi, fabric, kernel, log};
use crate::facts::Reading;
use crate::facts::gpu::{Access, PciFunction, PciKind};

/// A root with `files`.
fn root(files: &[(&str, &str)]) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for (path, text) in files {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    root
}

#[test]
fn the_release_of_the_module_is_read_from_both_kinds_of_module() {
    for (text, release) in [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version:  gcc version 12.3.0\n",
            "535.104.05",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (builder@host)  Tue Sep 23 10:11:16 UTC 2025\n",
            "580.95.05",
        ),
    ] {
        let root = root(&[("proc/driver/nvidia/version", text)]);
        let found = kernel::module_version(root.path()).unwrap();
        assert_eq!(found.as_deref(), Some(release));
    }
    assert_eq!(kernel::module_version(root(&[]).path()).unwrap(), None);
    assert!(
        kernel::module_version(root(&[("proc/driver/nvidia/version", "nothing")]).path()).is_err()
    );
}

#[test]
fn nouveau_is_unknown_where_modules_are_not_listed() {
    assert!(kernel::nouveau_loaded(root(&[]).path()).is_err());
    assert!(!kernel::nouveau_loaded(root(&[("sys/module/nvidia/version", "")]).path()).unwrap());
    assert!(kernel::nouveau_loaded(root(&[("sys/module/nouveau/refcnt", "")]).path()).unwrap());
}

#[test]
fn gpus_and_switches_are_found_on_the_bus_with_who_holds_them() {
    let root = root(&[
        ("sys/bus/pci/devices/0000:1b:00.0/vendor", "0x10de\n"),
        ("sys/bus/pci/devices/0000:1b:00.0/class", "0x030200\n"),
        ("sys/bus/pci/devices/0000:1b:00.1/vendor", "0x10de\n"),
        ("sys/bus/pci/devices/0000:1b:00.1/class", "0x040300\n"),
        ("sys/bus/pci/devices/0000:00:02.0/vendor", "0x8086\n"),
        ("sys/bus/pci/devices/0000:00:02.0/class", "0x030000\n"),
        ("sys/bus/pci/devices/0000:c1:00.0/vendor", "0x10de\n"),
        ("sys/bus/pci/devices/0000:c1:00.0/class", "0x068000\n"),
        ("sys/bus/pci/drivers/nvidia/bind", ""),
    ]);
    let devices = root.path().join("sys/bus/pci/devices");
    symlink("../../drivers/nvidia", devices.join("0000:1b:00.0/driver")).unwrap();
    let function = |address: &str, kind, driver: Option<&str>| PciFunction {
        address: address.to_owned(),
        kind,
        driver: driver.map(ToOwned::to_owned),
    };
    assert_eq!(
        kernel::pci_functions(root.path()).unwrap(),
        [
            function("0000:1b:00.0", PciKind::Gpu, Some("nvidia")),
            function("0000:c1:00.0", PciKind::NvSwitch, None),
        ]
    );
}

#[test]
fn nodes_that_computing_does_not_need_are_left_out() {
    let root = root(&[
        ("dev/nvidia0", ""),
        ("dev/nvidia12", ""),
        ("dev/nvidiactl", ""),
        ("dev/nvidia-uvm", ""),
        ("dev/nvidia-uvm-tools", ""),
        ("dev/nvidia-modeset", ""),
        ("dev/null", ""),
    ]);
    let mode = fs::Permissions::from_mode(0o660);
    fs::set_permissions(root.path().join("dev/nvidia0"), mode).unwrap();
    let nodes = kernel::device_nodes(root.path()).unwrap();
    let paths: Vec<_> = nodes
        .iter()
        .map(|node| node.path.to_str().unwrap())
        .collect();
    assert_eq!(
        paths,
        [
            "/dev/nvidia-uvm",
            "/dev/nvidia0",
            "/dev/nvidia12",
            "/dev/nvidiactl"
        ]
    );
    assert_eq!((nodes[1].mode, &nodes[1].access), (0o660, &Access::Allowed));
}

#[test]
fn faults_are_taken_from_the_kernel_log_and_counted() {
    let log = "\
6,900,3000000,-;Linux version 6.8.0
4,901,61000000,-;NVRM: Xid (PCI:0000:1B:00): 31, pid=4242, name=python3, Ch 00000008
 SUBSYSTEM=pci
6,902,62000000,-;NVRM: GPU at PCI:0000:1b:00: GPU-4f0c1a7e
4,903,3700000000,-;NVRM: Xid (PCI:0000:1b:00): 31, pid=4243, name=python3, Ch 00000010
3,904,3800000000,-;nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Non-fatal, Link 46
6,905,3900000000,-;somebody: wrote Xid (PCI:0000:1b:00): 79, and is not the driver
";
    let root = root(&[("dev/kmsg", log), ("proc/uptime", "7200.51 14000.00\n")]);
    let log = log::read(root.path()).unwrap();
    assert_eq!((log.begins_at_seconds, log.read_at_seconds), (3, 7200));
    let faults: Vec<_> = log
        .faults
        .iter()
        .map(|fault| {
            let place = fault.pci_address.as_str();
            (
                fault.of_switch,
                place,
                fault.number,
                fault.count,
                fault.last_at_seconds,
                fault.text.as_str(),
            )
        })
        .collect();
    assert_eq!(
        faults,
        [
            (
                false,
                "0000:1b:00.0",
                31,
                2,
                3700,
                "pid=4243, name=python3, Ch 00000010"
            ),
            (true, "0000:c1:00.0", 28006, 1, 3800, "Non-fatal, Link 46"),
        ]
    );
    assert!(log::read(self::root(&[("proc/uptime", "1.0 1.0")]).path()).is_err());
}

#[test]
fn specifications_for_containers_are_read_for_releases_and_nodes() {
    let root = root(&[
        (
            "etc/cdi/nvidia.yaml",
            "cdiVersion: 0.6.0\nkind: nvidia.com/gpu\ndevices:\n- name: \"0\"\n  containerEdits:\n    deviceNodes:\n    - path: /dev/nvidia0\n    - path: /dev/nvidia7\ncontainerEdits:\n  mounts:\n  - hostPath: /usr/lib/libcuda.so.570.124.06\n    containerPath: /usr/lib/libcuda.so.570.124.06\n  - hostPath: /usr/bin/nvidia-smi\n    containerPath: /usr/bin/nvidia-smi\n",
        ),
        (
            "etc/cdi/other.json",
            r#"{"cdiVersion": "0.6.0", "kind": "vendor.com/device", "devices": []}"#,
        ),
        ("etc/cdi/notes.txt", "not one"),
        ("var/run/cdi/broken.json", "{"),
        ("dev/nvidia0", ""),
    ]);
    let specs = cdi::specs(root.path()).unwrap();
    assert_eq!(specs.len(), 2);
    assert_eq!(specs[0].path, Path::new("/etc/cdi/nvidia.yaml"));
    let content = specs[0].content.known().unwrap();
    assert_eq!(content.devices, ["0"]);
    assert_eq!(content.driver_versions, ["570.124.06"]);
    assert_eq!(content.missing_nodes, [Path::new("/dev/nvidia7")]);
    assert!(specs[1].content.known().is_none());
    assert_eq!(cdi::specs(self::root(&[]).path()).unwrap(), []);
}

#[test]
fn the_fabric_manager_is_found_among_processes() {
    let log = "[Oct 23 2025 09:39:12] [INFO] [tid 1234] Fabric Manager version is : 580.95.05\n";
    let running = root(&[
        ("proc/1/comm", "systemd\n"),
        ("proc/900/comm", "nv-fabricmanage\n"),
        ("proc/version", "Linux"),
        ("var/log/fabricmanager.log", log),
    ]);
    let manager = fabric::manager(running.path())
        .known()
        .cloned()
        .unwrap()
        .unwrap();
    assert_eq!(
        (manager.pid, manager.version),
        (900, Reading::Known("580.95.05".to_owned()))
    );
    let without = root(&[("proc/1/comm", "systemd\n")]);
    assert_eq!(fabric::manager(without.path()), Reading::Known(None));
    assert!(fabric::manager(root(&[]).path()).known().is_none());
}

#[test]
fn addresses_of_nvml_and_of_the_kernel_log_are_those_of_the_bus() {
    for address in ["00000000:1B:00.0", "0000:1b:00", "0000:1b:00.0"] {
        assert_eq!(kernel::pci_address(address), "0000:1b:00.0");
    }
    assert_eq!(kernel::pci_address("00010000:01:00.0"), "10000:01:00.0");
}
