//! Reads the machine: memory, files, ports, limits, clock.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use outrider_bundle::Manifest;
use outrider_server::audit::AuditError;
use outrider_server::launch::LaunchError;
use outrider_server::listen::{self, Checked, Endpoint};
use outrider_server::logging::LogError;
use outrider_server::machine;
use rustix::fs::StatVfs;
use rustix::io::Errno;

use super::permission::{self, Wanted};
use super::{FILE_LIMIT, child};
use crate::facts::Reading;
use crate::facts::config::{ConfigFacts, Settings};
use crate::facts::host::{
    Clock, FileSystem, HostFacts, Kernel, Limits, Memory, PathFacts, PortFacts, PortFault, Purpose,
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
        Some(settings) => ports(&settings, &user, read_by_user),
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
    let may = |path: &Path, wanted| permission::check(user, read_by_user, path, wanted);
    let names_directory = path.as_os_str().as_bytes().ends_with(b"/");
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let parent = path.parent().unwrap_or(Path::new("/"));
    let fault = match purpose {
        Purpose::Read => may(&path, Wanted::Read),
        Purpose::Append if names_directory => Err(Errno::ISDIR.into()),
        Purpose::Append => appendable(&path, mounts, &may),
        Purpose::Create => creatable(parent, mounts, &may),
    };
    let fault = fault.err().map(|source| {
        let path = path.clone();
        // In the server's own words where it would refuse.
        match key {
            AUDIT if purpose == Purpose::Create => format!(
                "cannot make and rename files beside {} ({AUDIT}): {source}",
                path.display()
            ),
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

/// Asks whether the user may do something with a path.
type May<'a> = dyn Fn(&Path, Wanted) -> io::Result<()> + 'a;

/// Most links that lead from one to the next, as the kernel follows them.
const MAX_LINKS: usize = 40;

/// Whether a file can be appended to, or made where there is none, and nothing is changed.
fn appendable(path: &Path, mounts: &str, may: &May<'_>) -> io::Result<()> {
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => Err(Errno::ISDIR.into()),
        Ok(metadata) if metadata.file_type().is_socket() => Err(Errno::NXIO.into()),
        Ok(_) => may(path, Wanted::Write),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let mut path = path.to_owned();
            // What a link leads to is made, and not what is beside the link.
            for _ in 0..MAX_LINKS {
                let Ok(target) = fs::read_link(&path) else {
                    break;
                };
                path = path.parent().unwrap_or(Path::new("/")).join(target);
            }
            let dir = path.parent().unwrap_or(Path::new("/"));
            creatable(dir, mounts, may)?;
            let longest = rustix::fs::statvfs(dir)?.f_namemax;
            let name = path.file_name().unwrap_or_default();
            if name.len() as u64 > longest {
                return Err(Errno::NAMETOOLONG.into());
            }
            Ok(())
        }
        Err(error) => Err(error),
    }
}

/// Whether files can be made in a directory.
fn creatable(dir: &Path, mounts: &str, may: &May<'_>) -> io::Result<()> {
    if !fs::metadata(dir)?.is_dir() {
        return Err(Errno::NOTDIR.into());
    }
    may(dir, Wanted::Write)?;
    // The kernel fills these itself, whatever their modes say.
    match file_system(dir, mounts) {
        Some(FileSystem { kind, .. }) if ["proc", "sysfs"].contains(&kind.as_str()) => {
            Err(io::Error::other(format!("no file can be made on {kind}")))
        }
        _ => Ok(()),
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

/// Tries both places to listen; the first stays taken while the second is tried, as a server would have it.
fn ports(settings: &Settings, user: &User, read_by_user: bool) -> Vec<PortFacts> {
    let mut held = None;
    let mut all = Vec::new();
    for (key, listener) in [
        ("serving.listen", &settings.listen),
        ("serving.admin_listen", &settings.admin_listen),
    ] {
        let user = user.clone();
        let text = listener.endpoint.clone();
        let Ok(endpoint) = text.parse::<Endpoint>() else {
            all.push(PortFacts {
                key: key.to_owned(),
                fault: Some(format!("{text} ({key}) is no endpoint")),
                fault_kind: Some(PortFault::Other),
                endpoint: text,
                ..PortFacts::default()
            });
            continue;
        };
        let tried = {
            let endpoint = endpoint.clone();
            // A socket whose process does not take connections lets nobody in and sends nobody away.
            child::within(FILE_LIMIT, move || tried(&endpoint, &user, read_by_user))
        };
        let tried = tried.unwrap_or_else(|error| Err(io::Error::other(error.to_string())));
        let mut facts = port_facts(key, endpoint, tried.as_ref().err());
        if facts.holder.is_none()
            && facts.fault_kind == Some(PortFault::Taken)
            && let Some(taken) = held.as_ref().and_then(listening_on)
            && facts.port == Some(taken.port())
        {
            facts.holder = Some("serving.listen".to_owned());
        }
        all.push(facts);
        held = held.or(tried.ok());
    }
    all
}

fn listening_on(checked: &Checked) -> Option<SocketAddr> {
    match checked {
        Checked::Tcp(listener) => listener.local_addr().ok(),
        Checked::Free | Checked::Leftover => None,
    }
}

/// Whether a user can have `endpoint`.
fn tried(endpoint: &Endpoint, user: &User, read_by_user: bool) -> io::Result<Checked> {
    let checked = listen::check(endpoint)?;
    if let Endpoint::Unix(path) = endpoint {
        if path.as_os_str().as_bytes().ends_with(b"/") {
            return Err(Errno::ISDIR.into());
        }
        match checked {
            Checked::Leftover => permission::check_removal(user, read_by_user, path)?,
            _ => {
                let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
                let may = |path: &Path, wanted| permission::check(user, read_by_user, path, wanted);
                creatable(path.parent().unwrap_or(Path::new("/")), &mounts, &may)?;
            }
        }
    }
    Ok(checked)
}

/// A place to listen and why it can't be had, in the server's own words.
fn port_facts(key: &'static str, endpoint: Endpoint, error: Option<&io::Error>) -> PortFacts {
    let port = match &endpoint {
        Endpoint::Tcp(address) => Some(*address),
        Endpoint::Unix(_) => None,
    };
    let fault_kind = error.map(|error| match error.kind() {
        io::ErrorKind::AddrInUse => PortFault::Taken,
        io::ErrorKind::PermissionDenied => PortFault::Forbidden,
        io::ErrorKind::AddrNotAvailable => PortFault::ElsewhereAddress,
        io::ErrorKind::NotFound
        | io::ErrorKind::NotADirectory
        | io::ErrorKind::IsADirectory
        | io::ErrorKind::InvalidInput
        | io::ErrorKind::InvalidFilename => PortFault::Path,
        _ => PortFault::Other,
    });
    PortFacts {
        key: key.to_owned(),
        endpoint: endpoint.to_string(),
        holder: port
            .filter(|_| fault_kind == Some(PortFault::Taken))
            .and_then(holder),
        port: port.map(|address| address.port()),
        fault_kind,
        fault: error.map(|error| {
            let source = match error.raw_os_error() {
                Some(code) => io::Error::from_raw_os_error(code),
                None => io::Error::new(error.kind(), error.to_string()),
            };
            let error = LaunchError::Bind {
                key,
                endpoint,
                source,
            };
            error.to_string()
        }),
    }
}

/// The other process that listens where `address` is wanted, by its number and name; `None` where it belongs to somebody else.
fn holder(address: SocketAddr) -> Option<String> {
    let inode = ["/proc/net/tcp", "/proc/net/tcp6"]
        .iter()
        .filter_map(|path| fs::read_to_string(path).ok())
        .find_map(|table| listening_inode(&table, address))?;
    let link = format!("socket:[{inode}]");
    for process in fs::read_dir("/proc").ok()?.flatten() {
        let id = process.file_name().to_string_lossy().into_owned();
        // `self` and `thread-self` are other names of a process that comes by its number as well; this one holds what it tries.
        if id
            .parse::<u32>()
            .map_or(true, |id| id == std::process::id())
        {
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

/// The inode of the socket that listens where `address` is wanted, in a table as `/proc/net/tcp` has it.
fn listening_inode(table: &str, address: SocketAddr) -> Option<u64> {
    const LISTEN: &str = "0A";
    let wanted = address.ip().to_canonical();
    table.lines().skip(1).find_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (host, port) = words.get(1)?.rsplit_once(':')?;
        let host = host_of(host)?.to_canonical();
        // All addresses of a machine are in the way of each, and the other way round.
        let meets = host == wanted || host.is_unspecified() || wanted.is_unspecified();
        let is_it = meets
            && u16::from_str_radix(port, 16) == Ok(address.port())
            && *words.get(3)? == LISTEN;
        is_it.then(|| words.get(9)?.parse().ok())?
    })
}

/// An address as the kernel's tables have it: words of 32 bits as the machine stores them.
fn host_of(digits: &str) -> Option<IpAddr> {
    let mut bytes = Vec::new();
    for at in (0..digits.len()).step_by(8) {
        let word = u32::from_str_radix(digits.get(at..at + 8)?, 16).ok()?;
        bytes.extend(word.to_ne_bytes());
    }
    match bytes.len() {
        4 => <[u8; 4]>::try_from(bytes)
            .ok()
            .map(|it| Ipv4Addr::from(it).into()),
        16 => <[u8; 16]>::try_from(bytes)
            .ok()
            .map(|it| Ipv6Addr::from(it).into()),
        _ => None,
    }
}

fn memory() -> Memory {
    Memory {
        total_bytes: total_memory_bytes().into(),
        available_bytes: machine::free_memory_bytes().into(),
        cgroup_limit_bytes: machine::cgroup_memory_bytes(),
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
    let limited = |limit| (limit != RLIM_INFINITY).then_some(limit);
    let hard = |resource| limited(getrlimit(resource).ok()?.1);
    // Nobody raises these for a server.
    let soft = |resource| limited(getrlimit(resource).ok()?.0);
    Limits {
        open_files: hard(Resource::RLIMIT_NOFILE),
        processes: hard(Resource::RLIMIT_NPROC),
        cgroup_processes: machine::cgroup_processes(),
        address_space_bytes: soft(Resource::RLIMIT_AS),
        data_bytes: soft(Resource::RLIMIT_DATA),
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

    fn user() -> User {
        permission::user(permission::own_user_id().unwrap())
    }

    /// The facts of both listeners.
    fn both(listen: &str, admin_listen: &str) -> [PortFacts; 2] {
        let listener = |endpoint: &str| crate::facts::config::Listener {
            endpoint: endpoint.to_owned(),
            ..Default::default()
        };
        let settings = Settings {
            listen: listener(listen),
            admin_listen: listener(admin_listen),
            ..Settings::default()
        };
        ports(&settings, &user(), true).try_into().unwrap()
    }

    fn of_admin(endpoint: &str) -> PortFacts {
        both("127.0.0.1:0", endpoint)[1].clone()
    }

    #[test]
    fn a_port_in_use_is_found_and_a_free_one_is_let_go() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = taken.local_addr().unwrap().to_string();
        let facts = of_admin(&address);
        assert_eq!(facts.fault_kind, Some(PortFault::Taken));
        assert_eq!(facts.holder, None, "this process itself is named to nobody");
        drop(taken);
        for _ in 0..2 {
            assert_eq!(of_admin(&address).fault, None);
        }
    }

    #[test]
    fn two_listeners_that_want_the_same_port_are_found_out() {
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = free.local_addr().unwrap().port();
        drop(free);
        let [first, second] = both(&format!("0.0.0.0:{port}"), &format!("127.0.0.1:{port}"));
        assert_eq!(first.fault, None);
        assert_eq!(second.fault_kind, Some(PortFault::Taken), "{second:?}");
        assert_eq!(second.holder.as_deref(), Some("serving.listen"));
    }

    #[test]
    fn faults_of_addresses_and_sockets_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let socket = |name: &str| format!("unix:{}", dir.path().join(name).display());
        for (endpoint, kind) in [
            ("192.0.2.1:18640".to_owned(), PortFault::ElsewhereAddress),
            (socket("none/admin.sock"), PortFault::Path),
            (socket(&"x".repeat(120)), PortFault::Path),
            (socket("admin.sock/"), PortFault::Path),
            ("unix:/proc/admin.sock".to_owned(), PortFault::Other),
            ("nonsense".to_owned(), PortFault::Other),
        ] {
            let facts = of_admin(&endpoint);
            assert_eq!(facts.fault_kind, Some(kind), "{endpoint}: {facts:?}");
        }
    }

    #[test]
    fn the_listening_socket_of_an_address_is_found_among_others() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n\
            0: 0100007F:1F90 0100007F:A000 01 0:0 0:0 0 0 0 7 1\n\
            1: 0200007F:1F90 00000000:0000 0A 0:0 00:0 0 0 0 4710 1\n\
            2: 0100007F:1F90 00000000:0000 0A 0:0 00:0 0 0 0 4711 1\n";
        let inode = |address: &str| listening_inode(table, address.parse().unwrap());
        assert_eq!(inode("127.0.0.1:8080"), Some(4711));
        assert_eq!(inode("[::ffff:127.0.0.1]:8080"), Some(4711));
        assert_eq!(inode("127.0.0.2:8080"), Some(4710));
        assert_eq!(
            inode("0.0.0.0:8080"),
            Some(4710),
            "any of them is in the way"
        );
        assert_eq!(inode("127.0.0.3:8080"), None);
        assert_eq!(inode("127.0.0.1:8081"), None);
        let all = "\n0: 00000000000000000000000000000000:1F90 0:0 0A 0 0 0 0 0 4712";
        let wanted = "127.0.0.1:8080".parse().unwrap();
        assert_eq!(listening_inode(all, wanted), Some(4712));
        assert_eq!(listening_inode("garbage\nmore garbage\n", wanted), None);
    }

    #[test]
    fn a_socket_file_is_only_in_the_way_when_somebody_listens_or_it_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("admin.sock");
        let fault = || of_admin(&format!("unix:{}", path.display())).fault;
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
    fn a_file_that_the_server_could_not_append_to_is_found_and_nothing_is_made() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path();
        fs::create_dir(place.join("dir")).unwrap();
        fs::write(place.join("file"), "").unwrap();
        let link = |name: &str, target: &str| {
            std::os::unix::fs::symlink(place.join(target), place.join(name)).unwrap();
        };
        link("dangling", "new.log");
        link("lost", "none/new.log");
        link("loop", "loop");
        fs::create_dir_all(place.join("dir/inner")).unwrap();
        fs::create_dir(place.join("made")).unwrap();
        for (name, target) in [("dir/in", "inner/new.log"), ("dir/down", "made/new.log")] {
            std::os::unix::fs::symlink(target, place.join(name)).unwrap();
        }
        let _socket = std::os::unix::net::UnixListener::bind(place.join("socket")).unwrap();
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        let long = "x".repeat(300);
        for (name, fault) in [
            ("file", None),
            ("new.log", None),
            ("dangling", None),
            ("dir/in", None),
            ("dir", Some("Is a directory")),
            ("new.log/", Some("Is a directory")),
            ("none/new.log", Some("No such file or directory")),
            ("lost", Some("No such file or directory")),
            ("dir/down", Some("No such file or directory")),
            ("loop", Some("symbolic links")),
            ("file/new.log", Some("Not a directory")),
            ("socket", Some("No such device or address")),
            (&long, Some("File name too long")),
            ("/proc/new.log", Some("no file can be made on proc")),
        ] {
            let path = place.join(name);
            let facts = path_facts(&user(), true, &mounts, LOG, &path, Purpose::Append);
            match fault {
                None => assert_eq!(facts.fault, None, "{name}"),
                Some(words) => {
                    let found = facts.fault.unwrap_or_default();
                    assert!(found.contains(words), "{name}: {found:?}");
                    // What the server says when it opens the file.
                    let opened = fs::OpenOptions::new().append(true).create(true).open(&path);
                    assert!(opened.is_err(), "{name}");
                }
            }
        }
        assert!(!place.join("new.log").exists());
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
