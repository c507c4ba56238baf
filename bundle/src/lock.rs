//! Fetch locks: which files to bring into the store, from where, and which bytes they must have.
//!
//! A lock is a TOML file; every unknown field is an error. For example:
//!
//! ```toml
//! schema_version = 1
//!
//! [[item]]
//! name = "example-model"                      # with the version: the directory in the store
//! version = "1.0"                             # optional
//! arch = "x86_64"                             # optional: the item is for this machine architecture only
//! licence = "Apache-2.0"                      # SPDX expression
//! source.hf = { repository = "org/model", revision = "4f1e…" }
//!
//! [[item.files]]
//! member = "onnx/model.bin"                   # where in the source
//! name = "model.bin"                          # name in the store
//! size_bytes = 1234
//! sha256 = "…"                                # 64 lower-case hexadecimal digits
//! ```
//!
//! An item has exactly one source:
//!
//! | source | fields | a file's `member` is |
//! | --- | --- | --- |
//! | `pypi` | `package`, `version`, `wheel_sha256`, and `python`, `abi`, `platform` for a wheel that isn't for all machines | its path inside the wheel |
//! | `hf` | `repository`, `revision` | its path in the repository |
//! | `https` | `url` | its path below the URL; without one the URL is the file |
//! | `path` | `path`, relative to the lock | its path below the directory; without one the path is the file |

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::digest::is_sha256;
use crate::manifest::{FieldFault, list};
use crate::paths::check_relative;

/// The schema version this build reads.
pub const SCHEMA_VERSION: u32 = 1;

/// Largest lock that is read, in bytes.
pub const MAX_BYTES: u64 = 1 << 20;

/// A fetch lock.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lock {
    /// Version of this format, [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// What to fetch.
    #[serde(rename = "item")]
    pub items: Vec<Item>,
}

/// Files that come from one source and lie together in one directory of the store.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Item {
    /// Name; several items may share one when they are for different architectures.
    pub name: String,
    /// Version, part of the directory's name in the store.
    #[serde(default)]
    pub version: Option<String>,
    /// Machine architecture as [`std::env::consts::ARCH`] names it; `None` is for all.
    #[serde(default)]
    pub arch: Option<String>,
    /// SPDX licence expression.
    pub licence: String,
    /// Where the files come from.
    pub source: Source,
    /// The files.
    pub files: Vec<LockedFile>,
}

/// Where the files of an item come from.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// A wheel of whatever Python package index pip is configured for.
    Pypi(Wheel),
    /// A Hugging Face repository.
    Hf(Repository),
    /// A web server, such as a company's own mirror.
    Https(Mirror),
    /// A file or directory of this machine.
    Path(Local),
}

/// A wheel of a Python package.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wheel {
    /// Package name.
    pub package: String,
    /// Package version.
    pub version: String,
    /// Lower-case hexadecimal SHA-256 of the wheel.
    pub wheel_sha256: String,
    /// Python version of the wheel, such as `3.11`.
    #[serde(default)]
    pub python: Option<String>,
    /// ABI tag of the wheel, such as `cp311`.
    #[serde(default)]
    pub abi: Option<String>,
    /// Platform tag of the wheel, such as `manylinux_2_28_x86_64`.
    #[serde(default)]
    pub platform: Option<String>,
}

/// A revision of a Hugging Face repository.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Repository {
    /// `organisation/name`.
    pub repository: String,
    /// Commit, tag or branch; a commit can't change under the lock.
    pub revision: String,
}

/// A place on a web server.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mirror {
    /// `https://` or `http://` URL of the file, or of the directory that the members are in.
    pub url: String,
}

/// A place on this machine.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Local {
    /// File, or directory that the members are in.
    pub path: PathBuf,
}

/// One file of an item.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LockedFile {
    /// Where in the source it is.
    #[serde(default)]
    pub member: Option<String>,
    /// Its name in the item's directory of the store.
    pub name: String,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Lower-case hexadecimal SHA-256.
    pub sha256: String,
}

