//! Byte-level BPE rebuilt from GGUF metadata.
//!
//! The file stores vocabulary and merges, but only a *name* for the rules that split a text before merging
//! (`tokenizer.ggml.pre`). The rules behind the names below are llama.cpp's, written as the Hugging Face
//! components of the original tokenizers where those exist, so that ids equal the original's.

use std::path::Path;

use ahash::AHashMap;
use consort_parallel::checkpoint::Gguf;
use tokenizers::{
    AddedToken, PreTokenizerWrapper, SplitDelimiterBehavior,
    decoders::byte_level::ByteLevel,
    models::bpe::BPE,
    normalizers::NFC,
    pre_tokenizers::{
        digits::Digits,
        sequence::Sequence,
        split::{Split, SplitPattern},
    },
};

use super::{
    super::error::{Cause, TextError},
    Tokenizer,
};

const TOKENS: &str = "tokenizer.ggml.tokens";
const MERGES: &str = "tokenizer.ggml.merges";
const TOKEN_TYPE: &str = "tokenizer.ggml.token_type";
const BOS: &str = "tokenizer.ggml.bos_token_id";
const EOS: &str = "tokenizer.ggml.eos_token_id";

/// `tokenizer.ggml.token_type` of control tokens: special, parsed inside text, never shown.
const CONTROL: i32 = 3;
/// `tokenizer.ggml.token_type` of added tokens that are text all the same.
const USER_DEFINED: i32 = 4;

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)";
const LLAMA3: &str = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// llama.cpp's rules for files that name none, applied one after the other.
const DEFAULT: [&str; 4] = [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"];

/// Splitting rules behind a `tokenizer.ggml.pre`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pre {
    Default,
    Gpt2,
    Smollm,
    Llama3,
    Qwen2,
}

/// Names as llama.cpp writes them.
const NAMES: [(&str, Pre); 9] = [
    ("default", Pre::Default),
    ("gpt-2", Pre::Gpt2),
    ("smollm", Pre::Smollm),
    ("llama-bpe", Pre::Llama3),
    ("llama3", Pre::Llama3),
    ("llama-v3", Pre::Llama3),
    ("falcon3", Pre::Llama3),
    ("qwen2", Pre::Qwen2),
    ("deepseek-r1-qwen", Pre::Qwen2),
];

impl Pre {
    fn named(name: &str) -> Option<Pre> {
        NAMES.iter().find(|(known, _)| *known == name).map(|(_, pre)| *pre)
    }

    fn supported() -> String {
        NAMES.map(|(name, _)| name).join(", ")
    }

    fn steps(self) -> Result<Vec<PreTokenizerWrapper>, Cause> {
        let split = |regex: &str| -> Result<PreTokenizerWrapper, Cause> {
            let pattern = SplitPattern::Regex(regex.to_owned());
            Ok(Split::new(pattern, SplitDelimiterBehavior::Isolated, false)?.into())
        };
        let bytes_only: PreTokenizerWrapper = ByteLevel::new(false, true, false).into();
        let gpt2: PreTokenizerWrapper = ByteLevel::new(false, true, true).into();
        Ok(match self {
            Pre::Default => {
                let mut steps = DEFAULT.into_iter().map(split).collect::<Result<Vec<_>, _>>()?;
                steps.push(bytes_only);
                steps
            }
            Pre::Gpt2 => vec![gpt2],
            Pre::Smollm => vec![Digits::new(true).into(), gpt2],
            Pre::Llama3 => vec![split(LLAMA3)?, bytes_only],
            Pre::Qwen2 => vec![split(QWEN2)?, bytes_only],
        })
    }

    /// Llama 3's vocabulary holds whole words that its merges do not reach.
    fn takes_whole_words(self) -> bool {
        self == Pre::Llama3
    }
}

/// What GGUF metadata says of a tokenizer, checked.
pub(super) struct Vocabulary<'a> {
    pub(super) pre: Pre,
    pub(super) tokens: &'a [String],
    pub(super) merges: &'a [String],
    pub(super) token_types: &'a [i32],
    pub(super) bos: Option<u32>,
    pub(super) eos: Option<u32>,
    pub(super) add_bos: bool,
    pub(super) add_eos: bool,
}

