//! The kernels without a device: compiled for every architecture, and run on the CPU against the operators for the CPU.

use std::path::Path;

use half::{bf16, f16};
use proptest::{
    strategy::{Strategy, ValueTree},
    test_runner::TestRunner,
};

use super::{compile::compile, *};
use crate::ops::{
    attention, convolution,
    grouped_dynamic_conv::NAME,
    selector,
    testing::{
        Backwards, bits,
        block::{BlockSetting, BlockTensors, block_settings},
        graph::{Attribute, Graph},
        relative_error,
        session::{environment, value},
    },
};

/// Where `cargo xtask fetch` puts the compiler, relative to the workspace root.
const STORE_COMPILER: &str = ".outrider/store/nvrtc-13.4.92/libnvrtc.so.13";

/// The compiler is found by its name once it has been loaded by its path.
fn load_compiler() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("..")
        .join(STORE_COMPILER);
    assert!(
        path.is_file(),
        "no CUDA compiler at {STORE_COMPILER}; run `cargo xtask fetch --lock configs/locks/nvrtc.toml` or `cargo xtask test`"
    );
    // SAFETY: the library is loaded for good and nothing of it is called here.
    let library = unsafe { libloading::Library::new(&path) }.unwrap();
    std::mem::forget(library);
}

#[test]
fn every_source_compiles_for_every_architecture() {
    load_compiler();
    for source in Source::ALL {
        for architecture in ["sm_80", "sm_90a", "sm_120"] {
            let code = compile(source, architecture).unwrap();
            assert!(
                code.starts_with(b"\x7fELF"),
                "{} for {architecture}",
                source.name()
            );
            let has = |name: &str| code.windows(name.len()).any(|part| part == name.as_bytes());
            for suffix in ["f32", "f16", "bf16"] {
                let stem = source.name().trim_end_matches(".cu");
                assert!(
                    has(&format!("{stem}_{suffix}")) || has(&format!("{stem}_attend_{suffix}")),
                    "{stem} has no kernel for {suffix}"
                );
            }
        }
    }
}

#[test]
fn an_unknown_architecture_is_an_error_that_says_so() {
    load_compiler();
    let error = compile(Source::PathSelector, "sm_1")
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("path_selector.cu does not compile for sm_1: "),
        "{error}"
    );
}

/// A few values of a strategy, the same at every run: kernels are slow on the CPU.
fn examples<S: Strategy>(strategy: S, count: usize) -> Vec<S::Value> {
    let mut runner = TestRunner::deterministic();
    (0..count)
        .map(|_| strategy.new_tree(&mut runner).unwrap().current())
        .collect()
}

fn address<T>(elements: &[T]) -> usize {
    elements.as_ptr() as usize
}

fn check_convolution<T: CudaElement>(setting: &convolution::tests::Setting) {
    let tensors = setting.tensors::<T>();
    let want = setting.run(&tensors, &Backwards);
    let mut got = vec![T::default(); want.len()];
    let addresses = grouped_dynamic_conv::Addresses {
        x: address(&tensors.x),
        coefficients: address(&tensors.coefficients),
        base: address(&tensors.base),
        output: got.as_mut_ptr() as usize,
    };
    let launch = grouped_dynamic_conv::launch::<T>(&setting.geometry(), addresses);
    // SAFETY: the tensors have the sizes of the geometry.
    unsafe { emulator::run(&[launch]) };
    assert_eq!(bits(&got), bits(&want), "{setting:?}");
}

#[test]
fn the_convolution_has_the_bits_of_the_one_for_the_cpu() {
    for setting in examples(convolution::tests::settings(), 12) {
        check_convolution::<f32>(&setting);
        check_convolution::<f16>(&setting);
        check_convolution::<bf16>(&setting);
    }
}

/// Runs the kernel.
fn select<T: CudaElement>(
    setting: &selector::tests::Setting,
    tensors: &selector::tests::Tensors<T>,
) -> selector::tests::Proposal {
    let geometry = setting.geometry;
    let places = geometry.batch * geometry.slots;
    // What the outputs held before must not matter.
    let mut proposal = selector::tests::Proposal {
        drafts: vec![7; places],
        candidates: vec![7; places * geometry.top_k],
        scores: vec![7.0; places * geometry.top_k],
    };
    let codebook = |elements: &[T]| geometry.vocabulary.map_or(0, |_| address(elements));
    let addresses = path_selector::Addresses {
        inputs: [
            address(&tensors.logits),
            address(&tensors.block_ids),
            address(&tensors.block_position_ids),
            address(&tensors.block_rows),
            address(&tensors.temperature),
            address(&tensors.seed),
            address(&tensors.candidate_topk),
            codebook(&tensors.hidden),
            codebook(&tensors.predecessor),
            codebook(&tensors.successor),
            tensors.column_token_ids.as_deref().map_or(0, address),
        ],
        outputs: [
            proposal.drafts.as_mut_ptr() as usize,
            proposal.candidates.as_mut_ptr() as usize,
            proposal.scores.as_mut_ptr() as usize,
        ],
    };
    let launch = path_selector::launch::<T>(&geometry, &addresses).unwrap();
    // SAFETY: the tensors have the sizes of the geometry.
    unsafe { emulator::run(&[launch]) };
    proposal
}

