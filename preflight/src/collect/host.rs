//! Reads the machine: memory, files, ports, limits, clock.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use outrider_bundle::Manifest;
use outrider_server::audit::AuditError;
use outrider_server::launch::LaunchError;
use outrider_server::listen::{self, Endpoint};
use outrider_server::logging::LogError;
use outrider_server::machine;
use rustix::fs::StatVfs;

use super::permission::{self, Wanted};
use super::{FILE_LIMIT, child};
use crate::facts::Reading;
use crate::facts::config::{ConfigFacts, Settings};
use crate::facts::host::{
    Clock, FileSystem, HostFacts, Kernel, Limits, Memory, PathFacts, PortFacts, Purpose,
    SharedMemory, User,
};

/// Reads the machine as a server with this configuration and bundle needs it, run by `user_id` or by who runs this.
pub fn collect(
    config: &ConfigFacts,
    manifest: &Reading<Manifest>,
    user_id: Option<u32>,
) -> HostFacts {
    let own_id = permission::own_user_id().ok();
    // Where nobody can tell, nothing may be taken for granted: root is the user that is complained of.
    let user = permission::user(user_id.or(own_id).unwrap_or(0));
    let read_by_user = own_id == Some(user.id);
    let wanted = config
        .settings
        .as_ref()
        .map(|settings| wanted_paths(settings, manifest.known()));
    let paths = {
        let user = user.clone();
        let read = move || {
            let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
            let paths = wanted.unwrap_or_default().into_iter();
            paths
                .map(|(key, path, purpose)| {
                    path_facts(&user, read_by_user, &mounts, key, &path, purpose)
                })
                .collect::<Vec<_>>()
        };
        child::within(FILE_LIMIT, read).into()
    };
    let ports = match config.settings.clone() {
        None => Vec::new(),
        Some(settings) => {
            let user = user.clone();
            // A socket whose process does not take connections lets nobody in and sends nobody away.
            child::within(FILE_LIMIT, move || ports(&settings, &user, read_by_user))
                .unwrap_or_default()
        }
    };
    HostFacts {
        read_by_user,
        memory: memory(),
        paths,
        ports,
        limits: limits(),
        kernel: kernel(),
        clock: clock(),
        user,
    }
}

const LOG: &str = "serving.logging.path";
const AUDIT: &str = "serving.audit.path";

/// Every path that the server uses, with its key.
fn wanted_paths(
    settings: &Settings,
    manifest: Option<&Manifest>,
) -> Vec<(&'static str, PathBuf, Purpose)> {
    let bundle = Path::new(&settings.bundle);
    let mut paths = vec![
        ("serving.bundle", bundle.join("bundle.json"), Purpose::Read),
        (
            "serving.runtime.onnxruntime_library",
            PathBuf::from(&settings.onnxruntime_library),
            Purpose::Read,
        ),
    ];
    for name in manifest.iter().flat_map(|manifest| manifest.files.keys()) {
        paths.push(("serving.bundle", bundle.join(name), Purpose::Read));
    }
    for file in &settings.secret_files {
        paths.push((
            "serving.auth and serving.tls",
            PathBuf::from(&file.path),
            Purpose::Read,
        ));
    }
    if let Some(path) = &settings.log_path {
        paths.push((LOG, PathBuf::from(path), Purpose::Append));
    }
    if let Some(audit) = &settings.audit {
        let path = PathBuf::from(&audit.path);
        paths.push((AUDIT, path.clone(), Purpose::Append));
        paths.push((AUDIT, path, Purpose::Create));
    }
    paths
}

