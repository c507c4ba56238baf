//! `cargo xtask image push`, `pull`, `verify` and `sign`: images and their evidence between layouts and registries.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use indicatif::HumanBytes;
use outrider_image::debian;
use outrider_image::evidence;
use outrider_image::layout::{Image, Layout};
use outrider_image::registry::{
    Client, DockerConfig, Outcome, PushOptions, Pushed, Reference, Retry, pull, pull_referrers,
    push as push_image, push_referrers,
};
use outrider_image::signature::{PrivateKey, PublicKey};
use outrider_image::verify::{self, Expected};

use super::{Named, open};
use crate::fetch::Progress;
use crate::workspace::Workspace;

/// Arguments of `cargo xtask image push`.
#[derive(Debug, clap::Args)]
pub struct PushArgs {
    /// Name to push to: registry/repository:tag
    reference: Reference,
    /// Directory of the OCI layout [default: what `cargo xtask image` builds]
    #[arg(long, value_name = "DIR")]
    layout: Option<PathBuf>,
    /// Repository of the same registry that may have the layers; may be given several times
    #[arg(long, value_name = "REPOSITORY")]
    mount_from: Vec<String>,
    /// Speak plain HTTP with a registry that isn't on this machine
    #[arg(long)]
    plain_http: bool,
}

/// Arguments of `cargo xtask image pull`.
#[derive(Debug, clap::Args)]
pub struct PullArgs {
    /// Name of the image: registry/repository with a tag or a digest
    reference: Reference,
    /// Directory of the OCI layout
    #[arg(long, value_name = "DIR")]
    output: PathBuf,
    /// Speak plain HTTP with a registry that isn't on this machine
    #[arg(long)]
    plain_http: bool,
}

/// Arguments of `cargo xtask image verify`.
#[derive(Debug, clap::Args)]
pub struct VerifyArgs {
    /// Directory of an OCI layout, or the name of an image in a registry
    image: String,
    /// PEM file of the public key of who vouches for the image
    #[arg(long, value_name = "FILE", required_unless_present = "unsigned")]
    key: Option<PathBuf>,
    /// Look at no signature: only definition, lock and layers
    #[arg(long, conflicts_with = "key")]
    unsigned: bool,
    /// Definition that the image is of
    #[arg(long, default_value = "cpu", value_name = "NAME")]
    definition: String,
    /// Speak plain HTTP with a registry that isn't on this machine
    #[arg(long)]
    plain_http: bool,
}

/// Pushes the image of a layout.
pub fn push_layout(args: &PushArgs) -> anyhow::Result<()> {
    let workspace = Workspace::find()?;
    let dir = match &args.layout {
        Some(layout) => layout.clone(),
        None => workspace.home("images").join("outrider-cpu"),
    };
    let layout = Layout::open(&dir)?;
    push(
        &workspace,
        &layout,
        &args.reference,
        &args.mount_from,
        args.plain_http,
    )
}

/// Pushes an image and what lies beside it, and prints its name by digest.
pub fn push(
    workspace: &Workspace,
    layout: &Layout,
    reference: &Reference,
    mount_from: &[String],
    plain_http: bool,
) -> anyhow::Result<()> {
    let client = client(reference, plain_http)?;
    let image = layout.image(None)?;
    let options = PushOptions {
        mount_from: mount_from.to_vec(),
        sessions: Some(workspace.home("image-uploads.json")),
        ..PushOptions::default()
    };
    let mut bars = Bars::default();
    let pushed = push_image(
        &client,
        layout,
        &image,
        &options,
        &mut |what, done, total| bars.show(what, done, total),
    )?;
    let beside = push_referrers(&client, layout, &image, &options, &mut |_, _, _| {})?;
    drop(bars);
    let sent_bytes = sent_bytes(&pushed) + beside.iter().map(sent_bytes).sum::<u64>();
    let count = |wanted: Outcome| {
        let outcomes = pushed.blobs.iter();
        outcomes.filter(|(_, outcome)| *outcome == wanted).count()
    };
    eprintln!(
        "{} blobs, {} were there, {} were mounted; {} sent ({sent_bytes} bytes), {} documents beside the image",
        pushed.blobs.len(),
        count(Outcome::Exists),
        count(Outcome::Mounted),
        HumanBytes(sent_bytes),
        beside.len()
    );
    println!("{}", pushed.name);
    Ok(())
}

fn sent_bytes(pushed: &Pushed) -> u64 {
    let bytes = |(_, outcome): &(String, Outcome)| match outcome {
        Outcome::Sent(bytes) => *bytes,
        Outcome::Exists | Outcome::Mounted => 0,
    };
    pushed.blobs.iter().map(bytes).sum()
}

