//! The operator inside real ONNX Runtime sessions; what it computes is tested with the computation.

use half::{bf16, f16};
use ort::{
    memory::Allocator,
    session::{Session, SessionInputValue},
    value::Tensor,
};
use outrider_bundle::onnx::DataType;
use proptest::prelude::*;

use super::*;
use crate::ops::{
    DOMAIN,
    testing::{
        attention_attributes, bits,
        block::{BlockSetting, BlockTensors, block_settings},
        graph::{Attribute, Graph},
        relative_error,
        session::{Feeds, data_type, session, try_session, value},
    },
};

fn model(element: DataType, setting: &BlockSetting, attributes: &[(&str, Attribute)]) -> Vec<u8> {
    let mut graph = Graph::default();
    let shapes = setting.shapes();
    for (index, (name, shape)) in shapes.iter().enumerate() {
        let data_type = match index {
            0..7 => element,
            7..12 => DataType::Int64,
            _ => DataType::Float,
        };
        // No two inputs share a dimension here: shapes that disagree must get to the operator.
        let dimensions: Vec<String> = (0..shape.len()).map(|dim| format!("{name}{dim}")).collect();
        graph.input(
            name,
            data_type,
            &dimensions.iter().map(String::as_str).collect::<Vec<_>>(),
        );
    }
    let mut inputs: Vec<&str> = shapes.iter().map(|(name, _)| *name).collect();
    if setting.k_norm && !setting.q_norm {
        inputs.insert(14, "");
    }
    let outputs = ["output", "updated_key_cache", "updated_value_cache"];
    graph.node(DOMAIN, NAME, &inputs, &outputs, attributes);
    for output in outputs {
        graph.output(output, element, &["B", "ROWS", "WIDTH"]);
    }
    graph.model()
}

fn of_setting<T: PrimitiveTensorElementType>(setting: &BlockSetting, threads: usize) -> Session {
    session(
        &model(
            data_type::<T>(),
            setting,
            &attention_attributes(&setting.attributes),
        ),
        threads,
    )
}

fn feeds<T: Element + PrimitiveTensorElementType + std::fmt::Debug>(
    setting: &BlockSetting,
    tensors: &BlockTensors<T>,
) -> Feeds {
    let feed = |(name, shape): (&'static str, Vec<usize>)| {
        let elements = match name {
            "query" => &tensors.query,
            "key" => &tensors.key,
            "value" => &tensors.value,
            "context_key" => &tensors.context_key,
            "context_value" => &tensors.context_value,
            "key_cache" => &tensors.key_cache,
            "value_cache" => &tensors.value_cache,
            _ => {
                let integers = match name {
                    "block_position_ids" => &tensors.block_position_ids,
                    "context_position_ids" => &tensors.context_position_ids,
                    "context_start" => &tensors.context_start,
                    "context_rows" => &tensors.context_rows,
                    "block_rows" => &tensors.block_rows,
                    _ => {
                        let floats = match name {
                            "cos" => &tensors.cos,
                            "sin" => &tensors.sin,
                            "q_norm" => tensors.q_norm.as_ref().unwrap(),
                            "k_norm" => tensors.k_norm.as_ref().unwrap(),
                            other => panic!("no input {other}"),
                        };
                        return (name, value(&shape, floats));
                    }
                };
                return (name, value(&shape, integers));
            }
        };
        (name, value(&shape, elements))
    };
    setting.shapes().into_iter().map(feed).collect()
}

/// Output and updated caches.
fn run<T: Element + PrimitiveTensorElementType>(
    session: &mut Session,
    feeds: Feeds,
) -> ort::Result<[Vec<T>; 3]> {
    let outputs = session.run(feeds)?;
    let tensor = |name: &str| outputs[name].try_extract_tensor::<T>().unwrap().1.to_vec();
    Ok([
        tensor("output"),
        tensor("updated_key_cache"),
        tensor("updated_value_cache"),
    ])
}

/// The same where caches and updated caches are the same memory.
fn run_in_place(
    session: &mut Session,
    setting: &BlockSetting,
    tensors: &BlockTensors<f32>,
) -> [Vec<f32>; 3] {
    let allocator = Allocator::default();
    let mut binding = session.create_binding().unwrap();
    let mut caches = Vec::new();
    for (name, value) in feeds(setting, tensors) {
        let elements = match name {
            "key_cache" => &tensors.key_cache,
            "value_cache" => &tensors.value_cache,
            _ => {
                let SessionInputValue::Owned(value) = value else {
                    panic!("feeds are owned")
                };
                binding.bind_input(name, &value).unwrap();
                continue;
            }
        };
        let shape = [
            setting.sequences.len(),
            setting.capacity,
            setting.kv_width(),
        ];
        let mut cache = Tensor::<f32>::new(&allocator, shape).unwrap();
        cache.extract_tensor_mut().1.copy_from_slice(elements);
        binding.bind_input(name, &cache).unwrap();
        binding
            .bind_output(format!("updated_{name}"), &mut cache)
            .unwrap();
        caches.push(cache);
    }
    binding
        .bind_output_to_device("output", allocator.memory_info())
        .unwrap();
    let outputs = session.run_binding(&binding).unwrap();
    let output = outputs["output"].try_extract_tensor::<f32>().unwrap().1;
    let cache = |index: usize| caches[index].extract_tensor().1.to_vec();
    [output.to_vec(), cache(0), cache(1)]
}

