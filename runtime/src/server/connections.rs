//! Accepting and serving connections, with the limits that keep a slow or greedy client from hurting others.

use std::{sync::Arc, time::Duration};

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::{GracefulShutdown, Watcher},
    service::TowerToHyperService,
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
};

/// Longest wait for a request's headers, and for the next request on a kept connection.
const HEADER_SECONDS_MAX: u64 = 30;
/// Pause after a failed accept: it usually means that file descriptors ran out.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// Time for the last bytes of answers after everything else has ended.
const LINGER: Duration = Duration::from_secs(1);

/// Serves until `stop` is done, then lets connections finish what they are writing.
pub(super) async fn serve(
    listener: TcpListener,
    router: Router,
    connections_max: usize,
    stop: impl Future<Output = ()>,
) {
    let graceful = GracefulShutdown::new();
    let permits = Arc::new(Semaphore::new(connections_max.clamp(1, Semaphore::MAX_PERMITS)));
    let mut stop = std::pin::pin!(stop);
    loop {
        let accepted = tokio::select! {
            () = &mut stop => break,
            accepted = accept(&listener, &permits) => accepted,
        };
        match accepted {
            Ok((stream, permit)) => {
                tokio::spawn(connection(stream, permit, router.clone(), graceful.watcher()));
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_RETRY).await;
            }
        }
    }
    drop(listener);
    if tokio::time::timeout(LINGER, graceful.shutdown()).await.is_err() {
        tracing::info!("closing connections that did not end by themselves");
    }
}

async fn accept(
    listener: &TcpListener,
    permits: &Arc<Semaphore>,
) -> std::io::Result<(TcpStream, OwnedSemaphorePermit)> {
    let permit = Arc::clone(permits).acquire_owned().await.map_err(std::io::Error::other)?;
    let (stream, _) = listener.accept().await?;
    Ok((stream, permit))
}

async fn connection(stream: TcpStream, permit: OwnedSemaphorePermit, router: Router, watcher: Watcher) {
    // Tokens are small: waiting to fill a packet would delay every one of them.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "cannot switch off packet coalescing");
    }
    let serving = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(Duration::from_secs(HEADER_SECONDS_MAX))
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    if let Err(error) = watcher.watch(serving).await {
        tracing::debug!(%error, "connection ended early");
    }
    drop(permit);
}
