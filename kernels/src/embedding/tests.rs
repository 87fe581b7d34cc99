use half::bf16;

use super::*;
use crate::{
    element::through,
    testing::{Numbers, assert_same_bits, devices, weight},
};

#[test]
fn rows_outside_this_ranks_table_are_zeros_and_others_exact() {
    let (rows, width, first) = (40, 50, 100);
    let table: Vec<f32> = Numbers(5).vec(rows * width).into_iter().map(through::<bf16>).collect();
    let tokens = [99, 100, 139, 140, 0, 117, u32::MAX];
    for device in devices() {
        let weight = weight::<bf16>(&device, &table, rows, width);
        let mut out = vec![f32::NAN; tokens.len() * width];
        embedding(&device, &tokens, &weight, first, ViewMut::from(&mut out[..])).unwrap();
        assert_same_bits(&out, &embedding_reference(&tokens, &table, width, first), "embedding");
        assert!(out[..width].iter().all(|x| *x == 0.0));
        assert_eq!(out[width..2 * width], table[..width]);
    }
}
