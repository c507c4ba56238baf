//! Why two images aren't equal: which layer, which file, which attribute.
//!
//! Layers are compared in their order, and files by their path. The first differences say the cause; the list ends after [`MAX_DIFFERENCES`].

use std::collections::BTreeMap;
use std::fmt;

use outrider_bundle::digest::hash_stream;
use serde_json::Value;

use crate::Error;
use crate::layer::Compression;
use crate::layout::{Image, Layout};

/// Most differences that are listed.
pub const MAX_DIFFERENCES: usize = 20;

/// One difference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Where: `layer 3, opt/model.onnx`, `config`, `manifest`.
    pub place: String,
    /// What differs there, such as `mode` or `config.Env[0]`.
    pub attribute: String,
    /// What the first image has, `nothing` where it has none.
    pub first: String,
    /// What the second image has, `nothing` where it has none.
    pub second: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            place,
            attribute,
            first,
            second,
        } = self;
        write!(out, "{place}: {attribute}: {first} and {second}")
    }
}

/// The first differences of two images; none exactly when their manifests have the same digest.
pub fn diff(first: (&Layout, &Image), second: (&Layout, &Image)) -> Result<Vec<Difference>, Error> {
    let mut found = Found(Vec::new());
    if first.1.descriptor.digest() == second.1.descriptor.digest() {
        return Ok(found.0);
    }
    let layers = first.1.manifest.layers().len();
    let count = layers.max(second.1.manifest.layers().len());
    for index in 0..count {
        diff_layer(index, first, second, &mut found)?;
    }
    let of = |document: &dyn Fn(&Image) -> Value| (document(first.1), document(second.1));
    let value = |document: serde_json::Result<Value>| document.expect("it was read from JSON");
    let (a, b) = of(&|image| value(serde_json::to_value(&image.config)));
    diff_json("config", "", &a, &b, &mut found);
    let (a, b) = of(&|image| value(serde_json::to_value(&image.manifest)));
    diff_json("manifest", "", &a, &b, &mut found);
    found.0.truncate(MAX_DIFFERENCES);
    Ok(found.0)
}

struct Found(Vec<Difference>);

impl Found {
    fn compare(
        &mut self,
        place: &str,
        attribute: &str,
        first: Option<String>,
        second: Option<String>,
    ) {
        if first != second {
            let text = |side: Option<String>| side.unwrap_or_else(|| "nothing".to_owned());
            self.0.push(Difference {
                place: place.to_owned(),
                attribute: attribute.to_owned(),
                first: text(first),
                second: text(second),
            });
        }
    }

    fn is_full(&self) -> bool {
        self.0.len() >= MAX_DIFFERENCES
    }
}

fn diff_layer(
    index: usize,
    first: (&Layout, &Image),
    second: (&Layout, &Image),
    found: &mut Found,
) -> Result<(), Error> {
    let of = |(_, image): (&Layout, &Image)| {
        let descriptor = image.manifest.layers().get(index).cloned();
        let diff_id = image.config.rootfs().diff_ids().get(index).cloned();
        descriptor.zip(diff_id)
    };
    let place = format!("layer {index}");
    let (Some((a, a_id)), Some((b, b_id))) = (of(first), of(second)) else {
        let digest = |side| of(side).map(|(descriptor, _)| descriptor.digest().to_string());
        found.compare(&place, "blob", digest(first), digest(second));
        return Ok(());
    };
    if found.is_full() || a.digest() == b.digest() {
        return Ok(());
    }
    if a_id == b_id {
        // The same archive: only the compression, or its library, is another.
        let form = |it: &oci_spec::image::Descriptor| {
            Some(format!("{} as {}", it.digest(), it.media_type()))
        };
        found.compare(
            &place,
            "compressed form of the same archive",
            form(&a),
            form(&b),
        );
        return Ok(());
    }
    let before = found.0.len();
    let a_files = entries(first.0, &a)?;
    let b_files = entries(second.0, &b)?;
    let mut paths: Vec<&String> = a_files.keys().chain(b_files.keys()).collect();
    paths.sort();
    paths.dedup();
    for path in paths {
        let place = format!("{place}, {path}");
        match (a_files.get(path), b_files.get(path)) {
            (Some(a), Some(b)) => {
                for ((attribute, a), (_, b)) in a.attributes.iter().zip(&b.attributes) {
                    found.compare(&place, attribute, Some(a.clone()), Some(b.clone()));
                }
            }
            (a, b) => {
                let kind = |side: Option<&Entry>| side.map(|entry| entry.attributes[0].1.clone());
                found.compare(&place, "entry", kind(a), kind(b));
            }
        }
    }
    if found.0.len() == before {
        let (a_order, b_order) = (order(&a_files), order(&b_files));
        let moved = a_order.iter().zip(&b_order).find(|(a, b)| a != b);
        match moved {
            Some(((_, a), (_, b))) => {
                found.compare(
                    &place,
                    "order of entries",
                    Some((*a).clone()),
                    Some((*b).clone()),
                );
            }
            None => found.compare(&place, "form of the archive", Some(a_id), Some(b_id)),
        }
    }
    Ok(())
}

