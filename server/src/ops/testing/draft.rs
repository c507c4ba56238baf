//! A whole draft head made of the operators' computations, with plain loops between them, held to the goldens stage by stage.

mod tests;

use std::{collections::HashMap, path::PathBuf};

use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use super::{Backwards, rotary_tables};
use crate::ops::{
    attention::{
        Attributes, RotaryLayout, Scratch,
        block::{Inputs, Shapes},
    },
    convolution,
    selector::{self, Outputs, walk::Codebooks},
};

/// A tensor of a file: its shape, and its elements as `f32` or as integers.
struct Tensor {
    shape: Vec<usize>,
    floats: Vec<f32>,
    integers: Vec<i64>,
}

/// Every tensor of a file.
struct Tensors(HashMap<String, Tensor>);

impl Tensors {
    fn load(path: PathBuf) -> Self {
        let bytes =
            std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensors = file.iter().map(|(name, view)| {
            let mut tensor = Tensor {
                shape: view.shape().to_vec(),
                floats: Vec::new(),
                integers: Vec::new(),
            };
            match view.dtype() {
                Dtype::F32 => {
                    tensor.floats = view
                        .data()
                        .chunks_exact(4)
                        .map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()))
                        .collect()
                }
                Dtype::I64 => {
                    tensor.integers = view
                        .data()
                        .chunks_exact(8)
                        .map(|bytes| i64::from_le_bytes(bytes.try_into().unwrap()))
                        .collect()
                }
                other => panic!("{name} is {other:?}"),
            }
            (name.to_owned(), tensor)
        });
        Self(tensors.collect())
    }

    fn get(&self, name: &str) -> &Tensor {
        self.0
            .get(name)
            .unwrap_or_else(|| panic!("there is no tensor {name}"))
    }

    fn floats(&self, name: &str) -> &[f32] {
        &self.get(name).floats
    }

    fn integers(&self, name: &str) -> &[i64] {
        &self.get(name).integers
    }

    fn scalar(&self, name: &str) -> i64 {
        self.integers(name)[0]
    }
}

/// A checkpoint, its goldens, and the cache of one sequence.
struct Head {
    config: Value,
    weights: Tensors,
    cases: Tensors,
    /// Per layer: keys and values.
    caches: Vec<[Vec<f32>; 2]>,
    stages: HashMap<String, Vec<f32>>,
}

/// Where new context goes.
#[derive(Clone, Copy)]
struct Place {
    /// Valid rows of the cache.
    start: usize,
    /// Position of the first row of the cache.
    offset: usize,
}

/// Rows of a cache.
const CAPACITY: usize = 64;

impl Head {
    fn load(name: &str) -> Self {
        let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
            .join("../tests/goldens")
            .join(name);
        let config = std::fs::read_to_string(dir.join("config.json")).unwrap();
        Self {
            config: serde_json::from_str(&config).unwrap(),
            weights: Tensors::load(dir.join("model.safetensors")),
            cases: Tensors::load(dir.join("cases.safetensors")),
            caches: Vec::new(),
            stages: HashMap::new(),
        }
    }

    /// A value of the configuration, which the nested table may hold.
    fn setting(&self, name: &str) -> &Value {
        let nested = &self.config["dflash_config"][name];
        if nested.is_null() {
            &self.config[name]
        } else {
            nested
        }
    }

    fn size(&self, name: &str) -> usize {
        self.setting(name)
            .as_u64()
            .unwrap_or_else(|| panic!("{name} is missing")) as usize
    }

    fn float(&self, name: &str, default: f64) -> f64 {
        self.setting(name).as_f64().unwrap_or(default)
    }

    fn has_selector(&self) -> bool {
        self.config["architectures"][0] == "DFlash2DraftModel"
    }

    fn clear_caches(&mut self) {
        let width = self.size("num_key_value_heads") * self.size("head_dim");
        // NaN: what is not valid must not be read.
        self.caches = vec![
            [
                vec![f32::NAN; CAPACITY * width],
                vec![f32::NAN; CAPACITY * width]
            ];
            self.size("num_hidden_layers")
        ];
    }

    fn keep(&mut self, name: impl Into<String>, values: &[f32]) {
        self.stages.insert(name.into(), values.to_vec());
    }

