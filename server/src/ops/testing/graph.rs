//! Small ONNX graphs made in memory, for tests and benchmarks of the operators.

use outrider_bundle::onnx::{
    AttributeProto, AttributeType, DataType, Dimension, DimensionProto, GraphProto, ModelProto,
    NodeProto, OperatorSetIdProto, TensorProto, TensorShapeProto, TensorTypeProto, TypeProto,
    ValueInfoProto,
};
use prost::Message;

/// A graph in the making. All inputs and outputs have dynamic dimensions.
#[derive(Default)]
pub struct Graph(GraphProto);

/// Value of an attribute.
pub enum Attribute {
    /// An integer.
    Int(i64),
    /// A float.
    Float(f32),
}

impl Graph {
    /// Adds an input; each dimension is a symbol.
    pub fn input(&mut self, name: &str, element: DataType, dimensions: &[&str]) {
        self.0.input.push(value_info(name, element, dimensions));
    }

    /// Adds an output; each dimension is a symbol.
    pub fn output(&mut self, name: &str, element: DataType, dimensions: &[&str]) {
        self.0.output.push(value_info(name, element, dimensions));
    }

    /// Adds a constant.
    #[allow(
        dead_code,
        reason = "the benchmark has constants, the tests have inputs"
    )]
    pub fn constant(&mut self, name: &str, dims: &[i64], values: &[f32]) {
        self.0.initializer.push(TensorProto {
            dims: dims.to_vec(),
            data_type: DataType::Float as i32,
            name: name.to_owned(),
            raw_data: values
                .iter()
                .flat_map(|value| value.to_le_bytes())
                .collect(),
            ..TensorProto::default()
        });
    }

    /// Adds a node; an empty name stands for an absent input or output.
    pub fn node(
        &mut self,
        domain: &str,
        op_type: &str,
        inputs: &[&str],
        outputs: &[&str],
        attributes: &[(&str, Attribute)],
    ) {
        let owned = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        let attribute = attributes.iter().map(|(name, value)| {
            let attribute = AttributeProto {
                name: (*name).to_owned(),
                ..AttributeProto::default()
            };
            match *value {
                Attribute::Int(i) => AttributeProto {
                    r#type: AttributeType::Int as i32,
                    i,
                    ..attribute
                },
                Attribute::Float(f) => AttributeProto {
                    r#type: AttributeType::Float as i32,
                    f,
                    ..attribute
                },
            }
        });
        self.0.node.push(NodeProto {
            input: owned(inputs),
            output: owned(outputs),
            name: format!("{op_type}.{}", self.0.node.len()),
            op_type: op_type.to_owned(),
            domain: domain.to_owned(),
            attribute: attribute.collect(),
        });
    }

    /// The bytes of a model with this graph.
    pub fn model(mut self) -> Vec<u8> {
        self.0.name = "graph".to_owned();
        let opset = |domain: &str, version| OperatorSetIdProto {
            domain: domain.to_owned(),
            version,
        };
        let model = ModelProto {
            ir_version: 12,
            opset_import: vec![
                opset("", 24),
                opset("com.microsoft", 1),
                opset("outrider", 1),
            ],
            producer_name: "outrider".to_owned(),
            graph: Some(self.0),
            ..ModelProto::default()
        };
        model.encode_to_vec()
    }
}

fn value_info(name: &str, element: DataType, dimensions: &[&str]) -> ValueInfoProto {
    let dim = dimensions
        .iter()
        .map(|&symbol| DimensionProto {
            value: Some(Dimension::Symbol(symbol.to_owned())),
        })
        .collect();
    let tensor_type = TensorTypeProto {
        elem_type: element as i32,
        shape: Some(TensorShapeProto { dim }),
    };
    ValueInfoProto {
        name: name.to_owned(),
        r#type: Some(TypeProto {
            tensor_type: Some(tensor_type),
        }),
    }
}
