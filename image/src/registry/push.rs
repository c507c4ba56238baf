//! Pushing: what the registry lacks, in pieces that can be taken up again, and the manifest last.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::thread;

use oci_spec::image::Descriptor;
use outrider_bundle::digest::{sha256_hex, write_atomic};
use outrider_bundle::retry::Attempts;

use super::RegistryError;
use super::client::{Client, header};
use crate::Error;
use crate::layout::{Image, Layout, describe};

/// How to push.
#[derive(Clone, Debug)]
pub struct PushOptions {
    /// Repositories of the same registry that may have the blobs already.
    pub mount_from: Vec<String>,
    /// File that remembers the uploads on their way, so that a push that was ended is taken up by the next one.
    pub sessions: Option<PathBuf>,
    /// Bytes of a blob in one request.
    pub chunk_bytes: u64,
}

impl Default for PushOptions {
    fn default() -> Self {
        Self {
            mount_from: Vec::new(),
            sessions: None,
            chunk_bytes: 64 << 20,
        }
    }
}

/// What happened to a blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The repository had it.
    Exists,
    /// The registry took it over from another repository.
    Mounted,
    /// It was sent, so many bytes of it by this push.
    Sent(u64),
}

/// What was pushed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pushed {
    /// `registry/repository@sha256:…`.
    pub name: String,
    /// Every blob by its digest, the configuration last.
    pub blobs: Vec<(String, Outcome)>,
}

/// Pushes an image. `progress` hears of every blob: what it is, bytes the registry has, bytes in all.
pub fn push(
    client: &Client,
    layout: &Layout,
    image: &Image,
    options: &PushOptions,
    progress: &mut dyn FnMut(&str, u64, u64),
) -> Result<Pushed, Error> {
    let config = image.manifest.config();
    let blobs = image.manifest.layers().iter().chain([config]);
    let pushed = push_blobs(client, layout, blobs, options, progress)?;
    let digest = image.descriptor.digest().to_string();
    let name = client.reference().tag.as_ref().unwrap_or(&digest);
    put_manifest(client, layout, &image.descriptor, name)?;
    let reference = client.reference();
    Ok(Pushed {
        name: format!("{}/{}@{digest}", reference.registry, reference.repository),
        blobs: pushed,
    })
}

/// Pushes blobs, each once, in their order.
pub(super) fn push_blobs<'a>(
    client: &Client,
    layout: &Layout,
    blobs: impl Iterator<Item = &'a Descriptor>,
    options: &PushOptions,
    progress: &mut dyn FnMut(&str, u64, u64),
) -> Result<Vec<(String, Outcome)>, Error> {
    let mut sessions = Sessions::load(options.sessions.as_deref())?;
    let mut pushed: Vec<(String, Outcome)> = Vec::new();
    let blobs: Vec<&Descriptor> = blobs.collect();
    // Nothing is sent of an image that lacks something.
    for descriptor in &blobs {
        layout.read_at(descriptor, 0)?;
    }
    for descriptor in blobs {
        let digest = descriptor.digest().to_string();
        if pushed.iter().any(|(known, _)| *known == digest) {
            continue;
        }
        let mut blob = Blob {
            client,
            options,
            what: describe(descriptor),
            layout,
            key: format!(
                "{}/{}@{digest}",
                client.reference().registry,
                client.reference().repository
            ),
            descriptor,
            sent_bytes: 0,
        };
        let outcome = blob.push(&mut sessions, progress)?;
        pushed.push((digest, outcome));
    }
    Ok(pushed)
}

/// Puts a manifest under a tag or its digest and reads it back; returns whether the registry lists it for its subject (`OCI-Subject`).
pub(super) fn put_manifest(
    client: &Client,
    layout: &Layout,
    manifest: &Descriptor,
    name: &str,
) -> Result<bool, Error> {
    let bytes = layout.bytes(manifest)?;
    let media_type = manifest.media_type();
    let what = format!("manifest {}", manifest.digest());
    let url = client.url(&format!("manifests/{name}"));
    let answer = client.put(&what, &url, media_type, &bytes)?;
    let is_listed = header(&answer, "oci-subject").is_some();
    let limit_bytes = bytes.len() as u64 + 1;
    let read = client
        .get(&what, &url, Some(media_type), &[200], limit_bytes)?
        .into_body();
    if read != bytes {
        return Err(Error::Digest {
            what: format!("{what}, read back from {url},"),
            expected: manifest.digest().to_string(),
            actual: format!("sha256:{}", sha256_hex(&read)),
        });
    }
    Ok(is_listed)
}

