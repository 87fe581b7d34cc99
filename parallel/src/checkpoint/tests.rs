pub(in crate::checkpoint) mod build;
mod damage;

use std::{
    collections::BTreeMap,
    fs,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

use proptest::prelude::*;
use safetensors::Dtype;
use serde_json::{Value, json};

use super::{Checkpoint, CheckpointError, Encoding};
use crate::config::{GenerationDefaults, RopeScaling};

/// A model that `fixtures/make_gguf.py` writes as a GGUF file and as a folder.
pub(in crate::checkpoint) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

fn twins() -> [Arc<Checkpoint>; 2] {
    ["twin.gguf", "twin"].map(|name| Checkpoint::open(&fixture(name)).unwrap())
}

/// The pair that holds every type.
fn types() -> [Arc<Checkpoint>; 2] {
    ["types.gguf", "types"].map(|name| Checkpoint::open(&fixture(name)).unwrap())
}

/// An error and its causes, as a user sees them.
pub(in crate::checkpoint) fn message(error: &CheckpointError) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}

fn refusal(config: &Value) -> String {
    let folder = build::folder(config, &build::tensors());
    message(&Checkpoint::open(folder.path()).unwrap_err())
}

/// The smallest model's config with one key changed.
fn config_with(key: &str, value: Value) -> Value {
    let mut config = build::config();
    config[key] = value;
    config
}

fn read(
    checkpoint: &Checkpoint,
    name: &str,
    rows: Range<usize>,
    cols: Range<usize>,
) -> Result<Vec<f32>, CheckpointError> {
    let mut out = vec![f32::NAN; rows.len() * cols.len()];
    checkpoint.read_rows(name, rows, cols, &mut out)?;
    Ok(out)
}

pub(in crate::checkpoint) fn read_all(checkpoint: &Checkpoint, name: &str) -> Vec<f32> {
    let info = checkpoint.tensor(name).unwrap();
    read(checkpoint, name, 0..info.rows(), 0..info.cols()).unwrap()
}

pub(in crate::checkpoint) fn bits(values: &[f32]) -> Vec<u32> {
    // Which of the bit patterns of "not a number" comes out is the processor's business.
    values.iter().map(|value| if value.is_nan() { f32::NAN.to_bits() } else { value.to_bits() }).collect()
}

#[test]
fn gguf_and_safetensors_of_one_model_read_alike_bit_for_bit() {
    let [gguf, folder] = twins();
    let names: Vec<&str> = folder.names().collect();
    assert_eq!(gguf.names().collect::<Vec<_>>(), names);
    assert_eq!(names.len(), 20);
    let mut encodings = Vec::new();
    for name in names {
        let (info, twin) = (gguf.tensor(name).unwrap(), folder.tensor(name).unwrap());
        assert_eq!(info.shape, twin.shape, "{name}");
        assert_eq!(bits(&read_all(&gguf, name)), bits(&read_all(&folder, name)), "{name}");
        encodings.push(info.encoding);
    }
    for encoding in [Encoding::F32, Encoding::F16, Encoding::Bf16, Encoding::Q4_1, Encoding::Q8_0] {
        assert!(encodings.contains(&encoding), "the fixture lacks {encoding:?}");
    }
    assert_eq!(gguf.parameter_count(), folder.parameter_count());
    assert_eq!(folder.stored_bytes(), 4 * folder.parameter_count());
    assert!(gguf.stored_bytes() < folder.stored_bytes() / 2);
}

#[test]
fn every_type_reads_as_gguf_py_dequantises_it_bit_for_bit() {
    let [gguf, folder] = types();
    let mut special = BTreeMap::new();
    for name in folder.names() {
        let read = read_all(&gguf, name);
        assert_eq!(bits(&read), bits(&read_all(&folder, name)), "{name}");
        let count = read.iter().filter(|value| !value.is_normal()).count();
        *special.entry(gguf.tensor(name).unwrap().encoding.name()).or_insert(0) += count;
    }
    let encodings: Vec<&str> = special.keys().copied().collect();
    assert_eq!(
        encodings,
        ["BF16", "F16", "F32", "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0"]
    );
    // Scales that are subnormal, zero, infinite or not a number are among those compared.
    for (encoding, count) in special {
        assert!(count > 0 || ["F32", "BF16"].contains(&encoding), "{encoding} has only normal values");
    }
}

