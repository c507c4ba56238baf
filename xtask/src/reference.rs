//! The reference pair: target and drafter, exported and kept under `.outrider/bundles`, one bundle for each numeric form.
//!
//! The target is fetched, the drafter is part of the repository; both have the digests of their locks before anything is made of them.
//! A bundle is made again when anything it was made from has changed: a locked checkpoint, the options, or the exporter's own source.
//! What it was made from is kept beside it as one digest, so that a second start neither hashes nor exports anything.

use std::env::consts::ARCH;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, bail};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use outrider_bundle::Manifest;
use outrider_bundle::digest::{sha256_hex, write_atomic};
use outrider_bundle::lock::{Item, Lock};
use outrider_bundle::manifest::{Attention, Precision};

use crate::checkpoint::{self, DraftCheckpoint, Weights};
use crate::export;
use crate::fetch;
use crate::workspace::Workspace;

/// Name of the reference model, in locks and in requests.
pub const NAME: &str = "smollm2-135m-instruct";

/// Numeric forms that are served and tested.
pub const PRECISIONS: [Precision; 3] = [Precision::Fp32, Precision::Int8, Precision::Int4];

/// Name of the reference drafter, in locks.
pub const DRAFTER_NAME: &str = "smollm2-135m-dflash2";

/// Numeric form of the draft beside every target: it costs less than a hundredth of the acceptance and reads a quarter of the bytes.
const DRAFT_PRECISION: Precision = Precision::Int8;

/// File of the drafter with the tokens it proposes from.
const DRAFTER_VOCABULARY: &str = "vocabulary.json";

/// Sources that decide what an export looks like, relative to the workspace.
const EXPORTER_SOURCES: [&str; 3] = ["bundle/src", "xtask/src/checkpoint", "xtask/src/export"];

/// The ONNX Runtime library, fetched now if it is missing.
pub fn onnxruntime(workspace: &Workspace) -> anyhow::Result<PathBuf> {
    fetched(workspace, "onnxruntime")
}

/// The first file of a lock of the workspace, which is the one the others go with, fetched now if it is missing.
fn fetched(workspace: &Workspace, lock_name: &str) -> anyhow::Result<PathBuf> {
    fetch::fetch_named(workspace, &[lock_name])?;
    locked_file(workspace, lock_name)
}

/// Where the first file of a lock of the workspace is, or will be.
pub fn locked_file(workspace: &Workspace, lock_name: &str) -> anyhow::Result<PathBuf> {
    let item = locked_item(workspace, lock_name)?;
    let file = item.files.first();
    let file = file.with_context(|| format!("lock {lock_name} names no file"))?;
    Ok(workspace.store().join(item.directory()).join(&file.name))
}

/// The first item of a lock of the workspace that is for this machine.
fn locked_item(workspace: &Workspace, lock_name: &str) -> anyhow::Result<Item> {
    let path = workspace.locks().join(format!("{lock_name}.toml"));
    let unusable = || format!("lock {} is unusable", path.display());
    let lock = Lock::load(&path).with_context(unusable)?;
    let items = lock.items_for(ARCH).with_context(unusable)?;
    let item = *items.first().with_context(unusable)?;
    Ok(item.clone())
}

/// The name of a numeric form, as flags and bundle directories spell it.
pub fn precision_name(precision: Precision) -> &'static str {
    match precision {
        Precision::Fp32 => "fp32",
        Precision::Fp16 => "fp16",
        Precision::Bf16 => "bf16",
        Precision::Int8 => "int8",
        Precision::Int4 => "int4",
    }
}

/// Reads a numeric form of the reference model from a flag.
pub fn precision_parser() -> impl TypedValueParser<Value = Precision> {
    PossibleValuesParser::new(PRECISIONS.map(precision_name)).map(|name| {
        let named = |precision: &Precision| precision_name(*precision) == name;
        PRECISIONS
            .into_iter()
            .find(named)
            .expect("the possible values are these")
    })
}

/// The bundle of `precision` as it is, or an error that says how to make it.
pub fn find(workspace: &Workspace, precision: Precision) -> anyhow::Result<PathBuf> {
    let bundle = bundle_dir(workspace, precision);
    if !bundle.is_dir() {
        bail!(
            "{} does not exist, run `cargo xtask test` or `cargo xtask serve`",
            bundle.display()
        );
    }
    Ok(bundle)
}

