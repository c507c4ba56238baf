//! `smoke`: does the service keep the basic promises of its interface?
//!
//! Each check is one function that returns evidence; [`CHECKS`] is their order.
//! Requests are small (at most 24 tokens), so that a run takes seconds and may be made against a service that carries traffic.

use serde_json::{Map, Value, json};

use crate::checks::{self, Stop, complete, equal, ok_json, summary, typed_error};
use crate::client::{Client, Streamed};
use crate::report::{Model, Report};
use crate::wire::{Api, Generation, Speculative, shorten};

const CHAT_PROMPT: &str = "Write one sentence about the sea.";
/// One that a model goes on with, where it would end a finished sentence at once.
const COMPLETION_PROMPT: &str = "The sea was calm, and the captain";
const MAX_TOKENS: u64 = 24;
/// How often both requests are made until something is drafted.
const DRAFTING_ROUNDS: usize = 8;
/// Characters of the stop string: longer than most tokens' tails, so that it tends to cross a token's edge.
const STOP_CHARS: usize = 5;

fn prompt(api: Api) -> &'static str {
    match api {
        Api::Chat => CHAT_PROMPT,
        Api::Completions => COMPLETION_PROMPT,
    }
}

/// What to check.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The model to ask; the first one of the service's list when not given.
    pub model: Option<String>,
}

/// Runs every check against the service.
pub fn run(client: &Client, options: &Options) -> Report {
    let mut smoke = Smoke {
        client,
        wanted_model: options.model.clone(),
        model: None,
        speculation: None,
        returns_token_ids: true,
        greedy_chat: None,
        greedy_completion: None,
    };
    let outcomes = CHECKS
        .iter()
        .map(|&(name, expected, check)| (name, expected, check(&mut smoke)));
    let (checks, error) = checks::run(outcomes);
    Report::new("smoke", client.base(), smoke.model, checks, error)
}

type CheckFn = fn(&mut Smoke<'_>) -> Result<String, Stop>;

/// Name, what a right service does, and the check.
const CHECKS: &[(&str, &str, CheckFn)] = &[
    (
        "models-list",
        "the list holds the model that is asked",
        models_list,
    ),
    (
        "chat",
        "200, a chat completion with finish reason `stop` or `length`",
        |smoke| smoke.greedy(Api::Chat).map(|found| summary(&found)),
    ),
    (
        "completion",
        "200, a text completion with finish reason `stop` or `length`",
        |smoke| smoke.greedy(Api::Completions).map(|found| summary(&found)),
    ),
    (
        "chat-stream-equals-whole",
        "text, finish reason, usage and token ids of the stream equal the whole answer's",
        |smoke| stream_equals_whole(smoke, Api::Chat),
    ),
    (
        "completion-stream-equals-whole",
        "text, finish reason, usage and token ids of the stream equal the whole answer's",
        |smoke| stream_equals_whole(smoke, Api::Completions),
    ),
    (
        "seed-repeats",
        "a sampled request with a seed gives the same answer twice",
        seed_repeats,
    ),
    (
        "usage-adds-up",
        "total is prompt plus completion, and completion is 1 to 24 (`max_tokens`)",
        usage_adds_up,
    ),
    (
        "usage-matches-token-ids",
        "usage counts exactly the token ids that are returned",
        usage_matches_token_ids,
    ),
    (
        "stop-string",
        "the text ends before the stop string, finish reason `stop`",
        |smoke| stop_string(smoke, false),
    ),
    (
        "stop-string-stream",
        "the streamed text ends before the stop string, finish reason `stop`",
        |smoke| stop_string(smoke, true),
    ),
    (
        "drafting-keeps-greedy",
        "text, finish reason, usage and token ids are the same with and without drafting",
        |smoke| drafting_keeps(smoke, &json!({})),
    ),
    (
        "drafting-keeps-sampled",
        "the same for sampled requests with a seed",
        |smoke| drafting_keeps(smoke, &sampled()),
    ),
    (
        "drafting-is-counted",
        "`usage.speculative` counts drafted tokens with drafting and none without",
        drafting_is_counted,
    ),
    (
        "bad-request-type",
        "400 with an error message and type for `temperature: \"hot\"`",
        |smoke| refused(smoke, 400, json!({ "temperature": "hot" })),
    ),
    (
        "bad-request-range",
        "400 with an error message and type for `max_tokens: -1`",
        |smoke| refused(smoke, 400, json!({ "max_tokens": -1 })),
    ),
    (
        "bad-request-json",
        "400 with an error message and type for a body that is no JSON",
        bad_json,
    ),
    (
        "unknown-model",
        "404 with an error message and type for a model that is not in the list",
        |smoke| {
            refused(
                smoke,
                404,
                json!({ "model": "outrider-verify-no-such-model" }),
            )
        },
    ),
    (
        "serves-after-refusals",
        "the first answer again",
        serves_after_refusals,
    ),
];

const NO_TOKEN_IDS: &str = "the service does not return token ids (`return_token_ids`)";

struct Smoke<'a> {
    client: &'a Client,
    wanted_model: Option<String>,
    model: Option<Model>,
    /// What the service says about drafting.
    speculation: Option<Value>,
    /// Cleared when the service refuses the extension field.
    returns_token_ids: bool,
    greedy_chat: Option<Generation>,
    greedy_completion: Option<Generation>,
}

