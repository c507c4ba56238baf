//! Whether the bundle is whole, fits together, and how lossless it can be.

use outrider_bundle::Manifest;
use outrider_bundle::manifest::{Attention, DraftFacts};
use outrider_server::{loader, model};

use super::{Finding, Outcome, bytes_text};
use crate::facts::Facts;
use crate::facts::bundle::{BundleFacts, Depth};
use crate::facts::config::{ExecutionProvider, Settings};

/// Widest block of which the server's probe compares every width at load.
const PROBED_BLOCK_TOKENS: usize = 16;

/// Every check of this part.
pub fn checks(facts: &Facts) -> Vec<Finding> {
    let Some(settings) = &facts.config.settings else {
        return vec![super::needs_settings(
            "bundle.manifest",
            "which bundle is meant",
        )];
    };
    let bundle = &facts.bundle;
    let manifest = match &bundle.manifest {
        crate::facts::Reading::Known(manifest) => manifest,
        crate::facts::Reading::Unknown(reason) => {
            return vec![Finding::fail(
                "bundle.manifest",
                format!("{}: {reason}", settings.bundle),
                "name the directory of a bundle with serving.bundle; `cargo xtask export` makes one",
            )];
        }
    };
    let mut findings = vec![
        manifest_read(manifest, bundle),
        files(manifest, bundle, &settings.bundle),
        draft(manifest, bundle, settings),
        provider(manifest, facts.config.execution_provider),
        lossless(bundle, settings),
    ];
    if let Some(draft) = &manifest.draft {
        findings.push(pairing(manifest, draft));
        findings.push(block(draft, settings));
    }
    findings.push(context(manifest, settings));
    findings.push(licences(manifest));
    findings
}

fn manifest_read(manifest: &Manifest, bundle: &BundleFacts) -> Finding {
    let digest = bundle.digest.known().map_or("unknown", String::as_str);
    Finding::pass(
        "bundle.manifest",
        format!("{}, sha256 {digest}", manifest.name),
    )
}

fn files(manifest: &Manifest, bundle: &BundleFacts, dir: &str) -> Finding {
    let id = "bundle.files";
    if !bundle.target_faults.is_empty() {
        return Finding::fail(
            id,
            bundle.target_faults.join("\n"),
            format!(
                "copy the bundle to {dir} once more, or make it again with `cargo xtask export`"
            ),
        );
    }
    let sizes = manifest.files.values().map(|file| file.size_bytes);
    let total_bytes = sizes.fold(0, u64::saturating_add);
    let how = match bundle.depth {
        Depth::Sizes => "of the size that the manifest says; digests were not taken (--quick)",
        Depth::Digests => "with the digests of the manifest",
    };
    Finding::pass(
        id,
        format!(
            "{} files of {}, {how}; graphs have the inputs and outputs of their contracts",
            manifest.files.len(),
            bytes_text(total_bytes)
        ),
    )
}

fn draft(manifest: &Manifest, bundle: &BundleFacts, settings: &Settings) -> Finding {
    let id = "bundle.draft";
    let speculative = &settings.speculative;
    let complain = |evidence: String, remedy: &str| {
        if speculative.required {
            let evidence = format!(
                "{evidence}; serving.speculative.required is true, so the server refuses to start"
            );
            Finding::fail(id, evidence, remedy)
        } else {
            let evidence = format!("{evidence}; the server answers, but drafts nothing");
            Finding::warn(id, evidence, remedy)
        }
    };
    match (&manifest.draft, bundle.draft_faults.as_slice()) {
        // A target alone is an ordinary deployment, although drafting is on unless it is switched off.
        (None, _) if !speculative.required => {
            Finding::skip(id, "the bundle has no draft, and none is required")
        }
        (None, _) => complain(
            "the bundle has no draft".to_owned(),
            "export the bundle with --draft, or set serving.speculative.required to false",
        ),
        (Some(_), []) => Finding::pass(id, "the draft's files are those of the manifest"),
        (Some(_), faults) => complain(
            faults.join("\n"),
            "copy the bundle once more, or make it again with `cargo xtask export --draft`",
        ),
    }
}

/// The server's own operators compute on the CPU, and a CUDA session that can't run wholly on its device is refused.
fn provider(manifest: &Manifest, provider: ExecutionProvider) -> Finding {
    let id = "bundle.provider";
    let draft_form = manifest.draft.as_ref().map(|draft| draft.form);
    let is_native =
        [Some(manifest.target.attention), draft_form].contains(&Some(Attention::Native));
    match provider {
        ExecutionProvider::Cpu => Finding::pass(id, "graphs of either form run on the CPU"),
        ExecutionProvider::Cuda if is_native => Finding::fail(
            id,
            "a graph has native attention, whose operators run on the CPU only, and serving.runtime.execution_provider is cuda",
            "export the bundle with --attention portable, or set serving.runtime.execution_provider to cpu",
        ),
        ExecutionProvider::Cuda => Finding::pass(id, "graphs are of standard operators"),
    }
}

