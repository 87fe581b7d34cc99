//! Log-probabilities.

use super::{
    cases::{self, Case, surveyed_in, workspace},
    *,
};
use crate::sampling::log_probabilities;

/// Summaries of the wanted rows (row, number of best tokens), and the logits afterwards.
fn summaries(
    device: &Emulated,
    case: &Case,
    slice: Slice,
    wanted: &[(u32, u32)],
    tokens: &[u32],
) -> (Vec<Summary>, Vec<f32>) {
    let mut memory = workspace(case.rows());
    let mut run = surveyed_in(device, case, slice, &mut memory);
    let top_max = wanted.iter().map(|&(_, top)| top as usize).max().unwrap();
    let pairs: Vec<u32> = wanted.iter().flat_map(|&(row, top)| [row, top]).collect();
    let (pairs, tokens) = (Memory::from_slice(&pairs), Memory::from_slice(tokens));
    let words = summary_scratch_words(wanted.len(), slice.width, top_max);
    let mut scratch = Memory::<u32>::poisoned(words);
    let mut out = Memory::<u32>::poisoned(wanted.len() * Summary::words(top_max));
    let changed = Some((run.requests.requests(), device_slice(&run.before)));
    summarize(
        device,
        Wanted { rows: device_slice(&pairs), tokens: device_slice(&tokens), changed, top_max },
        slice,
        device_slice_mut(&mut run.logits),
        device_slice_mut(&mut scratch),
        &mut Workspace::new(device_slice_mut(&mut memory), case.rows()).unwrap(),
        device_slice_mut(&mut out),
    )
    .unwrap();
    let read = out.to_vec().chunks(Summary::words(top_max)).map(Summary::from_words).collect();
    (read, run.logits.to_vec())
}

/// Rows without infinities above, whose log-probabilities are numbers.
fn some_case(rows: usize, width: usize) -> Case {
    let source = Case::random(61, rows, width);
    let mut case = Case::random(61, rows, width);
    for (at, value) in source.logits.iter().enumerate() {
        case.logits[at] = if value.abs() < 100.0 || value.is_nan() { *value } else { value.signum() * 50.0 };
    }
    case.logits[width * (rows - 1)..].copy_from_slice(&cases::bell(&mut Numbers(7), width));
    case
}

/// The exponential errs by 2^-22 of itself at the largest logit, by more only where it weighs less (2^-19 at e^-28),
/// and weights are rounded down by 2^-40 each: log-probabilities by 2^-21 at most, and by half an ulp of the result.
fn assert_near(got: f32, expected: f32, context: &str) {
    let near = (got - expected).abs() <= 2f32.powi(-21) + expected.abs() * f32::EPSILON;
    assert!(near || got == expected, "{context}: {got}, expected {expected}");
}

fn assert_as_on_the_cpu(case: &Case, row: usize, token: u32, top: usize, summary: &Summary, context: &str) {
    let raw = &case.logits[row * case.width..][..case.width];
    let (chosen, best) = log_probabilities(raw, token, top);
    let (got_chosen, got_best) = summary.log_probabilities(top);
    assert_near(got_chosen, chosen, context);
    let ids = |list: &[(u32, f32)]| list.iter().map(|&(token, _)| token).collect::<Vec<_>>();
    assert_eq!(ids(&got_best), ids(&best), "{context}, row {row}");
    got_best.iter().zip(&best).for_each(|(got, expected)| assert_near(got.1, expected.1, context));
}

#[test]
fn emulator_log_probabilities_are_those_of_the_cpu_in_every_way() {
    for width in [1, 7, 263] {
        let case = some_case(4, width);
        let tokens: Vec<u32> = (0..4).map(|row| (row * 5 % width) as u32).collect();
        let wanted = [(3, 20), (0, 0), (1, 5)];
        for device in Emulated::every_way() {
            let context = format!("width {width}, {:?}", device.settings);
            let (summaries, logits) = summaries(&device, &case, case.whole(), &wanted, &tokens);
            for (summary, (row, top)) in summaries.iter().zip(wanted) {
                let row = row as usize;
                assert_as_on_the_cpu(&case, row, tokens[row], top as usize, summary, &context);
                let part = row * width..(row + 1) * width;
                assert_same_bits(&logits[part.clone()], &case.logits[part], "logits given back");
            }
        }
    }
}

#[test]
fn emulator_log_probabilities_of_many_chunks_and_ranks_are_those_of_the_cpu() {
    let (width, token) = (20_001, 17_000);
    let case = some_case(2, width);
    for cuts in [&[0, width][..], &[0, 5000, width], &[0, 1, 9000, 9000, 16_400, width]] {
        let slices = cuts.windows(2).map(|cut| Slice { first: cut[0] as u32, width: cut[1] - cut[0] });
        let parts: Vec<Summary> = slices
            .map(|slice| summaries(&plain(), &case, slice, &[(1, 20)], &[NO_TOKEN, token]).0.remove(0))
            .collect();
        assert_as_on_the_cpu(&case, 1, token, 20, &Summary::merge(&parts), &format!("{cuts:?}"));
    }
}

#[test]
fn emulator_infinite_and_missing_logits_have_sound_log_probabilities() {
    let mut case = Case::random(0, 0, 6);
    let none = f32::NEG_INFINITY;
    for row in [
        [f32::NAN, none, none, none, none, f32::NAN],
        [1.0, f32::INFINITY, f32::NAN, 3.0, f32::INFINITY, none],
    ] {
        case.push(row.to_vec(), SamplingParams::default());
    }
    let (read, _) = summaries(&plain(), &case, case.whole(), &[(0, 3), (1, 3)], &[NO_TOKEN, 4]);
    assert_eq!(read[0].log_probabilities(3), (none, vec![(0, none), (1, none), (2, none)]));
    let half = 0.5f32.ln();
    assert_eq!(read[1].log_probabilities(3), (half, vec![(1, half), (4, half), (3, none)]));
    for (row, token) in [(0, 1), (1, 4)] {
        let raw = &case.logits[6 * row..][..6];
        assert_eq!(read[row].log_probabilities(3), log_probabilities(raw, token, 3));
    }
}
