//! Models of which not all is there, or not all can be read: planned where they are sound, refused where they are
//! damaged.

use super::*;

/// A GGUF header with these values (type and bytes) and tensors (outermost dimension first, type, bytes), one behind
/// the other; and the bytes of their data.
fn gguf(values: &[(String, u32, Vec<u8>)], tensors: &[(&str, &[u64], u32, u64)]) -> (Vec<u8>, u64) {
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    bytes.extend([tensors.len() as u64, values.len() as u64].map(u64::to_le_bytes).concat());
    for (key, kind, value) in values {
        bytes.extend([string(key), kind.to_le_bytes().to_vec(), value.clone()].concat());
    }
    let mut offset = 0_u64;
    for (name, shape, kind, size) in tensors {
        bytes.extend([string(name), (shape.len() as u32).to_le_bytes().to_vec()].concat());
        shape.iter().rev().for_each(|size| bytes.extend(size.to_le_bytes()));
        bytes.extend([kind.to_le_bytes().to_vec(), offset.to_le_bytes().to_vec()].concat());
        offset = (offset + size).next_multiple_of(32);
    }
    bytes.resize(bytes.len().next_multiple_of(32), 0);
    (bytes, offset)
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

fn values(architecture: &str, sizes: &[(&str, u32)]) -> Vec<(String, u32, Vec<u8>)> {
    let named = ("general.architecture".to_owned(), 8, string(architecture));
    let sizes =
        sizes.iter().map(|(key, size)| (format!("{architecture}.{key}"), 4, size.to_le_bytes().to_vec()));
    [named].into_iter().chain(sizes).collect()
}

fn refused(words: &[&str]) -> String {
    let error = answer(&parse(words).expect("well spelt"), Style::Plain).err().expect("refused");
    assert_eq!(code(&error), 2, "{words:?}: {error:#}");
    format!("{error:#}")
}

fn note(planned: &Value) -> &str {
    planned["notes"][0].as_str().expect("a note")
}

#[test]
fn the_header_of_a_gguf_file_is_enough_for_models_that_are_only_planned() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("Qwen3-8B.gguf");
    let sizes = [
        ("embedding_length", 4096),
        ("block_count", 36),
        ("feed_forward_length", 12_288),
        ("attention.head_count", 32),
        ("attention.head_count_kv", 8),
        ("attention.key_length", 128),
        ("attention.value_length", 128),
        ("context_length", 40_960),
    ];
    let size = 151_936 * 4096 * 2;
    let tensors: [(&str, &[u64], u32, u64); 2] =
        [("token_embd.weight", &[151_936, 4096], 30, size), ("output.weight", &[151_936, 4096], 30, size)];
    let (header, data_bytes) = gguf(&values("qwen3", &sizes), &tensors);
    fs::write(&file, &header).expect("written");
    let words = [path(&file), "--gpus", "L40S"];
    let (of_header, named) = (json(&words), json(&["Qwen3-8B", "--gpus", "L40S"]));
    for part in ["weight_bytes", "ranks", "cache", "users", "steps", "settings"] {
        assert_eq!(of_header[part], named[part], "{part}");
    }
    assert_eq!(of_header["model"]["stored_bytes"], data_bytes);
    assert_eq!(of_header["model"]["stored_as"], "bfloat16");
    assert!(note(&of_header).starts_with("not run: "), "{of_header}");
    assert!(note(&of_header).contains("the architecture `qwen3`"), "{of_header}");
    // The data behind it change nothing; they are a hole in the file.
    let sparse = fs::OpenOptions::new().write(true).open(&file).expect("it is there");
    sparse.set_len(header.len() as u64 + data_bytes).expect("a sparse file");
    assert_eq!(json(&words), of_header);
}

#[test]
fn the_header_is_enough_for_experts_of_llamas_architecture_too() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("mixtral.gguf");
    let sizes = [
        ("embedding_length", 4096),
        ("block_count", 32),
        ("feed_forward_length", 14_336),
        ("attention.head_count", 32),
        ("attention.head_count_kv", 8),
        ("context_length", 32_768),
        ("expert_count", 8),
        ("expert_used_count", 2),
    ];
    let (header, _) =
        gguf(&values("llama", &sizes), &[("token_embd.weight", &[32_000, 4096], 1, 32_000 * 4096 * 2)]);
    fs::write(&file, &header).expect("written");
    let planned = json(&[path(&file), "--gpus", "2xH100-80GB"]);
    assert_eq!(planned["model"]["experts"], 8);
    assert_eq!(
        (&planned["model"]["stored_as"], &planned["settings"]["dtype"]),
        (&Value::Null, &"bfloat16".into())
    );
    assert!(note(&planned).contains("a mixture of experts"), "{planned}");
}

