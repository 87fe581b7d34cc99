//! Models by name: the shapes that their public `config.json` files give.

use std::num::NonZeroUsize;

use super::{
    format::WeightFormat,
    shape::{Attention, Experts, GroupedAttention, LatentAttention, ModelShape},
};
use crate::config::{Architecture, ModelConfig, RopeConfig, RopeScaling};

/// A name, other spellings of it, and the shape behind it.
struct Entry {
    name: &'static str,
    /// As plain as [`plain`] makes them, without the owner.
    aliases: &'static [&'static str],
    shape: fn() -> ModelShape,
}

const TABLE: [Entry; 11] = [
    Entry { name: "gpt-oss-20b", aliases: &[], shape: || gpt_oss(24, 32) },
    Entry { name: "gpt-oss-120b", aliases: &[], shape: || gpt_oss(36, 128) },
    Entry { name: "Llama-3.1-8B", aliases: &["metallama3.18b"], shape: || llama(32, 4096, 32, 14_336) },
    Entry {
        name: "Llama-3.3-70B",
        // 3.1 has the same shape.
        aliases: &["metallama3.370b", "llama3.170b", "metallama3.170b"],
        shape: || llama(80, 8192, 64, 28_672),
    },
    Entry { name: "Qwen3-8B", aliases: &[], shape: || qwen3(36, 4096, 32, 12_288) },
    Entry { name: "Qwen3-32B", aliases: &[], shape: || qwen3(64, 5120, 64, 25_600) },
    Entry { name: "Qwen3-30B-A3B", aliases: &["qwen330b"], shape: || qwen3_moe(48, 2048, 32, 768) },
    Entry { name: "Qwen3-235B-A22B", aliases: &["qwen3235b"], shape: || qwen3_moe(94, 4096, 64, 1536) },
    Entry { name: "Kimi-K2", aliases: &[], shape: kimi_k2 },
    Entry { name: "GLM-4.5", aliases: &[], shape: glm_4_5 },
    Entry { name: "GLM-4.5-Air", aliases: &[], shape: glm_4_5_air },
];

/// What follows a name without making another model of it.
const SUFFIXES: [&str; 5] = ["instruct", "base", "chat", "bf16", "it"];

/// A name that is in no table.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "no model is called `{name}`{}; known are {}. A folder with config.json, a GGUF file or a topology (*.toml) does \
     as well",
    .meant.map(|meant| format!(": did you mean {meant}?")).unwrap_or_default(),
    names().collect::<Vec<_>>().join(", ")
)]
pub struct UnknownModel {
    /// What was asked for.
    pub name: String,
    /// What was probably meant.
    pub meant: Option<&'static str>,
}

/// Names of the table.
pub fn names() -> impl Iterator<Item = &'static str> {
    TABLE.iter().map(|entry| entry.name)
}

/// The model of that name: any letter case, `-` and `_` and spaces as one likes, with or without its owner (`openai/`)
/// and its kind (`-Instruct`).
pub fn find(name: &str) -> Result<ModelShape, UnknownModel> {
    let wanted = plain(name);
    let bare = bare(&wanted);
    let is_it = |entry: &&Entry, wanted: &str| plain(entry.name) == wanted || entry.aliases.contains(&wanted);
    let found = TABLE.iter().find(|entry| is_it(entry, &wanted) || is_it(entry, bare));
    match found {
        Some(entry) => Ok(ModelShape { name: entry.name.to_owned(), ..(entry.shape)() }),
        None => Err(UnknownModel { name: shown(name), meant: nearest(name, bare) }),
    }
}

/// A name for comparison: without its owner, letters and digits and dots alone.
fn plain(name: &str) -> String {
    let name = name.trim().trim_end_matches('/').rsplit('/').next().unwrap_or_default();
    name.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '.').collect::<String>().to_ascii_lowercase()
}

fn bare(name: &str) -> &str {
    let cut = SUFFIXES.iter().find_map(|suffix| name.strip_suffix(suffix));
    cut.filter(|rest| !rest.is_empty()).unwrap_or(name)
}

/// A name as it may stand in a message.
fn shown(name: &str) -> String {
    const CHARS_MAX: usize = 80;
    name.chars().filter(|c| !c.is_control()).take(CHARS_MAX).collect()
}

/// The longest name that the given one begins with, else the one that needs the fewest letters changed, if few are.
fn nearest(given: &str, bare: &str) -> Option<&'static str> {
    const LETTERS_MAX: usize = 64;
    let begins = names().filter(|name| bare.starts_with(&plain(name)));
    if let Some(name) = begins.max_by_key(|name| name.len()) {
        return Some(name);
    }
    // With their dashes, which tell -120b from -20b.
    let given = given.trim().rsplit('/').next()?.to_ascii_lowercase();
    if given.len() > LETTERS_MAX {
        return None;
    }
    let allowed = (given.len() / 3).clamp(1, 4);
    let distances = names().map(|name| (distance(&given, &name.to_ascii_lowercase()), name));
    distances.min().filter(|(distance, _)| *distance <= allowed).map(|(_, name)| name)
}

