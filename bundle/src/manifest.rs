//! `bundle.json`: every file of a model with its size and digest, and the facts a server needs before it opens one.
//!
//! The manifest is the only thing that says what a bundle is.
//! It refuses unknown fields and unknown schema versions, and holds no path that leaves the bundle directory.
//! A [`Manifest`] says nothing yet about the files beside it: that is [`crate::verify`].

mod check;

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::de::{Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::digest::{sha256_hex, write_atomic};

/// Name of the manifest inside a bundle directory.
pub const FILE_NAME: &str = "bundle.json";

/// Name under which a manifest is written before it is renamed to [`FILE_NAME`].
pub const ASIDE_NAME: &str = ".bundle.json.partial";

/// Element types of the KV cache, as `target.kv_dtype` names them.
pub const KV_DTYPES: [&str; 3] = ["float32", "float16", "bfloat16"];

/// Largest manifest that is read, in bytes; some ten thousand files fit.
pub const MAX_BYTES: u64 = 4 << 20;

/// The schema version this build reads and writes.
pub const SCHEMA_VERSION: u32 = 1;

/// A bundle manifest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Version of this format, [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Model name as callers see it in `/v1/models`.
    pub name: String,
    /// Every file of the bundle except the manifest, keyed by its path relative to the bundle directory, with `/` as separator.
    #[serde(deserialize_with = "unique_keys")]
    pub files: BTreeMap<String, FileEntry>,
    /// Facts about the target.
    pub target: TargetFacts,
    /// Facts about the draft, when the bundle holds one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft: Option<DraftFacts>,
    /// Tokenizer and chat template.
    pub text: TextFacts,
    /// Defaults for requests that leave a field out.
    pub generation: GenerationDefaults,
    /// Tools that made the bundle, name to version.
    #[serde(deserialize_with = "unique_keys")]
    pub tools: BTreeMap<String, String>,
    /// Inputs the bundle was made from.
    pub sources: Vec<Source>,
}

/// Size and digest of one file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Size in bytes.
    pub size_bytes: u64,
    /// Lower-case hexadecimal SHA-256.
    pub sha256: String,
}

/// How the nodes of a graph are written that no older standard operator computes: attention, and the draft's convolutions and selector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Attention {
    /// Custom ops of the server, such as `outrider.CachedAttention`.
    Native,
    /// Standard operators of opset 24, such as `TensorScatter` and `Attention`.
    Portable,
}

/// Numeric form of the weights of a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// fp32 weights and activations.
    Fp32,
    /// fp16 weights and activations.
    Fp16,
    /// bf16 weights and activations.
    Bf16,
    /// int8 weights per output channel, activations quantised per row.
    Int8,
    /// 4-bit weights in blocks of 32, `MatMulNBits`.
    Int4,
}

/// Facts about the target graph; every one is checked against the graph itself when a bundle is made and when it is loaded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TargetFacts {
    /// Path of the graph inside the bundle.
    pub graph: String,
    /// Model family, such as `llama` or `qwen3`.
    pub architecture: String,
    /// Numeric form of the weights.
    pub precision: Precision,
    /// Form of the attention nodes.
    pub attention: Attention,
    /// Number of decoder layers.
    pub layers: usize,
    /// Hidden size.
    pub hidden_size: usize,
    /// Key/value heads per layer.
    pub kv_heads: usize,
    /// Size of one head.
    pub head_dim: usize,
    /// Rows of the embedding and of the logits.
    pub vocab_size: usize,
    /// Longest sequence the model supports, in tokens.
    pub context_tokens: usize,
    /// Element type of the KV cache: `float32`, `float16` or `bfloat16`.
    pub kv_dtype: String,
    /// 0-based ids of the layers whose output `aux_hidden_states` carries, in its order; empty when the graph has no taps.
    #[serde(default)]
    pub taps: Vec<usize>,
}

