//! How much a graph has in memory while it runs: the values between its nodes, for each row of a pass.
//!
//! The rows of a value are counted by the second dimension of the input that it is computed from, such as `sequence`; its columns follow from the shapes
//! of weights.
//! A value lives from its node to the last node that reads it, and its memory until the last value that it is given to has ended: ONNX Runtime plans ahead
//! which value takes over the memory of an earlier one of its shape, and gives nothing back in between, so what one layer needs is kept for the next.
//! Inputs count, since they are copies that are made for one pass; caches, taps and outputs do not, which are the caller's own memory.

use std::collections::{BTreeMap, HashMap, HashSet};

use outrider_bundle::onnx::{DataType, Dimension, GraphProto, NodeProto};

/// What a value has for each row.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Row {
    /// The dimension that counts the rows.
    dimension: String,
    columns: u64,
    element_bytes: u64,
}

impl Row {
    fn bytes(&self) -> u64 {
        self.columns.saturating_mul(self.element_bytes)
    }
}

/// Memory that values of one shape have in turn.
struct Buffer {
    row: Row,
    /// The node that it is taken for.
    first: usize,
    /// The last node that reads a value in it.
    last: usize,
}

/// Most bytes that are alive at once for each row, by the dimension that counts the rows.
pub fn row_bytes(graph: &GraphProto) -> BTreeMap<String, u64> {
    let mut most: BTreeMap<String, u64> = BTreeMap::new();
    let mut alive: HashMap<String, (u128, BTreeMap<usize, u128>)> = HashMap::new();
    for Buffer { row, first, last } in plan(graph) {
        let (sum, by_last) = alive.entry(row.dimension.clone()).or_default();
        while let Some(ended) = by_last.first_entry().filter(|it| *it.key() < first) {
            *sum -= ended.remove();
        }
        let bytes = u128::from(row.bytes());
        *sum += bytes;
        *by_last.entry(last).or_default() += bytes;
        let most = most.entry(row.dimension).or_default();
        *most = (*most).max(u64::try_from(*sum).unwrap_or(u64::MAX));
    }
    most
}

/// The memory of every value, in the order in which it is taken; that of inputs is held from the first node to the last.
fn plan(graph: &GraphProto) -> Vec<Buffer> {
    let outputs: HashSet<&str> = graph.output.iter().map(|it| it.name.as_str()).collect();
    let mut constants: HashMap<&str, Vec<u64>> = HashMap::new();
    let mut constant_types = HashMap::new();
    for tensor in &graph.initializer {
        let dims = tensor
            .dims
            .iter()
            .map(|&dim| u64::try_from(dim).unwrap_or(0));
        constants.insert(&tensor.name, dims.collect());
        constant_types.insert(tensor.name.as_str(), tensor.data_type);
    }
    let mut last_use = HashMap::new();
    for (index, node) in graph.node.iter().enumerate() {
        for name in &node.input {
            last_use.insert(name.as_str(), index);
        }
    }
    let mut rows: HashMap<&str, Row> = inputs(graph).collect();
    let of_input = |row: &Row| Buffer {
        row: row.clone(),
        first: 0,
        last: graph.node.len(),
    };
    let mut buffers: Vec<Buffer> = copied_inputs(graph).map(|it| of_input(&it.1)).collect();
    let mut holders: HashMap<&str, usize> = HashMap::new();
    let mut free: HashMap<Row, Vec<usize>> = HashMap::new();
    for (index, node) in graph.node.iter().enumerate() {
        if node.op_type == "Transpose"
            && let Some(dims) = node
                .input
                .first()
                .and_then(|name| constants.get(name.as_str()))
        {
            let dims = dims.iter().rev().copied().collect();
            constants.extend(node.output.first().map(|name| (name.as_str(), dims)));
        }
        let first = node.input.first().map_or("", String::as_str);
        // A value of another shape is the same memory where nobody else reads the first.
        let taken_over = (is_alias(node) && last_use.get(first) == Some(&index))
            .then(|| holders.remove(first))
            .flatten();
        if let Some(row) = result(node, &rows, &constants, &constant_types) {
            for name in node.output.iter().filter(|name| !name.is_empty()) {
                rows.insert(name, row.clone());
                if outputs.contains(name.as_str()) || !last_use.contains_key(name.as_str()) {
                    continue;
                }
                let reused = || free.get_mut(&row).and_then(Vec::pop);
                let holder = taken_over.or_else(reused).unwrap_or_else(|| {
                    buffers.push(Buffer {
                        row: row.clone(),
                        first: index,
                        last: index,
                    });
                    buffers.len() - 1
                });
                buffers[holder].last = last_use[name.as_str()];
                holders.insert(name, holder);
            }
        }
        for name in &node.input {
            if last_use[name.as_str()] == index
                && let Some(holder) = holders.remove(name.as_str())
            {
                free.entry(buffers[holder].row.clone())
                    .or_default()
                    .push(holder);
            }
        }
    }
    buffers
}

