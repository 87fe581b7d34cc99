//! Fixtures shared by the tests of this module.

use std::{
    collections::{BTreeMap, HashMap},
    path::{Path, PathBuf},
    sync::Arc,
};

use serde::Deserialize;

use super::{
    decode::IncrementalDecoder,
    tokenizer::{Tokenizer, testing::build},
};

#[derive(Deserialize)]
pub(super) struct VocabularyFixture {
    pub(super) tokens: Vec<String>,
    pub(super) merges: Vec<String>,
}

/// Control tokens at the beginning of SmolLM2's vocabulary.
pub(super) const SPECIAL_TOKENS: usize = 17;

/// The first 2,273 tokens of SmolLM2.
pub(super) fn vocabulary() -> VocabularyFixture {
    serde_json::from_str(include_str!("../../fixtures/tokenizer/vocabulary.json")).unwrap()
}

pub(crate) fn corpus() -> Vec<String> {
    serde_json::from_str(include_str!("../../fixtures/tokenizer/corpus.json")).unwrap()
}

/// What Hugging Face's `tokenizers`, set up by a Python script, makes of the texts of [`corpus`].
#[derive(Deserialize)]
pub(crate) struct Readings {
    /// Ids of each text, names of special tokens read as those tokens.
    pub(crate) ids: Vec<Vec<u32>>,
    /// By index of the text: ids with such names read as text, where they differ.
    pub(super) literal: BTreeMap<usize, Vec<u32>>,
    /// By index of the text: what the ids decode to, where it is not the text itself.
    pub(super) decoded: BTreeMap<usize, String>,
}

/// Readings under [`vocabulary`], by pre-tokenizer.
pub(super) fn readings() -> HashMap<String, Readings> {
    serde_json::from_str(include_str!("../../fixtures/tokenizer/ids.json")).unwrap()
}

/// Readings under SmolLM2's whole vocabulary.
pub(crate) fn smollm2_readings() -> Readings {
    serde_json::from_str(include_str!("../../fixtures/tokenizer/smollm2.json")).unwrap()
}

/// Encodes and decodes every text of the corpus as the readings say.
pub(crate) fn assert_reads(tokenizer: &Arc<Tokenizer>, expected: &Readings, name: &str) {
    let texts = corpus();
    assert_eq!(expected.ids.len(), texts.len(), "{name}: readings of another corpus");
    let literal = tokenizer.reading_literally();
    for (at, (text, ids)) in texts.iter().zip(&expected.ids).enumerate() {
        assert_eq!(tokenizer.encode(text, false).unwrap(), *ids, "{name}: {text:?}");
        let of_literal = expected.literal.get(&at).unwrap_or(ids);
        assert_eq!(literal.encode(text, false).unwrap(), *of_literal, "{name}, literally: {text:?}");
        let decoded = expected.decoded.get(&at).unwrap_or(text);
        assert_eq!(tokenizer.decode(ids, false), *decoded, "{name}: {ids:?}");
    }
}

/// Streams the ids and, at every split, lets a second stream go on after the first part: what comes out, joined, is
/// what `tokenizers` decodes from all of them.
pub(super) fn assert_streams(tokenizer: &Arc<Tokenizer>, ids: &[u32], skip_special_tokens: bool, name: &str) {
    let whole = tokenizer.reference_decode(ids, skip_special_tokens);
    let mut first = IncrementalDecoder::new(Arc::clone(tokenizer), skip_special_tokens);
    let mut text = String::new();
    for split in 0..=ids.len() {
        let (before, after) = ids.split_at(split);
        let mut second = IncrementalDecoder::after(Arc::clone(tokenizer), skip_special_tokens, before);
        let rest: String = after.iter().map(|&id| second.push(id)).collect();
        let joined = format!("{text}{rest}{}", second.flush());
        assert_eq!(joined, whole, "{name}: split at {split} of {ids:?}");
        match after.first() {
            Some(&id) => text.push_str(&first.push(id)),
            None => text.push_str(&first.flush()),
        }
    }
    assert_eq!(text, whole, "{name}: {ids:?}");
}

/// A tokenizer over [`vocabulary`], as GGUF metadata with this `tokenizer.ggml.pre` would give it.
pub(super) fn small_tokenizer(pre: &str) -> Arc<Tokenizer> {
    Arc::new(build(&vocabulary(), pre))
}

/// A sentencepiece-style tokenizer: spaces as marks, bytes as tokens, one leading space dropped.
pub(super) fn sentencepiece() -> Arc<Tokenizer> {
    let json = serde_json::json!({
        "version": "1.0",
        "added_tokens": [
            {"id": 1, "content": "<s>", "special": true, "single_word": false,
             "lstrip": false, "rstrip": false, "normalized": false},
            {"id": 9, "content": "<tool>", "special": false, "single_word": false,
             "lstrip": false, "rstrip": false, "normalized": false},
        ],
        "normalizer": null,
        "pre_tokenizer": null,
        "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": {
            "type": "BPE", "byte_fallback": true, "unk_token": "<unk>", "merges": [],
            "vocab": {"<unk>": 0, "<s>": 1, "▁": 2, "▁Hello": 3, "▁world": 4, "!": 5, "<0xE2>": 6,
                      "<0x82>": 7, "<0xAC>": 8},
        },
    });
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
    Arc::new(Tokenizer::from_folder(folder.path()).unwrap())
}

/// SmolLM2's GGUF file, where `cargo xtask model` has put it.
pub(crate) fn smollm2() -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/models/SmolLM2-135M-Instruct.Q4_1.gguf");
    if !path.exists() {
        eprintln!("skipped: {} is not there (cargo xtask model fetches it)", path.display());
        return None;
    }
    Some(path)
}