fn lossless(bundle: &BundleFacts, settings: &Settings) -> Finding {
    let id = "bundle.lossless";
    let graph = match &bundle.target {
        crate::facts::Reading::Known(graph) => graph,
        crate::facts::Reading::Unknown(reason) => {
            return Finding::unknown(
                id,
                format!("the target graph could not be read: {reason}"),
                "make the bundle again with `cargo xtask export`",
            );
        }
    };
    if graph.row_mixing_nodes.is_empty() {
        let one_row_kernels = [
            "ai.onnx.MatMul",
            "ai.onnx.MatMulInteger",
            "com.microsoft.MatMulNBits",
        ];
        let products: u64 = one_row_kernels
            .iter()
            .filter_map(|op| graph.ops.get(*op))
            .sum();
        return Finding::pass(
            id,
            format!(
                "class exact is to be expected: no node computes one scale for several rows; {products} products may have kernels of their own for one row, which the server avoids with passes of two rows; the probe at load decides"
            ),
        );
    }
    let evidence = format!(
        "class none is to be expected: a row's result depends on the rows beside it in {}",
        graph.row_mixing_nodes.join(", ")
    );
    let remedy =
        "export the target again: `cargo xtask export` quantises activations for each row alone";
    if settings.speculative.required {
        Finding::fail(
            id,
            format!(
                "{evidence}; serving.speculative.acceptance_strategy strict needs exact and serving.speculative.required is true, so the server refuses to start"
            ),
            remedy,
        )
    } else {
        Finding::warn(
            id,
            format!(
                "{evidence}; answers depend on what else is running, and serving.speculative.acceptance_strategy strict leaves drafting off"
            ),
            remedy,
        )
    }
}

fn pairing(manifest: &Manifest, draft: &DraftFacts) -> Finding {
    let id = "bundle.pairing";
    let target = &manifest.target;
    let mut faults = Vec::new();
    if draft.target_layer_ids != target.taps {
        faults.push(format!(
            "the draft reads the layers {:?}, and the target gives those of {:?}",
            draft.target_layer_ids, target.taps
        ));
    }
    if draft.vocabulary_columns > target.vocab_size {
        faults.push(format!(
            "the draft proposes from {} tokens, and the target has {}",
            draft.vocabulary_columns, target.vocab_size
        ));
    }
    if draft.mask_token_id as usize >= target.vocab_size {
        faults.push(format!(
            "the draft's mask is token {}, and the target has {}",
            draft.mask_token_id, target.vocab_size
        ));
    }
    if !faults.is_empty() {
        return Finding::fail(
            id,
            faults.join("\n"),
            "export target and draft together, from a drafter that was trained for this target",
        );
    }
    let mut evidence = format!(
        "the draft reads the target's layers {:?} and proposes from {} of its {} tokens",
        target.taps, draft.vocabulary_columns, target.vocab_size
    );
    if draft.context_tokens < target.context_tokens {
        evidence.push_str(&format!(
            "; behind {} tokens of {} nothing is drafted",
            draft.context_tokens, target.context_tokens
        ));
    }
    Finding::pass(id, evidence)
}

fn block(draft: &DraftFacts, settings: &Settings) -> Finding {
    let id = "bundle.block";
    let speculative = &settings.speculative;
    let too_large = loader::check_settings(
        speculative.draft_block_size,
        speculative.candidate_topk,
        draft,
    );
    if let Err(too_large) = too_large {
        return Finding::fail(
            id,
            too_large.join("\n"),
            "lower the keys to what the draft allows, or leave them out",
        );
    }
    let block_size = speculative.draft_block_size.unwrap_or(draft.block_size);
    if block_size > PROBED_BLOCK_TOKENS {
        return Finding::warn(
            id,
            format!(
                "blocks have {block_size} tokens, and the server's probe compares every width up to {PROBED_BLOCK_TOKENS} only"
            ),
            format!("set serving.speculative.draft_block_size to {PROBED_BLOCK_TOKENS} or less"),
        );
    }
    Finding::pass(
        id,
        format!(
            "blocks of {block_size} of the draft's {} tokens, with {} of its {} candidates",
            draft.block_size,
            speculative.candidate_topk.unwrap_or(draft.top_k),
            draft.top_k
        ),
    )
}

fn context(manifest: &Manifest, settings: &Settings) -> Finding {
    let id = "bundle.context";
    let own = manifest.target.context_tokens;
    if let Err(fault) = model::check_context(settings.context_tokens, own) {
        let remedy = "lower serving.runtime.context_tokens, or leave it out";
        return Finding::fail(id, fault, remedy);
    }
    match settings.context_tokens {
        Some(tokens) => Finding::pass(id, format!("{tokens} of the model's {own} tokens")),
        None => Finding::pass(id, format!("all of the model's {own} tokens")),
    }
}

fn licences(manifest: &Manifest) -> Finding {
    let id = "bundle.licences";
    let unknown: Vec<&str> = manifest
        .sources
        .iter()
        .filter(|source| source.licence.is_none())
        .map(|source| source.name.as_str())
        .collect();
    if manifest.sources.is_empty() || !unknown.is_empty() {
        let evidence = if manifest.sources.is_empty() {
            "the manifest names no sources, so nobody can tell their licences".to_owned()
        } else {
            format!("no licence is known of {}", unknown.join(", "))
        };
        return Finding::warn(
            id,
            evidence,
            "ask who made the bundle, and export it with the licences of its sources",
        );
    }
    let known = manifest.sources.iter().map(|source| {
        let licence = source.licence.as_deref().unwrap_or_default();
        format!("{}: {licence}", source.name)
    });
    Finding::pass(id, known.collect::<Vec<_>>().join(", "))
}

/// Whether the server will draft, as far as the bundle shows it.
pub(super) fn will_draft(facts: &Facts) -> bool {
    // The draft is loaded whether drafting is on or not, so that it can be switched on.
    let bundle = &facts.bundle;
    let Some(settings) = &facts.config.settings else {
        return false;
    };
    let has_draft = bundle
        .manifest
        .known()
        .is_some_and(|manifest| manifest.draft.is_some());
    has_draft
        && bundle.draft_faults.is_empty()
        && lossless(bundle, settings).outcome == Outcome::Pass
}
