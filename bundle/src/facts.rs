//! What an ONNX file says about itself: inputs, outputs, operators, where its weights are.
//!
//! Only the structure is read. Weights inside the file are skipped over and external ones aren't opened, so a graph of any size costs little memory,
//! and a file that is no graph costs no more: every part that is kept has a limit.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::onnx::{
    DataType, Dimension, OperatorSetIdProto, StringStringEntryProto, ValueInfoProto,
};
use crate::wire::{Value, Wire, WireError};

/// The name of the standard operator domain, which files write as an empty string.
pub const STANDARD_DOMAIN: &str = "ai.onnx";

/// Largest `.onnx` file in bytes: no protobuf message is larger.
pub const MAX_GRAPH_BYTES: u64 = i32::MAX as u64;

/// Why there are no facts about a graph.
#[derive(Debug, thiserror::Error)]
pub enum GraphError {
    /// The file can't be opened.
    #[error("cannot read {}", path.display())]
    Open {
        /// The graph file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The content is no ONNX model.
    #[error("{} is no ONNX model", path.display())]
    Content {
        /// The graph file.
        path: PathBuf,
        /// What is wrong with it.
        source: WireError,
    },
}

/// Path in the bundle of an external file that a graph at `graph_path` has at `location`, which starts at the graph's own directory.
pub(crate) fn external_path(graph_path: &str, location: &str) -> String {
    match graph_path.rsplit_once('/') {
        Some((dir, _)) => format!("{dir}/{location}"),
        None => location.to_owned(),
    }
}

/// Facts about one graph.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct GraphFacts {
    /// Version of the file format.
    pub ir_version: i64,
    /// Name and version of the tool that wrote the file.
    pub producer: String,
    /// Version of each operator domain the graph imports.
    pub opsets: BTreeMap<String, i64>,
    /// Inputs in the order of the graph.
    pub inputs: Vec<ValueFacts>,
    /// Outputs in the order of the graph.
    pub outputs: Vec<ValueFacts>,
    /// How often each operator occurs, subgraphs and functions included, keyed by `domain.op_type`.
    pub ops: BTreeMap<String, u64>,
    /// Bytes of all initializers, inside the file and external; a range of an external file that several of them share counts once.
    pub initializer_bytes: u64,
    /// External files by the path in the graph, each with the number of bytes it must have at least.
    pub external_files: BTreeMap<String, u64>,
    /// Free key/value pairs.
    pub metadata: BTreeMap<String, String>,
}

/// Name and type of an input or output.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ValueFacts {
    /// Name.
    pub name: String,
    /// Element type, such as `float32` or `int64`; `unknown` and a number for one that Outrider doesn't know.
    pub dtype: String,
    /// Dimensions, `None` when the graph doesn't give the rank.
    pub shape: Option<Vec<Dim>>,
}

/// One dimension of a value; in JSON a number, a text or `null`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Dim {
    /// A fixed size.
    Size(i64),
    /// A size that is known at run time, named.
    Symbol(String),
    /// A size that is known at run time, without a name.
    Unknown,
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Size(size) => write!(f, "{size}"),
            Self::Symbol(name) => f.write_str(name),
            Self::Unknown => f.write_str("?"),
        }
    }
}

impl ValueFacts {
    /// The shape as people write it: `[batch,sequence]`, or `of unknown rank`.
    pub fn shape_text(&self) -> String {
        match &self.shape {
            Some(dims) => format!(
                "[{}]",
                dims.iter()
                    .map(ToString::to_string)
                    .collect::<Vec<_>>()
                    .join(",")
            ),
            None => "of unknown rank".to_owned(),
        }
    }
}

impl GraphFacts {
    /// Reads the facts of a `.onnx` file.
    pub fn read(path: &Path) -> Result<Self, GraphError> {
        let file = File::open(path).map_err(|source| GraphError::Open {
            path: path.to_owned(),
            source,
        })?;
        Self::from_stream(file).map_err(|source| GraphError::Content {
            path: path.to_owned(),
            source,
        })
    }

    /// Paths in the bundle of the external files of a graph that is at `graph_path` in it.
    pub fn external_paths(&self, graph_path: &str) -> impl Iterator<Item = String> {
        self.external_files
            .keys()
            .map(move |location| external_path(graph_path, location))
    }

