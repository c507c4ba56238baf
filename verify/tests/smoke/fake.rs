//! A small OpenAI-compatible service on a real socket, right in all it does except for one fault that a test asks for.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use serde_json::{Value, json};

/// What the service does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    None,
    /// Refuses `return_token_ids`, as servers without the extension do.
    NoTokenIds,
    /// Every sampled answer is another one.
    SeedIgnored,
    /// The stop string stays in the text.
    StopLeaks,
    /// As `StopLeaks`, in streams only.
    StopLeaksInStream,
    /// One completion token too many is counted.
    UsageOffByOne,
    /// The second event of a stream is lost.
    StreamDropsText,
    /// The connection closes in the middle of a stream.
    StreamCut,
    /// Wrong types are ignored.
    AcceptsBadTypes,
    /// Wrong types end in a 500.
    InternalErrors,
    /// Errors are plain text.
    UntypedErrors,
    /// Any model name is taken.
    AnyModel,
    /// Wants a key.
    Unauthorized,
    /// Its model list is empty.
    NoModels,
    /// Does not say whether it drafts, as servers without the extension do not.
    NoSpeculation,
    /// Has no draft.
    NoDraft,
    /// Its draft fails.
    Suspended,
    /// Greedy answers are others with drafting.
    DraftChangesGreedy,
    /// Sampled answers are others with drafting.
    DraftChangesSampled,
    /// Says that it drafts, and does not.
    NeverDrafts,
    NeverPays,
    /// Drafts for requests that want none.
    DraftsUnasked,
    /// Does not count what it drafts.
    NoCounts,
}

const VOCABULARY: [&str; 12] = [
    " sea", " waves", " quiet", " under", " morning", " of", " grey", " light", " salt", " wind",
    " rolls", " home",
];

/// Starts the service; it lives as long as the test process.
pub fn serve(fault: Fault) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let counter = Arc::new(AtomicU64::new(0));
    thread::spawn(move || {
        for connection in listener.incoming() {
            let counter = counter.clone();
            thread::spawn(move || {
                let mut connection = connection.unwrap();
                // A client that is gone is no fault of the service.
                let _ = answer(&mut connection, fault, &counter);
            });
        }
    });
    address
}

