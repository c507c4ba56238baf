//! Every stage of every golden draft, alone and in company, and the decode loop.

use outrider_bundle::manifest::Attention;

use super::support::*;

/// The slot of a recorded pass; the cache begins with its first context row, wherever that stands.
pub fn slot_of(cases: &Cases, case: &str, mask: i64) -> Slot {
    let taps = cases.floats(&format!("{case}.in.taps"));
    let (rows, first) = (
        taps.shape[0] as i64,
        cases.ints(&format!("{case}.in.context_start")).values[0],
    );
    let block = cases.find_ints(&format!("{case}.in.block_ids"));
    let drafted = cases.ints(&format!("{case}.out.draft_ids")).values.len();
    let anchor = cases.ints(&format!("{case}.in.anchor")).values[0];
    let block = block.map_or_else(
        || [vec![anchor], vec![mask; drafted]].concat(),
        |block| block.values.clone(),
    );
    assert_eq!(block[0], anchor);
    Slot {
        taps: taps.values.clone(),
        positions: (first..first + rows).collect(),
        anchor_position: first + rows,
        block,
        ..Slot::default()
    }
}

/// Every way in which a slot of a pass differs from a recorded case.
fn differences(
    cases: &Cases,
    prefix: &str,
    graph: &Graph,
    outputs: &Outputs,
    index: usize,
    slot: &Slot,
) -> Vec<String> {
    let mut found = Vec::new();
    let is_sampled = prefix.starts_with("sampled");
    for name in cases.below(&format!("{prefix}.out.")) {
        let expected = format!("{prefix}.out.{name}");
        let mut compare = |actual: Vec<f32>| {
            let difference = disagreement(&actual, &cases.floats(&expected).values);
            found.extend(difference.map(|difference| format!("{prefix}: {name}: {difference}")));
        };
        if let Some((layer, side)) = name
            .strip_prefix('l')
            .and_then(|rest| rest.split_once(".ctx_"))
        {
            let side = usize::from(side == "v");
            let cache = &graph.caches[layer.parse::<usize>().unwrap()][side];
            let width = graph.facts.kv_heads * graph.facts.head_dim;
            let rows = slot.positions.len() * width;
            compare(cache[index * MAX * width..][..rows].to_vec());
            continue;
        }
        match name.as_str() {
            "edge_scores" => {
                // The rows along the path that was taken.
                let scores = of_slot(&outputs.floats["stage.path_scores"], index);
                let lattice = cases.floats(&expected);
                let candidates = lattice.shape[1];
                let path = &cases.ints(&format!("{prefix}.out.draft_slots")).values;
                let mut before = 0;
                for (row, &taken) in path.iter().enumerate() {
                    let recorded =
                        &lattice.values[(row * candidates + before) * candidates..][..candidates];
                    let actual = &scores.values[row * candidates..][..candidates];
                    let difference = disagreement(actual, recorded);
                    found.extend(
                        difference.map(|difference| format!("{prefix}: edge_scores: {difference}")),
                    );
                    before = taken as usize;
                }
            }
            // What another walk, its acceptance and its probabilities are is not the graph's business.
            "draft_ids" | "draft_slots" | "q" | "accepted" | "next_token_distribution"
                if is_sampled => {}
            "draft_ids" | "draft_slots" | "topk_ids" => {
                let output = match name.as_str() {
                    "draft_ids" => "draft_ids".to_owned(),
                    other => format!("stage.{other}"),
                };
                if name == "draft_slots" && graph.facts.form == Attention::Native {
                    continue;
                }
                let expected = cases.ints(&expected);
                let array = of_slot(&outputs.ints[&output], index);
                let actual = array.rows(expected.shape[0]);
                if actual != expected.values {
                    found.push(format!(
                        "{prefix}: {name} is {actual:?}, expected {:?}",
                        expected.values
                    ));
                }
                let behind = &array.values[actual.len()..];
                if name == "draft_ids" && behind.iter().any(|&id| id != -1) {
                    found.push(format!("{prefix}: {behind:?} is proposed behind the block"));
                }
            }
            "topk_values" if graph.facts.form == Attention::Native => {}
            _ => {
                let array = of_slot(&outputs.floats[&format!("stage.{name}")], index);
                compare(array.rows(cases.floats(&expected).shape[0]));
            }
        }
    }
    assert!(!cases.below(&format!("{prefix}.out.")).is_empty());
    found
}

/// Every difference from the recorded passes, each pass alone.
pub fn all_differences(graph: &mut Graph, cases: &Cases) -> Vec<String> {
    all_differences_of(graph, cases, |_| {})
}

