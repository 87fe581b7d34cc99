//! The API key: only `/v1/*` asks for it, so that probes and scrapers need none.

use std::sync::Arc;

use axum::{
    extract::{Request, State},
    http::header,
    middleware::Next,
    response::{IntoResponse, Response},
};

use super::{AppState, error::ApiError};

/// Lets a request through if it needs no key or brings the right one.
pub(super) async fn check(State(state): State<Arc<AppState>>, request: Request, next: Next) -> Response {
    if let Some(key) = &state.settings.api_key
        && (request.uri().path() == "/v1" || request.uri().path().starts_with("/v1/"))
    {
        let header = request.headers().get(header::AUTHORIZATION).map(|value| value.as_bytes());
        if !header.and_then(bearer).is_some_and(|given| same(given, key.as_bytes())) {
            return ApiError::unauthorized().into_response();
        }
    }
    next.run(request).await
}

/// The token of a `Bearer` header; the scheme's name has no case.
pub(super) fn bearer(header: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = header.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then_some(token)
}

/// Whether both are equal, in a time that depends on their lengths only.
pub(super) fn same(given: &[u8], key: &[u8]) -> bool {
    let differences = given.iter().zip(key).fold(0, |all, (a, b)| all | (a ^ b));
    std::hint::black_box(differences) == 0 && given.len() == key.len()
}
