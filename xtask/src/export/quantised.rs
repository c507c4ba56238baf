//! Products of quantised activations with quantised weights: integers per row and channel, and blocks.

use anyhow::Result;
use outrider_bundle::onnx::DataType;

use super::convert::{BLOCK, BlockQuantised};
use super::exporter::Exporter;
use super::graph::{Call, MICROSOFT, Stored, int, scalar_tensor, to};

/// `accuracy_level` of `MatMulNBits`: activations are quantised to 8 bits, per row and block.
const ACCURACY_LEVEL: i64 = 4;

/// Level of zero in 8-bit activations.
const ZERO_POINT: u8 = 128;

/// Blocks of weights whose bytes are stored.
#[derive(Clone, Debug)]
pub struct StoredBlocks {
    /// Values.
    pub values: Stored,
    /// One scale per block.
    pub scales: Stored,
    /// One zero point per block, unless all are the middle of the range.
    pub zero_points: Option<Stored>,
}

impl Exporter<'_> {
    /// Adds an integer product: each input row is quantised by its own largest value, so that no row sees another.
    ///
    /// Activations are unsigned with zero point 128, which is what the integer instructions of CPUs multiply with signed weights.
    /// `rows_like` is an integer value of the graph whose axes are the leading axes of the input.
    pub fn matmul_integer(
        &mut self,
        name: &str,
        [input, weight, output]: [&str; 3],
        rows_like: &'static str,
        scales: &Stored,
        [columns, rows]: [usize; 2],
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

    /// Name of a zero point for each row of a value whose leading axes are those of another; all who ask share it.
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

    /// Adds a product with weights in blocks of `bits` bits.
    pub fn matmul_blocks(
        &mut self,
        name: &str,
        [input, output]: [&str; 2],
        blocks: &StoredBlocks,
        bits: usize,
        [columns, rows]: [usize; 2],
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
        let zero_points = format!("{name}.zero_points");
        let mut inputs = vec![input, &weight, &scales];
        if let Some(stored) = &blocks.zero_points {
            let bytes = (per_row * bits).div_ceil(8);
            self.graph
                .constant(&zero_points, DataType::Uint8, &[rows, bytes], stored);
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

    /// Stores the bytes of weights in blocks.
    pub fn store_blocks(&mut self, quantised: BlockQuantised) -> Result<StoredBlocks> {
        Ok(StoredBlocks {
            values: self.graph.store(&quantised.values)?,
            scales: self.graph.store(&quantised.scales)?,
            zero_points: if quantised.zero_points.is_empty() {
                None
            } else {
                Some(self.graph.store(&quantised.zero_points)?)
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
