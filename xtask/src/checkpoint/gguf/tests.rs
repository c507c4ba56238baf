//! The golden GGUF file as it is, written again with something changed, and damaged at random.

mod content;

use std::collections::BTreeMap;
use std::fs;

use proptest::prelude::*;
use serde_json::json;
use tempfile::NamedTempFile;

use super::*;
use crate::checkpoint::testing::golden;
use crate::checkpoint::{Checkpoint, RopeScaling, open};
use content::{Content, golden_bytes};

fn open_bytes(bytes: &[u8]) -> anyhow::Result<Checkpoint> {
    let file = NamedTempFile::new().unwrap();
    fs::write(file.path(), bytes).unwrap();
    open(file.path())
}

#[track_caller]
fn assert_refused(bytes: &[u8], expected: &str) {
    let error = match open_bytes(bytes) {
        Ok(_) => panic!("the file was accepted, expected {expected:?}"),
        Err(error) => format!("{error:#}"),
    };
    assert!(
        error.contains(expected),
        "{error:?} doesn't contain {expected:?}"
    );
}

fn text(text: &str) -> Value {
    Value::String(text.to_string())
}

#[test]
fn the_same_checkpoint_as_gguf_and_as_safetensors_reads_the_same() {
    let gguf = open(&golden("gguf/tiny-llama.gguf")).unwrap();
    let directory = open(&golden("hugging_face/llama-linear")).unwrap();
    assert_eq!(gguf.config, directory.config);
    assert_eq!(gguf.weights.names(), directory.weights.names());
    for name in gguf.weights.names() {
        assert_eq!(
            gguf.weights.shape(&name),
            directory.weights.shape(&name),
            "{name}"
        );
        assert!(
            gguf.weights.load(&name).unwrap() == directory.weights.load(&name).unwrap(),
            "{name} differs"
        );
    }
    assert_eq!(gguf.generation, directory.generation);
    assert_eq!(gguf.text.add_bos, directory.text.add_bos);
    assert_eq!(gguf.text.bos_token, directory.text.bos_token);
    assert_eq!(gguf.text.eos_token, directory.text.eos_token);
    assert_eq!(gguf.name, "tiny-llama");
    assert_eq!(gguf.sources[0].licence.as_deref(), Some("MIT"));

    let encoder = |checkpoint: &Checkpoint| {
        checkpoint
            .text
            .tokenizer_json
            .parse::<tokenizers::Tokenizer>()
            .unwrap()
    };
    let (one, other) = (encoder(&gguf), encoder(&directory));
    for text in [
        "the and the band",
        " x  y\n\n",
        "<|user|>it's 42</s>",
        "thethe singer",
    ] {
        let ids = one.encode(text, true).unwrap().get_ids().to_vec();
        assert_eq!(ids, other.encode(text, true).unwrap().get_ids(), "{text:?}");
        assert_eq!(ids[0], 1);
        assert_eq!(one.decode(&ids[1..], false).unwrap(), text);
    }
}

#[test]
fn the_reference_model_has_the_shape_it_is_published_with() {
    let checkpoint = open(&crate::checkpoint::testing::reference_gguf()).unwrap();
    let config = checkpoint.config;
    assert_eq!(
        (config.layers, config.hidden_size, config.intermediate_size),
        (30, 576, 1536)
    );
    assert_eq!((config.heads, config.kv_heads, config.head_dim), (9, 3, 64));
    assert_eq!(
        (
            config.vocab_size,
            config.context_tokens,
            config.norm_epsilon
        ),
        (49152, 8192, 1e-5)
    );
    assert_eq!(
        (config.rope.theta, config.rope.scaling),
        (100_000.0, RopeScaling::None)
    );
    assert!(config.tied_embeddings);
    assert_eq!(checkpoint.name, "SmolLM2-135M-Instruct");
    assert_eq!(
        checkpoint.sources[0].sha256,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    );
    assert_eq!(checkpoint.sources[0].licence.as_deref(), Some("Apache-2.0"));
}

