//! Tasks are (rows of a span, KV head); the query heads of a group and a few rows share each load of keys.
#![allow(unsafe_code)]

use std::{num::NonZeroUsize, ops::Range};

use super::{AttentionShape, CHUNK, PagedSpan, lanes, tiles::OnTiles};
use crate::{
    DType,
    device::{CpuDevice, Isa},
    element::through,
    kv_append::HEAD_DIM_MAX,
    linear::{BLOCK, Kernels},
    rope::Heads,
    simd::{Lanes, dispatch},
    sys::SharedMut,
};

/// Query vectors of one task.
pub(super) const QUERIES_MAX: usize = 16;
/// Query vectors that share a register block.
pub(super) const TOGETHER: usize = 4;

pub(super) struct Call<'a, T> {
    pub(super) queries: &'a [f32],
    pub(super) heads: Heads,
    pub(super) shape: &'a AttentionShape,
    pub(super) pages: &'a [T],
    pub(super) tables: &'a [u32],
    pub(super) spans: &'a [PagedSpan],
}

impl<T: Kernels> Call<'_, T> {
    /// Whether tiles can do it: they take BF16, 32 dimensions at a time.
    fn on_tiles(&self, isa: Isa) -> bool {
        isa == Isa::Amx && T::DTYPE == DType::BF16 && self.heads.dim.is_multiple_of(BLOCK)
    }
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
    let on_tiles = call.on_tiles(isa);
    cpu.team().for_each(tasks.len(), |at| {
        let (task, out) = (&tasks[at], &out);
        dispatch!(isa, run::<T>(call: &Call<'_, T>, task: &Task, on_tiles: bool, out: &SharedMut<'_, T>)
            [T: Kernels]);
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
pub(super) struct State<V> {
    pub(super) queries: [[f32; HEAD_DIM_MAX]; QUERIES_MAX],
    pub(super) largest: [f32; QUERIES_MAX],
    pub(super) total: [V; QUERIES_MAX],
    pub(super) out: [[f32; HEAD_DIM_MAX]; QUERIES_MAX],
    pub(super) scores: [[f32; CHUNK]; QUERIES_MAX],
    /// Keys of the chunk that each sees.
    pub(super) seen: [Range<usize>; QUERIES_MAX],
    /// Factors of the old state and of the chunk in the merge.
    pub(super) merge: [(f32, f32); QUERIES_MAX],
}

#[inline(always)]
unsafe fn run<V: Lanes, T: Kernels>(call: &Call<'_, T>, task: &Task, on_tiles: bool, out: &SharedMut<'_, T>) {
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
            seen: std::array::from_fn(|_| 0..0),
            merge: [(0.0, 0.0); QUERIES_MAX],
        };
        let mut tiles = on_tiles.then(|| OnTiles::new(count));
        for query in 0..count {
            let (row, head) = place(task, query);
            let at = (span.rows.start + row) * call.heads.stride + call.heads.first + head * dim;
            for (to, from) in state.queries[query].iter_mut().zip(&call.queries[at..at + dim]) {
                *to = through::<T>(*from);
            }
            if let Some(tiles) = &mut tiles {
                tiles.set_query(query, &state.queries[query][..dim]);
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
            for query in active.clone() {
                let position = first_position + query / heads;
                state.seen[query] =
                    oldest(position).saturating_sub(first_key)..(position + 1 - first_key).min(CHUNK);
            }
            let keys = first_key..context.min(first_key + CHUNK);
            // The first of them sees farthest back.
            let unseen_tiles = oldest(first_position + early_rows).saturating_sub(first_key) / 16;
            chunk(call, task, &mut state, tiles.as_mut(), (keys, unseen_tiles), active);
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

/// One chunk, the given keys, for the query vectors `active`. None of these sees the given number of tiles of 16 keys
/// at its beginning: whatever page the table names for them is not touched.
#[inline(always)]
unsafe fn chunk<V: Lanes, T: Kernels>(
    call: &Call<'_, T>,
    task: &Task,
    state: &mut State<V>,
    mut tiles: Option<&mut OnTiles>,
    (keys, unseen_tiles): (Range<usize>, usize),
    active: Range<usize>,
) {
    let shape = call.shape.pages;
    let (first_key, keys) = (keys.start, keys.len());
    let is_there = |tile: usize| (unseen_tiles..keys.div_ceil(16)).contains(&tile);
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
        let keys_of: [*const T; 2] = std::array::from_fn(|tile| {
            if !is_there(tile) {
                return std::ptr::null();
            }
            let (head, offset) = page_of(tile * 16);
            call.pages.as_ptr().add(head + offset / 16 * (shape.padded_dim() / 2) * 32)
        });
        match &mut tiles {
            Some(tiles) => tiles.scores(state, keys_of.map(<*const T>::cast), shape.head_dim()),
            None => {
                for (tile, from) in keys_of.into_iter().enumerate().filter(|(tile, _)| is_there(*tile)) {
                    for first in active.clone().step_by(TOGETHER) {
                        let queries = first..active.end.min(first + TOGETHER);
                        lanes::scores_of_tile::<V, T>(state, queries, from, shape.head_dim(), tile);
                    }
                }
            }
        }
        let scale = V::splat(call.shape.scale * std::f32::consts::LOG2_E);
        for query in active.clone() {
            lanes::weigh::<V, T>(state, query, scale);
        }
        let values_of = |dims: usize| -> [*const T; 2] {
            std::array::from_fn(|tile| {
                if !is_there(tile) {
                    return std::ptr::null();
                }
                let (head, offset) = page_of(tile * 16);
                let values = head + shape.half_elements() + (dims * shape.block_size() / 2 + offset / 2) * 32;
                call.pages.as_ptr().add(values)
            })
        };
        if let Some(tiles) = tiles {
            let values = |dims| values_of(dims).map(<*const T>::cast);
            let adjacent = shape.block_size().is_multiple_of(CHUNK);
            if tiles.values(state, active.clone(), values, adjacent, shape.padded_dim() / 16) {
                return;
            }
        }
        for dims in 0..shape.padded_dim() / 16 {
            let from = values_of(dims);
            for first in active.clone().step_by(TOGETHER) {
                let queries = first..active.end.min(first + TOGETHER);
                lanes::add_values::<V, T>(state, queries, from, dims);
            }
        }
    }
}
