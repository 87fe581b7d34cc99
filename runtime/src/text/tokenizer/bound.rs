//! How many tokens a text has at least: tells a hopelessly long text from one worth encoding.
//!
//! Known only where nothing that happens to a text can make it vanish: no normaliser that drops characters, no
//! pre-tokenizer that drops spaces, no added token that swallows the spaces beside it. Bytes without a token of their
//! own do vanish (published vocabularies lack some control characters), so they do not count.

use serde_json::Value;
use tokenizers::{ModelWrapper, Tokenizer};

use super::pieces::Pieces;

/// NFC composes up to four characters of two bytes into one of three, or one of three into one of one.
const NFC_SHRINK_MAX: usize = 4;

/// What a lower bound needs.
pub(super) struct TokenBound {
    /// Bytes of text that one token stands for at most.
    token_bytes_max: usize,
    /// Bytes that end up in some token, whatever stands beside them.
    counts: [bool; 256],
}

impl TokenBound {
    /// `None` where there is no telling.
    pub(super) fn of(inner: &Tokenizer, pieces: &Pieces) -> Option<Self> {
        let json = |part: Option<Value>| part.unwrap_or(Value::Null);
        let normalizer = json(inner.get_normalizer().and_then(|part| serde_json::to_value(part).ok()));
        let pre_tokenizer = json(inner.get_pre_tokenizer().and_then(|part| serde_json::to_value(part).ok()));
        let ModelWrapper::BPE(model) = inner.get_model() else { return None };
        let swallows = inner.get_added_tokens_decoder().values().any(|token| token.lstrip || token.rstrip);
        if swallows || !keeps_all(&pre_tokenizer) {
            return None;
        }
        let counts = single_bytes(pieces);
        // Bytes map to symbols one by one, or characters fall back to all their bytes at once.
        let all_count = || (0..=u8::MAX).all(|byte| counts[usize::from(byte)] || is_never_in_utf8(byte));
        let none_is_skipped = maps_bytes(&pre_tokenizer) || (model.byte_fallback && all_count());
        if !none_is_skipped {
            return None;
        }
        let longest = pieces.iter().map(<[u8]>::len).max().filter(|longest| *longest > 0)?;
        Some(Self { token_bytes_max: longest.checked_mul(shrink(&normalizer)?)?, counts })
    }

    pub(super) fn tokens_min(&self, text: &str) -> usize {
        let bytes = text.bytes().filter(|byte| self.counts[usize::from(*byte)]).count();
        bytes.div_ceil(self.token_bytes_max)
    }
}

/// The bytes that are tokens of their own.
fn single_bytes(pieces: &Pieces) -> [bool; 256] {
    let mut known = [false; 256];
    for piece in pieces.iter() {
        if let [byte] = piece {
            known[usize::from(*byte)] = true;
        }
    }
    known
}

fn is_never_in_utf8(byte: u8) -> bool {
    matches!(byte, 0xC0 | 0xC1 | 0xF5..)
}

fn kind(part: &Value) -> Option<&str> {
    part.get("type").and_then(Value::as_str)
}

/// The factor by which a normaliser shortens a text at most.
fn shrink(normalizer: &Value) -> Option<usize> {
    if normalizer.is_null() {
        return Some(1);
    }
    match kind(normalizer)? {
        "NFC" => Some(NFC_SHRINK_MAX),
        "Prepend" => Some(1),
        "Replace" => {
            let pattern = normalizer.get("pattern")?.get("String")?.as_str()?;
            let content = normalizer.get("content")?.as_str()?;
            (content.len() >= pattern.len()).then_some(1)
        }
        "Sequence" => {
            let mut parts = normalizer.get("normalizers")?.as_array()?.iter();
            parts.try_fold(1_usize, |all, part| all.checked_mul(shrink(part)?))
        }
        _ => None,
    }
}

/// Whether every byte of a text ends up in some piece.
fn keeps_all(pre_tokenizer: &Value) -> bool {
    if pre_tokenizer.is_null() {
        return true;
    }
    match kind(pre_tokenizer) {
        Some("ByteLevel" | "Metaspace" | "Digits") => true,
        Some("Split") => pre_tokenizer.get("behavior").is_some_and(|behavior| behavior != "Removed"),
        Some("Sequence") => steps(pre_tokenizer).iter().all(keeps_all),
        _ => false,
    }
}

fn maps_bytes(pre_tokenizer: &Value) -> bool {
    match kind(pre_tokenizer) {
        Some("ByteLevel") => true,
        Some("Sequence") => steps(pre_tokenizer).iter().any(maps_bytes),
        _ => false,
    }
}

fn steps(sequence: &Value) -> &[Value] {
    sequence.get("pretokenizers").and_then(Value::as_array).map_or(&[], Vec::as_slice)
}