    /// `x · weightᵀ`.
    fn linear(&self, x: &[f32], weight: &str) -> Vec<f32> {
        linear(x, self.weights.get(weight))
    }

    fn rms(&self, x: &[f32], weight: &str) -> Vec<f32> {
        let weight = self.weights.floats(weight);
        let epsilon = self.float("rms_norm_eps", 0.0);
        x.chunks(weight.len())
            .flat_map(|row| {
                let square: f64 = row.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
                let factor = 1.0 / (square / row.len() as f64 + epsilon).sqrt();
                row.iter()
                    .zip(weight)
                    .map(move |(&x, &weight)| (f64::from(x) * factor * f64::from(weight)) as f32)
            })
            .collect()
    }

    /// One of the convolutions around a sublayer; as it is without them.
    fn convolve(
        &mut self,
        x: Vec<f32>,
        coefficients: &[f32],
        prefix: &str,
        side: usize,
    ) -> Vec<f32> {
        if !self.has_selector() {
            return x;
        }
        let base = self.weights.get(&format!("{prefix}.base_kernel"));
        let shape = |shape: &[usize]| shape.iter().map(|&size| size as i64).collect::<Vec<i64>>();
        let rows = x.len() / self.size("hidden_size");
        let attributes = convolution::Attributes {
            side,
            group_size: self.size("conv_group_size"),
        };
        let geometry = convolution::Geometry::new(
            attributes,
            &convolution::Shapes {
                x: &shape(&[1, rows, self.size("hidden_size")]),
                coefficients: &shape(&[1, rows, coefficients.len() / rows]),
                base: &shape(&base.shape),
            },
        )
        .unwrap();
        let mut output = vec![0.0; x.len()];
        let inputs = convolution::Inputs {
            x: &x,
            coefficients,
            base: &base.floats,
        };
        convolution::convolve(&geometry, &inputs, &mut output, &Backwards).unwrap();
        output
    }

    fn coefficients(&self, x: &[f32], prefix: &str) -> Vec<f32> {
        if self.has_selector() {
            self.linear(x, &format!("{prefix}.kernel_projection.weight"))
        } else {
            Vec::new()
        }
    }

    fn attention(&mut self, layer: usize, h: &[f32], fused: &[f32], place: Place) -> Vec<f32> {
        let (heads, kv_heads, head_dim) = (
            self.size("num_attention_heads"),
            self.size("num_key_value_heads"),
            self.size("head_dim"),
        );
        let (block, context) = (
            h.len() / self.size("hidden_size"),
            fused.len() / self.size("hidden_size"),
        );
        let prefix = format!("layers.{layer}.self_attn");
        let [query, key, value] =
            ["q", "k", "v"].map(|name| self.linear(h, &format!("{prefix}.{name}_proj.weight")));
        let [context_key, context_value] =
            ["k", "v"].map(|name| self.linear(fused, &format!("{prefix}.{name}_proj.weight")));
        let is_sliding = self.config["layer_types"][layer] == "sliding_attention";
        let attributes = Attributes {
            num_heads: heads,
            kv_num_heads: kv_heads,
            is_causal: self.config["is_causal"].as_bool().unwrap_or(is_sliding),
            window: if is_sliding {
                self.size("sliding_window")
            } else {
                0
            },
            rotary_layout: RotaryLayout::HalfSplit,
            scale: 0.0,
            norm_epsilon: self.float("rms_norm_eps", 0.0) as f32,
            softcap: 0.0,
        };
        let Place { start, offset } = place;
        let positions = offset + start + context + block;
        let base = self.config["rope_theta"]
            .as_f64()
            .or(self.config["rope_parameters"]["rope_theta"].as_f64())
            .unwrap();
        let [cos, sin] = rotary_tables(positions, head_dim / 2, base);
        let [q_norm, k_norm] = ["q", "k"].map(|name| {
            self.weights
                .floats(&format!("{prefix}.{name}_norm.weight"))
                .to_vec()
        });
        let shape = |sizes: &[usize]| sizes.iter().map(|&size| size as i64).collect::<Vec<i64>>();
        let (queries, keys, context_keys) = (
            shape(&[1, block, heads * head_dim]),
            shape(&[1, block, kv_heads * head_dim]),
            shape(&[1, context, kv_heads * head_dim]),
        );
        let (cache, table) = (
            shape(&[1, CAPACITY, kv_heads * head_dim]),
            shape(&[positions, head_dim / 2]),
        );
        let geometry = Shapes {
            query: &queries,
            key: &keys,
            value: &keys,
            context_key: &context_keys,
            context_value: &context_keys,
            key_cache: &cache,
            value_cache: &cache,
            block_position_ids: &shape(&[1, block]),
            context_position_ids: &shape(&[1, context]),
            context_start: &[1],
            context_rows: &[1],
            block_rows: &[1],
            cos: &table,
            sin: &table,
            q_norm: Some(&[head_dim as i64]),
            k_norm: Some(&[head_dim as i64]),
        }
        .geometry(&attributes)
        .unwrap();
        let range = |first: usize, count: usize| {
            (first..first + count)
                .map(|position| position as i64)
                .collect::<Vec<i64>>()
        };
        let inputs = Inputs {
            query: &query,
            key: &key,
            value: &value,
            context_key: &context_key,
            context_value: &context_value,
            block_position_ids: &range(offset + start + context, block),
            context_position_ids: &range(offset + start, context),
            context_start: &[start as i64],
            context_rows: &[context as i64],
            block_rows: &[block as i64],
            cos: &cos,
            sin: &sin,
            q_norm: Some(&q_norm),
            k_norm: Some(&k_norm),
        };
        let mut output = vec![0.0; query.len()];
        let [keys, values] = &mut self.caches[layer];
        inputs
            .call(&geometry)
            .unwrap()
            .attend(
                keys,
                values,
                &mut output,
                &mut Scratch::default(),
                &Backwards,
            )
            .unwrap();
        let written = start * kv_heads * head_dim..(start + context) * kv_heads * head_dim;
        let (keys, values) = (keys[written.clone()].to_vec(), values[written].to_vec());
        self.keep(format!("l{layer}.ctx_k"), &keys);
        self.keep(format!("l{layer}.ctx_v"), &values);
        self.linear(&output, &format!("{prefix}.o_proj.weight"))
    }

