use std::{path::Path, sync::Arc, time::Instant};

use consort_parallel::checkpoint::Checkpoint;

use super::{
    Tokenizer, gguf,
    testing::{plain, types},
};
use crate::text::{
    TextError,
    testing::{
        VocabularyFixture, assert_reads, assert_streams, corpus, readings, sentencepiece, small_tokenizer,
        smollm2, smollm2_readings, vocabulary,
    },
};

mod families;

#[test]
fn every_pre_tokenizer_reads_the_corpus_as_hugging_faces_own() {
    let readings = readings();
    assert_eq!(readings.len(), 5);
    for (pre, expected) in readings {
        assert_reads(&small_tokenizer(&pre), &expected, &pre);
    }
}

#[test]
fn smollm2_from_its_gguf_file_reads_the_corpus_as_its_own_tokenizer() {
    let Some(path) = smollm2() else { return };
    let checkpoint = Checkpoint::open(&path).unwrap();
    let tokenizer = Arc::new(Tokenizer::from_checkpoint(&checkpoint).unwrap());
    let expected = smollm2_readings();
    assert_reads(&tokenizer, &expected, "SmolLM2");
    for (text, ids) in corpus().iter().zip(&expected.ids) {
        assert_eq!(tokenizer.encode(text, true).unwrap(), *ids, "SmolLM2 adds no special tokens");
        assert_streams(&tokenizer, ids, false, "SmolLM2");
        assert_streams(&tokenizer, ids, true, "SmolLM2");
    }
    assert_eq!(tokenizer.vocab_size(), 49152);
    assert_eq!(tokenizer.bos_token(), Some("<|im_start|>"));
    assert_eq!(tokenizer.eos_token(), Some("<|im_end|>"));
}

#[test]
fn special_tokens_are_parsed_inside_text_and_left_out_of_answers() {
    let tokenizer = small_tokenizer("smollm");
    let ids = tokenizer.encode("<|im_start|>a<|im_end|>", false).unwrap();
    assert_eq!((ids[0], *ids.last().unwrap()), (1, 2));
    assert!(tokenizer.is_special(1) && !tokenizer.is_special(ids[1]));
    assert_eq!(tokenizer.decode(&ids, true), "a");
    assert_eq!(tokenizer.decode(&ids, false), "<|im_start|>a<|im_end|>");
}

#[test]
fn tokens_are_known_by_piece_text_and_bytes() {
    let tokenizer = small_tokenizer("smollm");
    let the = tokenizer.id_of("Ġthe").unwrap();
    assert_eq!(tokenizer.piece(the).as_deref(), Some("Ġthe"));
    assert_eq!(tokenizer.token_text(the), " the");
    let half = tokenizer.encode("é", false).unwrap();
    let bytes: Vec<u8> = half.iter().flat_map(|&id| tokenizer.token_bytes(id)).copied().collect();
    assert_eq!(bytes, "é".as_bytes());
    assert_eq!(tokenizer.token_bytes(u32::MAX), b"");
    assert_eq!(tokenizer.decode(&[u32::MAX, the], false), " the", "unknown ids are left out");
    assert_eq!(tokenizer.vocab_size(), 2273);
}

#[test]
fn a_text_gets_its_first_and_last_token_where_the_metadata_asks_for_them() {
    let fixture = vocabulary();
    let token_types = types(&fixture);
    let encode = |pre: &str, add_bos, add_eos| {
        let vocabulary = gguf::Vocabulary { add_bos, add_eos, ..plain(&fixture, &token_types, pre) };
        let tokenizer = vocabulary.build(Path::new("test.gguf")).unwrap();
        assert_eq!(tokenizer.encode("!", false).unwrap(), [17], "only when asked");
        tokenizer.encode("!", true).unwrap()
    };
    for pre in ["smollm", "llama-bpe"] {
        assert_eq!(encode(pre, false, false), [17]);
        assert_eq!(encode(pre, true, false), [1, 17]);
        assert_eq!(encode(pre, false, true), [17, 2]);
        assert_eq!(encode(pre, true, true), [1, 17, 2]);
    }
}

#[test]
fn a_written_tokenizer_json_gives_the_same_ids_whatever_is_put_around_a_text() {
    let fixture = vocabulary();
    let mut token_types = types(&fixture);
    // A token of the text that is matched before merging, as files with added words have it.
    let word = fixture.tokens.iter().position(|token| token == "Ġthe").unwrap();
    token_types[word] = 4;
    let pres = ["smollm", "gpt-2", "default", "llama-bpe", "qwen2"];
    let around = [(false, false), (true, false), (false, true), (true, true)];
    for (pre, (add_bos, add_eos)) in pres.into_iter().flat_map(|pre| around.map(|around| (pre, around))) {
        let vocabulary = gguf::Vocabulary { add_bos, add_eos, ..plain(&fixture, &token_types, pre) };
        let original = vocabulary.build(Path::new("test.gguf")).unwrap();
        let json = original.to_json().unwrap();
        let read = Tokenizer::from_json(json.as_bytes(), Path::new("tokenizer.json")).unwrap();
        for (text, special) in corpus().iter().flat_map(|text| [(text, false), (text, true)]) {
            let ids = original.encode(text, special).unwrap();
            assert_eq!(read.encode(text, special).unwrap(), ids, "{pre} {add_bos:?} {add_eos:?}: {text:?}");
        }
        assert_eq!(read.to_json().unwrap(), json, "writing what was read changes nothing");
    }
}

