//! Rows with requests, sampled by the CPU and by the kernels.

use super::*;
use crate::sampling::{TokenHistory, sample};

/// A batch and its logits on the host.
pub(super) struct Case {
    pub(super) width: usize,
    pub(super) logits: Vec<f32>,
    params: Vec<SamplingParams>,
    histories: Vec<TokenHistory>,
}

/// Numbers as logits are: most within a few units, the best some above.
pub(super) fn bell(numbers: &mut Numbers, width: usize) -> Vec<f32> {
    (0..width).map(|_| (0..6).map(|_| numbers.f32()).sum::<f32>() * 2.5).collect()
}

impl Case {
    /// Rows of every kind with requests of every kind.
    pub(super) fn random(seed: u64, rows: usize, width: usize) -> Case {
        let mut case = Case { width, logits: Vec::new(), params: Vec::new(), histories: Vec::new() };
        let mut numbers = Numbers(seed);
        for _ in 0..rows {
            let values = random_row(&mut numbers, width);
            let params = random_params(&mut numbers, width);
            case.push(values, params);
            let mut history = TokenHistory::new(20, &case.params.last().unwrap().adjustments);
            history.extend(&(0..40).map(|_| numbers.below(width + 2) as u32).collect::<Vec<_>>());
            *case.histories.last_mut().unwrap() = history;
        }
        case
    }

    pub(super) fn push(&mut self, values: Vec<f32>, params: SamplingParams) {
        assert_eq!(values.len(), self.width);
        self.logits.extend(values);
        self.histories.push(TokenHistory::new(0, &params.adjustments));
        self.params.push(params);
    }

    pub(super) fn rows(&self) -> usize {
        self.params.len()
    }

    fn row(&self, row: usize) -> Vec<f32> {
        self.logits[row * self.width..][..self.width].to_vec()
    }

    fn position(row: &SamplingParams) -> u64 {
        row.seed % 1000
    }

    /// One row by itself.
    pub(super) fn only(&self, row: usize) -> Case {
        Case {
            width: self.width,
            logits: self.row(row),
            params: vec![self.params[row].clone()],
            histories: vec![self.histories[row].clone()],
        }
    }

    pub(super) fn batch(&self) -> Batch {
        let mut batch = Batch::new();
        for (params, history) in self.params.iter().zip(&self.histories) {
            batch.push(params, history, Self::position(params));
        }
        batch
    }

    pub(super) fn row_of_entry(&self, entry: usize) -> usize {
        let rows = self.batch().row_words().to_vec();
        rows.chunks(16).position(|row| entry < row[12] as usize).unwrap()
    }

    /// The logits as the CPU changes them.
    pub(super) fn changed(&self) -> Vec<f32> {
        let mut logits = self.logits.clone();
        for row in 0..self.rows() {
            let values = &mut logits[row * self.width..][..self.width];
            self.params[row].adjustments.apply(values, &self.histories[row]);
        }
        logits
    }

    /// The CPU's tokens.
    pub(super) fn tokens(&self) -> Vec<u32> {
        let mut logits = self.changed();
        let of = |row: usize, logits: &mut Vec<f32>| {
            let values = &mut logits[row * self.width..][..self.width];
            sample(values, &self.params[row], Self::position(&self.params[row])).unwrap_or(NO_TOKEN)
        };
        (0..self.rows()).map(|row| of(row, &mut logits)).collect()
    }

    /// The logits of a slice of the vocabulary.
    pub(super) fn sliced(&self, slice: Slice) -> Vec<f32> {
        let row = |row: usize| self.row(row)[slice.first as usize..][..slice.width].to_vec();
        (0..self.rows()).flat_map(row).collect()
    }

    pub(super) fn whole(&self) -> Slice {
        Slice { first: 0, width: self.width }
    }
}

fn pick<T: Copy>(numbers: &mut Numbers, of: &[T]) -> T {
    of[numbers.below(of.len())]
}

fn random_row(numbers: &mut Numbers, width: usize) -> Vec<f32> {
    let mut row = bell(numbers, width);
    match numbers.below(12) {
        0 => row.fill(0.75),
        1 => row.iter_mut().for_each(|x| *x = x.round()),
        2 => row.iter_mut().for_each(|x| *x *= 1e37),
        3 => row.iter_mut().for_each(|x| *x = x.signum() * 0.0),
        4 => row.iter_mut().for_each(|x| *x *= 8.0),
        5 => row.fill(f32::NAN),
        6 => row.iter_mut().for_each(|x| *x = if *x > 1.0 { *x } else { f32::NEG_INFINITY }),
        _ => {}
    }
    for value in [f32::NAN, f32::NEG_INFINITY, f32::INFINITY, f32::MAX] {
        let odds = if value > 1e30 { 12 } else { 3 };
        if numbers.below(odds) == 0 {
            for _ in 0..1 + width / 50 {
                row[numbers.below(width)] = value;
            }
        }
    }
    row
}

