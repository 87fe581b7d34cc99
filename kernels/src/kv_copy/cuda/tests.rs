use consort_emulator::Memory;
use half::bf16;

use super::{check_copies, kv_copy};
use crate::{
    kv_append::PageShape,
    kv_copy::kv_copy_reference,
    testing::{
        Numbers,
        emulated::{Emulated, device_slice, device_slice_mut},
    },
};

fn assert_copies(shape: PageShape, layers: usize, blocks: usize, copies: &[(u32, u32)]) {
    let mut expected: Vec<bf16> =
        Numbers(6).vec(layers * blocks * shape.page_elements()).into_iter().map(bf16::from_f32).collect();
    let before = expected.clone();
    kv_copy_reference(&mut expected, layers, shape.page_elements(), copies);
    let flat: Vec<u32> = copies.iter().flat_map(|&(from, to)| [from, to]).collect();
    let flat = Memory::from_slice(&flat);
    for device in Emulated::every_way() {
        let mut pool = Memory::from_slice(&before);
        kv_copy(&device, shape, layers, device_slice(&flat), device_slice_mut(&mut pool)).unwrap();
        assert!(pool.to_vec() == expected, "{shape:?}, {layers} layers, {copies:?}, {:?}", device.settings);
    }
}

#[test]
fn emulator_pages_of_every_layer_are_copied_and_no_others_touched() {
    let small = PageShape::new(16, 1, 16).unwrap();
    let odd = PageShape::new(48, 3, 80).unwrap();
    for (shape, layers, blocks) in [(small, 1, 2), (small, 5, 7), (odd, 2, 6)] {
        assert_copies(shape, layers, blocks, &[(1, 0)]);
        assert_copies(shape, layers, blocks, &[]);
        if blocks > 4 {
            assert_copies(shape, layers, blocks, &[(2, 0), (2, 5), (1, 4)]);
        }
    }
}

#[test]
fn pairs_that_depend_on_their_order_and_blocks_beyond_the_pool_are_refused() {
    let message = |copies: &[(u32, u32)]| check_copies(copies, 4).unwrap_err().to_string();
    assert!(check_copies(&[(0, 1), (0, 2)], 4).is_ok());
    assert_eq!(message(&[(0, 4)]), "kv_copy: destination block 4 is outside 0..4");
    assert_eq!(message(&[(9, 1)]), "kv_copy: source block 9 is outside 0..4");
    assert_eq!(message(&[(0, 1), (2, 1)]), "kv_copy: block 1 is copied over twice");
    assert_eq!(message(&[(0, 1), (1, 2)]), "kv_copy: block 1 is copied and copied over in one step");
}

#[test]
fn emulator_a_block_beyond_the_pool_is_left_alone_even_when_nobody_checked() {
    let shape = PageShape::new(16, 1, 16).unwrap();
    let pool = vec![bf16::ONE; 2 * shape.page_elements()];
    let copies = Memory::from_slice(&[0u32, 2, u32::MAX, 1]);
    for device in Emulated::every_way() {
        let mut memory = Memory::from_slice(&pool);
        kv_copy(&device, shape, 1, device_slice(&copies), device_slice_mut(&mut memory)).unwrap();
        assert_eq!(memory.to_vec(), pool);
    }
}