#[test]
fn a_llama_in_a_type_that_is_not_read_is_planned_and_the_type_named() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("llama.gguf");
    let sizes = [
        ("embedding_length", 256),
        ("block_count", 1),
        ("feed_forward_length", 256),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 4),
        ("context_length", 64),
    ];
    let mut values = values("llama", &sizes);
    values.push(("llama.attention.layer_norm_rms_epsilon".to_owned(), 6, 1e-5_f32.to_le_bytes().to_vec()));
    for (name, kind, row_bytes) in [("Q3_K", 11, 110), ("IQ4_XS", 23, 136)] {
        let (matrix, vector): (&[u64], &[u64]) = (&[256, 256], &[256]);
        let bytes = 256 * 256 * 2;
        let tensors = [
            ("token_embd.weight", matrix, 1, bytes),
            ("output_norm.weight", vector, 0, 1024),
            ("blk.0.attn_norm.weight", vector, 0, 1024),
            ("blk.0.attn_q.weight", matrix, kind, 256 * row_bytes),
            ("blk.0.attn_k.weight", matrix, kind, 256 * row_bytes),
            ("blk.0.attn_v.weight", matrix, 1, bytes),
            ("blk.0.attn_output.weight", matrix, 1, bytes),
            ("blk.0.ffn_norm.weight", vector, 0, 1024),
            ("blk.0.ffn_gate.weight", matrix, 1, bytes),
            ("blk.0.ffn_up.weight", matrix, 1, bytes),
            ("blk.0.ffn_down.weight", matrix, 1, bytes),
        ];
        let (mut file_bytes, data_bytes) = gguf(&values, &tensors);
        file_bytes.resize(file_bytes.len() + data_bytes as usize, 0);
        fs::write(&file, &file_bytes).expect("written");
        let planned = json(&[path(&file), "--gpus", "L40S"]);
        let said = format!("is stored as {name}; readable types are");
        assert!(note(&planned).starts_with("not run: ") && note(&planned).contains(&said), "{planned}");
        assert_eq!(planned["notes"].as_array().map(Vec::len), Some(1), "{planned}");
        let emitted = answered(&[path(&file), "--gpus", "L40S", "--emit-toml"]).text;
        let head = emitted.lines().nth(1).expect("two lines of comments");
        assert!(head.contains(&said) && head.ends_with("`consort serve` refuses it"), "{emitted}");
        // As the engine would lay it out.
        let asked = ask(&parse(&[path(&file), "--gpus", "L40S"]).expect("well spelt")).expect("asked");
        assert!(asked.request.model.config.is_some());
        // Of what ends behind its header nobody can tell whether it was meant to run.
        fs::write(&file, &file_bytes[..file_bytes.len() - data_bytes as usize]).expect("written");
        assert!(refused(&[path(&file), "--gpus", "L40S"]).contains("past the end of the file"));
    }
}

#[test]
fn a_damaged_folder_is_refused_and_not_planned() {
    let words = |folder: &TempDir| [path(folder.path()).to_owned(), "--gpus".to_owned(), "L40S".to_owned()];
    let told = |folder: &TempDir| refused(&words(folder).each_ref().map(String::as_str));
    // The same length, so that all else in the header stays as it is.
    let folder = checkpoint();
    let file = folder.path().join("model.safetensors");
    let mut bytes = fs::read(&file).expect("written before");
    let at = bytes.windows(17).position(|window| window == b"model.norm.weight").expect("it is there");
    bytes[at..at + 17].copy_from_slice(b"model.harm.weight");
    fs::write(&file, bytes).expect("written");
    assert!(told(&folder).contains("has no tensor `model.norm.weight`"), "{}", told(&folder));
    let folder = checkpoint();
    let file = folder.path().join("config.json");
    let text = fs::read_to_string(&file).expect("written before");
    let mut config: Value = serde_json::from_str(&text).expect("JSON");
    config["intermediate_size"] = 256.into();
    fs::write(&file, config.to_string()).expect("written");
    assert!(told(&folder).contains("the configuration implies [256, 96]"), "{}", told(&folder));
    config["intermediate_size"] = "many".into();
    fs::remove_file(folder.path().join("model.safetensors")).expect("removed");
    fs::write(&file, config.to_string()).expect("written");
    assert!(told(&folder).contains("`intermediate_size` must be"), "{}", told(&folder));
}

#[test]
fn the_configuration_of_a_model_that_runs_gives_the_plan_of_the_model() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
        "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 131_072, "vocab_size": 128_256, "tie_word_embeddings": false,
        "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "torch_dtype": "bfloat16",
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192},
    });
    fs::write(folder.path().join("config.json"), config.to_string()).expect("written");
    let words = [path(folder.path()), "--gpus", "L40S"];
    let (here, named) = (json(&words), json(&["Llama-3.1-8B", "--gpus", "L40S"]));
    for part in ["weight_bytes", "ranks", "cache", "users", "steps", "settings"] {
        assert_eq!(here[part], named[part], "{part}");
    }
    assert!(note(&here).contains("neither model.safetensors nor"), "{here}");
    assert_eq!(named["notes"], serde_json::json!([]));
    let emitted = answered(&[&words[..], &["--emit-toml"]].concat()).text;
    assert!(!emitted.contains("does not run it") && emitted.contains("# not run: "), "{emitted}");
}

#[test]
fn a_part_that_is_missing_is_named() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("big-00001-of-00002.gguf");
    let mut values = values("qwen3", &[("embedding_length", 4096)]);
    values.push(("split.count".to_owned(), 2, 2_u16.to_le_bytes().to_vec()));
    values.push(("split.no".to_owned(), 2, 0_u16.to_le_bytes().to_vec()));
    fs::write(&file, gguf(&values, &[]).0).expect("written");
    let error = refused(&[path(&file), "--gpus", "L40S"]);
    assert!(error.contains("part 2 is missing") && error.contains("big-00002-of-00002.gguf"), "{error}");
}
