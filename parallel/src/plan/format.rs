//! How numbers are held, and what a matrix of them takes.

use std::{fmt, str::FromStr};

use super::shape::ModelShape;

/// Values of a scale's block along rows and columns of FP8 weights.
const FP8_BLOCK: usize = 128;
/// Values of a scale's block along a row of MXFP4 weights, and their bytes: 16 of nibbles, one of scale.
const MXFP4_BLOCK: (usize, u64) = (32, 17);

/// How weights are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WeightFormat {
    /// Experts in blocks of four-bit numbers, all else in BF16.
    Mxfp4,
    /// Matrices of layers in eight bits with a scale for 128 x 128 of them, all else in BF16.
    Fp8,
    /// Two bytes a number.
    BFloat16,
    /// Four bytes a number.
    Float32,
}

/// How keys and values are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvFormat {
    /// One byte a number.
    Fp8,
    /// Two bytes.
    BFloat16,
    /// Four bytes.
    Float32,
}

/// What part of a model a matrix is, which decides how a format holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Embeddings, heads, norms, biases and routers: never in fewer than 16 bits.
    Plain,
    /// A matrix of a layer.
    Linear,
    /// A matrix of an expert.
    Expert,
}

impl WeightFormat {
    /// All of them, smallest first.
    pub const ALL: [WeightFormat; 4] =
        [WeightFormat::Mxfp4, WeightFormat::Fp8, WeightFormat::BFloat16, WeightFormat::Float32];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            WeightFormat::Mxfp4 => "mxfp4",
            WeightFormat::Fp8 => "fp8",
            WeightFormat::BFloat16 => "bfloat16",
            WeightFormat::Float32 => "float32",
        }
    }

    /// Whether it makes a difference for this model.
    pub fn suits(self, model: &ModelShape) -> bool {
        self != WeightFormat::Mxfp4 || model.experts.is_some()
    }

    /// How keys and values are held beside such weights, unless something else is asked for.
    pub fn kv(self) -> KvFormat {
        if self == WeightFormat::Float32 { KvFormat::Float32 } else { KvFormat::BFloat16 }
    }

    /// Columns of the MLP that are held together.
    pub(super) fn column_block(self) -> usize {
        match self {
            WeightFormat::Mxfp4 => MXFP4_BLOCK.0,
            WeightFormat::Fp8 => FP8_BLOCK,
            WeightFormat::BFloat16 | WeightFormat::Float32 => 1,
        }
    }

    /// Bytes of a matrix.
    pub(super) fn matrix_bytes(self, kind: Kind, rows: usize, cols: usize) -> u64 {
        let elements = (rows as u64).saturating_mul(cols as u64);
        let blocks = |rows: usize, cols: usize| (rows as u64).saturating_mul(cols as u64);
        match (self, kind) {
            (WeightFormat::Float32, _) => elements.saturating_mul(4),
            (WeightFormat::Mxfp4, Kind::Expert) => {
                let (block, bytes) = MXFP4_BLOCK;
                blocks(rows, cols.div_ceil(block)).saturating_mul(bytes)
            }
            (WeightFormat::Fp8, Kind::Expert | Kind::Linear) => {
                let scales = blocks(rows.div_ceil(FP8_BLOCK), cols.div_ceil(FP8_BLOCK));
                elements.saturating_add(scales.saturating_mul(4))
            }
            _ => elements.saturating_mul(2),
        }
    }
}

impl fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for WeightFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<WeightFormat, String> {
        let known =
            WeightFormat::ALL.into_iter().find(|format| format.name().eq_ignore_ascii_case(text.trim()));
        known.ok_or_else(|| {
            let names: Vec<&str> = WeightFormat::ALL.iter().map(|format| format.name()).collect();
            format!(
                "no such format of weights; they are {}, and auto for the checkpoint's own",
                names.join(", ")
            )
        })
    }
}

impl KvFormat {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            KvFormat::Fp8 => "fp8",
            KvFormat::BFloat16 => "bfloat16",
            KvFormat::Float32 => "float32",
        }
    }

    /// Bytes of a number.
    pub(super) fn bytes(self) -> u64 {
        match self {
            KvFormat::Fp8 => 1,
            KvFormat::BFloat16 => 2,
            KvFormat::Float32 => 4,
        }
    }
}
