//! Text: chat templates, tokens to text, stop strings.

use std::fs;
use std::sync::LazyLock;

use outrider_bundle::manifest::TextFacts;
use outrider_server::text::{ChatMessage, Text};
use serde_json::{Map, Value};

use super::{parts, text};

/// More ids than any tokenizer of the goldens has.
const VOCAB_SIZE: usize = 10_000;

/// A tokenizer of the goldens, with a chat template.
pub(super) fn load(tokenizer: &str, template: Option<&str>) -> Text {
    let path = crate::fixtures::data(&format!("goldens/tokenizers/{tokenizer}.json"));
    let json = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    compile(&json, template).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn compile(
    tokenizer_json: &[u8],
    template: Option<&str>,
) -> Result<Text, outrider_server::text::TextError> {
    let facts = TextFacts {
        tokenizer: "tokenizer.json".to_owned(),
        chat_template: None,
        bos_token: None,
        eos_token: None,
        add_bos: false,
    };
    Text::new(tokenizer_json, template, &facts, VOCAB_SIZE)
}

pub(super) fn template(name: &str) -> String {
    let path = crate::fixtures::data(&format!("goldens/templates/{name}.jinja"));
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

static TEMPLATES: LazyLock<Vec<Text>> = LazyLock::new(|| {
    [
        "chatml",
        "chatml-generation",
        "features",
        "no-system",
        "turns",
    ]
    .map(|name| load("byte-level", Some(&template(name))))
    .into()
});

static PLAIN: LazyLock<Vec<Text>> = LazyLock::new(|| {
    [
        "byte-level",
        "sentencepiece-prepend",
        "sentencepiece-metaspace",
    ]
    .map(|name| load(name, None))
    .into()
});

static BYTE_LEVEL: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let path = crate::fixtures::data("goldens/tokenizers/byte-level.json");
    fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
});

/// What chooses a template that is in the input itself; compiling one takes long, so most inputs have a known one.
const OWN_TEMPLATE: u8 = 5;

/// A conversation for a chat template: a byte that says which template, the template itself where it is the input's own, `chat_template_kwargs` as
/// JSON, then role, content and name in turns.
pub fn chat_template(input: &[u8]) -> bool {
    let templates = &*TEMPLATES;
    let Some((&choice, rest)) = input.split_first() else {
        return false;
    };
    let mut parts = parts(rest);
    let own;
    let model = if choice == OWN_TEMPLATE {
        let source = text(parts.next().unwrap_or_default());
        match compile(&BYTE_LEVEL, Some(&source)) {
            Ok(model) => own = model,
            Err(_) => return false,
        }
        &own
    } else {
        &templates[usize::from(choice) % templates.len()]
    };
    let kwargs: Map<String, Value> =
        serde_json::from_slice(parts.next().unwrap_or_default()).unwrap_or_default();
    let words: Vec<String> = parts.map(text).collect();
    let messages: Vec<ChatMessage> = words
        .chunks(3)
        .map(|words| ChatMessage {
            role: words[0].clone(),
            content: words.get(1).cloned().unwrap_or_default(),
            name: words.get(2).filter(|name| !name.is_empty()).cloned(),
        })
        .collect();
    match model.encode_chat(&messages, kwargs) {
        Ok(ids) => {
            assert!(ids.iter().all(|&id| (id as usize) < VOCAB_SIZE));
            true
        }
        Err(_) => false,
    }
}

/// Token ids, two bytes each, after a byte that says which tokenizer.
pub fn detokenizer(input: &[u8]) -> bool {
    let models = &*PLAIN;
    let Some((&choice, rest)) = input.split_first() else {
        return false;
    };
    let Some(model) = models.get(usize::from(choice)) else {
        return false;
    };
    let ids: Vec<u32> = rest
        .chunks(2)
        .map(|bytes| bytes.iter().fold(0, |id, &byte| id << 8 | u32::from(byte)))
        .collect();
    let mut stream = model.stream(&[]);
    let mut portions = Vec::new();
    for &id in &ids {
        let pushed = stream.push(id);
        assert!(!pushed.stopped, "nothing was to stop at");
        portions.push(pushed.text);
    }
    portions.push(stream.finish());
    let streamed = portions.concat();
    assert_eq!(streamed, model.decode(&ids));
    // Of the tokenizers, only that of byte level has tokens that bring the same bytes wherever they stand.
    if choice == 0 {
        let is_text = |id: u32| !model.decode(&[id]).is_empty() || model.token_bytes(id).is_empty();
        let bytes: Vec<u8> = ids
            .iter()
            .filter(|&&id| is_text(id))
            .flat_map(|&id| model.token_bytes(id))
            .collect();
        assert_eq!(streamed, String::from_utf8_lossy(&bytes));
    }
    true
}

/// A text that arrives in portions, and up to four stop strings: the portions, then an empty part, then the strings.
pub fn stop_strings(input: &[u8]) -> bool {
    let model = &PLAIN[0];
    let all: Vec<&[u8]> = parts(input).collect();
    let Some(divide) = all.iter().position(|part| part.is_empty()) else {
        return false;
    };
    let stop: Vec<String> = all[divide + 1..]
        .iter()
        .take(4)
        .map(|part| text(part))
        .collect();
    let portions = all[..divide].iter().map(|part| text(part));
    let mut ids = Vec::new();
    for portion in portions {
        match model.encode_plain(&portion) {
            Ok(portion) => ids.extend(portion),
            Err(_) => return false,
        }
    }
    let whole = model.decode(&ids);

    let mut stream = model.stream(&stop);
    let (mut streamed, mut stopped) = (String::new(), false);
    for &id in &ids {
        let pushed = stream.push(id);
        assert!(!stopped || pushed.text.is_empty(), "text after the stop");
        streamed.push_str(&pushed.text);
        stopped |= pushed.stopped;
    }
    streamed.push_str(&stream.finish());
    assert_eq!((streamed.as_str(), stopped), cut(&whole, &stop), "{stop:?}");
    true
}

/// The definition: a text ends where the first stop string to be complete begins, the longest of several that are complete at once.
fn cut<'a>(whole: &'a str, stop: &[String]) -> (&'a str, bool) {
    let ends = whole.char_indices().map(|(at, char)| at + char.len_utf8());
    for end in ends {
        let seen = &whole[..end];
        let complete = stop
            .iter()
            .filter(|stop| !stop.is_empty() && seen.ends_with(stop.as_str()));
        if let Some(length) = complete.map(String::len).max() {
            return (&seen[..end - length], true);
        }
    }
    (whole, false)
}
