//! `cargo xtask fetch` against servers, wheels and directories, honest and otherwise.

mod server;

mod http;
mod local;
mod pypi;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use outrider_bundle::digest::sha256_hex;
use tempfile::TempDir;
use xtask::fetch::{Pip, Progress, Retry, Settings, Summary, fetch};

/// A store, a lock, and settings that try three times without waiting.
struct Setup {
    root: TempDir,
    settings: Settings,
}

impl Setup {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let settings = Settings {
            store: root.path().join("store"),
            arch: "x86_64".to_owned(),
            hf_endpoint: "http://127.0.0.1:1".to_owned(),
            hf_token: None,
            pip: Pip::default(),
            retry: Retry {
                attempts: 3,
                first_wait: Duration::ZERO,
            },
            progress: Progress::Silent,
        };
        Self { root, settings }
    }

    /// Writes a lock of one item named `model` with one file named `model.bin`.
    fn lock(&self, source: &str, member: Option<&str>, content: &[u8]) -> PathBuf {
        self.lock_of(source, &[("model.bin", member, content)])
    }

    fn lock_of(&self, source: &str, files: &[(&str, Option<&str>, &[u8])]) -> PathBuf {
        let mut text = format!(
            "schema_version = 1\n[[item]]\nname = \"model\"\nlicence = \"MIT\"\nsource.{source}\n"
        );
        for (name, member, content) in files {
            let member = member
                .map(|member| format!("member = {member:?}\n"))
                .unwrap_or_default();
            let (size_bytes, sha256) = (content.len(), sha256_hex(content));
            text += &format!(
                "[[item.files]]\n{member}name = {name:?}\nsize_bytes = {size_bytes}\nsha256 = {sha256:?}\n"
            );
        }
        let path = self.root.path().join("lock.toml");
        fs::write(&path, text).unwrap();
        path
    }

    fn fetch(&self, lock: &Path) -> anyhow::Result<Summary> {
        fetch(&[lock.to_owned()], &self.settings)
    }

    /// The error of a fetch, with its causes.
    fn error(&self, lock: &Path) -> String {
        format!("{:#}", self.fetch(lock).unwrap_err())
    }

    fn stored(&self) -> Vec<u8> {
        fs::read(self.settings.store.join("model/model.bin")).unwrap()
    }

    /// Names of everything in the item's directory.
    fn left(&self) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.settings.store.join("model")) else {
            return Vec::new();
        };
        let mut names: Vec<_> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

/// Content that differs at every position from its neighbours, several network packets long.
fn content() -> Vec<u8> {
    (0..300_000u32).flat_map(u32::to_le_bytes).collect()
}