#[test]
fn every_kind_of_metadata_value_is_read_as_written() {
    let values = [
        Value::U8(250),
        Value::I8(-5),
        Value::U16(60_000),
        Value::I16(-300),
        Value::U32(4_000_000_000),
        Value::I32(-70_000),
        Value::U64(u64::MAX),
        Value::I64(i64::MIN),
        Value::F32(-0.5),
        Value::F64(1e300),
        Value::Bool(true),
        text("häh 日本"),
        Value::Array(vec![]),
        Value::Array(vec![Value::U16(1), Value::U16(2)]),
        Value::Array(vec![
            Value::Array(vec![text("a"), text("")]),
            Value::Array(vec![Value::Bool(false)]),
        ]),
    ];
    let mut content = Content {
        metadata: BTreeMap::new(),
        tensors: BTreeMap::new(),
    };
    for (index, value) in values.iter().enumerate() {
        content = content.set(&format!("test.{index}"), value.clone());
    }
    let bytes = content.bytes();
    assert_eq!(
        parse(bytes.as_slice(), bytes.len() as u64)
            .unwrap()
            .metadata
            .0,
        content.metadata
    );
}

#[test]
fn rows_of_quantised_tensors_are_whole_blocks() {
    let content = Content::golden();
    let quantised = |columns: u64, bytes: usize| {
        let mut content = content.clone();
        content.tensors.insert(
            "blk.0.ffn_gate.weight".to_string(),
            (vec![columns, 48], 8, vec![0; bytes]),
        );
        content
    };
    assert_eq!(
        quantised(32, 48 * 34)
            .open()
            .unwrap()
            .weights
            .load("model.layers.0.mlp.gate_proj.weight")
            .unwrap(),
        [0.0; 48 * 32]
    );
    quantised(16, 48 * 17).assert_refused("tensor blk.0.ffn_gate.weight: shape [48, 16] doesn't fit type Q8_0, which has blocks of 32");
}

