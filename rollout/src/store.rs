//! The folder of a rollout: its plan, its state, its journal, and what an operator asks for.
//!
//! The state file is the truth. The journal follows it: a line that is missing after a crash is written from the state, half a line is cut off.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use outrider_bundle::digest::write_atomic;
use serde::{Deserialize, Serialize};

use crate::machine::{Command, Record, State};
use crate::plan::Plan;

const PLAN: &str = "plan.yaml";
const STATE: &str = "state.json";
const JOURNAL: &str = "journal.jsonl";
const REQUEST: &str = "request.json";
const LOCK: &str = "lock";

/// What an operator asks of a rollout that another process carries on.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// Different for each request.
    pub id: u64,
    /// What is asked for.
    pub command: Command,
}

/// The folder.
#[derive(Clone, Debug)]
pub struct Store {
    directory: PathBuf,
}

/// Holds off a second process for as long as it lives; the kernel lets go of it with the process, however that ends.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

impl Store {
    /// The folder at `directory`, which need not be there yet.
    pub fn new(directory: &Path) -> Self {
        Self {
            directory: directory.to_owned(),
        }
    }

    /// The lock; `None` when another process has it.
    pub fn lock(&self) -> anyhow::Result<Option<Lock>> {
        fs::create_dir_all(&self.directory)
            .with_context(|| format!("cannot make {}", self.directory.display()))?;
        let path = self.directory.join(LOCK);
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .with_context(|| format!("cannot open {}", path.display()))?;
        match file.try_lock() {
            Ok(()) => Ok(Some(Lock { _file: file })),
            Err(fs::TryLockError::WouldBlock) => Ok(None),
            Err(fs::TryLockError::Error(error)) => {
                Err(error).with_context(|| format!("cannot lock {}", path.display()))
            }
        }
    }

    /// Begins a rollout in this folder; what an ended one left is kept beside under its name.
    pub fn begin(&self, plan: &Plan, state: &State) -> anyhow::Result<()> {
        if let Some(old) = self.state()? {
            if !old.phase.is_end() {
                bail!(
                    "{} holds the rollout {}, which has not ended: resume or abort it",
                    self.directory.display(),
                    old.id
                );
            }
            let journal = self.directory.join(JOURNAL);
            let kept = format!("journal-{}-{}.jsonl", old.id, old.record.time_ms);
            if journal.exists() {
                fs::rename(&journal, self.directory.join(kept))?;
            }
            fs::remove_file(self.directory.join(STATE))?;
        }
        self.clear_request()?;
        self.write(PLAN, serde_yaml::to_string(plan)?.as_bytes())?;
        self.save(state)?;
        self.follow(&state.record)
    }

    /// The state; `None` when no rollout was ever begun here.
    pub fn state(&self) -> anyhow::Result<Option<State>> {
        let path = self.directory.join(STATE);
        match fs::read(&path) {
            Ok(bytes) => {
                let state = serde_json::from_slice(&bytes);
                Ok(Some(state.with_context(|| path.display().to_string())?))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
        }
    }

    /// The plan that the rollout was begun with.
    pub fn plan(&self, state: &State) -> anyhow::Result<Plan> {
        let path = self.directory.join(PLAN);
        let text =
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        Plan::parse(&text, state.plan_directory.clone()).with_context(|| path.display().to_string())
    }

    /// Keeps the state.
    pub fn save(&self, state: &State) -> anyhow::Result<()> {
        let mut bytes = serde_json::to_vec_pretty(state)?;
        bytes.push(b'\n');
        self.write(STATE, &bytes)
    }

    fn write(&self, name: &str, bytes: &[u8]) -> anyhow::Result<()> {
        let path = self.directory.join(name);
        write_atomic(&path, &path.with_extension("new"), bytes)
            .with_context(|| format!("cannot write {}", path.display()))
    }

    /// Brings the journal up to the state's last line.
    pub fn follow(&self, record: &Record) -> anyhow::Result<()> {
        let path = self.directory.join(JOURNAL);
        let explain = || format!("cannot write {}", path.display());
        let mut file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(&path)
            .with_context(explain)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).with_context(explain)?;
        let whole = bytes
            .iter()
            .rposition(|&byte| byte == b'\n')
            .map_or(0, |end| end + 1);
        let last = bytes[..whole]
            .split(|&byte| byte == b'\n')
            .rfind(|line| !line.is_empty());
        let last_seq = match last {
            None => 0,
            Some(line) => {
                let last: Record =
                    serde_json::from_slice(line).with_context(|| path.display().to_string())?;
                last.seq
            }
        };
        if last_seq == record.seq {
            return Ok(());
        }
        if last_seq + 1 != record.seq {
            bail!(
                "{} ends with line {last_seq}, the state is at {}: they are not of the same rollout",
                path.display(),
                record.seq
            );
        }
        let mut line = serde_json::to_vec(record)?;
        line.push(b'\n');
        file.set_len(whole as u64).with_context(explain)?;
        file.seek(SeekFrom::End(0)).with_context(explain)?;
        file.write_all(&line).with_context(explain)?;
        file.sync_all().with_context(explain)
    }

    /// The journal's lines.
    pub fn journal(&self) -> anyhow::Result<Vec<Record>> {
        let path = self.directory.join(JOURNAL);
        let text =
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let lines = text
            .split_inclusive('\n')
            .filter(|line| line.ends_with('\n'));
        lines
            .map(|line| serde_json::from_str(line).with_context(|| path.display().to_string()))
            .collect()
    }

    /// Leaves a request for the process that carries the rollout on.
    pub fn ask(&self, request: Request) -> anyhow::Result<()> {
        let path = self.directory.join(REQUEST);
        let aside = self.directory.join(format!("request-{}.new", request.id));
        fs::write(&aside, serde_json::to_vec(&request)?)
            .with_context(|| format!("cannot write {}", aside.display()))?;
        // A link is made only where nothing is yet, and whole.
        let linked = fs::hard_link(&aside, &path);
        fs::remove_file(&aside)?;
        match linked {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                bail!(
                    "another request waits to be carried out, see {}",
                    path.display()
                )
            }
            other => other.with_context(|| format!("cannot write {}", path.display())),
        }
    }

    /// What was asked for and not carried out yet.
    pub fn request(&self) -> anyhow::Result<Option<Request>> {
        let path = self.directory.join(REQUEST);
        match fs::read(&path) {
            Ok(bytes) => {
                let request = serde_json::from_slice(&bytes);
                Ok(Some(request.with_context(|| path.display().to_string())?))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
        }
    }

    /// Takes the request away.
    pub fn clear_request(&self) -> anyhow::Result<()> {
        match fs::remove_file(self.directory.join(REQUEST)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }
}
