//! Reads a bundle: manifest, files and graphs.

use std::fs::{self, File};
use std::io::Read as _;
use std::path::Path;
use std::time::Duration;

use outrider_bundle::facts::{Dim, GraphFacts as Structure};
use outrider_bundle::manifest::FILE_NAME;
use outrider_bundle::onnx::{DataType, GraphProto, ModelProto, NodeProto, TensorProto};
use outrider_bundle::verify::BundleError;
use outrider_bundle::{Manifest, VerifiedBundle};
use outrider_server::loader;
use prost::Message as _;

use super::{FILE_LIMIT, child, live};
use crate::facts::Reading;
use crate::facts::bundle::{BundleFacts, Cache, Depth, GraphFacts};

/// Largest graph whose nodes are read; weights of larger ones are inside the file, and are not worth the memory.
const MAX_GRAPH_BYTES: u64 = 256 << 20;

/// Most nodes that are named as a fault.
const MAX_NAMED_NODES: usize = 8;

/// Slowest reading of a bundle that is waited for: a disk that is slower, or a file that never comes, is a fault.
const SLOWEST_BYTES_PER_SECOND: u64 = 4 << 20;

/// Reads the bundle in `dir`; `quick` looks at sizes and headers only.
pub fn collect(dir: &Path, quick: bool) -> BundleFacts {
    let unusable = |reason| BundleFacts {
        manifest: Reading::Unknown(reason),
        ..BundleFacts::default()
    };
    let load = {
        let dir = dir.to_owned();
        move || Manifest::load(&dir)
    };
    let manifest = match child::within(FILE_LIMIT, load) {
        Ok(Ok(manifest)) => manifest,
        Ok(Err(error)) => return unusable(error.lines().join("\n")),
        Err(error) => return unusable(format!("{FILE_NAME}: {error}")),
    };
    let bytes = manifest.files.values().map(|file| file.size_bytes);
    let bytes = bytes.fold(0, u64::saturating_add);
    let limit = FILE_LIMIT + Duration::from_secs(bytes / SLOWEST_BYTES_PER_SECOND);
    let read = {
        let (dir, manifest) = (dir.to_owned(), manifest.clone());
        move || of_files(&dir, manifest, quick)
    };
    child::within(limit, read).unwrap_or_else(|error| BundleFacts {
        target_faults: vec![format!("its files could not be read: {error}")],
        digest: Reading::Known(manifest.digest()),
        manifest: Reading::Known(manifest),
        ..BundleFacts::default()
    })
}

fn of_files(dir: &Path, manifest: Manifest, quick: bool) -> BundleFacts {
    let lines = |fault: &BundleError| fault.lines();
    let (depth, of_draft) = if quick {
        let inspected = VerifiedBundle::inspect(dir);
        (
            Depth::Sizes,
            inspected.map(|fault| fault.as_ref().map(lines)),
        )
    } else {
        let opened = VerifiedBundle::open_target(dir);
        let of_draft = opened.map(|bundle| bundle.draft_fault().map(lines));
        (Depth::Digests, of_draft)
    };
    let (draft_faults, target_faults) = match of_draft {
        Ok(of_draft) => (
            of_draft.unwrap_or_default(),
            text_fault(dir, &manifest).into_iter().collect(),
        ),
        Err(of_target) => (Vec::new(), of_target.lines()),
    };
    let graph = |path: &str| read_graph(&dir.join(path)).into();
    BundleFacts {
        depth,
        digest: Reading::Known(manifest.digest()),
        target_faults,
        draft_faults,
        target: graph(&manifest.target.graph),
        draft: manifest.draft.as_ref().map(|draft| graph(&draft.graph)),
        manifest: Reading::Known(manifest),
    }
}

/// Why the server could not use the tokenizer or the template, in its own words.
fn text_fault(dir: &Path, manifest: &Manifest) -> Option<String> {
    let read = |file: &str| {
        fs::read(dir.join(file)).map_err(|error| format!("cannot read {file}: {error}"))
    };
    loader::text_of(manifest, read).err()
}

