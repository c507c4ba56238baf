//! The two ends of a decoder, which share their weights where they are tied, and which a draft shares with its target: embedding and head.

use anyhow::{Context, Result};
use outrider_bundle::manifest::Precision;
use outrider_bundle::onnx::DataType;

use super::convert::{BLOCK, quantise_blocks_8, quantise_channels};
use super::exporter::{Exporter, element};
use super::graph::{Call, MICROSOFT, Stored, int, to};
use super::quantised::StoredBlocks;
use super::rotation::Rotation;
use super::tensors::Tensors;
use crate::checkpoint::DecoderConfig;

const EMBEDDING: &str = "model.embed_tokens";
const HEAD: &str = "lm_head";

/// Embedding and head of one model; the same bytes where they are tied.
#[derive(Clone, Debug)]
pub struct Ends {
    /// `[vocabulary, hidden]`.
    pub embedding: Matrix,
    /// `[vocabulary, hidden]`.
    pub head: Matrix,
}

/// Shape of the two ends.
#[derive(Clone, Copy, Debug)]
pub struct EndsShape {
    /// Rows of both.
    pub vocab_size: usize,
    /// Columns of both.
    pub hidden_size: usize,
    /// Whether the head is the embedding.
    pub tied: bool,
}

impl EndsShape {
    /// The ends of a decoder.
    pub fn of(config: &DecoderConfig) -> Self {
        Self {
            vocab_size: config.vocab_size,
            hidden_size: config.hidden_size,
            tied: config.tied_embeddings,
        }
    }

    /// Shape of either matrix.
    pub fn dims(&self) -> [usize; 2] {
        [self.vocab_size, self.hidden_size]
    }
}

/// How the two ends of a model are stored.
#[derive(Clone, Copy, Debug)]
pub struct MatrixForm {
    /// Numeric form of the model.
    pub precision: Precision,
    /// Basis of the rows, where it isn't the checkpoint's.
    pub rotation: Option<Rotation>,
}

/// A matrix with a row for each token, in the form of the model it belongs to.
#[derive(Clone, Debug)]
pub struct Matrix {
    table: Table,
    rows: usize,
    hidden: usize,
    /// Element type of the activations that it makes and takes.
    element: DataType,
    /// Basis of its rows, where it isn't the checkpoint's.
    rotation: Option<Rotation>,
}

impl Matrix {
    /// Element type of the activations that it makes and takes.
    pub fn element(&self) -> DataType {
        self.element
    }

    /// Basis of its rows, where it isn't the checkpoint's.
    pub fn rotation(&self) -> Option<Rotation> {
        self.rotation
    }
}

/// A matrix `[rows, hidden]` whose bytes are stored; embedding and head read it in the same layout.
#[derive(Clone, Debug)]
enum Table {
    /// In the element type of the activations.
    Float(Stored),
    /// 8-bit integers with one scale per row.
    Channels {
        /// `[rows, hidden]`.
        values: Stored,
        /// `[rows]`.
        scales: Stored,
    },
    /// 8-bit blocks: two bits less would show more than they save, since the head decides every token.
    Blocks(StoredBlocks),
}

