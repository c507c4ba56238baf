//! The bundle: its manifest, files, graphs and licences.

use std::collections::BTreeMap;

use outrider_bundle::Manifest;
use serde::{Deserialize, Serialize};

use super::Reading;

/// The bundle: its manifest, files, graphs and licences.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BundleFacts {
    /// How far its files were compared with the manifest.
    pub depth: Depth,
    /// The manifest.
    pub manifest: Reading<Manifest>,
    /// Digest of the manifest.
    pub digest: Reading<String>,
    /// What keeps the target from being served, one fault each.
    pub target_faults: Vec<String>,
    /// What is wrong with the draft alone.
    pub draft_faults: Vec<String>,
    /// The target graph.
    pub target: Reading<GraphFacts>,
    /// The draft graph, when the manifest names one.
    pub draft: Option<Reading<GraphFacts>>,
}

/// How far files were compared with a manifest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Depth {
    /// Their sizes.
    #[default]
    Sizes,
    /// Their digests.
    Digests,
}

/// What a graph says of itself.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GraphFacts {
    /// Bytes of every initializer; bytes of a file that several of them share count for each, since each is held in memory by itself.
    pub initializer_bytes: u64,
    /// The cache tensors among the inputs.
    pub caches: Vec<Cache>,
    /// Columns of the logits; 0 when there are none.
    pub logits_columns: u64,
    /// Columns of the taps; 0 when there are none.
    pub tap_columns: u64,
    /// Most bytes between its nodes that are alive at once, for each row of a pass, by the dimension of the inputs that counts the rows.
    pub live_row_bytes: BTreeMap<String, u64>,
    /// How often each operator occurs, by `domain.op_type`.
    pub ops: BTreeMap<String, u64>,
    /// Nodes whose result for one row depends on other rows, as `op_type name`.
    pub row_mixing_nodes: Vec<String>,
}

/// A cache tensor `[batch, rows, columns]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cache {
    /// Name of the input.
    pub name: String,
    /// Bytes of one row; `None` when the graph does not fix it.
    pub row_bytes: Option<u64>,
}
