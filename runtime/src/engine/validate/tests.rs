use consort_parallel::config::GenerationDefaults;

use serde_json::{Map, Value, json};

use super::{
    Limits, MESSAGES_MAX, PROMPTS_MAX, TEMPLATE_KWARGS_BYTES_MAX, Validated, choices, messages, prompts,
    template_kwargs, validate,
};
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
    validate(&options, &limits())
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
fn absent_options_take_the_checkpoints_defaults_and_no_seed() {
    let valid = check(GenerateOptions::default()).expect("valid");
    assert_eq!(valid.sampling.temperature, 0.6);
    assert_eq!(valid.sampling.top_k, Some(20));
    assert_eq!(valid.sampling.top_p, 1.0);
    assert_eq!(valid.sampling.min_p, 0.0);
    assert_eq!(valid.seed, None);
    assert_eq!(valid.stop_token_ids, [2, 7]);
    assert_eq!((valid.priority, valid.cache_salt), (0, None));
}

#[test]
fn priorities_are_all_numbers_and_salts_are_told_by_their_text() {
    for priority in [i32::MIN, -1, 0, i32::MAX] {
        assert_eq!(
            check(GenerateOptions { priority, ..Default::default() }).expect("valid").priority,
            priority
        );
    }
    let salt = |text: &str| {
        let options = GenerateOptions { cache_salt: Some(text.to_owned()), ..Default::default() };
        check(options).expect("valid").cache_salt.expect("a salt")
    };
    assert_eq!(salt("a"), salt("a"));
    assert_ne!(salt("a"), salt("b"));
    assert_ne!(salt("a"), salt(&"a".repeat(1024)));
}

#[test]
fn given_options_win_over_defaults() {
    let options =
        GenerateOptions { temperature: Some(0.0), top_k: Some(-1), seed: Some(5), ..Default::default() };
    let valid = check(options).expect("valid");
    assert_eq!(valid.sampling.temperature, 0.0);
    assert_eq!(valid.sampling.top_k, None);
    assert_eq!(valid.seed, Some(5));
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
    assert_eq!(refused(GenerateOptions { cache_salt: Some(String::new()), ..none() }), "cache_salt");
    assert_eq!(refused(GenerateOptions { cache_salt: Some("x".repeat(1025)), ..none() }), "cache_salt");
    assert_eq!(refused(GenerateOptions { max_tokens: Some(51), ..none() }), "max_tokens");
    assert_eq!(refused(GenerateOptions { max_tokens: Some(usize::MAX), ..none() }), "max_tokens");
}

#[test]
fn penalties_out_of_range_are_refused_by_their_names() {
    let none = GenerateOptions::default;
    for bad in [-2.1, 2.1, f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let options = GenerateOptions { frequency_penalty: Some(bad), ..none() };
        assert_eq!(refused(options), "frequency_penalty", "{bad}");
        let options = GenerateOptions { presence_penalty: Some(bad), ..none() };
        assert_eq!(refused(options), "presence_penalty", "{bad}");
        let options = GenerateOptions { logit_bias: [(5, bad * 50.0)].into(), ..none() };
        assert_eq!(refused(options), "logit_bias", "{bad}");
    }
    for bad in [0.0, -1.0, 0.009, 100.1, f32::NAN, f32::INFINITY] {
        let options = GenerateOptions { repetition_penalty: Some(bad), ..none() };
        assert_eq!(refused(options), "repetition_penalty", "{bad}");
    }
    for (penalty, repetition, bias) in [(-2.0, 0.01, -100.0), (2.0, 100.0, 100.0)] {
        let valid = check(GenerateOptions {
            frequency_penalty: Some(penalty),
            presence_penalty: Some(penalty),
            repetition_penalty: Some(repetition),
            logit_bias: [(99, bias), (3, 1.0)].into(),
            ..none()
        });
        let adjustments = valid.expect("the ends are inside").sampling.adjustments;
        assert_eq!(adjustments.logit_bias, [(3, 1.0), (99, bias)]);
        assert_eq!((adjustments.frequency_penalty, adjustments.repetition_penalty), (penalty, repetition));
    }
}

