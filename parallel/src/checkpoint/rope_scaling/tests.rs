//! Both readers on stretched frequencies and on the window.

use std::num::NonZeroUsize;

use consort_kernels::rope::Yarn;
use serde_json::{Value as Json, json};

use super::attention_factor;
use crate::{
    checkpoint::{
        Checkpoint, CheckpointError,
        tests::{
            build::{self, GgufBuilder},
            message,
        },
    },
    config::{Architecture, ModelConfig, RopeScaling},
};

fn folder(change: impl FnOnce(&mut Json)) -> Result<ModelConfig, CheckpointError> {
    let mut config = build::config();
    change(&mut config);
    let folder = build::folder(&config, &build::tensors());
    Checkpoint::open(folder.path()).map(|checkpoint| checkpoint.config().clone())
}

/// transformers 4's spelling.
fn scaled(scaling: Json) -> Result<ModelConfig, CheckpointError> {
    folder(|config| config["rope_scaling"] = scaling)
}

fn mistral(window: Json) -> Result<ModelConfig, CheckpointError> {
    folder(|config| {
        config["architectures"] = json!(["MistralForCausalLM"]);
        config["model_type"] = json!("mistral");
        config["sliding_window"] = window;
    })
}

fn gguf(change: impl FnOnce(&mut GgufBuilder)) -> Result<ModelConfig, CheckpointError> {
    let mut builder = GgufBuilder::llama();
    change(&mut builder);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, builder.bytes()).unwrap();
    Checkpoint::open(&path).map(|checkpoint| checkpoint.config().clone())
}

/// One key of `llama.rope.scaling.` beside the type and, for YaRN, a factor of 4.
fn gguf_scaled(
    kind: &str,
    key: &str,
    set: impl FnOnce(&mut GgufBuilder, &str),
) -> Result<ModelConfig, CheckpointError> {
    gguf(|b| {
        b.string("llama.rope.scaling.type", kind);
        if kind == "yarn" {
            b.f32("llama.rope.scaling.factor", 4.0);
        }
        set(b, &format!("llama.rope.scaling.{key}"));
    })
}

#[track_caller]
fn assert_refused(file: &str, expected: &str, result: Result<ModelConfig, CheckpointError>) {
    let error = message(&result.unwrap_err());
    assert!(error.contains(expected) && error.contains(file), "{error}");
}

/// The YaRN of `factor` 4 over the smallest model's 64 tokens that no key changes.
const YARN: Yarn =
    Yarn { factor: 4.0, original_context: 64, beta_fast: 32.0, beta_slow: 1.0, truncate: true };

#[test]
fn yarn_reads_the_same_from_both_spellings_and_from_gguf() {
    let yarn = Yarn { original_context: 32, beta_fast: 16.0, beta_slow: 2.0, ..YARN };
    let keys = json!({
        "factor": 4, "original_max_position_embeddings": 32, "beta_fast": 16, "beta_slow": 2.0,
    });
    let with = |key: &str, value: &str| {
        let mut keys = keys.clone();
        keys[key] = json!(value);
        keys
    };
    let v5 = folder(|config| {
        config["rope_parameters"] = with("rope_type", "yarn");
        config.as_object_mut().unwrap().remove("rope_scaling");
    });
    let metadata = gguf_scaled("yarn", "original_context_length", |b, key| {
        b.u32(key, 32);
        b.f32("llama.rope.scaling.yarn_beta_fast", 16.0);
        b.f32("llama.rope.scaling.yarn_beta_slow", 2.0);
    });
    for config in [scaled(with("type", "yarn")), scaled(with("rope_type", "yarn")), v5, metadata] {
        let RopeScaling::Yarn { yarn: got, attention_factor } = config.unwrap().rope.scaling else {
            panic!("no yarn")
        };
        assert_eq!(got, yarn);
        assert!((attention_factor - 1.138_629_4).abs() < 1e-6, "{attention_factor}");
    }
}

