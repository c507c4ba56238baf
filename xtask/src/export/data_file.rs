//! The external data file of a graph: tensors one after the other, each where `mmap` can reach it.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

/// Alignment of every tensor in bytes: one cache line, and more than any vector load needs.
const ALIGNMENT: u64 = 64;

/// Alignment of large tensors in bytes: a page, so that a mapping of one tensor shares no page with its neighbours.
const PAGE: u64 = 4096;

/// From this size in bytes a tensor starts on a page.
const LARGE: u64 = 1 << 20;

/// Where the bytes of a tensor are in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub length: u64,
}

/// Appends tensors to a file; nothing of them stays in memory.
pub struct DataFile {
    writer: BufWriter<File>,
    position: u64,
}

impl DataFile {
    /// Creates the file.
    pub fn create(path: &Path) -> io::Result<Self> {
        Ok(Self {
            writer: BufWriter::with_capacity(1 << 20, File::create(path)?),
            position: 0,
        })
    }

    /// Writes the bytes of one tensor behind the ones before and says where they are.
    pub fn append(&mut self, bytes: &[u8]) -> io::Result<Span> {
        let length = bytes.len() as u64;
        let alignment = if length >= LARGE { PAGE } else { ALIGNMENT };
        let offset = self.position.next_multiple_of(alignment);
        let padding = [0; PAGE as usize];
        self.writer
            .write_all(&padding[..(offset - self.position) as usize])?;
        self.writer.write_all(bytes)?;
        self.position = offset + length;
        Ok(Span { offset, length })
    }

    /// Brings everything to the disk.
    pub fn finish(self) -> io::Result<()> {
        self.writer
            .into_inner()
            .map_err(io::IntoInnerError::into_error)?
            .sync_all()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_start_on_cache_lines_and_large_ones_on_pages() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data");
        let mut file = DataFile::create(&path).unwrap();
        let spans: Vec<Span> = [vec![1; 3], vec![2; 65], vec![3; LARGE as usize], vec![4; 1]]
            .iter()
            .map(|bytes| file.append(bytes).unwrap())
            .collect();
        file.finish().unwrap();
        let offsets: Vec<u64> = spans.iter().map(|span| span.offset).collect();
        assert_eq!(offsets, [0, 64, 4096, 4096 + LARGE]);
        let bytes = std::fs::read(path).unwrap();
        for (span, value) in spans.iter().zip(1..) {
            let range = span.offset as usize..(span.offset + span.length) as usize;
            assert!(bytes[range].iter().all(|&byte| byte == value));
        }
        assert!(bytes[3..64].iter().all(|&byte| byte == 0));
    }
}
