use std::{fs, path::PathBuf};

use super::*;
use crate::{
    checkpoint::{
        Checkpoint, read_shape,
        tests::build::{self, GgufBuilder},
    },
    plan::{
        WeightFormat, models,
        shape::{Attention, Experts, GroupedAttention},
    },
};

/// Tensors by name, outermost dimension first, and their types.
type Tensors<'a> = [(&'a str, &'a [usize], u32)];

/// A header with these sizes under `architecture`, and these tensors.
fn header(architecture: &str, sizes: &[(&str, u32)], tensors: &Tensors<'_>) -> GgufBuilder {
    let mut builder = GgufBuilder::llama();
    builder.metadata.clear();
    builder.tensors.clear();
    builder.string("general.architecture", architecture);
    sizes.iter().for_each(|(key, size)| builder.u32(&format!("{architecture}.{key}"), *size));
    tensors.iter().for_each(|(name, shape, kind)| builder.tensor(name, shape, *kind));
    builder
}

/// What is read of a file that ends behind its header.
fn read(builder: &GgufBuilder) -> Result<(ModelShape, Option<u64>), CheckpointError> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("model.gguf");
    fs::write(&path, builder.bytes_with(0)).expect("written");
    read_shape(&path)
}

fn of(
    architecture: &str,
    sizes: &[(&str, u32)],
    tensors: &Tensors<'_>,
) -> Result<(ModelShape, Option<u64>), CheckpointError> {
    read(&header(architecture, sizes, tensors))
}

const F32: u32 = 0;
const F16: u32 = 1;
const Q4_K: u32 = 12;
const BF16: u32 = 30;
const MXFP4: u32 = 39;

const QWEN: [(&str, u32); 8] = [
    ("embedding_length", 4096),
    ("block_count", 36),
    ("feed_forward_length", 12_288),
    ("attention.head_count", 32),
    ("attention.head_count_kv", 8),
    ("attention.key_length", 128),
    ("attention.value_length", 128),
    ("context_length", 40_960),
];

#[test]
fn a_header_gives_the_shape_of_the_table() {
    let tensors: [(&str, &[usize], u32); 3] = [
        ("token_embd.weight", &[151_936, 4096], BF16),
        ("output.weight", &[151_936, 4096], BF16),
        ("blk.0.attn_q.weight", &[4096, 4096], Q4_K),
    ];
    let (qwen, bytes) = of("qwen3", &QWEN, &tensors).expect("a shape");
    assert_eq!(ModelShape { name: "Qwen3-8B".to_owned(), ..qwen }, models::find("Qwen3-8B").expect("known"));
    // Two bytes a number, and 144 for 256 of them.
    assert_eq!(bytes, Some(2 * 151_936 * 4096 * 2 + 4096 * 4096 / 256 * 144));
    let sizes = [
        ("embedding_length", 2880),
        ("block_count", 36),
        ("feed_forward_length", 2880),
        ("expert_feed_forward_length", 2880),
        ("attention.head_count", 64),
        ("attention.head_count_kv", 8),
        ("attention.key_length", 64),
        ("attention.value_length", 64),
        ("attention.sliding_window", 128),
        ("context_length", 131_072),
        ("expert_count", 128),
        ("expert_used_count", 4),
    ];
    let tensors: [(&str, &[usize], u32); 3] = [
        ("token_embd.weight", &[201_088, 2880], 8),
        ("output.weight", &[201_088, 2880], 8),
        ("blk.0.ffn_gate_exps.weight", &[1280, 2880, 2880], MXFP4),
    ];
    let (gpt_oss, _) = of("gpt-oss", &sizes, &tensors).expect("a shape");
    let named = models::find("gpt-oss-120b").expect("known");
    assert_eq!(ModelShape { name: named.name.clone(), ..gpt_oss }, named);
}

