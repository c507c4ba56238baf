//! SHA-256 over streams, and files that appear whole or not at all.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;

use sha2::{Digest, Sha256};

/// Bytes read at a time; large enough for sequential disk speed, small enough for one buffer per thread.
const CHUNK_BYTES: usize = 1 << 20;

/// Lower-case hexadecimal SHA-256 of bytes in memory.
pub fn sha256_hex(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

/// Whether a text is a SHA-256 as manifests and locks write it: 64 lower-case hexadecimal digits.
pub fn is_sha256(text: &str) -> bool {
    text.len() == 64
        && text
            .bytes()
            .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Size and digest of everything that went through it.
#[derive(Clone, Debug, Default)]
pub struct Hasher {
    sha256: Sha256,
    size_bytes: u64,
}

impl Hasher {
    /// Takes the next bytes of the stream.
    pub fn update(&mut self, bytes: &[u8]) {
        self.sha256.update(bytes);
        self.size_bytes += bytes.len() as u64;
    }

    /// Bytes seen so far.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Size in bytes and lower-case hexadecimal SHA-256.
    pub fn finish(self) -> (u64, String) {
        (self.size_bytes, hex::encode(self.sha256.finalize()))
    }
}

/// Reads a stream to its end; returns its size in bytes and its lower-case hexadecimal SHA-256. Memory use doesn't depend on the size.
pub fn hash_stream(mut stream: impl Read) -> io::Result<(u64, String)> {
    let mut hasher = Hasher::default();
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        match stream.read(&mut chunk) {
            Ok(0) => return Ok(hasher.finish()),
            Ok(count) => hasher.update(&chunk[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Size in bytes and lower-case hexadecimal SHA-256 of a file.
pub fn hash_file(path: &Path) -> io::Result<(u64, String)> {
    hash_stream(File::open(path)?)
}

/// Writes a file so that a reader, also after a crash, sees the old content or the new one: written aside, synced, renamed.
pub fn write_atomic(path: &Path, aside: &Path, bytes: &[u8]) -> io::Result<()> {
    let written = File::create(aside).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()
    });
    if let Err(error) = written.and_then(|()| fs::rename(aside, path)) {
        // The first error is the one to report; a file aside that can't be removed is overwritten by the next attempt.
        let _ = fs::remove_file(aside);
        return Err(error);
    }
    sync_parent(path)
}

/// Makes a rename in the directory of `path` last through a crash.
pub fn sync_parent(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => File::open(parent)?.sync_all(),
        _ => File::open(".")?.sync_all(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// FIPS 180-4 examples.
    #[test]
    fn known_digests_hold() {
        assert_eq!(
            sha256_hex(b"abc"),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
        let million = vec![b'a'; 1_000_000];
        assert_eq!(
            hash_stream(million.as_slice()).unwrap(),
            (
                1_000_000,
                "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0".to_owned()
            )
        );
    }

    #[test]
    fn only_64_lower_case_hex_digits_are_a_digest() {
        assert!(is_sha256(&sha256_hex(b"")));
        for text in [
            "",
            "abc",
            &sha256_hex(b"").to_uppercase(),
            &"g".repeat(64),
            &"0".repeat(65),
        ] {
            assert!(!is_sha256(text), "{text}");
        }
    }

    #[test]
    fn a_failed_write_leaves_the_old_file_and_nothing_aside() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("taken");
        fs::create_dir(&path).unwrap();
        fs::write(path.join("inside"), "x").unwrap();
        write_atomic(&path, &dir.path().join("aside"), b"new").unwrap_err();
        assert!(path.join("inside").exists());
        assert!(!dir.path().join("aside").exists());
    }
}
