//! The matrices of a rank: one list from which parameters, bytes and what a step reads of them are counted.

use std::collections::BTreeMap;

use super::{
    format::{Kind, WeightFormat},
    shape::{Attention, Experts, GroupedAttention, LatentAttention, ModelShape},
};
use crate::partition::{Partition, Share};

/// Parts of a model that are told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WeightGroup {
    /// Token embedding.
    Embedding,
    /// Attention of all layers.
    Attention,
    /// Dense MLPs, and experts that every token takes.
    Mlp,
    /// Experts that tokens choose from.
    Experts,
    /// Norms and routers.
    Rest,
    /// The matrix that makes logits, where it is not the embedding.
    Head,
}

impl WeightGroup {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            WeightGroup::Embedding => "embedding",
            WeightGroup::Attention => "attention",
            WeightGroup::Mlp => "mlp",
            WeightGroup::Experts => "experts",
            WeightGroup::Rest => "rest",
            WeightGroup::Head => "head",
        }
    }
}

/// When a step reads a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Read {
    /// In every step, whole.
    Whole,
    /// The rows of its tokens.
    Rows,
    /// Where a token of the step chose this expert.
    Chosen,
}

/// Equal matrices of a rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Matrices {
    pub(super) group: WeightGroup,
    pub(super) kind: Kind,
    pub(super) read: Read,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) copies: u64,
}

impl Matrices {
    pub(super) fn elements(&self) -> u64 {
        (self.rows as u64).saturating_mul(self.cols as u64).saturating_mul(self.copies)
    }

    pub(super) fn bytes(&self, format: WeightFormat) -> u64 {
        format.matrix_bytes(self.kind, self.rows, self.cols).saturating_mul(self.copies)
    }
}

/// All that a rank holds. Biases that are added once to a sum over ranks are the first rank's.
pub(super) fn matrices(model: &ModelShape, share: &Share, is_first: bool) -> Vec<Matrices> {
    let mut list = List { found: Vec::new(), is_first };
    let (hidden, vocabulary) = (model.hidden, share.vocabulary.len());
    let layers = model.layers() as u64;
    // A tied head is read whole in every step, and its rows are looked up besides.
    let lookup = if model.is_head_tied { Read::Whole } else { Read::Rows };
    list.plain(WeightGroup::Embedding, lookup, vocabulary, hidden, 1);
    if !model.is_head_tied {
        list.plain(WeightGroup::Head, Read::Whole, vocabulary, hidden, 1);
    }
    list.plain(WeightGroup::Rest, Read::Whole, 1, hidden, 2 * layers + 1);
    match model.attention {
        Attention::Grouped(grouped) => list.grouped(&grouped, hidden, share, layers),
        Attention::Latent(latent) => list.latent(&latent, hidden, share, layers),
    }
    let expert_layers = model.expert_layers() as u64;
    list.mlp(WeightGroup::Mlp, hidden, share.columns.len(), layers - expert_layers);
    if let Some(experts) = model.experts {
        list.experts(&experts, hidden, share.expert_columns.len(), expert_layers);
    }
    list.found
}

struct List {
    found: Vec<Matrices>,
    is_first: bool,
}

impl List {
    fn add(&mut self, matrices: Matrices) {
        if matrices.elements() > 0 {
            self.found.push(matrices);
        }
    }

    fn plain(&mut self, group: WeightGroup, read: Read, rows: usize, cols: usize, copies: u64) {
        self.add(Matrices { group, kind: Kind::Plain, read, rows, cols, copies });
    }

    fn linear(&mut self, group: WeightGroup, rows: usize, cols: usize, copies: u64) {
        self.add(Matrices { group, kind: Kind::Linear, read: Read::Whole, rows, cols, copies });
    }

    fn grouped(&mut self, attention: &GroupedAttention, hidden: usize, share: &Share, layers: u64) {
        const GROUP: WeightGroup = WeightGroup::Attention;
        let dim = attention.head_dim;
        let (queries, keys) = (share.query_heads.len() * dim, share.kv_heads.len() * dim);
        self.linear(GROUP, queries + 2 * keys, hidden, layers);
        self.linear(GROUP, hidden, queries, layers);
        let is_first = self.is_first;
        let mut vector = |is_there: bool, len| {
            let len = if is_there { len } else { 0 };
            self.plain(GROUP, Read::Whole, 1, len, layers);
        };
        vector(attention.has_qkv_bias, queries + 2 * keys);
        vector(attention.has_sinks, share.query_heads.len());
        vector(attention.has_qk_norms, 2 * dim);
        vector(attention.has_output_bias && is_first, hidden);
    }

