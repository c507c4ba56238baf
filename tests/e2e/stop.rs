//! Stop strings in real answers, cut out of the answer itself at every place a stop string can fall.

use outrider_bundle::manifest::Precision;
use outrider_tests::answer::{streamed, whole};
use outrider_tests::servers::Servers;
use outrider_verify::wire::Api;
use serde_json::{Value, json};

const PROMPT: &str = "List the seven days of the week, one per line.";

pub fn stop_strings_end_the_text_wherever_they_fall(servers: &Servers) -> anyhow::Result<()> {
    let server = servers.of(Precision::Int8)?;
    let free_request = json!({ "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": true, "logprobs": 0 });
    let free = whole(server, Api::Completions, &free_request)?;
    let pieces: Vec<String> = free
        .logprobs
        .iter()
        .map(|entry| entry["token"].as_str().unwrap_or_default().to_owned())
        .collect();
    assert_eq!(
        pieces.concat(),
        free.text,
        "the cases below need tokens that are whole characters"
    );

    let check = |name: &str, stop: Value| -> anyhow::Result<()> {
        let stops: Vec<&str> = stop.as_array().map_or_else(
            || stop.as_str().into_iter().collect(),
            |stops| stops.iter().filter_map(Value::as_str).collect(),
        );
        // Generation can't look ahead: the stop string that is complete first ends it, the longest of those that are complete at once.
        let ends = stops
            .iter()
            .filter_map(|stop| Some((free.text.find(stop)? + stop.len(), stop.len())));
        let found = ends
            .min_by_key(|&(end, length)| (end, std::cmp::Reverse(length)))
            .map(|(end, length)| (end - length, length));
        let (expected_text, expected_reason) = match found {
            Some((start, _)) => (&free.text[..start], "stop"),
            None => (free.text.as_str(), "length"),
        };
        let request = json!({ "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": true, "stop": stop });
        let at_once = whole(server, Api::Completions, &request)?;
        let (stream, deltas) = streamed(server, Api::Completions, &request, |_| {})?;
        for (how, answer) in [("whole", &at_once), ("stream", &stream)] {
            assert_eq!(answer.text, expected_text, "{name}, {how}: stop {stop}");
            assert_eq!(
                answer.finish_reason, expected_reason,
                "{name}, {how}: stop {stop}"
            );
        }
        assert_eq!(deltas.concat(), expected_text, "{name}: {deltas:?}");
        assert_eq!(at_once.token_ids, stream.token_ids, "{name}");
        assert_eq!(at_once.usage, stream.usage, "{name}");
        assert_eq!(
            at_once.usage["completion_tokens"],
            at_once.token_ids.len(),
            "{name}"
        );
        if let Some((start, length)) = found {
            // Generation ends with the token that completes the stop string.
            let mut end = 0;
            let needed = pieces.iter().position(|piece| {
                end += piece.len();
                end >= start + length
            });
            assert_eq!(
                at_once.token_ids.len(),
                needed.map_or(pieces.len(), |last| last + 1),
                "{name}: stop {stop}"
            );
        }
        Ok(())
    };

    let long = pieces
        .iter()
        .position(|piece| piece.is_ascii() && piece.trim().len() >= 4)
        .expect("a week has a long word");
    let text_of = |from: usize, to: usize| pieces[from..to].concat();
    let inner = &pieces[long].trim()[1..3];
    check("inside one token", json!(inner))?;
    check("one whole token", json!(pieces[long]))?;
    let tail: String = pieces[long].chars().skip(1).collect();
    let head: String = pieces[long + 1].chars().take(1).collect();
    check(
        "from inside one token to inside the next",
        json!(format!("{tail}{head}")),
    )?;
    check("over five tokens", json!(text_of(long, long + 5)))?;
    check("the first token", json!(pieces[0]))?;
    check(
        "the last token",
        json!(text_of(pieces.len() - 2, pieces.len())),
    )?;
    check("not there", json!("\u{1}"))?;
    check(
        "begins as the text does but never completes",
        json!(format!("{}\u{1}", text_of(long, long + 3))),
    )?;
    check(
        "begins at the end of the text and is cut off by it",
        json!(format!("{}\u{1}", pieces[pieces.len() - 1])),
    )?;
    check(
        "the earliest of several",
        json!([text_of(20, 22), inner, text_of(30, 31), "\u{1}"]),
    )?;
    check(
        "one stop string inside another",
        json!([text_of(long, long + 3), tail]),
    )?;
    Ok(())
}
