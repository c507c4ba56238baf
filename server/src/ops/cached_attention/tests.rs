//! The operator inside real ONNX Runtime sessions.

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
    attention::RotaryLayout,
    testing::{
        Setting, Tensors, attention_attributes, bits,
        graph::{Attribute, Graph},
        relative_error,
        session::{Feeds, data_type, session, try_session, value},
        settings,
    },
};

const CACHES: [&str; 2] = ["key_cache", "value_cache"];

fn graph_with_inputs(element: DataType, norms: &[&str]) -> Graph {
    let mut graph = Graph::default();
    graph.input("query", element, &["B", "S", "Q"]);
    graph.input("key", element, &["B", "S", "KV"]);
    graph.input("value", element, &["B", "S", "KV"]);
    graph.input("key_cache", element, &["B", "MAX", "KV"]);
    graph.input("value_cache", element, &["B", "MAX", "KV"]);
    graph.input("position_ids", DataType::Int64, &["B", "S"]);
    graph.input("write_indices", DataType::Int64, &["B"]);
    graph.input("nonpad_kv_seqlen", DataType::Int64, &["B"]);
    graph.input("cos", DataType::Float, &["P", "R"]);
    graph.input("sin", DataType::Float, &["P", "R"]);
    for norm in norms {
        graph.input(norm, DataType::Float, &["D"]);
    }
    graph
}

const INPUTS: [&str; 10] = [
    "query",
    "key",
    "value",
    "key_cache",
    "value_cache",
    "position_ids",
    "write_indices",
    "nonpad_kv_seqlen",
    "cos",
    "sin",
];

fn native(element: DataType, setting: &Setting) -> Vec<u8> {
    let norms: Vec<&str> = [("q_norm", setting.q_norm), ("k_norm", setting.k_norm)]
        .into_iter()
        .filter_map(|(name, present)| present.then_some(name))
        .collect();
    let mut graph = graph_with_inputs(element, &norms);
    let mut inputs = INPUTS.to_vec();
    match (setting.q_norm, setting.k_norm) {
        (true, true) => inputs.extend(["q_norm", "k_norm"]),
        (true, false) => inputs.push("q_norm"),
        (false, true) => inputs.extend(["", "k_norm"]),
        (false, false) => {}
    }
    let outputs = ["output", "updated_key_cache", "updated_value_cache"];
    graph.node(
        DOMAIN,
        NAME,
        &inputs,
        &outputs,
        &attention_attributes(&setting.attributes),
    );
    graph.output("output", element, &["B", "S", "Q"]);
    graph.output("updated_key_cache", element, &["B", "MAX", "KV"]);
    graph.output("updated_value_cache", element, &["B", "MAX", "KV"]);
    graph.model()
}

/// The same in standard operators; `mask` carries the window.
fn portable(setting: &Setting) -> Vec<u8> {
    let attributes = &setting.attributes;
    let (heads, kv_heads) = (attributes.num_heads as i64, attributes.kv_num_heads as i64);
    let mut graph = graph_with_inputs(DataType::Float, &[]);
    let rotary = |graph: &mut Graph, from: &str, to: &str, heads: i64| {
        let interleaved = i64::from(attributes.rotary_layout == RotaryLayout::Interleaved);
        let attributes = [
            ("num_heads", heads),
            ("rotary_embedding_dim", setting.rotary_dim as i64),
            ("interleaved", interleaved),
        ];
        graph.node(
            "",
            "RotaryEmbedding",
            &[from, "cos", "sin", "position_ids"],
            &[to],
            &attributes.map(|(name, value)| (name, Attribute::Int(value))),
        );
    };
    rotary(&mut graph, "query", "rotated_query", heads);
    rotary(&mut graph, "key", "rotated_key", kv_heads);
    for (cache, update, updated) in [
        ("key_cache", "rotated_key", "updated_key_cache"),
        ("value_cache", "value", "updated_value_cache"),
    ] {
        graph.node(
            "",
            "TensorScatter",
            &[cache, update, "write_indices"],
            &[updated],
            &[("axis", Attribute::Int(1))],
        );
        graph.output(updated, DataType::Float, &["B", "MAX", "KV"]);
    }
    let mut mask = "";
    if attributes.window > 0 {
        mask = "mask";
        graph.input("mask", DataType::Bool, &["B", "ONE", "S", "MAX"]);
    }
    let mut attention = vec![
        ("q_num_heads", Attribute::Int(heads)),
        ("kv_num_heads", Attribute::Int(kv_heads)),
        ("is_causal", Attribute::Int(i64::from(attributes.is_causal))),
        ("softcap", Attribute::Float(attributes.softcap)),
    ];
    if attributes.scale > 0.0 {
        attention.push(("scale", Attribute::Float(attributes.scale)));
    }
    let inputs = [
        "rotated_query",
        "updated_key_cache",
        "updated_value_cache",
        mask,
        "",
        "",
        "nonpad_kv_seqlen",
    ];
    graph.node("", "Attention", &inputs, &["output"], &attention);
    graph.output("output", DataType::Float, &["B", "S", "Q"]);
    graph.model()
}