#[test]
fn tokens_around_a_text_may_have_characters_with_a_meaning_in_templates() {
    let mut fixture = vocabulary();
    let token_types = types(&fixture);
    (fixture.tokens[1], fixture.tokens[2]) = ("$A:1 <|begin|>".to_owned(), "<eos:0>".to_owned());
    let vocabulary =
        gguf::Vocabulary { add_bos: true, add_eos: true, ..plain(&fixture, &token_types, "smollm") };
    let json = vocabulary.build(Path::new("test.gguf")).unwrap().to_json().unwrap();
    let inner = tokenizers::Tokenizer::from_bytes(json.as_bytes()).unwrap();
    assert_eq!(inner.encode_fast("!", true).unwrap().get_ids(), [1, 17, 2]);
    assert_eq!(inner.encode_fast(("!", "!"), true).unwrap().get_ids(), [1, 17, 2, 1, 17, 2]);
}

#[test]
fn an_unknown_pre_tokenizer_is_refused_with_the_known_ones() {
    let error = gguf::pre_tokenizer(Some("tekken"), Path::new("m.gguf")).unwrap_err().to_string();
    assert!(error.starts_with("m.gguf: tokenizer.ggml.pre is `tekken`"), "{error}");
    assert!(["smollm", "default", "llama-bpe", "qwen2"].iter().all(|name| error.contains(name)), "{error}");
}

#[test]
fn vocabularies_that_contradict_themselves_are_refused() {
    let mut fixture = vocabulary();
    let token_types = types(&fixture);
    let refused = |fixture: &VocabularyFixture, types: &[i32]| {
        let result = plain(fixture, types, "smollm").build(Path::new("m.gguf"));
        assert!(matches!(result, Err(TextError::BadVocabulary { .. })), "{result:?}");
    };
    refused(&fixture, &token_types[1..]);
    fixture.merges.push("no-space".to_owned());
    refused(&fixture, &token_types);
    fixture.merges.pop();
    fixture.merges.push("zz qqqq".to_owned());
    refused(&fixture, &token_types);
    fixture.merges.clear();
    fixture.tokens.clear();
    refused(&fixture, &[]);
}

#[test]
fn a_token_that_is_listed_twice_is_refused_with_both_ids() {
    let mut fixture = vocabulary();
    let token_types = types(&fixture);
    let last = fixture.tokens.len() - 1;
    let text = fixture.tokens[100].clone();
    fixture.merges.clear();
    fixture.tokens[last].clone_from(&text);
    let error = plain(&fixture, &token_types, "smollm").build(Path::new("m.gguf")).unwrap_err().to_string();
    assert!(
        error.contains(&format!("tokens 100 and {last} of tokenizer.ggml.tokens are both {text:?}")),
        "{error}"
    );
    // Rows without a name are all alike: nothing.
    fixture.tokens[last - 1].clear();
    fixture.tokens[last].clear();
    let tokenizer = Arc::new(plain(&fixture, &token_types, "smollm").build(Path::new("m.gguf")).unwrap());
    let id = |index: usize| u32::try_from(index).unwrap();
    assert_eq!(
        tokenizer.decode(&[100, id(last - 1), id(last), 100], false),
        tokenizer.token_text(100).repeat(2)
    );
    assert_eq!(tokenizer.vocab_size(), last + 1);
}

#[test]
fn a_folders_tokenizer_json_reads_like_the_original() {
    let original = small_tokenizer("qwen2");
    let folder = tempfile::tempdir().unwrap();
    let mut trained = original.inner.clone();
    trained
        .with_truncation(Some(tokenizers::TruncationParams { max_length: 2, ..Default::default() }))
        .unwrap();
    trained.save(folder.path().join("tokenizer.json"), false).unwrap();
    let config = r#"{"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>", "other": 1}"#;
    std::fs::write(folder.path().join("tokenizer_config.json"), config).unwrap();
    let read = Tokenizer::from_folder(folder.path()).unwrap();
    for text in corpus() {
        let ids = original.encode(&text, false).unwrap();
        assert_eq!(read.encode(&text, false).unwrap(), ids, "nothing is cut: {text:?}");
    }
    assert_eq!((read.bos_token(), read.eos_token()), (Some("<|im_start|>"), Some("<|im_end|>")));
}

#[test]
fn a_folder_without_a_readable_tokenizer_says_what_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    let error = Tokenizer::from_folder(folder.path()).unwrap_err();
    assert!(matches!(error, TextError::NoTokenizer { .. }), "{error}");
    std::fs::write(folder.path().join("tokenizer.json"), "{").unwrap();
    let error = Tokenizer::from_folder(folder.path()).unwrap_err();
    assert!(matches!(error, TextError::Malformed { .. }), "{error}");
}