#[test]
fn what_the_graph_cannot_express_is_refused_by_name() {
    let golden = Content::golden();
    for (key, value, expected) in [
        (
            "general.architecture",
            text("gemma"),
            "architecture gemma is not supported, only llama",
        ),
        (
            "general.type",
            text("adapter"),
            "general.type adapter is not supported",
        ),
        (
            "llama.expert_count",
            Value::U32(8),
            "metadata key llama.expert_count is not supported",
        ),
        (
            "llama.attention.sliding_window",
            Value::U32(64),
            "llama.attention.sliding_window is not supported",
        ),
        (
            "llama.logit_scale",
            Value::F32(0.5),
            "llama.logit_scale is not supported",
        ),
        (
            "llama.something_new",
            Value::Bool(false),
            "llama.something_new is not supported",
        ),
        (
            "llama.attention.head_count",
            Value::Array(vec![Value::U32(4)]),
            "llama.attention.head_count is not a whole number",
        ),
        (
            "llama.attention.head_count_kv",
            Value::U32(3),
            "4 heads can't share 3",
        ),
        (
            "llama.attention.head_count",
            Value::U32(0),
            "not a multiple of 0 heads",
        ),
        (
            "llama.attention.key_length",
            Value::U32(16),
            "llama.rope.dimension_count 8 differs from the head size 16",
        ),
        (
            "llama.attention.value_length",
            Value::U32(16),
            "value_length 16 differs from the key length 8",
        ),
        (
            "llama.rope.dimension_count",
            Value::U32(4),
            "partial rotation",
        ),
        (
            "llama.rope.scaling.type",
            text("longrope"),
            "llama.rope.scaling.type longrope",
        ),
        (
            "llama.rope.scaling.factor",
            Value::F32(0.5),
            "factor is 0.5",
        ),
        (
            "llama.rope.scaling.factor",
            Value::F32(f32::NAN),
            "factor is not a finite number",
        ),
        ("llama.rope.freq_base", Value::F32(-1.0), "rope theta -1"),
        (
            "llama.block_count",
            Value::U32(3),
            "missing blk.2.attn_k.weight",
        ),
        (
            "llama.block_count",
            Value::U32(1),
            "unknown blk.1.attn_k.bias",
        ),
        (
            "llama.block_count",
            Value::U64(1 << 60),
            "llama.block_count is 1152921504606846976",
        ),
        (
            "llama.embedding_length",
            Value::U64(u64::MAX - 7),
            "differs from the head size 4611686018427387902",
        ),
        (
            "llama.context_length",
            Value::U64(1 << 40),
            "context length 1099511627776 is out of range",
        ),
        (
            "llama.feed_forward_length",
            Value::I32(-1),
            "llama.feed_forward_length is not a whole number",
        ),
        (
            "llama.vocab_size",
            Value::U32(129),
            "llama.vocab_size is 129, but token_embd.weight has 128 rows",
        ),
        ("split.count", Value::U16(2), "split.count is 2"),
        (
            "general.alignment",
            Value::U32(24),
            "general.alignment is 24",
        ),
        ("general.alignment", Value::U32(0), "general.alignment is 0"),
        (
            "tokenizer.ggml.model",
            text("bert"),
            "tokenizer.ggml.model bert",
        ),
        (
            "tokenizer.ggml.pre",
            text("viking"),
            "tokenizer.ggml.pre viking is not supported",
        ),
        (
            "tokenizer.ggml.add_eos_token",
            Value::Bool(true),
            "add_eos_token true",
        ),
        (
            "tokenizer.ggml.add_space_prefix",
            Value::Bool(true),
            "add_space_prefix true",
        ),
        (
            "tokenizer.ggml.bos_token_id",
            Value::U32(128),
            "bos_token_id is 128, but there are only 128 tokens",
        ),
        (
            "tokenizer.ggml.eos_token_id",
            Value::I32(-1),
            "eos_token_id is not a token id",
        ),
    ] {
        golden.clone().set(key, value).assert_refused(expected);
    }
    for key in [
        "general.architecture",
        "llama.block_count",
        "llama.context_length",
        "llama.attention.layer_norm_rms_epsilon",
        "tokenizer.ggml.model",
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.token_type",
        "tokenizer.ggml.merges",
        "tokenizer.ggml.eos_token_id",
    ] {
        golden
            .clone()
            .without(key)
            .assert_refused(&format!("metadata key {key} is missing"));
    }
    for (key, value) in [
        ("llama.expert_count", Value::U32(0)),
        ("llama.attention.causal", Value::Bool(true)),
        ("llama.rope.scaling.finetuned", Value::Bool(true)),
    ] {
        golden.clone().set(key, value).open().unwrap();
    }
}

#[test]
fn tokens_and_merges_must_fit_together() {
    let golden = Content::golden();
    let tokens = "tokenizer.ggml.tokens";
    golden
        .clone()
        .edit(tokens, |tokens| tokens.pop())
        .assert_refused("has 127 tokens, but the embedding has 128 rows");
    golden
        .clone()
        .edit(tokens, |tokens| tokens[100] = tokens[10].clone())
        .assert_refused("twice, as 10 and 100");
    golden
        .clone()
        .edit("tokenizer.ggml.token_type", |types| types.pop())
        .assert_refused("has 127 entries for 128 tokens");
    golden
        .clone()
        .edit("tokenizer.ggml.token_type", |types| {
            types[9] = Value::I32(6)
        })
        .assert_refused("token 9 is a byte token");
    golden
        .clone()
        .edit("tokenizer.ggml.token_type", |types| {
            types[9] = Value::I32(7)
        })
        .assert_refused("token 9 is I32(7)");
    for merge in ["a", "a zz", "a b", ""] {
        golden
            .clone()
            .edit("tokenizer.ggml.merges", |merges| merges[3] = text(merge))
            .assert_refused("(number 3) doesn't join two tokens");
    }
}

#[test]
fn ends_of_an_answer_are_collected_and_the_beginning_follows_the_metadata() {
    let golden = Content::golden();
    let checkpoint = golden
        .clone()
        .set("tokenizer.ggml.eot_token_id", Value::U32(4))
        .set("tokenizer.ggml.eom_token_id", Value::U32(2));
    assert_eq!(checkpoint.open().unwrap().generation.eos_token_ids, [2, 4]);

    let without = golden.clone().without("tokenizer.ggml.add_bos_token");
    assert!(!without.open().unwrap().text.add_bos);
    assert!(
        without
            .set("tokenizer.ggml.pre", text("llama-bpe"))
            .open()
            .unwrap()
            .text
            .add_bos,
        "as Llama 3 does unless told otherwise"
    );
    golden
        .without("tokenizer.ggml.bos_token_id")
        .assert_refused("add_bos_token is true, but tokenizer.ggml.bos_token_id is missing");
}

