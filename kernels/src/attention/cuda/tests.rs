mod frames;

use std::num::NonZeroUsize;

use consort_emulator::{Copies, Memory, Order, Settings};
use half::bf16;

use super::*;
use crate::{
    attention::{PagedSpan, attention_reference},
    testing::{
        Numbers, assert_same_bits,
        emulated::{Emulated, device_slice, device_slice_mut},
    },
};

struct Case {
    /// Query heads of each KV head.
    groups: Vec<usize>,
    head_dim: usize,
    block_size: usize,
    /// (context, new rows) of each sequence.
    spans: Vec<(usize, usize)>,
    window: Option<NonZeroUsize>,
    sinks: bool,
}

fn case(groups: &[usize], head_dim: usize, spans: &[(usize, usize)]) -> Case {
    Case {
        groups: groups.to_vec(),
        head_dim,
        block_size: 16,
        spans: spans.to_vec(),
        window: None,
        sinks: false,
    }
}

impl Case {
    fn window(self, keys: usize) -> Case {
        Case { window: NonZeroUsize::new(keys), ..self }
    }

    fn sinks(self) -> Case {
        Case { sinks: true, ..self }
    }

    fn block_size(self, block_size: usize) -> Case {
        Case { block_size, ..self }
    }
}

/// Sequences with random keys and values in shuffled pages.
struct World {
    shape: AttentionShape,
    /// `[rows, heads, head_dim]`, as the kernels see them.
    queries: Vec<f32>,
    /// Per sequence `[tokens, KV heads, head_dim]`.
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
    sinks: Option<Vec<f32>>,
    pages: Vec<bf16>,
    tables: Vec<u32>,
    spans: Vec<PagedSpan>,
}

/// Largest value, key and query in magnitude.
const VALUE_MAX: f32 = 2.0;

fn rounded(numbers: &mut Numbers, len: usize, factor: f32) -> Vec<f32> {
    numbers.vec(len).into_iter().map(|x| bf16::from_f32(factor * x).to_f32()).collect()
}

impl World {
    fn new(case: &Case) -> World {
        let mut numbers = Numbers(42);
        let (kv_heads, dim, block) = (case.groups.len(), case.head_dim, case.block_size);
        let layout = PageShape::new(block, kv_heads, dim).unwrap();
        let kv_of_query: Vec<usize> =
            case.groups.iter().enumerate().flat_map(|(kv, &group)| vec![kv; group]).collect();
        let heads = kv_of_query.len();
        let scale = (dim as f32).powf(-0.5);
        let shape = AttentionShape { pages: layout, kv_of_query, scale, window: case.window };
        let blocks: usize = case.spans.iter().map(|(context, _)| context.div_ceil(block)).sum();
        // Other pages and slots hold NaN: a kernel that multiplies what a row must not see is found.
        let mut pages = vec![bf16::NAN; (blocks + 3) * layout.page_elements()];
        let mut free: Vec<u32> = (0..blocks as u32 + 3).rev().collect();
        let (mut tables, mut spans, mut keys, mut values, mut first_row) =
            (vec![], vec![], vec![], vec![], 0);
        for &(context, rows) in &case.spans {
            let table = tables.len()..tables.len() + context.div_ceil(block);
            tables.extend((0..table.len()).map(|_| free.swap_remove(numbers.below(free.len()))));
            for (half, all) in [&mut keys, &mut values].into_iter().enumerate() {
                let of_sequence = rounded(&mut numbers, context * kv_heads * dim, VALUE_MAX);
                for token in 0..context {
                    let page = tables[table.start + token / block] as usize;
                    for kv in 0..kv_heads {
                        let at = place(layout, page, kv, half, token % block);
                        let slot = &mut pages[at..at + layout.padded_dim()];
                        slot.fill(bf16::ZERO);
                        let from = &of_sequence[(token * kv_heads + kv) * dim..][..dim];
                        slot.iter_mut().zip(from).for_each(|(to, x)| *to = bf16::from_f32(*x));
                    }
                }
                all.push(of_sequence);
            }
            spans.push(PagedSpan { rows: first_row..first_row + rows, context_len: context, table });
            first_row += rows;
        }
        let queries = rounded(&mut numbers, first_row * heads * dim, 3.0);
        let sinks = case.sinks.then(|| numbers.vec(heads).iter().map(|x| 3.0 * x).collect());
        World { shape, queries, keys, values, sinks, pages, tables, spans }
    }