fn random_params(numbers: &mut Numbers, width: usize) -> SamplingParams {
    let some_ids =
        |numbers: &mut Numbers| (0..4).map(|_| numbers.below(width + 3) as u32).collect::<Vec<_>>();
    let adjustments = match numbers.below(3) {
        0 => Adjustments::default(),
        _ => Adjustments {
            min_tokens: pick(numbers, &[0, 100]),
            masked_until_min: some_ids(numbers),
            logit_bias: some_ids(numbers)
                .into_iter()
                .chain([0, 0])
                .map(|id| (id, numbers.f32() * 5.0))
                .collect(),
            repetition_penalty: pick(numbers, &[1.0, 1.3, 0.7]),
            frequency_penalty: pick(numbers, &[0.0, 0.4, -0.3]),
            presence_penalty: pick(numbers, &[0.0, 1.1]),
        },
    };
    SamplingParams {
        temperature: pick(numbers, &[0.0, 0.01, 0.6, 1.0, 1.0, 1.5, 1e4, 1e30, 2e-5]),
        top_k: pick(numbers, &[None, None, Some(0), Some(1), Some(2), Some(5), Some(50), Some(2_000_000)]),
        top_p: pick(numbers, &[1.0, 1.0, 1e-6, 0.1, 0.5, 0.9, 0.95, 0.999_999_9]),
        min_p: pick(numbers, &[0.0, 0.0, 1e-4, 0.05, 1.0]),
        seed: numbers.next_u64(),
        adjustments,
    }
}

/// A batch in the device's memory.
pub(super) struct OnDevice {
    shape: BatchShape,
    rows: Memory<u32>,
    entries: Memory<u32>,
    slice: Slice,
}

impl OnDevice {
    pub(super) fn new(case: &Case, slice: Slice) -> OnDevice {
        let batch = case.batch();
        OnDevice {
            shape: batch.shape(),
            rows: Memory::from_slice(batch.row_words()),
            entries: Memory::from_slice(batch.entry_words()),
            slice,
        }
    }

    pub(super) fn requests(&self) -> Requests<'_> {
        let (rows, entries) = (device_slice(&self.rows), device_slice(&self.entries));
        Requests { shape: self.shape, rows, entries, slice: self.slice }
    }
}

/// Zeroed memory for a workspace.
pub(super) fn workspace(rows: usize) -> Memory<u32> {
    Memory::from_slice(&vec![0; Workspace::words(rows)])
}

/// One rank after its survey.
pub(super) struct Surveyed {
    pub(super) requests: OnDevice,
    pub(super) logits: Memory<f32>,
    pub(super) before: Memory<f32>,
    pub(super) standings: Memory<u32>,
    pub(super) tokens: Memory<u32>,
}

pub(super) fn surveyed(device: &Emulated, case: &Case) -> Surveyed {
    surveyed_in(device, case, case.whole(), &mut workspace(case.rows()))
}

pub(super) fn surveyed_in(
    device: &Emulated,
    case: &Case,
    slice: Slice,
    memory: &mut Memory<u32>,
) -> Surveyed {
    let requests = OnDevice::new(case, slice);
    let mut run = Surveyed {
        logits: Memory::from_slice(&case.sliced(slice)),
        before: Memory::poisoned(requests.shape.entries),
        standings: Memory::poisoned(standing_words(case.rows())),
        tokens: Memory::poisoned(case.rows()),
        requests,
    };
    survey(
        device,
        run.requests.requests(),
        device_slice_mut(&mut run.logits),
        Some(device_slice_mut(&mut run.before)),
        &mut Workspace::new(device_slice_mut(memory), case.rows()).unwrap(),
        device_slice_mut(&mut run.standings),
        Some(device_slice_mut(&mut run.tokens)),
    )
    .unwrap();
    run
}

/// The kernels' tokens on a single rank.
pub(super) fn single(device: &Emulated, case: &Case) -> Vec<u32> {
    single_in(device, case, &mut workspace(case.rows()))
}

pub(super) fn single_in(device: &Emulated, case: &Case, memory: &mut Memory<u32>) -> Vec<u32> {
    let mut run = surveyed_in(device, case, case.whole(), memory);
    let early = run.tokens.to_vec();
    let mut workspace = Workspace::new(device_slice_mut(memory), case.rows()).unwrap();
    let standings = Standings { words: device_slice(&run.standings), ranks: 1 };
    let (requests, logits) = (run.requests.requests(), device_slice(&run.logits));
    select(device, requests, logits, standings, &mut workspace).unwrap();
    draw(device, requests, logits, standings, &mut workspace, device_slice_mut(&mut run.tokens)).unwrap();
    let tokens = run.tokens.to_vec();
    // Greedy rows and rows without numbers were done before; the others had not been touched.
    for (row, params) in case.params.iter().enumerate() {
        let done = params.temperature == 0.0 || tokens[row] == NO_TOKEN;
        assert_eq!(early[row], if done { tokens[row] } else { u32::MAX }, "row {row} after the survey");
    }
    tokens
}
