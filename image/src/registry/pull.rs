//! Pulling: an image into a layout, every blob held to its digest before it has its name.

use std::io::{self, Read, Write};
use std::path::Path;
use std::thread;

use oci_spec::image::{Descriptor, ImageManifest, MediaType};
use outrider_bundle::digest::{Hasher, sha256_hex};
use outrider_bundle::manifest::FileEntry;
use outrider_bundle::retry::Attempts;

use super::RegistryError;
use super::client::Client;
use crate::Error;
use crate::layer::entry;
use crate::layout::{Layout, MAX_JSON_BYTES, Unfinished, check, describe, descriptor, parse};

/// Pulls the image that the client was made for into a new layout at `output`.
pub fn pull(client: &Client, output: &Path) -> Result<Layout, Error> {
    let reference = client.reference();
    let name = reference
        .digest
        .as_ref()
        .or(reference.tag.as_ref())
        .ok_or_else(|| RegistryError::Reference {
            text: reference.to_string(),
            problem: "has neither tag nor digest",
        })?;
    let what = format!("manifest {name}");
    let url = client.url(&format!("manifests/{name}"));
    let accept = Some(&MediaType::ImageManifest);
    let response = client.get(&what, &url, accept, &[200], MAX_JSON_BYTES)?;
    let bytes = response.into_body();
    let found = FileEntry {
        size_bytes: bytes.len() as u64,
        sha256: sha256_hex(&bytes),
    };
    let actual = format!("sha256:{}", found.sha256);
    if let Some(expected) = reference
        .digest
        .as_ref()
        .filter(|expected| **expected != actual)
    {
        return Err(Error::Digest {
            what,
            expected: expected.clone(),
            actual,
        });
    }
    let manifest: ImageManifest = parse(&bytes, || what.clone())?;
    let mut layout = Unfinished::begin(output)?;
    for blob in manifest.layers().iter().chain([manifest.config()]) {
        if !layout.has(blob) {
            pull_blob(client, &mut layout, blob)?;
        }
    }
    let manifest = descriptor(MediaType::ImageManifest, &found);
    layout.stream(&manifest, bytes.as_slice())?;
    layout.list(manifest, reference.tag.as_deref());
    layout.finish()
}

/// Pulls a blob; a transfer that breaks goes on where it stopped.
pub(super) fn pull_blob(
    client: &Client,
    layout: &mut Unfinished,
    blob: &Descriptor,
) -> Result<(), Error> {
    let mut file = layout.new_blob()?;
    let mut hasher = Hasher::default();
    let mut attempts = Attempts::new(client.retry, 0);
    loop {
        let error = match attempt(client, blob, &mut file, &mut hasher) {
            Ok(()) => break,
            Err(Error::Registry(error)) if error.is_passing() => error,
            Err(error) => return Err(error),
        };
        match attempts.fail(hasher.size_bytes()) {
            Some(wait) => thread::sleep(wait),
            None => return Err(error.into()),
        }
    }
    check(blob, &entry(hasher))?;
    layout.keep(file, blob)
}

fn attempt(
    client: &Client,
    blob: &Descriptor,
    file: &mut impl Write,
    hasher: &mut Hasher,
) -> Result<(), Error> {
    let what = describe(blob);
    let url = client.url(&format!("blobs/{}", blob.digest()));
    let begin_bytes = hasher.size_bytes();
    let range = format!("bytes={begin_bytes}-");
    let (headers, status) = match begin_bytes {
        0 => (vec![], 200),
        _ => (vec![("range", range.as_str())], 206),
    };
    let mut response = client.send(&what, ("GET", &url), &headers, None, &[status])?;
    let broken = |source: io::Error| RegistryError::Connection {
        what: what.clone(),
        url: url.clone(),
        source: Box::new(source.into()),
    };
    // One byte more than there should be is enough to see that there are too many.
    let wanted_bytes = (blob.size() + 1).saturating_sub(begin_bytes);
    let mut body = response.body_mut().as_reader().take(wanted_bytes);
    let mut chunk = vec![0; 1 << 20];
    loop {
        let count = body.read(&mut chunk).map_err(broken)?;
        if count == 0 {
            break;
        }
        file.write_all(&chunk[..count])
            .map_err(|source| Error::write("a blob", source))?;
        hasher.update(&chunk[..count]);
    }
    if hasher.size_bytes() < blob.size() {
        return Err(broken(io::ErrorKind::UnexpectedEof.into()).into());
    }
    Ok(())
}