/// As [`all_differences`], after a change of what is fed.
pub fn all_differences_of(
    graph: &mut Graph,
    cases: &Cases,
    change: impl Fn(&mut Slot),
) -> Vec<String> {
    let mask = graph.facts.mask_token_id.into();
    let mut found = Vec::new();
    for case in cases.passes() {
        let mut slot = slot_of(cases, &case, mask);
        change(&mut slot);
        let outputs = graph.run(std::slice::from_ref(&slot));
        found.extend(differences(cases, &case, graph, &outputs, 0, &slot));
    }
    found
}

#[test]
fn every_stage_of_every_pass_is_what_was_recorded() {
    for name in DRAFTS {
        let (checkpoint, cases) = (draft(name), Cases::of(name));
        for form in FORMS {
            let mut graph = Graph::load(&checkpoint, &cases, &options(form, true), 1);
            let found = all_differences(&mut graph, &cases);
            assert!(found.is_empty(), "{name}, {form:?}: {}", found.join("\n"));
            // Room in every direction changes nothing.
            graph.padding = [3, 2];
            let found = all_differences(&mut graph, &cases);
            assert!(
                found.is_empty(),
                "{name}, {form:?}, padded: {}",
                found.join("\n")
            );
        }
    }
}

#[test]
fn passes_of_different_lengths_run_together_as_they_do_alone() {
    for name in DRAFTS {
        let (checkpoint, cases) = (draft(name), Cases::of(name));
        let names = cases.passes();
        for form in FORMS {
            let mut graph = Graph::load(&checkpoint, &cases, &options(form, true), names.len() + 1);
            let mask = graph.facts.mask_token_id.into();
            let mut slots: Vec<Slot> = names
                .iter()
                .map(|case| slot_of(&cases, case, mask))
                .collect();
            // One slot takes no part.
            slots.insert(1, Slot::default());
            let outputs = graph.run(&slots);
            for (index, case) in names.iter().enumerate() {
                let index = if index == 0 { 0 } else { index + 1 };
                let found = differences(&cases, case, &graph, &outputs, index, &slots[index]);
                assert!(found.is_empty(), "{name}, {form:?}: {}", found.join("\n"));
            }
            let idle = of_slot(&outputs.ints["draft_ids"], 1);
            assert!(idle.values.iter().all(|&id| id == -1), "{idle:?}");
        }
    }
}

#[test]
fn the_decode_loop_proposes_what_was_recorded() {
    for name in DRAFTS {
        let (checkpoint, cases) = (draft(name), Cases::of(name));
        for form in FORMS {
            let mut graph = Graph::load(&checkpoint, &cases, &options(form, true), 1);
            let mask: i64 = graph.facts.mask_token_id.into();
            let prefill = cases.floats("multi.prefill.taps");
            let mut slot = Slot {
                taps: prefill.values.clone(),
                positions: (0..prefill.shape[0] as i64).collect(),
                anchor_position: prefill.shape[0] as i64,
                ..Slot::default()
            };
            let mut anchor = cases.ints("multi.prefill.anchor").values[0];
            let mut accepted_counts = Vec::new();
            for step in 0.. {
                let prefix = format!("multi.step{step}");
                let recorded = |part: &str| cases.ints(&format!("{prefix}.{part}"));
                assert_eq!(recorded("anchor").values, [anchor]);
                assert_eq!(recorded("block_start").values, [slot.anchor_position]);
                let drafted = recorded("out.draft_ids").values.len();
                slot.block = [vec![anchor], vec![mask; drafted]].concat();
                let outputs = graph.run(std::slice::from_ref(&slot));
                let found = differences(&cases, &prefix, &graph, &outputs, 0, &slot);
                assert!(found.is_empty(), "{name}, {form:?}: {}", found.join("\n"));

                let Some(choices) = cases.find_ints(&format!("{prefix}.verify.target_argmax"))
                else {
                    break;
                };
                let ids = &outputs.ints["draft_ids"].values;
                let agree = ids.iter().zip(&choices.values);
                let accepted = agree.take_while(|(id, choice)| id == choice).count();
                assert_eq!(recorded("verify.accepted").values, [accepted as i64]);
                anchor = choices.values[accepted];
                assert_eq!(recorded("verify.bonus").values, [anchor]);
                let taps = cases.floats(&format!("{prefix}.verify.taps"));
                slot.start = slot.anchor_position as usize;
                slot.taps = taps.rows(accepted + 1);
                slot.positions = (0..=accepted as i64)
                    .map(|row| slot.anchor_position + row)
                    .collect();
                slot.anchor_position += accepted as i64 + 1;
                accepted_counts.push(accepted);
            }
            let block = checkpoint.config.block_size;
            assert!(accepted_counts.contains(&0) && accepted_counts.contains(&(block - 1)));
        }
    }
}
