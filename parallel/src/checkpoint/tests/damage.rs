//! Damaged and hostile safetensors folders, each with the whole text of its error.

use std::{fs, path::Path};

use serde_json::{Value, json};

use super::{build, message};
use crate::checkpoint::Checkpoint;

const Q: &str = "model.layers.0.self_attn.q_proj.weight";

/// Opens a folder and returns the error's text without the folder's name.
fn error_of(folder: &Path) -> String {
    let error = message(&Checkpoint::open(folder).expect_err("it opened"));
    error.replace(&format!("{}/", folder.display()), "").replace(&folder.display().to_string(), "FOLDER")
}

/// A file with this header and as many zeros behind it.
fn file(header: &[u8], data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header);
    bytes.resize(bytes.len() + data, 0);
    bytes
}

/// The error of the smallest Llama with this in place of its weights.
fn error_of_file(bytes: &[u8]) -> String {
    let folder = build::folder(&build::config(), &build::tensors());
    fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
    error_of(folder.path())
}

#[test]
fn headers_that_contradict_the_file() {
    for (length, rest, expected) in [
        (
            0,
            0,
            "model.safetensors is not a readable safetensors file: its header is malformed: EOF while \
             parsing a value at line 1 column 0",
        ),
        (
            2,
            1,
            "model.safetensors is damaged or incomplete at byte 0: its header of 2 bytes goes past the \
             end of the file or is absurd",
        ),
        (
            u64::MAX,
            64,
            "model.safetensors is damaged or incomplete at byte 0: its header of 18446744073709551615 \
             bytes goes past the end of the file or is absurd",
        ),
        (
            i64::MAX as u64,
            64,
            "model.safetensors is damaged or incomplete at byte 0: its header of 9223372036854775807 \
             bytes goes past the end of the file or is absurd",
        ),
        (
            u64::MAX - 7,
            64,
            "model.safetensors is damaged or incomplete at byte 0: its header of 18446744073709551608 \
             bytes goes past the end of the file or is absurd",
        ),
        (
            100_000_001,
            64,
            "model.safetensors is damaged or incomplete at byte 0: its header of 100000001 bytes goes \
             past the end of the file or is absurd",
        ),
    ] {
        let mut bytes = u64::to_le_bytes(length).to_vec();
        bytes.resize(8 + rest, b'{');
        assert_eq!(error_of_file(&bytes), expected, "{length}");
    }
    assert_eq!(
        error_of_file(b"\x02\0\0"),
        "model.safetensors is damaged or incomplete at byte 0: 3 bytes are too short for a safetensors file"
    );
    assert_eq!(error_of_file(b""), "model.safetensors is not a checkpoint: it is empty");
    assert_eq!(
        error_of_file(&file(b"{}", 1)),
        "model.safetensors is damaged or incomplete at byte 8: the header describes 0 bytes of tensors, \
         but 1 follow it"
    );
    assert_eq!(
        error_of_file(&file(b"{}", 0)),
        "FOLDER has no tensor `model.embed_tokens.weight` (it has 0 others)"
    );
}