fn answer(connection: &mut TcpStream, fault: Fault, counter: &AtomicU64) -> std::io::Result<()> {
    let mut reader = BufReader::new(connection.try_clone()?);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let target = line.split(' ').nth(1).unwrap_or_default().to_owned();
    let mut length = 0;
    loop {
        line.clear();
        reader.read_line(&mut line)?;
        if line.trim().is_empty() {
            break;
        }
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;

    if fault == Fault::Unauthorized {
        return whole(
            connection,
            401,
            &error("missing key", "authentication_error"),
        );
    }
    if target == "/v1/models" {
        let mut model = json!({ "id": "sea-words", "object": "model", "bundle_digest": "sha256:5ea", "lossless_class": "exact" });
        let (drafting, detail) = match fault {
            Fault::NoDraft => ("unavailable", json!("the bundle has no draft")),
            Fault::Suspended => ("suspended", json!("draft passes failed repeatedly")),
            _ => ("on", Value::Null),
        };
        if fault != Fault::NoSpeculation {
            let adaptive_width = fault == Fault::NeverPays;
            model["speculation"] =
                json!({ "drafting": drafting, "detail": detail, "adaptive_width": adaptive_width });
        }
        let data = if fault == Fault::NoModels {
            json!([])
        } else {
            json!([model])
        };
        return whole(
            connection,
            200,
            &json!({ "object": "list", "data": data }).to_string(),
        );
    }
    match generate(&target, &body, fault, counter) {
        Ok((request, generation)) if request["stream"] == true => {
            stream(connection, &target, &generation, fault)
        }
        Ok((_, generation)) => whole(connection, 200, &whole_body(&target, &generation)),
        Err((status, _)) if fault == Fault::InternalErrors && status == 400 => {
            whole(connection, 500, &error("worker panicked", "server_error"))
        }
        Err((status, message)) if fault == Fault::UntypedErrors => {
            whole(connection, status, &message)
        }
        Err((status, message)) => whole(
            connection,
            status,
            &error(&message, "invalid_request_error"),
        ),
    }
}

struct Generation {
    deltas: Vec<String>,
    ids: Option<Vec<usize>>,
    prompt_ids: Vec<usize>,
    finish_reason: &'static str,
    usage: Value,
}

fn generate(
    target: &str,
    body: &[u8],
    fault: Fault,
    counter: &AtomicU64,
) -> Result<(Value, Generation), (u16, String)> {
    let bad = |message: String| Err((400, message));
    let Ok(request) = serde_json::from_slice::<Value>(body) else {
        return bad("the body is not JSON".into());
    };
    if request["model"] != "sea-words" && fault != Fault::AnyModel {
        return Err((
            404,
            format!("the model {} does not exist", request["model"]),
        ));
    }
    if !request["temperature"].is_null()
        && !request["temperature"].is_number()
        && fault != Fault::AcceptsBadTypes
    {
        return bad("`temperature` must be a number from 0 to 2".into());
    }
    if request["max_tokens"]
        .as_i64()
        .is_some_and(|tokens| tokens < 1)
    {
        return bad("`max_tokens` must be at least 1".into());
    }
    let drafts = !matches!(
        fault,
        Fault::NoDraft | Fault::NoSpeculation | Fault::Suspended
    ) && request["speculative"]["enabled"] != false;
    if fault == Fault::NoDraft && request["speculative"]["enabled"] == true {
        return bad("`speculative.enabled` is true, but this server cannot draft".into());
    }
    if fault == Fault::NoTokenIds && !request["return_token_ids"].is_null() {
        return bad("unknown field `return_token_ids`".into());
    }

    let prompt = if target == "/v1/completions" {
        request["prompt"].to_string()
    } else {
        request["messages"].to_string()
    };
    let prompt_ids: Vec<usize> = prompt.split(' ').map(str::len).collect();
    let mut state: u64 = prompt_ids.iter().sum::<usize>() as u64;
    if request["temperature"].as_f64().unwrap_or(1.0) > 0.0 {
        state += request["seed"].as_u64().unwrap_or_default();
        if fault == Fault::SeedIgnored {
            state += counter.fetch_add(1, Ordering::Relaxed);
        }
        state += u64::from(fault == Fault::DraftChangesSampled && drafts);
    } else {
        state += u64::from(fault == Fault::DraftChangesGreedy && drafts);
    }
    let mut ids = Vec::new();
    for _ in 0..request["max_tokens"].as_u64().unwrap_or(16) {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ids.push((state >> 33) as usize % VOCABULARY.len());
    }

    let mut deltas: Vec<String> = ids.iter().map(|&id| VOCABULARY[id].to_owned()).collect();
    let mut finish_reason = "length";
    let stop = request["stop"][0].as_str();
    if let Some((stop, start)) = stop.and_then(|stop| Some((stop, deltas.concat().find(stop)?))) {
        finish_reason = "stop";
        let leaks = fault == Fault::StopLeaks
            || (fault == Fault::StopLeaksInStream && request["stream"] == true);
        let text = deltas.concat()[..if leaks { start + stop.len() } else { start }].to_owned();
        let mut end_chars = 0;
        let needed = deltas.iter().take_while(|delta| {
            end_chars += delta.len();
            end_chars < start + stop.len()
        });
        ids.truncate(needed.count() + 1);
        deltas = vec![text];
    }
    let completion_tokens = ids.len() + usize::from(fault == Fault::UsageOffByOne);
    let mut usage = json!({
        "prompt_tokens": prompt_ids.len(),
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_ids.len() + completion_tokens,
    });
    if fault != Fault::NoCounts {
        let steps = match fault {
            Fault::NeverDrafts | Fault::NeverPays => 0,
            Fault::DraftsUnasked => ids.len() / 3,
            _ if drafts => ids.len() / 3,
            _ => 0,
        };
        usage["speculative"] =
            json!({ "drafted_tokens": 7 * steps, "accepted_tokens": 2 * steps, "steps": steps });
    }
    let ids = (request["return_token_ids"] == true).then_some(ids);
    let generation = Generation {
        deltas,
        ids,
        prompt_ids,
        finish_reason,
        usage,
    };
    Ok((request, generation))
}

fn whole_body(target: &str, generation: &Generation) -> String {
    let text = generation.deltas.concat();
    let mut choice = if target == "/v1/completions" {
        json!({ "index": 0, "text": text })
    } else {
        json!({ "index": 0, "message": { "role": "assistant", "content": text } })
    };
    choice["finish_reason"] = generation.finish_reason.into();
    if let Some(ids) = &generation.ids {
        choice["token_ids"] = json!(ids);
        choice["prompt_token_ids"] = json!(generation.prompt_ids);
    }
    let object = if target == "/v1/completions" {
        "text_completion"
    } else {
        "chat.completion"
    };
    json!({ "object": object, "choices": [choice], "usage": generation.usage }).to_string()
}

fn stream(
    connection: &mut TcpStream,
    target: &str,
    generation: &Generation,
    fault: Fault,
) -> std::io::Result<()> {
    write!(
        connection,
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    )?;
    let object = if target == "/v1/completions" {
        "text_completion"
    } else {
        "chat.completion.chunk"
    };
    let last = generation.deltas.len() - 1;
    for (index, delta) in generation.deltas.iter().enumerate() {
        if index == 1 && fault == Fault::StreamDropsText {
            continue;
        }
        if index == 2 && fault == Fault::StreamCut {
            return write!(connection, "data: {{\"object\":");
        }
        let mut choice = if target == "/v1/completions" {
            json!({ "index": 0, "text": delta })
        } else {
            json!({ "index": 0, "delta": { "content": delta } })
        };
        choice["finish_reason"] = if index == last {
            generation.finish_reason.into()
        } else {
            Value::Null
        };
        if let Some(ids) = &generation.ids {
            choice["token_ids"] = if last == 0 {
                json!(ids)
            } else {
                json!([ids[index]])
            };
            if index == 0 {
                choice["prompt_token_ids"] = json!(generation.prompt_ids);
            }
        }
        write!(
            connection,
            "data: {}\n\n",
            json!({ "object": object, "choices": [choice] })
        )?;
    }
    write!(
        connection,
        "data: {}\n\n",
        json!({ "object": object, "choices": [], "usage": generation.usage })
    )?;
    write!(connection, "data: [DONE]\n\n")
}

fn whole(connection: &mut TcpStream, status: u16, body: &str) -> std::io::Result<()> {
    let length = body.len();
    write!(
        connection,
        "HTTP/1.1 {status} Status\r\ncontent-type: application/json\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
    )
}

fn error(message: &str, kind: &str) -> String {
    json!({ "error": { "message": message, "type": kind, "param": null, "code": null } })
        .to_string()
}