#[test]
fn pre_tokenizers_cut_text_as_their_models_do() {
    let golden = Content::golden();
    let pieces = |pre: &str, text_to_cut: &str| {
        let checkpoint = golden
            .clone()
            .set("tokenizer.ggml.pre", text(pre))
            .open()
            .unwrap();
        let mut tokenizer: serde_json::Value =
            serde_json::from_str(&checkpoint.text.tokenizer_json).unwrap();
        // Any text at all, and no merging: what is left are the pieces.
        tokenizer["model"] = json!({"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"});
        tokenizer["added_tokens"] = json!([]);
        tokenizer["post_processor"] = json!(null);
        let tokenizer: tokenizers::Tokenizer = tokenizer.to_string().parse().unwrap();
        let encoding = tokenizer.encode(text_to_cut, false).unwrap();
        encoding
            .get_offsets()
            .iter()
            .map(|&(start, end)| text_to_cut[start..end].to_string())
            .collect::<Vec<_>>()
    };
    for (pre, expected) in [
        (
            "gpt-2",
            vec![
                "I", "'m", " 12345", " x", "'", "LL", "  ", " y", "...", "\n", "\n", "z",
            ],
        ),
        (
            "smollm",
            vec![
                "I", "'m", " ", "1", "2", "3", "4", "5", " x", "'", "LL", "  ", " y", "...", "\n",
                "\n", "z",
            ],
        ),
        (
            "llama-bpe",
            vec![
                "I", "'m", " ", "123", "45", " x", "'LL", "  ", " y", "...\n\n", "z",
            ],
        ),
        (
            "qwen2",
            vec![
                "I", "'m", " ", "1", "2", "3", "4", "5", " x", "'LL", "  ", " y", "...\n\n", "z",
            ],
        ),
        (
            "tekken",
            vec![
                "I", "'m", " ", "1", "2", "3", "4", "5", " x", "'LL", "  ", " y", "...\n\n", "z",
            ],
        ),
        (
            "default",
            vec![
                "I", "'", "m", " ", "123", "45", " x", "'", "LL", "  ", " y", "...", "\n", "\n",
                "z",
            ],
        ),
    ] {
        assert_eq!(pieces(pre, "I'm 12345 x'LL   y...\n\nz"), expected, "{pre}");
    }
    assert_eq!(
        pieces("tekken", "aB HelloWORLD"),
        ["a", "B", " Hello", "WORLD"]
    );
    assert_eq!(pieces("llama-bpe", "aB HelloWORLD"), ["aB", " HelloWORLD"]);
    let composed = golden
        .set("tokenizer.ggml.pre", text("qwen2"))
        .open()
        .unwrap();
    let encoder: tokenizers::Tokenizer = composed.text.tokenizer_json.parse().unwrap();
    assert_eq!(
        encoder
            .get_normalizer()
            .map(|normalizer| serde_json::to_value(normalizer).unwrap()),
        Some(json!({"type": "NFC"}))
    );
}

