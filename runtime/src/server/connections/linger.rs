//! Closes so that the client hears the last answer.

#[cfg(test)]
mod tests;

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::timeout,
};
use tokio_util::sync::CancellationToken;

/// Longest time that what a client still sends is thrown away.
pub(super) const LINGER_MAX: Duration = Duration::from_secs(2);
/// Most bytes that are thrown away: twice the usual largest body. Who sends more finds the connection broken.
pub(super) const LINGER_BYTES_MAX: usize = 32 << 20;

/// A stream whose shutdown goes on reading, into nowhere, until the client has closed its side too.
///
/// A socket that is closed with unread bytes resets the connection, and a client that is still sending a refused body
/// then sees a broken pipe in place of the refusal.
pub(super) struct Lingering<T> {
    io: T,
    closing: CancellationToken,
    shut: bool,
    bytes_left: usize,
    /// Ends a wait for the client; begins with the first.
    end: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl<T> Lingering<T> {
    /// Once `closing` is cancelled the server ends, and nobody is waited for.
    pub(super) fn new(io: T, closing: CancellationToken) -> Self {
        Self { io, closing, shut: false, bytes_left: LINGER_BYTES_MAX, end: None }
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> Lingering<T> {
    /// Throws away what comes, until the end of it or of the bounds.
    fn poll_drained(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let mut scratch = [0; 8 << 10];
        while self.bytes_left > 0 && !self.closing.is_cancelled() {
            let mut buffer = ReadBuf::new(&mut scratch);
            match Pin::new(&mut self.io).poll_read(context, &mut buffer) {
                Poll::Ready(Ok(())) if !buffer.filled().is_empty() => {
                    self.bytes_left = self.bytes_left.saturating_sub(buffer.filled().len());
                }
                Poll::Ready(_) => break,
                Poll::Pending => {
                    let closing = &self.closing;
                    let end = self.end.get_or_insert_with(|| {
                        let closing = closing.clone().cancelled_owned();
                        Box::pin(async { drop(timeout(LINGER_MAX, closing).await) })
                    });
                    ready!(end.as_mut().poll(context));
                    break;
                }
            }
        }
        Poll::Ready(())
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Lingering<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(context, buffer)
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Lingering<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.shut {
            ready!(Pin::new(&mut self.io).poll_shutdown(context))?;
            self.shut = true;
        }
        self.poll_drained(context).map(Ok)
    }
}
