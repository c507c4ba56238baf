//! What the machine, or the container on it, has to offer.

use std::io;
use std::path::Path;

/// Bytes of memory that can be taken without pushing anything out: the least of what the kernel and the memory cgroup leave.
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
    let cgroup = root.join("sys/fs/cgroup");
    let left = [
        cgroup_left(&cgroup, "memory.max", "memory.current", "inactive_file"),
        cgroup_left(
            &cgroup.join("memory"),
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ];
    Ok(left.into_iter().flatten().fold(available, u64::min))
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
    let number = |name: &str| {
        std::fs::read_to_string(dir.join(name))
            .ok()?
            .trim()
            .parse::<u64>()
            .ok()
    };
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
