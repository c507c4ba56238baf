//! Checks a live OpenAI-compatible service from outside.
//!
//! This crate owns the client, the checks and the report.
//! It links neither the server nor ONNX Runtime, so it can judge any server, and never shares a fault with the one it judges.

pub mod all;
pub mod baseline;
pub mod boundary;
mod checks;
pub mod client;
pub mod files;
pub mod lossless;
pub mod perf;
mod pool;
pub mod prompts;
pub mod report;
pub mod service;
pub mod smoke;
pub mod soak;
pub mod wire;
