//! One request, one text: the same bits whatever else runs and however the prompt is cut.
//!
//! A request is made alone, then while seven others arrive at random moments of its own progress, then on servers that cut prompts into other chunks.
//! Token ids, text, finish reason, usage and every digit of every log-probability must be equal.

use std::sync::mpsc;
use std::thread;

use outrider_bundle::manifest::Precision;
use outrider_tests::answer::{Answer, streamed};
use outrider_tests::servers::{self, Server, Servers};
use outrider_verify::wire::Api;
use serde_json::{Value, json};
use xtask::random::Random;

/// Chunk lengths of the other servers; shared servers run with the default, 64.
const PREFILL_CHUNKS_TOKENS: [usize; 2] = [2, 7];
const DEFAULT_PREFILL_CHUNK_TOKENS: usize = 64;
const OTHERS: usize = 7;
const BATCH_ROUNDS: u64 = 2;

const PROMPT: &str = "The harbour master keeps a list of every ship that enters before dawn: its name, its cargo, the depth of its keel, \
    and the hour at which the pilot went aboard. On the third of May he wrote down eleven names. The first was a collier with \
    a broken mast; the second carried oranges, wine and two passengers who would not give their names. \
    Tell the story of the third ship, in the style of a letter home.";

pub fn fp32_is_bit_equal_alone_in_a_batch_and_for_every_prefill_chunk(
    servers: &Servers,
) -> anyhow::Result<()> {
    check(servers, Precision::Fp32)
}

pub fn int8_is_bit_equal_alone_in_a_batch_and_for_every_prefill_chunk(
    servers: &Servers,
) -> anyhow::Result<()> {
    check(servers, Precision::Int8)
}

pub fn int4_is_bit_equal_alone_in_a_batch_and_for_every_prefill_chunk(
    servers: &Servers,
) -> anyhow::Result<()> {
    check(servers, Precision::Int4)
}

fn requests() -> Vec<Value> {
    let request = |fields: Value| {
        let mut request = json!({
            "prompt": PROMPT, "max_tokens": 40, "ignore_eos": true, "logprobs": 5,
        });
        for (name, value) in fields.as_object().into_iter().flatten() {
            request[name] = value.clone();
        }
        request
    };
    vec![
        request(json!({ "temperature": 0 })),
        request(
            json!({ "temperature": 0.9, "top_p": 0.95, "seed": 20_240_607, "frequency_penalty": 0.5 }),
        ),
    ]
}

fn check(servers: &Servers, precision: Precision) -> anyhow::Result<()> {
    let shared = servers.of(precision)?;
    let mut alone = Vec::new();
    for request in requests() {
        let answer = ask(shared, &request)?;
        assert_eq!(answer.token_ids.len(), 40, "{answer:?}");
        assert_eq!(answer.logprobs.len(), 40, "{answer:?}");
        for round in 0..BATCH_ROUNDS {
            let in_batch = ask_with_others(shared, &request, round)?;
            assert_equal(
                &answer,
                &in_batch,
                &format!("{precision:?}, {OTHERS} others, round {round}"),
            );
        }
        alone.push(answer);
    }
    for chunk_tokens in PREFILL_CHUNKS_TOKENS {
        let command =
            servers::command(precision)?.set("serving.runtime.prefill_chunk_tokens", chunk_tokens);
        let server = Server::start(&command)?;
        for (request, answer) in requests().iter().zip(&alone) {
            let other = ask(&server, request)?;
            let what = format!(
                "{precision:?}, prefill chunks of {chunk_tokens} and {DEFAULT_PREFILL_CHUNK_TOKENS}"
            );
            assert_equal(answer, &other, &what);
        }
    }
    Ok(())
}

fn ask(server: &Server, request: &Value) -> anyhow::Result<Answer> {
    Ok(streamed(server, Api::Completions, request, |_| {})?.0)
}

/// Asks while others come and go: some run before the request is made, the rest start when it has produced a random number of tokens.
fn ask_with_others(server: &Server, request: &Value, round: u64) -> anyhow::Result<Answer> {
    let mut random = Random::new(round);
    let mut others: Vec<Value> = (0..OTHERS)
        .map(|other| {
            json!({
                "prompt": &PROMPT[random.below(40)..][..20 + random.below(200)],
                "max_tokens": 20 + random.below(60),
                "temperature": 1.0,
                "seed": other,
                "ignore_eos": true,
            })
        })
        .collect();
    let mut later: Vec<(usize, Value)> = others
        .split_off(3)
        .into_iter()
        .map(|other| (1 + random.below(30), other))
        .collect();

    thread::scope(|scope| {
        let mut running = Vec::new();
        for other in others {
            let (started, first_token) = mpsc::channel();
            running.push(scope.spawn(move || {
                streamed(server, Api::Completions, &other, |_| {
                    // Only the first one is waited for.
                    let _ = started.send(());
                })
            }));
            // An error ends the wait as well, and is seen at the join.
            let _ = first_token.recv();
        }
        let answer = streamed(server, Api::Completions, request, |events| {
            for (_, other) in later.extract_if(.., |(at, _)| *at <= events) {
                running
                    .push(scope.spawn(move || streamed(server, Api::Completions, &other, |_| {})));
            }
        })?;
        assert!(
            later.is_empty(),
            "the request ended before all others had started: {later:?}"
        );
        for other in running {
            let (other, _) = other.join().expect("another request panicked")?;
            assert_eq!(other.finish_reason, "length", "{other:?}");
        }
        Ok(answer.0)
    })
}

fn assert_equal(first: &Answer, second: &Answer, what: &str) {
    if first == second {
        return;
    }
    let position = first
        .token_ids
        .iter()
        .zip(&second.token_ids)
        .take_while(|(a, b)| a == b)
        .count();
    let bits = first
        .logprobs
        .iter()
        .zip(&second.logprobs)
        .take_while(|(a, b)| a == b)
        .count();
    panic!(
        "{what}: token ids equal up to position {position}, log-probabilities up to {bits}: {:?} and {:?}\n{first:?}\n{second:?}",
        first.logprobs.get(bits),
        second.logprobs.get(bits)
    );
}
