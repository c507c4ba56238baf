//! From logits to proposed ids: the candidates of each slot and the path through them, in the two forms that a graph can have.
//!
//! DFlash 1 takes the best token of every slot. DFlash 2 scores each candidate of a slot with its logit and a low-rank product with the token before it,
//! and walks from the anchor through the slots.

use anyhow::Result;
use outrider_bundle::manifest::Attention;
use outrider_bundle::onnx::{DataType, GraphProto};

use super::{BATCH, Drafter, SLOT_ROWS, SLOTS};
use crate::checkpoint::Dflash2;
use crate::export::graph::{Call, Dim, GraphBuilder, OUTRIDER, int, ints, subgraph, to};
use crate::export::linear::{Linear, Reads};

const PREDECESSORS: &str = "candidate_selector.predecessor_codebook";
const SUCCESSORS: &str = "candidate_selector.successor_codebook";
const COLUMN_TOKENS: &str = "column_token_ids";
/// Name of the result.
const IDS: &str = "draft_ids";

impl Drafter<'_> {
    /// Adds the choice of a path, `draft_ids`.
    pub fn select(&mut self, logits: &str, slots: &str) -> Result<()> {
        if let Some(tokens) = &self.options.vocabulary {
            let tokens: Vec<i64> = tokens.iter().map(|&token| token.into()).collect();
            let stored = self.exporter.graph.store(&tokens)?;
            let dims = [tokens.len()];
            self.exporter
                .graph
                .constant(COLUMN_TOKENS, DataType::Int64, &dims, &stored);
        }
        let hidden = match self.config.dflash2 {
            Some(dflash2) => Some(self.selector_hidden(slots, dflash2)?),
            None => None,
        };
        match (self.options.form, &hidden) {
            (Attention::Native, hidden) => self.native_selector(logits, hidden.as_deref()),
            (Attention::Portable, Some(hidden)) => self.portable_walk(logits, hidden),
            (Attention::Portable, None) => self.portable_best(logits),
        }
        Ok(())
    }

    /// The slots in the rank of the selector; takes the codebooks too.
    fn selector_hidden(&mut self, slots: &str, dflash2: Dflash2) -> Result<String> {
        let rank = dflash2.selector_rank;
        for codebook in [PREDECESSORS, SUCCESSORS] {
            let dims = [self.config.vocab_size, rank];
            let values = self.exporter.tensors.take(codebook, &dims)?;
            self.exporter.float_constant(codebook, &values, &dims)?;
        }
        let projection = Linear {
            name: "selector".to_owned(),
            weights: vec![(
                "candidate_selector.hidden_projection.weight".to_owned(),
                rank,
            )],
            biases: Vec::new(),
            columns: self.config.hidden_size,
            rows_like: SLOT_ROWS,
            reads: Reads::Plain,
            writes_residual: false,
            keeps_float: true,
        };
        let hidden = self.exporter.linear(slots, &projection)?;
        let element = self.exporter.element;
        self.stage(
            "selector_hidden",
            &hidden,
            element,
            &[BATCH, SLOTS, Dim::Fixed(rank)],
        );
        Ok(hidden)
    }

    fn native_selector(&mut self, logits: &str, hidden: Option<&str>) {
        let mut inputs = vec![
            logits,
            "block_ids",
            "block_position_ids",
            "block_rows",
            "temperature",
            "seed",
            "candidate_topk",
        ];
        match hidden {
            Some(hidden) => inputs.extend([hidden, PREDECESSORS, SUCCESSORS]),
            None if self.options.vocabulary.is_some() => inputs.extend(["", "", ""]),
            None => {}
        }
        if self.options.vocabulary.is_some() {
            inputs.push(COLUMN_TOKENS);
        }
        let mut outputs = vec![IDS];
        if self.options.stages {
            outputs.extend(["candidate_ids", "path_scores"]);
        }
        self.exporter.graph.call(Call {
            domain: OUTRIDER,
            op_type: "PathSelector",
            inputs: &inputs,
            outputs: &outputs,
            attributes: vec![int("top_k", self.facts.top_k as i64)],
        });
        if self.options.stages {
            self.candidate_stages("candidate_ids", "path_scores");
        }
    }

    fn candidate_stages(&mut self, ids: &str, scores: &str) {
        let dims = [BATCH, SLOTS, Dim::Fixed(self.facts.top_k)];
        self.stage("topk_ids", ids, DataType::Int64, &dims);
        self.stage("path_scores", scores, DataType::Float, &dims);
    }

    /// The best token of every slot; the first of several.
    fn portable_best(&mut self, logits: &str) {
        let best = self.exporter.graph.node(
            "best",
            "ArgMax",
            &[logits],
            vec![int("axis", -1), int("keepdims", 0)],
        );
        let tokens = self.column_tokens("best.tokens", &best);
        self.drop_unusable(logits, &tokens);
    }

    /// The greedy path from the anchor through the candidates of all slots, slot by slot.
    fn portable_walk(&mut self, logits: &str, hidden: &str) {
        let top_k = self.facts.top_k;
        let element = self.exporter.element;
        let hidden = (self.exporter).cast("selector.cast", hidden, [element, DataType::Float]);
        let graph = &mut self.exporter.graph;
        let count = graph.ints(&[top_k as i64]);
        let (values, columns) = ("candidates.values", "candidates.columns");
        graph.call(Call {
            domain: "",
            op_type: "TopK",
            inputs: &[logits, &count],
            outputs: &[values, columns],
            attributes: vec![int("axis", -1)],
        });
        let candidates = self.column_tokens("candidates.tokens", columns);
        self.stage(
            "topk_values",
            values,
            DataType::Float,
            &[BATCH, SLOTS, Dim::Fixed(top_k)],
        );
        let least = self
            .exporter
            .fp32_value("candidates.least", f32::NEG_INFINITY);
        let graph = &mut self.exporter.graph;
        // The request may ask for fewer candidates than the graph has.
        let (zero, one) = (graph.int(0), graph.int(1));
        let all = graph.int(top_k as i64);
        let index = graph.node("candidates.index", "Range", &[&zero, &all, &one], vec![]);
        let taken = graph.node(
            "candidates.taken",
            "Less",
            &[&index, "candidate_topk"],
            vec![],
        );
        let scores = graph.node(
            "candidates.scores",
            "Where",
            &[&taken, values, &least],
            vec![],
        );
        let (first, second) = (graph.ints(&[0]), graph.ints(&[1]));
        let anchor = graph.node(
            "anchor_column",
            "Slice",
            &["block_ids", &first, &second, &second],
            vec![],
        );
        let anchor = graph.node("anchor", "Squeeze", &[&anchor, &second], vec![]);

        let body = self.step(top_k);
        self.exporter.graph.call(Call {
            domain: "",
            op_type: "Scan",
            inputs: &[&anchor, &candidates, &scores, &hidden],
            outputs: &["walk.last", "walk.tokens", "walk.slots", "walk.scores"],
            attributes: vec![
                subgraph("body", body),
                int("num_scan_inputs", 3),
                ints("scan_input_axes", &[1, 1, 1]),
                ints("scan_output_axes", &[1, 1, 1]),
            ],
        });
        self.candidate_stages(&candidates, "walk.scores");
        self.stage(
            "draft_slots",
            "walk.slots",
            DataType::Int64,
            &[BATCH, SLOTS],
        );
        self.drop_unusable(logits, "walk.tokens");
    }

    /// The body of the walk: one slot, given the token before it.
    fn step(&mut self, top_k: usize) -> GraphProto {
        let rank = self
            .config
            .dflash2
            .map_or(0, |dflash2| dflash2.selector_rank);
        let (ids, float) = (DataType::Int64, DataType::Float);
        let element = self.exporter.element;
        let (candidates, rank) = ([BATCH, Dim::Fixed(top_k)], [BATCH, Dim::Fixed(rank)]);
        let last = self.exporter.graph.ints(&[-1]);
        let cast = |graph: &mut GraphBuilder, name: &str| {
            if element == float {
                return name.to_owned();
            }
            let cast = format!("{name}.cast");
            graph.node(&cast, "Cast", &[name], vec![to(float)])
        };
        self.exporter.graph.body(
            "step",
            &[
                ("step.before", ids, &[BATCH]),
                ("step.candidates", ids, &candidates),
                ("step.unary", float, &candidates),
                ("step.hidden", float, &rank),
            ],
            &[
                ("step.after", ids, &[BATCH]),
                ("step.token", ids, &[BATCH]),
                ("step.slot", ids, &[BATCH]),
                ("step.scores", float, &candidates),
            ],
            |graph| {
                graph.node(
                    "step.predecessor",
                    "Gather",
                    &[PREDECESSORS, "step.before"],
                    vec![],
                );
                let predecessor = cast(graph, "step.predecessor");
                let query = ["step.hidden", &predecessor];
                graph.node("step.query", "Mul", &query, vec![]);
                graph.node("step.query_3d", "Unsqueeze", &["step.query", &last], vec![]);
                graph.node(
                    "step.successors",
                    "Gather",
                    &[SUCCESSORS, "step.candidates"],
                    vec![],
                );
                let successors = cast(graph, "step.successors");
                let factors = [successors.as_str(), "step.query_3d"];
                graph.node("step.edges_3d", "MatMul", &factors, vec![]);
                graph.node("step.edges", "Squeeze", &["step.edges_3d", &last], vec![]);
                let terms = ["step.unary", "step.edges"];
                graph.node("step.scores", "Add", &terms, vec![]);
                graph.node(
                    "step.best",
                    "ArgMax",
                    &["step.scores"],
                    vec![int("axis", 1), int("keepdims", 1)],
                );
                graph.node("step.slot", "Squeeze", &["step.best", &last], vec![]);
                graph.node(
                    "step.chosen",
                    "GatherElements",
                    &["step.candidates", "step.best"],
                    vec![int("axis", 1)],
                );
                graph.node("step.token", "Squeeze", &["step.chosen", &last], vec![]);
                graph.node("step.after", "Identity", &["step.token"], vec![]);
            },
        )
    }

    /// Token ids of columns of the logits.
    fn column_tokens(&mut self, name: &str, columns: &str) -> String {
        match self.options.vocabulary {
            Some(_) => self
                .exporter
                .graph
                .node(name, "Gather", &[COLUMN_TOKENS, columns], vec![]),
            None => columns.to_owned(),
        }
    }

    /// Names the ids `draft_ids`, with -1 from the first slot whose logits aren't all finite, and in slots behind the valid rows of the block.
    fn drop_unusable(&mut self, logits: &str, tokens: &str) {
        let size = self.exporter.size_of("slots.count", SLOT_ROWS, 1);
        let graph = &mut self.exporter.graph;
        let (last, second) = (graph.ints(&[-1]), graph.ints(&[1]));
        let (zero, one, none) = (graph.int(0), graph.int(1), graph.int(-1));
        // The difference of a number and itself is zero if the number is finite, and no number otherwise.
        let differences = graph.node("finite.differences", "Sub", &[logits, logits], vec![]);
        let sums = graph.node(
            "finite.sums",
            "ReduceSum",
            &[&differences, &last],
            vec![int("keepdims", 0)],
        );
        let broken = graph.node("finite.broken", "IsNaN", &[&sums], vec![]);
        let broken = graph.node(
            "finite.broken_ints",
            "Cast",
            &[&broken],
            vec![to(DataType::Int64)],
        );
        let broken = graph.node("finite.broken_so_far", "CumSum", &[&broken, &one], vec![]);
        let broken = graph.node("finite.dropped", "Greater", &[&broken, &zero], vec![]);
        let index = graph.node("slots.index", "Range", &[&zero, &size, &one], vec![]);
        let limit = graph.node("slots.limit", "Sub", &["block_rows", &one], vec![]);
        let limit = graph.node("slots.limit_2d", "Unsqueeze", &[&limit, &second], vec![]);
        let behind = graph.node("slots.behind", "GreaterOrEqual", &[&index, &limit], vec![]);
        let dropped = graph.node("slots.dropped", "Or", &[&broken, &behind], vec![]);
        graph.node(IDS, "Where", &[&dropped, &none, tokens], vec![]);
    }
}
