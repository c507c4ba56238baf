//! What an image comes with, so that whoever runs it can know what it is: a bill of materials, provenance, and signatures of both and of the image.
//!
//! The plain documents are for readers that look for them; only what a bundle holds is trusted, since only that is signed.
//! Bundles of other keys are left alone: several signers may vouch for one image.

use std::collections::{BTreeMap, BTreeSet};

use oci_spec::image::Descriptor;
use outrider_bundle::lock::Item;
use serde_json::{Value, json};

use crate::Error;
use crate::build::{Built, Options};
use crate::crates::Crate;
use crate::layout::{Image, Layout, canonical_json, parse};
use crate::provenance::{self, Source, Statement};
use crate::referrer::{self, Referrer, attach, document};
use crate::sbom;
use crate::signature::{BUNDLE_MEDIA_TYPE, BundleError, PrivateKey, PublicKey, STATEMENT_TYPE};
use crate::verify::{self, Expected, Verified, is_weights_only};

/// Predicate type of the statement that an image is the signer's.
pub const SIGNATURE_PREDICATE_TYPE: &str = "https://sigstore.dev/cosign/sign/v1";

/// Artifact types of everything that is attached here.
pub const ARTIFACT_TYPES: [&str; 3] = [sbom::MEDIA_TYPE, STATEMENT_TYPE, BUNDLE_MEDIA_TYPE];

/// Predicate types that a verified image has a signed statement of.
const WANTED: [&str; 3] = [
    SIGNATURE_PREDICATE_TYPE,
    provenance::PREDICATE_TYPE,
    sbom::PREDICATE_TYPE,
];

/// Annotation by which readers of bundles choose without opening them.
const PREDICATE_ANNOTATION: &str = "dev.sigstore.bundle.predicateType";

/// What an image can't be asked for, but whoever built it knows.
#[derive(Clone, Copy, Debug)]
pub struct Origin<'a> {
    /// Documents that steer the build, such as definition, lock and `Cargo.lock`, by their paths below the root.
    pub documents: &'a [&'a str],
    /// The sources.
    pub source: &'a Source,
    /// Crates of the server.
    pub crates: &'a [Crate],
    /// Items of the fetch locks.
    pub items: &'a [Item],
    /// Programs that the bytes depend on beside this one, with their versions.
    pub tools: &'a BTreeMap<String, String>,
    /// Who built, as a URI.
    pub builder_id: &'a str,
}

/// Attaches a bill of materials and provenance to an image that was just built; returns the components whose licence isn't known.
pub fn add(
    options: &Options<'_>,
    built: &Built,
    origin: &Origin<'_>,
) -> Result<Vec<String>, Error> {
    let digest = built.manifest.digest().to_string();
    let image = built.layout.image(Some(&digest))?;
    let sbom = sbom::make(&sbom::Inputs {
        options,
        digest: &digest,
        crates: origin.crates,
        items: origin.items,
    })?;
    let provenance = provenance::make(&provenance::Inputs {
        options,
        digest: &digest,
        documents: origin.documents,
        source: origin.source,
        crates: origin.crates,
        tools: origin.tools,
        builder_id: origin.builder_id,
    })?;
    for (artifact_type, bytes) in [(sbom::MEDIA_TYPE, sbom.bytes), (STATEMENT_TYPE, provenance)] {
        attach(
            &built.layout,
            &image,
            &Referrer {
                artifact_type: artifact_type.to_owned(),
                bytes,
                annotations: BTreeMap::new(),
            },
        )?;
    }
    Ok(sbom.unlicensed)
}

