//! The smallest graph that keeps the target contract: an embedding, two layers of bare attention, and a head.
//!
//! It exists to put one MatMul of a chosen kind between a token and its logits.

use std::collections::BTreeMap;
use std::path::Path;

use outrider_bundle::VerifiedBundle;
use outrider_bundle::create::Builder;
use outrider_bundle::manifest::{Attention, GenerationDefaults, Precision, TargetFacts, TextFacts};
use outrider_bundle::onnx::{
    AttributeProto, AttributeType, DataType, Dimension, DimensionProto, GraphProto, ModelProto,
    NodeProto, OperatorSetIdProto, TensorProto, TensorShapeProto, TensorTypeProto, TypeProto,
    ValueInfoProto,
};
use prost::Message;

const VOCAB_SIZE: usize = 96;
const HIDDEN_SIZE: usize = 64;
const LAYERS: usize = 2;

/// How the head multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Head {
    /// fp32 `MatMul`.
    Float,
    /// `DynamicQuantizeMatMul`: one activation scale for all rows of a pass.
    PerTensorDynamic,
}

/// Writes the bundle of such a graph.
pub fn bundle(dir: &Path, head: Head) -> VerifiedBundle {
    std::fs::write(dir.join("model.onnx"), graph(head).encode_to_vec())
        .expect("the graph is written");
    std::fs::write(dir.join("tokenizer.json"), "{}").expect("the tokenizer is written");
    let builder = Builder {
        name: "tiny".to_owned(),
        target: TargetFacts {
            graph: "model.onnx".to_owned(),
            architecture: "llama".to_owned(),
            precision: Precision::Fp32,
            attention: Attention::Portable,
            layers: LAYERS,
            hidden_size: HIDDEN_SIZE,
            kv_heads: 1,
            head_dim: HIDDEN_SIZE,
            vocab_size: VOCAB_SIZE,
            context_tokens: 128,
            kv_dtype: "float32".to_owned(),
            taps: Vec::new(),
        },
        draft: None,
        text: TextFacts {
            tokenizer: "tokenizer.json".to_owned(),
            chat_template: None,
            bos_token: None,
            eos_token: None,
            add_bos: false,
        },
        generation: GenerationDefaults {
            eos_token_ids: vec![0],
            ..GenerationDefaults::default()
        },
        tools: BTreeMap::new(),
        sources: Vec::new(),
    };
    builder.write(dir).expect("the bundle is complete");
    VerifiedBundle::open(dir).expect("the bundle verifies")
}

