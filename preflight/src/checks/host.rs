//! Whether the machine has what the server needs beside a GPU.

use super::{Finding, bytes_text};
use crate::facts::config::Settings;
use crate::facts::host::{
    Clock, HostFacts, Kernel, Memory, PathFacts, PortFacts, PortFault, Purpose,
};
use crate::facts::{Facts, Reading};

/// Files that the server needs beside connections.
const OTHER_FILES: u64 = 256;

/// Threads that a server may have: workers, engine, logs and those of ONNX Runtime.
const THREADS: u64 = 512;

/// Length of the queue of connections that the server asks for.
const BACKLOG: u64 = 4096;

/// What kernels allow by default, and libraries count on.
const MAP_COUNT: u64 = 65_530;

/// Least space for a log.
const LOG_BYTES: u64 = 1 << 30;

/// Part of the memory that files in `/dev/shm` may take before somebody should look at them.
const SHARED_RATIO: u64 = 10;

/// 2025-01-01: a clock before it was never set.
const EARLIEST_UNIX_TIME_S: u64 = 1_735_689_600;

/// Every check of this part.
pub fn checks(facts: &Facts) -> Vec<Finding> {
    let host = &facts.host;
    let mut findings = vec![user(host)];
    if let Some(settings) = &facts.config.settings {
        findings.push(port("host.listen", host, "serving.listen"));
        findings.push(port("host.admin_listen", host, "serving.admin_listen"));
        match &host.paths {
            Reading::Known(paths) => {
                findings.push(readable(host, paths));
                findings.push(unchangeable(host, paths));
                findings.push(storage(paths));
                findings.push(log(paths, settings));
                findings.push(audit(paths, settings));
            }
            Reading::Unknown(reason) => findings.push(Finding::unknown(
                "host.readable",
                format!("the file systems could not be asked: {reason}"),
                "look for a file system whose server does not answer: `findmnt`, `df`",
            )),
        }
        findings.push(open_files(host, settings));
    } else {
        findings.push(super::needs_settings(
            "host.listen",
            "where it is to listen",
        ));
    }
    findings.push(processes(host));
    findings.push(shared_memory(&host.memory));
    findings.push(clock(&host.clock));
    findings.push(clock_source(&host.clock));
    findings.extend(kernel(&host.kernel));
    findings
}

fn user_text(host: &HostFacts) -> String {
    match &host.user.name {
        Some(name) => format!("user {} ({name})", host.user.id),
        None => format!("user {}", host.user.id),
    }
}

fn user(host: &HostFacts) -> Finding {
    let id = "host.user";
    if host.user.id == 0 {
        return Finding::warn(
            id,
            "the server would run as root",
            "run it as a user of its own that may read its files and nothing more, and name that user here with --user",
        );
    }
    let how = if host.read_by_user {
        "asked of the kernel"
    } else {
        "worked out from owners and modes; lists of access rights are not seen"
    };
    Finding::pass(id, format!("{}; what it may do was {how}", user_text(host)))
}

