//! The files of the audit log: whole lines appended to one of them, which makes room for the next by being renamed.
//!
//! `audit.jsonl` is the present one, `audit.jsonl.1` the one before it, and so on.
//! One process may write them at a time.

use std::fs::{File, OpenOptions, rename};
use std::io::{self, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

/// Readable and writable by the server alone: the lines may hold what callers wrote.
const MODE: u32 = 0o600;

/// What users have that are neither the owner nor of the file's group.
const OTHERS: u32 = 0o007;

/// A file of whole lines that is rotated by size.
#[derive(Debug)]
pub(super) struct RotatingFile {
    path: PathBuf,
    max_file_bytes: u64,
    max_files: usize,
    file: File,
    /// Length without the part of a line that could neither be finished nor taken back.
    torn_at: Option<u64>,
}

impl RotatingFile {
    /// Opens or creates the present file.
    pub(super) fn open(path: &Path, max_file_bytes: u64, max_files: usize) -> io::Result<Self> {
        Ok(Self {
            path: path.to_owned(),
            max_file_bytes,
            max_files,
            file: append_to(path)?,
            torn_at: None,
        })
    }

    /// Appends a line, all of it or nothing. It goes into a new file when this one would grow beyond its limit.
    ///
    /// # Errors
    ///
    /// The line is not in the file, or only part of it, which the next call takes back first.
    pub(super) fn append(&mut self, line: &[u8]) -> io::Result<()> {
        self.follow_name()?;
        self.take_back()?;
        let mut metadata = self.file.metadata()?;
        let grown = metadata.len().saturating_add(line.len() as u64);
        // A line that is longer than a file may be gets one of its own.
        if metadata.is_file() && metadata.len() > 0 && grown > self.max_file_bytes {
            self.rotate()?;
            metadata = self.file.metadata()?;
        }
        let written = self.file.write_all(line);
        if written.is_err() && metadata.is_file() {
            self.torn_at = Some(metadata.len());
        }
        written
    }

    /// Opens the present file by its name again.
    pub(super) fn reopen(&mut self) -> io::Result<()> {
        let file = append_to(&self.path)?;
        if let Err(error) = self.sync() {
            // It must not keep a file that works from taking its place.
            tracing::warn!(%error, "the old file of the audit log could not be brought to the disk");
        }
        self.file = file;
        self.torn_at = None;
        Ok(())
    }

    /// Opens the file anew when its name has gone or means another one now.
    fn follow_name(&mut self) -> io::Result<()> {
        let named = match std::fs::metadata(&self.path) {
            Ok(metadata) => Some((metadata.dev(), metadata.ino())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            // What can't be looked up may be written to all the same.
            Err(_) => return Ok(()),
        };
        let open = self.file.metadata()?;
        if named != Some((open.dev(), open.ino())) {
            self.reopen()?;
            tracing::warn!(
                path = %self.path.display(),
                "the file of the audit log was moved, replaced or deleted; the log goes on in a new one"
            );
        }
        Ok(())
    }

    /// Waits until all lines are on the disk.
    pub(super) fn sync(&mut self) -> io::Result<()> {
        self.take_back()?;
        match self.file.sync_data() {
            // A pipe or a device has nothing to wait for.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(()),
            result => result,
        }
    }

    fn take_back(&mut self) -> io::Result<()> {
        if let Some(length) = self.torn_at {
            self.file.set_len(length)?;
            self.torn_at = None;
        }
        Ok(())
    }

    /// Makes the present file the one before, each of those the one before it, and begins a new one. The oldest is overwritten.
    ///
    /// Every step leaves whole files; when one fails, the next call goes on where this one ended.
    fn rotate(&mut self) -> io::Result<()> {
        self.file.sync_data()?;
        let oldest = self.max_files - 1;
        if oldest == 0 {
            remove(&self.path)?;
        } else {
            // Only up to the first gap: a call before this one may have moved the older ones already.
            let last = (1..oldest).find(|&age| !self.aged(age).exists());
            for age in (1..last.unwrap_or(oldest)).rev() {
                rename(self.aged(age), self.aged(age + 1))?;
            }
            match rename(&self.path, self.aged(1)) {
                // A call before this one moved it, or somebody else did.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                result => result?,
            }
        }
        self.file = append_to(&self.path)?;
        Ok(())
    }

    fn aged(&self, age: usize) -> PathBuf {
        let mut name = self.path.clone().into_os_string();
        name.push(format!(".{age}"));
        name.into()
    }
}

fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// Opens a file at the beginning of a line.
fn append_to(path: &Path) -> io::Result<File> {
    let mut file = OpenOptions::new()
        .create(true)
        .read(true)
        .append(true)
        .mode(MODE)
        .open(path)?;
    let metadata = file.metadata()?;
    if metadata.is_file() && metadata.mode() & OTHERS != 0 {
        tracing::warn!(
            path = %path.display(),
            mode = format!("{:04o}", metadata.mode() & 0o7777),
            "every user of the machine can read or write the audit log; a file that the server makes has 0600"
        );
    }
    if metadata.is_file() && metadata.len() > 0 {
        let mut last = [0];
        file.read_exact_at(&mut last, metadata.len() - 1)?;
        if last != *b"\n" {
            // The machine went down in the middle of a line; it must not take the next one with it.
            tracing::warn!(path = %path.display(), "the audit log ended within a line");
            file.write_all(b"\n")?;
        }
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(path: &Path) -> Vec<String> {
        let text = std::fs::read_to_string(path).unwrap();
        assert!(text.is_empty() || text.ends_with('\n'), "{text:?}");
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn files_age_and_the_oldest_goes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.jsonl");
        let mut file = RotatingFile::open(&path, 12, 3).unwrap();
        for number in 0..9 {
            file.append(format!("line{number}\n").as_bytes()).unwrap();
        }
        assert_eq!(lines(&path), ["line8"]);
        assert_eq!(lines(&file.aged(1)), ["line6", "line7"]);
        assert_eq!(lines(&file.aged(2)), ["line4", "line5"]);
        assert!(!file.aged(3).exists());
    }

    #[test]
    fn a_single_file_begins_anew() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.jsonl");
        let mut file = RotatingFile::open(&path, 12, 1).unwrap();
        for number in 0..3 {
            file.append(format!("line{number}\n").as_bytes()).unwrap();
        }
        assert_eq!(lines(&path), ["line2"]);
        assert!(!file.aged(1).exists());
    }

    #[test]
    fn a_line_longer_than_a_file_has_one_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.jsonl");
        let mut file = RotatingFile::open(&path, 12, 3).unwrap();
        for line in ["short\n", "much longer than twelve bytes\n", "last\n"] {
            file.append(line.as_bytes()).unwrap();
        }
        assert_eq!(lines(&path), ["last"]);
        assert_eq!(lines(&file.aged(1)), ["much longer than twelve bytes"]);
        assert_eq!(lines(&file.aged(2)), ["short"]);
    }

    #[test]
    fn a_rotation_that_failed_half_way_loses_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.jsonl");
        let mut file = RotatingFile::open(&path, 6, 4).unwrap();
        for line in ["one\n", "two\n", "three\n"] {
            file.append(line.as_bytes()).unwrap();
        }
        // What a rotation does before its last two steps.
        rename(file.aged(2), file.aged(3)).unwrap();
        rename(file.aged(1), file.aged(2)).unwrap();
        file.append(b"four\n").unwrap();
        assert_eq!(lines(&path), ["four"]);
        for (age, line) in [(1, "three"), (2, "two"), (3, "one")] {
            assert_eq!(lines(&file.aged(age)), [line]);
        }
    }

    #[test]
    fn a_line_cut_by_a_crash_stands_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.jsonl");
        std::fs::write(&path, "whole\nhal").unwrap();
        let mut file = RotatingFile::open(&path, 100, 2).unwrap();
        file.append(b"next\n").unwrap();
        assert_eq!(lines(&path), ["whole", "hal", "next"]);
    }

    #[test]
    fn a_file_that_was_deleted_or_replaced_is_followed_by_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.jsonl");
        let mut file = RotatingFile::open(&path, 100, 2).unwrap();
        file.append(b"old\n").unwrap();
        std::fs::remove_file(&path).unwrap();
        file.append(b"after deletion\n").unwrap();
        assert_eq!(lines(&path), ["after deletion"]);
        let other = dir.path().join("other");
        std::fs::write(&other, "other\n").unwrap();
        rename(&other, &path).unwrap();
        file.append(b"after replacement\n").unwrap();
        assert_eq!(lines(&path), ["other", "after replacement"]);
    }

    #[test]
    fn a_file_that_was_moved_away_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.jsonl");
        let moved = dir.path().join("moved");
        let mut file = RotatingFile::open(&path, 100, 2).unwrap();
        file.append(b"old\n").unwrap();
        rename(&path, &moved).unwrap();
        file.append(b"new\n").unwrap();
        file.reopen().unwrap();
        file.append(b"newer\n").unwrap();
        assert_eq!(lines(&moved), ["old"]);
        assert_eq!(lines(&path), ["new", "newer"]);
    }
}
