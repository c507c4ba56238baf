//! The service that sets up a fabric of NVSwitches, without which CUDA does not start on such a machine.

use std::io;
use std::path::Path;

use super::kernel::is_release;
use crate::facts::Reading;
use crate::facts::gpu::FabricManager;

/// The kernel keeps fifteen characters of a process's name.
const PROCESS: &str = "nv-fabricmanage";

/// Its log, where it says its release when it starts.
const LOG: &str = "var/log/fabricmanager.log";

/// The fabric manager among the processes that are seen from here.
pub(super) fn manager(root: &Path) -> Reading<Option<FabricManager>> {
    pid(root)
        .map(|pid| {
            pid.map(|pid| FabricManager {
                pid,
                version: version(root).into(),
            })
        })
        .into()
}

fn pid(root: &Path) -> io::Result<Option<u32>> {
    for entry in std::fs::read_dir(root.join("proc"))? {
        let entry = entry?;
        let Ok(pid) = entry.file_name().to_string_lossy().parse() else {
            continue;
        };
        // A process may end while it is looked at.
        let name = std::fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        if name.trim() == PROCESS {
            return Ok(Some(pid));
        }
    }
    Ok(None)
}

fn version(root: &Path) -> io::Result<String> {
    let log = std::fs::read_to_string(root.join(LOG))
        .map_err(|error| io::Error::new(error.kind(), format!("/{LOG}: {error}")))?;
    log.lines()
        .rev()
        .filter(|line| line.contains("version is"))
        .find_map(|line| line.split_whitespace().find(|word| is_release(word)))
        .map(ToOwned::to_owned)
        .ok_or_else(|| io::Error::other(format!("/{LOG} names no release")))
}
