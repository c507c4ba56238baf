//! `/v1/completions` and `/v1/chat/completions`: from the bytes of a body to an answer.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use actix_web::http::header;
use actix_web::rt::time::timeout;
use actix_web::{HttpMessage, HttpRequest, HttpResponse, web};
use futures_util::future::{Either, select};
use serde_json::Value;
use tracing::Span;

use super::access::AccessRecord;
use super::backend::Backend;
use super::body;
use super::caller::Caller;
use super::choices::{Choices, Piece, Plan, Prompt, random_seed};
use super::error::ApiError;
use super::params::{
    self, ChatParams, CompletionParams, DEFAULT_COMPLETION_TOKENS, Generation, Limits,
};
use super::shape::{AnswerWriter, Head, Shape};
use super::sse::EventStream;
use super::turns::{Full, Turn, Turns};
use super::{Settings, State};
use crate::engine::{EngineError, Event, SubmitError};
use crate::lifecycle::Drain;

/// Characters of the bundle digest in `system_fingerprint`.
const FINGERPRINT_DIGITS: usize = 12;

/// Wait that a caller is told whose body can't be prepared now: turns are short.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Small bodies that may wait to be parsed and tokenised, however few the engine's queue takes: a moment later they may have slots.
const SMALL_BODIES_WAITING: usize = 1024;

/// Bodies above this are parsed and tokenised one at a time.
const LARGE_BODY_BYTES: usize = 64 * 1024;

/// A request that is checked and tokenised.
struct Prepared {
    shape: Shape,
    prompts: Vec<Prompt>,
    generation: Generation,
}

/// `POST /v1/completions`.
pub async fn completions(
    request: HttpRequest,
    payload: web::Payload,
    state: web::Data<State>,
) -> Result<HttpResponse, ApiError> {
    answer(request, payload, state, prepare_completion).await
}

/// `POST /v1/chat/completions`.
pub async fn chat_completions(
    request: HttpRequest,
    payload: web::Payload,
    state: web::Data<State>,
) -> Result<HttpResponse, ApiError> {
    answer(request, payload, state, prepare_chat).await
}

type Prepare = fn(&dyn Backend, Value, Limits) -> Result<Prepared, ApiError>;

async fn answer(
    request: HttpRequest,
    payload: web::Payload,
    state: web::Data<State>,
    prepare: Prepare,
) -> Result<HttpResponse, ApiError> {
    let drain = state.drain().clone();
    let answer = pin!(complete(request, payload, state, prepare));
    // A stream looks after itself; until there is one, a server that waits no longer ends the request here.
    match select(answer, pin!(drain.cut_off())).await {
        Either::Left((answer, _)) => answer,
        Either::Right(_) => Err(ApiError::from(EngineError::Stopped)),
    }
}

async fn complete(
    request: HttpRequest,
    payload: web::Payload,
    state: web::Data<State>,
    prepare: Prepare,
) -> Result<HttpResponse, ApiError> {
    let arrived = Instant::now();
    let backend = state.ready()?.clone();
    let settings = state.settings();
    let record = request
        .extensions()
        .get::<AccessRecord>()
        .cloned()
        .ok_or_else(|| ApiError::internal("the request has no access record"))?;
    record.caller(&request);
    let body = body::read(&request, payload, &state, settings.body_limit_bytes).await?;
    record.body(&body);

    let caller = Caller::of(&request);
    let limits = Limits {
        completions: settings.max_completions_per_request,
        vocab_size: backend.limits().vocab_size,
    };
    // A body can be megabytes of text to parse and tokenise: too long for a worker that other streams share.
    let prepared = {
        // Tokenising takes over a hundred times the memory of the text, and a text that will not fit is only known by its tokens:
        // large bodies go one after the other, small ones never wait for them.
        let (turns, capacity) = if body.len() > LARGE_BODY_BYTES {
            (&state.large_turns, settings.queue_capacity)
        } else {
            let capacity = settings.queue_capacity.max(SMALL_BODIES_WAITING);
            (&state.turns, capacity)
        };
        let turn = turn(turns, capacity, &caller, &settings, arrived).await?;
        let backend = backend.clone();
        let span = Span::current();
        let work = web::block(move || {
            let _entered = span.entered();
            let prepared = prepare(&*backend, body::json(&body)?, limits);
            // Kept to here, not in the handler: a client that leaves does not stop the work.
            drop(turn);
            prepared
        });
        timeout(
            settings.request_deadline.saturating_sub(arrived.elapsed()),
            work,
        )
        .await
        .map_err(|_| deadline_exceeded(&settings))?
        .map_err(|error| ApiError::internal(format!("preparing the request failed: {error}")))??
    };
    let drain = state.drain().clone();
    run(backend, prepared, caller, arrived, record, drain).await
}