/// Why there is no lock to speak of.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// The file can't be read.
    #[error("cannot read lock {}", path.display())]
    Read {
        /// The lock.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file is larger than any lock.
    #[error("the lock is larger than {MAX_BYTES} bytes")]
    TooLarge,
    /// The text is no TOML of the lock's form.
    #[error("the lock is not of the expected form")]
    Form(#[source] Box<toml::de::Error>),
    /// The file was written for another version of the format.
    #[error("schema_version is {found}, this build reads {SCHEMA_VERSION}")]
    SchemaVersion {
        /// The version in the file.
        found: u32,
    },
    /// The form is right and values are not; all faults.
    #[error("the lock holds invalid values: {}", list(.0))]
    Values(Vec<FieldFault>),
    /// An item is only for other machines.
    #[error("{name} has no item for {arch}, only for {}", known.join(", "))]
    NoVariant {
        /// Name of the item.
        name: String,
        /// The architecture asked for.
        arch: String,
        /// Architectures the lock has.
        known: Vec<String>,
    },
}

impl Lock {
    /// Reads a lock file.
    pub fn load(path: &Path) -> Result<Self, LockError> {
        let mut text = String::new();
        let read =
            File::open(path).and_then(|file| file.take(MAX_BYTES + 1).read_to_string(&mut text));
        read.map_err(|source| LockError::Read {
            path: path.to_owned(),
            source,
        })?;
        Self::parse(&text)
    }

    /// Reads a lock from its text.
    pub fn parse(text: &str) -> Result<Self, LockError> {
        if text.len() as u64 > MAX_BYTES {
            return Err(LockError::TooLarge);
        }
        let lock: Self = toml::from_str(text).map_err(|error| LockError::Form(Box::new(error)))?;
        if lock.schema_version != SCHEMA_VERSION {
            return Err(LockError::SchemaVersion {
                found: lock.schema_version,
            });
        }
        let faults = lock.faults();
        if faults.is_empty() {
            Ok(lock)
        } else {
            Err(LockError::Values(faults))
        }
    }

    /// The items for a machine architecture, as [`std::env::consts::ARCH`] names it. An item that exists for others only is an error.
    pub fn items_for(&self, arch: &str) -> Result<Vec<&Item>, LockError> {
        let mut by_name: BTreeMap<&str, Vec<&Item>> = BTreeMap::new();
        for item in &self.items {
            by_name.entry(&item.name).or_default().push(item);
        }
        let mut chosen = Vec::new();
        for (name, variants) in by_name {
            let fits = |item: &&Item| item.arch.as_deref().is_none_or(|wanted| wanted == arch);
            let fitting: Vec<&Item> = variants.iter().copied().filter(fits).collect();
            if fitting.is_empty() {
                let known = variants
                    .iter()
                    .filter_map(|item| item.arch.clone())
                    .collect();
                return Err(LockError::NoVariant {
                    name: name.to_owned(),
                    arch: arch.to_owned(),
                    known,
                });
            }
            chosen.extend(fitting);
        }
        Ok(chosen)
    }

    fn faults(&self) -> Vec<FieldFault> {
        let mut faults = Vec::new();
        let mut places = BTreeMap::<String, Vec<Option<&str>>>::new();
        for (index, item) in self.items.iter().enumerate() {
            let mut fault = |field: &str, problem: String| {
                faults.push(FieldFault {
                    field: format!("item[{index}].{field}"),
                    problem,
                })
            };
            item.check(&mut fault);
            let taken = places.entry(item.directory()).or_default();
            let arch = item.arch.as_deref();
            if taken
                .iter()
                .any(|other| other.is_none() || arch.is_none() || *other == arch)
            {
                fault(
                    "name",
                    format!("another item goes to {} already", item.directory()),
                );
            }
            taken.push(arch);
        }
        faults
    }
}

impl Item {
    /// Name of its directory in the store.
    pub fn directory(&self) -> String {
        match &self.version {
            Some(version) => format!("{}-{version}", self.name),
            None => self.name.clone(),
        }
    }

    fn check(&self, fault: &mut impl FnMut(&str, String)) {
        let mut word = |field: &str, text: &str| {
            if let Err(problem) = check_word(text) {
                fault(field, format!("{text:?} {problem}"));
            }
        };
        word("name", &self.name);
        if let Some(version) = &self.version {
            word("version", version);
        }
        self.source.check(fault);
        if self.files.is_empty() {
            fault("files", "is empty, an item has at least one".to_owned());
        }
        let mut names = BTreeSet::new();
        for (index, file) in self.files.iter().enumerate() {
            if let Err(problem) = check_word(&file.name) {
                fault(
                    &format!("files[{index}].name"),
                    format!("{:?} {problem}", file.name),
                );
            }
            if !names.insert(&file.name) {
                fault(
                    &format!("files[{index}].name"),
                    format!("{:?} comes twice", file.name),
                );
            }
            if !is_sha256(&file.sha256) {
                fault(
                    &format!("files[{index}].sha256"),
                    format!("{:?} is not 64 lower-case hexadecimal digits", file.sha256),
                );
            }
            match &file.member {
                Some(member) => {
                    if let Err(problem) = check_relative(member) {
                        fault(
                            &format!("files[{index}].member"),
                            format!("{member:?} {problem}"),
                        );
                    }
                }
                None if matches!(self.source, Source::Pypi(_) | Source::Hf(_)) => {
                    fault(
                        &format!("files[{index}].member"),
                        "is missing, this source holds many files".to_owned(),
                    );
                }
                None if self.files.len() > 1 => {
                    fault(
                        &format!("files[{index}].member"),
                        "is missing, only a source of one file needs none".to_owned(),
                    );
                }
                None => {}
            }
        }
    }
}

impl Source {
    fn check(&self, fault: &mut impl FnMut(&str, String)) {
        match self {
            Self::Pypi(wheel) => {
                let tags = [
                    ("python", &wheel.python),
                    ("abi", &wheel.abi),
                    ("platform", &wheel.platform),
                ];
                let words = [("package", &wheel.package), ("version", &wheel.version)].into_iter();
                let given = tags
                    .iter()
                    .filter_map(|(field, tag)| Some((*field, tag.as_ref()?)));
                for (field, text) in words.chain(given) {
                    if let Err(problem) = check_word(text) {
                        fault(
                            &format!("source.pypi.{field}"),
                            format!("{text:?} {problem}"),
                        );
                    }
                }
                let count = tags.iter().filter(|(_, tag)| tag.is_some()).count();
                if count != 0 && count != tags.len() {
                    fault(
                        "source.pypi",
                        "python, abi and platform go together".to_owned(),
                    );
                }
                if !is_sha256(&wheel.wheel_sha256) {
                    let problem = format!(
                        "{:?} is not 64 lower-case hexadecimal digits",
                        wheel.wheel_sha256
                    );
                    fault("source.pypi.wheel_sha256", problem);
                }
            }
            Self::Hf(repository) => {
                let mut parts = repository.repository.split('/');
                let is_pair =
                    parts.clone().count() == 2 && parts.all(|part| check_word(part).is_ok());
                if !is_pair {
                    fault(
                        "source.hf.repository",
                        format!("{:?} is not `organisation/name`", repository.repository),
                    );
                }
                if let Err(problem) = check_word(&repository.revision) {
                    fault(
                        "source.hf.revision",
                        format!("{:?} {problem}", repository.revision),
                    );
                }
            }
            Self::Https(mirror) => {
                let rest = mirror
                    .url
                    .strip_prefix("https://")
                    .or_else(|| mirror.url.strip_prefix("http://"));
                let is_plain = |rest: &str| {
                    let host = rest.split(['/', '?', '#']).next().unwrap_or_default();
                    !host.is_empty()
                        && !host.contains('@')
                        && rest.bytes().all(|byte| byte.is_ascii_graphic())
                };
                if !rest.is_some_and(is_plain) {
                    fault(
                        "source.https.url",
                        format!(
                            "{:?} is no http(s) URL without user name and spaces",
                            mirror.url
                        ),
                    );
                }
            }
            Self::Path(local) => {
                if local.path.as_os_str().is_empty() {
                    fault("source.path.path", "is empty".to_owned());
                }
            }
        }
    }
}

/// A word that is safe in a file name, in a URL and on a command line.
fn check_word(text: &str) -> Result<(), &'static str> {
    let is_safe = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | '+');
    let starts_well = text.starts_with(|c: char| c.is_ascii_alphanumeric());
    if starts_well && text.len() <= 200 && text.chars().all(is_safe) {
        return Ok(());
    }
    Err("must be letters, digits, `.`, `_`, `-` and `+`, and start with a letter or digit")
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"
        schema_version = 1

        [[item]]
        name = "library"
        version = "1.2.3"
        arch = "x86_64"
        licence = "MIT"
        source.pypi = { package = "library", version = "1.2.3", wheel_sha256 = "DIGEST", python = "3.11", abi = "cp311", platform = "manylinux_2_28_x86_64" }
        files = [{ member = "library/lib.so", name = "lib.so", size_bytes = 7, sha256 = "DIGEST" }]

        [[item]]
        name = "library"
        version = "1.2.3"
        arch = "aarch64"
        licence = "MIT"
        source.https = { url = "https://mirror.example/lib.so" }
        files = [{ name = "lib.so", size_bytes = 7, sha256 = "DIGEST" }]

        [[item]]
        name = "model"
        licence = "Apache-2.0"
        source.hf = { repository = "org/model", revision = "main" }

        [[item.files]]
        member = "onnx/model.bin"
        name = "model.bin"
        size_bytes = 7
        sha256 = "DIGEST"

        [[item]]
        name = "local"
        licence = "MIT"
        source.path = { path = "../here" }
        files = [
            { member = "a", name = "a", size_bytes = 7, sha256 = "DIGEST" },
            { member = "b", name = "b", size_bytes = 7, sha256 = "DIGEST" },
        ]
    "#;

    fn good() -> String {
        GOOD.replace("DIGEST", &"0123456789abcdef".repeat(4))
    }

    fn names(items: &[&Item]) -> Vec<String> {
        items.iter().map(|item| item.directory()).collect()
    }

    #[test]
    fn every_source_is_read() {
        let lock = Lock::parse(&good()).unwrap();
        assert_eq!(lock.items.len(), 4);
        assert!(
            matches!(&lock.items[0].source, Source::Pypi(wheel) if wheel.abi.as_deref() == Some("cp311"))
        );
        assert!(
            matches!(&lock.items[1].source, Source::Https(mirror) if mirror.url == "https://mirror.example/lib.so")
        );
        assert!(
            matches!(&lock.items[2].source, Source::Hf(repository) if repository.revision == "main")
        );
        assert!(
            matches!(&lock.items[3].source, Source::Path(local) if local.path == Path::new("../here"))
        );
    }

    #[test]
    fn the_variant_of_the_architecture_is_chosen() {
        let lock = Lock::parse(&good()).unwrap();
        for (arch, is_wheel) in [("x86_64", true), ("aarch64", false)] {
            let items = lock.items_for(arch).unwrap();
            assert_eq!(names(&items), ["library-1.2.3", "local", "model"]);
            assert_eq!(matches!(items[0].source, Source::Pypi(_)), is_wheel);
        }
        let error = lock.items_for("riscv64").unwrap_err().to_string();
        assert_eq!(
            error,
            "library has no item for riscv64, only for x86_64, aarch64"
        );
    }

    #[test]
    fn bad_locks_are_refused_with_the_field() {
        let digest = "0123456789abcdef".repeat(4);
        for (old, new, expected) in [
            (
                "schema_version = 1",
                "schema_version = 2",
                "schema_version is 2, this build reads 1",
            ),
            (
                "licence = \"MIT\"",
                "licence = \"MIT\"\ncolour = 1",
                "unknown field `colour`",
            ),
            (
                "revision = \"main\"",
                "revision = \"main\", branch = \"x\"",
                "unknown field `branch`",
            ),
            ("source.hf", "source.ftp", "unknown variant `ftp`"),
            (
                "source.hf = {",
                "source.path = { path = \"x\" }\nsource.hf = {",
                "wanted exactly 1 element",
            ),
            (
                "name = \"model\"",
                "name = \"../model\"",
                "item[2].name: \"../model\" must be letters",
            ),
            (
                "name = \"model\"",
                "name = \".model\"",
                "item[2].name: \".model\" must be letters",
            ),
            (
                "name = \"model.bin\"",
                "name = \"sub/model.bin\"",
                "item[2].files[0].name",
            ),
            (
                "name = \"b\"",
                "name = \"a\"",
                "item[3].files[1].name: \"a\" comes twice",
            ),
            (
                "onnx/model.bin",
                "../model.bin",
                "item[2].files[0].member: \"../model.bin\" leaves the directory by `..`",
            ),
            (
                "member = \"a\", ",
                "",
                "item[3].files[0].member: is missing",
            ),
            (
                "member = \"onnx/model.bin\"",
                "",
                "item[2].files[0].member: is missing, this source holds many files",
            ),
            (
                "arch = \"aarch64\"",
                "",
                "item[1].name: another item goes to library-1.2.3 already",
            ),
            (
                "abi = \"cp311\", ",
                "",
                "item[0].source.pypi: python, abi and platform go together",
            ),
            (
                "package = \"library\"",
                "package = \"-r\"",
                "item[0].source.pypi.package: \"-r\" must be letters",
            ),
            (
                "org/model",
                "org",
                "item[2].source.hf.repository: \"org\" is not `organisation/name`",
            ),
            ("https://mirror", "ftp://mirror", "item[1].source.https.url"),
            (
                "https://mirror",
                "https://user:secret@mirror",
                "item[1].source.https.url",
            ),
            (
                digest.as_str(),
                "ABCD",
                "item[0].source.pypi.wheel_sha256: \"ABCD\" is not 64 lower-case hexadecimal digits",
            ),
            ("size_bytes = 7", "size_bytes = -7", "invalid value"),
        ] {
            let text = good().replacen(old, new, 1);
            assert_ne!(text, good(), "{old}");
            let error = Lock::parse(&text).unwrap_err();
            let text = match &error {
                LockError::Form(source) => source.to_string(),
                other => other.to_string(),
            };
            assert!(text.contains(expected), "{expected}: {text}");
        }
    }

    #[test]
    fn a_lock_of_any_size_is_refused_without_being_read_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("large.toml");
        File::create(&path).unwrap().set_len(100 << 20).unwrap();
        assert!(matches!(Lock::load(&path), Err(LockError::TooLarge)));
        assert!(
            Lock::load(&dir.path().join("gone.toml"))
                .unwrap_err()
                .to_string()
                .contains("gone.toml")
        );
    }

    #[test]
    fn the_locks_of_this_repository_are_for_every_supported_machine() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/locks");
        let mut count = 0;
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "toml") {
                continue;
            }
            let lock = Lock::load(&path).unwrap();
            for arch in ["x86_64", "aarch64"] {
                lock.items_for(arch).unwrap();
            }
            count += 1;
        }
        assert!(count >= 2);
    }

    #[test]
    fn the_examples_of_the_page_about_locks_are_locks() {
        let page = include_str!("../../configs/locks/README.md");
        let examples: Vec<_> = page
            .split("```toml\n")
            .skip(1)
            .map(|rest| rest.split("```").next().unwrap())
            .collect();
        assert_eq!(examples.len(), 4);
        for example in examples {
            Lock::parse(example).unwrap();
        }
    }
}
