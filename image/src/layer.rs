//! Layers: a [`Tree`] as a tar archive that is the same bytes wherever it is written.
//!
//! Entries are sorted; every directory above a file is in the archive with the same header; owner and group are 0 without names; times are the epoch that is
//! asked for; there are no extended attributes, no sparse files, no hard links and no devices.
//! Sizes over 8 GiB are in the base-256 form of GNU tar.
//! Contents are streamed: memory doesn't depend on the size of a file, and every file is held to its digest while it is copied.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use flate2::GzBuilder;
use oci_spec::image::MediaType;
use outrider_bundle::digest::Hasher;
use outrider_bundle::manifest::FileEntry;
use tar::{EntryType, Header};

use crate::Error;
use crate::tree::{Content, Mode, Node, Tree};

/// Level of the zstd encoder; part of what makes the bytes of a layer.
pub const ZSTD_LEVEL: i32 = 9;

/// Level of the gzip encoder; part of what makes the bytes of a layer.
pub const GZIP_LEVEL: u32 = 9;

/// Bytes of a file that are read at a time, and [`CHUNKS_AHEAD`] of them wait to be written.
const CHUNK_BYTES: usize = 1 << 20;
const CHUNKS_AHEAD: usize = 4;

/// Size of a header, and what contents are filled up to.
const BLOCK_BYTES: u64 = 512;

/// Size of the end of an archive.
pub(crate) const END_BYTES: u64 = 2 * BLOCK_BYTES;

/// Longest path or link target that fits into a header.
const NAME_BYTES: usize = 100;

/// How a layer is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// Not at all: weights don't get smaller, and are unpacked at the speed of the disk.
    None,
    /// zstd at [`ZSTD_LEVEL`].
    Zstd,
    /// gzip at [`GZIP_LEVEL`], for consumers that know nothing newer.
    Gzip,
}

impl Compression {
    /// Media type of a layer in this form.
    pub fn media_type(self) -> MediaType {
        match self {
            Self::None => MediaType::ImageLayer,
            Self::Zstd => MediaType::ImageLayerZstd,
            Self::Gzip => MediaType::ImageLayerGzip,
        }
    }

    /// The form that a media type names, where it is the type of a layer that can be read.
    pub fn of(media_type: &MediaType) -> Option<Self> {
        match media_type {
            MediaType::ImageLayer => Some(Self::None),
            MediaType::ImageLayerZstd => Some(Self::Zstd),
            MediaType::ImageLayerGzip => Some(Self::Gzip),
            _ => None,
        }
    }

    /// The archive in a blob of this form.
    pub fn reader<'a>(self, blob: impl Read + 'a) -> io::Result<Box<dyn Read + 'a>> {
        Ok(match self {
            Self::None => Box::new(blob),
            Self::Zstd => Box::new(zstd::stream::read::Decoder::new(blob)?),
            Self::Gzip => Box::new(flate2::read::MultiGzDecoder::new(blob)),
        })
    }
}

/// What was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// Size in bytes and lower-case hexadecimal SHA-256 of the blob.
    pub blob: FileEntry,
    /// Size in bytes and lower-case hexadecimal SHA-256 of the archive; the latter is the `diff_id`.
    pub archive: FileEntry,
    /// Size and digest of every file, by path.
    pub files: BTreeMap<String, FileEntry>,
}

/// Writes a tree as a layer. Times of all entries are `epoch_s`, in seconds since 1970.
pub fn write(
    tree: &Tree,
    compression: Compression,
    epoch_s: u64,
    out: impl Write,
) -> Result<Written, Error> {
    let blob = Hashing::new(BufWriter::with_capacity(CHUNK_BYTES, out));
    match compression {
        Compression::None => {
            let (archive, files, blob) = write_archive(tree, epoch_s, blob)?;
            finish(blob, archive, files)
        }
        Compression::Zstd => {
            let encoder = zstd::stream::write::Encoder::new(blob, ZSTD_LEVEL).map_err(layer_io)?;
            let (archive, files, encoder) = write_archive(tree, epoch_s, encoder)?;
            finish(encoder.finish().map_err(layer_io)?, archive, files)
        }
        Compression::Gzip => {
            let level = flate2::Compression::new(GZIP_LEVEL);
            let encoder = GzBuilder::new().mtime(0).write(blob, level);
            let (archive, files, encoder) = write_archive(tree, epoch_s, encoder)?;
            finish(encoder.finish().map_err(layer_io)?, archive, files)
        }
    }
}

