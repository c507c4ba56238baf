//! Small files that a configuration names, read so that none of them can hold up the server.
//!
//! A pipe without a writer would be waited for, and a file without an end would be read until the memory is full; both are refused.

use std::fs::OpenOptions;
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use nix::libc::O_NONBLOCK;

/// The longest of them: thousands of keys, or of certificates.
const MAX_BYTES: u64 = 1 << 20;

/// The whole of a regular file of at most 1 MiB.
///
/// # Errors
///
/// It can't be read, is no regular file, or is longer.
pub(crate) fn read(path: &Path) -> io::Result<Vec<u8>> {
    // Opening a pipe waits for its other end otherwise; reading a regular file is the same either way.
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(O_NONBLOCK)
        .open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        let kind = metadata.file_type();
        return Err(io::Error::other(format!(
            "it is {}, and must be a regular file",
            if kind.is_dir() {
                "a directory"
            } else {
                "a pipe or a device"
            }
        )));
    }
    let mut bytes = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(io::Error::other(format!(
            "it has {} bytes, and must have {MAX_BYTES} at most",
            metadata.len()
        )));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_regular_file_is_read_and_nothing_else_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "text").unwrap();
        assert_eq!(read(&path).unwrap(), b"text");

        let pipe = dir.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status();
        assert!(made.unwrap().success());
        let refused = |path: &Path| read(path).unwrap_err().to_string();
        assert_eq!(
            refused(&pipe),
            "it is a pipe or a device, and must be a regular file"
        );
        assert_eq!(
            refused(dir.path()),
            "it is a directory, and must be a regular file"
        );

        let long = dir.path().join("long");
        std::fs::File::create(&long)
            .unwrap()
            .set_len(1 << 40)
            .unwrap();
        assert_eq!(
            refused(&long),
            "it has 1099511627776 bytes, and must have 1048576 at most"
        );
    }
}
