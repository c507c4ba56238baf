//! What every graph is made with: the graph under construction, the weights on their way into it, and their numeric form.
//!
//! Norms, constants and casts are here; products, embeddings and heads have modules of their own. It knows no model.

use std::collections::BTreeSet;

use anyhow::{Context, Result};
use outrider_bundle::manifest::Precision;
use outrider_bundle::onnx::DataType;

use super::convert::{to_bf16, to_f16, transpose};
use super::graph::{Call, GraphBuilder, Stored, float, int, to};
use super::rotation::Rotation;
use super::tensors::Tensors;

/// A graph, and what goes into it.
pub struct Exporter<'a> {
    /// The graph.
    pub graph: GraphBuilder,
    /// The weights.
    pub tensors: Tensors<'a>,
    /// Numeric form of the weights of matrix products.
    pub precision: Precision,
    /// Element type of activations and caches.
    pub element: DataType,
    /// Epsilon of every RMS norm.
    pub norm_epsilon: f32,
    /// Basis of the residual stream, where it isn't the checkpoint's.
    pub residual_rotation: Option<Rotation>,
    /// Values whose rows have zero points already.
    pub zero_points: BTreeSet<&'static str>,
}

impl<'a> Exporter<'a> {
    /// Starts with an empty graph and the checkpoint's own basis.
    pub fn new(
        precision: Precision,
        norm_epsilon: f32,
        graph: GraphBuilder,
        tensors: Tensors<'a>,
    ) -> Self {
        Self {
            graph,
            tensors,
            precision,
            element: element(precision),
            norm_epsilon,
            residual_rotation: None,
            zero_points: BTreeSet::new(),
        }
    }

    /// Names fp32 values as a constant, whatever the element type of the activations.
    pub fn fp32_constant(&mut self, name: &str, values: &[f32], dims: &[usize]) -> Result<String> {
        let stored = self.graph.store(values)?;
        self.graph.constant(name, DataType::Float, dims, &stored);
        Ok(name.to_owned())
    }

    /// Names one fp32 number as a constant without dimensions.
    pub fn fp32_value(&mut self, name: &str, value: f32) -> String {
        let stored = Stored::Inline(value.to_le_bytes().into());
        self.graph.constant(name, DataType::Float, &[], &stored);
        name.to_owned()
    }

    /// Casts a value to fp32.
    pub fn cast_to_fp32(&mut self, name: &str, input: &str) {
        self.graph
            .node(name, "Cast", &[input], vec![to(DataType::Float)]);
    }

    /// The value in the second element type; as it is when the types are the same.
    pub fn cast(&mut self, name: &str, input: &str, [from, into]: [DataType; 2]) -> String {
        if from == into {
            return input.to_owned();
        }
        self.graph.node(name, "Cast", &[input], vec![to(into)])
    }

    /// Adds an RMS norm with its weight.
    pub fn weighted_norm(
        &mut self,
        name: &str,
        input: &str,
        tensor: &str,
        size: usize,
    ) -> Result<String> {
        let dims = [size];
        let weight = self.tensors.take(tensor, &dims)?;
        let weight = self.float_constant(tensor, &weight, &dims)?;
        Ok(self.rms_norm(name, input, &weight))
    }

    /// Adds an RMS norm whose weight has gone into the product behind it.
    pub fn unweighted_norm(&mut self, name: &str, input: &str, size: usize) -> Result<String> {
        let ones = format!("constants.ones_{size}");
        if !self.graph.has_constant(&ones) {
            self.float_constant(&ones, &vec![1.0; size], &[size])?;
        }
        Ok(self.rms_norm(name, input, &ones))
    }

    /// Names a vector or matrix of the activations' element type as a constant.
    pub fn float_constant(&mut self, name: &str, values: &[f32], dims: &[usize]) -> Result<String> {
        let stored = self.store_floats(values).context(name.to_owned())?;
        self.graph.constant(name, self.element, dims, &stored);
        Ok(name.to_owned())
    }

    /// Stores values in the element type of the activations.
    pub fn store_floats(&mut self, values: &[f32]) -> Result<Stored> {
        self.store_floats_as(self.element, values)
    }

    /// Stores values in an element type.
    pub fn store_floats_as(&mut self, element: DataType, values: &[f32]) -> Result<Stored> {
        Ok(match element {
            DataType::Float16 => self.graph.store(&to_f16(values)?)?,
            DataType::Bfloat16 => self.graph.store(&to_bf16(values))?,
            _ => self.graph.store(values)?,
        })
    }

    /// Stores a matrix `[rows, columns]` in the element type of the activations as `[columns, rows]`.
    pub fn store_transposed(&mut self, values: Vec<f32>, columns: usize) -> Result<Stored> {
        Ok(match self.element {
            DataType::Float16 => {
                let halves = to_f16(&values)?;
                drop(values);
                self.graph.store(&transpose(&halves, columns))?
            }
            DataType::Bfloat16 => {
                let halves = to_bf16(&values);
                drop(values);
                self.graph.store(&transpose(&halves, columns))?
            }
            _ => self.graph.store(&transpose(&values, columns))?,
        })
    }

    /// Adds an RMS norm over the last axis, its statistics in fp32.
    pub fn rms_norm(&mut self, name: &str, input: &str, weight: &str) -> String {
        self.graph.node(
            name,
            "RMSNormalization",
            &[input, weight],
            vec![
                int("axis", -1),
                float("epsilon", self.norm_epsilon),
                int("stash_type", i32::from(DataType::Float).into()),
            ],
        )
    }

    /// Cuts the last axis of a value into named parts.
    pub fn split(&mut self, input: &str, parts: &[(&str, usize)]) {
        let sizes: Vec<i64> = parts.iter().map(|&(_, size)| size as i64).collect();
        let sizes = self.graph.ints(&sizes);
        let outputs: Vec<&str> = parts.iter().map(|&(name, _)| name).collect();
        self.graph.call(Call {
            domain: "",
            op_type: "Split",
            inputs: &[input, &sizes],
            outputs: &outputs,
            attributes: vec![int("axis", -1)],
        });
    }
}

/// Element type of activations and caches.
pub fn element(precision: Precision) -> DataType {
    match precision {
        Precision::Fp32 | Precision::Int8 | Precision::Int4 => DataType::Float,
        Precision::Fp16 => DataType::Float16,
        Precision::Bf16 => DataType::Bfloat16,
    }
}