#[test]
fn headers_that_are_no_headers() {
    let deep = format!(r#"{{"a":{}"#, "[".repeat(100_000));
    let nine = r#"{"a":{"dtype":"F32","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,4]}}"#;
    let twice = r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},
                    "\u0061":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#;
    let long = format!(r#"{{"{}":1}}"#, "x".repeat(1025));
    for (header, expected) in [
        (
            "[]",
            "model.safetensors is not a readable safetensors file: its header is malformed: invalid \
             type: sequence, expected an object of tensors at line 1 column 0",
        ),
        (
            "{",
            "model.safetensors is not a readable safetensors file: its header is malformed: EOF while \
             parsing an object at line 1 column 1",
        ),
        (
            "{}}",
            "model.safetensors is not a readable safetensors file: its header is malformed: trailing \
             characters at line 1 column 3",
        ),
        (
            "\u{feff}{}",
            "model.safetensors is not a readable safetensors file: its header is malformed: expected \
             value at line 1 column 1",
        ),
        (
            r#"{"a":1}"#,
            "model.safetensors is not a readable safetensors file: its header is malformed: tensor `a`: \
             invalid type: integer `1`, expected an object with dtype, shape and data_offsets at line 1 column 6",
        ),
        (
            r#"{"a":{}}"#,
            "model.safetensors is not a readable safetensors file: its header is malformed: tensor `a`: \
             missing field `dtype` at line 1 column 7",
        ),
        (
            r#"{"a":{"dtype":"F33","shape":[1],"data_offsets":[0,4]}}"#,
            "model.safetensors is not a readable safetensors file: its header is malformed: tensor `a`: \
             unknown variant `F33`, expected one of `BOOL`, `F4`, `F6_E2M3`, `F6_E3M2`, `U8`, `I8`, \
             `F8_E5M2`, `F8_E4M3`, `F8_E8M0`, `F8_E4M3FNUZ`, `F8_E5M2FNUZ`, `I16`, `U16`, `F16`, `BF16`, \
             `I32`, `U32`, `F32`, `C64`, `F64`, `I64`, `U64` at line 1 column 54",
        ),
        (
            r#"{"a":{"dtype":32,"shape":[1],"data_offsets":[0,4]}}"#,
            "model.safetensors is not a readable safetensors file: its header is malformed: tensor `a`: \
             invalid type: integer `32`, expected a string at line 1 column 16",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":4,"data_offsets":[0,4]}}"#,
            "model.safetensors is not a readable safetensors file: its header is malformed: tensor `a`: \
             invalid type: integer `4`, expected at most 8 dimensions at line 1 column 29",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}"#,
            "model.safetensors is not a readable safetensors file: its header is malformed: tensor `a`: \
             invalid value: integer `-1`, expected usize at line 1 column 31",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}"#,
            "model.safetensors is not a readable safetensors file: its header is malformed: tensor `a`: \
             invalid type: floating point `1.0`, expected usize at line 1 column 32",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[18446744073709551616],"data_offsets":[0,4]}}"#,
            "model.safetensors is not a readable safetensors file: its header is malformed: tensor `a`: \
             invalid type: floating point `1.8446744073709552e+19`, expected usize at line 1 column 49",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}}"#,
            "model.safetensors is not a readable safetensors file: its header is malformed: tensor `a`: \
             invalid length 1, expected an array of length 2 at line 1 column 50",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4,8]}}"#,
            "model.safetensors is not a readable safetensors file: its header is malformed: tensor `a`: \
             trailing characters at line 1 column 53",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4]}}"#,
            "model.safetensors is not a readable safetensors file: its header is malformed: tensor `a`: \
             duplicate field `shape` at line 1 column 39",
        ),
        (
            nine,
            "model.safetensors is not a readable safetensors file: its header is malformed: tensor `a`: \
             invalid length 9, expected at most 8 dimensions at line 1 column 47",
        ),
        (
            twice,
            "model.safetensors is damaged or incomplete at byte 8: tensor `a` appears twice in the header",
        ),
        (
            &long,
            "model.safetensors is not a readable safetensors file: its header is malformed: a name of \
             1025 bytes exceeds the limit of 1024 at line 1 column 1028",
        ),
        (
            &deep,
            "model.safetensors is not a readable safetensors file: its header is malformed: tensor `a`: \
             invalid type: sequence, expected a string at line 1 column 6",
        ),
    ] {
        assert_eq!(
            error_of_file(&file(header.as_bytes(), 8)),
            expected,
            "{}",
            &header[..header.len().min(200)]
        );
    }
    assert_eq!(
        error_of_file(&file(b"{\"\xff\":1}", 8)),
        "model.safetensors is not a readable safetensors file: its header is malformed: invalid unicode \
         code point at line 1 column 3"
    );
}

/// The value of a tensor's key in a header.
fn described(dtype: &str, shape: Value, offsets: [u64; 2]) -> Value {
    json!({"dtype": dtype, "shape": shape, "data_offsets": offsets})
}

/// Eight tensors, sound each by itself, whose data end at the last address: a header before them overflows.
fn together_past_every_address() -> Value {
    let size = u64::MAX / 8;
    let entry = |i: u64| json!({"dtype": "U8", "shape": [size], "data_offsets": [i * size, (i + 1) * size]});
    Value::Object((0..8).map(|i| (format!("t{i}"), entry(i))).collect())
}

