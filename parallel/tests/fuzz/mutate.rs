//! Damage to bytes, with or without knowledge of what stands where.

use std::ops::Range;

use crate::random::Random;

/// A number in a file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Field {
    pub(crate) at: usize,
    /// In bytes, at most 8.
    pub(crate) width: usize,
}

/// Numbers at which readers break: ends of ranges, powers of two around the sizes of types, and their neighbours.
pub(crate) fn extremes(file_len: usize) -> Vec<u64> {
    let len = file_len as u64;
    let mut values = vec![0, 1, 2, 3, 5, 7, 9, 31, 32, 33, 255, 256, 257, len - 1, len, len + 1, len * 2];
    for shift in [15, 16, 27, 31, 32, 33, 40, 60, 61, 62, 63] {
        let power = 1_u64 << shift;
        values.extend([power - 1, power, power + 1]);
    }
    values.extend([u64::MAX / 3, u64::MAX - 31, u64::MAX - 7, u64::MAX - 1, u64::MAX]);
    values
}

pub(crate) fn get(bytes: &[u8], field: Field) -> Option<u64> {
    let stored = bytes.get(field.at..field.at + field.width)?;
    let mut wide = [0; 8];
    wide[..stored.len()].copy_from_slice(stored);
    Some(u64::from_le_bytes(wide))
}

/// Does nothing where the file has become too short.
pub(crate) fn set(bytes: &mut [u8], field: Field, value: u64) {
    if let Some(stored) = bytes.get_mut(field.at..field.at + field.width) {
        stored.copy_from_slice(&value.to_le_bytes()[..field.width]);
    }
}

/// Changes a known number: to an extreme, by a little, or to another one's value.
pub(crate) fn field(random: &mut Random, bytes: &mut [u8], fields: &[Field]) {
    let field = *random.one_of(fields);
    let Some(old) = get(bytes, field) else { return };
    let value = match random.below(4) {
        0 => old.wrapping_add(random.up_to(64) as u64).wrapping_sub(32),
        1 => get(bytes, *random.one_of(fields)).unwrap_or_default(),
        _ => *random.one_of(&extremes(bytes.len())),
    };
    set(bytes, field, value);
}

/// Damages bytes of `range`, knowing nothing.
pub(crate) fn blind(random: &mut Random, bytes: &mut [u8], range: Range<usize>) {
    let range = range.start.min(bytes.len())..range.end.min(bytes.len());
    if range.is_empty() {
        return;
    }
    let at = range.start + random.below(range.len());
    if random.once_in(2) {
        bytes[at] ^= 1 << random.below(8);
    } else {
        let end = (at + 1 + random.below(8)).min(range.end);
        bytes[at..end].fill_with(|| random.word() as u8);
    }
}

/// Removes, repeats or brings in a stretch between two of the places, or cuts the file off at one of them.
pub(crate) fn splice(random: &mut Random, bytes: &mut Vec<u8>, places: &[usize], donor: &[u8]) {
    let place = |random: &mut Random, len: usize| match places {
        [] => random.up_to(len),
        places => (*random.one_of(places)).min(len),
    };
    let (a, b) = (place(random, bytes.len()), place(random, bytes.len()));
    let stretch = a.min(b)..a.max(b);
    let to = place(random, bytes.len());
    match random.below(5) {
        0 => drop(bytes.drain(stretch)),
        1 => {
            let copy = bytes[stretch].to_vec();
            drop(bytes.splice(to..to, copy));
        }
        2 if !donor.is_empty() => {
            let from = random.below(donor.len());
            let length = random.below(256).min(donor.len() - from);
            drop(bytes.splice(to..to, donor[from..from + length].iter().copied()));
        }
        3 => bytes.resize(bytes.len() + random.below(256), random.word() as u8),
        _ => bytes.truncate(to),
    }
}
