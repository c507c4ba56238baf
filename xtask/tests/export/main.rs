//! Exported graphs, run: against what transformers computes, against each other, and bit for bit against themselves.

mod draft;
mod faults;
mod numbers;
mod reproducible;
mod rows;
mod support;
