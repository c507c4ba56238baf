//! A file on its way into the store: received aside, checked against the lock while it comes in, and given its name when every byte is right.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use outrider_bundle::digest::{Hasher, sync_parent};
use outrider_bundle::lock::LockedFile;

/// Bytes read at a time.
const CHUNK_BYTES: usize = 256 << 10;

/// The received part of a file.
///
/// Dropped before [`Incoming::commit`], it leaves nothing behind, unless [`Incoming::keep_partial`] was asked for.
pub struct Incoming<'a> {
    file: &'a LockedFile,
    target: PathBuf,
    partial: PathBuf,
    out: File,
    hasher: Hasher,
    is_kept: bool,
}

impl<'a> Incoming<'a> {
    /// Starts from nothing.
    pub fn start(dir: &Path, file: &'a LockedFile) -> anyhow::Result<Self> {
        let mut incoming = Self::resume(dir, file)?;
        incoming.restart()?;
        incoming.is_kept = false;
        Ok(incoming)
    }

    /// Goes on from what an earlier attempt left; that part is hashed again. The part is kept when this attempt fails too.
    pub fn resume(dir: &Path, file: &'a LockedFile) -> anyhow::Result<Self> {
        // With the digest in its name, so that a partial file never belongs to another version of the lock.
        let partial = dir.join(format!(".{}.{}.partial", file.name, &file.sha256[..16]));
        let open = || -> io::Result<(File, Hasher)> {
            let mut out = OpenOptions::new()
                .read(true)
                .append(true)
                .create(true)
                .open(&partial)?;
            let mut hasher = Hasher::default();
            copy_chunks(&mut out, |chunk| {
                hasher.update(chunk);
                Ok(())
            })?;
            Ok((out, hasher))
        };
        let (out, hasher) =
            open().with_context(|| format!("cannot write {}", partial.display()))?;
        let mut incoming = Self {
            file,
            target: dir.join(&file.name),
            partial,
            out,
            hasher,
            is_kept: true,
        };
        if incoming.received_bytes() > file.size_bytes {
            incoming.restart()?;
        }
        Ok(incoming)
    }

    /// Bytes that are there.
    pub fn received_bytes(&self) -> u64 {
        self.hasher.size_bytes()
    }

    /// Whether every byte is there.
    pub fn is_complete(&self) -> bool {
        self.received_bytes() == self.file.size_bytes
    }

    /// Where a note about the partial file may be kept.
    pub fn note_path(&self) -> PathBuf {
        self.partial.with_extension("etag")
    }

    /// Throws away what is there.
    pub fn restart(&mut self) -> anyhow::Result<()> {
        self.hasher = Hasher::default();
        let _ = fs::remove_file(self.note_path());
        self.out
            .set_len(0)
            .with_context(|| format!("cannot write {}", self.partial.display()))
    }

    /// Takes the next bytes; more than the lock says is an error at once.
    pub fn write(&mut self, bytes: &[u8]) -> anyhow::Result<()> {
        let size_bytes = self.received_bytes() + bytes.len() as u64;
        if size_bytes > self.file.size_bytes {
            self.is_kept = false;
            bail!(
                "{} is larger than the {} bytes the lock says",
                self.file.name,
                self.file.size_bytes
            );
        }
        self.out
            .write_all(bytes)
            .with_context(|| format!("cannot write {}", self.partial.display()))?;
        self.hasher.update(bytes);
        Ok(())
    }

    /// Takes everything a stream has.
    pub fn write_all_of(
        &mut self,
        stream: &mut impl Read,
        mut advanced: impl FnMut(u64),
    ) -> anyhow::Result<()> {
        let mut written = Ok(());
        let read = copy_chunks(stream, |chunk| {
            written = self.write(chunk);
            advanced(chunk.len() as u64);
            if written.is_ok() {
                Ok(())
            } else {
                Err(io::ErrorKind::Other.into())
            }
        });
        written?;
        read.with_context(|| format!("cannot read {}", self.file.name))
    }

    /// Gives the file its name, when size and digest are what the lock says. If they aren't, nothing is left behind.
    pub fn commit(mut self) -> anyhow::Result<()> {
        self.is_kept = false;
        let (size_bytes, sha256) = std::mem::take(&mut self.hasher).finish();
        let LockedFile {
            name,
            size_bytes: locked_bytes,
            sha256: locked,
            ..
        } = self.file;
        ensure!(
            size_bytes == *locked_bytes,
            "{name} has {size_bytes} bytes, the lock says {locked_bytes}"
        );
        ensure!(
            sha256 == *locked,
            "{name} has sha256 {sha256}, the lock says {locked}"
        );
        let place = || -> io::Result<()> {
            self.out.sync_all()?;
            fs::rename(&self.partial, &self.target)?;
            sync_parent(&self.target)
        };
        place().with_context(|| format!("cannot write {}", self.target.display()))
    }
}

impl Drop for Incoming<'_> {
    fn drop(&mut self) {
        // After a commit there is nothing to remove. A partial file that can't be removed is hashed and used or replaced by the next attempt.
        if !self.is_kept || self.received_bytes() == 0 {
            let _ = fs::remove_file(&self.partial);
            let _ = fs::remove_file(self.note_path());
        }
    }
}

/// Reads a stream to its end, chunk by chunk.
fn copy_chunks(
    stream: &mut impl Read,
    mut take: impl FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        match stream.read(&mut chunk) {
            Ok(0) => return Ok(()),
            Ok(count) => take(&chunk[..count])?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}