#[test]
fn yarn_without_optional_keys_has_the_defaults_of_transformers() {
    let expected = RopeScaling::Yarn { yarn: YARN, attention_factor: attention_factor(4.0, [0.0, 0.0]) };
    assert_eq!(scaled(json!({"type": "yarn", "factor": 4})).unwrap().rope.scaling, expected);
    assert_eq!(gguf_scaled("yarn", "finetuned", |b, key| b.bool(key, true)).unwrap().rope.scaling, expected);
    let beside = folder(|config| {
        config["rope_scaling"] =
            json!({"type": "yarn", "factor": 4, "original_max_position_embeddings": 32, "truncate": false});
        config["original_max_position_embeddings"] = json!(16);
    });
    let RopeScaling::Yarn { yarn, .. } = beside.unwrap().rope.scaling else { panic!("no yarn") };
    assert_eq!(yarn, Yarn { original_context: 16, truncate: false, ..YARN });
}

#[test]
fn a_yarn_key_that_is_0_or_unset_is_what_transformers_takes_for_it() {
    let yarn = |scaling: Json| {
        let RopeScaling::Yarn { yarn, attention_factor } = scaled(scaling).unwrap().rope.scaling else {
            panic!()
        };
        (yarn, attention_factor)
    };
    let plain = yarn(json!({"type": "yarn", "factor": 4}));
    assert_eq!(yarn(json!({"type": "yarn", "factor": 4, "beta_fast": 0, "beta_slow": 0.0})), plain);
    // The quotient of both contexts: 64 / 16.
    let derived = yarn(json!({"type": "yarn", "factor": null, "original_max_position_embeddings": 16}));
    assert_eq!(derived, (Yarn { original_context: 16, ..YARN }, plain.1));
    let absent = scaled(json!({"type": "yarn", "original_max_position_embeddings": 16}));
    assert_refused("config.json", "`rope_scaling.factor` is missing", absent);
    for (original, factor) in [(0, "inf"), (128, "0.5")] {
        let impossible =
            scaled(json!({"type": "yarn", "factor": null, "original_max_position_embeddings": original}));
        let expected = format!("`rope_scaling.factor` is {factor}; it must be at least 1");
        assert_refused("config.json", &expected, impossible);
    }
}

#[test]
fn the_original_context_of_llama3_is_beside_or_within_or_the_whole() {
    let original = |beside: Json, within: Json| {
        let config = folder(|config| {
            config["original_max_position_embeddings"] = beside;
            config["rope_scaling"] = json!({
                "rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
                "original_max_position_embeddings": within,
            });
        });
        let RopeScaling::Llama3 { original_context, .. } = config.unwrap().rope.scaling else { panic!() };
        original_context
    };
    assert_eq!(original(json!(16), json!(32)), 16);
    assert_eq!(original(Json::Null, json!(32)), 32);
    assert_eq!(original(Json::Null, Json::Null), 64);
}

#[test]
fn both_spellings_at_once_must_agree() {
    let both = |beside: Json, parameters: Json, scaling: Json| {
        folder(|config| {
            config["rope_theta"] = beside;
            config["rope_parameters"] = parameters;
            config["rope_scaling"] = scaling;
        })
    };
    let yarn = |theta: Json| json!({"rope_type": "yarn", "factor": 4, "rope_theta": theta});
    let old = json!({"type": "yarn", "factor": 4.0});
    let expected = both(json!(5e5), Json::Null, old.clone()).unwrap().rope;
    for empty in [Json::Null, json!({}), old.clone()] {
        assert_eq!(both(json!(5e5), yarn(json!(5e5)), empty.clone()).unwrap().rope, expected, "{empty}");
        assert_eq!(both(Json::Null, yarn(json!(5e5)), json!({})).unwrap().rope, expected, "{empty}");
    }
    assert_eq!(both(json!(5e5), json!({}), old.clone()).unwrap().rope, expected);
    // A release that heeds only the second never sees the base, or the factor, or the kind in the first.
    let linear = json!({"rope_type": "linear", "factor": 4, "rope_theta": 5e5});
    for (beside, parameters, scaling) in [
        (Json::Null, yarn(json!(5e5)), old.clone()),
        (json!(1e4), yarn(json!(5e5)), old.clone()),
        (json!(5e5), yarn(json!(5e5)), json!({"type": "yarn", "factor": 8})),
        (json!(5e5), linear, old),
        (json!(5e5), json!({"rope_theta": 5e5}), json!({"type": "linear", "factor": 2})),
    ] {
        let refusal = "key `rope_scaling` says something else than `rope_parameters` does";
        assert_refused("config.json", refusal, both(beside, parameters, scaling));
    }
}