/// A turn to prepare a body, within the times that hold for the engine's queue.
async fn turn(
    turns: &Turns,
    capacity: usize,
    caller: &Caller,
    settings: &Settings,
    arrived: Instant,
) -> Result<Turn, ApiError> {
    let waiting = turns.join(&caller.0, capacity).map_err(|Full| {
        let refusal = SubmitError::QueueFull {
            limit: capacity,
            retry_after: RETRY_AFTER,
        };
        ApiError::from_submit(refusal, "")
    })?;
    let left = settings.request_deadline.saturating_sub(arrived.elapsed());
    match timeout(left.min(settings.queue_timeout), waiting).await {
        Ok(Ok(turn)) => Ok(turn),
        Ok(Err(_)) => Err(ApiError::from(EngineError::Displaced {
            retry_after: RETRY_AFTER,
        })),
        Err(_) if left <= settings.queue_timeout => Err(deadline_exceeded(settings)),
        Err(_) => Err(ApiError::from(EngineError::QueueTimeout {
            limit: settings.queue_timeout,
            retry_after: RETRY_AFTER,
        })),
    }
}

fn deadline_exceeded(settings: &Settings) -> ApiError {
    ApiError::from(EngineError::DeadlineExceeded {
        limit: settings.request_deadline,
    })
}

/// The token ids of every prompt in a body of `/v1/completions`: all that happens to it before the engine is asked.
pub fn completion_prompts(
    backend: &dyn Backend,
    body: &[u8],
    max_completions: usize,
) -> Result<Vec<Vec<u32>>, ApiError> {
    prompts(backend, body, max_completions, prepare_completion)
}

/// The token ids of the prompt in a body of `/v1/chat/completions`: all that happens to it before the engine is asked.
pub fn chat_prompts(
    backend: &dyn Backend,
    body: &[u8],
    max_completions: usize,
) -> Result<Vec<Vec<u32>>, ApiError> {
    prompts(backend, body, max_completions, prepare_chat)
}

fn prompts(
    backend: &dyn Backend,
    body: &[u8],
    max_completions: usize,
    prepare: Prepare,
) -> Result<Vec<Vec<u32>>, ApiError> {
    let limits = Limits {
        completions: max_completions,
        vocab_size: backend.limits().vocab_size,
    };
    let prepared = prepare(backend, body::json(body)?, limits)?;
    let prompts = prepared.prompts.into_iter();
    Ok(prompts.map(|prompt| prompt.tokens).collect())
}

fn check_model(backend: &dyn Backend, model: &str) -> Result<(), ApiError> {
    let served = &backend.card().name;
    if model == served {
        Ok(())
    } else {
        Err(ApiError::model_not_found(model, served))
    }
}

fn prepare_completion(
    backend: &dyn Backend,
    body: Value,
    limits: Limits,
) -> Result<Prepared, ApiError> {
    let CompletionParams {
        model,
        prompts,
        echo,
        generation,
    } = CompletionParams::read(body, limits)?;
    check_model(backend, &model)?;
    let single = prompts.len() == 1;
    let prompts = prompts.into_iter().enumerate().map(|(position, prompt)| {
        let param = if single {
            "prompt".to_owned()
        } else {
            format!("prompt[{position}]")
        };
        let (tokens, text) = match prompt {
            params::Prompt::Text(text) => {
                let tokens = backend
                    .encode_prompt(&text)
                    .map_err(|error| ApiError::from_encode(error, &param))?;
                (tokens, Some(text))
            }
            params::Prompt::Tokens(tokens) => (tokens, None),
        };
        let echo = echo.then(|| text.unwrap_or_else(|| text_of(backend, &tokens)));
        Ok(Prompt {
            tokens,
            echo,
            param,
        })
    });
    Ok(Prepared {
        shape: Shape::Completion,
        prompts: prompts.collect::<Result<_, ApiError>>()?,
        generation,
    })
}

