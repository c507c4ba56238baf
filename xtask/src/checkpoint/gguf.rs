//! GGUF files: the container.
//!
//! Owns the header (metadata, tensor directory, alignment) and positioned reads of tensor data; what the metadata means is the business of the
//! modules below. Versions 2 and 3, little-endian. The header is untrusted: every length is checked against what is left of the file before
//! anything is allocated, and nothing in it can make the reader panic.
//! Split files are refused, and so are tensor types that `dequantise` doesn't know.
//!
//! Format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.

mod dequantise;
mod llama;
#[cfg(test)]
mod tests;
mod tokenizer;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};

use dequantise::TensorType;
pub use llama::read;

/// First bytes of every GGUF file.
pub const MAGIC: [u8; 4] = *b"GGUF";

/// Several times the header of any real model; a bound on what a broken file can make us read and keep.
const HEADER_LIMIT_BYTES: u64 = 64 << 20;
const DEFAULT_ALIGNMENT: u64 = 32;
const MAX_DIMENSIONS: u32 = 4;
const MAX_ARRAY_DEPTH: usize = 4;

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    String(String),
    Array(Vec<Value>),
}

impl Value {
    fn as_u64(&self) -> Option<u64> {
        match *self {
            Value::U8(v) => Some(v.into()),
            Value::U16(v) => Some(v.into()),
            Value::U32(v) => Some(v.into()),
            Value::U64(v) => Some(v),
            Value::I8(v) => v.try_into().ok(),
            Value::I16(v) => v.try_into().ok(),
            Value::I32(v) => v.try_into().ok(),
            Value::I64(v) => v.try_into().ok(),
            _ => None,
        }
    }

    fn as_f64(&self) -> Option<f64> {
        match *self {
            Value::F32(v) => Some(v.into()),
            Value::F64(v) => Some(v),
            _ => None,
        }
    }
}

/// The key-value part of the header.
#[derive(Debug, Default, PartialEq)]
struct Metadata(BTreeMap<String, Value>);

impl Metadata {
    fn get<T>(
        &self,
        key: &str,
        expected: &str,
        convert: impl FnOnce(&Value) -> Option<T>,
    ) -> anyhow::Result<Option<T>> {
        let Some(value) = self.0.get(key) else {
            return Ok(None);
        };
        match convert(value) {
            Some(converted) => Ok(Some(converted)),
            None => bail!("metadata key {key} is not {expected}"),
        }
    }

    fn size(&self, key: &str) -> anyhow::Result<Option<usize>> {
        self.get(key, "a whole number from 0", |value| {
            value.as_u64()?.try_into().ok()
        })
    }

    fn required_size(&self, key: &str) -> anyhow::Result<usize> {
        self.size(key)?
            .with_context(|| format!("metadata key {key} is missing"))
    }

    fn token_id(&self, key: &str) -> anyhow::Result<Option<u32>> {
        self.get(key, "a token id", |value| value.as_u64()?.try_into().ok())
    }

    fn number(&self, key: &str) -> anyhow::Result<Option<f64>> {
        self.get(key, "a finite number", |value| {
            value.as_f64().filter(|number| number.is_finite())
        })
    }

    fn flag(&self, key: &str) -> anyhow::Result<Option<bool>> {
        self.get(key, "a boolean", |value| match value {
            Value::Bool(flag) => Some(*flag),
            _ => None,
        })
    }

    fn text(&self, key: &str) -> anyhow::Result<Option<&str>> {
        let Some(value) = self.0.get(key) else {
            return Ok(None);
        };
        match value {
            Value::String(text) => Ok(Some(text)),
            _ => bail!("metadata key {key} is not a string"),
        }
    }

    fn array(&self, key: &str) -> anyhow::Result<Option<&[Value]>> {
        let Some(value) = self.0.get(key) else {
            return Ok(None);
        };
        match value {
            Value::Array(values) => Ok(Some(values)),
            _ => bail!("metadata key {key} is not an array"),
        }
    }

    fn texts(&self, key: &str) -> anyhow::Result<Option<Vec<&str>>> {
        let Some(values) = self.array(key)? else {
            return Ok(None);
        };
        let texts = values.iter().map(|value| match value {
            Value::String(text) => Ok(text.as_str()),
            _ => bail!("metadata key {key} is not an array of strings"),
        });
        texts.collect::<anyhow::Result<_>>().map(Some)
    }
}

/// Where a tensor lies in the file and what it is.
#[derive(Clone, Debug, PartialEq)]
struct TensorInfo {
    /// Sizes from the slowest to the fastest dimension: `[out, in]` for a matrix. (The file has them the other way round.)
    shape: Vec<usize>,
    kind: TensorType,
    /// From the start of the file.
    offset: u64,
    bytes: usize,
}

