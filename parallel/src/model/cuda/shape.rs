//! What one rank computes, as numbers: known before there is memory.

use consort_kernels::{
    KernelError,
    attention::{
        AttentionShape,
        cuda::{Chunks, Frame, workspace_floats_max},
    },
    kv_append::PageShape,
    linear::cuda::{Invariance, LIBRARY_PARTIALS, LIBRARY_ROWS_MIN, WorkspaceLen, workspace_len},
    qkv::cuda::QkvShape,
    rope::Pairs,
};

use super::super::loader::LoadOptions;
use crate::{
    config::ModelConfig,
    ids::Rank,
    kv::{KvGroups, KvPlace},
    partition::Partition,
};

/// Rows of logits that are made and drawn from at a time.
pub(super) const LOGIT_ROWS_MAX: usize = 64;

/// Keys of a chunk of attention where a request's tokens must not depend on its company: long enough that joining
/// chunks costs little, short enough that a long context keeps a device busy.
const INVARIANT_CHUNK: std::num::NonZeroUsize = std::num::NonZeroUsize::new(512).unwrap();

/// Batches up to this many sequences are decoded by graphs; larger ones keep the device busy for longer than their
/// launches take.
const GRAPH_SEQUENCES_MAX: usize = 512;

/// How a rank computes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Ways {
    pub(super) invariance: Invariance,
    pub(super) chunks: Chunks,
}

/// Sizes and shapes of one rank.
#[derive(Clone, Debug)]
pub(super) struct RankShape {
    pub(super) hidden: usize,
    pub(super) query_heads: usize,
    pub(super) columns: usize,
    pub(super) first_token: u32,
    /// Vocabulary rows of each rank.
    pub(super) vocabularies: Vec<usize>,
    pub(super) vocabulary: usize,
    /// What is alike in all layers; the windows are in `layers`.
    pub(super) attention: AttentionShape,
    pub(super) layers: Vec<LayerShape>,
    /// Groups of layers, and how many layers share a page.
    pub(super) groups: usize,
    pub(super) layers_per_page: usize,
    pub(super) eps: f32,
    pub(super) frequencies: Vec<f32>,
    pub(super) attention_factor: f32,
    pub(super) ways: Ways,
    /// Rows of any step at most, those that only fill up a graph included.
    pub(super) rows_max: usize,
    /// Sequences of any step at most.
    pub(super) sequences_max: usize,
    /// Tokens of a sequence at most.
    pub(super) context_max: usize,
    /// Entries of all block tables of a step at most, in each group.
    pub(super) table_len_max: usize,
    /// Keys whose partial sums there is memory for at a time. Sequences that share blocks may have more of them
    /// together than the pool has slots, and so may those that left blocks behind their windows: such decodes take
    /// turns.
    pub(super) keys_at_once: usize,
}

/// How far back a layer looks, and in which pages.
#[derive(Clone, Debug)]
pub(super) struct LayerShape {
    pub(super) attention: AttentionShape,
    pub(super) place: KvPlace,
}

impl RankShape {
    /// That of `rank`, on a device with so many multiprocessors.
    pub(super) fn new(
        config: &ModelConfig,
        partition: &Partition,
        rank: Rank,
        options: &LoadOptions,
        multiprocessors: u32,
    ) -> Result<RankShape, KernelError> {
        let share = partition.share(rank);
        let pages = PageShape::new(options.block_size, share.kv_heads.len(), config.head_dim)?;
        let (frequencies, attention_factor) = config.rope.frequencies(config.head_dim);
        let sequences_max = options.max_num_seqs.min(options.max_batch_tokens);
        let blocks_of_one = options.max_model_len.div_ceil(options.block_size);
        let ways = if options.deterministic {
            Ways { invariance: Invariance::Batch, chunks: Chunks::Fixed(INVARIANT_CHUNK) }
        } else {
            Ways { invariance: Invariance::None, chunks: Chunks::Fill { multiprocessors } }
        };
        let attention = AttentionShape {
            pages,
            kv_of_query: share.kv_of_query.clone(),
            scale: 1.0 / (config.head_dim as f32).sqrt(),
            window: None,
        };
        let groups = KvGroups::of(config);
        let layers = groups.places().iter().zip(&config.layer_windows).map(|(&place, &window)| LayerShape {
            attention: AttentionShape { window, ..attention.clone() },
            place,
        });
        Ok(RankShape {
            hidden: config.hidden_size,
            query_heads: share.query_heads.len(),
            columns: share.columns.len(),
            first_token: share.vocabulary.start as u32,
            vocabularies: partition.shares().iter().map(|share| share.vocabulary.len()).collect(),
            vocabulary: config.vocab_size,
            layers: layers.collect(),
            attention,
            groups: groups.count(),
            layers_per_page: groups.layers_per_page(),
            eps: config.rms_norm_eps,
            frequencies,
            attention_factor,
            ways,
            rows_max: options.max_batch_tokens.max(bucket_of(sequences_max).unwrap_or(0)),
            sequences_max,
            table_len_max: sequences_max.saturating_mul(blocks_of_one),
            context_max: options.max_model_len,
            keys_at_once: sequences_max
                .saturating_mul(options.max_model_len)
                .min(options.num_blocks.saturating_mul(options.block_size).max(options.max_model_len)),
        })
    }

