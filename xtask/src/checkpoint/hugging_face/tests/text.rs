//! Tokenizer, template and generation settings.

use serde_json::{Value, json};

use super::*;

#[test]
fn text_files_and_generation_defaults_are_read() {
    let checkpoint = open(&golden("hugging_face/llama")).unwrap();
    assert!(checkpoint.text.add_bos);
    assert_eq!(checkpoint.text.bos_token.as_deref(), Some("<s>"));
    assert_eq!(checkpoint.text.eos_token.as_deref(), Some("</s>"));
    assert!(
        checkpoint
            .text
            .chat_template
            .unwrap()
            .starts_with("{% for message")
    );
    assert_eq!(checkpoint.generation.eos_token_ids, [2]);
    assert_eq!(checkpoint.generation.temperature, None);

    let checkpoint = open(&golden("hugging_face/llama-llama3")).unwrap();
    assert_eq!(
        checkpoint.text.bos_token.as_deref(),
        Some("<s>"),
        "the token is written as an object"
    );
    assert!(
        checkpoint
            .text
            .chat_template
            .unwrap()
            .starts_with("{% for message"),
        "the template is the one named default"
    );
    assert_eq!(checkpoint.generation.eos_token_ids, [2, 4]);
    assert_eq!(
        (
            checkpoint.generation.temperature,
            checkpoint.generation.top_p,
            checkpoint.generation.top_k
        ),
        (Some(0.6), Some(0.9), None)
    );

    let checkpoint = open(&golden("hugging_face/qwen2")).unwrap();
    assert!(!checkpoint.text.add_bos);
    assert_eq!(checkpoint.text.bos_token, None);
    assert!(
        checkpoint
            .text
            .chat_template
            .unwrap()
            .starts_with("{% for message"),
        "the template file wins"
    );
    assert_eq!(checkpoint.generation.top_k, Some(20));

    let checkpoint = open(&golden("hugging_face/qwen3")).unwrap();
    assert_eq!(checkpoint.text.chat_template, None);
    let encoder: tokenizers::Tokenizer = checkpoint.text.tokenizer_json.parse().unwrap();
    assert_eq!(
        encoder
            .decode(encoder.encode("the and", false).unwrap().get_ids(), false)
            .unwrap(),
        "the and"
    );
}

#[test]
fn tokenizers_that_cannot_be_served_as_they_are_are_refused() {
    let config = |changes: Value| Edited::copy("llama").set("tokenizer_config.json", changes);
    assert_refused(
        &config(json!({"add_eos_token": true})),
        "add_eos_token true is not supported",
    );
    assert_refused(
        &config(json!({"add_bos_token": false})),
        "add_bos_token false, but the post_processor of tokenizer.json says true",
    );
    assert_refused(
        &config(json!({"bos_token": "</s>"})),
        "starts a prompt with <s>, but bos_token is </s>",
    );
    assert_refused(
        &config(json!({"eos_token": 2})),
        "eos_token is 2, expected a string",
    );
    assert_refused(
        &config(json!({"chat_template": [{"name": "rag", "template": ""}]})),
        "no template named default, only [\"rag\"]",
    );
    assert!(config(json!({"add_bos_token": true})).open().text.add_bos);

    let processor = |single: Value| {
        Edited::copy("llama").set(
            "tokenizer.json",
            json!({"post_processor": {"type": "TemplateProcessing", "single": single}}),
        )
    };
    let (text, special) = (
        json!({"Sequence": {"id": "A"}}),
        json!({"SpecialToken": {"id": "<s>"}}),
    );
    assert!(!processor(json!([text])).open().text.add_bos);
    assert_refused(
        &processor(json!([special, text, special])),
        "adds more than one token",
    );
    let bert = json!({"post_processor": {"type": "BertProcessing"}});
    assert_refused(
        &Edited::copy("llama").set("tokenizer.json", bert),
        "post_processor BertProcessing is not supported",
    );

    assert_refused(
        &Edited::copy("llama").remove("tokenizer.json"),
        "tokenizer.json",
    );
    let added = json!({"added_tokens": [{"id": 128, "content": "<extra>"}]});
    assert_refused(
        &Edited::copy("llama").set("tokenizer.json", added),
        "token id 128, but the embedding has only 128 rows",
    );
}

#[test]
fn token_names_may_come_from_the_older_file() {
    let edited = Edited::copy("qwen3").remove("tokenizer_config.json").write(
        "special_tokens_map.json",
        r#"{"eos_token": {"content": "</s>"}, "bos_token": "<s>"}"#,
    );
    let text = edited.open().text;
    assert_eq!(
        (text.bos_token.as_deref(), text.eos_token.as_deref()),
        (Some("<s>"), Some("</s>"))
    );
    let text = edited
        .write("tokenizer_config.json", r#"{"bos_token": null}"#)
        .open()
        .text;
    assert_eq!(
        (text.bos_token.as_deref(), text.eos_token.as_deref()),
        (None, Some("</s>"))
    );
}

#[test]
fn generation_settings_are_checked() {
    let file = "generation_config.json";
    for (changes, expected) in [
        (
            json!({"eos_token_id": [2, 128]}),
            "eos_token_id 128 is not a token id, allowed are 0 to 127",
        ),
        (
            json!({"eos_token_id": "</s>"}),
            "eos_token_id \"</s>\" is not a token id",
        ),
        (json!({"eos_token_id": []}), "eos_token_id is an empty list"),
        (
            json!({"do_sample": true, "temperature": -1}),
            "temperature is -1",
        ),
        (json!({"do_sample": true, "top_p": 0}), "top_p is 0"),
        (json!({"do_sample": true, "top_k": -1}), "top_k is -1"),
        (json!({"do_sample": true, "min_p": 2}), "min_p is 2"),
        (
            json!({"repetition_penalty": 0}),
            "repetition_penalty is 0, allowed is above 0 up to 10",
        ),
    ] {
        assert_refused(&Edited::copy("llama").set(file, changes), expected);
    }
    assert_eq!(
        Edited::copy("llama")
            .remove(file)
            .open()
            .generation
            .eos_token_ids,
        [2],
        "config.json says it too"
    );
    let greedy_with_penalty = json!({"do_sample": false, "repetition_penalty": 1.1, "min_p": 0.1});
    let defaults = Edited::copy("llama")
        .set(file, greedy_with_penalty)
        .open()
        .generation;
    assert_eq!(
        (defaults.repetition_penalty, defaults.min_p),
        (Some(1.1), None),
        "a penalty counts without sampling too"
    );
    assert_refused(
        &Edited::copy("llama")
            .remove(file)
            .without("config.json", &["eos_token_id"]),
        "has an eos_token_id",
    );
    assert_eq!(
        Edited::copy("llama")
            .set(file, json!({"temperature": -1}))
            .open()
            .generation
            .temperature,
        None,
        "without sampling it has no effect"
    );
}
