//! The OpenAI-compatible HTTP server.
//!
//! [`Server::bind`] takes the port, [`ServerHandle::attach`] gives it an engine once one is loaded (until then
//! `/readyz` and the API answer 503), [`Server::run`] serves until told to stop, drains, and shuts the engine down. It
//! never schedules or generates: handlers validate, submit and write what streams out.

mod auth;
mod body;
mod chat;
mod completions;
mod connections;
mod error;
mod health;
mod sse;
mod wire;

#[cfg(test)]
mod tests;

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use axum::{
    Json, Router,
    extract::{FromRequestParts, Request, State},
    http::{HeaderName, HeaderValue, StatusCode, Version, header, request::Parts},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use tokio::{net::TcpListener, sync::Semaphore, time::Instant};

use self::{
    connections::Routes,
    error::ApiError,
    wire::{ModelCard, ModelList},
};
use crate::{
    engine::{Engine, fresh_u64},
    topology::Topology,
};

/// Largest request body by default: prompts of a million tokens fit as JSON.
pub const BODY_LIMIT_BYTES_DEFAULT: usize = 16 << 20;
/// Most open connections by default: each may hold a body of the limit's size while it is read.
pub const CONNECTIONS_MAX_DEFAULT: usize = 1024;

/// Longest grace that is measured.
const GRACE_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

static REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// How a server behaves.
#[derive(Clone)]
pub struct ServerSettings {
    /// Where to listen, `host:port`.
    pub listen: String,
    /// Keys of which `/v1/*` asks for one; none: no key is asked for.
    pub api_keys: Vec<String>,
    /// Whether requests with different keys share no cached prefixes, where there are several.
    pub salt_per_api_key: bool,
    /// Largest request body.
    pub body_limit_bytes: usize,
    /// Most open connections. A few further ones are served probes and metrics, and told 503 on everything else.
    pub connections_max: usize,
    /// How long requests may go on after the signal to stop.
    pub shutdown_grace: Duration,
}

impl Default for ServerSettings {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:8000".into(),
            api_keys: Vec::new(),
            salt_per_api_key: true,
            body_limit_bytes: BODY_LIMIT_BYTES_DEFAULT,
            connections_max: CONNECTIONS_MAX_DEFAULT,
            shutdown_grace: Duration::from_secs(30),
        }
    }
}

impl ServerSettings {
    /// What a topology says of its server.
    pub fn from_topology(topology: &Topology) -> Self {
        Self {
            listen: topology.listen().to_string(),
            api_keys: topology.api_keys().iter().map(|key| key.reveal().to_owned()).collect(),
            salt_per_api_key: topology.salt_per_api_key(),
            body_limit_bytes: topology.max_body_bytes(),
            ..Self::default()
        }
    }
}

impl std::fmt::Debug for ServerSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The keys stay out of logs.
        f.debug_struct("ServerSettings")
            .field("listen", &self.listen)
            .field("api_keys", &self.api_keys.len())
            .finish_non_exhaustive()
    }
}

/// Why a server could not serve.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The address could not be taken.
    #[error("cannot listen on {listen}: {}", bind_remedy(.listen, .source))]
    Bind {
        /// What was asked for.
        listen: String,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// A second engine was attached.
    #[error("this server already serves the model `{model}`")]
    AlreadyAttached {
        /// The first engine's model.
        model: String,
    },
}

fn bind_remedy(listen: &str, source: &io::Error) -> &'static str {
    let port = listen.rsplit(':').next().and_then(|port| port.parse::<u16>().ok());
    match source.kind() {
        io::ErrorKind::AddrInUse => {
            "another program does; stop it, or choose another port (--port, server.listen)"
        }
        io::ErrorKind::PermissionDenied if port.is_some_and(|port| port >= 1024) => {
            "this system does not let this user listen there; choose another address or port (--host, --port, \
             server.listen)"
        }
        io::ErrorKind::PermissionDenied => {
            "ports below 1024 are reserved; choose a higher one (--port, server.listen)"
        }
        io::ErrorKind::AddrNotAvailable => {
            "this machine has no such address; use 127.0.0.1, or 0.0.0.0 for all of its own (--host, server.listen)"
        }
        _ => "choose another address or port (--host, --port, server.listen)",
    }
}

