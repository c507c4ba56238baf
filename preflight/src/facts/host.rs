//! The machine: memory, disks, ports, users and limits.

use serde::{Deserialize, Serialize};

use super::Reading;

/// The machine: memory, disks, ports, users and limits.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostFacts {
    /// Who the server will run as.
    pub user: User,
    /// Whether these facts were read by that user, so that what it may do was asked of the kernel and not worked out from modes.
    pub read_by_user: bool,
    /// Memory.
    pub memory: Memory,
    /// Files and directories that the server uses.
    pub paths: Reading<Vec<PathFacts>>,
    /// Where it is to listen.
    pub ports: Vec<PortFacts>,
    /// Limits of this process, which a service may have set otherwise.
    pub limits: Limits,
    /// Parameters of the kernel.
    pub kernel: Kernel,
    /// The clock.
    pub clock: Clock,
}

/// A user.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct User {
    /// Number.
    pub id: u32,
    /// Name in `/etc/passwd`, where it has one.
    pub name: Option<String>,
    /// Numbers of its groups, the primary one first.
    pub group_ids: Vec<u32>,
}

/// Memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Memory {
    /// All that the machine has.
    pub total_bytes: Reading<u64>,
    /// What can be taken without pushing anything out, as the server counts it: by the kernel and the memory cgroup.
    pub available_bytes: Reading<u64>,
    /// Limit of the memory cgroup, where there is one.
    pub cgroup_limit_bytes: Option<u64>,
    /// Memory that processes share as files in `/dev/shm`.
    pub shared: Reading<SharedMemory>,
}

/// Memory that processes share as files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SharedMemory {
    /// What the files may have together.
    pub size_bytes: u64,
    /// What they have; no process needs to use it, and it is gone from what others can take.
    pub used_bytes: u64,
}

/// What a path is used for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Purpose {
    /// It is read.
    #[default]
    Read,
    /// It is appended to, and made when it is not there.
    Append,
    /// It is made, renamed and removed.
    Create,
}

/// A path that the server uses.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PathFacts {
    /// The configuration key that it comes from.
    pub key: String,
    /// The path.
    pub path: String,
    /// What it is used for.
    pub purpose: Purpose,
    /// Why the user can't use it for that; `None` when it can.
    pub fault: Option<String>,
    /// Whether the user could change it, where it is only to be read.
    pub is_writable: bool,
    /// The file system that it is on.
    pub file_system: Option<FileSystem>,
}

/// A file system.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileSystem {
    /// Where it is mounted.
    pub mount_point: String,
    /// Its type, as the kernel spells it.
    pub kind: String,
    /// Space that users other than root may take.
    pub free_bytes: u64,
}

/// A place to listen.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PortFacts {
    /// The configuration key that it comes from.
    pub key: String,
    /// Address and port, or `unix:` and a path.
    pub endpoint: String,
    /// Why it can't be had; `None` when it can.
    pub fault: Option<String>,
    /// What kind of fault that is.
    pub fault_kind: Option<PortFault>,
    /// The process that has it, where it can be seen.
    pub holder: Option<String>,
    /// Port, for an address.
    pub port: Option<u16>,
}

/// Why a place to listen can't be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PortFault {
    /// Another listener has it.
    Taken,
    /// The user may not have it.
    Forbidden,
    /// The address is of another machine.
    ElsewhereAddress,
    /// The directory of a socket is not there, or the path can't be that of a socket.
    Path,
    /// Something else.
    Other,
}

/// Limits of a process; `None` is unlimited or unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Open files, the hard limit: the server raises its own to it.
    pub open_files: Option<u64>,
    /// Processes and threads of the user.
    pub processes: Option<u64>,
    /// Processes and threads of the cgroup.
    pub cgroup_processes: Option<u64>,
    /// Bytes of address space.
    pub address_space_bytes: Option<u64>,
    /// Bytes of memory that a process writes to and shares with no other.
    pub data_bytes: Option<u64>,
}

/// Parameters of the kernel; `None` where they can't be read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kernel {
    /// `vm.overcommit_memory`.
    pub overcommit_memory: Option<u64>,
    /// `vm.max_map_count`.
    pub max_map_count: Option<u64>,
    /// `net.core.somaxconn`.
    pub somaxconn: Option<u64>,
    /// `net.ipv4.ip_unprivileged_port_start`.
    pub unprivileged_port_start: Option<u64>,
}

/// The clock.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Clock {
    /// Seconds since 1970.
    pub unix_time_s: u64,
    /// What the kernel counts time with.
    pub source: Option<String>,
    /// Whether a time service says that the clock is right; `None` where none can be asked.
    pub synchronised: Option<bool>,
}
