//! The types of ggml: which of them are read, and what the others take up, so that a file's tensors can be held
//! against each other whatever they are stored in.

use crate::checkpoint::Encoding;

/// A type of ggml that can stand in a file.
struct GgmlType {
    id: u32,
    name: &'static str,
    /// Elements and bytes of a block; nothing for types that ggml never writes.
    block: Option<(usize, usize)>,
}

/// The types that are read.
const READ: [(u32, Encoding); 11] = [
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

/// The types that are not.
const OTHERS: [GgmlType; 23] = [
    GgmlType { id: 9, name: "Q8_1", block: None },
    GgmlType { id: 10, name: "Q2_K", block: Some((256, 84)) },
    GgmlType { id: 11, name: "Q3_K", block: Some((256, 110)) },
    GgmlType { id: 15, name: "Q8_K", block: None },
    GgmlType { id: 16, name: "IQ2_XXS", block: Some((256, 66)) },
    GgmlType { id: 17, name: "IQ2_XS", block: Some((256, 74)) },
    GgmlType { id: 18, name: "IQ3_XXS", block: Some((256, 98)) },
    GgmlType { id: 19, name: "IQ1_S", block: Some((256, 50)) },
    GgmlType { id: 20, name: "IQ4_NL", block: Some((32, 18)) },
    GgmlType { id: 21, name: "IQ3_S", block: Some((256, 110)) },
    GgmlType { id: 22, name: "IQ2_S", block: Some((256, 82)) },
    GgmlType { id: 23, name: "IQ4_XS", block: Some((256, 136)) },
    GgmlType { id: 24, name: "I8", block: Some((1, 1)) },
    GgmlType { id: 25, name: "I16", block: Some((1, 2)) },
    GgmlType { id: 26, name: "I32", block: Some((1, 4)) },
    GgmlType { id: 27, name: "I64", block: Some((1, 8)) },
    GgmlType { id: 28, name: "F64", block: Some((1, 8)) },
    GgmlType { id: 29, name: "IQ1_M", block: Some((256, 56)) },
    GgmlType { id: 34, name: "TQ1_0", block: Some((256, 54)) },
    GgmlType { id: 35, name: "TQ2_0", block: Some((256, 66)) },
    GgmlType { id: 39, name: "MXFP4", block: Some((32, 17)) },
    GgmlType { id: 40, name: "NVFP4", block: Some((64, 36)) },
    GgmlType { id: 41, name: "Q1_0", block: Some((128, 18)) },
];

/// The encoding of a ggml type, or the name of a type that is not read.
pub(super) fn encoding(kind: u32) -> Result<Encoding, String> {
    if let Some((_, encoding)) = READ.iter().find(|(id, _)| *id == kind) {
        return Ok(*encoding);
    }
    match other(kind) {
        Some(other) => Err(other.name.to_owned()),
        None => Err(format!("ggml type {kind}")),
    }
}

/// Elements and bytes of a block of a ggml type that is not read, where they are known.
pub(super) fn block_of_other(kind: u32) -> Option<(usize, usize)> {
    other(kind)?.block
}

/// Bytes of a tensor of a ggml type, where its blocks are known.
pub(super) fn bytes(kind: u32, shape: &[usize]) -> Option<u64> {
    let (elements, bytes) = match encoding(kind) {
        Ok(encoding) => encoding.block(),
        Err(_) => block_of_other(kind)?,
    };
    let count = shape.iter().fold(1_u64, |count, size| count.saturating_mul(*size as u64));
    Some((count / elements as u64).saturating_mul(bytes as u64))
}

fn other(kind: u32) -> Option<&'static GgmlType> {
    OTHERS.iter().find(|other| other.id == kind)
}