#[test]
fn gguf_and_safetensors_of_one_model_give_the_same_configuration() {
    let [gguf, folder] = twins();
    let mut config = gguf.config().clone();
    config.rope.scaling = folder.config().rope.scaling.clone();
    assert_eq!(&config, folder.config());
    assert_eq!(config.eos_token_ids, [2, 5], "config's id united with generation_config's, ascending");
    assert_eq!(config.bos_token_id, Some(1));
    assert!(config.tie_word_embeddings && !gguf.contains("lm_head.weight"));
    let expected = GenerationDefaults { temperature: Some(0.6), top_p: Some(0.9), ..Default::default() };
    assert_eq!(folder.generation_defaults(), &expected);
    assert_eq!(gguf.generation_defaults(), &GenerationDefaults::default());
}

#[test]
fn stored_rotary_factors_are_those_of_llama3_scaling() {
    let [gguf, folder] = twins();
    let RopeScaling::Factors(factors) = &gguf.config().rope.scaling else { panic!("no factors") };
    let RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } =
        folder.config().rope.scaling
    else {
        panic!("no llama3 scaling")
    };
    let theta = f64::from(folder.config().rope.theta);
    let context = original_context as f64;
    for (pair, stored) in factors.iter().enumerate() {
        let wavelength = 2.0 * std::f64::consts::PI * theta.powf(pair as f64 / factors.len() as f64);
        let ramp = (context / wavelength - f64::from(low_freq_factor))
            / f64::from(high_freq_factor - low_freq_factor);
        let kept = ramp.clamp(0.0, 1.0);
        let expected = 1.0 / ((1.0 - kept) / f64::from(factor) + kept);
        assert!((f64::from(*stored) - expected).abs() < 1e-5, "pair {pair}: {stored} against {expected}");
    }
    assert_eq!(factors.len(), 4);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn a_slice_is_that_part_of_the_whole(
        tensor in any::<prop::sample::Index>(), file in 0_usize..4,
        rows in any::<[u16; 2]>(), cols in any::<[u16; 2]>(),
    ) {
        let checkpoint = Checkpoint::open(&fixture(["twin.gguf", "twin", "types.gguf", "types"][file])).unwrap();
        let checkpoint = &*checkpoint;
        let name = checkpoint.names().nth(tensor.index(checkpoint.names().count())).unwrap();
        let info = checkpoint.tensor(name).unwrap();
        let within = |[a, b]: [u16; 2], len: usize| {
            let (a, b) = (usize::from(a) % (len + 1), usize::from(b) % (len + 1));
            a.min(b)..a.max(b)
        };
        let (rows, cols) = (within(rows, info.rows()), within(cols, info.cols()));
        let whole = read_all(checkpoint, name);
        let mut expected = Vec::new();
        for row in rows.clone() {
            expected.extend_from_slice(&whole[row * info.cols()..][cols.clone()]);
        }
        prop_assert_eq!(bits(&read(checkpoint, name, rows, cols).unwrap()), bits(&expected));
    }
}

#[test]
fn a_file_cut_off_anywhere_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    fs::copy(fixture("twin/config.json"), folder.path().join("config.json")).unwrap();
    for (name, opened) in [("twin.gguf", "model.gguf"), ("twin/model.safetensors", "")] {
        let target = folder.path().join(name.rsplit('/').next().unwrap().replace("twin", "model"));
        fs::copy(fixture(name), &target).unwrap();
        let file = fs::OpenOptions::new().write(true).open(&target).unwrap();
        let whole = file.metadata().unwrap().len();
        // From the end, cutting off ever more. The last tensor of a GGUF file, which only opening proves to be
        // there, ends before the file's padding does.
        let data = (3000..whole - 32).rev().step_by(97);
        for length in data.chain((0..3000).rev()) {
            file.set_len(length).unwrap();
            let result = Checkpoint::open(&folder.path().join(opened));
            assert!(result.is_err(), "{name} opened with {length} of {whole} bytes");
        }
    }
}

