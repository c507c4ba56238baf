use half::{bf16, f16};
use proptest::prelude::*;

use super::*;
use crate::ops::{
    attention::{Machine, RotaryLayout, Scratch, cached},
    pool::Pool,
    testing::{
        Backwards, Threads, bits,
        block::{BlockSetting, BlockTensors, block_settings},
        relative_error,
    },
};

/// The output; the caches are updated in place.
fn run<T: Element>(
    setting: &BlockSetting,
    tensors: &mut BlockTensors<T>,
    pool: &impl Pool,
) -> Vec<T> {
    let mut output = vec![T::default(); tensors.query.len()];
    let (mut keys, mut values) = (
        std::mem::take(&mut tensors.key_cache),
        std::mem::take(&mut tensors.value_cache),
    );
    let geometry = setting
        .with_shapes(|shapes| shapes.geometry(&setting.attributes))
        .unwrap();
    tensors
        .inputs()
        .call(&geometry)
        .unwrap()
        .attend_on(
            Machine::this(),
            &mut keys,
            &mut values,
            &mut output,
            &mut Scratch::default(),
            pool,
        )
        .unwrap();
    (tensors.key_cache, tensors.value_cache) = (keys, values);
    output
}

fn check_against_definition<T: Element>(setting: &BlockSetting, tolerance: f64) {
    let tensors = setting.tensors::<T>();
    let got = run(setting, &mut tensors.clone(), &Backwards);
    let error = relative_error(&got, &setting.reference(&tensors));
    assert!(
        error <= tolerance,
        "relative error {error:e} with {setting:?}"
    );
}