/// Size of the archive that a tree becomes, before compression.
pub fn archive_bytes(tree: &Tree) -> Result<u64, Error> {
    let mut total = END_BYTES;
    let mut directories = BTreeSet::new();
    for (path, node) in tree.iter() {
        for directory in above(path) {
            if directories.insert(directory.to_owned()) {
                total += header_bytes(directory.len() + 1);
            }
        }
        total += match node {
            Node::File(content, _) => {
                header_bytes(path.len()) + filled_up_bytes(content.size_bytes()?)
            }
            Node::Link(target) => {
                header_bytes(path.len()) + header_bytes(target.len()) - BLOCK_BYTES
            }
            Node::Directory if directories.insert(path.to_owned()) => header_bytes(path.len() + 1),
            Node::Directory => 0,
        };
    }
    Ok(total)
}

/// Size of a content with what it is filled up with.
pub(crate) fn filled_up_bytes(content_bytes: u64) -> u64 {
    content_bytes.next_multiple_of(BLOCK_BYTES)
}

/// Size of a header with a name of so many bytes: a long one has an entry of its own before it.
fn header_bytes(name_bytes: usize) -> u64 {
    if name_bytes > NAME_BYTES {
        2 * BLOCK_BYTES + (name_bytes as u64 + 1).next_multiple_of(BLOCK_BYTES)
    } else {
        BLOCK_BYTES
    }
}

fn finish(
    blob: Hashing<BufWriter<impl Write>>,
    archive: FileEntry,
    files: BTreeMap<String, FileEntry>,
) -> Result<Written, Error> {
    let Hashing { mut inner, hasher } = blob;
    inner.flush().map_err(layer_io)?;
    Ok(Written {
        blob: entry(hasher),
        archive,
        files,
    })
}

fn write_archive<W: Write>(
    tree: &Tree,
    epoch_s: u64,
    out: W,
) -> Result<(FileEntry, BTreeMap<String, FileEntry>, W), Error> {
    let mut builder = tar::Builder::new(Hashing::new(out));
    let mut directories = BTreeSet::new();
    let mut files = BTreeMap::new();
    let mut directory = |builder: &mut tar::Builder<Hashing<W>>, path: &str| {
        if !directories.insert(path.to_owned()) {
            return Ok(());
        }
        let mut header = header(EntryType::Directory, 0o755, 0, epoch_s);
        builder
            .append_data(&mut header, format!("{path}/"), io::empty())
            .map_err(layer_io)
    };
    for (path, node) in tree.iter() {
        for above in above(path) {
            directory(&mut builder, above)?;
        }
        match node {
            Node::Directory => directory(&mut builder, path)?,
            Node::Link(target) => {
                let mut header = header(EntryType::Symlink, 0o777, 0, epoch_s);
                builder
                    .append_link(&mut header, path, target)
                    .map_err(layer_io)?;
            }
            Node::File(content, mode) => {
                let entry = append_file(&mut builder, path, content, *mode, epoch_s)?;
                files.insert(path.to_owned(), entry);
            }
        }
    }
    let Hashing { inner, hasher } = builder.into_inner().map_err(layer_io)?;
    Ok((entry(hasher), files, inner))
}

fn append_file<W: Write>(
    builder: &mut tar::Builder<W>,
    path: &str,
    content: &Content,
    mode: Mode,
    epoch_s: u64,
) -> Result<FileEntry, Error> {
    match content {
        Content::Bytes(bytes) => {
            let mut header = header(EntryType::Regular, mode.bits(), bytes.len() as u64, epoch_s);
            builder
                .append_data(&mut header, path, bytes.as_slice())
                .map_err(layer_io)?;
            let mut hasher = Hasher::default();
            hasher.update(bytes);
            Ok(entry(hasher))
        }
        Content::Path(source, expected) => {
            let file = File::open(source).map_err(|error| Error::read(source, error))?;
            let metadata = file
                .metadata()
                .map_err(|error| Error::read(source, error))?;
            if !metadata.is_file() {
                let problem = format!("{} is no plain file", source.display());
                return Err(Error::entry(path, problem));
            }
            let size_bytes = metadata.len();
            if let Some(expected) = expected.as_ref().filter(|it| it.size_bytes != size_bytes) {
                // Nothing of it goes into the layer, but the message has both digests.
                let (_, sha256) = outrider_bundle::digest::hash_stream(file)
                    .map_err(|error| Error::read(source, error))?;
                return Err(stale(path, expected, FileEntry { size_bytes, sha256 }));
            }
            let mut header = header(EntryType::Regular, mode.bits(), size_bytes, epoch_s);
            let actual = copy(builder, &mut header, path, source, file, size_bytes)?;
            match expected {
                Some(expected) if *expected != actual => Err(stale(path, expected, actual)),
                _ => Ok(actual),
            }
        }
    }
}

