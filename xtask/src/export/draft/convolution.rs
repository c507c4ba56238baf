//! Grouped dynamic causal convolution over the rows of a block (DFlash 2), in the two forms that a graph can have.
//!
//! `y[i,c] = sum over taps t of (base[t,c] + d[i,t,group of c]) * x[i-t,c]`, where rows before the anchor count as zero. One projection of the
//! part's input gives the coefficients `d` of both sides.

use anyhow::Result;
use outrider_bundle::manifest::Attention;

use super::{BATCH, BLOCK, BLOCK_ROWS, Drafter};
use crate::checkpoint::Dflash2;
use crate::export::graph::{Call, Dim, OUTRIDER, int};
use crate::export::linear::{Linear, Reads};

/// Which side of a part of a layer is convolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// What the part reads.
    Before = 0,
    /// What it gives.
    After = 1,
}

/// The convolutions of one part of one layer; empty in a draft that has none.
pub struct Convolution {
    sizes: Option<Dflash2>,
    layer: usize,
    part: &'static str,
    coefficients: String,
    base: String,
}

impl Drafter<'_> {
    /// Adds the coefficients of both sides of a part, `attention` or `mlp`, that reads `normed`.
    pub fn convolution(
        &mut self,
        layer: usize,
        part: &'static str,
        normed: &str,
    ) -> Result<Convolution> {
        let hidden = self.config.hidden_size;
        let mut convolution = Convolution {
            sizes: self.config.dflash2,
            layer,
            part,
            coefficients: String::new(),
            base: format!("layers.{layer}.{part}_conv.base_kernel"),
        };
        let Some(Dflash2 {
            conv_kernel_size: taps,
            conv_group_size,
            ..
        }) = self.config.dflash2
        else {
            return Ok(convolution);
        };
        let groups = hidden / conv_group_size;
        let base = &convolution.base;
        let dims = [2, taps, hidden];
        let values = self.exporter.tensors.take(base, &dims)?;
        self.exporter.float_constant(base, &values, &dims)?;
        let width = 2 * taps * groups;
        let projection = Linear {
            name: format!("layers.{layer}.{part}.convolution"),
            weights: vec![(
                format!("layers.{layer}.{part}_conv.kernel_projection.weight"),
                width,
            )],
            biases: Vec::new(),
            columns: hidden,
            rows_like: BLOCK_ROWS,
            reads: Reads::Plain,
            writes_residual: false,
            // Every value of a row is multiplied with one of these few.
            keeps_float: true,
        };
        convolution.coefficients = self.exporter.linear(normed, &projection)?;
        let stage = format!("l{layer}.{}_conv_dyn", stage_name(part));
        let coefficients = convolution.coefficients.clone();
        self.block_stage(&stage, &coefficients, width);
        Ok(convolution)
    }

    /// Convolves one side of a part; without convolutions that is the value itself.
    pub fn convolve(
        &mut self,
        convolution: &Convolution,
        side: Side,
        input: &str,
    ) -> Result<String> {
        let Some(sizes) = convolution.sizes else {
            return Ok(input.to_owned());
        };
        let (Convolution { layer, part, .. }, side_name) = (
            convolution,
            match side {
                Side::Before => "in",
                Side::After => "out",
            },
        );
        let name = format!("layers.{layer}.{part}.convolved_{side_name}");
        match self.options.form {
            Attention::Native => self.native_convolution(&name, convolution, sizes, side, input),
            Attention::Portable => {
                self.portable_convolution(&name, convolution, sizes, side, input)
            }
        }
        let stage = format!("l{layer}.{}_conv_{side_name}", stage_name(part));
        self.block_stage(&stage, &name, self.config.hidden_size);
        Ok(name)
    }

    fn native_convolution(
        &mut self,
        name: &str,
        convolution: &Convolution,
        sizes: Dflash2,
        side: Side,
        input: &str,
    ) {
        self.exporter.graph.call(Call {
            domain: OUTRIDER,
            op_type: "GroupedDynamicConv",
            inputs: &[input, &convolution.coefficients, &convolution.base],
            outputs: &[name],
            attributes: vec![
                int("group_size", sizes.conv_group_size as i64),
                int("side", side as i64),
            ],
        });
        let element = self.exporter.element;
        let dims = [BATCH, BLOCK, Dim::Fixed(self.config.hidden_size)];
        self.exporter.graph.value(name, element, &dims);
    }

    fn portable_convolution(
        &mut self,
        name: &str,
        convolution: &Convolution,
        sizes: Dflash2,
        side: Side,
        input: &str,
    ) {
        let (taps, group_size) = (sizes.conv_kernel_size, sizes.conv_group_size);
        let hidden = self.config.hidden_size;
        let groups = hidden / group_size;
        let graph = &mut self.exporter.graph;
        let part = |part: &str| format!("{name}.{part}");
        let [zero, one] = [0, 1].map(|value| graph.ints(&[value]));
        let rows = graph.node(
            &part("rows"),
            "Shape",
            &[input],
            vec![int("start", 1), int("end", 2)],
        );
        let cut = graph.ints(&[0, 0, groups as i64, group_size as i64]);
        let joined = graph.ints(&[0, 0, hidden as i64]);
        let base_shape = graph.ints(&[groups as i64, group_size as i64]);
        let last = graph.ints(&[-1]);
        let mut sum = String::new();
        for tap in 0..taps {
            let part = |part: &str| format!("{name}.{part}_{tap}");
            let column = (side as usize * taps + tap) * groups;
            let bounds = [column, column + groups].map(|bound| graph.ints(&[bound as i64]));
            let coefficients = graph.node(
                &part("coefficients"),
                "Slice",
                &[&convolution.coefficients, &bounds[0], &bounds[1], &last],
                vec![],
            );
            let coefficients = graph.node(
                &part("coefficients_4d"),
                "Unsqueeze",
                &[&coefficients, &last],
                vec![],
            );
            let index = [side as i64, tap as i64].map(|index| graph.int(index));
            let base = graph.node(
                &part("base_of_side"),
                "Gather",
                &[&convolution.base, &index[0]],
                vec![int("axis", 0)],
            );
            let base = graph.node(
                &part("base"),
                "Gather",
                &[&base, &index[1]],
                vec![int("axis", 0)],
            );
            let base = graph.node(&part("base_2d"), "Reshape", &[&base, &base_shape], vec![]);
            let kernel = graph.node(&part("kernel"), "Add", &[&coefficients, &base], vec![]);
            let mut shifted = input.to_owned();
            if tap > 0 {
                // Rows of zeros before the anchor's; there is no `Pad` for every element type.
                let count = graph.ints(&[tap as i64]);
                let first = graph.node(
                    &part("first"),
                    "Slice",
                    &[input, &zero, &count, &one],
                    vec![],
                );
                let zeros = graph.node(&part("zeros"), "Sub", &[&first, &first], vec![]);
                let longer = graph.node(
                    &part("longer"),
                    "Concat",
                    &[&zeros, input],
                    vec![int("axis", 1)],
                );
                shifted = graph.node(
                    &part("shifted"),
                    "Slice",
                    &[&longer, &zero, &rows, &one],
                    vec![],
                );
            }
            let shifted = graph.node(&part("grouped"), "Reshape", &[&shifted, &cut], vec![]);
            let product = graph.node(&part("product"), "Mul", &[&kernel, &shifted], vec![]);
            sum = match tap {
                0 => product,
                _ => graph.node(&part("sum"), "Add", &[&sum, &product], vec![]),
            };
        }
        graph.node(name, "Reshape", &[&sum, &joined], vec![]);
    }
}

fn stage_name(part: &str) -> &str {
    match part {
        "attention" => "attn",
        other => other,
    }
}
