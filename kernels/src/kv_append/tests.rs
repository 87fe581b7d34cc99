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

fn against_reference<T: Element + Plain>(layers: usize) {
    let device = &devices()[0];
    let shape = PageShape::new(16, 2, 24).unwrap().among(layers);
    let keys = Heads { stride: 200, first: 10, count: 2, dim: 24 };
    let values = Heads { first: 100, ..keys };
    let slots = [17, 40, 2, 31];
    let x = Numbers(9).vec(slots.len() * 200);
    let mut pages = vec![T::default(); (2 * layers + 1) * shape.page_elements()];
    kv_append(device, View::from(&x[..]), keys, values, &slots, shape, ViewMut::from(&mut pages[..]))
        .unwrap();
    let mut cache = vec![0.0; 3 * 16 * 2 * 2 * 24];
    kv_append_reference(&x, keys, values, &slots, &mut cache);
    for slot in 0..48 {
        for head in 0..2 {
            let half = slot / 16 * layers * shape.page_elements() + head * 2 * shape.half_elements();
            for dim in 0..24 {
                let expected = &cache[(slot * 2 + head) * 48..];
                let k = pages[half + shape.key_at::<T>(slot % 16, dim)];
                let v = pages[half + shape.half_elements() + shape.value_at::<T>(slot % 16, dim)];
                assert_eq!(k, T::round(expected[dim]), "slot {slot}");
                assert_eq!(v, T::round(expected[24 + dim]), "slot {slot}");
            }
        }
    }
    let written = pages.iter().filter(|x| x.widen() != 0.0).count();
    assert_eq!(written, slots.len() * 2 * 2 * 24, "nothing else is touched");
}

#[test]
fn rows_land_in_their_slots_and_nowhere_else() {
    for layers in [1, 4] {
        against_reference::<f32>(layers);
        against_reference::<bf16>(layers);
    }
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
    // Two pages, if they followed each other; of three layers, only the first page of one.
    let mut pages = vec![0.0f32; 2 * shape.page_elements()];
    let among = shape.among(3);
    let result =
        kv_append(device, View::from(&x[..]), heads, heads, &[0, 16], among, ViewMut::from(&mut pages[..]));
    assert_eq!(result.unwrap_err().to_string(), "kv_append: slot 16 is outside 0..16");
    assert!(pages.iter().all(|x| *x == 0.0));
    assert!(PageShape::new(20, 1, 16).is_err());
    assert!(PageShape::new(16, 1, 512).is_err());
}
