//! The part of the ONNX model format that Outrider reads and writes.
//!
//! Field numbers and names follow `onnx.proto3` of ONNX 1.20 (IR version 13).
//! Fields that no graph of ours needs are left out: prost skips them on reading.
//! A message that is read and written back would lose them, so foreign graphs are only ever read.

use prost::Message;

/// `TensorProto.DataType` values that Outrider knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum DataType {
    /// No type given.
    Undefined = 0,
    /// IEEE 754 single precision.
    Float = 1,
    /// Unsigned 8-bit integer.
    Uint8 = 2,
    /// Signed 8-bit integer.
    Int8 = 3,
    /// Signed 32-bit integer.
    Int32 = 6,
    /// Signed 64-bit integer.
    Int64 = 7,
    /// Boolean.
    Bool = 9,
    /// IEEE 754 half precision.
    Float16 = 10,
    /// IEEE 754 double precision.
    Double = 11,
    /// bfloat16.
    Bfloat16 = 16,
}

/// `AttributeProto.AttributeType` values that Outrider writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum AttributeType {
    /// No type given.
    Undefined = 0,
    /// One float.
    Float = 1,
    /// One 64-bit integer.
    Int = 2,
    /// One byte string.
    String = 3,
    /// One tensor.
    Tensor = 4,
    /// One graph.
    Graph = 5,
    /// A list of floats.
    Floats = 6,
    /// A list of 64-bit integers.
    Ints = 7,
}

/// Where the bytes of a tensor are, `TensorProto.DataLocation`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum DataLocation {
    /// In the message itself.
    Default = 0,
    /// In another file, named by `external_data`.
    External = 1,
}

/// `ModelProto`: one `.onnx` file.
#[derive(Clone, PartialEq, Message)]
pub struct ModelProto {
    /// Version of the format itself.
    #[prost(int64, tag = "1")]
    pub ir_version: i64,
    /// Operator sets the graph uses.
    #[prost(message, repeated, tag = "8")]
    pub opset_import: Vec<OperatorSetIdProto>,
    /// The tool that wrote the file.
    #[prost(string, tag = "2")]
    pub producer_name: String,
    /// The version of that tool.
    #[prost(string, tag = "3")]
    pub producer_version: String,
    /// The graph.
    #[prost(message, optional, tag = "7")]
    pub graph: Option<GraphProto>,
    /// Free key/value pairs.
    #[prost(message, repeated, tag = "14")]
    pub metadata_props: Vec<StringStringEntryProto>,
}

/// `GraphProto`.
#[derive(Clone, PartialEq, Message)]
pub struct GraphProto {
    /// Nodes in topological order.
    #[prost(message, repeated, tag = "1")]
    pub node: Vec<NodeProto>,
    /// Name of the graph.
    #[prost(string, tag = "2")]
    pub name: String,
    /// Constant tensors.
    #[prost(message, repeated, tag = "5")]
    pub initializer: Vec<TensorProto>,
    /// Graph inputs.
    #[prost(message, repeated, tag = "11")]
    pub input: Vec<ValueInfoProto>,
    /// Graph outputs.
    #[prost(message, repeated, tag = "12")]
    pub output: Vec<ValueInfoProto>,
    /// Types of inner values.
    #[prost(message, repeated, tag = "13")]
    pub value_info: Vec<ValueInfoProto>,
}

/// `NodeProto`: one operator call. An empty input name stands for an absent optional input.
#[derive(Clone, PartialEq, Message)]
pub struct NodeProto {
    /// Names of the inputs.
    #[prost(string, repeated, tag = "1")]
    pub input: Vec<String>,
    /// Names of the outputs.
    #[prost(string, repeated, tag = "2")]
    pub output: Vec<String>,
    /// Name of the node.
    #[prost(string, tag = "3")]
    pub name: String,
    /// Operator name.
    #[prost(string, tag = "4")]
    pub op_type: String,
    /// Operator domain; empty for the standard one.
    #[prost(string, tag = "7")]
    pub domain: String,
    /// Attributes.
    #[prost(message, repeated, tag = "5")]
    pub attribute: Vec<AttributeProto>,
}

