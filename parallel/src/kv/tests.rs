use consort_kernels::element::bf16;

use super::*;

#[test]
fn a_copied_block_is_whole_in_every_layer_and_leaves_the_others_alone() {
    let device = Device::cpu(1).unwrap();
    let layout =
        KvLayout { pages: PageShape::new(16, 2, 16).unwrap(), layers_per_page: 3, dtype: DType::F32 };
    let mut store = KvStore::new(&device, layout, 4).unwrap();
    let page = layout.pages.page_elements();
    assert_eq!(layout.block_bytes(), 3 * 2 * 2 * 16 * 16 * 4);
    assert_eq!(store.bytes(), 4 * layout.block_bytes());
    for layer in 0..3 {
        let layer_pages = store.slot_mut::<f32>(layer).unwrap();
        let (range, buffer) = (layer_pages.range, layer_pages.buffer);
        for (at, x) in buffer.as_mut_slice()[range].iter_mut().enumerate() {
            *x = (layer * 10 + at / page) as f32;
        }
    }
    store.copy_blocks(&[]).unwrap();
    store.copy_blocks(&[(BlockId(2), BlockId(0))]).unwrap();
    for layer in 0..3 {
        let layer_pages = store.slot_mut::<f32>(layer).unwrap();
        let pages = &layer_pages.buffer.as_slice()[layer_pages.range];
        let firsts: Vec<f32> = (0..4).map(|block| pages[block * page]).collect();
        assert_eq!(
            firsts,
            [layer * 10 + 2, layer * 10 + 1, layer * 10 + 2, layer * 10 + 3].map(|x| x as f32)
        );
        assert!(pages[..page].iter().all(|x| *x == firsts[0]));
    }
    assert!(store.slot_mut::<bf16>(0).is_err());
}

#[test]
fn copies_that_leave_the_pool_or_depend_on_their_order_are_refused_before_any_is_made() {
    let device = Device::cpu(1).unwrap();
    let layout =
        KvLayout { pages: PageShape::new(16, 1, 16).unwrap(), layers_per_page: 1, dtype: DType::BF16 };
    let mut store = KvStore::new(&device, layout, 4).unwrap();
    let page = layout.pages.page_elements();
    let pages = store.slot_mut::<bf16>(0).unwrap();
    for (at, x) in pages.buffer.as_mut_slice().iter_mut().enumerate() {
        *x = bf16::from_f32((at / page) as f32);
    }
    let pair = |(from, to)| (BlockId(from), BlockId(to));
    let refused = [[(0, 1), (4, 2)], [(0, 1), (2, 4)], [(0, 1), (1, 2)], [(0, 1), (2, 0)], [(0, 2), (1, 2)]];
    for copies in refused {
        assert!(store.copy_blocks(&copies.map(pair)).is_err(), "{copies:?}");
    }
    let firsts = |store: &mut KvStore| -> Vec<f32> {
        let pages = store.slot_mut::<bf16>(0).unwrap();
        (0..4).map(|block| pages.buffer.as_slice()[block * page].to_f32()).collect()
    };
    assert_eq!(firsts(&mut store), [0.0, 1.0, 2.0, 3.0]);
    store.copy_blocks(&[(0, 1), (0, 3)].map(pair)).unwrap();
    assert_eq!(firsts(&mut store), [0.0, 0.0, 2.0, 0.0]);
}
