//! Image locks: the size and digest of everything that a definition names.
//!
//! A lock stands beside its definition (`cpu.toml`, `cpu.lock.toml`) and is written by [`Lock::make`], never by hand.
//! A definition and a lock that don't name the same things are an error, and so is a file that isn't the locked one: nothing is taken on trust, and nothing is
//! locked again on the way.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use outrider_bundle::Manifest;
use outrider_bundle::digest::{hash_file, is_sha256, write_atomic};
use outrider_bundle::manifest::{FILE_NAME as BUNDLE_MANIFEST, FieldFault, FileEntry};
use serde::Deserialize;

use crate::Error;
use crate::definition::{Base, Bundle, Definition, is_package_name};

/// The schema version this build reads and writes.
pub const SCHEMA_VERSION: u32 = 1;

/// An image lock.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lock {
    /// Version of this format, [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Digest of the bundle, which ties the image to `/v1/models`.
    #[serde(default)]
    pub bundle_digest: Option<String>,
    /// Debian packages of the base, sorted by name.
    #[serde(default, rename = "package")]
    pub packages: Vec<Package>,
    /// Files, sorted by path.
    #[serde(default, rename = "file")]
    pub files: Vec<LockedFile>,
}

/// One Debian package.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Package {
    /// Name.
    pub name: String,
    /// Version with epoch and revision.
    pub version: String,
    /// Architecture, or `all`.
    pub architecture: String,
    /// Size of the `.deb` in bytes.
    pub size_bytes: u64,
    /// Lower-case hexadecimal SHA-256 of the `.deb`.
    pub sha256: String,
}

/// One file of the image.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LockedFile {
    /// Path in the image.
    pub path: String,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Lower-case hexadecimal SHA-256.
    pub sha256: String,
}

impl Lock {
    /// Reads a lock.
    pub fn load(path: &Path) -> Result<Self, Error> {
        let text = fs::read_to_string(path).map_err(|source| Error::read(path, source))?;
        Self::parse(&text).map_err(|error| error.in_file(path))
    }

