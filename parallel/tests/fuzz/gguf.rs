//! GGUF files: where their numbers stand, and damage that keeps the rest of the file in order.

use std::{fs, path::Path};

use consort_parallel::checkpoint::Checkpoint;

use crate::{
    allocation::peak_of,
    campaign, fixture,
    mutate::{self, Field},
    random::Random,
    reading::{InputBytes, Outcome, exercise},
    write,
};

/// A valid file and what is known of it.
struct Sample {
    bytes: Vec<u8>,
    /// Counts, lengths, types, dimensions, offsets and values of the header.
    fields: Vec<Field>,
    /// Where metadata and tensor entries start; the last one is the end of the header.
    entries: Vec<usize>,
    metadata_count: usize,
}

const TENSOR_COUNT: Field = Field { at: 8, width: 8 };
const METADATA_COUNT: Field = Field { at: 16, width: 8 };

/// Walks the header of a valid file.
struct Scan<'a> {
    bytes: &'a [u8],
    at: usize,
    fields: Vec<Field>,
}

impl Scan<'_> {
    fn number(&mut self, width: usize) -> u64 {
        let field = Field { at: self.at, width };
        self.at += width;
        self.fields.push(field);
        mutate::get(self.bytes, field).unwrap()
    }

    fn string(&mut self) {
        self.at += self.number(8) as usize;
    }

    fn value(&mut self, kind: u64) {
        match kind {
            8 => self.string(),
            9 => {
                let (kind, count) = (self.number(4), self.number(8));
                (0..count).for_each(|_| self.value(kind));
            }
            kind => {
                self.number([1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8][kind as usize]);
            }
        }
    }
}

impl Sample {
    fn new(bytes: Vec<u8>) -> Self {
        let mut scan = Scan { bytes: &bytes, at: 4, fields: Vec::new() };
        scan.number(4);
        let (tensors, metadata) = (scan.number(8), scan.number(8));
        let mut entries = Vec::new();
        for _ in 0..metadata {
            entries.push(scan.at);
            scan.string();
            let kind = scan.number(4);
            scan.value(kind);
        }
        for _ in 0..tensors {
            entries.push(scan.at);
            scan.string();
            let dimensions = scan.number(4);
            for _ in 0..dimensions {
                scan.number(8);
            }
            scan.number(4);
            scan.number(8);
        }
        entries.push(scan.at);
        let fields = scan.fields;
        Self { bytes, fields, entries, metadata_count: metadata as usize }
    }

    fn header_len(&self) -> usize {
        *self.entries.last().unwrap()
    }

    /// Repeats, removes or takes over a whole entry, with the count to match, and keeps the data in its place.
    fn entry(&self, random: &mut Random, bytes: &mut Vec<u8>, donor: &Sample) {
        let is_metadata = random.once_in(2);
        let of = |sample: &Sample, random: &mut Random| {
            let middle = sample.metadata_count;
            let range = if is_metadata { 0..middle } else { middle..sample.entries.len() - 1 };
            let index = range.start + random.below(range.len());
            sample.entries[index]..sample.entries[index + 1]
        };
        // What takes the place of what, and by how much that changes the count.
        let target = of(self, random);
        let (source, target, change) = match random.below(3) {
            0 => (self.bytes[of(self, random)].to_vec(), target.start..target.start, 1),
            1 => (donor.bytes[of(donor, random)].to_vec(), target.start..target.start, 1),
            _ => (Vec::new(), target, u64::MAX),
        };
        if bytes.len() < self.header_len() {
            return;
        }
        let count = if is_metadata { METADATA_COUNT } else { TENSOR_COUNT };
        let counted = mutate::get(bytes, count).unwrap_or_default().wrapping_add(change);
        mutate::set(bytes, count, counted);
        let padding = |header_len: usize| header_len.next_multiple_of(32) - header_len;
        let header_len = self.header_len() - target.len() + source.len();
        drop(bytes.splice(target, source));
        let end = (header_len + padding(self.header_len())).min(bytes.len());
        let padding = std::iter::repeat_n(0, padding(header_len));
        drop(bytes.splice(header_len.min(end)..end, padding));
    }