/// Signs an image, its bill of materials and its provenance, which lie in its layout; returns the descriptors of what was attached.
pub fn sign(layout: &Layout, image: &Image, key: &PrivateKey) -> Result<Vec<Descriptor>, Error> {
    let digest = image.descriptor.digest().to_string();
    let about = |predicate_type, predicate| {
        canonical_json(&Statement::about("", &digest, predicate_type, predicate))
    };
    let sbom: Value = parse(&plain(layout, image, sbom::MEDIA_TYPE)?, || {
        "the bill of materials".to_owned()
    })?;
    let statements = [
        about(SIGNATURE_PREDICATE_TYPE, json!({})),
        plain(layout, image, STATEMENT_TYPE)?,
        about(sbom::PREDICATE_TYPE, sbom),
    ];
    let mut attached = Vec::new();
    for (predicate_type, statement) in WANTED.iter().zip(statements) {
        let annotations = [
            ("dev.sigstore.bundle.content", "dsse-envelope"),
            (PREDICATE_ANNOTATION, predicate_type),
        ];
        let annotations = annotations.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let referrer = Referrer {
            artifact_type: BUNDLE_MEDIA_TYPE.to_owned(),
            bytes: key.sign(&statement),
            annotations: BTreeMap::from(annotations),
        };
        attached.push(attach(layout, image, &referrer)?);
    }
    Ok(attached)
}

/// Checks an image as [`verify::verify`] does, and that the owner of the key vouches for it, for its provenance and for its bill of materials; an error lists
/// everything that is wrong.
pub fn verify(
    layout: &Layout,
    image: &Image,
    expected: Expected<'_>,
    key: &PublicKey,
) -> Result<Verified, Error> {
    let verified = verify::verify(layout, image, expected)?;
    let digest = image.descriptor.digest().to_string();
    let mut faults = Vec::new();
    let mut others = BTreeSet::new();
    let mut signed = BTreeSet::new();
    for (descriptor, manifest) in referrer::list(layout, image)? {
        let is_bundle = |kind: &oci_spec::image::MediaType| kind.to_string() == BUNDLE_MEDIA_TYPE;
        if !manifest.artifact_type().as_ref().is_some_and(is_bundle) {
            continue;
        }
        let what = format!("the bundle {}", descriptor.digest());
        let bundle = document(layout, &manifest)?;
        let payload = match key.verify(&bundle) {
            Ok(payload) => payload,
            Err(BundleError::OtherKey { signer, .. }) => {
                others.insert(signer);
                continue;
            }
            Err(error) => {
                faults.push(format!("{what} {error}"));
                continue;
            }
        };
        let statement: Statement = parse(&payload, || format!("the statement of {what}"))?;
        if !statement.is_about(&digest) {
            faults.push(format!("{what} is about another image"));
            continue;
        }
        if statement.predicate_type == provenance::PREDICATE_TYPE {
            faults.extend(provenance::check(
                &statement,
                expected.definition,
                expected.lock,
                is_weights_only(image),
                &verified.built,
            ));
        }
        signed.insert(statement.predicate_type);
    }
    for wanted in WANTED {
        if !signed.contains(wanted) {
            faults.push(format!(
                "there is no statement {wanted} signed with the key {}",
                key.hint()
            ));
        }
    }
    if !faults.is_empty() && !others.is_empty() {
        let others: Vec<String> = others.into_iter().collect();
        faults.push(format!("other keys signed: {}", others.join(", ")));
    }
    match faults.is_empty() {
        true => Ok(verified),
        false => Err(Error::Evidence(faults)),
    }
}

/// The only document of a kind that is attached to an image.
fn plain(layout: &Layout, image: &Image, artifact_type: &str) -> Result<Vec<u8>, Error> {
    let mut found = Vec::new();
    for (_, manifest) in referrer::list(layout, image)? {
        let kind = manifest.artifact_type().as_ref();
        if kind.is_some_and(|kind| kind.to_string() == artifact_type) {
            found.push(document(layout, &manifest)?);
        }
    }
    match found.len() {
        1 => Ok(found.remove(0)),
        count => {
            let problem = format!("is attached {count} times, expected once");
            Err(Error::entry(artifact_type, problem))
        }
    }
}
