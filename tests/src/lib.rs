//! What the end-to-end tests stand on: where binaries, bundles and goldens are, servers that run while tests need them, faults before them, and answers in one form.
//!
//! Tests reach a server through its public faces only: command line, configuration, HTTP, exit code, log.
//! [`fuzz`] is the exception: it feeds the readers of the crates themselves.

pub mod answer;
pub mod faulty_proxy;
pub mod fixtures;
pub mod fuzz;
pub mod scenario;
pub mod servers;

#[cfg(test)]
mod known_faults;
