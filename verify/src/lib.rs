//! Checks a live OpenAI-compatible service from outside.
//!
//! This crate owns the client, the checks and the report.
//! It links neither the server nor ONNX Runtime, so it can judge any server, and never shares a fault with the one it judges.

pub mod client;
pub mod lossless;
pub mod prompts;
pub mod report;
pub mod service;
pub mod smoke;
pub mod wire;
