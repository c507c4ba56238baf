use half::{bf16, f16};
use proptest::prelude::*;

use super::{cached::Shapes, *};
use crate::ops::testing::{
    Backwards, Numbers, Setting, Tensors, Threads, bits, relative_error, settings,
};

/// Every instruction set of this processor, and few and many cores for the best one.
fn machines() -> Vec<Machine> {
    let mut machines: Vec<Machine> = InstructionSet::available()
        .into_iter()
        .map(|instructions| Machine {
            instructions,
            cores: 2,
        })
        .collect();
    machines.extend([1, 64].map(|cores| Machine {
        cores,
        ..machines[0]
    }));
    machines
}

fn run<T: Element>(
    machine: Machine,
    setting: &Setting,
    tensors: &mut Tensors<T>,
    pool: &impl Pool,
) -> Vec<T> {
    let mut output = vec![T::default(); tensors.query.len()];
    let (mut keys, mut values) = (
        std::mem::take(&mut tensors.key_cache),
        std::mem::take(&mut tensors.value_cache),
    );
    let mut scratch = Scratch::default();
    let geometry = setting.geometry();
    tensors
        .inputs()
        .call(&geometry)
        .unwrap()
        .attend_on(
            machine,
            &mut keys,
            &mut values,
            &mut output,
            &mut scratch,
            pool,
        )
        .unwrap();
    (tensors.key_cache, tensors.value_cache) = (keys, values);
    output
}

