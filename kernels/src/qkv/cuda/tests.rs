use consort_emulator::Memory;
use half::bf16;

use super::{QkNorms, QkvShape, QkvWeights, RowPlaces, check_slots, kernel_for, qkv};
use crate::{
    KernelError,
    buffer::ViewMut,
    device::Device,
    kv_append::PageShape,
    qkv::{QkvHeads, QkvReference},
    rope::{Pairs, frequencies, rope_angles},
    testing::{
        Numbers,
        emulated::{Emulated, device_slice, device_slice_mut},
    },
};

/// Slots of a pool of this many pages are used out of order.
const POOL: usize = 5;
const NOTHING: u32 = u32::MAX;

struct Given {
    shape: QkvShape,
    reference: QkvReference,
    x: Vec<f32>,
    positions: Vec<u32>,
    slots: Vec<u32>,
}

impl Given {
    fn new(rows: usize, shape: QkvShape) -> Given {
        let mut numbers = Numbers(3 + shape.columns() as u64);
        let (columns, dim) = (shape.columns(), shape.pages.head_dim());
        let reference = QkvReference {
            query_heads: shape.query_heads,
            kv_heads: shape.pages.kv_heads(),
            head_dim: dim,
            bias: Some(numbers.vec(columns)),
            norms: Some([numbers.vec(dim), numbers.vec(dim)]),
            eps: 1e-6,
            frequencies: frequencies(1e4, shape.rotary_dim),
            attention_factor: 1.25,
            pairs: shape.pairs,
        };
        let x = numbers.vec(rows * columns);
        let positions = (0..rows).map(|_| numbers.below(40_000) as u32).collect();
        // Every third of the pool's slots, from anywhere on; the second row of a longer batch has none.
        let capacity = POOL * shape.pages.block_size();
        let first = numbers.below(capacity);
        let mut slots: Vec<u32> = (0..rows).map(|row| ((first + 3 * row) % capacity) as u32).collect();
        if rows > 3 {
            slots[1] = NOTHING;
        }
        Given { shape, reference, x, positions, slots }
    }

    /// Queries and the pool after a launch on a poisoned one.
    fn run(&self, device: &Emulated) -> Result<(Vec<bf16>, Vec<bf16>), KernelError> {
        let rows = self.slots.len();
        let angles = rows * self.reference.frequencies.len();
        let (mut cos, mut sin) = (vec![0.0; angles], vec![0.0; angles]);
        let r = &self.reference;
        let (c, s) = (ViewMut::from(&mut cos[..]), ViewMut::from(&mut sin[..]));
        rope_angles(&Device::cpu(1)?, &self.positions, &r.frequencies, r.attention_factor, c, s)?;
        let x = Memory::from_slice(&self.x);
        let (cos, sin, slots) =
            (Memory::from_slice(&cos), Memory::from_slice(&sin), Memory::from_slice(&self.slots));
        let bias = r.bias.as_ref().map(|bias| Memory::from_slice(bias));
        let norms = r.norms.as_ref().map(|[q, k]| (Memory::from_slice(q), Memory::from_slice(k)));
        let weights = QkvWeights {
            bias: bias.as_ref().map(device_slice),
            norms: norms.as_ref().map(|(queries, keys)| QkNorms {
                queries: device_slice(queries),
                keys: device_slice(keys),
                eps: r.eps,
            }),
        };
        let places =
            RowPlaces { cos: device_slice(&cos), sin: device_slice(&sin), slots: device_slice(&slots) };
        let mut queries = Memory::<bf16>::poisoned(rows * self.shape.query_elements());
        let mut pages = Memory::<bf16>::poisoned(POOL * self.shape.pages.page_elements());
        let (q, p) = (device_slice_mut(&mut queries), device_slice_mut(&mut pages));
        qkv(device, &self.shape, weights, device_slice(&x), places, q, p)?;
        Ok((queries.to_vec(), pages.to_vec()))
    }

