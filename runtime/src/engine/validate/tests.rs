use consort_parallel::config::GenerationDefaults;

use super::{Limits, Validated, validate};
use crate::{engine::GenerateOptions, error::RequestError};

fn limits() -> Limits {
    Limits {
        vocab_size: 100,
        max_model_len: 50,
        max_waiting_requests: 8,
        eos_token_ids: vec![2, 7],
        defaults: GenerationDefaults {
            temperature: Some(0.6),
            top_k: Some(20),
            ..GenerationDefaults::default()
        },
    }
}

fn check(options: GenerateOptions) -> Result<Validated, RequestError> {
    validate(&options, &limits(), || 42)
}

fn refused(options: GenerateOptions) -> &'static str {
    match check(options) {
        Err(RequestError::Invalid { field, message }) => {
            assert!(!message.is_empty());
            field
        }
        other => panic!("must be refused, got {other:?}"),
    }
}

#[test]
fn absent_options_take_the_checkpoints_defaults_and_a_drawn_seed() {
    let valid = check(GenerateOptions::default()).expect("valid");
    assert_eq!(valid.sampling.temperature, 0.6);
    assert_eq!(valid.sampling.top_k, Some(20));
    assert_eq!(valid.sampling.top_p, 1.0);
    assert_eq!(valid.sampling.min_p, 0.0);
    assert_eq!(valid.sampling.seed, 42);
    assert_eq!(valid.stop_token_ids, [2, 7]);
}

#[test]
fn given_options_win_over_defaults() {
    let options =
        GenerateOptions { temperature: Some(0.0), top_k: Some(-1), seed: Some(5), ..Default::default() };
    let valid = check(options).expect("valid");
    assert_eq!(valid.sampling.temperature, 0.0);
    assert_eq!(valid.sampling.top_k, None);
    assert_eq!(valid.sampling.seed, 5);
}

#[test]
fn every_number_out_of_range_is_refused_by_its_name() {
    let none = GenerateOptions::default;
    for bad in [-0.1, 2.1, f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        assert_eq!(refused(GenerateOptions { temperature: Some(bad), ..none() }), "temperature", "{bad}");
        assert_eq!(refused(GenerateOptions { top_p: Some(bad), ..none() }), "top_p", "{bad}");
        assert_eq!(refused(GenerateOptions { min_p: Some(bad), ..none() }), "min_p", "{bad}");
    }
    assert_eq!(refused(GenerateOptions { top_p: Some(0.0), ..none() }), "top_p");
    assert_eq!(refused(GenerateOptions { top_k: Some(-2), ..none() }), "top_k");
    assert_eq!(refused(GenerateOptions { top_k: Some(i64::MIN), ..none() }), "top_k");
    assert_eq!(refused(GenerateOptions { logprobs: Some(21), ..none() }), "logprobs");
    assert_eq!(refused(GenerateOptions { prompt_logprobs: Some(21), ..none() }), "prompt_logprobs");
    assert_eq!(refused(GenerateOptions { max_tokens: Some(51), ..none() }), "max_tokens");
    assert_eq!(refused(GenerateOptions { max_tokens: Some(usize::MAX), ..none() }), "max_tokens");
}

#[test]
fn the_ends_of_every_range_are_inside() {
    for (temperature, top_p, min_p) in [(0.0, f32::MIN_POSITIVE, 0.0), (2.0, 1.0, 1.0)] {
        let options = GenerateOptions {
            temperature: Some(temperature),
            top_p: Some(top_p),
            min_p: Some(min_p),
            logprobs: Some(20),
            max_tokens: Some(50),
            ..Default::default()
        };
        assert!(check(options).is_ok());
    }
}

#[test]
fn tiny_temperatures_are_raised_and_zero_stays_greedy() {
    let temperature = |value| {
        check(GenerateOptions { temperature: Some(value), ..Default::default() })
            .expect("valid")
            .sampling
            .temperature
    };
    assert_eq!(temperature(1e-6), 0.01);
    assert_eq!(temperature(0.0), 0.0);
    assert_eq!(temperature(-0.0), 0.0);
}

#[test]
fn top_k_beyond_the_vocabulary_keeps_everything() {
    for k in [100, 101, i64::MAX] {
        let valid = check(GenerateOptions { top_k: Some(k), ..Default::default() }).expect("valid");
        assert_eq!(valid.sampling.top_k, None);
    }
}

#[test]
fn a_seed_of_minus_one_is_drawn_and_other_negatives_are_themselves() {
    let seed = |seed| {
        check(GenerateOptions { seed: Some(seed), ..Default::default() }).expect("valid").sampling.seed
    };
    assert_eq!(seed(-1), 42);
    assert_eq!(seed(-2), u64::MAX - 1);
}

#[test]
fn nothing_to_generate_is_allowed_only_with_prompt_logprobs() {
    let options = GenerateOptions { max_tokens: Some(0), ..Default::default() };
    assert_eq!(refused(options.clone()), "max_tokens");
    assert!(check(GenerateOptions { prompt_logprobs: Some(0), ..options }).is_ok());
}

#[test]
fn stop_strings_are_bounded_and_not_empty() {
    let stop = |stop: Vec<String>| GenerateOptions { stop, ..Default::default() };
    assert_eq!(refused(stop(vec![String::new()])), "stop");
    assert_eq!(refused(stop(vec!["a".repeat(1025)])), "stop");
    assert_eq!(refused(stop(vec!["a".into(); 257])), "stop");
    assert!(check(stop(vec!["a".repeat(1024); 256])).is_ok());
}

#[test]
fn stop_tokens_join_the_end_of_sequence_tokens_unless_those_are_ignored() {
    let options = GenerateOptions { stop_token_ids: vec![9, 2, 9], ..Default::default() };
    assert_eq!(check(options.clone()).expect("valid").stop_token_ids, [2, 7, 9]);
    let ignoring = GenerateOptions { ignore_eos: true, ..options };
    assert_eq!(check(ignoring).expect("valid").stop_token_ids, [2, 9]);
}

#[test]
fn stop_tokens_outside_the_vocabulary_or_too_many_are_refused() {
    let stop = |stop_token_ids| GenerateOptions { stop_token_ids, ..Default::default() };
    assert_eq!(refused(stop(vec![100])), "stop_token_ids");
    assert_eq!(refused(stop(vec![1; 257])), "stop_token_ids");
}

#[test]
fn request_ids_are_bounded() {
    let named = |id: &str| GenerateOptions { request_id: Some(id.into()), ..Default::default() };
    assert_eq!(refused(named("")), "request_id");
    assert_eq!(refused(named(&"a".repeat(257))), "request_id");
    assert!(check(named("a")).is_ok());
}
