//! Failures as OpenAI's clients expect them: `{"error": {"message", "type", "param", "code"}}`.

use axum::{
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use consort_actors::{GenerationError, SubmitError};
use serde::Serialize;

use crate::error::RequestError;

/// Seconds after which a refused client may try again: about the time in which a queue of short requests drains.
const RETRY_AFTER_SECONDS: &str = "1";
/// Longest message in characters. What a client sent may stand in it, and must not come back by the megabyte.
const MESSAGE_CHARS_MAX: usize = 1000;
/// Characters kept of a longer message's end, where it says what is allowed.
const MESSAGE_END_CHARS: usize = 200;

/// A request's failure on the wire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) message: String,
    pub(crate) kind: &'static str,
    pub(crate) param: Option<String>,
}

#[derive(Serialize)]
struct ErrorBody<'a> {
    error: ErrorDetail<'a>,
}

#[derive(Serialize)]
struct ErrorDetail<'a> {
    message: &'a str,
    #[serde(rename = "type")]
    kind: &'a str,
    param: Option<&'a str>,
    /// The status, as vLLM has it, but as a string: OpenAI's schema says string or null, and typed clients made from it
    /// cannot read an error with a number here.
    code: String,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, message: bounded(message.into()), kind, param: None }
    }

    /// 400: the caller's mistake, in a named field.
    pub(crate) fn field(field: impl Into<String>, message: impl std::fmt::Display) -> Self {
        let field = field.into();
        let text = format!("{field}: {message}");
        Self { param: Some(field), ..Self::new(StatusCode::BAD_REQUEST, "BadRequestError", text) }
    }

    /// 400: the caller's mistake, in a field that the message need not name.
    fn about(field: &str, message: String) -> Self {
        Self { param: Some(field.into()), ..Self::bad_request(message) }
    }

    /// The same error where the request has another name for the field.
    pub(crate) fn renamed(mut self, field: &str, name: &str) -> Self {
        if self.param.as_deref() == Some(field) {
            self.param = Some(name.into());
            if let Some(rest) = self.message.strip_prefix(field).filter(|rest| rest.starts_with(": ")) {
                self.message = format!("{name}{rest}");
            }
        }
        self
    }

    /// 400: the caller's mistake, in no particular field.
    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "BadRequestError", message)
    }

    /// 401.
    pub(crate) fn unauthorized() -> Self {
        let message = "missing or wrong API key; send it as `Authorization: Bearer <key>`";
        Self::new(StatusCode::UNAUTHORIZED, "AuthenticationError", message)
    }

    /// 404: a model that is not served here.
    pub(crate) fn unknown_model(asked: &str, served: &str) -> Self {
        let message = format!("the model `{asked}` does not exist here; this server has `{served}`");
        Self { param: Some("model".into()), ..Self::new(StatusCode::NOT_FOUND, "NotFoundError", message) }
    }

    /// 404: a path that is not served here.
    pub(crate) fn unknown_path(method: &str, path: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, "NotFoundError", format!("there is no {method} {path} here"))
    }

    /// 405.
    pub(crate) fn method_not_allowed(method: &str, path: &str) -> Self {
        let message = format!("{path} does not take {method}");
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowedError", message)
    }

    /// 408: the body did not arrive in time.
    pub(crate) fn slow_body(seconds: u64) -> Self {
        let message = format!("the request's body did not arrive within {seconds} s");
        Self::new(StatusCode::REQUEST_TIMEOUT, "RequestTimeoutError", message)
    }

    /// 413.
    pub(crate) fn body_too_large(limit: usize) -> Self {
        let message = format!("the request's body is larger than the {limit} bytes that this server takes");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "PayloadTooLargeError", message)
    }

    /// 415: compressed or otherwise encoded.
    pub(crate) fn unsupported_encoding(got: &str) -> Self {
        let message = format!("the body must not be encoded, got content-encoding {got}");
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "UnsupportedMediaTypeError", message)
    }

    /// 415.
    pub(crate) fn unsupported_media_type(got: Option<&str>) -> Self {
        let got = got.unwrap_or("none");
        let message =
            format!("the body must be JSON (content-type: application/json), got content-type {got}");
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "UnsupportedMediaTypeError", message)
    }

    /// 500: a failure on this side, told without its insides.
    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "InternalServerError", message)
    }

    /// 503.
    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailableError", message)
    }

    /// The JSON body, also used inside streams.
    pub(crate) fn body(&self) -> String {
        let detail = ErrorDetail {
            message: &self.message,
            kind: self.kind,
            param: self.param.as_deref(),
            code: self.status.as_u16().to_string(),
        };
        serde_json::to_string(&ErrorBody { error: detail }).expect("strings and numbers always serialise")
    }
}

/// The message with its middle left out if it is long.
fn bounded(message: String) -> String {
    let chars = if message.len() <= MESSAGE_CHARS_MAX { 0 } else { message.chars().count() };
    if chars <= MESSAGE_CHARS_MAX {
        return message;
    }
    let byte = |at: usize| message.char_indices().nth(at).map_or(message.len(), |(byte, _)| byte);
    let (begin, end) = (byte(MESSAGE_CHARS_MAX - MESSAGE_END_CHARS), byte(chars - MESSAGE_END_CHARS));
    format!("{} [...] {}", &message[..begin], &message[end..])
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let json = [(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))];
        let mut response = (self.status, json, self.body()).into_response();
        let headers = response.headers_mut();
        match self.status {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from_static(RETRY_AFTER_SECONDS));
            }
            StatusCode::UNAUTHORIZED => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            _ => {}
        }
        response
    }
}

impl From<RequestError> for ApiError {
    fn from(error: RequestError) -> Self {
        match &error {
            RequestError::Invalid { field, message } => Self::field(*field, message),
            RequestError::Submit(submit) => from_submit(submit),
            RequestError::Generation(generation) => from_generation(generation),
            RequestError::TextTooLong { .. } => Self::about("prompt", error.to_string()),
            RequestError::Text(_) | RequestError::NoChatTemplate { .. } => {
                Self::bad_request(error.to_string())
            }
            RequestError::Template(_) => Self::about("messages", error.to_string()),
            RequestError::Cancelled => Self::unavailable(error.to_string()),
        }
    }
}

fn from_submit(error: &SubmitError) -> ApiError {
    let message = error.to_string();
    match error {
        SubmitError::EmptyPrompt | SubmitError::UnknownToken { .. } => ApiError::about("prompt", message),
        SubmitError::TooLong { prompt_tokens, max_model_len, .. } if prompt_tokens >= max_model_len => {
            ApiError::about("prompt", message)
        }
        // A pool holds the longest sequence at least, so that a prompt alone never exceeds it.
        SubmitError::TooLong { .. } | SubmitError::NeverFits { .. } => ApiError::about("max_tokens", message),
        SubmitError::Overloaded { .. } => {
            ApiError::new(StatusCode::TOO_MANY_REQUESTS, "TooManyRequestsError", message)
        }
        SubmitError::NotReady(_) | SubmitError::ShuttingDown => ApiError::unavailable(message),
    }
}

fn from_generation(error: &GenerationError) -> ApiError {
    match error {
        GenerationError::ShardLost { .. } | GenerationError::ShuttingDown => {
            ApiError::unavailable(error.to_string())
        }
        GenerationError::SlowReader { .. } | GenerationError::NotFinite { .. } => {
            ApiError::internal(error.to_string())
        }
    }
}
