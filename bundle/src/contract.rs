//! Whether a graph is what the manifest says and what an engine can drive.
//!
//! The target graph contract (B sequences, S rows, MAX cache rows, n rows with logits, V vocabulary, KV heads of size D, T taps of H):
//!
//! | input | type | shape |
//! | --- | --- | --- |
//! | `input_ids` | int64 | `[B,S]` |
//! | `position_ids` | int64 | `[B,S]` |
//! | `key_cache.N`, `value_cache.N` for each layer N | the KV type | `[B,MAX,KV*D]` |
//! | `write_indices` | int64 | `[B]`, the cache row of each sequence's first new token |
//! | `nonpad_kv_seqlen` | int64 | `[B]`, valid cache rows of each sequence, the new ones included |
//! | `logit_indices` | int64 | `[B,n]`, which of the S rows get logits |
//!
//! | output | type | shape |
//! | --- | --- | --- |
//! | `logits` | float32 | `[B,n,V]` |
//! | `updated_key_cache.N`, `updated_value_cache.N` | the KV type | `[B,MAX,KV*D]` |
//! | `aux_hidden_states`, when there are taps | float32 | `[B,S,T*H]` |
//!
//! B, S, MAX and n are free: a graph that fixes one of them can't be stepped at the widths an engine chooses.
//!
//! The draft graph contract is in [`draft`].

pub mod draft;

use std::collections::BTreeMap;

use crate::facts::{Dim, GraphFacts, STANDARD_DOMAIN, ValueFacts, external_path};
use crate::manifest::{Attention, FileEntry, TargetFacts};
use crate::paths::{PathError, check_relative};

/// Domain of Outrider's own operators.
pub const OUTRIDER_DOMAIN: &str = "outrider";

/// One way in which a graph isn't what it has to be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FactError {
    /// An input of the contract isn't there.
    #[error("the graph has no input `{name}`, expected {expected}")]
    MissingInput {
        /// The input.
        name: String,
        /// Type and shape it must have.
        expected: String,
    },
    /// An output of the contract isn't there.
    #[error("the graph has no output `{name}`, expected {expected}")]
    MissingOutput {
        /// The output.
        name: String,
        /// Type and shape it must have.
        expected: String,
    },
    /// The graph wants an input that no engine feeds.
    #[error("the graph has an input `{name}` that is not in the contract")]
    UnknownInput {
        /// The input.
        name: String,
    },
    /// The graph has an output that nobody takes.
    #[error(
        "the graph has an output `{name}` that is not in the contract or not in the manifest's facts"
    )]
    UnknownOutput {
        /// The output.
        name: String,
    },
    /// An input or output has another type or shape.
    #[error("`{name}` is {actual}, expected {expected}")]
    WrongType {
        /// The input or output.
        name: String,
        /// Its type and shape in the graph.
        actual: String,
        /// Type and shape it must have.
        expected: String,
    },
    /// The graph says something else about itself than the manifest.
    #[error("the graph's metadata has {key} = {actual:?}, the manifest says {expected:?}")]
    Metadata {
        /// The key.
        key: String,
        /// What the graph says; empty when it says nothing.
        actual: String,
        /// What the manifest says.
        expected: String,
    },
    /// The attention nodes aren't those the manifest names.
    #[error("the graph has {actual} `{op}` nodes, expected {expected}")]
    WrongOpCount {
        /// The operator with its domain.
        op: String,
        /// How often the graph has it.
        actual: u64,
        /// How often it must.
        expected: u64,
    },
    /// The graph was written for another version of an operator set.
    #[error("the graph imports `{domain}` version {actual}, expected at least {minimum}")]
    Opset {
        /// The operator domain.
        domain: String,
        /// The version in the graph, 0 when it imports none.
        actual: i64,
        /// The lowest that has the operators it must use.
        minimum: i64,
    },
    /// Weights are in a place that can't be in a bundle.
    #[error("the graph has weights in {location:?}: the path {problem}")]
    ExternalPath {
        /// The path in the graph.
        location: String,
        /// What is wrong with it.
        problem: PathError,
    },
    /// Weights are in a file that the manifest doesn't list.
    #[error("the graph has weights in {path:?}, which the manifest doesn't list")]
    ExternalUnlisted {
        /// The path in the bundle.
        path: String,
    },
    /// Weights are beyond the end of their file.
    #[error(
        "the graph has weights up to byte {needed_bytes} of {path:?}, which has {actual_bytes}"
    )]
    ExternalShort {
        /// The path in the bundle.
        path: String,
        /// Bytes the file must have.
        needed_bytes: u64,
        /// Bytes it has.
        actual_bytes: u64,
    },
}