    fn heads(&self) -> usize {
        self.shape.kv_of_query.len()
    }

    /// Elements of a row of queries or outputs.
    fn width(&self) -> usize {
        self.heads() * self.shape.pages.head_dim()
    }

    fn plan(&self, chunks: Chunks, spans: &[PagedSpan]) -> Plan {
        let rows = spans.last().map_or(0, |span| span.rows.end);
        let pages = self.pages.len() / self.shape.pages.page_elements();
        Plan::new(&self.shape, chunks, spans, rows, &self.tables, pages).unwrap()
    }

    /// The outputs of `spans`, whose queries are `queries`, `[rows, heads · head_dim]`.
    fn attend(&self, device: &Emulated, chunks: Chunks, spans: &[PagedSpan], queries: &[f32]) -> Vec<f32> {
        self.attend_planned(device, &self.plan(chunks, spans), queries)
    }

    /// The same with a plan of its own.
    fn attend_planned(&self, device: &dyn Launcher, plan: &Plan, queries: &[f32]) -> Vec<f32> {
        let (dim, padded) = (self.shape.pages.head_dim(), self.shape.pages.padded_dim());
        let mut wide = vec![bf16::ZERO; queries.len() / dim * padded];
        for (to, from) in wide.chunks_exact_mut(padded).zip(queries.chunks_exact(dim)) {
            to.iter_mut().zip(from).for_each(|(to, x)| *to = bf16::from_f32(*x));
        }
        let (wide, pages) = (Memory::from_slice(&wide), Memory::from_slice(&self.pages));
        let numbers = Memory::from_slice(plan.numbers());
        let sinks = self.sinks.as_ref().map(|sinks| Memory::from_slice(sinks));
        let mut workspace = Memory::<f32>::poisoned(plan.workspace_floats());
        let stride = row_stride(self.width());
        let mut out = Memory::<bf16>::poisoned(plan.rows * stride);
        let inputs = Inputs {
            shape: &self.shape,
            queries: device_slice(&wide),
            pages: device_slice(&pages),
            sinks: sinks.as_ref().map(device_slice),
            plan,
            numbers: device_slice(&numbers),
        };
        attention(device, &inputs, device_slice_mut(&mut workspace), device_slice_mut(&mut out)).unwrap();
        let out = out.to_vec();
        out.chunks_exact(stride.max(1))
            .flat_map(|row| {
                assert!(row[self.width()..].iter().all(|x| x.to_bits() == 0), "padding is zero");
                row[..self.width()].iter().map(|x| x.to_f32())
            })
            .collect()
    }

    /// All spans at once.
    fn attend_all(&self, device: &Emulated, chunks: Chunks) -> Vec<f32> {
        self.attend(device, chunks, &self.spans, &self.queries)
    }

    /// In the layout of `attend`.
    fn expected(&self) -> Vec<f32> {
        let (dim, kv_heads) = (self.shape.pages.head_dim(), self.shape.pages.kv_heads());
        let mut out = Vec::new();
        for (at, span) in self.spans.iter().enumerate() {
            for row in span.rows.clone() {
                let seen = span.context_len + row + 1 - span.rows.end;
                for (head, &kv) in self.shape.kv_of_query.iter().enumerate() {
                    let query = &self.queries[row * self.width() + head * dim..][..dim];
                    let of_head = |all: &[f32]| -> Vec<f32> {
                        (0..seen)
                            .flat_map(|token| all[(token * kv_heads + kv) * dim..][..dim].to_vec())
                            .collect()
                    };
                    let (k, v) = (of_head(&self.keys[at]), of_head(&self.values[at]));
                    let sink = self.sinks.as_ref().map(|sinks| sinks[head]);
                    out.extend(attention_reference(query, &k, &v, self.shape.scale, self.shape.window, sink));
                }
            }
        }
        out
    }