#[test]
fn a_sentencepiece_tokenizer_gives_the_ids_of_the_library() {
    #[derive(serde::Deserialize)]
    struct Case {
        text: String,
        ids: Vec<u32>,
    }
    let bytes = fs::read(golden("gguf/sentencepiece.gguf")).unwrap();
    let metadata = parse(bytes.as_slice(), bytes.len() as u64)
        .unwrap()
        .metadata;
    let vocab_size = metadata
        .array("tokenizer.ggml.tokens")
        .unwrap()
        .unwrap()
        .len();
    let tokenizer = tokenizer::read(&metadata, vocab_size).unwrap();
    assert!(tokenizer.text.add_bos);
    let mut encoder: tokenizers::Tokenizer = tokenizer.text.tokenizer_json.parse().unwrap();
    encoder.set_encode_special_tokens(true);
    let cases: Vec<Case> =
        serde_json::from_slice(&fs::read(golden("gguf/sentencepiece.json")).unwrap()).unwrap();
    assert!(cases.len() > 40);
    for Case { text, ids } in cases {
        let encoding = encoder.encode(text.as_str(), true).unwrap();
        assert_eq!(encoding.get_ids()[0], 1);
        assert_eq!(encoding.get_ids()[1..], ids, "{text:?}");
        assert_eq!(
            encoder.decode(&ids, false).unwrap(),
            text.replace('\u{2581}', " ")
        );
    }
    encoder.set_encode_special_tokens(false);
    assert!(
        encoder
            .encode("a</s>", false)
            .unwrap()
            .get_ids()
            .ends_with(&[2])
    );
}

#[test]
fn a_sentencepiece_tokenizer_that_lacks_something_is_refused() {
    let bytes = fs::read(golden("gguf/sentencepiece.gguf")).unwrap();
    let metadata = parse(bytes.as_slice(), bytes.len() as u64)
        .unwrap()
        .metadata
        .0;
    let with = |key: &str, value: Option<Value>| {
        let mut metadata = metadata.clone();
        match value {
            Some(value) => metadata.insert(key.to_string(), value),
            None => metadata.remove(key),
        };
        let metadata = Metadata(metadata);
        let vocab_size = metadata
            .array("tokenizer.ggml.tokens")
            .unwrap()
            .unwrap()
            .len();
        tokenizer::read(&metadata, vocab_size)
            .err()
            .map(|error| error.to_string())
            .unwrap_or_default()
    };
    let edited = |key: &str, at: usize, value: Value| {
        let Value::Array(mut values) = metadata[key].clone() else {
            panic!("{key} is not an array");
        };
        values[at] = value;
        with(key, Some(Value::Array(values)))
    };
    for (error, expected) in [
        (with("tokenizer.ggml.scores", None), "scores is missing"),
        (
            with("tokenizer.ggml.scores", Some(Value::Array(vec![]))),
            "scores has 0 entries",
        ),
        (
            with("tokenizer.ggml.pre", Some(text("llama-bpe"))),
            "pre llama-bpe is not supported for SentencePiece",
        ),
        (
            with(
                "tokenizer.ggml.remove_extra_whitespaces",
                Some(Value::Bool(true)),
            ),
            "remove_extra_whitespaces true",
        ),
        (
            with(
                "tokenizer.ggml.precompiled_charsmap",
                Some(Value::Array(vec![Value::U8(1)])),
            ),
            "precompiled_charsmap",
        ),
        (
            edited("tokenizer.ggml.tokens", 13, text("x0A")),
            "no byte token <0x0A>",
        ),
        (
            edited("tokenizer.ggml.token_type", 0, Value::I32(3)),
            "marks no token as unknown",
        ),
        (
            edited("tokenizer.ggml.scores", 300, Value::F32(f32::NAN)),
            "scores of token 300",
        ),
    ] {
        assert!(
            error.contains(expected),
            "{error:?} doesn't contain {expected:?}"
        );
    }
}

#[test]
fn llama3_factors_are_recognised_and_other_factors_refused() {
    // Four channel pairs with theta 500000: wavelengths of 6, 167, 4443 and 118142 tokens.
    let golden = Content::golden()
        .without("llama.rope.scaling.type")
        .without("llama.rope.scaling.factor")
        .set("llama.rope.freq_base", Value::F32(500_000.0));
    let wavelength = std::f64::consts::TAU * 500_000f64.powf(0.5);
    let smooth = (8192.0 / wavelength - 1.0) / 3.0;
    let passage = (1.0 / ((1.0 - smooth) / 8.0 + smooth)) as f32;
    let scaling = |factors: &[f32]| {
        golden
            .clone()
            .tensor("rope_freqs.weight", factors)
            .open()
            .map(|checkpoint| checkpoint.config.rope.scaling)
    };

    let llama3 = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 8192,
    };
    assert_eq!(scaling(&[1.0, 1.0, passage, 8.0]).unwrap(), llama3);
    assert_eq!(scaling(&[1.0; 4]).unwrap(), RopeScaling::None);
    for (factors, expected) in [
        (
            &[1.0, 2.0, passage, 8.0][..],
            "rope_freqs.weight has 2 at 1 where llama3 scaling",
        ),
        (&[1.0, 1.0, passage], "rope_freqs.weight has 3 values"),
        (&[1.0, 1.0, passage, f32::NAN], "not finite"),
        (&[f32::INFINITY; 4], "not finite"),
    ] {
        golden
            .clone()
            .tensor("rope_freqs.weight", factors)
            .assert_refused(expected);
    }
    Content::golden()
        .tensor("rope_freqs.weight", &[1.0, 1.0, 1.0, 8.0])
        .assert_refused("together with llama.rope.scaling.type linear");
}