    fn damaged(&self, random: &mut Random, donor: &Sample) -> Vec<u8> {
        let mut bytes = self.bytes.clone();
        // Where lengths changed, what is known of places no longer holds: then it is damage without aim.
        for _ in 0..=random.below(3) {
            match random.below(12) {
                0..5 => mutate::field(random, &mut bytes, &self.fields),
                5..7 => mutate::blind(random, &mut bytes, 0..self.header_len()),
                7 => mutate::blind(random, &mut bytes, self.header_len()..self.bytes.len()),
                8 => mutate::splice(random, &mut bytes, &self.entries, &donor.bytes),
                9 => mutate::splice(random, &mut bytes, &[], &donor.bytes),
                _ => self.entry(random, &mut bytes, donor),
            }
        }
        bytes
    }
}

fn samples() -> [Sample; 2] {
    ["twin.gguf", "types.gguf"].map(|name| Sample::new(fs::read(fixture(name)).unwrap()))
}

fn read(bytes: &[u8], folder: &Path, random: &mut Random) -> Outcome {
    let path = folder.join("model.gguf");
    write(&path, bytes);
    exercise(&path, InputBytes { weights: bytes.len(), config: 0 }, random)
}

#[test]
fn damaged_gguf_files_do_no_harm() {
    let samples = samples();
    campaign::run("gguf", |random, folder| {
        let which = random.below(samples.len());
        let bytes = samples[which].damaged(random, &samples[1 - which]);
        read(&bytes, folder, random)
    });
}

#[test]
fn any_number_of_a_gguf_header_may_be_any_extreme() {
    let folder = campaign::folder("gguf-extremes");
    let (mut random, mut count, mut total) = (Random::new(1), 0, Outcome::default());
    for sample in samples() {
        let extremes = mutate::extremes(sample.bytes.len());
        for field in &sample.fields {
            for value in &extremes {
                let mut bytes = sample.bytes.clone();
                mutate::set(&mut bytes, *field, *value);
                total.add(&read(&bytes, &folder, &mut random));
                count += 1;
            }
        }
    }
    println!("{count} files: {total}");
    assert!(count > 10_000 && total.opened > 0 && total.opened < count);
}

#[test]
fn a_gguf_file_cut_off_at_any_number_or_tensor_is_refused() {
    let folder = campaign::folder("gguf-cut");
    let mut random = Random::new(1);
    for sample in samples() {
        let ends = sample.fields.iter().flat_map(|field| [field.at, field.at + 1, field.at + field.width]);
        // The last tensor reaches to less than 32 bytes from the end.
        let data = (sample.header_len()..sample.bytes.len() - 31).step_by(61);
        for end in ends.chain(data).chain([sample.bytes.len() - 32]) {
            let outcome = read(&sample.bytes[..end], &folder, &mut random);
            assert_eq!(outcome.opened, 0, "cut to {end} of {} bytes", sample.bytes.len());
        }
    }
}

#[test]
fn an_array_of_metadata_takes_what_its_elements_take() {
    const COUNT: usize = 1 << 20;
    let folder = campaign::folder("gguf-arrays");
    // Type, bytes in the file, bytes in memory: an integer, a number, a string.
    for (kind, stored, kept) in [(0_u32, 1, 4), (5, 4, 4), (10, 8, 4), (6, 4, 4), (7, 1, 0), (8, 8, 24)] {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend([0_u64, 1, 1].map(u64::to_le_bytes).concat());
        bytes.push(b'a');
        bytes.extend([9, kind].map(u32::to_le_bytes).concat());
        bytes.extend((COUNT as u64).to_le_bytes());
        bytes.resize(bytes.len() + COUNT * stored, 0);
        let path = folder.join("model.gguf");
        write(&path, &bytes);
        let (result, peak) = peak_of(|| Checkpoint::open(&path));
        assert!(result.unwrap_err().to_string().contains("general.architecture"));
        assert!(peak <= COUNT * kept + 4096, "{COUNT} elements of type {kind} held {peak} bytes");
    }
}
