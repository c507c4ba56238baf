//! The target model below the server: real graphs in real ONNX Runtime sessions, without HTTP and without the engine.

mod probe;
mod tiny;
