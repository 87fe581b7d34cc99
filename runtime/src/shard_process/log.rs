//! What a rank's process logs, on both sides: lines of its standard error, told on in the engine's log.
//!
//! A line that begins with [`MARK`] is an event of `tracing` with level and target; any other is something that a
//! library, a panic or the loader wrote.

use std::{
    fmt, io,
    os::fd::{AsFd, OwnedFd},
};

use consort_parallel::ids::Rank;
use rustix::{fs::OFlags, io::Errno};
use tracing::{Event, Level, Subscriber, level_filters::LevelFilter};
use tracing_subscriber::{
    fmt::{FmtContext, FormatEvent, FormatFields, format::Writer},
    registry::LookupSpan,
};

/// Begins the lines that have a level and a target.
const MARK: char = '\u{1e}';
/// Stands between them.
const BETWEEN: char = '\u{1f}';

/// Longest line that is told on; the rest of a longer one is dropped.
const LINE_BYTES_MAX: usize = 4096;

/// Bytes taken at one look: a process that writes without end must not keep its rank from its steps.
const LOOK_BYTES_MAX: usize = 64 << 10;

const LEVELS: [Level; 5] = [Level::ERROR, Level::WARN, Level::INFO, Level::DEBUG, Level::TRACE];

/// The most that anybody wants to see in this process, as a number for another one.
pub(super) fn wanted_level() -> u8 {
    let wanted = LevelFilter::current();
    LEVELS.iter().filter(|level| wanted >= LevelFilter::from_level(**level)).count() as u8
}

/// Has this process's events written for the engine's process to read, unless something else does that already.
pub(super) fn log_to_parent(level: u8) {
    let wanted = LEVELS.get(usize::from(level).wrapping_sub(1));
    let _ = tracing_subscriber::fmt()
        .with_max_level(wanted.map_or(LevelFilter::OFF, |level| LevelFilter::from_level(*level)))
        .with_writer(io::stderr)
        .with_ansi(false)
        .event_format(Marked)
        .try_init();
}

struct Marked;

impl<S, N> FormatEvent<S, N> for Marked
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let metadata = event.metadata();
        write!(writer, "{MARK}{}{BETWEEN}{}{BETWEEN}", metadata.level(), metadata.target())?;
        let mut fields = String::new();
        context.format_fields(Writer::new(&mut fields), event)?;
        writeln!(writer, "{}", fields.replace('\n', " "))
    }
}

/// Reads the standard error of a rank's process without waiting, and tells its lines on.
pub(super) struct ErrorLines {
    rank: Rank,
    pid: i32,
    source: Option<OwnedFd>,
    line: Vec<u8>,
    last: String,
}

impl ErrorLines {
    pub(super) fn new(rank: Rank, pid: i32, source: Option<OwnedFd>) -> io::Result<Self> {
        if let Some(source) = &source {
            rustix::fs::fcntl_setfl(source, rustix::fs::fcntl_getfl(source)? | OFlags::NONBLOCK)?;
        }
        Ok(Self { rank, pid, source, line: Vec::new(), last: String::new() })
    }

    /// What to wait for, until its end.
    pub(super) fn source(&self) -> Option<&OwnedFd> {
        self.source.as_ref()
    }

    /// Takes what is there, a bounded part of it.
    pub(super) fn read(&mut self) {
        let mut taken = 0;
        let mut buffer = [0; 4096];
        while let Some(source) = &self.source
            && taken < LOOK_BYTES_MAX
        {
            match rustix::io::read(source.as_fd(), &mut buffer) {
                Ok(0) => self.source = None,
                Ok(bytes) => {
                    taken += bytes;
                    self.take(&buffer[..bytes]);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(_) => self.source = None,
            }
        }
        if self.source.is_none() && !self.line.is_empty() {
            self.tell();
        }
    }

    /// The last line that says something; of the process's end, if it has ended.
    pub(super) fn last(&self) -> &str {
        &self.last
    }

    fn take(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            match byte {
                b'\n' => self.tell(),
                _ if self.line.len() < LINE_BYTES_MAX => self.line.push(byte),
                _ => {}
            }
        }
    }

    fn tell(&mut self) {
        let line = String::from_utf8_lossy(&std::mem::take(&mut self.line)).trim_end().to_owned();
        let (level, from, text) = parts(&line);
        if text.is_empty() {
            return;
        }
        let (rank, pid) = (self.rank.0, self.pid);
        match level {
            Level::ERROR => tracing::error!(target: "consort::shard", rank, pid, from, "{text}"),
            Level::WARN => tracing::warn!(target: "consort::shard", rank, pid, from, "{text}"),
            Level::INFO => tracing::info!(target: "consort::shard", rank, pid, from, "{text}"),
            Level::DEBUG => tracing::debug!(target: "consort::shard", rank, pid, from, "{text}"),
            Level::TRACE => tracing::trace!(target: "consort::shard", rank, pid, from, "{text}"),
        }
        if level <= Level::WARN {
            text.clone_into(&mut self.last);
        }
    }
}

/// Level, origin and text of a line. What has no mark is a warning: somebody meant it to be seen.
fn parts(line: &str) -> (Level, &str, &str) {
    let unmarked = (Level::WARN, "stderr", line);
    let Some(marked) = line.strip_prefix(MARK) else { return unmarked };
    let mut parts = marked.splitn(3, BETWEEN);
    match (parts.next().and_then(|level| level.parse().ok()), parts.next(), parts.next()) {
        (Some(level), Some(from), Some(text)) => (level, from, text),
        _ => unmarked,
    }
}
