//! Errors as callers see them: OpenAI's shape, a fixed code for each cause, and nothing of the inside.
//!
//! The layers below know no HTTP; their errors become an [`ApiError`] here and nowhere else.
//! What is only for operators goes to the log, with the request's identifier.

use std::fmt;
use std::time::Duration;

use actix_web::http::{StatusCode, header};
use actix_web::{HttpResponse, ResponseError};
use serde::Serialize;

use super::code::Code;
use super::fields::{FieldError, shorten};
use crate::engine::{EngineError, SubmitError};
use crate::text::{ChatError, EncodeError};

/// An answer that is not a completion.
#[derive(Clone, Debug)]
pub struct ApiError {
    code: Code,
    param: Option<String>,
    public: String,
    log: Option<String>,
    allow: Option<&'static str>,
    retry_after_seconds: Option<u64>,
    closes: bool,
}

/// The JSON body of an error.
#[derive(Serialize)]
pub struct ErrorBody<'a> {
    error: ErrorObject<'a>,
}

#[derive(Serialize)]
struct ErrorObject<'a> {
    message: &'a str,
    r#type: &'static str,
    param: Option<&'a str>,
    code: &'static str,
}

impl ApiError {
    fn new(code: Code, public: impl Into<String>) -> Self {
        Self {
            code,
            param: None,
            public: public.into(),
            log: None,
            allow: None,
            retry_after_seconds: code.retry_after_seconds(),
            closes: false,
        }
    }

    /// Rounded up: who comes back too early is turned away again.
    fn with_retry_after(mut self, wait: Duration) -> Self {
        self.retry_after_seconds = Some(wait.as_secs() + u64::from(wait.subsec_nanos() > 0));
        self
    }

    fn with_param(mut self, param: impl Into<String>) -> Self {
        self.param = Some(param.into());
        self
    }

    fn with_log(mut self, log: impl Into<String>) -> Self {
        self.log = Some(log.into());
        self
    }

    /// The body is not JSON.
    pub fn invalid_json(reason: impl fmt::Display) -> Self {
        Self::new(
            Code::InvalidJson,
            format!("the request body is not valid JSON: {reason}"),
        )
    }

    /// The body ended before it was complete, or could not be decoded.
    pub fn unreadable_body() -> Self {
        Self::new(
            Code::UnreadableBody,
            "the request body could not be read to its end",
        )
    }

    /// The body is longer than the configuration allows.
    pub fn body_too_large(limit_bytes: usize) -> Self {
        Self::new(
            Code::RequestTooLarge,
            format!("the request body is longer than the {limit_bytes} bytes allowed"),
        )
    }

    /// The body is declared to be something other than plain JSON.
    pub fn unsupported_media_type(
        header: &'static str,
        value: &str,
        allowed: &'static str,
    ) -> Self {
        Self::new(
            Code::UnsupportedMediaType,
            format!("the header {header} is `{value}`; it must be {allowed}"),
        )
    }

    /// The head of the request is larger than it may be.
    pub fn head_too_large(what: &str, count: usize, limit: usize) -> Self {
        Self::new(
            Code::HeadTooLarge,
            format!("the request has {count} {what}; at most {limit} are taken"),
        )
    }

    /// A line of the head ends without a carriage return.
    pub fn bare_line_feed() -> Self {
        Self::new(
            Code::InvalidHead,
            "a line of the request's head ends with a line feed alone; every line must end with a carriage return and a line feed",
        )
    }

    /// The request names a host that this machine is not called by on its own.
    pub fn misdirected(host: &str) -> Self {
        Self::new(
            Code::MisdirectedRequest,
            format!(
                "the request is for the host `{}`; without keys this server answers only to `localhost` and to addresses",
                shorten(host)
            ),
        )
    }

    /// The path has a query string, which would have no effect.
    pub fn unknown_query(name: &str) -> Self {
        let name = shorten(name);
        Self::new(
            Code::UnknownParameter,
            format!("the query parameter `{name}` is not known; this interface has none"),
        )
        .with_param(name)
    }

    /// The model that was asked for is not the one served.
    pub fn model_not_found(model: &str, served: &str) -> Self {
        Self::new(
            Code::ModelNotFound,
            format!(
                "the model `{}` does not exist; this server has `{served}`",
                shorten(model)
            ),
        )
        .with_param("model")
    }