/// A bound server.
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    state: Arc<AppState>,
}

/// What handlers share.
struct AppState {
    engine: OnceLock<Engine>,
    settings: ServerSettings,
    draining: AtomicBool,
    /// One permit per core, for requests whose bodies take a while to prepare.
    preparing: Arc<Semaphore>,
    /// As many for short chats, whose templates may take a while.
    rendering: Arc<Semaphore>,
}

impl AppState {
    fn attached(&self) -> Option<&Engine> {
        self.engine.get()
    }

    /// The engine for a caller's requests: with a salt of its key's, if there are others.
    fn engine_of(&self, caller: Caller) -> Result<Engine, ApiError> {
        let engine = self.engine()?;
        let keys = &self.settings.api_keys;
        let is_salted = self.settings.salt_per_api_key && keys.len() > 1;
        let key = caller.key.filter(|_| is_salted).and_then(|at| keys.get(at));
        Ok(key.map_or_else(|| engine.clone(), |key| engine.with_cache_salt(key.as_bytes())))
    }

    /// The engine, for requests that want to run on it.
    fn engine(&self) -> Result<&Engine, ApiError> {
        if self.draining.load(Ordering::Acquire) {
            return Err(ApiError::unavailable("the server is shutting down"));
        }
        self.attached().ok_or_else(|| ApiError::unavailable("the model is still loading; try again later"))
    }
}

/// A request may leave the model out, or name it by its served name.
fn check_model(asked: Option<&str>, engine: &Engine) -> Result<(), ApiError> {
    match asked {
        Some(name) if !name.is_empty() && name != engine.model_name() => {
            Err(ApiError::unknown_model(name, engine.model_name()))
        }
        _ => Ok(()),
    }
}

impl Server {
    /// Takes the address.
    pub async fn bind(settings: ServerSettings) -> Result<Self, ServerError> {
        let taken = async {
            let listener = TcpListener::bind(&settings.listen).await?;
            let address = listener.local_addr()?;
            Ok((listener, address))
        };
        let (listener, address) =
            taken.await.map_err(|source| ServerError::Bind { listen: settings.listen.clone(), source })?;
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let state = AppState {
            engine: OnceLock::new(),
            settings,
            draining: AtomicBool::new(false),
            preparing: Arc::new(Semaphore::new(cores)),
            rendering: Arc::new(Semaphore::new(cores)),
        };
        Ok(Self { listener, address, state: Arc::new(state) })
    }

    /// The address it got; tells the port where 0 was asked for.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// A handle that gives the server its engine, also while [`Server::run`] is under way.
    pub fn handle(&self) -> ServerHandle {
        ServerHandle { state: Arc::clone(&self.state) }
    }

    /// Serves until `stop` is done. Then `/readyz` turns false, new requests are refused, open ones may end and be read
    /// within the grace, and the engine is shut down.
    pub async fn run(self, stop: impl Future<Output = ()>) {
        let state = Arc::clone(&self.state);
        let grace = state.settings.shutdown_grace;
        let drained = async move {
            stop.await;
            tracing::info!(grace_seconds = grace.as_secs(), "draining");
            state.draining.store(true, Ordering::Release);
            // A grace beyond what a clock can hold is no limit.
            let grace = grace.min(GRACE_MAX);
            let grace_end = Instant::now() + grace;
            if let Some(engine) = state.attached() {
                engine.shutdown(grace).await;
            }
            grace_end
        };
        let connections_max = self.state.settings.connections_max;
        let routes = Routes { all: router(Arc::clone(&self.state)), crowded: crowded(self.state) };
        connections::serve(self.listener, routes, connections_max, drained).await;
    }
}

/// Gives a server its engine.
#[derive(Clone)]
pub struct ServerHandle {
    state: Arc<AppState>,
}

impl ServerHandle {
    /// Attaches the engine that answers from now on.
    pub fn attach(&self, engine: Engine) -> Result<(), ServerError> {
        let model = engine.model_name().to_owned();
        self.state.engine.set(engine).map_err(|_| ServerError::AlreadyAttached { model })
    }
}