#[test]
fn tensors_that_lie_where_they_cannot() {
    let typed = |dtype: &str, shape: Value, end: u64| described(dtype, shape, [0, end]);
    let single = |shape: Value, start: u64, end: u64| described("F32", shape, [start, end]);
    let most = u64::MAX;
    for (header, expected) in [
        (
            json!({"a": single(json!([2]), 0, 8), "b": single(json!([2]), 4, 12)}),
            "model.safetensors is damaged or incomplete at byte 8: tensor `b` starts at 4 of the data \
             and overlaps tensor `a`, which ends at 8",
        ),
        (
            json!({"a": single(json!([2]), 0, 8), "b": single(json!([2]), 0, 8)}),
            "model.safetensors is damaged or incomplete at byte 8: tensor `b` starts at 0 of the data \
             and overlaps tensor `a`, which ends at 8",
        ),
        (
            json!({"a": single(json!([1]), 0, 4), "b": single(json!([1]), 8, 12)}),
            "model.safetensors is damaged or incomplete at byte 8: the bytes 4..8 of the data, between \
             tensor `a` and tensor `b`, belong to no tensor",
        ),
        (
            json!({"a": single(json!([1]), 8, 12)}),
            "model.safetensors is damaged or incomplete at byte 8: the bytes 0..8 of the data, between \
             the header and tensor `a`, belong to no tensor",
        ),
        (
            json!({"a": single(json!([1]), 4, 0)}),
            "model.safetensors is damaged or incomplete at byte 8: tensor `a`: its data_offsets [4, 0] \
             are reversed",
        ),
        (
            json!({"a": single(json!([2]), 0, 8)}),
            "model.safetensors is damaged or incomplete at byte 8: the header describes 8 bytes of \
             tensors, but 12 follow it",
        ),
        (
            json!({"a": single(json!([4]), 0, 16)}),
            "model.safetensors is damaged or incomplete at byte 8: tensor `a`: its 16 bytes from 0 go past \
             the end of the file, after 12 bytes of data; was the download interrupted?",
        ),
        (
            json!({"a": single(json!([1_u64 << 40]), 0, 1 << 42)}),
            "model.safetensors is damaged or incomplete at byte 8: tensor `a`: its 4398046511104 bytes from \
             0 go past the end of the file, after 12 bytes of data; was the download interrupted?",
        ),
        (
            json!({"a": single(json!([3]), 0, 16)}),
            "model.safetensors is damaged or incomplete at byte 8: tensor `a`: [3] of F32 takes 12 \
             bytes, but its data_offsets hold 16",
        ),
        (
            json!({"a": single(json!([]), 0, 8)}),
            "model.safetensors is damaged or incomplete at byte 8: tensor `a`: [] of F32 takes 4 bytes, \
             but its data_offsets hold 8",
        ),
        (
            json!({"a": single(json!([0]), 0, 12)}),
            "model.safetensors is damaged or incomplete at byte 8: tensor `a`: [0] of F32 takes 0 bytes, \
             but its data_offsets hold 12",
        ),
        (
            json!({"a": single(json!([most, most]), 0, 12)}),
            "model.safetensors is damaged or incomplete at byte 8: tensor `a`: its shape \
             [18446744073709551615, 18446744073709551615] overflows",
        ),
        (
            json!({"a": single(json!([most, 2, 0]), 0, 0)}),
            "model.safetensors is damaged or incomplete at byte 8: tensor `a`: its shape \
             [18446744073709551615, 2, 0] overflows",
        ),
        (
            json!({"a": single(json!([1_u64 << 62]), 0, 0)}),
            "model.safetensors is damaged or incomplete at byte 8: tensor `a`: its shape \
             [4611686018427387904] overflows",
        ),
        (
            json!({"a": single(json!([1]), 0, most)}),
            "model.safetensors is damaged or incomplete at byte 8: tensor `a`: [1] of F32 takes 4 bytes, \
             but its data_offsets hold 18446744073709551615",
        ),
        (
            json!({"a": single(json!([1]), most, most)}),
            "model.safetensors is damaged or incomplete at byte 8: the bytes 0..18446744073709551615 of \
             the data, between the header and tensor `a`, belong to no tensor",
        ),
        (
            json!({"a": typed("F4", json!([3]), 1)}),
            "model.safetensors is damaged or incomplete at byte 8: tensor `a`: [3] of F4 takes 2 bytes, \
             but its data_offsets hold 1",
        ),
        (
            json!({"a": typed("F16", json!([3]), 12)}),
            "model.safetensors is damaged or incomplete at byte 8: tensor `a`: [3] of F16 takes 6 bytes, \
             but its data_offsets hold 12",
        ),
        (
            together_past_every_address(),
            "model.safetensors is damaged or incomplete at byte 8: tensor `t0`: its 2305843009213693951 \
             bytes from 0 go past the end of the file, after 12 bytes of data; was the download \
             interrupted?",
        ),
    ] {
        assert_eq!(error_of_file(&file(header.to_string().as_bytes(), 12)), expected, "{header}");
    }
}