#[test]
fn rope_scaling_is_read_in_all_its_spellings() {
    let golden = Content::golden()
        .without("llama.rope.scaling.type")
        .without("llama.rope.scaling.factor");
    let scaling = |content: Content| content.open().unwrap().config.rope.scaling;
    let (linear, factor) = (
        RopeScaling::Linear { factor: 2.0 },
        "llama.rope.scaling.factor",
    );
    assert_eq!(scaling(golden.clone()), RopeScaling::None);
    assert_eq!(
        scaling(golden.clone().set(factor, Value::F32(2.0))),
        linear,
        "a factor without a type"
    );
    assert_eq!(
        scaling(
            golden
                .clone()
                .set("llama.rope.scale_linear", Value::F32(2.0))
        ),
        linear,
        "the old key"
    );
    assert_eq!(
        scaling(golden.clone().set(factor, Value::F32(0.0))),
        RopeScaling::None,
        "0 means not set"
    );
    assert_eq!(
        scaling(
            golden
                .clone()
                .set("llama.rope.scaling.type", text("none"))
                .set(factor, Value::F32(2.0))
        ),
        RopeScaling::None
    );

    let yarn = golden
        .set("llama.rope.scaling.type", text("yarn"))
        .set(factor, Value::F32(4.0));
    let yarn = yarn.set("llama.rope.scaling.original_context_length", Value::U32(32));
    let attention_factor = 1.0 + 0.1 * libm::log(4.0);
    let expected = |attention_factor| RopeScaling::Yarn {
        factor: 4.0,
        original_context: 32,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor,
        truncate: true,
    };
    assert_eq!(scaling(yarn.clone()), expected(attention_factor));
    assert_eq!(
        scaling(yarn.set("llama.rope.scaling.attn_factor", Value::F32(0.5))),
        expected(0.5 * attention_factor)
    );
}

#[test]
fn an_untied_head_and_tensors_of_other_shapes() {
    let mut tied = Content::golden();
    tied.tensors.remove("output.weight").unwrap();
    let checkpoint = tied.open().unwrap();
    assert!(checkpoint.config.tied_embeddings);
    assert_eq!(checkpoint.weights.shape("lm_head.weight"), None);
    assert!(checkpoint.weights.load("lm_head.weight").is_err());

    Content::golden()
        .tensor("output_norm.weight", &[1.0; 16])
        .assert_refused("output_norm.weight has shape [16] instead of [32]");
    let mut missing = Content::golden();
    missing.tensors.remove("blk.1.attn_q.bias").unwrap();
    missing.tensors.remove("blk.0.ffn_norm.weight").unwrap();
    missing.assert_refused("missing blk.0.ffn_norm.weight, missing blk.1.attn_q.bias");
}

