use super::*;
use crate::testing::Numbers;

const NONE: f32 = f32::NEG_INFINITY;

fn greedy() -> SamplingParams {
    SamplingParams { temperature: 0.0, ..SamplingParams::default() }
}

fn kept(logits: &[f32], params: &SamplingParams) -> Vec<usize> {
    let mut logits = logits.to_vec();
    keep_candidates(&mut logits, params);
    (0..logits.len()).filter(|&i| logits[i] > NONE).collect()
}

/// Logits of given probabilities.
fn ln(probabilities: &[f32]) -> Vec<f32> {
    probabilities.iter().map(|p| p.ln()).collect()
}

#[test]
fn greedy_ties_go_to_the_lowest_id_and_nan_never_wins() {
    assert_eq!(sample(&mut [1.0, 3.0, 3.0, 2.0], &greedy(), 0), Some(1));
    assert_eq!(sample(&mut [f32::NAN, -1.0, f32::NAN], &greedy(), 0), Some(1));
    assert_eq!(sample(&mut [f32::NAN, 0.5, f32::NAN], &SamplingParams::default(), 9), Some(1));
}

#[test]
fn a_row_without_a_single_number_yields_no_token() {
    for params in [greedy(), SamplingParams::default()] {
        assert_eq!(sample(&mut [f32::NAN; 3], &params, 0), None);
        assert_eq!(sample(&mut [NONE; 3], &params, 0), None);
        assert_eq!(sample(&mut [], &params, 0), None);
    }
}

#[test]
fn filters_keep_what_their_definitions_say() {
    let p = |top_p, top_k, min_p| SamplingParams { top_p, top_k, min_p, ..SamplingParams::default() };
    let logits = ln(&[0.1, 0.4, 0.2, 0.3]);
    assert_eq!(kept(&logits, &p(1.0, Some(2), 0.0)), [1, 3]);
    assert_eq!(kept(&logits, &p(1.0, Some(1), 0.0)), [1]);
    assert_eq!(kept(&logits, &p(0.65, None, 0.0)), [1, 3]);
    assert_eq!(kept(&logits, &p(0.85, None, 0.0)), [1, 2, 3]);
    assert_eq!(kept(&logits, &p(1e-6, None, 0.0)), [1]);
    assert_eq!(kept(&logits, &p(1.0, None, 0.6)), [1, 3]);
    assert_eq!(kept(&logits, &p(1.0, None, 1.0)), [1]);
    // top-p counts what top-k left: 0.4 and 0.3 become 4/7 and 3/7.
    assert_eq!(kept(&logits, &p(0.55, Some(2), 0.0)), [1]);
    assert_eq!(kept(&logits, &p(0.60, Some(2), 0.0)), [1, 3]);
    // Ties: top-k keeps equals of its last, top-p prefers lower ids.
    assert_eq!(kept(&[1.0, 1.0, 1.0, 0.0], &p(1.0, Some(2), 0.0)), [0, 1, 2]);
    assert_eq!(kept(&[0.0; 4], &p(0.5, None, 0.0)), [0, 1]);
}

#[test]
fn top_p_without_sorting_the_tail_equals_the_plain_definition() {
    for case in 0..200 {
        let mut numbers = Numbers(case);
        let logits: Vec<f32> = numbers.vec(500).iter().map(|x| x * 6.0).collect();
        let top_p = 0.05 + 0.9 * (numbers.f32() + 1.0) / 2.0;
        let largest = logits.iter().copied().fold(NONE, f32::max);
        let weights: Vec<f64> = logits.iter().map(|l| f64::from((l - largest).exp())).collect();
        let total: f64 = weights.iter().sum();
        let mut order: Vec<usize> = (0..500).collect();
        order.sort_by(|&a, &b| weights[a].total_cmp(&weights[b]).then(b.cmp(&a)));
        let mut spent = 0.0;
        let mut expected: Vec<usize> = order
            .iter()
            .enumerate()
            .filter(|&(rank, &token)| {
                spent += weights[token];
                rank == 499 || spent > (1.0 - f64::from(top_p)) * total
            })
            .map(|(_, &token)| token)
            .collect();
        expected.sort_unstable();
        assert_eq!(
            kept(&logits, &SamplingParams { top_p, ..SamplingParams::default() }),
            expected,
            "case {case}"
        );
    }
}

#[test]
fn a_draw_depends_on_seed_and_position_alone() {
    let logits = Numbers(1).vec(1000);
    let draw = |seed, position| {
        sample(&mut logits.clone(), &SamplingParams { seed, ..Default::default() }, position).unwrap()
    };
    assert_eq!(draw(7, 3), draw(7, 3));
    let by_position: Vec<u32> = (0..50).map(|position| draw(7, position)).collect();
    let by_seed: Vec<u32> = (0..50).map(|seed| draw(seed, 7)).collect();
    for draws in [by_position, by_seed] {
        let distinct: std::collections::HashSet<u32> = draws.iter().copied().collect();
        assert!(distinct.len() > 35, "{} distinct of 50", distinct.len());
    }
}

#[test]
fn frequencies_of_draws_follow_the_softmax() {
    let probabilities = [0.5, 0.25, 0.125, 0.0625, 0.0625];
    let logits = ln(&probabilities);
    let draws = 40_000;
    for temperature in [1.0f32, 0.7] {
        let weights: Vec<f32> = probabilities.iter().map(|p| p.powf(1.0 / temperature)).collect();
        let total: f32 = weights.iter().sum();
        let mut counts = [0usize; 5];
        for position in 0..draws {
            let params = SamplingParams { seed: 99, temperature, ..Default::default() };
            counts[sample(&mut logits.clone(), &params, position).unwrap() as usize] += 1;
        }
        for (count, weight) in counts.iter().zip(&weights) {
            let p = f64::from(weight / total);
            let deviation = (draws as f64 * p * (1.0 - p)).sqrt();
            assert!(
                (*count as f64 - draws as f64 * p).abs() < 4.0 * deviation,
                "{counts:?} at {temperature}"
            );
        }
    }
}

#[test]
fn the_shortcut_of_the_draw_never_changes_its_result() {
    for case in 0..300u64 {
        let logits: Vec<f32> = Numbers(case).vec(400).iter().map(|x| x * 12.0).collect();
        let key = random_key(case);
        let expected = (0..400u32)
            .map(|token| (token, f64::from(logits[token as usize]) - libm::log(-libm::log(key(token)))))
            .fold((0, f64::NEG_INFINITY), |best, next| if next.1 > best.1 { next } else { best });
        assert_eq!(gumbel_argmax(&logits, case, 5), expected.0);
    }
}

fn random_key(seed: u64) -> impl Fn(u32) -> f64 {
    move |token| super::random::uniform_of(seed, 5, token)
}

#[test]
fn log_probabilities_sum_to_one_and_rank_ties_by_id() {
    let logits = ln(&[0.125, 0.5, 0.125, 0.25]);
    let (of, top) = log_probabilities(&logits, 3, 4);
    assert!((of - 0.25f32.ln()).abs() < 1e-6);
    assert_eq!(top.iter().map(|(token, _)| *token).collect::<Vec<_>>(), [1, 3, 0, 2]);
    assert!((top.iter().map(|(_, l)| l.exp()).sum::<f32>() - 1.0).abs() < 1e-6);
    assert_eq!(log_probabilities(&logits, 1, 0).1, []);
    assert_eq!(log_probabilities(&logits, 1, 9).1.len(), 4);
}
