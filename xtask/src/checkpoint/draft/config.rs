//! `config.json` of a draft to [`DraftConfig`].
//!
//! A setting of the drafter is looked up in `dflash_config`, then at the top level, since checkpoints of both forms are published.
//! Every key is either read, known to be harmless, or an error that names it.

use std::collections::BTreeSet;

use anyhow::{Context, bail, ensure};

use super::{Dflash2, DraftAttention, DraftConfig};
use crate::checkpoint::hugging_face::fields::{Fields, as_size};
use crate::checkpoint::hugging_face::{config, rope};
use crate::checkpoint::{DecoderConfig, check_sizes};

/// Architecture of DFlash 1.
pub const DFLASH_1: &str = "DFlashDraftModel";
/// Architecture of DFlash 2.
pub const DFLASH_2: &str = "DFlash2DraftModel";

const NESTED: &str = "dflash_config";
const DEFAULT_BLOCK_SIZE: usize = 16;

/// Keys that change nothing in a draft, beside those that change nothing in any checkpoint.
const HARMLESS: &[&str] = &[
    // Names the code that published checkpoints bring along for transformers; `architectures` says which model it is.
    "auto_map",
    "eos_token_id",
    "max_window_layers",
    "model_type",
    "tie_word_embeddings",
    // Which layers slide is said by `layer_types`.
    "use_sliding_window",
];

/// Settings of single vendors, and what would have to be different with them.
const VENDOR: &[(&str, &str)] = &[
    ("attention_sink_bias", "attention sinks"),
    ("causal", "a second spelling of is_causal"),
    ("draft_vocab_size", "a head of the draft's own"),
    (
        "quantization_config",
        "weights that are not fp32, fp16 or bf16",
    ),
    ("sample_from_anchor", "a proposal from the anchor's row"),
    ("swa_window_size", "a second spelling of sliding_window"),
    ("use_swa", "a second spelling of layer_types"),
];

/// Keys by which the Speculators format is known.
const SPECULATORS: &[&str] = &[
    "speculators_model_type",
    "speculators_version",
    "speculators_config",
    "transformer_layer_config",
    "aux_hidden_state_layer_ids",
    "eagle_aux_hidden_state_layer_ids",
];

/// The settings of a draft, in the two places where they can be.
struct Settings {
    nested: Fields,
    top: Fields,
}

impl Settings {
    /// The first of the two places that has the key.
    fn first<T>(
        &mut self,
        key: &str,
        read: impl Fn(&mut Fields, &str) -> anyhow::Result<Option<T>>,
    ) -> anyhow::Result<Option<T>> {
        let nested = read(&mut self.nested, key)?;
        let top = read(&mut self.top, key)?;
        Ok(nested.or(top))
    }

    fn size(&mut self, key: &str) -> anyhow::Result<Option<usize>> {
        self.first(key, Fields::size)
    }

    fn required_size(&mut self, key: &str) -> anyhow::Result<usize> {
        self.size(key)?
            .with_context(|| format!("config.json: {key} is missing, in {NESTED} and beside it"))
    }

    fn factor(&mut self, key: &str) -> anyhow::Result<f32> {
        let factor = self.first(key, Fields::number)?.unwrap_or(1.0) as f32;
        ensure!(
            factor.is_finite() && factor > 0.0,
            "config.json: {key} is {factor}, allowed is above 0"
        );
        Ok(factor)
    }
}