/// Copies a file into an archive. Another thread reads it and takes its digest, so that the two digests and the writing overlap.
fn copy<W: Write>(
    builder: &mut tar::Builder<W>,
    header: &mut Header,
    path: &str,
    source: &Path,
    file: File,
    size_bytes: u64,
) -> Result<FileEntry, Error> {
    let (sender, chunks) = sync_channel(CHUNKS_AHEAD);
    thread::scope(|scope| {
        let reader = scope.spawn(move || read_ahead(file, &sender));
        let ahead = Ahead {
            chunks,
            chunk: Vec::new(),
            taken_bytes: 0,
        };
        // A file that grows must not write over the header of the next.
        let appended = builder.append_data(header, path, ahead.take(size_bytes));
        let read = reader.join().expect("reading ahead doesn't panic");
        let actual = read.map_err(|error| Error::read(source, error))?;
        appended.map_err(layer_io)?;
        match actual {
            Some(actual) if actual.size_bytes == size_bytes => Ok(actual),
            _ => {
                let problem = format!("{} changed while it was read", source.display());
                Err(Error::entry(path, problem))
            }
        }
    })
}

/// Size and digest of the file, or nothing when the other end took no more.
fn read_ahead(mut file: File, sender: &SyncSender<Vec<u8>>) -> io::Result<Option<FileEntry>> {
    let mut hasher = Hasher::default();
    loop {
        let mut chunk = Vec::with_capacity(CHUNK_BYTES);
        (&mut file)
            .take(CHUNK_BYTES as u64)
            .read_to_end(&mut chunk)?;
        if chunk.is_empty() {
            return Ok(Some(entry(hasher)));
        }
        hasher.update(&chunk);
        if sender.send(chunk).is_err() {
            return Ok(None);
        }
    }
}

/// The end of a file that another thread reads.
struct Ahead {
    chunks: Receiver<Vec<u8>>,
    chunk: Vec<u8>,
    taken_bytes: usize,
}

impl Read for Ahead {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.taken_bytes == self.chunk.len() {
            self.taken_bytes = 0;
            // The sender is gone at the end of the file, and after an error that its thread returns.
            self.chunk = self.chunks.recv().unwrap_or_default();
        }
        let rest = &self.chunk[self.taken_bytes..];
        let count = rest.len().min(buffer.len());
        buffer[..count].copy_from_slice(&rest[..count]);
        self.taken_bytes += count;
        Ok(count)
    }
}

/// A header of the GNU form, which has every field that must not differ set.
fn header(entry_type: EntryType, mode: u32, size_bytes: u64, epoch_s: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(entry_type);
    header.set_mode(mode);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(epoch_s);
    header.set_size(size_bytes);
    header
}

/// The directories above a path, the topmost first.
fn above(path: &str) -> impl Iterator<Item = &str> {
    path.match_indices('/').map(|(index, _)| &path[..index])
}

fn stale(path: &str, expected: &FileEntry, actual: FileEntry) -> Error {
    Error::Stale {
        file: path.to_owned(),
        expected_bytes: expected.size_bytes,
        expected: expected.sha256.clone(),
        actual_bytes: actual.size_bytes,
        actual: actual.sha256,
    }
}

fn layer_io(source: io::Error) -> Error {
    Error::write("the layer", source)
}

pub(crate) fn entry(hasher: Hasher) -> FileEntry {
    let (size_bytes, sha256) = hasher.finish();
    FileEntry { size_bytes, sha256 }
}

/// Takes the digest of everything that is written through it.
struct Hashing<W> {
    inner: W,
    hasher: Hasher,
}

impl<W> Hashing<W> {
    fn new(inner: W) -> Self {
        Self {
            inner,
            hasher: Hasher::default(),
        }
    }
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.inner.write(bytes)?;
        self.hasher.update(&bytes[..count]);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use outrider_bundle::digest::sha256_hex;

    use super::*;

    const EPOCH_S: u64 = 1_700_000_000;

    fn text(content: &str) -> Node {
        Node::File(Content::Bytes(content.as_bytes().to_vec()), Mode::Plain)
    }

    fn tree() -> Tree {
        let mut tree = Tree::default();
        let long = format!("usr/{}/{}", "d".repeat(90), "f".repeat(90));
        tree.insert("usr/lib/b", text("b")).unwrap();
        tree.insert("usr/lib/a", text("a")).unwrap();
        tree.insert("usr/lib-x/c", text("c")).unwrap();
        tree.insert(&long, text("long")).unwrap();
        tree.insert("lib", Node::Link("usr/lib".to_owned()))
            .unwrap();
        tree.insert("far", Node::Link(format!("/{}", "t".repeat(150))))
            .unwrap();
        tree.insert("run", Node::Directory).unwrap();
        tree
    }

