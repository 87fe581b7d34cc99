//! Bytes to a socket and one answer back, without a client that would refuse to send nonsense.

use std::{
    io::{ErrorKind, Read, Write},
    net::TcpStream,
    thread,
    time::Duration,
};

/// A refusal takes milliseconds; this only ends a hang. Shorter than the server's own patience with a silent client.
const ANSWER_MAX: Duration = Duration::from_secs(20);

/// One answer.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) body: String,
    /// Whether the connection took another request afterwards.
    pub(super) kept: bool,
}

pub(super) struct Connection {
    socket: TcpStream,
    unread: Vec<u8>,
}

impl Connection {
    /// To a URL like `http://127.0.0.1:8000`.
    pub(super) fn open(url: &str) -> Connection {
        let socket = TcpStream::connect(url.trim_start_matches("http://")).unwrap();
        socket.set_read_timeout(Some(ANSWER_MAX)).unwrap();
        socket.set_write_timeout(Some(ANSWER_MAX)).unwrap();
        Connection { socket, unread: Vec::new() }
    }

    /// Sends a whole request and reads its answer.
    pub(super) fn ask(mut self, request: &[u8]) -> Answer {
        self.socket.write_all(request).unwrap();
        self.answer()
    }

    /// Sends until the server breaks the connection, or all is sent. Reads the answer meanwhile; also tells how many
    /// bytes could be sent.
    pub(super) fn flood(mut self, head: &str, piece: &[u8], times: usize) -> (Answer, usize) {
        let mut sending = self.socket.try_clone().unwrap();
        thread::scope(|scope| {
            let sent = scope.spawn(move || {
                let mut sent = 0;
                let mut pieces = std::iter::once(head.as_bytes()).chain(std::iter::repeat_n(piece, times));
                while let Some(piece) = pieces.next().filter(|piece| sending.write_all(piece).is_ok()) {
                    sent += piece.len();
                }
                sent
            });
            (self.answer(), sent.join().unwrap())
        })
    }

    fn answer(&mut self) -> Answer {
        let (status, body) = self.read_answer().expect("an answer before the connection is closed");
        let kept = self.socket.write_all(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n").is_ok()
            && self.read_answer().is_some_and(|(status, _)| status == 200);
        Answer { status, body, kept }
    }

    /// `None` if the server closed the connection.
    fn read_answer(&mut self) -> Option<(u16, String)> {
        let head_end = loop {
            if let Some(at) = self.unread.windows(4).position(|window| window == b"\r\n\r\n") {
                break at + 4;
            }
            self.read_more()?;
        };
        let head = String::from_utf8(self.unread.drain(..head_end).collect()).unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        let length: usize = length.unwrap_or_else(|| panic!("no length in {head}")).parse().unwrap();
        while self.unread.len() < length {
            self.read_more()?;
        }
        Some((status, String::from_utf8(self.unread.drain(..length).collect()).unwrap()))
    }

    fn read_more(&mut self) -> Option<()> {
        let mut buffer = [0; 4096];
        match self.socket.read(&mut buffer) {
            Ok(0) => None,
            Ok(count) => {
                self.unread.extend_from_slice(&buffer[..count]);
                Some(())
            }
            Err(error) if error.kind() == ErrorKind::ConnectionReset => None,
            Err(error) => panic!("no answer: {error}"),
        }
    }
}
