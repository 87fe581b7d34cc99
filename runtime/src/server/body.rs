//! Reading a request's body: JSON only, bounded in size and time.

use std::{sync::Arc, time::Duration};

use axum::{
    body::Bytes,
    extract::Request,
    http::{HeaderMap, header},
};
use http_body_util::{BodyExt, LengthLimitError, Limited};

use super::{AppState, error::ApiError};

/// Longest time a body may take: a client that sends a byte a minute must not keep its buffer for ever.
const BODY_SECONDS_MAX: u64 = 30;
/// Without a template, bodies up to this size are parsed and tokenised where they are read (about a millisecond);
/// longer ones on a thread of their own, so that they do not hold up other requests' tokens.
const INLINE_BYTES_MAX: usize = 16 << 10;

/// The whole body of a JSON request.
pub(super) async fn read(request: Request, limit: usize) -> Result<Bytes, ApiError> {
    check_content_type(request.headers())?;
    check_encoding(request.headers())?;
    let announced =
        request.headers().get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    if announced.is_some_and(|length: u64| length > limit as u64) {
        return Err(ApiError::body_too_large(limit));
    }
    let collecting = Limited::new(request.into_body(), limit).collect();
    let collected = tokio::time::timeout(Duration::from_secs(BODY_SECONDS_MAX), collecting)
        .await
        .map_err(|_| ApiError::slow_body(BODY_SECONDS_MAX))?;
    match collected {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(ApiError::body_too_large(limit)),
        Err(error) => {
            tracing::debug!(%error, "a body could not be read");
            let message = "the body ended before its announced length, or its chunks are malformed";
            Err(ApiError::bad_request(message))
        }
    }
}

fn check_content_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let got = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let essence = got.unwrap_or("").split(';').next().unwrap_or("").trim().to_ascii_lowercase();
    if essence == "application/json" || essence.starts_with("application/") && essence.ends_with("+json") {
        return Ok(());
    }
    Err(ApiError::unsupported_media_type(got))
}

fn check_encoding(headers: &HeaderMap) -> Result<(), ApiError> {
    let encoding = headers.get(header::CONTENT_ENCODING).map(|value| value.to_str().unwrap_or("(not text)"));
    match encoding {
        Some(got) if !got.trim().eq_ignore_ascii_case("identity") => Err(ApiError::unsupported_encoding(got)),
        _ => Ok(()),
    }
}

/// What making a request takes besides what its body's length tells.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    /// Nothing.
    Light,
    /// A chat template, which may loop over few words for as long as its budget lasts: about a second.
    Template,
}

/// Makes a request out of its body: here, or on a blocking thread if that may take long. There only so many are worked
/// on at a time as there are permits, and the others wait: behind long bodies those with long bodies, behind templates
/// those with templates.
pub(super) async fn prepare<T: Send + 'static>(
    state: &AppState,
    body: Bytes,
    kind: Work,
    work: impl FnOnce(Bytes) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let permits = match kind {
        _ if body.len() > INLINE_BYTES_MAX => &state.preparing,
        Work::Template => &state.rendering,
        Work::Light => return work(body),
    };
    let ended = || ApiError::internal("the request could not be prepared");
    let permit = Arc::clone(permits).acquire_owned().await.map_err(|_| ended())?;
    let working = tokio::task::spawn_blocking(move || {
        // Held by the work itself: a client that goes away stops the wait, and not the thread.
        let _permit = permit;
        work(body)
    });
    working.await.map_err(|error| {
        tracing::error!(%error, "a request's preparation ended without a result");
        ended()
    })?
}
