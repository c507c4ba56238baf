//! Matrix products with constant weights, in every precision.
//!
//! A row of a result depends on the same row of the input alone, in every precision: speculation is lossless only then.

use anyhow::{Context, Result};
use outrider_bundle::manifest::Precision;
use outrider_bundle::onnx::DataType;

use super::convert::{quantise_blocks_4, quantise_channels, scale_columns, transpose};
use super::exporter::Exporter;
use super::graph::Stored;
use super::quantised::StoredBlocks;
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

/// The precision whose weights have the element type of the activations.
fn activations(precision: Precision) -> Precision {
    match precision {
        Precision::Int8 | Precision::Int4 => Precision::Fp32,
        Precision::Fp32 | Precision::Fp16 | Precision::Bf16 => precision,
    }
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
    /// An integer value of the graph whose axes are the leading axes of the input.
    pub rows_like: &'static str,
    /// What it reads.
    pub reads: Reads,
    /// Whether the result is added to the residual stream.
    pub writes_residual: bool,
    /// Whether the weights keep the element type of the activations in every precision: for small matrices that much hangs on.
    pub keeps_float: bool,
}

/// The weights of a matrix product in the file, to be multiplied with one value or several.
#[derive(Clone, Debug)]
pub struct Product {
    weights: StoredWeights,
    columns: usize,
    rows: usize,
    /// How an input row is turned before it is multiplied.
    rotation: Option<Rotation>,
    bias: Option<Stored>,
}

#[derive(Clone, Debug)]
enum StoredWeights {
    /// `[columns, rows]` in the element type of the activations.
    Float(Stored),
    /// 8-bit integers `[columns, rows]` with one scale per row of the checkpoint's matrix.
    Channels { levels: Stored, scales: Stored },
    /// 4-bit blocks.
    Blocks(StoredBlocks),
}

impl Exporter<'_> {
    /// Adds a matrix product, the norm before it included, and returns the name of its result.
    pub fn linear(&mut self, input: &str, linear: &Linear) -> Result<String> {
        let Linear { name, columns, .. } = linear;
        let (norm, columns) = (format!("{name}.norm"), *columns);
        let product = self.product(linear)?;
        let input = match &linear.reads {
            // The weight has gone into the product.
            Reads::Normed(_) if self.residual_rotation.is_some() => {
                self.unweighted_norm(&norm, input, columns)?
            }
            Reads::Normed(tensor) => self.weighted_norm(&norm, input, tensor, columns)?,
            Reads::Plain | Reads::Outliers => input.to_owned(),
        };
        self.multiply(name, &input, linear.rows_like, &product)
    }

    /// Stores the weights of a matrix product.
    pub fn product(&mut self, linear: &Linear) -> Result<Product> {
        let Linear { name, columns, .. } = linear;
        let columns = *columns;
        let rows: usize = linear.weights.iter().map(|(_, rows)| rows).sum();
        let mut values = self.tensors.take_stacked(&linear.weights, columns)?;

        let precision = if linear.keeps_float {
            activations(self.precision)
        } else {
            self.precision
        };
        let mut online = None;
        match (&linear.reads, self.residual_rotation) {
            (Reads::Normed(tensor), Some(rotation)) => {
                let weight = self.tensors.take(tensor, &[columns])?;
                scale_columns(&mut values, &weight);
                rotation.rotate_rows(&mut values);
            }
            (Reads::Outliers, _) if precision == Precision::Int8 => {
                let rotation = Rotation::new(columns, LARGEST_ONLINE_BLOCK);
                rotation.rotate_rows(&mut values);
                online = Some(rotation);
            }
            (Reads::Normed(_) | Reads::Plain | Reads::Outliers, _) => {}
        }
        if let Some(rotation) = self.residual_rotation.filter(|_| linear.writes_residual) {
            rotation.rotate_columns(&mut values, columns);
        }

        let weights = match precision {
            Precision::Fp32 | Precision::Fp16 | Precision::Bf16 => {
                let stored = self.store_transposed(values, columns);
                StoredWeights::Float(stored.context(name.clone())?)
            }
            Precision::Int8 => {
                let quantised = quantise_channels(&values, columns);
                drop(values);
                let levels = transpose(&quantised.values, columns);
                StoredWeights::Channels {
                    levels: self.graph.store(&levels)?,
                    scales: self.graph.store(&quantised.scales)?,
                }
            }
            Precision::Int4 => {
                let quantised = quantise_blocks_4(&values, columns);
                drop(values);
                StoredWeights::Blocks(self.store_blocks(quantised)?)
            }
        };

        let mut bias = None;
        if !linear.biases.is_empty() {
            let mut values = self.tensors.take_joined(&linear.biases)?;
            if let Some(rotation) = self.residual_rotation.filter(|_| linear.writes_residual) {
                rotation.rotate_rows(&mut values);
            }
            bias = Some(self.store_floats(&values).context(name.clone())?);
        }
        Ok(Product {
            weights,
            columns,
            rows,
            rotation: online,
            bias,
        })
    }

    /// Adds a matrix product with stored weights and returns the name of its result; `rows_like` as in [`Linear`].
    pub fn multiply(
        &mut self,
        name: &str,
        input: &str,
        rows_like: &'static str,
        stored: &Product,
    ) -> Result<String> {
        let (columns, rows) = (stored.columns, stored.rows);
        let input = match stored.rotation {
            Some(rotation) => self.rotate(&format!("{name}.rotated"), input, rotation, columns)?,
            None => input.to_owned(),
        };
        let product = format!("{name}.product");
        let weight = format!("{name}.weight");
        match &stored.weights {
            StoredWeights::Float(values) => {
                self.graph
                    .constant(&weight, self.element, &[columns, rows], values);
                self.graph
                    .node(&product, "MatMul", &[&input, &weight], vec![]);
            }
            StoredWeights::Channels { levels, scales } => {
                self.graph
                    .constant(&weight, DataType::Int8, &[columns, rows], levels);
                self.matmul_integer(
                    name,
                    [&input, &weight, &product],
                    rows_like,
                    scales,
                    [columns, rows],
                );
            }
            StoredWeights::Blocks(blocks) => {
                self.matmul_blocks(name, [&input, &product], blocks, 4, [columns, rows]);
            }
        }
        let Some(values) = &stored.bias else {
            return Ok(product);
        };
        let bias = format!("{name}.bias");
        self.graph.constant(&bias, self.element, &[rows], values);
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
