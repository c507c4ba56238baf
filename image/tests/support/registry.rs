//! A registry on loopback that keeps everything in memory, says what it was asked, and fails when it is told to.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

use outrider_bundle::digest::sha256_hex;

/// What the registry has and does; a fault happens once.
#[derive(Default)]
pub struct State {
    pub blobs: BTreeMap<String, Vec<u8>>,
    /// Repository and digest of every blob that can be had there.
    pub links: BTreeSet<(String, String)>,
    pub manifests: BTreeMap<String, Vec<u8>>,
    pub uploads: BTreeMap<String, Vec<u8>>,
    /// Requests as `METHOD path`.
    pub asked: Vec<String>,
    /// Bytes of bodies that were taken in.
    pub taken_bytes: u64,
    /// The connection of the next `PATCH` breaks after so many bytes.
    pub break_upload_at: Option<usize>,
    /// Every `PATCH` is refused with 503.
    pub is_read_only: bool,
    /// The connection of the next blob breaks after so many bytes.
    pub break_download_at: Option<usize>,
    /// What refers to a manifest is listed; without it that is left to whoever pushes.
    pub lists_referrers: bool,
    /// The next index under a tag `sha256-…` is lost, as to a second writer.
    pub loses_index: bool,
    /// Only callers with this token get in; the token is for user `u` with password `p`.
    pub token: Option<String>,
}

pub struct StandIn {
    pub address: String,
    pub state: Arc<Mutex<State>>,
}

impl StandIn {
    /// Starts one on a free port. It ends with the process.
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let state = Arc::new(Mutex::new(State::default()));
        let (own, own_address) = (state.clone(), address.clone());
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (state, address) = (own.clone(), own_address.clone());
                // A caller that goes away is no matter of the registry.
                thread::spawn(move || drop(serve(stream, &state, &address)));
            }
        });
        Self { address, state }
    }
}

fn serve(stream: TcpStream, state: &Mutex<State>, address: &str) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let mut words = line.split_whitespace();
    let (method, target) = (
        words.next().unwrap_or("").to_owned(),
        words.next().unwrap_or("").to_owned(),
    );
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        match line.trim_end().split_once(": ") {
            Some((name, value)) => headers.insert(name.to_lowercase(), value.to_owned()),
            None => break,
        };
    }
    let length = headers
        .get("content-length")
        .map_or(0, |it| it.parse().unwrap());
    let break_at = match method.as_str() {
        "PATCH" => state.lock().unwrap().break_upload_at.take(),
        _ => None,
    };
    let mut body = vec![0; break_at.unwrap_or(length).min(length)];
    reader.read_exact(&mut body)?;
    let mut state = state.lock().unwrap();
    state.asked.push(format!("{method} {target}"));
    state.taken_bytes += body.len() as u64;
    let answer = answer(&mut state, &method, &target, &headers, body, address);
    if break_at.is_some() {
        return Ok(());
    }
    let is_blob = method == "GET" && target.contains("/blobs/sha256:");
    let sent = match state.break_download_at.take_if(|_| is_blob) {
        Some(at) => answer.body.len().min(at),
        None => answer.body.len(),
    };
    drop(state);
    let mut head = format!("HTTP/1.1 {} X\r\nconnection: close\r\n", answer.status);
    for (name, value) in &answer.headers {
        head += &format!("{name}: {value}\r\n");
    }
    if !answer
        .headers
        .iter()
        .any(|(name, _)| *name == "content-length")
    {
        head += &format!("content-length: {}\r\n", answer.body.len());
    }
    let mut stream = stream;
    stream.write_all(format!("{head}\r\n").as_bytes())?;
    stream.write_all(&answer.body[..sent])
}

struct Answer {
    status: u16,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
}

fn plain(status: u16) -> Answer {
    Answer {
        status,
        headers: Vec::new(),
        body: Vec::new(),
    }
}

fn session(status: u16, repository: &str, id: &str, size: usize) -> Answer {
    let location = format!("/v2/{repository}/blobs/uploads/{id}?state=x");
    let range = format!("0-{}", size.saturating_sub(1));
    Answer {
        headers: vec![("location", location), ("range", range)],
        ..plain(status)
    }
}

