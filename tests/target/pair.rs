//! The trained tiny pair of the goldens, exported and loaded.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use outrider_bundle::VerifiedBundle;
use outrider_bundle::manifest::{Attention, Precision};
use outrider_server::model::{DraftOptions, OnnxDraft, OnnxTarget, TargetOptions};
use xtask::checkpoint;
use xtask::export::{self, write_pair};

use crate::options;

/// The bundle, made once for all tests of this process.
fn bundle() -> &'static Path {
    static BUNDLE: LazyLock<PathBuf> = LazyLock::new(|| {
        let bundle = Path::new(env!("CARGO_TARGET_TMPDIR")).join("tiny-pair");
        export_pair(&bundle);
        bundle
    });
    &BUNDLE
}

fn export_pair(bundle: &Path) {
    let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("goldens/dflash2-e2e-tiny");
    let target = checkpoint::open(&goldens.join("target")).expect("the target is readable");
    let draft = checkpoint::open_draft(&goldens.join("draft"), &[]).expect("the draft is readable");
    let target_options = export::Options {
        precision: Precision::Fp32,
        attention: Attention::Native,
        taps: draft.config.target_layer_ids.clone(),
    };
    let draft_options = export::DraftOptions {
        precision: Precision::Fp32,
        form: Attention::Native,
        vocabulary: None,
        stages: false,
    };
    write_pair(&target, &target_options, &draft, &draft_options, bundle)
        .expect("the pair can be exported");
}

/// Target and draft with this many slots.
pub fn tiny_pair(slots: usize) -> (OnnxTarget, OnnxDraft) {
    tiny_pair_parking(slots, 0)
}

/// The same with slots that only keep rows.
pub fn tiny_pair_parking(slots: usize, parking_slots: usize) -> (OnnxTarget, OnnxDraft) {
    let bundle = VerifiedBundle::open(bundle()).expect("the bundle verifies");
    let options = TargetOptions {
        slots,
        parking_slots,
        ..options()
    };
    let draft_options = DraftOptions {
        session: options.session.clone(),
        slots,
        parking_slots,
        context_tokens: bundle.manifest().target.context_tokens,
        candidate_topk: None,
        kv_limit_bytes: 1 << 30,
    };
    (
        OnnxTarget::load(&bundle, &options).expect("the target loads"),
        OnnxDraft::load(&bundle, &draft_options).expect("the draft loads"),
    )
}