    /// A request asked for drafting, but no draft is loaded; `reason` is for callers.
    pub fn no_draft(reason: &str) -> Self {
        Self::new(
            Code::UnsupportedValue,
            format!(
                "`speculative.enabled` is true, but this server cannot draft: {reason}; it must be false or left out"
            ),
        )
        .with_param("speculative.enabled")
    }

    /// An operator switched drafting on, but no draft is loaded; `reason` is for operators.
    pub fn draft_unavailable(reason: &str) -> Self {
        Self::new(
            Code::DraftUnavailable,
            format!("drafting cannot be switched on: {reason}"),
        )
        .with_param("enabled")
    }

    /// No route has this path.
    pub fn not_found(method: &str, path: &str) -> Self {
        Self::new(
            Code::NotFound,
            format!("there is nothing at {method} {}", shorten(path)),
        )
    }

    /// The route exists for another method.
    pub fn method_not_allowed(method: &str, path: &str, allow: &'static str) -> Self {
        let public = format!("{} does not take {method}; it takes {allow}", shorten(path));
        Self {
            allow: Some(allow),
            ..Self::new(Code::MethodNotAllowed, public)
        }
    }

    /// The request has no key, or not in the way it must be sent; `kind` says what the key is called.
    pub fn key_missing(kind: &str) -> Self {
        Self::new(
            Code::InvalidApiKey,
            format!("this server needs an {kind}, in the header `Authorization: Bearer KEY`"),
        )
    }

    /// The key of the request is none of those listed.
    pub fn key_unknown(kind: &str) -> Self {
        Self::new(
            Code::InvalidApiKey,
            format!("the {kind} in the header `Authorization` is not one that this server knows"),
        )
    }

    /// The body did not arrive in time.
    pub fn body_timeout(limit: Duration) -> Self {
        let public = format!(
            "the request body did not arrive within {} ms",
            limit.as_millis()
        );
        Self {
            // The rest of the body may still come, and is not a request.
            closes: true,
            ..Self::new(Code::RequestTimeout, public)
        }
    }

    /// The server was told to stop and takes no new requests.
    pub fn going_down() -> Self {
        Self {
            closes: true,
            ..Self::not_ready("the server is going down; try again later")
        }
    }

    /// The model is not loaded yet, or the server is going down.
    pub fn not_ready(public: &'static str) -> Self {
        Self::new(Code::NotReady, public)
    }

    /// Something that must not happen did; `log` is for operators only.
    pub fn internal(log: impl Into<String>) -> Self {
        Self::new(
            Code::InternalError,
            "the server failed to answer this request",
        )
        .with_log(log)
    }

    /// A prompt that the tokenizer refused; `prompt_param` is the field it came from.
    pub fn from_encode(error: EncodeError, prompt_param: &str) -> Self {
        Self::new(code_of(&error), error.to_string()).with_param(prompt_param)
    }

    /// A submission that the engine refused; `prompt_param` is the field the prompt came from.
    pub fn from_submit(error: SubmitError, prompt_param: &str) -> Self {
        match error {
            SubmitError::EmptyPrompt => {
                Self::new(Code::EmptyPrompt, "the prompt has no tokens; at least one is needed").with_param(prompt_param)
            }
            SubmitError::PromptTooLong {
                prompt_tokens,
                limit_tokens,
            } => Self::new(
                Code::ContextLengthExceeded,
                format!(
                    "the maximum context length leaves room for a prompt of {limit_tokens} tokens, but the prompt has {prompt_tokens}"
                ),
            )
            .with_param(prompt_param),
            SubmitError::ContextExceeded {
                prompt_tokens,
                max_tokens,
                context_tokens,
            } => Self::new(
                Code::ContextLengthExceeded,
                format!(
                    "the maximum context length is {context_tokens} tokens, but {} were requested: {prompt_tokens} in the prompt and \
                     {max_tokens} for the completion",
                    prompt_tokens.saturating_add(max_tokens)
                ),
            )
            .with_param(prompt_param),
            SubmitError::UnknownToken { id, vocab_size } => Self::new(
                Code::UnknownToken,
                format!("token id {id} is not in the vocabulary; ids run from 0 to {}", vocab_size.saturating_sub(1)),
            )
            .with_param(prompt_param),
            SubmitError::QueueFull { limit, retry_after } => Self::new(
                Code::QueueFull,
                format!("{limit} completions are waiting already; try again later"),
            )
            .with_retry_after(retry_after),
            SubmitError::NotReady => Self::not_ready("the model is not ready; try again later"),
        }
    }

