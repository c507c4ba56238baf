//! The crates that a binary is linked of, with the digests of `Cargo.lock`.
//!
//! Cargo is asked, since only it knows which features are on. Build scripts, macros and tests aren't in the binary and not in the list.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use serde::Deserialize;

use crate::Error;
use crate::debian::run;
use crate::definition::Architecture;

/// One crate.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Crate {
    /// Name.
    pub name: String,
    /// Version.
    pub version: String,
    /// SPDX licence expression, when the crate says one.
    pub licence: Option<String>,
    /// Lower-case hexadecimal SHA-256 of the `.crate` file; none for a crate of this repository.
    pub sha256: Option<String>,
}

#[derive(Deserialize)]
struct CargoLock {
    package: Vec<LockedCrate>,
}

#[derive(Deserialize)]
struct LockedCrate {
    name: String,
    version: String,
    checksum: Option<String>,
}

/// The crates that are linked into the binaries of a package of the workspace at `root`, sorted, each once.
pub fn linked(root: &Path, package: &str, architecture: Architecture) -> Result<Vec<Crate>, Error> {
    let target = match architecture {
        Architecture::Amd64 => "x86_64-unknown-linux-gnu",
        Architecture::Arm64 => "aarch64-unknown-linux-gnu",
    };
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let tree = run(Command::new(cargo).current_dir(root).args([
        "tree",
        "--locked",
        "--package",
        package,
        "--edges",
        "normal,no-proc-macro",
        "--target",
        target,
        "--prefix",
        "none",
        "--format",
        "{p}|{l}|",
    ]))?;
    let path = root.join("Cargo.lock");
    let lock = std::fs::read_to_string(&path).map_err(|source| Error::read(&path, source))?;
    parse(&tree, &lock).map_err(|error| error.in_file(&path))
}

/// Reads what Cargo says: `name vX.Y.Z (place)|licence|`, and a mark behind it when a crate was listed before.
fn parse(tree: &str, lock: &str) -> Result<Vec<Crate>, Error> {
    let lock: CargoLock = toml::from_str(lock).map_err(|source| Error::Toml(Box::new(source)))?;
    let locked: BTreeMap<(&str, &str), &Option<String>> = lock
        .package
        .iter()
        .map(|it| ((it.name.as_str(), it.version.as_str()), &it.checksum))
        .collect();
    let mut crates = BTreeSet::new();
    for line in tree.lines() {
        let strange = || Error::entry("cargo tree", format!("says {line:?}, which names no crate"));
        let mut fields = line.split('|');
        let (Some(name), Some(licence)) = (fields.next(), fields.next()) else {
            return Err(strange());
        };
        let mut words = name.split(' ');
        let (Some(name), Some(version)) = (
            words.next(),
            words.next().and_then(|it| it.strip_prefix('v')),
        ) else {
            return Err(strange());
        };
        let Some(sha256) = locked.get(&(name, version)) else {
            return Err(Error::Unlocked {
                what: format!("the crate {name} {version}"),
                present: "build",
            });
        };
        // Before SPDX expressions, crates separated a choice with a slash.
        let licence = licence.split('/').map(str::trim).collect::<Vec<_>>();
        crates.insert(Crate {
            name: name.to_owned(),
            version: version.to_owned(),
            licence: Some(licence.join(" OR ")).filter(|licence| !licence.is_empty()),
            sha256: (*sha256).clone(),
        });
    }
    Ok(crates.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCK: &str = r#"
        version = 4
        [[package]]
        name = "server"
        version = "0.1.0"
        [[package]]
        name = "half"
        version = "2.6.0"
        source = "registry"
        checksum = "aa"
    "#;

    #[test]
    fn a_crate_comes_once_with_its_digest_and_without_the_place_it_is_in() {
        let tree = "server v0.1.0 (/home/somebody/server)|Apache-2.0|\n\
                    half v2.6.0|MIT/Apache-2.0|\n\
                    half v2.6.0|MIT/Apache-2.0| (*)\n";
        let crates = parse(tree, LOCK).unwrap();
        let said: Vec<_> = crates
            .iter()
            .map(|it| {
                (
                    &*it.name,
                    &*it.version,
                    it.licence.as_deref(),
                    it.sha256.as_deref(),
                )
            })
            .collect();
        assert_eq!(
            said,
            [
                ("half", "2.6.0", Some("MIT OR Apache-2.0"), Some("aa")),
                ("server", "0.1.0", Some("Apache-2.0"), None)
            ]
        );
    }

    #[test]
    fn a_crate_that_no_lock_has_is_an_error() {
        let error = parse("half v2.7.0|MIT|\n", LOCK).unwrap_err();
        assert!(error.to_string().contains("half 2.7.0"), "{error}");
    }
}