/// Reads `config.json`.
pub fn read(mut top: Fields, allowed: &[String]) -> anyhow::Result<DraftConfig> {
    let nested = top.object(NESTED)?;
    let mut settings = Settings {
        nested: nested.unwrap_or_else(|| Fields::empty(NESTED)),
        top,
    };
    refuse_other_formats(&settings)?;
    let is_dflash2 = read_architecture(&mut settings.top)?;
    let top = &mut settings.top;
    let activation = top.text("hidden_act")?;
    let activation = activation.as_deref().unwrap_or("silu");
    ensure!(
        activation == "silu",
        "config.json: hidden_act {activation} is not supported, only silu"
    );
    ensure!(
        top.flag("is_neox_style")? != Some(false),
        "config.json: is_neox_style false is not supported: the two halves of a head are rotated with each other"
    );
    let layers = top.required_size("num_hidden_layers")?;
    ensure!(
        (1..=DecoderConfig::MAX_LAYERS).contains(&layers),
        "config.json: num_hidden_layers is {layers}, allowed are 1 to {}",
        DecoderConfig::MAX_LAYERS
    );
    let vocab_size = top.required_size("vocab_size")?;
    let hidden_size = top.required_size("hidden_size")?;
    if let Some(target_hidden_size) = top.size("target_hidden_size")? {
        ensure!(
            target_hidden_size == hidden_size,
            "config.json: target_hidden_size is {target_hidden_size}, but hidden_size is {hidden_size}: a draft is as wide as its target"
        );
    }
    let context_tokens = top.required_size("max_position_embeddings")?;
    let rope = rope::read_stated(top, context_tokens)?;
    let attention = attention(top, layers)?;
    let num_target_layers = settings.size("num_target_layers")?;
    let block_size = settings.size("block_size")?.unwrap_or(DEFAULT_BLOCK_SIZE);
    let mask_token_id = settings.required_size("mask_token_id")?;
    let target_layer_ids = target_layer_ids(&mut settings, layers, num_target_layers)?;
    let dflash2 = if is_dflash2 {
        Some(Dflash2 {
            conv_kernel_size: settings.required_size("conv_kernel_size")?,
            conv_group_size: settings.required_size("conv_group_size")?,
            selector_rank: settings.required_size("selector_rank")?,
            selector_top_k: settings.required_size("selector_top_k")?,
        })
    } else {
        None
    };
    let input_embedding_scale = settings.factor("input_embedding_scale")?;
    let output_multiplier = settings.factor("output_multiplier")?;
    // 0 switches it off.
    let logit_softcap = settings
        .first("final_logit_softcapping", Fields::number)?
        .map(|cap| cap as f32)
        .filter(|&cap| cap > 0.0);

    let Settings { nested, mut top } = settings;
    let config = DraftConfig {
        vocab_size,
        hidden_size,
        intermediate_size: top.required_size("intermediate_size")?,
        layers,
        heads: top.required_size("num_attention_heads")?,
        kv_heads: top.required_size("num_key_value_heads")?,
        head_dim: top.required_size("head_dim")?,
        norm_epsilon: top.required_number("rms_norm_eps")? as f32,
        context_tokens,
        rope,
        attention,
        attention_bias: top.flag("attention_bias")?.unwrap_or(false),
        block_size,
        mask_token_id: u32::try_from(mask_token_id).with_context(|| {
            format!(
                "config.json: mask_token_id {mask_token_id} is no token, vocab_size is {vocab_size}"
            )
        })?,
        target_layer_ids,
        num_target_layers,
        input_embedding_scale,
        output_multiplier,
        logit_softcap,
        dflash2,
    };
    check(&config)?;
    nested.finish()?;
    let harmless = [config::HARMLESS, HARMLESS].concat();
    config::refuse_unknown(
        top.leftover(&harmless),
        allowed,
        "--allow-unknown-draft-config",
    )?;
    Ok(config)
}

/// Refuses what can't be read as a published DFlash checkpoint, with the reason.
fn refuse_other_formats(settings: &Settings) -> anyhow::Result<()> {
    let places = [(&settings.top, ""), (&settings.nested, "dflash_config.")];
    for (fields, prefix) in places {
        for key in SPECULATORS {
            ensure!(
                !fields.contains(key),
                "config.json: {prefix}{key} is of another format: a checkpoint in the Speculators format counts target layers from 1 and has to be converted"
            );
        }
        for (key, meaning) in VENDOR {
            ensure!(
                !fields.contains(key) || fields.is_null(key),
                "config.json: {prefix}{key} is not supported: it asks for {meaning}"
            );
        }
    }
    Ok(())
}

/// Whether the architecture is DFlash 2.
fn read_architecture(top: &mut Fields) -> anyhow::Result<bool> {
    let architectures = top
        .texts("architectures")?
        .context("config.json: architectures is missing")?;
    match architectures.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [DFLASH_1] => Ok(false),
        [DFLASH_2] => Ok(true),
        _ => bail!(
            "config.json: architectures {architectures:?} is no draft, only {DFLASH_1} and {DFLASH_2} are"
        ),
    }
}

/// What each layer sees.
fn attention(top: &mut Fields, layers: usize) -> anyhow::Result<Vec<DraftAttention>> {
    let window = top.size("sliding_window")?;
    let is_causal = top.flag("is_causal")?;
    let layer_types = top
        .texts("layer_types")?
        .unwrap_or_else(|| vec!["full_attention".to_owned(); layers]);
    ensure!(
        layer_types.len() == layers,
        "config.json: layer_types has {} entries for {layers} layers",
        layer_types.len()
    );
    let layer = |layer_type: &String| match layer_type.as_str() {
        "full_attention" => Ok(DraftAttention {
            causal: is_causal.unwrap_or(false),
            window: None,
        }),
        "sliding_attention" => {
            let window = window.filter(|&window| window > 0).context(
                "config.json: layer_types has sliding_attention, but there is no sliding_window",
            )?;
            Ok(DraftAttention {
                // The default of a sliding layer, unlike that of a full one.
                causal: is_causal.unwrap_or(true),
                window: Some(window),
            })
        }
        other => bail!(
            "config.json: layer type {other} is not supported, only full_attention and sliding_attention"
        ),
    };
    layer_types.iter().map(layer).collect()
}