    /// Overwrites a token's keys (half 0) or values (half 1) of every KV head.
    fn overwrite(&mut self, sequence: usize, token: usize, half: usize, with: bf16) {
        let layout = self.shape.pages;
        let page = self.tables[self.spans[sequence].table.start + token / layout.block_size()] as usize;
        for kv in 0..layout.kv_heads() {
            let at = place(layout, page, kv, half, token % layout.block_size());
            self.pages[at..at + layout.head_dim()].fill(with);
        }
    }
}

/// Where a token's keys (half 0) or values (half 1) of a KV head begin.
fn place(layout: PageShape, page: usize, kv: usize, half: usize, offset: usize) -> usize {
    ((page * layout.kv_heads() + kv) * 2 + half) * layout.half_elements() + offset * layout.padded_dim()
}

const FILL: Chunks = Chunks::Fill { multiprocessors: 4 };

fn fixed(keys: usize) -> Chunks {
    Chunks::Fixed(NonZeroUsize::new(keys).unwrap())
}

/// Two ways that differ in everything, for shapes too large for all.
fn two_ways() -> impl Iterator<Item = Emulated> {
    [(Order::Shuffled, Copies::Late), (Order::FarWarp, Copies::ByChance)]
        .into_iter()
        .map(|(order, copies)| Emulated { settings: Settings { order, copies, seed: 7 }, multiprocessors: 4 })
}

/// Against the truth, and bit for bit alike in all ways.
///
/// An output is Σ w v / Σ w, whose weights are rounded to BF16 in both sums: relative errors of at most 2^-9 each,
/// which move it by 2^-9 of |v - out| <= 2 VALUE_MAX at most. Its own rounding adds 2^-9 of VALUE_MAX. A score is a sum
/// of `dim` exact products below 6 in f32, times dim^-1/2: an error below 2^-24 · dim · 6 dim · dim^-1/2 (far less as a
/// rule) in a weight's logarithm moves an output by as much of 2 VALUE_MAX. The rest, exponentials within 2 ulp and a
/// rounding per tile and chunk, disappears in that.
fn assert_near_the_reference(case: &Case, chunks: Chunks, devices: impl Iterator<Item = Emulated>) {
    let score_error = 6.0 * (case.head_dim.max(64) as f32).powf(1.5) * f32::EPSILON / 2.0;
    let tolerance = VALUE_MAX * (3.0 / 512.0 + 2.0 * score_error);
    let world = World::new(case);
    let expected = world.expected();
    let mut first: Option<Vec<f32>> = None;
    for device in devices {
        let got = world.attend_all(&device, chunks);
        assert_eq!(got.len(), expected.len());
        let context = format!("{:?} x {} {:?} {:?}", case.groups, case.head_dim, case.spans, device.settings);
        for (at, (a, b)) in got.iter().zip(&expected).enumerate() {
            assert!((a - b).abs() <= tolerance, "{context}: element {at} is {a}, expected {b}");
        }
        assert_same_bits(first.get_or_insert(got.clone()), &got, &context);
    }
}

const DECODES: [(usize, usize); 9] =
    [(1, 1), (15, 1), (16, 1), (17, 1), (63, 1), (64, 1), (65, 1), (200, 1), (700, 1)];

#[test]
fn emulator_small_decodes_match_the_reference_in_every_way() {
    for case in [
        case(&[1], 64, &DECODES[..4]),
        case(&[3, 4], 72, &DECODES[5..7]).sinks(),
        case(&[8], 128, &[(65, 1), (20, 1)]).window(7),
        case(&[20], 16, &[(1, 1), (70, 1)]).sinks(),
        case(&[2], 256, &[(33, 1)]),
    ] {
        assert_near_the_reference(&case, FILL, Emulated::every_way());
    }
}

