//! How far what a device wrote is from what the emulator wrote.

use half::bf16;

use super::recording::{Elements, Memory};

/// What may differ: sums of tensor cores have an order and roundings of their own, `exp2` and `rsqrt` are approximate.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tolerance {
    /// Of a float, relative to it or to the root mean square of what was written beside it, whichever is larger.
    pub(super) float: f32,
    /// Words may stand in any order: as many of each are expected.
    pub(super) any_order: bool,
}

/// Of BF16, whatever the kernel: two units of the last place.
const BFLOAT16: f32 = 1.0 / 64.0;

/// What was found in one piece of memory, or in several.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Difference {
    /// The largest, as a share of the tolerance; infinite where no tolerance allows it.
    pub(super) worst: f32,
    /// Elements that are not the same bits.
    pub(super) differ: usize,
    /// Elements that the launch wrote, or left as they were.
    pub(super) elements: usize,
    /// Those that it changed.
    pub(super) changed: usize,
}

impl Difference {
    pub(super) fn and(self, other: Difference) -> Difference {
        Difference {
            worst: self.worst.max(other.worst),
            differ: self.differ + other.differ,
            elements: self.elements + other.elements,
            changed: self.changed + other.changed,
        }
    }
}

/// Holds what a device left in memory against the recording. What the launch did not change must be as it was.
pub(super) fn compare(memory: &Memory, got: &[u8], tolerance: Tolerance) -> Difference {
    let after = memory.after.as_ref().unwrap_or(&memory.before);
    let width = match memory.elements {
        Elements::BFloat16 => 2,
        Elements::Float32 | Elements::Words => 4,
        Elements::Bytes => 1,
    };
    if tolerance.any_order && memory.elements == Elements::Words {
        return compare_words_in_any_order(&memory.before, after, got);
    }
    let scale = scale_of(memory, after);
    let mut found = Difference::default();
    let elements =
        after.chunks_exact(width).zip(got.chunks_exact(width)).zip(memory.before.chunks_exact(width));
    for ((expected, got), before) in elements {
        found.elements += 1;
        found.changed += usize::from(expected != before);
        if expected == got {
            continue;
        }
        found.differ += 1;
        let share = if before == expected {
            f32::INFINITY
        } else {
            share(memory.elements, expected, got, scale, tolerance)
        };
        found.worst = found.worst.max(share);
    }
    found
}

/// How many words are not in the other one's place, after both are put in order.
fn compare_words_in_any_order(before: &[u8], expected: &[u8], got: &[u8]) -> Difference {
    let changed = before.chunks_exact(4).zip(expected.chunks_exact(4)).filter(|(a, b)| a != b).count();
    let sorted = |bytes: &[u8]| {
        let mut words: Vec<[u8; 4]> =
            bytes.chunks_exact(4).map(|word| [word[0], word[1], word[2], word[3]]).collect();
        words.sort_unstable();
        words
    };
    let (expected, got) = (sorted(expected), sorted(got));
    let differ = expected.iter().zip(&got).filter(|(expected, got)| expected != got).count();
    Difference {
        worst: if differ > 0 { f32::INFINITY } else { 0.0 },
        differ,
        elements: expected.len(),
        changed,
    }
}

/// One element's difference, as a share of what is allowed.
fn share(elements: Elements, expected: &[u8], got: &[u8], scale: f32, tolerance: Tolerance) -> f32 {
    match elements {
        Elements::BFloat16 => float_share(bfloat16(expected), bfloat16(got), scale, BFLOAT16),
        Elements::Float32 => float_share(float32(expected), float32(got), scale, tolerance.float),
        // A word may hold a float: then both look like one, which small integers do not.
        Elements::Words => {
            let (expected, got) = (float32(expected), float32(got));
            let usual = |x: f32| (1e-30..1e30).contains(&x.abs());
            match usual(expected) && usual(got) {
                true => float_share(expected, got, 0.0, tolerance.float),
                false => f32::INFINITY,
            }
        }
        Elements::Bytes => f32::INFINITY,
    }
}

fn float_share(expected: f32, got: f32, scale: f32, tolerance: f32) -> f32 {
    if expected.is_nan() && got.is_nan() || expected == got {
        return 0.0;
    }
    let share = (expected - got).abs() / (tolerance * expected.abs().max(scale));
    if share.is_nan() { f32::INFINITY } else { share }
}

/// Root mean square of the finite floats that a launch wrote.
fn scale_of(memory: &Memory, after: &[u8]) -> f32 {
    let (width, read): (usize, fn(&[u8]) -> f32) = match memory.elements {
        Elements::BFloat16 => (2, bfloat16),
        Elements::Float32 => (4, float32),
        Elements::Words | Elements::Bytes => return 0.0,
    };
    let written = after.chunks_exact(width).zip(memory.before.chunks_exact(width));
    let written = written.filter(|(after, before)| after != before).map(|(after, _)| read(after));
    let (mut sum, mut count) = (0.0f64, 0u32);
    for value in written.filter(|value| value.is_finite()) {
        sum += f64::from(value).powi(2);
        count += 1;
    }
    (sum / f64::from(count.max(1))).sqrt() as f32
}

