//! What belongs to an image without being part of it: bill of materials, provenance, signature.
//!
//! Each is a manifest of its own whose `subject` is the image, so that nothing about the image changes when one is added.

use std::collections::BTreeMap;

use oci_spec::image::{Descriptor, ImageManifest, ImageManifestBuilder, MediaType};

use crate::Error;
use crate::layout::{Image, Layout, canonical_json, of_bytes};

/// A document about an image.
#[derive(Clone, Debug)]
pub struct Referrer {
    /// What kind of document it is, such as `application/vnd.cyclonedx+json`; also the media type of its bytes.
    pub artifact_type: String,
    /// The document.
    pub bytes: Vec<u8>,
    /// Annotations of its manifest.
    pub annotations: BTreeMap<String, String>,
}

/// Adds a document about an image to the image's layout; returns the descriptor of its manifest.
pub fn attach(layout: &Layout, image: &Image, referrer: &Referrer) -> Result<Descriptor, Error> {
    let artifact_type = MediaType::from(referrer.artifact_type.as_str());
    let blob = of_bytes(artifact_type.clone(), &referrer.bytes);
    let config = of_bytes(MediaType::EmptyJSON, b"{}");
    let subject = Descriptor::new(
        image.descriptor.media_type().clone(),
        image.descriptor.size(),
        image.descriptor.digest().clone(),
    );
    let manifest = ImageManifestBuilder::default()
        .schema_version(2_u32)
        .media_type(MediaType::ImageManifest)
        .artifact_type(artifact_type.clone())
        .config(config.clone())
        .layers(vec![blob.clone()])
        .subject(subject)
        .annotations(
            referrer
                .annotations
                .clone()
                .into_iter()
                .collect::<std::collections::HashMap<_, _>>(),
        )
        .build()
        .expect("every required field is set");
    let text = canonical_json(&manifest);
    let mut descriptor = of_bytes(MediaType::ImageManifest, &text);
    descriptor.set_artifact_type(Some(artifact_type));
    let documents = [
        (config, b"{}".to_vec()),
        (blob, referrer.bytes.clone()),
        (descriptor.clone(), text),
    ];
    layout.add(&documents, descriptor.clone())?;
    Ok(descriptor)
}

/// Documents about an image that lie in its layout: the descriptors of their manifests, and the manifests.
pub fn list(layout: &Layout, image: &Image) -> Result<Vec<(Descriptor, ImageManifest)>, Error> {
    let mut referrers = Vec::new();
    for descriptor in layout.index()?.manifests() {
        if descriptor.artifact_type().is_none() {
            continue;
        }
        let manifest: ImageManifest = layout.json(descriptor)?;
        if is_about(&manifest, image) {
            referrers.push((descriptor.clone(), manifest));
        }
    }
    Ok(referrers)
}

/// Whether a manifest refers to an image.
pub fn is_about(manifest: &ImageManifest, image: &Image) -> bool {
    let subject = manifest.subject().as_ref();
    subject.is_some_and(|subject| subject.digest() == image.descriptor.digest())
}

/// The document that a manifest attaches, held to its digest.
pub fn document(layout: &Layout, manifest: &ImageManifest) -> Result<Vec<u8>, Error> {
    match manifest.layers().as_slice() {
        [document] => layout.bytes(document),
        layers => {
            let problem = format!("attaches {} documents, expected one", layers.len());
            let kind = manifest.artifact_type().as_ref();
            Err(Error::entry(
                kind.map(ToString::to_string).unwrap_or_default(),
                problem,
            ))
        }
    }
}
