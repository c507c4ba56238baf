//! Reads files that are small when they are what they should be: configurations, keys, certificates.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

/// Largest file that is read; one that never ends, such as a device, must not take the memory of the machine.
pub const MAX_BYTES: u64 = 4 << 20;

/// The bytes of a file.
///
/// # Errors
///
/// It can't be read, or has more than [`MAX_BYTES`].
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?
        .take(MAX_BYTES + 1)
        .read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("has more than {MAX_BYTES} bytes"),
        ));
    }
    Ok(bytes)
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
    fn a_file_that_never_ends_is_an_error() {
        let error = read(Path::new("/dev/zero")).unwrap_err();
        assert_eq!(error.to_string(), "has more than 4194304 bytes");
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
