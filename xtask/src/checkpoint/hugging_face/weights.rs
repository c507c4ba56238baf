//! Tensors of one or several safetensors files.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::Metadata;

use super::fields::Fields;
use crate::checkpoint::{DecoderConfig, Weights, inventory};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// The limit that the format sets itself.
const HEADER_LIMIT_BYTES: u64 = 100_000_000;

/// Where a tensor is.
struct Tensor {
    file: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    /// From the start of the file.
    offset: u64,
    bytes: usize,
}

/// The tensors of a checkpoint directory.
pub struct SafetensorsWeights {
    files: Vec<(PathBuf, File)>,
    tensors: BTreeMap<String, Tensor>,
}

impl SafetensorsWeights {
    /// Opens the weight files of a decoder and holds their tensors against its configuration.
    pub fn open(directory: &Path, config: &DecoderConfig) -> anyhow::Result<SafetensorsWeights> {
        let mut weights = SafetensorsWeights::open_files(directory)?;
        // Old Llama checkpoints store a table that follows from the configuration.
        weights
            .tensors
            .retain(|name, _| !name.ends_with(".rotary_emb.inv_freq"));
        if config.tied_embeddings {
            weights.drop_head_copy()?;
        }
        inventory::check(&inventory::expected(config), &weights.shapes())?;
        Ok(weights)
    }

    /// Opens the weight files, whatever tensors they hold.
    pub fn open_files(directory: &Path) -> anyhow::Result<SafetensorsWeights> {
        let index = if directory.join(SINGLE).exists() {
            None
        } else {
            Some(weight_map(directory)?)
        };
        let names: BTreeSet<String> = match &index {
            None => BTreeSet::from([SINGLE.to_string()]),
            Some(map) => map.values().cloned().collect(),
        };
        let names: Vec<String> = names.into_iter().collect();
        let mut weights = SafetensorsWeights {
            files: Vec::new(),
            tensors: BTreeMap::new(),
        };
        for name in &names {
            weights
                .add_file(directory.join(name))
                .with_context(|| name.clone())?;
        }
        for (tensor, file) in index.iter().flatten() {
            let found = weights
                .tensors
                .get(tensor)
                .map(|tensor| &names[tensor.file]);
            ensure!(
                found == Some(file),
                "{INDEX} says that {file} has {tensor}, but it doesn't"
            );
        }
        Ok(weights)
    }

    /// Names and shapes of the tensors.
    pub fn shapes(&self) -> BTreeMap<String, Vec<usize>> {
        let tensors = self.tensors.iter();
        tensors
            .map(|(name, tensor)| (name.clone(), tensor.shape.clone()))
            .collect()
    }

    /// The weight files, sorted by name.
    pub fn paths(&self) -> Vec<&Path> {
        self.files.iter().map(|(path, _)| path.as_path()).collect()
    }

    fn add_file(&mut self, path: PathBuf) -> anyhow::Result<()> {
        let file = File::open(&path)?;
        let file_bytes = file.metadata()?.len();
        let mut length = [0; 8];
        file.read_exact_at(&mut length, 0)
            .context("the file has no header")?;
        let header_bytes = u64::from_le_bytes(length);
        ensure!(
            header_bytes <= HEADER_LIMIT_BYTES && header_bytes + 8 <= file_bytes,
            "the header claims {header_bytes} bytes in a file of {file_bytes} bytes"
        );
        let mut header = vec![0; header_bytes as usize];
        file.read_exact_at(&mut header, 8)?;
        let metadata: Metadata =
            serde_json::from_slice(&header).context("the header is damaged")?;
        let data_start = 8 + header_bytes;
        let (described, present) = (metadata.data_len() as u64, file_bytes - data_start);
        ensure!(
            described == present,
            "the header describes {described} bytes of tensors, but the file has {present}: truncated?"
        );
        for (name, info) in metadata.tensors() {
            ensure!(
                matches!(info.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16),
                "tensor {name} has type {:?}, only F32, F16 and BF16 are supported",
                info.dtype
            );
            let (start, end) = info.data_offsets;
            let tensor = Tensor {
                file: self.files.len(),
                dtype: info.dtype,
                shape: info.shape.clone(),
                offset: data_start + start as u64,
                bytes: end - start,
            };
            if let Some(first) = self.tensors.insert(name.clone(), tensor) {
                bail!(
                    "tensor {name} is in {} too",
                    self.files[first.file].0.display()
                );
            }
        }
        self.files.push((path, file));
        Ok(())
    }

    /// A tied checkpoint may store the head a second time, as long as it is the embedding.
    fn drop_head_copy(&mut self) -> anyhow::Result<()> {
        if !self.tensors.contains_key(inventory::HEAD)
            || !self.tensors.contains_key(inventory::EMBEDDING)
        {
            return Ok(());
        }
        let same = self.read(inventory::HEAD)? == self.read(inventory::EMBEDDING)?;
        ensure!(
            same,
            "config.json has tie_word_embeddings true, but {} differs from {}",
            inventory::HEAD,
            inventory::EMBEDDING
        );
        self.tensors.remove(inventory::HEAD);
        Ok(())
    }

    fn read(&self, name: &str) -> anyhow::Result<Vec<u8>> {
        let tensor = self
            .tensors
            .get(name)
            .with_context(|| format!("tensor {name} is not part of this checkpoint"))?;
        let (path, file) = &self.files[tensor.file];
        let mut bytes = vec![0; tensor.bytes];
        file.read_exact_at(&mut bytes, tensor.offset)
            .with_context(|| {
                format!(
                    "{}: tensor {name}: {} bytes at offset {}",
                    path.display(),
                    tensor.bytes,
                    tensor.offset
                )
            })?;
        Ok(bytes)
    }
}

impl Weights for SafetensorsWeights {
    fn names(&self) -> Vec<String> {
        self.tensors.keys().cloned().collect()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.tensors.get(name).map(|tensor| tensor.shape.clone())
    }

    fn load(&self, name: &str) -> anyhow::Result<Vec<f32>> {
        let bytes = self.read(name)?;
        let pairs = || bytes.chunks_exact(2).map(|value| [value[0], value[1]]);
        Ok(match self.tensors[name].dtype {
            Dtype::F16 => pairs()
                .map(|value| f16::from_le_bytes(value).to_f32())
                .collect(),
            Dtype::BF16 => pairs()
                .map(|value| bf16::from_le_bytes(value).to_f32())
                .collect(),
            _ => bytes
                .chunks_exact(4)
                .map(|value| f32::from_le_bytes([value[0], value[1], value[2], value[3]]))
                .collect(),
        })
    }
}

/// Which file has which tensor.
fn weight_map(directory: &Path) -> anyhow::Result<BTreeMap<String, String>> {
    let mut index = Fields::read_optional(directory, INDEX)?.with_context(|| {
        format!(
            "the directory has neither {SINGLE} nor {INDEX}: other weight files are not supported"
        )
    })?;
    let map = index
        .take("weight_map")
        .with_context(|| format!("{INDEX} has no weight_map"))?;
    let map: BTreeMap<String, String> =
        serde_json::from_value(map).with_context(|| format!("weight_map of {INDEX}"))?;
    ensure!(!map.is_empty(), "weight_map of {INDEX} is empty");
    for file in map.values() {
        let is_plain = Path::new(file)
            .file_name()
            .is_some_and(|name| name == file.as_str());
        ensure!(
            is_plain,
            "{INDEX} has file name {file:?}, which leaves the directory"
        );
    }
    Ok(map)
}
