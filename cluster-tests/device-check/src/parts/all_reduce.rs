//! Sums and gathers over three ranks on one card, by the kernels that ranks on three cards use: there is no link
//! between them, so the times are of meeting and of the card's own memory. Sums must be those of the fixed order, to
//! the bit, on all ranks.

mod ranks;

use anyhow::{Context, Result};
use consort_kernels::{
    all_reduce::{all_reduce_reference, cuda::prefers_one_shot},
    rms_norm::rms_norm_reference,
};
use half::bf16;

use self::ranks::{EPS, Operation, Ranks};
use crate::{
    figures::{Figure, Goal, Row},
    session::{Noise, Session, WORK_LIMIT, median},
};

const RANKS: usize = 3;
/// Elements of a sum: 8 KiB, 64 KiB, 1 MiB, 8 MiB.
const LENGTHS: [usize; 4] = [2 << 10, 16 << 10, 256 << 10, 2 << 20];
/// Columns of a row that is normalised, or all where there are fewer.
const WIDTH_MAX: usize = 4096;
/// Sums in a graph, and replays of which the median counts.
const SUMS: usize = 20;
const REPLAYS: usize = 15;

pub(crate) fn run(session: &mut Session) -> Result<()> {
    let lengths = session.pick(LENGTHS, [8, 515, 1024, 4096]);
    let longest = lengths.iter().copied().max().unwrap_or(1);
    let mut ranks = Ranks::new(session, RANKS, longest)?;
    let data = Data::new(longest);
    sums(session, &mut ranks, &data, "one shot", &lengths, |_| Operation::OneShot)?;
    sums(session, &mut ranks, &data, "two shots", &lengths, |_| Operation::TwoShots)?;
    let width_max = session.pick(WIDTH_MAX, 512);
    // A kernel of its own where a sum is so short that one shot is the faster way; whole rows.
    let fused: Vec<usize> = lengths
        .into_iter()
        .filter(|&len| prefers_one_shot(len, RANKS) && len % len.min(width_max) == 0)
        .collect();
    sums(session, &mut ranks, &data, "with the norm", &fused, |len| Operation::Fused {
        width: len.min(width_max),
    })?;
    // Of odd rows too, which are gathered one element at a time.
    sums(session, &mut ranks, &data, "gather", &lengths, |len| Operation::Gather {
        width: if len.is_multiple_of(2) { len / 2 } else { len },
    })
}

/// What is added.
struct Data {
    parts: Vec<Vec<f32>>,
    residual: Vec<f32>,
    weight: Vec<f32>,
}

impl Data {
    fn new(len: usize) -> Data {
        let numbers = |seed| numbers(seed, len);
        Data { parts: (20..).take(RANKS).map(numbers).collect(), residual: numbers(30), weight: numbers(31) }
    }
}

/// Numbers of very different sizes, so that sums in another order would differ.
pub(super) fn numbers(seed: u64, len: usize) -> Vec<f32> {
    let mut noise = Noise::new(seed);
    let mut number = || {
        let power = (noise.next_u64() >> 60) as i32 - 8;
        noise.next().unwrap_or_default() * f32::powi(2.0, power)
    };
    (0..len).map(|_| number()).collect()
}

fn sums(
    session: &mut Session,
    ranks: &mut Ranks,
    data: &Data,
    name: &str,
    lengths: &[usize],
    operation: impl Fn(usize) -> Operation,
) -> Result<()> {
    let (mut compared, mut wrong) = (0, 0);
    for &len in lengths {
        let operation = operation(len);
        let case = format!("{name} {}", size(len));
        wrong += once(ranks, data, operation, len).with_context(|| case.clone())?;
        compared += RANKS * len;
        let replays = session.pick(REPLAYS, 2);
        let seconds = timed(ranks, operation, len, replays).with_context(|| case.clone())?;
        let figure = Figure::cost(seconds / SUMS as f64 * 1e6, "us");
        let chosen = match operation {
            Operation::OneShot => prefers_one_shot(len, RANKS),
            Operation::TwoShots => !prefers_one_shot(len, RANKS),
            Operation::Fused { .. } | Operation::Gather { .. } => true,
        };
        let note = if chosen { "what ranks on several cards do" } else { "" };
        session.row(Row::new(case, figure).note(note))?;
    }
    // Where nothing was compared, nothing is right.
    let wrong = if compared == 0 { 1 } else { wrong };
    let row = Row::new(format!("results {name}"), Figure::cost(wrong as f64, "wrong"));
    session.row(row.goal(Goal::required(0.0, "the fixed order's")).note(format!("of {compared} elements")))
}

