//! The codes of errors: one for each cause, with its status. Programs may rely on them; `docs/errors.md` says what to do about each.

use actix_web::http::StatusCode;

/// The cause of an error, as callers see it in `error.code`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// The lines of the head do not end as they must.
    InvalidHead,
    /// The body is not JSON.
    InvalidJson,
    /// The body did not arrive whole.
    UnreadableBody,
    /// A required field is not there.
    MissingParameter,
    /// A field is not known.
    UnknownParameter,
    /// A field is known, but not supported.
    UnsupportedParameter,
    /// A value has the wrong type.
    InvalidType,
    /// A number is too small.
    BelowMinimum,
    /// A number is too large.
    AboveMaximum,
    /// A value is none of those supported.
    UnsupportedValue,
    /// A text or list is empty.
    EmptyValue,
    /// A list is too long.
    TooManyEntries,
    /// Two fields do not go together.
    ConflictingParameters,
    /// A prompt has no tokens.
    EmptyPrompt,
    /// Prompt and completion do not fit.
    ContextLengthExceeded,
    /// A token id is outside the vocabulary.
    UnknownToken,
    /// The tokenizer refuses the text.
    UnsupportedText,
    /// The model has no chat template.
    ChatTemplateMissing,
    /// The chat template refuses the conversation.
    ChatTemplateRefused,
    /// The chat template failed.
    ChatTemplateFailed,
    /// The chat template does too much work.
    ChatTemplateLimit,
    /// A template variable belongs to the server.
    ReservedTemplateVariable,
    /// The key is missing or not known.
    InvalidApiKey,
    /// Another model is served.
    ModelNotFound,
    /// Nothing is at the path.
    NotFound,
    /// The path takes another method.
    MethodNotAllowed,
    /// The body did not arrive in time.
    RequestTimeout,
    /// There is no draft to switch on.
    DraftUnavailable,
    /// The body is too long.
    RequestTooLarge,
    /// The body is not declared as plain JSON.
    UnsupportedMediaType,
    /// The request was meant for another host.
    MisdirectedRequest,
    /// The head of the request is too long.
    HeadTooLarge,
    /// Too many completions wait.
    QueueFull,
    /// The server failed.
    InternalError,
    /// The model computed NaN or infinity.
    NonFiniteLogits,
    /// An engine step failed.
    EngineError,
    /// The engine ended.
    EngineStopped,
    /// No slot became free in time.
    QueueTimeout,
    /// The model is not loaded, or the server is going down.
    NotReady,
    /// The answer was not complete in time.
    DeadlineExceeded,
}

impl Code {
    /// Every code, by status.
    pub const ALL: [Self; 40] = [
        Self::InvalidHead,
        Self::InvalidJson,
        Self::UnreadableBody,
        Self::MissingParameter,
        Self::UnknownParameter,
        Self::UnsupportedParameter,
        Self::InvalidType,
        Self::BelowMinimum,
        Self::AboveMaximum,
        Self::UnsupportedValue,
        Self::EmptyValue,
        Self::TooManyEntries,
        Self::ConflictingParameters,
        Self::EmptyPrompt,
        Self::ContextLengthExceeded,
        Self::UnknownToken,
        Self::UnsupportedText,
        Self::ChatTemplateMissing,
        Self::ChatTemplateRefused,
        Self::ChatTemplateFailed,
        Self::ChatTemplateLimit,
        Self::ReservedTemplateVariable,
        Self::InvalidApiKey,
        Self::ModelNotFound,
        Self::NotFound,
        Self::MethodNotAllowed,
        Self::RequestTimeout,
        Self::DraftUnavailable,
        Self::RequestTooLarge,
        Self::UnsupportedMediaType,
        Self::MisdirectedRequest,
        Self::QueueFull,
        Self::HeadTooLarge,
        Self::InternalError,
        Self::NonFiniteLogits,
        Self::EngineError,
        Self::EngineStopped,
        Self::QueueTimeout,
        Self::NotReady,
        Self::DeadlineExceeded,
    ];

