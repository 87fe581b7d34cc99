//! Tasks are (rows of a span, KV head): the query heads of a group by a few rows, which share each load of keys.
#![allow(unsafe_code)]

use std::{cell::RefCell, num::NonZeroUsize, ops::Range};

use super::{AttentionShape, BLOCK_KEYS, CHUNK, PagedSpan, lanes, tiles};
use crate::{
    DType,
    device::{CpuDevice, Isa},
    element::{bf16, through},
    kv_append::HEAD_DIM_MAX,
    linear::{BLOCK, Kernels, RowsMut, SharedRows},
    rope::Heads,
    simd::{Lanes, dispatch},
};

/// Query vectors of one task.
pub(super) const QUERIES_MAX: usize = 16;
/// Query vectors that share a register block.
pub(super) const TOGETHER: usize = 4;
/// Blocks of keys in a chunk.
const BLOCKS: usize = CHUNK / BLOCK_KEYS;
/// Lengths of rows that are read or written as lines of tiles: one line more than is used, since lines that are a power
/// of two apart compete for the same places of the first cache.
pub(super) const SCORES: usize = CHUNK + 16;
pub(super) const WEIGHTS: usize = CHUNK + 32;
pub(super) const TILE_QUERY: usize = HEAD_DIM_MAX + 32;
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
    kv_head: usize,
    query_heads: Range<usize>,
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
    let keys = |task: &Task| {
        let span = &call.spans[task.span];
        span.context_len - span.rows.len() + task.rows.end
    };
    tasks.sort_by_key(|task| std::cmp::Reverse(keys(task)));
    tasks
}

thread_local! {
    static STATE: RefCell<Box<State>> = RefCell::new(State::new());
}

/// Running softmax of up to [`QUERIES_MAX`] query vectors, and what a chunk needs. Each thread keeps one: what a task
/// does not write, it does not read.
#[repr(C, align(64))]
pub(super) struct State {
    /// Scores of a chunk; then, for lanes, the weights.
    pub(super) scores: [[f32; SCORES]; QUERIES_MAX],
    /// The weights, for tiles.
    pub(super) weights: [[bf16; WEIGHTS]; QUERIES_MAX],
    pub(super) queries: [[f32; HEAD_DIM_MAX]; QUERIES_MAX],
    /// The same, for tiles.
    pub(super) tile_queries: [[bf16; TILE_QUERY]; QUERIES_MAX],
    pub(super) out: [[f32; HEAD_DIM_MAX]; QUERIES_MAX],
    /// A chunk's weighted values of up to 64 dimensions.
    pub(super) sums: [[f32; 64]; QUERIES_MAX],
    /// Values of a block that some row does not see whole.
    pub(super) values: [tiles::Values; BLOCKS],
    /// Sums of weights, by lane.
    pub(super) total: [[f32; 16]; QUERIES_MAX],
    pub(super) largest: [f32; QUERIES_MAX],
    /// Largest score of the chunk, scaled.
    pub(super) base: [f32; QUERIES_MAX],
    /// Factors of the old state and of the chunk in the merge.
    pub(super) merge: [[f32; QUERIES_MAX]; 2],
    /// Keys of the chunk that each sees.
    pub(super) seen: [Range<usize>; QUERIES_MAX],
}

impl State {
    fn new() -> Box<State> {
        Box::new(State {
            scores: [[0.0; SCORES]; QUERIES_MAX],
            weights: [[bf16::ZERO; WEIGHTS]; QUERIES_MAX],
            queries: [[0.0; HEAD_DIM_MAX]; QUERIES_MAX],
            tile_queries: [[bf16::ZERO; TILE_QUERY]; QUERIES_MAX],
            out: [[0.0; HEAD_DIM_MAX]; QUERIES_MAX],
            sums: [[0.0; 64]; QUERIES_MAX],
            values: [tiles::NO_VALUES; BLOCKS],
            total: [[0.0; 16]; QUERIES_MAX],
            largest: [0.0; QUERIES_MAX],
            base: [0.0; QUERIES_MAX],
            merge: [[0.0; QUERIES_MAX]; 2],
            seen: std::array::from_fn(|_| 0..0),
        })
    }
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
    let (dim, count) = (call.heads.dim, task.rows.len() * task.query_heads.len());
    let padded = call.shape.pages.padded_dim();
    let first_position = span.context_len - span.rows.len() + task.rows.start;
    // SAFETY: V's instruction set is the caller's; indices were checked against the pages by the operation; no other
    // tiles live on this thread.
    unsafe {
        state.largest = [f32::NEG_INFINITY; QUERIES_MAX];
        state.base = [f32::NEG_INFINITY; QUERIES_MAX];
        for query in 0..count {
            let (row, head) = place(task, query);
            let at = (span.rows.start + row) * call.heads.stride + call.heads.first + head * dim;
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
        let _tiles = on_tiles.then(|| tiles::configure(count));
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
            chunk::<V, T>(call, task, state, on_tiles, first_key, active);
        }
        for query in 0..count {
            let (row, head) = place(task, query);
            let inverse = 1.0 / V::load(state.total[query].as_ptr()).sum();
            // Row and head belong to this task alone.
            lanes::finish::<V, T>(
                &state.out[query],
                inverse,
                out,
                span.rows.start + row,
                head * dim..(head + 1) * dim,
            );
        }
    }
}

