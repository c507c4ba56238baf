//! Where an image comes from: an in-toto statement with the predicate SLSA provenance 1.0.
//!
//! Every input has its digest in it: the lock's entries, the bundle, the sources, the crates, and what was built of them.
//! Nothing else goes in: no time, no host, no path of the machine, so that the same build has the same provenance.

use std::collections::BTreeMap;
use std::path::Path;

use outrider_bundle::digest::{hash_file, sha256_hex};
use outrider_bundle::manifest::FileEntry;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::Error;
use crate::build;
use crate::crates::Crate;
use crate::definition::{Base, Definition};
use crate::layer::Compression;
use crate::layout::canonical_json;
use crate::lock::{Lock, Package};

/// Type of every statement.
pub const STATEMENT: &str = "https://in-toto.io/Statement/v1";

/// Type of the predicate.
pub const PREDICATE_TYPE: &str = "https://slsa.dev/provenance/v1";

/// What the parameters mean; the page says it.
pub const BUILD_TYPE: &str = concat!(
    env!("CARGO_PKG_REPOSITORY"),
    "/blob/main/docs/image-evidence.md#provenance"
);

/// Who built, when the caller says nothing else: whoever has the key.
pub const BUILDER_ID: &str = concat!(env!("CARGO_PKG_REPOSITORY"), "/builder/xtask-image");

/// A statement about things with a digest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Statement {
    /// [`STATEMENT`].
    #[serde(rename = "_type")]
    pub statement_type: String,
    /// What it is about.
    pub subject: Vec<Subject>,
    /// What the predicate means.
    #[serde(rename = "predicateType")]
    pub predicate_type: String,
    /// What is said.
    pub predicate: Value,
}

/// What a statement is about.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Subject {
    /// Name; only the digest identifies.
    #[serde(default)]
    pub name: String,
    /// Digests by algorithm.
    pub digest: BTreeMap<String, String>,
}

impl Statement {
    /// A statement about an image, by the digest of its manifest in the form `sha256:…`.
    pub fn about(name: &str, digest: &str, predicate_type: &str, predicate: Value) -> Self {
        let sha256 = digest.strip_prefix("sha256:").unwrap_or(digest);
        Self {
            statement_type: STATEMENT.to_owned(),
            subject: vec![Subject {
                name: name.to_owned(),
                digest: BTreeMap::from([("sha256".to_owned(), sha256.to_owned())]),
            }],
            predicate_type: predicate_type.to_owned(),
            predicate,
        }
    }

    /// Whether this is a statement about the image with this manifest digest.
    pub fn is_about(&self, digest: &str) -> bool {
        let sha256 = digest.strip_prefix("sha256:");
        let is_it = |subject: &Subject| subject.digest.get("sha256").map(String::as_str) == sha256;
        self.statement_type == STATEMENT && sha256.is_some() && self.subject.iter().any(is_it)
    }
}

/// The sources that a build is of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Address of the repository.
    pub uri: String,
    /// Git commit.
    pub commit: String,
    /// Whether the working tree had changes that no commit has.
    pub is_modified: bool,
}

/// What provenance is made of.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// What was built, and how.
    pub options: &'a build::Options<'a>,
    /// Digest of the manifest, `sha256:…`.
    pub digest: &'a str,
    /// Documents that steer the build, such as definition, lock and `Cargo.lock`, by their paths in the repository.
    pub documents: &'a [&'a str],
    /// The sources.
    pub source: &'a Source,
    /// Crates of the server.
    pub crates: &'a [Crate],
    /// Programs that the bytes depend on beside this one, with their versions, such as compilers.
    pub tools: &'a BTreeMap<String, String>,
    /// Who built, as a URI.
    pub builder_id: &'a str,
}

/// Makes the statement; the same inputs give the same bytes.
pub fn make(inputs: &Inputs<'_>) -> Result<Vec<u8>, Error> {
    let Inputs {
        options, source, ..
    } = inputs;
    let definition = options.definition;
    let mut dependencies = vec![source_dependency(source)];
    for document in inputs.documents {
        let file = hash(&options.root.join(document))?;
        dependencies.push(dependency(document, None, &file.sha256));
    }
    if let Base::Oci(oci) = &definition.base {
        let sha256 = oci.digest.trim_start_matches("sha256:");
        dependencies.push(dependency("base", None, sha256));
    }
    dependencies.extend(lock_dependencies(
        definition,
        options.lock,
        options.weights_only,
    ));
    if !options.weights_only {
        dependencies.extend(
            built(options)?
                .iter()
                .map(|(path, file)| built_dependency(path, file)),
        );
        for file in definition.files() {
            if let Some(text) = &file.text {
                dependencies.push(dependency(&file.to, None, &sha256_hex(text.as_bytes())));
            }
        }
        for linked in inputs.crates {
            if let Some(sha256) = &linked.sha256 {
                let purl = crate_purl(linked);
                dependencies.push(dependency(&linked.name, Some(&purl), sha256));
            }
        }
    }
    let compression = match options.compression {
        Compression::None => "none",
        Compression::Zstd => "zstd",
        Compression::Gzip => "gzip",
    };
    let mut tools = inputs.tools.clone();
    // The bytes of a compressed layer are the same for one version of the library only.
    tools.insert(
        "zstd".to_owned(),
        zstd::zstd_safe::version_string().to_owned(),
    );
    let predicate = json!({
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": {
                "definition": definition.name,
                "sourceDateEpoch": options.epoch_s,
                "compression": compression,
                "maxLayerBytes": options.max_layer_bytes,
                "weightsOnly": options.weights_only,
                "labels": options.labels,
            },
            "internalParameters": { "tools": tools },
            "resolvedDependencies": dependencies,
        },
        "runDetails": {
            "builder": {
                "id": inputs.builder_id,
                "version": { "outrider-image": env!("CARGO_PKG_VERSION") },
            },
        },
    });
    let statement = Statement::about(&definition.name, inputs.digest, PREDICATE_TYPE, predicate);
    Ok(canonical_json(&statement))
}

