use std::collections::BTreeMap;

use super::{Adjustments, TokenHistory};
use crate::testing::Numbers;

const NONE: f32 = f32::NEG_INFINITY;

fn history(prompt: &[u32], output: &[u32], adjustments: &Adjustments) -> TokenHistory {
    let mut history = TokenHistory::new(prompt.len(), adjustments);
    history.extend(prompt);
    history.extend(output);
    history
}

/// The row after `adjustments`, each token looked at by itself.
fn by_definition(before: &[f32], prompt: &[u32], output: &[u32], adjustments: &Adjustments) -> Vec<f32> {
    let one = |(token, &logit): (usize, &f32)| {
        let token = token as u32;
        let count = output.iter().filter(|&&seen| seen == token).count();
        let masked = adjustments.masked_until_min.contains(&token);
        let mut logit = if masked && output.len() < adjustments.min_tokens as usize { NONE } else { logit };
        for (_, bias) in adjustments.logit_bias.iter().filter(|(biased, _)| *biased == token) {
            logit += bias;
        }
        if count > 0 || prompt.contains(&token) {
            let penalty = adjustments.repetition_penalty;
            logit = if logit > 0.0 { logit / penalty } else { logit * penalty };
        }
        logit -= adjustments.frequency_penalty * count as f32;
        logit - if count > 0 { adjustments.presence_penalty } else { 0.0 }
    };
    before.iter().enumerate().map(one).collect()
}

fn bits(row: &[f32]) -> Vec<u32> {
    row.iter().map(|logit| logit.to_bits()).collect()
}

/// One case of the fixture: numbers by key.
struct Case<'a>(BTreeMap<&'a str, &'a str>);

impl Case<'_> {
    fn numbers<T: std::str::FromStr<Err: std::fmt::Debug>>(&self, key: &str) -> Vec<T> {
        self.0[key].split_whitespace().map(|number| number.parse().unwrap()).collect()
    }

    fn row(&self, key: &str) -> Vec<f32> {
        self.numbers(key).into_iter().map(f32::from_bits).collect()
    }
}

#[test]
fn rows_equal_those_of_transformers_bit_for_bit() {
    let text = include_str!("../../../fixtures/adjustments.txt");
    let cases: Vec<Case<'_>> = text
        .split("\n\n")
        .map(|case| Case(case.lines().map(|line| line.split_once(':').unwrap()).collect()))
        .collect();
    assert_eq!(cases.len(), 11);
    let mut changed = 0;
    for (number, case) in cases.iter().enumerate() {
        let one = |key: &str| case.numbers::<f32>(key)[0];
        let adjustments = Adjustments {
            min_tokens: case.numbers("min_tokens")[0],
            masked_until_min: case.numbers("stop"),
            logit_bias: case.numbers("bias_ids").into_iter().zip(case.numbers("bias")).collect(),
            repetition_penalty: one("repetition"),
            frequency_penalty: one("frequency"),
            presence_penalty: one("presence"),
        };
        let (prompt, output) = (case.numbers("prompt"), case.numbers("output"));
        let (before, after) = (case.row("before"), case.row("after"));
        let mut row = before.clone();
        adjustments.apply(&mut row, &history(&prompt, &output, &adjustments));
        assert_eq!(bits(&row), bits(&after), "case {number}");
        let definition = by_definition(&before, &prompt, &output, &adjustments);
        assert_eq!(bits(&definition), bits(&after), "case {number}: the tests' own definition");
        changed += usize::from(before != after);
    }
    assert_eq!(changed, 9, "all but the neutral one and the one whose minimum is reached");
}

#[test]
fn random_adjustments_equal_the_plain_definition() {
    for seed in 0..300 {
        let mut numbers = Numbers(seed);
        let mut below = |bound: u32| ((numbers.f32() + 1.0) / 2.0 * bound as f32) as u32 % bound;
        let prompt: Vec<u32> = (0..1 + below(30)).map(|_| below(60)).collect();
        let output: Vec<u32> = (0..below(30)).map(|_| below(60)).collect();
        let on = |below: &mut dyn FnMut(u32) -> u32| below(2) == 1;
        let adjustments = Adjustments {
            min_tokens: below(30),
            masked_until_min: (0..below(4)).map(|_| below(64)).collect(),
            logit_bias: (0..below(8)).map(|token| (token * 7, below(200) as f32 - 100.0)).collect(),
            repetition_penalty: if on(&mut below) { 0.5 + below(100) as f32 / 50.0 } else { 1.0 },
            frequency_penalty: if on(&mut below) { below(400) as f32 / 100.0 - 2.0 } else { 0.0 },
            presence_penalty: if on(&mut below) { below(400) as f32 / 100.0 - 2.0 } else { 0.0 },
        };
        let before: Vec<f32> = Numbers(seed + 1000).vec(60).iter().map(|x| x * 8.0).collect();
        let mut row = before.clone();
        adjustments.apply(&mut row, &history(&prompt, &output, &adjustments));
        assert_eq!(bits(&row), bits(&by_definition(&before, &prompt, &output, &adjustments)), "seed {seed}");
    }
}

