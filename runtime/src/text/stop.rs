//! Stop strings in streamed text.
//!
//! A stream ends at the first moment, byte by byte, at which some stop string is complete. Where several are
//! complete at that moment, the one that began earliest (the longest) is named, so that the text before it
//! holds no part of any. How the text is cut into pushes does not matter.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use super::error::TextError;

/// The stop strings of a request, prepared. Clones share them, so that any number of streams costs their tables once.
#[derive(Clone, Debug)]
pub struct StopStrings(Arc<[Needle]>);

/// What a push made certain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopPush {
    /// Text that no stop string can take back; often less than was pushed.
    Emit(String),
    /// A stop string is complete: the last text of the stream. What was pushed after it is dropped.
    Stopped {
        /// Text before the stop string, and the stop string itself where it is to be included.
        text: String,
        /// The stop string.
        matched: String,
    },
}

/// Looks for stop strings in one stream, holding back only what may still become one.
pub struct StopMatcher {
    needles: StopStrings,
    /// Per stop string: how many of its bytes end the text so far.
    matched: Box<[usize]>,
    include_stop: bool,
    /// Text not yet emitted: the longest end of the text so far that begins a stop string.
    held: String,
    stopped: bool,
}

/// Knuth, Morris and Pratt's automaton of one stop string.
#[derive(Debug)]
struct Needle {
    text: String,
    /// `fallback[i]`: length of the longest proper beginning of `text[..=i]` that is also its end.
    fallback: Vec<usize>,
}

impl StopStrings {
    /// Prepares these strings; none may be empty.
    pub fn new<S: Into<String>>(stops: impl IntoIterator<Item = S>) -> Result<StopStrings, TextError> {
        stops.into_iter().map(|stop| Needle::new(stop.into())).collect::<Result<_, _>>().map(Self)
    }
}

impl StopMatcher {
    /// A matcher for these strings. `include_stop` leaves the matched string in the text.
    pub fn new(stops: StopStrings, include_stop: bool) -> StopMatcher {
        let matched = vec![0; stops.0.len()].into();
        StopMatcher { needles: stops, matched, include_stop, held: String::new(), stopped: false }
    }

    /// Each stop string with its progress.
    fn progress(&mut self) -> impl Iterator<Item = (&Needle, &mut usize)> {
        self.needles.0.iter().zip(&mut self.matched)
    }

    /// Adds text.
    pub fn push(&mut self, text: &str) -> StopPush {
        if self.stopped {
            return StopPush::Emit(String::new());
        }
        if self.matched.is_empty() {
            return StopPush::Emit(text.to_owned());
        }
        let already = self.held.len();
        self.held.push_str(text);
        for (offset, byte) in text.bytes().enumerate() {
            let complete = self.progress().filter_map(|(needle, matched)| needle.step(matched, byte)).max();
            if let Some(length) = complete {
                return self.stop_at(already + offset + 1, length);
            }
        }
        StopPush::Emit(self.release())
    }

    /// Adds text in which no stop string may end (before a minimum length is reached), and returns what is certain. As
    /// in vLLM, one that begins in such text may end in later text.
    pub fn pass(&mut self, text: &str) -> String {
        if self.stopped {
            return String::new();
        }
        self.held.push_str(text);
        for byte in text.bytes() {
            self.progress().for_each(|(needle, matched)| needle.step_over(matched, byte));
        }
        self.release()
    }

    /// Ends the stream: what was held back can no longer become a stop string.
    pub fn flush(&mut self) -> String {
        self.matched.fill(0);
        std::mem::take(&mut self.held)
    }

    /// Takes out what can no longer be part of a stop string.
    fn release(&mut self) -> String {
        let open = self.matched.iter().copied().max().unwrap_or(0);
        // A stop string begins with a whole character, so this is never inside one.
        let kept = self.held.split_off(self.held.len() - open);
        std::mem::replace(&mut self.held, kept)
    }

    fn stop_at(&mut self, end: usize, length: usize) -> StopPush {
        self.stopped = true;
        let mut text = std::mem::take(&mut self.held);
        text.truncate(end);
        let matched = text[end - length..].to_owned();
        if !self.include_stop {
            text.truncate(end - length);
        }
        StopPush::Stopped { text, matched }
    }
}

impl Needle {
    fn new(text: String) -> Result<Needle, TextError> {
        if text.is_empty() {
            return Err(TextError::EmptyStop);
        }
        let bytes = text.as_bytes();
        let mut fallback = vec![0; bytes.len()];
        let mut length = 0;
        for at in 1..bytes.len() {
            while length > 0 && bytes[at] != bytes[length] {
                length = fallback[length - 1];
            }
            length += usize::from(bytes[at] == bytes[length]);
            fallback[at] = length;
        }
        Ok(Needle { text, fallback })
    }

    /// Takes a byte with which the needle does not count as complete.
    fn step_over(&self, matched: &mut usize, byte: u8) {
        if self.step(matched, byte).is_some() {
            *matched = self.fallback[*matched - 1];
        }
    }

    /// Takes a byte; the needle's length once it is complete. Not to be called after that.
    fn step(&self, matched: &mut usize, byte: u8) -> Option<usize> {
        let bytes = self.text.as_bytes();
        while *matched > 0 && byte != bytes[*matched] {
            *matched = self.fallback[*matched - 1];
        }
        *matched += usize::from(byte == bytes[*matched]);
        (*matched == bytes.len()).then_some(bytes.len())
    }
}

#[cfg(test)]
impl StopMatcher {
    /// Whether both look for the same strings in the same memory.
    pub(crate) fn shares_tables_with(&self, other: &StopMatcher) -> bool {
        Arc::ptr_eq(&self.needles.0, &other.needles.0)
    }
}