fn graph(head: Head) -> ModelProto {
    let symbol = |name: &str| Dimension::Symbol(name.to_owned());
    let size = |size: usize| Dimension::Size(size as i64);
    let cache = || vec![symbol("batch"), symbol("max"), size(HIDDEN_SIZE)];
    let rows = || vec![symbol("batch"), symbol("sequence")];

    let mut input = vec![
        value("input_ids", DataType::Int64, rows()),
        value("position_ids", DataType::Int64, rows()),
        value("write_indices", DataType::Int64, vec![symbol("batch")]),
        value("nonpad_kv_seqlen", DataType::Int64, vec![symbol("batch")]),
        value(
            "logit_indices",
            DataType::Int64,
            vec![symbol("batch"), symbol("logits")],
        ),
    ];
    let mut output = vec![value(
        "logits",
        DataType::Float,
        vec![symbol("batch"), symbol("logits"), size(VOCAB_SIZE)],
    )];
    let mut nodes = vec![node(
        "Gather",
        "",
        &["embedding", "input_ids"],
        &["hidden.0"],
        vec![],
    )];
    for layer in 0..LAYERS {
        let hidden = format!("hidden.{layer}");
        let [keys, values] = ["key", "value"].map(|name| {
            let (old, new) = (
                format!("{name}_cache.{layer}"),
                format!("updated_{name}_cache.{layer}"),
            );
            input.push(value(&old, DataType::Float, cache()));
            output.push(value(&new, DataType::Float, cache()));
            let axis = int_attribute("axis", -2);
            nodes.push(node(
                "TensorScatter",
                "",
                &[&old, &hidden, "write_indices"],
                &[&new],
                vec![axis],
            ));
            new
        });
        let attributes = [("q_num_heads", 1), ("kv_num_heads", 1), ("is_causal", 1)];
        let attributes = attributes
            .map(|(name, value)| int_attribute(name, value))
            .to_vec();
        let attended = format!("attended.{layer}");
        nodes.push(node(
            "Attention",
            "",
            &[&hidden, &keys, &values, "", "", "", "nonpad_kv_seqlen"],
            &[&attended],
            attributes,
        ));
        nodes.push(node(
            "Add",
            "",
            &[&hidden, &attended],
            &[&format!("hidden.{}", layer + 1)],
            vec![],
        ));
    }
    let hidden = format!("hidden.{LAYERS}");
    let head_inputs: &[&str] = match head {
        Head::Float => &[&hidden, "head"],
        Head::PerTensorDynamic => &[&hidden, "head_int8", "head_scale"],
    };
    nodes.push(match head {
        Head::Float => node("MatMul", "", head_inputs, &["all"], vec![]),
        Head::PerTensorDynamic => node(
            "DynamicQuantizeMatMul",
            "com.microsoft",
            head_inputs,
            &["all"],
            vec![],
        ),
    });
    nodes.push(node(
        "Unsqueeze",
        "",
        &["logit_indices", "minus_one"],
        &["indices"],
        vec![],
    ));
    let batch_dims = int_attribute("batch_dims", 1);
    nodes.push(node(
        "GatherND",
        "",
        &["all", "indices"],
        &["logits"],
        vec![batch_dims],
    ));

    let weight = |count: usize, step: usize| {
        (0..count).map(move |index| ((index * step % 251) as f32 - 125.0) / 250.0)
    };
    let embedding: Vec<u8> = weight(VOCAB_SIZE * HIDDEN_SIZE, 97)
        .flat_map(f32::to_le_bytes)
        .collect();
    let mut initializer = vec![
        tensor(
            "embedding",
            DataType::Float,
            &[VOCAB_SIZE, HIDDEN_SIZE],
            embedding,
        ),
        tensor(
            "minus_one",
            DataType::Int64,
            &[1],
            (-1i64).to_le_bytes().to_vec(),
        ),
    ];
    let shape = [HIDDEN_SIZE, VOCAB_SIZE];
    let head_weights = weight(HIDDEN_SIZE * VOCAB_SIZE, 61);
    match head {
        Head::Float => initializer.push(tensor(
            "head",
            DataType::Float,
            &shape,
            head_weights.flat_map(f32::to_le_bytes).collect(),
        )),
        Head::PerTensorDynamic => {
            let quantised = head_weights
                .map(|weight| (weight * 250.0).round() as i8 as u8)
                .collect();
            initializer.push(tensor("head_int8", DataType::Int8, &shape, quantised));
            initializer.push(tensor(
                "head_scale",
                DataType::Float,
                &[1],
                (1.0f32 / 250.0).to_le_bytes().to_vec(),
            ));
        }
    }

    let opset = |domain: &str, version| OperatorSetIdProto {
        domain: domain.to_owned(),
        version,
    };
    ModelProto {
        ir_version: 10,
        opset_import: vec![opset("", 24), opset("com.microsoft", 1)],
        producer_name: "outrider-tests".to_owned(),
        graph: Some(GraphProto {
            node: nodes,
            name: "tiny".to_owned(),
            initializer,
            input,
            output,
            value_info: vec![],
        }),
        ..ModelProto::default()
    }
}

fn value(name: &str, element: DataType, shape: Vec<Dimension>) -> ValueInfoProto {
    let dim = shape
        .into_iter()
        .map(|value| DimensionProto { value: Some(value) })
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

fn node(
    op_type: &str,
    domain: &str,
    input: &[&str],
    output: &[&str],
    attribute: Vec<AttributeProto>,
) -> NodeProto {
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    NodeProto {
        input: names(input),
        output: names(output),
        op_type: op_type.to_owned(),
        domain: domain.to_owned(),
        attribute,
        ..NodeProto::default()
    }
}

fn int_attribute(name: &str, value: i64) -> AttributeProto {
    AttributeProto {
        name: name.to_owned(),
        r#type: AttributeType::Int as i32,
        i: value,
        ..AttributeProto::default()
    }
}

fn tensor(name: &str, element: DataType, shape: &[usize], raw_data: Vec<u8>) -> TensorProto {
    TensorProto {
        dims: shape.iter().map(|&dim| dim as i64).collect(),
        data_type: element as i32,
        name: name.to_owned(),
        raw_data,
        ..TensorProto::default()
    }
}
