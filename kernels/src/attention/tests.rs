use std::num::NonZeroUsize;

use half::bf16;

use super::*;
use crate::{
    buffer::ViewMut,
    element::through,
    kv_append::kv_append,
    linear::Rows,
    testing::{Numbers, assert_same_bits, devices},
};

struct Case {
    kv_of_query: Vec<usize>,
    head_dim: usize,
    block_size: usize,
    /// (context, new rows) of each sequence.
    spans: Vec<(usize, usize)>,
    window: Option<NonZeroUsize>,
}

fn cases() -> Vec<Case> {
    let case = |kv_of_query: &[usize], head_dim, block_size, spans: &[(usize, usize)]| Case {
        kv_of_query: kv_of_query.to_vec(),
        head_dim,
        block_size,
        spans: spans.to_vec(),
        window: None,
    };
    let windowed = |window, case| Case { window: NonZeroUsize::new(window), ..case };
    vec![
        case(&[0], 16, 16, &[(1, 1)]),
        case(&[0, 0, 0, 1, 1, 1], 64, 16, &[(33, 33), (1, 1), (100, 1), (64, 7)]),
        case(&[0, 0, 1], 64, 32, &[(65, 40), (31, 31), (32, 1)]),
        case(&[0, 1, 2], 80, 48, &[(97, 97), (96, 2)]),
        case(&[0; 20], 24, 16, &[(40, 3)]),
        case(&[0; 16], 128, 16, &[(75, 5), (64, 64), (20, 1)]),
        case(&[0, 1, 1], 256, 64, &[(130, 9), (33, 2)]),
        case(&[0, 0], 96, 32, &[(64, 64), (95, 1)]),
        windowed(1, case(&[0, 0, 1], 16, 16, &[(70, 70), (33, 1)])),
        windowed(7, case(&[0, 0, 0, 1, 1, 1], 64, 16, &[(70, 70), (1, 1), (100, 1), (64, 7), (40, 9)])),
        windowed(31, case(&[0, 0, 1], 64, 32, &[(97, 40), (31, 31), (32, 1), (65, 1)])),
        windowed(32, case(&[0, 1], 32, 16, &[(130, 130), (96, 1), (97, 2)])),
        windowed(33, case(&[0], 80, 48, &[(97, 97), (96, 2), (66, 1)])),
        windowed(50, case(&[0; 20], 24, 16, &[(140, 3)])),
        windowed(usize::MAX, case(&[0, 0], 16, 16, &[(40, 40)])),
        // Several chunks, and halves of a task on both sides of a chunk's end.
        case(&[0, 0, 0, 1, 1, 1], 64, 16, &[(1100, 1), (600, 40), (259, 9), (257, 1), (512, 12)]),
        case(&[0, 1], 128, 32, &[(780, 20), (513, 1)]),
        windowed(300, case(&[0, 0, 1], 64, 16, &[(900, 70), (700, 1), (557, 1), (556, 16)])),
    ]
}

/// Sequences with random keys and values, stored in shuffled pages.
struct World<T> {
    shape: AttentionShape,
    heads: Heads,
    queries: Vec<f32>,
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
    pages: Vec<T>,
    tables: Vec<u32>,
    spans: Vec<PagedSpan>,
}

/// Pages lie among those of so many layers, which hold NaN here.
const LAYERS: usize = 3;

