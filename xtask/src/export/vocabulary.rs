//! The two ends of a decoder, which share their weights where they are tied: embedding and head.

use anyhow::{Context, Result};
use outrider_bundle::manifest::Precision;
use outrider_bundle::onnx::DataType;

use super::convert::{BLOCK, quantise_blocks_8, quantise_channels};
use super::decoder::Exporter;
use super::graph::{Call, MICROSOFT, Stored, int, to};
use super::quantised::StoredBlocks;

const EMBEDDING: &str = "model.embed_tokens";
const HEAD: &str = "lm_head";

/// A matrix `[vocabulary, hidden]` whose bytes are stored; embedding and head read it in the same layout.
pub enum Table {
    /// In the element type of the activations.
    Float(Stored),
    /// 8-bit integers with one scale per row.
    Channels {
        /// `[vocabulary, hidden]`.
        values: Stored,
        /// `[vocabulary]`.
        scales: Stored,
    },
    /// 8-bit blocks: two bits less would show more than they save, since the head decides every token.
    Blocks(StoredBlocks),
}

impl Exporter<'_> {
    /// Adds the embedding `[batch, sequence] -> [batch, sequence, hidden]`; returns the name of its result and the table for a tied head.
    pub fn embedding(&mut self, ids: &str) -> Result<(String, Table)> {
        let [vocabulary, hidden] = self.table_shape();
        let table = self.table(EMBEDDING)?;
        let weight = format!("{EMBEDDING}.weight");
        let scales_name = format!("{EMBEDDING}.scales");
        let rows_name = format!("{EMBEDDING}.rows");
        match &table {
            Table::Float(stored) => {
                self.graph
                    .constant(&weight, self.element, &[vocabulary, hidden], stored);
                self.graph
                    .node(&rows_name, "Gather", &[&weight, ids], vec![]);
            }
            Table::Channels { values, scales } => {
                self.graph
                    .constant(&weight, DataType::Int8, &[vocabulary, hidden], values);
                self.graph
                    .constant(&scales_name, DataType::Float, &[vocabulary, 1], scales);
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
                    .constant(&weight, DataType::Uint8, &[vocabulary, padded], values);
                self.graph
                    .constant(&scales_name, DataType::Float, &[vocabulary, blocks], scales);
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
                    let unpadded = self.graph.node(
                        &format!("{EMBEDDING}.rows_unpadded"),
                        "Slice",
                        &[&rows_name, &start, &end, &axis],
                        vec![],
                    );
                    return Ok((unpadded, table));
                }
            }
        }
        Ok((rows_name, table))
    }

    /// Adds the head `[batch, n, hidden] -> [batch, n, vocabulary]` with its own weights or the embedding's; `output` names its result.
    pub fn head(&mut self, input: &str, embedding: Table, output: &str) -> Result<()> {
        let [vocabulary, hidden] = self.table_shape();
        let table = if self.config.tied_embeddings {
            embedding
        } else {
            self.table(HEAD)?
        };
        let weight = format!("{HEAD}.weight");
        // The table is in the basis of the residual stream.
        let input = match self.residual_rotation {
            Some(rotation) => self.rotate(&format!("{HEAD}.rotated"), input, rotation, hidden)?,
            None => input.to_owned(),
        };
        match table {
            Table::Float(stored) => {
                self.graph
                    .constant(&weight, self.element, &[vocabulary, hidden], &stored);
                self.graph.call(Call {
                    domain: MICROSOFT,
                    op_type: "FusedMatMul",
                    inputs: &[&input, &weight],
                    outputs: &[output],
                    attributes: vec![int("transB", 1)],
                });
            }
            Table::Channels { values, scales } => {
                let table = format!("{HEAD}.table");
                self.graph
                    .constant(&table, DataType::Int8, &[vocabulary, hidden], &values);
                // Done once, when the graph is loaded.
                self.graph.node(&weight, "Transpose", &[&table], vec![]);
                self.matmul_integer(
                    HEAD,
                    [&input, &weight, output],
                    "logit_indices",
                    &scales,
                    [hidden, vocabulary],
                );
            }
            Table::Blocks(blocks) => {
                self.matmul_blocks(HEAD, [&input, output], &blocks, 8, [hidden, vocabulary]);
            }
        }
        Ok(())
    }

    fn table(&mut self, name: &str) -> Result<Table> {
        let shape = self.table_shape();
        let hidden = shape[1];
        let mut values = self.tensors.take(&format!("{name}.weight"), &shape)?;
        if let Some(rotation) = self.residual_rotation {
            rotation.rotate_rows(&mut values);
        }
        Ok(match self.options.precision {
            Precision::Fp32 | Precision::Fp16 | Precision::Bf16 => {
                Table::Float(self.store_floats(&values).context(name.to_owned())?)
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
        })
    }

    fn table_shape(&self) -> [usize; 2] {
        [self.config.vocab_size, self.config.hidden_size]
    }
}
