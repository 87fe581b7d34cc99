use std::time::Duration;

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex},
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;

use super::{LINGER_BYTES_MAX, LINGER_MAX, Lingering};

fn pair() -> (DuplexStream, Lingering<DuplexStream>, CancellationToken) {
    let (client, server) = duplex(64 << 10);
    let closing = CancellationToken::new();
    (client, Lingering::new(server, closing.clone()), closing)
}

#[tokio::test(start_paused = true)]
async fn a_client_that_is_still_sending_hears_the_answer_and_may_finish() {
    let (mut client, mut server, _closing) = pair();
    let serving = tokio::spawn(async move {
        server.write_all(b"refused").await.expect("written");
        server.shutdown().await.expect("shut");
    });
    client.write_all(&vec![0; 5 << 20]).await.expect("nobody breaks the pipe");
    client.shutdown().await.expect("shut");
    let mut answer = Vec::new();
    client.read_to_end(&mut answer).await.expect("read");
    assert_eq!(answer, b"refused");
    serving.await.expect("no panic");
}

#[tokio::test(start_paused = true)]
async fn neither_endless_nor_silent_senders_are_waited_for_longer_than_the_bounds() {
    let (mut client, mut server, _closing) = pair();
    let serving = tokio::spawn(async move { server.shutdown().await });
    let mut sent = 0;
    while client.write_all(&[0; 1 << 10]).await.is_ok() {
        sent += 1 << 10;
    }
    assert!((LINGER_BYTES_MAX..LINGER_BYTES_MAX + (1 << 20)).contains(&sent), "{sent}");
    serving.await.expect("no panic").expect("shut");

    let (_client, mut server, _closing) = pair();
    let begin = Instant::now();
    server.shutdown().await.expect("shut");
    assert!(begin.elapsed() >= LINGER_MAX && begin.elapsed() < LINGER_MAX + Duration::from_secs(1));
}

#[tokio::test(start_paused = true)]
async fn a_server_that_ends_waits_for_nobody() {
    let (_client, mut server, closing) = pair();
    closing.cancel();
    timeout(Duration::from_millis(1), server.shutdown()).await.expect("at once").expect("shut");

    // Also one that lingers already.
    let (_client, mut server, closing) = pair();
    let lingering = tokio::spawn(async move { server.shutdown().await });
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!lingering.is_finished(), "it waits for a client that may still be sending");
    closing.cancel();
    timeout(Duration::from_millis(1), lingering).await.expect("at once").expect("no panic").expect("shut");
}
