//! Specifications of the Container Device Interface: what a container engine passes to a container that asks for a GPU.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::kernel::{existing, is_release, shown};
use crate::facts::Reading;
use crate::facts::gpu::{CdiContent, CdiSpec};

/// Where specifications lie.
const DIRS: [&str; 2] = ["etc/cdi", "var/run/cdi"];

/// Libraries that carry the driver's release in their name.
const VERSIONED: [&str; 2] = ["libcuda.so.", "libnvidia-ml.so."];

// The fields that are looked at, of those of version 1 of the specification.
#[derive(Deserialize)]
struct Spec {
    kind: String,
    #[serde(default)]
    devices: Vec<SpecDevice>,
    #[serde(default, rename = "containerEdits")]
    edits: Edits,
}

#[derive(Deserialize)]
struct SpecDevice {
    name: String,
    #[serde(default, rename = "containerEdits")]
    edits: Edits,
}

#[derive(Default, Deserialize)]
struct Edits {
    #[serde(default, rename = "deviceNodes")]
    nodes: Vec<Node>,
    #[serde(default)]
    mounts: Vec<Mount>,
}

#[derive(Deserialize)]
struct Node {
    path: PathBuf,
    #[serde(rename = "hostPath")]
    host_path: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Mount {
    #[serde(rename = "hostPath")]
    host_path: PathBuf,
}

/// The specifications of NVIDIA's devices, and those that can't be read.
pub(super) fn specs(root: &Path) -> io::Result<Vec<CdiSpec>> {
    let mut specs = Vec::new();
    for dir in DIRS {
        for entry in existing(std::fs::read_dir(root.join(dir)))?
            .into_iter()
            .flatten()
        {
            let path = entry?.path();
            let is_spec = path.extension().is_some_and(|extension| {
                ["json", "yaml", "yml"].map(OsStr::new).contains(&extension)
            });
            if !is_spec {
                continue;
            }
            let content = match read(root, &path) {
                Ok(content) if !content.kind.starts_with("nvidia.com/") => continue,
                Ok(content) => Reading::Known(content),
                Err(reason) => Reading::Unknown(reason),
            };
            specs.push(CdiSpec {
                path: shown(root, &path),
                content,
            });
        }
    }
    specs.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(specs)
}

fn read(root: &Path, path: &Path) -> Result<CdiContent, String> {
    let text = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
    // JSON is YAML too.
    let spec: Spec = serde_yaml::from_str(&text).map_err(|error| error.to_string())?;
    let edits = || {
        spec.devices
            .iter()
            .map(|device| &device.edits)
            .chain([&spec.edits])
    };
    let mut driver_versions: Vec<String> = edits()
        .flat_map(|edits| &edits.mounts)
        .filter_map(|mount| release_of(&mount.host_path))
        .collect();
    driver_versions.sort();
    driver_versions.dedup();
    let mut missing_nodes: Vec<PathBuf> = edits()
        .flat_map(|edits| &edits.nodes)
        .map(|node| node.host_path.as_ref().unwrap_or(&node.path))
        .filter(|path| !root.join(path.strip_prefix("/").unwrap_or(path)).exists())
        .cloned()
        .collect();
    missing_nodes.sort();
    missing_nodes.dedup();
    Ok(CdiContent {
        devices: spec
            .devices
            .iter()
            .map(|device| device.name.clone())
            .collect(),
        kind: spec.kind,
        driver_versions,
        missing_nodes,
    })
}

fn release_of(library: &Path) -> Option<String> {
    let name = library.file_name()?.to_str()?;
    VERSIONED
        .iter()
        .find_map(|prefix| name.strip_prefix(prefix))
        .filter(|version| is_release(version))
        .map(ToOwned::to_owned)
}
