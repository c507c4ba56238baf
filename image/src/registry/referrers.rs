//! Documents about an image in a registry: pushed beside it, and found again by its digest.
//!
//! A registry that doesn't list what refers to an image gets the list that the specification has for it: an index under the tag `sha256-…`.
//! Two writers of that index may lose an entry of each other, so it is read again until the entry is there.

use oci_spec::image::{Descriptor, ImageIndex, ImageManifest, MediaType};
use outrider_bundle::digest::sha256_hex;
use outrider_bundle::manifest::FileEntry;

use super::RegistryError;
use super::client::{Client, header};
use super::push::{PushOptions, Pushed, push_blobs, put_manifest};
use crate::Error;
use crate::evidence::ARTIFACT_TYPES;
use crate::layout::{
    Image, Layout, MAX_JSON_BYTES, canonical_json, check, describe, descriptor, parse, sha256_of,
};
use crate::referrer;

/// Pushes what lies in the layout about an image; the image is in the repository already.
pub fn push_referrers(
    client: &Client,
    layout: &Layout,
    image: &Image,
    options: &PushOptions,
    progress: &mut dyn FnMut(&str, u64, u64),
) -> Result<Vec<Pushed>, Error> {
    let mut pushed = Vec::new();
    for (descriptor, manifest) in referrer::list(layout, image)? {
        let blobs = manifest.layers().iter().chain([manifest.config()]);
        let blobs = push_blobs(client, layout, blobs, options, progress)?;
        let digest = descriptor.digest().to_string();
        if !put_manifest(client, layout, &descriptor, &digest)? {
            list_by_tag(client, image, &descriptor, &manifest)?;
        }
        let reference = client.reference();
        pushed.push(Pushed {
            name: format!("{}/{}@{digest}", reference.registry, reference.repository),
            blobs,
        });
    }
    Ok(pushed)
}

/// Pulls bills of materials, provenance and signatures of an image into its layout; returns how many.
pub fn pull_referrers(client: &Client, layout: &Layout, image: &Image) -> Result<usize, Error> {
    let mut count = 0;
    for listed in listed(client, image)? {
        let is_known = |kind: &MediaType| ARTIFACT_TYPES.contains(&kind.to_string().as_str());
        // A list may leave the type out; the manifest has it.
        if !listed.artifact_type().as_ref().is_none_or(is_known) {
            continue;
        }
        let bytes = get(client, &listed, "manifests")?;
        let manifest: ImageManifest = parse(&bytes, || describe(&listed))?;
        let kind = manifest.artifact_type().clone();
        let Some(kind) = kind.filter(is_known) else {
            continue;
        };
        if !referrer::is_about(&manifest, image) {
            let problem = format!("does not refer to {}", image.descriptor.digest());
            return Err(Error::entry(describe(&listed), problem));
        }
        let mut descriptor = descriptor(MediaType::ImageManifest, &entry_of(&bytes));
        descriptor.set_artifact_type(Some(kind));
        let mut documents = Vec::new();
        for blob in manifest.layers().iter().chain([manifest.config()]) {
            documents.push((blob.clone(), get(client, blob, "blobs")?));
        }
        documents.push((descriptor.clone(), bytes));
        layout.add(&documents, descriptor)?;
        count += 1;
    }
    Ok(count)
}

/// What the registry lists for an image, or the index under its tag.
fn listed(client: &Client, image: &Image) -> Result<Vec<Descriptor>, Error> {
    let what = format!("what refers to {}", image.descriptor.digest());
    let mut url = client.url(&format!("referrers/{}", image.descriptor.digest()));
    let mut all = Vec::new();
    loop {
        let Some((index, link)) = get_index(client, &what, &url)? else {
            return Ok(by_tag(client, image)?.manifests().clone());
        };
        all.extend(index.manifests().iter().cloned());
        // `<address>; rel="next"`
        let next =
            link.and_then(|link| Some(link.strip_prefix('<')?.split_once('>')?.0.to_owned()));
        let Some(next) = next else { return Ok(all) };
        let next = client.absolute(&what, &next)?;
        if next == url {
            let problem = "gives a page of a list that leads to itself".to_owned();
            return Err(RegistryError::Answer { what, problem }.into());
        }
        url = next;
    }
}

/// Address of the index for registries that list nothing themselves.
fn tag_url(client: &Client, image: &Image) -> Result<String, Error> {
    let sha256 = sha256_of(&image.descriptor)?;
    Ok(client.url(&format!("manifests/sha256-{sha256}")))
}

fn by_tag(client: &Client, image: &Image) -> Result<ImageIndex, Error> {
    let what = format!("the index of {}", image.descriptor.digest());
    let found = get_index(client, &what, &tag_url(client, image)?)?;
    Ok(found.map_or_else(
        || {
            let mut index = ImageIndex::default();
            index.set_media_type(Some(MediaType::ImageIndex));
            index
        },
        |(index, _)| index,
    ))
}

/// An index and the `Link` it came with; `None` where there is none.
fn get_index(
    client: &Client,
    what: &str,
    url: &str,
) -> Result<Option<(ImageIndex, Option<String>)>, Error> {
    let accept = Some(&MediaType::ImageIndex);
    let response = client.get(what, url, accept, &[200, 404], MAX_JSON_BYTES)?;
    if response.status() == 404 {
        return Ok(None);
    }
    let index = parse(response.body(), || what.to_owned())?;
    Ok(Some((index, header(&response, "link"))))
}

/// Adds a manifest to the index under the tag, until a reader finds it there.
fn list_by_tag(
    client: &Client,
    image: &Image,
    descriptor: &Descriptor,
    manifest: &ImageManifest,
) -> Result<(), Error> {
    let what = format!("the index of {}", image.descriptor.digest());
    let mut listed = descriptor.clone();
    listed.set_artifact_type(manifest.artifact_type().clone());
    listed.set_annotations(manifest.annotations().clone());
    for _ in 0..=client.retry.attempts {
        let mut index = by_tag(client, image)?;
        let mut manifests = index.manifests().clone();
        if manifests.iter().any(|it| it.digest() == listed.digest()) {
            return Ok(());
        }
        manifests.push(listed.clone());
        index.set_manifests(manifests);
        let bytes = canonical_json(&index);
        let url = tag_url(client, image)?;
        client.put(&what, &url, &MediaType::ImageIndex, &bytes)?;
    }
    let problem = format!("does not keep {} in it", listed.digest());
    Err(RegistryError::Answer { what, problem }.into())
}

/// A small document by its descriptor, held to its digest.
fn get(client: &Client, wanted: &Descriptor, kind: &str) -> Result<Vec<u8>, Error> {
    let what = describe(wanted);
    if wanted.size() > MAX_JSON_BYTES {
        let problem = format!(
            "has {} bytes, at most {MAX_JSON_BYTES} are read",
            wanted.size()
        );
        return Err(Error::entry(what, problem));
    }
    let url = client.url(&format!("{kind}/{}", wanted.digest()));
    let accept = (kind == "manifests").then_some(&MediaType::ImageManifest);
    let response = client.get(&what, &url, accept, &[200], wanted.size() + 1)?;
    let bytes = response.into_body();
    check(wanted, &entry_of(&bytes))?;
    Ok(bytes)
}

fn entry_of(bytes: &[u8]) -> FileEntry {
    FileEntry {
        size_bytes: bytes.len() as u64,
        sha256: sha256_hex(bytes),
    }
}