fn text_of(backend: &dyn Backend, tokens: &[u32]) -> String {
    let bytes: Vec<u8> = tokens
        .iter()
        .flat_map(|id| backend.token_bytes(*id))
        .collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

fn prepare_chat(backend: &dyn Backend, body: Value, limits: Limits) -> Result<Prepared, ApiError> {
    let ChatParams {
        model,
        messages,
        template_kwargs,
        generation,
    } = ChatParams::read(body, limits)?;
    check_model(backend, &model)?;
    let prompt = Prompt {
        tokens: backend.encode_chat(&messages, template_kwargs)?,
        echo: None,
        param: "messages".to_owned(),
    };
    Ok(Prepared {
        shape: Shape::Chat,
        prompts: vec![prompt],
        generation,
    })
}

async fn run(
    backend: Arc<dyn Backend>,
    prepared: Prepared,
    caller: Caller,
    arrived: Instant,
    record: AccessRecord,
    drain: Arc<Drain>,
) -> Result<HttpResponse, ApiError> {
    let Prepared {
        shape,
        prompts,
        generation,
    } = prepared;
    let card = backend.card();
    if let (Some(true), Err(reason)) = (generation.speculative, &card.draft) {
        return Err(ApiError::no_draft(reason));
    }
    let seed = match generation.seed {
        Some(seed) => seed,
        None => random_seed()?,
    };
    let prompt_tokens = prompts.iter().map(|prompt| prompt.tokens.len()).sum();
    let plan = Plan {
        request_id: record.request_id(),
        caller,
        arrived,
        seed,
        default_max_tokens: (shape == Shape::Completion).then_some(DEFAULT_COMPLETION_TOKENS),
        // A request can only do without: whether there is drafting at all is the server's switch.
        speculative: generation.speculative.unwrap_or(true),
    };
    let mut choices = Choices::submit(&*backend, prompts, &generation, &plan, &record)?;

    let prefix = match shape {
        Shape::Completion => "cmpl",
        Shape::Chat => "chatcmpl",
    };
    let digest = card
        .bundle_digest
        .get(..FINGERPRINT_DIGITS)
        .unwrap_or(&card.bundle_digest);
    #[expect(clippy::disallowed_methods, reason = "callers are told the date")]
    let now = SystemTime::now();
    let head = Head {
        shape,
        id: format!("{prefix}-{}", record.request_id()),
        created: now
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_secs()),
        model: card.name.clone(),
        system_fingerprint: format!("outrider-{}-{digest}", env!("CARGO_PKG_VERSION")),
        seed,
        token_ids: generation.return_token_ids,
        logprobs: generation.logprobs.is_some(),
    };
    let writer = AnswerWriter::new(head, choices.iter().count(), prompt_tokens);

    if generation.stream {
        // What fails before there is anything to send has a status of its own.
        choices.begun().await?;
        let include_usage = generation.include_usage;
        let stream = EventStream::new(backend, choices, writer, include_usage, record, drain);
        return Ok(HttpResponse::Ok()
            .insert_header((header::CONTENT_TYPE, "text/event-stream; charset=utf-8"))
            .insert_header((header::CACHE_CONTROL, "no-cache"))
            // nginx holds a stream back unless told not to.
            .insert_header(("x-accel-buffering", "no"))
            .body(stream));
    }
    whole(&*backend, choices, writer, record).await
}

async fn whole(
    backend: &dyn Backend,
    mut choices: Choices,
    mut writer: AnswerWriter,
    record: AccessRecord,
) -> Result<HttpResponse, ApiError> {
    let mut pieces: Vec<Piece> = choices.iter().map(|_| Piece::default()).collect();
    while let Some((index, event)) = poll_fn(|cx| choices.poll_next(cx)).await {
        let event = event?;
        // The token itself goes into the answer; should there be none, its record still counts it.
        writer.brought(index, usize::from(matches!(event, Event::Token { .. })));
        record.usage(writer.usage());
        pieces[index].absorb(event);
    }
    let response = HttpResponse::Ok().json(writer.whole(backend, choices.iter(), pieces));
    record.usage(writer.usage());
    Ok(response)
}