fn path_facts(
    user: &User,
    read_by_user: bool,
    mounts: &str,
    key: &str,
    path: &Path,
    purpose: Purpose,
) -> PathFacts {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let may = |path: &Path, wanted| permission::check(user, read_by_user, path, wanted);
    let parent = path.parent().unwrap_or(Path::new("/"));
    let fault = match purpose {
        Purpose::Read => may(&path, Wanted::Read),
        Purpose::Append if path.exists() => may(&path, Wanted::Write),
        Purpose::Append | Purpose::Create => may(parent, Wanted::Write),
    };
    let fault = fault.err().map(|source| {
        let path = path.clone();
        // In the server's own words where it would refuse.
        match key {
            LOG => LogError { path, source }.to_string(),
            AUDIT => AuditError { path, source }.to_string(),
            _ => format!("{}: {source} ({key})", path.display()),
        }
    });
    PathFacts {
        key: key.to_owned(),
        purpose,
        fault,
        is_writable: purpose == Purpose::Read
            && (may(&path, Wanted::Write).is_ok() || may(parent, Wanted::Write).is_ok()),
        file_system: file_system(&path, mounts),
        path: path.display().to_string(),
    }
}

/// The file system of the nearest directory that exists.
fn file_system(path: &Path, mounts: &str) -> Option<FileSystem> {
    let existing = path.ancestors().find(|path| path.exists())?;
    let existing = existing.canonicalize().ok()?;
    let (mount_point, kind) = mounts
        .lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace().skip(1);
            Some((unescaped(words.next()?), words.next()?))
        })
        .filter(|(mount_point, _)| existing.starts_with(mount_point))
        // Of mounts on the same place the last one is seen.
        .max_by_key(|(mount_point, _)| mount_point.len())?;
    let space = rustix::fs::statvfs(&existing).ok()?;
    Some(FileSystem {
        mount_point,
        kind: kind.to_owned(),
        free_bytes: space.f_bavail.saturating_mul(space.f_frsize),
    })
}

