//! Tasks are (rows of a span, KV head): the query heads of a group by a few rows, which share each load of keys.
//!
//! Of a chunk of keys all scores are made first, then all weights, then all sums of values: a processor that has just
//! used its tiles computes with half its lanes for some hundred cycles, so tiles and lanes take long turns. Query
//! vectors come in two halves, rows of two tiles, which share what is loaded of keys and values.
#![allow(unsafe_code)]

use std::{cell::RefCell, cmp::Reverse, num::NonZeroUsize, ops::Range};

use super::{
    AttentionShape, BLOCK_KEYS, CHUNK, PagedSpan, lanes,
    state::{Blocks, HALF, QUERIES_MAX, State},
    tiles,
};
use crate::{
    DType,
    device::{CpuDevice, Isa},
    element::through,
    linear::{BLOCK, Kernels, RowsMut, SharedRows},
    rope::Heads,
    simd::{Lanes, dispatch},
};

/// Query vectors that share a register block.
pub(super) const TOGETHER: usize = 4;
/// How many blocks ahead of its use a block of keys is asked for.
const PREFETCH_BLOCKS: usize = 4;

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
    /// Rows of each half but the last.
    half_rows: usize,
    kv_head: usize,
    query_heads: Range<usize>,
}

impl Task {
    /// Rows of a half, as offsets within those of the task.
    fn half(&self, half: usize) -> Range<usize> {
        let rows = self.rows.len();
        (half * self.half_rows).min(rows)..((half + 1) * self.half_rows).min(rows)
    }

    /// Query vectors of all halves with their row, as an offset within those of the task, and their query head.
    fn queries(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        let (half_rows, heads) = (self.half_rows, self.query_heads.clone());
        (0..self.rows.len()).flat_map(move |row| {
            let first = row / half_rows * HALF + row % half_rows * heads.len();
            heads.clone().enumerate().map(move |(at, head)| (first + at, row, head))
        })
    }
}

