//! Reads files that are small when they are what they should be: configurations, keys, certificates.
//!
//! Only regular files are read: a pipe or a device may never answer.

use std::fs::{FileType, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;

/// Largest file that is read; one that was named by mistake must not take the memory of the machine.
pub const MAX_BYTES: u64 = 4 << 20;

/// The bytes of a file.
///
/// # Errors
///
/// It can't be read, is not a regular file, or has more than [`MAX_BYTES`].
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let file = OpenOptions::new()
        .read(true)
        // Or to open a pipe waits for its writer.
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    let kind = file.metadata()?.file_type();
    if !kind.is_file() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("is {}, but must be a regular file", name_of(kind)),
        ));
    }
    let mut bytes = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("has more than {MAX_BYTES} bytes"),
        ));
    }
    Ok(bytes)
}

fn name_of(kind: FileType) -> &'static str {
    if kind.is_fifo() {
        "a pipe"
    } else if kind.is_dir() {
        "a directory"
    } else {
        "a device"
    }
}

/// Permission bit of a file that every user of the machine can write.
pub const OTHERS_WRITE: u32 = 0o002;

/// Permission bit of a file that every user of the machine can read.
pub const OTHERS_READ: u32 = 0o004;

/// The permission bits of a file.
///
/// # Errors
///
/// The system does not say.
pub fn mode(path: &Path) -> io::Result<u32> {
    Ok(std::fs::metadata(path)?.permissions().mode() & 0o777)
}

/// The text of a file.
///
/// # Errors
///
/// As [`read`], and it is not UTF-8.
pub fn read_text(path: &Path) -> io::Result<String> {
    String::from_utf8(read(path)?).map_err(|_| {
        io::Error::new(
            io::ErrorKind::InvalidData,
            "stream did not contain valid UTF-8",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_never_answer_or_end_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status();
        assert!(made.unwrap().success());
        let long = dir.path().join("long");
        std::fs::write(&long, vec![b' '; MAX_BYTES as usize + 1]).unwrap();
        for (path, fault) in [
            (&*pipe, "is a pipe, but must be a regular file"),
            (dir.path(), "is a directory, but must be a regular file"),
            (
                Path::new("/dev/zero"),
                "is a device, but must be a regular file",
            ),
            (&*long, "has more than 4194304 bytes"),
        ] {
            assert_eq!(read(path).unwrap_err().to_string(), fault);
        }
    }

    #[test]
    fn a_file_of_the_largest_size_is_read_and_bytes_that_are_no_text_are_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, vec![0xff; MAX_BYTES as usize]).unwrap();
        assert_eq!(read(&path).unwrap().len() as u64, MAX_BYTES);
        assert_eq!(
            read_text(&path).unwrap_err().kind(),
            io::ErrorKind::InvalidData
        );
    }
}