#[test]
fn slices_that_do_not_exist_are_refused() {
    for checkpoint in twins() {
        let read = |rows, cols, len| {
            let mut out = vec![0.0; len];
            checkpoint.read_rows("model.embed_tokens.weight", rows, cols, &mut out)
        };
        read(0..48, 0..32, 48 * 32).unwrap();
        read(48..48, 0..32, 0).unwrap();
        for (rows, cols, len) in [
            (0..49, 0..32, 49 * 32),
            (0..1, 0..33, 33),
            (0..1, 0..32, 31),
            (49..49, 0..32, 0),
            (0..usize::MAX, 0..usize::MAX, 1),
        ] {
            let error = read(rows, cols, len).unwrap_err();
            assert!(matches!(error, CheckpointError::Slice { .. }), "{error}");
        }
        #[expect(clippy::reversed_empty_ranges, reason = "this is the mistake under test")]
        let backwards = read(3..2, 0..32, 0).unwrap_err();
        assert!(matches!(backwards, CheckpointError::Slice { .. }), "{backwards}");
    }
}

#[test]
fn a_missing_tensor_is_named() {
    let expected = [
        "twin.gguf has no tensor `lm_head.weight` (`output.weight` in GGUF; it has 20 others)",
        "twin has no tensor `lm_head.weight` (it has 20 others)",
    ];
    for (checkpoint, expected) in twins().iter().zip(expected) {
        let error = message(&checkpoint.tensor("lm_head.weight").unwrap_err());
        assert!(error.ends_with(expected), "{error}");
    }
    let mut tensors = build::tensors();
    tensors.remove("model.layers.0.mlp.up_proj.weight");
    let folder = build::folder(&build::config(), &tensors);
    let error = message(&Checkpoint::open(folder.path()).unwrap_err());
    assert!(error.contains("no tensor `model.layers.0.mlp.up_proj.weight`"), "{error}");
}

#[test]
fn the_rows_of_a_vector_are_one() {
    for checkpoint in twins() {
        let info = checkpoint.tensor("model.norm.weight").unwrap();
        assert_eq!((info.shape.as_slice(), info.rows(), info.cols()), (&[32][..], 1, 32));
    }
}

