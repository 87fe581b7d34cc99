use std::{
    fs::{self, File},
    io::Write as _,
    num::NonZeroUsize,
    ops::ControlFlow,
    path::Path,
    sync::Arc,
};

use consort_kernels::{DType, element::bf16, rope};
use proptest::prelude::*;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{
    CHUNK_ELEMENTS, Shape, WriteError, WriteOptions, Written,
    config::{number, one_window, rope_scaling},
    copy_if_present, llama3, stream, write_config, write_weights,
};
use crate::{
    checkpoint::{
        Checkpoint, CheckpointError,
        tests::{
            bits,
            build::{self, GgufBuilder},
            fixture, read_all,
        },
    },
    config::{Architecture, RopeConfig, RopeScaling},
};

const ONE_FILE: WriteOptions = WriteOptions { dtype: DType::BF16, max_shard_bytes: u64::MAX };

fn open(name: &str) -> Arc<Checkpoint> {
    Checkpoint::open(&fixture(name)).unwrap()
}

fn write(checkpoint: &Checkpoint, options: &WriteOptions) -> (TempDir, Written) {
    let folder = tempfile::tempdir().unwrap();
    write_config(checkpoint, folder.path(), options.dtype).unwrap();
    let mut progress = |_, _| ControlFlow::Continue(());
    let written = write_weights(checkpoint, folder.path(), options, &mut progress).unwrap();
    (folder, written)
}

fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Asserts that `folder` holds the tensors of `original`, each value as `dtype` holds it.
fn assert_same_tensors(original: &Checkpoint, folder: &Path, dtype: DType) {
    let copy = Checkpoint::open(folder).unwrap();
    assert_eq!(copy.names().collect::<Vec<_>>(), original.names().collect::<Vec<_>>());
    for name in original.names() {
        assert_eq!(copy.tensor(name).unwrap().shape, original.tensor(name).unwrap().shape, "{name}");
        let expected: Vec<f32> = match dtype {
            DType::F32 => read_all(original, name),
            DType::BF16 => {
                read_all(original, name).iter().map(|value| bf16::from_f32(*value).to_f32()).collect()
            }
        };
        assert_eq!(bits(&read_all(&copy, name)), bits(&expected), "{name}");
    }
}

#[test]
fn a_gguf_file_becomes_a_folder_of_the_same_values_and_configuration() {
    let gguf = open("twin.gguf");
    for dtype in [DType::BF16, DType::F32] {
        let (folder, written) = write(&gguf, &WriteOptions { dtype, ..ONE_FILE });
        assert_same_tensors(&gguf, folder.path(), dtype);
        let bytes = gguf.parameter_count() * dtype.bytes() as u64;
        let files = vec!["model.safetensors".to_owned()];
        assert_eq!(written, Written { tensors: 20, bytes, files, left_out: Vec::new() });

        let copy = Checkpoint::open(folder.path()).unwrap();
        assert_eq!(copy.config(), open("twin").config(), "llama3's scaling is found in the stored divisors");
        assert_eq!(copy.generation_defaults(), gguf.generation_defaults());
        assert_eq!(json_of(&folder.path().join("config.json"))["torch_dtype"], dtype.to_string());
        let generation = json_of(&folder.path().join("generation_config.json"));
        assert_eq!((&generation["eos_token_id"], &generation["bos_token_id"]), (&json!([2, 5]), &json!(1)));
    }
}

#[test]
fn windows_and_stretched_frequencies_read_the_same_from_the_written_folder() {
    type Change = fn(&mut GgufBuilder);
    let changes: [(&str, Change); 3] = [
        ("mistral", |gguf| gguf.u32("llama.attention.sliding_window", 7)),
        ("linear", |gguf| {
            gguf.string("llama.rope.scaling.type", "linear");
            gguf.f32("llama.rope.scaling.factor", 2.5);
        }),
        ("yarn", |gguf| {
            gguf.string("llama.rope.scaling.type", "yarn");
            gguf.f32("llama.rope.scaling.factor", 4.0);
            gguf.u32("llama.rope.scaling.original_context_length", 32);
            gguf.f32("llama.rope.scaling.yarn_beta_fast", 16.0);
            gguf.f32("llama.rope.scaling.attn_factor", 1.25);
        }),
    ];
    for (name, change) in changes {
        let mut builder = GgufBuilder::llama();
        change(&mut builder);
        let source = tempfile::tempdir().unwrap();
        let path = source.path().join("model.gguf");
        fs::write(&path, builder.bytes()).unwrap();
        let gguf = Checkpoint::open(&path).unwrap();
        let (folder, _) = write(&gguf, &ONE_FILE);
        assert_eq!(Checkpoint::open(folder.path()).unwrap().config(), gguf.config(), "{name}");
    }
}

