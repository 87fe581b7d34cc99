use std::{io::ErrorKind, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::{sleep, timeout},
};

use super::StallGuard;

const PATIENCE: Duration = Duration::from_millis(300);

#[tokio::test(start_paused = true)]
async fn a_reader_that_takes_nothing_ends_the_write() {
    let (ours, _theirs) = tokio::io::duplex(8);
    let mut guarded = StallGuard::new(ours, PATIENCE);
    let written = timeout(Duration::from_secs(10), guarded.write_all(&[1; 64])).await;
    let error = written.expect("no endless wait").expect_err("nobody reads");
    assert_eq!(error.kind(), ErrorKind::TimedOut);
}

#[tokio::test(start_paused = true)]
async fn a_reader_that_takes_a_byte_now_and_then_is_waited_for() {
    let (ours, mut theirs) = tokio::io::duplex(1);
    let reading = tokio::spawn(async move {
        let mut got = Vec::new();
        for _ in 0..8 {
            sleep(PATIENCE / 4).await;
            got.push(theirs.read_u8().await.expect("a byte"));
        }
        got
    });
    // In all this takes twice the patience, and no single byte takes it.
    let bytes = [1, 2, 3, 4, 5, 6, 7, 8];
    StallGuard::new(ours, PATIENCE).write_all(&bytes).await.expect("progress is enough");
    assert_eq!(reading.await.expect("it ends"), bytes);
}