    /// Reads a lock from its text.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let lock: Self = toml::from_str(text).map_err(|source| Error::Toml(Box::new(source)))?;
        if lock.schema_version != SCHEMA_VERSION {
            return Err(Error::SchemaVersion {
                found: lock.schema_version,
                reads: SCHEMA_VERSION,
            });
        }
        let faults = lock.faults();
        if faults.is_empty() {
            Ok(lock)
        } else {
            Err(Error::Values(faults))
        }
    }

    /// Takes the digest of everything that a definition names. Packages are given, since only a package index knows them.
    pub fn make(
        definition: &Definition,
        root: &Path,
        mut packages: Vec<Package>,
    ) -> Result<Self, Error> {
        let mut files = BTreeMap::new();
        for rule in definition.files().filter(|rule| !rule.built) {
            let Some(from) = &rule.from else { continue };
            let path = root.join(from);
            let (size_bytes, sha256) =
                hash_file(&path).map_err(|source| Error::read(&path, source))?;
            files.insert(rule.to.clone(), FileEntry { size_bytes, sha256 });
        }
        let mut bundle_digest = None;
        if let Some(bundle) = &definition.bundle {
            let (digest, bundle_files) = bundle_files(bundle, root)?;
            bundle_digest = Some(digest);
            files.extend(bundle_files);
        }
        packages.sort();
        let lock = Self {
            schema_version: SCHEMA_VERSION,
            bundle_digest,
            packages,
            files: files
                .into_iter()
                .map(|(path, FileEntry { size_bytes, sha256 })| LockedFile {
                    path,
                    size_bytes,
                    sha256,
                })
                .collect(),
        };
        lock.check_covers(definition)?;
        Ok(lock)
    }

    /// Whether lock and definition name the same packages and files; those of the bundle are known by the bundle alone.
    pub fn check_covers(&self, definition: &Definition) -> Result<(), Error> {
        let named: BTreeSet<&str> = match &definition.base {
            Base::Debian(debian) => debian.packages.iter().map(String::as_str).collect(),
            Base::Oci(_) => BTreeSet::new(),
        };
        let locked = self.packages.iter().map(|package| package.name.as_str());
        same(&named, &locked.collect())?;
        let named: BTreeSet<&str> = definition
            .files()
            .filter(|rule| rule.from.is_some() && !rule.built)
            .map(|rule| rule.to.as_str())
            .collect();
        let is_own = |path: &&str| {
            let bundle = definition.bundle.as_ref();
            !bundle.is_some_and(|bundle| crate::tree::is_at_or_below(path, &bundle.to))
        };
        let locked = self
            .files
            .iter()
            .map(|file| file.path.as_str())
            .filter(is_own);
        same(&named, &locked.collect())?;
        match (&definition.bundle, &self.bundle_digest) {
            (Some(_), None) => Err(unlocked("the bundle", "definition")),
            (None, Some(_)) => Err(unlocked("the bundle", "lock")),
            _ => Ok(()),
        }
    }

    /// Size and digest of a file of the image.
    pub fn file(&self, path: &str) -> Option<FileEntry> {
        let file = self.files.iter().find(|file| file.path == path)?;
        Some(FileEntry {
            size_bytes: file.size_bytes,
            sha256: file.sha256.clone(),
        })
    }

    /// The text of the lock; the same lock has the same text.
    pub fn to_toml(&self) -> String {
        // Numbers, and texts whose characters `check` and `faults` have seen, so that their JSON form is their TOML form.
        let quoted = |text: &str| serde_json::to_string(text).expect("a text can be written");
        let mut text = format!(
            "# Written by a command; changes by hand are lost.\nschema_version = {}\n",
            self.schema_version
        );
        let mut line = |key: &str, value: String| {
            writeln!(text, "{key} = {value}").expect("writing to memory doesn't fail");
        };
        if let Some(digest) = &self.bundle_digest {
            line("bundle_digest", quoted(digest));
        }
        let mut lines = String::new();
        for package in &self.packages {
            let Package {
                name,
                version,
                architecture,
                size_bytes,
                sha256,
            } = package;
            let _ = write!(
                lines,
                "\n[[package]]\nname = {}\nversion = {}\narchitecture = {}\nsize_bytes = {size_bytes}\nsha256 = {}\n",
                quoted(name),
                quoted(version),
                quoted(architecture),
                quoted(sha256)
            );
        }
        for LockedFile {
            path,
            size_bytes,
            sha256,
        } in &self.files
        {
            let _ = write!(
                lines,
                "\n[[file]]\npath = {}\nsize_bytes = {size_bytes}\nsha256 = {}\n",
                quoted(path),
                quoted(sha256)
            );
        }
        text + &lines
    }

    /// Writes the lock, whole or not at all.
    pub fn write(&self, path: &Path) -> Result<(), Error> {
        write_atomic(
            path,
            &path.with_extension("partial"),
            self.to_toml().as_bytes(),
        )
        .map_err(|source| Error::write(path, source))
    }

    fn faults(&self) -> Vec<FieldFault> {
        let mut faults = Vec::new();
        let mut fault = |field: String, problem: String| faults.push(FieldFault { field, problem });
        let mut digest = |field: String, sha256: &str| {
            if !is_sha256(sha256) {
                fault(
                    field,
                    format!("{sha256:?} is not 64 lower-case hexadecimal digits"),
                );
            }
        };
        if let Some(sha256) = &self.bundle_digest {
            digest("bundle_digest".to_owned(), sha256);
        }
        for (index, package) in self.packages.iter().enumerate() {
            digest(format!("package[{index}].sha256"), &package.sha256);
        }
        for (index, file) in self.files.iter().enumerate() {
            digest(format!("file[{index}].sha256"), &file.sha256);
        }
        let mut names = BTreeSet::new();
        for (index, package) in self.packages.iter().enumerate() {
            let field = |field: &str| format!("package[{index}].{field}");
            let Package {
                name,
                version,
                architecture,
                ..
            } = package;
            if !is_package_name(name) {
                fault(
                    field("name"),
                    format!("{name:?} is no name of a Debian package"),
                );
            }
            if !names.insert(name) {
                fault(field("name"), format!("{name:?} comes twice"));
            }
            // A version and an architecture become arguments and names of files.
            let is_word = |text: &str| {
                text.starts_with(|first: char| first.is_ascii_alphanumeric())
                    && text
                        .bytes()
                        .all(|byte| byte.is_ascii_alphanumeric() || b".+-~:".contains(&byte))
            };
            for (key, value) in [("version", version), ("architecture", architecture)] {
                if !is_word(value) {
                    fault(
                        field(key),
                        format!("{value:?} must be letters, digits and `.+-~:`"),
                    );
                }
            }
        }
        let mut paths = BTreeSet::new();
        for (index, file) in self.files.iter().enumerate() {
            let field = format!("file[{index}].path");
            if let Err(problem) = outrider_bundle::paths::check_relative(&file.path) {
                fault(field, format!("{:?} {problem}", file.path));
            } else if !paths.insert(&file.path) {
                fault(field, format!("{:?} comes twice", file.path));
            }
        }
        faults
    }
}