    /// The text in `error.code`; OpenAI's where OpenAI has one for the cause.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::InvalidHead => "invalid_request_head",
            Self::InvalidJson => "invalid_json",
            Self::UnreadableBody => "unreadable_body",
            Self::MissingParameter => "missing_required_parameter",
            Self::UnknownParameter => "unknown_parameter",
            Self::UnsupportedParameter => "unsupported_parameter",
            Self::InvalidType => "invalid_type",
            Self::BelowMinimum => "value_below_minimum",
            Self::AboveMaximum => "value_above_maximum",
            Self::UnsupportedValue => "unsupported_value",
            Self::EmptyValue => "empty_value",
            Self::TooManyEntries => "array_above_max_length",
            Self::ConflictingParameters => "conflicting_parameters",
            Self::EmptyPrompt => "empty_prompt",
            Self::ContextLengthExceeded => "context_length_exceeded",
            Self::UnknownToken => "unknown_token",
            Self::UnsupportedText => "unsupported_text",
            Self::ChatTemplateMissing => "chat_template_missing",
            Self::ChatTemplateRefused => "chat_template_refused",
            Self::ChatTemplateFailed => "chat_template_failed",
            Self::ChatTemplateLimit => "chat_template_limit",
            Self::ReservedTemplateVariable => "reserved_template_variable",
            Self::InvalidApiKey => "invalid_api_key",
            Self::ModelNotFound => "model_not_found",
            Self::NotFound => "not_found",
            Self::MethodNotAllowed => "method_not_allowed",
            Self::RequestTimeout => "request_timeout",
            Self::DraftUnavailable => "draft_unavailable",
            Self::RequestTooLarge => "request_too_large",
            Self::UnsupportedMediaType => "unsupported_media_type",
            Self::MisdirectedRequest => "misdirected_request",
            Self::QueueFull => "queue_full",
            Self::HeadTooLarge => "request_head_too_large",
            Self::InternalError => "internal_error",
            Self::NonFiniteLogits => "non_finite_logits",
            Self::EngineError => "engine_error",
            Self::EngineStopped => "engine_stopped",
            Self::QueueTimeout => "queue_timeout",
            Self::NotReady => "not_ready",
            Self::DeadlineExceeded => "deadline_exceeded",
        }
    }

    /// The HTTP status.
    pub fn status(self) -> StatusCode {
        match self {
            Self::InvalidApiKey => StatusCode::UNAUTHORIZED,
            Self::RequestTimeout => StatusCode::REQUEST_TIMEOUT,
            Self::ModelNotFound | Self::NotFound => StatusCode::NOT_FOUND,
            Self::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
            Self::DraftUnavailable => StatusCode::CONFLICT,
            Self::RequestTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::UnsupportedMediaType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::MisdirectedRequest => StatusCode::MISDIRECTED_REQUEST,
            Self::QueueFull => StatusCode::TOO_MANY_REQUESTS,
            Self::HeadTooLarge => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            Self::InternalError | Self::NonFiniteLogits | Self::EngineError => {
                StatusCode::INTERNAL_SERVER_ERROR
            }
            Self::EngineStopped | Self::QueueTimeout | Self::NotReady => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            Self::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
            _ => StatusCode::BAD_REQUEST,
        }
    }

    /// The text in `error.type`.
    pub fn kind(self) -> &'static str {
        match self.status() {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        }
    }

    /// Seconds after which the same request may succeed, where that is the same each time.
    pub fn retry_after_seconds(self) -> Option<u64> {
        match self {
            Self::EngineStopped | Self::NotReady => Some(2),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOCUMENT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/errors.md");

    #[test]
    fn every_code_is_documented_with_its_status_and_no_other_is() {
        let text = std::fs::read_to_string(DOCUMENT).unwrap();
        let rows: Vec<(String, String)> = text
            .lines()
            .filter(|line| line.starts_with("| `"))
            .map(|line| {
                let mut cells = line
                    .trim_matches('|')
                    .split('|')
                    .map(|cell| cell.trim().trim_matches('`').to_owned());
                (cells.next().unwrap(), cells.next().unwrap())
            })
            .collect();
        let codes: Vec<(String, String)> = Code::ALL
            .iter()
            .map(|code| (code.as_str().to_owned(), code.status().as_u16().to_string()))
            .collect();
        assert_eq!(
            rows, codes,
            "docs/errors.md must list the codes of Code::ALL in their order, each with its status"
        );
    }
}