impl<'a> Vocabulary<'a> {
    pub(super) fn from_metadata(metadata: &'a Gguf, path: &Path) -> Result<Vocabulary<'a>, TextError> {
        let missing = |key| TextError::MissingMetadata { path: path.to_path_buf(), key };
        let model = metadata.string("tokenizer.ggml.model").ok_or_else(|| missing("tokenizer.ggml.model"))?;
        if model != "gpt2" {
            return Err(TextError::UnsupportedModel { path: path.to_path_buf(), model: model.to_owned() });
        }
        let token = |key| metadata.u32(key).filter(|id| *id != Gguf::NO_TOKEN);
        Ok(Vocabulary {
            pre: pre_tokenizer(metadata.string("tokenizer.ggml.pre"), path)?,
            tokens: metadata.strings(TOKENS).ok_or_else(|| missing(TOKENS))?,
            merges: metadata.strings(MERGES).ok_or_else(|| missing(MERGES))?,
            token_types: metadata.i32s(TOKEN_TYPE).unwrap_or_default(),
            bos: token(BOS),
            eos: token(EOS),
            add_bos: metadata.adds_bos(),
            add_eos: metadata.bool("tokenizer.ggml.add_eos_token").unwrap_or(false),
        })
    }

    pub(super) fn build(&self, path: &Path) -> Result<Tokenizer, TextError> {
        let bad = |reason: String| TextError::BadVocabulary { path: path.to_path_buf(), reason };
        if !self.token_types.is_empty() && self.token_types.len() != self.tokens.len() {
            let (types, tokens) = (self.token_types.len(), self.tokens.len());
            return Err(bad(format!("{TOKEN_TYPE} has {types} entries for {tokens} tokens")));
        }
        let inner = self.model().map_err(|error| bad(error.to_string()))?;
        let mut tokenizer = Tokenizer::assemble(inner, path)?;
        let piece = |id: Option<u32>| id.and_then(|id| self.tokens.get(id as usize)).cloned();
        tokenizer.bos = piece(self.bos);
        tokenizer.eos = piece(self.eos);
        if self.add_bos {
            tokenizer.prefix.extend(self.bos);
        }
        if self.add_eos {
            tokenizer.suffix.extend(self.eos);
        }
        Ok(tokenizer)
    }

    fn model(&self) -> Result<tokenizers::Tokenizer, Cause> {
        let mut vocabulary = AHashMap::with_capacity(self.tokens.len());
        for (id, token) in self.tokens.iter().enumerate() {
            let first = vocabulary.insert(token.clone(), u32::try_from(id)?);
            // Unused rows may have an empty name, and need no other: there is nothing to decode.
            if let Some(first) = first.filter(|_| !token.is_empty()) {
                return Err(format!(
                    "tokens {first} and {id} of {TOKENS} are both {token:?}, so that one of them would be lost; \
                     convert the model anew from an intact tokenizer"
                )
                .into());
            }
        }
        let merges = self
            .merges
            .iter()
            .map(|merge| match merge.split_once(' ') {
                Some((left, right)) => Ok((left.to_owned(), right.to_owned())),
                None => Err(format!("merge `{merge}` is not two tokens with a space between")),
            })
            .collect::<Result<Vec<_>, _>>()?;
        let model = BPE::builder()
            .vocab_and_merges(vocabulary, merges)
            .ignore_merges(self.pre.takes_whole_words())
            .build()?;
        let mut inner = tokenizers::Tokenizer::new(model);
        inner.with_pre_tokenizer(Some(Sequence::new(self.pre.steps()?)));
        inner.with_decoder(Some(ByteLevel::default()));
        if self.pre == Pre::Qwen2 {
            // Qwen's own tokenizer composes characters first. llama.cpp does not; the model was trained with
            // it.
            inner.with_normalizer(Some(NFC))?;
        }
        let of_type = |kind: i32, special: bool| -> Vec<AddedToken> {
            let typed = self.tokens.iter().zip(self.token_types).filter(|(_, found)| **found == kind);
            typed.map(|(token, _)| AddedToken::from(token.clone(), special).normalized(false)).collect()
        };
        inner.add_special_tokens(of_type(CONTROL, true))?;
        inner.add_tokens(of_type(USER_DEFINED, false))?;
        Ok(inner)
    }
}

/// The rules that a file names.
pub(super) fn pre_tokenizer(name: Option<&str>, path: &Path) -> Result<Pre, TextError> {
    let Some(name) = name else {
        tracing::warn!(
            path = %path.display(),
            "GGUF file names no pre-tokenizer (tokenizer.ggml.pre); the default may cost quality"
        );
        return Ok(Pre::Default);
    };
    Pre::named(name).ok_or_else(|| TextError::UnsupportedPreTokenizer {
        path: path.to_path_buf(),
        pre: name.to_owned(),
        supported: Pre::supported(),
    })
}
