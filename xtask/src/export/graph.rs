//! Puts a graph together: nodes, constants, inputs and outputs, and the external data file.
//!
//! It knows the ONNX format and nothing of models. Values are named by the caller; every name is given once.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;

use outrider_bundle::onnx::{
    AttributeProto, AttributeType, DataLocation, DataType, Dimension, DimensionProto, GraphProto,
    ModelProto, NodeProto, OperatorSetIdProto, StringStringEntryProto, TensorProto,
    TensorShapeProto, TensorTypeProto, TypeProto, ValueInfoProto,
};

use super::data_file::{DataFile, Span};

/// Version of the ONNX format that is written: the one of ONNX 1.19, which brought operator set 24.
const IR_VERSION: i64 = 12;

/// Version of the standard operator set: the first with `TensorScatter` and `Attention` over a static cache.
const OPSET: i64 = 24;

/// Domain of ONNX Runtime's own operators.
pub const MICROSOFT: &str = "com.microsoft";

/// Domain of the server's custom operators.
pub const OUTRIDER: &str = "outrider";

/// Constants below this size in bytes are kept in the graph file itself.
const INLINE_BYTES: usize = 1024;

/// Bytes of a constant, wherever they are.
#[derive(Clone, Debug)]
pub enum Stored {
    /// In the graph.
    Inline(Vec<u8>),
    /// In a data file beside the graph.
    External {
        /// Name of the file.
        file: String,
        /// Where in it.
        span: Span,
    },
}

/// One dimension of an input or output.
#[derive(Clone, Copy, Debug)]
pub enum Dim {
    /// A fixed size.
    Fixed(usize),
    /// A size by name.
    Symbol(&'static str),
}

/// A call of an operator with several outputs or of another domain.
pub struct Call<'a> {
    /// Domain of the operator, empty for the standard one.
    pub domain: &'static str,
    /// Operator.
    pub op_type: &'static str,
    /// Names of the inputs; an empty name stands for an absent one.
    pub inputs: &'a [&'a str],
    /// Names of the outputs; the first names the node too.
    pub outputs: &'a [&'a str],
    /// Attributes.
    pub attributes: Vec<AttributeProto>,
}

/// A graph under construction.
pub struct GraphBuilder {
    graph: GraphProto,
    data: DataFile,
    data_name: String,
    constants: BTreeSet<String>,
    domains: BTreeSet<&'static str>,
}

impl GraphBuilder {
    /// Starts a graph whose large constants go to the file `data_name` in `dir`.
    pub fn create(dir: &Path, data_name: &str) -> io::Result<Self> {
        Ok(Self {
            graph: GraphProto::default(),
            data: DataFile::create(&dir.join(data_name))?,
            data_name: data_name.to_owned(),
            constants: BTreeSet::new(),
            domains: BTreeSet::from([""]),
        })
    }

    /// Adds a graph input.
    pub fn input(&mut self, name: &str, data_type: DataType, dims: &[Dim]) {
        self.graph.input.push(value_info(name, data_type, dims));
    }

    /// Adds a graph output.
    pub fn output(&mut self, name: &str, data_type: DataType, dims: &[Dim]) {
        self.graph.output.push(value_info(name, data_type, dims));
    }

    /// States the type of an inner value, for readers that don't know the operator that makes it.
    pub fn value(&mut self, name: &str, data_type: DataType, dims: &[Dim]) {
        self.graph
            .value_info
            .push(value_info(name, data_type, dims));
    }

    /// Calls a standard operator with one output and returns the name of the output.
    pub fn node(
        &mut self,
        name: &str,
        op_type: &'static str,
        inputs: &[&str],
        attributes: Vec<AttributeProto>,
    ) -> String {
        self.call(Call {
            domain: "",
            op_type,
            inputs,
            outputs: &[name],
            attributes,
        });
        name.to_owned()
    }

    /// Calls any operator.
    pub fn call(&mut self, call: Call) {
        self.domains.insert(call.domain);
        let owned = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        self.graph.node.push(NodeProto {
            input: owned(call.inputs),
            output: owned(call.outputs),
            name: call.outputs[0].to_owned(),
            op_type: call.op_type.to_owned(),
            domain: call.domain.to_owned(),
            attribute: call.attributes,
        });
    }

    /// Makes the body of a loop of the nodes that `build` adds. Constants go to the graph around it, whose values the body may read.
    pub fn body(
        &mut self,
        name: &str,
        inputs: &[(&str, DataType, &[Dim])],
        outputs: &[(&str, DataType, &[Dim])],
        build: impl FnOnce(&mut Self),
    ) -> GraphProto {
        let around = std::mem::take(&mut self.graph.node);
        build(self);
        let infos = |values: &[(&str, DataType, &[Dim])]| {
            let values = values.iter();
            values
                .map(|(name, data_type, dims)| value_info(name, *data_type, dims))
                .collect()
        };
        GraphProto {
            name: name.to_owned(),
            node: std::mem::replace(&mut self.graph.node, around),
            input: infos(inputs),
            output: infos(outputs),
            ..GraphProto::default()
        }
    }

    /// Stores the values of a constant, row-major; small ones inline.
    pub fn store<T: bytemuck::NoUninit>(&mut self, values: &[T]) -> io::Result<Stored> {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        if bytes.len() < INLINE_BYTES {
            Ok(Stored::Inline(bytes.to_vec()))
        } else {
            Ok(Stored::External {
                file: self.data_name.clone(),
                span: self.data.append(bytes)?,
            })
        }
    }

