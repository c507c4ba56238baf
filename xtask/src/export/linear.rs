//! Matrix products with constant weights, in every precision.
//!
//! A row of a result depends on the same row of the input alone, in every precision: speculation is lossless only then.

use anyhow::{Context, Result};
use outrider_bundle::manifest::Precision;
use outrider_bundle::onnx::DataType;

use super::convert::{quantise_blocks_4, quantise_channels, scale_columns, transpose};
use super::decoder::Exporter;
use super::rotation::Rotation;

/// Channels per block of a rotation that the graph itself does: the cost of each value, in multiplications.
const LARGEST_ONLINE_BLOCK: usize = 64;

/// What a matrix product reads.
#[derive(Clone, Debug)]
pub enum Reads {
    /// The residual stream through the RMS norm with this weight tensor.
    Normed(String),
    /// A value as it is.
    Plain,
    /// A value with outliers, which are spread before it is quantised.
    Outliers,
}

/// A matrix product: `[.., columns] -> [.., sum of rows]`, with the weights of several tensors side by side.
#[derive(Clone, Debug)]
pub struct Linear {
    /// Name of the product in the graph.
    pub name: String,
    /// Tensors `[rows, columns]` by name.
    pub weights: Vec<(String, usize)>,
    /// Bias vectors by name, in the order of the weights; empty if there are none.
    pub biases: Vec<(String, usize)>,
    /// Size of an input row.
    pub columns: usize,
    /// What it reads.
    pub reads: Reads,
    /// Whether the result is added to the residual stream.
    pub writes_residual: bool,
}

impl Exporter<'_> {
    /// Adds a matrix product, the norm before it included, and returns the name of its result.
    pub fn linear(&mut self, input: &str, linear: &Linear) -> Result<String> {
        let Linear { name, columns, .. } = linear;
        let columns = *columns;
        let rows: usize = linear.weights.iter().map(|(_, rows)| rows).sum();
        let mut values = self.tensors.take_stacked(&linear.weights, columns)?;

        let input = match &linear.reads {
            Reads::Normed(tensor) => match self.residual_rotation {
                Some(rotation) => {
                    let weight = self.tensors.take(tensor, &[columns])?;
                    scale_columns(&mut values, &weight);
                    rotation.rotate_rows(&mut values);
                    self.unweighted_norm(&format!("{name}.norm"), input)?
                }
                None => self.weighted_norm(&format!("{name}.norm"), input, tensor)?,
            },
            Reads::Plain => input.to_owned(),
            Reads::Outliers if self.options.precision == Precision::Int8 => {
                let rotation = Rotation::new(columns, LARGEST_ONLINE_BLOCK);
                rotation.rotate_rows(&mut values);
                self.rotate(&format!("{name}.rotated"), input, rotation, columns)?
            }
            Reads::Outliers => input.to_owned(),
        };
        if let Some(rotation) = self.residual_rotation.filter(|_| linear.writes_residual) {
            rotation.rotate_columns(&mut values, columns);
        }

        let product = format!("{name}.product");
        match self.options.precision {
            Precision::Fp32 | Precision::Fp16 | Precision::Bf16 => {
                let stored = self.store_transposed(values, columns);
                let stored = stored.context(name.clone())?;
                let weight = format!("{name}.weight");
                self.graph
                    .constant(&weight, self.element, &[columns, rows], &stored);
                self.graph
                    .node(&product, "MatMul", &[&input, &weight], vec![]);
            }
            Precision::Int8 => {
                let quantised = quantise_channels(&values, columns);
                drop(values);
                let levels = transpose(&quantised.values, columns);
                let levels = self.graph.store(&levels)?;
                let weight = format!("{name}.weight");
                self.graph
                    .constant(&weight, DataType::Int8, &[columns, rows], &levels);
                let scales = self.graph.store(&quantised.scales)?;
                self.matmul_integer(
                    name,
                    [&input, &weight, &product],
                    "input_ids",
                    &scales,
                    [columns, rows],
                );
            }
            Precision::Int4 => {
                let quantised = quantise_blocks_4(&values, columns);
                drop(values);
                let blocks = self.store_blocks(quantised)?;
                self.matmul_blocks(name, [&input, &product], &blocks, 4, [columns, rows]);
            }
        }

        if linear.biases.is_empty() {
            return Ok(product);
        }
        let mut bias = self.tensors.take_joined(&linear.biases)?;
        if let Some(rotation) = self.residual_rotation.filter(|_| linear.writes_residual) {
            rotation.rotate_rows(&mut bias);
        }
        let bias = self.float_constant(&format!("{name}.bias"), &bias, &[rows])?;
        Ok(self
            .graph
            .node(&format!("{name}.biased"), "Add", &[&product, &bias], vec![]))
    }

    /// Adds the map `x R` of every row of a value and returns the name of its result.
    pub fn rotate(
        &mut self,
        name: &str,
        input: &str,
        rotation: Rotation,
        columns: usize,
    ) -> Result<String> {
        let weight = format!("constants.rotation_{}", rotation.block());
        self.multiply_blocks(name, input, &weight, rotation.matrix(), columns)
    }

    /// Adds the inverse of [`Exporter::rotate`].
    pub fn rotate_back(
        &mut self,
        name: &str,
        input: &str,
        rotation: Rotation,
        columns: usize,
    ) -> Result<String> {
        let weight = format!("constants.rotation_back_{}", rotation.block());
        // The inverse of an orthogonal matrix is its transpose.
        let matrix = transpose(&rotation.matrix(), rotation.block());
        self.multiply_blocks(name, input, &weight, matrix, columns)
    }

    /// Multiplies every block of every row with a square matrix.
    fn multiply_blocks(
        &mut self,
        name: &str,
        input: &str,
        weight: &str,
        matrix: Vec<f32>,
        columns: usize,
    ) -> Result<String> {
        let block = matrix.len().isqrt();
        if !self.graph.has_constant(weight) {
            let stored = self.graph.store(&matrix)?;
            self.graph
                .constant(weight, DataType::Float, &[block, block], &stored);
        }
        let blocks = self
            .graph
            .ints(&[0, 0, (columns / block) as i64, block as i64]);
        let joined = self.graph.ints(&[0, 0, columns as i64]);
        let cut = self.graph.node(
            &format!("{name}.blocks"),
            "Reshape",
            &[input, &blocks],
            vec![],
        );
        let product = self.graph.node(
            &format!("{name}.product"),
            "MatMul",
            &[&cut, weight],
            vec![],
        );
        Ok(self
            .graph
            .node(name, "Reshape", &[&product, &joined], vec![]))
    }
}
