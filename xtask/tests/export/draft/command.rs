//! `cargo xtask export --draft` as people call it.

use std::fs;
use std::process::Command;

use outrider_bundle::VerifiedBundle;
use outrider_bundle::manifest::{Attention, Precision};
use tempfile::TempDir;

use super::support::draft_dir;

/// A directory with the target of the golden pair, which has no tokenizer of its own.
fn target() -> TempDir {
    let dir = TempDir::new().unwrap();
    for file in ["config.json", "model.safetensors"] {
        let golden = draft_dir("dflash2-e2e-tiny/target").join(file);
        fs::copy(golden, dir.path().join(file)).unwrap();
    }
    let tokenizer = r#"{"model": {"vocab": {}}}"#;
    fs::write(dir.path().join("tokenizer.json"), tokenizer).unwrap();
    dir
}

/// Runs `export` of the golden pair in a directory with further arguments; returns success and standard error.
fn export(dir: &TempDir, draft: &str, arguments: &[&str]) -> (bool, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .args(["export", "--model", ".", "--out", "bundle"])
        .args(["--precision", "int8", "--draft"])
        .arg(draft_dir(draft))
        .args(arguments)
        .current_dir(dir.path())
        .output()
        .unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    (output.status.success(), errors)
}

#[test]
fn one_command_writes_one_bundle_with_target_and_draft() {
    let dir = target();
    let draft = "dflash2-e2e-tiny/draft";
    let (ok, errors) = export(&dir, draft, &[]);
    assert!(ok, "{errors}");
    let bundle = VerifiedBundle::open(&dir.path().join("bundle")).unwrap();
    let facts = bundle.manifest().draft.clone().unwrap();
    assert_eq!(bundle.manifest().target.taps, [1, 3, 4]);
    assert_eq!(
        (facts.precision, facts.form, facts.vocabulary_columns),
        (Precision::Int8, Attention::Native, 64)
    );
    assert_eq!((facts.block_size, facts.top_k, facts.layers), (6, 6, 2));
    assert_eq!((facts.mask_token_id, facts.context_tokens), (62, 512));
    assert_eq!(bundle.manifest().sources.len(), 2);

    // In any order: the graph needs them rising.
    fs::write(dir.path().join("tokens.json"), "[9, 3, 60, 4, 8, 7, 5]").unwrap();
    let arguments = [
        "--draft-vocabulary",
        "tokens.json",
        "--draft-precision",
        "fp32",
    ];
    let (ok, errors) = export(&dir, draft, &arguments);
    assert!(ok, "{errors}");
    let bundle = VerifiedBundle::open(&dir.path().join("bundle")).unwrap();
    let facts = bundle.manifest().draft.clone().unwrap();
    assert_eq!(
        (facts.precision, facts.vocabulary_columns),
        (Precision::Fp32, 7)
    );
    assert_eq!(bundle.manifest().target.precision, Precision::Int8);
}

#[test]
fn a_draft_that_can_not_be_exported_is_named_and_leaves_nothing() {
    let dir = target();
    let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
    write("twice.json", "[1, 2, 3, 4, 5, 6, 2]");
    write("words.json", "[\"a\"]");
    let draft = "dflash2-e2e-tiny/draft";
    for (draft, arguments, expected) in [
        (
            draft,
            &["--taps", "1,2"][..],
            "the taps are [1, 2], the draft reads [1, 3, 4]",
        ),
        (
            draft,
            &["--draft-vocabulary", "twice.json"],
            "twice.json: token 2 comes twice",
        ),
        (
            draft,
            &["--draft-vocabulary", "words.json"],
            "words.json: the file is no JSON list of token ids",
        ),
        (
            draft,
            &["--draft-vocabulary", "none.json"],
            "draft vocabulary none.json",
        ),
        (
            "dflash2-tiny",
            &[],
            "hidden_size of the draft is 64, of the target 48",
        ),
        (
            "dflash2-e2e-tiny/target",
            &[],
            "is no draft, only DFlashDraftModel and DFlash2DraftModel are",
        ),
        ("dflash2-e2e-tiny", &[], "there is no config.json"),
        (
            draft,
            &["--allow-unknown-draft-config", "colour"],
            "no unknown setting colour",
        ),
    ] {
        let (ok, errors) = export(&dir, draft, arguments);
        assert!(!ok && errors.contains(expected), "{expected}: {errors}");
        assert!(!dir.path().join("bundle").exists());
    }
    let alone = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .args([
            "export",
            "--model",
            ".",
            "--out",
            "bundle",
            "--precision",
            "int8",
        ])
        .args(["--draft-precision", "fp32"])
        .current_dir(dir.path())
        .output()
        .unwrap();
    assert_eq!(
        alone.status.code(),
        Some(2),
        "a draft's precision without a draft is wrong usage"
    );
}