#[test]
fn the_selector_proposes_what_the_definition_says() {
    for has_codebooks in [false, true] {
        for setting in examples(selector::tests::settings(has_codebooks), 6) {
            let tensors = setting.tensors::<f32>();
            let proposal = select(&setting, &tensors);
            setting.check(&tensors, &proposal);
            // Without codebooks nothing is summed, and every bit is that of the CPU.
            if !has_codebooks {
                assert_eq!(proposal, setting.run(&tensors, &Backwards));
            }
        }
    }
    let setting = &examples(selector::tests::settings(true), 1)[0];
    let tensors = setting.tensors::<f16>();
    setting.check(&tensors, &select(setting, &tensors));
    let tensors = setting.tensors::<bf16>();
    setting.check(&tensors, &select(setting, &tensors));
}

#[test]
fn the_selector_proposes_nothing_for_what_the_cpu_refuses_or_ends() {
    let setting = selector::tests::Setting {
        geometry: selector::Geometry {
            top_k: 4,
            batch: 2,
            slots: 3,
            columns: 200,
            rank: 8,
            vocabulary: Some(200),
        },
        candidates: 4,
        block_rows: vec![4, 4],
        temperature: 0.0,
        seed: 3,
    };
    let clean = select(&setting, &setting.tensors::<f32>()).drafts;
    type Change = fn(&mut selector::tests::Tensors<f32>);
    let changes: [(Change, usize); 8] = [
        (|tensors| tensors.logits[200 + 5] = f32::NAN, 1),
        (|tensors| tensors.logits[2 * 200 + 199] = f32::INFINITY, 2),
        (|tensors| tensors.logits[..200].fill(f32::NEG_INFINITY), 0),
        (|tensors| tensors.hidden[8] = f32::NAN, 1),
        (|tensors| tensors.temperature[0] = f32::NAN, 0),
        (|tensors| tensors.block_ids[0] = 200, 0),
        (|tensors| tensors.block_rows[0] = 5, 0),
        (|tensors| tensors.block_position_ids[2] = -1, 1),
    ];
    for (change, kept) in changes {
        let mut tensors = setting.tensors::<f32>();
        change(&mut tensors);
        let drafts = select(&setting, &tensors).drafts;
        assert_eq!(drafts[..kept], clean[..kept]);
        assert!(drafts[kept..3].iter().all(|&draft| draft == -1));
        assert_eq!(drafts[3..], clean[3..], "the other sequence");
    }
    let mut tensors = setting.tensors::<f32>();
    tensors.candidate_topk = [5];
    assert_eq!(select(&setting, &tensors).drafts, [-1; 6]);
    tensors.candidate_topk = [4];
    tensors.column_token_ids = Some(vec![-1; 200]);
    assert_eq!(select(&setting, &tensors).drafts, [-1; 6]);
}

fn attention_addresses<T>(
    tensors: &mut BlockTensors<T>,
    output: &mut [T],
) -> block_attention::Addresses {
    block_attention::Addresses {
        inputs: [
            address(&tensors.query),
            address(&tensors.key),
            address(&tensors.value),
            address(&tensors.context_key),
            address(&tensors.context_value),
            tensors.key_cache.as_mut_ptr() as usize,
            tensors.value_cache.as_mut_ptr() as usize,
            address(&tensors.block_position_ids),
            address(&tensors.context_position_ids),
            address(&tensors.context_start),
            address(&tensors.context_rows),
            address(&tensors.block_rows),
            address(&tensors.cos),
            address(&tensors.sin),
            tensors.q_norm.as_deref().map_or(0, address),
            tensors.k_norm.as_deref().map_or(0, address),
        ],
        output: output.as_mut_ptr() as usize,
    }
}

fn check_attention<T: CudaElement>(setting: &BlockSetting, tolerance: f64) {
    let mut tensors = setting.tensors::<T>();
    let geometry = setting
        .with_shapes(|shapes| shapes.geometry(&setting.attributes))
        .unwrap();
    let (mut keys, mut values) = (tensors.key_cache.clone(), tensors.value_cache.clone());
    let mut want = vec![T::default(); tensors.query.len()];
    tensors
        .inputs()
        .call(&geometry)
        .unwrap()
        .attend(
            &mut keys,
            &mut values,
            &mut want,
            &mut attention::Scratch::default(),
            &Backwards,
        )
        .unwrap();
    let mut got = vec![T::default(); tensors.query.len()];
    let addresses = attention_addresses(&mut tensors, &mut got);
    let launches = block_attention::launches::<T>(&geometry, setting.context, &addresses).unwrap();
    // SAFETY: the tensors have the sizes of the geometry.
    unsafe { emulator::run(&launches) };
    let error = relative_error(&got, &setting.reference(&tensors));
    assert!(
        error <= tolerance,
        "relative error {error:e} with {setting:?}"
    );
    assert_eq!(bits(&tensors.value_cache), bits(&values), "{setting:?}");
    // NaN behind the valid rows, where the CPU's has it as well: nothing but valid rows was written.
    let written = |cache: &[T]| -> Vec<bool> {
        bits(cache)
            .iter()
            .map(|&bits| f32::from_bits(bits).is_nan())
            .collect()
    };
    assert_eq!(written(&tensors.key_cache), written(&keys), "{setting:?}");
}