fn port(id: &'static str, host: &HostFacts, key: &str) -> Finding {
    let Some(port) = host.ports.iter().find(|port| port.key == key) else {
        return Finding::unknown(
            id,
            format!("{key} was not tried"),
            "record the facts again with this configuration",
        );
    };
    let PortFacts {
        endpoint,
        fault,
        fault_kind,
        holder,
        port,
        ..
    } = port;
    let first_free = host.kernel.unprivileged_port_start.unwrap_or(1024);
    let for_root = format!(
        "set {key} to a port from {first_free} on, or give the service CAP_NET_BIND_SERVICE (AmbientCapabilities in a systemd unit)"
    );
    let is_privileged = port.is_some_and(|port| port != 0 && u64::from(port) < first_free);
    if let Some(fault) = fault {
        let holder = holder
            .as_ref()
            .map(|holder| format!("; {holder} has it"))
            .unwrap_or_default();
        let remedy = match fault_kind {
            Some(PortFault::Taken) => format!(
                "stop the process that has it (`ss -ltnp`, `ss -lxp`), or set {key} to another address of this machine"
            ),
            Some(PortFault::Forbidden) if is_privileged => for_root,
            Some(PortFault::Forbidden) => format!(
                "give the directory to the user of the server (RuntimeDirectory in a systemd unit, `install -d -o USER DIR`), or set {key} to another place"
            ),
            Some(PortFault::ElsewhereAddress) => format!(
                "set {key} to an address of this machine (`ip address`), or to 0.0.0.0 or [::] for all of them"
            ),
            Some(PortFault::Path) => format!(
                "set {key} to a path of fewer than 108 bytes in a directory that is there (RuntimeDirectory in a systemd unit, `install -d -o USER DIR`)"
            ),
            Some(PortFault::Other) | None => format!("set {key} to another place"),
        };
        return Finding::fail(id, format!("{fault}{holder}"), remedy);
    }
    // Who runs this took the port; whether another user may is not tried.
    if is_privileged && host.user.id != 0 && !host.read_by_user {
        return Finding::fail(
            id,
            format!(
                "{endpoint} ({key}) is free, and only root or a process with CAP_NET_BIND_SERVICE may take ports below {first_free}; {} is not root",
                user_text(host)
            ),
            for_root,
        );
    }
    Finding::pass(id, format!("{endpoint} ({key}) can be had"))
}

fn readable(host: &HostFacts, paths: &[PathFacts]) -> Finding {
    let id = "host.readable";
    let read = |path: &&PathFacts| path.purpose == Purpose::Read;
    let faults: Vec<String> = paths
        .iter()
        .filter(read)
        .filter_map(|path| path.fault.clone())
        .collect();
    if faults.is_empty() {
        return Finding::pass(
            id,
            format!(
                "{} may read all {} files of bundle, library, keys and certificates",
                user_text(host),
                paths.iter().filter(read).count()
            ),
        );
    }
    Finding::fail(
        id,
        faults.join("\n"),
        format!(
            "let {} read them: `chmod -R a+rX DIR` for bundles and libraries, `chown` for keys",
            user_text(host)
        ),
    )
}

fn unchangeable(host: &HostFacts, paths: &[PathFacts]) -> Finding {
    let id = "host.unchangeable";
    if host.user.id == 0 {
        return Finding::skip(id, "root may change every file");
    }
    let writable: Vec<&str> = paths
        .iter()
        .filter(|path| path.is_writable)
        .map(|path| path.path.as_str())
        .collect();
    if writable.is_empty() {
        return Finding::pass(
            id,
            format!("{} can't change what it serves", user_text(host)),
        );
    }
    Finding::warn(
        id,
        format!(
            "{} may change or replace {}: a server that is broken into can change what it serves",
            user_text(host),
            writable.join(", ")
        ),
        "give files and directories to another user, without write permission for this one",
    )
}

fn storage(paths: &[PathFacts]) -> Finding {
    let id = "host.storage";
    let bundle = paths.iter().find(|path| path.key == "serving.bundle");
    let Some(file_system) = bundle.and_then(|path| path.file_system.as_ref()) else {
        return Finding::unknown(
            id,
            "the file system of the bundle is not known",
            "look whether serving.bundle is on a file system that is mounted: `findmnt -T DIR`",
        )
        .optional();
    };
    let evidence = format!(
        "the bundle is on {}, mounted at {}",
        file_system.kind, file_system.mount_point
    );
    let is_remote = [
        "nfs",
        "cifs",
        "smb",
        "9p",
        "fuse",
        "ceph",
        "glusterfs",
        "lustre",
    ]
    .iter()
    .any(|kind| file_system.kind.starts_with(kind));
    if is_remote {
        return Finding::warn(
            id,
            format!(
                "{evidence}: a start reads every byte of it, and waits as long as its server does"
            ),
            "copy the bundle to a disk of this machine",
        );
    }
    Finding::pass(id, evidence)
}

fn log(paths: &[PathFacts], settings: &Settings) -> Finding {
    let id = "host.log";
    match &settings.log_path {
        None => Finding::skip(id, "the log goes to standard error"),
        Some(_) => appended(id, paths, "serving.logging.path", LOG_BYTES),
    }
}