pub(super) fn attention<T: Kernels>(cpu: &CpuDevice, call: &Call<'_, T>, out: RowsMut<'_, T>) {
    let tasks = tasks(call);
    let (out, isa) = (out.shared(), cpu.isa());
    let on_tiles = call.on_tiles(isa);
    cpu.team().for_each(tasks.len(), |at| {
        let (task, out) = (&tasks[at], &out);
        STATE.with_borrow_mut(|state| {
            dispatch!(isa, run::<T>(call: &Call<'_, T>, task: &Task, on_tiles: bool, state: &mut State,
                out: &SharedRows<'_, T>) [T: Kernels]);
        });
    });
}

fn tasks<T>(call: &Call<'_, T>) -> Vec<Task> {
    let mut groups: Vec<(usize, Range<usize>)> = Vec::new();
    for (query, &kv) in call.shape.kv_of_query.iter().enumerate() {
        match groups.last_mut() {
            Some((last, queries)) if *last == kv && queries.len() < HALF => queries.end += 1,
            _ => groups.push((kv, query..query + 1)),
        }
    }
    let mut tasks = Vec::new();
    for (span, PagedSpan { rows, .. }) in call.spans.iter().enumerate() {
        for (kv_head, query_heads) in &groups {
            let half_rows = (HALF / query_heads.len()).max(1);
            for first in (0..rows.len()).step_by(2 * half_rows) {
                let rows = first..rows.len().min(first + 2 * half_rows);
                let query_heads = query_heads.clone();
                tasks.push(Task { span, rows, half_rows, kv_head: *kv_head, query_heads });
            }
        }
    }
    // The longest contexts first, so that no member is left with one at the end; what reads the same keys stays
    // together.
    let keys = |task: &Task| {
        let span = &call.spans[task.span];
        span.context_len - span.rows.len() + task.rows.end
    };
    tasks.sort_by_key(|task| {
        (Reverse(call.spans[task.span].context_len), task.span, task.kv_head, Reverse(keys(task)))
    });
    tasks
}

thread_local! {
    static STATE: RefCell<Box<State>> = RefCell::new(State::new());
}

#[inline(always)]
unsafe fn run<V: Lanes, T: Kernels>(
    call: &Call<'_, T>,
    task: &Task,
    on_tiles: bool,
    state: &mut State,
    out: &SharedRows<'_, T>,
) {
    let span = &call.spans[task.span];
    let (dim, padded) = (call.heads.dim, call.shape.pages.padded_dim());
    let first_row = span.rows.start + task.rows.start;
    let first_position = span.context_len - span.rows.len() + task.rows.start;
    // SAFETY: V's instruction set is the caller's; indices were checked against the pages by the operation; no other
    // tiles live on this thread.
    unsafe {
        state.largest = [f32::NEG_INFINITY; QUERIES_MAX];
        state.base = [f32::NEG_INFINITY; QUERIES_MAX];
        for (query, row, head) in task.queries() {
            let at = (first_row + row) * call.heads.stride + call.heads.first + head * dim;
            let from = &call.queries[at..at + dim];
            match on_tiles {
                true => tiles::set_query::<V>(&mut state.tile_queries[query], from),
                false => {
                    let to = &mut state.queries[query][..dim];
                    to.iter_mut().zip(from).for_each(|(to, from)| *to = through::<T>(*from));
                }
            }
            state.out[query][..padded].fill(0.0);
            state.total[query] = [0.0; 16];
        }
        let window = call.shape.window.map_or(usize::MAX, NonZeroUsize::get);
        let end = first_position + task.rows.len();
        for first_key in (oldest(first_position, window) / CHUNK * CHUNK..end).step_by(CHUNK) {
            find_keys(call, task, state, first_position, first_key, window);
            chunk::<V, T>(call, task, state, on_tiles);
        }
        for (query, row, head) in task.queries() {
            let inverse = 1.0 / V::load(state.total[query].as_ptr()).sum();
            // Row and head belong to this task alone.
            let columns = head * dim..(head + 1) * dim;
            lanes::finish::<V, T>(&state.out[query], inverse, out, first_row + row, columns);
        }
    }
}

/// The first key that a position sees.
fn oldest(position: usize, window: usize) -> usize {
    (position + 1).saturating_sub(window)
}

/// What each query vector sees of the chunk from `first_key` on, and where that is. Pages of which none sees a key are
/// not touched.
fn find_keys<T>(
    call: &Call<'_, T>,
    task: &Task,
    state: &mut State,
    first_position: usize,
    first_key: usize,
    window: usize,
) {
    let heads = task.query_heads.len();
    // Rows whose position lies before the chunk, and rows whose window has left it, take no part.
    let early = first_key.saturating_sub(first_position);
    let past = (first_key + CHUNK - 1).saturating_add(window).saturating_sub(first_position);
    let (mut oldest_seen, mut newest_seen) = (CHUNK, 0);
    for half in 0..2 {
        let rows = task.half(half);
        let active = early.clamp(rows.start, rows.end)..past.clamp(rows.start, rows.end);
        let first = |row: usize| half * HALF + (row - rows.start) * heads;
        state.active[half] = first(active.start)..first(active.end.max(active.start));
        for row in active {
            let position = first_position + row;
            let seen =
                oldest(position, window).saturating_sub(first_key)..(position + 1 - first_key).min(CHUNK);
            (oldest_seen, newest_seen) = (oldest_seen.min(seen.start), newest_seen.max(seen.end));
            state.seen[first(row)..first(row + 1)].fill(seen);
        }
    }
    let shape = call.shape.pages;
    let table = &call.tables[call.spans[task.span].table.clone()];
    let seen = oldest_seen / BLOCK_KEYS..newest_seen.div_ceil(BLOCK_KEYS);
    // A block of 16 keys lies within one page, since block_size is a multiple of 16.
    let token = first_key + seen.start * BLOCK_KEYS;
    let (mut at, mut offset) = (token / shape.block_size(), token % shape.block_size());
    for block in seen.clone() {
        let head = shape.page_start(table[at] as usize) + task.kv_head * 2 * shape.half_elements();
        state.blocks.keys[block] = head + offset * shape.padded_dim();
        state.blocks.values[block] = head + shape.half_elements() + offset / 2 * 32;
        offset += BLOCK_KEYS;
        if offset == shape.block_size() {
            (at, offset) = (at + 1, 0);
        }
    }
    state.blocks.value_stride = shape.block_size() / 2 * 32;
    state.blocks.seen = seen;
}

/// One chunk whose keys were found.
#[inline(always)]
unsafe fn chunk<V: Lanes, T: Kernels>(call: &Call<'_, T>, task: &Task, state: &mut State, on_tiles: bool) {
    let shape = call.shape.pages;
    let (pages, dims) = (call.pages.as_ptr(), shape.padded_dim() / 16);
    let scale = call.shape.scale * std::f32::consts::LOG2_E;
    let counts = [0, 1].map(|half| task.half(half).len() * task.query_heads.len());
    // The rows of a prefill find keys and values near, since others have just read them.
    let fetch = task.rows.len() == 1;
    // SAFETY: V's instruction set is the caller's; blocks lie within the pages.
    unsafe {
        if on_tiles {
            tiles::scores::<V>(state, counts, pages.cast(), shape.head_dim(), fetch);
        } else {
            for block in state.blocks.seen.clone() {
                if fetch {
                    prefetch::<V, T>(pages, &state.blocks, block, shape.padded_dim());
                }
                let keys = pages.add(state.blocks.keys[block]);
                lanes::scores_of_block::<V, T>(state, keys, shape.head_dim(), block);
            }
        }
        for half in 0..2 {
            for query in state.active[half].clone() {
                lanes::find_base::<V>(state, query, scale);
            }
            lanes::find_factors::<V>(state, half);
            for query in state.active[half].clone() {
                lanes::weigh::<V, T>(state, query, scale, on_tiles);
            }
        }
        if on_tiles && tiles::values::<V>(state, counts, pages.cast(), dims) {
            return;
        }
        if on_tiles {
            lanes::weights_of_tiles(state);
        }
        for dims in 0..dims {
            lanes::add_values::<V, T>(state, pages, dims);
        }
    }
}

/// Asks for a block of keys a little ahead, and for the values of this one, which are read a good deal later.
#[inline(always)]
pub(super) unsafe fn prefetch<V: Lanes, T>(pages: *const T, blocks: &Blocks, block: usize, dims: usize) {
    let lines = |elements: usize| (0..elements * size_of::<T>()).step_by(64);
    let ahead = block + PREFETCH_BLOCKS;
    // SAFETY: hints that never fault; V's instruction set is the caller's.
    unsafe {
        if ahead < blocks.seen.end {
            let keys = pages.wrapping_add(blocks.keys[ahead]).cast::<u8>();
            for line in lines(dims / 2 * 32) {
                V::prefetch(keys.wrapping_add(line));
            }
        }
        for piece in 0..dims / 16 {
            let values = pages.wrapping_add(blocks.values[block] + piece * blocks.value_stride).cast::<u8>();
            for line in lines(8 * 32) {
                V::prefetch(values.wrapping_add(line));
            }
        }
    }
}
