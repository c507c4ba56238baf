//! `cargo xtask image build` and `lock`: brings what a definition names, and makes an image or a lock of it.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use indicatif::HumanBytes;
use outrider_bundle::lock::{Item, Lock as FetchLock};
use outrider_image::build::{Built, Options, build, epoch_s};
use outrider_image::definition::{Base, Definition};
use outrider_image::evidence::{self, Origin};
use outrider_image::layer::Compression;
use outrider_image::lock::Lock;
use outrider_image::provenance::{self, Source};
use outrider_image::registry::Reference;
use outrider_image::signature::PrivateKey;
use outrider_image::{crates, debian};

use super::{Named, load_definition, server, transfer};
use crate::fetch::{self, Settings};
use crate::machine::peak_resident_bytes;
use crate::reference;
use crate::workspace::Workspace;

/// Arguments of `cargo xtask image build`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Definition: `images/NAME.toml`, or the path of one in the workspace
    #[arg(default_value = "cpu")]
    name: String,
    /// Directory of the OCI layout [default: .outrider/images/NAME of the workspace]
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// Push to this name while building, with the weights straight from the bundle, and keep nothing
    #[arg(long, value_name = "REF", conflicts_with = "output")]
    no_store: Option<Reference>,
    /// Form of the layers that aren't weights
    #[arg(long, value_enum, default_value_t)]
    compress: Compress,
    /// Largest layer before compression; layers are split between files, and a larger file is an error
    #[arg(long, value_name = "BYTES")]
    max_layer_bytes: Option<u64>,
    /// Only the bundle, to be mounted as a volume
    #[arg(long)]
    weights_only: bool,
    /// Server binary to take, instead of building one for release
    #[arg(long, value_name = "FILE", conflicts_with = "weights_only")]
    server: Option<PathBuf>,
    /// PEM file of the private key that signs the image
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
}

/// Form of the layers that aren't weights.
#[derive(Clone, Copy, Debug, Default, clap::ValueEnum)]
enum Compress {
    /// For everything newer than Docker 20.10
    #[default]
    Zstd,
    /// For older consumers
    Gzip,
}

impl Default for Args {
    fn default() -> Self {
        Self {
            name: "cpu".to_owned(),
            output: None,
            no_store: None,
            compress: Compress::default(),
            max_layer_bytes: None,
            weights_only: false,
            server: None,
            key: None,
        }
    }
}

/// Arguments of `cargo xtask image lock`.
#[derive(Debug, clap::Args)]
pub struct LockArgs {
    /// Definition: `images/NAME.toml`, or the path of one in the workspace
    #[arg(default_value = "cpu")]
    name: String,
    /// Keep the Debian packages that the lock has, instead of taking the newest of this machine's package index
    #[arg(long)]
    keep_packages: bool,
}

/// Builds an image, with bill of materials and provenance.
pub fn run(args: Args) -> anyhow::Result<()> {
    let workspace = Workspace::find()?;
    let epoch_s = epoch_s(env::var("SOURCE_DATE_EPOCH").ok().as_deref())?;
    let key = args.key.as_deref().map(PrivateKey::load).transpose()?;
    let Named {
        mut definition,
        lock,
        documents,
    } = Named::load(&workspace, &args.name)?;
    // Before anything slow: a build in a tree that git doesn't know has no provenance.
    let source = source(&workspace)?;
    let items = bring_inputs(&workspace, &definition)?;
    let packages_dir = workspace.home("packages");
    debian::fetch(&lock.packages, &packages_dir)?;
    let mut tools = BTreeMap::new();
    let mut crates = Vec::new();
    if !args.weights_only {
        let binary = match &args.server {
            Some(binary) => std::path::absolute(binary)
                .with_context(|| format!("--server {} is no path", binary.display()))?,
            None => {
                tools = server::compilers()?;
                server::build(&workspace, definition.architecture)?
            }
        };
        place_server(&mut definition, &binary)?;
        crates = crates::linked(workspace.root(), server::NAME, definition.architecture)?;
    }
    let images_dir = workspace.home("images");
    fs::create_dir_all(&images_dir)
        .with_context(|| format!("cannot make {}", images_dir.display()))?;
    let scratch = tempfile::tempdir_in(&images_dir)
        .with_context(|| format!("cannot write to {}", images_dir.display()))?;
    let output = match (&args.no_store, &args.output) {
        (Some(_), _) => scratch.path().join("layout"),
        (None, Some(output)) => output.clone(),
        (None, None) => images_dir.join(default_name(&definition, args.weights_only)),
    };
    let options = Options {
        definition: &definition,
        lock: &lock,
        root: workspace.root(),
        packages_dir: &packages_dir,
        output: &output,
        epoch_s,
        compression: match args.compress {
            Compress::Zstd => Compression::Zstd,
            Compress::Gzip => Compression::Gzip,
        },
        max_layer_bytes: args.max_layer_bytes,
        store_weights: args.no_store.is_none(),
        weights_only: args.weights_only,
        labels: labels(&source),
    };
    let built = build(&options)?;
    let [definition_path, lock_path] = &documents;
    let unlicensed = evidence::add(
        &options,
        &built,
        &Origin {
            documents: &[definition_path, lock_path, "Cargo.lock"],
            source: &source,
            crates: &crates,
            items: &items,
            tools: &tools,
            builder_id: provenance::BUILDER_ID,
        },
    )?;
    if !unlicensed.is_empty() {
        eprintln!("nothing says the licence of {}", unlicensed.join(", "));
    }
    if let Some(key) = &key {
        let image = built.layout.image(None)?;
        evidence::sign(&built.layout, &image, key)?;
    }
    eprint!("{}", table(&built));
    let peak_bytes = peak_resident_bytes(std::process::id())?;
    eprintln!("peak memory {}", HumanBytes(peak_bytes));
    match &args.no_store {
        Some(reference) => transfer::push(&workspace, &built.layout, reference, &[], false),
        None => {
            println!("{}  {}", built.manifest.digest(), output.display());
            Ok(())
        }
    }
}

