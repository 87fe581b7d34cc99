//! Damaged and hostile files, each with the whole text of its error.

use std::fs;

use crate::checkpoint::{
    Checkpoint,
    tests::build::{self, GgufBuilder},
    tests::message,
};

const Q: &str = "blk.0.attn_q.weight";
const UP: &str = "blk.0.ffn_up.weight";
const LAST: &str = "blk.0.ffn_down.weight";

/// Opens the bytes and returns the error's text behind the folder's name.
fn error_of(bytes: &[u8]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    fs::write(&path, bytes).unwrap();
    let error = message(&Checkpoint::open(&path).expect_err("it opened"));
    error.replace(&format!("{}/", folder.path().display()), "")
}

/// What is done to the smallest Llama, and the error.
type Case<'a> = (fn(&mut GgufBuilder), &'a str);

#[track_caller]
fn check(cases: &[Case<'_>]) {
    for (change, expected) in cases {
        let mut builder = GgufBuilder::llama();
        change(&mut builder);
        assert_eq!(error_of(&builder.bytes()), *expected);
    }
}

/// Where the bytes of `key` stand in the file.
fn find(bytes: &[u8], key: &str) -> usize {
    bytes.windows(key.len()).position(|window| window == key.as_bytes()).unwrap()
}

#[test]
fn tensors_that_lie_where_they_cannot() {
    check(&[
        (
            |b| b.tensor_mut(Q).offset += 1,
            "model.gguf is damaged or incomplete at byte 1024: tensor `blk.0.attn_q.weight`: its offset \
             161 is no multiple of the alignment 32",
        ),
        (
            |b| b.tensor_mut(Q).offset = u64::MAX,
            "model.gguf is damaged or incomplete at byte 1024: tensor `blk.0.attn_q.weight`: its offset \
             18446744073709551615 is no multiple of the alignment 32",
        ),
        (
            |b| b.tensor_mut(Q).offset = u64::MAX - 31,
            "model.gguf is damaged or incomplete at byte 1024: tensor `blk.0.attn_q.weight`: its offset \
             18446744073709551584 goes past the end of the file, after 672 bytes of data",
        ),
        (
            |b| b.tensor_mut(Q).offset -= 32,
            "model.gguf is damaged or incomplete at byte 1024: tensor `blk.0.attn_q.weight` starts at \
             128 of the data and overlaps tensor `blk.0.attn_norm.weight`, which ends at 144",
        ),
        (
            |b| b.tensor_mut(Q).offset += 32,
            "model.gguf is damaged or incomplete at byte 1024: the bytes 160..192 of the data, between \
             tensor `blk.0.attn_norm.weight` and tensor `blk.0.attn_q.weight`, belong to no tensor",
        ),
        (
            |b| b.tensor_mut(UP).offset = 0,
            "model.gguf is damaged or incomplete at byte 1024: tensor `blk.0.ffn_up.weight` starts at 0 \
             of the data and overlaps tensor `token_embd.weight`, which ends at 80",
        ),
        (
            |b| b.tensor_mut("token_embd.weight").offset = 32,
            "model.gguf is damaged or incomplete at byte 1024: the bytes 0..32 of the data, between the \
             header and tensor `token_embd.weight`, belong to no tensor",
        ),
        (
            |b| b.tensor_mut(LAST).offset += 32,
            "model.gguf is damaged or incomplete at byte 1024: tensor `blk.0.ffn_down.weight`: its 96 \
             bytes from 608 go past the end of the file, after 672 bytes of data; was the download \
             interrupted?",
        ),
        (
            |b| b.tensor_mut(LAST).offset += 1 << 40,
            "model.gguf is damaged or incomplete at byte 1024: tensor `blk.0.ffn_down.weight`: its \
             offset 1099511628352 goes past the end of the file, after 672 bytes of data",
        ),
        // Two of one size in one place.
        (
            |b| {
                let offset = b.tensor_mut(Q).offset;
                b.tensor_mut("blk.0.attn_output.weight").offset = offset;
            },
            "model.gguf is damaged or incomplete at byte 1024: tensor `blk.0.attn_output.weight` starts \
             at 160 of the data and overlaps tensor `blk.0.attn_q.weight`, which ends at 224",
        ),
        // A surplus tensor counts, read or not.
        (
            |b| {
                b.tensor("vision.weight", &[8], 26);
                b.tensor_mut("vision.weight").dims = vec![1 << 40];
            },
            "model.gguf is damaged or incomplete at byte 1056: tensor `vision.weight`: its 4398046511104 \
             bytes from 672 go past the end of the file, after 704 bytes of data; was the download \
             interrupted?",
        ),
        (
            |b| {
                b.tensor("vision.weight", &[8], 26);
                b.tensor_mut("vision.weight").offset = 0;
            },
            "model.gguf is damaged or incomplete at byte 1056: tensor `token_embd.weight` starts at 0 of \
             the data and overlaps tensor `vision.weight`, which ends at 32",
        ),
    ]);
}

#[test]
fn shapes_that_cannot_be() {
    check(&[
        (
            |b| b.tensor_mut(Q).dims = vec![],
            "model.gguf is damaged or incomplete at byte 992: the bytes 192..224 of the data, between \
             tensor `blk.0.attn_q.weight` and tensor `blk.0.attn_k.weight`, belong to no tensor",
        ),
        (
            |b| b.tensor_mut(Q).dims = vec![16],
            "model.gguf: tensor `model.layers.0.self_attn.q_proj.weight` (`blk.0.attn_q.weight` in GGUF): \
             its 1 rows are not whole heads \
             of 2",
        ),
        (
            |b| b.tensor_mut(Q).dims = vec![4, 4, 1],
            "model.gguf: tensor `model.layers.0.self_attn.q_proj.weight` (`blk.0.attn_q.weight` in GGUF) \
             is [1, 4, 4], but the \
             configuration implies [4, 4]",
        ),
        (
            |b| b.tensor_mut(Q).dims = vec![1; 5],
            "model.gguf is damaged or incomplete at byte 546: tensor entry 3 of 11: \
             `blk.0.attn_q.weight` has 5 dimensions; at most 4 exist",
        ),
        (
            |b| b.tensor_mut(Q).dims = vec![1; 1000],
            "model.gguf is damaged or incomplete at byte 546: tensor entry 3 of 11: \
             `blk.0.attn_q.weight` has 1000 dimensions; at most 4 exist",
        ),
        (
            |b| b.tensor_mut(Q).dims = vec![2, 4],
            "model.gguf is damaged or incomplete at byte 1024: the bytes 192..224 of the data, between \
             tensor `blk.0.attn_q.weight` and tensor `blk.0.attn_k.weight`, belong to no tensor",
        ),
        (
            |b| b.tensor_mut(Q).dims = vec![0, 4],
            "model.gguf is damaged or incomplete at byte 1024: the bytes 160..224 of the data, between \
             tensor `blk.0.attn_q.weight` and tensor `blk.0.attn_k.weight`, belong to no tensor",
        ),
        (
            |b| b.tensor_mut(Q).dims = vec![4, 0],
            "model.gguf is damaged or incomplete at byte 1024: the bytes 160..224 of the data, between \
             tensor `blk.0.attn_q.weight` and tensor `blk.0.attn_k.weight`, belong to no tensor",
        ),
        (
            |b| b.tensor_mut(Q).dims = vec![0, u64::MAX],
            "model.gguf is damaged or incomplete at byte 1024: the bytes 160..224 of the data, between \
             tensor `blk.0.attn_q.weight` and tensor `blk.0.attn_k.weight`, belong to no tensor",
        ),
        (
            |b| b.tensor_mut(Q).dims = vec![u64::MAX, 0],
            "model.gguf is damaged or incomplete at byte 1024: the bytes 160..224 of the data, between \
             tensor `blk.0.attn_q.weight` and tensor `blk.0.attn_k.weight`, belong to no tensor",
        ),
        (
            |b| b.tensor_mut(Q).dims = vec![u64::MAX, u64::MAX],
            "model.gguf is damaged or incomplete at byte 1024: tensor `blk.0.attn_q.weight`: its shape \
             [18446744073709551615, 18446744073709551615] overflows",
        ),
        (
            |b| b.tensor_mut(Q).dims = vec![1 << 32, 1 << 32],
            "model.gguf is damaged or incomplete at byte 1024: tensor `blk.0.attn_q.weight`: its shape \
             [4294967296, 4294967296] overflows",
        ),
        (
            |b| b.tensor_mut(Q).dims = vec![1 << 31, 1 << 31],
            "model.gguf is damaged or incomplete at byte 1024: tensor `blk.0.attn_q.weight`: its shape \
             [2147483648, 2147483648] overflows",
        ),
        (
            |b| b.tensor_mut(Q).dims = vec![4, 1 << 61],
            "model.gguf is damaged or incomplete at byte 1024: tensor `blk.0.attn_q.weight`: its shape \
             [2305843009213693952, 4] overflows",
        ),
        (
            |b| b.tensor_mut(LAST).dims = vec![6, 1 << 20],
            "model.gguf is damaged or incomplete at byte 1024: tensor `blk.0.ffn_down.weight`: its \
             25165824 bytes from 576 go past the end of the file, after 672 bytes of data; was the \
             download interrupted?",
        ),
        (
            |b| b.tensor_mut(LAST).dims = vec![6, 3],
            "model.gguf: tensor `model.layers.0.mlp.down_proj.weight` (`blk.0.ffn_down.weight` in GGUF) is \
             [3, 6], but the configuration \
             implies [4, 6]",
        ),
        (
            |b| b.tensor_mut("output_norm.weight").dims = vec![4, 1],
            "model.gguf: tensor `model.norm.weight` (`output_norm.weight` in GGUF) is [1, 4], but the \
             configuration implies [4]",
        ),
    ]);
}

#[test]
fn types_that_cannot_be() {
    check(&[
        (
            |b| b.tensor_mut(UP).kind = 2,
            "model.gguf is damaged or incomplete at byte 1024: tensor `blk.0.ffn_up.weight`: rows of 4 \
             elements cannot be Q4_0 blocks of 32",
        ),
        (
            |b| b.tensor_mut(UP).kind = 14,
            "model.gguf is damaged or incomplete at byte 1024: tensor `blk.0.ffn_up.weight`: rows of 4 \
             elements cannot be Q6_K blocks of 256",
        ),
        (
            |b| b.tensor_mut(UP).kind = 20,
            "model.gguf is damaged or incomplete at byte 1024: tensor `blk.0.ffn_up.weight`: rows of 4 \
             elements cannot be IQ4_NL blocks of 32",
        ),
        (
            |b| b.tensor_mut(UP).kind = 28,
            "model.gguf is damaged or incomplete at byte 1024: tensor `blk.0.ffn_down.weight` starts at \
             576 of the data and overlaps tensor `blk.0.ffn_up.weight`, which ends at 672",
        ),
        (
            |b| b.tensor_mut(UP).kind = 26,
            "model.gguf: tensor `model.layers.0.mlp.up_proj.weight` (`blk.0.ffn_up.weight` in GGUF) is \
             stored as I32; readable types are \
             F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K and Q6_K",
        ),
        (
            |b| b.tensor_mut(UP).kind = 1,
            "model.gguf is damaged or incomplete at byte 1024: the bytes 544..576 of the data, between \
             tensor `blk.0.ffn_up.weight` and tensor `blk.0.ffn_down.weight`, belong to no tensor",
        ),
        (
            |b| b.tensor_mut(UP).kind = u32::MAX,
            "model.gguf: tensor `model.layers.0.mlp.up_proj.weight` (`blk.0.ffn_up.weight` in GGUF) is \
             stored as ggml type 4294967295; \
             readable types are F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K and Q6_K",
        ),
        (
            |b| b.tensor_mut(LAST).kind = 27,
            "model.gguf is damaged or incomplete at byte 1024: tensor `blk.0.ffn_down.weight`: its 192 \
             bytes from 576 go past the end of the file, after 672 bytes of data; was the download \
             interrupted?",
        ),
        (
            |b| b.tensor_mut("output_norm.weight").kind = 24,
            "model.gguf: tensor `model.norm.weight` (`output_norm.weight` in GGUF) is stored as I8; \
             readable types are F32, F16, BF16, \
             Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K and Q6_K",
        ),
    ]);
}

#[test]
fn tensors_that_are_missing_or_there_twice() {
    check(&[
        (
            |b| b.tensors.clear(),
            "model.gguf: key `llama.vocab_size` is missing, and there are neither tokens nor an \
             embedding to count",
        ),
        (
            |b| drop(b.tensors.pop()),
            "model.gguf has no tensor `model.layers.0.mlp.down_proj.weight` (`blk.0.ffn_down.weight` in \
             GGUF; it has 10 others)",
        ),
        (
            |b| b.tensor_mut(Q).name.clear(),
            "model.gguf has no tensor `model.layers.0.self_attn.q_proj.weight` (`blk.0.attn_q.weight` in \
             GGUF; it has 10 others)",
        ),
        (
            |b| b.tensor_mut(Q).name = "x".repeat(1025),
            "model.gguf is damaged or incomplete at byte 519: tensor entry 3 of 11: a name of 1025 bytes \
             exceeds the limit of 1024",
        ),
        (
            |b| b.tensors[4].name = Q.to_owned(),
            "model.gguf is damaged or incomplete at byte 578: tensor `blk.0.attn_q.weight` appears twice",
        ),
        (
            |b| b.u32("llama.block_count", 2),
            "model.gguf has no tensor `model.layers.1.input_layernorm.weight` (`blk.1.attn_norm.weight` in \
             GGUF; it has 11 others)",
        ),
    ]);
}

#[test]
fn counts_and_lengths_beyond_the_file() {
    check(&[
        (
            |b| b.claimed = Some((u64::MAX, 8)),
            "model.gguf is damaged or incomplete at byte 8: 18446744073709551615 tensors cannot fit in \
             the 1680 bytes left",
        ),
        (
            |b| b.claimed = Some((11, u64::MAX)),
            "model.gguf is damaged or incomplete at byte 16: 18446744073709551615 metadata entries \
             cannot fit in the 1672 bytes left",
        ),
        (
            |b| b.claimed = Some((12, 8)),
            "model.gguf is damaged or incomplete at byte 1024: tensor `token_embd.weight` starts at 0 of \
             the data and overlaps tensor ``, which ends at 4",
        ),
        (
            |b| b.claimed = Some((11, 9)),
            "model.gguf is damaged or incomplete at byte 389: tensor entry 0 of 11: 1407374883553280 \
             bytes of a string cannot fit in the 1299 bytes left",
        ),
        (
            |b| b.claimed = Some((11, 7)),
            "model.gguf is damaged or incomplete at byte 350: tensor entry 0 of 11: \
             `llama.attention.layer_norm_rms_epsilon` has 6 dimensions; at most 4 exist",
        ),
        (|b| b.claimed = Some((0, 0)), "model.gguf: key `general.architecture` is missing or not a string"),
        (
            |b| b.set("a", 8, u64::MAX.to_le_bytes().to_vec()),
            "model.gguf is damaged or incomplete at byte 371: metadata key `a`: 18446744073709551615 \
             bytes of a string cannot fit in the 1317 bytes left",
        ),
        (
            |b| b.set("a", 8, 4096_u64.to_le_bytes().to_vec()),
            "model.gguf is damaged or incomplete at byte 371: metadata key `a`: 4096 bytes of a string \
             cannot fit in the 1317 bytes left",
        ),
        (
            |b| b.set("a", 9, build::array(8, u64::MAX)),
            "model.gguf is damaged or incomplete at byte 375: metadata key `a`: 18446744073709551615 \
             strings cannot fit in the 1313 bytes left",
        ),
        (
            |b| b.set("a", 9, build::array(0, u64::MAX)),
            "model.gguf is damaged or incomplete at byte 375: metadata key `a`: 18446744073709551615 \
             array elements cannot fit in the 1313 bytes left",
        ),
        (
            |b| b.set("a", 9, build::array(10, 1 << 61)),
            "model.gguf is damaged or incomplete at byte 375: metadata key `a`: 2305843009213693952 \
             array elements cannot fit in the 1313 bytes left",
        ),
        (
            |b| b.set("a", 9, [build::array(8, 2), build::string(b"x"), vec![255; 8]].concat()),
            "model.gguf is damaged or incomplete at byte 392: metadata key `a`: element 1: \
             18446744073709551615 bytes of a string cannot fit in the 1328 bytes left",
        ),
        (
            |b| b.set(&"k".repeat(65_536), 7, vec![1]),
            "model.gguf is damaged or incomplete at byte 358: metadata entry 8 of 9: a name of 65536 \
             bytes exceeds the limit of 65535",
        ),
    ]);
}

#[test]
fn values_that_cannot_be() {
    check(&[
        (
            |b| b.set("a", 13, vec![0; 8]),
            "model.gguf is damaged or incomplete at byte 371: metadata key `a`: there is no value type 13",
        ),
        (
            |b| b.set("a", u32::MAX, vec![0; 8]),
            "model.gguf is damaged or incomplete at byte 371: metadata key `a`: there is no value type \
             4294967295",
        ),
        (
            |b| b.set("a", 9, build::array(9, 1)),
            "model.gguf is damaged or incomplete at byte 375: metadata key `a`: arrays of arrays are not \
             supported",
        ),
        (
            |b| b.set("a", 9, build::array(13, 1)),
            "model.gguf is damaged or incomplete at byte 375: metadata key `a`: there is no array \
             element type 13",
        ),
        (
            |b| b.string("general.architecture", "mamba"),
            "model.gguf needs the architecture `mamba`, which is not supported; supported: llama",
        ),
        (
            |b| b.u32("general.alignment", 0),
            "model.gguf is damaged or incomplete at byte 1027: `general.alignment` must be a power of \
             two up to 1048576",
        ),
        (
            |b| b.u32("general.alignment", 3),
            "model.gguf is damaged or incomplete at byte 1027: `general.alignment` must be a power of \
             two up to 1048576",
        ),
        (
            |b| b.u32("general.alignment", 1 << 31),
            "model.gguf is damaged or incomplete at byte 1027: `general.alignment` must be a power of \
             two up to 1048576",
        ),
        (
            |b| b.set("general.alignment", 10, (1_u64 << 63).to_le_bytes().to_vec()),
            "model.gguf is damaged or incomplete at byte 1031: `general.alignment` must be a power of \
             two up to 1048576",
        ),
        (
            |b| b.f32("llama.attention.layer_norm_rms_epsilon", f32::NAN),
            "model.gguf: key `llama.attention.layer_norm_rms_epsilon` must be a finite number",
        ),
        (
            |b| b.f32("llama.rope.freq_base", f32::NAN),
            "model.gguf: key `llama.rope.freq_base` must be a finite number",
        ),
        (
            |b| b.f32("llama.rope.freq_base", f32::INFINITY),
            "model.gguf: key `llama.rope.freq_base` must be a finite number",
        ),
        (
            |b| b.u32("llama.context_length", u32::MAX),
            "model.gguf: a context of 4294967295 tokens exceeds the limit of 134217728",
        ),
        (
            |b| b.set("llama.embedding_length", 10, u64::MAX.to_le_bytes().to_vec()),
            "model.gguf: hidden size 18446744073709551615 is no multiple of 2 attention heads",
        ),
        (
            |b| b.set("llama.attention.head_count", 5, (-1_i32).to_le_bytes().to_vec()),
            "model.gguf: key `llama.attention.head_count` must be one non-negative integer",
        ),
    ]);
}

#[test]
fn rotary_factors_that_are_no_factors() {
    for (factor, expected) in [
        (f32::NAN, "model.gguf: a rotary factor is NaN; all must be positive"),
        (f32::INFINITY, "model.gguf: a rotary factor is inf; all must be positive"),
        (-1.0, "model.gguf: a rotary factor is -1; all must be positive"),
        (0.0, "model.gguf: a rotary factor is 0; all must be positive"),
    ] {
        let mut builder = GgufBuilder::llama();
        builder.tensor("rope_freqs.weight", &[1], 0);
        let mut bytes = builder.bytes();
        // One value and its padding end the file.
        let at = bytes.len() - 32;
        bytes[at..at + 4].copy_from_slice(&factor.to_le_bytes());
        assert_eq!(error_of(&bytes), expected);
    }
}

#[test]
fn a_file_that_ends_early_says_where() {
    let whole = GgufBuilder::llama().bytes();
    let entry = find(&whole, Q);
    for (length, expected) in [
        (0, "model.gguf is not a checkpoint: it is empty"),
        (
            3,
            "model.gguf is not a checkpoint: it is neither a GGUF file nor a folder with config.json and \
             safetensors",
        ),
        (4, "model.gguf is damaged or incomplete at byte 4: 4 bytes are wanted, but 0 are left"),
        (6, "model.gguf is damaged or incomplete at byte 4: 4 bytes are wanted, but 2 are left"),
        (8, "model.gguf is damaged or incomplete at byte 8: 8 bytes are wanted, but 0 are left"),
        (23, "model.gguf is damaged or incomplete at byte 8: 11 tensors cannot fit in the 7 bytes left"),
        (24, "model.gguf is damaged or incomplete at byte 8: 11 tensors cannot fit in the 8 bytes left"),
        (
            find(&whole, "llama.block_count") + 9,
            "model.gguf is damaged or incomplete at byte 8: 11 tensors cannot fit in the 108 bytes left",
        ),
        (
            find(&whole, "llama.block_count") + 17,
            "model.gguf is damaged or incomplete at byte 8: 11 tensors cannot fit in the 116 bytes left",
        ),
        (
            entry,
            "model.gguf is damaged or incomplete at byte 519: tensor entry 3 of 11: 19 bytes of a string \
             cannot fit in the 0 bytes left",
        ),
        (
            entry + Q.len() + 4 + 8,
            "model.gguf is damaged or incomplete at byte 558: tensor entry 3 of 11: \
             `blk.0.attn_q.weight`: 8 bytes are wanted, but 0 are left",
        ),
        (
            whole.len() - 33,
            "model.gguf is damaged or incomplete at byte 1024: tensor `blk.0.ffn_down.weight`: its 96 \
             bytes from 576 go past the end of the file, after 639 bytes of data; was the download \
             interrupted?",
        ),
        (
            whole.len() - 512,
            "model.gguf is damaged or incomplete at byte 1024: tensor `blk.0.attn_q.weight`: its 64 \
             bytes from 160 go past the end of the file, after 160 bytes of data; was the download \
             interrupted?",
        ),
    ] {
        assert_eq!(error_of(&whole[..length]), expected, "cut to {length} of {} bytes", whole.len());
    }
}
