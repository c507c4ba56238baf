//! Whether a draft and a target belong together, and which tokens a draft may be cut to.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use crate::checkpoint::{DecoderConfig, DraftConfig};

/// Fails unless the draft fits the target; names every two numbers that disagree.
pub fn check_pair(draft: &DraftConfig, target: &DecoderConfig) -> Result<()> {
    let mut faults = Vec::new();
    let mut must = |holds: bool, fault: String| {
        if !holds {
            faults.push(fault);
        }
    };
    must(
        draft.hidden_size == target.hidden_size,
        format!(
            "hidden_size of the draft is {}, of the target {}",
            draft.hidden_size, target.hidden_size
        ),
    );
    must(
        draft.vocab_size == target.vocab_size,
        format!(
            "vocab_size of the draft is {}, of the target {}",
            draft.vocab_size, target.vocab_size
        ),
    );
    if let Some(layers) = draft.num_target_layers {
        must(
            layers == target.layers,
            format!(
                "num_target_layers of the draft is {layers}, the target has {} layers",
                target.layers
            ),
        );
    }
    for layer in &draft.target_layer_ids {
        must(
            *layer < target.layers,
            format!(
                "target_layer_ids of the draft names layer {layer}, the target has layers 0 to {}",
                target.layers - 1
            ),
        );
    }
    must(
        (draft.mask_token_id as usize) < target.vocab_size,
        format!(
            "mask_token_id of the draft is {}, the target has {} tokens",
            draft.mask_token_id, target.vocab_size
        ),
    );
    must(
        draft.block_size <= target.context_tokens,
        format!(
            "block_size of the draft is {}, the context of the target {} tokens",
            draft.block_size, target.context_tokens
        ),
    );
    ensure!(
        faults.is_empty(),
        "draft and target do not belong together: {}",
        faults.join("; ")
    );
    Ok(())
}

/// Fails unless a head can be cut to these tokens.
pub fn check_vocabulary(tokens: Option<&[u32]>, vocab_size: usize, top_k: usize) -> Result<()> {
    let Some(tokens) = tokens else {
        return Ok(());
    };
    if let Some(token) = tokens.iter().find(|&&token| token as usize >= vocab_size) {
        bail!(
            "the draft vocabulary has token {token}, the target has tokens 0 to {}",
            vocab_size - 1
        );
    }
    if let Some(pair) = tokens.windows(2).find(|pair| pair[0] >= pair[1]) {
        bail!(
            "the draft vocabulary has token {} before {}, must rise",
            pair[0],
            pair[1]
        );
    }
    ensure!(
        tokens.len() >= top_k,
        "the draft vocabulary has {} tokens, the draft picks {top_k} candidates per slot",
        tokens.len()
    );
    Ok(())
}

/// Reads a list of token ids in any order, such as `[17, 4, 256]`; an id that comes twice is an error.
pub fn read_vocabulary(path: &Path) -> Result<Vec<u32>> {
    let read = || -> Result<Vec<u32>> {
        let mut tokens: Vec<u32> = serde_json::from_slice(&fs::read(path)?)
            .context("the file is no JSON list of token ids")?;
        tokens.sort_unstable();
        if let Some(pair) = tokens.windows(2).find(|pair| pair[0] == pair[1]) {
            bail!("token {} comes twice", pair[0]);
        }
        Ok(tokens)
    };
    read().with_context(|| format!("draft vocabulary {}", path.display()))
}
