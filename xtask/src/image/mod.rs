//! `cargo xtask image`: builds images, moves them between layouts and registries, and says whether one is what it should be.
//!
//! `outrider-image` does the work; this is its command line: where definitions and inputs lie in the workspace, and what a person sees.
//! `build` brings the inputs and builds, `server` is the program inside, `transfer` everything about registries and evidence, `measure` the figures of the
//! documentation.

mod build;
mod measure;
mod server;
mod transfer;

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use outrider_image::definition::{Base, Definition};
use outrider_image::diff;
use outrider_image::layout::{Image, Layout};
use outrider_image::lock::Lock;
use outrider_image::signature;

use crate::workspace::Workspace;

/// Arguments of `cargo xtask image`; without a subcommand `images/cpu.toml` is built.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Build an image into an OCI layout, or with --no-store straight into a registry
    Build(build::Args),
    /// Take the digest of everything that a definition names into the lock beside it
    Lock(build::LockArgs),
    /// Push the image of a layout, with its bill of materials, provenance and signatures
    Push(transfer::PushArgs),
    /// Pull an image, with its bill of materials, provenance and signatures, into a layout
    Pull(transfer::PullArgs),
    /// Hold an image to its definition, its lock and a key; exit status 1 when anything differs
    Verify(transfer::VerifyArgs),
    /// Say why two layouts hold different images; exit status 1 when they do
    Diff {
        /// Directory of an OCI layout
        first: PathBuf,
        /// Directory of another
        second: PathBuf,
    },
    /// Make a P-256 key: PREFIX.key signs and is a secret, PREFIX.pub verifies
    Keygen {
        /// Path of both files without their extension
        prefix: PathBuf,
    },
    /// Sign the image of a layout, its bill of materials and its provenance
    Sign {
        /// Directory of the layout
        layout: PathBuf,
        /// PEM file of the private key
        #[arg(long, value_name = "FILE")]
        key: PathBuf,
    },
    /// Measure how fast a file becomes a layer, and how much memory that takes
    Measure(measure::Args),
}

/// Runs the subcommand.
pub fn run(args: Args) -> anyhow::Result<()> {
    match args
        .command
        .unwrap_or_else(|| Command::Build(build::Args::default()))
    {
        Command::Build(args) => build::run(args),
        Command::Lock(args) => build::lock(&args),
        Command::Push(args) => transfer::push_layout(&args),
        Command::Pull(args) => transfer::pull_image(&args),
        Command::Verify(args) => transfer::verify(&args),
        Command::Diff { first, second } => differences(&first, &second),
        Command::Keygen { prefix } => {
            let public = prefix.with_added_extension("pub");
            let key = signature::generate(&prefix.with_added_extension("key"), &public)?;
            println!("{}  {}", key.hint(), public.display());
            Ok(())
        }
        Command::Sign { layout, key } => transfer::sign(&layout, &key),
        Command::Measure(args) => measure::run(&args),
    }
}

/// A definition of the workspace, with its paths as this machine has them.
struct Named {
    definition: Definition,
    lock: Lock,
    /// Paths of definition and lock below the root of the workspace, as provenance names them.
    documents: [String; 2],
}

impl Named {
    /// Reads `images/NAME.toml`, or a definition at a path, and the lock beside it.
    fn load(workspace: &Workspace, name: &str) -> anyhow::Result<Self> {
        let (path, definition) = load_definition(workspace, name)?;
        let lock_path = path.with_extension("lock.toml");
        let lock = Lock::load(&lock_path)
            .with_context(|| format!("`cargo xtask image lock {name}` writes it"))?;
        lock.check_covers(&definition)
            .with_context(|| format!("{} is stale", lock_path.display()))?;
        let documents = [&path, &lock_path].map(|path| below_root(workspace, path));
        let [definition_path, lock_path] = documents;
        Ok(Self {
            definition,
            lock,
            documents: [definition_path?, lock_path?],
        })
    }
}

fn load_definition(workspace: &Workspace, name: &str) -> anyhow::Result<(PathBuf, Definition)> {
    let is_path = name.contains('/') || name.ends_with(".toml");
    let path = if is_path {
        std::path::absolute(name).with_context(|| format!("{name} is no path"))?
    } else {
        workspace.root().join(format!("images/{name}.toml"))
    };
    let mut definition = Definition::load(&path)?;
    relocate(workspace, &mut definition);
    Ok((path, definition))
}

/// Definitions say `.outrider/…` for the home directory of the workspace, which may be elsewhere.
fn relocate(workspace: &Workspace, definition: &mut Definition) {
    let move_path = |path: &mut PathBuf| {
        if let Ok(rest) = path.strip_prefix(".outrider") {
            *path = workspace.home("").join(rest);
        }
    };
    let files = definition.runtime.files.iter_mut();
    for rule in files.chain(&mut definition.app.files) {
        rule.from.iter_mut().for_each(move_path);
    }
    if let Some(bundle) = &mut definition.bundle {
        move_path(&mut bundle.from);
    }
    if let Base::Oci(oci) = &mut definition.base {
        move_path(&mut oci.layout);
    }
}

fn below_root(workspace: &Workspace, path: &Path) -> anyhow::Result<String> {
    let below = path.strip_prefix(workspace.root()).with_context(|| {
        let root = workspace.root().display();
        format!("{} must lie in {root}, provenance names it", path.display())
    })?;
    let text = below.to_str();
    Ok(text
        .with_context(|| format!("{} is not UTF-8", path.display()))?
        .to_owned())
}

/// Opens a layout with a single image.
fn open(dir: &Path) -> anyhow::Result<(Layout, Image)> {
    let layout = Layout::open(dir)?;
    let image = layout.image(None)?;
    Ok((layout, image))
}

fn differences(first: &Path, second: &Path) -> anyhow::Result<()> {
    let (first, second) = (open(first)?, open(second)?);
    let found = diff::diff((&first.0, &first.1), (&second.0, &second.1))?;
    found.iter().for_each(|difference| println!("{difference}"));
    ensure!(found.is_empty(), "the images differ");
    println!("{}  both", first.1.descriptor.digest());
    Ok(())
}