#[test]
fn the_attention_factor_is_given_or_follows_from_the_others() {
    let factor = |config: Result<ModelConfig, CheckpointError>| {
        let RopeScaling::Yarn { attention_factor, .. } = config.unwrap().rope.scaling else { panic!() };
        attention_factor
    };
    let near = |got: f32, expected: f32| assert!((got - expected).abs() < 1e-6, "{got} {expected}");
    let with = |keys: Json| {
        let mut scaling = json!({"type": "yarn", "factor": 40});
        scaling.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        factor(scaled(scaling))
    };
    // The numbers of transformers 5.
    near(with(json!({"mscale": 0.707, "mscale_all_dim": 1.3})), 0.852_151_05);
    near(with(json!({"mscale": 1.0, "mscale_all_dim": 1.0})), 1.0);
    near(with(json!({"mscale": 0.707})), 1.368_888);
    near(with(json!({"mscale": 0.707, "mscale_all_dim": 0})), 1.368_888);
    near(with(json!({"attention_factor": 1.25, "mscale": 0.707, "mscale_all_dim": 1.3})), 1.25);
    near(attention_factor(1.0, [0.0, 0.0]), 1.0);

    near(factor(gguf_scaled("yarn", "attn_factor", |b, key| b.f32(key, 0.5))), 0.569_314_7);
    near(factor(gguf_scaled("yarn", "yarn_log_multiplier", |b, key| b.f32(key, 1.0))), 1.0);
    near(factor(gguf_scaled("yarn", "yarn_attn_factor", |b, key| b.f32(key, 1.1386))), 1.138_629_4);
    near(factor(gguf_scaled("yarn", "yarn_ext_factor", |b, key| b.f32(key, 1.0))), 1.138_629_4);
}

#[test]
fn linear_scaling_is_read_from_every_spelling() {
    let expected = RopeScaling::Linear { factor: 2.5 };
    assert_eq!(scaled(json!({"type": "linear", "factor": 2.5})).unwrap().rope.scaling, expected);
    let v5 =
        folder(|c| c["rope_parameters"] = json!({"rope_type": "linear", "factor": 2.5, "rope_theta": 5}));
    let v5 = v5.unwrap().rope;
    assert_eq!((v5.theta, v5.scaling), (5.0, expected.clone()));
    assert_eq!(gguf_scaled("linear", "factor", |b, key| b.f32(key, 2.5)).unwrap().rope.scaling, expected);
    for key in ["llama.rope.scaling.factor", "llama.rope.scale_linear"] {
        assert_eq!(gguf(|b| b.f32(key, 2.5)).unwrap().rope.scaling, expected, "{key}");
        assert_eq!(gguf(|b| b.f32(key, 0.0)).unwrap().rope.scaling, RopeScaling::None, "{key}");
    }
    assert_eq!(
        gguf_scaled("none", "factor", |b, key| b.f32(key, 2.5)).unwrap().rope.scaling,
        RopeScaling::None
    );
}

