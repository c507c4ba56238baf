//! What happens to the rows of a block: embedding, layers, norm and head; and to the taps before they become context.

use anyhow::Result;
use outrider_bundle::onnx::DataType;

use super::attention::Heads;
use super::convolution::Side;
use super::{BATCH, BLOCK_ROWS, CONTEXT, CONTEXT_ROWS, Drafter, SLOT_ROWS, SLOTS};
use crate::export::feed_forward::FeedForward;
use crate::export::graph::Dim;
use crate::export::linear::{Linear, Product, Reads};
use crate::export::vocabulary::Ends;

impl Drafter<'_> {
    /// The vector of each context row that every layer projects its keys and values from.
    pub fn fuse_taps(&mut self) -> Result<String> {
        let (hidden, element) = (self.config.hidden_size, self.exporter.element);
        let taps = self
            .exporter
            .cast("taps.cast", "taps", [DataType::Float, element]);
        let fuse = Linear {
            name: "fuse".to_owned(),
            weights: vec![("fc.weight".to_owned(), hidden)],
            biases: Vec::new(),
            columns: self.config.tap_size(),
            rows_like: CONTEXT_ROWS,
            // A residual stream has a few channels that are far larger than all others.
            reads: Reads::Outliers,
            writes_residual: false,
            keeps_float: false,
        };
        let fused = self.exporter.linear(&taps, &fuse)?;
        let fused = (self.exporter).weighted_norm("fused", &fused, "hidden_norm.weight", hidden)?;
        self.stage(
            "fused",
            &fused,
            element,
            &[BATCH, CONTEXT, Dim::Fixed(hidden)],
        );
        Ok(fused)
    }

    /// The embedding of each block row, in the basis of the checkpoint.
    pub fn block_embedding(&mut self, ends: &Ends) -> Result<String> {
        let hidden = self.config.hidden_size;
        let element = self.exporter.element;
        let mut rows = self.exporter.embedding(BLOCK_ROWS, &ends.embedding);
        if let Some(rotation) = ends.embedding.rotation() {
            rows =
                (self.exporter).rotate_back("embedding.rotated_back", &rows, rotation, hidden)?;
        }
        let types = [ends.embedding.element(), element];
        rows = self.exporter.cast("embedding.cast", &rows, types);
        let scale = self.config.input_embedding_scale;
        if scale != 1.0 {
            let factor = self
                .exporter
                .float_constant("embedding.factor", &[scale], &[])?;
            rows = self
                .exporter
                .graph
                .node("embedding.scaled", "Mul", &[&rows, &factor], vec![]);
        }
        self.block_stage("block_embed", &rows, hidden);
        Ok(rows)
    }

    /// One layer over the block, its context being the fused taps.
    pub fn layer(&mut self, layer: usize, fused: &str, input: &str) -> Result<String> {
        let hidden = self.config.hidden_size;
        let name = |part: &str| format!("layers.{layer}.{part}");

        let normed = self.exporter.weighted_norm(
            &name("attention.norm"),
            input,
            &name("input_layernorm.weight"),
            hidden,
        )?;
        let convolution = self.convolution(layer, "attention", &normed)?;
        let read = self.convolve(&convolution, Side::Before, &normed)?;
        let attended = self.attend(layer, fused, &read)?;
        self.block_stage(&format!("l{layer}.attn_out"), &attended, hidden);
        let attended = self.convolve(&convolution, Side::After, &attended)?;
        let residual = self.exporter.graph.node(
            &name("attention.residual"),
            "Add",
            &[input, &attended],
            vec![],
        );

        let normed = self.exporter.weighted_norm(
            &name("mlp.norm"),
            &residual,
            &name("post_attention_layernorm.weight"),
            hidden,
        )?;
        let convolution = self.convolution(layer, "mlp", &normed)?;
        let read = self.convolve(&convolution, Side::Before, &normed)?;
        let feed_forward = FeedForward {
            name: name("mlp"),
            tensors: name("mlp"),
            inner: self.config.intermediate_size,
            hidden,
            biased: false,
            reads: Reads::Plain,
            rows_like: BLOCK_ROWS,
        };
        let down = self.exporter.feed_forward(&read, &feed_forward)?;
        self.block_stage(&format!("l{layer}.mlp_out"), &down, hidden);
        let down = self.convolve(&convolution, Side::After, &down)?;
        let output =
            (self.exporter.graph).node(&name("residual"), "Add", &[&residual, &down], vec![]);
        self.block_stage(&format!("l{layer}.out"), &output, hidden);
        Ok(output)
    }

    /// The attention of a layer between the two sides of its convolution, output projection included.
    fn attend(&mut self, layer: usize, fused: &str, read: &str) -> Result<String> {
        let name = |part: &str| format!("layers.{layer}.attention.{part}");
        let query_width = self.config.heads * self.config.head_dim;
        let kv_width = self.kv_width();
        let query = self.projection(layer, "q", &[("q_proj", query_width)])?;
        let query = (self.exporter).multiply(&name("q"), read, BLOCK_ROWS, &query)?;
        // Context and block rows are multiplied with the same bytes.
        let key_value =
            self.projection(layer, "kv", &[("k_proj", kv_width), ("v_proj", kv_width)])?;
        let mut halves = |part: &str, input: &str, rows_like| -> Result<[String; 2]> {
            let joined = (self.exporter).multiply(&name(part), input, rows_like, &key_value)?;
            let halves = ["key", "value"].map(|half| name(&format!("{part}.{half}")));
            self.exporter
                .split(&joined, &[(&halves[0], kv_width), (&halves[1], kv_width)]);
            Ok(halves)
        };
        let [context_key, context_value] = halves("context_kv", fused, CONTEXT_ROWS)?;
        let [key, value] = halves("kv", read, BLOCK_ROWS)?;
        let heads = Heads {
            query: &query,
            key: &key,
            value: &value,
            context_key: &context_key,
            context_value: &context_value,
        };
        let attended = self.attention(layer, &heads)?;
        let hidden = self.config.hidden_size;
        let output = self.attention_linear(layer, "output", &[("o_proj", hidden)], query_width);
        self.exporter.linear(&attended, &output)
    }

    /// Stores projections of a layer that read the hidden size.
    fn projection(&mut self, layer: usize, name: &str, parts: &[(&str, usize)]) -> Result<Product> {
        let linear = self.attention_linear(layer, name, parts, self.config.hidden_size);
        self.exporter.product(&linear)
    }

    fn attention_linear(
        &self,
        layer: usize,
        name: &str,
        parts: &[(&str, usize)],
        columns: usize,
    ) -> Linear {
        let tensors = |kind: &str| -> Vec<(String, usize)> {
            let tensor = |part: &str| format!("layers.{layer}.self_attn.{part}.{kind}");
            parts
                .iter()
                .map(|(part, rows)| (tensor(part), *rows))
                .collect()
        };
        Linear {
            name: format!("layers.{layer}.attention.{name}"),
            weights: tensors("weight"),
            biases: match self.config.attention_bias {
                true => tensors("bias"),
                false => Vec::new(),
            },
            columns,
            rows_like: BLOCK_ROWS,
            reads: Reads::Plain,
            writes_residual: false,
            keeps_float: false,
        }
    }

    /// The normed rows that propose a token: all but the anchor's.
    pub fn slots(&mut self, hidden: &str) -> Result<String> {
        let width = self.config.hidden_size;
        let normed = (self.exporter).weighted_norm("norm", hidden, "norm.weight", width)?;
        self.block_stage("final_hidden", &normed, width);
        let graph = &mut self.exporter.graph;
        let (start, end) = (graph.ints(&[1]), graph.ints(&[i64::MAX]));
        let axis = graph.ints(&[1]);
        graph.node(
            SLOT_ROWS,
            "Slice",
            &[BLOCK_ROWS, &start, &end, &axis],
            vec![],
        );
        let bounds = [normed.as_str(), &start, &end, &axis];
        Ok(graph.node("slots", "Slice", &bounds, vec![]))
    }

    /// The scores of every token the draft proposes from, fp32.
    pub fn logits(&mut self, slots: &str, ends: &Ends) -> Result<String> {
        let types = [self.exporter.element, ends.head.element()];
        let read = self.exporter.cast("slots.cast", slots, types);
        let mut logits = "logits".to_owned();
        self.exporter.head(&read, &ends.head, SLOT_ROWS, &logits)?;
        let mut map = |logits: &str, name: &str, op_type: &'static str, factor: Option<f32>| {
            let name = format!("logits.{name}");
            let mut inputs = vec![logits.to_owned()];
            if let Some(factor) = factor {
                let constant = format!("{name}.factor");
                inputs.push(self.exporter.fp32_constant(&constant, &[factor], &[])?);
            }
            let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
            anyhow::Ok(self.exporter.graph.node(&name, op_type, &inputs, vec![]))
        };
        let multiplier = self.config.output_multiplier;
        if multiplier != 1.0 {
            logits = map(&logits, "multiplied", "Mul", Some(multiplier))?;
        }
        if let Some(cap) = self.config.logit_softcap {
            logits = map(&logits, "of_cap", "Div", Some(cap))?;
            logits = map(&logits, "bent", "Tanh", None)?;
            logits = map(&logits, "capped", "Mul", Some(cap))?;
        }
        let columns = Dim::Fixed(self.facts.vocabulary_columns);
        self.stage("logits", &logits, DataType::Float, &[BATCH, SLOTS, columns]);
        Ok(logits)
    }
}