/// Letters to insert, take away or change.
fn distance(from: &str, to: &str) -> usize {
    let (from, to) = (from.as_bytes(), to.as_bytes());
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (at, letter) in from.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = at + 1;
        for (column, other) in to.iter().enumerate() {
            let changed = diagonal + usize::from(letter != other);
            diagonal = row[column + 1];
            row[column + 1] = changed.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row[to.len()]
}

/// A model with full attention in all of its layers and no experts yet.
fn decoder(layers: usize, hidden: usize, vocabulary: usize, attention: Attention) -> ModelShape {
    ModelShape {
        name: String::new(),
        hidden,
        vocabulary,
        is_head_tied: false,
        context_max: 131_072,
        attention,
        windows: vec![None; layers],
        dense_layers: layers,
        dense_columns: 0,
        experts: None,
        stored: Some(WeightFormat::BFloat16),
        config: None,
    }
}

fn grouped(query_heads: usize, kv_heads: usize, head_dim: usize) -> GroupedAttention {
    GroupedAttention { query_heads, kv_heads, head_dim, ..GroupedAttention::default() }
}

/// Windows and full attention by turns; experts in MXFP4.
fn gpt_oss(layers: usize, experts: usize) -> ModelShape {
    const WINDOW: Option<NonZeroUsize> = NonZeroUsize::new(128);
    let attention =
        GroupedAttention { has_qkv_bias: true, has_output_bias: true, has_sinks: true, ..grouped(64, 8, 64) };
    ModelShape {
        windows: (0..layers).map(|layer| if layer % 2 == 0 { WINDOW } else { None }).collect(),
        dense_layers: 0,
        experts: Some(Experts {
            count: experts,
            chosen: 4,
            columns: 2880,
            shared: 0,
            have_biases: true,
            has_router_bias: true,
        }),
        stored: Some(WeightFormat::Mxfp4),
        ..decoder(layers, 2880, 201_088, Attention::Grouped(attention))
    }
}

/// Llama 3.1 and its successors, which this version runs.
fn llama(layers: usize, hidden: usize, heads: usize, columns: usize) -> ModelShape {
    let config = ModelConfig {
        architecture: Architecture::Llama,
        hidden_size: hidden,
        num_layers: layers,
        num_heads: heads,
        num_kv_heads: 8,
        head_dim: 128,
        intermediate_size: columns,
        vocab_size: 128_256,
        max_position_embeddings: 131_072,
        rms_norm_eps: 1e-5,
        rope: RopeConfig {
            theta: 5e5,
            scaling: RopeScaling::Llama3 {
                factor: 8.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_context: 8192,
            },
        },
        layer_windows: vec![None; layers],
        tie_word_embeddings: false,
        eos_token_ids: vec![128_001, 128_008, 128_009],
        bos_token_id: Some(128_000),
    };
    ModelShape::from(&config)
}

fn qwen3(layers: usize, hidden: usize, heads: usize, columns: usize) -> ModelShape {
    let attention = GroupedAttention { has_qk_norms: true, ..grouped(heads, 8, 128) };
    ModelShape {
        context_max: 40_960,
        dense_columns: columns,
        ..decoder(layers, hidden, 151_936, Attention::Grouped(attention))
    }
}

fn qwen3_moe(layers: usize, hidden: usize, heads: usize, columns: usize) -> ModelShape {
    let attention = GroupedAttention { has_qk_norms: true, ..grouped(heads, 4, 128) };
    ModelShape {
        context_max: 40_960,
        dense_layers: 0,
        experts: Some(Experts { count: 128, chosen: 8, columns, ..Experts::default() }),
        ..decoder(layers, hidden, 151_936, Attention::Grouped(attention))
    }
}

/// Latent attention; weights in FP8 blocks.
fn kimi_k2() -> ModelShape {
    let attention = LatentAttention {
        heads: 64,
        query_rank: Some(1536),
        latent: 512,
        rotary: 64,
        plain: 128,
        value: 128,
    };
    ModelShape {
        dense_layers: 1,
        dense_columns: 18_432,
        experts: Some(sigmoid_experts(384, 2048)),
        stored: Some(WeightFormat::Fp8),
        ..decoder(61, 7168, 163_840, Attention::Latent(attention))
    }
}

fn glm_4_5() -> ModelShape {
    let attention = GroupedAttention { has_qkv_bias: true, has_qk_norms: true, ..grouped(96, 8, 128) };
    ModelShape {
        dense_layers: 3,
        dense_columns: 12_288,
        experts: Some(sigmoid_experts(160, 1536)),
        ..decoder(92, 5120, 151_552, Attention::Grouped(attention))
    }
}

fn glm_4_5_air() -> ModelShape {
    let attention = GroupedAttention { has_qkv_bias: true, ..grouped(96, 8, 128) };
    ModelShape {
        dense_layers: 1,
        dense_columns: 10_944,
        experts: Some(sigmoid_experts(128, 1408)),
        ..decoder(46, 4096, 151_552, Attention::Grouped(attention))
    }
}

/// Eight of them and one that is always taken; the router has a correction.
fn sigmoid_experts(count: usize, columns: usize) -> Experts {
    Experts { count, chosen: 8, columns, shared: 1, have_biases: false, has_router_bias: true }
}