/// A field of a table of mounts, in which what would part fields or lines is written as `\\` and three octal digits.
fn unescaped(field: &str) -> String {
    let mut parts = field.split('\\');
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        let code = part
            .get(..3)
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code {
            Some(code) => {
                bytes.push(code);
                bytes.extend_from_slice(&part.as_bytes()[3..]);
            }
            None => {
                bytes.push(b'\\');
                bytes.extend_from_slice(part.as_bytes());
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn ports(settings: &Settings, user: &User, read_by_user: bool) -> Vec<PortFacts> {
    [
        ("serving.listen", &settings.listen),
        ("serving.admin_listen", &settings.admin_listen),
    ]
    .into_iter()
    .map(|(key, listener)| {
        let may_make = |dir: &Path| permission::check(user, read_by_user, dir, Wanted::Write);
        port_facts(key, &listener.endpoint, &may_make)
    })
    .collect()
}

/// Whether `endpoint` can be had, in the server's own words; `may_make` says whether its user may make files in a directory.
fn port_facts(
    key: &'static str,
    endpoint: &str,
    may_make: &dyn Fn(&Path) -> io::Result<()>,
) -> PortFacts {
    let mut facts = PortFacts {
        key: key.to_owned(),
        endpoint: endpoint.to_owned(),
        ..PortFacts::default()
    };
    let Ok(endpoint) = endpoint.parse::<Endpoint>() else {
        facts.fault = Some(format!("{endpoint} ({key}) is no endpoint"));
        return facts;
    };
    let mut tried = listen::check(&endpoint);
    match &endpoint {
        Endpoint::Tcp(address) => {
            facts.port = Some(address.port());
            if tried
                .as_ref()
                .is_err_and(|error| error.kind() == io::ErrorKind::AddrInUse)
            {
                facts.holder = holder(*address);
            }
        }
        Endpoint::Unix(path) => {
            let dir = path.parent().unwrap_or(Path::new("/"));
            tried = tried.and_then(|()| may_make(dir));
        }
    }
    facts.fault = tried.err().map(|source| {
        let error = LaunchError::Bind {
            key,
            endpoint,
            source,
        };
        error.to_string()
    });
    facts
}

/// The process that listens on a port, by its number and name; `None` where it belongs to somebody else.
fn holder(address: SocketAddr) -> Option<String> {
    let inode = ["/proc/net/tcp", "/proc/net/tcp6"]
        .iter()
        .filter_map(|path| fs::read_to_string(path).ok())
        .find_map(|table| listening_inode(&table, address.port()))?;
    let link = format!("socket:[{inode}]");
    for process in fs::read_dir("/proc").ok()?.flatten() {
        let id = process.file_name().to_string_lossy().into_owned();
        // `self` and `thread-self` are other names of a process that comes by its number as well.
        if id.parse::<u32>().is_err() {
            continue;
        }
        let Ok(files) = fs::read_dir(process.path().join("fd")) else {
            continue;
        };
        let holds = |file: fs::DirEntry| {
            fs::read_link(file.path()).is_ok_and(|target| target.as_os_str() == link.as_str())
        };
        if files.flatten().any(holds) {
            let name = fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            return Some(format!("process {id} ({})", name.trim()));
        }
    }
    None
}

/// The inode of the socket that listens on a port, in a table as `/proc/net/tcp` has it.
fn listening_inode(table: &str, port: u16) -> Option<u64> {
    const LISTEN: &str = "0A";
    table.lines().skip(1).find_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let of_port = words.get(1)?.rsplit_once(':')?.1;
        let is_it = u16::from_str_radix(of_port, 16) == Ok(port) && *words.get(3)? == LISTEN;
        is_it.then(|| words.get(9)?.parse().ok())?
    })
}

fn memory() -> Memory {
    let cgroup_limit = ["memory.max", "memory/memory.limit_in_bytes"]
        .iter()
        .find_map(|name| number(&Path::new("/sys/fs/cgroup").join(name)));
    Memory {
        total_bytes: total_memory_bytes().into(),
        available_bytes: machine::free_memory_bytes().into(),
        // The older form says "none" with a number near the largest.
        cgroup_limit_bytes: cgroup_limit.filter(|limit| *limit < 1 << 60),
        shared: rustix::fs::statvfs("/dev/shm").map(shared_memory).into(),
    }
}

fn shared_memory(space: StatVfs) -> SharedMemory {
    let bytes = |blocks: u64| blocks.saturating_mul(space.f_frsize);
    SharedMemory {
        size_bytes: bytes(space.f_blocks),
        used_bytes: bytes(space.f_blocks.saturating_sub(space.f_bfree)),
    }
}

fn total_memory_bytes() -> Result<u64, String> {
    let path = "/proc/meminfo";
    let text = fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.map(|kib| kib.saturating_mul(1024))
        .ok_or_else(|| format!("{path} has no MemTotal"))
}

fn limits() -> Limits {
    let hard = |resource| {
        let (_, hard) = getrlimit(resource).ok()?;
        (hard != RLIM_INFINITY).then_some(hard)
    };
    Limits {
        open_files: hard(Resource::RLIMIT_NOFILE),
        processes: hard(Resource::RLIMIT_NPROC),
        cgroup_processes: number(Path::new("/sys/fs/cgroup/pids.max")),
    }
}

fn kernel() -> Kernel {
    let parameter = |name: &str| number(&Path::new("/proc/sys").join(name));
    Kernel {
        overcommit_memory: parameter("vm/overcommit_memory"),
        max_map_count: parameter("vm/max_map_count"),
        somaxconn: parameter("net/core/somaxconn"),
        unprivileged_port_start: parameter("net/ipv4/ip_unprivileged_port_start"),
    }
}

fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn clock() -> Clock {
    let source = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    Clock {
        unix_time_s: unix_time_s(),
        source: fs::read_to_string(source)
            .ok()
            .map(|text| text.trim().to_owned()),
        synchronised: synchronised(Path::new("/")),
    }
}

/// What the wall clock says; 0 before 1970.
fn unix_time_s() -> u64 {
    #[expect(
        clippy::disallowed_methods,
        reason = "whether the clock is right is the question"
    )]
    let now = SystemTime::now();
    now.duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