/// A dimension of the contract: free, with the name people know it by, or one size.
enum Expected {
    Free(&'static str),
    Fixed(usize),
}

/// Type and shape of one input or output of the contract.
struct Value {
    name: String,
    dtype: String,
    dims: Vec<Expected>,
}

impl Value {
    fn new(name: impl Into<String>, dtype: &str, dims: Vec<Expected>) -> Self {
        Self {
            name: name.into(),
            dtype: dtype.to_owned(),
            dims,
        }
    }

    fn text(&self) -> String {
        let dims: Vec<_> = self
            .dims
            .iter()
            .map(|dim| match dim {
                Expected::Free(name) => (*name).to_owned(),
                Expected::Fixed(size) => size.to_string(),
            })
            .collect();
        format!("{} [{}]", self.dtype, dims.join(","))
    }

    fn agrees(&self, actual: &ValueFacts) -> bool {
        let Some(dims) = &actual.shape else {
            return false;
        };
        let dim_agrees = |(expected, actual): (&Expected, &Dim)| match (expected, actual) {
            (Expected::Free(_), Dim::Symbol(_) | Dim::Unknown) => true,
            (Expected::Fixed(expected), Dim::Size(actual)) => {
                usize::try_from(*actual) == Ok(*expected)
            }
            _ => false,
        };
        actual.dtype == self.dtype
            && dims.len() == self.dims.len()
            && self.dims.iter().zip(dims).all(dim_agrees)
    }
}

/// Inputs and outputs that the contract demands of a target with these facts.
fn contract(target: &TargetFacts) -> (Vec<Value>, Vec<Value>) {
    use Expected::{Fixed, Free};
    let cache = |name: String| {
        let width = target.kv_heads * target.head_dim;
        Value::new(
            name,
            &target.kv_dtype,
            vec![Free("B"), Free("MAX"), Fixed(width)],
        )
    };
    let mut inputs = vec![
        Value::new("input_ids", "int64", vec![Free("B"), Free("S")]),
        Value::new("position_ids", "int64", vec![Free("B"), Free("S")]),
        Value::new("write_indices", "int64", vec![Free("B")]),
        Value::new("nonpad_kv_seqlen", "int64", vec![Free("B")]),
        Value::new("logit_indices", "int64", vec![Free("B"), Free("n")]),
    ];
    let mut outputs = vec![Value::new(
        "logits",
        "float32",
        vec![Free("B"), Free("n"), Fixed(target.vocab_size)],
    )];
    for layer in 0..target.layers {
        inputs.extend([
            cache(format!("key_cache.{layer}")),
            cache(format!("value_cache.{layer}")),
        ]);
        outputs.extend([
            cache(format!("updated_key_cache.{layer}")),
            cache(format!("updated_value_cache.{layer}")),
        ]);
    }
    if !target.taps.is_empty() {
        let width = target.taps.len() * target.hidden_size;
        outputs.push(Value::new(
            "aux_hidden_states",
            "float32",
            vec![Free("B"), Free("S"), Fixed(width)],
        ));
    }
    (inputs, outputs)
}

/// Checks a target graph against the contract and against the facts of a manifest; all errors at once.
pub fn check_target(target: &TargetFacts, graph: &GraphFacts) -> Result<(), Vec<FactError>> {
    let mut errors = interface_errors(contract(target), graph);
    let op = match target.attention {
        Attention::Native => "CachedAttention",
        Attention::Portable => "Attention",
    };
    check_ops(target.attention, graph, &[(op, target.layers)], &mut errors);
    if errors.is_empty() {
        Ok(())
    } else {
        Err(errors)
    }
}

/// Every way in which inputs and outputs aren't those of a contract.
fn interface_errors(
    (inputs, outputs): (Vec<Value>, Vec<Value>),
    graph: &GraphFacts,
) -> Vec<FactError> {
    let mut errors = Vec::new();
    let missing_input = |name, expected| FactError::MissingInput { name, expected };
    let missing_output = |name, expected| FactError::MissingOutput { name, expected };
    compare(
        &inputs,
        &graph.inputs,
        missing_input,
        |name| FactError::UnknownInput { name },
        &mut errors,
    );
    compare(
        &outputs,
        &graph.outputs,
        missing_output,
        |name| FactError::UnknownOutput { name },
        &mut errors,
    );
    errors
}

fn compare(
    expected: &[Value],
    actual: &[ValueFacts],
    missing: impl Fn(String, String) -> FactError,
    unknown: impl Fn(String) -> FactError,
    errors: &mut Vec<FactError>,
) {
    let mut rest: BTreeMap<&str, &ValueFacts> = actual
        .iter()
        .map(|value| (value.name.as_str(), value))
        .collect();
    for expected in expected {
        match rest.remove(expected.name.as_str()) {
            None => errors.push(missing(expected.name.clone(), expected.text())),
            Some(actual) if !expected.agrees(actual) => errors.push(FactError::WrongType {
                name: expected.name.clone(),
                actual: format!("{} {}", actual.dtype, actual.shape_text()),
                expected: expected.text(),
            }),
            Some(_) => {}
        }
    }
    errors.extend(rest.into_keys().map(|name| unknown(name.to_owned())));
}

/// Every operator in which the two forms of a graph differ.
const FORM_OPS: [(&str, &str); 5] = [
    (OUTRIDER_DOMAIN, "CachedAttention"),
    (OUTRIDER_DOMAIN, "BlockAttention"),
    (OUTRIDER_DOMAIN, "GroupedDynamicConv"),
    (OUTRIDER_DOMAIN, "PathSelector"),
    (STANDARD_DOMAIN, "Attention"),
];

/// Checks that the operators in which the forms differ come as often as `expected` says, and those it doesn't name never.
fn check_ops(
    form: Attention,
    graph: &GraphFacts,
    expected: &[(&str, usize)],
    errors: &mut Vec<FactError>,
) {
    let (domain, minimum) = match form {
        Attention::Native => (OUTRIDER_DOMAIN, 1),
        // `Attention` over a static cache and `TensorScatter` came with version 24.
        Attention::Portable => (STANDARD_DOMAIN, 24),
    };
    for (op_domain, op_type) in FORM_OPS {
        let wanted = expected
            .iter()
            .find(|(op, _)| op_domain == domain && *op == op_type);
        let expected = wanted.map_or(0, |(_, count)| *count as u64);
        let actual = graph.op_count(op_domain, op_type);
        if actual != expected {
            errors.push(FactError::WrongOpCount {
                op: format!("{op_domain}.{op_type}"),
                actual,
                expected,
            });
        }
    }
    let actual = graph.opsets.get(domain).copied().unwrap_or(0);
    if actual < minimum {
        errors.push(FactError::Opset {
            domain: domain.to_owned(),
            actual,
            minimum,
        });
    }
}

/// Checks that every external file of a graph is a listed file of the bundle and long enough. `graph_path` is the graph's own path in the bundle.
pub fn check_external_files(
    graph_path: &str,
    graph: &GraphFacts,
    files: &BTreeMap<String, FileEntry>,
) -> Result<(), Vec<FactError>> {
    let mut errors = Vec::new();
    for (location, &needed_bytes) in &graph.external_files {
        if let Err(problem) = check_relative(location) {
            errors.push(FactError::ExternalPath {
                location: location.clone(),
                problem,
            });
            continue;
        }
        let path = external_path(graph_path, location);
        match files.get(&path) {
            None => errors.push(FactError::ExternalUnlisted { path }),
            Some(entry) if entry.size_bytes < needed_bytes => {
                errors.push(FactError::ExternalShort {
                    path,
                    needed_bytes,
                    actual_bytes: entry.size_bytes,
                });
            }
            Some(_) => {}
        }
    }
    if errors.is_empty() {
        Ok(())
    } else {
        Err(errors)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use prost::Message;

    use super::*;
    use crate::onnx::{Dimension, GraphProto, ModelProto, NodeProto, OperatorSetIdProto};
    use crate::testing::{sample_graph, sample_manifest, sample_target};

    /// Errors of the sample graph after a change.
    fn errors(
        change: impl FnOnce(&mut ModelProto, &mut GraphProto, &mut TargetFacts),
    ) -> Vec<String> {
        let (mut model, mut target) = (sample_graph(), sample_target());
        let mut graph = model.graph.take().unwrap();
        change(&mut model, &mut graph, &mut target);
        model.graph = Some(graph);
        let facts = GraphFacts::from_stream(Cursor::new(model.encode_to_vec())).unwrap();
        let mut errors = check_target(&target, &facts).err().unwrap_or_default();
        errors.extend(
            check_external_files(&target.graph, &facts, &sample_manifest().files)
                .err()
                .unwrap_or_default(),
        );
        errors.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_graph_as_the_contract_has_it_passes() {
        assert_eq!(errors(|_, _, _| {}), [""; 0]);
    }

    #[test]
    fn a_missing_input_or_output_is_named_with_its_type() {
        for index in 0..9 {
            let mut name = String::new();
            let errors = errors(|_, graph, _| name = graph.input.remove(index).name);
            assert_eq!(errors.len(), 1);
            assert!(
                errors[0].starts_with(&format!("the graph has no input `{name}`, expected ")),
                "{}",
                errors[0]
            );
        }
        for index in 0..6 {
            let mut name = String::new();
            let errors = errors(|_, graph, _| name = graph.output.remove(index).name);
            assert_eq!(errors.len(), 1);
            assert!(
                errors[0].starts_with(&format!("the graph has no output `{name}`, expected ")),
                "{}",
                errors[0]
            );
        }
    }

    #[test]
    fn every_disagreement_is_reported_at_once() {
        let errors = errors(|model, graph, target| {
            graph.input.retain(|input| input.name != "logit_indices");
            graph.input[0].r#type = graph.output[0].r#type.clone();
            graph.input.push(graph.input[1].clone());
            graph.input.last_mut().unwrap().name = "attention_mask".to_owned();
            graph.output[1]
                .r#type
                .as_mut()
                .unwrap()
                .tensor_type
                .as_mut()
                .unwrap()
                .shape = None;
            graph.node.retain(|node| node.op_type != "Attention");
            graph.node.push(NodeProto {
                op_type: "Attention".to_owned(),
                ..NodeProto::default()
            });
            model.opset_import[0].version = 23;
            target.kv_dtype = "float16".to_owned();
        });
        insta::assert_snapshot!(errors.join("\n"));
    }

    #[test]
    fn a_fixed_batch_is_refused() {
        let errors = errors(|_, graph, _| {
            let shape = graph.input[0]
                .r#type
                .as_mut()
                .unwrap()
                .tensor_type
                .as_mut()
                .unwrap()
                .shape
                .as_mut()
                .unwrap();
            shape.dim[0].value = Some(Dimension::Size(1));
        });
        assert_eq!(
            errors,
            ["`input_ids` is int64 [1,sequence], expected int64 [B,S]"]
        );
    }

    #[test]
    fn taps_of_graph_and_manifest_must_agree() {
        let expected = "the graph has an output `aux_hidden_states` that is not in the contract or not in the manifest's facts";
        assert_eq!(errors(|_, _, target| target.taps.clear()), [expected]);
        let one_tap = errors(|_, _, target| target.taps = vec![1]);
        assert_eq!(
            one_tap,
            ["`aux_hidden_states` is float32 [batch,sequence,32], expected float32 [B,S,16]"]
        );
    }

    #[test]
    fn attention_form_of_graph_and_manifest_must_agree() {
        let errors = errors(|_, _, target| target.attention = Attention::Native);
        assert_eq!(
            errors,
            [
                "the graph has 0 `outrider.CachedAttention` nodes, expected 2",
                "the graph has 2 `ai.onnx.Attention` nodes, expected 0",
                "the graph imports `outrider` version 0, expected at least 1",
            ]
        );
    }

    #[test]
    fn a_native_graph_passes() {
        let errors = errors(|model, graph, target| {
            graph.node.clear();
            for _ in 0..2 {
                let domain = OUTRIDER_DOMAIN.to_owned();
                graph.node.push(NodeProto {
                    op_type: "CachedAttention".to_owned(),
                    domain,
                    ..NodeProto::default()
                });
            }
            model.opset_import.push(OperatorSetIdProto {
                domain: OUTRIDER_DOMAIN.to_owned(),
                version: 1,
            });
            target.attention = Attention::Native;
        });
        assert_eq!(errors, [""; 0]);
    }

    #[test]
    fn weights_outside_the_manifest_are_refused() {
        for (location, offset, expected) in [
            (
                "other.data",
                "0",
                "the graph has weights in \"other.data\", which the manifest doesn't list",
            ),
            (
                "../model.onnx.data",
                "0",
                "the graph has weights in \"../model.onnx.data\": the path leaves the directory by `..`",
            ),
            (
                "/dev/zero",
                "0",
                "the graph has weights in \"/dev/zero\": the path is absolute, must be relative",
            ),
            (
                "model.onnx.data",
                "1",
                "the graph has weights up to byte 5001 of \"model.onnx.data\", which has 5000",
            ),
        ] {
            let errors = errors(|_, graph, _| {
                graph.initializer[0].external_data[0].value = location.to_owned();
                graph.initializer[0].external_data[1].value = offset.to_owned();
            });
            assert_eq!(errors, [expected]);
        }
    }
}