#[test]
fn tensors_that_are_not_what_the_configuration_wants() {
    use safetensors::Dtype::{F32, F64, I8};
    for (dtype, shape, expected) in [
        (
            F32,
            Some(&[4, 5][..]),
            "FOLDER: tensor `model.layers.0.self_attn.q_proj.weight` is [4, 5], but the configuration \
             implies [4, 4]",
        ),
        (
            F32,
            Some(&[16]),
            "FOLDER: tensor `model.layers.0.self_attn.q_proj.weight` is [16], but the configuration \
             implies [4, 4]",
        ),
        (
            F32,
            Some(&[]),
            "FOLDER: tensor `model.layers.0.self_attn.q_proj.weight` is [], but the configuration \
             implies [4, 4]",
        ),
        (
            F32,
            Some(&[4, 0]),
            "FOLDER: tensor `model.layers.0.self_attn.q_proj.weight` is [4, 0], but the configuration \
             implies [4, 4]",
        ),
        (
            F64,
            Some(&[4, 4]),
            "FOLDER: tensor `model.layers.0.self_attn.q_proj.weight` is stored as F64; readable types \
             are F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K and Q6_K",
        ),
        (
            I8,
            Some(&[4, 4]),
            "FOLDER: tensor `model.layers.0.self_attn.q_proj.weight` is stored as I8; readable types are \
             F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K and Q6_K",
        ),
        (F32, None, "FOLDER has no tensor `model.layers.0.self_attn.q_proj.weight` (it has 10 others)"),
    ] {
        let mut tensors = build::tensors();
        tensors.remove(Q);
        if let Some(shape) = shape {
            tensors.insert(Q.to_owned(), build::Zeros { dtype, shape: shape.to_vec() });
        }
        let folder = build::folder(&build::config(), &tensors);
        assert_eq!(error_of(folder.path()), expected, "{dtype:?} {shape:?}");
    }
}

/// The smallest Llama in one file under an index of this text.
fn error_of_index(index: &str) -> String {
    let folder = build::folder(&build::config(), &build::tensors());
    fs::rename(folder.path().join("model.safetensors"), folder.path().join("one.safetensors")).unwrap();
    fs::create_dir(folder.path().join("sub")).unwrap();
    fs::write(folder.path().join("model.safetensors.index.json"), index).unwrap();
    error_of(folder.path())
}