#[test]
fn impossible_scalings_in_config_json_are_refused_by_key() {
    for (key, value, expected) in [
        ("factor", json!(null), "`rope_scaling.factor` is missing"),
        ("factor", json!(0), "`rope_scaling.factor` is 0; it must be at least 1"),
        ("factor", json!(-4), "`rope_scaling.factor` is -4"),
        ("factor", json!(1e39), "`rope_scaling.factor` must be a finite number"),
        ("factor", json!("NaN"), "`rope_scaling.factor` must be a finite number, but is \"NaN\""),
        (
            "original_max_position_embeddings",
            json!(0),
            "`rope_scaling.original_max_position_embeddings` is 0",
        ),
        ("original_max_position_embeddings", json!(1.5), "must be a non-negative integer"),
        ("beta_fast", json!(-1), "`rope_scaling.beta_fast` is -1"),
        ("beta_slow", json!(-1), "`rope_scaling.beta_slow` is -1"),
        ("beta_fast", json!(0.5), "`rope_scaling.beta_fast` is 0.5; it must be at least beta_slow, 1"),
        ("attention_factor", json!(0), "`rope_scaling.attention_factor` is 0"),
        ("attention_factor", json!(-1), "`rope_scaling.attention_factor` is -1"),
        ("mscale_all_dim", json!(-100), "`rope_scaling.mscale` is -0.08"),
        ("truncate", json!(1), "`rope_scaling.truncate` must be true or false"),
        ("rope_theta", json!(1), "`rope_scaling.rope_theta` is 1; yarn scaling needs one above 1"),
        (
            "type",
            json!("dynamic"),
            "rope scaling `dynamic`, which is not supported; supported: default, linear",
        ),
        ("type", json!("longrope"), "rope scaling `longrope`"),
    ] {
        let mut scaling = json!({"type": "yarn", "factor": 4, "mscale": 1.0});
        scaling[key] = value;
        assert_refused("config.json", expected, scaled(scaling));
    }
    assert_refused("config.json", "`rope_scaling.factor` is missing", scaled(json!({"type": "linear"})));
    let v5 = folder(|c| c["rope_parameters"] = json!({"rope_type": "linear", "factor": 0.0}));
    assert_refused("config.json", "`rope_parameters.factor` is 0; it must be at least 1", v5);
    let nested = folder(|c| c["rope_parameters"] = json!({"sliding_attention": {"rope_type": "default"}}));
    assert_refused("config.json", "`rope_parameters.sliding_attention`", nested);
}

#[test]
fn impossible_scalings_in_metadata_are_refused_by_key() {
    for (key, value, expected) in [
        ("factor", 0.0, "`llama.rope.scaling.factor` is 0; it must be at least 1"),
        ("factor", -2.0, "`llama.rope.scaling.factor` is -2"),
        ("factor", f32::NAN, "`llama.rope.scaling.factor` must be a finite number"),
        ("yarn_beta_fast", 0.0, "`llama.rope.scaling.yarn_beta_fast` is 0"),
        ("yarn_beta_fast", 0.5, "`llama.rope.scaling.yarn_beta_fast` is 0.5"),
        ("yarn_beta_slow", f32::INFINITY, "`llama.rope.scaling.yarn_beta_slow` must be a finite number"),
        ("attn_factor", 0.0, "`llama.rope.scaling.attn_factor` is 0"),
        ("yarn_ext_factor", 0.5, "`llama.rope.scaling.yarn_ext_factor` 0.5"),
        ("yarn_attn_factor", 1.0, "`llama.rope.scaling.yarn_attn_factor` 1,"),
    ] {
        let config = gguf_scaled("yarn", key, |b, key| b.f32(key, value));
        assert_refused("model.gguf", expected, config);
    }
    let config = gguf_scaled("yarn", "original_context_length", |b, key| b.u32(key, 0));
    assert_refused("model.gguf", "`llama.rope.scaling.original_context_length` is 0", config);
    let config = gguf(|b| b.string("llama.rope.scaling.type", "yarn"));
    assert_refused("model.gguf", "`llama.rope.scaling.factor` is missing", config);
    let config = gguf_scaled("longrope", "finetuned", |b, key| b.bool(key, true));
    assert_refused("model.gguf", "rope scaling `longrope`", config);
    let config = gguf_scaled("linear", "factor", |b, key| b.f32(key, 0.0));
    assert_refused("model.gguf", "`llama.rope.scaling.factor` is 0", config);
    let config = gguf_scaled("yarn", "finetuned", |b, _| b.tensor("rope_freqs.weight", &[1], 0));
    assert_refused("model.gguf", "both rope scaling and `rope_freqs.weight`", config);
}