/// One blob on its way.
struct Blob<'a> {
    client: &'a Client,
    options: &'a PushOptions,
    what: String,
    layout: &'a Layout,
    key: String,
    descriptor: &'a Descriptor,
    sent_bytes: u64,
}

/// Where an upload goes on.
struct Session {
    url: String,
    offset_bytes: u64,
}

impl Blob<'_> {
    fn push(
        &mut self,
        sessions: &mut Sessions,
        progress: &mut dyn FnMut(&str, u64, u64),
    ) -> Result<Outcome, Error> {
        let total_bytes = self.descriptor.size();
        let what = self.what.clone();
        let mut attempts = Attempts::new(self.client.retry, 0);
        let mut reached_bytes = 0;
        let outcome = loop {
            let attempt = self.attempt(sessions, &mut |bytes| {
                reached_bytes = reached_bytes.max(bytes);
                progress(&what, bytes, total_bytes);
            });
            let error = match attempt {
                Ok(outcome) => break outcome,
                Err(Error::Registry(error)) if error.is_passing() => error,
                Err(error) => {
                    sessions.remove(&self.key)?;
                    return Err(error);
                }
            };
            match attempts.fail(reached_bytes) {
                Some(wait) => thread::sleep(wait),
                None => return Err(error.into()),
            }
        };
        progress(&what, total_bytes, total_bytes);
        sessions.remove(&self.key)?;
        Ok(outcome)
    }

    fn attempt(
        &mut self,
        sessions: &mut Sessions,
        reached: &mut dyn FnMut(u64),
    ) -> Result<Outcome, Error> {
        let digest = self.descriptor.digest().to_string();
        let url = self.client.url(&format!("blobs/{digest}"));
        let head = self
            .client
            .send(&self.what, ("HEAD", &url), &[], None, &[200, 404])?;
        if head.status() == 200 {
            return Ok(match self.sent_bytes {
                0 => Outcome::Exists,
                sent_bytes => Outcome::Sent(sent_bytes),
            });
        }
        let mut session = match self.resume(sessions)? {
            Some(session) => session,
            None => match self.begin(&digest)? {
                Some(session) => session,
                None => return Ok(Outcome::Mounted),
            },
        };
        while session.offset_bytes < self.descriptor.size() {
            sessions.keep(&self.key, &session.url)?;
            session = self.send_chunk(&session)?;
            reached(session.offset_bytes);
        }
        let separator = if session.url.contains('?') { '&' } else { '?' };
        let url = format!("{}{separator}digest={digest}", session.url);
        let none = || Ok((Box::new(io::empty()) as Box<dyn Read>, 0));
        let headers = [("content-type", "application/octet-stream")];
        self.client
            .send(&self.what, ("PUT", &url), &headers, Some(&none), &[201])?;
        Ok(Outcome::Sent(self.sent_bytes))
    }

    /// The upload that an earlier attempt or an earlier push began, when the registry still knows it.
    fn resume(&self, sessions: &mut Sessions) -> Result<Option<Session>, Error> {
        let Some(url) = sessions.urls.get(&self.key).cloned() else {
            return Ok(None);
        };
        let response =
            self.client
                .send(&self.what, ("GET", &url), &[], None, &[200, 204, 400, 404]);
        let response = match response {
            Ok(response) if matches!(response.status().as_u16(), 200 | 204) => response,
            Ok(_) => {
                sessions.remove(&self.key)?;
                return Ok(None);
            }
            Err(error) => return Err(error.into()),
        };
        Ok(Some(Session {
            url: self.client.location(&self.what, &response).unwrap_or(url),
            offset_bytes: self.offset(&response)?,
        }))
    }

    /// Begins an upload; none when the registry took the blob over from another repository.
    fn begin(&self, digest: &str) -> Result<Option<Session>, Error> {
        let none = || Ok((Box::new(io::empty()) as Box<dyn Read>, 0));
        let mounts = self.options.mount_from.iter().map(Some).chain([None]);
        for mount in mounts {
            let query = mount.map_or(String::new(), |from| format!("?mount={digest}&from={from}"));
            let url = self.client.url(&format!("blobs/uploads/{query}"));
            let response =
                self.client
                    .send(&self.what, ("POST", &url), &[], Some(&none), &[201, 202])?;
            if response.status() == 201 {
                return Ok(None);
            }
            if mount.is_none() {
                let url = self.client.location(&self.what, &response)?;
                return Ok(Some(Session {
                    url,
                    offset_bytes: 0,
                }));
            }
            // A repository without the blob: the registry has begun an upload instead, which isn't needed.
            let session = self.client.location(&self.what, &response)?;
            self.client.send(
                &self.what,
                ("DELETE", &session),
                &[],
                None,
                &[200, 202, 204, 404, 405],
            )?;
        }
        unreachable!("the last round has no mount")
    }

    fn send_chunk(&mut self, session: &Session) -> Result<Session, Error> {
        let offset_bytes = session.offset_bytes;
        let count = self
            .options
            .chunk_bytes
            .min(self.descriptor.size() - offset_bytes);
        let body = || {
            let blob = self
                .layout
                .read_at(self.descriptor, offset_bytes)
                .map_err(io::Error::other)?;
            Ok((Box::new(blob.take(count)) as Box<dyn Read>, count))
        };
        let range = format!("{offset_bytes}-{}", offset_bytes + count - 1);
        let headers = [
            ("content-type", "application/octet-stream"),
            ("content-range", range.as_str()),
        ];
        let response = self.client.send(
            &self.what,
            ("PATCH", &session.url),
            &headers,
            Some(&body),
            &[202],
        )?;
        self.sent_bytes += count;
        let reached = self.offset(&response)?;
        if reached <= offset_bytes {
            let problem = format!(
                "has {reached} bytes after {} were sent",
                offset_bytes + count
            );
            return Err(self.answer(problem));
        }
        Ok(Session {
            url: self.client.location(&self.what, &response)?,
            offset_bytes: reached,
        })
    }

    /// Bytes of an upload that the registry has, from `Range: 0-N`. One byte can't be told from none, and is sent again.
    fn offset(&self, response: &ureq::http::Response<ureq::Body>) -> Result<u64, Error> {
        let Some(range) = header(response, "range") else {
            return Ok(0);
        };
        let last = range
            .trim_start_matches("bytes=")
            .strip_prefix("0-")
            .and_then(|last| last.parse().ok());
        match last {
            Some(0) => Ok(u64::from(self.descriptor.size() == 1)),
            Some(last) if last < self.descriptor.size() => Ok(last + 1),
            _ => Err(self.answer(format!(
                "has the range {range:?} of {} bytes",
                self.descriptor.size()
            ))),
        }
    }

    fn answer(&self, problem: String) -> Error {
        let what = self.what.clone();
        RegistryError::Answer { what, problem }.into()
    }
}

