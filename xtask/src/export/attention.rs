//! The attention part of a layer: q/k norm, rotation, cache write and attention, in the two forms that a graph can have.

use anyhow::Result;
use outrider_bundle::manifest::Attention;

use super::decoder::{Decoder, ROWS};
use super::exporter::Exporter;
use super::graph::{Call, Dim, OUTRIDER, float, int, string};
use super::rope;
use crate::checkpoint::Rope;

/// Query, key and value of one layer, `[batch, sequence, heads * head_dim]`.
pub struct Heads<'a> {
    /// Query.
    pub query: &'a str,
    /// New keys.
    pub key: &'a str,
    /// New values.
    pub value: &'a str,
}

/// How heads are normed and rotated in standard operators.
pub struct HeadRotation<'a> {
    /// Prefix of the names of the nodes.
    pub name: &'a str,
    /// Number of heads.
    pub heads: usize,
    /// Size of one head.
    pub head_dim: usize,
    /// Constant with the weight of the RMS norm of each head, where there is one.
    pub norm: Option<&'a str>,
    /// Positions `[batch, sequence]`.
    pub positions: &'a str,
}

impl Exporter<'_> {
    /// Adds the rotary tables.
    pub fn rotary_tables(
        &mut self,
        rope: &Rope,
        head_dim: usize,
        positions: usize,
        attention: Attention,
    ) -> Result<()> {
        let tables = rope::tables(rope, head_dim, positions);
        for (name, values) in [("rotary.cos", tables.cos), ("rotary.sin", tables.sin)] {
            let dims = [positions, head_dim / 2];
            match attention {
                // The custom operators rotate in fp32 whatever the element type.
                Attention::Native => self.fp32_constant(name, &values, &dims)?,
                Attention::Portable => self.float_constant(name, &values, &dims)?,
            };
        }
        Ok(())
    }

    /// Name of the size of an axis of a value, an integer without dimensions.
    pub fn size_of(&mut self, name: &str, value: &str, axis: i64) -> String {
        let shape = self.graph.node(
            &format!("{name}_shape"),
            "Shape",
            &[value],
            vec![int("start", axis), int("end", axis + 1)],
        );
        let none = self.graph.ints(&[0]);
        self.graph.node(name, "Squeeze", &[&shape, &none], vec![])
    }

    /// Name of the distances `[batch, 1, rows, max]` from each query back to each cache row; `first` `[batch]` is the cache row of the first query.
    pub fn key_distances(&mut self, prefix: &str, first: &str, rows: &str) -> String {
        let (zero, one) = (self.graph.int(0), self.graph.int(1));
        let max = self.size_of(&format!("{prefix}.max"), "key_cache.0", 1);
        let range = |exporter: &mut Self, name: &str, size: &str| {
            let name = format!("{prefix}.{name}");
            exporter
                .graph
                .node(&name, "Range", &[&zero, size, &one], vec![])
        };
        let row = range(self, "row", rows);
        let keys = range(self, "keys", &max);
        let last_axes = self.graph.ints(&[1, 2, 3]);
        let first = self.graph.node(
            &format!("{prefix}.first_4d"),
            "Unsqueeze",
            &[first, &last_axes],
            vec![],
        );
        let last_axis = self.graph.ints(&[1]);
        let row = self.graph.node(
            &format!("{prefix}.row_2d"),
            "Unsqueeze",
            &[&row, &last_axis],
            vec![],
        );
        let queries = format!("{prefix}.queries");
        let queries = self.graph.node(&queries, "Add", &[&first, &row], vec![]);
        let distances = format!("{prefix}.distances");
        self.graph
            .node(&distances, "Sub", &[&queries, &keys], vec![])
    }

    /// Norms and rotates heads `[batch, sequence, heads * head_dim]` in standard operators.
    pub fn rotate_heads(&mut self, input: &str, rotation: &HeadRotation) -> String {
        let HeadRotation {
            name,
            heads,
            head_dim,
            norm,
            positions,
        } = *rotation;
        let mut value = input.to_owned();
        if let Some(weight) = norm {
            let split = self.graph.ints(&[0, 0, heads as i64, head_dim as i64]);
            let joined = self.graph.ints(&[0, 0, (heads * head_dim) as i64]);
            let cut = format!("{name}.heads");
            value = self.graph.node(&cut, "Reshape", &[&value, &split], vec![]);
            value = self.rms_norm(&format!("{name}.normed"), &value, weight);
            let whole = format!("{name}.joined");
            value = self
                .graph
                .node(&whole, "Reshape", &[&value, &joined], vec![]);
        }
        self.graph.node(
            &format!("{name}.rotated"),
            "RotaryEmbedding",
            &[&value, "rotary.cos", "rotary.sin", positions],
            vec![int("interleaved", 0), int("num_heads", heads as i64)],
        )
    }
}