#[test]
fn emulator_decodes_of_every_context_and_group_match_the_reference() {
    for case in [
        case(&[1, 1], 64, &DECODES),
        case(&[3, 3], 64, &DECODES).sinks().block_size(32),
        case(&[4], 80, &DECODES).block_size(48),
        case(&[8, 8], 8, &DECODES),
        case(&[16], 128, &DECODES).sinks(),
        case(&[20, 17, 1], 72, &DECODES[5..]),
        case(&[0, 5], 96, &DECODES[4..]),
    ] {
        for chunks in [FILL, fixed(128)] {
            assert_near_the_reference(&case, chunks, two_ways());
        }
    }
}

#[test]
fn emulator_windows_of_decodes_match_the_reference() {
    for window in [1, 7, 64, 128, usize::MAX] {
        let case = case(&[8], 64, &DECODES).window(window).sinks();
        for chunks in [FILL, fixed(64), fixed(192)] {
            assert_near_the_reference(&case, chunks, two_ways().take(1));
        }
    }
}

#[test]
fn emulator_wide_heads_match_the_reference() {
    let spans = [(70, 70), (64, 1), (200, 1), (100, 9)];
    for case in [case(&[4], 256, &spans), case(&[5], 160, &spans).window(40).sinks()] {
        for chunks in [FILL, fixed(64)] {
            assert_near_the_reference(&case, chunks, two_ways());
        }
    }
}

#[test]
fn emulator_small_prefills_match_the_reference_in_every_way() {
    for case in [
        case(&[1], 64, &[(17, 17), (1, 1), (3, 2)]),
        case(&[3], 72, &[(65, 5)]).sinks(),
        case(&[2], 128, &[(70, 3)]).window(7),
        case(&[3], 256, &[(40, 15)]),
        // More than one chunk of 64, and a part of a tile of keys in the last.
        case(&[2], 64, &[(130, 4)]),
        case(&[1], 256, &[(66, 2)]).sinks(),
    ] {
        for chunks in [FILL, fixed(64)] {
            assert_near_the_reference(&case, chunks, Emulated::every_way());
        }
    }
}

#[test]
fn emulator_prefills_of_every_shape_match_the_reference() {
    for case in [
        case(&[4, 4], 64, &[(64, 64), (200, 60), (15, 15), (130, 2)]),
        case(&[1, 1], 128, &[(150, 150), (65, 64)]).sinks(),
        case(&[20, 1], 16, &[(66, 20), (5, 5)]),
        case(&[8], 80, &[(129, 30), (700, 9)]).block_size(48),
        case(&[3], 96, &[(100, 100)]).sinks().block_size(64),
        case(&[0, 6], 8, &[(63, 63), (17, 16)]),
    ] {
        assert_near_the_reference(&case, FILL, two_ways());
        assert_near_the_reference(&case, fixed(64), two_ways().take(1));
    }
}

#[test]
fn emulator_windows_of_prefills_match_the_reference() {
    for window in [1, 7, 64, 128] {
        let case = case(&[3], 64, &[(200, 200), (300, 20), (31, 31)]).window(window).sinks();
        for chunks in [FILL, fixed(64)] {
            assert_near_the_reference(&case, chunks, two_ways().take(1));
        }
    }
}

/// A plan's span for rows `first..last` of a sequence whose prompt begins the call.
fn part(span: &PagedSpan, first: usize, last: usize, first_row: usize) -> PagedSpan {
    PagedSpan { rows: first_row..first_row + last - first, context_len: last, table: span.table.clone() }
}

