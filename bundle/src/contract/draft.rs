//! What a draft graph must look like.
//!
//! The draft graph contract (B sequences, N tap rows, W block rows, at least two, MAX cache rows, T taps of H, KV heads of size D of the draft):
//!
//! | input | type | shape |
//! | --- | --- | --- |
//! | `taps` | float32 | `[B,N,T*H]`, the target's taps of the tokens accepted since the last call; rows from `context_rows` on are padding |
//! | `context_position_ids` | int64 | `[B,N]` |
//! | `context_start` | int64 | `[B]`, valid rows of the draft's cache before the call; the new context rows are written from here |
//! | `context_rows` | int64 | `[B]`, valid rows of `taps`, 0 to N |
//! | `block_ids` | int64 | `[B,W]`, the anchor and masks behind it |
//! | `block_position_ids` | int64 | `[B,W]`, counting from `context_start + context_rows` |
//! | `block_rows` | int64 | `[B]`, valid rows of the block, 0 to W; with fewer than two nothing is drafted, but the context is appended |
//! | `temperature` | float32 | `[B]`, 0 for the greedy path |
//! | `seed` | int64 | `[B]`, the bits of the request's noise seed |
//! | `candidate_topk` | int64 | `[1]`, candidates per slot, 1 to the draft's `top_k` |
//! | `key_cache.N`, `value_cache.N` for each draft layer N | the draft's KV type | `[B,MAX,KV*D]` |
//!
//! | output | type | shape |
//! | --- | --- | --- |
//! | `draft_ids` | int64 | `[B,W-1]`, the tokens proposed for the positions behind the anchor; -1 from the first slot whose logits aren't finite, and in slots from `block_rows - 1` on |
//! | `updated_key_cache.N`, `updated_value_cache.N` | the draft's KV type | `[B,MAX,KV*D]` |
//!
//! Rows that aren't valid never influence valid ones. Keys and values of the block are written behind the context rows, to be written over by the next call.

use super::{Expected, FactError, Value, check_ops, interface_errors};
use crate::facts::GraphFacts;
use crate::manifest::{Attention, DraftFacts, TargetFacts};

/// Architecture of a DFlash 2 draft, whose layers have convolutions.
const DFLASH_2: &str = "DFlash2DraftModel";

/// Inputs and outputs that the contract demands of a draft with these facts.
fn draft_contract(draft: &DraftFacts, target: &TargetFacts) -> (Vec<Value>, Vec<Value>) {
    use Expected::{Fixed, Free};
    let cache = |name: String| {
        let width = draft.kv_heads * draft.head_dim;
        let dims = vec![Free("B"), Free("MAX"), Fixed(width)];
        Value::new(name, &draft.kv_dtype, dims)
    };
    let taps = draft.target_layer_ids.len() * target.hidden_size;
    let ids = |name: &str, dims: &[&'static str]| {
        let dims = dims.iter().map(|&dim| Free(dim)).collect();
        Value::new(name, "int64", dims)
    };
    let mut inputs = vec![
        Value::new("taps", "float32", vec![Free("B"), Free("N"), Fixed(taps)]),
        ids("context_position_ids", &["B", "N"]),
        ids("context_start", &["B"]),
        ids("context_rows", &["B"]),
        ids("block_ids", &["B", "W"]),
        ids("block_position_ids", &["B", "W"]),
        ids("block_rows", &["B"]),
        Value::new("temperature", "float32", vec![Free("B")]),
        ids("seed", &["B"]),
        Value::new("candidate_topk", "int64", vec![Fixed(1)]),
    ];
    let mut outputs = vec![ids("draft_ids", &["B", "W-1"])];
    for layer in 0..draft.layers {
        for side in ["key", "value"] {
            inputs.push(cache(format!("{side}_cache.{layer}")));
            outputs.push(cache(format!("updated_{side}_cache.{layer}")));
        }
    }
    (inputs, outputs)
}