/// Facts about the draft graph; every one is checked against the graph itself when a bundle is made and when it is opened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DraftFacts {
    /// Path of the graph inside the bundle.
    pub graph: String,
    /// `DFlashDraftModel` or `DFlash2DraftModel`.
    pub architecture: String,
    /// Numeric form of the weights.
    pub precision: Precision,
    /// Form of the attention, convolution and selector nodes.
    pub form: Attention,
    /// Number of draft layers.
    pub layers: usize,
    /// Key/value heads per layer.
    pub kv_heads: usize,
    /// Size of one head.
    pub head_dim: usize,
    /// Element type of the draft's KV cache: `float32`, `float16` or `bfloat16`.
    pub kv_dtype: String,
    /// Tokens the draft can propose: all of the vocabulary, or those its head was cut to.
    pub vocabulary_columns: usize,
    /// Anchor and mask slots of one draft pass.
    pub block_size: usize,
    /// Most candidates per slot.
    pub top_k: usize,
    /// Token id of the mask slots.
    pub mask_token_id: u32,
    /// Target layers whose output the draft reads, in order.
    pub target_layer_ids: Vec<usize>,
    /// Longest context the draft supports, in tokens.
    pub context_tokens: usize,
}

impl DraftFacts {
    /// The facts that neither inputs nor nodes of the graph show, as its metadata has them.
    pub fn metadata(&self) -> Vec<(&'static str, String)> {
        let list: Vec<String> = self.target_layer_ids.iter().map(usize::to_string).collect();
        vec![
            ("outrider.architecture", self.architecture.clone()),
            ("outrider.block_size", self.block_size.to_string()),
            ("outrider.context_tokens", self.context_tokens.to_string()),
            ("outrider.form", spelling(&self.form)),
            ("outrider.mask_token_id", self.mask_token_id.to_string()),
            ("outrider.precision", spelling(&self.precision)),
            ("outrider.target_layer_ids", list.join(",")),
            ("outrider.top_k", self.top_k.to_string()),
            (
                "outrider.vocabulary_columns",
                self.vocabulary_columns.to_string(),
            ),
        ]
    }
}

/// A value as the manifest spells it.
pub fn spelling(value: &impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(Value::String(spelling)) => spelling,
        other => unreachable!("precision and attention are spelled as strings, not {other:?}"),
    }
}

/// Tokenizer and chat template.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TextFacts {
    /// Path of `tokenizer.json` inside the bundle.
    pub tokenizer: String,
    /// Path of the chat template (Jinja), when the model has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chat_template: Option<String>,
    /// Text of the beginning-of-sequence token, as templates refer to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bos_token: Option<String>,
    /// Text of the end-of-sequence token, as templates refer to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eos_token: Option<String>,
    /// Whether the tokenizer puts the beginning-of-sequence token before a plain prompt.
    pub add_bos: bool,
}

/// Defaults for requests that leave a field out, from the model's own generation settings.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GenerationDefaults {
    /// Tokens that end an answer.
    pub eos_token_ids: Vec<u32>,
    /// Softmax temperature.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f32>,
    /// Nucleus bound.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top_p: Option<f32>,
    /// Candidate bound.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top_k: Option<u32>,
    /// Least share of the largest probability.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_p: Option<f32>,
    /// Repetition penalty, over prompt and answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repetition_penalty: Option<f32>,
}

/// One input a bundle was made from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// What it is, for example `SmolLM2-135M-Instruct.Q4_1.gguf`.
    pub name: String,
    /// Lower-case hexadecimal SHA-256.
    pub sha256: String,
    /// SPDX licence expression, when known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub licence: Option<String>,
}

