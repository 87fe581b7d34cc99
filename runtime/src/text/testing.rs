//! Fixtures shared by the tests of this module.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use serde::Deserialize;

use super::tokenizer::{Tokenizer, testing::build};

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