#[test]
fn absent_penalties_are_neutral_but_for_the_checkpoints_repetition() {
    let neutral = check(GenerateOptions::default()).expect("valid").sampling.adjustments;
    assert_eq!(neutral, Default::default());
    let mut limits = limits();
    limits.defaults.repetition_penalty = Some(1.2);
    let repetition = |options: GenerateOptions| {
        validate(&options, &limits).expect("valid").sampling.adjustments.repetition_penalty
    };
    assert_eq!(repetition(GenerateOptions::default()), 1.2);
    assert_eq!(repetition(GenerateOptions { repetition_penalty: Some(1.0), ..Default::default() }), 1.0);
}

#[test]
fn biased_tokens_are_in_the_vocabulary_and_not_too_many() {
    let bias = |ids: std::ops::Range<u32>| GenerateOptions {
        logit_bias: ids.map(|id| (id, 1.0)).collect(),
        ..Default::default()
    };
    assert!(check(bias(0..100)).is_ok());
    assert_eq!(refused(bias(100..101)), "logit_bias");
    assert_eq!(refused(bias(0..1025)), "logit_bias");
}

#[test]
fn a_minimum_masks_every_end_also_ignored_ones_and_stays_within_bounds() {
    let min = |min_tokens| GenerateOptions { min_tokens, stop_token_ids: vec![9], ..Default::default() };
    let valid = check(min(5)).expect("valid");
    assert_eq!(valid.sampling.adjustments.masked_until_min, [2, 7, 9]);
    assert_eq!((valid.min_tokens, valid.sampling.adjustments.min_tokens), (5, 5));
    let ignoring = check(GenerateOptions { ignore_eos: true, ..min(5) }).expect("valid");
    assert_eq!(ignoring.sampling.adjustments.masked_until_min, [2, 7, 9]);
    assert_eq!(ignoring.stop_token_ids, [9]);
    assert!(check(min(0)).expect("valid").sampling.adjustments.masked_until_min.is_empty());

    assert!(check(GenerateOptions { max_tokens: Some(5), ..min(5) }).is_ok());
    assert_eq!(refused(GenerateOptions { max_tokens: Some(4), ..min(5) }), "min_tokens");
    assert_eq!(refused(min(51)), "min_tokens");
    assert_eq!(refused(min(usize::MAX)), "min_tokens");
    let everything = GenerateOptions { stop_token_ids: (0..100).collect(), ..min(1) };
    assert_eq!(refused(everything), "min_tokens");
}

#[test]
fn choices_are_counted_and_can_all_wait() {
    let field = |n, prompts| match choices(n, prompts, &limits()) {
        Ok(()) => "",
        Err(RequestError::Invalid { field, .. }) => field,
        Err(other) => panic!("{other}"),
    };
    assert_eq!((field(1, 8), field(8, 1), field(2, 4)), ("", "", ""));
    assert_eq!((field(0, 1), field(129, 1), field(usize::MAX, usize::MAX)), ("n", "n", "n"));
    assert_eq!((field(9, 1), field(3, 3), field(1, 9)), ("n", "n", "prompt"));
}

#[test]
fn prompts_and_messages_are_counted_and_template_variables_measured() {
    let field = |checked| match checked {
        Ok(()) => "",
        Err(RequestError::Invalid { field, .. }) => field,
        Err(other) => panic!("{other}"),
    };
    assert_eq!((field(prompts(1)), field(prompts(PROMPTS_MAX))), ("", ""));
    assert_eq!((field(prompts(0)), field(prompts(PROMPTS_MAX + 1))), ("prompt", "prompt"));
    assert_eq!((field(messages(1)), field(messages(MESSAGES_MAX))), ("", ""));
    assert_eq!((field(messages(0)), field(messages(MESSAGES_MAX + 1))), ("messages", "messages"));
    // `{"a":"..."}` is eight bytes and the text.
    let kwargs = |bytes: usize| -> Map<String, Value> {
        [("a".into(), json!("x".repeat(bytes - 8)))].into_iter().collect()
    };
    assert_eq!(field(template_kwargs(&Map::new())), "");
    assert_eq!(field(template_kwargs(&kwargs(TEMPLATE_KWARGS_BYTES_MAX))), "");
    assert_eq!(field(template_kwargs(&kwargs(TEMPLATE_KWARGS_BYTES_MAX + 1))), "chat_template_kwargs");
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
    let seed = |seed| check(GenerateOptions { seed: Some(seed), ..Default::default() }).expect("valid").seed;
    assert_eq!(seed(-1), None);
    assert_eq!(seed(-2), Some(u64::MAX - 1));
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
