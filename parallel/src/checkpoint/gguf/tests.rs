mod damage;

use std::fs;

use crate::{
    checkpoint::{
        Checkpoint, CheckpointError, Encoding,
        tests::build::{self, GgufBuilder},
        tests::{fixture, message},
    },
    config::{GenerationDefaults, ModelConfig, RopeScaling},
    plan::WeightFormat,
};

use super::{names, parse, types};

fn open_bytes(bytes: &[u8]) -> Result<ModelConfig, CheckpointError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    fs::write(&path, bytes).unwrap();
    Checkpoint::open(&path).map(|checkpoint| checkpoint.config().clone())
}

fn open(change: impl FnOnce(&mut GgufBuilder)) -> Result<ModelConfig, CheckpointError> {
    let mut builder = GgufBuilder::llama();
    change(&mut builder);
    open_bytes(&builder.bytes())
}

#[track_caller]
fn refused(expected: &str, change: impl FnOnce(&mut GgufBuilder)) {
    let error = message(&open(change).unwrap_err());
    assert!(error.contains(expected), "{error}");
    assert!(error.contains("model.gguf"), "no file in: {error}");
}

#[test]
fn the_smallest_llama_opens() {
    let config = open(|_| {}).unwrap();
    assert_eq!((config.vocab_size, config.head_dim, config.num_kv_heads), (5, 2, 1));
    assert_eq!(config.rope.theta, 10_000.0);
    assert_eq!(config.rope.scaling, RopeScaling::None);
}

#[test]
fn every_type_of_metadata_is_read_by_its_getter() {
    let checkpoint = Checkpoint::open(&fixture("twin.gguf")).unwrap();
    let gguf = checkpoint.gguf().unwrap();
    for (key, value) in [("u8", 200), ("u16", 60_000), ("u32", 4_000_000_000), ("i64", 7)] {
        assert_eq!(gguf.u32(&format!("test.{key}")), Some(value), "{key}");
    }
    for key in ["i8", "i16", "i32", "u64", "f32", "bool", "string", "absent"] {
        assert_eq!(gguf.u32(&format!("test.{key}")), None, "{key}");
    }
    assert_eq!(gguf.f32("test.f32"), Some(0.25));
    assert_eq!(gguf.f32("test.f64"), Some(-0.5));
    assert_eq!(gguf.bool("test.bool"), Some(true));
    assert_eq!(gguf.string("test.string"), Some("naïve"));
    assert_eq!(gguf.string("tokenizer.chat_template"), Some("{{ messages[0]['content'] }}"));
    let tokens = gguf.strings("tokenizer.ggml.tokens").unwrap();
    assert_eq!((tokens.len(), tokens[3].as_str(), tokens[47].as_str()), (48, "t3", "Ġé"));
    assert_eq!(gguf.i32s("tokenizer.ggml.token_type").unwrap()[4..8], [3, 3, 1, 1]);
    assert_eq!(gguf.f32s("tokenizer.ggml.scores").unwrap()[..3], [0.0, 0.25, 0.5]);
    for (key, values) in [
        ("u8", [0, 255]),
        ("i8", [-128, 127]),
        ("u16", [0, 65_535]),
        ("i16", [-32_768, 32_767]),
        ("u32", [0, i32::MAX]),
        ("i32", [i32::MIN, i32::MAX]),
        ("u64", [0, 1]),
        ("i64", [-1, 1]),
    ] {
        assert_eq!(gguf.i32s(&format!("test.array.{key}")), Some(&values[..]), "{key}");
    }
    for key in ["u32_large", "f64", "bool"] {
        let key = format!("test.array.{key}");
        assert!(gguf.contains(&key) && gguf.i32s(&key).is_none() && gguf.f32s(&key).is_none(), "{key}");
    }
    assert_eq!(gguf.keys().filter(|key| key.starts_with("test.")).count(), 23);
}

#[test]
fn broken_metadata_is_refused_with_its_key() {
    refused("metadata key `a`: a string is not UTF-8", |b| b.set("a", 8, build::string(b"ab\xff")));
    refused("metadata key `llama.block_count` appears twice", |b| {
        let entry = b.metadata[2].clone();
        b.metadata.push(entry);
    });
    refused("metadata entry 0 of 8: a string is not UTF-8", |b| b.metadata[0].0 = vec![0xc0, 0x80]);
}

#[test]
fn other_versions_are_refused() {
    for version in [0, 1, 4] {
        let expected = format!("GGUF version {version} is not supported, only 2 and 3");
        refused(&expected, |b| b.version = version);
    }
    for version in [2_u32, 3] {
        refused("the file is big-endian", |b| b.version = version.swap_bytes());
    }
}

