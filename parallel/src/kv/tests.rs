use consort_kernels::element::bf16;

use super::*;
use crate::ids::HostBlock;

/// The pages of one layer of `layers`, in order.
fn pages_mut<'a, T: KvElement>(
    layer: &'a mut KvLayer<'_, T>,
    page: usize,
    layers: usize,
) -> impl Iterator<Item = &'a mut [T]> {
    layer.buffer.as_mut_slice()[layer.range.clone()]
        .chunks_mut(page * layers)
        .map(move |pages| &mut pages[..page])
}

#[test]
fn a_copied_block_is_whole_in_every_layer_and_leaves_the_others_alone() {
    let device = Device::cpu(1).unwrap();
    let layout = KvLayout {
        pages: PageShape::new(16, 2, 16).unwrap(),
        layers_per_page: 3,
        groups: 1,
        dtype: DType::F32,
    };
    let mut store = KvStore::new(&device, layout, 4).unwrap();
    let page = layout.pages.page_elements();
    assert_eq!(layout.block_bytes(), 3 * 2 * 2 * 16 * 16 * 4);
    assert_eq!(store.bytes(), 4 * layout.block_bytes());
    for layer in 0..3 {
        let mut layer_pages = store.slot_mut::<f32>(layer).unwrap();
        for (block, values) in pages_mut(&mut layer_pages, page, 3).enumerate() {
            values.fill((layer * 10 + block) as f32);
        }
    }
    store.copy_blocks(&[]).unwrap();
    store.copy_blocks(&[(BlockId(2), BlockId(0))]).unwrap();
    for layer in 0..3 {
        let mut layer_pages = store.slot_mut::<f32>(layer).unwrap();
        for (values, block) in pages_mut(&mut layer_pages, page, 3).zip([2, 1, 2, 3]) {
            assert!(values.iter().all(|x| *x == (layer * 10 + block) as f32));
        }
    }
    assert!(store.slot_mut::<bf16>(0).is_err());
}

