//! Errors as callers see them: OpenAI's shape, a fixed code for each cause, and nothing of the inside.
//!
//! The layers below know no HTTP; their errors become an [`ApiError`] here and nowhere else.
//! `docs` of the codes: 400 is the caller's to change, 404 names something that is not served, 429 and 503 carry `Retry-After`,
//! 500 is ours and is logged with its cause.

use std::fmt;

use actix_web::http::{StatusCode, header};
use actix_web::{HttpResponse, ResponseError};
use serde::Serialize;

use super::fields::FieldError;
use crate::engine::{EngineError, SubmitError};
use crate::text::{ChatError, EncodeError};

/// Seconds after which a caller who met a full queue should try again.
const QUEUE_RETRY_SECONDS: u32 = 1;
/// Seconds after which a caller who met a server that is starting or stopping should try again.
const NOT_READY_RETRY_SECONDS: u32 = 2;

/// An answer that is not a completion.
#[derive(Clone, Debug)]
pub struct ApiError {
    status: StatusCode,
    code: &'static str,
    param: Option<String>,
    public: String,
    log: Option<String>,
    retry_after_seconds: Option<u32>,
    allow: Option<&'static str>,
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
    fn new(status: StatusCode, code: &'static str, public: impl Into<String>) -> Self {
        Self {
            status,
            code,
            param: None,
            public: public.into(),
            log: None,
            retry_after_seconds: None,
            allow: None,
        }
    }

    fn with_param(mut self, param: impl Into<String>) -> Self {
        self.param = Some(param.into());
        self
    }

    /// The caller broke a rule that belongs to no single field.
    pub fn bad_request(code: &'static str, public: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, code, public)
    }

    /// The body is not JSON.
    pub fn invalid_json(reason: impl fmt::Display) -> Self {
        Self::bad_request(
            "invalid_json",
            format!("the request body is not valid JSON: {reason}"),
        )
    }

    /// The body ended before it was complete, or could not be decoded.
    pub fn unreadable_body() -> Self {
        Self::bad_request(
            "unreadable_body",
            "the request body could not be read to its end",
        )
    }

