//! Scores, weights and weighted values on lanes; up to four query vectors share each load.
#![allow(unsafe_code)]

use std::ops::Range;

use super::{
    BLOCK_KEYS, CHUNK,
    cpu::{Blocks, QUERIES_MAX, State, TOGETHER},
};
use crate::{
    Element,
    kv_append::HEAD_DIM_MAX,
    linear::{BLOCK, SharedRows},
    simd::{Lanes, LanesElement, exp2, exp2_in_range},
};

/// Unscaled scores of up to four query vectors with 16 keys.
#[inline(always)]
pub(super) unsafe fn scores_of_block<V: Lanes, T: LanesElement>(
    state: &mut State,
    queries: Range<usize>,
    keys: *const T,
    head_dim: usize,
    block: usize,
) {
    unsafe {
        match queries.len() {
            1 => scores::<V, T, 1>(state, queries.start, keys, head_dim, block),
            2 => scores::<V, T, 2>(state, queries.start, keys, head_dim, block),
            3 => scores::<V, T, 3>(state, queries.start, keys, head_dim, block),
            _ => scores::<V, T, TOGETHER>(state, queries.start, keys, head_dim, block),
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
    let all = vectors(&seen);
    scores[all.start..seen.start].fill(f32::NEG_INFINITY);
    scores[seen.end..all.end].fill(f32::NEG_INFINITY);
    // SAFETY: whole vectors within the chunk; V's instruction set is the caller's.
    let (largest, is_sound) = unsafe {
        let (mut largest, mut is_sound) = (V::splat(f32::NEG_INFINITY), true);
        for at in all.step_by(16) {
            let scores = V::load(scores.as_ptr().add(at));
            is_sound &= scores.is_below_infinity();
            largest = scores.max(largest);
        }
        (largest.largest() * scale, is_sound)
    };
    if !(is_sound && largest.is_finite()) {
        state.total[query] = [f32::NAN; 16];
    }
    state.base[query] = largest;
}

/// Factors by which the states and the chunk of `active` query vectors are merged; all at once.
#[inline(always)]
pub(super) unsafe fn find_factors<V: Lanes>(state: &mut State, active: Range<usize>) {
    for query in (0..active.start).chain(active.end..QUERIES_MAX) {
        state.base[query] = state.largest[query];
    }
    // SAFETY: 16 query vectors; V's instruction set is the caller's.
    unsafe {
        let (old, base) = (V::load(state.largest.as_ptr()), V::load(state.base.as_ptr()));
        let new = old.max(base);
        exp2(old.sub(new)).store(state.merge[0].as_mut_ptr());
        exp2(base.sub(new)).store(state.merge[1].as_mut_ptr());
        new.store(state.largest.as_mut_ptr());
    }
}

/// Scores of one query vector become rounded weights, and their sum is merged. Blocks of `blocks` beyond its own get
/// weights of zero.
#[inline(always)]
pub(super) unsafe fn weigh<V: Lanes, T: LanesElement>(
    state: &mut State,
    query: usize,
    scale: f32,
    blocks: &Range<usize>,
    on_tiles: bool,
) {
    let seen = state.seen[query].clone();
    let all = vectors(&seen);
    let (scores, weights) = (state.scores[query].as_mut_ptr(), state.weights[query].as_mut_ptr());
    // SAFETY: whole vectors within the chunk; V's instruction set is the caller's.
    unsafe {
        let (scale, base) = (V::splat(scale), V::splat(-state.base[query]));
        let mut sum = V::zero();
        // Those that are seen whole need no questions.
        let whole =
            seen.start.next_multiple_of(16)..(seen.end / 16 * 16).max(seen.start.next_multiple_of(16));
        for at in (all.start..whole.start).step_by(16).chain((whole.end..all.end).step_by(16)) {
            let scores = scores.add(at);
            exp2_in_range(V::load(scores).fma(scale, base)).store(scores);
            for lane in 0..16 {
                if !seen.contains(&(at + lane)) {
                    *scores.add(lane) = 0.0;
                }
            }
            let weight = V::load(scores);
            sum = sum.add(weight);
            match on_tiles {
                true => weight.store_weights_bf16(weights.add(at)),
                false => T::through_lanes(weight).store(scores),
            }
        }
        let (mut scores, mut to) = (scores.add(whole.start), weights.add(whole.start));
        if on_tiles {
            for _ in 0..whole.len() / 16 {
                let weight = exp2_in_range(V::load(scores).fma(scale, base));
                sum = sum.add(weight);
                weight.store_weights_bf16(to);
                (scores, to) = (scores.add(16), to.add(16));
            }
        } else {
            for _ in 0..whole.len() / 16 {
                let weight = exp2_in_range(V::load(scores).fma(scale, base));
                sum = sum.add(weight);
                T::through_lanes(weight).store(scores);
                scores = scores.add(16);
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
        let total = state.total[query].as_mut_ptr();
        let (old, new) = (V::splat(state.merge[0][query]), V::splat(state.merge[1][query]));
        V::load(total).fma(old, sum.mul(new)).store(total);
    }
}

/// The weights of tiles where lanes read them.
pub(super) fn weights_of_tiles(state: &mut State, active: Range<usize>, blocks: &Range<usize>) {
    let keys = blocks.start * BLOCK_KEYS..blocks.end * BLOCK_KEYS;
    for query in active {
        let (to, from) = (&mut state.scores[query][keys.clone()], &state.weights[query][keys.clone()]);
        to.iter_mut().zip(from).for_each(|(to, from)| *to = from.widen());
    }
}

/// Adds the weighted values of one chunk to 16 dimensions of up to four outputs.
#[inline(always)]
pub(super) unsafe fn add_values<V: Lanes, T: LanesElement>(
    state: &mut State,
    queries: Range<usize>,
    blocks: &Blocks<T>,
    dims: usize,
) {
    unsafe {
        match queries.len() {
            1 => values::<V, T, 1>(state, queries.start, blocks, dims),
            2 => values::<V, T, 2>(state, queries.start, blocks, dims),
            3 => values::<V, T, 3>(state, queries.start, blocks, dims),
            _ => values::<V, T, TOGETHER>(state, queries.start, blocks, dims),
        }
    }
}

#[inline(always)]
unsafe fn values<V: Lanes, T: LanesElement, const Q: usize>(
    state: &mut State,
    first: usize,
    blocks: &Blocks<T>,
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
            let from = blocks.values[block].add(dims * blocks.value_stride);
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
const _: () = assert!(CHUNK.is_multiple_of(BLOCK_KEYS) && BLOCK_KEYS == 16 && QUERIES_MAX == 16);
