//! Scores, weights and weighted values on lanes; up to four query vectors share each load.
#![allow(unsafe_code)]

use std::ops::Range;

use super::{
    CHUNK,
    cpu::{State, TOGETHER},
};
use crate::{
    linear::BLOCK,
    simd::{Lanes, LanesElement, exp2},
};

/// Unscaled scores of up to four query vectors with 16 keys.
#[inline(always)]
pub(super) unsafe fn scores_of_tile<V: Lanes, T: LanesElement>(
    state: &mut State<V>,
    queries: Range<usize>,
    keys: *const T,
    head_dim: usize,
    tile: usize,
) {
    unsafe {
        match queries.len() {
            1 => scores::<V, T, 1>(state, queries.start, keys, head_dim, tile),
            2 => scores::<V, T, 2>(state, queries.start, keys, head_dim, tile),
            3 => scores::<V, T, 3>(state, queries.start, keys, head_dim, tile),
            _ => scores::<V, T, TOGETHER>(state, queries.start, keys, head_dim, tile),
        }
    }
}

#[inline(always)]
unsafe fn scores<V: Lanes, T: LanesElement, const Q: usize>(
    state: &mut State<V>,
    first: usize,
    keys: *const T,
    head_dim: usize,
    tile: usize,
) {
    unsafe {
        let mut sums = [V::zero(); Q];
        for block in (0..head_dim).step_by(BLOCK) {
            let mut even = [V::zero(); Q];
            let mut odd = [V::zero(); Q];
            for dim in (block..head_dim.min(block + BLOCK)).step_by(2) {
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
            sum.store(state.scores.get_unchecked_mut(first + q).as_mut_ptr().add(tile * 16));
        }
    }
}

/// Scores of one query vector become rounded weights; its maximum and sum are merged, the factors kept.
#[inline(always)]
pub(super) unsafe fn weigh<V: Lanes, T: LanesElement>(state: &mut State<V>, query: usize, scale: V) {
    let (scores, seen) = (&mut state.scores[query], &state.seen[query]);
    let hide = |scores: &mut [f32; CHUNK], value| {
        if seen.len() < CHUNK {
            scores[..seen.start].fill(value);
            scores[seen.end..].fill(value);
        }
    };
    unsafe {
        hide(scores, f32::NEG_INFINITY);
        let low = V::load(scores.as_ptr()).mul(scale);
        let high = V::load(scores.as_ptr().add(16)).mul(scale);
        let finite = low.is_below_infinity() && high.is_below_infinity();
        let largest = low.max(high).largest();
        let base = V::splat(largest);
        exp2(low.sub(base)).store(scores.as_mut_ptr());
        exp2(high.sub(base)).store(scores.as_mut_ptr().add(16));
        hide(scores, 0.0);
        let (low, high) = (V::load(scores.as_ptr()), V::load(scores.as_ptr().add(16)));
        let sum = low.add(high);
        T::through_lanes(low).store(scores.as_mut_ptr());
        T::through_lanes(high).store(scores.as_mut_ptr().add(16));
        let old = state.largest[query];
        let new = if old > largest { old } else { largest };
        let mut exponents = [0.0; 16];
        (exponents[0], exponents[1]) = (old - new, largest - new);
        let factors = exp2(V::load(exponents.as_ptr())).to_array();
        state.largest[query] = new;
        state.merge[query] = (factors[0], factors[1]);
        // The exponential takes anything to a number: a score that overflowed must not end as a plausible average.
        let sum = if finite { sum } else { V::splat(f32::NAN) };
        state.total[query] = state.total[query].fma(V::splat(factors[0]), sum.mul(V::splat(factors[1])));
    }
}

/// Adds the weighted values of one chunk to 16 dimensions of up to four outputs.
#[inline(always)]
pub(super) unsafe fn add_values<V: Lanes, T: LanesElement>(
    state: &mut State<V>,
    queries: Range<usize>,
    tiles: [*const T; 2],
    dims: usize,
) {
    unsafe {
        match queries.len() {
            1 => values::<V, T, 1>(state, queries.start, tiles, dims),
            2 => values::<V, T, 2>(state, queries.start, tiles, dims),
            3 => values::<V, T, 3>(state, queries.start, tiles, dims),
            _ => values::<V, T, TOGETHER>(state, queries.start, tiles, dims),
        }
    }
}

#[inline(always)]
unsafe fn values<V: Lanes, T: LanesElement, const Q: usize>(
    state: &mut State<V>,
    first: usize,
    tiles: [*const T; 2],
    dims: usize,
) {
    let (mut all, mut any) = (state.seen[first].clone(), state.seen[first].clone());
    for seen in &state.seen[first + 1..first + Q] {
        all = all.start.max(seen.start)..all.end.min(seen.end);
        any = any.start.min(seen.start)..any.end.max(seen.end);
    }
    unsafe {
        let mut even = [V::zero(); Q];
        let mut odd = [V::zero(); Q];
        for pair in any.start / 2..any.end.div_ceil(2) {
            let (v_even, v_odd) = T::load_pairs::<V>(tiles[pair / 8].add(pair % 8 * 32));
            // Pairs that every query vector of the block sees whole need no questions.
            let whole = all.start <= 2 * pair && 2 * pair + 1 < all.end;
            for q in 0..Q {
                let weights = state.scores.get_unchecked(first + q).as_ptr().add(2 * pair);
                if whole || state.seen[first + q].contains(&(2 * pair)) {
                    even[q] = V::splat(*weights).fma(v_even, even[q]);
                }
                if whole || state.seen[first + q].contains(&(2 * pair + 1)) {
                    odd[q] = V::splat(*weights.add(1)).fma(v_odd, odd[q]);
                }
            }
        }
        for q in 0..Q {
            let (old, new) = state.merge[first + q];
            let out = state.out.get_unchecked_mut(first + q).as_mut_ptr().add(dims * 16);
            let chunk = even[q].add(odd[q]).mul(V::splat(new));
            V::load(out).fma(V::splat(old), chunk).store(out);
        }
    }
}