/// Digest of a bundle, and its files with their paths in the image.
fn bundle_files(
    bundle: &Bundle,
    root: &Path,
) -> Result<(String, BTreeMap<String, FileEntry>), Error> {
    let dir = root.join(&bundle.from);
    let manifest = load_bundle(&dir)?;
    let mut files: BTreeMap<String, FileEntry> = manifest
        .files
        .iter()
        .map(|(path, entry)| (format!("{}/{path}", bundle.to), entry.clone()))
        .collect();
    let path = dir.join(BUNDLE_MANIFEST);
    let (size_bytes, sha256) = hash_file(&path).map_err(|source| Error::read(&path, source))?;
    files.insert(
        format!("{}/{BUNDLE_MANIFEST}", bundle.to),
        FileEntry { size_bytes, sha256 },
    );
    Ok((manifest.digest(), files))
}

pub(crate) fn load_bundle(dir: &Path) -> Result<Manifest, Error> {
    Manifest::load(dir).map_err(|source| Error::Bundle {
        dir: dir.to_owned(),
        source,
    })
}

fn same(named: &BTreeSet<&str>, locked: &BTreeSet<&str>) -> Result<(), Error> {
    if let Some(what) = named.difference(locked).next() {
        return Err(unlocked(what, "definition"));
    }
    match locked.difference(named).next() {
        Some(what) => Err(unlocked(what, "lock")),
        None => Ok(()),
    }
}

fn unlocked(what: &str, present: &'static str) -> Error {
    Error::Unlocked {
        what: what.to_owned(),
        present,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lock() -> Lock {
        Lock {
            schema_version: 1,
            bundle_digest: Some("a".repeat(64)),
            packages: vec![Package {
                name: "libstdc++6".to_owned(),
                version: "1:12.2.0-14+deb12u1~x".to_owned(),
                architecture: "amd64".to_owned(),
                size_bytes: 7,
                sha256: "b".repeat(64),
            }],
            files: vec![LockedFile {
                path: "opt/größe \"1\".json".to_owned(),
                size_bytes: 9 << 30,
                sha256: "c".repeat(64),
            }],
        }
    }

    #[test]
    fn a_lock_is_read_as_it_was_written() {
        let text = lock().to_toml();
        assert_eq!(Lock::parse(&text).unwrap(), lock(), "{text}");
    }

    #[test]
    fn a_fault_of_a_lock_is_named() {
        for (from, to, expected) in [
            (
                "size_bytes = 7",
                "size_bytes = 7\nsurprise = 1",
                "unknown field `surprise`",
            ),
            (&*"b".repeat(64), "B", "package[0].sha256: \"B\" is not 64"),
            (&*"c".repeat(64), "c", "file[0].sha256"),
            ("\"opt/", "\"../opt/", "file[0].path"),
            (
                "\"libstdc++6\"",
                "\"--help\"",
                "package[0].name: \"--help\" is no name",
            ),
            ("\"1:12", "\"/1:12", "package[0].version"),
            (
                "schema_version = 1",
                "schema_version = 9",
                "schema_version is 9",
            ),
        ] {
            let text = lock().to_toml();
            assert!(text.contains(from), "{from} is not in the lock");
            let message = Lock::parse(&text.replacen(from, to, 1))
                .unwrap_err()
                .chain();
            assert!(message.contains(expected), "{to}: {message}");
        }
    }
}
