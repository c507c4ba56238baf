//! The OpenAI-compatible interface: the only place that knows OpenAI shapes.

pub mod backend;
