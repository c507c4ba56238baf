//! What the machine, or the container on it, has to offer.

use std::io;
use std::path::{Component, Path, PathBuf};

/// Bytes of memory that can be taken without pushing anything out: the least of what the kernel and the memory cgroups of this process leave.
///
/// # Errors
///
/// `/proc/meminfo` can't be read or lacks `MemAvailable`.
pub fn free_memory_bytes() -> io::Result<u64> {
    free_memory_under(Path::new("/"))
}

fn free_memory_under(root: &Path) -> io::Result<u64> {
    let path = root.join("proc/meminfo");
    let meminfo = std::fs::read_to_string(&path)?;
    let available_kib = value_of(&meminfo, "MemAvailable:")
        .ok_or_else(|| io::Error::other(format!("{} has no MemAvailable", path.display())))?;
    let available = available_kib.saturating_mul(1024);
    let left = cgroups(root, "memory").into_iter().flat_map(|dir| {
        [
            cgroup_left(&dir, "memory.max", "memory.current", "inactive_file"),
            cgroup_left(
                &dir,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            ),
        ]
    });
    Ok(left.flatten().fold(available, u64::min))
}

/// The lowest limit of memory among the cgroups of this process in bytes; `None` without one.
pub fn cgroup_memory_bytes() -> Option<u64> {
    cgroup_limit(
        Path::new("/"),
        "memory",
        &["memory.max", "memory.limit_in_bytes"],
    )
}

/// The lowest limit of processes and threads among the cgroups of this process; `None` without one.
pub fn cgroup_processes() -> Option<u64> {
    cgroup_limit(Path::new("/"), "pids", &["pids.max"])
}

fn cgroup_limit(root: &Path, controller: &str, names: &[&str]) -> Option<u64> {
    let dirs = cgroups(root, controller).into_iter();
    dirs.flat_map(|dir| names.iter().filter_map(move |name| number(&dir.join(name))))
        // The older form says "none" with a number near the largest.
        .filter(|limit| *limit < 1 << 60)
        .min()
}

/// Directories of the cgroups that hold this process, from its own up to the root, in both forms that kernels have.
///
/// One that the container does not show is not there, and the root of what it shows is its own.
fn cgroups(root: &Path, controller: &str) -> Vec<PathBuf> {
    let table = std::fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let own = |is_it: &dyn Fn(&str) -> bool| {
        let path = table.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            is_it(fields.next()?).then(|| fields.next())?
        });
        let path = Path::new(path.unwrap_or("/"));
        let below = path.strip_prefix("/").unwrap_or(path).to_owned();
        // A path that leads out of what is mounted here names nothing here.
        let is_here = below
            .components()
            .all(|part| matches!(part, Component::Normal(_)));
        if is_here { below } else { PathBuf::new() }
    };
    let mounted = root.join("sys/fs/cgroup");
    let of_all = own(&|controllers| controllers.is_empty());
    let of_one = own(&|controllers| controllers.split(',').any(|name| name == controller));
    let mut dirs = Vec::new();
    for (mounted, own) in [
        (mounted.clone(), of_all),
        (mounted.join(controller), of_one),
    ] {
        dirs.extend(own.ancestors().map(|dir| mounted.join(dir)));
    }
    dirs
}

fn number(path: &Path) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Bytes of memory that this process has in RAM.
///
/// # Errors
///
/// `/proc/self/status` can't be read or lacks `VmRSS`.
pub fn resident_memory_bytes() -> io::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let resident_kib = value_of(&status, "VmRSS:")
        .ok_or_else(|| io::Error::other("/proc/self/status has no VmRSS"))?;
    Ok(resident_kib.saturating_mul(1024))
}

/// What a memory cgroup leaves; file pages that nobody uses count as free. `None` without a limit.
fn cgroup_left(dir: &Path, limit: &str, usage: &str, inactive: &str) -> Option<u64> {
    let number = |name: &str| number(&dir.join(name));
    let stat = std::fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
    let used = number(usage)?.saturating_sub(value_of(&stat, inactive).unwrap_or(0));
    Some(number(limit)?.saturating_sub(used))
}

