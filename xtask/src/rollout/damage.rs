//! Bundles that are whole by their manifests and wrong in their weights.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use anyhow::Context;
use outrider_bundle::Manifest;
use outrider_bundle::create::Builder;
use outrider_bundle::onnx::{DataType, ModelProto, TensorProto};
use prost::Message as _;

use crate::random::Random;

/// Copies a bundle to `to` with the weights of the first matrix of `graph` shuffled, and says its digest.
///
/// Only the order of 8-bit weights changes, so that every number stays as large as it was and only what is computed is wrong.
pub fn copy(from: &Path, to: &Path, graph: &str) -> anyhow::Result<String> {
    let manifest = load(from)?;
    fs::create_dir(to).with_context(|| format!("cannot make {}", to.display()))?;
    let data = format!("{graph}.data");
    for name in manifest.files.keys() {
        let (from, to) = (from.join(name), to.join(name));
        let done = if *name == data {
            fs::copy(&from, &to).map(|_| ())
        } else {
            fs::hard_link(&from, &to)
        };
        done.with_context(|| format!("cannot bring {} to {}", from.display(), to.display()))?;
    }
    let bytes = fs::read(from.join(graph))?;
    let model = ModelProto::decode(&*bytes).with_context(|| graph.to_owned())?;
    let initializers = model.graph.with_context(|| graph.to_owned())?.initializer;
    let tensor = initializers
        .iter()
        .find(|tensor| is_matrix_of_bytes(tensor));
    let tensor = tensor.with_context(|| {
        format!(
            "{graph} of {} has no 8-bit weights to damage",
            from.display()
        )
    })?;
    let (offset, length) = place(tensor)?;
    let mut bytes = vec![0; length];
    let file = to.join(&data);
    let file = OpenOptions::new().read(true).write(true).open(file)?;
    file.read_exact_at(&mut bytes, offset)?;
    let mut random = Random::new(1);
    // Fisher and Yates.
    for last in (1..length).rev() {
        bytes.swap(last, random.below(last + 1));
    }
    file.write_all_at(&bytes, offset)?;
    let damaged = Builder::from(manifest).write(to);
    let damaged = damaged.map_err(|error| anyhow::anyhow!("{error}"))?;
    Ok(damaged.digest())
}

/// The manifest of a bundle.
pub fn load(bundle: &Path) -> anyhow::Result<Manifest> {
    Manifest::load(bundle).map_err(|error| anyhow::anyhow!("{}", error.lines().join("; ")))
}

fn is_matrix_of_bytes(tensor: &TensorProto) -> bool {
    let bytes = [DataType::Int8 as i32, DataType::Uint8 as i32];
    bytes.contains(&tensor.data_type) && tensor.dims.len() >= 2 && !tensor.external_data.is_empty()
}

fn place(tensor: &TensorProto) -> anyhow::Result<(u64, usize)> {
    let entries = tensor.external_data.iter();
    let entries: BTreeMap<_, _> = entries
        .map(|entry| (entry.key.as_str(), entry.value.as_str()))
        .collect();
    let number = |key: &str| {
        let value = entries.get(key).and_then(|value| value.parse().ok());
        value.with_context(|| format!("{} has no {key}", tensor.name))
    };
    Ok((number("offset")?, number("length")? as usize))
}
