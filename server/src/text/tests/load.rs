//! Tokenizer files and templates that are refused, with the reasons people read.

use super::*;

proptest! {
    #[test]
    fn a_damaged_tokenizer_file_is_an_error(at in any::<prop::sample::Index>(), byte in any::<u8>(), cut in any::<bool>()) {
        let mut json = tokenizer_json("sentencepiece-metaspace");
        let at = at.index(json.len());
        json[at] = byte;
        if cut {
            json.truncate(at);
        }
        match Text::new(&json, None, &facts(None, false), 10_000) {
            Ok(text) => drop(text.decode(&text.encode_plain("the target, 语 and <s>").unwrap_or_default())),
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }
}

#[test]
fn unsupported_tokenizers_are_refused_by_name() {
    let error = |json: &[u8], template, facts, vocab_size| {
        Text::new(json, template, &facts, vocab_size)
            .unwrap_err()
            .to_string()
    };
    let byte_level = tokenizer_json("byte-level");
    let decoder = |decoder: Value| {
        let json = changed("sentencepiece-prepend", |json| json["decoder"] = decoder);
        error(&json, None, facts(None, false), 10_000)
    };
    let errors = [
        error(b"{}", None, facts(None, false), 10_000),
        error(&byte_level, None, facts(None, false), 560),
        error(&byte_level, None, facts(Some("<bos>"), false), 10_000),
        error(&byte_level, None, facts(None, true), 10_000),
        error(
            &byte_level,
            Some("{% for m in messages %}{{ m }}"),
            facts(None, false),
            10_000,
        ),
        error(
            &byte_level,
            Some("{% nonsense %}"),
            facts(None, false),
            10_000,
        ),
        error(
            &changed("byte-level", |json| {
                json["added_tokens"][1]["single_word"] = json!(true)
            }),
            None,
            facts(None, false),
            10_000,
        ),
        error(
            &changed("byte-level", |json| {
                json["added_tokens"][3]["id"] = json!(700)
            }),
            None,
            facts(None, false),
            10_000,
        ),
        error(
            &changed("byte-level", |json| {
                json["normalizer"] = json!({"type": "Precompiled", "precompiled_charsmap": "AA=="})
            }),
            None,
            facts(None, false),
            10_000,
        ),
        error(
            &changed("byte-level", |json| json["model"]["dropout"] = json!(0.1)),
            None,
            facts(None, false),
            10_000,
        ),
        error(
            &changed("byte-level", |json| {
                json["model"]["ignore_merges"] = json!(true);
                json["pre_tokenizer"] = Value::Null;
            }),
            None,
            facts(None, false),
            10_000,
        ),
        error(
            &changed("byte-level", |json| {
                json["model"] = json!({"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["<|im_end|>", -1.0]], "byte_fallback": false});
                json["pre_tokenizer"] = Value::Null;
                json["added_tokens"] = json!([{"id": 1, "content": "<|im_end|>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}]);
            }),
            None,
            facts(None, false),
            10_000,
        ),
        decoder(Value::Null),
        decoder(
            json!({"type": "CTC", "pad_token": "p", "word_delimiter_token": "|", "cleanup": true}),
        ),
        decoder(json!({"type": "WordPiece", "prefix": "##", "cleanup": true})),
        decoder(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0})),
        decoder(
            json!({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 1}]}),
        ),
        decoder(
            json!({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}]}),
        ),
    ];
    insta::assert_snapshot!(errors.join("\n"));
}