#[test]
fn latent_attention_has_the_widths_of_heads_and_not_of_what_is_remembered() {
    let sizes = [
        ("embedding_length", 7168),
        ("block_count", 61),
        ("feed_forward_length", 18_432),
        ("expert_feed_forward_length", 2048),
        ("attention.head_count", 64),
        ("attention.head_count_kv", 1),
        ("attention.key_length", 576),
        ("attention.value_length", 512),
        ("attention.key_length_mla", 192),
        ("attention.value_length_mla", 128),
        ("attention.q_lora_rank", 1536),
        ("attention.kv_lora_rank", 512),
        ("rope.dimension_count", 64),
        ("context_length", 131_072),
        ("expert_count", 384),
        ("expert_used_count", 8),
        ("expert_shared_count", 1),
        ("leading_dense_block_count", 1),
    ];
    let embedding: (&str, &[usize], u32) = ("token_embd.weight", &[163_840, 7168], Q4_K);
    let (kimi, _) =
        of("deepseek2", &sizes, &[embedding, ("output.weight", &[163_840, 7168], Q4_K)]).expect("known");
    let named = models::find("Kimi-K2").expect("known");
    assert_eq!(kimi.stored, None, "four bits are none of a planner's formats");
    let kimi = ModelShape { name: named.name.clone(), stored: named.stored, ..kimi };
    assert_eq!(kimi, named);
    // Files from before the latent vector was remembered have the heads' own widths and no others.
    let older: Vec<_> = sizes
        .into_iter()
        .filter(|(key, _)| !key.ends_with("_mla"))
        .map(|(key, size)| match key {
            "attention.key_length" => (key, 192),
            "attention.value_length" => (key, 128),
            "attention.head_count_kv" => (key, 64),
            _ => (key, size),
        })
        .collect();
    let (older, _) =
        of("deepseek2", &older, &[embedding, ("output.weight", &[163_840, 7168], Q4_K)]).expect("known");
    assert_eq!(ModelShape { name: named.name.clone(), stored: named.stored, ..older }, named);
}

/// Sizes of GLM-4.5-Air, whose last layer drafts tokens.
const GLM: [(&str, u32); 14] = [
    ("embedding_length", 4096),
    ("block_count", 47),
    ("nextn_predict_layers", 1),
    ("leading_dense_block_count", 1),
    ("feed_forward_length", 10_944),
    ("expert_feed_forward_length", 1408),
    ("attention.head_count", 96),
    ("attention.head_count_kv", 8),
    ("attention.key_length", 128),
    ("attention.value_length", 128),
    ("context_length", 131_072),
    ("expert_count", 128),
    ("expert_used_count", 8),
    ("expert_shared_count", 1),
];

/// Sizes of a model of Llama's family.
const LLAMA: [(&str, u32); 6] = [
    ("embedding_length", 4096),
    ("block_count", 32),
    ("feed_forward_length", 14_336),
    ("attention.head_count", 32),
    ("attention.head_count_kv", 8),
    ("context_length", 32_768),
];

fn grouped(shape: &ModelShape) -> GroupedAttention {
    let Attention::Grouped(grouped) = shape.attention else { panic!("{shape:?}") };
    grouped
}

#[test]
fn layers_that_draft_are_no_part_of_the_decoder_and_the_first_are_dense() {
    let tensors: [(&str, &[usize], u32); 3] = [
        ("token_embd.weight", &[151_552, 4096], BF16),
        ("output.weight", &[151_552, 4096], BF16),
        ("blk.0.attn_q.bias", &[12_288], F32),
    ];
    let (air, _) = of("glm4moe", &GLM, &tensors).expect("a shape");
    let named = models::find("GLM-4.5-Air").expect("known");
    assert_eq!(ModelShape { name: named.name.clone(), ..air }, named);
    let with_norms = [&tensors[..], &[("blk.0.attn_q_norm.weight", &[128], F32)]].concat();
    let (shape, _) = of("glm4moe", &GLM, &with_norms).expect("a shape");
    assert!(grouped(&shape).has_qk_norms);
}