    #[test]
    fn an_archive_has_sorted_entries_and_nothing_of_this_machine() {
        let mut blob = Vec::new();
        let written = write(&tree(), Compression::None, EPOCH_S, &mut blob).unwrap();
        let mut archive = tar::Archive::new(blob.as_slice());
        let mut names = Vec::new();
        for entry in archive.entries().unwrap() {
            let entry = entry.unwrap();
            let header = entry.header();
            let path = String::from_utf8(entry.path_bytes().into_owned()).unwrap();
            let owner = (header.uid().unwrap(), header.gid().unwrap());
            assert_eq!(owner, (0, 0), "{path}");
            assert_eq!(header.mtime().unwrap(), EPOCH_S, "{path}");
            assert_eq!(header.username_bytes().unwrap_or_default(), b"", "{path}");
            assert_eq!(header.groupname_bytes().unwrap_or_default(), b"", "{path}");
            names.push(
                path.replace(&"d".repeat(90), "D")
                    .replace(&"f".repeat(90), "F"),
            );
        }
        assert_eq!(
            names,
            [
                "far",
                "lib",
                "run/",
                "usr/",
                "usr/D/",
                "usr/D/F",
                "usr/lib-x/",
                "usr/lib-x/c",
                "usr/lib/",
                "usr/lib/a",
                "usr/lib/b"
            ]
        );
        assert_eq!(written.blob.sha256, sha256_hex(&blob));
        assert_eq!(written.blob, written.archive);
        assert_eq!(written.files["usr/lib/a"].sha256, sha256_hex(b"a"));
    }

    #[test]
    fn the_size_of_an_archive_is_known_before_it_is_written() {
        let written = write(&tree(), Compression::None, 0, io::sink()).unwrap();
        assert_eq!(archive_bytes(&tree()).unwrap(), written.archive.size_bytes);
    }

    #[test]
    fn a_file_over_8_gib_has_its_size_in_the_header() {
        // More than the octal digits of the field can say; the top bit marks the base-256 form.
        let size_bytes = 12 << 30;
        let header = header(EntryType::Regular, 0o444, size_bytes, 0);
        assert_eq!(header.as_bytes()[124], 0x80);
        assert_eq!(header.size().unwrap(), size_bytes);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weights");
        File::create(&path).unwrap().set_len(size_bytes).unwrap();
        let mut tree = Tree::default();
        let content = Content::Path(path, None);
        tree.insert("w", Node::File(content, Mode::ReadOnly))
            .unwrap();
        assert_eq!(archive_bytes(&tree).unwrap(), size_bytes + 3 * BLOCK_BYTES);
    }

    #[test]
    fn bytes_do_not_depend_on_time_and_modes_of_the_source() {
        let dir = tempfile::tempdir().unwrap();
        let digest_of = |name: &str, mode: u32, compression: Compression| {
            use std::os::unix::fs::PermissionsExt;
            let path = dir.path().join(name);
            fs::write(&path, "weights").unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let content = Content::Path(path, None);
            let mut tree = Tree::default();
            tree.insert("w", Node::File(content, Mode::ReadOnly))
                .unwrap();
            write(&tree, compression, 0, io::sink()).unwrap()
        };
        for compression in [Compression::None, Compression::Zstd, Compression::Gzip] {
            let first = digest_of("first", 0o600, compression);
            let second = digest_of("second", 0o755, compression);
            assert_eq!(first, second, "{compression:?}");
        }
    }

    #[test]
    fn every_form_is_read_back_as_the_archive_that_was_written() {
        for compression in [Compression::None, Compression::Zstd, Compression::Gzip] {
            let mut blob = Vec::new();
            let written = write(&tree(), compression, 0, &mut blob).unwrap();
            let media_type = compression.media_type();
            assert_eq!(Compression::of(&media_type), Some(compression));
            let mut archive = Vec::new();
            let mut reader = compression.reader(blob.as_slice()).unwrap();
            reader.read_to_end(&mut archive).unwrap();
            assert_eq!(
                written.archive.sha256,
                sha256_hex(&archive),
                "{compression:?}"
            );
            assert_eq!(written.blob.size_bytes, blob.len() as u64);
        }
    }

    #[test]
    fn a_file_that_is_not_the_locked_one_is_named_with_both_digests() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.bin");
        fs::write(&path, "weights").unwrap();
        for (size_bytes, sha256) in [(7, sha256_hex(b"Weights")), (8, sha256_hex(b"weights!"))] {
            let content = Content::Path(path.clone(), Some(FileEntry { size_bytes, sha256 }));
            let mut tree = Tree::default();
            tree.insert("opt/model.bin", Node::File(content, Mode::ReadOnly))
                .unwrap();
            let error = write(&tree, Compression::None, 0, io::sink()).unwrap_err();
            let message = error.to_string();
            let Error::Stale { expected, .. } = &error else {
                panic!("{message}");
            };
            for part in ["opt/model.bin", expected, &sha256_hex(b"weights")] {
                assert!(message.contains(part), "{part} is not in {message}");
            }
        }
    }
}