#[test]
fn damaged_files_are_refused_with_a_reason() {
    let bytes = golden_bytes();
    let with = |at: usize, patch: &[u8]| {
        let mut bytes = bytes.clone();
        bytes[at..at + patch.len()].copy_from_slice(patch);
        bytes
    };
    assert_refused(&[], "neither a GGUF file nor a directory");
    assert_refused(b"GGML1234", "neither a GGUF file nor a directory");
    assert_refused(&bytes[..10], "truncated or damaged?");
    assert_refused(&bytes[..bytes.len() - 1], "past the end of the file");
    assert_refused(&bytes[..3000], "truncated or damaged?");
    assert_refused(
        &with(4, &1u32.to_le_bytes()),
        "GGUF version 1 is not supported",
    );
    assert_refused(&with(4, &3u32.to_be_bytes()), "big-endian GGUF");
    assert_refused(
        &with(8, &u64::MAX.to_le_bytes()),
        "tensor count 18446744073709551615 can't fit",
    );
    assert_refused(
        &with(16, &(1u64 << 40).to_le_bytes()),
        "metadata count 1099511627776 can't fit",
    );
    assert_refused(
        &with(24, &(1u64 << 62).to_le_bytes()),
        "string length 4611686018427387904 can't fit",
    );
    assert_refused(&with(32, &[0xff]), "is not UTF-8");

    let value = |kind: u32, value: &[u8]| {
        [
            b"GGUF".as_slice(),
            &[3, 0, 0, 0],
            &[0; 8],
            &[1, 0, 0, 0, 0, 0, 0, 0],
            &[1, 0, 0, 0, 0, 0, 0, 0],
            b"k",
            &kind.to_le_bytes(),
            value,
        ]
        .concat()
    };
    assert_refused(
        &value(13, &[0; 16]),
        "metadata key k: unknown metadata value type 13",
    );
    assert_refused(&value(7, &[2; 16]), "2 is not a boolean");
    assert_refused(
        &value(
            9,
            &[[6, 0, 0, 0].as_slice(), &u64::MAX.to_le_bytes(), &[0; 16]].concat(),
        ),
        "array length 18446744073709551615 can't fit",
    );
    let nested = [[9, 0, 0, 0].as_slice(), &1u64.to_le_bytes()]
        .concat()
        .repeat(40);
    assert_refused(&value(9, &nested), "nested more than 4 deep");
}

#[test]
fn broken_tensor_directories_are_refused_with_a_reason() {
    let with = |dimensions: Vec<u64>, kind: u32| {
        let mut content = Content::golden();
        content
            .tensors
            .insert("x".to_string(), (dimensions, kind, vec![0; 64]));
        content
    };
    with(vec![1; 5], 0).assert_refused("tensor x: 5 dimensions");
    with(vec![], 0).assert_refused("tensor x: 0 dimensions");
    with(vec![4, 0], 0).assert_refused("tensor x: a dimension is 0");
    with(vec![1 << 40, 1 << 40], 0).assert_refused("is too large");
    with(vec![1 << 62], 0).assert_refused("is too large");
    with(vec![4], 18).assert_refused("tensor x: tensor type 18 (IQ3_XXS) is not supported");
    with(vec![1 << 20], 0).assert_refused("tensor x: 4194304 bytes at data offset");
    with(vec![4], 0).assert_refused("unknown x");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_damage_to_a_file_makes_the_reader_panic(
        patches in prop::collection::vec((0usize..6000, prop_oneof![any::<u8>(), Just(0), Just(0xff), Just(0x7f)]), 0..8),
        length in prop_oneof![4 => Just(usize::MAX), 1 => 0usize..8000],
    ) {
        let mut bytes = golden_bytes();
        for (at, byte) in patches {
            bytes[at] = byte;
        }
        bytes.truncate(length);
        if let Ok(checkpoint) = open_bytes(&bytes) {
            for name in checkpoint.weights.names() {
                let values = checkpoint.weights.load(&name).unwrap();
                prop_assert_eq!(values.len(), checkpoint.weights.shape(&name).unwrap().iter().product::<usize>());
            }
        }
    }

    #[test]
    fn no_header_makes_the_parser_panic(bytes in prop::collection::vec(any::<u8>(), 0..400), counts in any::<[u8; 2]>()) {
        let start = [b"GGUF".as_slice(), &[3, 0, 0, 0], &[counts[0] % 4, 0, 0, 0, 0, 0, 0, 0], &[counts[1] % 4, 0, 0, 0, 0, 0, 0, 0]].concat();
        let bytes = [start, bytes].concat();
        let _ = parse(bytes.as_slice(), bytes.len() as u64);
    }
}
