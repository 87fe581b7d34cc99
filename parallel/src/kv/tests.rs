use super::*;

#[test]
fn a_copied_block_is_whole_in_every_layer_and_leaves_the_others_alone() {
    let device = Device::cpu(1).unwrap();
    let layout = KvLayout { pages: PageShape::new(16, 2, 16).unwrap(), num_layers: 3, dtype: DType::F32 };
    let mut store = KvStore::new(&device, layout, 4).unwrap();
    let page = layout.pages.page_elements();
    assert_eq!(layout.block_bytes(), 3 * 2 * 2 * 16 * 16 * 4);
    assert_eq!(store.bytes(), 4 * layout.block_bytes());
    for layer in 0..3 {
        let layer_pages = store.layer_mut::<f32>(layer).unwrap();
        let (range, buffer) = (layer_pages.range, layer_pages.buffer);
        for (at, x) in buffer.as_mut_slice()[range].iter_mut().enumerate() {
            *x = (layer * 10 + at / page) as f32;
        }
    }
    store.copy_block(BlockId(2), BlockId(0)).unwrap();
    for layer in 0..3 {
        let layer_pages = store.layer_mut::<f32>(layer).unwrap();
        let pages = &layer_pages.buffer.as_slice()[layer_pages.range];
        let firsts: Vec<f32> = (0..4).map(|block| pages[block * page]).collect();
        assert_eq!(
            firsts,
            [layer * 10 + 2, layer * 10 + 1, layer * 10 + 2, layer * 10 + 3].map(|x| x as f32)
        );
        assert!(pages[..page].iter().all(|x| *x == firsts[0]));
    }
    assert!(store.copy_block(BlockId(4), BlockId(0)).is_err());
    assert!(store.layer_mut::<bf16>(0).is_err());
}
