//! Tokenizers for tests.

use std::path::Path;

use super::{
    Tokenizer,
    gguf::{Vocabulary, pre_tokenizer},
};
use crate::text::testing::{SPECIAL_TOKENS, VocabularyFixture};

impl Tokenizer {
    /// What `tokenizers` itself decodes to.
    pub(in crate::text) fn reference_decode(&self, ids: &[u32], skip_special_tokens: bool) -> String {
        self.inner.decode(ids, skip_special_tokens).unwrap()
    }

    /// The same vocabulary and rules, with names of special tokens read as text.
    pub(in crate::text) fn reading_literally(&self) -> Tokenizer {
        let mut inner = self.inner.clone();
        inner.set_encode_special_tokens(true);
        Tokenizer::assemble(inner, Path::new("test")).unwrap()
    }
}

/// The tokenizer that GGUF metadata with these tokens would give.
pub(in crate::text) fn build(fixture: &VocabularyFixture, pre: &str) -> Tokenizer {
    let types = types(fixture);
    plain(fixture, &types, pre).build(Path::new("test.gguf")).unwrap()
}

pub(super) fn types(fixture: &VocabularyFixture) -> Vec<i32> {
    (0..fixture.tokens.len()).map(|id| if id < SPECIAL_TOKENS { 3 } else { 1 }).collect()
}

pub(super) fn plain<'a>(fixture: &'a VocabularyFixture, token_types: &'a [i32], pre: &str) -> Vocabulary<'a> {
    Vocabulary {
        pre: pre_tokenizer(Some(pre), Path::new("test.gguf")).unwrap(),
        tokens: &fixture.tokens,
        merges: &fixture.merges,
        token_types,
        bos: Some(1),
        eos: Some(2),
        add_bos: false,
        add_eos: false,
    }
}