/// Whether a node only gives its input another shape.
fn is_alias(node: &NodeProto) -> bool {
    matches!(node.op_type.as_str(), "Reshape" | "Squeeze" | "Unsqueeze")
}

/// Those that are copies made for a pass; taps are read where the target left them.
fn copied_inputs(graph: &GraphProto) -> impl Iterator<Item = (&str, Row)> {
    inputs(graph).filter(|(name, _)| *name != "taps")
}

/// Inputs `[batch, rows, …]`.
fn inputs(graph: &GraphProto) -> impl Iterator<Item = (&str, Row)> {
    let is_cache = |name: &str| name.starts_with("key_cache.") || name.starts_with("value_cache.");
    let of_pass = graph
        .input
        .iter()
        .filter(move |input| !is_cache(&input.name));
    of_pass.filter_map(|input| {
        let tensor = input.r#type.as_ref()?.tensor_type.as_ref()?;
        let dims = &tensor.shape.as_ref()?.dim;
        let Some(Dimension::Symbol(dimension)) = &dims.get(1)?.value else {
            return None;
        };
        let columns = dims[2..].iter().map(|dim| match dim.value {
            Some(Dimension::Size(size)) => u64::try_from(size).unwrap_or(1),
            _ => 1,
        });
        let row = Row {
            dimension: dimension.clone(),
            columns: columns.fold(1, u64::saturating_mul),
            element_bytes: element_bytes(tensor.elem_type),
        };
        Some((input.name.as_str(), row))
    })
}

