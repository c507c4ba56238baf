//! `generation_config.json`: when an answer ends, and the sampling settings a model recommends.

use std::path::Path;

use anyhow::{Context, bail, ensure};
use outrider_bundle::manifest::GenerationDefaults;
use serde_json::Value;

use super::fields::{Fields, as_size};

const FILE: &str = "generation_config.json";

/// Reads the file where there is one. `config_eos` is what `config.json` says about the end of an answer, which counts where the file is silent.
pub fn read(
    directory: &Path,
    config_eos: Option<Value>,
    vocab_size: usize,
) -> anyhow::Result<GenerationDefaults> {
    let mut fields = Fields::read_optional(directory, FILE)?;
    let eos = fields
        .as_mut()
        .and_then(|fields| fields.take("eos_token_id"))
        .or(config_eos);
    let eos = eos.context("neither generation_config.json nor config.json has an eos_token_id")?;
    let mut defaults = GenerationDefaults {
        eos_token_ids: token_ids(&eos, vocab_size)?,
        ..GenerationDefaults::default()
    };

    let Some(mut fields) = fields else {
        return Ok(defaults);
    };
    defaults.repetition_penalty = fields
        .number("repetition_penalty")?
        .map(|penalty| penalty as f32)
        .filter(|&penalty| penalty != 1.0);
    if let Some(penalty) = defaults.repetition_penalty {
        ensure!(
            penalty > 0.0 && penalty <= 10.0,
            "{FILE}: repetition_penalty is {penalty}, allowed is above 0 up to 10"
        );
    }
    // Without sampling the other settings have no effect.
    if fields.flag("do_sample")? != Some(true) {
        return Ok(defaults);
    }
    defaults.temperature = fields
        .number("temperature")?
        .map(|temperature| temperature as f32);
    defaults.top_p = fields.number("top_p")?.map(|top_p| top_p as f32);
    // 0 switches the bound off.
    defaults.top_k = fields
        .size("top_k")?
        .filter(|&top_k| top_k > 0)
        .map(u32::try_from)
        .transpose()
        .context("generation_config.json: top_k")?;
    defaults.min_p = fields.number("min_p")?.map(|min_p| min_p as f32);
    if let Some(min_p) = defaults.min_p {
        ensure!(
            (0.0..=1.0).contains(&min_p),
            "{FILE}: min_p is {min_p}, allowed is 0 to 1"
        );
    }
    if let Some(temperature) = defaults.temperature {
        ensure!(
            temperature.is_finite() && temperature >= 0.0,
            "{FILE}: temperature is {temperature}, allowed is 0 and more"
        );
    }
    if let Some(top_p) = defaults.top_p {
        ensure!(
            top_p > 0.0 && top_p <= 1.0,
            "{FILE}: top_p is {top_p}, allowed is above 0 up to 1"
        );
    }
    Ok(defaults)
}

/// One id or a list of them.
fn token_ids(value: &Value, vocab_size: usize) -> anyhow::Result<Vec<u32>> {
    let values = match value {
        Value::Array(values) => values.as_slice(),
        single => std::slice::from_ref(single),
    };
    let mut ids = Vec::new();
    for value in values {
        let Some(id) = as_size(value).filter(|&id| id < vocab_size) else {
            bail!(
                "eos_token_id {value} is not a token id, allowed are 0 to {}",
                vocab_size - 1
            );
        };
        if !ids.contains(&(id as u32)) {
            ids.push(id as u32);
        }
    }
    ensure!(!ids.is_empty(), "eos_token_id is an empty list");
    Ok(ids)
}