#[test]
fn the_file_is_one_that_the_safetensors_crate_reads_and_transformers_accepts() {
    let (folder, _) = write(&open("twin.gguf"), &ONE_FILE);
    let bytes = fs::read(folder.path().join("model.safetensors")).unwrap();
    let (header_bytes, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    assert!((header_bytes + 8).is_multiple_of(8), "the data starts at {}", header_bytes + 8);
    assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(tensors.len(), 20);
    assert!(tensors.iter().all(|(_, tensor)| tensor.dtype() == Dtype::BF16));
}

#[test]
fn a_model_above_the_limit_is_split_under_an_index() {
    let gguf = open("twin.gguf");
    for max_shard_bytes in [1, 5_000, 20_000] {
        let (folder, written) = write(&gguf, &WriteOptions { max_shard_bytes, ..ONE_FILE });
        assert_same_tensors(&gguf, folder.path(), DType::BF16);
        let count = written.files.len();
        assert_eq!(written.files[0], format!("model-00001-of-{count:05}.safetensors"));
        let index = json_of(&folder.path().join("model.safetensors.index.json"));
        assert_eq!(index["metadata"]["total_size"], written.bytes);
        assert_eq!(index["weight_map"].as_object().unwrap().len(), 20);
        let mut most_per_file = 0;
        for file in &written.files {
            let bytes = fs::read(folder.path().join(file)).unwrap();
            let tensors = SafeTensors::deserialize(&bytes).unwrap();
            let size: usize = tensors.iter().map(|(_, tensor)| tensor.data().len()).sum();
            assert!(tensors.len() == 1 || size as u64 <= max_shard_bytes, "{file}: {size}");
            assert!(tensors.names().iter().all(|name| index["weight_map"][*name] == *file));
            most_per_file = most_per_file.max(tensors.len());
        }
        if max_shard_bytes == 1 {
            assert_eq!((count, most_per_file), (20, 1), "a tensor is never cut");
        } else {
            assert!(count > 1 && most_per_file > 1, "{count} files of up to {most_per_file} tensors");
        }
    }
}

#[test]
fn a_folder_keeps_its_files_but_for_the_type() {
    let original = open("twin");
    let (folder, _) = write(&original, &ONE_FILE);
    assert_same_tensors(&original, folder.path(), DType::BF16);
    let mut expected = json_of(&fixture("twin/config.json"));
    expected["torch_dtype"] = json!("bfloat16");
    assert_eq!(json_of(&folder.path().join("config.json")), expected);
    let generation = "generation_config.json";
    let kept = fs::read(fixture("twin").join(generation)).unwrap();
    assert_eq!(fs::read(folder.path().join(generation)).unwrap(), kept);
}

#[test]
fn what_a_folders_configuration_leaves_open_is_spelled_out() {
    let mut config = build::config();
    config.as_object_mut().unwrap().remove("tie_word_embeddings");
    config["dtype"] = json!("float32");
    config["unknown_to_us"] = json!({"kept": true});
    let mut tensors = build::tensors();
    tensors.insert("counter".to_owned(), build::Zeros { dtype: Dtype::I64, shape: vec![3] });
    let from = build::folder(&config, &tensors);
    let (folder, written) = write(&Checkpoint::open(from.path()).unwrap(), &ONE_FILE);
    config["tie_word_embeddings"] = json!(true);
    config["dtype"] = json!("bfloat16");
    config["torch_dtype"] = json!("bfloat16");
    assert_eq!(json_of(&folder.path().join("config.json")), config);
    assert!(!folder.path().join("generation_config.json").exists());
    assert_eq!(written.left_out, ["counter"]);
}

#[test]
fn mistrals_window_is_spelled_out_where_the_folder_leaves_it_to_be_guessed() {
    for window in [None, Some(json!(null)), Some(json!(7))] {
        let mut config = build::config();
        config["architectures"] = json!(["MistralForCausalLM"]);
        config["model_type"] = json!("mistral");
        if let Some(window) = &window {
            config["sliding_window"] = window.clone();
        }
        let from = build::folder(&config, &build::tensors());
        let (folder, _) = write(&Checkpoint::open(from.path()).unwrap(), &ONE_FILE);
        let written = json_of(&folder.path().join("config.json"));
        assert_eq!(written.get("sliding_window"), Some(&window.unwrap_or(json!(4096))));
    }
    // transformers' Llama has no such key, and gets none.
    let from = build::folder(&build::config(), &build::tensors());
    let (folder, _) = write(&Checkpoint::open(from.path()).unwrap(), &ONE_FILE);
    assert_eq!(json_of(&folder.path().join("config.json")).get("sliding_window"), None);
}

#[test]
fn kinds_of_layers_stay_as_a_folder_lists_them_and_cannot_be_made_anew() {
    for (class, window, expected) in
        [("LlamaForCausalLM", Some(7), json!(7)), ("MistralForCausalLM", None, json!(4096))]
    {
        let mut config = build::config();
        config["architectures"] = json!([class]);
        config["layer_types"] = json!(["sliding_attention"]);
        if let Some(window) = window {
            config["sliding_window"] = json!(window);
        }
        let from = build::folder(&config, &build::tensors());
        let original = Checkpoint::open(from.path()).unwrap();
        let (folder, _) = write(&original, &ONE_FILE);
        let written = json_of(&folder.path().join("config.json"));
        assert_eq!(
            (&written["layer_types"], &written["sliding_window"]),
            (&config["layer_types"], &expected)
        );
        assert_eq!(Checkpoint::open(folder.path()).unwrap().config(), original.config());
    }
    let (none, seven) = (None, NonZeroUsize::new(7));
    let spelled = |architecture, windows: &[_]| one_window(Path::new("m.gguf"), architecture, windows);
    for windows in [[none, none], [seven, seven]] {
        assert_eq!(spelled(Architecture::Mistral, &windows).unwrap(), windows[0]);
    }
    for (architecture, windows, expected) in [
        (Architecture::Mistral, [none, seven], "windows that differ from layer to layer"),
        (Architecture::Llama, [seven, none], "windows that differ from layer to layer"),
        (Architecture::Llama, [seven, seven], "a sliding window in layers of Llama"),
    ] {
        let error = spelled(architecture, &windows).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn a_greedy_default_is_written_as_transformers_says_it_and_stays_greedy() {
    let cases: [(&[(&str, f32)], Value); 4] = [
        (&[], json!({})),
        (&[("penalty_repeat", 1.5)], json!({"repetition_penalty": 1.5})),
        (
            &[("temp", 0.0), ("top_p", 0.5), ("penalty_repeat", 1.5)],
            json!({"do_sample": false, "repetition_penalty": 1.5}),
        ),
        (&[("top_p", 0.5)], json!({"do_sample": true, "top_p": 0.5})),
    ];
    for (sampling, expected) in cases {
        let mut builder = GgufBuilder::llama();
        for (key, value) in sampling {
            builder.f32(&format!("general.sampling.{key}"), *value);
        }
        let source = tempfile::tempdir().unwrap();
        let path = source.path().join("model.gguf");
        fs::write(&path, builder.bytes()).unwrap();
        let gguf = Checkpoint::open(&path).unwrap();
        let (folder, _) = write(&gguf, &ONE_FILE);
        let mut written = json_of(&folder.path().join("generation_config.json"));
        written.as_object_mut().unwrap().retain(|key, _| !key.ends_with("_token_id"));
        assert_eq!(written, expected);
        let copy = Checkpoint::open(folder.path()).unwrap();
        let (read, stored) = (copy.generation_defaults(), gguf.generation_defaults());
        assert_eq!(
            (read.temperature, read.repetition_penalty),
            (stored.temperature, stored.repetition_penalty),
            "{sampling:?}"
        );
    }
}

#[test]
fn copying_tells_absence_from_what_cannot_be_read_and_that_from_what_cannot_be_written() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    copy_if_present(&at("absent"), &at("copy")).unwrap();
    copy_if_present(folder.path(), &at("copy")).unwrap();
    assert!(!at("copy").exists());
    let text: Vec<u8> = (0..200_000_u32).map(|i| (i % 251) as u8).collect();
    fs::write(at("text"), &text).unwrap();
    copy_if_present(&at("text"), &at("copy")).unwrap();
    assert_eq!(fs::read(at("copy")).unwrap(), text);

    // A name below a file is not one that is merely absent. Permissions would do too, but not for root.
    let error = copy_if_present(&at("text/tokenizer.json"), &at("second")).unwrap_err();
    let WriteError::Read(CheckpointError::Io { action: "read", path, .. }) = error else { panic!("{error}") };
    assert_eq!(path, at("text/tokenizer.json"));
    let error = copy_if_present(&at("text"), &at("copy")).unwrap_err();
    assert!(matches!(&error, WriteError::Io { path, .. } if *path == at("copy")), "{error}");
    // It opens, and then cannot be read.
    #[cfg(target_os = "linux")]
    {
        let error = copy_if_present(Path::new("/proc/self/mem"), &at("third")).unwrap_err();
        assert!(matches!(error, WriteError::Read(_)), "{error}");
    }
}

#[test]
fn a_break_ends_the_work_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let mut reports = Vec::new();
    let mut progress = |written, total| {
        reports.push((written, total));
        if reports.len() == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let outcome = write_weights(&open("twin.gguf"), folder.path(), &ONE_FILE, &mut progress);
    assert!(matches!(outcome, Err(WriteError::Interrupted)), "{outcome:?}");
    assert_eq!(reports.len(), 3);
    assert!(reports.is_sorted() && reports[2].0 < reports[2].1, "{reports:?}");
}

#[test]
fn a_full_disk_and_a_name_that_is_taken_are_told_with_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    fs::write(&path, "mine").unwrap();
    let mut progress = |_, _| ControlFlow::Continue(());
    let error = write_weights(&open("twin.gguf"), folder.path(), &ONE_FILE, &mut progress).unwrap_err();
    assert!(matches!(&error, WriteError::Io { path: at, .. } if *at == path), "{error}");
    assert_eq!(fs::read(&path).unwrap(), b"mine");

    #[cfg(target_os = "linux")]
    {
        let full = File::options().write(true).open("/dev/full").unwrap().write_all(b"x").unwrap_err();
        let error = WriteError::io(Path::new("/out/model.safetensors"), 4096, full).to_string();
        assert!(error.contains("no space left for /out/model.safetensors: 4096 bytes"), "{error}");
    }
}

#[test]
fn parts_are_bounded_and_cover_a_tensor_in_order() {
    let shapes = [
        (1, 1),
        (201_088, 2_880),
        (3, CHUNK_ELEMENTS),
        (3, CHUNK_ELEMENTS + 1),
        (1, 5 * CHUNK_ELEMENTS),
        (CHUNK_ELEMENTS + 7, 1),
        (0, 5),
        (5, 0),
        (usize::MAX, 0),
    ];
    for (rows, cols) in shapes {
        let mut next = 0;
        for (part_rows, part_cols) in (Shape { rows, cols }).parts() {
            assert!(part_rows.len() * part_cols.len() <= CHUNK_ELEMENTS);
            assert!(part_rows.len() == 1 || part_cols == (0..cols), "only a single row is cut");
            assert_eq!(part_rows.start * cols + part_cols.start, next, "{rows} x {cols}");
            next += part_rows.len() * part_cols.len();
        }
        assert_eq!(next, rows * cols);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_large_tensor_passes_through_a_small_buffer() {
    use crate::checkpoint::tests::resident_kib;
    // 64 MiB of floats; whole rows at one time, a part of a row at the other.
    for shape in [[4096, 4096], [4, 4 << 20]] {
        let mut tensors = build::tensors();
        tensors.insert("surplus".to_owned(), build::Zeros { dtype: Dtype::F32, shape: shape.to_vec() });
        let folder = build::folder(&build::config(), &tensors);
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let file = folder.path().join("model.safetensors");
        let (mut bytes, mut resident) = (0, 0);
        let mut sink = |part: &[u8]| {
            assert!(part.len() <= CHUNK_ELEMENTS * 2);
            bytes += part.len();
            resident = resident.max(resident_kib(&file));
            Ok(())
        };
        stream(&checkpoint, "surplus", &Shape::of(&shape), DType::BF16, &mut sink).unwrap();
        assert_eq!(bytes, 32 << 20);
        // A row of the second shape is 16 MiB and is released as a whole.
        assert!(resident < 24 << 10, "{resident} KiB of the file are held at a time");
    }
}

#[test]
fn numbers_are_spelled_as_people_do() {
    for (value, text) in
        [(1e-5, "0.00001"), (0.1, "0.1"), (500_000.0, "500000.0"), (8.0, "8.0"), (f32::MAX, "3.4028235e+38")]
    {
        assert_eq!(number(value).to_string(), text);
    }
    for value in [f32::MIN_POSITIVE, 1.0 / 3.0, 16_777_216.0, 1e-45] {
        assert_eq!(number(value).as_f64().unwrap() as f32, value);
    }
}

/// The divisors that converters store, computed as they do in single precision.
fn divisors(theta: f32, head_dim: usize, factor: f32, context: f32) -> Vec<f32> {
    let divisor = |i: usize| {
        let frequency = 1.0 / theta.powf((2 * i) as f32 / head_dim as f32);
        let wavelength = 2.0 * std::f32::consts::PI / frequency;
        if wavelength < context / 4.0 {
            1.0
        } else if wavelength > context {
            factor
        } else {
            let kept = (context / wavelength - 1.0) / 3.0;
            1.0 / ((1.0 - kept) / factor + kept)
        }
    };
    (0..head_dim / 2).map(divisor).collect()
}

fn llama3(factor: f32, original_context: usize) -> RopeScaling {
    RopeScaling::Llama3 { factor, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context }
}

#[test]
fn published_llama3_scalings_are_found_in_their_divisors() {
    for (theta, head_dim, factor, context) in
        [(5e5, 128, 8.0, 8192), (5e5, 64, 32.0, 8192), (1e6, 96, 16.0, 32_768), (1e4, 80, 4.0, 12_345)]
    {
        let stored = divisors(theta, head_dim, factor, context as f32);
        assert_eq!(llama3::recognise(&stored, theta), Some(llama3(factor, context)), "{theta} {head_dim}");
    }
    assert_eq!(llama3::recognise(&[1.0; 32], 1e4), Some(RopeScaling::None));
}

#[test]
fn divisors_of_another_kind_are_not_taken_for_llama3s() {
    let good = divisors(5e5, 128, 8.0, 8192.0);
    for pair in [0, 30, 33, 63] {
        let mut changed = good.clone();
        changed[pair] *= 1.0003;
        assert_eq!(llama3::recognise(&changed, 5e5), None, "pair {pair}");
    }
    assert_eq!(llama3::recognise(&good, 1e4), None, "another base");
    assert_eq!(llama3::recognise(&[4.0; 32], 1e4), None, "one divisor for all is linear scaling");
    let linear = RopeConfig { theta: 1e4, scaling: RopeScaling::Factors(vec![4.0; 32]) };
    let spelled = rope_scaling(Path::new("m.gguf"), &linear).unwrap();
    assert_eq!(spelled, json!({ "rope_type": "linear", "factor": 4.0 }));
    assert_eq!(llama3::recognise(&[0.5; 32], 1e4), None);
    assert_eq!(llama3::recognise(&[1.0, f32::MAX, 1e-30, 2.0], 1e4), None);
    let scaling = RopeScaling::Factors(vec![4.0, 3.0, 1.0, 7.0]);
    let error = rope_scaling(Path::new("m.gguf"), &RopeConfig { theta: 1e4, scaling }).unwrap_err();
    let error = error.to_string();
    assert!(error.starts_with("m.gguf has divisors") && error.contains("rope_freqs.weight"), "{error}");
}

proptest! {
    #[test]
    fn the_scaling_that_is_found_gives_the_frequencies_that_were_stored(
        theta in 5e3_f32..1e7, pairs in 2_usize..=128, factor in 1.5_f32..64.0, context in 32_usize..200_000,
    ) {
        let stored = divisors(theta, 2 * pairs, factor, context as f32);
        let plain = rope::frequencies(theta, 2 * pairs);
        let mut scaled = plain.clone();
        match llama3::recognise(&stored, theta) {
            Some(RopeScaling::None) => {}
            Some(RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context }) => {
                rope::scale_llama3(&mut scaled, factor, low_freq_factor, high_freq_factor, original_context);
            }
            other => {
                // No pair is divided by the whole factor, which cannot be told then; or none is kept.
                let ends = |end: f32| stored.contains(&end);
                prop_assert!(!ends(1.0) || !ends(factor), "{other:?} for {stored:?}");
            }
        }
        if scaled != plain {
            for ((plain, divisor), scaled) in plain.iter().zip(&stored).zip(&scaled) {
                let difference = (plain / divisor - scaled).abs() / scaled;
                prop_assert!(difference < 16.0 * f32::EPSILON * divisor + 1e-6, "{difference}");
            }
        }
    }
}
