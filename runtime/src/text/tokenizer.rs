//! The tokenizer of a checkpoint: Hugging Face's `tokenizers` for encoding, a flat byte table for decoding.
//!
//! Decoding does not go through `tokenizers`: every supported decoder (byte-level, sentencepiece-style) maps
//! a token to fixed bytes, so one table serves whole decodes, streams and the `bytes` of log-probabilities
//! alike, at a cost per token that does not depend on the text before it.

mod around;
mod bound;
mod gguf;
mod pieces;
#[cfg(test)]
pub(super) mod testing;
#[cfg(test)]
mod tests;

use std::{path::Path, sync::Arc};

use consort_parallel::checkpoint::Checkpoint;
use serde_json::Value;

pub(super) use self::pieces::Joining;
use self::{bound::TokenBound, pieces::Pieces};
use super::{
    IncrementalDecoder,
    error::TextError,
    files::{read_if_present, read_json_if_present},
};

/// Text to token ids and back. Immutable: share it with an `Arc`.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    pieces: Pieces,
    /// Ids put before and after a text by `add_special_tokens`, where `inner` has no post-processor to do it.
    prefix: Vec<u32>,
    suffix: Vec<u32>,
    bound: Option<TokenBound>,
    bos: Option<String>,
    eos: Option<String>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .field("bos", &self.bos)
            .field("eos", &self.eos)
            .finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// The tokenizer that belongs to a checkpoint: rebuilt from metadata for a GGUF file, `tokenizer.json`
    /// otherwise.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Tokenizer, TextError> {
        let config = checkpoint.config();
        let mut tokenizer = match checkpoint.gguf() {
            Some(metadata) => {
                gguf::Vocabulary::from_metadata(metadata, checkpoint.path())?.build(checkpoint.path())?
            }
            None => Tokenizer::from_folder(checkpoint.path())?,
        };
        // The names in tokenizer_config.json win; ids from the model's configuration fill in what it leaves
        // open.
        if tokenizer.bos.is_none() {
            tokenizer.bos = config.bos_token_id.and_then(|id| tokenizer.piece(id));
        }
        if tokenizer.eos.is_none() {
            tokenizer.eos = config.eos_token_ids.first().and_then(|&id| tokenizer.piece(id));
        }
        Ok(tokenizer)
    }

    /// `tokenizer.json` of a folder, with the names of its special tokens from `tokenizer_config.json`.
    pub fn from_folder(folder: &Path) -> Result<Tokenizer, TextError> {
        let path = folder.join("tokenizer.json");
        let bytes =
            read_if_present(&path)?.ok_or_else(|| TextError::NoTokenizer { folder: folder.to_path_buf() })?;
        let mut tokenizer = Tokenizer::from_json(&bytes, &path)?;
        if let Some(config) = read_json_if_present(&folder.join("tokenizer_config.json"))? {
            tokenizer.bos = token_name(config.get("bos_token"));
            tokenizer.eos = token_name(config.get("eos_token"));
        }
        Ok(tokenizer)
    }

    fn from_json(bytes: &[u8], path: &Path) -> Result<Tokenizer, TextError> {
        let mut inner = tokenizers::Tokenizer::from_bytes(bytes).map_err(|source| TextError::Malformed {
            path: path.to_path_buf(),
            what: "tokenizer.json",
            source,
        })?;
        // Training leftovers: a prompt must be neither cut nor padded silently.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|source| TextError::Malformed {
            path: path.to_path_buf(),
            what: "tokenizer.json",
            source,
        })?;
        Tokenizer::assemble(inner, path)
    }

    fn assemble(inner: tokenizers::Tokenizer, path: &Path) -> Result<Tokenizer, TextError> {
        let pieces = Pieces::of(&inner, path)?;
        let bound = TokenBound::of(&inner, &pieces);
        let (prefix, suffix) = (Vec::new(), Vec::new());
        Ok(Tokenizer { inner, pieces, prefix, suffix, bound, bos: None, eos: None })
    }

    /// The contents of a `tokenizer.json` that gives the same ids, what is put around a text included.
    pub fn to_json(&self) -> Result<String, TextError> {
        let serialise = || {
            let mut inner = self.inner.clone();
            if let Some(processor) = around::processor(&inner, &self.prefix, &self.suffix)? {
                inner.with_post_processor(Some(processor));
            }
            inner.to_string(true)
        };
        serialise().map_err(|source| TextError::Serialise { source })
    }

    /// Ids of a text. Names of special tokens inside the text become those tokens, as in `transformers`;
    /// `add_special_tokens` adds what the model wants around a text (often a first token, often nothing).
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TextError> {
        let encoding = self
            .inner
            .encode_fast(text, add_special_tokens)
            .map_err(|source| TextError::Encode { bytes: text.len(), source })?;
        if !add_special_tokens || (self.prefix.is_empty() && self.suffix.is_empty()) {
            return Ok(encoding.get_ids().to_vec());
        }
        Ok([self.prefix.as_slice(), encoding.get_ids(), &self.suffix].concat())
    }

    /// Text of ids. Bytes that form no character become U+FFFD; unknown ids are left out.
    pub fn decode(self: &Arc<Self>, ids: &[u32], skip_special_tokens: bool) -> String {
        let mut decoder = IncrementalDecoder::new(Arc::clone(self), skip_special_tokens);
        let mut text: String = ids.iter().map(|&id| decoder.push(id)).collect();
        text.push_str(&decoder.flush());
        text
    }

    /// The bytes that a token stands for, alone; empty for an unknown id.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.pieces.bytes(id)
    }

    /// The text of one token alone, as log-probabilities show it. Part of a character becomes U+FFFD: use
    /// [`token_bytes`](Self::token_bytes) beside it.
    pub fn token_text(&self, id: u32) -> String {
        String::from_utf8_lossy(self.token_bytes(id)).into_owned()
    }

    /// A token as the vocabulary spells it (`Ġthe`, `<|im_end|>`).
    pub fn piece(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Id of a token as the vocabulary spells it.
    pub fn id_of(&self, piece: &str) -> Option<u32> {
        self.inner.token_to_id(piece)
    }

    /// One more than the largest id. A model's matrices may have more rows than this.
    pub fn vocab_size(&self) -> usize {
        self.pieces.len()
    }

    /// A number of tokens that [`encode`](Self::encode) gives for this text at least, found without encoding it; 0
    /// where this cannot be told, as for tokenizers that drop spaces.
    pub fn tokens_min(&self, text: &str) -> usize {
        self.bound.as_ref().map_or(0, |bound| bound.tokens_min(text))
    }

    /// Whether a token is special: control tokens that `skip_special_tokens` leaves out.
    pub fn is_special(&self, id: u32) -> bool {
        self.pieces.is_special(id)
    }

    /// Text of the token that begins a document, for templates.
    pub fn bos_token(&self) -> Option<&str> {
        self.bos.as_deref()
    }

    /// Text of the token that ends a turn, for templates.
    pub fn eos_token(&self) -> Option<&str> {
        self.eos.as_deref()
    }

    pub(super) fn joining(&self) -> Joining {
        self.pieces.joining()
    }
}

/// A token's name in tokenizer_config.json: a string, or an object with `content`.
fn token_name(value: Option<&Value>) -> Option<String> {
    let value = value?;
    value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_owned)
}