/// Paths in the order of their entries.
fn order(entries: &BTreeMap<String, Entry>) -> Vec<(usize, &String)> {
    let mut order: Vec<_> = entries
        .iter()
        .map(|(path, entry)| (entry.position, path))
        .collect();
    order.sort();
    order
}

/// One entry of an archive.
struct Entry {
    position: usize,
    attributes: [(&'static str, String); 8],
}

fn entries(
    layout: &Layout,
    descriptor: &oci_spec::image::Descriptor,
) -> Result<BTreeMap<String, Entry>, Error> {
    let name = format!("blob {}", descriptor.digest());
    let read = |source| Error::read(&name, source);
    let Some(compression) = Compression::of(descriptor.media_type()) else {
        let problem = format!(
            "has the media type {}, which can't be read",
            descriptor.media_type()
        );
        return Err(Error::entry(name.as_str(), problem));
    };
    let reader = compression.reader(layout.blob(descriptor)?).map_err(read)?;
    let mut archive = tar::Archive::new(reader);
    let mut entries = BTreeMap::new();
    for (position, member) in archive.entries().map_err(read)?.enumerate() {
        let mut member = member.map_err(read)?;
        let path = String::from_utf8_lossy(&member.path_bytes()).into_owned();
        let link = member.link_name_bytes();
        let link = link.map_or("nothing".to_owned(), |it| {
            String::from_utf8_lossy(&it).into_owned()
        });
        let (size_bytes, sha256) = hash_stream(&mut member).map_err(read)?;
        let header = member.header();
        let number = |field: std::io::Result<u64>| field.map(|it| it.to_string()).map_err(read);
        let names = [header.username_bytes(), header.groupname_bytes()]
            .map(|name| String::from_utf8_lossy(name.unwrap_or_default()).into_owned());
        let attributes = [
            ("type", format!("{:?}", header.entry_type())),
            ("mode", format!("{:04o}", header.mode().map_err(read)?)),
            ("mtime", number(header.mtime())?),
            (
                "owner",
                format!("{}:{}", number(header.uid())?, number(header.gid())?),
            ),
            ("owner names", names.join(":")),
            ("link target", link),
            ("size", size_bytes.to_string()),
            ("sha256", sha256),
        ];
        entries.insert(
            path,
            Entry {
                position,
                attributes,
            },
        );
    }
    Ok(entries)
}

/// Walks two documents and compares their leaves.
fn diff_json(place: &str, path: &str, first: &Value, second: &Value, found: &mut Found) {
    if found.is_full() || first == second {
        return;
    }
    match (first, second) {
        (Value::Object(a), Value::Object(b)) => {
            let mut keys: Vec<&String> = a.keys().chain(b.keys()).collect();
            keys.sort();
            keys.dedup();
            for key in keys {
                let path = if path.is_empty() {
                    key.clone()
                } else {
                    format!("{path}.{key}")
                };
                let side = |map: &serde_json::Map<String, Value>| {
                    map.get(key).cloned().unwrap_or_default()
                };
                diff_json(place, &path, &side(a), &side(b), found);
            }
        }
        (Value::Array(a), Value::Array(b)) => {
            for index in 0..a.len().max(b.len()) {
                let side = |list: &[Value]| list.get(index).cloned().unwrap_or_default();
                diff_json(
                    place,
                    &format!("{path}[{index}]"),
                    &side(a),
                    &side(b),
                    found,
                );
            }
        }
        _ => {
            let text = |side: &Value| (!side.is_null()).then(|| side.to_string());
            found.compare(place, path, text(first), text(second));
        }
    }
}
