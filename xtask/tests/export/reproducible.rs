//! The same checkpoint gives the same bytes, and the nodes are those that were chosen.

use std::collections::BTreeMap;
use std::fs;

use outrider_bundle::manifest::{Attention, Precision};
use outrider_bundle::onnx::{DataType, ModelProto};
use prost::Message;
use xtask::export::write_bundle;

use crate::support::*;

#[test]
fn bytes_do_not_depend_on_threads_or_on_the_place() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["llama-linear", "qwen2"] {
        for precision in PRECISIONS {
            for attention in ATTENTIONS {
                let exports = [1, 2, 5].map(|threads| {
                    let checkpoint = checkpoint(name);
                    let options = options(&checkpoint, precision, attention);
                    let out = dir.path().join(format!("{threads}/{name}"));
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
                    let pool = pool.build().unwrap();
                    pool.install(|| write_bundle(&checkpoint, &options, &out).unwrap());
                    files(&out)
                });
                assert!(exports[0].contains_key("model.onnx.data"));
                assert!(
                    exports[0] == exports[1] && exports[0] == exports[2],
                    "{name}, {precision:?}, {attention:?}"
                );
            }
        }
    }
}

/// The graph file of a tiny checkpoint.
fn graph(name: &str, precision: Precision, attention: Attention) -> ModelProto {
    let checkpoint = checkpoint(name);
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("bundle");
    write_bundle(
        &checkpoint,
        &options(&checkpoint, precision, attention),
        &out,
    )
    .unwrap();
    ModelProto::decode(&fs::read(out.join("model.onnx")).unwrap()[..]).unwrap()
}

#[test]
fn a_bf16_graph_is_the_fp16_graph_with_another_element_type() {
    // No CPU kernel of ONNX Runtime multiplies bf16 matrices, and the fp16 graph is run by other tests.
    let (half, brain) = (DataType::Float16 as i32, DataType::Bfloat16 as i32);
    for attention in ATTENTIONS {
        let mut graphs = [Precision::Fp16, Precision::Bf16].map(|precision| {
            graph("qwen3", precision, attention)
                .graph
                .expect("a graph file has a graph")
        });
        for graph in &mut graphs {
            let values = [&mut graph.input, &mut graph.output, &mut graph.value_info];
            for value in values.into_iter().flatten() {
                let tensor = value.r#type.as_mut().unwrap().tensor_type.as_mut().unwrap();
                if tensor.elem_type == brain {
                    tensor.elem_type = half;
                }
            }
            for constant in &mut graph.initializer {
                if constant.data_type == brain {
                    constant.data_type = half;
                }
                if constant.data_type == half {
                    constant.raw_data.clear();
                }
            }
        }
        assert!(graphs[0] == graphs[1], "{attention:?}");
    }
}

#[test]
fn the_nodes_of_each_form_are_these() {
    let mut text = String::new();
    for precision in PRECISIONS {
        for attention in ATTENTIONS {
            let model = graph("qwen2", precision, attention);
            let mut counts = BTreeMap::<String, usize>::new();
            for node in &model.graph.as_ref().unwrap().node {
                let op = format!("{} {}", node.domain, node.op_type);
                *counts.entry(op.trim().to_owned()).or_default() += 1;
            }
            let opsets: Vec<String> = model
                .opset_import
                .iter()
                .map(|opset| format!("{:?} {}", opset.domain, opset.version))
                .collect();
            text += &format!("{precision:?}, {attention:?}: {}\n", opsets.join(", "));
            for property in &model.metadata_props {
                text += &format!("  {} = {}\n", property.key, property.value);
            }
            for (op, count) in counts {
                text += &format!("  {count:3} {op}\n");
            }
        }
    }
    insta::assert_snapshot!(text);
}