/// The rows of a cache that are valid after a call, the block's included.
fn valid_rows(setting: &BlockSetting, cache: &[f32]) -> Vec<u32> {
    let width = setting.kv_width();
    let rows = setting.sequences.iter().enumerate();
    rows.flat_map(|(index, rows)| {
        bits(&cache[index * setting.capacity * width..][..rows.iter().sum::<usize>() * width])
    })
    .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    #[test]
    fn updating_in_place_and_copying_give_the_same(setting in block_settings(300)) {
        let setting = BlockSetting { capacity: setting.capacity.max(1), ..setting };
        // Padding and stale rows hold NaN here.
        let tensors = setting.tensors::<f32>();
        let mut session = of_setting::<f32>(&setting, 2);
        let copied = run::<f32>(&mut session, feeds(&setting, &tensors)).unwrap();
        let in_place = run_in_place(&mut session, &setting, &tensors);
        prop_assert_eq!(bits(&copied[0]), bits(&in_place[0]));
        prop_assert!(copied[0].iter().all(|element| element.is_finite()));
        for index in 1..3 {
            prop_assert_eq!(valid_rows(&setting, &copied[index]), valid_rows(&setting, &in_place[index]));
        }
        prop_assert!(relative_error(&copied[0], &setting.reference(&tensors)) <= 1e-5);
    }
}

fn setting() -> BlockSetting {
    BlockSetting {
        attributes: Attributes {
            num_heads: 4,
            kv_num_heads: 2,
            is_causal: false,
            window: 0,
            rotary_layout: crate::ops::attention::RotaryLayout::HalfSplit,
            scale: 0.0,
            norm_epsilon: 1e-6,
            softcap: 0.0,
        },
        block: 5,
        context: 3,
        capacity: 40,
        sequences: vec![[30, 3, 5], [2, 1, 2], [7, 2, 0]],
        head_dim: 16,
        rotary_dim: 16,
        q_norm: true,
        k_norm: true,
        seed: 11,
    }
}

#[test]
fn the_16_bit_forms_run_in_a_session() {
    fn check<T: Element + PrimitiveTensorElementType + std::fmt::Debug>(tolerance: f64) {
        let setting = setting();
        let tensors = setting.tensors::<T>();
        let [output, ..] =
            run::<T>(&mut of_setting::<T>(&setting, 1), feeds(&setting, &tensors)).unwrap();
        let error = relative_error(&output, &setting.reference(&tensors));
        assert!(error <= tolerance, "relative error {error:e}");
    }
    check::<f16>(2e-3);
    check::<bf16>(1.6e-2);
}

#[test]
fn a_refused_run_names_the_input_and_leaves_the_session_usable() {
    let setting = setting();
    let good = setting.tensors::<f32>();
    let mut session = of_setting::<f32>(&setting, 2);
    let [want, ..] = run::<f32>(&mut session, feeds(&setting, &good)).unwrap();
    let bad = BlockTensors {
        context_start: vec![30, 2, 39],
        ..good.clone()
    };
    let error = run::<f32>(&mut session, feeds(&setting, &bad)).unwrap_err();
    assert!(
        error
            .message()
            .contains("input context_start[2] is 39; allowed is 0 to 38"),
        "{error}"
    );
    let mut mixed = feeds(&setting, &good);
    mixed[9].1 = value(&[2], &[0_i64, 0]);
    let error = run::<f32>(&mut session, mixed).unwrap_err();
    assert!(
        error
            .message()
            .contains("input context_start has shape [2]; expected is [3]"),
        "{error}"
    );
    let [output, ..] = run::<f32>(&mut session, feeds(&setting, &good)).unwrap();
    assert_eq!(bits(&output), bits(&want));
}

#[test]
fn bad_attributes_are_refused_when_the_model_is_loaded() {
    let attributes = [("num_heads", Attribute::Int(4))];
    let error = try_session(&model(DataType::Float, &setting(), &attributes), 1)
        .expect_err("the model loaded");
    assert!(
        error
            .message()
            .contains("attribute kv_num_heads of BlockAttention is missing"),
        "{error}"
    );
}