    /// Reads the facts of a `.onnx` file from its content.
    pub fn from_stream(mut stream: impl Read + Seek) -> Result<Self, WireError> {
        let size_bytes = stream.seek(SeekFrom::End(0))?;
        stream.rewind()?;
        if size_bytes > MAX_GRAPH_BYTES {
            return Err(WireError::Limit {
                what: "the file",
                offset: 0,
                limit: MAX_GRAPH_BYTES,
            });
        }
        let mut walk = Walk {
            wire: Wire::new(stream),
            facts: Self::default(),
            depth: 0,
            graphs: 0,
            ranges: BTreeMap::new(),
            range_count: 0,
        };
        walk.model(size_bytes)?;
        if walk.graphs == 0 {
            return Err(WireError::Malformed {
                problem: "there is no graph",
                offset: size_bytes,
            });
        }
        Ok(walk.facts)
    }

    /// How often an operator occurs. `domain` is [`STANDARD_DOMAIN`] for standard operators.
    pub fn op_count(&self, domain: &str, op_type: &str) -> u64 {
        self.ops
            .get(&format!("{domain}.{op_type}"))
            .copied()
            .unwrap_or(0)
    }
}

/// Name of an element type.
pub fn dtype_name(data_type: i32) -> String {
    let name = match DataType::try_from(data_type) {
        Ok(DataType::Undefined) => "undefined",
        Ok(DataType::Float) => "float32",
        Ok(DataType::Uint8) => "uint8",
        Ok(DataType::Int8) => "int8",
        Ok(DataType::Int32) => "int32",
        Ok(DataType::Int64) => "int64",
        Ok(DataType::Bool) => "bool",
        Ok(DataType::Float16) => "float16",
        Ok(DataType::Double) => "float64",
        Ok(DataType::Bfloat16) => "bfloat16",
        Err(_) => return format!("unknown ({data_type})"),
    };
    name.to_owned()
}

/// Bits of one element, 0 for types whose size Outrider doesn't know.
fn dtype_bits(data_type: i32) -> u64 {
    match DataType::try_from(data_type) {
        Ok(DataType::Uint8 | DataType::Int8 | DataType::Bool) => 8,
        Ok(DataType::Float16 | DataType::Bfloat16) => 16,
        Ok(DataType::Float | DataType::Int32) => 32,
        Ok(DataType::Int64 | DataType::Double) => 64,
        Ok(DataType::Undefined) | Err(_) => 0,
    }
}

/// Limits on what is kept, far above what graphs of language models have.
mod limits {
    pub(super) const NAME_BYTES: u64 = 4 << 10;
    pub(super) const VALUE_BYTES: u64 = 16 << 10;
    pub(super) const METADATA_BYTES: u64 = 64 << 10;
    pub(super) const VALUES: u64 = 16 << 10;
    pub(super) const DISTINCT: u64 = 1 << 10;
    pub(super) const RANGES: u64 = 1 << 18;
    pub(super) const DEPTH: u64 = 32;
}

/// The walk over a model. Field numbers are those of `onnx.proto`; the methods are named after its messages.
struct Walk<R> {
    wire: Wire<R>,
    facts: GraphFacts,
    depth: u64,
    graphs: u64,
    /// External ranges of initializers so far, offset and length by location.
    ranges: BTreeMap<String, BTreeSet<(u64, u64)>>,
    range_count: usize,
}

impl<R: Read + Seek> Walk<R> {
    /// Visits the fields of one message; what `visit` leaves unread of a field is skipped.
    fn each(
        &mut self,
        end: u64,
        mut visit: impl FnMut(&mut Self, u64, Value) -> Result<(), WireError>,
    ) -> Result<(), WireError> {
        self.depth += 1;
        if self.depth > limits::DEPTH {
            return Err(self.wire.limit("the nesting", limits::DEPTH));
        }
        while let Some(field) = self.wire.next_field(end)? {
            visit(self, field.number, field.value)?;
            self.wire.skip_to(field.next)?;
        }
        self.depth -= 1;
        Ok(())
    }