fn value_of(table: &str, name: &str) -> Option<u64> {
    table.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        (words.next() == Some(name)).then(|| words.next()?.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        root
    }

    const MEMINFO: (&str, &str) = (
        "proc/meminfo",
        "MemTotal: 4000 kB\nMemAvailable:  2000 kB\n",
    );

    #[test]
    fn without_a_cgroup_limit_the_kernel_decides() {
        let root = machine(&[
            MEMINFO,
            ("sys/fs/cgroup/memory.max", "max\n"),
            ("sys/fs/cgroup/memory.current", "5\n"),
        ]);
        assert_eq!(free_memory_under(root.path()).unwrap(), 2000 * 1024);
    }

    #[test]
    fn a_container_is_held_to_its_own_limit() {
        let root = machine(&[
            MEMINFO,
            ("sys/fs/cgroup/memory.max", "1000000\n"),
            ("sys/fs/cgroup/memory.current", "600000\n"),
            (
                "sys/fs/cgroup/memory.stat",
                "anon 1\ninactive_file 100000\n",
            ),
        ]);
        assert_eq!(free_memory_under(root.path()).unwrap(), 500_000);
    }

    #[test]
    fn the_older_cgroup_files_count_too() {
        let root = machine(&[
            MEMINFO,
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "1000000\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "2000000\n"),
        ]);
        assert_eq!(free_memory_under(root.path()).unwrap(), 0);
    }

    #[test]
    fn a_service_is_held_to_the_limits_of_its_own_cgroup_and_of_those_above() {
        let newer = machine(&[
            MEMINFO,
            ("proc/self/cgroup", "0::/system.slice/outrider.service\n"),
            ("sys/fs/cgroup/system.slice/memory.max", "1500000\n"),
            ("sys/fs/cgroup/system.slice/memory.current", "900000\n"),
            (
                "sys/fs/cgroup/system.slice/outrider.service/memory.max",
                "1000000\n",
            ),
            (
                "sys/fs/cgroup/system.slice/outrider.service/memory.current",
                "100000\n",
            ),
            ("sys/fs/cgroup/system.slice/pids.max", "64\n"),
            (
                "sys/fs/cgroup/system.slice/outrider.service/pids.max",
                "max\n",
            ),
        ]);
        let memory =
            |root: &Path| cgroup_limit(root, "memory", &["memory.max", "memory.limit_in_bytes"]);
        assert_eq!(free_memory_under(newer.path()).unwrap(), 600_000);
        assert_eq!(memory(newer.path()), Some(1_000_000));
        assert_eq!(cgroup_limit(newer.path(), "pids", &["pids.max"]), Some(64));
        let older = machine(&[
            MEMINFO,
            (
                "proc/self/cgroup",
                "8:pids:/\n4:memory,cpu:/outrider\n0::/\n",
            ),
            (
                "sys/fs/cgroup/memory/memory.limit_in_bytes",
                "9223372036854771712\n",
            ),
            (
                "sys/fs/cgroup/memory/outrider/memory.limit_in_bytes",
                "700000\n",
            ),
            (
                "sys/fs/cgroup/memory/outrider/memory.usage_in_bytes",
                "200000\n",
            ),
        ]);
        assert_eq!(free_memory_under(older.path()).unwrap(), 500_000);
        assert_eq!(memory(older.path()), Some(700_000));
    }

    #[test]
    fn a_container_whose_cgroup_has_another_name_outside_is_held_to_the_one_it_sees() {
        for outside in ["0::/docker/4711\n", "0::/../../4711\n", ""] {
            let root = machine(&[
                MEMINFO,
                ("proc/self/cgroup", outside),
                ("sys/fs/cgroup/memory.max", "1000000\n"),
                ("sys/fs/cgroup/memory.current", "600000\n"),
            ]);
            assert_eq!(
                free_memory_under(root.path()).unwrap(),
                400_000,
                "{outside}"
            );
        }
    }

    #[test]
    fn a_process_knows_what_it_has_in_ram() {
        let resident = resident_memory_bytes().unwrap();
        assert!((1 << 20..1 << 40).contains(&resident), "{resident}");
    }

    #[test]
    fn a_machine_that_does_not_say_is_an_error() {
        let root = machine(&[("proc/meminfo", "MemTotal: 4000 kB\n")]);
        assert!(free_memory_under(root.path()).is_err());
    }
}