impl Smoke<'_> {
    fn model_id(&self) -> String {
        self.model
            .as_ref()
            .map(|model| model.id.clone())
            .unwrap_or_default()
    }

    /// The state of drafting by the service's own word.
    fn drafting(&self) -> Option<&str> {
        self.speculation.as_ref()?.get("drafting")?.as_str()
    }

    /// The standard request, greedy unless `fields` say otherwise.
    fn request(&self, api: Api, fields: &Value) -> Value {
        let mut request = api.request(&self.model_id(), prompt(api));
        request.insert("max_tokens".into(), MAX_TOKENS.into());
        request.insert("temperature".into(), 0.into());
        request.insert("seed".into(), 1.into());
        if self.returns_token_ids {
            request.insert("return_token_ids".into(), true.into());
        }
        merge(&mut request, fields);
        Value::Object(request)
    }

    fn whole(&mut self, api: Api, fields: &Value) -> Result<Generation, Stop> {
        let mut answer = self.client.post(api.path(), &self.request(api, fields))?;
        if self.returns_token_ids
            && answer.status == 400
            && answer.text().contains("return_token_ids")
        {
            self.returns_token_ids = false;
            answer = self.client.post(api.path(), &self.request(api, fields))?;
        }
        let found = Generation::from_whole(api, &ok_json(&answer)?)?;
        complete(found)
    }

    fn streamed(&mut self, api: Api, fields: &Value) -> Result<Generation, Stop> {
        let mut fields = fields.clone();
        fields["stream"] = true.into();
        fields["stream_options"] = json!({ "include_usage": true });
        let events = match self
            .client
            .stream(api.path(), &self.request(api, &fields))?
        {
            Streamed::Events(events) => events,
            Streamed::Whole(answer) => {
                return Err(Stop::Fail(format!(
                    "{} instead of an event stream: {}",
                    answer.status,
                    shorten(&answer.text())
                )));
            }
        };
        let mut chunks = Vec::new();
        for event in events {
            let event = event?;
            let chunk: Value = serde_json::from_str(&event).map_err(|_| {
                Stop::Fail(format!("an event that is no JSON: {}", shorten(&event)))
            })?;
            if let Some(error) = chunk.get("error") {
                return Err(Stop::Fail(format!(
                    "an error inside the stream: {}",
                    shorten(&error.to_string())
                )));
            }
            chunks.push(chunk);
        }
        complete(Generation::from_chunks(api, &chunks)?)
    }

    /// The standard request's whole answer, asked for once.
    fn greedy(&mut self, api: Api) -> Result<Generation, Stop> {
        let known = match api {
            Api::Chat => &self.greedy_chat,
            Api::Completions => &self.greedy_completion,
        };
        if let Some(known) = known {
            return Ok(known.clone());
        }
        let found = self.whole(api, &json!({}))?;
        match api {
            Api::Chat => self.greedy_chat = Some(found.clone()),
            Api::Completions => self.greedy_completion = Some(found.clone()),
        }
        Ok(found)
    }
}

fn models_list(smoke: &mut Smoke<'_>) -> Result<String, Stop> {
    let answer = smoke.client.get("/v1/models")?;
    let listed = ok_json(&answer)
        .ok()
        .and_then(|list| list.get("data").and_then(Value::as_array).cloned())
        .unwrap_or_default();
    let id_of = |model: &Value| model.get("id").and_then(Value::as_str).map(str::to_owned);
    let ids: Vec<String> = listed.iter().filter_map(id_of).collect();
    let Some(wanted) = smoke.wanted_model.clone().or_else(|| ids.first().cloned()) else {
        return Err(Stop::CouldNotRun(format!(
            "no model to ask: GET /v1/models answered {} {}; name one with --model",
            answer.status,
            shorten(&answer.text())
        )));
    };
    let entry = listed
        .iter()
        .find(|model| id_of(model).as_deref() == Some(&wanted));
    smoke.speculation = entry.and_then(|model| model.get("speculation")).cloned();
    smoke.model = Some(entry.and_then(Model::from_entry).unwrap_or_else(|| Model {
        id: wanted.clone(),
        ..Model::default()
    }));
    if entry.is_none() {
        return Err(Stop::Fail(format!(
            "{} [{}], without `{wanted}`",
            answer.status,
            ids.join(", ")
        )));
    }
    Ok(ids.join(", "))
}

