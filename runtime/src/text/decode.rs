//! Token ids of one stream to text, as they come.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use super::tokenizer::{Joining, Tokenizer};

/// A character of UTF-8 has at most four bytes, so at most three wait for their end.
const PENDING_BYTES_MAX: usize = 3;
/// Prompt tokens that can matter to the first character of an answer: each has a byte or more, but for
/// unknown and special ones, so this leaves room for some of those.
const CONTEXT_TOKENS: usize = 16;

/// Decodes one stream. The pieces it returns, joined, equal [`Tokenizer::decode`] of all ids, however they
/// are split; a character whose bytes are spread over tokens comes with its last byte.
///
/// Work per token is bounded by the token's own length.
pub struct IncrementalDecoder {
    tokenizer: Arc<Tokenizer>,
    skip_special_tokens: bool,
    /// The beginning of a character whose end has not come.
    pending: Vec<u8>,
    /// Leading spaces that may still be dropped.
    droppable_spaces: usize,
    /// Written before the next token's bytes, unless it is the first.
    separator: &'static [u8],
    started: bool,
}

impl IncrementalDecoder {
    /// A decoder at the beginning of a text.
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special_tokens: bool) -> IncrementalDecoder {
        let (droppable_spaces, separator): (usize, &[u8]) = match tokenizer.joining() {
            Joining::Concatenate { leading_spaces_dropped } => (leading_spaces_dropped, b""),
            Joining::Spaced => (0, b" "),
        };
        let pending = Vec::with_capacity(PENDING_BYTES_MAX);
        IncrementalDecoder {
            tokenizer,
            skip_special_tokens,
            pending,
            droppable_spaces,
            separator,
            started: false,
        }
    }

    /// A decoder that goes on after a prompt: a space before the first word of the answer is kept, and a
    /// character that the prompt's last token began is completed.
    pub fn after(tokenizer: Arc<Tokenizer>, skip_special_tokens: bool, prompt: &[u32]) -> IncrementalDecoder {
        let mut decoder = IncrementalDecoder::new(tokenizer, skip_special_tokens);
        for &id in &prompt[prompt.len().saturating_sub(CONTEXT_TOKENS)..] {
            decoder.push(id);
        }
        decoder
    }

    /// Adds a token and returns the text that is now certain; often empty, never part of a character.
    pub fn push(&mut self, id: u32) -> String {
        if self.skip_special_tokens && self.tokenizer.is_special(id) {
            return String::new();
        }
        let mut bytes = self.tokenizer.token_bytes(id);
        if bytes.is_empty() {
            return String::new();
        }
        if self.started {
            self.pending.extend_from_slice(self.separator);
        }
        self.started = true;
        while let (1.., [b' ', rest @ ..]) = (self.droppable_spaces, bytes) {
            self.droppable_spaces -= 1;
            bytes = rest;
        }
        if !bytes.is_empty() {
            self.droppable_spaces = 0;
        }
        self.pending.extend_from_slice(bytes);
        self.take_certain()
    }

    /// Ends the stream: the beginning of a character whose end never came becomes U+FFFD.
    pub fn flush(&mut self) -> String {
        let rest = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        rest
    }

    fn take_certain(&mut self) -> String {
        let mut certain = String::with_capacity(self.pending.len());
        let (mut seen, mut kept) = (0, 0);
        for chunk in self.pending.utf8_chunks() {
            certain.push_str(chunk.valid());
            let invalid = chunk.invalid();
            seen += chunk.valid().len() + invalid.len();
            if invalid.is_empty() {
                continue;
            }
            // Only the end of the input can be a beginning; anywhere else it is broken for good.
            if seen == self.pending.len() && is_beginning_of_char(invalid) {
                kept = invalid.len();
            } else {
                certain.push(char::REPLACEMENT_CHARACTER);
            }
        }
        self.pending.drain(..self.pending.len() - kept);
        certain
    }
}

/// Whether more bytes could make these a character.
fn is_beginning_of_char(bytes: &[u8]) -> bool {
    matches!(std::str::from_utf8(bytes), Err(error) if error.error_len().is_none())
}