/// What each output of a node has for each row; `None` when it has no rows of a pass.
fn result(
    node: &NodeProto,
    rows: &HashMap<&str, Row>,
    constants: &HashMap<&str, Vec<u64>>,
    constant_types: &HashMap<&str, i32>,
) -> Option<Row> {
    let read = || node.input.iter().filter_map(|name| rows.get(name.as_str()));
    let mut row = read().next()?.clone();
    let attribute = |name: &str| {
        let found = node.attribute.iter().find(|it| it.name == name);
        found.map(|it| u64::try_from(it.i).unwrap_or(0))
    };
    let product = |columns: u64, inner: u64, outer: u64| {
        let blocks = columns.checked_div(inner).unwrap_or(1);
        blocks.saturating_mul(outer)
    };
    match node.op_type.as_str() {
        "Shape" | "ConstantOfShape" => return None,
        "MatMul" | "MatMulInteger" | "FusedMatMul" => {
            let weight = constants.get(node.input.get(1)?.as_str());
            if let Some([.., first, second]) = weight.map(Vec::as_slice) {
                let (inner, outer) = if attribute("transB") == Some(1) {
                    (second, first)
                } else {
                    (first, second)
                };
                row.columns = product(row.columns, *inner, *outer);
            }
            if node.op_type == "MatMulInteger" {
                row.element_bytes = 4;
            }
        }
        "MatMulNBits" => {
            row.columns = product(row.columns, attribute("K")?, attribute("N")?);
        }
        "Gather" | "GatherND" => {
            let table = node.input.first()?.as_str();
            let indices = rows.get(node.input.get(1)?.as_str())?;
            row.dimension.clone_from(&indices.dimension);
            if let Some([_, columns @ ..]) = constants.get(table).map(Vec::as_slice) {
                row.columns = columns.iter().copied().fold(1, u64::saturating_mul);
                row.element_bytes = element_bytes(*constant_types.get(table)?);
            }
        }
        "GatherBlockQuantized" => {
            let [table, indices, scales, ..] = node.input.as_slice() else {
                return None;
            };
            row.dimension
                .clone_from(&rows.get(indices.as_str())?.dimension);
            let [_, columns @ ..] = constants.get(table.as_str())?.as_slice() else {
                return None;
            };
            // A byte of the table holds two values of 4 bits.
            let values_per_byte = 8u64.checked_div(attribute("bits").unwrap_or(4))?;
            row.columns = columns
                .iter()
                .copied()
                .fold(values_per_byte, u64::saturating_mul);
            row.element_bytes = element_bytes(*constant_types.get(scales.as_str())?);
        }
        "Split" => row.columns /= node.output.len().max(1) as u64,
        "Concat" => row.columns = read().map(|it| it.columns).fold(0, u64::saturating_add),
        "QuantizeLinear" => row.element_bytes = 1,
        "Cast" => row.element_bytes = element_bytes(i32::try_from(attribute("to")?).ok()?),
        name if name.starts_with("Reduce") => row.columns = 1,
        _ => {}
    }
    Some(row)
}

fn element_bytes(data_type: i32) -> u64 {
    match DataType::try_from(data_type) {
        Ok(DataType::Uint8 | DataType::Int8 | DataType::Bool) => 1,
        Ok(DataType::Float16 | DataType::Bfloat16) => 2,
        Ok(DataType::Int64 | DataType::Double) => 8,
        _ => 4,
    }
}

#[cfg(test)]
mod tests {
    use outrider_bundle::onnx::{
        AttributeProto, DimensionProto, TensorProto, TensorShapeProto, TensorTypeProto, TypeProto,
        ValueInfoProto,
    };

    use super::*;