fn bfloat16(bytes: &[u8]) -> f32 {
    bf16::from_ne_bytes([bytes[0], bytes[1]]).to_f32()
}

fn float32(bytes: &[u8]) -> f32 {
    f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOLERANCE: Tolerance = Tolerance { float: 1e-3, any_order: false };

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_ne_bytes()).collect()
    }

    fn floats(before: &[f32], after: &[f32]) -> Memory {
        Memory { elements: Elements::Float32, before: bytes(before), after: Some(bytes(after)) }
    }

    #[test]
    fn the_same_bits_are_no_difference_and_small_ones_are_a_share_of_the_tolerance() {
        let memory = floats(&[9.0, 9.0], &[1.0, -1.0]);
        assert_eq!(
            compare(&memory, &bytes(&[1.0, -1.0]), TOLERANCE),
            Difference { worst: 0.0, differ: 0, elements: 2, changed: 2 }
        );
        let found = compare(&memory, &bytes(&[1.0005, -1.0]), TOLERANCE);
        assert!((0.49..0.51).contains(&found.worst) && found.differ == 1, "{found:?}");
        assert!(compare(&memory, &bytes(&[1.1, -1.0]), TOLERANCE).worst > 50.0);
    }

    #[test]
    fn a_tiny_number_is_held_against_what_stands_beside_it() {
        let memory = floats(&[9.0, 9.0], &[1e-9, 1.0]);
        assert!(compare(&memory, &bytes(&[1e-4, 1.0]), TOLERANCE).worst < 1.0);
    }

    #[test]
    fn what_a_launch_leaves_alone_must_stay_as_it_was() {
        let memory = floats(&[9.0, 5.0], &[1.0, 5.0]);
        assert_eq!(compare(&memory, &bytes(&[1.0, 5.000_001]), TOLERANCE).worst, f32::INFINITY);
        let untouched = Memory { after: None, ..floats(&[3.0], &[]) };
        assert_eq!(compare(&untouched, &bytes(&[3.1]), TOLERANCE).worst, f32::INFINITY);
        assert_eq!(compare(&untouched, &bytes(&[3.0]), TOLERANCE).worst, 0.0);
    }

    #[test]
    fn nan_is_nan_only_where_it_is_expected() {
        let memory = floats(&[0.0, 0.0], &[f32::NAN, 1.0]);
        assert_eq!(compare(&memory, &bytes(&[-f32::NAN, 1.0]), TOLERANCE).worst, 0.0);
        assert_eq!(compare(&memory, &bytes(&[1.0, 1.0]), TOLERANCE).worst, f32::INFINITY);
        assert_eq!(compare(&memory, &bytes(&[f32::NAN, f32::NAN]), TOLERANCE).worst, f32::INFINITY);
        assert_eq!(compare(&memory, &bytes(&[f32::NAN, f32::INFINITY]), TOLERANCE).worst, f32::INFINITY);
    }

    #[test]
    fn words_are_equal_unless_both_are_floats() {
        let words = |before: u32, after: u32| Memory {
            elements: Elements::Words,
            before: before.to_ne_bytes().to_vec(),
            after: Some(after.to_ne_bytes().to_vec()),
        };
        assert_eq!(compare(&words(0, 5), &6u32.to_ne_bytes(), TOLERANCE).worst, f32::INFINITY);
        let near = 1.0005f32.to_bits().to_ne_bytes();
        assert!(compare(&words(0, 1.0f32.to_bits()), &near, TOLERANCE).worst < 1.0);
    }

    #[test]
    fn words_in_any_order_are_the_same_words() {
        let words = |words: [u32; 3]| words.into_iter().flat_map(u32::to_ne_bytes).collect::<Vec<u8>>();
        let memory = Memory {
            elements: Elements::Words,
            before: words([0; 3]),
            after: Some(words([7, 1_000_000, 7])),
        };
        let tolerance = Tolerance { any_order: true, ..TOLERANCE };
        let worst = |got| compare(&memory, &words(got), tolerance).worst;
        assert_eq!((worst([1_000_000, 7, 7]), worst([1_000_000, 7, 1_000_000])), (0.0, f32::INFINITY));
        assert_eq!(compare(&memory, &words([1_000_000, 7, 7]), TOLERANCE).worst, f32::INFINITY);
    }

    #[test]
    fn two_units_of_the_last_place_of_bfloat16_are_allowed_and_three_are_not() {
        let one = bf16::ONE.to_bits();
        let memory = Memory {
            elements: Elements::BFloat16,
            before: vec![0, 0],
            after: Some(one.to_ne_bytes().to_vec()),
        };
        assert!(compare(&memory, &(one + 2).to_ne_bytes(), TOLERANCE).worst <= 1.0);
        assert!(compare(&memory, &(one + 3).to_ne_bytes(), TOLERANCE).worst > 1.0);
    }
}