    /// Element of the pool where a head of a token begins: `[page][KV head][keys, values][token][padded_dim]`.
    fn place(&self, slot: usize, kv_head: usize, is_value: usize) -> usize {
        let pages = self.shape.pages;
        let (page, offset) = (slot / pages.block_size(), slot % pages.block_size());
        (((page * pages.kv_heads() + kv_head) * 2 + is_value) * pages.block_size() + offset)
            * pages.padded_dim()
    }

    /// Holds a head against the reference's; returns how many of its elements a norm's rounding moved.
    ///
    /// The last rounding moves a number by 2^-8 of itself at most, and sines, cosines, their factor and two products
    /// move it by 8 · 2^-24 of the head's largest before. A norm's statistics differ by 2^-18, since its sum runs in
    /// another order, which may make either of its two roundings end on the neighbour: 2 · 2^-7 of each of two numbers
    /// that turn together, so 2^-6 of the largest times the root of two and the factor 1.25.
    #[track_caller]
    fn assert_head(&self, got: &[bf16], expected: &[f32], context: &str) -> usize {
        let (dim, scale) = (expected.len(), expected.iter().fold(0.0f32, |a, b| a.max(b.abs())));
        let mut moved = 0;
        for (at, (got, expected)) in got.iter().zip(expected).enumerate() {
            let error = (f32::from(*got) - expected).abs();
            let rounding = expected.abs() / 256.0 + scale * 8.0 / 16_777_216.0;
            let within = rounding + if self.reference.norms.is_some() { scale * 1.77 / 64.0 } else { 0.0 };
            assert!(error <= within, "{context}, {at}: {got}, expected {expected}");
            moved += usize::from(error > rounding);
        }
        assert!(got[dim..].iter().all(|x| x.to_bits() == 0), "{context}: padding is zero");
        moved
    }

    fn assert_all(&self, queries: &[bf16], pages: &[bf16], context: &str) {
        let (shape, dim, padded) = (self.shape, self.shape.pages.head_dim(), self.shape.pages.padded_dim());
        let (mut written, mut moved, mut elements) = (0, 0, 0);
        for (row, x) in self.x.chunks_exact(shape.columns()).enumerate() {
            let expected: QkvHeads = self.reference.row(x, self.positions[row]);
            for (head, expected) in expected.queries.chunks_exact(dim).enumerate() {
                let got = &queries[row * shape.query_elements() + head * padded..][..padded];
                moved += self.assert_head(got, expected, &format!("{context}, row {row}, query head {head}"));
                elements += dim;
            }
            if self.slots[row] == NOTHING {
                continue;
            }
            for (is_value, heads) in [&expected.keys, &expected.values].into_iter().enumerate() {
                for (head, expected) in heads.chunks_exact(dim).enumerate() {
                    let got = &pages[self.place(self.slots[row] as usize, head, is_value)..][..padded];
                    let context = format!("{context}, row {row}, KV head {head}, value {is_value}");
                    moved += self.assert_head(got, expected, &context);
                    (written, elements) = (written + padded, elements + dim);
                }
            }
        }
        // A norm's rounding ends on the neighbour when the number lies within 2^-18 of the middle between two that are
        // 2^-8 to 2^-7 apart: once in 2^9 at most, for each of two roundings of two numbers, so in less than 1 % of
        // all.
        assert!(
            moved <= 4 + elements / 50,
            "{context}: {moved} of {elements} elements were rounded otherwise"
        );
        let poison = pages.iter().filter(|x| x.to_bits() == u16::MAX).count();
        assert_eq!(poison, pages.len() - written, "{context}: nothing else is touched");
    }
}

fn shape(query_heads: usize, kv_heads: usize, head_dim: usize, rotary_dim: usize, pairs: Pairs) -> QkvShape {
    QkvShape { query_heads, pages: PageShape::new(16, kv_heads, head_dim).unwrap(), rotary_dim, pairs }
}