/// Every row decoded, in one launch, against the prompt filled in at once and in pieces.
fn assert_decodes_repeat_the_prefill(case: &Case, chunk: usize, cuts: &[usize]) {
    let world = World::new(case);
    let [first, ..] = world.spans.as_slice() else { panic!("a prompt first") };
    let (rows, width) = (first.rows.len(), world.width());
    let queries = &world.queries[..rows * width];
    let device = two_ways().next().unwrap();
    let whole = world.attend_all(&device, fixed(chunk));
    let decodes: Vec<PagedSpan> = (0..rows).map(|at| part(first, at, at + 1, at)).collect();
    let decoded = world.attend(&device, fixed(chunk), &decodes, queries);
    let context = format!("{} wide, window {:?}, chunks of {chunk}", case.head_dim, case.window);
    assert_same_bits(&decoded, &whole[..rows * width], &format!("decoded and filled in, {context}"));
    for &cut in cuts {
        let pieces = [part(first, 0, cut, 0), part(first, cut, rows, cut)];
        let cut_up = world.attend(&device, fixed(chunk), &pieces, queries);
        assert_same_bits(&cut_up, &decoded, &format!("cut at {cut}, {context}"));
    }
}

#[test]
fn emulator_fixed_chunks_give_decode_and_prefill_the_same_bits() {
    for chunk in [64, 128] {
        let case = case(&[3], 64, &[(150, 150), (40, 40), (90, 1)]).sinks();
        assert_decodes_repeat_the_prefill(&case, chunk, &[1, 100]);
    }
}

#[test]
fn emulator_fixed_chunks_give_windowed_decode_and_prefill_the_same_bits() {
    for (window, chunk) in [(7, 64), (70, 64), (128, 128)] {
        let case = case(&[2], 64, &[(150, 150), (40, 3)]).window(window).sinks();
        assert_decodes_repeat_the_prefill(&case, chunk, &[63]);
    }
}

#[test]
fn emulator_fixed_chunks_give_decode_and_prefill_of_wider_heads_the_same_bits() {
    for (dim, window) in [(80, 0), (128, 50)] {
        assert_decodes_repeat_the_prefill(&case(&[2], dim, &[(135, 135)]).window(window), 64, &[77]);
    }
    assert_decodes_repeat_the_prefill(&case(&[1], 256, &[(135, 135)]).window(70), 64, &[]);
}

#[test]
fn emulator_one_chunk_gives_decode_and_prefill_the_same_bits() {
    // The kernels without a second set of sums, and decodes that are written without a merge.
    for dim in [64, 96, 128, 256] {
        assert_decodes_repeat_the_prefill(&case(&[2], dim, &[(70, 70)]), 128, &[]);
    }
}

#[test]
fn emulator_rows_depend_on_no_company() {
    let case = case(&[4, 4], 64, &[(200, 1), (65, 65), (64, 1), (17, 3), (130, 1)]).sinks();
    let world = World::new(&case);
    for device in two_ways() {
        let together = world.attend_all(&device, fixed(64));
        for span in &world.spans {
            let alone = PagedSpan { rows: 0..span.rows.len(), ..span.clone() };
            let rows = span.rows.start * world.width()..span.rows.end * world.width();
            let queries = &world.queries[rows.clone()];
            let got = world.attend(&device, fixed(64), &[alone], queries);
            assert_same_bits(&got, &together[rows], "alone and together");
        }
    }
}