#[test]
fn one_name_of_an_architecture_serves_three_families() {
    let tensors: [(&str, &[usize], u32); 2] =
        [("token_embd.weight", &[32_000, 4096], F16), ("output.weight", &[32_000, 4096], F16)];
    let with = |more: &[(&str, u32)]| of("llama", &[&LLAMA[..], more].concat(), &tensors).expect("a shape").0;
    let mixtral = with(&[("expert_count", 8), ("expert_used_count", 2)]);
    let experts = Experts { count: 8, chosen: 2, columns: 14_336, ..Experts::default() };
    assert_eq!((mixtral.experts, mixtral.dense_layers, mixtral.layers()), (Some(experts), 0, 32));
    assert_eq!(mixtral.config, None, "it is planned only");
    assert_eq!((mixtral.stored, mixtral.own_format()), (None, WeightFormat::BFloat16), "F16 has more digits");
    let mistral = with(&[("attention.sliding_window", 4096)]);
    assert!(mistral.windows.iter().all(|window| window.is_some_and(|window| window.get() == 4096)));
    let llama = with(&[]);
    assert!(llama.windows.iter().all(Option::is_none));
    assert_eq!((llama.dense_layers, llama.dense_columns, llama.experts), (32, 14_336, None));
    assert_eq!(grouped(&llama).head_dim, 128, "what is divided by the heads, where no width is given");
}

#[test]
fn qwen2_has_biases_and_a_tied_head_has_no_tensor() {
    let embedding: (&str, &[usize], u32) = ("token_embd.weight", &[151_936, 4096], F32);
    let sizes = QWEN.map(|(key, size)| if key == "attention.head_count_kv" { (key, 4) } else { (key, size) });
    let (tied, _) = of("qwen2", &sizes, &[embedding]).expect("a shape");
    let expected = GroupedAttention {
        query_heads: 32,
        kv_heads: 4,
        head_dim: 128,
        has_qkv_bias: true,
        ..GroupedAttention::default()
    };
    assert_eq!(grouped(&tied), expected);
    assert_eq!((tied.is_head_tied, tied.stored), (true, Some(WeightFormat::Float32)));
    let (untied, _) =
        of("qwen2", &sizes, &[embedding, ("output.weight", &[151_936, 4096], F32)]).expect("a shape");
    assert!(!untied.is_head_tied);
}

#[test]
fn a_format_of_experts_is_none_of_a_dense_model() {
    let tensors: [(&str, &[usize], u32); 2] =
        [("token_embd.weight", &[1000, 4096], F16), ("blk.0.ffn_up.weight", &[12_288, 4096], MXFP4)];
    assert_eq!(of("qwen3", &QWEN, &tensors).expect("a shape").0.stored, None);
    assert_eq!(of("glm4moe", &GLM, &tensors).expect("a shape").0.stored, Some(WeightFormat::Mxfp4));
}

#[test]
fn a_size_for_each_layer_is_taken_only_where_all_are_equal() {
    let tensors: [(&str, &[usize], u32); 1] = [("token_embd.weight", &[1000, 4096], BF16)];
    let with = |key: &str, kind: u32, value: Vec<u8>| {
        let mut builder = header("qwen3", &QWEN, &tensors);
        builder.set(&format!("qwen3.{key}"), kind, value);
        read(&builder)
    };
    let layers = |sizes: &[u32]| -> Vec<u8> {
        let mut value = build::array(4, sizes.len() as u64);
        sizes.iter().for_each(|size| value.extend(size.to_le_bytes()));
        value
    };
    let (equal, _) = with("attention.head_count_kv", 9, layers(&[4; 36])).expect("a shape");
    assert_eq!(grouped(&equal).kv_heads, 4);
    let ones: Vec<(&str, u32, Vec<u8>)> = vec![
        ("attention.head_count_kv", 9, layers(&[8, 4])),
        ("attention.head_count_kv", 9, layers(&[])),
        ("feed_forward_length", 6, 12_288.0_f32.to_le_bytes().to_vec()),
        ("block_count", 8, build::string(b"36")),
        ("context_length", 5, (-1_i32).to_le_bytes().to_vec()),
    ];
    for (key, kind, value) in ones {
        let error = with(key, kind, value).expect_err(key).to_string();
        assert!(error.contains(&format!("key `qwen3.{key}` must be one non-negative integer")), "{error}");
    }
}

