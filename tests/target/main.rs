//! The target model below the server: real graphs in real ONNX Runtime sessions, without HTTP and without the engine.

mod device;
mod goldens;
mod pair;
mod prefix_cache;
mod probe;
mod tiny;
mod traces;

use outrider_server::model::{ExecutionProvider, SessionOptions, TargetOptions, runtime};

/// A few slots on the CPU.
fn options() -> TargetOptions {
    TargetOptions {
        session: SessionOptions {
            library: runtime::library_for_tests(),
            execution_provider: ExecutionProvider::Cpu,
            intra_op_threads: 2,
        },
        slots: 4,
        parking_slots: 0,
        block_size: None,
        context_tokens: None,
        kv_limit_bytes: 1 << 32,
    }
}