#[test]
fn an_index_reads_like_a_single_file() {
    let tensors = build::tensors();
    let folder = build::folder(&build::config(), &tensors);
    fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    let mut parts = [build::tensors(), build::tensors()];
    let mut map = serde_json::Map::new();
    for (index, name) in tensors.keys().enumerate() {
        parts[1 - index % 2].remove(name);
        map.insert(name.clone(), json!(format!("part-{}.safetensors", index % 2)));
    }
    for (index, part) in parts.iter().enumerate() {
        build::write_safetensors(&folder.path().join(format!("part-{index}.safetensors")), part);
    }
    let index_path = folder.path().join("model.safetensors.index.json");
    let write = |map: &serde_json::Map<String, Value>| {
        fs::write(&index_path, json!({"metadata": {}, "weight_map": map}).to_string()).unwrap();
        Checkpoint::open(folder.path())
    };

    let checkpoint = write(&map).unwrap();
    assert!(checkpoint.names().eq(tensors.keys()));
    tensors.keys().for_each(|name| assert!(read_all(&checkpoint, name).iter().all(|value| *value == 0.0)));

    let name = "model.norm.weight";
    for (file, expected) in [
        (json!("../part-0.safetensors"), "must be the name of a file in the same folder"),
        (json!("/etc/passwd"), "must be the name of a file in the same folder"),
        (json!(3), "must be the name of a file in the same folder"),
        (json!("part-2.safetensors"), "cannot open"),
        (
            json!(format!("part-{}.safetensors", 1 - tensors.keys().position(|n| n == name).unwrap() % 2)),
            name,
        ),
    ] {
        let mut wrong = map.clone();
        wrong.insert(name.to_owned(), file);
        let error = message(&write(&wrong).unwrap_err());
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn both_spellings_of_the_rotary_configuration_are_read() {
    let scaling = json!({
        "rope_type": "llama3", "factor": 8, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    });
    let mut v4 = config_with("rope_scaling", scaling.clone());
    v4["rope_theta"] = json!(500_000);
    let mut old_v4 = v4.clone();
    let kind = old_v4["rope_scaling"].as_object_mut().unwrap().remove("rope_type").unwrap();
    old_v4["rope_scaling"]["type"] = kind;
    let mut v5 = config_with("rope_parameters", scaling);
    v5["rope_parameters"]["rope_theta"] = json!(500_000.0);
    let keys = v5.as_object_mut().unwrap();
    keys.remove("rope_theta");
    keys.remove("rope_scaling");
    keys.remove("torch_dtype");
    keys.insert("dtype".to_owned(), json!("float32"));

    let rope = [v4, old_v4, v5].map(|config| {
        let folder = build::folder(&config, &build::tensors());
        Checkpoint::open(folder.path()).unwrap().config().rope.clone()
    });
    assert_eq!(rope[0].theta, 500_000.0);
    assert_eq!(
        rope[0].scaling,
        RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 32
        }
    );
    assert_eq!(rope[0], rope[1]);
    assert_eq!(rope[0], rope[2]);
}

#[test]
fn keys_that_may_be_absent_have_the_defaults_of_the_family() {
    let mut config = build::config();
    let keys = config.as_object_mut().unwrap();
    for key in
        ["rope_theta", "rope_scaling", "tie_word_embeddings", "bos_token_id", "eos_token_id", "architectures"]
    {
        keys.remove(key);
    }
    let folder = build::folder(&config, &build::tensors());
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let config = checkpoint.config();
    assert_eq!((config.head_dim, config.rope.theta), (2, 10_000.0));
    assert!(config.tie_word_embeddings, "no head is stored");
    assert_eq!((config.bos_token_id, config.eos_token_ids.len()), (None, 0));
}

#[test]
fn a_head_is_kept_only_where_the_configuration_does_not_tie_it() {
    let mut tensors = build::tensors();
    tensors.insert("lm_head.weight".to_owned(), build::Zeros { dtype: Dtype::BF16, shape: vec![5, 4] });
    for (tie, kept) in [(json!(true), false), (json!(false), true), (Value::Null, true)] {
        let folder = build::folder(&config_with("tie_word_embeddings", tie), &tensors);
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        assert_eq!(checkpoint.contains("lm_head.weight"), kept);
        assert_eq!(checkpoint.config().tie_word_embeddings, !kept);
    }
    let error = refusal(&config_with("tie_word_embeddings", json!(false)));
    assert!(error.contains("no tensor `lm_head.weight`"), "{error}");
}

#[test]
fn impossible_configurations_are_refused_with_the_key_or_sizes() {
    for (key, value, expected) in [
        ("architectures", json!(["Qwen3ForCausalLM"]), "the architecture `Qwen3ForCausalLM`"),
        ("architectures", json!(["Qwen3ForCausalLM"]), "supported: LlamaForCausalLM"),
        ("architectures", json!([]), "`architectures` must be a list of class names"),
        ("hidden_size", json!("four"), "`hidden_size` must be a non-negative integer, but is \"four\""),
        ("hidden_size", json!(-4), "`hidden_size` must be"),
        ("hidden_size", Value::Null, "`hidden_size` is missing"),
        ("hidden_size", json!(5), "hidden size 5 is no multiple of 2 attention heads"),
        ("num_attention_heads", json!(0), "no multiple of 0 attention heads"),
        ("num_key_value_heads", json!(0), "number of key/value heads is 0"),
        ("num_key_value_heads", json!(3), "2 attention heads cannot be divided among 3 key/value heads"),
        ("head_dim", json!(3), "head width 3 is odd"),
        ("head_dim", json!(u64::MAX - 1), "overflow"),
        ("num_hidden_layers", json!(u64::MAX), "layers exceed the limit of 4096"),
        ("num_hidden_layers", json!(2), "no tensor `model.layers.1.input_layernorm.weight`"),
        (
            "vocab_size",
            json!(6),
            "`model.embed_tokens.weight` is [5, 4], but the configuration implies [6, 4]",
        ),
        ("max_position_embeddings", json!(u64::MAX), "exceeds the limit"),
        ("rms_norm_eps", json!(0), "epsilon of RMSNorm"),
        ("rope_theta", json!(-1), "base of the rotary embedding"),
        ("rope_scaling", json!({"rope_type": "llama3"}), "`rope_scaling.factor` is missing"),
        ("partial_rotary_factor", json!(0.5), "`partial_rotary_factor` 0.5"),
        ("eos_token_id", json!([1, 5]), "end-of-sequence token 5 lies outside the vocabulary of 5"),
        ("eos_token_id", json!("</s>"), "`eos_token_id` must be a token id or a list of them"),
        ("attention_bias", json!(true), "`attention_bias`"),
        ("hidden_act", json!("gelu"), "the activation `gelu`"),
        ("quantization_config", json!({"quant_method": "gptq"}), "the quantisation method `gptq`"),
    ] {
        let error = refusal(&config_with(key, value));
        assert!(error.contains(expected), "{key}: {error}");
        assert!(error.contains("config.json") || error.contains("tensor"), "{key}: no file in: {error}");
    }
}

#[test]
fn tensors_that_cannot_be_computed_with_are_refused() {
    let name = "model.layers.0.self_attn.q_proj.weight";
    for (extra, zeros, expected) in [
        (
            name,
            build::Zeros { dtype: Dtype::I8, shape: vec![4, 4] },
            "stored as I8; readable types are F32, F16",
        ),
        (name, build::Zeros { dtype: Dtype::F32, shape: vec![4, 5] }, "is [4, 5], but"),
        (name, build::Zeros { dtype: Dtype::F32, shape: vec![] }, "is [], but"),
        (
            "model.layers.0.mlp.up_proj.bias",
            build::Zeros { dtype: Dtype::F32, shape: vec![6] },
            "the bias `model.layers.0.mlp.up_proj.bias`",
        ),
    ] {
        let mut tensors = build::tensors();
        tensors.insert(extra.to_owned(), zeros);
        let folder = build::folder(&build::config(), &tensors);
        let error = message(&Checkpoint::open(folder.path()).unwrap_err());
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn tensors_that_the_layers_would_leave_out_are_refused() {
    let zeros = || build::Zeros { dtype: Dtype::F32, shape: vec![2] };
    let open = |name: &str| {
        let mut tensors = build::tensors();
        tensors.insert(name.to_owned(), zeros());
        let folder = build::folder(&build::config(), &tensors);
        Checkpoint::open(folder.path()).map_err(|error| message(&error))
    };
    for name in [
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.self_attn.attn_sub_norm.weight",
        "model.layers.0.pre_feedforward_layernorm.weight",
        "model.layers.0.input_layernorm.bias",
        "model.layers.0.self_attn.qkv_proj.bias",
        "lm_head.bias",
        "model.norm.bias",
    ] {
        let error = open(name).unwrap_err();
        assert!(
            error.contains(&format!(" `{name}`, which is not supported; supported: the tensors")),
            "{error}"
        );
    }
    // Beyond the layers that are used, outside the model, or of no consequence.
    for name in [
        "model.layers.1.self_attn.q_norm.weight",
        "model.layers.00.self_attn.q_norm.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.0.self_attn.k_scale",
        "vision.layers.0.self_attn.q_norm.weight",
    ] {
        open(name).unwrap();
    }
}

#[test]
fn surplus_tensors_do_not_matter() {
    let mut tensors = build::tensors();
    tensors.insert("rotary_emb.inv_freq".to_owned(), build::Zeros { dtype: Dtype::I64, shape: vec![3] });
    let folder = build::folder(&build::config(), &tensors);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let error = message(&checkpoint.tensor("rotary_emb.inv_freq").unwrap_err());
    assert!(error.contains("I64"), "{error}");
}

#[test]
fn generation_defaults_out_of_range_are_dropped_and_other_types_refused() {
    let open = |generation: Value| {
        let folder = build::folder(&build::config(), &build::tensors());
        fs::write(folder.path().join("generation_config.json"), generation.to_string()).unwrap();
        Checkpoint::open(folder.path()).map(|checkpoint| checkpoint.generation_defaults().clone())
    };
    let all = json!({"temperature": 0, "top_k": 40, "top_p": 1, "min_p": 0.05, "repetition_penalty": 1.1});
    let expected = GenerationDefaults {
        temperature: Some(0.0),
        top_k: Some(40),
        top_p: Some(1.0),
        min_p: Some(0.05),
        repetition_penalty: Some(1.1),
    };
    assert_eq!(open(all).unwrap(), expected);
    for (greedy, temperature) in [
        (json!({"do_sample": false}), Some(0.0)),
        (json!({"do_sample": false, "temperature": null}), Some(0.0)),
        (json!({"do_sample": false, "temperature": 0.5}), Some(0.5)),
        (json!({"do_sample": true}), None),
    ] {
        assert_eq!(
            open(greedy).unwrap().temperature,
            temperature,
            "a number counts whatever `do_sample` says"
        );
    }
    for off in [json!({"top_k": -1}), json!({"top_k": 0}), json!({"temperature": null})] {
        assert_eq!(open(off).unwrap(), GenerationDefaults::default());
    }
    for (key, value) in [("temperature", -1), ("top_p", 0), ("min_p", 2), ("repetition_penalty", 0)] {
        assert_eq!(open(json!({key: value})).unwrap(), GenerationDefaults::default());
    }
    for (key, value) in [("temperature", json!("hot")), ("top_k", json!(-2))] {
        let error = open(json!({key: value})).unwrap_err().to_string();
        assert!(error.contains(key), "{error}");
    }
}

#[test]
fn a_path_that_is_no_checkpoint_is_answered_with_what_to_pass() {
    let folder = tempfile::tempdir().unwrap();
    let open = |path: &Path| message(&Checkpoint::open(path).unwrap_err());
    assert!(open(&folder.path().join("absent")).contains("cannot open"));
    assert!(open(folder.path()).contains("has no config.json"));

    let file = folder.path().join("model.gguf");
    fs::write(&file, b"").unwrap();
    assert!(open(&file).contains("it is empty"));
    fs::write(&file, b"PK\x03\x04").unwrap();
    assert!(open(&file).contains("neither a GGUF file nor a folder"));
    let error = open(folder.path());
    assert!(error.contains("pass the file") && error.contains("model.gguf"), "{error}");

    // What is wrong with the configuration comes before what is not there.
    fs::write(folder.path().join("config.json"), b"{}").unwrap();
    assert!(open(folder.path()).contains("key `architectures` is missing"));
    fs::write(folder.path().join("config.json"), build::config().to_string()).unwrap();
    assert!(open(folder.path()).contains("neither model.safetensors nor model.safetensors.index.json"));
}

#[test]
fn ranks_read_and_release_at_once() {
    for checkpoint in twins() {
        let expected: Vec<Vec<f32>> = checkpoint.names().map(|name| read_all(&checkpoint, name)).collect();
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..20 {
                        for (name, expected) in checkpoint.names().zip(&expected) {
                            assert_eq!(&read_all(&checkpoint, name), expected, "{name}");
                            checkpoint.release_pages(name);
                        }
                    }
                });
            }
        });
    }
}