impl TensorInfo {
    fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// Everything before the tensor data.
#[derive(Debug, PartialEq)]
struct Header {
    metadata: Metadata,
    tensors: BTreeMap<String, TensorInfo>,
}

/// An open GGUF file.
struct Gguf {
    path: PathBuf,
    file: File,
    header: Header,
}

impl Gguf {
    fn open(path: &Path) -> anyhow::Result<Gguf> {
        let file = File::open(path)?;
        let file_bytes = file.metadata()?.len();
        let header = parse(BufReader::with_capacity(1 << 16, &file), file_bytes)?;
        Ok(Gguf {
            path: path.to_path_buf(),
            file,
            header,
        })
    }

    /// The values of a tensor as fp32, row-major.
    fn load(&self, name: &str) -> anyhow::Result<Vec<f32>> {
        let info = self
            .header
            .tensors
            .get(name)
            .with_context(|| format!("tensor {name} is missing"))?;
        let mut bytes = vec![0; info.bytes];
        self.file
            .read_exact_at(&mut bytes, info.offset)
            .with_context(|| {
                format!(
                    "{}: tensor {name}: {} bytes at offset {}",
                    self.path.display(),
                    info.bytes,
                    info.offset
                )
            })?;
        let mut values = vec![0.0; info.elements()];
        dequantise::dequantise(info.kind, &bytes, &mut values);
        Ok(values)
    }
}

/// Reads the header of a GGUF file that has `file_bytes` bytes in all.
fn parse(reader: impl Read, file_bytes: u64) -> anyhow::Result<Header> {
    let mut cursor = Cursor {
        reader,
        position: 0,
        end: file_bytes.min(HEADER_LIMIT_BYTES),
    };

    let magic = cursor.array::<4>()?;
    ensure!(magic == MAGIC, "the file doesn't start with GGUF");
    let version = cursor.u32()?;
    ensure!(version & 0xffff != 0, "big-endian GGUF is not supported");
    ensure!(
        (2..=3).contains(&version),
        "GGUF version {version} is not supported, only 2 and 3"
    );

    // A tensor entry has at least a name length, a dimension count, one dimension, a type and an offset; a metadata entry a key length, a type
    // and one byte.
    let tensor_count = cursor.count("tensor count", 8 + 4 + 8 + 4 + 8)?;
    let metadata_count = cursor.count("metadata count", 8 + 4 + 1)?;

    let mut metadata = Metadata::default();
    for _ in 0..metadata_count {
        let key = cursor.string("metadata key")?;
        let value = cursor
            .value(0)
            .with_context(|| format!("metadata key {key}"))?;
        ensure!(
            metadata.0.insert(key.clone(), value).is_none(),
            "metadata key {key} occurs twice"
        );
    }
    let alignment = metadata
        .size("general.alignment")?
        .map_or(DEFAULT_ALIGNMENT, |alignment| alignment as u64);
    ensure!(
        alignment.is_power_of_two() && (8..=1 << 20).contains(&alignment),
        "general.alignment is {alignment}, allowed are powers of two from 8 to 1048576"
    );
    if let Some(splits) = metadata.size("split.count")? {
        ensure!(
            splits <= 1,
            "split.count is {splits}: split GGUF files are not supported, merge the parts into one file first"
        );
    }

    let mut tensors = BTreeMap::new();
    for _ in 0..tensor_count {
        let name = cursor.string("tensor name")?;
        let info = cursor
            .tensor_info()
            .with_context(|| format!("tensor {name}"))?;
        ensure!(
            tensors.insert(name.clone(), info).is_none(),
            "tensor {name} occurs twice"
        );
    }

    // Offsets are relative to the data section, which starts at the next aligned byte after the header.
    let data_start = cursor.position.next_multiple_of(alignment);
    for (name, info) in &mut tensors {
        ensure!(
            info.offset.is_multiple_of(alignment),
            "tensor {name}: offset {} is not a multiple of the alignment {alignment}",
            info.offset
        );
        let end = data_start
            .checked_add(info.offset)
            .and_then(|start| start.checked_add(info.bytes as u64));
        ensure!(
            end.is_some_and(|end| end <= file_bytes),
            "tensor {name}: {} bytes at data offset {} reach past the end of the file ({file_bytes} bytes): truncated?",
            info.bytes,
            info.offset
        );
        info.offset += data_start;
    }
    Ok(Header { metadata, tensors })
}

/// Reads little-endian values and never past `end`.
struct Cursor<R> {
    reader: R,
    position: u64,
    end: u64,
}

impl<R: Read> Cursor<R> {
    fn claim(&mut self, bytes: u64) -> anyhow::Result<()> {
        let left = self.end - self.position;
        ensure!(
            bytes <= left,
            "{bytes} bytes needed at offset {}, but the header has only {left} left: truncated or damaged?",
            self.position
        );
        self.position += bytes;
        Ok(())
    }

