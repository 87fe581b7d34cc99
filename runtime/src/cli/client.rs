//! A small HTTP client for the demonstration: it asks the real server over a real socket, as any client would.

use std::net::SocketAddr;

use anyhow::{Context, bail};
use http_body_util::{BodyExt, Full};
use hyper::{
    Request, StatusCode,
    body::{Bytes, Incoming},
    header,
};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

/// Longest line of a stream that is believed: a chunk of a chat has some hundred bytes.
const EVENT_BYTES_MAX: usize = 1 << 20;

/// A streamed answer.
pub(super) struct EventStream {
    body: Incoming,
    events: EventSplitter,
    ready: std::vec::IntoIter<String>,
}

/// Posts JSON and returns the stream of its `data:` payloads.
pub(super) async fn post_stream(
    address: SocketAddr,
    path: &str,
    api_key: Option<&str>,
    json: String,
) -> anyhow::Result<EventStream> {
    let stream = TcpStream::connect(address).await.with_context(|| format!("cannot connect to {address}"))?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "client connection ended early");
        }
    });
    let mut request = Request::post(path)
        .header(header::HOST, address.to_string())
        .header(header::CONTENT_TYPE, "application/json");
    if let Some(key) = api_key {
        request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
    }
    let response = sender.send_request(request.body(Full::new(Bytes::from(json)))?).await?;
    let status = response.status();
    let body = response.into_body();
    if status != StatusCode::OK {
        let text = body.collect().await?.to_bytes();
        bail!("{path} answered {status}: {}", String::from_utf8_lossy(&text));
    }
    Ok(EventStream { body, events: EventSplitter::default(), ready: Vec::new().into_iter() })
}

impl EventStream {
    /// The next payload; `None` at the end of the body.
    pub(super) async fn next(&mut self) -> anyhow::Result<Option<String>> {
        loop {
            if let Some(payload) = self.ready.next() {
                return Ok(Some(payload));
            }
            let Some(frame) = self.body.frame().await else { return Ok(None) };
            if let Ok(data) = frame?.into_data() {
                self.ready = self.events.push(&data)?.into_iter();
            }
        }
    }
}

/// Cuts a byte stream into the payloads of its server-sent events.
#[derive(Default)]
pub(super) struct EventSplitter {
    open: Vec<u8>,
}

impl EventSplitter {
    pub(super) fn push(&mut self, bytes: &[u8]) -> anyhow::Result<Vec<String>> {
        self.open.extend_from_slice(bytes);
        let mut payloads = Vec::new();
        while let Some(end) = self.open.windows(2).position(|pair| pair == b"\n\n") {
            let event: Vec<u8> = self.open.drain(..end + 2).collect();
            let text = String::from_utf8_lossy(&event);
            payloads.extend(text.lines().filter_map(|line| line.strip_prefix("data: ")).map(str::to_owned));
        }
        if self.open.len() > EVENT_BYTES_MAX {
            bail!("the server sent a line of more than {EVENT_BYTES_MAX} bytes");
        }
        Ok(payloads)
    }
}
