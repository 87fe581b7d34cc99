//! The peer: a Python process that does the same in PyTorch, on the same card. One serves all parts, since loading
//! PyTorch takes seconds.
//!
//! A request is one line of JSON over a Unix socket, and so is its answer: `{"seconds": ..}`, or `{"error": ".."}`.
//! The peer keeps what it made for the last few requests, so that a case may be asked again between our own runs.

use std::{
    io::{BufRead, BufReader, Write},
    os::unix::net::UnixStream,
    path::Path,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// Longest wait for one answer: the first of a case makes its data and its graph.
const ANSWER_LIMIT: Duration = Duration::from_secs(40);

/// A connection to it.
pub(crate) struct Peer {
    reader: BufReader<UnixStream>,
    broken: bool,
}

impl Peer {
    pub(crate) fn connect(socket: &Path) -> Result<Peer> {
        let stream =
            UnixStream::connect(socket).with_context(|| format!("no peer at {}", socket.display()))?;
        stream.set_read_timeout(Some(ANSWER_LIMIT))?;
        stream.set_write_timeout(Some(ANSWER_LIMIT))?;
        Ok(Peer { reader: BufReader::new(stream), broken: false })
    }

    /// Seconds that the peer takes for a case.
    pub(crate) fn seconds(&mut self, request: &Value) -> Result<f64> {
        let answer = self.ask(request)?;
        answer["seconds"]
            .as_f64()
            .filter(|seconds| *seconds > 0.0)
            .context("the peer's answer has no seconds")
    }

    /// The whole answer. After a lost connection each call fails at once: a late answer would be taken for the next.
    pub(crate) fn ask(&mut self, request: &Value) -> Result<Value> {
        if self.broken {
            bail!("the peer did not answer an earlier case");
        }
        let answer = self.exchange(request).inspect_err(|_| self.broken = true)?;
        let answer: Value = serde_json::from_str(&answer).context("the peer's answer is no JSON")?;
        if let Some(error) = answer["error"].as_str() {
            bail!("the peer: {error}");
        }
        Ok(answer)
    }

    fn exchange(&mut self, request: &Value) -> Result<String> {
        let mut line = request.to_string();
        line.push('\n');
        self.reader.get_mut().write_all(line.as_bytes()).context("cannot ask the peer")?;
        let mut answer = String::new();
        if self.reader.read_line(&mut answer).context("the peer does not answer")? == 0 {
            bail!("the peer has ended");
        }
        Ok(answer)
    }
}

#[cfg(test)]
mod tests {
    use std::{os::unix::net::UnixListener, thread};

    use serde_json::json;

    use super::*;

    #[test]
    fn answers_errors_and_an_end_are_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("peer");
        let listener = UnixListener::bind(&socket).unwrap();
        let peer = thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            for answer in ["{\"seconds\": 0.5}\n", "{\"error\": \"no such case\"}\n", "{\"seconds\": 0}\n"] {
                lines.next().unwrap().unwrap();
                (&stream).write_all(answer.as_bytes()).unwrap();
            }
        });
        let mut peer_side = Peer::connect(&socket).unwrap();
        assert_eq!(peer_side.seconds(&json!({"case": "copy"})).unwrap(), 0.5);
        assert_eq!(
            peer_side.seconds(&json!({"case": "x"})).unwrap_err().to_string(),
            "the peer: no such case"
        );
        assert!(peer_side.seconds(&json!({"case": "y"})).is_err(), "no time at all is no answer");
        peer.join().unwrap();
        assert!(peer_side.seconds(&json!({"case": "z"})).is_err());
        let again = peer_side.seconds(&json!({"case": "z"})).unwrap_err().to_string();
        assert_eq!(again, "the peer did not answer an earlier case");
    }
}
