//! What a planner knows of a model: the numbers that decide bytes and operations, and no others.

use std::num::NonZeroUsize;

use super::format::WeightFormat;
use crate::{config::ModelConfig, partition::Dividend};

/// Sizes of a decoder model, whether this version can run it or not.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelShape {
    /// How people call it.
    pub name: String,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Rows of embedding and head.
    pub vocabulary: usize,
    /// Whether the head is the embedding matrix.
    pub is_head_tied: bool,
    /// Longest context that the model was trained for.
    pub context_max: usize,
    /// Attention of every layer.
    pub attention: Attention,
    /// One for each layer: the keys that a token sees, its own included, or all.
    pub windows: Vec<Option<NonZeroUsize>>,
    /// Layers with a dense MLP; they come first.
    pub dense_layers: usize,
    /// Columns of the dense MLP.
    pub dense_columns: usize,
    /// What the other layers have in its place.
    pub experts: Option<Experts>,
    /// How the checkpoint holds the weights, where a planner has a word for it.
    pub stored: Option<WeightFormat>,
    /// Where the model can be run: what the engine plans its buffers from.
    pub config: Option<Box<ModelConfig>>,
}

/// Attention of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attention {
    /// Query heads in groups that share a KV head.
    Grouped(GroupedAttention),
    /// All heads read one latent vector and one rotary key (MLA).
    Latent(LatentAttention),
}

/// Sizes of grouped-query attention.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupedAttention {
    /// Query heads.
    pub query_heads: usize,
    /// KV heads; divides the query heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Whether queries, keys and values have biases.
    pub has_qkv_bias: bool,
    /// Whether the output has one.
    pub has_output_bias: bool,
    /// Whether each query head has a logit of its own beside the keys'.
    pub has_sinks: bool,
    /// Whether queries and keys are normalised, head by head.
    pub has_qk_norms: bool,
}

/// Sizes of multi-head latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentAttention {
    /// Query heads.
    pub heads: usize,
    /// Width between the two query projections, where there are two.
    pub query_rank: Option<usize>,
    /// Width of the latent vector that is remembered.
    pub latent: usize,
    /// Width of the rotary key that is remembered beside it.
    pub rotary: usize,
    /// Width of a head's keys without rotation.
    pub plain: usize,
    /// Width of a head's values.
    pub value: usize,
}

/// Experts of a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Experts {
    /// Experts to choose from.
    pub count: usize,
    /// How many a token takes.
    pub chosen: usize,
    /// Columns of each.
    pub columns: usize,
    /// Experts that every token takes besides.
    pub shared: usize,
    /// Whether experts have biases.
    pub have_biases: bool,
    /// Whether the router has one, or a correction in its place.
    pub has_router_bias: bool,
}

impl ModelShape {
    /// Its name, or what stands for it where it has none.
    pub fn called(&self) -> &str {
        if self.name.is_empty() { "the model" } else { &self.name }
    }

    /// The format of its checkpoint, or the bfloat16 that others become.
    pub fn own_format(&self) -> WeightFormat {
        self.stored.unwrap_or(WeightFormat::BFloat16)
    }

    /// Decoder layers.
    pub fn layers(&self) -> usize {
        self.windows.len()
    }

    /// Layers with experts.
    pub fn expert_layers(&self) -> usize {
        self.experts.map_or(0, |_| self.layers().saturating_sub(self.dense_layers))
    }

    /// Query heads.
    pub fn query_heads(&self) -> usize {
        match self.attention {
            Attention::Grouped(grouped) => grouped.query_heads,
            Attention::Latent(latent) => latent.heads,
        }
    }

    /// What a partition divides, where weights are held in `format`.
    pub fn dividend(&self, format: WeightFormat) -> Dividend {
        Dividend {
            query_heads: self.query_heads(),
            kv_heads: match self.attention {
                Attention::Grouped(grouped) => grouped.kv_heads,
                // Every rank needs it whole, as it does the one KV head that all queries read.
                Attention::Latent(_) => 1,
            },
            columns: self.dense_columns,
            expert_columns: self.experts.map_or(0, |experts| experts.columns),
            column_block: format.column_block(),
            vocabulary: self.vocabulary,
        }
    }
}

impl From<&ModelConfig> for ModelShape {
    /// The shape of a model that this version runs, without a name, and stored as most are: how a checkpoint holds it,
    /// [`Checkpoint::stored_format`](crate::checkpoint::Checkpoint::stored_format) tells.
    fn from(config: &ModelConfig) -> ModelShape {
        ModelShape {
            name: String::new(),
            hidden: config.hidden_size,
            vocabulary: config.vocab_size,
            is_head_tied: config.tie_word_embeddings,
            context_max: config.max_position_embeddings,
            attention: Attention::Grouped(GroupedAttention {
                query_heads: config.num_heads,
                kv_heads: config.num_kv_heads,
                head_dim: config.head_dim,
                ..GroupedAttention::default()
            }),
            windows: config.layer_windows.clone(),
            dense_layers: config.num_layers,
            dense_columns: config.intermediate_size,
            experts: None,
            stored: Some(WeightFormat::BFloat16),
            config: Some(Box::new(config.clone())),
        }
    }
}