    fn value(name: &str, data_type: DataType, rows: &str, columns: &[i64]) -> ValueInfoProto {
        let named = |name: &str| Dimension::Symbol(name.to_owned());
        let sizes = columns.iter().map(|&size| Dimension::Size(size));
        let dims = [named("batch"), named(rows)].into_iter().chain(sizes);
        ValueInfoProto {
            name: name.to_owned(),
            r#type: Some(TypeProto {
                tensor_type: Some(TensorTypeProto {
                    elem_type: data_type.into(),
                    shape: Some(TensorShapeProto {
                        dim: dims
                            .map(|dim| DimensionProto { value: Some(dim) })
                            .collect(),
                    }),
                }),
            }),
        }
    }

    fn node(op_type: &str, inputs: &[&str], outputs: &[&str]) -> NodeProto {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        NodeProto {
            input: owned(inputs),
            output: owned(outputs),
            op_type: op_type.to_owned(),
            ..NodeProto::default()
        }
    }

    fn weight(name: &str, data_type: DataType, dims: &[i64]) -> TensorProto {
        TensorProto {
            name: name.to_owned(),
            dims: dims.to_vec(),
            data_type: data_type.into(),
            ..TensorProto::default()
        }
    }

    /// Tokens are looked up in a table of 8 columns, widened to 32, halved, and a row for each index is multiplied with the table of 100 tokens.
    fn graph() -> GraphProto {
        GraphProto {
            input: vec![
                value("ids", DataType::Int64, "sequence", &[]),
                value("indices", DataType::Int64, "n", &[]),
                value("key_cache.0", DataType::Float, "max", &[1000]),
            ],
            initializer: vec![
                weight("table", DataType::Float, &[100, 8]),
                weight("wide", DataType::Float, &[8, 32]),
            ],
            node: vec![
                node("Gather", &["table", "ids"], &["hidden"]),
                node("MatMul", &["hidden", "wide"], &["product"]),
                node("Reshape", &["product", "shape"], &["shaped"]),
                node("Split", &["shaped"], &["left", "right"]),
                node("Mul", &["left", "right"], &["narrow"]),
                node("GatherND", &["narrow", "indices"], &["chosen"]),
                node("Transpose", &["table"], &["columns"]),
                node("MatMulInteger", &["chosen", "unknown"], &["same"]),
                node("Abs", &["same"], &["magnitude"]),
                node("MatMul", &["magnitude", "columns"], &["logits"]),
            ],
            output: vec![value("logits", DataType::Float, "n", &[100])],
            ..GraphProto::default()
        }
    }

    #[test]
    fn values_count_from_where_they_are_made_to_where_they_are_last_read() {
        let found = row_bytes(&graph());
        // The wide product beside its two halves, and the ids.
        assert_eq!(found["sequence"], 8 + 128 + 64 + 64);
        // Two values of 16 columns, and the indices; logits are the caller's.
        assert_eq!(found["n"], 8 + 64 + 64);
        assert_eq!(found.len(), 2, "caches are the caller's: {found:?}");
    }

    #[test]
    fn memory_that_a_later_value_of_the_same_shape_takes_over_is_kept_in_between() {
        let mut graph = graph();
        graph
            .initializer
            .push(weight("narrow", DataType::Float, &[32, 8]));
        graph.node.truncate(2);
        graph.node.extend([
            node("Abs", &["product"], &["magnitude"]),
            node("MatMul", &["magnitude", "narrow"], &["hidden_again"]),
            node("MatMul", &["hidden_again", "wide"], &["end"]),
        ]);
        let found = row_bytes(&graph);
        // The first hidden values are read no more while both wide ones are there.
        assert_eq!(found["sequence"], 8 + 32 + 128 + 128);
        graph.node.truncate(3);
        graph.node.push(node("Abs", &["magnitude"], &["end"]));
        assert_eq!(row_bytes(&graph)["sequence"], 8 + 128 + 128);
    }

    #[test]
    fn rows_of_a_table_of_blocks_are_as_wide_as_their_values() {
        for (bits, bytes) in [(4, 64), (8, 32)] {
            let mut graph = graph();
            let mut gather = node(
                "GatherBlockQuantized",
                &["packed", "ids", "scales"],
                &["hidden"],
            );
            gather.attribute.push(AttributeProto {
                name: "bits".to_owned(),
                i: bits,
                ..AttributeProto::default()
            });
            graph.initializer.extend([
                weight("packed", DataType::Uint8, &[100, 8]),
                weight("scales", DataType::Float, &[100, 1]),
            ]);
            graph.node = vec![gather, node("Abs", &["hidden"], &["end"])];
            assert_eq!(row_bytes(&graph)["sequence"], 8 + bytes, "{bits} bits");
        }
    }

    #[test]
    fn taps_are_read_where_the_target_left_them() {
        let mut graph = graph();
        graph
            .input
            .push(value("taps", DataType::Float, "context", &[64]));
        graph.node = vec![
            node("Abs", &["taps"], &["magnitude"]),
            node("Abs", &["magnitude"], &["end"]),
        ];
        assert_eq!(row_bytes(&graph)["context"], 256);
    }

    #[test]
    fn logits_that_are_scaled_after_an_integer_product_count_for_each_row() {
        let mut graph = graph();
        graph.node.pop();
        for added in [
            node("MatMulInteger", &["magnitude", "columns"], &["integers"]),
            node("Mul", &["integers", "scale"], &["scaled"]),
            node("Mul", &["scaled", "scale"], &["logits"]),
        ] {
            graph.node.push(added);
        }
        let found = row_bytes(&graph);
        // Blocks of 8 of the 16 columns are multiplied one by one.
        assert_eq!(found["n"], 8 + 800 + 800);
    }
}
