mod cases;
mod ranks;
mod summaries;

use std::collections::BTreeSet;

use cases::{Case, single};
use consort_emulator::{Copies, Memory, Order, Settings};

use super::*;
use crate::{
    sampling::{Adjustments, SamplingParams},
    testing::{
        Numbers, assert_same_bits,
        emulated::{Emulated, device_slice, device_slice_mut},
    },
};

fn plain() -> Emulated {
    Emulated { settings: Settings::PLAIN, multiprocessors: 4 }
}

fn shuffled(seed: u64) -> Emulated {
    let settings = Settings { order: Order::Shuffled, copies: Copies::AtOnce, seed };
    Emulated { settings, multiprocessors: 4 }
}

/// `many`, or under the race detector, which is fifty times slower and needs no repetition, `few`.
fn many_or<T>(many: T, few: T) -> T {
    if option_env!("CONSORT_SANITIZE") == Some("thread") { few } else { many }
}

#[test]
fn emulator_rows_of_every_kind_get_the_tokens_of_the_cpu_in_every_way() {
    for (seed, width) in [(1, 1), (2, 7), (3, 97), (4, 263)] {
        let case = Case::random(seed, 5, width);
        for device in Emulated::every_way() {
            let context = format!("width {width}, {:?}", device.settings);
            assert_eq!(single(&device, &case), case.tokens(), "{context}");
        }
    }
}

#[test]
fn emulator_thousands_of_random_rows_get_the_tokens_of_the_cpu() {
    let mut distinct = BTreeSet::new();
    for seed in 0..many_or(84, 2) {
        let case = Case::random(100 + seed, 24, [97, 263, 97, 263, 97, 1100][seed as usize % 6]);
        let tokens = single(&plain(), &case);
        assert_eq!(tokens, case.tokens(), "seed {seed}");
        distinct.extend(tokens);
    }
    assert!(distinct.len() > many_or(300, 10), "{} distinct tokens", distinct.len());
}

#[test]
fn emulator_a_row_over_many_blocks_gets_the_token_of_the_cpu() {
    for (seed, width, multiprocessors) in [(7, 4096, 132), (8, 4099, 3), (9, 12_288, 4)] {
        let case = Case::random(seed, many_or(8, 1), width);
        let device = Emulated { multiprocessors, ..shuffled(seed) };
        assert_eq!(single(&device, &case), case.tokens(), "width {width}");
    }
}

#[test]
fn emulator_a_large_vocabulary_gets_the_token_of_the_cpu() {
    let width = many_or(50_000, 3000);
    let mut case = Case::random(10, 0, width);
    let mut add = |values: Vec<f32>, temperature: f32, top_k: Option<u32>, top_p: f32, min_p: f32| {
        case.push(values, SamplingParams { temperature, top_k, top_p, min_p, seed: 5, ..Default::default() });
    };
    let bell = |seed: u64| cases::bell(&mut Numbers(seed), width);
    add(bell(1), 0.0, None, 1.0, 0.0);
    add(bell(2), 1.0, Some(50), 0.95, 0.0);
    add(bell(3), 1.0, None, 0.9, 0.02);
    add(bell(4), 2.0, Some(20_000), 0.999, 0.0);
    add(bell(5), 1e6, Some(30_000), 0.5, 0.0);
    // More equal logits than one block compares with each other: digits of ids decide.
    add(vec![1.5; width], 1.0, Some(7), 0.3, 0.0);
    let device = Emulated { multiprocessors: 132, ..plain() };
    assert_eq!(single(&device, &case), case.tokens());
}

#[test]
fn emulator_filters_end_at_the_same_token_as_on_the_cpu() {
    // At the temperature 1e6 a draw is uniform over what is left: a boundary off by one token shows in some of the
    // draws.
    let values: Vec<f32> = (0..64).map(|token| (token % 8) as f32).collect();
    for (top_k, top_p) in [(Some(9), 1.0), (Some(16), 0.4), (None, 0.26), (None, 0.9)] {
        let mut case = Case::random(0, 0, 64);
        for seed in 0..many_or(60, 8) {
            let params = SamplingParams { temperature: 1e6, top_k, top_p, seed, ..Default::default() };
            case.push(values.clone(), params);
        }
        let tokens = single(&plain(), &case);
        assert_eq!(tokens, case.tokens());
        let distinct: BTreeSet<u32> = tokens.into_iter().collect();
        assert!(distinct.len() > many_or(4, 1), "{distinct:?}");
    }
}