/// Checks a draft graph against the contract and against the facts of a manifest; all errors at once.
pub fn check_draft(
    draft: &DraftFacts,
    target: &TargetFacts,
    graph: &GraphFacts,
) -> Result<(), Vec<FactError>> {
    let mut errors = interface_errors(draft_contract(draft, target), graph);
    // Attention and feed-forward of a DFlash 2 layer have a convolution on either side.
    let convolutions = match draft.architecture.as_str() {
        DFLASH_2 => 4 * draft.layers,
        _ => 0,
    };
    let ops: &[(&str, usize)] = match draft.form {
        Attention::Native => &[
            ("BlockAttention", draft.layers),
            ("GroupedDynamicConv", convolutions),
            ("PathSelector", 1),
        ],
        Attention::Portable => &[("Attention", draft.layers)],
    };
    check_ops(draft.form, graph, ops, &mut errors);
    for (key, expected) in draft.metadata() {
        let actual = graph.metadata.get(key).cloned().unwrap_or_default();
        if actual != expected {
            errors.push(FactError::Metadata {
                key: key.to_owned(),
                actual,
                expected,
            });
        }
    }
    if errors.is_empty() {
        Ok(())
    } else {
        Err(errors)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use prost::Message;

    use super::*;
    use crate::manifest::Precision;
    use crate::onnx::{GraphProto, ModelProto};
    use crate::testing::{sample_draft, sample_draft_graph, sample_target};

    /// Errors of the sample draft after a change.
    fn draft_errors(
        change: impl FnOnce(&mut ModelProto, &mut GraphProto, &mut DraftFacts),
    ) -> Vec<String> {
        let (mut model, mut draft) = (sample_draft_graph(), sample_draft());
        let mut graph = model.graph.take().unwrap();
        change(&mut model, &mut graph, &mut draft);
        model.graph = Some(graph);
        let facts = GraphFacts::from_stream(Cursor::new(model.encode_to_vec())).unwrap();
        let errors = check_draft(&draft, &sample_target(), &facts);
        let errors = errors.err().unwrap_or_default();
        errors.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_draft_graph_as_the_contract_has_it_passes() {
        assert_eq!(draft_errors(|_, _, _| {}), [""; 0]);
    }

    #[test]
    fn a_missing_input_or_output_of_a_draft_is_named() {
        for index in 0..12 {
            let mut name = String::new();
            let errors = draft_errors(|_, graph, _| name = graph.input.remove(index).name);
            assert!(errors.len() == 1 && errors[0].contains(&format!("no input `{name}`")));
        }
        for index in 0..3 {
            let mut name = String::new();
            let errors = draft_errors(|_, graph, _| name = graph.output.remove(index).name);
            assert!(errors.len() == 1 && errors[0].contains(&format!("no output `{name}`")));
        }
    }

    #[test]
    fn every_fact_about_a_draft_that_its_graph_contradicts_is_named() {
        type Change = fn(&mut DraftFacts);
        let changes: [Change; 14] = [
            |draft| draft.architecture = "DFlashDraftModel".to_owned(),
            |draft| draft.precision = Precision::Int8,
            |draft| draft.form = Attention::Portable,
            |draft| draft.layers = 2,
            |draft| draft.kv_heads = 2,
            |draft| draft.head_dim = 8,
            |draft| draft.kv_dtype = "float16".to_owned(),
            |draft| draft.vocabulary_columns = 30,
            |draft| draft.block_size = 5,
            |draft| draft.top_k = 2,
            |draft| draft.mask_token_id = 3,
            |draft| draft.target_layer_ids = vec![1, 0],
            |draft| draft.target_layer_ids = vec![1],
            |draft| draft.context_tokens = 64,
        ];
        let mut text = String::new();
        for change in changes {
            let errors = draft_errors(|_, _, draft| change(draft));
            assert!(!errors.is_empty());
            text += &format!("{}\n", errors.join("\n"));
        }
        insta::assert_snapshot!(text);
    }

    #[test]
    fn a_draft_graph_with_stages_or_without_its_nodes_is_refused() {
        let errors = draft_errors(|model, graph, _| {
            let mut stage = graph.output[0].clone();
            stage.name = "stage.logits".to_owned();
            graph.output.push(stage);
            graph.node.retain(|node| node.op_type != "PathSelector");
            model.metadata_props.clear();
        });
        assert!(errors[0].contains("`stage.logits`"), "{errors:?}");
        assert!(errors[1].contains("0 `outrider.PathSelector` nodes, expected 1"));
        assert_eq!(errors.len(), 2 + sample_draft().metadata().len());
    }
}
