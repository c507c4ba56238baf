//! Models as ONNX Runtime sees them: the runtime itself, sessions, bindings and KV memory.

pub mod runtime;