    fn latent(&mut self, attention: &LatentAttention, hidden: usize, share: &Share, layers: u64) {
        const GROUP: WeightGroup = WeightGroup::Attention;
        let LatentAttention { query_rank, latent, rotary, plain, value, .. } = *attention;
        let heads = share.query_heads.len();
        let queries = heads * (plain + rotary);
        match query_rank {
            Some(rank) => {
                self.linear(GROUP, rank, hidden, layers);
                self.plain(GROUP, Read::Whole, 1, rank, layers);
                self.linear(GROUP, queries, rank, layers);
            }
            None => self.linear(GROUP, queries, hidden, layers),
        }
        self.linear(GROUP, latent + rotary, hidden, layers);
        self.plain(GROUP, Read::Whole, 1, latent, layers);
        self.linear(GROUP, heads * (plain + value), latent, layers);
        self.linear(GROUP, hidden, heads * value, layers);
    }

    fn mlp(&mut self, group: WeightGroup, hidden: usize, columns: usize, copies: u64) {
        self.linear(group, 2 * columns, hidden, copies);
        self.linear(group, hidden, columns, copies);
    }

    fn experts(&mut self, experts: &Experts, hidden: usize, columns: usize, layers: u64) {
        const GROUP: WeightGroup = WeightGroup::Experts;
        let copies = layers.saturating_mul(experts.count as u64);
        let expert = |rows, cols| Matrices {
            group: GROUP,
            kind: Kind::Expert,
            read: Read::Chosen,
            rows,
            cols,
            copies,
        };
        self.add(expert(2 * columns, hidden));
        self.add(expert(hidden, columns));
        if experts.have_biases {
            let once = if self.is_first { hidden } else { 0 };
            self.plain(GROUP, Read::Chosen, 1, 2 * columns + once, copies);
        }
        self.mlp(WeightGroup::Mlp, hidden, columns, layers.saturating_mul(experts.shared as u64));
        self.plain(WeightGroup::Rest, Read::Whole, experts.count, hidden, layers);
        if experts.has_router_bias {
            self.plain(WeightGroup::Rest, Read::Whole, 1, experts.count, layers);
        }
    }
}

/// Bytes of a rank's weights, part by part.
pub(super) fn bytes_by_group(matrices: &[Matrices], format: WeightFormat) -> BTreeMap<WeightGroup, u64> {
    let mut bytes = BTreeMap::new();
    for part in matrices {
        let sum: &mut u64 = bytes.entry(part.group).or_default();
        *sum = sum.saturating_add(part.bytes(format));
    }
    bytes
}

impl ModelShape {
    /// All of one rank alone; nothing where the sizes are none of a model's.
    pub(super) fn whole(&self) -> Vec<Matrices> {
        let partition = Partition::of(&self.dividend(WeightFormat::BFloat16), 1, None);
        partition.map(|partition| matrices(self, &partition.shares()[0], true)).unwrap_or_default()
    }

    /// Numbers that were learnt.
    pub fn parameters(&self) -> u64 {
        self.whole().iter().map(Matrices::elements).sum()
    }

    /// Those that a token is multiplied by: experts that it chooses, and no embedding, of which it takes one row.
    pub fn active_parameters(&self) -> u64 {
        let experts = self.experts.unwrap_or_default();
        let active = |part: &Matrices| match part.read {
            Read::Whole => part.elements(),
            Read::Rows => 0,
            Read::Chosen => part.elements() / experts.count.max(1) as u64 * experts.chosen as u64,
        };
        self.whole().iter().map(active).sum()
    }

    /// Bytes of all weights in a format, undivided.
    pub fn weight_bytes(&self, format: WeightFormat) -> u64 {
        self.whole().iter().map(|part| part.bytes(format)).sum()
    }
}
