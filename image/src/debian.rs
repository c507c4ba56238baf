//! A root of Debian packages: `.deb` files by the digests of a lock, unpacked and not installed.
//!
//! No maintainer script runs and no package manager is asked what a package needs: what the definition names is there, and nothing else.
//! A file that isn't a plain file, a directory or a symbolic link is refused, but for a hard link, which becomes a copy.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use lzma_rust2::XzReader;
use outrider_bundle::digest::{hash_file, is_sha256};

use crate::Error;
use crate::definition::{Architecture, Debian};
use crate::lock::Package;
use crate::tree::{Content, Mode, Node, Tree, is_at_or_below};

/// Where `ca-certificates` keeps the certificates of its authorities.
const CERTIFICATES: &str = "usr/share/ca-certificates/mozilla";

/// Unpacks the locked packages, which lie in `packages_dir` under the names that [`file_name`] gives them. Contents go into `scratch`.
pub fn unpack(
    debian: &Debian,
    packages: &[Package],
    packages_dir: &Path,
    scratch: &Path,
) -> Result<Tree, Error> {
    let mut tree = Tree::default();
    for (index, package) in packages.iter().enumerate() {
        let path = packages_dir.join(file_name(package));
        check_package(package, &path)?;
        let scratch = scratch.join(index.to_string());
        fs::create_dir(&scratch).map_err(|source| Error::write(&scratch, source))?;
        let unpacked = unpack_package(&path, &scratch).map_err(|error| error.in_file(&path))?;
        for (name, node) in unpacked.iter() {
            if is_kept(debian, name) {
                tree.insert(name, node.clone())?;
            }
        }
        if debian.certificate_file.is_some() && package.name == "ca-certificates" {
            add_certificates(debian, &unpacked, &mut tree)?;
        }
    }
    if let Some(path) = &debian.certificate_file
        && tree.get(path).is_none()
    {
        let problem = "certificate_file needs the package ca-certificates";
        return Err(Error::entry(path, problem));
    }
    Ok(tree)
}

/// Brings the packages that `packages_dir` lacks, from the mirrors that `apt` of this machine is set up with.
pub fn fetch(packages: &[Package], packages_dir: &Path) -> Result<(), Error> {
    fs::create_dir_all(packages_dir).map_err(|source| Error::write(packages_dir, source))?;
    for package in packages {
        let path = packages_dir.join(file_name(package));
        if path.exists() {
            check_package(package, &path)?;
            continue;
        }
        let aside = tempfile::tempdir_in(packages_dir)
            .map_err(|source| Error::write(packages_dir, source))?;
        let wanted = format!(
            "{}:{}={}",
            package.name, package.architecture, package.version
        );
        let wanted = wanted.replace(":all=", "=");
        run(Command::new("apt-get")
            .args(["-o", "APT::Sandbox::User=root", "download", &wanted])
            .current_dir(aside.path()))?;
        let entry = fs::read_dir(aside.path())
            .and_then(|mut entries| entries.next().transpose())
            .map_err(|source| Error::read(aside.path(), source))?;
        let Some(entry) = entry else {
            return Err(Error::Command {
                command: format!("apt-get download {wanted}"),
                problem: "brought no file".to_owned(),
            });
        };
        check_package(package, &entry.path())?;
        fs::rename(entry.path(), &path).map_err(|source| Error::write(&path, source))?;
    }
    Ok(())
}

/// What the package index of this machine says about the newest version of each package.
pub fn look_up(names: &[String], architecture: Architecture) -> Result<Vec<Package>, Error> {
    let query = |name: &String| {
        let wanted = format!("{name}:{}", architecture.name());
        let text = run(Command::new("apt-cache").env("LC_ALL", "C").args([
            "show",
            "--no-all-versions",
            &wanted,
        ]))?;
        parse_record(&text).ok_or_else(|| Error::Command {
            command: format!("apt-cache show --no-all-versions {wanted}"),
            problem: "has no Package, Version, Architecture, Size and SHA256".to_owned(),
        })
    };
    names.iter().map(query).collect()
}

/// Name of a package's file: without the epoch's colon, which no archive has in its names.
pub fn file_name(package: &Package) -> String {
    let version = package.version.replace(':', "%3a");
    format!("{}_{version}_{}.deb", package.name, package.architecture)
}

fn parse_record(text: &str) -> Option<Package> {
    let fields: BTreeMap<&str, &str> = text
        .lines()
        .take_while(|line| !line.is_empty())
        .filter(|line| !line.starts_with(' '))
        .filter_map(|line| line.split_once(": "))
        .collect();
    let field = |name: &str| fields.get(name).map(|value| (*value).to_owned());
    Some(Package {
        name: field("Package")?,
        version: field("Version")?,
        architecture: field("Architecture")?,
        size_bytes: field("Size")?.parse().ok()?,
        sha256: field("SHA256").filter(|sha256| is_sha256(sha256))?,
    })
}

fn check_package(package: &Package, path: &Path) -> Result<(), Error> {
    let (actual_bytes, actual) = hash_file(path).map_err(|source| Error::read(path, source))?;
    if actual_bytes != package.size_bytes || actual != package.sha256 {
        return Err(Error::Stale {
            file: file_name(package),
            expected_bytes: package.size_bytes,
            expected: package.sha256.clone(),
            actual_bytes,
            actual,
        });
    }
    Ok(())
}

