use std::collections::HashSet;

use half::bf16;

use super::*;
use crate::testing::{Numbers, devices};

#[test]
fn every_element_of_a_page_has_its_own_place() {
    for (block_size, head_dim) in [(16, 64), (32, 80), (48, 20)] {
        let shape = PageShape::new(block_size, 2, head_dim).unwrap();
        let places = |at: &dyn Fn(usize, usize) -> usize| {
            (0..block_size)
                .flat_map(|t| (0..head_dim).map(move |d| (t, d)))
                .map(|(t, d)| at(t, d))
                .collect::<HashSet<_>>()
        };
        for places in [
            places(&|t, d| shape.key_at::<f32>(t, d)),
            places(&|t, d| shape.key_at::<bf16>(t, d)),
            places(&|t, d| shape.value_at::<f32>(t, d)),
            places(&|t, d| shape.value_at::<bf16>(t, d)),
        ] {
            assert_eq!(places.len(), block_size * head_dim);
            assert!(places.iter().all(|&at| at < shape.half_elements()));
        }
    }
}

#[test]
fn rows_land_in_their_slots_and_nowhere_else() {
    let device = &devices()[0];
    let shape = PageShape::new(16, 2, 24).unwrap();
    let keys = Heads { stride: 200, first: 10, count: 2, dim: 24 };
    let values = Heads { first: 100, ..keys };
    let x = Numbers(9).vec(2 * 200);
    let mut pages = vec![0.0f32; 3 * shape.page_elements()];
    kv_append(device, View::from(&x[..]), keys, values, &[17, 40], shape, ViewMut::from(&mut pages[..]))
        .unwrap();
    for (row, page, offset) in [(0, 1, 1), (1, 2, 8)] {
        for head in 0..2 {
            let half = &pages[page * shape.page_elements() + head * 2 * shape.half_elements()..];
            for dim in 0..24 {
                assert_eq!(half[shape.key_at::<f32>(offset, dim)], x[row * 200 + 10 + head * 24 + dim]);
                let v = half[shape.half_elements() + shape.value_at::<f32>(offset, dim)];
                assert_eq!(v, x[row * 200 + 100 + head * 24 + dim]);
            }
        }
    }
    assert_eq!(pages.iter().filter(|x| **x != 0.0).count(), 2 * 2 * 2 * 24);
}

#[test]
fn a_slot_beyond_the_pool_is_refused_before_anything_is_written() {
    let device = &devices()[0];
    let shape = PageShape::new(16, 1, 16).unwrap();
    let heads = Heads { stride: 16, first: 0, count: 1, dim: 16 };
    let x = [1.0; 32];
    let mut pages = vec![0.0f32; shape.page_elements()];
    let result =
        kv_append(device, View::from(&x[..]), heads, heads, &[0, 16], shape, ViewMut::from(&mut pages[..]));
    assert_eq!(result.unwrap_err().to_string(), "kv_append: slot 16 is outside 0..16");
    assert!(pages.iter().all(|x| *x == 0.0));
    assert!(PageShape::new(20, 1, 16).is_err());
    assert!(PageShape::new(16, 1, 512).is_err());
}
