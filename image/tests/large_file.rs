//! A file above 8 GiB, the most that the octal size of a tar header can say. Alone in its process, so that its memory can be judged.

use std::fs::{self, File};
use std::io::{self, Write};

use outrider_image::layer::{Compression, archive_bytes, write};
use outrider_image::tree::{Content, Mode, Node, Tree};

const SIZE_BYTES: u64 = (8 << 30) + 1;

/// Keeps the beginning and counts the rest.
#[derive(Default)]
struct Beginning {
    kept: Vec<u8>,
    total_bytes: u64,
}

impl Write for Beginning {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let missing = 512_usize.saturating_sub(self.kept.len());
        self.kept
            .extend_from_slice(&bytes[..bytes.len().min(missing)]);
        self.total_bytes += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Most memory that this process ever had, in bytes.
fn peak_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kilobytes = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kilobytes.unwrap() * 1024
}

#[test]
fn a_file_over_8_gib_keeps_its_size_and_takes_little_memory() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("weights");
    File::create(&path).unwrap().set_len(SIZE_BYTES).unwrap();
    let mut tree = Tree::default();
    tree.insert(
        "weights",
        Node::File(Content::Path(path, None), Mode::ReadOnly),
    )
    .unwrap();
    let mut out = Beginning::default();
    let written = write(&tree, Compression::None, 0, &mut out).unwrap();
    let header = tar::Header::from_byte_slice(&out.kept);
    assert_eq!(header.size().unwrap(), SIZE_BYTES);
    assert_eq!(written.files["weights"].size_bytes, SIZE_BYTES);
    assert_eq!(out.total_bytes, archive_bytes(&tree).unwrap());
    let peak_bytes = peak_bytes();
    assert!(
        peak_bytes < 100 << 20,
        "{peak_bytes} bytes of memory were used"
    );
}