#[test]
fn emulator_an_infinite_value_reaches_only_rows_that_see_it() {
    for (dim, window, bad) in
        [(64, 0, bf16::INFINITY), (64, 9, bf16::NAN), (128, 0, bf16::NEG_INFINITY), (256, 9, bf16::INFINITY)]
    {
        let case = case(&[3], dim, &[(70, 70), (33, 1), (33, 33)]).window(window);
        let mut world = World::new(&case);
        let device = two_ways().next().unwrap();
        let before = world.attend_all(&device, fixed(64));
        const AT: usize = 20;
        world.overwrite(0, AT, 1, bad);
        let after = world.attend_all(&device, fixed(64));
        let width = world.width();
        let end = if window == 0 { 70 } else { AT + window };
        assert_same_bits(&after[..AT * width], &before[..AT * width], "rows before it");
        assert!(after[AT * width..end * width].iter().all(|x| !x.is_finite()), "{dim} {bad}: it is seen");
        assert_same_bits(&after[end * width..], &before[end * width..], "rows past it, and others");
        let decodes: Vec<PagedSpan> = (0..70).map(|at| part(&world.spans[0], at, at + 1, at)).collect();
        let decoded = world.attend(&device, fixed(64), &decodes, &world.queries[..70 * width]);
        for (at, (a, b)) in decoded.iter().zip(&after).enumerate() {
            assert!(a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan(), "element {at}: {a} and {b}");
        }
    }
}

#[test]
fn emulator_poison_before_the_window_reaches_nothing() {
    const AT: usize = 41;
    for window in [1, 7, 64] {
        let mut world = World::new(&case(&[2], 64, &[(150, 150)]).window(window));
        let device = two_ways().last().unwrap();
        let before = world.attend_all(&device, fixed(64));
        world.overwrite(0, AT, 0, bf16::NAN);
        world.overwrite(0, AT, 1, bf16::NAN);
        let after = world.attend_all(&device, fixed(64));
        let (first, end) = (AT * world.width(), (AT + window) * world.width());
        assert_same_bits(&after[..first], &before[..first], "rows before the poison");
        assert!(after[first..end].iter().all(|x| x.is_nan()), "window {window}: it is seen");
        assert_same_bits(&after[end..], &before[end..], "rows whose window has passed it");
    }
}

#[test]
fn emulator_any_page_may_stand_in_a_table_where_no_row_sees_a_key() {
    for (window, dim) in [(1, 64), (7, 256), (40, 128), (64, 64)] {
        let spans = [(150, 1), (190, 40), (80, 80), (170, 1)];
        let mut world = World::new(&case(&[2], dim, &spans).window(window));
        let count = world.pages.len() / world.shape.pages.page_elements();
        let spare = (0..count as u32).find(|page| !world.tables.contains(page)).unwrap();
        let last = *world.tables.last().unwrap();
        for chunks in [FILL, fixed(64)] {
            let original = world.tables.clone();
            let device = two_ways().next().unwrap();
            let before = world.attend_all(&device, chunks);
            // A page that holds NaN, and one of another sequence.
            for page in [spare, last] {
                for span in &world.spans {
                    let first_position = span.context_len - span.rows.len();
                    let behind = (first_position + 1).saturating_sub(window) / 16;
                    world.tables[span.table.start..][..behind].fill(page);
                }
                assert_ne!(world.tables, original);
                let after = world.attend_all(&device, chunks);
                assert_same_bits(&after, &before, &format!("window {window}, {dim} wide, {chunks:?}"));
            }
            world.tables = original;
        }
    }
}

#[test]
fn emulator_decodes_take_turns_in_a_small_workspace_and_keep_their_bits() {
    let contexts = [300, 40, 250, 64, 190, 130];
    let mut spans: Vec<(usize, usize)> = contexts.iter().map(|&context| (context, 1)).collect();
    spans.insert(3, (70, 20));
    for window in [0, 90] {
        let world = World::new(&case(&[3, 2], 64, &spans).sinks().window(window));
        let (rows, page_count) = (26, world.pages.len() / world.shape.pages.page_elements());
        let within = |floats| {
            Plan::within(floats, &world.shape, fixed(64), &world.spans, rows, &world.tables, page_count)
        };
        // Five heads of 64 dimensions, a maximum and a sum of weights; chunks of 64 keys: 5, 0, 4, 0, 3 and 3 of them.
        let partial = 5 * 66;
        let device = two_ways().last().unwrap();
        let whole = within(usize::MAX).unwrap();
        assert_eq!((whole.passes.len(), whole.workspace_floats()), (1, 15 * partial));
        let expected = world.attend_planned(&device, &whole, &world.queries);
        for (partials, passes) in [(15, 1), (14, 2), (9, 2), (8, 3), (6, 3), (5, 4)] {
            let plan = within(partials * partial + partial - 1).unwrap();
            assert_eq!(plan.passes.len(), passes, "{partials} partial sums");
            assert!(plan.workspace_floats() <= partials * partial);
            let got = world.attend_planned(&device, &plan, &world.queries);
            assert_same_bits(&got, &expected, &format!("window {window}, {partials} partial sums"));
        }
        assert!(within(5 * partial - 1).is_err(), "the longest alone needs more");
    }
}