#[test]
fn emulator_equal_logits_are_cut_by_id() {
    // Ten, and more than one block compares: of 3000 equal logits top-p 0.5 keeps the lower half, top-k all.
    for width in [10, 3000] {
        let mut case = Case::random(0, 0, width);
        for seed in 0..many_or(12, 2) {
            let of = |top_k, top_p| SamplingParams { top_k, top_p, seed, ..Default::default() };
            case.push(vec![-2.0; width], of(None, 0.5));
            case.push(vec![-2.0; width], of(Some(1), 1.0));
        }
        let tokens = single(&plain(), &case);
        assert_eq!(tokens, case.tokens());
        let (halves, whole): (Vec<_>, Vec<_>) = tokens.chunks(2).map(|pair| (pair[0], pair[1])).unzip();
        assert!(halves.iter().all(|token| (*token as usize) < width / 2), "{halves:?}");
        assert!(many_or(whole.iter().any(|token| *token as usize >= width / 2), true), "{whole:?}");
    }
}

#[test]
fn emulator_a_row_depends_neither_on_its_company_nor_on_the_cut() {
    let case = Case::random(21, many_or(9, 1), 5000);
    let together = single(&plain(), &case);
    assert_eq!(together, case.tokens());
    for (row, &token) in together.iter().enumerate() {
        for multiprocessors in [1, 5, 132] {
            let device = Emulated { multiprocessors, ..plain() };
            assert_eq!(single(&device, &case.only(row)), [token], "row {row}, {multiprocessors}");
        }
    }
}

#[test]
fn emulator_changed_logits_are_those_of_the_cpu_bit_by_bit_and_come_back() {
    for device in Emulated::every_way() {
        let case = Case::random(31, 6, 97);
        let run = cases::surveyed(&device, &case);
        assert_same_bits(&run.logits.to_vec(), &case.changed(), "changed logits");
        let (entries, before) = (case.batch().entry_words().to_vec(), run.before.to_vec());
        assert!(entries.len() > 100, "changes are tested");
        for (at, entry) in entries.chunks(4).enumerate() {
            let (row, token) = (case.row_of_entry(at), entry[0] as usize);
            let is_first = at == 0 || entries[4 * (at - 1)] != entry[0] || case.row_of_entry(at - 1) != row;
            if token < 97 && is_first {
                assert_eq!(before[at].to_bits(), case.logits[row * 97 + token].to_bits(), "entry {at}");
            }
        }
    }
}

#[test]
fn emulator_the_workspace_is_left_as_it_must_be_found() {
    let case = Case::random(41, 6, 3000);
    let mut memory = cases::workspace(case.rows());
    let first = cases::single_in(&shuffled(1), &case, &mut memory);
    let second = cases::single_in(&shuffled(2), &case, &mut memory);
    assert_eq!((&first, &second), (&case.tokens(), &case.tokens()));
}

#[test]
fn emulator_a_batch_without_rows_or_tokens_is_well() {
    assert_eq!(single(&plain(), &Case::random(0, 0, 8)), [0; 0]);
    let mut case = Case::random(0, 0, 0);
    case.push(Vec::new(), SamplingParams::default());
    case.push(Vec::new(), SamplingParams { temperature: 0.0, ..Default::default() });
    assert_eq!(single(&plain(), &case), [NO_TOKEN, NO_TOKEN]);
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let device = plain();
    let case = Case::random(1, 2, 8);
    let mut run = cases::surveyed(&device, &case);
    let mut words = cases::workspace(1);
    let mut small = Workspace::new(device_slice_mut(&mut words), 1).unwrap();
    let requests = run.requests.requests();
    let mut standings = Memory::<u32>::poisoned(standing_words(2));
    let refused = survey(
        &device,
        requests,
        device_slice_mut(&mut run.logits),
        None,
        &mut small,
        device_slice_mut(&mut standings),
        None,
    );
    assert!(matches!(refused, Err(KernelError::OutOfRange { got: 2, limit: 2, .. })), "{refused:?}");
    let wide = Requests { slice: Slice { first: 0, width: WIDTH_MAX + 1 }, ..requests };
    let refused = check(
        wide,
        2 * (WIDTH_MAX + 1),
        &Workspace::new(device_slice_mut(&mut cases::workspace(2)), 2).unwrap(),
    );
    assert!(matches!(refused, Err(KernelError::OutOfRange { what: "last token", .. })), "{refused:?}");
    assert!(matches!(check_capacity(0), Err(KernelError::Unsupported { .. })));
    let refused = Workspace::new(device_slice_mut(&mut words), 2);
    assert!(matches!(refused, Err(KernelError::Length { argument: "workspace", .. })));
}
