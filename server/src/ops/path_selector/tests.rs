//! The operator inside real ONNX Runtime sessions; what it computes is tested with the computation.

use half::{bf16, f16};
use ort::session::Session;
use outrider_bundle::onnx::DataType;

use super::*;
use crate::ops::{
    DOMAIN,
    testing::{
        Backwards, Numbers,
        graph::{Attribute, Graph},
        session::{Feeds, data_type, session, try_session, value},
    },
};

const BATCH: usize = 2;
const SLOTS: usize = 5;
/// Enough for several threads.
const COLUMNS: usize = 9000;
const RANK: usize = 24;
const TOP_K: usize = 8;

/// A graph with the optional inputs of these names.
fn model<T: PrimitiveTensorElementType>(optional: &[&str], top_k: i64) -> Vec<u8> {
    let mut graph = Graph::default();
    let element = data_type::<T>();
    let required = [
        ("logits", DataType::Float, &["B", "S", "V"][..]),
        ("block_ids", DataType::Int64, &["B", "W"]),
        ("block_position_ids", DataType::Int64, &["B", "W"]),
        ("block_rows", DataType::Int64, &["B"]),
        ("temperature", DataType::Float, &["B"]),
        ("seed", DataType::Int64, &["B"]),
        ("candidate_topk", DataType::Int64, &["ONE"]),
    ];
    let mut inputs = Vec::new();
    for (name, data_type, dimensions) in required {
        graph.input(name, data_type, dimensions);
        inputs.push(name);
    }
    for (name, data_type, dimensions) in [
        ("selector_hidden", element, &["B", "S", "R"][..]),
        ("predecessor_codebook", element, &["T", "R"]),
        ("successor_codebook", element, &["T", "R"]),
        ("column_token_ids", DataType::Int64, &["V"]),
    ] {
        let is_there = optional.contains(&name);
        if is_there {
            graph.input(name, data_type, dimensions);
        }
        inputs.push(if is_there { name } else { "" });
    }
    while inputs.last() == Some(&"") {
        inputs.pop();
    }
    let outputs = ["draft_ids", "candidate_ids", "path_scores"];
    graph.node(
        DOMAIN,
        NAME,
        &inputs,
        &outputs,
        &[("top_k", Attribute::Int(top_k))],
    );
    graph.output("draft_ids", DataType::Int64, &["B", "S"]);
    graph.output("candidate_ids", DataType::Int64, &["B", "S", "K"]);
    graph.output("path_scores", DataType::Float, &["B", "S", "K"]);
    graph.model()
}

const CODEBOOKS: [&str; 3] = [
    "selector_hidden",
    "predecessor_codebook",
    "successor_codebook",
];

type Proposal = (Vec<i64>, Vec<i64>, Vec<f32>);

fn run(session: &mut Session, feeds: Feeds) -> ort::Result<Proposal> {
    let outputs = session.run(feeds)?;
    let integers = |name: &str| {
        outputs[name]
            .try_extract_tensor::<i64>()
            .unwrap()
            .1
            .to_vec()
    };
    let scores = outputs["path_scores"].try_extract_tensor::<f32>().unwrap();
    assert_eq!(scores.0[..], [BATCH as i64, SLOTS as i64, TOP_K as i64]);
    Ok((
        integers("draft_ids"),
        integers("candidate_ids"),
        scores.1.to_vec(),
    ))
}