/// One sequence of the call as a call of its own: no padding, and no cache row that is not used.
fn alone(
    setting: &BlockSetting,
    tensors: &BlockTensors<f32>,
    index: usize,
) -> (BlockSetting, BlockTensors<f32>) {
    let [start, context, block] = setting.sequences[index];
    let capacity = start + context + block;
    let own = BlockSetting {
        block,
        context,
        capacity,
        sequences: vec![[start, context, block]],
        ..setting.clone()
    };
    let part = |elements: &[f32], per_sequence: usize, rows: usize, width: usize| {
        elements[index * per_sequence * width..][..rows * width].to_vec()
    };
    let (query_width, kv_width) = (setting.query_width(), setting.kv_width());
    let half = setting.rotary_dim / 2;
    let own_tensors = BlockTensors {
        query: part(&tensors.query, setting.block, block, query_width),
        key: part(&tensors.key, setting.block, block, kv_width),
        value: part(&tensors.value, setting.block, block, kv_width),
        context_key: part(&tensors.context_key, setting.context, context, kv_width),
        context_value: part(&tensors.context_value, setting.context, context, kv_width),
        key_cache: part(&tensors.key_cache, setting.capacity, capacity, kv_width),
        value_cache: part(&tensors.value_cache, setting.capacity, capacity, kv_width),
        block_position_ids: tensors.block_position_ids[index * setting.block..][..block].to_vec(),
        context_position_ids: tensors.context_position_ids[index * setting.context..][..context]
            .to_vec(),
        context_start: vec![start as i64],
        context_rows: vec![context as i64],
        block_rows: vec![block as i64],
        cos: tensors.cos[..capacity * half].to_vec(),
        sin: tensors.sin[..capacity * half].to_vec(),
        q_norm: tensors.q_norm.clone(),
        k_norm: tensors.k_norm.clone(),
    };
    (own, own_tensors)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn f32_is_what_the_definition_says(setting in block_settings(500)) {
        check_against_definition::<f32>(&setting, 1e-5);
    }

    #[test]
    fn f16_is_what_the_definition_says(setting in block_settings(200)) {
        check_against_definition::<f16>(&setting, 2e-3);
    }

    #[test]
    fn bf16_is_what_the_definition_says(setting in block_settings(200)) {
        check_against_definition::<bf16>(&setting, 1.6e-2);
    }

    #[test]
    fn a_sequence_of_a_batch_has_the_bits_it_has_alone_and_without_padding(setting in block_settings(500)) {
        let tensors = setting.tensors::<f32>();
        let mut updated = tensors.clone();
        let together = run(&setting, &mut updated, &Threads);
        for (index, rows) in setting.sequences.iter().enumerate() {
            let (own_setting, mut own) = alone(&setting, &tensors, index);
            prop_assume!(own_setting.capacity > 0);
            let output = run(&own_setting, &mut own, &Backwards);
            let width = setting.query_width();
            let mine = &together[index * setting.block * width..][..setting.block * width];
            let (valid, padding) = mine.split_at(rows[2] * width);
            prop_assert_eq!(bits(&output), bits(valid));
            prop_assert!(padding.iter().all(|&element| element == 0.0), "padding is not zero");
            for (updated, before, own) in [
                (&updated.key_cache, &tensors.key_cache, &own.key_cache),
                (&updated.value_cache, &tensors.value_cache, &own.value_cache),
            ] {
                let cache = |elements: &[f32]| elements[index * setting.capacity * setting.kv_width()..][..setting.capacity * setting.kv_width()].to_vec();
                let (updated, before) = (cache(updated), cache(before));
                prop_assert_eq!(bits(&updated[..own.len()]), bits(own));
                prop_assert_eq!(bits(&updated[own.len()..]), bits(&before[own.len()..]), "a row behind the block was written");
                let kept = rows[0] * setting.kv_width();
                prop_assert_eq!(bits(&updated[..kept]), bits(&before[..kept]), "a valid row was written");
            }
        }
    }

    #[test]
    fn context_gives_the_same_bits_in_one_call_and_in_several(setting in block_settings(500)) {
        let whole_tensors = setting.tensors::<f32>();
        for index in 0..setting.sequences.len() {
            let (whole, tensors) = alone(&setting, &whole_tensors, index);
            prop_assume!(whole.capacity > 0);
            let [start, context, block] = whole.sequences[0];
            let mut at_once = tensors.clone();
            let want = run(&whole, &mut at_once, &Backwards);
            // The first half of the context alone, without a block; then the rest.
            let first = context / 2;
            let width = whole.kv_width();
            let mut first_half = BlockTensors {
                query: Vec::new(),
                key: Vec::new(),
                value: Vec::new(),
                block_position_ids: Vec::new(),
                context_key: tensors.context_key[..first * width].to_vec(),
                context_value: tensors.context_value[..first * width].to_vec(),
                context_position_ids: tensors.context_position_ids[..first].to_vec(),
                context_rows: vec![first as i64],
                block_rows: vec![0],
                ..tensors.clone()
            };
            run(&BlockSetting { block: 0, context: first, sequences: vec![[start, first, 0]], ..whole.clone() }, &mut first_half, &Backwards);
            let mut rest = BlockTensors {
                context_key: tensors.context_key[first * width..].to_vec(),
                context_value: tensors.context_value[first * width..].to_vec(),
                context_position_ids: tensors.context_position_ids[first..].to_vec(),
                context_start: vec![(start + first) as i64],
                context_rows: vec![(context - first) as i64],
                key_cache: first_half.key_cache,
                value_cache: first_half.value_cache,
                ..tensors.clone()
            };
            let got = run(&BlockSetting { context: context - first, sequences: vec![[start + first, context - first, block]], ..whole.clone() }, &mut rest, &Backwards);
            prop_assert_eq!(bits(&got), bits(&want));
            prop_assert_eq!(bits(&rest.key_cache), bits(&at_once.key_cache));
        }
    }

    #[test]
    fn a_block_without_context_is_what_cached_attention_computes(setting in block_settings(300)) {
        for (index, &[start, _, block]) in setting.sequences.iter().enumerate() {
            prop_assume!(block > 0);
            let setting = BlockSetting { context: 0, sequences: vec![[start, 0, block]], block, capacity: start + block, seed: setting.seed ^ index as u64, ..setting.clone() };
            let mut tensors = setting.tensors::<f32>();
            let (mut keys, mut values) = (tensors.key_cache.clone(), tensors.value_cache.clone());
            let output = run(&setting, &mut tensors, &Backwards);
            let geometry = setting.with_shapes(|shapes| shapes.geometry(&setting.attributes)).unwrap();
            let cached = cached::Inputs {
                query: &tensors.query,
                key: &tensors.key,
                value: &tensors.value,
                position_ids: &tensors.block_position_ids,
                write_indices: &[start as i64],
                nonpad_kv_seqlen: &[(start + block) as i64],
                cos: &tensors.cos,
                sin: &tensors.sin,
                q_norm: tensors.q_norm.as_deref(),
                k_norm: tensors.k_norm.as_deref(),
            };
            let mut want = vec![0.0; output.len()];
            cached.call(&geometry).unwrap().attend(&mut keys, &mut values, &mut want, &mut Scratch::default(), &Threads).unwrap();
            prop_assert_eq!(bits(&output), bits(&want));
            prop_assert_eq!(bits(&tensors.key_cache), bits(&keys));
        }
    }
}

