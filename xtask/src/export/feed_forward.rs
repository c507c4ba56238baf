//! The gated SiLU feed-forward part of a layer, which target and draft have alike.

use anyhow::Result;

use super::exporter::Exporter;
use super::linear::{Linear, Reads};

/// `down(silu(gate x) * up x)`.
#[derive(Clone, Debug)]
pub struct FeedForward {
    /// Prefix of the names in the graph.
    pub name: String,
    /// Prefix of the names of the tensors.
    pub tensors: String,
    /// Inner size.
    pub inner: usize,
    /// Size of an input row and of a result row.
    pub hidden: usize,
    /// Whether the projections have biases.
    pub biased: bool,
    /// What it reads.
    pub reads: Reads,
    /// As in [`Linear`].
    pub rows_like: &'static str,
}

impl Exporter<'_> {
    /// Adds the feed-forward part and returns the name of its result, which is in the basis of the residual stream.
    pub fn feed_forward(&mut self, input: &str, part: &FeedForward) -> Result<String> {
        let FeedForward {
            name,
            tensors,
            inner,
            hidden,
            ..
        } = part;
        let (inner, hidden) = (*inner, *hidden);
        let named = |parts: &[(&str, usize)], kind: &str| -> Vec<(String, usize)> {
            let named = parts
                .iter()
                .map(|(part, rows)| (format!("{tensors}.{part}.{kind}"), *rows));
            named.collect()
        };
        let biases = |parts: &[(&str, usize)]| match part.biased {
            true => named(parts, "bias"),
            false => Vec::new(),
        };

        let parts = [("gate_proj", inner), ("up_proj", inner)];
        let gated = Linear {
            name: format!("{name}.gate_up"),
            weights: named(&parts, "weight"),
            biases: biases(&parts),
            columns: hidden,
            rows_like: part.rows_like,
            reads: part.reads.clone(),
            writes_residual: false,
            keeps_float: false,
        };
        let joined = self.linear(input, &gated)?;
        let (gate, up) = (format!("{name}.gate"), format!("{name}.up"));
        self.split(&joined, &[(&gate, inner), (&up, inner)]);
        let sigmoid = format!("{name}.sigmoid");
        let sigmoid = self.graph.node(&sigmoid, "Sigmoid", &[&gate], vec![]);
        let silu = format!("{name}.silu");
        let silu = self.graph.node(&silu, "Mul", &[&gate, &sigmoid], vec![]);
        let product = format!("{name}.product");
        let product = self.graph.node(&product, "Mul", &[&silu, &up], vec![]);
        let parts = [("down_proj", hidden)];
        let down = Linear {
            name: format!("{name}.down"),
            weights: named(&parts, "weight"),
            biases: biases(&parts),
            columns: inner,
            rows_like: part.rows_like,
            reads: Reads::Outliers,
            writes_residual: true,
            keeps_float: false,
        };
        self.linear(&product, &down)
    }
}
