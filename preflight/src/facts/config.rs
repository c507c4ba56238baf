//! The configuration: what the server would refuse, and what it asks of the machine.

use serde::{Deserialize, Serialize};

/// The configuration: what the server would refuse, and what it asks of the machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ConfigFacts {}
