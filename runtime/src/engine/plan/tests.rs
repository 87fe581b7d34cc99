use std::num::NonZeroUsize;

use consort_actors::{CacheSpec, LayerGroups};
use consort_parallel::{
    kv::KvGroups,
    plan::{CacheShape, Policy},
};

#[test]
fn the_planner_counts_pages_as_the_scheduler_does() {
    let patterns: [&[usize]; 6] =
        [&[0], &[128], &[128, 0], &[0, 17, 0, 17], &[1, 0, 2, 4096], &[33, 33, 33, 0]];
    for pattern in patterns {
        for block_size in [1, 2, 15, 16, 32, 256] {
            let layers: Vec<_> = pattern.iter().map(|&window| NonZeroUsize::new(window)).collect();
            let groups = KvGroups::of_windows(&layers);
            let windows: Vec<Option<usize>> = groups.windows().collect();
            let shape = CacheShape { block_size, groups, chunk: 512 };
            let groups = LayerGroups::new(&windows).expect("few groups");
            let spec = CacheSpec { groups, ..CacheSpec::new(block_size, 1) };
            for tokens in (0..300).chain([511, 512, 513, 4095, 4096, 4097, 131_072]) {
                let planned = shape.pages(tokens, Policy::WindowsFreed);
                assert_eq!(planned, spec.pages_for(tokens) as u64, "{pattern:?}, {block_size}, {tokens}");
                if tokens > 0 {
                    let across = spec.blocks_across(tokens);
                    assert_eq!(shape.pages_of_window(tokens), across, "{block_size}, {tokens}");
                }
            }
        }
    }
}