/// What systemd-timesyncd or chrony left on the disk; the kernel itself can only be asked with a system call that no safe crate wraps.
fn synchronised(root: &Path) -> Option<bool> {
    let timesyncd = root.join("run/systemd/timesync");
    if timesyncd.is_dir() {
        return Some(timesyncd.join("synchronized").exists());
    }
    let drift = fs::metadata(root.join("var/lib/chrony/drift")).ok()?;
    let running = root.join("run/chrony").is_dir();
    let day_s = 86_400;
    let age_s = unix_time_s().saturating_sub(u64::try_from(drift.mtime()).ok()?);
    running.then_some(age_s < day_s)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn port_facts(key: &'static str, endpoint: &str) -> PortFacts {
        super::port_facts(key, endpoint, &|_| Ok(()))
    }

    #[test]
    fn a_port_in_use_names_who_has_it_and_a_free_one_is_let_go() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = taken.local_addr().unwrap().to_string();
        let facts = port_facts("serving.listen", &address);
        assert!(facts.fault.is_some());
        let own = format!("process {} (", std::process::id());
        let holder = facts.holder.unwrap();
        assert!(holder.starts_with(&own), "{holder}");
        drop(taken);
        for _ in 0..2 {
            assert_eq!(port_facts("serving.listen", &address).fault, None);
        }
    }

    #[test]
    fn the_listening_socket_of_a_port_is_found_among_others() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n\
            0: 0100007F:1F90 0100007F:A000 01 0:0 0:0 0 0 0 7 1\n\
            1: 0100007F:1F90 00000000:0000 0A 0:0 00:0 0 0 0 4711 1\n";
        assert_eq!(listening_inode(table, 8080), Some(4711));
        assert_eq!(listening_inode(table, 8081), None);
        assert_eq!(listening_inode("garbage\nmore garbage\n", 1), None);
    }

    #[test]
    fn a_socket_file_is_only_in_the_way_when_somebody_listens_or_it_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("admin.sock");
        let fault =
            || port_facts("serving.admin_listen", &format!("unix:{}", path.display())).fault;
        assert_eq!(fault(), None);
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let place = format!(
            "cannot listen on unix:{} (serving.admin_listen)",
            path.display()
        );
        assert_eq!(
            fault(),
            Some(format!("{place}: another process listens there"))
        );
        drop(listener);
        assert_eq!(fault(), None, "nobody listens any more");
        fs::remove_file(&path).unwrap();
        fs::write(&path, "").unwrap();
        assert_eq!(
            fault(),
            Some(format!("{place}: something that is not a socket is there"))
        );
    }

    #[test]
    fn a_socket_needs_a_directory_that_the_user_may_write_to() {
        let may_make = |dir: &Path| Err(io::Error::other(format!("not in {}", dir.display())));
        let facts = super::port_facts("serving.admin_listen", "unix:/run/x/admin.sock", &may_make);
        assert_eq!(
            facts.fault.as_deref(),
            Some("cannot listen on unix:/run/x/admin.sock (serving.admin_listen): not in /run/x")
        );
    }

    #[test]
    fn names_of_mounts_are_read_as_the_kernel_writes_them() {
        for (field, name) in [
            ("/srv", "/srv"),
            ("/a\\040b\\012c\\134d", "/a b\nc\\d"),
            ("/odd\\9\\", "/odd\\9\\"),
        ] {
            assert_eq!(unescaped(field), name);
        }
    }

    #[test]
    fn the_innermost_mount_is_the_file_system_of_a_path_that_is_not_there_yet() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().canonicalize().unwrap();
        let mounts = format!(
            "/dev/a / ext4 rw 0 0\nserver:/b {} nfs4 rw 0 0\n",
            place.display()
        );
        let found = file_system(&place.join("logs/audit.jsonl"), &mounts).unwrap();
        assert_eq!(found.kind, "nfs4");
        assert!(found.free_bytes > 0);
    }

    #[test]
    fn the_clock_is_right_when_a_time_service_says_so() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(synchronised(root.path()), None);
        let dir = root.path().join("run/systemd/timesync");
        fs::create_dir_all(&dir).unwrap();
        assert_eq!(synchronised(root.path()), Some(false));
        fs::write(dir.join("synchronized"), "").unwrap();
        assert_eq!(synchronised(root.path()), Some(true));
    }
}
