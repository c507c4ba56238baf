//! Checkpoint directories as Hugging Face publishes them.
//!
//! Reads `config.json`, `model.safetensors` or the files of `model.safetensors.index.json`, `tokenizer.json`, and, where they are there,
//! `tokenizer_config.json`, `special_tokens_map.json`, `chat_template.jinja`, `generation_config.json` and the licence in `README.md`.
//! Meanings and defaults are those of transformers 5; where versions of transformers disagree, the reader refuses instead of choosing.
//! Dense decoders of the families Llama, Mistral, Qwen2 and Qwen3, weights in fp32, fp16 or bf16.

pub(super) mod config;
pub(super) mod fields;
mod generation;
pub(super) mod rope;
mod text;
pub(super) mod weights;

use std::fs;
use std::path::Path;

use anyhow::Context;
use rayon::prelude::*;

use super::{Checkpoint, source};
use fields::Fields;
use weights::SafetensorsWeights;

/// Reads a checkpoint directory. `allowed` are keys of `config.json` that the reader doesn't know and the caller vouches for.
pub fn read(directory: &Path, allowed: &[String]) -> anyhow::Result<Checkpoint> {
    let mut fields = Fields::read(directory, "config.json")?;
    let config_eos = fields.take("eos_token_id");
    let config = config::read(fields, allowed)?;
    config.check()?;

    let weights = SafetensorsWeights::open(directory, &config)?;
    let licence = licence(directory)?;
    let paths = weights.paths();
    let sources = paths
        .par_iter()
        .map(|path| source::describe(path, licence.clone()))
        .collect::<anyhow::Result<_>>()?;
    Ok(Checkpoint {
        name: name(directory)?,
        text: text::read(directory, config.vocab_size)?,
        generation: generation::read(directory, config_eos, config.vocab_size)?,
        weights: Box::new(weights),
        config,
        sources,
    })
}

fn name(directory: &Path) -> anyhow::Result<String> {
    let absolute = directory.canonicalize()?;
    let name = absolute
        .file_name()
        .context("the root directory can't be a checkpoint")?;
    Ok(name.to_string_lossy().into_owned())
}

/// The `license` entry of the model card, which is YAML between two lines of dashes at the start of `README.md`.
pub(super) fn licence(directory: &Path) -> anyhow::Result<Option<String>> {
    let path = directory.join("README.md");
    if !path.is_file() {
        return Ok(None);
    }
    let card = fs::read(&path).context("README.md")?;
    let card = String::from_utf8_lossy(&card);
    let mut lines = card.lines();
    if lines.next() != Some("---") {
        return Ok(None);
    }
    let tag = lines
        .take_while(|line| *line != "---")
        .find_map(|line| line.strip_prefix("license:"));
    Ok(tag.and_then(|tag| source::spdx(tag.trim().trim_matches(['"', '\'']))))
}

#[cfg(test)]
mod tests;