fn assert_shape(rows: usize, shape: QkvShape, ways: usize) {
    let mut given = Given::new(rows, shape);
    let (bias, norms) = (given.reference.bias.clone(), given.reference.norms.clone());
    for (bias, norms) in [(bias.clone(), norms.clone()), (None, norms), (bias, None), (None, None)] {
        (given.reference.bias, given.reference.norms) = (bias, norms);
        for device in Emulated::every_way().take(ways) {
            let context = format!("{rows} rows of {shape:?}, {:?}", device.settings);
            let (queries, pages) = given.run(&device).unwrap();
            given.assert_all(&queries, &pages, &context);
        }
    }
}

#[test]
fn emulator_heads_of_every_kernel_match_the_reference_in_both_pairings() {
    for pairs in [Pairs::HalfSplit, Pairs::Interleaved] {
        for (query_heads, kv_heads, dim, rotary) in
            [(3, 1, 64, 64), (2, 2, 80, 80), (4, 2, 128, 64), (1, 1, 256, 256), (5, 1, 8, 8), (2, 1, 24, 0)]
        {
            let shape = shape(query_heads, kv_heads, dim, rotary, pairs);
            assert_ne!(kernel_for(&shape).0, "qkv_any");
            assert_shape(5, shape, 12);
        }
    }
}

#[test]
fn emulator_widths_that_are_no_multiple_of_eight_match_the_reference() {
    for pairs in [Pairs::HalfSplit, Pairs::Interleaved] {
        for (dim, rotary) in [(2, 2), (20, 12), (100, 100), (250, 126), (64, 20)] {
            let shape = shape(3, 2, dim, rotary, pairs);
            assert_eq!(kernel_for(&shape).0, "qkv_any");
            assert_shape(4, shape, 12);
        }
    }
}

#[test]
fn emulator_one_row_an_empty_batch_and_a_rank_with_keys_only_are_served() {
    assert_shape(1, shape(8, 1, 128, 128, Pairs::HalfSplit), 12);
    assert_shape(0, shape(8, 1, 128, 128, Pairs::HalfSplit), 1);
    assert_shape(2, shape(0, 3, 64, 64, Pairs::HalfSplit), 2);
}

#[test]
fn emulator_the_heads_of_a_large_model_match_the_reference() {
    assert_shape(9, shape(64, 8, 128, 128, Pairs::HalfSplit), 2);
}

#[test]
fn emulator_a_rows_bits_do_not_depend_on_its_company() {
    let mut given = Given::new(5, shape(3, 2, 64, 64, Pairs::HalfSplit));
    given.slots[1] = 7;
    let (together, _) = given.run(&Emulated::every_way().next().unwrap()).unwrap();
    let (columns, elements) = (given.shape.columns(), given.shape.query_elements());
    for row in 0..5 {
        let mut one = Given::new(1, given.shape);
        one.x = given.x[row * columns..(row + 1) * columns].to_vec();
        one.positions = vec![given.positions[row]];
        one.reference = given.reference.clone();
        let (alone, _) = one.run(&Emulated::every_way().last().unwrap()).unwrap();
        assert_eq!(together[row * elements..(row + 1) * elements], alone[..], "row {row}");
    }
}

#[test]
fn slots_and_lengths_that_do_not_agree_are_refused_before_a_launch() {
    let pages = PageShape::new(16, 1, 64).unwrap();
    assert!(check_slots(&[0, 47], pages, 3).is_ok());
    assert_eq!(check_slots(&[0, 48], pages, 3).unwrap_err().to_string(), "qkv: slot 48 is outside 0..48");
    let device = Emulated::every_way().next().unwrap();
    let refusal = |change: &dyn Fn(&mut Given)| {
        let mut given = Given::new(2, shape(2, 1, 64, 64, Pairs::HalfSplit));
        change(&mut given);
        given.run(&device).unwrap_err().to_string()
    };
    assert_eq!(refusal(&|given| given.x.truncate(511)), "qkv: x holds 511 elements, 512 expected");
    let short_bias = refusal(&|given| given.reference.bias = Some(vec![0.0; 255]));
    assert_eq!(short_bias, "qkv: bias holds 255 elements, 256 expected");
    assert!(refusal(&|given| given.shape.rotary_dim = 66).contains("rotated dimension 66"));
    assert!(refusal(&|given| given.shape.rotary_dim = 63).contains("pairs"));
}