fn router(state: Arc<AppState>) -> Router {
    probes()
        .route("/v1/chat/completions", post(chat::handle))
        .route("/v1/completions", post(completions::handle))
        .route("/v1/models", get(models))
        .fallback(unknown_path)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(middleware::from_fn_with_state(Arc::clone(&state), auth::check))
        .layer(middleware::from_fn(name_request))
        .with_state(state)
}

/// What is served on connections beyond the most that are allowed.
fn crowded(state: Arc<AppState>) -> Router {
    probes().fallback(too_many_connections).layer(middleware::from_fn(name_request)).with_state(state)
}

fn probes() -> Router<Arc<AppState>> {
    Router::new()
        .route("/livez", get(health::livez))
        .route("/readyz", get(health::readyz))
        .route("/health", get(health::health))
        .route("/metrics", get(health::metrics))
}

async fn too_many_connections(State(state): State<Arc<AppState>>) -> ApiError {
    let most = state.settings.connections_max;
    ApiError::unavailable(format!("all {most} connections of this server are in use; try again later"))
}

async fn models(State(state): State<Arc<AppState>>) -> Result<Response, ApiError> {
    let engine = state.engine()?;
    let root = engine.model_path().display().to_string();
    let card = ModelCard {
        id: engine.model_name(),
        object: "model",
        created: engine.started_unix_seconds(),
        owned_by: "consort",
        root: &root,
        max_model_len: engine.max_model_len(),
    };
    Ok(Json(ModelList { object: "list", data: vec![card] }).into_response())
}

async fn unknown_path(request: Request) -> ApiError {
    ApiError::unknown_path(request.method().as_str(), request.uri().path())
}

async fn method_not_allowed(request: Request) -> ApiError {
    ApiError::method_not_allowed(request.method().as_str(), request.uri().path())
}

/// The request's name: the client's `x-request-id` if it is sensible, else made up.
#[derive(Clone, Debug)]
struct RequestId(String);

impl<S: Send + Sync> FromRequestParts<S> for RequestId {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        // Put there by `name_request`, which wraps every route.
        parts.extensions.get().cloned().ok_or_else(|| ApiError::internal("the request has no name"))
    }
}

/// Who asks, as far as keys tell.
#[derive(Clone, Copy, Debug, Default)]
struct Caller {
    /// Which of the server's keys came with the request.
    key: Option<usize>,
}

impl<S: Send + Sync> FromRequestParts<S> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        // Put there by `auth::check`, which wraps every route that generates.
        parts.extensions.get().copied().ok_or_else(|| ApiError::internal("the request was not let in"))
    }
}

/// Names every request, tells the name in the answer and in the log.
async fn name_request(mut request: Request, next: Next) -> Response {
    let given =
        request.headers().get(&REQUEST_ID).and_then(|value| value.to_str().ok()).filter(|id| sensible(id));
    let id = given.map_or_else(|| format!("{:016x}{:016x}", fresh_u64(), fresh_u64()), str::to_owned);
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    request.extensions_mut().insert(RequestId(id.clone()));
    let mut response = match check_host(&request) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    };
    let status = response.status();
    // 503 is how probes are answered while loading or draining: no failure.
    if status == StatusCode::INTERNAL_SERVER_ERROR {
        tracing::warn!(request_id = %id, %method, path, status = status.as_u16(), "request failed");
    } else {
        tracing::debug!(request_id = %id, %method, path, status = status.as_u16(), "request answered");
    }
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID.clone(), value);
    }
    response
}

/// HTTP/1.1 wants exactly one Host, and 400 for everything else (RFC 9112, 3.2).
fn check_host(request: &Request) -> Result<(), ApiError> {
    match request.headers().get_all(header::HOST).iter().count() {
        0 if request.version() < Version::HTTP_11 => Ok(()),
        1 => Ok(()),
        got => Err(ApiError::bad_request(format!("the request must have one Host header, got {got}"))),
    }
}

fn sensible(id: &str) -> bool {
    (1..=128).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic())
}

/// Now, as OpenAI's `created` wants it.
pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