fn audit(paths: &[PathFacts], settings: &Settings) -> Finding {
    let id = "host.audit";
    match &settings.audit {
        None => Finding::skip(id, "there is no audit log"),
        Some(audit) => {
            let needed_bytes = audit.max_file_bytes.saturating_mul(audit.max_files as u64);
            appended(id, paths, "serving.audit.path", needed_bytes)
        }
    }
}

fn appended(id: &'static str, paths: &[PathFacts], key: &str, needed_bytes: u64) -> Finding {
    let of_key = || paths.iter().filter(|path| path.key == key);
    let fault_of = |purpose| {
        let mut of_purpose = of_key().filter(move |path| path.purpose == purpose);
        of_purpose.find_map(|path| path.fault.as_ref())
    };
    if let Some(fault) = fault_of(Purpose::Append) {
        return Finding::fail(
            id,
            fault,
            format!(
                "set {key} to a file in a directory that is there and belongs to the user of the server: `install -d -o USER DIR`"
            ),
        );
    }
    if let Some(fault) = fault_of(Purpose::Create) {
        return Finding::warn(
            id,
            format!("{fault}; the file can be appended to, and lines are lost once it is full"),
            "give its directory to the user of the server, who makes and renames files there: `install -d -o USER DIR`",
        );
    }
    let Some((path, file_system)) =
        of_key().find_map(|path| Some((path, path.file_system.as_ref()?)))
    else {
        return Finding::unknown(
            id,
            format!("the file system of {key} is not known"),
            "look whether its directory is mounted: `findmnt -T DIR`",
        );
    };
    let free_bytes = file_system.free_bytes;
    let evidence = format!(
        "{} is on {} with {} free",
        path.path,
        file_system.kind,
        bytes_text(free_bytes)
    );
    if file_system.kind == "tmpfs" {
        return Finding::warn(
            id,
            format!("{evidence}: it is lost when the machine stops, and takes memory"),
            format!("set {key} to a file on a disk"),
        );
    }
    if free_bytes < needed_bytes {
        return Finding::warn(
            id,
            format!(
                "{evidence}, and it may grow to {}",
                bytes_text(needed_bytes)
            ),
            format!("free space there, or set {key} to another file system"),
        );
    }
    Finding::pass(id, evidence)
}

fn open_files(host: &HostFacts, settings: &Settings) -> Finding {
    let id = "host.open_files";
    let needed = (settings.max_connections as u64).saturating_add(OTHER_FILES);
    match host.limits.open_files {
        Some(limit) if limit < needed => Finding::warn(
            id,
            format!(
                "{limit} open files are allowed here, and serving.http.max_connections {} needs {needed}: connections are refused beyond",
                settings.max_connections
            ),
            format!(
                "raise the limit (LimitNOFILE={needed} in a systemd unit), or lower serving.http.max_connections"
            ),
        ),
        Some(limit) => Finding::pass(id, format!("{limit} are allowed, {needed} are needed")),
        None => Finding::pass(id, "unlimited"),
    }
}

fn processes(host: &HostFacts) -> Finding {
    let id = "host.processes";
    let limits = [host.limits.processes, host.limits.cgroup_processes];
    match limits.into_iter().flatten().min() {
        Some(limit) if limit < THREADS => Finding::warn(
            id,
            format!("{limit} processes and threads are allowed; a server may have {THREADS}"),
            "raise the limit: TasksMax and LimitNPROC in a systemd unit, --pids-limit of a container",
        ),
        Some(limit) => Finding::pass(id, format!("{limit} processes and threads are allowed")),
        None => Finding::pass(id, "unlimited"),
    }
}