/// Offset of the row and query head of a task's query vector.
fn place(task: &Task, query: usize) -> (usize, usize) {
    let heads = task.query_heads.len();
    (task.rows.start + query / heads, task.query_heads.start + query % heads)
}

/// Where a chunk's keys and values are: 16 keys of one head, all dimensions, and 16 dimensions of the values of 16
/// keys.
pub(super) struct Blocks<T> {
    /// Null where no row of the task sees a key of the block.
    pub(super) keys: [*const T; BLOCKS],
    /// Of the first dimensions.
    pub(super) values: [*const T; BLOCKS],
    /// Elements from 16 dimensions of values to the next.
    pub(super) value_stride: usize,
    /// The blocks of which some row sees a key.
    pub(super) seen: Range<usize>,
}

/// One chunk, the keys from `first_key` on, for the query vectors `active`. Pages of which none of these sees a key are
/// not touched.
#[inline(always)]
unsafe fn chunk<V: Lanes, T: Kernels>(
    call: &Call<'_, T>,
    task: &Task,
    state: &mut State,
    on_tiles: bool,
    first_key: usize,
    active: Range<usize>,
) {
    let shape = call.shape.pages;
    let table = &call.tables[call.spans[task.span].table.clone()];
    // The first of them sees farthest back, the last one farthest on.
    let seen =
        state.seen[active.start].start / BLOCK_KEYS..state.seen[active.end - 1].end.div_ceil(BLOCK_KEYS);
    let mut blocks = Blocks {
        keys: [std::ptr::null(); BLOCKS],
        values: [std::ptr::null(); BLOCKS],
        value_stride: shape.block_size() / 2 * 32,
        seen: seen.clone(),
    };
    // SAFETY: a block of 16 keys lies within one page, since block_size is a multiple of 16; the pages were checked by
    // the operation.
    unsafe {
        for block in seen.clone() {
            let token = first_key + block * BLOCK_KEYS;
            let (page, offset) = (table[token / shape.block_size()] as usize, token % shape.block_size());
            let head = shape.page_start(page) + task.kv_head * 2 * shape.half_elements();
            let head = call.pages.as_ptr().add(head);
            blocks.keys[block] = head.add(offset / 16 * (shape.padded_dim() / 2) * 32);
            blocks.values[block] = head.add(shape.half_elements() + offset / 2 * 32);
        }
        for block in seen.clone() {
            let ahead = blocks.keys[(block + PREFETCH_BLOCKS).min(BLOCKS - 1)];
            prefetch_block::<V, T>(ahead, shape.padded_dim() / 2 * 32, 0, 1);
            let dims = shape.padded_dim() / 16;
            prefetch_block::<V, T>(blocks.values[block], 8 * 32, blocks.value_stride, dims);
            let keys = blocks.keys[block];
            match on_tiles {
                true => tiles::scores(state, keys.cast(), shape.head_dim(), block),
                false => {
                    for first in active.clone().step_by(TOGETHER) {
                        let queries = first..active.end.min(first + TOGETHER);
                        lanes::scores_of_block::<V, T>(state, queries, keys, shape.head_dim(), block);
                    }
                }
            }
        }
        let scale = call.shape.scale * std::f32::consts::LOG2_E;
        for query in active.clone() {
            lanes::find_base::<V>(state, query, scale);
        }
        lanes::find_factors::<V>(state, active.clone());
        for query in active.clone() {
            lanes::weigh::<V, T>(state, query, scale, &seen, on_tiles);
        }
        let dims = shape.padded_dim() / 16;
        if on_tiles && tiles::values::<V>(state, active.clone(), &blocks.of_tiles(), dims) {
            return;
        }
        if on_tiles {
            lanes::weights_of_tiles(state, active.clone(), &seen);
        }
        for dims in 0..dims {
            for first in active.clone().step_by(TOGETHER) {
                let queries = first..active.end.min(first + TOGETHER);
                lanes::add_values::<V, T>(state, queries, &blocks, dims);
            }
        }
    }
}

/// Asks for `count` pieces of `elements` elements, `stride` elements apart.
#[inline(always)]
unsafe fn prefetch_block<V: Lanes, T>(from: *const T, elements: usize, stride: usize, count: usize) {
    if from.is_null() {
        return;
    }
    for piece in 0..count {
        for line in (0..elements * size_of::<T>()).step_by(64) {
            // SAFETY: a hint that never faults; V's instruction set is the caller's.
            unsafe { V::prefetch(from.wrapping_add(piece * stride).cast::<u8>().wrapping_add(line)) }
        }
    }
}

impl<T> Blocks<T> {
    /// The same, of BF16.
    fn of_tiles(&self) -> Blocks<bf16> {
        Blocks {
            keys: self.keys.map(<*const T>::cast),
            values: self.values.map(<*const T>::cast),
            value_stride: self.value_stride,
            seen: self.seen.clone(),
        }
    }
}
