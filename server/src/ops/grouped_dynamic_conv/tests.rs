//! The operator inside real ONNX Runtime sessions; what it computes is tested with the computation.

use half::{bf16, f16};

use super::*;
use crate::ops::{
    DOMAIN,
    testing::{
        Backwards, Numbers, bits,
        graph::{Attribute, Graph},
        session::{Feeds, data_type, session, try_session, value},
    },
};

/// Sequences, rows, channels, channels of a group, taps: enough work for several threads.
const SIZES: [usize; 5] = [2, 6, 4096, 16, 2];

fn model<T: PrimitiveTensorElementType>(attributes: &[(&str, Attribute)]) -> Vec<u8> {
    let mut graph = Graph::default();
    let element = data_type::<T>();
    graph.input("x", element, &["B", "W", "C"]);
    graph.input("coefficients", element, &["B", "W", "D"]);
    graph.input("base", element, &["TWO", "K", "C"]);
    graph.node(
        DOMAIN,
        NAME,
        &["x", "coefficients", "base"],
        &["y"],
        attributes,
    );
    graph.output("y", element, &["B", "W", "C"]);
    graph.model()
}

fn attributes() -> [(&'static str, Attribute); 2] {
    [
        ("side", Attribute::Int(1)),
        ("group_size", Attribute::Int(SIZES[3] as i64)),
    ]
}

fn check<T: Element + PrimitiveTensorElementType + std::fmt::Debug>() {
    let [batch, rows, channels, group_size, taps] = SIZES;
    let coefficients = 2 * taps * channels / group_size;
    let mut numbers = Numbers(5);
    let x = numbers.elements::<T>(batch * rows * channels, 2.0);
    let dynamic = numbers.elements::<T>(batch * rows * coefficients, 1.0);
    let base = numbers.elements::<T>(2 * taps * channels, 1.0);
    let feeds: Feeds = vec![
        ("x", value(&[batch, rows, channels], &x)),
        (
            "coefficients",
            value(&[batch, rows, coefficients], &dynamic),
        ),
        ("base", value(&[2, taps, channels], &base)),
    ];
    let mut session = session(&model::<T>(&attributes()), 2);
    let outputs = session.run(feeds).unwrap();
    let got = outputs["y"].try_extract_tensor::<T>().unwrap().1.to_vec();

    let shape = |sizes: [usize; 3]| sizes.map(|size| size as i64);
    let shapes = Shapes {
        x: &shape([batch, rows, channels]),
        coefficients: &shape([batch, rows, coefficients]),
        base: &shape([2, taps, channels]),
    };
    let attributes = Attributes {
        side: 1,
        group_size,
    };
    let geometry = Geometry::new(attributes, &shapes).unwrap();
    let inputs = Inputs {
        x: &x,
        coefficients: &dynamic,
        base: &base,
    };
    let mut want = vec![T::default(); x.len()];
    convolution::convolve(&geometry, &inputs, &mut want, &Backwards).unwrap();
    assert_eq!(bits(&got), bits(&want));
}

#[test]
fn a_session_computes_what_the_function_computes_in_every_type() {
    check::<f32>();
    check::<f16>();
    check::<bf16>();
}

#[test]
fn a_refused_run_names_the_input() {
    let mut session = session(&model::<f32>(&attributes()), 1);
    let feeds: Feeds = vec![
        ("x", value(&[1, 2, 32], &[0.0_f32; 64])),
        ("coefficients", value(&[1, 2, 7], &[0.0_f32; 14])),
        ("base", value(&[2, 2, 32], &[0.0_f32; 128])),
    ];
    let error = session.run(feeds).unwrap_err();
    assert!(
        error
            .message()
            .contains("input coefficients has shape [1, 2, 7]; expected is [1, 2, 8]"),
        "{error}"
    );
}

#[test]
fn bad_attributes_are_refused_when_the_model_is_loaded() {
    for (attributes, message) in [
        (
            vec![("side", Attribute::Int(0))],
            "attribute group_size of GroupedDynamicConv is missing",
        ),
        (
            vec![
                ("side", Attribute::Int(2)),
                ("group_size", Attribute::Int(4)),
            ],
            "attribute side is 2; allowed is 0 or 1",
        ),
    ] {
        let error = try_session(&model::<f32>(&attributes), 1).expect_err("the model loaded");
        assert!(error.message().contains(message), "{error}");
    }
}
