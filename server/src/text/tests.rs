//! The text module through its public surface, against the `tokenizers` library and against goldens made with its Python sisters.

use std::path::Path;
use std::sync::LazyLock;

use proptest::prelude::*;
use proptest::sample::select;
use serde::de::DeserializeOwned;
use serde_json::json;

use super::*;

mod chat;
mod load;

const TOKENIZERS: [&str; 3] = [
    "byte-level",
    "sentencepiece-prepend",
    "sentencepiece-metaspace",
];

fn golden(path: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/goldens")
        .join(path);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn golden_json<T: DeserializeOwned>(path: &str) -> T {
    serde_json::from_slice(&golden(path)).unwrap()
}

fn tokenizer_json(name: &str) -> Vec<u8> {
    golden(&format!("tokenizers/{name}.json"))
}

/// A tokenizer file with a change.
fn changed(name: &str, change: impl FnOnce(&mut Value)) -> Vec<u8> {
    let mut json = serde_json::from_slice(&tokenizer_json(name)).unwrap();
    change(&mut json);
    serde_json::to_vec(&json).unwrap()
}

fn facts(bos_token: Option<&str>, add_bos: bool) -> TextFacts {
    TextFacts {
        tokenizer: "tokenizer.json".to_owned(),
        chat_template: None,
        bos_token: bos_token.map(str::to_owned),
        eos_token: None,
        add_bos,
    }
}

#[test]
fn a_text_that_cannot_fit_is_refused_before_it_is_tokenised_and_no_other_is() {
    let texts = [
        "a",
        "the quick brown fox",
        "日本語のテキスト",
        "🙂🙂🙂",
        "\u{0}\u{7f}\n\t  ",
        "e\u{301}\u{212a}\u{212b}",
        "    ",
        "<s>",
        "\u{2581}\u{2581}\u{2581}\u{2581} \u{2581}",
        "0123456789",
    ];
    for name in TOKENIZERS {
        let json = tokenizer_json(name);
        for text in texts
            .into_iter()
            .flat_map(|text| [text.to_owned(), text.repeat(50)])
        {
            let ids = build(&json, None).encode_plain(&text).unwrap();
            let exact = build(&json, None).with_context(ids.len());
            assert_eq!(exact.encode_plain(&text).unwrap(), ids, "{name} {text:?}");
            if name == "sentencepiece-metaspace" {
                // It has tokens that swallow all white space around them, so that a text of any length may fit.
                assert!(build(&json, None).shares.is_none());
                continue;
            }
            // Four bytes a token are more than the few merges of these vocabularies make of it.
            let far = text.repeat(1000);
            assert!(
                matches!(
                    exact.encode_plain(&far),
                    Err(EncodeError::TooLong { bytes, .. }) if bytes == far.len()
                ),
                "{name} {text:?}"
            );
        }
    }
}

fn build(tokenizer_json: &[u8], template: Option<&str>) -> Text {
    Text::new(tokenizer_json, template, &facts(None, false), 10_000).unwrap()
}

/// A tokenizer through this module and through the library alone.
struct Pair {
    name: String,
    text: Text,
    library: Tokenizer,
}

impl Pair {
    fn new(name: &str, tokenizer_json: &[u8]) -> Self {
        Self {
            name: name.to_owned(),
            text: build(tokenizer_json, None),
            library: Tokenizer::from_bytes(tokenizer_json).unwrap(),
        }
    }

    fn library_ids(&self, text: &str, control: bool) -> Vec<u32> {
        let mut library = self.library.clone();
        library.set_encode_special_tokens(!control);
        library.encode(text, false).unwrap().get_ids().to_vec()
    }
}

/// The goldens' tokenizers, and variants of them with other stages that models use.
static PAIRS: LazyLock<Vec<Pair>> = LazyLock::new(|| {
    let mut pairs: Vec<Pair> = TOKENIZERS
        .iter()
        .map(|name| Pair::new(name, &tokenizer_json(name)))
        .collect();
    pairs.push(Pair::new(
        "byte-level with a pattern of its own, whole words first",
        &changed("byte-level", |json| {
            let pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
            json["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false},
                {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
            ]});
            json["normalizer"] = json!({"type": "NFC"});
            json["model"]["ignore_merges"] = json!(true);
        }),
    ));
    pairs.push(Pair::new(
        "byte-level with a space before every part",
        &changed("byte-level", |json| {
            json["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = json!(true);
        }),
    ));
    pairs.push(Pair::new(
        "metaspace before every part, no byte tokens",
        &changed("sentencepiece-metaspace", |json| {
            let metaspace =
                json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
            json["pre_tokenizer"] = metaspace.clone();
            json["decoder"] = metaspace;
            json["model"]["byte_fallback"] = json!(false);
        }),
    ));
    pairs
});

/// Text that meets the corners of tokenizers: control tokens and parts of them, spaces, digits, scripts, marks.
fn awkward_text() -> impl Strategy<Value = String> {
    let pieces = select(
        &[
            "<|im_start|>",
            "<|im_end|>",
            "<|im_",
            "end|>",
            "<s>",
            "</s>",
            "<unk>",
            "<|user|>",
            "<mask>",
            "<think>",
            "</think>",
            "the target",
            "<0x41>",
            "▁",
            " ",
            "  ",
            "\n",
            "\t",
            "\r\n",
            "a",
            "the",
            " draft",
            "It's",
            "1",
            "234",
            "é",
            "e\u{301}",
            "语",
            "모",
            "👩‍👩‍👧",
            "\0",
            "\u{feff}",
            "<",
            "|",
            ">",
            "\u{F0000}",
            "\u{10FFFD}",
        ][..],
    );
    prop_oneof![
        4 => prop::collection::vec(pieces, 0..12).prop_map(|pieces| pieces.concat()),
        1 => any::<String>(),
    ]
}

#[derive(serde::Deserialize)]
struct TokenizerCase {
    text: String,
    plain: Vec<u32>,
    with_control: Vec<u32>,
    decoded: String,
}

#[test]
fn ids_and_texts_equal_the_goldens() {
    for name in TOKENIZERS {
        let text = build(&tokenizer_json(name), None);
        for case in golden_json::<Vec<TokenizerCase>>(&format!("tokenizers/{name}.cases.json")) {
            let context = format!("{name}: {:?}", case.text);
            let plain = text.encode_plain(&case.text).unwrap();
            assert_eq!(plain, case.plain, "{context}");
            let with_control = text.encoder.encode(&case.text, &[]).unwrap();
            assert_eq!(with_control, case.with_control, "{context}");
            assert_eq!(text.decode(&case.plain), case.decoded, "{context}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn ids_equal_the_librarys_for_any_text(text in awkward_text()) {
        for pair in &*PAIRS {
            let with_control = pair.text.encoder.encode(&text, &[]).unwrap();
            prop_assert_eq!(with_control, pair.library_ids(&text, true), "{}", pair.name);
            let plain = pair.text.encode_plain(&text).unwrap();
            prop_assert_eq!(plain, pair.library_ids(&text, false), "{}", pair.name);
        }
    }

    #[test]
    fn portions_equal_the_whole_and_the_library_for_any_ids(ids in prop::collection::vec(0_u32..720, 0..24)) {
        for pair in &*PAIRS {
            let mut stream = pair.text.stream(&[]);
            let mut joined = String::new();
            for &id in &ids {
                let pushed = stream.push(id);
                prop_assert!(!pushed.stopped);
                joined.push_str(&pushed.text);
            }
            joined.push_str(&stream.finish());
            prop_assert_eq!(&joined, &pair.text.decode(&ids), "{}", pair.name);
            let library = pair.library.decode(&ids, true).unwrap();
            // The library gives up on a whole run of byte tokens that is not valid, so only texts without losses compare there.
            if pair.name.starts_with("byte-level") || !joined.contains(char::REPLACEMENT_CHARACTER) {
                prop_assert_eq!(&joined, &library, "{}", pair.name);
            }
        }
    }

    #[test]
    fn plain_text_survives_the_way_there_and_back(text in any::<String>()) {
        let pair = &PAIRS[0];
        prop_assert_eq!(pair.text.decode(&pair.text.encode_plain(&text).unwrap()), text);
    }

    #[test]
    fn a_stop_string_cuts_the_whole_text(text in "[ab é语\n<]{0,30}", stop in prop::collection::vec("[ab é语\n<]{1,4}", 0..4)) {
        for pair in &*PAIRS {
            let ids = pair.text.encode_plain(&text).unwrap();
            let whole = pair.text.decode(&ids);
            let mut stream = pair.text.stream(&stop);
            let mut streamed = String::new();
            let mut stopped = false;
            for &id in &ids {
                let pushed = stream.push(id);
                prop_assert!(pushed.text.is_empty() || !stopped);
                streamed.push_str(&pushed.text);
                stopped = pushed.stopped;
            }
            let rest = stream.finish();
            prop_assert!(rest.is_empty() || !stopped);
            streamed.push_str(&rest);
            prop_assert!(whole.starts_with(&streamed));
            prop_assert_eq!(stopped, stop.iter().any(|stop| whole.contains(stop)));
            prop_assert!(!stop.iter().any(|stop| streamed.contains(stop)));
        }
    }
}

#[test]
fn a_character_split_over_tokens_comes_whole() {
    let text = build(&tokenizer_json("byte-level"), None);
    let ids = text.encode_plain("ok 👍").unwrap();
    let mut stream = text.stream(&[]);
    let portions: Vec<String> = ids.iter().map(|&id| stream.push(id).text).collect();
    assert_eq!(portions.concat(), "ok 👍");
    assert!(
        portions.len() > 4,
        "the emoji should take several tokens: {portions:?}"
    );

    // Without its last token only the beginning is there, and is replaced once.
    let mut stream = text.stream(&[]);
    let cut: String = ids[..ids.len() - 1]
        .iter()
        .map(|&id| stream.push(id).text)
        .collect();
    assert_eq!(
        (cut.as_str(), stream.finish().as_str()),
        ("ok ", "\u{FFFD}")
    );
}

#[test]
fn control_tokens_bring_no_text_but_have_bytes() {
    let text = build(&tokenizer_json("byte-level"), None);
    let ids = text
        .encoder
        .encode("<|im_start|>a<|im_end|> b", &[])
        .unwrap();
    assert_eq!(text.decode(&ids), "a b");
    assert_eq!(text.token_bytes(1), b"<|im_start|>");
    assert_eq!(text.token_bytes(9_999), b"");
    let bytes: Vec<u8> = ids.iter().flat_map(|&id| text.token_bytes(id)).collect();
    assert_eq!(bytes, b"<|im_start|>a<|im_end|> b");
}

#[test]
fn a_plain_prompt_begins_as_the_model_wants_it() {
    let json = tokenizer_json("sentencepiece-prepend");
    let with = Text::new(&json, None, &facts(Some("<s>"), true), 10_000).unwrap();
    let without = Text::new(&json, None, &facts(Some("<s>"), false), 10_000).unwrap();
    assert_eq!(with.encode_prompt("").unwrap(), [1]);
    assert!(without.encode_prompt("").unwrap().is_empty());
    let ids = without.encode_prompt("<s>hi").unwrap();
    assert!(!ids.contains(&1));
    assert_eq!(
        with.encode_prompt("<s>hi").unwrap(),
        [&[1], &ids[..]].concat()
    );
}

#[test]
fn long_texts_and_long_runs_are_taken() {
    let text = build(&tokenizer_json("byte-level"), None);
    for unit in [
        "a",
        " ",
        "\n",
        "\0",
        "1",
        "语",
        "👍",
        "<|im_end|>",
        "<",
        "word 1, ",
    ] {
        let long = unit.repeat((1 << 20) / unit.len()) + "x";
        let ids = text.encode_plain(&long).unwrap();
        assert_eq!(text.decode(&ids), long, "{unit:?}");
    }
}
