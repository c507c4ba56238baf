//! The bundle: its manifest, files, graphs and licences.

use serde::{Deserialize, Serialize};

/// The bundle: its manifest, files, graphs and licences.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BundleFacts {}
