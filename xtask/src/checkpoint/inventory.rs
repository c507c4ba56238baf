//! The tensors a decoder must have, no more and no less.

use std::collections::BTreeMap;

use anyhow::ensure;

use super::DecoderConfig;

/// Name of the embedding.
pub const EMBEDDING: &str = "model.embed_tokens.weight";
/// Name of the head, where it isn't the embedding.
pub const HEAD: &str = "lm_head.weight";

/// Names and shapes of all tensors of a decoder.
pub fn expected(config: &DecoderConfig) -> BTreeMap<String, Vec<usize>> {
    let hidden = config.hidden_size;
    let inner = config.intermediate_size;
    let query = config.heads * config.head_dim;
    let key_value = config.kv_heads * config.head_dim;

    let mut tensors = BTreeMap::from([
        (EMBEDDING.to_string(), vec![config.vocab_size, hidden]),
        ("model.norm.weight".to_string(), vec![hidden]),
    ]);
    if !config.tied_embeddings {
        tensors.insert(HEAD.to_string(), vec![config.vocab_size, hidden]);
    }
    for layer in 0..config.layers {
        let mut add = |name: &str, shape: &[usize]| {
            tensors.insert(format!("model.layers.{layer}.{name}"), shape.to_vec())
        };
        add("input_layernorm.weight", &[hidden]);
        add("post_attention_layernorm.weight", &[hidden]);
        for (projection, rows, columns, bias) in [
            ("self_attn.q_proj", query, hidden, config.qkv_bias),
            ("self_attn.k_proj", key_value, hidden, config.qkv_bias),
            ("self_attn.v_proj", key_value, hidden, config.qkv_bias),
            ("self_attn.o_proj", hidden, query, config.o_bias),
            ("mlp.gate_proj", inner, hidden, config.mlp_bias),
            ("mlp.up_proj", inner, hidden, config.mlp_bias),
            ("mlp.down_proj", hidden, inner, config.mlp_bias),
        ] {
            add(&format!("{projection}.weight"), &[rows, columns]);
            if bias {
                add(&format!("{projection}.bias"), &[rows]);
            }
        }
        if config.qk_norm {
            add("self_attn.q_norm.weight", &[config.head_dim]);
            add("self_attn.k_norm.weight", &[config.head_dim]);
        }
    }
    tensors
}

/// Compares what a file has with what it must have; the error lists every difference.
pub fn check(
    expected: &BTreeMap<String, Vec<usize>>,
    found: &BTreeMap<String, Vec<usize>>,
) -> anyhow::Result<()> {
    let missing = expected
        .keys()
        .filter(|name| !found.contains_key(*name))
        .map(|name| format!("missing {name}"));
    let unknown = found
        .keys()
        .filter(|name| !expected.contains_key(*name))
        .map(|name| format!("unknown {name}"));
    let misshapen = expected.iter().filter_map(|(name, shape)| {
        let found = found.get(name).filter(|found| *found != shape)?;
        Some(format!("{name} has shape {found:?} instead of {shape:?}"))
    });
    let faults: Vec<String> = missing.chain(unknown).chain(misshapen).collect();
    ensure!(
        faults.is_empty(),
        "the tensors don't fit the configuration: {}",
        faults.join(", ")
    );
    Ok(())
}
