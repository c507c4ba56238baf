//! What an image is made of: a bill of materials in CycloneDX 1.6, with digests and licences.
//!
//! CycloneDX and not SPDX 2.3, since it has a kind of component for models.
//! A licence is what the source says it is: the crate, the package's copyright file, the fetch lock, the bundle.
//! Where none says one, the component has the property [`NO_LICENCE`] and is named in [`Sbom::unlicensed`]; none is guessed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use outrider_bundle::digest::sha256_hex;
use outrider_bundle::lock::Item;
use outrider_bundle::manifest::FileEntry;
use serde_json::{Value, json};

use crate::Error;
use crate::build;
use crate::crates::Crate;
use crate::debian;
use crate::definition::Base;
use crate::layout::canonical_json;
use crate::lock::{Package, load_bundle};
use crate::provenance::{built, crate_purl, package_purl};
use crate::tree::{Content, Node, Tree};

/// Media type of the document, and artifact type of the manifest that attaches it.
pub const MEDIA_TYPE: &str = "application/vnd.cyclonedx+json";

/// Predicate type of a statement that holds the document.
pub const PREDICATE_TYPE: &str = "https://cyclonedx.org/bom";

/// Property of a component whose licence nothing says.
pub const NO_LICENCE: &str = "outrider:licence";

/// Where Debian keeps the licences that many packages have.
const COMMON_LICENCES: &str = "/usr/share/common-licenses/";

/// What a bill of materials is made of.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// What was built, and how.
    pub options: &'a build::Options<'a>,
    /// Digest of the manifest, `sha256:…`.
    pub digest: &'a str,
    /// Crates of the server.
    pub crates: &'a [Crate],
    /// Items of the fetch locks, which say where runtime libraries come from.
    pub items: &'a [Item],
}

/// A bill of materials.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sbom {
    /// The document.
    pub bytes: Vec<u8>,
    /// Components without a licence.
    pub unlicensed: Vec<String>,
}

/// Makes the document; the same inputs give the same bytes.
pub fn make(inputs: &Inputs<'_>) -> Result<Sbom, Error> {
    let options = inputs.options;
    let definition = options.definition;
    let mut bill = Bill::default();
    if !options.weights_only {
        bill.add_base(options)?;
        bill.add_files(inputs)?;
    }
    bill.add_bundle(options)?;
    let root = json!({
        "bom-ref": "image",
        "type": "container",
        "name": definition.name,
        "version": inputs.digest,
        "hashes": hashes(inputs.digest.trim_start_matches("sha256:")),
    });
    let top: Vec<&Value> = bill.components.iter().map(|it| &it["bom-ref"]).collect();
    let mut dependencies = vec![json!({ "ref": "image", "dependsOn": top })];
    dependencies.append(&mut bill.dependencies);
    let document = json!({
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": build::created(options.epoch_s),
            "tools": { "components": [{
                "type": "application",
                "name": env!("CARGO_PKG_NAME"),
                "version": env!("CARGO_PKG_VERSION"),
            }] },
            "component": root,
        },
        "components": bill.components,
        "dependencies": dependencies,
    });
    Ok(Sbom {
        bytes: canonical_json(&document),
        unlicensed: bill.unlicensed,
    })
}

/// A document on its way.
#[derive(Default)]
struct Bill {
    components: Vec<Value>,
    dependencies: Vec<Value>,
    unlicensed: Vec<String>,
}

/// What is said of a licence.
enum Licence {
    /// An SPDX expression.
    Expression(String),
    /// Names that aren't SPDX identifiers.
    Names(BTreeSet<String>),
    /// Nothing.
    Unknown,
}

impl From<Option<String>> for Licence {
    fn from(expression: Option<String>) -> Self {
        expression.map_or(Self::Unknown, Self::Expression)
    }
}

impl Bill {
    /// A component with what its licence is.
    fn licensed(&mut self, mut component: Value, licence: Licence) -> Value {
        match licence {
            Licence::Expression(expression) => {
                component["licenses"] = json!([{ "expression": expression }]);
            }
            Licence::Names(names) => {
                let names = names
                    .iter()
                    .map(|name| json!({ "license": { "name": name } }));
                component["licenses"] = names.collect();
            }
            Licence::Unknown => {
                let name = component["name"].as_str().unwrap_or_default().to_owned();
                self.unlicensed.push(name);
                component["properties"] = json!([{ "name": NO_LICENCE, "value": "unknown" }]);
            }
        }
        component
    }