    fn model(&mut self, end: u64) -> Result<(), WireError> {
        let (mut name, mut version) = (String::new(), String::new());
        self.each(end, |walk, field, value| {
            match (field, value) {
                (1, Value::Varint(ir_version)) => walk.facts.ir_version = ir_version as i64,
                (2, Value::Bytes { end }) => {
                    name = walk.wire.text(end, "producer_name", limits::NAME_BYTES)?
                }
                (3, Value::Bytes { end }) => {
                    version = walk
                        .wire
                        .text(end, "producer_version", limits::NAME_BYTES)?
                }
                (7, Value::Bytes { end }) => {
                    walk.graphs += 1;
                    walk.graph(end, true)?;
                }
                (8, Value::Bytes { end }) => {
                    let set: OperatorSetIdProto =
                        walk.wire.message(end, "opset_import", limits::NAME_BYTES)?;
                    walk.check_count(
                        walk.facts.opsets.len(),
                        "the number of operator sets",
                        limits::DISTINCT,
                    )?;
                    walk.facts
                        .opsets
                        .insert(domain_name(set.domain), set.version);
                }
                (14, Value::Bytes { end }) => {
                    let entry: StringStringEntryProto =
                        walk.wire
                            .message(end, "metadata_props", limits::METADATA_BYTES)?;
                    walk.check_count(
                        walk.facts.metadata.len(),
                        "the number of metadata entries",
                        limits::DISTINCT,
                    )?;
                    walk.facts.metadata.insert(entry.key, entry.value);
                }
                // Bodies of functions that the model brings along.
                (25, Value::Bytes { end }) => walk.function(end)?,
                _ => {}
            }
            Ok(())
        })?;
        self.facts.producer = [name, version].join(" ").trim().to_owned();
        Ok(())
    }

    fn function(&mut self, end: u64) -> Result<(), WireError> {
        self.each(end, |walk, field, value| match (field, value) {
            (7, Value::Bytes { end }) => walk.node(end),
            _ => Ok(()),
        })
    }

    fn graph(&mut self, end: u64, is_main: bool) -> Result<(), WireError> {
        self.each(end, |walk, field, value| match (field, value) {
            (1, Value::Bytes { end }) => walk.node(end),
            (5, Value::Bytes { end }) => walk.tensor(end, true),
            (11, Value::Bytes { end }) if is_main => {
                walk.check_count(
                    walk.facts.inputs.len(),
                    "the number of inputs",
                    limits::VALUES,
                )?;
                let input = walk.value_info(end)?;
                walk.facts.inputs.push(input);
                Ok(())
            }
            (12, Value::Bytes { end }) if is_main => {
                walk.check_count(
                    walk.facts.outputs.len(),
                    "the number of outputs",
                    limits::VALUES,
                )?;
                let output = walk.value_info(end)?;
                walk.facts.outputs.push(output);
                Ok(())
            }
            (15, Value::Bytes { end }) => walk.sparse_tensor(end, true),
            _ => Ok(()),
        })
    }

    fn node(&mut self, end: u64) -> Result<(), WireError> {
        let (mut op_type, mut domain) = (String::new(), String::new());
        self.each(end, |walk, field, value| {
            match (field, value) {
                (4, Value::Bytes { end }) => {
                    op_type = walk.wire.text(end, "op_type", limits::NAME_BYTES)?
                }
                (5, Value::Bytes { end }) => walk.attribute(end)?,
                (7, Value::Bytes { end }) => {
                    domain = walk.wire.text(end, "domain", limits::NAME_BYTES)?
                }
                _ => {}
            }
            Ok(())
        })?;
        let key = format!("{}.{op_type}", domain_name(domain));
        if let Some(count) = self.facts.ops.get_mut(&key) {
            *count += 1;
            return Ok(());
        }
        self.check_count(
            self.facts.ops.len(),
            "the number of different operators",
            limits::DISTINCT,
        )?;
        self.facts.ops.insert(key, 1);
        Ok(())
    }

    fn attribute(&mut self, end: u64) -> Result<(), WireError> {
        self.each(end, |walk, field, value| match (field, value) {
            (5 | 10, Value::Bytes { end }) => walk.tensor(end, false),
            (6 | 11, Value::Bytes { end }) => walk.graph(end, false),
            (22 | 23, Value::Bytes { end }) => walk.sparse_tensor(end, false),
            _ => Ok(()),
        })
    }

    fn sparse_tensor(&mut self, end: u64, is_initializer: bool) -> Result<(), WireError> {
        self.each(end, |walk, field, value| match (field, value) {
            (1 | 2, Value::Bytes { end }) => walk.tensor(end, is_initializer),
            _ => Ok(()),
        })
    }

