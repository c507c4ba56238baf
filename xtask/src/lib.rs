//! Outrider's tasks, one module each, as `cargo xtask` runs them.
//!
//! A task is a module with `Args` and `run(args)`; what it prints on standard output is its result, everything else goes to standard error.
//! They are a library so that the end-to-end tests start servers and find bundles in the same way.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "printing is what a command line is for"
)]

pub mod answer;
pub mod bench;
pub mod build;
pub mod bundle;
pub mod checkpoint;
pub mod export;
pub mod fetch;
pub mod fuzz;
pub mod image;
pub mod machine;
pub mod measure;
pub mod output;
pub mod preflight;
pub mod prompts;
pub mod python;
pub mod random;
pub mod reference;
pub mod rollout;
pub mod serve;
pub mod server_process;
pub mod session;
pub mod soak;
pub mod test;
pub mod traffic;
pub mod workspace;