/// What a statement lacks of the lock's entries and of what was built; what it says besides is no matter of the lock.
pub fn check(
    statement: &Statement,
    definition: &Definition,
    lock: &Lock,
    is_weights_only: bool,
    built: &BTreeMap<String, FileEntry>,
) -> Vec<String> {
    let said = &statement.predicate["buildDefinition"]["resolvedDependencies"];
    let said: &[Value] = said.as_array().map_or(&[], Vec::as_slice);
    let built = built
        .iter()
        .map(|(path, file)| built_dependency(path, file));
    lock_dependencies(definition, lock, is_weights_only)
        .into_iter()
        .chain(built)
        .filter(|wanted| !said.contains(wanted))
        .map(|wanted| {
            let (name, sha256) = (&wanted["name"], &wanted["digest"]["sha256"]);
            format!("the provenance has no input {name} with the sha256 {sha256}")
        })
        .collect()
}

/// Files that no lock can have, with their digests, by their paths in the image.
pub fn built(options: &build::Options<'_>) -> Result<BTreeMap<String, FileEntry>, Error> {
    let rules = options.definition.files().filter(|rule| rule.built);
    let built = rules.filter_map(|rule| Some((rule, rule.from.as_ref()?)));
    built
        .map(|(rule, from)| Ok((rule.to.clone(), hash(&options.root.join(from))?)))
        .collect()
}

fn hash(path: &Path) -> Result<FileEntry, Error> {
    let (size_bytes, sha256) = hash_file(path).map_err(|source| Error::read(path, source))?;
    Ok(FileEntry { size_bytes, sha256 })
}

fn source_dependency(source: &Source) -> Value {
    let mut dependency = json!({
        "name": "sources",
        "uri": format!("git+{}", source.uri),
        "digest": { "gitCommit": source.commit },
    });
    if source.is_modified {
        dependency["annotations"] = json!({ "modified": true });
    }
    dependency
}

fn lock_dependencies(definition: &Definition, lock: &Lock, is_weights_only: bool) -> Vec<Value> {
    let mut dependencies = Vec::new();
    if !is_weights_only {
        dependencies.extend(lock.packages.iter().map(package_dependency));
    }
    if let Some(digest) = &lock.bundle_digest {
        dependencies.push(dependency("bundle", None, digest));
    }
    let is_in_image = |path: &str| !is_weights_only || definition.is_in_bundle(path);
    let files = lock.files.iter().filter(|file| is_in_image(&file.path));
    dependencies.extend(files.map(|file| dependency(&file.path, None, &file.sha256)));
    dependencies
}

fn built_dependency(path: &str, file: &FileEntry) -> Value {
    let mut dependency = dependency(path, None, &file.sha256);
    dependency["annotations"] = json!({ "built": true });
    dependency
}

fn package_dependency(package: &Package) -> Value {
    dependency(&package.name, Some(&package_purl(package)), &package.sha256)
}

fn dependency(name: &str, uri: Option<&str>, sha256: &str) -> Value {
    let mut dependency = json!({ "name": name, "digest": { "sha256": sha256 } });
    if let Some(uri) = uri {
        dependency["uri"] = json!(uri);
    }
    dependency
}

/// Package URL of a crate.
pub(crate) fn crate_purl(linked: &Crate) -> String {
    format!(
        "pkg:cargo/{}@{}",
        linked.name,
        linked.version.replace('+', "%2B")
    )
}

/// Package URL of a Debian package.
pub(crate) fn package_purl(package: &Package) -> String {
    let escape = |text: &str| text.replace('+', "%2B").replace(':', "%3A");
    format!(
        "pkg:deb/debian/{}@{}?arch={}",
        escape(&package.name),
        escape(&package.version),
        package.architecture
    )
}
