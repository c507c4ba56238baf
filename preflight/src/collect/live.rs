//! How much a graph has in memory while it runs: the values between its nodes, for each row of a pass.
//!
//! The rows of a value are counted by the second dimension of the input that it is computed from, such as `sequence`; its columns follow from the shapes
//! of weights.
//! A value lives from its node to the last node that reads it.
//! Inputs count, since they are copies that are made for one pass; caches and outputs do not, which are the caller's own memory.

use std::collections::{BTreeMap, HashMap, HashSet};

use outrider_bundle::onnx::{DataType, Dimension, GraphProto, NodeProto};

/// What a value has for each row.
#[derive(Clone, Debug)]
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

/// Most bytes that are alive at once for each row, by the dimension that counts the rows.
pub fn row_bytes(graph: &GraphProto) -> BTreeMap<String, u64> {
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
    let mut alive: BTreeMap<String, u64> = BTreeMap::new();
    for row in rows.values() {
        *alive.entry(row.dimension.clone()).or_default() += row.bytes();
    }
    let given: HashSet<&str> = rows.keys().copied().collect();
    let mut most = alive.clone();
    // A value of another shape is the same memory where nobody else reads the first.
    let takes_over = |index: usize, node: &NodeProto| {
        let first = node.input.first().map_or("", String::as_str);
        is_alias(node) && !given.contains(first) && last_use.get(first) == Some(&index)
    };
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
        if let Some(row) = result(node, &rows, &constants, &constant_types) {
            for name in node.output.iter().filter(|name| !name.is_empty()) {
                let is_new = !outputs.contains(name.as_str()) && !takes_over(index, node);
                if is_new && last_use.contains_key(name.as_str()) {
                    let sum = alive.entry(row.dimension.clone()).or_default();
                    *sum = sum.saturating_add(row.bytes());
                    let most = most.entry(row.dimension.clone()).or_default();
                    *most = (*most).max(*sum);
                }
                rows.insert(name, row.clone());
            }
        }
        let read: HashSet<&str> = node.input.iter().map(String::as_str).collect();
        for name in read {
            let ends = last_use[name] == index && !given.contains(name) && !takes_over(index, node);
            if let Some(row) = rows.get(name).filter(|_| ends && !outputs.contains(name)) {
                let sum = alive.entry(row.dimension.clone()).or_default();
                *sum = sum.saturating_sub(row.bytes());
            }
        }
    }
    most
}

/// Whether a node only gives its input another shape.
fn is_alias(node: &NodeProto) -> bool {
    matches!(node.op_type.as_str(), "Reshape" | "Squeeze" | "Unsqueeze")
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
        DimensionProto, TensorProto, TensorShapeProto, TensorTypeProto, TypeProto, ValueInfoProto,
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
