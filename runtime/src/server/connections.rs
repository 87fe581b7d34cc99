//! Accepting and serving connections, with the limits that keep a slow or greedy client from hurting others.
//!
//! Every connection is a task of a [`JoinSet`], and none outlives [`serve`].

mod linger;
mod stall;

use std::{sync::Arc, time::Duration};

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    task::{JoinError, JoinSet},
    time::{Instant, sleep, timeout, timeout_at},
};
use tokio_util::sync::CancellationToken;

use self::{linger::Lingering, stall::StallGuard};

/// Connections beyond the allowed ones that still get an answer, so that probes and metrics come through when clients
/// hold all others. Further ones are closed at once: few, as each is held for [`CROWDED`]'s seconds at most.
const CROWDED_MAX: usize = 16;
/// Pause after a failed accept: it usually means that file descriptors ran out.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// Time for the last bytes of answers after everything else has ended.
const LINGER: Duration = Duration::from_secs(1);

/// How long a connection may do nothing.
#[derive(Clone, Copy)]
struct Patience {
    /// For a request's headers, and for the next request on a kept connection.
    headers: Duration,
    /// For the client to take one more byte of an answer.
    write: Duration,
    keep_alive: bool,
}

/// For the connections that are allowed.
const ALLOWED: Patience =
    Patience { headers: Duration::from_secs(30), write: Duration::from_secs(30), keep_alive: true };
/// For those beyond: one short question and its answer.
const CROWDED: Patience =
    Patience { headers: Duration::from_secs(5), write: Duration::from_secs(5), keep_alive: false };

/// What connections are served.
pub(super) struct Routes {
    pub(super) all: Router,
    /// For connections beyond the allowed ones.
    pub(super) crowded: Router,
}

/// Serves until `drained` is done, which tells when the grace ends. Then connections may finish what they are writing
/// until that moment; meanwhile new ones are still answered, mostly with refusals.
pub(super) async fn serve(
    listener: TcpListener,
    routes: Routes,
    connections_max: usize,
    drained: impl Future<Output = Instant>,
) {
    let acceptor = Acceptor {
        listener,
        routes,
        allowed: Arc::new(Semaphore::new(connections_max.clamp(1, Semaphore::MAX_PERMITS))),
        crowded: Arc::new(Semaphore::new(CROWDED_MAX)),
        closing: CancellationToken::new(),
    };
    let (mut early, mut late) = (JoinSet::new(), JoinSet::new());
    let grace_end = acceptor.accept_until(&mut early, drained).await;
    acceptor.closing.cancel();
    let deadline = grace_end.max(Instant::now()) + LINGER;
    if !acceptor.accept_until(&mut late, all_end(&mut early, deadline)).await {
        tracing::info!(open = early.len(), "closing connections that did not end by themselves");
    }
    drop(acceptor);
    all_end(&mut late, Instant::now() + LINGER).await;
    early.shutdown().await;
    late.shutdown().await;
}

/// Waits for the end of all connections; false if the deadline comes first.
async fn all_end(connections: &mut JoinSet<()>, deadline: Instant) -> bool {
    let ending = async {
        while let Some(ended) = connections.join_next().await {
            tell_panic(ended);
        }
    };
    timeout_at(deadline, ending).await.is_ok()
}

fn tell_panic(ended: Result<(), JoinError>) {
    if let Err(error) = ended
        && error.is_panic()
    {
        tracing::error!(%error, "a connection's task panicked");
    }
}

struct Acceptor {
    listener: TcpListener,
    routes: Routes,
    allowed: Arc<Semaphore>,
    crowded: Arc<Semaphore>,
    /// Connections end after the request they are at.
    closing: CancellationToken,
}

impl Acceptor {
    async fn accept_until<T>(&self, connections: &mut JoinSet<()>, end: impl Future<Output = T>) -> T {
        let mut end = std::pin::pin!(end);
        loop {
            let accepted = tokio::select! {
                biased;
                ended = &mut end => return ended,
                Some(ended) = connections.join_next() => {
                    tell_panic(ended);
                    continue;
                }
                accepted = self.listener.accept() => accepted,
            };
            match accepted {
                Ok((stream, _)) => self.admit(stream, connections),
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    sleep(ACCEPT_RETRY).await;
                }
            }
        }
    }

    fn admit(&self, stream: TcpStream, connections: &mut JoinSet<()>) {
        let places =
            [(&self.allowed, &self.routes.all, ALLOWED), (&self.crowded, &self.routes.crowded, CROWDED)];
        let place = places.into_iter().find_map(|(places, router, patience)| {
            let permit = Arc::clone(places).try_acquire_owned().ok()?;
            Some((permit, router.clone(), patience))
        });
        match place {
            Some((permit, router, patience)) => {
                connections.spawn(connection(stream, permit, router, patience, self.closing.clone()));
            }
            None => tracing::debug!("closed a connection: all are in use"),
        }
    }
}

async fn connection(
    stream: TcpStream,
    permit: OwnedSemaphorePermit,
    router: Router,
    patience: Patience,
    closing: CancellationToken,
) {
    // Tokens are small: waiting to fill a packet would delay every one of them.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "cannot switch off packet coalescing");
    }
    // One that was opened ahead and says nothing must not hold up the end for the whole grace.
    let silent = async {
        closing.cancelled().await;
        sleep(LINGER).await;
    };
    // Looks for a byte rather than for readiness, which may be false.
    let mut first = [0];
    tokio::select! {
        spoke = timeout(patience.headers, stream.peek(&mut first)) => if !matches!(spoke, Ok(Ok(1..))) { return },
        () = silent => return,
    }
    let serving = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(patience.headers)
        .keep_alive(patience.keep_alive)
        .serve_connection(
            TokioIo::new(Lingering::new(StallGuard::new(stream, patience.write), closing.clone())),
            TowerToHyperService::new(router),
        );
    let mut serving = std::pin::pin!(serving);
    let ended = tokio::select! {
        // In this order, so that what the client has said is read: a connection that has read nothing is closed.
        biased;
        ended = &mut serving => ended,
        () = closing.cancelled() => {
            serving.as_mut().graceful_shutdown();
            serving.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "connection ended early");
    }
    drop(permit);
}