/// Why there is no manifest to speak of.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// The file can't be read.
    #[error("cannot read {path}")]
    Read {
        /// The manifest file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file can't be written.
    #[error("cannot write {path}")]
    Write {
        /// The manifest file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file is larger than any manifest.
    #[error("the manifest is larger than {MAX_BYTES} bytes")]
    TooLarge,
    /// The file was written for another version of the format.
    #[error("schema_version is {found}, this build reads {SCHEMA_VERSION}")]
    SchemaVersion {
        /// The version in the file.
        found: u64,
    },
    /// The text is no JSON of the manifest's form.
    #[error("the manifest is not of the expected form")]
    Form(#[source] serde_json::Error),
    /// The form is right and values are not; all faults.
    #[error("the manifest holds invalid values: {}", list(.0))]
    Values(Vec<FieldFault>),
}

impl ManifestError {
    /// One line per thing that is wrong, without the chain of sources having to be walked.
    pub fn lines(&self) -> Vec<String> {
        match self {
            Self::Read { source, .. } | Self::Write { source, .. } => {
                vec![format!("{self}: {source}")]
            }
            Self::Form(source) => vec![format!("{self}: {source}")],
            Self::Values(faults) => faults.iter().map(ToString::to_string).collect(),
            Self::TooLarge | Self::SchemaVersion { .. } => vec![self.to_string()],
        }
    }
}

/// The first few of several faults in one line, for places that have only one.
pub(crate) fn list<T: ToString>(faults: &[T]) -> String {
    const SHOWN: usize = 8;
    let mut parts: Vec<_> = faults.iter().take(SHOWN).map(ToString::to_string).collect();
    if faults.len() > SHOWN {
        parts.push(format!("and {} more", faults.len() - SHOWN));
    }
    parts.join("; ")
}

/// One field of a manifest with a value that can't be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct FieldFault {
    /// Path of the field, such as `target.graph`.
    pub field: String,
    /// The value and what is allowed.
    pub problem: String,
}

/// The part that every version of the format has.
#[derive(Deserialize)]
struct Version {
    schema_version: u64,
}

impl Manifest {
    /// Reads `bundle.json` of a bundle directory. The files beside it aren't looked at.
    pub fn load(dir: &Path) -> Result<Self, ManifestError> {
        let path = dir.join(FILE_NAME);
        let mut bytes = Vec::new();
        let read =
            File::open(&path).and_then(|file| file.take(MAX_BYTES + 1).read_to_end(&mut bytes));
        match read {
            Ok(_) => Self::parse(&bytes),
            Err(source) => Err(ManifestError::Read { path, source }),
        }
    }

    /// Reads a manifest from the text of a `bundle.json`; whatever it returns passed [`Manifest::check`].
    pub fn parse(bytes: &[u8]) -> Result<Self, ManifestError> {
        if bytes.len() as u64 > MAX_BYTES {
            return Err(ManifestError::TooLarge);
        }
        // The version comes first: of a later format it is the only thing that can be said with certainty.
        let Version { schema_version } =
            serde_json::from_slice(bytes).map_err(ManifestError::Form)?;
        if schema_version != u64::from(SCHEMA_VERSION) {
            return Err(ManifestError::SchemaVersion {
                found: schema_version,
            });
        }
        let manifest: Self = serde_json::from_slice(bytes).map_err(ManifestError::Form)?;
        manifest.check()?;
        Ok(manifest)
    }

    /// The bytes that [`Manifest::digest`] is taken of: JSON with sorted keys and no white space, in UTF-8.
    pub fn canonical_json(&self) -> Vec<u8> {
        // By way of text, so that a 32-bit float keeps its shortest decimal form.
        let text =
            serde_json::to_vec(self).expect("a manifest has string keys and finite numbers only");
        let mut value: Value =
            serde_json::from_slice(&text).expect("this is the text of a moment ago");
        value.sort_all_objects();
        serde_json::to_vec(&value).expect("a JSON value can be written")
    }

    /// The bundle digest: lower-case hexadecimal SHA-256 of the canonical JSON. It names the whole bundle, since the manifest holds every file's digest.
    pub fn digest(&self) -> String {
        sha256_hex(&self.canonical_json())
    }

    /// Writes `bundle.json` into a bundle directory, whole or not at all.
    pub fn write(&self, dir: &Path) -> Result<(), ManifestError> {
        self.check()?;
        let path = dir.join(FILE_NAME);
        let mut text = serde_json::to_vec_pretty(self)
            .expect("a manifest has string keys and finite numbers only");
        text.push(b'\n');
        write_atomic(&path, &dir.join(ASIDE_NAME), &text)
            .map_err(|source| ManifestError::Write { path, source })
    }

    /// Checks every value that can be checked without the files; all faults at once.
    pub fn check(&self) -> Result<(), ManifestError> {
        if self.schema_version != SCHEMA_VERSION {
            return Err(ManifestError::SchemaVersion {
                found: self.schema_version.into(),
            });
        }
        let faults = check::faults(self);
        if faults.is_empty() {
            Ok(())
        } else {
            Err(ManifestError::Values(faults))
        }
    }
}

/// Reads a map and refuses a key that comes twice, which serde would let the later entry win.
fn unique_keys<'de, D, V>(deserializer: D) -> Result<BTreeMap<String, V>, D::Error>
where
    D: Deserializer<'de>,
    V: Deserialize<'de>,
{
    struct Unique<V>(std::marker::PhantomData<V>);

    impl<'de, V: Deserialize<'de>> Visitor<'de> for Unique<V> {
        type Value = BTreeMap<String, V>;

        fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
            formatter.write_str("a map")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Self::Value, A::Error> {
            let mut map = BTreeMap::new();
            while let Some(key) = access.next_key::<String>()? {
                if map.contains_key(&key) {
                    return Err(serde::de::Error::custom(format_args!(
                        "duplicate key {key:?}"
                    )));
                }
                map.insert(key, access.next_value()?);
            }
            Ok(map)
        }
    }

    deserializer.deserialize_map(Unique(std::marker::PhantomData))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::testing::{manifest_json, sample_draft, sample_manifest};

    fn lines(text: &str) -> Vec<String> {
        Manifest::parse(text.as_bytes()).unwrap_err().lines()
    }

    #[test]
    fn what_is_written_is_what_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let manifest = sample_manifest();
        manifest.write(dir.path()).unwrap();
        assert_eq!(Manifest::load(dir.path()).unwrap(), manifest);
        assert_eq!(
            fs::read_dir(dir.path()).unwrap().count(),
            1,
            "nothing is left aside"
        );
    }

    #[test]
    fn the_digest_is_that_of_sorted_json_without_spaces() {
        let mut manifest = sample_manifest();
        manifest.generation.temperature = Some(0.6);
        let canonical = String::from_utf8(manifest.canonical_json()).unwrap();
        assert!(
            canonical.starts_with(r#"{"files":{"chat_template.jinja":{"sha256":""#),
            "{canonical}"
        );
        assert!(
            canonical
                .contains(r#""generation":{"eos_token_ids":[2],"temperature":0.6},"name":"tiny""#),
            "{canonical}"
        );
        assert!(!canonical.contains(' '), "{canonical}");
        assert_eq!(manifest.digest(), sha256_hex(canonical.as_bytes()));
    }

    #[test]
    fn the_digest_depends_on_content_and_not_on_layout() {
        let manifest = sample_manifest();
        let compact = serde_json::to_vec(&manifest).unwrap();
        let mut reversed = serde_json::to_value(&manifest).unwrap();
        let entries: Vec<_> = reversed
            .as_object()
            .unwrap()
            .clone()
            .into_iter()
            .rev()
            .collect();
        *reversed.as_object_mut().unwrap() = entries.into_iter().collect();
        for text in [compact, serde_json::to_vec_pretty(&reversed).unwrap()] {
            assert_eq!(Manifest::parse(&text).unwrap().digest(), manifest.digest());
        }
        let mut other = manifest.clone();
        other.files.get_mut("model.onnx").unwrap().size_bytes += 1;
        assert_ne!(other.digest(), manifest.digest());
    }

    #[test]
    fn bad_form_is_refused() {
        let good = manifest_json();
        for (text, expected) in [
            (
                good.replace("\"name\"", "\"colour\": 1, \"name\""),
                "unknown field `colour`",
            ),
            (
                good.replace("\"kv_heads\"", "\"kv_head\""),
                "unknown field `kv_head`",
            ),
            (
                good.replace("\"portable\"", "\"magic\""),
                "unknown variant `magic`",
            ),
            (
                good.replace("\"name\": \"tiny\",", ""),
                "missing field `name`",
            ),
            (
                good.replace("\"tokenizer.json\": {", "\"model.onnx\": {"),
                "duplicate key \"model.onnx\"",
            ),
            (
                good.replace(
                    "\"name\": \"tiny\"",
                    "\"name\": \"tiny\", \"name\": \"tiny\"",
                ),
                "duplicate field `name`",
            ),
            (good[..good.len() / 2].to_owned(), "EOF while parsing"),
            (good.clone() + "}", "trailing characters"),
            ("[".repeat(10_000), "invalid type: sequence"),
            (String::new(), "EOF while parsing"),
            ("\0\0".to_owned(), "expected value"),
        ] {
            let lines = lines(&text).join("\n");
            assert!(lines.contains(expected), "{expected}: {lines}");
        }
    }

    #[test]
    fn another_schema_version_is_named_before_anything_else() {
        assert_eq!(
            lines(r#"{"schema_version": 2, "whatever": true}"#),
            ["schema_version is 2, this build reads 1"]
        );
        assert!(lines(r#"{"schema_version": "1"}"#)[0].contains("invalid type: string"));
    }

    #[test]
    fn every_bad_value_is_named_at_once() {
        let text = manifest_json()
            .replace("\"model.onnx\": {", "\"../model.onnx\": {")
            .replace("\"tokenizer.json\": {", "\"/etc/tokenizer.json\": {")
            .replace("\"layers\": 2", "\"layers\": 0")
            .replace("\"float32\"", "\"float64\"")
            .replace(
                "\"eos_token_ids\": [\n      2\n",
                "\"eos_token_ids\": [\n      99\n",
            );
        insta::assert_snapshot!(lines(&text).join("\n"));
    }

    #[test]
    fn every_bad_value_of_a_draft_is_named_at_once() {
        let mut manifest = sample_manifest();
        manifest.draft = Some(DraftFacts {
            kv_dtype: "int8".to_owned(),
            layers: 0,
            vocabulary_columns: 33,
            top_k: 34,
            block_size: 1,
            mask_token_id: 32,
            target_layer_ids: vec![1, 0],
            context_tokens: 65,
            ..sample_draft()
        });
        let text = serde_json::to_string(&manifest).unwrap();
        insta::assert_snapshot!(lines(&text).join("\n"));
    }

    #[test]
    fn a_digest_that_is_none_is_refused() {
        let good = manifest_json();
        let digest = &sample_manifest().files["model.onnx"].sha256;
        for bad in ["", "abc", &digest.to_uppercase()] {
            assert!(
                lines(&good.replace(digest.as_str(), bad))[0]
                    .contains("64 lower-case hexadecimal digits"),
                "{bad}"
            );
        }
    }

    #[test]
    fn a_manifest_of_any_size_is_refused_without_being_read_whole() {
        let dir = tempfile::tempdir().unwrap();
        // Sparse: reading it whole would take 100 MB of memory and none of disk.
        File::create(dir.path().join(FILE_NAME))
            .unwrap()
            .set_len(100 << 20)
            .unwrap();
        assert!(matches!(
            Manifest::load(dir.path()),
            Err(ManifestError::TooLarge)
        ));
    }

    #[test]
    fn a_missing_manifest_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let error = Manifest::load(dir.path()).unwrap_err();
        assert!(error.to_string().contains("bundle.json"), "{error}");
    }

    #[test]
    fn a_faulty_manifest_is_never_written() {
        let dir = tempfile::tempdir().unwrap();
        let mut manifest = sample_manifest();
        manifest.target.graph = "gone.onnx".to_owned();
        manifest.write(dir.path()).unwrap_err();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    proptest::proptest! {
        #[test]
        fn damaged_text_is_an_error_or_a_manifest_and_never_a_panic(at in 0..5000usize, byte: u8) {
            let mut text = manifest_json().into_bytes();
            let at = at % text.len();
            text[at] = byte;
            if let Ok(manifest) = Manifest::parse(&text) {
                manifest.check().unwrap();
            }
        }
    }
}