fn answer(
    state: &mut State,
    method: &str,
    target: &str,
    headers: &BTreeMap<String, String>,
    body: Vec<u8>,
    address: &str,
) -> Answer {
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let parameter = |name: &str| {
        query
            .split('&')
            .find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))
    };
    if path == "/token" {
        // user `u`, password `p`
        let is_known = headers
            .get("authorization")
            .is_some_and(|it| it == "Basic dTpw");
        let token = state.token.clone().unwrap_or_default();
        return match is_known {
            true => Answer {
                body: format!("{{\"token\":\"{token}\"}}").into_bytes(),
                ..plain(200)
            },
            false => plain(401),
        };
    }
    if let Some(token) = &state.token
        && headers.get("authorization") != Some(&format!("Bearer {token}"))
    {
        let challenge = format!("Bearer realm=\"http://{address}/token\",service=\"s\"");
        return Answer {
            headers: vec![("www-authenticate", challenge)],
            ..plain(401)
        };
    }
    let path = path.strip_prefix("/v2/").unwrap_or("");
    if let Some((repository, id)) = path.split_once("/blobs/uploads/") {
        let key = format!("{repository}/{id}");
        return match method {
            "POST" => {
                if let (Some(digest), Some(from)) = (parameter("mount"), parameter("from"))
                    && state.links.contains(&(from.to_owned(), digest.to_owned()))
                {
                    state
                        .links
                        .insert((repository.to_owned(), digest.to_owned()));
                    return plain(201);
                }
                let id = format!("u{}", state.asked.len());
                state
                    .uploads
                    .insert(format!("{repository}/{id}"), Vec::new());
                session(202, repository, &id, 0)
            }
            "DELETE" => plain(if state.uploads.remove(&key).is_some() {
                204
            } else {
                404
            }),
            _ if !state.uploads.contains_key(&key) => plain(404),
            "GET" => session(204, repository, id, state.uploads[&key].len()),
            "PATCH" if state.is_read_only => plain(503),
            "PATCH" => {
                let upload = state.uploads.get_mut(&key).unwrap();
                let begins_at = headers["content-range"].split('-').next().unwrap().parse();
                if begins_at != Ok(upload.len()) {
                    return plain(416);
                }
                upload.extend(body);
                let size = upload.len();
                session(202, repository, id, size)
            }
            "PUT" => {
                let bytes = state.uploads.remove(&key).unwrap();
                let digest = format!("sha256:{}", sha256_hex(&bytes));
                if parameter("digest") != Some(&digest) {
                    return Answer {
                        body: b"DIGEST_INVALID".to_vec(),
                        ..plain(400)
                    };
                }
                state.blobs.insert(digest.clone(), bytes);
                state.links.insert((repository.to_owned(), digest));
                plain(201)
            }
            _ => plain(405),
        };
    }
    if let Some((repository, digest)) = path.split_once("/blobs/") {
        let key = (repository.to_owned(), digest.to_owned());
        if !state.links.contains(&key) {
            return plain(404);
        }
        let blob = &state.blobs[digest];
        let begin = headers.get("range").and_then(|range| {
            range
                .strip_prefix("bytes=")?
                .strip_suffix('-')?
                .parse()
                .ok()
        });
        return match (method, begin) {
            ("HEAD", _) => Answer {
                headers: vec![("content-length", blob.len().to_string())],
                ..plain(200)
            },
            (_, Some(begin)) => Answer {
                body: blob[begin..].to_vec(),
                ..plain(206)
            },
            _ => Answer {
                body: blob.clone(),
                ..plain(200)
            },
        };
    }
    if let Some((repository, digest)) = path.split_once("/referrers/")
        && state.lists_referrers
    {
        return referrers(state, repository, digest, parameter("after"));
    }
    if let Some((repository, name)) = path.split_once("/manifests/") {
        let key = |name: &str| format!("{repository}/{name}");
        if method == "PUT" {
            let digest = format!("sha256:{}", sha256_hex(&body));
            if name.starts_with("sha256-") && std::mem::take(&mut state.loses_index) {
                return plain(201);
            }
            let subject = subject(&body).filter(|_| state.lists_referrers);
            state.manifests.insert(key(&digest), body.clone());
            state.manifests.insert(key(name), body);
            return Answer {
                headers: subject.map(|it| ("oci-subject", it)).into_iter().collect(),
                ..plain(201)
            };
        }
        return match state.manifests.get(&key(name)) {
            Some(body) => Answer {
                body: body.clone(),
                ..plain(200)
            },
            None => plain(404),
        };
    }
    plain(404)
}

/// What a manifest refers to.
fn subject(manifest: &[u8]) -> Option<String> {
    let manifest: serde_json::Value = serde_json::from_slice(manifest).ok()?;
    Some(manifest["subject"]["digest"].as_str()?.to_owned())
}

/// What refers to a digest, two manifests a page.
fn referrers(state: &State, repository: &str, digest: &str, after: Option<&str>) -> Answer {
    let prefix = format!("{repository}/sha256:");
    let mut found = state.manifests.iter().filter(|(key, bytes)| {
        let is_later = after.is_none_or(|after| **key > format!("{prefix}{after}"));
        key.starts_with(&prefix) && is_later && subject(bytes).as_deref() == Some(digest)
    });
    let mut last = "";
    let mut manifests = Vec::new();
    for (key, bytes) in found.by_ref().take(2) {
        last = key.strip_prefix(&prefix).unwrap();
        manifests.push(serde_json::json!({
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "digest": format!("sha256:{last}"),
            "size": bytes.len(),
        }));
    }
    let next = format!("</v2/{repository}/referrers/{digest}?after={last}>; rel=\"next\"");
    let index = serde_json::json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": manifests,
    });
    Answer {
        headers: found.next().map(|_| ("link", next)).into_iter().collect(),
        body: index.to_string().into_bytes(),
        ..plain(200)
    }
}