/// Pulls an image into a layout.
pub fn pull_image(args: &PullArgs) -> anyhow::Result<()> {
    let (_, image) = pull_with_evidence(&args.reference, args.plain_http, &args.output)?;
    println!("{}  {}", image.descriptor.digest(), args.output.display());
    Ok(())
}

fn pull_with_evidence(
    reference: &Reference,
    plain_http: bool,
    output: &Path,
) -> anyhow::Result<(Layout, Image)> {
    let client = client(reference, plain_http)?;
    let layout = pull(&client, output)?;
    let image = layout.image(None)?;
    let count = pull_referrers(&client, &layout, &image)?;
    eprintln!(
        "{} layers, {count} documents beside the image",
        image.manifest.layers().len()
    );
    Ok((layout, image))
}

/// Holds an image to its definition, its lock and a key.
pub fn verify(args: &VerifyArgs) -> anyhow::Result<()> {
    let workspace = Workspace::find()?;
    let named = Named::load(&workspace, &args.definition)?;
    let key = args.key.as_deref().map(PublicKey::load).transpose()?;
    let images_dir = workspace.home("images");
    std::fs::create_dir_all(&images_dir)
        .with_context(|| format!("cannot make {}", images_dir.display()))?;
    // What was pulled goes away with it.
    let scratch = tempfile::tempdir_in(&images_dir)
        .with_context(|| format!("cannot write to {}", images_dir.display()))?;
    let (layout, image) = if Path::new(&args.image).is_dir() {
        open(Path::new(&args.image))?
    } else {
        let reference = args.image.parse().with_context(|| {
            format!(
                "{} is neither a directory nor the name of an image",
                args.image
            )
        })?;
        pull_with_evidence(&reference, args.plain_http, &scratch.path().join("layout"))?
    };
    let packages_dir = workspace.home("packages");
    let is_there = |package| packages_dir.join(debian::file_name(package)).exists();
    let expected = Expected {
        definition: &named.definition,
        lock: &named.lock,
        packages_dir: named
            .lock
            .packages
            .iter()
            .all(is_there)
            .then_some(packages_dir.as_path()),
    };
    let verified = match &key {
        Some(key) => evidence::verify(&layout, &image, expected, key)?,
        None => verify::verify(&layout, &image, expected)?,
    };
    let built = verified.built.len();
    eprintln!(
        "{} layers, {} files are what the lock says",
        verified.layers, verified.files
    );
    match &key {
        Some(key) => eprintln!(
            "signed by {}, as are the bill of materials and the provenance, which has the files that no lock has ({built})",
            key.hint()
        ),
        None => eprintln!("files that no lock has ({built}) and signatures were not checked"),
    }
    if verified.base_files_unchecked > 0 {
        eprintln!(
            "{} files of the base weren't held to the packages, which are not in {}",
            verified.base_files_unchecked,
            packages_dir.display()
        );
    }
    println!("{}  ok", verified.digest);
    Ok(())
}

/// Signs the image of a layout.
pub fn sign(layout: &Path, key: &Path) -> anyhow::Result<()> {
    let key = PrivateKey::load(key)?;
    let (layout, image) = open(layout)?;
    let attached = evidence::sign(&layout, &image, &key)?;
    ensure!(!attached.is_empty(), "nothing was signed");
    println!("{}  {}", image.descriptor.digest(), key.public().hint());
    Ok(())
}

/// A client with the credentials that Docker and its relatives know.
fn client(reference: &Reference, plain_http: bool) -> anyhow::Result<Client> {
    let dir = match env::var_os("DOCKER_CONFIG") {
        Some(dir) => Some(PathBuf::from(dir)),
        None => env::home_dir().map(|home| home.join(".docker")),
    };
    let config = match dir {
        Some(dir) => DockerConfig::load(&dir.join("config.json"))?,
        None => DockerConfig::default(),
    };
    let credentials = config.find(&reference.registry)?;
    Ok(Client::new(
        reference,
        credentials,
        plain_http,
        Retry::default(),
    ))
}

/// One bar after the other, one for each blob.
#[derive(Default)]
struct Bars {
    /// The blob that was done last.
    done: String,
    current: Option<(String, crate::fetch::Bar)>,
}

impl Bars {
    fn show(&mut self, what: &str, done_bytes: u64, total_bytes: u64) {
        if self.done == what {
            return;
        }
        let progress = Progress::of_process();
        if self.current.as_ref().is_none_or(|(name, _)| name != what) {
            self.current = Some((what.to_owned(), progress.bytes(what, total_bytes)));
        }
        if let Some((_, bar)) = &self.current {
            bar.set(done_bytes);
        }
        if done_bytes == total_bytes {
            self.current = None;
            self.done = what.to_owned();
            progress.line(&format!("{what}: {}", HumanBytes(total_bytes)));
        }
    }
}