#[test]
fn version_2_reads_as_version_3_does() {
    let twin = fixture("twin.gguf");
    let mut bytes = fs::read(&twin).unwrap();
    let newer = parse::parse(&bytes).unwrap();
    bytes[4] = 2;
    assert_eq!(parse::parse(&bytes).unwrap(), newer);
    assert_eq!(&open_bytes(&bytes).unwrap(), Checkpoint::open(&twin).unwrap().config());
}

#[test]
fn tensors_of_another_shape_or_name_are_refused() {
    const Q: &str = "blk.0.attn_q.weight";
    refused("is [4, 3], but the configuration implies [4, 4]", |b| b.tensor_mut(Q).dims = vec![3, 4]);
    refused("its 3 rows are not whole heads of 2", |b| b.tensor_mut(Q).dims = vec![4, 3]);
    refused("rows of 4 elements cannot be Q8_0 blocks of 32", |b| b.tensor_mut(Q).kind = 8);
    refused(
        "no tensor `model.layers.0.self_attn.q_proj.weight` (`blk.0.attn_q.weight` in GGUF; it has 10",
        |b| b.tensor_mut(Q).name = "blk.00.attn_q.weight".into(),
    );
}

#[test]
fn unsupported_types_are_refused_with_the_supported_ones() {
    const EXPECTED: &str = "stored as I32; readable types are F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, \
                            Q5_K and Q6_K";
    refused(EXPECTED, |b| b.tensor_mut("blk.0.ffn_up.weight").kind = 26);
    refused("stored as ggml type 4000000000", |b| b.tensor_mut("blk.0.ffn_up.weight").kind = 4_000_000_000);
    refused("`rope_freqs.weight` is stored as I32", |b| b.tensor("rope_freqs.weight", &[1], 26));
    // Nobody asks for a surplus tensor.
    open(|b| b.tensor("blk.0.attn_rot_embd.weight", &[1], 26)).unwrap();
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    refused("2 attention heads cannot be divided among 3 key/value heads", |b| {
        b.u32("llama.attention.head_count_kv", 3);
    });
    refused("`llama.attention.head_count_kv` must be one non-negative integer", |b| {
        b.set("llama.attention.head_count_kv", 9, [build::array(4, 1), vec![1, 0, 0, 0]].concat());
    });
    refused("`llama.block_count` is missing", |b| b.remove("llama.block_count"));
    refused("no tensor `model.layers.1.input_layernorm.weight`", |b| b.u32("llama.block_count", 2));
    refused("4294967295 layers exceed the limit of 4096", |b| b.u32("llama.block_count", u32::MAX));
    refused("`tokenizer.ggml.tokens` has 6 entries, but the vocabulary has 5", |b| {
        b.strings("tokenizer.ggml.tokens", &["a"; 6]);
    });
    refused("end-of-sequence token 5 lies outside", |b| b.u32("tokenizer.ggml.eos_token_id", 5));
    refused("power of two", |b| b.u32("general.alignment", 24));
    refused("power of two", |b| b.string("general.alignment", "32"));
}

#[test]
fn models_that_would_be_computed_wrongly_are_refused() {
    refused("the architecture `qwen3`, which is not supported; supported: llama", |b| {
        b.string("general.architecture", "qwen3");
    });
    refused("`general.architecture` is missing", |b| b.remove("general.architecture"));
    refused("a mixture of experts", |b| b.u32("llama.expert_count", 8));
    refused("`llama.rope.dimension_count` 1", |b| b.u32("llama.rope.dimension_count", 1));
    refused("`llama.attention.value_length` 4", |b| b.u32("llama.attention.value_length", 4));
    refused("`llama.logit_scale` 8", |b| b.f32("llama.logit_scale", 8.0));
}

#[test]
fn every_part_of_a_split_file_is_refused_as_one() {
    const EXPECTED: &str = "model.gguf needs the other parts of a model that was split (it is part";
    const MERGE: &str = "supported: one whole file; merge the parts with `llama-gguf-split --merge`";
    let part = |b: &mut GgufBuilder, number: u16| {
        b.set("split.count", 2, vec![3, 0]);
        b.set("split.no", 2, number.to_le_bytes().to_vec());
    };
    for number in [0, 1, u16::MAX] {
        let what = format!("{EXPECTED} {} of 3), which is not supported; {MERGE}", u32::from(number) + 1);
        refused(&what, |b| part(b, number));
        // All parts but the first have nothing else.
        refused(&what, |b| {
            b.metadata.clear();
            part(b, number);
        });
    }
    refused(&format!("{EXPECTED} one of 2)"), |b| b.set("split.count", 2, vec![2, 0]));
    open(|b| b.set("split.count", 2, vec![1, 0])).unwrap();
}