fn world<T: Kernels>(device: &Device, case: &Case) -> World<T> {
    let mut numbers = Numbers(42);
    let kv_heads = case.kv_of_query.iter().max().unwrap() + 1;
    let (dim, queries) = (case.head_dim, case.kv_of_query.len());
    let pages = PageShape::new(case.block_size, kv_heads, dim).unwrap().among(LAYERS);
    let (kv_of_query, scale) = (case.kv_of_query.clone(), (dim as f32).powf(-0.5));
    let shape = AttentionShape { pages, kv_of_query, scale, window: case.window };
    let rows: usize = case.spans.iter().map(|(_, rows)| rows).sum();
    let heads = Heads { stride: queries * dim + 5, first: 2, count: queries, dim };
    let blocks: usize = case.spans.iter().map(|(context, _)| context.div_ceil(case.block_size)).sum();
    // Stale pages hold NaN: a kernel that multiplies what a row must not see is found.
    let mut storage = vec![T::round(f32::NAN); ((blocks + 2) * LAYERS + 1) * pages.page_elements()];
    let (mut tables, mut spans, mut keys, mut values, mut first_row) = (vec![], vec![], vec![], vec![], 0);
    let mut free: Vec<u32> = (0..blocks as u32 + 3).rev().collect();
    for &(context, rows) in &case.spans {
        let table = tables.len()..tables.len() + context.div_ceil(case.block_size);
        tables.extend((0..table.len()).map(|_| free.swap_remove(numbers.below(free.len()))));
        let row = |numbers: &mut Numbers| -> Vec<f32> {
            numbers.vec(context * kv_heads * dim).into_iter().map(|x| through::<T>(2.0 * x)).collect()
        };
        let (k, v) = (row(&mut numbers), row(&mut numbers));
        let both: Vec<f32> = (0..context)
            .flat_map(|t| {
                [&k[t * kv_heads * dim..][..kv_heads * dim], &v[t * kv_heads * dim..][..kv_heads * dim]]
                    .concat()
            })
            .collect();
        let key_heads = Heads { stride: 2 * kv_heads * dim, first: 0, count: kv_heads, dim };
        let value_heads = Heads { first: kv_heads * dim, ..key_heads };
        let slots: Vec<u32> = (0..context)
            .map(|t| {
                tables[table.start + t / case.block_size] * case.block_size as u32
                    + (t % case.block_size) as u32
            })
            .collect();
        let view = ViewMut::from(&mut storage[..]);
        kv_append(device, View::from(&both[..]), key_heads, value_heads, &slots, pages, view).unwrap();
        spans.push(PagedSpan { rows: first_row..first_row + rows, context_len: context, table });
        keys.push(k);
        values.push(v);
        first_row += rows;
    }
    let queries = numbers.vec(rows * heads.stride).into_iter().map(|x| 3.0 * x).collect();
    World { shape, heads, queries, keys, values, pages: storage, tables, spans }
}

fn attend<T: Kernels>(device: &Device, world: &World<T>, spans: &[PagedSpan], queries: &[f32]) -> Vec<f32> {
    let width = world.heads.count * world.heads.dim;
    let rows = queries.len() / world.heads.stride;
    let mut out = Rows::<T>::of(device, &vec![f32::NAN; rows * width], width).unwrap();
    let cache = PagedCache { pages: View::from(&world.pages[..]), tables: &world.tables, spans };
    attention(device, View::from(queries), world.heads, &world.shape, cache, out.view_mut(rows)).unwrap();
    out.view(rows).to_vec()
}

fn against_reference<T: Kernels>(tolerance: f32) {
    for case in cases() {
        let mut first: Option<Vec<f32>> = None;
        for device in devices() {
            let world = world::<T>(&device, &case);
            let got = attend(&device, &world, &world.spans, &world.queries);
            let (dim, heads) = (case.head_dim, case.kv_of_query.len());
            let kv_heads = world.shape.pages.kv_heads();
            for (at, span) in world.spans.iter().enumerate() {
                for row in span.rows.clone() {
                    let position = span.context_len + row - span.rows.end;
                    for head in 0..heads {
                        let start = row * world.heads.stride + world.heads.first + head * dim;
                        let query: Vec<f32> =
                            world.queries[start..start + dim].iter().map(|x| through::<T>(*x)).collect();
                        let of_head = |all: &[f32]| -> Vec<f32> {
                            (0..=position)
                                .flat_map(|t| {
                                    all[(t * kv_heads + case.kv_of_query[head]) * dim..][..dim].to_vec()
                                })
                                .collect()
                        };
                        let (k, v) = (of_head(&world.keys[at]), of_head(&world.values[at]));
                        let expected =
                            attention_reference(&query, &k, &v, world.shape.scale, case.window, None);
                        for (a, b) in got[(row * heads + head) * dim..][..dim].iter().zip(&expected) {
                            assert!(
                                (a - b).abs() <= tolerance,
                                "row {row} head {head}: {a} {b} on {device:?}"
                            );
                        }
                    }
                }
            }
            assert_same_bits(first.get_or_insert(got.clone()), &got, "the same bits everywhere");
        }
    }
}

