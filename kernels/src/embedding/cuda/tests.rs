use consort_emulator::Memory;
use half::bf16;

use super::{DRAWN, embedding};
use crate::{
    cuda::row_stride,
    embedding::embedding_reference,
    sampling::cuda::NO_TOKEN,
    testing::{
        Numbers, assert_same_bits,
        emulated::{Emulated, bf16_rows, device_slice, device_slice_mut},
    },
};

/// Both sides copy numbers, so the bits are the same.
#[track_caller]
fn assert_rows(tokens: &[u32], table_rows: usize, width: usize, first: usize) {
    let (values, table) = bf16_rows(&Numbers(5).vec(table_rows * width), width);
    let expected = embedding_reference(tokens, &values, width, first);
    // The same tokens as they are, and by their places among those that were drawn.
    let places: Vec<u32> = (0..tokens.len() as u32).rev().map(|at| DRAWN | at).collect();
    let drawn: Vec<u32> = tokens.iter().rev().copied().collect();
    for (tokens, drawn) in [(tokens, &[][..]), (&places, &drawn)] {
        let (ids, drawn) = (Memory::from_slice(tokens), Memory::from_slice(drawn));
        let table = Memory::from_slice(&table);
        for device in Emulated::every_way() {
            let mut out = Memory::poisoned(tokens.len() * width);
            let (ids, drawn, rows) = (device_slice(&ids), device_slice(&drawn), device_slice(&table));
            embedding(&device, ids, drawn, rows, width, first, device_slice_mut(&mut out)).unwrap();
            assert_same_bits(&out.to_vec(), &expected, &format!("{width} columns, {:?}", device.settings));
        }
    }
}

#[test]
fn emulator_places_beyond_what_was_drawn_and_draws_of_no_token_give_zeros() {
    let width = 12;
    let (values, table) = bf16_rows(&Numbers(5).vec(8 * width), width);
    let tokens = Memory::from_slice(&[DRAWN | 1, DRAWN | 3, 2, DRAWN | 2, DRAWN, u32::MAX]);
    let (drawn, table) = (Memory::from_slice(&[5, NO_TOKEN, 7]), Memory::from_slice(&table));
    let expected = embedding_reference(&[NO_TOKEN, NO_TOKEN, 2, 7, 5, NO_TOKEN], &values, width, 0);
    assert!(expected[..2 * width].iter().all(|x| *x == 0.0) && expected[3 * width] != 0.0);
    for device in Emulated::every_way() {
        let mut out = Memory::poisoned(6 * width);
        let (ids, drawn, rows) = (device_slice(&tokens), device_slice(&drawn), device_slice(&table));
        embedding(&device, ids, drawn, rows, width, 0, device_slice_mut(&mut out)).unwrap();
        assert_same_bits(&out.to_vec(), &expected, &format!("{:?}", device.settings));
    }
}

#[test]
fn emulator_rows_of_every_width_are_exact_and_ids_of_other_ranks_give_zeros() {
    let tokens = [99, 100, 139, 140, 0, 117, 117, u32::MAX, 101];
    // One column; less than a vector; whole vectors; half a vector more (4 of 8); ragged; more than one block.
    for width in [1, 3, 8, 16, 12, 101, 576, 1032] {
        assert_rows(&tokens, 40, width, 100);
    }
}

#[test]
fn emulator_one_token_an_empty_batch_and_a_rank_without_rows_are_served() {
    assert_rows(&[7], 8, 64, 0);
    assert_rows(&[], 8, 64, 0);
    assert_rows(&[0, 1, u32::MAX], 0, 64, 2);
}

#[test]
fn emulator_a_wide_row_is_spread_over_blocks() {
    assert_rows(&[3, 1], 4, 8192, 0);
}

#[test]
fn lengths_that_do_not_agree_are_refused_before_a_launch() {
    let device = Emulated::every_way().next().unwrap();
    let (tokens, table) = (Memory::from_slice(&[0u32, 1]), Memory::<bf16>::poisoned(3 * row_stride(5) - 1));
    let mut out = Memory::<f32>::poisoned(10);
    let ids = || device_slice(&tokens);
    let refused = embedding(&device, ids(), ids(), device_slice(&table), 5, 0, device_slice_mut(&mut out));
    assert_eq!(refused.unwrap_err().to_string(), "embedding: table holds 23 elements, 16 expected");
    let table = Memory::<bf16>::poisoned(3 * row_stride(5));
    let mut out = Memory::<f32>::poisoned(11);
    let refused = embedding(&device, ids(), ids(), device_slice(&table), 5, 0, device_slice_mut(&mut out));
    assert!(refused.is_err());
}
