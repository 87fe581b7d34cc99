//! Tasks are (rows of a span, KV head); the query heads of a group and a few rows share each load of keys.
#![allow(unsafe_code)]

use std::{num::NonZeroUsize, ops::Range};

use super::{AttentionShape, CHUNK, PagedSpan};
use crate::{
    device::CpuDevice,
    element::through,
    kv_append::HEAD_DIM_MAX,
    linear::{BLOCK, Kernels},
    rope::Heads,
    simd::{Lanes, LanesElement, dispatch, exp2},
    sys::SharedMut,
};

/// Query vectors of one task.
const QUERIES_MAX: usize = 16;
/// Query vectors that share a register block.
const TOGETHER: usize = 4;

pub(super) struct Call<'a, T> {
    pub(super) queries: &'a [f32],
    pub(super) heads: Heads,
    pub(super) shape: &'a AttentionShape,
    pub(super) pages: &'a [T],
    pub(super) tables: &'a [u32],
    pub(super) spans: &'a [PagedSpan],
}

/// Query vectors that read one KV head: some rows of a span by some query heads.
struct Task {
    span: usize,
    /// Offsets within the span.
    rows: Range<usize>,
    kv_head: usize,
    query_heads: Range<usize>,
}

pub(super) fn attention<T: Kernels>(cpu: &CpuDevice, call: &Call<'_, T>, out: &mut [T]) {
    let tasks = tasks(call);
    let (out, isa) = (SharedMut::new(out), cpu.isa());
    cpu.team().for_each(tasks.len(), |at| {
        let (task, out) = (&tasks[at], &out);
        dispatch!(isa, run::<T>(call: &Call<'_, T>, task: &Task, out: &SharedMut<'_, T>) [T: Kernels]);
    });
}

fn tasks<T>(call: &Call<'_, T>) -> Vec<Task> {
    let mut groups: Vec<(usize, Range<usize>)> = Vec::new();
    for (query, &kv) in call.shape.kv_of_query.iter().enumerate() {
        match groups.last_mut() {
            Some((last, queries)) if *last == kv && queries.len() < QUERIES_MAX => queries.end += 1,
            _ => groups.push((kv, query..query + 1)),
        }
    }
    let mut tasks = Vec::new();
    for (span, PagedSpan { rows, .. }) in call.spans.iter().enumerate() {
        for (kv_head, query_heads) in &groups {
            let step = (QUERIES_MAX / query_heads.len()).max(1);
            for first in (0..rows.len()).step_by(step) {
                let rows = first..rows.len().min(first + step);
                tasks.push(Task { span, rows, kv_head: *kv_head, query_heads: query_heads.clone() });
            }
        }
    }
    // The longest contexts first, so that no member is left with one at the end.
    tasks.sort_by_key(|task| std::cmp::Reverse(call.spans[task.span].context_len));
    tasks
}

/// Running softmax of up to [`QUERIES_MAX`] query vectors.
struct State<V> {
    queries: [[f32; HEAD_DIM_MAX]; QUERIES_MAX],
    largest: [f32; QUERIES_MAX],
    total: [V; QUERIES_MAX],
    out: [[f32; HEAD_DIM_MAX]; QUERIES_MAX],
    scores: [[f32; CHUNK]; QUERIES_MAX],
    /// Factors of the old state and of the chunk in the merge.
    merge: [(f32, f32); QUERIES_MAX],
}

#[inline(always)]
unsafe fn run<V: Lanes, T: Kernels>(call: &Call<'_, T>, task: &Task, out: &SharedMut<'_, T>) {
    let span = &call.spans[task.span];
    let (dim, count) = (call.heads.dim, task.rows.len() * task.query_heads.len());
    let first_position = span.context_len - span.rows.len() + task.rows.start;
    // SAFETY: V's instruction set is the caller's; indices were checked against the pages by the operation.
    unsafe {
        let mut state = State {
            queries: [[0.0; HEAD_DIM_MAX]; QUERIES_MAX],
            largest: [f32::NEG_INFINITY; QUERIES_MAX],
            total: [V::zero(); QUERIES_MAX],
            out: [[0.0; HEAD_DIM_MAX]; QUERIES_MAX],
            scores: [[0.0; CHUNK]; QUERIES_MAX],
            merge: [(0.0, 0.0); QUERIES_MAX],
        };
        for query in 0..count {
            let (row, head) = place(task, query);
            let at = (span.rows.start + row) * call.heads.stride + call.heads.first + head * dim;
            for (to, from) in state.queries[query].iter_mut().zip(&call.queries[at..at + dim]) {
                *to = through::<T>(*from);
            }
        }
        let context = first_position + task.rows.len();
        let (heads, window) =
            (task.query_heads.len(), call.shape.window.map_or(usize::MAX, NonZeroUsize::get));
        let oldest = |position: usize| (position + 1).saturating_sub(window);
        for first_key in (oldest(first_position) / CHUNK * CHUNK..context).step_by(CHUNK) {
            // Rows whose position lies before the chunk, and rows whose window has left it, take no part.
            let early_rows = first_key.saturating_sub(first_position);
            let past = (first_key + CHUNK - 1).saturating_add(window).saturating_sub(first_position);
            let active = early_rows * heads..past.min(task.rows.len()) * heads;
            let seen = |query: usize| {
                let position = first_position + query / heads;
                oldest(position).saturating_sub(first_key)..(position + 1 - first_key).min(CHUNK)
            };
            chunk(call, task, &mut state, first_key, active, context, &seen);
        }
        for query in 0..count {
            let (row, head) = place(task, query);
            let at = ((span.rows.start + row) * call.heads.count + head) * dim;
            let inverse = 1.0 / state.total[query].sum();
            // Row and head belong to this task alone.
            for (to, x) in out.range_mut(at..at + dim).iter_mut().zip(&state.out[query]) {
                *to = T::round(x * inverse);
            }
        }
    }
}