    /// Ranks of the group.
    pub(super) fn ranks(&self) -> usize {
        self.vocabularies.len()
    }

    /// Vocabulary rows that any rank holds at most.
    pub(super) fn widest_vocabulary(&self) -> usize {
        self.vocabularies.iter().copied().max().unwrap_or(0)
    }

    pub(super) fn qkv(&self) -> QkvShape {
        QkvShape {
            query_heads: self.query_heads,
            pages: self.attention.pages,
            rotary_dim: self.attention.pages.head_dim(),
            pairs: Pairs::HalfSplit,
        }
    }

    /// Scratch memory of all products with these matrices.
    pub(super) fn linear_scratch(
        &self,
        matrices: impl Iterator<Item = (usize, usize)>,
        multiprocessors: u32,
    ) -> Result<WorkspaceLen, KernelError> {
        let mut most = WorkspaceLen::default();
        for (outputs, inputs) in matrices {
            let invariance = self.ways.invariance;
            most = most.max(workspace_len(multiprocessors, outputs, inputs, self.rows_max, invariance)?);
        }
        if self.ways.invariance == Invariance::None && self.rows_max >= LIBRARY_ROWS_MIN {
            most.partials = most.partials.max(LIBRARY_PARTIALS);
        }
        Ok(most)
    }

    /// Floats of attention's workspace: any step does with them, in a graph or not.
    pub(super) fn attention_floats(&self) -> Result<usize, KernelError> {
        let (chunks, sequences, keys) = (self.ways.chunks, self.padded_sequences(), self.keys_at_once);
        let frame = Frame::around(&self.attention, chunks, std::iter::once(1), sequences, keys, 0)?;
        let framed = frame.workspace_floats(&self.attention);
        Ok(framed.max(workspace_floats_max(&self.attention, chunks, sequences, keys)?))
    }

    /// Numbers of any step's attention on the device, in one group of layers.
    pub(super) fn attention_numbers(&self) -> usize {
        let heads = self.attention.kv_of_query.len();
        // A tile of a prefill takes 16 pairs of a token and a head of a group at least, and each span one more.
        let tiles = (self.rows_max * heads).div_ceil(16) + self.sequences_max;
        let spans = 5 * self.padded_sequences() + 2;
        spans + 2 * tiles + self.attention.pages.kv_heads() + 1 + self.table_len_max
    }

    /// The frame of a graph for decodes of `contexts`; `None` where there are too many for graphs, or they take turns.
    pub(super) fn frame(
        &self,
        contexts: impl ExactSizeIterator<Item = usize> + Clone,
    ) -> Result<Option<Frame>, KernelError> {
        let Some(bucket) = bucket_of(contexts.len()) else { return Ok(None) };
        let (chunks, keys) = (self.ways.chunks, self.keys_at_once);
        let frame =
            Frame::around(&self.attention, chunks, contexts.clone(), bucket, keys, self.table_len_max)?;
        Ok(Some(frame).filter(|frame| frame.has_room_for(contexts)))
    }

    /// Sequences of the largest graph, or of the largest step without one.
    fn padded_sequences(&self) -> usize {
        bucket_of(self.sequences_max.min(GRAPH_SEQUENCES_MAX)).unwrap_or(0).max(self.sequences_max)
    }
}

/// Rows of the graph that decodes so many sequences: 1, 2, 4, then multiples of 8.
fn bucket_of(sequences: usize) -> Option<usize> {
    match sequences {
        0 => None,
        1 | 2 => Some(sequences),
        3 | 4 => Some(4),
        _ if sequences <= GRAPH_SEQUENCES_MAX => Some(sequences.next_multiple_of(8)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_graph_has_room_for_its_batch_and_little_more() {
        let buckets = [0, 1, 2, 3, 4, 5, 8, 9, 31, 512, 513].map(bucket_of);
        let expected = [0, 1, 2, 4, 4, 8, 8, 16, 32, 512, 0].map(|bucket| (bucket > 0).then_some(bucket));
        assert_eq!(buckets, expected);
    }
}