fn feeds<T: Element + PrimitiveTensorElementType + std::fmt::Debug>(
    setting: &Setting,
    tensors: &Tensors<T>,
) -> Feeds {
    let geometry = setting.geometry();
    let (batch, tokens, capacity) = (setting.batch, setting.tokens, setting.capacity);
    let (query_width, kv_width, half) = (
        geometry.query_width(),
        geometry.kv_width(),
        setting.rotary_dim / 2,
    );
    let positions = tensors
        .cos
        .len()
        .checked_div(half)
        .unwrap_or(setting.capacity);
    let mut feeds = vec![
        (
            "query",
            value(&[batch, tokens, query_width], &tensors.query),
        ),
        ("key", value(&[batch, tokens, kv_width], &tensors.key)),
        ("value", value(&[batch, tokens, kv_width], &tensors.value)),
        (
            "key_cache",
            value(&[batch, capacity, kv_width], &tensors.key_cache),
        ),
        (
            "value_cache",
            value(&[batch, capacity, kv_width], &tensors.value_cache),
        ),
        (
            "position_ids",
            value(&[batch, tokens], &tensors.position_ids),
        ),
        ("write_indices", value(&[batch], &tensors.write_indices)),
        (
            "nonpad_kv_seqlen",
            value(&[batch], &tensors.nonpad_kv_seqlen),
        ),
        ("cos", value(&[positions, half], &tensors.cos)),
        ("sin", value(&[positions, half], &tensors.sin)),
    ];
    for (name, norm) in [("q_norm", &tensors.q_norm), ("k_norm", &tensors.k_norm)] {
        feeds.extend(norm.as_ref().map(|norm| (name, value(&[norm.len()], norm))));
    }
    feeds
}

/// `[batch, 1, tokens, capacity]`: true where a query may look as far as the window goes.
fn window_mask(setting: &Setting, tensors: &Tensors<f32>) -> SessionInputValue<'static> {
    let mut mask = Vec::new();
    for batch in 0..setting.batch {
        for token in 0..setting.tokens {
            let place = token as i64 + tensors.nonpad_kv_seqlen[batch] - setting.tokens as i64;
            mask.extend(
                (0..setting.capacity as i64)
                    .map(|key| (place - key).abs() < setting.attributes.window as i64),
            );
        }
    }
    value(&[setting.batch, 1, setting.tokens, setting.capacity], &mask)
}

/// Output and updated caches of a plain run.
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

/// Output and caches of a run whose caches and updated caches are the same memory.
fn run_in_place<T: Element + PrimitiveTensorElementType + std::fmt::Debug>(
    session: &mut Session,
    setting: &Setting,
    tensors: &Tensors<T>,
) -> [Vec<T>; 3] {
    let allocator = Allocator::default();
    let mut binding = session.create_binding().unwrap();
    let mut caches = Vec::new();
    for (name, elements) in CACHES
        .into_iter()
        .zip([&tensors.key_cache, &tensors.value_cache])
    {
        let mut cache = Tensor::<T>::new(
            &allocator,
            [
                setting.batch,
                setting.capacity,
                setting.geometry().kv_width(),
            ],
        )
        .unwrap();
        cache.extract_tensor_mut().1.copy_from_slice(elements);
        binding.bind_input(name, &cache).unwrap();
        binding
            .bind_output(format!("updated_{name}"), &mut cache)
            .unwrap();
        caches.push(cache);
    }
    for (name, value) in feeds(setting, tensors) {
        if !CACHES.contains(&name) {
            let SessionInputValue::Owned(value) = value else {
                panic!("feeds are owned")
            };
            binding.bind_input(name, &value).unwrap();
        }
    }
    binding
        .bind_output_to_device("output", allocator.memory_info())
        .unwrap();
    let outputs = session.run_binding(&binding).unwrap();
    let output = outputs["output"]
        .try_extract_tensor::<T>()
        .unwrap()
        .1
        .to_vec();
    let cache = |index: usize| caches[index].extract_tensor().1.to_vec();
    [output, cache(0), cache(1)]
}