#[test]
fn a_decoder_that_cannot_stream_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let mut inner = small_tokenizer("smollm").inner.clone();
    inner.with_decoder(Some(tokenizers::decoders::wordpiece::WordPiece::default()));
    inner.save(folder.path().join("tokenizer.json"), false).unwrap();
    let error = Tokenizer::from_folder(folder.path()).unwrap_err().to_string();
    assert!(error.contains("decoder `WordPiece` is not supported"), "{error}");
}

#[test]
fn an_absurd_token_id_does_not_become_an_absurd_table() {
    let folder = tempfile::tempdir().unwrap();
    let json =
        r#"{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 4000000000}, "unk_token": "a"}}"#;
    std::fs::write(folder.path().join("tokenizer.json"), json).unwrap();
    let error = Tokenizer::from_folder(folder.path()).unwrap_err();
    assert!(matches!(error, TextError::BadVocabulary { .. }), "{error}");
}

#[test]
fn sentencepiece_marks_bytes_and_leading_space_decode_as_in_hugging_face() {
    let tokenizer = sentencepiece();
    for ids in [&[3, 4, 5][..], &[1, 3, 4], &[6, 7, 8, 5], &[2, 2, 3], &[9, 3], &[2], &[]] {
        for skip in [false, true] {
            assert_eq!(
                tokenizer.decode(ids, skip),
                tokenizer.inner.decode(ids, skip).unwrap(),
                "{ids:?} {skip}"
            );
        }
    }
    assert_eq!(tokenizer.decode(&[1, 3, 6, 7, 8], true), "Hello€");
    assert_eq!(tokenizer.token_text(4), " world");
    assert!(!tokenizer.is_special(9), "added, but text");
}

#[test]
fn long_texts_without_a_place_to_split_do_not_stall() {
    let tokenizer = small_tokenizer("smollm");
    for text in [" ".repeat(400_000), "a".repeat(400_000), "\u{301}".repeat(100_000), "1 ".repeat(100_000)] {
        let begun = Instant::now();
        let ids = tokenizer.encode(&text, false).unwrap();
        assert!(begun.elapsed().as_secs() < 20, "{:?} for {:?}...", begun.elapsed(), &text[..4]);
        assert_eq!(tokenizer.decode(&ids, false), text);
    }
}

#[test]
fn no_text_has_fewer_tokens_than_its_least() {
    // NFC makes some of these shorter; SmolLM2 has no token for the last two.
    let tricky = [
        "ι\u{308}\u{301}",
        "\u{212a}",
        "\u{1fef}",
        "\u{1100}\u{1161}\u{11a8}",
        "e\u{301}",
        "  ",
        "==",
        "\u{4}",
        "\u{50000}",
    ];
    let tricky = tricky.map(|text| text.repeat(500));
    for pre in ["smollm", "gpt-2", "default", "llama-bpe", "qwen2"] {
        let tokenizer = small_tokenizer(pre);
        for text in corpus().iter().chain(&tricky) {
            let (tokens, least) = (tokenizer.encode(text, false).unwrap().len(), tokenizer.tokens_min(text));
            assert!(tokens >= least, "{pre}: {tokens} tokens, {least} at least, for {text:?}");
        }
        assert!(tokenizer.tokens_min(&"a".repeat(10_000)) >= 10_000 / 4 / 20, "{pre}: worth asking");
    }
}

#[test]
fn where_text_can_vanish_there_is_no_least() {
    use tokenizers::{
        AddedToken, NormalizerWrapper, normalizers, pre_tokenizers::whitespace::WhitespaceSplit,
    };
    let plain = small_tokenizer("smollm");
    let text = "a".repeat(1000);
    let least = |inner: tokenizers::Tokenizer| {
        Tokenizer::assemble(inner, Path::new("test")).unwrap().tokens_min(&text)
    };
    let normalized = |normalizer: NormalizerWrapper| {
        let mut inner = plain.inner.clone();
        inner.with_normalizer(Some(normalizer)).unwrap();
        least(inner)
    };
    assert_eq!(least(plain.inner.clone()), 50, "the longest token has 20 bytes");
    assert_eq!(normalized(normalizers::NFC.into()), 13);
    assert_eq!(normalized(normalizers::Strip::new(true, true).into()), 0);
    assert_eq!(normalized(normalizers::StripAccents.into()), 0);
    let mut split = plain.inner.clone();
    split.with_pre_tokenizer(Some(WhitespaceSplit));
    assert_eq!(least(split), 0);
    let mut greedy = plain.inner.clone();
    greedy.add_special_tokens([AddedToken::from("<x>", true).lstrip(true)]).unwrap();
    assert_eq!(least(greedy), 0);
    assert_eq!(sentencepiece().tokens_min(&text), 0, "this one has tokens for three bytes only");
}