#[test]
fn f32_rows_match_the_reference_on_every_instruction_set() {
    // Values below 2, scores below 12 with an error of about 64 ulp of the products.
    against_reference::<f32>(2e-5);
}

#[test]
fn bf16_rows_match_the_reference_on_every_instruction_set() {
    // Rounding of the weights and of the output: 2^-9 each of values below 2, the sum of weights unrounded.
    against_reference::<bf16>(2.0 * 2.0 / 256.0);
}

#[test]
fn a_rows_bits_depend_neither_on_chunking_nor_on_company() {
    for (device, window) in devices().into_iter().flat_map(|d| [(d.clone(), 0), (d.clone(), 7), (d, 40)]) {
        let case = Case {
            kv_of_query: vec![0, 0, 0],
            head_dim: 64,
            block_size: 16,
            spans: vec![(90, 90), (70, 70), (5, 5)],
            window: NonZeroUsize::new(window),
        };
        let world = world::<bf16>(&device, &case);
        let together = attend(&device, &world, &world.spans, &world.queries);
        let width = world.heads.count * world.heads.dim;
        for span in &world.spans {
            for step in [1, 7, 32] {
                for first in (0..span.rows.len()).step_by(step) {
                    let last = span.rows.len().min(first + step);
                    let part =
                        PagedSpan { rows: 0..last - first, context_len: last, table: span.table.clone() };
                    let rows = span.rows.start + first..span.rows.start + last;
                    let queries =
                        &world.queries[rows.start * world.heads.stride..rows.end * world.heads.stride];
                    let alone = attend(&device, &world, &[part], queries);
                    assert_same_bits(
                        &alone,
                        &together[rows.start * width..rows.end * width],
                        "company or chunking shows",
                    );
                }
            }
        }
    }
}

#[test]
fn an_infinite_value_reaches_no_row_before_it() {
    let case = &cases()[1];
    for device in devices() {
        let mut world = world::<bf16>(&device, case);
        let before = attend(&device, &world, &world.spans, &world.queries);
        // The value of position 20 of the first sequence, in every dimension of both heads.
        let (shape, page) = (world.shape.pages, world.tables[1] as usize);
        for head in 0..2 {
            let half = shape.page_start(page) + (2 * head + 1) * shape.half_elements();
            for dim in 0..case.head_dim {
                world.pages[half + shape.value_at::<bf16>(4, dim)] = bf16::INFINITY;
            }
        }
        let after = attend(&device, &world, &world.spans, &world.queries);
        let width = world.heads.count * world.heads.dim;
        assert_same_bits(&after[..20 * width], &before[..20 * width], "rows before the infinity");
        assert!(after[20 * width..33 * width].iter().all(|x| !x.is_finite()));
        assert_same_bits(&after[33 * width..], &before[33 * width..], "other sequences");
    }
}

#[test]
fn a_score_that_is_not_finite_makes_its_row_nan_and_no_other() {
    for (device, bad) in devices().into_iter().flat_map(|d| [(d.clone(), f32::NAN), (d, f32::INFINITY)]) {
        let mut world = world::<bf16>(&device, &cases()[1]);
        let before = attend(&device, &world, &world.spans, &world.queries);
        // One number of the second head's query in row 20.
        let (row, head, dim) = (20, 1, world.heads.dim);
        world.queries[row * world.heads.stride + world.heads.first + head * dim + 3] = bad;
        let after = attend(&device, &world, &world.spans, &world.queries);
        let poisoned = (row * world.heads.count + head) * dim..(row * world.heads.count + head + 1) * dim;
        assert!(after[poisoned.clone()].iter().all(|x| x.is_nan()), "{device:?} {bad}");
        assert_same_bits(&after[..poisoned.start], &before[..poisoned.start], "what comes before");
        assert_same_bits(&after[poisoned.end..], &before[poisoned.end..], "what comes after");
    }
}