    fn tensor(&mut self, end: u64, is_initializer: bool) -> Result<(), WireError> {
        let mut elements = 1u64;
        let (mut data_type, mut is_external, mut inline_bytes) = (0, false, 0);
        let mut entries = Vec::new();
        self.each(end, |walk, field, value| {
            match (field, value) {
                (1, Value::Varint(dim)) => elements = elements.saturating_mul(dim),
                (1, Value::Bytes { end }) => {
                    while walk.wire.remaining(end) > 0 {
                        elements = elements.saturating_mul(walk.wire.varint(end)?);
                    }
                }
                (2, Value::Varint(value)) => data_type = value as i32,
                // The typed data fields and `raw_data`.
                (4..=7 | 9..=11, Value::Bytes { end }) => inline_bytes += walk.wire.remaining(end),
                (13, Value::Bytes { end }) => {
                    walk.check_count(entries.len(), "the number of external_data entries", 16)?;
                    let entry: StringStringEntryProto =
                        walk.wire
                            .message(end, "external_data", limits::NAME_BYTES)?;
                    entries.push(entry);
                }
                (14, Value::Varint(location)) => is_external = location == 1,
                _ => {}
            }
            Ok(())
        })?;
        let mut size_bytes = inline_bytes;
        if is_external {
            let default_bytes = elements.saturating_mul(dtype_bits(data_type)) / 8;
            size_bytes = self.external_data(&entries, default_bytes, is_initializer)?;
        }
        if is_initializer {
            self.facts.initializer_bytes = self.facts.initializer_bytes.saturating_add(size_bytes);
        }
        Ok(())
    }

    /// Notes an external file and how long it must be; returns the bytes that no initializer before had.
    fn external_data(
        &mut self,
        entries: &[StringStringEntryProto],
        default_bytes: u64,
        is_initializer: bool,
    ) -> Result<u64, WireError> {
        let entry = |key: &str| {
            entries
                .iter()
                .find(|entry| entry.key == key)
                .map(|entry| entry.value.as_str())
        };
        let number = |key: &str, default: u64| match entry(key) {
            Some(text) => text.parse().map_err(|_| {
                self.wire
                    .malformed("offset or length of external data is no number")
            }),
            None => Ok(default),
        };
        let offset: u64 = number("offset", 0)?;
        let length: u64 = number("length", default_bytes)?;
        let Some(location) = entry("location") else {
            return Err(self.wire.malformed("external data has no location"));
        };
        let needed = offset.saturating_add(length);
        if let Some(known) = self.facts.external_files.get_mut(location) {
            *known = needed.max(*known);
        } else {
            self.check_count(
                self.facts.external_files.len(),
                "the number of external files",
                limits::DISTINCT,
            )?;
            self.facts
                .external_files
                .insert(location.to_owned(), needed);
        }
        if !is_initializer {
            return Ok(0);
        }
        self.check_count(
            self.range_count,
            "the number of external tensors",
            limits::RANGES,
        )?;
        let is_new = self
            .ranges
            .entry(location.to_owned())
            .or_default()
            .insert((offset, length));
        self.range_count += usize::from(is_new);
        Ok(if is_new { length } else { 0 })
    }

