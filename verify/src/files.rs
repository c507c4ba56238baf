//! Files that are either whole or not there.

use std::fs::File;
use std::io::Write;
use std::path::Path;

/// Writes a file aside, syncs it and gives it its name; makes the directories above it.
pub fn write(path: &Path, content: &[u8]) -> std::io::Result<()> {
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    std::fs::create_dir_all(directory)?;
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.part", std::process::id()));
    let aside = directory.join(name);
    let write = || {
        let mut file = File::create(&aside)?;
        file.write_all(content)?;
        file.sync_all()?;
        std::fs::rename(&aside, path)
    };
    write().inspect_err(|_| {
        // What could not be made whole is of no use; the first error is the one to tell.
        let _ = std::fs::remove_file(&aside);
    })
}
