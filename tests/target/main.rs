//! The target model below the server: real graphs in real ONNX Runtime sessions, without HTTP and without the engine.

mod goldens;
mod probe;
mod tiny;

use outrider_server::model::{ExecutionProvider, TargetOptions, runtime};

/// A few slots on the CPU.
fn options() -> TargetOptions {
    TargetOptions {
        library: runtime::library_for_tests(),
        execution_provider: ExecutionProvider::Cpu,
        slots: 4,
        context_tokens: None,
        kv_limit_bytes: 1 << 32,
        intra_op_threads: 2,
    }
}