    fn add_base(&mut self, options: &build::Options<'_>) -> Result<(), Error> {
        if let Base::Oci(oci) = &options.definition.base {
            let component = json!({
                "bom-ref": "base",
                "type": "container",
                "name": "base",
                "version": oci.digest,
                "hashes": hashes(oci.digest.trim_start_matches("sha256:")),
            });
            let component = self.licensed(component, Licence::Unknown);
            self.components.push(component);
        }
        let copyrights = copyrights(&options.lock.packages, options.packages_dir)?;
        for (package, copyright) in options.lock.packages.iter().zip(copyrights) {
            let purl = package_purl(package);
            let component = json!({
                "bom-ref": purl,
                "type": "library",
                "name": package.name,
                "version": package.version,
                "purl": purl,
                "hashes": hashes(&package.sha256),
            });
            let licence = copyright.map_or(Licence::Unknown, |text| licence_of(&text));
            let component = self.licensed(component, licence);
            self.components.push(component);
        }
        Ok(())
    }

    /// Files of the runtime and of the app, and the crates of those that are built.
    fn add_files(&mut self, inputs: &Inputs<'_>) -> Result<(), Error> {
        let options = inputs.options;
        let built = built(options)?;
        for rule in options.definition.files() {
            let own = || Licence::Expression(env!("CARGO_PKG_LICENSE").to_owned());
            if let Some(file) = built.get(&rule.to) {
                let mut component = file_component(&rule.to, "application", file);
                component["version"] = json!(env!("CARGO_PKG_VERSION"));
                let component = self.licensed(component, own());
                self.components.push(component);
                let crates: Vec<String> = inputs.crates.iter().map(crate_purl).collect();
                self.dependencies
                    .push(json!({ "ref": reference(&rule.to), "dependsOn": crates }));
            } else if let Some(text) = &rule.text {
                let file = FileEntry {
                    size_bytes: text.len() as u64,
                    sha256: sha256_hex(text.as_bytes()),
                };
                let component = self.licensed(file_component(&rule.to, "file", &file), own());
                self.components.push(component);
            } else if let Some(file) = options.lock.file(&rule.to) {
                let item = inputs
                    .items
                    .iter()
                    .find(|item| item.files.iter().any(|it| it.sha256 == file.sha256));
                let mut component = file_component(&rule.to, "library", &file);
                let licence = match item {
                    Some(item) => {
                        component["group"] = json!(item.name);
                        if let Some(version) = &item.version {
                            component["version"] = json!(version);
                        }
                        Licence::Expression(item.licence.clone())
                    }
                    // What lies in the repository is of the repository, what was fetched isn't.
                    None if is_own(rule.from.as_deref()) => {
                        component["type"] = json!("file");
                        own()
                    }
                    None => Licence::Unknown,
                };
                let component = self.licensed(component, licence);
                self.components.push(component);
            }
        }
        if built.is_empty() {
            return Ok(());
        }
        for linked in inputs.crates {
            let purl = crate_purl(linked);
            let mut component = json!({
                "bom-ref": purl,
                "type": "library",
                "name": linked.name,
                "version": linked.version,
                "purl": purl,
            });
            if let Some(sha256) = &linked.sha256 {
                component["hashes"] = hashes(sha256);
            }
            let component = self.licensed(component, linked.licence.clone().into());
            self.components.push(component);
        }
        Ok(())
    }

    fn add_bundle(&mut self, options: &build::Options<'_>) -> Result<(), Error> {
        let Some(bundle) = &options.definition.bundle else {
            return Ok(());
        };
        let manifest = load_bundle(&options.root.join(&bundle.from))?;
        let files = options.lock.files.iter();
        let files = files.filter(|file| options.definition.is_in_bundle(&file.path));
        let files: Vec<Value> = files
            .map(|file| {
                let entry = FileEntry {
                    size_bytes: file.size_bytes,
                    sha256: file.sha256.clone(),
                };
                file_component(&file.path, "file", &entry)
            })
            .collect();
        let mut ancestors = Vec::new();
        for source in &manifest.sources {
            let component = json!({
                "type": "machine-learning-model",
                "name": source.name,
                "hashes": hashes(&source.sha256),
            });
            ancestors.push(self.licensed(component, source.licence.clone().into()));
        }
        // A model has the terms of everything that it was made of.
        let licences: Option<BTreeSet<String>> = manifest
            .sources
            .iter()
            .map(|source| source.licence.clone())
            .collect();
        let licence = licences.and_then(|licences| match licences.len() {
            0 | 1 => licences.into_iter().next(),
            _ => Some(
                licences
                    .iter()
                    .map(|licence| format!("({licence})"))
                    .collect::<Vec<_>>()
                    .join(" AND "),
            ),
        });
        let component = json!({
            "bom-ref": "bundle",
            "type": "machine-learning-model",
            "name": manifest.name,
            "version": format!("sha256:{}", manifest.digest()),
            "components": files,
            "pedigree": { "ancestors": ancestors },
        });
        let component = self.licensed(component, licence.into());
        self.components.push(component);
        Ok(())
    }
}