/// `AttributeProto`.
#[derive(Clone, PartialEq, Message)]
pub struct AttributeProto {
    /// Name of the attribute.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Which of the value fields holds the value.
    #[prost(enumeration = "AttributeType", tag = "20")]
    pub r#type: i32,
    /// Value of a `Float`.
    #[prost(float, tag = "2")]
    pub f: f32,
    /// Value of an `Int`.
    #[prost(int64, tag = "3")]
    pub i: i64,
    /// Value of a `String`.
    #[prost(bytes = "vec", tag = "4")]
    pub s: Vec<u8>,
    /// Value of a `Tensor`.
    #[prost(message, optional, tag = "5")]
    pub t: Option<TensorProto>,
    /// Value of a `Graph`: the body of a loop.
    #[prost(message, optional, boxed, tag = "6")]
    pub g: Option<Box<GraphProto>>,
    /// Value of `Floats`.
    #[prost(float, repeated, tag = "7")]
    pub floats: Vec<f32>,
    /// Value of `Ints`.
    #[prost(int64, repeated, tag = "8")]
    pub ints: Vec<i64>,
}

/// `TensorProto`: a constant tensor, its bytes in `raw_data` or in an external file.
#[derive(Clone, PartialEq, Message)]
pub struct TensorProto {
    /// Shape.
    #[prost(int64, repeated, tag = "1")]
    pub dims: Vec<i64>,
    /// Element type.
    #[prost(enumeration = "DataType", tag = "2")]
    pub data_type: i32,
    /// Name of the tensor.
    #[prost(string, tag = "8")]
    pub name: String,
    /// Elements, little-endian, row-major.
    #[prost(bytes = "vec", tag = "9")]
    pub raw_data: Vec<u8>,
    /// `location`, `offset` and `length` of external bytes.
    #[prost(message, repeated, tag = "13")]
    pub external_data: Vec<StringStringEntryProto>,
    /// Where the bytes are.
    #[prost(enumeration = "DataLocation", tag = "14")]
    pub data_location: i32,
}

/// `ValueInfoProto`: name and type of a value.
#[derive(Clone, PartialEq, Message)]
pub struct ValueInfoProto {
    /// Name of the value.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Its type.
    #[prost(message, optional, tag = "2")]
    pub r#type: Option<TypeProto>,
}

/// `TypeProto`, tensors only.
#[derive(Clone, PartialEq, Message)]
pub struct TypeProto {
    /// Present when the value is a tensor.
    #[prost(message, optional, tag = "1")]
    pub tensor_type: Option<TensorTypeProto>,
}

/// `TypeProto.Tensor`.
#[derive(Clone, PartialEq, Message)]
pub struct TensorTypeProto {
    /// Element type.
    #[prost(enumeration = "DataType", tag = "1")]
    pub elem_type: i32,
    /// Shape, when known.
    #[prost(message, optional, tag = "2")]
    pub shape: Option<TensorShapeProto>,
}

/// `TensorShapeProto`.
#[derive(Clone, PartialEq, Message)]
pub struct TensorShapeProto {
    /// One entry per dimension.
    #[prost(message, repeated, tag = "1")]
    pub dim: Vec<DimensionProto>,
}

/// `TensorShapeProto.Dimension`: a number, a symbol, or unknown.
#[derive(Clone, PartialEq, Message)]
pub struct DimensionProto {
    /// The dimension, when it is known.
    #[prost(oneof = "Dimension", tags = "1, 2")]
    pub value: Option<Dimension>,
}

/// A known dimension.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum Dimension {
    /// A fixed size.
    #[prost(int64, tag = "1")]
    Size(i64),
    /// A symbolic size.
    #[prost(string, tag = "2")]
    Symbol(String),
}

/// `OperatorSetIdProto`.
#[derive(Clone, PartialEq, Message)]
pub struct OperatorSetIdProto {
    /// Operator domain; empty for the standard one.
    #[prost(string, tag = "1")]
    pub domain: String,
    /// Version of the operator set.
    #[prost(int64, tag = "2")]
    pub version: i64,
}

/// `StringStringEntryProto`.
#[derive(Clone, PartialEq, Message)]
pub struct StringStringEntryProto {
    /// Key.
    #[prost(string, tag = "1")]
    pub key: String,
    /// Value.
    #[prost(string, tag = "2")]
    pub value: String,
}