fn check_against_definition<T: Element>(setting: &Setting, tolerance: f64) {
    let tensors = setting.tensors::<T>();
    let want = setting.reference(&tensors);
    for machine in machines() {
        let got = run(machine, setting, &mut tensors.clone(), &Backwards);
        let error = relative_error(&got, &want);
        assert!(
            error <= tolerance,
            "{machine:?}: relative error {error:e} with {setting:?}"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn f32_is_what_the_definition_says(setting in settings(600)) {
        check_against_definition::<f32>(&setting, 1e-5);
    }

    #[test]
    fn f16_is_what_the_definition_says(setting in settings(300)) {
        check_against_definition::<f16>(&setting, 2e-3);
    }

    #[test]
    fn bf16_is_what_the_definition_says(setting in settings(300)) {
        check_against_definition::<bf16>(&setting, 1.6e-2);
    }

    #[test]
    fn a_row_of_a_batch_has_the_bits_it_has_alone(setting in settings(600)) {
        let mut tensors = setting.tensors::<f32>();
        let tensors_before = tensors.clone();
        let together = run(Machine::this(), &setting, &mut tensors, &Backwards);
        let geometry = setting.geometry();
        let tokens = setting.tokens;
        for batch in 0..setting.batch {
            // Another capacity as well, as small as it gets.
            let capacity = setting.past[batch] + tokens + setting.ahead[batch];
            let alone = Setting { batch: 1, past: vec![setting.past[batch]], ahead: vec![setting.ahead[batch]], capacity, ..setting.clone() };
            let part = |elements: &[f32], row: usize| elements[batch * row..(batch + 1) * row].to_vec();
            let cache = |elements: &[f32]| elements[batch * setting.capacity * geometry.kv_width()..][..capacity * geometry.kv_width()].to_vec();
            let mut own = Tensors {
                query: part(&tensors_before.query, tokens * geometry.query_width()),
                key: part(&tensors_before.key, tokens * geometry.kv_width()),
                value: part(&tensors_before.value, tokens * geometry.kv_width()),
                key_cache: cache(&tensors_before.key_cache),
                value_cache: cache(&tensors_before.value_cache),
                position_ids: tensors_before.position_ids[batch * tokens..(batch + 1) * tokens].to_vec(),
                write_indices: vec![tensors_before.write_indices[batch]],
                nonpad_kv_seqlen: vec![tensors_before.nonpad_kv_seqlen[batch]],
                cos: tensors_before.cos[..capacity * setting.rotary_dim / 2].to_vec(),
                sin: tensors_before.sin[..capacity * setting.rotary_dim / 2].to_vec(),
                ..tensors_before.clone()
            };
            let output = run(Machine::this(), &alone, &mut own, &Threads);
            prop_assert_eq!(bits(&output), bits(&part(&together, tokens * geometry.query_width())));
            prop_assert_eq!(bits(&own.key_cache), bits(&cache(&tensors.key_cache)));
        }
    }
}

/// Feeds one sequence in chunks of these sizes and returns all outputs.
fn feed<T: Element>(
    machine: Machine,
    setting: &Setting,
    whole: &Tensors<T>,
    chunks: &[usize],
    capacity: usize,
    pool: &impl Pool,
) -> Vec<T> {
    let geometry = setting.geometry();
    let cache = vec![T::default(); capacity * geometry.kv_width()];
    let mut tensors = Tensors {
        key_cache: cache.clone(),
        value_cache: cache,
        ..whole.clone()
    };
    let (mut output, mut fed, mut turn) = (Vec::new(), 0, 0);
    while fed < setting.tokens {
        let tokens = chunks[turn % chunks.len()].min(setting.tokens - fed);
        let part =
            |elements: &[T], width: usize| elements[fed * width..(fed + tokens) * width].to_vec();
        tensors.query = part(&whole.query, geometry.query_width());
        tensors.key = part(&whole.key, geometry.kv_width());
        tensors.value = part(&whole.value, geometry.kv_width());
        tensors.position_ids = (fed..fed + tokens)
            .map(|position| position as i64)
            .collect();
        tensors.write_indices = vec![fed as i64];
        tensors.nonpad_kv_seqlen = vec![(fed + tokens) as i64];
        let step = Setting {
            tokens,
            past: vec![fed],
            ahead: vec![0],
            capacity,
            ..setting.clone()
        };
        output.extend(run(machine, &step, &mut tensors, pool));
        (fed, turn) = (fed + tokens, turn + 1);
    }
    output
}

fn check_chunkings<T: Element>(
    num_heads: usize,
    kv_num_heads: usize,
    head_dim: usize,
    window: usize,
) {
    let tokens = 2 * SPLIT + 90;
    let setting = Setting {
        attributes: Attributes {
            num_heads,
            kv_num_heads,
            is_causal: true,
            window,
            rotary_layout: RotaryLayout::HalfSplit,
            scale: 0.0,
            norm_epsilon: 1e-6,
            softcap: 0.0,
        },
        batch: 1,
        tokens,
        past: vec![0],
        ahead: vec![0],
        capacity: tokens,
        head_dim,
        rotary_dim: head_dim / 2 * 2,
        q_norm: true,
        k_norm: false,
        seed: head_dim as u64,
    };
    let whole = setting.tensors::<T>();
    for machine in machines() {
        let want = bits(&feed(
            machine,
            &setting,
            &whole,
            &[tokens],
            tokens,
            &Backwards,
        ));
        for (chunks, capacity) in [
            (&[1][..], tokens),
            (&[2], tokens + 1),
            (&[3], 1024),
            (&[5], 700),
            (&[8], tokens),
            (&[64], 2048),
            (&[1, 8, 2, 64, 3], 611),
        ] {
            let got = bits(&feed(
                machine, &setting, &whole, chunks, capacity, &Backwards,
            ));
            assert!(
                got == want,
                "{machine:?}: chunks of {chunks:?} in a cache of {capacity} rows, window {window}"
            );
        }
    }
    let want = bits(&feed(
        Machine::this(),
        &setting,
        &whole,
        &[tokens],
        tokens,
        &Backwards,
    ));
    assert!(
        bits(&feed(
            Machine::this(),
            &setting,
            &whole,
            &[8, 31],
            tokens,
            &Threads
        )) == want,
        "on many threads"
    );
}

#[test]
fn any_chunking_gives_the_same_bits() {
    check_chunkings::<f32>(9, 3, 64, 0);
    check_chunkings::<f32>(4, 1, 128, 100);
    check_chunkings::<f32>(2, 2, 24, 0);
    check_chunkings::<f16>(6, 3, 40, 300);
    check_chunkings::<bf16>(7, 1, 32, 0);
}

fn setting(tokens: usize, past: &[usize], ahead: &[usize], capacity: usize) -> Setting {
    Setting {
        attributes: Attributes {
            num_heads: 4,
            kv_num_heads: 2,
            is_causal: true,
            window: 0,
            rotary_layout: RotaryLayout::HalfSplit,
            scale: 0.0,
            norm_epsilon: 1e-6,
            softcap: 0.0,
        },
        batch: past.len(),
        tokens,
        past: past.to_vec(),
        ahead: ahead.to_vec(),
        capacity,
        head_dim: 16,
        rotary_dim: 16,
        q_norm: false,
        k_norm: false,
        seed: 11,
    }
}

#[test]
fn a_query_that_sees_no_key_gives_zeros() {
    // One valid row and three queries, bottom-right aligned: the first two stand before the first row.
    let setting = setting(3, &[0], &[0], 8);
    let mut tensors = setting.tensors::<f32>();
    tensors.nonpad_kv_seqlen = vec![1];
    let output = run(Machine::this(), &setting, &mut tensors, &Backwards);
    let width = setting.geometry().query_width();
    assert!(output[..2 * width].iter().all(|&element| element == 0.0));
    assert_eq!(output[2 * width..2 * width + 16], tensors.value[..16]);
    tensors.nonpad_kv_seqlen = vec![0];
    let output = run(Machine::this(), &setting, &mut tensors, &Backwards);
    assert!(output.iter().all(|&element| element == 0.0));
}

#[test]
fn a_row_with_nan_does_not_reach_its_neighbours() {
    let setting = setting(9, &[20, 3], &[0, 0], 40);
    let mut tensors = setting.tensors::<f32>();
    let clean = run(Machine::this(), &setting, &mut tensors.clone(), &Backwards);
    let (query_width, kv_width) = (
        setting.geometry().query_width(),
        setting.geometry().kv_width(),
    );
    // A query alone: only that row. A key and its value: that row and the later ones of its sequence.
    tensors.query[4 * query_width..5 * query_width].fill(f32::NAN);
    tensors.key[7 * kv_width..8 * kv_width].fill(f32::NAN);
    tensors.value[7 * kv_width..8 * kv_width].fill(f32::INFINITY);
    let output = run(Machine::this(), &setting, &mut tensors, &Backwards);
    for (row, (got, want)) in output
        .chunks(query_width)
        .zip(clean.chunks(query_width))
        .enumerate()
    {
        if [4, 7, 8].contains(&row) {
            assert!(got.iter().all(|element| element.is_nan()), "row {row}");
        } else {
            assert_eq!(bits(got), bits(want), "row {row}");
        }
    }
}

#[test]
fn large_scores_neither_overflow_nor_vanish() {
    let setting = Setting {
        attributes: Attributes {
            scale: 1.0,
            ..setting(2, &[400], &[0], 402).attributes
        },
        ..setting(2, &[400], &[0], 402)
    };
    let mut tensors = setting.tensors::<f32>();
    tensors.query.iter_mut().for_each(|element| *element *= 1e3);
    let want = setting.reference(&tensors);
    for machine in machines() {
        let output = run(machine, &setting, &mut tensors.clone(), &Backwards);
        assert!(relative_error(&output, &want) < 1e-2, "{machine:?}");
    }
}

#[test]
fn only_the_kept_rows_are_copied() {
    let setting = setting(2, &[3, 0], &[0, 0], 8);
    let mut tensors = setting.tensors::<f32>();
    // The second sequence keeps rows behind the written ones, as a block that is rewritten in the middle does.
    tensors.nonpad_kv_seqlen[1] = 5;
    let geometry = setting.geometry();
    let from: Vec<f32> = Numbers(5).elements(tensors.key_cache.len(), 1.0);
    let mut to = vec![7.0; from.len()];
    tensors
        .inputs()
        .call(&geometry)
        .unwrap()
        .copy_kept_rows(&from, &mut to);
    let width = geometry.kv_width();
    let copied: Vec<bool> = to
        .chunks(width)
        .zip(from.chunks(width))
        .map(|(to, from)| to == from)
        .collect();
    let untouched: Vec<bool> = to
        .chunks(width)
        .map(|to| to.iter().all(|&element| element == 7.0))
        .collect();
    let kept = [
        [true, true, true, false, false, false, false, false],
        [false, false, true, true, true, false, false, false],
    ]
    .concat();
    assert_eq!(copied, kept);
    assert_eq!(untouched, kept.iter().map(|kept| !kept).collect::<Vec<_>>());
}

#[test]
fn nothing_to_do_is_no_error() {
    for (batch, tokens) in [(0, 3), (2, 0)] {
        let setting = setting(tokens, &vec![0; batch], &vec![0; batch], 4);
        assert!(
            run(
                Machine::this(),
                &setting,
                &mut setting.tensors::<f32>(),
                &Backwards
            )
            .is_empty()
        );
    }
}

#[test]
fn values_outside_their_limits_are_named() {
    let setting = setting(3, &[2, 4], &[0, 0], 10);
    let check = |change: &dyn Fn(&mut Tensors<f32>), message: &str| {
        let mut tensors = setting.tensors::<f32>();
        change(&mut tensors);
        let geometry = setting.geometry();
        let error = tensors.inputs().call(&geometry).unwrap_err();
        assert_eq!(error.to_string(), message);
    };
    check(
        &|tensors| tensors.write_indices[1] = 8,
        "input write_indices[1] is 8; allowed is 0 to 7",
    );
    check(
        &|tensors| tensors.write_indices[0] = -1,
        "input write_indices[0] is -1; allowed is 0 to 7",
    );
    check(
        &|tensors| tensors.write_indices[0] = i64::MAX,
        "input write_indices[0] is 9223372036854775807; allowed is 0 to 7",
    );
    check(
        &|tensors| tensors.nonpad_kv_seqlen[0] = 11,
        "input nonpad_kv_seqlen[0] is 11; allowed is 0 to 10",
    );
    check(
        &|tensors| tensors.nonpad_kv_seqlen[1] = i64::MIN,
        "input nonpad_kv_seqlen[1] is -9223372036854775808; allowed is 0 to 10",
    );
    check(
        &|tensors| tensors.position_ids[5] = 10,
        "input position_ids[5] is 10; allowed is 0 to 9",
    );
    check(
        &|tensors| tensors.position_ids[0] = -3,
        "input position_ids[0] is -3; allowed is 0 to 9",
    );
}

#[test]
fn shapes_that_disagree_are_named() {
    let attributes = setting(1, &[0], &[0], 8).attributes;
    let check = |change: &dyn Fn(&mut Shapes<'_>), message: &str| {
        let mut shapes = Shapes {
            query: &[2, 3, 64],
            key: &[2, 3, 32],
            value: &[2, 3, 32],
            key_cache: &[2, 10, 32],
            value_cache: &[2, 10, 32],
            position_ids: &[2, 3],
            write_indices: &[2],
            nonpad_kv_seqlen: &[2],
            cos: &[100, 8],
            sin: &[100, 8],
            q_norm: Some(&[16]),
            k_norm: None,
        };
        assert!(shapes.geometry(&attributes).is_ok());
        change(&mut shapes);
        assert_eq!(
            shapes.geometry(&attributes).unwrap_err().to_string(),
            message
        );
    };
    check(
        &|shapes| shapes.query = &[2, 64],
        "input query has shape [2, 64]; expected is [batch, tokens, num_heads * head_dim]",
    );
    check(
        &|shapes| shapes.query = &[2, 3, 66],
        "input query has shape [2, 3, 66]; expected is a last dimension that is a multiple of num_heads = 4",
    );
    check(
        &|shapes| shapes.query = &[2, 3, 0],
        "input query has shape [2, 3, 0]; expected is a last dimension that is a multiple of num_heads = 4",
    );
    check(
        &|shapes| shapes.query = &[2, 11, 64],
        "input query has shape [2, 11, 64]; expected is at most 10 tokens, as many as a cache has rows",
    );
    check(
        &|shapes| shapes.cos = &[0, 8],
        "input cos has shape [0, 8]; expected is at least 1 row",
    );
    check(
        &|shapes| shapes.key = &[2, 3, 16],
        "input key has shape [2, 3, 16]; expected is [2, 3, 32]",
    );
    check(
        &|shapes| shapes.value = &[2, 4, 32],
        "input value has shape [2, 4, 32]; expected is [2, 3, 32]",
    );
    check(
        &|shapes| shapes.key_cache = &[2, 32],
        "input key_cache has shape [2, 32]; expected is [2, capacity, 32]",
    );
    check(
        &|shapes| shapes.value_cache = &[2, 9, 32],
        "input value_cache has shape [2, 9, 32]; expected is [2, 10, 32]",
    );
    check(
        &|shapes| shapes.position_ids = &[3, 2],
        "input position_ids has shape [3, 2]; expected is [2, 3]",
    );
    check(
        &|shapes| shapes.write_indices = &[],
        "input write_indices has shape []; expected is [2]",
    );
    check(
        &|shapes| shapes.nonpad_kv_seqlen = &[1],
        "input nonpad_kv_seqlen has shape [1]; expected is [2]",
    );
    check(
        &|shapes| shapes.cos = &[100, 9],
        "input cos has shape [100, 9]; expected is at most head_dim / 2 = 8 columns",
    );
    check(
        &|shapes| shapes.sin = &[99, 8],
        "input sin has shape [99, 8]; expected is [100, 8]",
    );
    check(
        &|shapes| shapes.q_norm = Some(&[1]),
        "input q_norm has shape [1]; expected is [16]",
    );
    check(
        &|shapes| shapes.k_norm = Some(&[16, 1]),
        "input k_norm has shape [16, 1]; expected is [16]",
    );
}

#[test]
fn impossible_attributes_are_named() {
    let good = setting(1, &[0], &[0], 8).attributes;
    let check = |attributes: Attributes, message: &str| {
        assert_eq!(attributes.check().unwrap_err().to_string(), message)
    };
    check(
        Attributes {
            num_heads: 0,
            ..good.clone()
        },
        "attribute num_heads is 0; allowed is at least 1",
    );
    check(
        Attributes {
            kv_num_heads: 3,
            ..good.clone()
        },
        "attribute kv_num_heads is 3; allowed is a divisor of num_heads",
    );
    check(
        Attributes {
            kv_num_heads: 0,
            ..good.clone()
        },
        "attribute kv_num_heads is 0; allowed is a divisor of num_heads",
    );
    check(
        Attributes {
            softcap: -1.0,
            ..good.clone()
        },
        "attribute softcap is -1; allowed is a finite number, 0 or above",
    );
    check(
        Attributes {
            scale: f32::NAN,
            ..good
        },
        "attribute scale is NaN; allowed is a finite number, 0 or above",
    );
}