#[test]
fn tensors_that_the_layers_would_leave_out_are_refused() {
    for name in [
        "blk.0.attn_q_norm.weight",
        "blk.0.attn_sub_norm.weight",
        "blk.0.ffn_sub_norm.weight",
        "blk.0.attn_q.scale",
        "blk.0.attn_sinks.weight",
        "blk.0.ffn_gate_inp.weight",
        "blk.00.attn_q.weight",
        "token_embd_norm.weight",
        "output.bias",
    ] {
        refused(&format!("needs the tensor `{name}`, which is not supported"), |b| b.tensor(name, &[4], 0));
    }
    for name in ["blk.0.attn_q.bias", "blk.0.ffn_down.bias", "blk.0.attn_norm.bias"] {
        for kind in [0, 26] {
            refused(&format!("needs the bias `{name}`, which is not supported"), |b| {
                b.tensor(name, &[4], kind)
            });
        }
    }
    // Frequencies that follow from the configuration, and layers that are not used.
    for name in ["blk.0.attn_rot_embd.weight", "blk.1.attn_q_norm.weight", "blk.1.attn_q.bias"] {
        open(|b| b.tensor(name, &[4], 0)).unwrap();
    }
}

#[test]
fn an_unset_token_is_none() {
    let config = open(|b| {
        b.bool("tokenizer.ggml.add_bos_token", true);
        for key in ["bos", "eos", "eot"] {
            b.u32(&format!("tokenizer.ggml.{key}_token_id"), u32::MAX);
        }
    });
    let config = config.unwrap();
    assert_eq!((config.bos_token_id, config.eos_token_ids), (None, vec![]));
    refused("end-of-sequence token 4294967294 lies outside", |b| {
        b.u32("tokenizer.ggml.eos_token_id", u32::MAX - 1);
    });
}

#[test]
fn rope_scaling_is_read_from_factors_or_refused() {
    const TYPE: &str = "llama.rope.scaling.type";
    const FACTOR: &str = "llama.rope.scaling.factor";
    refused("attn_factor` 1.5", |b| b.f32("llama.rope.scaling.attn_factor", 1.5));
    // Zeros, as the builder writes them, cannot divide; and heads of width 2 have one pair.
    refused("a rotary factor is 0", |b| b.tensor("rope_freqs.weight", &[1], 0));
    refused("2 rotary factors for heads of width 2, which need 1", |b| {
        b.tensor("rope_freqs.weight", &[2], 0)
    });
    refused("must be a vector", |b| b.tensor("rope_freqs.weight", &[0, 1 << 40], 0));
    for unscaled in ["none", "linear"] {
        let config = open(|b| {
            b.string(TYPE, unscaled);
            b.f32(FACTOR, 1.0);
            b.f32("llama.rope.freq_base", 5e5);
        });
        let rope = config.unwrap().rope;
        assert_eq!((rope.theta, rope.scaling), (5e5, RopeScaling::None));
    }
}

#[test]
fn a_head_of_its_own_means_untied() {
    assert!(open(|_| {}).unwrap().tie_word_embeddings);
    assert!(!open(|b| b.tensor("output.weight", &[5, 4], 1)).unwrap().tie_word_embeddings);
}

#[test]
fn the_vocabulary_is_the_embedding_s_whatever_the_key_says() {
    for claimed in [0, 4, 6] {
        assert_eq!(open(|b| b.u32("llama.vocab_size", claimed)).unwrap().vocab_size, 5);
    }
    // Padding rows beyond the tokens belong to the vocabulary.
    assert_eq!(open(|b| b.strings("tokenizer.ggml.tokens", &["a", "b"])).unwrap().vocab_size, 5);
}

#[test]
fn end_tokens_are_the_text_s_and_the_turn_s() {
    let config = open(|b| {
        b.u32("tokenizer.ggml.eos_token_id", 4);
        b.u32("tokenizer.ggml.eot_token_id", 2);
    });
    assert_eq!(config.unwrap().eos_token_ids, [2, 4]);
    let same = open(|b| {
        b.u32("tokenizer.ggml.eos_token_id", 4);
        b.u32("tokenizer.ggml.eot_token_id", 4);
    });
    assert_eq!(same.unwrap().eos_token_ids, [4]);
}