fn shared_memory(memory: &Memory) -> Finding {
    let id = "host.shared_memory";
    let (shared, total_bytes) = match (&memory.shared, &memory.total_bytes) {
        (Reading::Known(shared), Reading::Known(total_bytes)) => (shared, *total_bytes),
        (Reading::Unknown(reason), _) | (_, Reading::Unknown(reason)) => {
            return Finding::unknown(
                id,
                format!("what files in /dev/shm take is not known: {reason}"),
                "look yourself: `df /dev/shm`, `free -m`",
            )
            .optional();
        }
    };
    let evidence = format!(
        "files in /dev/shm take {} of {} of memory",
        bytes_text(shared.used_bytes),
        bytes_text(total_bytes)
    );
    if shared.used_bytes > total_bytes / SHARED_RATIO {
        return Finding::warn(
            id,
            format!("{evidence}, which no other process can have"),
            "remove files that belong to no process any more (`ls -l /dev/shm`, `fuser -v /dev/shm/*`)",
        );
    }
    Finding::pass(
        id,
        format!("{evidence}; the server itself runs on one device and needs none"),
    )
}

fn clock(clock: &Clock) -> Finding {
    let id = "host.clock";
    let remedy = "set up a time service such as chrony, and wait until it has the time";
    if clock.unix_time_s < EARLIEST_UNIX_TIME_S {
        return Finding::fail(
            id,
            format!(
                "the clock says {} s after 1970, which is past: certificates would not be valid and logs would have the wrong time",
                clock.unix_time_s
            ),
            remedy,
        );
    }
    match clock.synchronised {
        Some(true) => Finding::pass(id, "a time service says that the clock is right"),
        Some(false) => Finding::warn(
            id,
            "a time service runs and does not have the time yet",
            remedy,
        ),
        None => Finding::unknown(
            id,
            "there is no time service to ask, as in a container",
            "look at the machine itself: `timedatectl`, `chronyc tracking`",
        )
        .optional(),
    }
}

fn clock_source(clock: &Clock) -> Finding {
    let id = "host.clock_source";
    match clock.source.as_deref() {
        Some(source @ ("hpet" | "acpi_pm" | "jiffies")) => Finding::warn(
            id,
            format!(
                "the kernel counts time with {source}: every look at the clock takes microseconds, and each step takes many"
            ),
            "find out why the kernel gave up its fast clock (`dmesg | grep -i clocksource`); virtual machines need kvm-clock or an invariant TSC",
        ),
        Some(source) => Finding::pass(id, format!("the kernel counts time with {source}")),
        None => Finding::skip(id, "the kernel does not say what it counts time with"),
    }
}

fn kernel(kernel: &Kernel) -> Vec<Finding> {
    let judge = |id: &'static str,
                 name: &str,
                 value: Option<u64>,
                 fault: &dyn Fn(u64) -> Option<(String, String)>| {
        let Some(value) = value else {
            return Finding::skip(id, format!("{name} can't be read here"));
        };
        match fault(value) {
            None => Finding::pass(id, format!("{name} is {value}")),
            Some((why, remedy)) => Finding::warn(id, format!("{name} is {value}: {why}"), remedy),
        }
    };
    let below = |least: u64, name: &'static str, why: &'static str| {
        move |value: u64| {
            (value < least).then(|| {
                (
                    why.to_owned(),
                    format!("`sysctl -w {name}={least}`, and in /etc/sysctl.d"),
                )
            })
        }
    };
    vec![
        judge(
            "host.overcommit",
            "vm.overcommit_memory",
            kernel.overcommit_memory,
            &|value| {
                (value == 2).then(|| {
                    (
                        "memory for keys and values counts in full from the start, whether it is used or not".to_owned(),
                        "set vm.overcommit_memory to 0 or 1, or see that CommitLimit in /proc/meminfo has room for what memory.ram says".to_owned(),
                    )
                })
            },
        ),
        judge(
            "host.map_count",
            "vm.max_map_count",
            kernel.max_map_count,
            &below(
                MAP_COUNT,
                "vm.max_map_count",
                "a process with many large buffers may run out of mappings",
            ),
        ),
        judge(
            "host.backlog",
            "net.core.somaxconn",
            kernel.somaxconn,
            &below(
                BACKLOG,
                "net.core.somaxconn",
                "connections beyond it are refused when many arrive at once",
            ),
        ),
    ]
}