fn file_component(path: &str, kind: &str, file: &FileEntry) -> Value {
    json!({
        "bom-ref": reference(path),
        "type": kind,
        "name": path,
        "hashes": hashes(&file.sha256),
    })
}

fn reference(path: &str) -> String {
    format!("file:{path}")
}

fn hashes(sha256: &str) -> Value {
    json!([{ "alg": "SHA-256", "content": sha256 }])
}

/// Whether a path is of the repository itself: the store is hidden in it, and so is what version control keeps.
fn is_own(from: Option<&Path>) -> bool {
    from.and_then(Path::to_str)
        .is_some_and(|from| !from.starts_with(['.', '/']))
}

/// The copyright file of each package; the documents of a package may be those of another by a link.
fn copyrights(packages: &[Package], packages_dir: &Path) -> Result<Vec<Option<String>>, Error> {
    let scratch =
        tempfile::tempdir().map_err(|source| Error::write(std::env::temp_dir(), source))?;
    let mut files = BTreeMap::new();
    let mut links = BTreeMap::new();
    for (index, package) in packages.iter().enumerate() {
        let path = packages_dir.join(debian::file_name(package));
        let scratch = scratch.path().join(index.to_string());
        std::fs::create_dir(&scratch).map_err(|source| Error::write(&scratch, source))?;
        let tree = debian::unpack_package(&path, &scratch).map_err(|error| error.in_file(&path))?;
        let documents = format!("usr/share/doc/{}", package.name);
        if let Some(Node::Link(target)) = tree.get(&documents) {
            links.insert(package.name.clone(), target.clone());
        }
        if let Some(text) = copyright(&tree, &documents)? {
            files.insert(package.name.clone(), text);
        }
    }
    let find = |package: &Package| {
        let holder = links.get(&package.name).unwrap_or(&package.name);
        files.get(holder).cloned()
    };
    Ok(packages.iter().map(find).collect())
}

fn copyright(tree: &Tree, documents: &str) -> Result<Option<String>, Error> {
    let Some(Node::File(content, _)) = tree.get(&format!("{documents}/copyright")) else {
        return Ok(None);
    };
    let bytes = match content {
        Content::Bytes(bytes) => bytes.clone(),
        Content::Path(path, _) => {
            std::fs::read(path).map_err(|source| Error::read(path, source))?
        }
    };
    Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
}

/// The licences that a copyright file names: in the fields `License` where it has the form of DEP 5, and the common licences that it refers to.
fn licence_of(copyright: &str) -> Licence {
    let mut names = BTreeSet::new();
    if copyright.starts_with("Format:") {
        for line in copyright.lines() {
            if let Some(name) = line.strip_prefix("License:").map(str::trim)
                && !name.is_empty()
            {
                names.insert(name.to_owned());
            }
        }
    } else {
        for (at, _) in copyright.match_indices(COMMON_LICENCES) {
            let name = copyright[at + COMMON_LICENCES.len()..]
                .split(|end: char| !(end.is_ascii_alphanumeric() || "-.".contains(end)))
                .next()
                .unwrap_or_default()
                .trim_end_matches('.');
            if !name.is_empty() {
                names.insert(name.to_owned());
            }
        }
    }
    match names.is_empty() {
        true => Licence::Unknown,
        false => Licence::Names(names),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_licences_of_a_package_are_those_that_its_copyright_file_names() {
        for (text, expected) in [
            (
                "Format: https://…\nFiles: a\nLicense: GPL-2+\n text\nFiles: b\nLicense: MPL-2.0\n",
                &["GPL-2+", "MPL-2.0"] as &[&str],
            ),
            (
                "See `/usr/share/common-licenses/GPL-3' and /usr/share/common-licenses/LGPL-2.1.\n",
                &["GPL-3", "LGPL-2.1"],
            ),
            ("do what you like", &[]),
        ] {
            let names = match licence_of(text) {
                Licence::Names(names) => names,
                Licence::Unknown => BTreeSet::new(),
                Licence::Expression(it) => panic!("{it}"),
            };
            assert!(names.iter().eq(expected), "{names:?}");
        }
    }

    #[test]
    fn what_was_fetched_is_not_of_the_repository() {
        for (path, expected) in [
            ("images/server.yaml", true),
            (".outrider/store/x.so", false),
            ("/usr/lib/x.so", false),
        ] {
            assert_eq!(is_own(Some(Path::new(path))), expected, "{path}");
        }
    }
}