fn stream_equals_whole(smoke: &mut Smoke<'_>, api: Api) -> Result<String, Stop> {
    let whole = smoke.greedy(api)?;
    let streamed = smoke.streamed(api, &json!({}))?;
    equal(&whole, &streamed)?;
    Ok(summary(&streamed))
}

/// Fields of a sampled request.
fn sampled() -> Value {
    json!({ "temperature": 1.0, "top_p": 0.95, "seed": 20_240_607 })
}

fn seed_repeats(smoke: &mut Smoke<'_>) -> Result<String, Stop> {
    let first = smoke.whole(Api::Chat, &sampled())?;
    let second = smoke.whole(Api::Chat, &sampled())?;
    equal(&first, &second)?;
    Ok(summary(&second))
}

fn usage_adds_up(smoke: &mut Smoke<'_>) -> Result<String, Stop> {
    let mut lines = Vec::new();
    for api in [Api::Chat, Api::Completions] {
        let Some(usage) = smoke.greedy(api)?.usage else {
            return Err(Stop::Fail(format!("{}: no `usage`", api.path())));
        };
        let line = format!(
            "{} + {} = {}",
            usage.prompt_tokens, usage.completion_tokens, usage.total_tokens
        );
        let adds_up = usage.prompt_tokens + usage.completion_tokens == usage.total_tokens;
        if !adds_up
            || usage.prompt_tokens == 0
            || !(1..=MAX_TOKENS).contains(&usage.completion_tokens)
        {
            return Err(Stop::Fail(format!("{}: {line}", api.path())));
        }
        lines.push(line);
    }
    Ok(lines.join(", "))
}

fn usage_matches_token_ids(smoke: &mut Smoke<'_>) -> Result<String, Stop> {
    let mut lines = Vec::new();
    for api in [Api::Chat, Api::Completions] {
        let found = smoke.greedy(api)?;
        let (Some(ids), Some(prompt_ids)) = (&found.token_ids, &found.prompt_token_ids) else {
            return Err(Stop::Skip(NO_TOKEN_IDS.to_owned()));
        };
        let Some(usage) = found.usage else {
            return Err(Stop::Fail(format!("{}: no `usage`", api.path())));
        };
        let line = format!(
            "{}: {} prompt ids, usage {}; {} generated ids, usage {}",
            api.path(),
            prompt_ids.len(),
            usage.prompt_tokens,
            ids.len(),
            usage.completion_tokens
        );
        if usage.prompt_tokens != prompt_ids.len() as u64
            || usage.completion_tokens != ids.len() as u64
        {
            return Err(Stop::Fail(line));
        }
        lines.push(format!("{} + {}", prompt_ids.len(), ids.len()));
    }
    Ok(lines.join(", "))
}

/// Takes the stop string out of the middle of an answer the service gives anyway, so that it must come up again.
fn stop_string(smoke: &mut Smoke<'_>, stream: bool) -> Result<String, Stop> {
    let free = smoke.greedy(Api::Chat)?;
    let chars: Vec<char> = free.text.chars().collect();
    if chars.len() < 2 * STOP_CHARS {
        return Err(Stop::Fail(format!(
            "the answer {:?} is too short to take a stop string from",
            free.text
        )));
    }
    let start = (chars.len() - STOP_CHARS) / 2;
    let stop: String = chars[start..start + STOP_CHARS].iter().collect();
    let before = free.text.split(&stop).next().unwrap_or_default();
    let fields = json!({ "stop": [stop] });
    let stopped = if stream {
        smoke.streamed(Api::Chat, &fields)?
    } else {
        smoke.whole(Api::Chat, &fields)?
    };
    if stopped.text != before || stopped.finish_reason.as_deref() != Some("stop") {
        return Err(Stop::Fail(format!(
            "stop {stop:?}: {:?}, finish reason {}; without the stop {:?}",
            stopped.text,
            stopped.finish_reason.as_deref().unwrap_or("none"),
            free.text
        )));
    }
    Ok(format!("stop {stop:?}: {:?}", stopped.text))
}