/// The rows of a cache that a later step may read.
fn valid_rows<T: Element>(setting: &Setting, tensors: &Tensors<T>, cache: &[T]) -> Vec<u32> {
    let width = setting.geometry().kv_width();
    let row =
        |batch: usize, row: usize| &cache[(batch * setting.capacity + row) * width..][..width];
    (0..setting.batch)
        .flat_map(|batch| {
            (0..tensors.nonpad_kv_seqlen[batch] as usize)
                .flat_map(move |index| bits(row(batch, index)))
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn native_and_portable_graphs_agree(setting in settings(400)) {
        // The portable rotary operator knows no empty tables, and the norms would be other nodes.
        let setting = Setting { q_norm: false, k_norm: false, rotary_dim: setting.rotary_dim.max(setting.head_dim.min(2)), ..setting };
        prop_assume!(setting.head_dim >= 2);
        let mut tensors = setting.tensors::<f32>();
        // Standard operators multiply stale rows by zero: NaN there would show.
        for cache in [&mut tensors.key_cache, &mut tensors.value_cache] {
            cache.iter_mut().filter(|element| element.is_nan()).for_each(|element| *element = 0.25);
        }
        let mut portable_feeds = feeds(&setting, &tensors);
        if setting.attributes.window > 0 {
            portable_feeds.push(("mask", window_mask(&setting, &tensors)));
        }
        let native = run::<f32>(&mut session(&native(DataType::Float, &setting), 2), feeds(&setting, &tensors)).unwrap();
        let portable = run::<f32>(&mut session(&portable(&setting), 2), portable_feeds).unwrap();
        for (name, (native, portable)) in ["output", "keys", "values"].into_iter().zip(native.iter().zip(&portable)) {
            // Rows behind the valid ones are unspecified in the native form.
            let (mut got, mut want) = (native.clone(), portable.iter().map(|&element| f64::from(element)).collect::<Vec<_>>());
            if name != "output" {
                let width = setting.geometry().kv_width();
                for batch in 0..setting.batch {
                    let stale = (batch * setting.capacity + tensors.nonpad_kv_seqlen[batch] as usize) * width..(batch + 1) * setting.capacity * width;
                    got[stale.clone()].fill(0.0);
                    want[stale].fill(0.0);
                }
            }
            let error = relative_error(&got, &want);
            // Where values cancel, the oracle's own rounding is of that size too; it must not be held against the operator.
            let oracle_error = if name == "output" { relative_error(portable, &setting.reference(&tensors)) } else { 0.0 };
            prop_assert!(error <= 1e-5 + oracle_error, "{}: relative error {:e}, of the oracle {:e}", name, error, oracle_error);
        }
    }

    #[test]
    fn updating_in_place_and_copying_give_the_same(setting in settings(300)) {
        // Rows that nothing may read hold NaN here.
        let tensors = setting.tensors::<f32>();
        let mut session = session(&native(DataType::Float, &setting), 2);
        let copied = run::<f32>(&mut session, feeds(&setting, &tensors)).unwrap();
        let in_place = run_in_place(&mut session, &setting, &tensors);
        prop_assert_eq!(bits(&copied[0]), bits(&in_place[0]));
        prop_assert!(copied[0].iter().all(|element| element.is_finite()));
        for index in 1..3 {
            prop_assert_eq!(valid_rows(&setting, &tensors, &copied[index]), valid_rows(&setting, &tensors, &in_place[index]));
        }
    }
}

fn decoder(batch: usize, tokens: usize, past: usize, capacity: usize) -> Setting {
    Setting {
        attributes: Attributes {
            num_heads: 9,
            kv_num_heads: 3,
            is_causal: true,
            window: 0,
            rotary_layout: RotaryLayout::HalfSplit,
            scale: 0.0,
            norm_epsilon: 1e-6,
            softcap: 0.0,
        },
        batch,
        tokens,
        past: vec![past; batch],
        ahead: vec![0; batch],
        capacity,
        head_dim: 64,
        rotary_dim: 64,
        q_norm: false,
        k_norm: false,
        seed: 3,
    }
}

/// Feeds `whole` in chunks, copying the caches from run to run.
fn feed_in_chunks<T: Element + PrimitiveTensorElementType + std::fmt::Debug>(
    session: &mut Session,
    whole: &Setting,
    tensors: &Tensors<T>,
    chunk: usize,
    capacity: usize,
) -> Vec<T> {
    let geometry = whole.geometry();
    let cache = vec![T::default(); whole.batch * capacity * geometry.kv_width()];
    let mut caches = [cache.clone(), cache];
    let mut rows: Vec<Vec<T>> = vec![Vec::new(); whole.batch];
    for first in (0..whole.tokens).step_by(chunk) {
        let chunk = chunk.min(whole.tokens - first);
        let part = |elements: &[T], width: usize| {
            let row =
                |batch: usize| &elements[(batch * whole.tokens + first) * width..][..chunk * width];
            (0..whole.batch).flat_map(row).copied().collect::<Vec<T>>()
        };
        let step = Setting {
            tokens: chunk,
            past: vec![first; whole.batch],
            capacity,
            ..whole.clone()
        };
        let [key_cache, value_cache] = caches;
        let step_tensors = Tensors {
            query: part(&tensors.query, geometry.query_width()),
            key: part(&tensors.key, geometry.kv_width()),
            value: part(&tensors.value, geometry.kv_width()),
            key_cache,
            value_cache,
            position_ids: (0..whole.batch)
                .flat_map(|_| (first..first + chunk).map(|position| position as i64))
                .collect(),
            write_indices: vec![first as i64; whole.batch],
            nonpad_kv_seqlen: vec![(first + chunk) as i64; whole.batch],
            ..tensors.clone()
        };
        let [output, keys, values] = run::<T>(session, feeds(&step, &step_tensors)).unwrap();
        for (row, output) in rows
            .iter_mut()
            .zip(output.chunks(chunk * geometry.query_width()))
        {
            row.extend(output);
        }
        caches = [keys, values];
    }
    rows.concat()
}

fn check_bits_in_sessions<T: Element + PrimitiveTensorElementType + std::fmt::Debug>(batch: usize) {
    let whole = decoder(batch, 330, 0, 330);
    let tensors = whole.tensors::<T>();
    let model = native(data_type::<T>(), &whole);
    let want = bits(&feed_in_chunks(
        &mut session(&model, 1),
        &whole,
        &tensors,
        whole.tokens,
        whole.tokens,
    ));
    for threads in [1, 2, 3] {
        let mut session = session(&model, threads);
        for (chunk, capacity) in [(1, 330), (2, 400), (3, 512), (5, 330), (8, 333), (64, 1000)] {
            let got = bits(&feed_in_chunks(
                &mut session,
                &whole,
                &tensors,
                chunk,
                capacity,
            ));
            assert!(
                got == want,
                "{threads} threads, {batch} sequences in chunks of {chunk}, capacity {capacity}"
            );
        }
    }
}

#[test]
fn chunks_batches_capacities_and_threads_do_not_change_a_bit() {
    check_bits_in_sessions::<f32>(1);
    check_bits_in_sessions::<f32>(3);
    check_bits_in_sessions::<f16>(1);
    check_bits_in_sessions::<bf16>(1);
}

#[test]
fn the_16_bit_forms_run_in_a_session() {
    fn check<T: Element + PrimitiveTensorElementType + std::fmt::Debug>(tolerance: f64) {
        let setting = Setting {
            q_norm: true,
            k_norm: true,
            ..decoder(2, 3, 100, 120)
        };
        let tensors = setting.tensors::<T>();
        let [output, ..] = run::<T>(
            &mut session(&native(data_type::<T>(), &setting), 2),
            feeds(&setting, &tensors),
        )
        .unwrap();
        assert!(relative_error(&output, &setting.reference(&tensors)) < tolerance);
    }
    check::<f16>(2e-3);
    check::<bf16>(1.6e-2);
}

#[test]
fn a_refused_run_leaves_the_session_usable() {
    let setting = decoder(2, 2, 5, 16);
    let good = setting.tensors::<f32>();
    let mut session = session(&native(DataType::Float, &setting), 2);
    let [want, ..] = run::<f32>(&mut session, feeds(&setting, &good)).unwrap();
    let mut check = |setting: &Setting, tensors: &Tensors<f32>, message: &str| {
        let error = run::<f32>(&mut session, feeds(setting, tensors)).unwrap_err();
        assert!(error.message().contains(message), "{error}");
        let [output, ..] = run::<f32>(&mut session, feeds(&decoder(2, 2, 5, 16), &good)).unwrap();
        assert_eq!(bits(&output), bits(&want));
    };
    check(
        &setting,
        &Tensors {
            write_indices: vec![5, 15],
            ..good.clone()
        },
        "input write_indices[1] is 15; allowed is 0 to 14",
    );
    check(
        &setting,
        &Tensors {
            nonpad_kv_seqlen: vec![17, 7],
            ..good.clone()
        },
        "input nonpad_kv_seqlen[0] is 17; allowed is 0 to 16",
    );
    check(
        &setting,
        &Tensors {
            position_ids: vec![5, 6, -1, 6],
            ..good.clone()
        },
        "input position_ids[2] is -1; allowed is 0 to 15",
    );
    // Caches of one row more than the tables of the other inputs say.
    let wider = Setting {
        head_dim: 32,
        rotary_dim: 32,
        ..setting
    };
    let mixed = Tensors {
        query: wider.tensors::<f32>().query,
        ..good.clone()
    };
    let mut mixed_feeds = feeds(&decoder(2, 2, 5, 16), &good);
    mixed_feeds[0].1 = value(&[2, 2, wider.geometry().query_width()], &mixed.query);
    let error = run::<f32>(&mut session, mixed_feeds).unwrap_err();
    assert!(
        error.message().contains(
            "input cos has shape [16, 32]; expected is at most head_dim / 2 = 16 columns"
        ),
        "{error}"
    );
}

#[test]
fn memory_shared_in_any_other_way_is_refused() {
    let setting = decoder(1, 1, 2, 8);
    let tensors = setting.tensors::<f32>();
    let mut session = session(&native(DataType::Float, &setting), 1);
    let allocator = Allocator::default();
    let mut binding = session.create_binding().unwrap();
    let shape = [
        setting.batch,
        setting.capacity,
        setting.geometry().kv_width(),
    ];
    let mut shared = Tensor::<f32>::new(&allocator, shape).unwrap();
    let mut other = Tensor::<f32>::new(&allocator, shape).unwrap();
    for (name, value) in feeds(&setting, &tensors) {
        let SessionInputValue::Owned(value) = value else {
            panic!("feeds are owned")
        };
        if !CACHES.contains(&name) {
            binding.bind_input(name, &value).unwrap();
        }
    }
    binding
        .bind_output_to_device("output", allocator.memory_info())
        .unwrap();
    binding.bind_input("key_cache", &shared).unwrap();
    binding.bind_input("value_cache", &other).unwrap();
    // The key cache is updated where the value cache is.
    binding
        .bind_output("updated_key_cache", &mut other)
        .unwrap();
    binding
        .bind_output("updated_value_cache", &mut shared)
        .unwrap();
    let error = session.run_binding(&binding).unwrap_err();
    assert!(
        error
            .message()
            .contains("updated_key_cache shares memory with another tensor"),
        "{error}"
    );
}

#[test]
fn a_plain_run_leaves_the_caches_it_was_given_alone() {
    let setting = decoder(2, 3, 40, 64);
    let tensors = setting.tensors::<f32>();
    let mut session = session(&native(DataType::Float, &setting), 1);
    let mut given = Vec::new();
    for (name, value) in feeds(&setting, &tensors) {
        let SessionInputValue::Owned(value) = value else {
            panic!("feeds are owned")
        };
        given.push((name, value));
    }
    let inputs: Vec<(&str, SessionInputValue<'_>)> = given
        .iter()
        .map(|(name, value)| (*name, value.into()))
        .collect();
    session.run(inputs).unwrap();
    for (name, before) in [
        ("key_cache", &tensors.key_cache),
        ("value_cache", &tensors.value_cache),
    ] {
        let (_, after) = given.iter().find(|(input, _)| *input == name).unwrap();
        assert_eq!(
            bits(after.try_extract_tensor::<f32>().unwrap().1),
            bits(before),
            "{name}"
        );
    }
}

#[test]
fn a_node_may_leave_out_the_updated_caches() {
    let setting = decoder(2, 3, 40, 64);
    let tensors = setting.tensors::<f32>();
    let [want, ..] = run::<f32>(
        &mut session(&native(DataType::Float, &setting), 1),
        feeds(&setting, &tensors),
    )
    .unwrap();
    for outputs in [
        &["output"][..],
        &["output", "", ""],
        &["output", "", "updated_value_cache"],
    ] {
        let mut graph = graph_with_inputs(DataType::Float, &[]);
        graph.node(
            DOMAIN,
            NAME,
            &INPUTS,
            outputs,
            &attention_attributes(&setting.attributes),
        );
        graph.output("output", DataType::Float, &["B", "S", "Q"]);
        let mut session = session(&graph.model(), 1);
        let got = session.run(feeds(&setting, &tensors)).unwrap();
        assert_eq!(
            bits(got["output"].try_extract_tensor::<f32>().unwrap().1),
            bits(&want),
            "{outputs:?}"
        );
    }
}

#[test]
fn caches_may_be_inner_values_of_a_graph() {
    let setting = decoder(1, 2, 30, 40);
    let tensors = setting.tensors::<f32>();
    let [want, want_keys, _] = run::<f32>(
        &mut session(&native(DataType::Float, &setting), 1),
        feeds(&setting, &tensors),
    )
    .unwrap();
    let mut graph = graph_with_inputs(DataType::Float, &[]);
    graph.node("", "Neg", &["key_cache"], &["negated"], &[]);
    graph.node("", "Neg", &["value_cache"], &["inner_values"], &[]);
    graph.node("", "Neg", &["negated"], &["inner_keys"], &[]);
    graph.node("", "Neg", &["inner_values"], &["inner_values_again"], &[]);
    let mut inputs = INPUTS;
    (inputs[3], inputs[4]) = ("inner_keys", "inner_values_again");
    graph.node(
        DOMAIN,
        NAME,
        &inputs,
        &["output", "inner_updated", ""],
        &attention_attributes(&setting.attributes),
    );
    graph.node("", "Neg", &["inner_updated"], &["negated_update"], &[]);
    graph.output("output", DataType::Float, &["B", "S", "Q"]);
    graph.output("negated_update", DataType::Float, &["B", "MAX", "KV"]);
    let mut session = session(&graph.model(), 1);
    let got = session.run(feeds(&setting, &tensors)).unwrap();
    assert_eq!(
        bits(got["output"].try_extract_tensor::<f32>().unwrap().1),
        bits(&want)
    );
    let negated: Vec<f32> = got["negated_update"]
        .try_extract_tensor::<f32>()
        .unwrap()
        .1
        .iter()
        .map(|element| -element)
        .collect();
    assert_eq!(
        valid_rows(&setting, &tensors, &negated),
        valid_rows(&setting, &tensors, &want_keys)
    );
}

#[test]
fn bad_attributes_are_refused_when_the_model_is_loaded() {
    let check = |attributes: Vec<(&str, Attribute)>, message: &str| {
        let mut graph = graph_with_inputs(DataType::Float, &[]);
        graph.node(DOMAIN, NAME, &INPUTS, &["output"], &attributes);
        graph.output("output", DataType::Float, &["B", "S", "Q"]);
        let error = try_session(&graph.model(), 1)
            .err()
            .unwrap_or_else(|| panic!("loaded, instead of: {message}"));
        assert!(error.message().contains(message), "{error}");
    };
    let heads = || {
        vec![
            ("num_heads", Attribute::Int(4)),
            ("kv_num_heads", Attribute::Int(2)),
        ]
    };
    let with = |name, value| {
        let mut attributes = heads();
        attributes.retain(|(existing, _)| *existing != name);
        attributes.push((name, value));
        attributes
    };
    check(
        vec![("num_heads", Attribute::Int(4))],
        "attribute kv_num_heads of CachedAttention is missing",
    );
    check(
        with("kv_num_heads", Attribute::Int(3)),
        "attribute kv_num_heads is 3; allowed is a divisor of num_heads",
    );
    check(
        with("num_heads", Attribute::Int(-4)),
        "attribute num_heads is -4; allowed is 0 or above",
    );
    check(
        with("num_heads", Attribute::Float(4.0)),
        "attribute num_heads of CachedAttention is not an integer",
    );
    check(
        with("is_causal", Attribute::Int(2)),
        "attribute is_causal is 2; allowed is 0 or 1",
    );
    check(
        with("window", Attribute::Int(-1)),
        "attribute window is -1; allowed is 0 or above",
    );
    check(
        with("scale", Attribute::Int(1)),
        "attribute scale of CachedAttention is not a float",
    );
    check(
        with("softcap", Attribute::Float(f32::INFINITY)),
        "attribute softcap is inf; allowed is a finite number, 0 or above",
    );
}