/// Reads the member `data.tar.*` of a `.deb`.
pub(crate) fn unpack_package(path: &Path, scratch: &Path) -> Result<Tree, Error> {
    let read = |source| Error::read("the package", source);
    let file = File::open(path).map_err(read)?;
    let mut archive = ar::Archive::new(file);
    while let Some(member) = archive.next_entry() {
        let member = member.map_err(read)?;
        let name = String::from_utf8_lossy(member.header().identifier()).into_owned();
        let data: Box<dyn Read> = match name.trim_end_matches('/') {
            "data.tar" => Box::new(member),
            "data.tar.xz" => Box::new(XzReader::new(member, true)),
            "data.tar.zst" => Box::new(zstd::stream::read::Decoder::new(member).map_err(read)?),
            "data.tar.gz" => Box::new(flate2::read::MultiGzDecoder::new(member)),
            name if name.starts_with("data.tar") => {
                let problem = "is compressed in a way that isn't read, only xz, zst and gz are";
                return Err(Error::entry(name, problem));
            }
            _ => continue,
        };
        return unpack_archive(data, scratch);
    }
    Err(Error::entry("data.tar", "is not in the package"))
}

fn unpack_archive(data: impl Read, scratch: &Path) -> Result<Tree, Error> {
    let read = |source| Error::read("the archive", source);
    let mut tree = Tree::default();
    let mut archive = tar::Archive::new(data);
    for (index, member) in archive.entries().map_err(read)?.enumerate() {
        let mut member = member.map_err(read)?;
        let Some(path) = text(&member.path_bytes())?.map(str::to_owned) else {
            continue;
        };
        let link = match member.link_name_bytes() {
            Some(link) => Some(utf8(&link)?.to_owned()),
            None => None,
        };
        let mode = member.header().mode().map_err(read)?;
        let node = match (member.header().entry_type(), link) {
            // Only directories with something in them are needed, and those are implied.
            (tar::EntryType::Directory, _) => continue,
            (tar::EntryType::Regular, _) => {
                let content = scratch.join(index.to_string());
                let copied = File::create_new(&content).and_then(|mut file| {
                    io::copy(&mut member, &mut file)?;
                    file.flush()
                });
                copied.map_err(|source| Error::write(&content, source))?;
                let mode = if mode & 0o111 == 0 {
                    Mode::Plain
                } else {
                    Mode::Executable
                };
                Node::File(Content::Path(content, None), mode)
            }
            (tar::EntryType::Symlink, Some(target)) => Node::Link(target),
            (tar::EntryType::Link, Some(target)) => {
                let target = text(target.as_bytes())?.unwrap_or_default();
                match tree.get(target) {
                    Some(node @ Node::File(..)) => node.clone(),
                    _ => {
                        return Err(Error::entry(
                            path,
                            format!("is a hard link to {target}, which isn't there"),
                        ));
                    }
                }
            }
            (other, _) => {
                let problem =
                    format!("is {other:?}, only files, directories and links are unpacked");
                return Err(Error::entry(path, problem));
            }
        };
        tree.insert(&path, node)?;
    }
    Ok(tree)
}

/// A path of an archive as a tree has it; none for the root.
pub(crate) fn text(path: &[u8]) -> Result<Option<&str>, Error> {
    let path = utf8(path)?;
    let path = path
        .strip_prefix("./")
        .unwrap_or(path)
        .trim_end_matches('/');
    Ok((!path.is_empty() && path != ".").then_some(path))
}

fn utf8(bytes: &[u8]) -> Result<&str, Error> {
    std::str::from_utf8(bytes).map_err(|_| {
        Error::entry(
            String::from_utf8_lossy(bytes),
            "has a name that is not UTF-8",
        )
    })
}

/// Whether a path is in the root. What a licence asks to be passed on is, wherever it is.
fn is_kept(debian: &Debian, path: &str) -> bool {
    let is_excluded = debian.exclude.iter().any(|top| is_at_or_below(path, top));
    let is_licence = path.starts_with("usr/share/doc/") && path.ends_with("/copyright");
    !is_excluded || is_licence
}

/// Puts all certificates into one file, in the order of their names.
fn add_certificates(debian: &Debian, unpacked: &Tree, tree: &mut Tree) -> Result<(), Error> {
    let Some(place) = &debian.certificate_file else {
        return Ok(());
    };
    let mut all = Vec::new();
    for (path, node) in unpacked.iter() {
        let is_certificate = is_at_or_below(path, CERTIFICATES) && path.ends_with(".crt");
        if let (true, Node::File(Content::Path(file, _), _)) = (is_certificate, node) {
            let bytes = fs::read(file).map_err(|source| Error::read(file, source))?;
            all.extend_from_slice(&bytes);
            if !all.ends_with(b"\n") {
                all.push(b'\n');
            }
        }
    }
    if all.is_empty() {
        let problem = format!("has no certificate, so there is nothing for {place}");
        return Err(Error::entry(CERTIFICATES, problem));
    }
    tree.insert(place, Node::File(Content::Bytes(all), Mode::Plain))
}

/// Runs a program; returns what it prints.
pub(crate) fn run(command: &mut Command) -> Result<String, Error> {
    let line = format!("{command:?}");
    let failed = |problem: String| Error::Command {
        command: line.clone(),
        problem,
    };
    let output = command
        .output()
        .map_err(|error| failed(error.to_string()))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(failed(said.trim().to_owned()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Where packages are kept between builds, below the root of the repository.
pub fn default_packages_dir(root: &Path) -> PathBuf {
    root.join(".outrider/packages")
}