    /// The cause.
    pub fn code(&self) -> Code {
        self.code
    }

    /// What operators should know beyond the public message.
    pub fn log(&self) -> Option<&str> {
        self.log.as_deref()
    }

    /// The JSON body.
    pub fn body(&self) -> ErrorBody<'_> {
        ErrorBody {
            error: ErrorObject {
                message: &self.public,
                r#type: self.code.kind(),
                param: self.param.as_deref(),
                code: self.code.as_str(),
            },
        }
    }
}

fn code_of(error: &EncodeError) -> Code {
    match error {
        EncodeError::Refused(_) => Code::UnsupportedText,
        EncodeError::TooLong { .. } => Code::ContextLengthExceeded,
    }
}

impl From<FieldError> for ApiError {
    fn from(error: FieldError) -> Self {
        Self::new(error.rule.code(), error.to_string()).with_param(error.path)
    }
}

impl From<ChatError> for ApiError {
    fn from(error: ChatError) -> Self {
        let (code, param) = match &error {
            ChatError::UnknownKwarg(name) => {
                let param = format!("chat_template_kwargs.{}", shorten(name));
                return Self::new(Code::UnknownParameter, error.to_string()).with_param(param);
            }
            ChatError::UnusedName(message) => {
                let param = format!("messages[{message}].name");
                return Self::new(Code::UnsupportedParameter, error.to_string()).with_param(param);
            }
            ChatError::NoTemplate => (Code::ChatTemplateMissing, "messages"),
            ChatError::Template(_) => (Code::ChatTemplateRefused, "messages"),
            ChatError::Render(_) => (Code::ChatTemplateFailed, "messages"),
            ChatError::Limit(_) => (Code::ChatTemplateLimit, "messages"),
            ChatError::ReservedKwarg(_) => (Code::ReservedTemplateVariable, "chat_template_kwargs"),
            ChatError::PrivateUse => (Code::UnsupportedText, "messages"),
            ChatError::Encode(error) => (code_of(error), "messages"),
        };
        Self::new(code, error.to_string()).with_param(param)
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        let of_the_inside = |code, public| Self::new(code, public).with_log(error.to_string());
        match error {
            EngineError::NonFiniteLogits => of_the_inside(
                Code::NonFiniteLogits,
                "the model computed values that are not finite for this request",
            ),
            EngineError::StepFailed(_) => of_the_inside(
                Code::EngineError,
                "the model failed while it worked on this request",
            ),
            EngineError::Stopped => of_the_inside(
                Code::EngineStopped,
                "the model stopped while it worked on this request; try again later",
            ),
            EngineError::QueueTimeout { limit, retry_after } => Self::new(
                Code::QueueTimeout,
                format!(
                    "the request waited for {} ms and its turn did not come; try again later",
                    limit.as_millis()
                ),
            )
            .with_retry_after(retry_after),
            EngineError::Displaced { retry_after } => Self::new(
                Code::QueueFull,
                "the queue is full, and the place of this request went to another caller; try again later",
            )
            .with_retry_after(retry_after),
            EngineError::DeadlineExceeded { limit } => Self::new(
                Code::DeadlineExceeded,
                format!(
                    "the answer was not complete within {} ms",
                    limit.as_millis()
                ),
            ),
        }
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.public)
    }
}

impl std::error::Error for ApiError {}

impl ResponseError for ApiError {
    fn status_code(&self) -> StatusCode {
        self.code.status()
    }

    fn error_response(&self) -> HttpResponse {
        let mut response = HttpResponse::build(self.code.status());
        if let Some(seconds) = self.retry_after_seconds {
            response.insert_header((header::RETRY_AFTER, seconds.to_string()));
        }
        if self.code == Code::InvalidApiKey {
            response.insert_header((header::WWW_AUTHENTICATE, "Bearer realm=\"outrider\""));
        }
        if self.closes {
            response.force_close();
        }
        if let Some(allow) = self.allow {
            response.insert_header((header::ALLOW, allow));
        }
        response.json(self.body())
    }
}