#[test]
fn a_begin_token_is_put_before_prompts_only_where_the_file_wants_it() {
    for (add, model, pre, wanted) in [
        (Some(true), "gpt2", "smollm", true),
        (Some(false), "llama", "default", false),
        (None, "llama", "default", true),
        (None, "gpt2", "llama-bpe", true),
        (None, "gpt2", "falcon3", true),
        (Some(false), "gpt2", "llama-bpe", false),
        (None, "gpt2", "smollm", false),
    ] {
        let config = open(|b| {
            b.u32("tokenizer.ggml.bos_token_id", 3);
            b.string("tokenizer.ggml.model", model);
            b.string("tokenizer.ggml.pre", pre);
            if let Some(add) = add {
                b.bool("tokenizer.ggml.add_bos_token", add);
            }
        });
        assert_eq!(config.unwrap().bos_token_id, wanted.then_some(3), "{add:?} {model} {pre}");
    }
}

#[test]
fn sampling_defaults_of_the_metadata_are_read() {
    let mut builder = GgufBuilder::llama();
    builder.f32("general.sampling.temp", 0.7);
    builder.set("general.sampling.top_k", 5, 20_i32.to_le_bytes().to_vec());
    builder.f32("general.sampling.top_p", 1.5);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    fs::write(&path, builder.bytes()).unwrap();
    let expected = GenerationDefaults { temperature: Some(0.7), top_k: Some(20), ..Default::default() };
    assert_eq!(Checkpoint::open(&path).unwrap().generation_defaults(), &expected);
}

#[test]
fn data_starts_at_the_alignment_of_the_file() {
    let mut builder = GgufBuilder::llama();
    let header_end = {
        let mut empty = builder.clone();
        empty.u32("general.alignment", 1);
        parse::parse(&empty.bytes()).unwrap().data_start
    };
    for alignment in [1_u32, 8, 64, 4096] {
        builder.u32("general.alignment", alignment);
        let bytes = builder.bytes_with(8192);
        let start = parse::parse(&bytes).unwrap().data_start;
        assert_eq!(start, header_end.next_multiple_of(alignment as usize));
    }
}

#[test]
fn names_are_mapped_in_their_canonical_spelling_only() {
    let mapped = |name| names::to_hugging_face(name);
    for (gguf, hugging_face, _) in build::TENSORS {
        assert_eq!(mapped(gguf).as_deref(), Some(hugging_face));
        assert_eq!(names::stored_name(hugging_face).as_deref(), Some(gguf));
    }
    assert_eq!(names::stored_name("lm_head.weight").as_deref(), Some("output.weight"));
    assert_eq!(names::stored_name("model.layers.0.self_attn.rotary_emb.inv_freq"), None);
    assert_eq!(
        mapped("blk.27.attn_output.weight").as_deref(),
        Some("model.layers.27.self_attn.o_proj.weight")
    );
    for name in [
        "blk.+1.attn_q.weight",
        "blk.01.attn_q.weight",
        "blk.1.attn_q",
        "blk.1.attn_q.weight.bias",
        "blk",
        "",
    ] {
        assert_eq!(mapped(name), None, "{name}");
    }
}

#[test]
fn ggml_types_that_are_read_have_their_encoding() {
    let known = [
        (0, Encoding::F32),
        (1, Encoding::F16),
        (2, Encoding::Q4_0),
        (3, Encoding::Q4_1),
        (6, Encoding::Q5_0),
        (7, Encoding::Q5_1),
        (8, Encoding::Q8_0),
        (12, Encoding::Q4K),
        (13, Encoding::Q5K),
        (14, Encoding::Q6K),
        (30, Encoding::Bf16),
    ];
    for kind in 0..64 {
        let expected = known.iter().find(|(known, _)| *known == kind).map(|(_, encoding)| *encoding);
        assert_eq!(types::encoding(kind).ok(), expected, "{kind}");
    }
}

#[test]
fn only_bfloat16_is_said_to_be_stored_as_bfloat16() {
    for (kind, stored) in [(0, Some(WeightFormat::Float32)), (1, None), (30, Some(WeightFormat::BFloat16))] {
        let mut builder = GgufBuilder::llama();
        // Vectors are f32 in every file.
        builder
            .tensors
            .iter_mut()
            .filter(|tensor| tensor.dims.len() > 1)
            .for_each(|tensor| tensor.kind = kind);
        let mut offset = 0;
        for tensor in &mut builder.tensors {
            tensor.offset = offset;
            let bytes = if tensor.kind == 0 { 4 } else { 2 };
            offset = (offset + tensor.dims.iter().product::<u64>() * bytes).next_multiple_of(32);
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        fs::write(&path, builder.bytes_with(offset as usize)).unwrap();
        assert_eq!(Checkpoint::open(&path).unwrap().stored_format(), stored, "type {kind}");
    }
}