impl Decoder<'_> {
    /// Adds the attention of a layer and returns the name of its result `[batch, sequence, heads * head_dim]`.
    pub fn attention(&mut self, layer: usize, heads: &Heads) -> Result<String> {
        match self.options.attention {
            Attention::Native => self.native_attention(layer, heads),
            Attention::Portable => self.portable_attention(layer, heads),
        }
    }

    fn native_attention(&mut self, layer: usize, heads: &Heads) -> Result<String> {
        let name = format!("layers.{layer}.attention");
        let (q_norm, k_norm) = if self.config.qk_norm {
            let mut norms = [String::new(), String::new()];
            for (norm, which) in norms.iter_mut().zip(["q_norm", "k_norm"]) {
                let tensor = format!("model.layers.{layer}.self_attn.{which}.weight");
                let values = self
                    .exporter
                    .tensors
                    .take(&tensor, &[self.config.head_dim])?;
                let dims = [self.config.head_dim];
                *norm = self.exporter.fp32_constant(&tensor, &values, &dims)?;
            }
            norms.into()
        } else {
            (String::new(), String::new())
        };
        let (key_cache, value_cache) = cache_names("", layer);
        let (new_key_cache, new_value_cache) = cache_names("updated_", layer);
        let mut inputs = vec![
            heads.query,
            heads.key,
            heads.value,
            &key_cache,
            &value_cache,
            "position_ids",
            "write_indices",
            "nonpad_kv_seqlen",
            "rotary.cos",
            "rotary.sin",
        ];
        if self.config.qk_norm {
            inputs.extend([q_norm.as_str(), k_norm.as_str()]);
        }
        self.exporter.graph.call(Call {
            domain: OUTRIDER,
            op_type: "CachedAttention",
            inputs: &inputs,
            outputs: &[&name, &new_key_cache, &new_value_cache],
            attributes: vec![
                int("is_causal", 1),
                int("kv_num_heads", self.config.kv_heads as i64),
                float("norm_epsilon", self.config.norm_epsilon),
                int("num_heads", self.config.heads as i64),
                int("rotary_interleaved", 0),
                float("scale", 0.0),
                float("softcap", 0.0),
                int("window", self.config.windows[layer].unwrap_or(0) as i64),
            ],
        });
        let width = self.config.heads * self.config.head_dim;
        self.exporter.graph.value(
            &name,
            self.exporter.element,
            &[
                Dim::Symbol("batch"),
                Dim::Symbol("sequence"),
                Dim::Fixed(width),
            ],
        );
        Ok(name)
    }

    fn portable_attention(&mut self, layer: usize, heads: &Heads) -> Result<String> {
        let prefix = format!("layers.{layer}.attention");
        let (query_heads, kv_heads) = (self.config.heads, self.config.kv_heads);
        let query = self.portable_rotation(layer, "q_norm", heads.query, query_heads)?;
        let key = self.portable_rotation(layer, "k_norm", heads.key, kv_heads)?;

        let (key_cache, value_cache) = cache_names("", layer);
        let (new_key_cache, new_value_cache) = cache_names("updated_", layer);
        for (cache, rows, updated) in [
            (&key_cache, key.as_str(), &new_key_cache),
            (&value_cache, heads.value, &new_value_cache),
        ] {
            self.exporter.graph.node(
                updated,
                "TensorScatter",
                &[cache, rows, "write_indices"],
                vec![int("axis", -2), string("mode", "linear")],
            );
        }

        let mask = match self.config.windows[layer] {
            Some(window) => self.window_mask(window),
            None => String::new(),
        };
        Ok(self.exporter.graph.node(
            &prefix,
            "Attention",
            &[
                &query,
                &new_key_cache,
                &new_value_cache,
                &mask,
                "",
                "",
                "nonpad_kv_seqlen",
            ],
            vec![
                int("is_causal", 1),
                int("kv_num_heads", self.config.kv_heads as i64),
                int("q_num_heads", self.config.heads as i64),
            ],
        ))
    }

    fn portable_rotation(
        &mut self,
        layer: usize,
        norm: &str,
        input: &str,
        heads: usize,
    ) -> Result<String> {
        let head_dim = self.config.head_dim;
        let tensor = format!("model.layers.{layer}.self_attn.{norm}.weight");
        if self.config.qk_norm {
            let weight = self.exporter.tensors.take(&tensor, &[head_dim])?;
            self.exporter
                .float_constant(&tensor, &weight, &[head_dim])?;
        }
        let rotation = HeadRotation {
            name: &format!("layers.{layer}.attention.{norm}"),
            heads,
            head_dim,
            norm: self.config.qk_norm.then_some(&tensor),
            positions: "position_ids",
        };
        Ok(self.exporter.rotate_heads(input, &rotation))
    }

    /// Name of the boolean mask `[batch, 1, sequence, max]` of a sliding window; layers with the same window share it.
    ///
    /// Causality and the valid length are left to the attention operator.
    fn window_mask(&mut self, window: usize) -> String {
        let name = format!("window_{window}.mask");
        if !self.masks.insert(window) {
            return name;
        }
        let distance = match self.distances.clone() {
            Some(distance) => distance,
            None => {
                let rows = self.exporter.size_of("window.rows", ROWS, 1);
                // Row i of the call stands at position i + nonpad - rows of its sequence.
                let first = self.exporter.graph.node(
                    "window.first",
                    "Sub",
                    &["nonpad_kv_seqlen", &rows],
                    vec![],
                );
                let distance = self.exporter.key_distances("window", &first, &rows);
                self.distances.insert(distance).clone()
            }
        };
        let limit = self.exporter.graph.int(window as i64);
        self.exporter
            .graph
            .node(&name, "Less", &[&distance, &limit], vec![])
    }
}

/// Names of the key and value cache of a layer.
pub fn cache_names(prefix: &str, layer: usize) -> (String, String) {
    (
        format!("{prefix}key_cache.{layer}"),
        format!("{prefix}value_cache.{layer}"),
    )
}