    /// Runs the body and the LM head over new context and a block behind it; every stage is kept.
    fn forward(&mut self, place: Place, taps: &[f32], block_ids: &[i64]) {
        self.stages.clear();
        let hidden = self.size("hidden_size");
        let fused = self.rms(&self.linear(taps, "fc.weight"), "hidden_norm.weight");
        self.keep("fused", &fused);
        let scale = self.float("input_embedding_scale", 1.0) as f32;
        let table = self.cases.floats("target.embed_tokens.weight");
        let mut x: Vec<f32> = block_ids
            .iter()
            .flat_map(|&id| {
                table[id as usize * hidden..][..hidden]
                    .iter()
                    .map(|x| x * scale)
            })
            .collect();
        self.keep("block_embed", &x);
        for layer in 0..self.size("num_hidden_layers") {
            let name = |stage: &str| format!("l{layer}.{stage}");
            let prefix = format!("layers.{layer}");
            let h = self.rms(&x, &format!("{prefix}.input_layernorm.weight"));
            let conv = format!("{prefix}.attention_conv");
            let coefficients = self.coefficients(&h, &conv);
            let h = self.convolve(h, &coefficients, &conv, 0);
            self.keep(name("attn_conv_dyn"), &coefficients);
            self.keep(name("attn_conv_in"), &h);
            let o = self.attention(layer, &h, &fused, place);
            self.keep(name("attn_out"), &o);
            let o = self.convolve(o, &coefficients, &conv, 1);
            self.keep(name("attn_conv_out"), &o);
            x.iter_mut().zip(&o).for_each(|(x, o)| *x += o);

            let h = self.rms(&x, &format!("{prefix}.post_attention_layernorm.weight"));
            let conv = format!("{prefix}.mlp_conv");
            let coefficients = self.coefficients(&h, &conv);
            let h = self.convolve(h, &coefficients, &conv, 0);
            self.keep(name("mlp_conv_in"), &h);
            let gate = self.linear(&h, &format!("{prefix}.mlp.gate_proj.weight"));
            let up = self.linear(&h, &format!("{prefix}.mlp.up_proj.weight"));
            let inner: Vec<f32> = gate
                .iter()
                .zip(up)
                .map(|(&gate, up)| gate / (1.0 + (-gate).exp()) * up)
                .collect();
            let m = self.linear(&inner, &format!("{prefix}.mlp.down_proj.weight"));
            self.keep(name("mlp_out"), &m);
            let m = self.convolve(m, &coefficients, &conv, 1);
            self.keep(name("mlp_conv_out"), &m);
            x.iter_mut().zip(&m).for_each(|(x, m)| *x += m);
            self.keep(name("out"), &x);
        }
        let y = self.rms(&x, "norm.weight");
        self.keep("final_hidden", &y);
        let (multiplier, cap) = (
            self.float("output_multiplier", 1.0),
            self.float("final_logit_softcapping", 0.0),
        );
        let logits: Vec<f32> = linear(&y[hidden..], self.cases.get("target.lm_head.weight"))
            .iter()
            .map(|&logit| {
                let logit = f64::from(logit) * multiplier;
                (if cap > 0.0 {
                    cap * (logit / cap).tanh()
                } else {
                    logit
                }) as f32
            })
            .collect();
        self.keep("logits", &logits);
        if self.has_selector() {
            let selector_hidden =
                self.linear(&y[hidden..], "candidate_selector.hidden_projection.weight");
            self.keep("selector_hidden", &selector_hidden);
        }
    }