    fn value_info(&mut self, end: u64) -> Result<ValueFacts, WireError> {
        let value: ValueInfoProto =
            self.wire
                .message(end, "type of an input or output", limits::VALUE_BYTES)?;
        let tensor = value
            .r#type
            .and_then(|r#type| r#type.tensor_type)
            .unwrap_or_default();
        let shape = tensor.shape.map(|shape| {
            let dims = shape.dim.into_iter().map(|dim| match dim.value {
                Some(Dimension::Size(size)) => Dim::Size(size),
                Some(Dimension::Symbol(name)) if !name.is_empty() => Dim::Symbol(name),
                Some(Dimension::Symbol(_)) | None => Dim::Unknown,
            });
            dims.collect()
        });
        Ok(ValueFacts {
            name: value.name,
            dtype: dtype_name(tensor.elem_type),
            shape,
        })
    }

    fn check_count(&self, count: usize, what: &'static str, limit: u64) -> Result<(), WireError> {
        if count as u64 >= limit {
            Err(self.wire.limit(what, limit))
        } else {
            Ok(())
        }
    }
}

fn domain_name(domain: String) -> String {
    if domain.is_empty() {
        STANDARD_DOMAIN.to_owned()
    } else {
        domain
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use proptest::prelude::*;
    use prost::Message;

    use super::*;
    use crate::onnx::{AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto};
    use crate::testing::sample_graph;

    fn facts(model: &ModelProto) -> GraphFacts {
        GraphFacts::from_stream(Cursor::new(model.encode_to_vec())).unwrap()
    }

    fn error(bytes: &[u8]) -> String {
        GraphFacts::from_stream(Cursor::new(bytes))
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn facts_of_a_graph_are_read() {
        insta::assert_json_snapshot!(facts(&sample_graph()));
    }

    #[test]
    fn external_weights_of_constants_in_functions_and_attributes_are_found() {
        let entry = |key: &str, value: &str| StringStringEntryProto {
            key: key.to_owned(),
            value: value.to_owned(),
        };
        let hidden = TensorProto {
            dims: vec![3, 4],
            data_type: DataType::Float16 as i32,
            external_data: vec![entry("location", "hidden"), entry("offset", "64")],
            data_location: 1,
            ..TensorProto::default()
        };
        let attribute = AttributeProto {
            name: "value".to_owned(),
            t: Some(hidden),
            ..AttributeProto::default()
        };
        let constant = NodeProto {
            op_type: "Constant".to_owned(),
            attribute: vec![attribute],
            ..NodeProto::default()
        };
        let mut model = sample_graph();
        model.graph.as_mut().unwrap().node.push(constant.clone());
        assert_eq!(facts(&model).external_files["hidden"], 64 + 3 * 4 * 2);

        // `ModelProto.functions` and `FunctionProto.node`, which the messages of this crate leave out.
        let mut function = Vec::new();
        prost::encoding::message::encode(7, &constant, &mut function);
        let mut bytes = sample_graph().encode_to_vec();
        prost::encoding::bytes::encode(25, &function, &mut bytes);
        let facts = GraphFacts::from_stream(Cursor::new(bytes)).unwrap();
        assert_eq!(facts.external_files["hidden"], 64 + 3 * 4 * 2);
        assert_eq!(facts.op_count(STANDARD_DOMAIN, "Constant"), 1);
    }

    #[test]
    fn a_file_that_is_no_graph_is_an_error() {
        for (bytes, expected) in [
            (&b""[..], "there is no graph"),
            (b"\x08\x0a", "there is no graph"),
            (b"hello world", "unknown wire type"),
            (b"\x3a\xff\xff\xff\xff\x0f", "longer than what holds it"),
            (
                b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
                "more than ten bytes",
            ),
            (b"\x3b", "unknown wire type"),
            (b"\x08\x80", "cut off"),
        ] {
            let error = error(bytes);
            assert!(error.contains(expected), "{expected}: {error}");
        }
    }

    #[test]
    fn deep_nesting_is_an_error_and_no_stack_overflow() {
        let mut graph = GraphProto::default().encode_to_vec();
        for _ in 0..1000 {
            let mut attribute = Vec::new();
            prost::encoding::bytes::encode(6, &graph, &mut attribute);
            let mut node = Vec::new();
            prost::encoding::bytes::encode(5, &attribute, &mut node);
            graph.clear();
            prost::encoding::bytes::encode(1, &node, &mut graph);
        }
        let mut model = Vec::new();
        prost::encoding::bytes::encode(7, &graph, &mut model);
        assert!(error(&model).contains("the nesting"));
    }

    #[test]
    fn weights_inside_the_file_are_skipped_and_counted() {
        let mut model = sample_graph();
        let before = facts(&model).initializer_bytes;
        let big = TensorProto {
            raw_data: vec![1; 3 << 20],
            ..TensorProto::default()
        };
        model.graph.as_mut().unwrap().initializer.push(big);
        assert_eq!(facts(&model).initializer_bytes, before + (3 << 20));
    }

    #[test]
    fn weights_that_two_initializers_share_count_once() {
        let mut model = sample_graph();
        let before = facts(&model).initializer_bytes;
        let initializers = &mut model.graph.as_mut().unwrap().initializer;
        initializers.push(initializers[0].clone());
        assert_eq!(facts(&model).initializer_bytes, before);
    }

    #[test]
    fn parts_over_their_limit_are_an_error() {
        let mut long_name = sample_graph();
        long_name.graph.as_mut().unwrap().node[0].op_type = "x".repeat(5000);
        assert!(error(&long_name.encode_to_vec()).contains("op_type"));

        let mut many_ops = sample_graph();
        let node = |index| NodeProto {
            op_type: format!("Op{index}"),
            ..NodeProto::default()
        };
        many_ops
            .graph
            .as_mut()
            .unwrap()
            .node
            .extend((0..2000).map(node));
        assert!(error(&many_ops.encode_to_vec()).contains("different operators"));

        let mut many_inputs = sample_graph();
        many_inputs
            .graph
            .as_mut()
            .unwrap()
            .input
            .extend(vec![ValueInfoProto::default(); 20_000]);
        assert!(error(&many_inputs.encode_to_vec()).contains("number of inputs"));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn damaged_bytes_never_panic(edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8), cut: prop::sample::Index) {
            let mut bytes = sample_graph().encode_to_vec();
            for (at, byte) in edits {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            let _ = GraphFacts::from_stream(Cursor::new(&bytes));
            let _ = GraphFacts::from_stream(Cursor::new(&bytes[..cut.index(bytes.len())]));
        }

        #[test]
        fn any_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..512)) {
            let _ = GraphFacts::from_stream(Cursor::new(bytes));
        }
    }
}