/// Uploads on their way: address by registry, repository and digest.
struct Sessions {
    path: Option<PathBuf>,
    urls: BTreeMap<String, String>,
}

impl Sessions {
    fn load(path: Option<&Path>) -> Result<Self, Error> {
        let urls = match path.map(fs::read) {
            Some(Ok(bytes)) => crate::layout::parse(&bytes, || "the list of uploads".to_owned())?,
            Some(Err(error)) if error.kind() != io::ErrorKind::NotFound => {
                return Err(Error::read(path.unwrap_or(Path::new("")), error));
            }
            _ => BTreeMap::new(),
        };
        Ok(Self {
            path: path.map(Path::to_owned),
            urls,
        })
    }

    fn keep(&mut self, key: &str, url: &str) -> Result<(), Error> {
        self.urls.insert(key.to_owned(), url.to_owned());
        self.write()
    }

    fn remove(&mut self, key: &str) -> Result<(), Error> {
        match self.urls.remove(key) {
            Some(_) => self.write(),
            None => Ok(()),
        }
    }

    fn write(&self) -> Result<(), Error> {
        let Some(path) = &self.path else {
            return Ok(());
        };
        let text = crate::layout::canonical_json(&self.urls);
        write_atomic(path, &path.with_extension("partial"), &text)
            .map_err(|source| Error::write(path, source))
    }
}
