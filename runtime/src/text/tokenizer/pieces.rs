//! Bytes of every token, in one flat table.

use std::path::Path;

use serde_json::Value;

use super::super::error::TextError;

/// Above any vocabulary in use (the largest have about 262,000 entries): an id beyond it is a corrupt file,
/// and the table below is dense.
const ID_MAX: u32 = 1 << 24;

/// How texts of consecutive tokens are joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::text) enum Joining {
    /// As they are, once this many leading spaces of the whole text are dropped.
    Concatenate {
        /// Spaces dropped at most; sentencepiece puts one before the first word.
        leading_spaces_dropped: usize,
    },
    /// With a space between: tokenizers without a decoder.
    Spaced,
}

/// How a token's spelling in the vocabulary becomes bytes.
enum Spelling {
    /// GPT-2's table: every character stands for one byte.
    ByteLevel,
    /// Sentencepiece: a mark stands for a space, `<0x0A>` for a byte.
    Sentencepiece { space: String, byte_fallback: bool },
    /// Itself.
    Plain,
}

/// Bytes and kinds of all tokens.
pub(super) struct Pieces {
    /// Bytes of token `i` are `bytes[ends[i - 1]..ends[i]]`.
    bytes: Vec<u8>,
    ends: Vec<u32>,
    special: Vec<bool>,
    joining: Joining,
}

impl Pieces {
    pub(super) fn of(inner: &tokenizers::Tokenizer, path: &Path) -> Result<Pieces, TextError> {
        let (spelling, joining) = decoder_of(inner, path)?;
        let vocabulary = inner.get_vocab(true);
        let Some(largest) = vocabulary.values().copied().max() else {
            return Err(TextError::BadVocabulary {
                path: path.to_path_buf(),
                reason: "it is empty".to_owned(),
            });
        };
        if largest > ID_MAX {
            let reason = format!("token id {largest} is beyond {ID_MAX}");
            return Err(TextError::BadVocabulary { path: path.to_path_buf(), reason });
        }
        let mut pieces = vec![""; largest as usize + 1];
        for (piece, id) in &vocabulary {
            pieces[*id as usize] = piece;
        }
        let mut special = vec![false; pieces.len()];
        let added = inner.get_added_tokens_decoder();
        for (id, token) in &added {
            if let Some(slot) = pieces.get_mut(*id as usize) {
                *slot = &token.content;
                special[*id as usize] = token.special;
            }
        }
        let alphabet = byte_level_alphabet();
        let mut bytes = Vec::new();
        let mut ends = Vec::with_capacity(pieces.len());
        for piece in pieces {
            spelling.append(piece, &alphabet, &mut bytes);
            ends.push(u32::try_from(bytes.len()).map_err(|_| TextError::BadVocabulary {
                path: path.to_path_buf(),
                reason: "its tokens have more than 4 GiB of text".to_owned(),
            })?);
        }
        Ok(Pieces { bytes, ends, special, joining })
    }

    pub(super) fn bytes(&self, id: u32) -> &[u8] {
        let id = id as usize;
        let Some(&end) = self.ends.get(id) else { return &[] };
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        &self.bytes[start as usize..end as usize]
    }

    pub(super) fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Bytes of every token, by id.
    pub(super) fn iter(&self) -> impl Iterator<Item = &[u8]> {
        (0..self.ends.len()).map(|id| self.bytes(id as u32))
    }

    pub(super) fn joining(&self) -> Joining {
        self.joining
    }
}

impl Spelling {
    fn append(&self, piece: &str, alphabet: &[Option<u8>; ALPHABET], out: &mut Vec<u8>) {
        match self {
            Spelling::ByteLevel => {
                let byte = |c: char| alphabet.get(c as usize).copied().flatten();
                // An added token with characters outside the table is spelled literally, as a whole.
                match piece.chars().map(byte).collect::<Option<Vec<u8>>>() {
                    Some(bytes) => out.extend(bytes),
                    None => out.extend_from_slice(piece.as_bytes()),
                }
            }
            Spelling::Sentencepiece { space, byte_fallback } => {
                match byte_fallback.then(|| byte_token(piece)) {
                    Some(Some(byte)) => out.push(byte),
                    _ => out.extend_from_slice(piece.replace(space.as_str(), " ").as_bytes()),
                }
            }
            Spelling::Plain => out.extend_from_slice(piece.as_bytes()),
        }
    }
}

/// `<0x0A>` is the byte 10.
fn byte_token(piece: &str) -> Option<u8> {
    let digits = piece.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 { u8::from_str_radix(digits, 16).ok() } else { None }
}

/// Code points of GPT-2's byte table lie below this: the printable bytes themselves, then 256 onwards for the
/// rest.
const ALPHABET: usize = 512;

/// The byte that each character of a byte-level vocabulary stands for.
fn byte_level_alphabet() -> [Option<u8>; ALPHABET] {
    let mut table = [None; ALPHABET];
    let mut next = 256;
    for byte in 0..=u8::MAX {
        if matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF) {
            table[usize::from(byte)] = Some(byte);
        } else {
            table[next] = Some(byte);
            next += 1;
        }
    }
    table
}

/// Reads the decoder of a tokenizer as spelling and joining.
fn decoder_of(inner: &tokenizers::Tokenizer, path: &Path) -> Result<(Spelling, Joining), TextError> {
    let Some(decoder) = inner.get_decoder() else { return Ok((Spelling::Plain, Joining::Spaced)) };
    let unsupported = |decoder: String| TextError::UnsupportedDecoder { path: path.to_path_buf(), decoder };
    let json = serde_json::to_value(decoder).map_err(|error| unsupported(error.to_string()))?;
    let kind = json.get("type").and_then(Value::as_str).unwrap_or("");
    let steps = match json.get("decoders").and_then(Value::as_array) {
        Some(steps) if kind == "Sequence" => steps.as_slice(),
        _ => std::slice::from_ref(&json),
    };
    read_steps(steps).ok_or_else(|| {
        let names: Vec<&str> = steps.iter().filter_map(|step| step.get("type")?.as_str()).collect();
        unsupported(names.join(", "))
    })
}

fn read_steps(steps: &[Value]) -> Option<(Spelling, Joining)> {
    let concatenate = |leading_spaces_dropped| Joining::Concatenate { leading_spaces_dropped };
    let mut space = None;
    let mut byte_fallback = false;
    let mut dropped = 0;
    for step in steps {
        match step.get("type")?.as_str()? {
            "ByteLevel" if space.is_none() => return Some((Spelling::ByteLevel, concatenate(0))),
            "Replace" if step.get("content")?.as_str()? == " " => {
                space = Some(step.get("pattern")?.get("String")?.as_str()?.to_owned());
            }
            "Metaspace" => {
                space = Some(step.get("replacement")?.as_str()?.to_owned());
                if step.get("prepend_scheme").and_then(Value::as_str) != Some("never") {
                    dropped = 1;
                }
            }
            "ByteFallback" => byte_fallback = true,
            "Fuse" => {}
            "Strip" if step.get("content")?.as_str()? == " " && step.get("stop")?.as_u64()? == 0 => {
                dropped = usize::try_from(step.get("start")?.as_u64()?).ok()?;
            }
            _ => return None,
        }
    }
    Some((Spelling::Sentencepiece { space: space?, byte_fallback }, concatenate(dropped)))
}
