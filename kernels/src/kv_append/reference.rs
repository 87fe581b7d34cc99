//! The truth: a cache without pages or packing, `[slots][heads][keys, then values of one head]`.

use crate::rope::Heads;

/// Writes the heads of each row of `x` into its slot of `cache`.
pub fn kv_append(x: &[f32], keys: Heads, values: Heads, slots: &[u32], cache: &mut [f32]) {
    let dim = keys.dim;
    for (row, &slot) in slots.iter().enumerate() {
        for head in 0..keys.count {
            let to = (slot as usize * keys.count + head) * 2 * dim;
            let key = row * keys.stride + keys.first + head * dim;
            let value = row * values.stride + values.first + head * dim;
            cache[to..to + dim].copy_from_slice(&x[key..key + dim]);
            cache[to + dim..to + 2 * dim].copy_from_slice(&x[value..value + dim]);
        }
    }
}