impl Exporter<'_> {
    /// Stores embedding and head; `take` loads a tensor by its name.
    pub fn ends(
        &mut self,
        shape: &EndsShape,
        form: MatrixForm,
        mut take: impl FnMut(&mut Self, &str) -> Result<Vec<f32>>,
    ) -> Result<Ends> {
        let mut matrix = |name: &str| {
            let values = take(self, &format!("{name}.weight"))?;
            self.matrix(values, shape.hidden_size, form)
                .context(name.to_owned())
        };
        let embedding = matrix(EMBEDDING)?;
        let head = if shape.tied {
            embedding.clone()
        } else {
            matrix(HEAD)?
        };
        Ok(Ends { embedding, head })
    }

    /// Stores the rows of a head that belong to some tokens.
    pub fn head_of_tokens(
        &mut self,
        target: &mut Tensors,
        shape: &EndsShape,
        form: MatrixForm,
        tokens: &[u32],
    ) -> Result<Matrix> {
        let name = format!("{}.weight", if shape.tied { EMBEDDING } else { HEAD });
        let hidden = shape.hidden_size;
        let all = target.take(&name, &shape.dims())?;
        let rows = tokens
            .iter()
            .flat_map(|&token| &all[token as usize * hidden..][..hidden]);
        let values = rows.copied().collect();
        drop(all);
        self.matrix(values, hidden, form).context(name)
    }

    /// Stores a matrix with one row for each token.
    fn matrix(&mut self, mut values: Vec<f32>, hidden: usize, form: MatrixForm) -> Result<Matrix> {
        let MatrixForm {
            precision,
            rotation,
        } = form;
        if let Some(rotation) = rotation {
            rotation.rotate_rows(&mut values);
        }
        let (rows, element) = (values.len() / hidden, element(precision));
        let table = match precision {
            Precision::Fp32 | Precision::Fp16 | Precision::Bf16 => {
                Table::Float(self.store_floats_as(element, &values)?)
            }
            Precision::Int8 => {
                let quantised = quantise_channels(&values, hidden);
                drop(values);
                Table::Channels {
                    values: self.graph.store(&quantised.values)?,
                    scales: self.graph.store(&quantised.scales)?,
                }
            }
            Precision::Int4 => {
                let quantised = quantise_blocks_8(&values, hidden);
                drop(values);
                Table::Blocks(self.store_blocks(quantised)?)
            }
        };
        Ok(Matrix {
            table,
            rows,
            hidden,
            element,
            rotation,
        })
    }

    /// Adds the embedding `[batch, sequence] -> [batch, sequence, hidden]` in the basis and element type of the matrix.
    pub fn embedding(&mut self, ids: &str, matrix: &Matrix) -> String {
        let Matrix { rows, hidden, .. } = *matrix;
        let weight = format!("{EMBEDDING}.weight");
        let scales_name = format!("{EMBEDDING}.scales");
        let rows_name = format!("{EMBEDDING}.rows");
        match &matrix.table {
            Table::Float(stored) => {
                self.graph
                    .constant(&weight, matrix.element, &[rows, hidden], stored);
                self.graph
                    .node(&rows_name, "Gather", &[&weight, ids], vec![]);
            }
            Table::Channels { values, scales } => {
                self.graph
                    .constant(&weight, DataType::Int8, &[rows, hidden], values);
                self.graph
                    .constant(&scales_name, DataType::Float, &[rows, 1], scales);
                let levels = format!("{EMBEDDING}.levels");
                let levels = self.graph.node(&levels, "Gather", &[&weight, ids], vec![]);
                let levels = self.graph.node(
                    &format!("{EMBEDDING}.levels_float"),
                    "Cast",
                    &[&levels],
                    vec![to(DataType::Float)],
                );
                let scale = format!("{EMBEDDING}.scale");
                let scale = self
                    .graph
                    .node(&scale, "Gather", &[&scales_name, ids], vec![]);
                self.graph
                    .node(&rows_name, "Mul", &[&levels, &scale], vec![]);
            }
            Table::Blocks(StoredBlocks { values, scales, .. }) => {
                let blocks = hidden.div_ceil(BLOCK);
                let padded = blocks * BLOCK;
                self.graph
                    .constant(&weight, DataType::Uint8, &[rows, padded], values);
                self.graph
                    .constant(&scales_name, DataType::Float, &[rows, blocks], scales);
                self.graph.call(Call {
                    domain: MICROSOFT,
                    op_type: "GatherBlockQuantized",
                    inputs: &[&weight, ids, &scales_name],
                    outputs: &[&rows_name],
                    attributes: vec![
                        int("bits", 8),
                        int("block_size", BLOCK as i64),
                        int("gather_axis", 0),
                        int("quantize_axis", 1),
                    ],
                });
                if padded != hidden {
                    let (start, end) = (self.graph.ints(&[0]), self.graph.ints(&[hidden as i64]));
                    let axis = self.graph.ints(&[-1]);
                    return self.graph.node(
                        &format!("{EMBEDDING}.rows_unpadded"),
                        "Slice",
                        &[&rows_name, &start, &end, &axis],
                        vec![],
                    );
                }
            }
        }
        rows_name
    }

    /// Adds the head `[batch, n, hidden] -> [batch, n, rows of the matrix]`; `output` names its result, which is fp32.
    ///
    /// The input is in the checkpoint's own basis and in the element type of the matrix; `rows_like` is an integer value `[batch, n]`.
    pub fn head(
        &mut self,
        input: &str,
        matrix: &Matrix,
        rows_like: &'static str,
        output: &str,
    ) -> Result<()> {
        let Matrix { rows, hidden, .. } = *matrix;
        let weight = format!("{HEAD}.weight");
        let input = match matrix.rotation {
            Some(rotation) => self.rotate(&format!("{HEAD}.rotated"), input, rotation, hidden)?,
            None => input.to_owned(),
        };
        match &matrix.table {
            Table::Float(stored) => {
                self.graph
                    .constant(&weight, matrix.element, &[rows, hidden], stored);
                let is_fp32 = matrix.element == DataType::Float;
                let product = format!("{HEAD}.product");
                self.graph.call(Call {
                    domain: MICROSOFT,
                    op_type: "FusedMatMul",
                    inputs: &[&input, &weight],
                    outputs: &[if is_fp32 { output } else { &product }],
                    attributes: vec![int("transB", 1)],
                });
                if !is_fp32 {
                    self.cast_to_fp32(output, &product);
                }
            }
            Table::Channels { values, scales } => {
                let table = format!("{HEAD}.table");
                self.graph
                    .constant(&table, DataType::Int8, &[rows, hidden], values);
                // Done once, when the graph is loaded.
                self.graph.node(&weight, "Transpose", &[&table], vec![]);
                self.matmul_integer(
                    HEAD,
                    [&input, &weight, output],
                    rows_like,
                    scales,
                    [hidden, rows],
                );
            }
            Table::Blocks(blocks) => {
                self.matmul_blocks(HEAD, [&input, output], blocks, 8, [hidden, rows]);
            }
        }
        Ok(())
    }
}
