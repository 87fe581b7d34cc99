//! The truth: one pair after another.

/// Copies pages of `page` elements in each of `layers` layers.
pub fn kv_copy<T: Copy>(pool: &mut [T], layers: usize, page: usize, copies: &[(u32, u32)]) {
    for layer in pool.chunks_exact_mut(pool.len() / layers) {
        for &(from, to) in copies {
            let from = from as usize * page;
            layer.copy_within(from..from + page, to as usize * page);
        }
    }
}