/// Architecture and the one window of all layers.
fn window_of(config: &ModelConfig) -> (Architecture, Option<usize>) {
    let window = config.layer_windows[0];
    assert_eq!(config.layer_windows, vec![window; config.num_layers]);
    (config.architecture, window.map(NonZeroUsize::get))
}

#[test]
fn a_window_is_mistral_s_and_null_means_none_while_absence_means_4096() {
    assert_eq!(window_of(&mistral(json!(7)).unwrap()), (Architecture::Mistral, Some(7)));
    assert_eq!(window_of(&mistral(json!(null)).unwrap()), (Architecture::Mistral, None));
    let absent = folder(|config| {
        config["model_type"] = json!("mistral");
        config.as_object_mut().unwrap().remove("architectures");
    });
    assert_eq!(window_of(&absent.unwrap()), (Architecture::Mistral, Some(4096)));
    // transformers' Llama does not heed the key.
    let llama = folder(|config| config["sliding_window"] = json!(7)).unwrap();
    assert_eq!(window_of(&llama), (Architecture::Llama, None));

    assert_refused("config.json", "`sliding_window` is 0", mistral(json!(0)));
    assert_refused("config.json", "`sliding_window` must be a non-negative integer", mistral(json!(-1)));
}

/// A folder of one layer that says of what kind its layers are.
fn kinds(class: &str, kinds: Json, window: Option<Json>) -> Result<ModelConfig, CheckpointError> {
    folder(|config| {
        config["architectures"] = json!([class]);
        config["layer_types"] = kinds;
        if let Some(window) = window {
            config["sliding_window"] = window;
        }
    })
}

#[test]
fn kinds_of_layers_decide_which_of_them_have_the_window() {
    const FULL: &str = "full_attention";
    const SLIDING: &str = "sliding_attention";
    let (llama, mistral) = ("LlamaForCausalLM", "MistralForCausalLM");
    for (class, kind, window, expected) in [
        (mistral, FULL, None, None),
        (mistral, FULL, Some(json!(7)), None),
        (mistral, SLIDING, Some(json!(7)), Some(7)),
        (mistral, SLIDING, None, Some(4096)),
        (llama, FULL, Some(json!(7)), None),
        (llama, SLIDING, Some(json!(7)), Some(7)),
    ] {
        let config = kinds(class, json!([kind]), window.clone()).unwrap();
        assert_eq!(window_of(&config).1, expected, "{class} {kind} {window:?}");
    }
    for (class, of_layers, window, expected) in [
        (llama, json!([SLIDING]), None, "`sliding_window` is missing or null"),
        (mistral, json!([SLIDING]), Some(json!(null)), "`sliding_window` is missing or null"),
        (mistral, json!([SLIDING]), Some(json!(0)), "`sliding_window` is 0"),
        (mistral, json!([FULL, SLIDING]), Some(json!(7)), "`layer_types` has 2 kinds for 1 layers"),
        (mistral, json!([]), None, "`layer_types` has 0 kinds for 1 layers"),
        (mistral, json!([7]), None, "`layer_types` must be a list of strings"),
        (mistral, json!("full_attention"), None, "`layer_types` must be a list, a kind for each layer"),
        (mistral, json!(["chunked_attention"]), None, "layers of `chunked_attention`"),
    ] {
        assert_refused("config.json", expected, kinds(class, of_layers, window));
    }
}

#[test]
fn a_window_in_metadata_makes_a_llama_a_mistral() {
    const KEY: &str = "llama.attention.sliding_window";
    assert_eq!(window_of(&gguf(|b| b.u32(KEY, 7)).unwrap()), (Architecture::Mistral, Some(7)));
    assert_eq!(window_of(&gguf(|b| b.u32(KEY, 0)).unwrap()), (Architecture::Llama, None));
    assert_refused("model.gguf", "`llama.attention.sliding_window` must be", gguf(|b| b.f32(KEY, 7.0)));
    let pattern = gguf(|b| {
        b.u32(KEY, 7);
        b.u32("llama.attention.sliding_window_pattern", 2);
    });
    assert_refused("model.gguf", "`llama.attention.sliding_window_pattern`", pattern);
}