#[test]
fn emulator_a_score_that_is_not_finite_makes_its_row_nan_and_no_other() {
    for (dim, bad) in [(64, f32::NAN), (128, f32::INFINITY), (256, f32::NAN)] {
        let mut world = World::new(&case(&[3], dim, &[(40, 40), (70, 1)]).sinks());
        let device = two_ways().next().unwrap();
        let before = world.attend_all(&device, fixed(64));
        for row in [20, 40] {
            let mut poisoned = world.queries.clone();
            let start = row * world.width() + dim;
            poisoned[start + 3] = bad;
            std::mem::swap(&mut world.queries, &mut poisoned);
            let after = world.attend_all(&device, fixed(64));
            std::mem::swap(&mut world.queries, &mut poisoned);
            assert!(after[start..start + dim].iter().all(|x| x.is_nan()), "{dim} {bad} row {row}");
            assert_same_bits(&after[..start], &before[..start], "what comes before");
            assert_same_bits(&after[start + dim..], &before[start + dim..], "what comes after");
        }
    }
}

#[test]
fn emulator_calls_without_rows_launch_nothing() {
    let world = World::new(&case(&[2], 64, &[(20, 0)]));
    let device = Emulated { settings: Settings::PLAIN, multiprocessors: 4 };
    assert_eq!(world.attend(&device, FILL, &world.spans, &[]), [0.0; 0]);
    assert_eq!(world.attend(&device, FILL, &[], &[]), [0.0; 0]);
}

#[test]
fn plans_that_point_outside_are_refused() {
    let world = World::new(&case(&[1, 1], 64, &[(20, 20)]));
    let good = world.spans[0].clone();
    let plan = |shape: &AttentionShape, chunks, span: PagedSpan, pages| {
        Plan::new(shape, chunks, &[span], 20, &world.tables, pages).map(|_| ())
    };
    assert!(plan(&world.shape, FILL, good.clone(), 5).is_ok());
    let among = AttentionShape { pages: world.shape.pages.among(2), ..world.shape.clone() };
    assert!(
        plan(&among, FILL, good.clone(), 5).is_err(),
        "its kernels know no pages of other layers between"
    );
    for span in [
        PagedSpan { rows: 0..21, ..good.clone() },
        PagedSpan { context_len: 33, ..good.clone() },
        PagedSpan { context_len: 19, ..good.clone() },
        PagedSpan { table: 0..3, ..good.clone() },
    ] {
        assert!(plan(&world.shape, FILL, span.clone(), 5).is_err(), "{span:?}");
    }
    assert!(plan(&world.shape, FILL, good.clone(), 1).is_err(), "a page that is not there");
    assert!(plan(&world.shape, fixed(100), good.clone(), 5).is_err(), "a chunk of part of a tile");
    let crossed = AttentionShape { kv_of_query: vec![1, 0], ..world.shape.clone() };
    assert!(plan(&crossed, FILL, good.clone(), 5).is_err(), "heads that cross");
    let beyond = AttentionShape { kv_of_query: vec![0, 2], ..world.shape.clone() };
    assert!(plan(&beyond, FILL, good, 5).is_err(), "a KV head that is not there");
}

