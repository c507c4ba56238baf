//! Which values a manifest may hold, as far as that can be said without its files.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    ASIDE_NAME, DraftFacts, FILE_NAME, FieldFault, FileEntry, GenerationDefaults, KV_DTYPES,
    Manifest, TargetFacts,
};
use crate::digest::is_sha256;
use crate::paths::check_relative;

/// Every value that can't be.
pub(super) fn faults(manifest: &Manifest) -> Vec<FieldFault> {
    let mut check = Check {
        files: &manifest.files,
        faults: Vec::new(),
    };
    check.name("name", &manifest.name);
    for (path, entry) in &manifest.files {
        let field = format!("files.{path:?}");
        if let Err(error) = check_relative(path) {
            check.fault(&field, format!("the path {error}"));
        }
        if [FILE_NAME, ASIDE_NAME].contains(&path.as_str()) {
            check.fault(&field, "the manifest doesn't list itself".to_owned());
        }
        check.sha256(&format!("{field}.sha256"), &entry.sha256);
    }
    check.target(&manifest.target);
    if let Some(draft) = &manifest.draft {
        check.draft(draft, &manifest.target);
    }
    check.listed("text.tokenizer", &manifest.text.tokenizer);
    if let Some(template) = &manifest.text.chat_template {
        check.listed("text.chat_template", template);
    }
    check.generation(&manifest.generation, &manifest.target);
    for (index, source) in manifest.sources.iter().enumerate() {
        check.sha256(&format!("sources[{index}].sha256"), &source.sha256);
    }
    check.faults
}

/// Collects the faults of a manifest.
struct Check<'a> {
    files: &'a BTreeMap<String, FileEntry>,
    faults: Vec<FieldFault>,
}

impl Check<'_> {
    fn fault(&mut self, field: &str, problem: String) {
        self.faults.push(FieldFault {
            field: field.to_owned(),
            problem,
        });
    }

    fn name(&mut self, field: &str, name: &str) {
        if name.is_empty() || name.len() > 256 || name.chars().any(char::is_control) {
            self.fault(
                field,
                format!(
                    "{name:?} is no name, allowed are 1 to 256 bytes without control characters"
                ),
            );
        }
    }

    fn sha256(&mut self, field: &str, digest: &str) {
        if !is_sha256(digest) {
            self.fault(
                field,
                format!("{digest:?} is no SHA-256, must be 64 lower-case hexadecimal digits"),
            );
        }
    }

    fn listed(&mut self, field: &str, path: &str) {
        if !self.files.contains_key(path) {
            self.fault(field, format!("{path:?} is not among the files"));
        }
    }

    fn sizes(&mut self, fields: &[(&str, usize, usize)]) {
        for &(field, value, max) in fields {
            if value == 0 || value > max {
                self.fault(
                    field,
                    format!("{value} is out of range, allowed is 1 to {max}"),
                );
            }
        }
    }

    fn layer_ids(&mut self, field: &str, ids: &[usize], layers: usize) {
        if let Some(id) = ids.iter().find(|&&id| id >= layers) {
            self.fault(
                field,
                format!("there is no layer {id}, the target has {layers}"),
            );
        }
        let distinct: BTreeSet<_> = ids.iter().collect();
        if distinct.len() != ids.len() {
            self.fault(field, format!("{ids:?} names a layer twice"));
        }
    }

    fn kv_dtype(&mut self, field: &str, kv_dtype: &str) {
        if !KV_DTYPES.contains(&kv_dtype) {
            self.fault(
                field,
                format!(
                    "{kv_dtype:?} is unknown, allowed are {}",
                    KV_DTYPES.join(", ")
                ),
            );
        }
    }

    fn target(&mut self, target: &TargetFacts) {
        self.listed("target.graph", &target.graph);
        self.name("target.architecture", &target.architecture);
        self.sizes(&[
            ("target.layers", target.layers, MAX_LAYERS),
            ("target.hidden_size", target.hidden_size, MAX_SIZE),
            ("target.kv_heads", target.kv_heads, MAX_SIZE),
            ("target.head_dim", target.head_dim, MAX_SIZE),
            ("target.vocab_size", target.vocab_size, MAX_SIZE),
            ("target.context_tokens", target.context_tokens, MAX_SIZE),
        ]);
        self.kv_dtype("target.kv_dtype", &target.kv_dtype);
        self.layer_ids("target.taps", &target.taps, target.layers);
    }

    fn draft(&mut self, draft: &DraftFacts, target: &TargetFacts) {
        self.listed("draft.graph", &draft.graph);
        self.name("draft.architecture", &draft.architecture);
        self.sizes(&[
            ("draft.layers", draft.layers, MAX_LAYERS),
            ("draft.kv_heads", draft.kv_heads, MAX_SIZE),
            ("draft.head_dim", draft.head_dim, MAX_SIZE),
            (
                "draft.vocabulary_columns",
                draft.vocabulary_columns,
                target.vocab_size,
            ),
            ("draft.top_k", draft.top_k, draft.vocabulary_columns),
            (
                "draft.context_tokens",
                draft.context_tokens,
                target.context_tokens,
            ),
        ]);
        if !(2..=draft.context_tokens).contains(&draft.block_size) {
            let problem = format!(
                "{} is out of range, allowed is 2 to draft.context_tokens, {}",
                draft.block_size, draft.context_tokens
            );
            self.fault("draft.block_size", problem);
        }
        self.kv_dtype("draft.kv_dtype", &draft.kv_dtype);
        if draft.mask_token_id as usize >= target.vocab_size {
            let problem = format!(
                "{} is no token, the vocabulary has {}",
                draft.mask_token_id, target.vocab_size
            );
            self.fault("draft.mask_token_id", problem);
        }
        if draft.target_layer_ids != target.taps {
            let problem = format!(
                "{:?} must be the taps of the target, {:?}",
                draft.target_layer_ids, target.taps
            );
            self.fault("draft.target_layer_ids", problem);
        }
    }

    fn generation(&mut self, generation: &GenerationDefaults, target: &TargetFacts) {
        if let Some(id) = generation
            .eos_token_ids
            .iter()
            .find(|&&id| id as usize >= target.vocab_size)
        {
            self.fault(
                "generation.eos_token_ids",
                format!("{id} is no token, the vocabulary has {}", target.vocab_size),
            );
        }
        if let Some(temperature) = generation
            .temperature
            .filter(|value| !(0.0..=100.0).contains(value))
        {
            self.fault(
                "generation.temperature",
                format!("{temperature} is out of range, allowed is 0 to 100"),
            );
        }
        if let Some(top_p) = generation
            .top_p
            .filter(|value| !(*value > 0.0 && *value <= 1.0))
        {
            self.fault(
                "generation.top_p",
                format!("{top_p} is out of range, allowed is above 0 and up to 1"),
            );
        }
        if let Some(min_p) = generation
            .min_p
            .filter(|value| !(0.0..=1.0).contains(value))
        {
            self.fault(
                "generation.min_p",
                format!("{min_p} is out of range, allowed is 0 to 1"),
            );
        }
        if let Some(penalty) = generation
            .repetition_penalty
            .filter(|value| !(*value > 0.0 && *value <= 10.0))
        {
            self.fault(
                "generation.repetition_penalty",
                format!("{penalty} is out of range, allowed is above 0 and up to 10"),
            );
        }
    }
}

/// Upper bound of every size among the facts: products of two of them fit into 64 bits.
const MAX_SIZE: usize = 1 << 30;

/// Upper bound of the number of layers, so that work per layer is bounded too.
const MAX_LAYERS: usize = 4096;