    /// The selector over the logits of the last forward: drafts, candidates and scores along the path.
    fn select(&self, block_ids: &[i64], first_position: usize, top_k: usize) -> Proposal {
        let slots = block_ids.len() - 1;
        let (logits, vocabulary) = (&self.stages["logits"], self.size("vocab_size"));
        let positions: Vec<i64> = (0..=slots)
            .map(|slot| (first_position + slot) as i64)
            .collect();
        let codebooks = self.codebooks();
        let rank = codebooks.map_or(0, |books| books.hidden.len() / slots);
        let geometry = selector::Geometry {
            top_k,
            batch: 1,
            slots,
            columns: vocabulary,
            rank,
            vocabulary: codebooks.map(|_| vocabulary),
        };
        let mut proposal = Proposal {
            drafts: vec![0; slots],
            candidates: vec![0; slots * top_k],
            scores: vec![0.0; slots * top_k],
        };
        let inputs = selector::Inputs {
            logits,
            block_ids,
            block_position_ids: &positions,
            block_rows: &[slots as i64 + 1],
            temperature: &[0.0],
            seed: &[0],
            candidate_topk: &[top_k as i64],
            codebooks,
            column_token_ids: None,
        };
        let outputs = Outputs {
            draft_ids: &mut proposal.drafts,
            candidate_ids: Some(&mut proposal.candidates),
            path_scores: Some(&mut proposal.scores),
        };
        selector::select(&geometry, &inputs, outputs, &Backwards).unwrap();
        proposal
    }

    fn codebooks(&self) -> Option<Codebooks<'_, f32>> {
        self.has_selector().then(|| Codebooks {
            hidden: &self.stages["selector_hidden"],
            predecessor: self
                .weights
                .floats("candidate_selector.predecessor_codebook"),
            successor: self.weights.floats("candidate_selector.successor_codebook"),
        })
    }

    /// Compares every stage that the goldens have of this case.
    fn check_stages(&self, case: &str) {
        let mut compared = 0;
        for (name, got) in &self.stages {
            let Some(want) = self.cases.0.get(&format!("{case}.out.{name}")) else {
                continue;
            };
            assert_close(&format!("{case} {name}"), got, &want.floats);
            compared += 1;
        }
        assert!(compared >= 2, "{case}: only {compared} stages compared");
    }
}

struct Proposal {
    drafts: Vec<i64>,
    candidates: Vec<i64>,
    scores: Vec<f32>,
}

fn linear(x: &[f32], weight: &Tensor) -> Vec<f32> {
    x.chunks(weight.shape[1])
        .flat_map(|row| {
            weight.floats.chunks(weight.shape[1]).map(|weight| {
                row.iter()
                    .zip(weight)
                    .map(|(&x, &w)| f64::from(x) * f64::from(w))
                    .sum::<f64>() as f32
            })
        })
        .collect()
}

fn assert_close(what: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (index, (got, want)) in got.iter().zip(want).enumerate() {
        let allowed = 1e-4 + 1e-4 * want.abs();
        assert!(
            (got - want).abs() <= allowed,
            "{what}[{index}] is {got}, not {want}"
        );
    }
}
