//! Attention of block rows over the cached context and their own block, in the two forms that a graph can have.

use anyhow::Result;
use outrider_bundle::manifest::Attention;

use super::{BATCH, BLOCK, BLOCK_ROWS, CONTEXT_ROWS, Drafter};
use crate::checkpoint::DraftAttention;
use crate::export::attention::{HeadRotation, cache_names};
use crate::export::graph::{Call, Dim, OUTRIDER, float, int, string};

/// Queries, keys and values of one layer, `[batch, rows, heads * head_dim]`, neither normed nor rotated.
pub struct Heads<'a> {
    /// Queries of the block rows.
    pub query: &'a str,
    /// Keys of the block rows.
    pub key: &'a str,
    /// Values of the block rows.
    pub value: &'a str,
    /// Keys of the new context rows.
    pub context_key: &'a str,
    /// Values of the new context rows.
    pub context_value: &'a str,
}

impl Drafter<'_> {
    /// Adds the attention of a layer and returns the name of its result `[batch, block, heads * head_dim]`.
    pub fn attention(&mut self, layer: usize, heads: &Heads) -> Result<String> {
        match self.options.form {
            Attention::Native => self.native_attention(layer, heads),
            Attention::Portable => self.portable_attention(layer, heads),
        }
    }

    fn native_attention(&mut self, layer: usize, heads: &Heads) -> Result<String> {
        let name = format!("layers.{layer}.attention");
        let head_dim = self.config.head_dim;
        let mut norms = [String::new(), String::new()];
        for (norm, which) in norms.iter_mut().zip(["q_norm", "k_norm"]) {
            let tensor = format!("layers.{layer}.self_attn.{which}.weight");
            let values = self.exporter.tensors.take(&tensor, &[head_dim])?;
            *norm = self.exporter.fp32_constant(&tensor, &values, &[head_dim])?;
        }
        let (key_cache, value_cache) = cache_names("", layer);
        let (new_key_cache, new_value_cache) = cache_names("updated_", layer);
        let DraftAttention { causal, window } = self.config.attention[layer];
        self.exporter.graph.call(Call {
            domain: OUTRIDER,
            op_type: "BlockAttention",
            inputs: &[
                heads.query,
                heads.key,
                heads.value,
                heads.context_key,
                heads.context_value,
                &key_cache,
                &value_cache,
                "block_position_ids",
                "context_position_ids",
                "context_start",
                "context_rows",
                "block_rows",
                "rotary.cos",
                "rotary.sin",
                &norms[0],
                &norms[1],
            ],
            outputs: &[&name, &new_key_cache, &new_value_cache],
            attributes: vec![
                int("is_causal", causal.into()),
                int("kv_num_heads", self.config.kv_heads as i64),
                float("norm_epsilon", self.config.norm_epsilon),
                int("num_heads", self.config.heads as i64),
                int("rotary_interleaved", 0),
                float("scale", 0.0),
                float("softcap", 0.0),
                int("window", window.unwrap_or(0) as i64),
            ],
        });
        let width = Dim::Fixed(self.config.heads * head_dim);
        let element = self.exporter.element;
        self.exporter
            .graph
            .value(&name, element, &[BATCH, BLOCK, width]);
        Ok(name)
    }

    fn portable_attention(&mut self, layer: usize, heads: &Heads) -> Result<String> {
        let name = format!("layers.{layer}.attention");
        let head_dim = self.config.head_dim;
        for norm in ["q_norm", "k_norm"] {
            let tensor = format!("layers.{layer}.self_attn.{norm}.weight");
            let values = self.exporter.tensors.take(&tensor, &[head_dim])?;
            self.exporter
                .float_constant(&tensor, &values, &[head_dim])?;
        }
        let mut rotate = |part: &str, input: &str, heads: usize, norm: &str, positions: &str| {
            let rotation = HeadRotation {
                name: &format!("{name}.{part}"),
                heads,
                head_dim,
                norm: Some(&format!("layers.{layer}.self_attn.{norm}.weight")),
                positions,
            };
            self.exporter.rotate_heads(input, &rotation)
        };
        let kv_heads = self.config.kv_heads;
        let block = "block_position_ids";
        let query = rotate("query", heads.query, self.config.heads, "q_norm", block);
        let key = rotate("key", heads.key, kv_heads, "k_norm", block);
        let context_key = rotate(
            "context_key",
            heads.context_key,
            kv_heads,
            "k_norm",
            CONTEXT_ROWS,
        );

        let block_start = self.block_start();
        let (key_cache, value_cache) = cache_names("", layer);
        let (new_key_cache, new_value_cache) = cache_names("updated_", layer);
        for (cache, context, block, updated) in [
            (
                &key_cache,
                context_key.as_str(),
                key.as_str(),
                &new_key_cache,
            ),
            (
                &value_cache,
                heads.context_value,
                heads.value,
                &new_value_cache,
            ),
        ] {
            let mut scatter = |name: &str, cache: &str, rows: &str, start: &str| {
                let attributes = vec![int("axis", -2), string("mode", "linear")];
                self.exporter
                    .graph
                    .node(name, "TensorScatter", &[cache, rows, start], attributes)
            };
            let appended = format!("{name}.appended.{cache}");
            let appended = scatter(&appended, cache, context, "context_start");
            scatter(updated, &appended, block, &block_start);
        }
        let mask = self.mask(self.config.attention[layer]);
        Ok(self.exporter.graph.node(
            &name,
            "Attention",
            &[&query, &new_key_cache, &new_value_cache, &mask],
            vec![
                int("is_causal", 0),
                int("kv_num_heads", kv_heads as i64),
                int("q_num_heads", self.config.heads as i64),
            ],
        ))
    }

    /// Name of the cache row of each anchor, `[batch]`.
    fn block_start(&mut self) -> String {
        let name = "block_start".to_owned();
        if self.masks.insert(name.clone()) {
            let parts = ["context_start", "context_rows"];
            self.exporter.graph.node(&name, "Add", &parts, vec![]);
        }
        name
    }

    /// Name of the boolean mask `[batch, 1, block, max]` of what block rows see of the cache; layers that see the same share it.
    fn mask(&mut self, attention: DraftAttention) -> String {
        let DraftAttention { causal, window } = attention;
        let name = match (causal, window) {
            (true, Some(window)) => format!("mask.causal_{window}"),
            (true, None) => "mask.causal".to_owned(),
            (false, Some(window)) => format!("mask.window_{window}"),
            (false, None) => "mask.full".to_owned(),
        };
        if !self.masks.insert(name.clone()) {
            return name;
        }
        let (distance, mut seen) = self.distance_and_valid();
        let graph = &mut self.exporter.graph;
        let mut limit = |what: &str, op_type: &'static str, bound: i64| {
            let bound = graph.int(bound);
            let within = format!("{name}.{what}");
            let within = graph.node(&within, op_type, &[&distance, &bound], vec![]);
            let both = format!("{name}.seen_{what}");
            seen = graph.node(&both, "And", &[&seen, &within], vec![]);
        };
        if causal {
            limit("back", "GreaterOrEqual", 0);
        }
        if let Some(window) = window {
            limit("near", "Less", window as i64);
            if !causal {
                limit("near_ahead", "Greater", -(window as i64));
            }
        }
        // A row that isn't valid may see nothing else, and what it gives must be a number: zero times it is added to other rows.
        graph.node(&name, "Or", &[&seen, "mask.self"], vec![])
    }

    /// Names of the distances from each block row back to each cache row, `[batch, 1, block, max]`, and of the valid cache rows, `[batch, 1, 1, max]`.
    fn distance_and_valid(&mut self) -> (String, String) {
        let (distance, valid) = ("mask.distances".to_owned(), "mask.valid".to_owned());
        if !self.masks.insert(distance.clone()) {
            return (distance, valid);
        }
        let start = self.block_start();
        let rows = self.exporter.size_of("mask.rows", BLOCK_ROWS, 1);
        self.exporter.key_distances("mask", &start, &rows);
        let graph = &mut self.exporter.graph;
        let end = graph.node("mask.end", "Add", &[&start, "block_rows"], vec![]);
        let axes = graph.ints(&[1, 2, 3]);
        let end = graph.node("mask.end_4d", "Unsqueeze", &[&end, &axes], vec![]);
        graph.node(&valid, "Less", &["mask.keys", &end], vec![]);
        let zero = graph.int(0);
        graph.node("mask.self", "Equal", &[&distance, &zero], vec![]);
        (distance, valid)
    }
}