    /// Names stored bytes as a constant. The same bytes may get several names: ONNX Runtime frees the memory of a constant by name.
    pub fn constant(&mut self, name: &str, data_type: DataType, dims: &[usize], stored: &Stored) {
        let mut tensor = TensorProto {
            dims: dims.iter().map(|&dim| dim as i64).collect(),
            data_type: data_type.into(),
            name: name.to_owned(),
            ..TensorProto::default()
        };
        match stored {
            Stored::Inline(bytes) => tensor.raw_data = bytes.clone(),
            Stored::External { file, span } => {
                tensor.data_location = DataLocation::External.into();
                tensor.external_data = vec![
                    entry("location", file),
                    entry("offset", &span.offset.to_string()),
                    entry("length", &span.length.to_string()),
                ];
            }
        }
        self.constants.insert(name.to_owned());
        self.graph.initializer.push(tensor);
    }

    /// Whether there is a constant of this name.
    pub fn has_constant(&self, name: &str) -> bool {
        self.constants.contains(name)
    }

    /// Names stored bytes as a constant unless there is one of that name: for constants whose name says their value.
    pub fn constant_once(
        &mut self,
        name: &str,
        data_type: DataType,
        dims: &[usize],
        stored: &Stored,
    ) {
        if !self.has_constant(name) {
            self.constant(name, data_type, dims, stored);
        }
    }

    /// A constant list of integers, shared by all who ask for the same one.
    pub fn ints(&mut self, values: &[i64]) -> String {
        let list: Vec<String> = values.iter().map(i64::to_string).collect();
        let name = format!("constants.ints_{}", list.join("_"));
        let bytes = values.iter().flat_map(|value| value.to_le_bytes());
        let stored = Stored::Inline(bytes.collect());
        self.constant_once(&name, DataType::Int64, &[values.len()], &stored);
        name
    }

    /// A constant integer without dimensions, shared.
    pub fn int(&mut self, value: i64) -> String {
        let name = format!("constants.int_{value}");
        let stored = Stored::Inline(value.to_le_bytes().into());
        self.constant_once(&name, DataType::Int64, &[], &stored);
        name
    }

    /// Writes the graph file and completes the data file.
    pub fn finish(
        mut self,
        path: &Path,
        name: &str,
        metadata: &[(&str, String)],
    ) -> io::Result<()> {
        self.data.finish()?;
        self.graph.name = name.to_owned();
        let model = ModelProto {
            ir_version: IR_VERSION,
            opset_import: self
                .domains
                .iter()
                .map(|&domain| OperatorSetIdProto {
                    domain: domain.to_owned(),
                    version: if domain.is_empty() { OPSET } else { 1 },
                })
                .collect(),
            producer_name: "outrider".to_owned(),
            producer_version: env!("CARGO_PKG_VERSION").to_owned(),
            graph: Some(self.graph),
            metadata_props: metadata
                .iter()
                .map(|(key, value)| entry(key, value))
                .collect(),
        };
        let file = std::fs::File::create(path)?;
        io::Write::write_all(&mut &file, &prost::Message::encode_to_vec(&model))?;
        file.sync_all()
    }
}

/// An integer attribute.
pub fn int(name: &str, value: i64) -> AttributeProto {
    AttributeProto {
        name: name.to_owned(),
        r#type: AttributeType::Int.into(),
        i: value,
        ..AttributeProto::default()
    }
}

/// A float attribute.
pub fn float(name: &str, value: f32) -> AttributeProto {
    AttributeProto {
        name: name.to_owned(),
        r#type: AttributeType::Float.into(),
        f: value,
        ..AttributeProto::default()
    }
}

/// A string attribute.
pub fn string(name: &str, value: &str) -> AttributeProto {
    AttributeProto {
        name: name.to_owned(),
        r#type: AttributeType::String.into(),
        s: value.as_bytes().to_vec(),
        ..AttributeProto::default()
    }
}

/// An attribute with several integers.
pub fn ints(name: &str, values: &[i64]) -> AttributeProto {
    AttributeProto {
        name: name.to_owned(),
        r#type: AttributeType::Ints.into(),
        ints: values.to_vec(),
        ..AttributeProto::default()
    }
}

/// A graph attribute.
pub fn subgraph(name: &str, value: GraphProto) -> AttributeProto {
    AttributeProto {
        name: name.to_owned(),
        r#type: AttributeType::Graph.into(),
        g: Some(Box::new(value)),
        ..AttributeProto::default()
    }
}

/// A tensor attribute of one element.
pub fn scalar_tensor(name: &str, data_type: DataType, bytes: &[u8]) -> AttributeProto {
    AttributeProto {
        name: name.to_owned(),
        r#type: AttributeType::Tensor.into(),
        t: Some(TensorProto {
            dims: vec![1],
            data_type: data_type.into(),
            raw_data: bytes.to_vec(),
            ..TensorProto::default()
        }),
        ..AttributeProto::default()
    }
}

/// The attribute `to` of `Cast`.
pub fn to(data_type: DataType) -> AttributeProto {
    int("to", i32::from(data_type).into())
}

fn entry(key: &str, value: &str) -> StringStringEntryProto {
    StringStringEntryProto {
        key: key.to_owned(),
        value: value.to_owned(),
    }
}

fn value_info(name: &str, data_type: DataType, dims: &[Dim]) -> ValueInfoProto {
    let dim = |dim: &Dim| DimensionProto {
        value: Some(match dim {
            Dim::Fixed(size) => Dimension::Size(*size as i64),
            Dim::Symbol(symbol) => Dimension::Symbol((*symbol).to_owned()),
        }),
    };
    ValueInfoProto {
        name: name.to_owned(),
        r#type: Some(TypeProto {
            tensor_type: Some(TensorTypeProto {
                elem_type: data_type.into(),
                shape: Some(TensorShapeProto {
                    dim: dims.iter().map(dim).collect(),
                }),
            }),
        }),
    }
}
