//! The reference model's tokenizer and chat template, from its GGUF file through the checkpoint reader to the server's text module.
//!
//! Needs the file that `cargo xtask fetch` brings.

use std::fs;
use std::path::PathBuf;

use outrider_bundle::manifest::TextFacts;
use outrider_server::text::{ChatMessage, EncodeError, Text};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, json};
use xtask::checkpoint::{self, Checkpoint};
use xtask::workspace::Workspace;

fn reference() -> Checkpoint {
    let path = Workspace::find()
        .expect("the tests run inside the workspace")
        .store()
        .join("smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf");
    assert!(
        path.is_file(),
        "{} is missing; run `cargo xtask fetch`",
        path.display()
    );
    checkpoint::open(&path).expect("the reference checkpoint is readable")
}

fn text_of(reference: &Checkpoint, chat_template: Option<&str>) -> Text {
    let files = &reference.text;
    let facts = TextFacts {
        tokenizer: "tokenizer.json".to_owned(),
        chat_template: None,
        bos_token: files.bos_token.clone(),
        eos_token: files.eos_token.clone(),
        add_bos: files.add_bos,
    };
    let vocab_size = reference.config.vocab_size;
    Text::new(
        files.tokenizer_json.as_bytes(),
        chat_template,
        &facts,
        vocab_size,
    )
    .expect("the reference text files are supported")
}

fn golden<T: DeserializeOwned>(name: &str) -> T {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("goldens/smollm2-135m")
        .join(name);
    let bytes = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_slice(&bytes).expect("the golden is well-formed")
}

#[derive(Deserialize)]
struct Strings {
    text: String,
    plain: Vec<u32>,
    with_specials: Vec<u32>,
}

#[test]
fn every_golden_string_has_its_ids() {
    let strings: Vec<Strings> = golden("tokenizer.json");
    assert_eq!(strings.len(), 25);
    // A template that says the string itself: there, and only there, control tokens are meant.
    let branches: String = strings
        .iter()
        .enumerate()
        .map(|(index, case)| {
            format!(
                "{{% if number == {index} %}}{{{{ {} }}}}{{% endif %}}",
                json!(case.text)
            )
        })
        .collect();
    let text = text_of(&reference(), Some(&branches));
    for (index, case) in strings.iter().enumerate() {
        assert_eq!(
            text.encode_plain(&case.text).unwrap(),
            case.plain,
            "{:?}",
            case.text
        );
        assert_eq!(
            text.encode_prompt(&case.text).unwrap(),
            case.plain,
            "{:?}",
            case.text
        );
        assert_eq!(text.decode(&case.plain), case.text);
        let number = Map::from_iter([("number".to_owned(), json!(index))]);
        assert_eq!(
            text.encode_chat(&[], number).unwrap(),
            case.with_specials,
            "{:?}",
            case.text
        );
    }
}

#[test]
fn a_text_is_refused_by_its_bytes_only_where_it_cannot_fit() {
    const CONTEXT_TOKENS: usize = 512;
    let reference = reference();
    for case in golden::<Vec<Strings>>("tokenizer.json") {
        let exact = text_of(&reference, None).with_context(case.plain.len());
        assert_eq!(exact.encode_plain(&case.text).unwrap(), case.plain);
    }
    let text = text_of(&reference, None).with_context(CONTEXT_TOKENS);
    for hopeless in ["7", "lorem ipsum dolor ", "\u{65e5}\u{672c}"] {
        let hopeless = hopeless.repeat(60_000 / hopeless.len());
        let error = text.encode_plain(&hopeless).unwrap_err();
        let EncodeError::TooLong { least_tokens, .. } = error else {
            panic!("{error}");
        };
        assert!(least_tokens > CONTEXT_TOKENS);
        let tokens = text_of(&reference, None).encode_plain(&hopeless).unwrap();
        assert!(least_tokens <= tokens.len());
    }
    // The vocabulary has no token for it, so that it is dropped.
    let dropped = text.encode_plain(&"\u{4}".repeat(60_000)).unwrap();
    assert!(dropped.len() <= 1, "{dropped:?}");
}

#[derive(Deserialize)]
struct Conversation {
    prompt: String,
    prompt_ids: Vec<u32>,
    greedy_ids: Vec<u32>,
}

#[test]
fn every_golden_conversation_has_its_prompt_ids() {
    let reference = reference();
    let text = text_of(&reference, reference.text.chat_template.as_deref());
    let conversations: Vec<Conversation> = golden("cases.json");
    assert_eq!(conversations.len(), 4);
    for case in conversations {
        let message = ChatMessage {
            role: "user".to_owned(),
            content: case.prompt,
            name: None,
        };
        assert_eq!(
            text.encode_chat(&[message], Map::new()).unwrap(),
            case.prompt_ids
        );
        // Streamed one token at a time, an answer is the text of all its tokens.
        let mut stream = text.stream(&[]);
        let mut streamed: String = case
            .greedy_ids
            .iter()
            .map(|&id| stream.push(id).text)
            .collect();
        streamed.push_str(&stream.finish());
        assert_eq!(streamed, text.decode(&case.greedy_ids));
    }
}
