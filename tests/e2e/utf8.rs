//! Characters of several tokens: streams give whole ones only, and together they give the whole text.

use outrider_bundle::manifest::Precision;
use outrider_tests::answer::{streamed, whole};
use outrider_tests::servers::Servers;
use outrider_verify::wire::Api;
use serde_json::{Map, Value, json};

/// Each is repeated in the prompt, and only its tokens are allowed in the answer, so that a small model goes on with it.
const SAMPLES: [&str; 5] = [
    "你好，世界。",
    "안녕하세요 세계. ",
    "family: 👩‍👩‍👧‍👦\n",
    "🏳️‍🌈\n",
    "naïve café — “ok” ",
];

pub fn streams_never_split_a_character(servers: &Servers) -> anyhow::Result<()> {
    let server = servers.of(Precision::Int8)?;
    for sample in SAMPLES {
        let prompt = sample.repeat(12);
        // `echo` with no new token costs one forward and tells the prompt's tokens.
        let echoed = whole(
            server,
            Api::Completions,
            &json!({ "prompt": prompt, "echo": true, "max_tokens": 0, "logprobs": 0 }),
        )?;
        assert_eq!(echoed.text, prompt);
        let bias: Map<String, Value> = echoed
            .prompt_token_ids
            .iter()
            .map(|id| (id.to_string(), json!(100)))
            .collect();
        for fields in [
            json!({ "temperature": 0 }),
            json!({ "temperature": 1.5, "seed": 3 }),
        ] {
            let mut request = json!({ "prompt": prompt, "max_tokens": 48, "ignore_eos": true, "logit_bias": bias });
            for (name, value) in fields.as_object().into_iter().flatten() {
                request[name] = value.clone();
            }
            let at_once = whole(server, Api::Completions, &request)?;
            let (stream, deltas) = streamed(server, Api::Completions, &request, |_| {})?;
            assert_eq!(deltas.concat(), at_once.text, "{sample}: {deltas:?}");
            assert_eq!(stream.token_ids, at_once.token_ids, "{sample}");
            assert!(
                at_once
                    .token_ids
                    .iter()
                    .all(|id| bias.contains_key(&id.to_string())),
                "{sample}: {at_once:?}"
            );
            assert!(!at_once.text.is_ascii(), "{sample}: {:?}", at_once.text);
            if fields["temperature"] == 0 {
                assert!(
                    at_once.text.contains(sample.trim()),
                    "the model did not go on with {sample:?}: {:?}",
                    at_once.text
                );
                // Only the last character may be cut, by the length limit.
                let whole_characters = at_once.text.trim_end_matches('\u{fffd}');
                assert!(
                    !whole_characters.contains('\u{fffd}'),
                    "{sample}: {:?}",
                    at_once.text
                );
                assert!(
                    deltas
                        .iter()
                        .rev()
                        .skip_while(|delta| delta.is_empty())
                        .skip(1)
                        .all(|delta| !delta.contains('\u{fffd}')),
                    "{sample}: {deltas:?}"
                );
            }
        }
    }
    Ok(())
}