/// As in "64 KiB".
fn size(len: usize) -> String {
    match len * size_of::<f32>() {
        bytes if bytes.is_multiple_of(1 << 20) => format!("{} MiB", bytes >> 20),
        bytes if bytes.is_multiple_of(1 << 10) => format!("{} KiB", bytes >> 10),
        bytes => format!("{bytes} B"),
    }
}

/// One sum, and how many elements of all ranks' results are not what they must be.
fn once(ranks: &mut Ranks, data: &Data, operation: Operation, len: usize) -> Result<usize> {
    let mut parts = data.parts.iter();
    ranks.each(|rank| {
        let device = rank.device.clone();
        if let Some(part) = parts.next() {
            device.upload(&part[..len], rank.part.slice_mut(0..len))?;
        }
        device.zero(rank.sum.all_mut())?;
        device.zero(rank.normed.all_mut())?;
        device.upload(&data.residual[..len], rank.residual.slice_mut(0..len))?;
        device.upload(&data.weight[..len], rank.weight.slice_mut(0..len))?;
        Ok(device.synchronize("take its part", WORK_LIMIT)?)
    })?;
    ranks.together(|rank| {
        let device = rank.device.clone();
        Ok(rank.enqueue(device.as_ref(), operation, len)?)
    })?;
    let parts: Vec<Vec<f32>> = data.parts.iter().map(|part| part[..len].to_vec()).collect();
    let sum = all_reduce_reference(&parts);
    match operation {
        Operation::OneShot | Operation::TwoShots => {
            let wrong = ranks.each(|rank| {
                let mut got = vec![0.0; len];
                rank.device.download(rank.sum.slice(0..len), &mut got, WORK_LIMIT)?;
                Ok(different(&got, &sum))
            })?;
            Ok(wrong.into_iter().sum())
        }
        Operation::Fused { width } => normalised(ranks, data, &sum, width),
        Operation::Gather { width } => {
            let rows =
                (0..len / width).flat_map(|row| parts.iter().map(move |part| &part[row * width..][..width]));
            let expected = rows.collect::<Vec<_>>().concat();
            let wrong = ranks.each(|rank| {
                let mut got = vec![0.0; expected.len()];
                rank.device.download(rank.sum.slice(0..expected.len()), &mut got, WORK_LIMIT)?;
                Ok(different(&got, &expected))
            })?;
            Ok(wrong.into_iter().sum())
        }
    }
}

/// Elements of residuals that are not the reference's, of rows that are not near it, or not rank 0's.
fn normalised(ranks: &mut Ranks, data: &Data, sum: &[f32], width: usize) -> Result<usize> {
    let mut residual = data.residual[..sum.len()].to_vec();
    let rows = residual.chunks_exact_mut(width).zip(sum.chunks_exact(width));
    let expected: Vec<f32> = rows
        .flat_map(|(row, sum)| rms_norm_reference::<bf16>(row, Some(sum), &data.weight[..width], EPS))
        .collect();
    let mut first: Option<Vec<bf16>> = None;
    let wrong = ranks.each(|rank| {
        let (mut after, mut out) = (vec![0.0; sum.len()], vec![bf16::ZERO; sum.len()]);
        rank.device.download(rank.residual.slice(0..sum.len()), &mut after, WORK_LIMIT)?;
        rank.device.download(rank.normed.slice(0..sum.len()), &mut out, WORK_LIMIT)?;
        let far = out.iter().zip(&expected).filter(|(out, expected)| !is_near(out.to_f32(), **expected));
        let mut wrong = different(&after, &residual) + far.count();
        match &first {
            Some(first) => wrong += out.iter().zip(first).filter(|(a, b)| a.to_bits() != b.to_bits()).count(),
            None => first = Some(out),
        }
        Ok(wrong)
    })?;
    Ok(wrong.into_iter().sum())
}

/// Both round twice to BF16, after scales that differ by some ulp of f32: a rounding may turn at either.
fn is_near(got: f32, expected: f32) -> bool {
    (got - expected).abs() <= expected.abs() / 64.0 + f32::MIN_POSITIVE
}

fn different(got: &[f32], expected: &[f32]) -> usize {
    got.iter().zip(expected).filter(|(got, expected)| got.to_bits() != expected.to_bits()).count()
}

/// Seconds of a graph of [`SUMS`], of the slowest rank.
fn timed(ranks: &mut Ranks, operation: Operation, len: usize, replays: usize) -> Result<f64> {
    let graphs = ranks.each(|rank| rank.record(operation, len, SUMS))?;
    let mut times = Vec::with_capacity(replays);
    // The first one warms up.
    for at in 0..=replays {
        let took = ranks.together(|rank| rank.seconds(&graphs[rank.index()]))?;
        if at > 0 {
            times.push(took.into_iter().fold(0.0, f64::max));
        }
    }
    Ok(median(times))
}
