//! API keys: only `/v1/*` asks for one, so that probes and scrapers need none.

use std::sync::Arc;

use axum::{
    extract::{Request, State},
    http::header,
    middleware::Next,
    response::{IntoResponse, Response},
};

use super::{AppState, Caller, error::ApiError};

/// Lets a request through if it needs no key or brings a right one, and says which.
pub(super) async fn check(State(state): State<Arc<AppState>>, mut request: Request, next: Next) -> Response {
    let mut caller = Caller::default();
    let keys = &state.settings.api_keys;
    let path = request.uri().path();
    if !keys.is_empty() && (path == "/v1" || path.starts_with("/v1/")) {
        let header = request.headers().get(header::AUTHORIZATION).map(|value| value.as_bytes());
        caller.key = header.and_then(bearer).and_then(|given| find(given, keys));
        if caller.key.is_none() {
            return ApiError::unauthorized().into_response();
        }
    }
    request.extensions_mut().insert(caller);
    next.run(request).await
}

/// The token of a `Bearer` header; the scheme's name has no case.
pub(super) fn bearer(header: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = header.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then_some(token)
}

/// Which of `keys` was given. All of them are looked at, whichever it is.
pub(super) fn find(given: &[u8], keys: &[String]) -> Option<usize> {
    let is_given = |(at, key): (usize, &String)| same(given, key.as_bytes()).then_some(at);
    keys.iter().enumerate().map(is_given).fold(None, Option::or)
}

/// Whether both are equal, in a time that depends on their lengths only.
pub(super) fn same(given: &[u8], key: &[u8]) -> bool {
    let differences = given.iter().zip(key).fold(0, |all, (a, b)| all | (a ^ b));
    std::hint::black_box(differences) == 0 && given.len() == key.len()
}