#[test]
fn copies_that_leave_the_pool_or_depend_on_their_order_are_refused_before_any_is_made() {
    let device = Device::cpu(1).unwrap();
    let layout = KvLayout {
        pages: PageShape::new(16, 1, 16).unwrap(),
        layers_per_page: 1,
        groups: 1,
        dtype: DType::BF16,
    };
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

/// A store on the CPU whose every number tells its page and layer, with a host's pool.
fn numbered(dtype: DType, host_blocks: usize) -> (KvStore, usize) {
    let device = Device::cpu(1).unwrap();
    let layout = KvLayout { pages: PageShape::new(16, 1, 16).unwrap(), layers_per_page: 2, groups: 1, dtype };
    let mut store = KvStore::new(&device, layout, 4).unwrap().with_host_pool(&device, host_blocks).unwrap();
    let page = layout.pages.page_elements();
    for layer in 0..2 {
        let value = |block: usize| (10 * layer + block) as f32;
        match dtype {
            DType::F32 => {
                let mut pages = store.slot_mut::<f32>(layer).unwrap();
                pages_mut(&mut pages, page, 2).enumerate().for_each(|(block, page)| page.fill(value(block)));
            }
            DType::BF16 => {
                let mut pages = store.slot_mut::<bf16>(layer).unwrap();
                let pages = pages_mut(&mut pages, page, 2).enumerate();
                pages.for_each(|(block, page)| page.fill(bf16::from_f32(value(block))));
            }
        }
    }
    (store, page)
}

/// What each page of a layer holds, where all of it is the same.
fn pages_of(store: &mut KvStore, layer: usize, page: usize) -> Vec<f32> {
    fn of_page<T: Copy + PartialEq>(values: &mut [T]) -> T {
        assert!(values.iter().all(|x| *x == values[0]), "a page was moved in part");
        values[0]
    }
    let layers = store.layout().layers_per_page;
    match store.layout().dtype {
        DType::F32 => {
            let mut pages = store.slot_mut::<f32>(layer).unwrap();
            pages_mut(&mut pages, page, layers).map(of_page).collect()
        }
        DType::BF16 => {
            let mut pages = store.slot_mut::<bf16>(layer).unwrap();
            pages_mut(&mut pages, page, layers).map(|values| of_page(values).to_f32()).collect()
        }
    }
}

#[test]
fn pages_come_back_from_the_host_whole_and_to_wherever_they_are_wanted() {
    for dtype in [DType::F32, DType::BF16] {
        let (mut store, page) = numbered(dtype, 3);
        assert_eq!(store.host_blocks(), 3);
        store.transfer(0, &[(BlockId(1), HostBlock(2)), (BlockId(3), HostBlock(0))], &[]).unwrap();
        store.copy_blocks(&[(BlockId(0), BlockId(1)), (BlockId(0), BlockId(3))]).unwrap();
        assert_eq!(pages_of(&mut store, 1, page), [10.0, 10.0, 12.0, 10.0]);
        let loads = [(HostBlock(2), BlockId(0)), (HostBlock(0), BlockId(1))];
        store.transfer(1, &[(BlockId(2), HostBlock(1))], &loads).unwrap();
        assert_eq!(
            store.pending_transfer().unwrap(),
            None,
            "a CPU's transfers are done when they are ordered"
        );
        assert_eq!(pages_of(&mut store, 0, page), [1.0, 3.0, 2.0, 0.0]);
        assert_eq!(pages_of(&mut store, 1, page), [11.0, 13.0, 12.0, 10.0]);
        store.transfer(2, &[], &[(HostBlock(1), BlockId(3))]).unwrap();
        assert_eq!(pages_of(&mut store, 1, page), [11.0, 13.0, 12.0, 12.0]);
        store.finish_transfers(std::time::Duration::ZERO).unwrap();
    }
}

#[test]
fn transfers_of_pages_that_are_not_there_or_that_others_use_are_refused_before_any_is_made() {
    type Pairs = &'static [(u32, u32)];
    let refused: [(Pairs, Pairs); 8] = [
        (&[(0, 3)], &[]),
        (&[(0, 0), (4, 1)], &[]),
        (&[], &[(3, 0)]),
        (&[(0, 0)], &[(1, 4)]),
        (&[(0, 0), (1, 0)], &[]),
        (&[], &[(0, 2), (1, 2)]),
        (&[(0, 1)], &[(1, 2)]),
        (&[(0, 1)], &[(2, 0)]),
    ];
    for (saves, loads) in refused {
        let (mut store, page) = numbered(DType::F32, 3);
        let saves: Vec<_> = saves.iter().map(|&(from, to)| (BlockId(from), HostBlock(to))).collect();
        let loads: Vec<_> = loads.iter().map(|&(from, to)| (HostBlock(from), BlockId(to))).collect();
        assert!(store.transfer(0, &saves, &loads).is_err(), "{saves:?} {loads:?}");
        assert_eq!(pages_of(&mut store, 0, page), [0.0, 1.0, 2.0, 3.0]);
    }
    let (mut store, _) = numbered(DType::F32, 0);
    assert!(store.transfer(0, &[(BlockId(0), HostBlock(0))], &[]).is_err(), "there is no host pool");
    assert!(store.transfer(0, &[], &[]).is_ok());
}

#[test]
fn a_block_is_one_stretch_of_memory_in_which_each_layer_has_its_own() {
    let device = Device::cpu(1).unwrap();
    let pages = PageShape::new(16, 2, 16).unwrap();
    let layout = KvLayout { pages, layers_per_page: 3, groups: 1, dtype: DType::F32 };
    let (page, mut store) = (pages.page_elements(), KvStore::new(&device, layout, 4).unwrap());
    let mut begins = Vec::new();
    for layer in 0..3 {
        let layer_pages = store.slot_mut::<f32>(layer).unwrap();
        assert_eq!(layer_pages.range.len(), (3 * 3 + 1) * page, "four pages with two others between each");
        begins.push(layer_pages.range.start);
    }
    assert_eq!(begins, [0, page, 2 * page]);
    let mut empty = KvStore::new(&device, layout, 0).unwrap();
    assert!((0..3).all(|layer| empty.slot_mut::<f32>(layer).unwrap().range.is_empty()));
}
