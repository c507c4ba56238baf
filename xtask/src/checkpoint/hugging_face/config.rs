//! `config.json` to [`DecoderConfig`].
//!
//! Every key is either read, known to be harmless, or an error that names it: a setting that changes the arithmetic must not pass unseen.

use std::collections::BTreeMap;

use anyhow::{Context, bail, ensure};
use serde_json::Value;

use super::fields::{Fields, describe};
use super::rope;
use crate::checkpoint::DecoderConfig;

/// Keys that change nothing in the forward pass: training, bookkeeping, and generation settings that transformers itself ignores here.
pub const HARMLESS: &[&str] = &[
    "_attn_implementation_autoset",
    "_commit_hash",
    "_name_or_path",
    "attention_dropout",
    "bos_token_id",
    "chunk_size_feed_forward",
    "do_sample",
    "dtype",
    "early_stopping",
    "finetuning_task",
    "id2label",
    "initializer_range",
    "is_llama_config",
    "label2id",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "min_length",
    "num_beams",
    "num_labels",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "repetition_penalty",
    "return_dict",
    "task_specific_params",
    "temperature",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
];

/// Keys that change nothing as long as they are false.
const MUST_BE_FALSE: &[&str] = &[
    "is_decoder",
    "is_encoder_decoder",
    "add_cross_attention",
    "rope_interleaved",
    "use_mrope",
];

#[derive(Clone, Copy, PartialEq)]
enum Family {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
}

impl Family {
    fn name(self) -> &'static str {
        match self {
            Family::Llama => "llama",
            Family::Mistral => "mistral",
            Family::Qwen2 => "qwen2",
            Family::Qwen3 => "qwen3",
        }
    }

    fn read(fields: &mut Fields) -> anyhow::Result<Family> {
        let architectures = fields
            .texts("architectures")?
            .context("config.json: architectures is missing")?;
        let family = match architectures.iter().map(String::as_str).collect::<Vec<_>>()[..] {
            ["LlamaForCausalLM"] => Family::Llama,
            ["MistralForCausalLM"] => Family::Mistral,
            ["Qwen2ForCausalLM"] => Family::Qwen2,
            ["Qwen3ForCausalLM"] => Family::Qwen3,
            _ => bail!(
                "config.json: architectures {architectures:?} is not supported, only one of LlamaForCausalLM, MistralForCausalLM, \
                 Qwen2ForCausalLM and Qwen3ForCausalLM"
            ),
        };
        if let Some(model_type) = fields.text("model_type")? {
            ensure!(
                model_type == family.name(),
                "config.json: model_type {model_type} doesn't fit architectures {architectures:?}"
            );
        }
        Ok(family)
    }
}

/// Reads `config.json`.
pub fn read(mut fields: Fields, allowed: &[String]) -> anyhow::Result<DecoderConfig> {
    let family = Family::read(&mut fields)?;
    if let Some(quantisation) = fields.take("quantization_config") {
        let method = quantisation.get("quant_method").unwrap_or(&quantisation);
        bail!(
            "config.json: quantization_config ({method}) is not supported, start from the checkpoint in bf16, fp16 or fp32"
        );
    }
    if fields.take("auto_map").is_some() {
        bail!(
            "config.json: auto_map is not supported: the checkpoint brings its own modelling code"
        );
    }
    let activation = fields
        .text("hidden_act")?
        .unwrap_or_else(|| "silu".to_string());
    ensure!(
        activation == "silu",
        "config.json: hidden_act {activation} is not supported, only silu"
    );
    for key in MUST_BE_FALSE {
        ensure!(
            fields.flag(key)? != Some(true),
            "config.json: {key} true is not supported"
        );
    }

    let hidden_size = fields.required_size("hidden_size")?;
    let heads = fields.required_size("num_attention_heads")?;
    let kv_heads = kv_heads(&mut fields, family, heads)?;
    let head_dim = match fields.size("head_dim")? {
        Some(head_dim) => head_dim,
        None if family == Family::Qwen3 => 128,
        None => {
            ensure!(
                heads > 0 && hidden_size.is_multiple_of(heads),
                "config.json: hidden_size {hidden_size} is not a multiple of {heads} heads"
            );
            hidden_size / heads
        }
    };
    let layers = fields.required_size("num_hidden_layers")?;
    ensure!(
        (1..=DecoderConfig::MAX_LAYERS).contains(&layers),
        "config.json: num_hidden_layers is {layers}, allowed are 1 to {}",
        DecoderConfig::MAX_LAYERS
    );
    let context_tokens = fields.required_size("max_position_embeddings")?;
    let attention_bias = match family {
        Family::Llama | Family::Qwen3 => fields.flag("attention_bias")?.unwrap_or(false),
        Family::Mistral => must_be_false(&mut fields, "attention_bias", family)?,
        // The family has biases by definition; the key would mean something else.
        Family::Qwen2 => false,
    };
    let mlp_bias = match family {
        Family::Llama => fields.flag("mlp_bias")?.unwrap_or(false),
        Family::Mistral | Family::Qwen2 | Family::Qwen3 => {
            must_be_false(&mut fields, "mlp_bias", family)?
        }
    };

    let config = DecoderConfig {
        architecture: family.name().to_string(),
        vocab_size: fields.required_size("vocab_size")?,
        hidden_size,
        intermediate_size: fields.required_size("intermediate_size")?,
        layers,
        heads,
        kv_heads,
        head_dim,
        norm_epsilon: fields.required_number("rms_norm_eps")? as f32,
        context_tokens,
        rope: rope::read(&mut fields, context_tokens)?,
        windows: windows(&mut fields, family, layers)?,
        qk_norm: family == Family::Qwen3,
        qkv_bias: attention_bias || family == Family::Qwen2,
        o_bias: attention_bias,
        mlp_bias,
        tied_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(false),
    };
    refuse_unknown(fields.leftover(HARMLESS), allowed, "--allow-unknown-config")?;
    Ok(config)
}