/// Reads the facts of a graph.
pub fn read_graph(path: &Path) -> Result<GraphFacts, String> {
    // Anything else might never end, and is a fault of the bundle already.
    if !fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_file()) {
        return Err(format!("{} is no plain file", path.display()));
    }
    let structure =
        Structure::read(path).map_err(|error| format!("{:#}", anyhow::Error::new(error)))?;
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(MAX_GRAPH_BYTES + 1).read_to_end(&mut bytes))
        .map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    if bytes.len() as u64 > MAX_GRAPH_BYTES {
        return Err(format!(
            "{} is larger than {MAX_GRAPH_BYTES} bytes: its weights are not in files of their own",
            path.display()
        ));
    }
    let model = ModelProto::decode(bytes.as_slice())
        .map_err(|error| format!("{} is no ONNX model: {error}", path.display()))?;
    Ok(facts_of(&structure, model.graph.unwrap_or_default()))
}

fn facts_of(structure: &Structure, graph: GraphProto) -> GraphFacts {
    let cache = |input: &outrider_bundle::facts::ValueFacts| {
        let is_cache = ["key_cache.", "value_cache."]
            .iter()
            .any(|prefix| input.name.starts_with(prefix));
        is_cache.then(|| Cache {
            name: input.name.clone(),
            row_bytes: row_bytes(input),
        })
    };
    let columns = |name: &str| {
        let output = structure.outputs.iter().find(|output| output.name == name);
        match output.and_then(|output| output.shape.as_ref()?.last()) {
            Some(Dim::Size(size)) => u64::try_from(*size).unwrap_or(0),
            _ => 0,
        }
    };
    let sizes = graph.initializer.iter().map(tensor_bytes);
    let mixing = graph.node.iter().filter(|node| mixes_rows(node));
    GraphFacts {
        initializer_bytes: sizes.fold(0, u64::saturating_add),
        caches: structure.inputs.iter().filter_map(cache).collect(),
        logits_columns: columns("logits"),
        tap_columns: columns("aux_hidden_states"),
        live_row_bytes: live::row_bytes(&graph),
        ops: structure.ops.clone(),
        row_mixing_nodes: mixing
            .map(|node| format!("{} {}", node.op_type, node.name).trim().to_owned())
            .take(MAX_NAMED_NODES)
            .collect(),
    }
}

/// Bytes of a row of a cache `[batch, rows, columns]`.
fn row_bytes(input: &outrider_bundle::facts::ValueFacts) -> Option<u64> {
    let element_bytes = match input.dtype.as_str() {
        "float32" => 4,
        "float16" | "bfloat16" => 2,
        _ => return None,
    };
    match input.shape.as_ref()?.last()? {
        Dim::Size(columns) => u64::try_from(*columns)
            .ok()
            .map(|columns| columns.saturating_mul(element_bytes)),
        _ => None,
    }
}

fn tensor_bytes(tensor: &TensorProto) -> u64 {
    let element_bits = match DataType::try_from(tensor.data_type) {
        Ok(DataType::Uint8 | DataType::Int8 | DataType::Bool) => 8,
        Ok(DataType::Float16 | DataType::Bfloat16) => 16,
        Ok(DataType::Float | DataType::Int32) => 32,
        Ok(DataType::Int64 | DataType::Double) => 64,
        // No graph that can be served has another type.
        Ok(DataType::Undefined) | Err(_) => 0,
    };
    let elements = tensor.dims.iter().try_fold(1u64, |product, &dim| {
        product.checked_mul(u64::try_from(dim).ok()?)
    });
    elements.unwrap_or(0).saturating_mul(element_bits) / 8
}

