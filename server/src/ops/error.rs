//! What can be wrong with a node or a call of an operator.

/// What is wrong with a call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OperatorError {
    /// An attribute of the node.
    #[error("attribute {name} is {value}; allowed is {allowed}")]
    Attribute {
        /// Name of the attribute.
        name: &'static str,
        /// Its value.
        value: String,
        /// What it may be.
        allowed: &'static str,
    },
    /// A shape that does not agree with the others.
    #[error("input {input} has shape {shape:?}; expected is {expected}")]
    Shape {
        /// Name of the input.
        input: &'static str,
        /// Its shape.
        shape: Vec<i64>,
        /// What the other shapes and the attributes ask for.
        expected: String,
    },
    /// An integer outside its limits.
    #[error("input {input}[{index}] is {value}; allowed is {least} to {most}")]
    Value {
        /// Name of the input.
        input: &'static str,
        /// Index of the element, row-major.
        index: usize,
        /// Its value.
        value: i64,
        /// Smallest value allowed.
        least: i64,
        /// Largest value allowed; below `least` when none is.
        most: i64,
    },
    /// A number outside its limits.
    #[error("input {input}[{index}] is {value}; allowed is {allowed}")]
    Number {
        /// Name of the input.
        input: &'static str,
        /// Index of the element, row-major.
        index: usize,
        /// Its value.
        value: String,
        /// What it may be.
        allowed: &'static str,
    },
    /// Inputs that go together are not all there.
    #[error(
        "only some of the inputs selector_hidden, predecessor_codebook and successor_codebook are there; allowed is all or none"
    )]
    PartOfCodebooks,
    /// The tasks of a call could not be run to their end.
    #[error("the thread pool failed: {0}")]
    Pool(String),
}
