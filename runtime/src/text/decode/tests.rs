use std::sync::{Arc, LazyLock};

use proptest::prelude::*;

use super::IncrementalDecoder;
use crate::text::{
    Tokenizer,
    testing::{assert_streams, readings, sentencepiece, small_tokenizer},
};

fn pushed(tokenizer: &Arc<Tokenizer>, ids: &[u32], skip: bool) -> Vec<String> {
    let mut decoder = IncrementalDecoder::new(Arc::clone(tokenizer), skip);
    let mut pieces: Vec<String> = ids.iter().map(|&id| decoder.push(id)).collect();
    pieces.push(decoder.flush());
    pieces
}

/// Ids of the single bytes of a text: the hardest case for a stream.
fn byte_ids(tokenizer: &Tokenizer, bytes: &[u8]) -> Vec<u32> {
    let id_of =
        |byte: &u8| (0..300).find(|&id| tokenizer.token_bytes(id) == [*byte] && !tokenizer.is_special(id));
    bytes.iter().map(|byte| id_of(byte).expect("every byte is a token")).collect()
}

#[test]
fn a_character_comes_with_its_last_byte() {
    let tokenizer = small_tokenizer("smollm");
    let ids = byte_ids(&tokenizer, "a😀b".as_bytes());
    assert_eq!(pushed(&tokenizer, &ids, false), ["a", "", "", "", "😀", "b", ""]);
}

#[test]
fn a_broken_character_is_replaced_as_soon_as_it_is_certain() {
    let tokenizer = small_tokenizer("smollm");
    let ids = byte_ids(&tokenizer, b"\xF0\x9F\x98x\xE2\x82");
    assert_eq!(pushed(&tokenizer, &ids, false), ["", "", "", "\u{FFFD}x", "", "", "\u{FFFD}"]);
}

#[test]
fn special_tokens_are_silent_when_skipped_even_inside_a_character() {
    let tokenizer = small_tokenizer("smollm");
    let mut ids = byte_ids(&tokenizer, "é".as_bytes());
    ids.insert(1, 2);
    assert_eq!(pushed(&tokenizer, &ids, true).concat(), "é");
    assert_eq!(pushed(&tokenizer, &ids, false).concat(), "\u{FFFD}<|im_end|>\u{FFFD}");
}

#[test]
fn an_answer_keeps_the_space_before_its_first_word() {
    let tokenizer = sentencepiece();
    assert_eq!(pushed(&tokenizer, &[3, 4], true).concat(), "Hello world");
    let mut after = IncrementalDecoder::after(Arc::clone(&tokenizer), true, &[1, 3]);
    assert_eq!(after.push(4), " world");
}

#[test]
fn an_answer_completes_the_character_that_the_prompt_began() {
    let tokenizer = small_tokenizer("smollm");
    let ids = byte_ids(&tokenizer, "xx€".as_bytes());
    let mut decoder = IncrementalDecoder::after(Arc::clone(&tokenizer), true, &ids[..4]);
    assert_eq!(decoder.push(ids[4]), "€");
}

#[test]
fn the_corpus_streams_as_it_decodes_wherever_it_is_split() {
    for (pre, expected) in readings() {
        let tokenizer = small_tokenizer(&pre);
        for ids in &expected.ids {
            assert_streams(&tokenizer, ids, false, &pre);
            assert_streams(&tokenizer, ids, true, &pre);
        }
    }
}

/// Building one takes longer than a property's case.
static TOKENIZER: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| small_tokenizer("smollm"));

proptest! {
    #[test]
    fn pieces_join_to_the_whole_decode_of_hugging_face(
        ids in prop::collection::vec(prop_oneof![0u32..300, 0u32..2300], 0..60),
        skip: bool,
    ) {
        let pieces = pushed(&TOKENIZER, &ids, skip);
        prop_assert_eq!(pieces.concat(), TOKENIZER.reference_decode(&ids, skip));
    }

    #[test]
    fn no_piece_ends_inside_a_character_of_valid_text(text in "\\PC{0,40}") {
        let ids = byte_ids(&TOKENIZER, text.as_bytes());
        let pieces = pushed(&TOKENIZER, &ids, false);
        prop_assert!(pieces.iter().all(|piece| piece.chars().count() <= 1));
        prop_assert_eq!(pieces.concat(), text);
    }
}