#[test]
fn the_configuration_stays_where_the_architecture_is_one_that_runs() {
    // A type that is not read is what keeps this one from running.
    let mut builder = GgufBuilder::llama();
    builder.tensor("output.weight", &[5, 4], 11);
    let (shape, bytes) = read(&builder).expect("a shape");
    let config = shape.config.clone().expect("it is a Llama");
    assert_eq!((config.num_heads, config.vocab_size, config.tie_word_embeddings), (2, 5, false));
    assert_eq!(ModelShape { stored: shape.stored, ..ModelShape::from(&*config) }, shape);
    assert!(bytes.is_some());
    builder.tensor("blk.0.attn_q.bias", &[4], F32);
    assert_eq!(read(&builder).expect("a shape").0.config, None, "it has what no configuration says");
}

/// Writes a model in three parts as `llama-gguf-split` does: metadata in the first alone.
fn split(folder: &Path) -> impl Fn(usize) -> PathBuf {
    let folder = folder.to_owned();
    let file = move |number: usize| folder.join(format!("model-{number:05}-of-00003.gguf"));
    let tensors: [&Tensors<'_>; 3] =
        [&[], &[("token_embd.weight", &[151_936, 4096], BF16)], &[("output.weight", &[151_936, 4096], BF16)]];
    for (at, tensors) in tensors.into_iter().enumerate() {
        let mut builder = header("qwen3", if at == 0 { &QWEN } else { &[] }, tensors);
        if at > 0 {
            builder.remove("general.architecture");
        }
        builder.set("split.no", 2, (at as u16).to_le_bytes().to_vec());
        builder.set("split.count", 2, 3_u16.to_le_bytes().to_vec());
        fs::write(file(at + 1), builder.bytes_with(0)).expect("written");
    }
    file
}

#[test]
fn a_model_in_parts_is_planned_from_the_headers_of_all() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = split(folder.path());
    let named = models::find("Qwen3-8B").expect("known");
    for given in [1, 3] {
        let (shape, bytes) = read_shape(&file(given)).expect("a shape");
        assert_eq!(ModelShape { name: named.name.clone(), ..shape }, named, "part {given}");
        assert_eq!(bytes, Some(2 * 151_936 * 4096 * 2));
    }
    // To run, they must be one.
    let error = Checkpoint::open(&file(1)).expect_err("refused").to_string();
    assert!(error.contains("it is part 1 of 3") && error.contains("llama-gguf-split --merge"), "{error}");
}

#[test]
fn parts_that_are_missing_or_swapped_are_named() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = split(folder.path());
    let refused = |given: &Path| read_shape(given).expect_err("refused").to_string();
    fs::rename(file(2), folder.path().join("elsewhere.gguf")).expect("moved");
    let error = refused(&file(1));
    assert!(error.contains("part 2 is missing") && error.contains("model-00002-of-00003.gguf"), "{error}");
    fs::copy(file(3), file(2)).expect("copied");
    let error = refused(&file(1));
    assert!(error.contains("model-00002-of-00003.gguf: its name says"), "{error}");
    let error = refused(&folder.path().join("elsewhere.gguf"));
    assert!(error.contains("does not end with -00002-of-00003.gguf"), "{error}");
}

#[test]
fn what_a_planner_does_not_know_is_refused_by_name() {
    let refused = |architecture: &str, sizes: &[(&str, u32)]| {
        of(architecture, sizes, &[]).expect_err("refused").to_string()
    };
    assert!(refused("phi3", &QWEN).contains("the architecture `phi3`"));
    // By the names that the file has for them.
    assert!(refused("qwen3", &QWEN).contains("key `qwen3.vocab_size` is missing"));
    assert!(refused("qwen3", &QWEN[1..]).contains("key `qwen3.embedding_length` is missing"));
}