#[test]
fn an_index_that_cannot_be_followed() {
    for (index, expected) in [
        ("", "model.safetensors.index.json is not valid JSON: EOF while parsing a value at line 1 column 0"),
        (
            "[]",
            "model.safetensors.index.json is not valid JSON: invalid type: sequence, expected an object \
             at line 1 column 0",
        ),
        (
            "{}",
            "model.safetensors.index.json: key `weight_map` must be an object of tensor names and file \
             names",
        ),
        (
            r#"{"weight_map": null}"#,
            "model.safetensors.index.json: key `weight_map` must be an object of tensor names and file \
             names",
        ),
        (
            r#"{"weight_map": []}"#,
            "model.safetensors.index.json: key `weight_map` must be an object of tensor names and file \
             names",
        ),
        (r#"{"weight_map": {}}"#, "FOLDER has no tensor `model.embed_tokens.weight` (it has 0 others)"),
        (
            r#"{"weight_map": {}, "weight_map": {}}"#,
            "model.safetensors.index.json: key `weight_map` is there twice",
        ),
        (
            r#"{"weight_map": {"a": 1}}"#,
            "model.safetensors.index.json: key `weight_map.a` must be the name of a file in the same folder",
        ),
        (
            r#"{"weight_map": {"a": ["one.safetensors"]}}"#,
            "model.safetensors.index.json: key `weight_map.a` must be the name of a file in the same folder",
        ),
        (
            r#"{"weight_map": {"a": ""}}"#,
            "model.safetensors.index.json: key `weight_map.a` must be the name of a file in the same folder",
        ),
        (
            r#"{"weight_map": {"a": "."}}"#,
            "model.safetensors.index.json: key `weight_map.a` must be the name of a file in the same folder",
        ),
        (
            r#"{"weight_map": {"a": ".."}}"#,
            "model.safetensors.index.json: key `weight_map.a` must be the name of a file in the same folder",
        ),
        (
            r#"{"weight_map": {"a": "../x"}}"#,
            "model.safetensors.index.json: key `weight_map.a` must be the name of a file in the same folder",
        ),
        (
            r#"{"weight_map": {"a": "/etc/passwd"}}"#,
            "model.safetensors.index.json: key `weight_map.a` must be the name of a file in the same folder",
        ),
        (
            r#"{"weight_map": {"a": "sub/one.safetensors"}}"#,
            "model.safetensors.index.json: key `weight_map.a` must be the name of a file in the same folder",
        ),
        (
            r#"{"weight_map": {"a": "sub/../one.safetensors"}}"#,
            "model.safetensors.index.json: key `weight_map.a` must be the name of a file in the same folder",
        ),
        (r#"{"weight_map": {"a": "sub"}}"#, "sub is not a checkpoint: it is not a regular file"),
        (
            r#"{"weight_map": {"a": "one.safetensors\u0000"}}"#,
            "model.safetensors.index.json: key `weight_map.a` must be the name of a file in the same folder",
        ),
        (
            r#"{"weight_map": {"a": "two.safetensors"}}"#,
            "cannot open two.safetensors: No such file or directory (os error 2)",
        ),
        (
            r#"{"weight_map": {"a": "one.safetensors"}}"#,
            "one.safetensors has no tensor `a` (it has 0 others)",
        ),
        (
            r#"{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}"#,
            "model.safetensors.index.json: key `weight_map.a` is listed twice, in one.safetensors and in \
             two.safetensors",
        ),
        (
            r#"{"weight_map": {"a": "one.safetensors", "\u0061": "one.safetensors"}}"#,
            "model.safetensors.index.json: key `weight_map.a` is listed twice, in one.safetensors and in \
             one.safetensors",
        ),
        (
            r#"{"weight_map": {"model.norm.weight": "one.safetensors"}}"#,
            "FOLDER has no tensor `model.embed_tokens.weight` (it has 1 others)",
        ),
    ] {
        assert_eq!(error_of_index(index), expected, "{index}");
    }
    let deep = format!(r#"{{"metadata": {}"#, "[".repeat(1_000_000));
    assert_eq!(
        error_of_index(&deep),
        "model.safetensors.index.json is not valid JSON: EOF while parsing a list at line 1 column 1000013"
    );
}

#[test]
fn a_configuration_that_is_no_configuration() {
    let folder = build::folder(&build::config(), &build::tensors());
    let path = folder.path().join("config.json");
    let deep = format!(r#"{{"a":{}"#, "[".repeat(1000));
    for (text, expected) in [
        ("", "config.json is not valid JSON: EOF while parsing a value at line 1 column 0"),
        ("[]", "config.json is not valid JSON: invalid type: sequence, expected a map at line 1 column 0"),
        ("{", "config.json is not valid JSON: EOF while parsing an object at line 1 column 1"),
        (deep.as_str(), "config.json is not valid JSON: recursion limit exceeded at line 1 column 132"),
        (
            &" ".repeat((1 << 20) + 1),
            "config.json is not a checkpoint: 1048577 bytes of JSON exceed the limit of 1048576",
        ),
        (
            r#"{"hidden_size": 1e999}"#,
            "config.json is not valid JSON: number out of range at line 1 column 21",
        ),
    ] {
        fs::write(&path, text).unwrap();
        assert_eq!(error_of(folder.path()), expected);
    }
    fs::write(&path, b"{\"\xff\": 1}").unwrap();
    assert_eq!(
        error_of(folder.path()),
        "config.json is not valid JSON: invalid unicode code point at line 1 column 3"
    );
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert_eq!(error_of(folder.path()), "config.json is not a checkpoint: it is not a regular file");
}