fn poison_before_the_window<T: Kernels>() {
    const POISONED: usize = 41;
    for window in [1, 7, 30, 32, 45] {
        let case = Case {
            kv_of_query: vec![0, 0, 1],
            head_dim: 32,
            block_size: 16,
            spans: vec![(120, 120)],
            window: NonZeroUsize::new(window),
        };
        for device in devices() {
            let mut world = world::<T>(&device, &case);
            let before = attend(&device, &world, &world.spans, &world.queries);
            // Key and value of one position, NaN in every dimension of both heads.
            let (shape, page) = (world.shape.pages, world.tables[POISONED / 16] as usize);
            for head in 0..2 {
                let at = shape.page_start(page) + 2 * head * shape.half_elements();
                for dim in 0..case.head_dim {
                    world.pages[at + shape.key_at::<T>(POISONED % 16, dim)] = T::round(f32::NAN);
                    let value = shape.half_elements() + shape.value_at::<T>(POISONED % 16, dim);
                    world.pages[at + value] = T::round(f32::NAN);
                }
            }
            let after = attend(&device, &world, &world.spans, &world.queries);
            let width = world.heads.count * world.heads.dim;
            let (first, end) = (POISONED * width, (POISONED + window) * width);
            assert_same_bits(&after[..first], &before[..first], "rows before the poison");
            assert!(after[first..end].iter().all(|x| x.is_nan()), "window {window}: it is seen");
            assert_same_bits(&after[end..], &before[end..], "rows whose window has passed it");
        }
    }
}

#[test]
fn what_lies_before_the_window_reaches_no_row_whatever_it_is() {
    poison_before_the_window::<f32>();
    poison_before_the_window::<bf16>();
}

fn other_pages_behind_the_window<T: Kernels>() {
    let mut replaced = 0;
    for case in cases().into_iter().filter(|case| case.window.is_some()) {
        let window = case.window.unwrap().get();
        for device in devices() {
            let mut world = world::<T>(&device, &case);
            let before = attend(&device, &world, &world.spans, &world.queries);
            let count = world.shape.pages.pages_in(world.pages.len());
            let spare = (0..count as u32).find(|page| !world.tables.contains(page)).unwrap();
            let last = *world.tables.last().unwrap();
            // A page that holds NaN, and one of another sequence.
            for page in [spare, last] {
                for span in &world.spans {
                    let first_position = span.context_len - span.rows.len();
                    let behind = (first_position + 1).saturating_sub(window) / case.block_size;
                    world.tables[span.table.start..][..behind].fill(page);
                    replaced += behind;
                }
                let after = attend(&device, &world, &world.spans, &world.queries);
                assert_same_bits(&after, &before, &format!("window {window} {device:?}"));
            }
        }
    }
    assert!(replaced > 100, "{replaced} entries of tables");
}

#[test]
fn any_page_may_stand_in_a_table_where_no_row_sees_a_key() {
    other_pages_behind_the_window::<f32>();
    other_pages_behind_the_window::<bf16>();
}

#[test]
fn spans_that_point_outside_are_refused() {
    let device = &devices()[0];
    let case = &cases()[0];
    let world = world::<f32>(device, case);
    let good = world.spans[0].clone();
    let inverted = PagedSpan { rows: Range { start: 1, end: 0 }, context_len: 0, table: 0..0 };
    let bad = [
        inverted,
        PagedSpan { table: Range { start: 1, end: 0 }, ..good.clone() },
        PagedSpan { context_len: 17, ..good.clone() },
        PagedSpan { table: 0..2, ..good.clone() },
        PagedSpan { rows: 0..2, context_len: 1, ..good.clone() },
        PagedSpan { rows: 1..2, ..good.clone() },
    ];
    for span in bad {
        let mut out = Rows::<f32>::zeros(device, 1, world.heads.dim, "out").unwrap();
        let cache = PagedCache {
            pages: View::from(&world.pages[..]),
            tables: &world.tables,
            spans: std::slice::from_ref(&span),
        };
        let queries = View::from(&world.queries[..]);
        let result = attention(device, queries, world.heads, &world.shape, cache, out.view_mut(1));
        assert!(result.is_err(), "{span:?}");
    }
}
