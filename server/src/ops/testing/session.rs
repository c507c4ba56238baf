//! Real ONNX Runtime sessions for the tests of the operators.

use ort::{
    environment::Environment,
    session::{Session, SessionInputValue, builder::GraphOptimizationLevel},
    value::{PrimitiveTensorElementType, Tensor, TensorElementType},
};
use outrider_bundle::onnx::DataType;

use crate::model::runtime;

/// Everything of `ort` needs the library to be loaded, tensors as well.
pub fn environment() -> &'static Environment {
    runtime::environment(&runtime::library_for_tests(), 0).unwrap()
}

/// A session with all operators, or why there is none.
pub fn try_session(model: &[u8], threads: usize) -> ort::Result<Session> {
    let environment = environment();
    let _registration = runtime::registration();
    Session::builder(environment)?
        .with_operators(crate::ops::domain()?)?
        .with_optimization_level(GraphOptimizationLevel::All)?
        .with_independent_thread_pool()?
        .with_intra_threads(threads)?
        .commit_from_memory(model)
}

/// A session with all operators.
pub fn session(model: &[u8], threads: usize) -> Session {
    try_session(model, threads).unwrap()
}

/// The element type as graphs spell it.
pub fn data_type<T: PrimitiveTensorElementType>() -> DataType {
    match T::into_tensor_element_type() {
        TensorElementType::Float32 => DataType::Float,
        TensorElementType::Float16 => DataType::Float16,
        TensorElementType::Bfloat16 => DataType::Bfloat16,
        TensorElementType::Int64 => DataType::Int64,
        other => panic!("no operator for {other:?}"),
    }
}

/// Named inputs of a run.
pub type Feeds = Vec<(&'static str, SessionInputValue<'static>)>;

/// A tensor to feed.
pub fn value<T: PrimitiveTensorElementType + Clone + std::fmt::Debug + 'static>(
    shape: &[usize],
    elements: &[T],
) -> SessionInputValue<'static> {
    environment();
    Tensor::from_array((shape.to_vec(), elements.to_vec()))
        .unwrap()
        .into()
}