/// Writes the lock of a definition.
pub fn lock(args: &LockArgs) -> anyhow::Result<()> {
    let workspace = Workspace::find()?;
    let (path, definition) = load_definition(&workspace, &args.name)?;
    let lock_path = path.with_extension("lock.toml");
    bring_inputs(&workspace, &definition)?;
    let packages = match (&definition.base, args.keep_packages) {
        (Base::Oci(_), _) => Vec::new(),
        (Base::Debian(_), true) => Lock::load(&lock_path)?.packages,
        (Base::Debian(debian), false) => {
            debian::look_up(&debian.packages, definition.architecture)?
        }
    };
    debian::fetch(&packages, &workspace.home("packages"))?;
    Lock::make(&definition, workspace.root(), packages)?.write(&lock_path)?;
    println!("{}", lock_path.display());
    Ok(())
}

fn default_name(definition: &Definition, weights_only: bool) -> String {
    let suffix = if weights_only { "-weights" } else { "" };
    format!("{}{suffix}", definition.name)
}

/// Brings what fetch locks have of a definition's files, and the reference bundle where it is the one; returns the items of all fetch locks.
fn bring_inputs(workspace: &Workspace, definition: &Definition) -> anyhow::Result<Vec<Item>> {
    let store = workspace.store();
    let needed: BTreeSet<String> = definition
        .files()
        .filter_map(|rule| {
            let below = rule.from.as_ref()?.strip_prefix(&store).ok()?;
            Some(below.iter().next()?.to_str()?.to_owned())
        })
        .collect();
    let mut items = Vec::new();
    let mut locks = Vec::new();
    for path in fetch_locks(workspace)? {
        let lock = FetchLock::load(&path).with_context(|| path.display().to_string())?;
        if lock
            .items
            .iter()
            .any(|item| needed.contains(&item.directory()))
        {
            locks.push(path);
        }
        items.extend(lock.items);
    }
    fetch::fetch(&locks, &Settings::of_process(store))?;
    for precision in reference::PRECISIONS {
        let is_wanted = definition
            .bundle
            .as_ref()
            .is_some_and(|bundle| bundle.from == reference::bundle_dir(workspace, precision));
        if is_wanted {
            reference::ensure(workspace, precision)?;
        }
    }
    Ok(items)
}

/// The fetch locks of the workspace, and those that only images need: `images/*.fetch.toml`.
fn fetch_locks(workspace: &Workspace) -> anyhow::Result<Vec<PathBuf>> {
    let mut locks = Vec::new();
    for (dir, ending) in [
        (workspace.locks(), ".toml"),
        (workspace.root().join("images"), ".fetch.toml"),
    ] {
        let entries = fs::read_dir(&dir).with_context(|| format!("cannot read {}", dir.display()));
        for entry in entries? {
            let path = entry
                .with_context(|| format!("cannot read {}", dir.display()))?
                .path();
            if path.to_string_lossy().ends_with(ending) {
                locks.push(path);
            }
        }
    }
    locks.sort();
    Ok(locks)
}

/// Puts the path of the server's binary into the one rule that wants something built.
fn place_server(definition: &mut Definition, binary: &Path) -> anyhow::Result<()> {
    let files = definition.runtime.files.iter_mut();
    for rule in files.chain(&mut definition.app.files) {
        if !rule.built {
            continue;
        }
        let name = rule.from.as_ref().and_then(|from| from.file_name());
        match name {
            Some(name) if name == server::NAME => rule.from = Some(binary.to_owned()),
            _ => bail!("{} is to be built, only {} can be", rule.to, server::NAME),
        }
    }
    Ok(())
}

/// The commit that is built, by git.
fn source(workspace: &Workspace) -> anyhow::Result<Source> {
    let root = workspace
        .root()
        .to_str()
        .context("the path of the workspace is not UTF-8")?;
    let git = |arguments: &[&str]| server::said("git", &[&["-C", root], arguments].concat());
    let commit = git(&["rev-parse", "HEAD"]).context("an image says which commit it is of")?;
    Ok(Source {
        uri: env!("CARGO_PKG_REPOSITORY").to_owned(),
        commit,
        is_modified: !git(&["status", "--porcelain"])?.is_empty(),
    })
}

/// Labels that a definition can't know.
fn labels(source: &Source) -> BTreeMap<String, String> {
    let modified = if source.is_modified { "-modified" } else { "" };
    let labels = [
        ("version", env!("CARGO_PKG_VERSION").to_owned()),
        ("revision", format!("{}{modified}", source.commit)),
    ];
    labels
        .map(|(name, value)| (format!("org.opencontainers.image.{name}"), value))
        .into()
}

/// The layers and their sizes, a line each.
fn table(built: &Built) -> String {
    use std::fmt::Write as _;

    let mut text = String::new();
    let mut others_bytes = 0;
    for (name, layer) in &built.layers {
        let _ = writeln!(text, "{:>14}  {}  {name}", layer.size(), layer.digest());
        if !name.starts_with("weights ") {
            others_bytes += layer.size();
        }
    }
    let all_bytes: u64 = built.layers.iter().map(|(_, layer)| layer.size()).sum();
    let _ = writeln!(
        text,
        "{all_bytes:>14}  bytes in all, {others_bytes} without weights"
    );
    text
}
