//! A vocabulary cut over ranks.

use super::{
    cases::{self, Case, Surveyed, surveyed_in, workspace},
    *,
};

/// Slices of the given shares of the width; the last takes the rest.
fn slices(width: usize, shares: &[usize]) -> Vec<Slice> {
    let total: usize = shares.iter().sum();
    let (mut first, mut slices) = (0, Vec::new());
    for (at, share) in shares.iter().enumerate() {
        let width = if at + 1 == shares.len() { width - first } else { width * share / total };
        slices.push(Slice { first: first as u32, width });
        first += width;
    }
    slices
}

/// Tokens and marks of incomplete rows, as every rank gets them.
fn over_ranks(device: &Emulated, case: &Case, slices: &[Slice], capacity: usize) -> (Vec<u32>, Vec<u32>) {
    let (rows, ranks) = (case.rows(), slices.len());
    let mut memories: Vec<Memory<u32>> = slices.iter().map(|_| workspace(rows)).collect();
    let runs: Vec<Surveyed> = slices
        .iter()
        .zip(&mut memories)
        .map(|(&slice, memory)| surveyed_in(device, case, slice, memory))
        .collect();
    let gathered: Vec<u32> = runs.iter().flat_map(|run| run.standings.to_vec()).collect();
    let standing_memory = Memory::from_slice(&gathered);
    let standings = Standings { words: device_slice(&standing_memory), ranks };
    let (mut all_draws, mut all_candidates) = (Vec::new(), Vec::new());
    for (run, memory) in runs.iter().zip(&mut memories) {
        let mut workspace = Workspace::new(device_slice_mut(memory), rows).unwrap();
        let (requests, logits) = (run.requests.requests(), device_slice(&run.logits));
        let mut draws = Memory::<u32>::poisoned(draw_words(rows));
        let mut listed = Memory::<u32>::poisoned(candidate_words(rows, capacity));
        let into = device_slice_mut(&mut listed);
        candidates(device, requests, logits, standings, &mut workspace, capacity, into).unwrap();
        draw_slice(device, requests, logits, standings, &mut workspace, device_slice_mut(&mut draws))
            .unwrap();
        all_draws.extend(draws.to_vec());
        all_candidates.extend(listed.to_vec());
    }
    let (draws, candidates) = (Memory::from_slice(&all_draws), Memory::from_slice(&all_candidates));
    let mut tokens = Memory::<u32>::poisoned(rows);
    let mut incomplete = Memory::<u32>::poisoned(rows);
    merge(
        device,
        runs[0].requests.requests(),
        Gathered { standings, draws: device_slice(&draws), candidates: device_slice(&candidates), capacity },
        device_slice_mut(&mut tokens),
        device_slice_mut(&mut incomplete),
    )
    .unwrap();
    (tokens.to_vec(), incomplete.to_vec())
}

const CUTS: [&[usize]; 5] = [&[1], &[3, 2], &[5, 1, 3], &[1, 0, 1], &[2, 7, 1, 4, 3]];

#[test]
fn emulator_ranks_that_list_all_agree_with_one_rank_and_the_cpu() {
    let rows = many_or(8, 1);
    for (seed, width) in [(1, 1), (2, 97), (3, 263), (4, 263), (5, 3000)] {
        let case = Case::random(seed, rows, width);
        assert_eq!(cases::single(&plain(), &case), case.tokens());
        for shares in CUTS {
            let (tokens, incomplete) =
                over_ranks(&shuffled(seed), &case, &slices(width, shares), width.max(8));
            assert_eq!(incomplete, vec![0; rows]);
            assert_eq!(tokens, case.tokens(), "{shares:?} of {width}");
        }
    }
}

#[test]
fn emulator_ranks_agree_in_every_way() {
    let case = Case::random(9, 3, 41);
    for device in Emulated::every_way() {
        let (tokens, incomplete) = over_ranks(&device, &case, &slices(41, &[1, 2]), 32);
        assert_eq!((tokens, incomplete), (case.tokens(), vec![0; 3]), "{:?}", device.settings);
    }
}

#[test]
fn emulator_few_candidates_yield_the_right_token_or_none() {
    let (mut complete, mut cut) = (0, 0);
    for seed in 0..many_or(24, 1) {
        let case = Case::random(50 + seed, 8, 500);
        let expected = case.tokens();
        for shares in [CUTS[1], CUTS[4]] {
            let (tokens, incomplete) = over_ranks(&plain(), &case, &slices(500, shares), 16);
            for (row, &token) in tokens.iter().enumerate() {
                if incomplete[row] == 1 {
                    assert_eq!(token, NO_TOKEN);
                    cut += 1;
                } else {
                    assert_eq!((token, incomplete[row]), (expected[row], 0), "seed {seed}, row {row}");
                    complete += 1;
                }
            }
        }
    }
    assert!(many_or(complete > 250 && cut > 30, complete > 0), "{complete} complete, {cut} not");
}

#[test]
fn emulator_as_many_candidates_as_top_k_always_suffice() {
    let mut case = Case::random(0, 0, 1000);
    let rows = many_or(12, 2);
    for seed in 0..rows as u64 {
        let top_p = if seed % 2 == 0 { 0.9 } else { 1.0 };
        let params = SamplingParams { top_k: Some(20), top_p, seed, ..Default::default() };
        case.push(cases::bell(&mut Numbers(seed), 1000), params);
    }
    for shares in CUTS {
        let (tokens, incomplete) = over_ranks(&plain(), &case, &slices(1000, shares), 20);
        assert_eq!((tokens, incomplete), (case.tokens(), vec![0; rows]), "{shares:?}");
    }
}

#[test]
fn emulator_more_candidates_than_one_block_compares_are_told_apart() {
    let mut case = Case::random(0, 0, 6000);
    let equal = |top_k, top_p, seed| SamplingParams { top_k, top_p, seed, ..Default::default() };
    case.push(vec![3.0; 6000], equal(None, 0.4, 1));
    case.push(vec![3.0; 6000], equal(Some(5), 0.7, 2));
    case.push(vec![3.0; 6000], equal(Some(5), 1.0, 3));
    let (tokens, incomplete) = over_ranks(&plain(), &case, &slices(6000, &[1, 2]), 4000);
    assert_eq!((tokens, incomplete), (case.tokens(), vec![0; 3]));
}
