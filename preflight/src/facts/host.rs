//! The machine: processors, memory, disks, ports, users and limits.

use serde::{Deserialize, Serialize};

/// The machine: processors, memory, disks, ports, users and limits.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostFacts {}