    fn array<const N: usize>(&mut self) -> anyhow::Result<[u8; N]> {
        self.claim(N as u64)?;
        let mut bytes = [0; N];
        self.reader.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn u32(&mut self) -> anyhow::Result<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> anyhow::Result<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// A number of things of at least `least_bytes` bytes each, which must fit in what is left.
    fn count(&mut self, what: &str, least_bytes: u64) -> anyhow::Result<u64> {
        let count = self.u64()?;
        let left = self.end - self.position;
        ensure!(
            count
                .checked_mul(least_bytes)
                .is_some_and(|bytes| bytes <= left),
            "{what} {count} can't fit in the {left} bytes left"
        );
        Ok(count)
    }

    fn string(&mut self, what: &str) -> anyhow::Result<String> {
        let length = self.count("string length", 1)?;
        self.claim(length)?;
        let mut bytes = vec![0; length as usize];
        self.reader.read_exact(&mut bytes)?;
        String::from_utf8(bytes)
            .with_context(|| format!("{what} before offset {} is not UTF-8", self.position))
    }

    fn value(&mut self, depth: usize) -> anyhow::Result<Value> {
        let kind = self.u32()?;
        self.value_of(kind, depth)
    }

    fn value_of(&mut self, kind: u32, depth: usize) -> anyhow::Result<Value> {
        Ok(match kind {
            0 => Value::U8(u8::from_le_bytes(self.array()?)),
            1 => Value::I8(i8::from_le_bytes(self.array()?)),
            2 => Value::U16(u16::from_le_bytes(self.array()?)),
            3 => Value::I16(i16::from_le_bytes(self.array()?)),
            4 => Value::U32(u32::from_le_bytes(self.array()?)),
            5 => Value::I32(i32::from_le_bytes(self.array()?)),
            6 => Value::F32(f32::from_le_bytes(self.array()?)),
            7 => match self.array::<1>()? {
                [0] => Value::Bool(false),
                [1] => Value::Bool(true),
                [other] => bail!("{other} is not a boolean"),
            },
            8 => Value::String(self.string("string")?),
            9 => {
                ensure!(
                    depth < MAX_ARRAY_DEPTH,
                    "arrays are nested more than {MAX_ARRAY_DEPTH} deep"
                );
                let element_kind = self.u32()?;
                let least_bytes = match element_kind {
                    0 | 1 | 7 => 1,
                    2 | 3 => 2,
                    4..=6 => 4,
                    9 => 12,
                    _ => 8,
                };
                let count = self.count("array length", least_bytes)?;
                // The vector grows as elements are really read, so its size follows the file and not the claimed count.
                let mut values = Vec::new();
                for _ in 0..count {
                    values.push(self.value_of(element_kind, depth + 1)?);
                }
                Value::Array(values)
            }
            10 => Value::U64(u64::from_le_bytes(self.array()?)),
            11 => Value::I64(i64::from_le_bytes(self.array()?)),
            12 => Value::F64(f64::from_le_bytes(self.array()?)),
            other => bail!("unknown metadata value type {other}"),
        })
    }

    /// One entry of the tensor directory; its offset is still relative to the data section.
    fn tensor_info(&mut self) -> anyhow::Result<TensorInfo> {
        let dimensions = self.u32()?;
        ensure!(
            (1..=MAX_DIMENSIONS).contains(&dimensions),
            "{dimensions} dimensions, allowed are 1 to {MAX_DIMENSIONS}"
        );
        let mut shape = Vec::new();
        for _ in 0..dimensions {
            let size = self.u64()?;
            ensure!(size > 0, "a dimension is 0");
            shape.push(usize::try_from(size)?);
        }
        let row = shape[0];
        shape.reverse();

        let kind = TensorType::from_id(self.u32()?)?;
        let offset = self.u64()?;
        let elements = shape
            .iter()
            .try_fold(1usize, |product, &size| product.checked_mul(size));
        let bytes = elements.and_then(|elements| {
            (elements / kind.block_elements()).checked_mul(kind.block_bytes())
        });
        let (Some(elements), Some(bytes)) = (elements, bytes) else {
            bail!("shape {shape:?} is too large");
        };
        ensure!(
            row.is_multiple_of(kind.block_elements())
                && elements.checked_mul(size_of::<f32>()).is_some(),
            "shape {shape:?} doesn't fit type {kind:?}, which has blocks of {}",
            kind.block_elements()
        );
        Ok(TensorInfo {
            shape,
            kind,
            offset,
            bytes,
        })
    }
}