/// Refuses what is left of `config.json`, except what the caller vouches for, which must be there.
pub fn refuse_unknown(
    mut left: BTreeMap<String, Value>,
    allowed: &[String],
    flag: &str,
) -> anyhow::Result<()> {
    for key in allowed {
        ensure!(
            left.remove(key).is_some(),
            "config.json has no unknown setting {key}, so it can't be allowed"
        );
    }
    ensure!(
        left.is_empty(),
        "config.json has settings that are not supported: {} (`{flag} KEY` lets one pass that changes nothing in the forward pass)",
        describe(&left)
    );
    Ok(())
}

fn must_be_false(fields: &mut Fields, key: &str, family: Family) -> anyhow::Result<bool> {
    ensure!(
        fields.flag(key)? != Some(true),
        "config.json: {key} true is not supported for {}",
        family.name()
    );
    Ok(false)
}

fn kv_heads(fields: &mut Fields, family: Family, heads: usize) -> anyhow::Result<usize> {
    let stated = fields.contains("num_key_value_heads");
    match fields.size("num_key_value_heads")? {
        Some(kv_heads) => Ok(kv_heads),
        // Null means one for each query head; so does no key at all in configurations of the first Llama models. The other families have
        // defaults that fit one model size only.
        None if stated || family == Family::Llama => Ok(heads),
        None => bail!("config.json: num_key_value_heads is missing"),
    }
}

/// The sliding window of each layer.
fn windows(
    fields: &mut Fields,
    family: Family,
    layers: usize,
) -> anyhow::Result<Vec<Option<usize>>> {
    // The default when the key is missing; null is no window.
    let default = (!fields.contains("sliding_window")).then_some(4096);
    match family {
        Family::Llama => Ok(vec![None; layers]),
        Family::Mistral => {
            let window = fields.size("sliding_window")?.or(default);
            Ok(vec![window; layers])
        }
        Family::Qwen2 | Family::Qwen3 => {
            let window = fields.size("sliding_window")?.or(default);
            let window = if fields.flag("use_sliding_window")?.unwrap_or(false) {
                window
            } else {
                None
            };
            let first = fields.size("max_window_layers")?.unwrap_or(28);
            let Some(layer_types) = fields.texts("layer_types")? else {
                return Ok((0..layers)
                    .map(|layer| window.filter(|_| layer >= first))
                    .collect());
            };
            ensure!(
                layer_types.len() == layers,
                "config.json: layer_types has {} entries for {layers} layers",
                layer_types.len()
            );
            let windows = layer_types.iter().map(|layer_type| match layer_type.as_str() {
                "full_attention" => Ok(None),
                "sliding_attention" if window.is_some() => Ok(window),
                "sliding_attention" => bail!("config.json: layer_types has sliding_attention, but there is no sliding_window in use"),
                other => bail!("config.json: layer type {other} is not supported, only full_attention and sliding_attention"),
            });
            windows.collect()
        }
    }
}