#[test]
fn the_prompt_counts_for_repetition_alone() {
    let apply = |adjustments: Adjustments| {
        let mut row = [4.0, -4.0, 4.0, -4.0];
        adjustments.apply(&mut row, &history(&[0, 1], &[2, 2], &adjustments));
        row
    };
    let none = Adjustments::default;
    assert_eq!(apply(Adjustments { repetition_penalty: 2.0, ..none() }), [2.0, -8.0, 2.0, -4.0]);
    assert_eq!(apply(Adjustments { frequency_penalty: 1.5, ..none() }), [4.0, -4.0, 1.0, -4.0]);
    assert_eq!(apply(Adjustments { presence_penalty: 1.5, ..none() }), [4.0, -4.0, 2.5, -4.0]);
}

#[test]
fn replayed_tokens_count_as_generated_however_they_are_cut() {
    let adjustments = Adjustments { frequency_penalty: 1.0, repetition_penalty: 1.5, ..Default::default() };
    let (prompt, output) = ([3, 1, 3], [1, 1, 2, 3]);
    let all: Vec<u32> = prompt.into_iter().chain(output).collect();
    let whole = history(&prompt, &output, &adjustments);
    for cut in 0..=all.len() {
        let mut replayed = TokenHistory::new(prompt.len(), &adjustments);
        replayed.extend(&all[..cut]);
        replayed.extend(&all[cut..]);
        assert_eq!(replayed.counts, whole.counts, "cut at {cut}");
        assert_eq!((replayed.generated, replayed.len), (4, 7), "cut at {cut}");
    }
}

#[test]
fn the_mask_ends_with_the_minimum_and_needs_no_counts() {
    let adjustments = Adjustments { min_tokens: 2, masked_until_min: vec![1, 99], ..Default::default() };
    let mut history = TokenHistory::new(2, &adjustments);
    history.extend(&[5, 6]);
    for (generated, expected) in [(0, NONE), (1, NONE), (2, 7.0), (3, 7.0)] {
        assert_eq!(history.generated, generated);
        let mut row = [1.0, 7.0];
        adjustments.apply(&mut row, &history);
        assert_eq!(row, [1.0, expected], "after {generated} tokens");
        history.extend(&[0]);
    }
    assert_eq!(history.kept(), 0);
}

#[test]
fn a_history_keeps_only_what_a_penalty_asks_for() {
    let kept = |adjustments: Adjustments| history(&[1, 2, 3], &[4, 4], &adjustments).kept();
    let none = Adjustments::default;
    assert_eq!(kept(none()), 0);
    assert_eq!(kept(Adjustments { logit_bias: vec![(1, 5.0)], ..none() }), 0);
    assert_eq!(kept(Adjustments { presence_penalty: 0.1, ..none() }), 1);
    assert_eq!(kept(Adjustments { repetition_penalty: 1.1, ..none() }), 4);
}

#[test]
fn a_row_that_is_masked_whole_yields_no_token_and_broken_numbers_no_panic() {
    let adjustments = Adjustments {
        min_tokens: 1,
        masked_until_min: vec![0, 1],
        logit_bias: vec![(0, 100.0), (7, 1.0)],
        repetition_penalty: 100.0,
        frequency_penalty: 2.0,
        ..Default::default()
    };
    let history = history(&[0, 1], &[], &adjustments);
    let mut row = [1.0, 2.0];
    adjustments.apply(&mut row, &history);
    assert_eq!(row, [NONE, NONE], "a bias does not lift the mask");
    let params = crate::sampling::SamplingParams { adjustments, ..Default::default() };
    assert_eq!(crate::sampling::sample(&mut row, &params, 2), None);
    let mut row = [f32::NAN, f32::MAX, f32::INFINITY];
    params.adjustments.apply(&mut row, &history);
    assert_eq!(crate::sampling::sample(&mut row, &params, 2), Some(2));
}
