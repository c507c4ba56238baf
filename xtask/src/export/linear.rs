//! Matrix products with constant weights, the embedding and the head, in every precision.
//!
//! A row of a result depends on the same row of the input alone, in every precision: speculation is lossless only then.

use anyhow::{Context, Result};
use half::{bf16, f16};
use outrider_bundle::manifest::Precision;
use outrider_bundle::onnx::DataType;

use super::convert::{
    BlockQuantised, quantise_blocks_4, quantise_blocks_8, quantise_channels, to_bf16, to_f16,
    transpose,
};
use super::decoder::Exporter;
use super::graph::{Call, MICROSOFT, Stored, int, scalar_tensor, to};

/// Values per scale of 4-bit and blockwise 8-bit weights. Larger blocks make rows depend on how many are computed together in ONNX Runtime 1.31.
const BLOCK: usize = 32;

/// `accuracy_level` of `MatMulNBits`: activations are quantised to 8 bits, per row and block.
const ACCURACY_LEVEL: i64 = 4;

/// A matrix product: `[.., columns] -> [.., sum of rows]`, with the weights of several tensors side by side.
pub struct Linear {
    /// Name of the product in the graph.
    pub name: String,
    /// Tensors `[rows, columns]` by name.
    pub weights: Vec<(String, usize)>,
    /// Bias vectors by name, in the order of the weights; empty if there are none.
    pub biases: Vec<(String, usize)>,
    /// Size of an input row.
    pub columns: usize,
}

/// Level of zero in 8-bit activations.
const ZERO_POINT: u8 = 128;

/// What the embedding leaves for a head that shares its weights.
pub enum SharedTable {
    /// `[vocabulary, hidden]` in the element type of the activations.
    Float(Stored),
    /// `[vocabulary, hidden]` 8-bit integers with one scale per row.
    Channels { values: Stored, scales: Stored },
    /// 8-bit blocks.
    Blocks { values: Stored, scales: Stored },
}