/// Offset of the row and query head of a task's query vector.
fn place(task: &Task, query: usize) -> (usize, usize) {
    let heads = task.query_heads.len();
    (task.rows.start + query / heads, task.query_heads.start + query % heads)
}

/// One chunk of keys for the query vectors `active`, each of which sees `seen(query)` of it.
#[inline(always)]
unsafe fn chunk<V: Lanes, T: Kernels>(
    call: &Call<'_, T>,
    task: &Task,
    state: &mut State<V>,
    first_key: usize,
    active: Range<usize>,
    context: usize,
    seen: &impl Fn(usize) -> Range<usize>,
) {
    let shape = call.shape.pages;
    let keys = (context - first_key).min(CHUNK);
    // Start of this head's keys in the page that holds a token of this chunk, and the token's offset there.
    let page_of = |offset: usize| {
        let token = first_key + offset;
        let page = call.tables[call.spans[task.span].table.start + token / shape.block_size()] as usize;
        let head = page * shape.page_elements() + task.kv_head * 2 * shape.half_elements();
        (head, token % shape.block_size())
    };
    // SAFETY: a tile of 16 keys (or of 16 dims by 8 pairs of values) lies within one page, since block_size is a
    // multiple of 16; the pages were checked by the operation.
    unsafe {
        for tile in 0..keys.div_ceil(16) {
            let (head, offset) = page_of(tile * 16);
            let from = call.pages.as_ptr().add(head + offset / 16 * (shape.padded_dim() / 2) * 32);
            for first in active.clone().step_by(TOGETHER) {
                let queries = first..active.end.min(first + TOGETHER);
                scores_of_tile::<V, T>(state, queries, from, shape.head_dim(), tile);
            }
        }
        let scale = V::splat(call.shape.scale * std::f32::consts::LOG2_E);
        for query in active.clone() {
            weigh::<V, T>(state, query, seen(query), scale);
        }
        for dims in 0..shape.padded_dim() / 16 {
            let tiles: [*const T; 2] = std::array::from_fn(|tile| {
                if tile * 16 >= keys {
                    return std::ptr::null();
                }
                let (head, offset) = page_of(tile * 16);
                let values = head + shape.half_elements() + (dims * shape.block_size() / 2 + offset / 2) * 32;
                call.pages.as_ptr().add(values)
            });
            for first in active.clone().step_by(TOGETHER) {
                let queries = first..active.end.min(first + TOGETHER);
                let seen =
                    std::array::from_fn(|q| if first + q < active.end { seen(first + q) } else { 0..keys });
                add_values::<V, T>(state, queries, tiles, seen, dims);
            }
        }
    }
}

/// Unscaled scores of up to four query vectors with 16 keys.
#[inline(always)]
unsafe fn scores_of_tile<V: Lanes, T: LanesElement>(
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
unsafe fn weigh<V: Lanes, T: LanesElement>(state: &mut State<V>, query: usize, seen: Range<usize>, scale: V) {
    unsafe {
        let scores = &mut state.scores[query];
        scores[..seen.start].fill(f32::NEG_INFINITY);
        scores[seen.end..].fill(f32::NEG_INFINITY);
        let low = V::load(scores.as_ptr()).mul(scale);
        let high = V::load(scores.as_ptr().add(16)).mul(scale);
        let largest = low.max(high).largest();
        let base = V::splat(largest);
        exp2(low.sub(base)).store(scores.as_mut_ptr());
        exp2(high.sub(base)).store(scores.as_mut_ptr().add(16));
        scores[..seen.start].fill(0.0);
        scores[seen.end..].fill(0.0);
        let sum = V::load(scores.as_ptr()).add(V::load(scores.as_ptr().add(16)));
        for weight in scores.iter_mut() {
            *weight = through::<T>(*weight);
        }
        let old = state.largest[query];
        let new = if old > largest { old } else { largest };
        let mut exponents = [0.0; 16];
        (exponents[0], exponents[1]) = (old - new, largest - new);
        let factors = exp2(V::load(exponents.as_ptr())).to_array();
        state.largest[query] = new;
        state.merge[query] = (factors[0], factors[1]);
        state.total[query] = state.total[query].fma(V::splat(factors[0]), sum.mul(V::splat(factors[1])));
    }
}

/// Adds the weighted values of one chunk to 16 dimensions of up to four outputs.
#[inline(always)]
unsafe fn add_values<V: Lanes, T: LanesElement>(
    state: &mut State<V>,
    queries: Range<usize>,
    tiles: [*const T; 2],
    seen: [Range<usize>; TOGETHER],
    dims: usize,
) {
    unsafe {
        match queries.len() {
            1 => values::<V, T, 1>(state, queries.start, tiles, seen, dims),
            2 => values::<V, T, 2>(state, queries.start, tiles, seen, dims),
            3 => values::<V, T, 3>(state, queries.start, tiles, seen, dims),
            _ => values::<V, T, TOGETHER>(state, queries.start, tiles, seen, dims),
        }
    }
}

#[inline(always)]
unsafe fn values<V: Lanes, T: LanesElement, const Q: usize>(
    state: &mut State<V>,
    first: usize,
    tiles: [*const T; 2],
    seen: [Range<usize>; TOGETHER],
    dims: usize,
) {
    let (mut all, mut any) = (seen[0].clone(), seen[0].clone());
    for seen in &seen[1..Q] {
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
                if whole || seen[q].contains(&(2 * pair)) {
                    even[q] = V::splat(*weights).fma(v_even, even[q]);
                }
                if whole || seen[q].contains(&(2 * pair + 1)) {
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