#[test]
fn emulator_inputs_that_are_not_those_of_the_plan_are_refused() {
    let world = World::new(&case(&[1, 1], 64, &[(200, 1)]));
    let plan = world.plan(fixed(64), &world.spans);
    let queries = Memory::<bf16>::poisoned(128);
    let pages = Memory::from_slice(&world.pages);
    let numbers = Memory::from_slice(plan.numbers());
    let device = Emulated { settings: Settings::PLAIN, multiprocessors: 4 };
    let mut out = Memory::<bf16>::poisoned(128);
    let mut workspace = Memory::<f32>::poisoned(plan.workspace_floats());
    let good = Inputs {
        shape: &world.shape,
        queries: device_slice(&queries),
        pages: device_slice(&pages),
        sinks: None,
        plan: &plan,
        numbers: device_slice(&numbers),
    };
    let mut run = |inputs: Inputs<'_>, floats: usize, elements: usize| {
        let (mut workspace, mut out) = (device_slice_mut(&mut workspace), device_slice_mut(&mut out));
        attention(&device, &inputs, workspace.range(0..floats), out.range(0..elements))
    };
    let floats = plan.workspace_floats();
    assert_eq!(run(good, floats, 128), Ok(()));
    assert!(run(good, floats - 1, 128).is_err(), "less workspace");
    assert!(run(good, floats, 64).is_err(), "half of the output");
    let other = AttentionShape { kv_of_query: vec![0, 0], ..world.shape.clone() };
    assert!(run(Inputs { shape: &other, ..good }, floats, 128).is_err(), "other heads");
    let negative = AttentionShape { scale: -1.0, ..world.shape.clone() };
    assert!(run(Inputs { shape: &negative, ..good }, floats, 128).is_err(), "a negative scale");
    assert!(run(Inputs { queries: good.queries.range(0..64), ..good }, floats, 128).is_err(), "queries");
    assert!(run(Inputs { pages: good.pages.range(0..64), ..good }, floats, 128).is_err(), "pages");
    assert!(run(Inputs { numbers: good.numbers.range(0..6), ..good }, floats, 128).is_err(), "numbers");
    let sink = Memory::from_slice(&[0.0f32]);
    assert!(
        run(Inputs { sinks: Some(device_slice(&sink)), ..good }, floats, 128).is_err(),
        "one sink for two"
    );
}

#[test]
fn chunks_fill_the_device_and_no_plan_outgrows_the_workspace_foretold() {
    let pages = PageShape::new(16, 8, 128).unwrap();
    let kv_of_query: Vec<usize> = (0..64).map(|head| head / 8).collect();
    let shape = AttentionShape { pages, kv_of_query, scale: 1.0, window: None };
    let contexts: [&[usize]; 5] = [&[1], &[1024], &[131_072], &[4096; 64], &[100_000, 500, 500]];
    for contexts in contexts {
        let longest = contexts.iter().max().unwrap();
        let tables = vec![0; longest.div_ceil(16)];
        let spans: Vec<PagedSpan> = contexts
            .iter()
            .enumerate()
            .map(|(at, &context_len)| PagedSpan {
                rows: at..at + 1,
                context_len,
                table: 0..context_len.div_ceil(16),
            })
            .collect();
        let keys: usize = contexts.iter().sum();
        for chunks in [Chunks::Fill { multiprocessors: 132 }, fixed(512)] {
            let plan = Plan::new(&shape, chunks, &spans, spans.len(), &tables, 1).unwrap();
            let foretold = workspace_floats_max(&shape, chunks, contexts.len(), keys).unwrap();
            assert!(plan.workspace_floats() <= foretold, "{contexts:?} {chunks:?}");
            assert!(plan.decode_chunk * plan.decode_chunks >= *longest);
            if chunks != fixed(512) && keys >= 132 * 64 {
                let blocks: usize = contexts.iter().map(|x| 8 * x.div_ceil(plan.decode_chunk)).sum();
                assert!((132 * 2..=132 * 3 + 8 * contexts.len()).contains(&blocks), "{contexts:?}: {blocks}");
            }
        }
    }
}
