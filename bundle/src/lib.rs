//! What an Outrider model on disk is.
//!
//! This crate owns the bundle manifest, its digests, the fetch locks, the facts that are read from ONNX files, and when a transfer of its files is tried again.
//! It links neither ONNX Runtime nor an HTTP stack, so every tool of the workspace can use it.

pub mod contract;
pub mod create;
pub mod digest;
mod draft_part;
pub mod facts;
pub mod lock;
pub mod manifest;
pub mod onnx;
pub mod paths;
pub mod retry;
pub mod verified;
pub mod verify;
mod wire;

#[cfg(test)]
mod testing;

pub use manifest::Manifest;
pub use verified::VerifiedBundle;