    /// The body is longer than the configuration allows.
    pub fn body_too_large(limit_bytes: usize) -> Self {
        Self::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            "request_too_large",
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
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "unsupported_media_type",
            format!("the header {header} is `{value}`; it must be {allowed}"),
        )
    }

    /// The model that was asked for is not the one served.
    pub fn model_not_found(model: &str, served: &str) -> Self {
        Self::new(
            StatusCode::NOT_FOUND,
            "model_not_found",
            format!("the model `{model}` does not exist; this server has `{served}`"),
        )
        .with_param("model")
    }

    /// Drafting was asked for, but no draft is loaded.
    pub fn no_draft() -> Self {
        Self::bad_request(
            "unsupported_value",
            "`speculative.enabled` is true, but this server has no draft; it must be false or left out",
        )
        .with_param("speculative.enabled")
    }

    /// No route has this path.
    pub fn not_found(method: &str, path: &str) -> Self {
        Self::new(
            StatusCode::NOT_FOUND,
            "not_found",
            format!("there is nothing at {method} {path}"),
        )
    }

    /// The route exists for another method.
    pub fn method_not_allowed(method: &str, path: &str, allow: &'static str) -> Self {
        let mut error = Self::new(
            StatusCode::METHOD_NOT_ALLOWED,
            "method_not_allowed",
            format!("{path} does not take {method}; it takes {allow}"),
        );
        error.allow = Some(allow);
        error
    }

    /// The model is not loaded yet, or the server is going down.
    pub fn not_ready(public: &'static str) -> Self {
        let mut error = Self::new(StatusCode::SERVICE_UNAVAILABLE, "not_ready", public);
        error.retry_after_seconds = Some(NOT_READY_RETRY_SECONDS);
        error
    }

    /// Something that must not happen did; `log` is for operators only.
    pub fn internal(log: impl Into<String>) -> Self {
        let mut error = Self::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "internal_error",
            "the server failed to answer this request",
        );
        error.log = Some(log.into());
        error
    }

    /// A prompt that the tokenizer refused; `prompt_param` is the field it came from.
    pub fn from_encode(error: EncodeError, prompt_param: &str) -> Self {
        Self::bad_request("unsupported_text", error.to_string()).with_param(prompt_param)
    }

    /// A submission that the engine refused; `prompt_param` is the field the prompt came from.
    pub fn from_submit(error: SubmitError, prompt_param: &str) -> Self {
        match error {
            SubmitError::EmptyPrompt => {
                Self::bad_request("empty_prompt", "the prompt has no tokens; at least one is needed").with_param(prompt_param)
            }
            SubmitError::PromptTooLong {
                prompt_tokens,
                limit_tokens,
            } => Self::bad_request(
                "context_length_exceeded",
                format!(
                    "the maximum context length leaves room for a prompt of {limit_tokens} tokens, but the prompt has {prompt_tokens}"
                ),
            )
            .with_param(prompt_param),
            SubmitError::ContextExceeded {
                prompt_tokens,
                max_tokens,
                context_tokens,
            } => Self::bad_request(
                "context_length_exceeded",
                format!(
                    "the maximum context length is {context_tokens} tokens, but {} were requested: {prompt_tokens} in the prompt and \
                     {max_tokens} for the completion",
                    prompt_tokens.saturating_add(max_tokens)
                ),
            )
            .with_param(prompt_param),
            SubmitError::UnknownToken { id, vocab_size } => Self::bad_request(
                "unknown_token",
                format!("token id {id} is not in the vocabulary; ids run from 0 to {}", vocab_size.saturating_sub(1)),
            )
            .with_param(prompt_param),
            SubmitError::QueueFull { limit } => {
                let mut error = Self::new(
                    StatusCode::TOO_MANY_REQUESTS,
                    "queue_full",
                    format!("{limit} completions are waiting already; try again later"),
                );
                error.retry_after_seconds = Some(QUEUE_RETRY_SECONDS);
                error
            }
            SubmitError::NotReady => Self::not_ready("the model is not ready; try again later"),
        }
    }

    /// The HTTP status.
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// The fixed code of the cause.
    pub fn code(&self) -> &'static str {
        self.code
    }

    /// What operators should know beyond the public message.
    pub fn log(&self) -> Option<&str> {
        self.log.as_deref()
    }

    /// The JSON body.
    pub fn body(&self) -> ErrorBody<'_> {
        let r#type = match self.status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        ErrorBody {
            error: ErrorObject {
                message: &self.public,
                r#type,
                param: self.param.as_deref(),
                code: self.code,
            },
        }
    }
}

impl From<FieldError> for ApiError {
    fn from(error: FieldError) -> Self {
        Self::bad_request(error.rule.code(), error.to_string()).with_param(error.path)
    }
}

impl From<ChatError> for ApiError {
    fn from(error: ChatError) -> Self {
        let (code, param) = match &error {
            ChatError::NoTemplate => ("chat_template_missing", "messages"),
            ChatError::Template(_) => ("chat_template_refused", "messages"),
            ChatError::Render(_) => ("chat_template_failed", "messages"),
            ChatError::Limit(_) => ("chat_template_limit", "messages"),
            ChatError::ReservedKwarg(_) => ("reserved_template_variable", "chat_template_kwargs"),
            ChatError::PrivateUse | ChatError::Encode(_) => ("unsupported_text", "messages"),
        };
        Self::bad_request(code, error.to_string()).with_param(param)
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        let log = error.to_string();
        let mut api = match error {
            EngineError::NonFiniteLogits => Self::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                "non_finite_logits",
                "the model computed values that are not finite for this request",
            ),
            EngineError::StepFailed(_) => Self::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                "engine_error",
                "the model failed while it worked on this request",
            ),
            EngineError::Stopped => {
                let mut api = Self::not_ready(
                    "the model stopped while it worked on this request; try again later",
                );
                api.code = "engine_stopped";
                api
            }
        };
        api.log = Some(log);
        api
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
        self.status
    }

    fn error_response(&self) -> HttpResponse {
        let mut response = HttpResponse::build(self.status);
        if let Some(seconds) = self.retry_after_seconds {
            response.insert_header((header::RETRY_AFTER, seconds.to_string()));
        }
        if let Some(allow) = self.allow {
            response.insert_header((header::ALLOW, allow));
        }
        response.json(self.body())
    }
}
