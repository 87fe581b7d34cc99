//! Scores, weights and weighted values on lanes; up to four query vectors share each load.
#![allow(unsafe_code)]

use std::ops::Range;

use super::{
    BLOCK_KEYS, CHUNK,
    cpu::TOGETHER,
    state::{HALF, SCORES, State},
};
use crate::{
    Element,
    kv_append::HEAD_DIM_MAX,
    linear::{BLOCK, SharedRows},
    simd::{Lanes, LanesElement, exp2},
};

/// Unscaled scores of all query vectors with 16 keys.
#[inline(always)]
pub(super) unsafe fn scores_of_block<V: Lanes, T: LanesElement>(
    state: &mut State,
    keys: *const T,
    head_dim: usize,
    block: usize,
) {
    for half in 0..2 {
        let active = state.active[half].clone();
        for first in active.clone().step_by(TOGETHER) {
            // SAFETY: the caller's.
            unsafe {
                match active.end - first {
                    1 => scores::<V, T, 1>(state, first, keys, head_dim, block),
                    2 => scores::<V, T, 2>(state, first, keys, head_dim, block),
                    3 => scores::<V, T, 3>(state, first, keys, head_dim, block),
                    _ => scores::<V, T, TOGETHER>(state, first, keys, head_dim, block),
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn scores<V: Lanes, T: LanesElement, const Q: usize>(
    state: &mut State,
    first: usize,
    keys: *const T,
    head_dim: usize,
    block: usize,
) {
    unsafe {
        let mut sums = [V::zero(); Q];
        for dims in (0..head_dim).step_by(BLOCK) {
            let mut even = [V::zero(); Q];
            let mut odd = [V::zero(); Q];
            for dim in (dims..head_dim.min(dims + BLOCK)).step_by(2) {
                let (k_even, k_odd) = T::load_pairs::<V>(keys.add(dim / 2 * 32));
                for q in 0..Q {
                    let query = state.queries.get_unchecked(first + q).as_ptr().add(dim);
                    even[q] = V::splat(*query).fma(k_even, even[q]);
                    odd[q] = V::splat(*query.add(1)).fma(k_odd, odd[q]);
                }
            }
            for q in 0..Q {
                sums[q] = sums[q].add(even[q].add(odd[q]));
            }
        }
        for (q, sum) in sums.into_iter().enumerate() {
            sum.store(state.scores.get_unchecked_mut(first + q).as_mut_ptr().add(block * BLOCK_KEYS));
        }
    }
}

/// Whole vectors of 16 keys around those that a query vector sees.
fn vectors(seen: &Range<usize>) -> Range<usize> {
    seen.start / 16 * 16..seen.end.next_multiple_of(16)
}

/// The largest score of a query vector, scaled; hides what it does not see. A score that is not a number, or too large
/// for one, makes its row not a number: the exponential would take it to a number, and a plausible average come of it.
#[inline(always)]
pub(super) unsafe fn find_base<V: Lanes>(state: &mut State, query: usize, scale: f32) {
    let (scores, seen) = (&mut state.scores[query], state.seen[query].clone());
    let (largest, is_sound) = if seen == (0..CHUNK) {
        // SAFETY: V's instruction set is the caller's.
        unsafe { largest_of_chunk::<V>(scores) }
    } else {
        // SAFETY: as above.
        unsafe { largest_seen::<V>(scores, seen) }
    };
    let largest = largest * scale;
    if !(is_sound && largest.is_finite()) {
        state.total[query] = [f32::NAN; 16];
    }
    state.base[query] = largest;
}

/// The largest score of a chunk that is seen whole, and whether none is plus infinity or not a number.
#[inline(always)]
unsafe fn largest_of_chunk<V: Lanes>(scores: &[f32; SCORES]) -> (f32, bool) {
    // Sums of what is never too large to be added, unless it is infinite.
    const SMALL: f32 = 1.0 / 1024.0;
    // SAFETY: whole vectors of the chunk; V's instruction set is the caller's.
    unsafe {
        let (mut largest, mut sums) = ([V::splat(f32::NEG_INFINITY); 2], [V::zero(); 2]);
        for at in (0..CHUNK).step_by(32) {
            for side in 0..2 {
                let scores = V::load(scores.as_ptr().add(at + side * 16));
                largest[side] = scores.max(largest[side]);
                sums[side] = scores.fma(V::splat(SMALL), sums[side]);
            }
        }
        (largest[0].max(largest[1]).largest(), sums[0].add(sums[1]).is_below_infinity())
    }
}

/// The same of the scores that are seen; hides the others of their vectors.
#[inline(always)]
unsafe fn largest_seen<V: Lanes>(scores: &mut [f32; SCORES], seen: Range<usize>) -> (f32, bool) {
    let all = vectors(&seen);
    scores[all.start..seen.start].fill(f32::NEG_INFINITY);
    scores[seen.end..all.end].fill(f32::NEG_INFINITY);
    // SAFETY: whole vectors within the chunk; V's instruction set is the caller's.
    unsafe {
        let (mut largest, mut is_sound) = (V::splat(f32::NEG_INFINITY), true);
        for at in all.step_by(16) {
            let scores = V::load(scores.as_ptr().add(at));
            is_sound &= scores.is_below_infinity();
            largest = scores.max(largest);
        }
        (largest.largest(), is_sound)
    }
}

/// Factors by which the states and the chunk of a half's query vectors are merged; all at once.
#[inline(always)]
pub(super) unsafe fn find_factors<V: Lanes>(state: &mut State, half: usize) {
    let (all, active) = (half * HALF..(half + 1) * HALF, state.active[half].clone());
    for query in (all.start..active.start).chain(active.end..all.end) {
        state.base[query] = state.largest[query];
    }
    // SAFETY: 16 query vectors; V's instruction set is the caller's.
    unsafe {
        let largest = state.largest.as_mut_ptr().add(all.start);
        let (old, base) = (V::load(largest), V::load(state.base.as_ptr().add(all.start)));
        let new = old.max(base);
        exp2(old.sub(new)).store(state.merge[0].as_mut_ptr().add(all.start));
        exp2(base.sub(new)).store(state.merge[1].as_mut_ptr().add(all.start));
        new.store(largest);
    }
}

/// Scores of one query vector become rounded weights, and their sum is merged. Blocks of the chunk beyond its own get
/// weights of zero.
#[inline(always)]
pub(super) unsafe fn weigh<V: Lanes, T: LanesElement>(
    state: &mut State,
    query: usize,
    scale: f32,
    on_tiles: bool,
) {
    let (scores, weights) = (state.scores[query].as_mut_ptr(), state.weights[query].as_mut_ptr());
    // SAFETY: whole vectors within the chunk; V's instruction set is the caller's.
    unsafe {
        let (scale, base) = (V::splat(scale), V::splat(-state.base[query]));
        let mut sum = V::zero();
        if state.seen[query] != (0..CHUNK) {
            sum = weigh_edges::<V, T>(state, query, scale, base, on_tiles);
        } else if on_tiles {
            for at in (0..CHUNK).step_by(16) {
                let weight = T::exp2_lanes(V::load(scores.add(at)).fma(scale, base));
                sum = sum.add(weight);
                weight.store_weights_of_tiles(weights.add(at));
            }
        } else {
            for at in (0..CHUNK).step_by(16) {
                let weight = T::exp2_lanes(V::load(scores.add(at)).fma(scale, base));
                sum = sum.add(weight);
                T::through_lanes(weight).store(scores.add(at));
            }
        }
        let total = state.total[query].as_mut_ptr();
        let (old, new) = (V::splat(state.merge[0][query]), V::splat(state.merge[1][query]));
        V::load(total).fma(old, sum.mul(new)).store(total);
    }
}

/// The same of a chunk that is seen in part, without the merge.
#[inline(always)]
unsafe fn weigh_edges<V: Lanes, T: LanesElement>(
    state: &mut State,
    query: usize,
    scale: V,
    base: V,
    on_tiles: bool,
) -> V {
    let (seen, blocks) = (state.seen[query].clone(), state.blocks.seen.clone());
    let all = vectors(&seen);
    let (scores, weights) = (state.scores[query].as_mut_ptr(), state.weights[query].as_mut_ptr());
    // SAFETY: whole vectors within the chunk; V's instruction set is the caller's.
    unsafe {
        let mut sum = V::zero();
        for at in all.clone().step_by(16) {
            let scores = scores.add(at);
            let mut weight = T::exp2_lanes(V::load(scores).fma(scale, base));
            if at < seen.start || seen.end < at + 16 {
                weight.store(scores);
                for lane in 0..16 {
                    if !seen.contains(&(at + lane)) {
                        *scores.add(lane) = 0.0;
                    }
                }
                weight = V::load(scores);
            }
            sum = sum.add(weight);
            match on_tiles {
                true => weight.store_weights_of_tiles(weights.add(at)),
                false => T::through_lanes(weight).store(scores),
            }
        }
        if on_tiles {
            for at in (blocks.start * BLOCK_KEYS..all.start).step_by(16) {
                V::zero().store_bf16(weights.add(at));
            }
            for at in (all.end..blocks.end * BLOCK_KEYS).step_by(16) {
                V::zero().store_bf16(weights.add(at));
            }
        }
        sum
    }
}

/// The weights of tiles where lanes read them.
pub(super) fn weights_of_tiles(state: &mut State) {
    let keys = state.blocks.seen.start * BLOCK_KEYS..state.blocks.seen.end * BLOCK_KEYS;
    for query in state.active() {
        let (to, from) = (&mut state.scores[query][keys.clone()], &state.weights[query][keys.clone()]);
        to.iter_mut().zip(from).for_each(|(to, from)| *to = from.widen());
    }
}

/// Adds the weighted values of a chunk to 16 dimensions of its outputs.
#[inline(always)]
pub(super) unsafe fn add_values<V: Lanes, T: LanesElement>(state: &mut State, pages: *const T, dims: usize) {
    for half in 0..2 {
        let active = state.active[half].clone();
        for first in active.clone().step_by(TOGETHER) {
            // SAFETY: the caller's.
            unsafe {
                match active.end - first {
                    1 => values::<V, T, 1>(state, first, pages, dims),
                    2 => values::<V, T, 2>(state, first, pages, dims),
                    3 => values::<V, T, 3>(state, first, pages, dims),
                    _ => values::<V, T, TOGETHER>(state, first, pages, dims),
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn values<V: Lanes, T: LanesElement, const Q: usize>(
    state: &mut State,
    first: usize,
    pages: *const T,
    dims: usize,
) {
    let (mut all, mut any) = (state.seen[first].clone(), state.seen[first].clone());
    for seen in &state.seen[first + 1..first + Q] {
        all = all.start.max(seen.start)..all.end.min(seen.end);
        any = any.start.min(seen.start)..any.end.max(seen.end);
    }
    unsafe {
        let mut sums = [V::zero(); Q];
        for block in any.start / BLOCK_KEYS..any.end.div_ceil(BLOCK_KEYS) {
            let from = pages.add(state.blocks.values[block] + dims * state.blocks.value_stride);
            let mut even = [V::zero(); Q];
            let mut odd = [V::zero(); Q];
            for pair in 0..BLOCK_KEYS / 2 {
                let key = block * BLOCK_KEYS + 2 * pair;
                let (v_even, v_odd) = T::load_pairs::<V>(from.add(pair * 32));
                // Pairs that every query vector of the block sees whole need no questions.
                let whole = all.start <= key && key + 1 < all.end;
                for q in 0..Q {
                    let weights = state.scores.get_unchecked(first + q).as_ptr().add(key);
                    if whole || state.seen[first + q].contains(&key) {
                        even[q] = V::splat(*weights).fma(v_even, even[q]);
                    }
                    if whole || state.seen[first + q].contains(&(key + 1)) {
                        odd[q] = V::splat(*weights.add(1)).fma(v_odd, odd[q]);
                    }
                }
            }
            for q in 0..Q {
                sums[q] = sums[q].add(even[q].add(odd[q]));
            }
        }
        for (q, sum) in sums.into_iter().enumerate() {
            merge::<V>(state, first + q, dims, sum);
        }
    }
}

/// Merges a chunk's weighted values of 16 dimensions into the output of a query vector.
#[inline(always)]
pub(super) unsafe fn merge<V: Lanes>(state: &mut State, query: usize, dims: usize, chunk: V) {
    let (old, new) = (state.merge[0][query], state.merge[1][query]);
    unsafe {
        let out = state.out.get_unchecked_mut(query).as_mut_ptr().add(dims * 16);
        V::load(out).fma(V::splat(old), chunk.mul(V::splat(new))).store(out);
    }
}

/// The same of all dimensions, from tiles.
#[inline(always)]
pub(super) unsafe fn merge_sums<V: Lanes>(state: &mut State, query: usize, dim_tiles: usize) {
    let (sums, out) = (state.sums[query].as_ptr(), state.out[query].as_mut_ptr());
    // SAFETY: whole vectors of a head; V's instruction set is the caller's.
    unsafe {
        let (old, new) = (V::splat(state.merge[0][query]), V::splat(state.merge[1][query]));
        for at in (0..dim_tiles * 16).step_by(16) {
            let out = out.add(at);
            V::load(out).fma(old, V::load(sums.add(at)).mul(new)).store(out);
        }
    }
}

/// Writes an output, times `factor`, to columns of a row.
#[inline(always)]
pub(super) unsafe fn finish<V: Lanes, T: LanesElement>(
    from: &[f32; HEAD_DIM_MAX],
    factor: f32,
    out: &SharedRows<'_, T>,
    row: usize,
    columns: Range<usize>,
) {
    if !columns.start.is_multiple_of(16) {
        for (input, x) in columns.zip(from) {
            // SAFETY: row and head belong to the caller's task alone.
            unsafe { out.part(row, input, 1)[0] = T::round(x * factor) }
        }
        return;
    }
    for at in (0..columns.len()).step_by(16) {
        let len = 16.min(columns.len() - at);
        // SAFETY: as above; V's instruction set is the caller's.
        unsafe {
            let out = out.part(row, columns.start + at, len);
            match len {
                16 => T::store_lanes(V::load(from.as_ptr().add(at)).mul(V::splat(factor)), out.as_mut_ptr()),
                _ => out.iter_mut().zip(&from[at..]).for_each(|(to, x)| *to = T::round(x * factor)),
            }
        }
    }
}

// A chunk holds whole blocks, and a block is a vector of scores.
const _: () = assert!(CHUNK.is_multiple_of(BLOCK_KEYS) && BLOCK_KEYS == 16 && HALF == 16);