/// Runs a session and the function on the same tensors.
fn check<T: Element + PrimitiveTensorElementType + std::fmt::Debug>(optional: &[&'static str]) {
    let has_codebooks = optional.contains(&CODEBOOKS[0]);
    let has_columns = optional.contains(&"column_token_ids");
    let vocabulary = if has_columns { 2 * COLUMNS } else { COLUMNS };
    let mut numbers = Numbers(9);
    let logits = numbers.elements::<f32>(BATCH * SLOTS * COLUMNS, 4.0);
    let block = BATCH * (SLOTS + 1);
    let block_ids: Vec<i64> = (0..block)
        .map(|_| numbers.below(vocabulary) as i64)
        .collect();
    let positions: Vec<i64> = (0..block).map(|row| row as i64 + 40).collect();
    let hidden = numbers.elements::<T>(BATCH * SLOTS * RANK, 1.0);
    let [predecessor, successor] = [(); 2].map(|()| numbers.elements::<T>(vocabulary * RANK, 1.0));
    let column_token_ids: Vec<i64> = (0..COLUMNS as i64).map(|column| 2 * column + 1).collect();
    let (rows, temperature, seed) = ([6_i64, 4], [0.0_f32, 0.9], [7_i64, -1]);
    let candidate_topk = [6_i64];

    let mut feeds: Feeds = vec![
        ("logits", value(&[BATCH, SLOTS, COLUMNS], &logits)),
        ("block_ids", value(&[BATCH, SLOTS + 1], &block_ids)),
        ("block_position_ids", value(&[BATCH, SLOTS + 1], &positions)),
        ("block_rows", value(&[BATCH], &rows)),
        ("temperature", value(&[BATCH], &temperature)),
        ("seed", value(&[BATCH], &seed)),
        ("candidate_topk", value(&[1], &candidate_topk)),
    ];
    if has_codebooks {
        feeds.push((CODEBOOKS[0], value(&[BATCH, SLOTS, RANK], &hidden)));
        feeds.push((CODEBOOKS[1], value(&[vocabulary, RANK], &predecessor)));
        feeds.push((CODEBOOKS[2], value(&[vocabulary, RANK], &successor)));
    }
    if has_columns {
        feeds.push(("column_token_ids", value(&[COLUMNS], &column_token_ids)));
    }
    let mut session = session(&model::<T>(optional, TOP_K as i64), 2);
    let (drafts, candidates, scores) = run(&mut session, feeds).unwrap();

    let geometry = Geometry {
        top_k: TOP_K,
        batch: BATCH,
        slots: SLOTS,
        columns: COLUMNS,
        rank: if has_codebooks { RANK } else { 0 },
        vocabulary: has_codebooks.then_some(vocabulary),
    };
    let inputs = Inputs {
        logits: &logits,
        block_ids: &block_ids,
        block_position_ids: &positions,
        block_rows: &rows,
        temperature: &temperature,
        seed: &seed,
        candidate_topk: &candidate_topk,
        codebooks: has_codebooks.then_some(Codebooks {
            hidden: &hidden,
            predecessor: &predecessor,
            successor: &successor,
        }),
        column_token_ids: has_columns.then_some(&column_token_ids),
    };
    let places = BATCH * SLOTS;
    let mut want = (
        vec![0; places],
        vec![0; places * TOP_K],
        vec![0.0; places * TOP_K],
    );
    let outputs = Outputs {
        draft_ids: &mut want.0,
        candidate_ids: Some(&mut want.1),
        path_scores: Some(&mut want.2),
    };
    selector::select(&geometry, &inputs, outputs, &Backwards).unwrap();
    assert_eq!((drafts, candidates, scores), want, "{optional:?}");
    assert_eq!(want.0[places - 2..], [-1, -1], "padding");
}

#[test]
fn a_session_computes_what_the_function_computes_with_and_without_optional_inputs() {
    let all = [CODEBOOKS[0], CODEBOOKS[1], CODEBOOKS[2], "column_token_ids"];
    check::<f32>(&[]);
    check::<f32>(&CODEBOOKS);
    check::<f32>(&all);
    check::<f32>(&["column_token_ids"]);
    check::<f16>(&CODEBOOKS);
    check::<bf16>(&all);
}

#[test]
fn a_refused_run_names_the_input() {
    let mut session = session(&model::<f32>(&[], TOP_K as i64), 1);
    let places = [BATCH, SLOTS + 1];
    let feeds: Feeds = vec![
        (
            "logits",
            value(&[BATCH, SLOTS, 20], &[0.0_f32; BATCH * SLOTS * 20]),
        ),
        ("block_ids", value(&places, &[0_i64; BATCH * (SLOTS + 1)])),
        (
            "block_position_ids",
            value(&places, &[0_i64; BATCH * (SLOTS + 1)]),
        ),
        ("block_rows", value(&[BATCH], &[6_i64, 6])),
        ("temperature", value(&[BATCH], &[0.0_f32, 0.0])),
        ("seed", value(&[BATCH], &[0_i64, 0])),
        ("candidate_topk", value(&[1], &[9_i64])),
    ];
    let error = run(&mut session, feeds).unwrap_err();
    assert!(
        error
            .message()
            .contains("input candidate_topk[0] is 9; allowed is 1 to 8"),
        "{error}"
    );
}

#[test]
fn a_node_may_leave_out_the_outputs_beside_the_drafts() {
    let mut graph = Graph::default();
    let inputs = [
        ("logits", DataType::Float, &["B", "S", "V"][..]),
        ("block_ids", DataType::Int64, &["B", "W"]),
        ("block_position_ids", DataType::Int64, &["B", "W"]),
        ("block_rows", DataType::Int64, &["B"]),
        ("temperature", DataType::Float, &["B"]),
        ("seed", DataType::Int64, &["B"]),
        ("candidate_topk", DataType::Int64, &["ONE"]),
    ];
    for (name, data_type, dimensions) in inputs {
        graph.input(name, data_type, dimensions);
    }
    let names = inputs.map(|(name, ..)| name);
    graph.node(
        DOMAIN,
        NAME,
        &names,
        &["draft_ids"],
        &[("top_k", Attribute::Int(1))],
    );
    graph.output("draft_ids", DataType::Int64, &["B", "S"]);
    let mut session = session(&graph.model(), 1);
    let feeds: Feeds = vec![
        (
            "logits",
            value(&[1, 2, 3], &[0.0_f32, 2.0, 1.0, 5.0, 0.0, 5.0]),
        ),
        ("block_ids", value(&[1, 3], &[0_i64; 3])),
        ("block_position_ids", value(&[1, 3], &[0_i64; 3])),
        ("block_rows", value(&[1], &[3_i64])),
        ("temperature", value(&[1], &[0.0_f32])),
        ("seed", value(&[1], &[0_i64])),
        ("candidate_topk", value(&[1], &[1_i64])),
    ];
    let outputs = session.run(feeds).unwrap();
    assert_eq!(
        outputs["draft_ids"].try_extract_tensor::<i64>().unwrap().1,
        [1, 0]
    );
}

#[test]
fn a_missing_attribute_is_refused_when_the_model_is_loaded() {
    let error = try_session(&model::<f32>(&[], 0), 1).expect_err("the model loaded");
    assert!(
        error
            .message()
            .contains("attribute top_k is 0; allowed is at least 1"),
        "{error}"
    );
}