fn target_layer_ids(
    settings: &mut Settings,
    layers: usize,
    num_target_layers: Option<usize>,
) -> anyhow::Result<Vec<usize>> {
    let ids = |fields: &mut Fields, key: &str| -> anyhow::Result<Option<Vec<usize>>> {
        let Some(value) = fields.take(key) else {
            return Ok(None);
        };
        let ids = value
            .as_array()
            .and_then(|ids| ids.iter().map(as_size).collect());
        match ids {
            Some(ids) => Ok(Some(ids)),
            None => bail!(
                "{}: {key} is {value}, expected a list of layers",
                fields.place()
            ),
        }
    };
    if let Some(ids) = settings.first("target_layer_ids", ids)? {
        return Ok(ids);
    }
    let target_layers = num_target_layers
        .context("config.json has neither target_layer_ids nor num_target_layers")?;
    Ok(default_target_layer_ids(layers, target_layers))
}

/// The layers that are tapped when the file doesn't say which: evenly spread, rounded as Python rounds, halves to the even number.
pub fn default_target_layer_ids(layers: usize, target_layers: usize) -> Vec<usize> {
    if layers == 1 {
        return vec![target_layers / 2];
    }
    let (span, steps) = (target_layers as f64 - 4.0, (layers - 1) as f64);
    (0..layers)
        .map(|layer| (1.0 + layer as f64 * span / steps).round_ties_even() as usize)
        .collect()
}

/// Refuses sizes that no draft can have.
fn check(config: &DraftConfig) -> anyhow::Result<()> {
    check_sizes(&[
        ("vocab_size", config.vocab_size),
        ("hidden_size", config.hidden_size),
        ("intermediate_size", config.intermediate_size),
        ("num_attention_heads", config.heads),
        ("num_key_value_heads", config.kv_heads),
        ("head_dim", config.head_dim),
        ("max_position_embeddings", config.context_tokens),
    ])
    .context("config.json")?;
    let faults = [
        (
            config.heads.is_multiple_of(config.kv_heads),
            format!(
                "{} num_attention_heads can't share {} num_key_value_heads",
                config.heads, config.kv_heads
            ),
        ),
        (
            config.head_dim.is_multiple_of(2),
            format!(
                "head_dim {} is not even, so it can't be rotated",
                config.head_dim
            ),
        ),
        (
            config.norm_epsilon.is_finite() && config.norm_epsilon > 0.0,
            format!("rms_norm_eps {} is not positive", config.norm_epsilon),
        ),
        (
            config.rope.theta.is_finite() && config.rope.theta > 1.0,
            format!("rope_theta {} is not above 1", config.rope.theta),
        ),
        (
            (2..=config.context_tokens).contains(&config.block_size),
            format!(
                "block_size is {}, allowed are 2 to max_position_embeddings, {}",
                config.block_size, config.context_tokens
            ),
        ),
        (
            (config.mask_token_id as usize) < config.vocab_size,
            format!(
                "mask_token_id {} is no token, vocab_size is {}",
                config.mask_token_id, config.vocab_size
            ),
        ),
        (
            !config.target_layer_ids.is_empty()
                && BTreeSet::from_iter(&config.target_layer_ids).len()
                    == config.target_layer_ids.len(),
            format!(
                "target_layer_ids is {:?}, must name at least one layer and none twice",
                config.target_layer_ids
            ),
        ),
    ];
    for (holds, fault) in faults {
        ensure!(holds, "config.json: {fault}");
    }
    let Some(dflash2) = &config.dflash2 else {
        return Ok(());
    };
    let Dflash2 {
        conv_kernel_size,
        conv_group_size,
        selector_rank,
        selector_top_k,
    } = *dflash2;
    check_sizes(&[
        ("conv_group_size", conv_group_size),
        ("selector_rank", selector_rank),
    ])
    .context("config.json")?;
    ensure!(
        config.hidden_size.is_multiple_of(conv_group_size),
        "config.json: conv_group_size {conv_group_size} does not divide hidden_size {}",
        config.hidden_size
    );
    ensure!(
        (1..=config.block_size).contains(&conv_kernel_size),
        "config.json: conv_kernel_size is {conv_kernel_size}, allowed are 1 to block_size, {}",
        config.block_size
    );
    ensure!(
        (1..=config.vocab_size).contains(&selector_top_k),
        "config.json: selector_top_k is {selector_top_k}, allowed are 1 to vocab_size, {}",
        config.vocab_size
    );
    Ok(())
}