#[test]
fn block_attention_is_what_the_definition_says() {
    for setting in examples(block_settings(90), 8) {
        let setting = BlockSetting {
            // Keys of a head are added by other trees than on the CPU.
            capacity: setting.capacity.max(1),
            ..setting
        };
        check_attention::<f32>(&setting, 2e-5);
        check_attention::<f16>(&setting, 3e-3);
        check_attention::<bf16>(&setting, 2e-2);
    }
}

#[test]
fn block_attention_gives_nan_for_what_the_cpu_refuses() {
    let setting = BlockSetting {
        sequences: vec![[5, 2, 3], [4, 1, 2]],
        block: 3,
        context: 2,
        capacity: 16,
        ..examples(block_settings(90), 1).remove(0)
    };
    let mut tensors = setting.tensors::<f32>();
    let before = tensors.key_cache.clone();
    let geometry = setting
        .with_shapes(|shapes| shapes.geometry(&setting.attributes))
        .unwrap();
    tensors.context_start = vec![12, 4];
    let mut output = vec![0.0_f32; tensors.query.len()];
    let addresses = attention_addresses(&mut tensors, &mut output);
    let launches =
        block_attention::launches::<f32>(&geometry, setting.context, &addresses).unwrap();
    // SAFETY: the tensors have the sizes of the geometry.
    unsafe { emulator::run(&launches) };
    let (refused, good) = output.split_at(output.len() / 2);
    assert!(refused.iter().all(|element| element.is_nan()));
    assert!(good.iter().all(|element| element.is_finite()));
    let half = before.len() / 2;
    assert_eq!(bits(&tensors.key_cache[..half]), bits(&before[..half]));
}

#[test]
fn more_than_the_kernels_can_do_is_named() {
    let geometry = selector::Geometry {
        top_k: 4,
        batch: 1,
        slots: 33,
        columns: 1000,
        rank: 0,
        vocabulary: None,
    };
    let addresses = path_selector::Addresses {
        inputs: [0; 11],
        outputs: [0; 3],
    };
    let message = |geometry| {
        path_selector::launch::<f32>(&geometry, &addresses)
            .unwrap_err()
            .to_string()
    };
    assert_eq!(
        message(geometry),
        "the number of slots is 33; on CUDA at most 32 is allowed"
    );
    assert_eq!(
        message(selector::Geometry {
            slots: 15,
            top_k: 120,
            ..geometry
        }),
        "the shared memory that top_k and the codebooks' rank ask for, in bytes, is 52932; on CUDA at most 49152 is allowed"
    );
}

#[test]
fn a_session_on_the_cpu_takes_the_operators_for_the_cpu_from_the_same_domain() {
    let mut graph = Graph::default();
    let element = outrider_bundle::onnx::DataType::Float;
    graph.input("x", element, &["B", "W", "C"]);
    graph.input("coefficients", element, &["B", "W", "D"]);
    graph.input("base", element, &["TWO", "K", "C"]);
    let attributes = [
        ("side", Attribute::Int(0)),
        ("group_size", Attribute::Int(2)),
    ];
    let inputs = ["x", "coefficients", "base"];
    graph.node(crate::ops::DOMAIN, NAME, &inputs, &["y"], &attributes);
    graph.output("y", element, &["B", "W", "C"]);
    let environment = environment();
    let registration = crate::model::runtime::registration();
    let mut session = ort::session::Session::builder(environment)
        .unwrap()
        .with_operators(domain().unwrap())
        .unwrap()
        .commit_from_memory(&graph.model())
        .unwrap();
    drop(registration);
    let outputs = session
        .run(vec![
            ("x", value(&[1, 2, 2], &[1.0_f32, 2.0, 3.0, 4.0])),
            ("coefficients", value(&[1, 2, 2], &[0.5_f32; 4])),
            ("base", value(&[2, 1, 2], &[1.0_f32, 2.0, 9.0, 9.0])),
        ])
        .unwrap();
    assert_eq!(
        outputs["y"].try_extract_tensor::<f32>().unwrap().1,
        [1.5, 5.0, 4.5, 10.0]
    );
}