/// Kilobytes of a mapped file that this process holds.
#[cfg(target_os = "linux")]
pub(in crate::checkpoint) fn resident_kib(file: &Path) -> u64 {
    let maps = fs::read_to_string("/proc/self/smaps").unwrap();
    let mut lines = maps.lines().skip_while(|line| !line.ends_with(file.to_str().unwrap()));
    let rss = lines.find_map(|line| line.strip_prefix("Rss:")).expect("the file is mapped");
    rss.trim().trim_end_matches(" kB").parse().unwrap()
}

#[cfg(target_os = "linux")]
#[test]
fn a_slice_touches_only_its_pages_and_released_pages_leave_the_process() {
    // 4096 x 4096 floats are 64 MiB, far above the 2 MiB at most that the kernel maps around a fault.
    let shape = vec![4096, 4096];
    let mut tensors = build::tensors();
    tensors.insert("surplus".to_owned(), build::Zeros { dtype: Dtype::F32, shape });
    let folder = build::folder(&build::config(), &tensors);
    let file = folder.path().join("model.safetensors");
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert!(resident_kib(&file) < 4096, "opening read {} KiB", resident_kib(&file));

    let mut row = vec![1.0; 4096];
    for _ in 0..2 {
        checkpoint.read_rows("surplus", 1000..1001, 0..4096, &mut row).unwrap();
        let one_row = resident_kib(&file);
        assert!((4..4096).contains(&one_row), "one row of 16 KiB holds {one_row} KiB");
        for index in 0..4096 {
            checkpoint.read_rows("surplus", index..index + 1, 0..4096, &mut row).unwrap();
        }
        assert!(resident_kib(&file) >= 65_536);
        checkpoint.release_rows("surplus", 2048..4096);
        let half = resident_kib(&file);
        assert!((30_000..37_000).contains(&half), "half of 64 MiB released leaves {half} KiB");
        checkpoint.release_pages("surplus");
        assert!(resident_kib(&file) < 4096, "released, yet {} KiB are held", resident_kib(&file));
    }
    checkpoint.release_pages("absent");
}