/// The bundle of `precision`, made now if it is missing or out of date.
pub fn ensure(workspace: &Workspace, precision: Precision) -> anyhow::Result<PathBuf> {
    let bundle = bundle_dir(workspace, precision);
    let recipe_file = bundle.with_extension("recipe");
    let recipe = recipe(workspace, precision)?;
    fs::create_dir_all(workspace.bundles())
        .with_context(|| format!("cannot make {}", workspace.bundles().display()))?;
    let _alone = lock(&workspace.bundles())?;
    if bundle.is_dir() && fs::read_to_string(&recipe_file).is_ok_and(|kept| kept == recipe) {
        return Ok(bundle);
    }

    let began = Instant::now();
    eprintln!("exporting {NAME} in {}", precision_name(precision));
    let manifest = write(workspace, precision, |weights| weights, &bundle)?;
    let aside = recipe_file.with_extension("recipe.partial");
    write_atomic(&recipe_file, &aside, recipe.as_bytes())
        .with_context(|| format!("cannot write {}", recipe_file.display()))?;
    eprintln!(
        "exported {} in {:.0} s, sha256 {}",
        bundle.display(),
        began.elapsed().as_secs_f64(),
        manifest.digest()
    );
    Ok(bundle)
}

/// Writes the pair in `precision` to `bundle`, with the drafter's weights as `change` makes them.
pub fn write(
    workspace: &Workspace,
    precision: Precision,
    change: impl FnOnce(Box<dyn Weights>) -> Box<dyn Weights>,
    bundle: &Path,
) -> anyhow::Result<Manifest> {
    let checkpoint = checkpoint::open(&fetched(workspace, NAME)?)?;
    let (mut drafter, vocabulary) = drafter(workspace)?;
    drafter.weights = change(drafter.weights);
    let options = export::Options {
        precision,
        attention: Attention::Native,
        taps: drafter.config.target_layer_ids.clone(),
    };
    let draft_options = export::DraftOptions {
        precision: DRAFT_PRECISION,
        form: Attention::Native,
        vocabulary: Some(vocabulary),
        stages: false,
    };
    export::write_pair(&checkpoint, &options, &drafter, &draft_options, bundle)
}

/// The reference drafter and the tokens it proposes from; its files have the digests of its lock.
fn drafter(workspace: &Workspace) -> anyhow::Result<(DraftCheckpoint, Vec<u32>)> {
    let file = fetched(workspace, DRAFTER_NAME)?;
    let directory = file.parent().context("a file is in a directory")?;
    let mut drafter = checkpoint::open_draft(directory, &[])?;
    let item = locked_item(workspace, DRAFTER_NAME)?;
    for source in &mut drafter.sources {
        source.licence = Some(item.licence.clone());
    }
    let vocabulary = export::read_vocabulary(&directory.join(DRAFTER_VOCABULARY))?;
    Ok((drafter, vocabulary))
}

/// Where the bundle of a numeric form is, whether it is there or not.
pub fn bundle_dir(workspace: &Workspace, precision: Precision) -> PathBuf {
    workspace
        .bundles()
        .join(format!("{NAME}-{}", precision_name(precision)))
}

/// One digest of everything a bundle is made from.
fn recipe(workspace: &Workspace, precision: Precision) -> anyhow::Result<String> {
    let mut inputs = vec![format!(
        "precision {}, draft {}, native operators",
        precision_name(precision),
        precision_name(DRAFT_PRECISION)
    )];
    let lock = |name: &str| workspace.locks().join(format!("{name}.toml"));
    let mut files = vec![lock(NAME), lock(DRAFTER_NAME)];
    for sources in EXPORTER_SOURCES {
        rust_files(&workspace.root().join(sources), &mut files)?;
    }
    for file in files {
        let bytes = fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let name = file.strip_prefix(workspace.root()).unwrap_or(&file);
        inputs.push(format!("{} {}", name.display(), sha256_hex(&bytes)));
    }
    Ok(sha256_hex(inputs.join("\n").as_bytes()))
}

/// Adds every Rust source below `dir`, in the order of their names.
fn rust_files(dir: &Path, files: &mut Vec<PathBuf>) -> anyhow::Result<()> {
    let cannot = || format!("cannot list {}", dir.display());
    let mut entries: Vec<PathBuf> = fs::read_dir(dir)
        .with_context(cannot)?
        .map(|entry| Ok(entry?.path()))
        .collect::<std::io::Result<_>>()
        .with_context(cannot)?;
    entries.sort();
    for entry in entries {
        if entry.is_dir() {
            rust_files(&entry, files)?;
        } else if entry.extension().is_some_and(|extension| extension == "rs") {
            files.push(entry);
        }
    }
    Ok(())
}

/// Keeps other runs of this command from making the same bundle; released when dropped.
fn lock(dir: &Path) -> anyhow::Result<File> {
    let path = dir.join(".lock");
    let file = File::create(&path).with_context(|| format!("cannot make {}", path.display()))?;
    file.lock()
        .with_context(|| format!("cannot lock {}", path.display()))?;
    Ok(file)
}