fn setting() -> BlockSetting {
    BlockSetting {
        attributes: Attributes {
            num_heads: 4,
            kv_num_heads: 2,
            is_causal: false,
            window: 0,
            rotary_layout: RotaryLayout::HalfSplit,
            scale: 0.0,
            norm_epsilon: 1e-6,
            softcap: 0.0,
        },
        block: 4,
        context: 3,
        capacity: 12,
        sequences: vec![[5, 3, 4], [2, 1, 2]],
        head_dim: 16,
        rotary_dim: 16,
        q_norm: false,
        k_norm: false,
        seed: 11,
    }
}

#[test]
fn values_outside_their_limits_are_named() {
    let check = |change: &dyn Fn(&mut BlockTensors<f32>), message: &str| {
        let setting = setting();
        let mut tensors = setting.tensors::<f32>();
        change(&mut tensors);
        let geometry = setting
            .with_shapes(|shapes| shapes.geometry(&setting.attributes))
            .unwrap();
        let error = tensors.inputs().call(&geometry).unwrap_err();
        assert_eq!(error.to_string(), message);
    };
    check(
        &|tensors| tensors.context_rows[1] = 4,
        "input context_rows[1] is 4; allowed is 0 to 3",
    );
    check(
        &|tensors| tensors.block_rows[0] = -1,
        "input block_rows[0] is -1; allowed is 0 to 4",
    );
    check(
        &|tensors| tensors.context_start[0] = 6,
        "input context_start[0] is 6; allowed is 0 to 5",
    );
    check(
        &|tensors| tensors.context_start[1] = i64::MAX,
        "input context_start[1] is 9223372036854775807; allowed is 0 to 9",
    );
    check(
        &|tensors| tensors.context_start[1] = -1,
        "input context_start[1] is -1; allowed is 0 to 9",
    );
    check(
        &|tensors| tensors.block_position_ids[5] = 12,
        "input block_position_ids[5] is 12; allowed is 0 to 11",
    );
    check(
        &|tensors| tensors.context_position_ids[3] = -2,
        "input context_position_ids[3] is -2; allowed is 0 to 11",
    );
}

#[test]
fn shapes_that_disagree_are_named() {
    let check = |change: &dyn Fn(&mut Shapes<'_>), message: &str| {
        let setting = setting();
        let error = setting.with_shapes(|mut shapes| {
            change(&mut shapes);
            shapes.geometry(&setting.attributes).unwrap_err()
        });
        assert_eq!(error.to_string(), message);
    };
    check(
        &|shapes| shapes.key = &[2, 4, 16],
        "input key has shape [2, 4, 16]; expected is [2, 4, 32]",
    );
    check(
        &|shapes| shapes.value = &[2, 3, 32],
        "input value has shape [2, 3, 32]; expected is [2, 4, 32]",
    );
    check(
        &|shapes| shapes.context_key = &[2, 32],
        "input context_key has shape [2, 32]; expected is [2, context, 32]",
    );
    check(
        &|shapes| shapes.context_value = &[2, 4, 32],
        "input context_value has shape [2, 4, 32]; expected is [2, 3, 32]",
    );
    check(
        &|shapes| shapes.value_cache = &[2, 12, 16],
        "input value_cache has shape [2, 12, 16]; expected is [2, 12, 32]",
    );
    check(
        &|shapes| shapes.block_position_ids = &[2, 3],
        "input block_position_ids has shape [2, 3]; expected is [2, 4]",
    );
    check(
        &|shapes| shapes.context_position_ids = &[2, 4],
        "input context_position_ids has shape [2, 4]; expected is [2, 3]",
    );
    for (change, name) in [
        (
            (|shapes| shapes.context_start = &[3]) as fn(&mut Shapes<'_>),
            "context_start",
        ),
        (|shapes| shapes.context_rows = &[3], "context_rows"),
        (|shapes| shapes.block_rows = &[3], "block_rows"),
    ] {
        check(
            &change,
            &format!("input {name} has shape [3]; expected is [2]"),
        );
    }
}