/// Whether what a node computes for one row depends on other rows of the same pass.
///
/// One scale for a whole tensor is how dynamic quantisation is done by `DynamicQuantizeLinear` and the fused operators made from it.
/// Written out in standard operators it is a reduction without axes, which reduces over every row.
fn mixes_rows(node: &NodeProto) -> bool {
    match (node.domain.as_str(), node.op_type.as_str()) {
        ("" | "ai.onnx", "DynamicQuantizeLinear")
        | ("com.microsoft", "DynamicQuantizeMatMul" | "DynamicQuantizeLSTM") => true,
        ("" | "ai.onnx", "ReduceMax" | "ReduceMin" | "ReduceMean" | "ReduceSum") => {
            let axes_input = node.input.get(1).is_some_and(|name| !name.is_empty());
            let attribute = |name: &str| node.attribute.iter().find(|it| it.name == name);
            let does_nothing = attribute("noop_with_empty_axes").is_some_and(|it| it.i == 1);
            !axes_input && attribute("axes").is_none() && !does_nothing
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use outrider_bundle::onnx::AttributeProto;

    use super::*;

    fn node(domain: &str, op_type: &str, inputs: &[&str], attributes: &[(&str, i64)]) -> NodeProto {
        NodeProto {
            input: inputs.iter().map(|name| (*name).to_owned()).collect(),
            op_type: op_type.to_owned(),
            domain: domain.to_owned(),
            attribute: attributes
                .iter()
                .map(|&(name, i)| AttributeProto {
                    name: name.to_owned(),
                    i,
                    ..AttributeProto::default()
                })
                .collect(),
            ..NodeProto::default()
        }
    }

    #[test]
    fn one_scale_for_a_whole_tensor_is_seen_in_every_form_and_one_for_a_row_is_none() {
        for mixing in [
            node("", "DynamicQuantizeLinear", &["x"], &[]),
            node("com.microsoft", "DynamicQuantizeMatMul", &["x", "w"], &[]),
            node("", "ReduceMax", &["x"], &[("keepdims", 1)]),
            node("", "ReduceMax", &["x", ""], &[]),
        ] {
            assert!(mixes_rows(&mixing), "{mixing:?}");
        }
        for apart in [
            node("", "ReduceMax", &["x", "axes"], &[("keepdims", 1)]),
            node("", "ReduceMean", &["x"], &[("axes", 0)]),
            node("", "ReduceSum", &["x"], &[("noop_with_empty_axes", 1)]),
            node("", "MatMulInteger", &["x", "w"], &[]),
            node("com.microsoft", "MatMulNBits", &["x", "w", "s"], &[]),
        ] {
            assert!(!mixes_rows(&apart), "{apart:?}");
        }
    }

    #[test]
    fn a_tokenizer_that_is_none_is_found_whatever_its_digest() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("tokenizer.json"), "not json").unwrap();
        let manifest: Manifest = serde_json::from_value(serde_json::json!({
            "schema_version": 1,
            "name": "model",
            "files": {},
            "target": {
                "graph": "model.onnx", "architecture": "llama", "precision": "int8",
                "attention": "native", "layers": 1, "hidden_size": 8, "kv_heads": 1,
                "head_dim": 8, "vocab_size": 8, "context_tokens": 8, "kv_dtype": "float32",
                "taps": [],
            },
            "draft": null,
            "text": {
                "tokenizer": "tokenizer.json", "chat_template": null,
                "bos_token": null, "eos_token": null, "add_bos": false,
            },
            "generation": serde_json::to_value(outrider_bundle::manifest::GenerationDefaults::default()).unwrap(),
            "tools": {},
            "sources": [],
        }))
        .unwrap();
        let fault = text_fault(dir.path(), &manifest).unwrap();
        assert!(fault.contains("tokenizer"), "{fault}");
    }

    #[test]
    fn a_weight_counts_in_full_for_each_tensor_that_holds_it() {
        let tensor = |data_type: DataType, dims: &[i64]| TensorProto {
            dims: dims.to_vec(),
            data_type: data_type.into(),
            ..TensorProto::default()
        };
        assert_eq!(tensor_bytes(&tensor(DataType::Float, &[3, 5])), 60);
        assert_eq!(tensor_bytes(&tensor(DataType::Int8, &[7])), 7);
        assert_eq!(tensor_bytes(&tensor(DataType::Bfloat16, &[])), 2);
        assert_eq!(tensor_bytes(&tensor(DataType::Float, &[-1])), 0);
        let graph = GraphProto {
            initializer: vec![tensor(DataType::Float, &[4]); 2],
            ..GraphProto::default()
        };
        let facts = facts_of(&Structure::default(), graph);
        assert_eq!(facts.initializer_bytes, 32);
    }
}
