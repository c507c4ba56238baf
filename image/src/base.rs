//! The layers of an image that is on disk already, as the base of another.
//!
//! Only its files are taken: user, entry point, environment and labels are those of the definition.

use std::path::Path;

use oci_spec::image::{Descriptor, History};

use crate::Error;
use crate::definition::{Architecture, Oci};
use crate::layer::Compression;
use crate::layout::{Layout, Unfinished};

/// Layers of a base, the lowest first.
#[derive(Debug, Default)]
pub struct Layers {
    /// Descriptors of the blobs.
    pub descriptors: Vec<Descriptor>,
    /// Digests of the archives, `sha256:…`.
    pub diff_ids: Vec<String>,
    /// One entry for each layer.
    pub history: Vec<History>,
}

/// Copies the layers of an image into a layout that is being written. The image is the one with the digest of the definition, and for the same architecture.
pub fn copy(
    oci: &Oci,
    root: &Path,
    architecture: Architecture,
    layout: &mut Unfinished,
) -> Result<Layers, Error> {
    let dir = root.join(&oci.layout);
    let source = Layout::open(&dir)?;
    let image = source.image(Some(&oci.digest))?;
    let found = image.config.architecture().to_string();
    if found != architecture.name() {
        let problem = format!(
            "is for {found}, the definition is for {}",
            architecture.name()
        );
        return Err(Error::entry(&oci.digest, problem));
    }
    let diff_ids = image.config.rootfs().diff_ids();
    if diff_ids.len() != image.manifest.layers().len() {
        let problem = format!(
            "has {} layers and {} diff_ids",
            image.manifest.layers().len(),
            diff_ids.len()
        );
        return Err(Error::entry(&oci.digest, problem));
    }
    let mut layers = Layers {
        diff_ids: diff_ids.clone(),
        ..Layers::default()
    };
    for descriptor in image.manifest.layers() {
        if Compression::of(descriptor.media_type()).is_none() {
            let problem = format!(
                "has the media type {}, which is no layer of an OCI image",
                descriptor.media_type()
            );
            return Err(Error::entry(descriptor.digest().to_string(), problem));
        }
        layout.stream(descriptor, source.blob(descriptor)?)?;
        layers.descriptors.push(descriptor.clone());
    }
    let entries = image.config.history().clone().unwrap_or_default();
    let of_layers = entries
        .into_iter()
        .filter(|entry| entry.empty_layer() != Some(true));
    layers.history = of_layers.collect();
    // History is optional, and wrong history would be told of the wrong layers.
    if layers.history.len() != layers.descriptors.len() {
        layers.history = vec![History::default(); layers.descriptors.len()];
    }
    Ok(layers)
}
