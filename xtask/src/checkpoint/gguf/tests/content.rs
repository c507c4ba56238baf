//! A GGUF file as something to change and to write again.

use std::collections::BTreeMap;
use std::fs;

use super::{assert_refused, open_bytes};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::gguf::{DEFAULT_ALIGNMENT, MAGIC, TensorType, Value, parse};
use crate::checkpoint::testing::golden;

/// The golden file as it is.
pub fn golden_bytes() -> Vec<u8> {
    fs::read(golden("gguf/tiny-llama.gguf")).unwrap()
}

/// What a GGUF file says, to be changed and written again.
#[derive(Clone)]
pub struct Content {
    pub metadata: BTreeMap<String, Value>,
    /// Dimensions as the file has them (fastest first), type id, data.
    pub tensors: BTreeMap<String, (Vec<u64>, u32, Vec<u8>)>,
}

impl Content {
    pub fn golden() -> Content {
        let bytes = golden_bytes();
        let header = parse(bytes.as_slice(), bytes.len() as u64).unwrap();
        let tensors = header.tensors.into_iter().map(|(name, info)| {
            assert_eq!(info.kind, TensorType::F32);
            let data = bytes[info.offset as usize..][..info.bytes].to_vec();
            (
                name,
                (
                    info.shape.iter().rev().map(|&size| size as u64).collect(),
                    0,
                    data,
                ),
            )
        });
        Content {
            tensors: tensors.collect(),
            metadata: header.metadata.0,
        }
    }

    pub fn set(mut self, key: &str, value: Value) -> Content {
        self.metadata.insert(key.to_string(), value);
        self
    }

    pub fn without(mut self, key: &str) -> Content {
        self.metadata.remove(key).unwrap();
        self
    }

    pub fn tensor(mut self, name: &str, values: &[f32]) -> Content {
        let data = values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        self.tensors
            .insert(name.to_string(), (vec![values.len() as u64], 0, data));
        self
    }

    pub fn edit<T>(mut self, key: &str, edit: impl FnOnce(&mut Vec<Value>) -> T) -> Content {
        let Some(Value::Array(values)) = self.metadata.get_mut(key) else {
            panic!("{key} is not an array");
        };
        edit(values);
        self
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            write_string(&mut out, key);
            out.extend(kind(value).to_le_bytes());
            write_value(&mut out, value);
        }
        let mut offset = 0u64;
        for (name, (dimensions, kind, data)) in &self.tensors {
            write_string(&mut out, name);
            out.extend((dimensions.len() as u32).to_le_bytes());
            out.extend(dimensions.iter().flat_map(|size| size.to_le_bytes()));
            out.extend(kind.to_le_bytes());
            out.extend(offset.to_le_bytes());
            offset = (offset + data.len() as u64).next_multiple_of(DEFAULT_ALIGNMENT);
        }
        for (_, _, data) in self.tensors.values() {
            out.resize(out.len().next_multiple_of(DEFAULT_ALIGNMENT as usize), 0);
            out.extend(data);
        }
        out
    }

    pub fn open(&self) -> anyhow::Result<Checkpoint> {
        open_bytes(&self.bytes())
    }

    #[track_caller]
    pub fn assert_refused(&self, expected: &str) {
        assert_refused(&self.bytes(), expected);
    }
}

fn kind(value: &Value) -> u32 {
    match value {
        Value::U8(_) => 0,
        Value::I8(_) => 1,
        Value::U16(_) => 2,
        Value::I16(_) => 3,
        Value::U32(_) => 4,
        Value::I32(_) => 5,
        Value::F32(_) => 6,
        Value::Bool(_) => 7,
        Value::String(_) => 8,
        Value::Array(_) => 9,
        Value::U64(_) => 10,
        Value::I64(_) => 11,
        Value::F64(_) => 12,
    }
}

fn write_string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn write_value(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::U8(v) => out.push(*v),
        Value::I8(v) => out.extend(v.to_le_bytes()),
        Value::U16(v) => out.extend(v.to_le_bytes()),
        Value::I16(v) => out.extend(v.to_le_bytes()),
        Value::U32(v) => out.extend(v.to_le_bytes()),
        Value::I32(v) => out.extend(v.to_le_bytes()),
        Value::U64(v) => out.extend(v.to_le_bytes()),
        Value::I64(v) => out.extend(v.to_le_bytes()),
        Value::F32(v) => out.extend(v.to_le_bytes()),
        Value::F64(v) => out.extend(v.to_le_bytes()),
        Value::Bool(v) => out.push((*v).into()),
        Value::String(text) => write_string(out, text),
        Value::Array(values) => {
            out.extend(values.first().map_or(0, kind).to_le_bytes());
            out.extend((values.len() as u64).to_le_bytes());
            values.iter().for_each(|value| write_value(out, value));
        }
    }
}