/// No result unless the service says that it drafts.
fn needs_drafting(smoke: &Smoke<'_>) -> Result<(), Stop> {
    let detail = smoke
        .speculation
        .as_ref()
        .and_then(|speculation| speculation.get("detail")?.as_str())
        .map_or_else(String::new, |detail| format!(", {detail}"));
    match smoke.drafting() {
        None => Err(Stop::Skip(
            "the service does not say whether it drafts (`speculation` of the model)".to_owned(),
        )),
        Some("on") => Ok(()),
        Some(state @ ("off" | "unavailable")) => Err(Stop::Skip(format!(
            "not checked, drafting is {state}{detail}"
        ))),
        // Suspended: it should draft, and something keeps it from doing so.
        Some(state) => Err(Stop::Fail(format!("drafting is {state}{detail}"))),
    }
}

/// The standard request with `fields`, drafting asked for or forbidden.
fn drafted(
    smoke: &mut Smoke<'_>,
    api: Api,
    fields: &Value,
    enabled: bool,
) -> Result<Generation, Stop> {
    let mut fields = fields.clone();
    fields["speculative"] = json!({ "enabled": enabled });
    smoke.whole(api, &fields)
}

fn drafting_keeps(smoke: &mut Smoke<'_>, fields: &Value) -> Result<String, Stop> {
    needs_drafting(smoke)?;
    let mut lines = Vec::new();
    for api in [Api::Chat, Api::Completions] {
        let with = drafted(smoke, api, fields, true)?;
        let without = drafted(smoke, api, fields, false)?;
        equal(&with, &without)?;
        lines.push(summary(&with));
    }
    Ok(lines.join(", "))
}

fn drafting_is_counted(smoke: &mut Smoke<'_>) -> Result<String, Stop> {
    needs_drafting(smoke)?;
    let mut counts = |enabled: bool| {
        let mut sum = Speculative::default();
        for api in [Api::Chat, Api::Completions] {
            let Some(found) = drafted(smoke, api, &json!({}), enabled)?.speculative else {
                return Err(Stop::Fail(format!(
                    "{}: no `usage.speculative`",
                    api.path()
                )));
            };
            sum += found;
        }
        Ok(sum)
    };
    let without = counts(false)?;
    let mut with = counts(true)?;
    // A service may find that drafting does not pay at the moment, and try it now and then only.
    for _ in 1..DRAFTING_ROUNDS {
        if with.drafted_tokens > 0 {
            break;
        }
        with += counts(true)?;
    }
    let speculation = smoke.speculation.as_ref();
    let adaptive = speculation.is_some_and(|state| state["adaptive_width"] == true);
    if adaptive && with == Speculative::default() && without == with {
        return Err(Stop::Skip(
            "nothing was drafted: it does not pay at the moment (`adaptive_width`), or never happens".to_owned(),
        ));
    }
    let line = format!(
        "{} drafted, {} accepted in {} steps; without drafting {}, {} and {}",
        with.drafted_tokens,
        with.accepted_tokens,
        with.steps,
        without.drafted_tokens,
        without.accepted_tokens,
        without.steps
    );
    let adds_up = with.accepted_tokens <= with.drafted_tokens
        && (1..=with.drafted_tokens).contains(&with.steps);
    if adds_up && without == Speculative::default() {
        Ok(line)
    } else {
        Err(Stop::Fail(line))
    }
}

/// A request that is wrong in `fields` gets `status` and a typed error.
fn refused(smoke: &mut Smoke<'_>, status: u16, fields: Value) -> Result<String, Stop> {
    let mut lines = Vec::new();
    for api in [Api::Chat, Api::Completions] {
        let mut request = api.request(&smoke.model_id(), prompt(api));
        merge(&mut request, &fields);
        let answer = smoke.client.post(api.path(), &Value::Object(request))?;
        lines.push(
            typed_error(&answer, status)
                .map_err(|fault| Stop::Fail(format!("{}: {fault}", api.path())))?,
        );
    }
    lines.dedup();
    Ok(lines.join("; "))
}

fn bad_json(smoke: &mut Smoke<'_>) -> Result<String, Stop> {
    let answer = smoke.client.post_bytes(Api::Chat.path(), b"{\"model\": ")?;
    typed_error(&answer, 400).map_err(Stop::Fail)
}

fn serves_after_refusals(smoke: &mut Smoke<'_>) -> Result<String, Stop> {
    let first = smoke.greedy(Api::Chat)?;
    let again = smoke.whole(Api::Chat, &json!({}))?;
    equal(&first, &again)?;
    Ok(summary(&again))
}

fn merge(request: &mut Map<String, Value>, fields: &Value) {
    for (name, value) in fields.as_object().into_iter().flatten() {
        request.insert(name.clone(), value.clone());
    }
}