impl Exporter<'_> {
    /// Adds a matrix product and returns the name of its result.
    pub fn linear(&mut self, input: &str, linear: &Linear) -> Result<String> {
        let Linear { name, columns, .. } = linear;
        let rows = linear.weights.iter().map(|(_, rows)| rows).sum();
        let values = self.tensors.take_stacked(&linear.weights, *columns)?;
        let product = format!("{name}.product");
        match self.options.precision {
            Precision::Fp32 | Precision::Fp16 | Precision::Bf16 => {
                let stored = self
                    .store_transposed(values, *columns)
                    .context(name.clone())?;
                let weight = format!("{name}.weight");
                self.graph
                    .constant(&weight, self.element, &[*columns, rows], &stored);
                self.graph
                    .node(&product, "MatMul", &[input, &weight], vec![]);
            }
            Precision::Int8 => {
                let quantised = quantise_channels(&values, *columns);
                drop(values);
                let values = self
                    .graph
                    .store(bytes_of(transpose(&quantised.values, *columns)))?;
                let weight = format!("{name}.weight");
                self.graph
                    .constant(&weight, DataType::Int8, &[*columns, rows], &values);
                let scales = self.graph.store(bytes_of(quantised.scales))?;
                self.matmul_integer(
                    name,
                    [input, &weight, &product],
                    "input_ids",
                    &scales,
                    *columns,
                    rows,
                );
            }
            Precision::Int4 => {
                let quantised = quantise_blocks_4(&values, *columns, BLOCK);
                drop(values);
                let blocks = self.store_blocks(quantised)?;
                self.matmul_blocks(name, [input, &product], &blocks, 4, *columns, rows);
            }
        }
        if linear.biases.is_empty() {
            return Ok(product);
        }
        let bias = self.tensors.take_joined(&linear.biases)?;
        let bias = self.float_constant(&format!("{name}.bias"), &bias, &[rows])?;
        Ok(self
            .graph
            .node(&format!("{name}.biased"), "Add", &[&product, &bias], vec![]))
    }

    /// Adds the embedding `[batch, sequence] -> [batch, sequence, hidden]`; returns the name of its result and the table for a tied head.
    pub fn embedding(&mut self, ids: &str) -> Result<(String, SharedTable)> {
        let name = "model.embed_tokens";
        let shape = [self.config.vocab_size, self.config.hidden_size];
        let values = self.tensors.take(&format!("{name}.weight"), &shape)?;
        let table = self.table(name, values)?;
        let weight = format!("{name}.weight");
        let scales_name = format!("{name}.scales");
        let rows = match &table {
            SharedTable::Float(stored) => {
                self.graph.constant(&weight, self.element, &shape, stored);
                self.graph
                    .node(&format!("{name}.rows"), "Gather", &[&weight, ids], vec![])
            }
            SharedTable::Channels { values, scales } => {
                self.graph.constant(&weight, DataType::Int8, &shape, values);
                self.graph
                    .constant(&scales_name, DataType::Float, &[shape[0], 1], scales);
                let levels =
                    self.graph
                        .node(&format!("{name}.levels"), "Gather", &[&weight, ids], vec![]);
                let levels = self.graph.node(
                    &format!("{name}.levels_float"),
                    "Cast",
                    &[&levels],
                    vec![to(DataType::Float)],
                );
                let scale = self.graph.node(
                    &format!("{name}.scale"),
                    "Gather",
                    &[&scales_name, ids],
                    vec![],
                );
                self.graph
                    .node(&format!("{name}.rows"), "Mul", &[&levels, &scale], vec![])
            }
            SharedTable::Blocks { values, scales } => {
                let blocks = shape[1].div_ceil(BLOCK);
                self.graph.constant(
                    &weight,
                    DataType::Uint8,
                    &[shape[0], blocks * BLOCK],
                    values,
                );
                self.graph
                    .constant(&scales_name, DataType::Float, &[shape[0], blocks], scales);
                let rows = format!("{name}.rows");
                self.graph.call(Call {
                    domain: MICROSOFT,
                    op_type: "GatherBlockQuantized",
                    inputs: &[&weight, ids, &scales_name],
                    outputs: &[&rows],
                    attributes: vec![
                        int("bits", 8),
                        int("block_size", BLOCK as i64),
                        int("gather_axis", 0),
                        int("quantize_axis", 1),
                    ],
                });
                if blocks * BLOCK == shape[1] {
                    rows
                } else {
                    let (start, end) = (self.graph.ints(&[0]), self.graph.ints(&[shape[1] as i64]));
                    let axis = self.graph.ints(&[-1]);
                    self.graph.node(
                        &format!("{name}.rows_unpadded"),
                        "Slice",
                        &[&rows, &start, &end, &axis],
                        vec![],
                    )
                }
            }
        };
        Ok((rows, table))
    }

    /// Adds the head `[batch, n, hidden] -> [batch, n, vocabulary]`, from its own weights or from the embedding's; `output` names its result.
    pub fn head(&mut self, input: &str, shared: SharedTable, output: &str) -> Result<()> {
        let name = "lm_head";
        let (rows, columns) = (self.config.vocab_size, self.config.hidden_size);
        let table = if self.config.tied_embeddings {
            shared
        } else {
            let values = self
                .tensors
                .take(&format!("{name}.weight"), &[rows, columns])?;
            self.table(name, values)?
        };
        let weight = format!("{name}.weight");
        match table {
            SharedTable::Float(stored) => {
                self.graph
                    .constant(&weight, self.element, &[rows, columns], &stored);
                self.graph.call(Call {
                    domain: MICROSOFT,
                    op_type: "FusedMatMul",
                    inputs: &[input, &weight],
                    outputs: &[output],
                    attributes: vec![int("transB", 1)],
                });
            }
            SharedTable::Channels { values, scales } => {
                let table = format!("{name}.table");
                self.graph
                    .constant(&table, DataType::Int8, &[rows, columns], &values);
                self.graph.node(&weight, "Transpose", &[&table], vec![]);
                self.matmul_integer(
                    name,
                    [input, &weight, output],
                    "logit_indices",
                    &scales,
                    columns,
                    rows,
                );
            }
            SharedTable::Blocks { values, scales } => {
                let blocks = StoredBlocks {
                    values,
                    scales,
                    zero_points: None,
                };
                self.matmul_blocks(name, [input, output], &blocks, 8, columns, rows);
            }
        }
        Ok(())
    }

    /// Names a vector or matrix of the activations' element type as a constant.
    pub fn float_constant(&mut self, name: &str, values: &[f32], dims: &[usize]) -> Result<String> {
        let bytes = self
            .element_bytes(values.to_vec())
            .context(name.to_owned())?;
        let stored = self.graph.store(bytes)?;
        self.graph.constant(name, self.element, dims, &stored);
        Ok(name.to_owned())
    }

    fn table(&mut self, name: &str, values: Vec<f32>) -> Result<SharedTable> {
        Ok(match self.options.precision {
            Precision::Fp32 | Precision::Fp16 | Precision::Bf16 => {
                let bytes = self.element_bytes(values).context(name.to_owned())?;
                SharedTable::Float(self.graph.store(bytes)?)
            }
            Precision::Int8 => {
                let quantised = quantise_channels(&values, self.config.hidden_size);
                drop(values);
                SharedTable::Channels {
                    values: self.graph.store(bytes_of(quantised.values))?,
                    scales: self.graph.store(bytes_of(quantised.scales))?,
                }
            }
            Precision::Int4 => {
                let quantised = quantise_blocks_8(&values, self.config.hidden_size, BLOCK);
                drop(values);
                SharedTable::Blocks {
                    values: self.graph.store(quantised.values)?,
                    scales: self.graph.store(bytes_of(quantised.scales))?,
                }
            }
        })
    }

    fn element_bytes(&self, values: Vec<f32>) -> Result<Vec<u8>> {
        Ok(match self.options.precision {
            Precision::Fp16 => bytes_of(to_f16(&values)?),
            Precision::Bf16 => bytes_of(to_bf16(&values)),
            Precision::Fp32 | Precision::Int8 | Precision::Int4 => bytes_of(values),
        })
    }

    fn store_transposed(&mut self, values: Vec<f32>, columns: usize) -> Result<Stored> {
        let bytes = match self.options.precision {
            Precision::Fp16 => {
                let halves: Vec<f16> = to_f16(&values)?;
                drop(values);
                bytes_of(transpose(&halves, columns))
            }
            Precision::Bf16 => {
                let halves: Vec<bf16> = to_bf16(&values);
                drop(values);
                bytes_of(transpose(&halves, columns))
            }
            Precision::Fp32 | Precision::Int8 | Precision::Int4 => {
                bytes_of(transpose(&values, columns))
            }
        };
        Ok(self.graph.store(bytes)?)
    }

    /// Integer product: each input row is quantised by its own largest value, so that no row sees another.
    ///
    /// Activations are unsigned with zero point 128, which is what the integer instructions of CPUs multiply with signed weights.
    fn matmul_integer(
        &mut self,
        name: &str,
        [input, weight, output]: [&str; 3],
        rows_like: &'static str,
        scales: &Stored,
        columns: usize,
        rows: usize,
    ) {
        let channel_scale = format!("{name}.channel_scale");
        self.graph
            .constant(&channel_scale, DataType::Float, &[rows], scales);
        let (row_scale, levels) = self.quantise_rows(name, input, rows_like, columns);
        let zero_point = self.byte(ZERO_POINT);
        let product = self.graph.node(
            &format!("{name}.integer_product"),
            "MatMulInteger",
            &[&levels, weight, &zero_point],
            vec![],
        );
        let product = self.graph.node(
            &format!("{name}.float_product"),
            "Cast",
            &[&product],
            vec![to(DataType::Float)],
        );
        let product = self.graph.node(
            &format!("{name}.channel_scaled"),
            "Mul",
            &[&product, &channel_scale],
            vec![],
        );
        self.graph
            .node(output, "Mul", &[&product, &row_scale], vec![]);
    }

    /// Names of the row scales `[.., 1]` and the 8-bit levels of a value.
    fn quantise_rows(
        &mut self,
        name: &str,
        input: &str,
        rows_like: &'static str,
        columns: usize,
    ) -> (String, String) {
        let axis = self.graph.ints(&[-1]);
        let magnitude = self
            .graph
            .node(&format!("{name}.magnitude"), "Abs", &[input], vec![]);
        let largest = self.graph.node(
            &format!("{name}.largest"),
            "ReduceMax",
            &[&magnitude, &axis],
            vec![int("keepdims", 1)],
        );
        // A row of zeros would be divided by zero.
        let least = self.scalar("least_magnitude", f32::MIN_POSITIVE * 128.0);
        let largest = self.graph.node(
            &format!("{name}.largest_positive"),
            "Max",
            &[&largest, &least],
            vec![],
        );
        let step = self.scalar("one_level", 1.0 / 127.0);
        let scale = self.graph.node(
            &format!("{name}.row_scale"),
            "Mul",
            &[&largest, &step],
            vec![],
        );
        let zero_points = self.row_zero_points(rows_like);
        // One block per row: the only form in which scales may vary over all leading axes.
        let levels = self.graph.node(
            &format!("{name}.levels"),
            "QuantizeLinear",
            &[input, &scale, &zero_points],
            vec![int("axis", -1), int("block_size", columns as i64)],
        );
        (scale, levels)
    }

    /// Name of a zero point for each row of a value whose leading axes are those of a graph input; all who ask share it.
    fn row_zero_points(&mut self, rows_like: &'static str) -> String {
        let name = format!("{rows_like}.zero_points");
        if self.zero_points.insert(rows_like) {
            let axis = self.graph.ints(&[-1]);
            let column = self.graph.node(
                &format!("{rows_like}.column"),
                "Unsqueeze",
                &[rows_like, &axis],
                vec![],
            );
            let shape = self.graph.node(
                &format!("{rows_like}.column_shape"),
                "Shape",
                &[&column],
                vec![],
            );
            let value = scalar_tensor("value", DataType::Uint8, &[ZERO_POINT]);
            self.graph
                .node(&name, "ConstantOfShape", &[&shape], vec![value]);
        }
        name
    }

    fn matmul_blocks(
        &mut self,
        name: &str,
        [input, output]: [&str; 2],
        blocks: &StoredBlocks,
        bits: usize,
        columns: usize,
        rows: usize,
    ) {
        let per_row = columns.div_ceil(BLOCK);
        let weight = format!("{name}.weight");
        self.graph.constant(
            &weight,
            DataType::Uint8,
            &[rows, per_row, BLOCK * bits / 8],
            &blocks.values,
        );
        let scales = format!("{name}.block_scales");
        self.graph
            .constant(&scales, DataType::Float, &[rows, per_row], &blocks.scales);
        let zero_points = match &blocks.zero_points {
            Some(stored) => {
                let zero_points = format!("{name}.zero_points");
                let bytes = (per_row * bits).div_ceil(8);
                self.graph
                    .constant(&zero_points, DataType::Uint8, &[rows, bytes], stored);
                zero_points
            }
            None => String::new(),
        };
        let mut inputs = vec![input, &weight, &scales];
        if !zero_points.is_empty() {
            inputs.push(&zero_points);
        }
        self.graph.call(Call {
            domain: MICROSOFT,
            op_type: "MatMulNBits",
            inputs: &inputs,
            outputs: &[output],
            attributes: vec![
                int("K", columns as i64),
                int("N", rows as i64),
                int("accuracy_level", ACCURACY_LEVEL),
                int("bits", bits as i64),
                int("block_size", BLOCK as i64),
            ],
        });
    }

    fn store_blocks(&mut self, quantised: BlockQuantised) -> Result<StoredBlocks> {
        Ok(StoredBlocks {
            values: self.graph.store(quantised.values)?,
            scales: self.graph.store(bytes_of(quantised.scales))?,
            zero_points: if quantised.zero_points.is_empty() {
                None
            } else {
                Some(self.graph.store(quantised.zero_points)?)
            },
        })
    }

    fn scalar(&mut self, name: &str, value: f32) -> String {
        let name = format!("constants.{name}");
        let stored = Stored::Inline(value.to_le_bytes().into());
        self.graph
            .constant_once(&name, DataType::Float, &[], &stored);
        name
    }

    fn byte(&mut self, value: u8) -> String {
        let name = format!("constants.byte_{value}");
        let stored = Stored::Inline(vec![value]);
        self.graph
            .constant_once(&name, DataType::Uint8, &[], &stored);
        name
    }
}

struct StoredBlocks {
    values: Stored,
    scales: Stored,
    zero_points: Option<Stored>,
}

fn bytes_of<T: bytemuck::NoUninit>(values: Vec<T>) -> Vec<u8> {
    bytemuck::cast_slice(&values).to_vec()
}
