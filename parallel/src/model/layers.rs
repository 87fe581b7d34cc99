//! Parallel layers: each rank multiplies its part; sums over ranks happen where a layer ends.

use std::{num::NonZeroUsize, ops::Range};

use consort_kernels::{
    attention::{AttentionShape, PagedCache, PagedSpan, attention},
    buffer::{Buffer, View},
    device::Device,
    embedding::embedding,
    kv_append::{PageShape, kv_append},
    linear::{Rows, RowsView, Weight, linear, linear_add, linear_swiglu},
    rms_norm::rms_norm,
    rope::{Heads, Pairs, rope, rope_angles},
    workspace::Workspace,
};

use super::{
    ModelError,
    loader::{LoadError, Loader, Part},
};
use crate::{
    batch::Batch,
    collective::Collective,
    config::ModelConfig,
    kv::{KvElement, KvPlace, KvStore},
    partition::Share,
};

/// Token embedding, rows divided over ranks; also the head when the two are tied.
pub(super) struct VocabParallelEmbedding<T> {
    table: Weight<T>,
    first: usize,
}

impl<T: KvElement> VocabParallelEmbedding<T> {
    pub(super) fn load(
        loader: &Loader<'_>,
        name: &str,
        share: &Share,
        config: &ModelConfig,
    ) -> Result<Self, LoadError> {
        let rows = share.vocabulary.clone();
        let first = rows.start;
        let table = loader.matrix(name, &[Part { name, rows, cols: 0..config.hidden_size }])?;
        Ok(VocabParallelEmbedding { table, first })
    }

    /// Whole embeddings `[tokens, hidden]` on every rank.
    pub(super) fn forward(
        &self,
        device: &Device,
        tokens: &[u32],
        out: &mut Buffer<f32>,
        comm: &mut dyn Collective,
    ) -> Result<(), ModelError> {
        let len = tokens.len() * self.table.inputs();
        embedding(device, tokens, &self.table, self.first, out.view_mut(0..len))?;
        reduce(out, len, comm)
    }

    pub(super) fn table(&self) -> &Weight<T> {
        &self.table
    }
}

/// Adds `partial[..len]` over ranks. A group of one has nothing to add.
fn reduce(partial: &mut Buffer<f32>, len: usize, comm: &mut dyn Collective) -> Result<(), ModelError> {
    if comm.size() > 1 {
        comm.all_reduce_sum(partial.view_mut(0..len).host_mut())?;
    }
    Ok(())
}

/// What a step's attention layers share: computed once, read by each.
pub(super) struct StepGeometry {
    frequencies: Vec<f32>,
    attention_factor: f32,
    cos: Buffer<f32>,
    sin: Buffer<f32>,
    spans: Vec<PagedSpan>,
    /// One for each group of layers.
    groups: Vec<GroupGeometry>,
}

/// Where a step's keys and values are in the pages of one group of layers.
#[derive(Clone, Default)]
struct GroupGeometry {
    /// Where each row's go.
    slots: Vec<u32>,
    /// Block tables of all spans.
    tables: Vec<u32>,
}

impl StepGeometry {
    pub(super) fn new(
        workspace: &mut Workspace,
        config: &ModelConfig,
        groups: usize,
        tokens: usize,
    ) -> Result<Self, LoadError> {
        let (frequencies, attention_factor) = config.rope.frequencies(config.head_dim);
        let angles = tokens * frequencies.len();
        let (cos, sin) = (workspace.buffer("rope cosines", angles)?, workspace.buffer("rope sines", angles)?);
        let (spans, groups) = (Vec::new(), vec![GroupGeometry::default(); groups]);
        Ok(StepGeometry { frequencies, attention_factor, cos, sin, spans, groups })
    }

    /// Groups of layers.
    pub(super) fn groups(&self) -> usize {
        self.groups.len()
    }

    /// Angles and cache slots of every row of `batch`.
    pub(super) fn prepare(
        &mut self,
        device: &Device,
        batch: &Batch,
        block_size: usize,
    ) -> Result<(), ModelError> {
        let angles = batch.tokens.len() * self.frequencies.len();
        let (cos, sin) = (self.cos.view_mut(0..angles), self.sin.view_mut(0..angles));
        rope_angles(device, &batch.positions, &self.frequencies, self.attention_factor, cos, sin)?;
        self.spans.clear();
        self.spans.extend(batch.paged_spans());
        for (group, blocks) in self.groups.iter_mut().zip(&batch.tables) {
            group.tables.clear();
            group.tables.extend(blocks.iter().map(|block| block.0));
            group.slots.clear();
            for slot in batch.slots(blocks, block_size) {
                group.slots.push(slot?);
            }
        }
        Ok(())
    }
}

/// Activations of one rank, sized for the largest step.
pub(super) struct Activations<T> {
    /// `[tokens, hidden]`: the residual stream, without what stands in `delta`.
    pub(super) residual: Buffer<f32>,
    /// `[tokens, hidden]`: the sum over ranks of what a layer adds to it. A rank alone adds without it.
    delta: Buffer<f32>,
    /// Whether it is still to be added.
    has_delta: bool,
    /// `[tokens, hidden]`: normalised input of a layer.
    normed: Rows<T>,
    /// `[tokens, (query + 2 · KV heads) · head]`.
    qkv: Buffer<f32>,
    /// `[tokens, query heads · head]`.
    attended: Rows<T>,
    /// `[tokens, columns]`.
    activated: Rows<T>,
}

impl<T: KvElement> Activations<T> {
    pub(super) fn new(
        workspace: &mut Workspace,
        config: &ModelConfig,
        share: &Share,
        tokens: usize,
        ranks: usize,
    ) -> Result<Self, LoadError> {
        let queries = share.query_heads.len() * config.head_dim;
        let keys = share.kv_heads.len() * config.head_dim;
        let delta = if ranks > 1 { tokens * config.hidden_size } else { 0 };
        Ok(Activations {
            residual: workspace.buffer("residual", tokens * config.hidden_size)?,
            delta: workspace.buffer("delta", delta)?,
            has_delta: false,
            normed: workspace.rows("normed", tokens, config.hidden_size)?,
            qkv: workspace.buffer("qkv", tokens * (queries + 2 * keys))?,
            attended: workspace.rows("attended", tokens, queries)?,
            activated: workspace.rows("activated", tokens, share.columns.len())?,
        })
    }

    /// Nothing is to be added to the residual stream: a step begins.
    pub(super) fn restart(&mut self) {
        self.has_delta = false;
    }

    /// Takes over what is to be added to the first `rows` rows, and normalises them.
    pub(super) fn normalise(
        &mut self,
        device: &Device,
        rows: usize,
        weight: &[f32],
        eps: f32,
    ) -> Result<(), ModelError> {
        let (len, weight) = (rows * weight.len(), View::from(weight));
        let delta = self.has_delta.then(|| self.delta.view(0..len));
        let residual = self.residual.view_mut(0..len);
        rms_norm(device, residual, delta, weight, eps, self.normed.view_mut(rows))?;
        self.has_delta = false;
        Ok(())
    }

    /// Moves the given rows to the front; they are ascending.
    pub(super) fn gather(&mut self, rows: &[usize], width: usize) {
        let mut streams = vec![self.residual.as_mut_slice()];
        if self.has_delta {
            streams.push(self.delta.as_mut_slice());
        }
        // A row moves only to places that were read before.
        for stream in streams {
            for (to, &from) in rows.iter().enumerate() {
                stream.copy_within(from * width..(from + 1) * width, to * width);
            }
        }
    }

    /// The normalised rows.
    pub(super) fn normed(&self, rows: usize) -> RowsView<'_, T> {
        self.normed.view(rows)
    }
}

/// Adds the product of `x` and a layer's last matrix, summed over ranks, to the residual stream, or leaves the sum in
/// `delta` for [`Activations::normalise`].
fn end_layer<T: KvElement>(
    device: &Device,
    x: RowsView<'_, T>,
    weight: &Weight<T>,
    (residual, delta, has_delta): (&mut Buffer<f32>, &mut Buffer<f32>, &mut bool),
    comm: &mut dyn Collective,
) -> Result<(), ModelError> {
    let len = x.rows() * weight.outputs();
    if comm.size() == 1 {
        return Ok(linear_add(device, x, weight, residual.view_mut(0..len))?);
    }
    linear(device, x, weight, delta.view_mut(0..len))?;
    comm.all_reduce_sum(delta.view_mut(0..len).host_mut())?;
    *has_delta = true;
    Ok(())
}

/// Grouped-query attention over the heads of one rank.
pub(super) struct ParallelAttention<T> {
    qkv: Weight<T>,
    output: Weight<T>,
    queries: Heads,
    keys: Heads,
    values: Heads,
    shape: AttentionShape,
    place: KvPlace,
}

/// How far back a layer looks, and in which pages.
#[derive(Clone, Copy)]
pub(super) struct Sight {
    pub(super) window: Option<NonZeroUsize>,
    pub(super) place: KvPlace,
    pub(super) pages: PageShape,
}

impl<T: KvElement> ParallelAttention<T> {
    /// `prefix` is the layer's, e.g. `model.layers.3.self_attn`.
    pub(super) fn load(
        loader: &Loader<'_>,
        prefix: &str,
        share: &Share,
        config: &ModelConfig,
        sight: Sight,
    ) -> Result<Self, LoadError> {
        let Sight { window, place, pages } = sight;
        let dim = config.head_dim;
        let columns = |heads: &Range<usize>| heads.start * dim..heads.end * dim;
        let name = |projection: &str| format!("{prefix}.{projection}.weight");
        let (q, k, v, o) = (name("q_proj"), name("k_proj"), name("v_proj"), name("o_proj"));
        let hidden = 0..config.hidden_size;
        let part = |name, heads| Part { name, rows: columns(heads), cols: hidden.clone() };
        let qkv = loader.matrix(
            &q,
            &[part(&q, &share.query_heads), part(&k, &share.kv_heads), part(&v, &share.kv_heads)],
        )?;
        let output = Part { name: &o, rows: hidden.clone(), cols: columns(&share.query_heads) };
        let output = loader.matrix(&o, &[output])?;
        let (query_count, kv_count) = (share.query_heads.len(), share.kv_heads.len());
        let stride = (query_count + 2 * kv_count) * dim;
        let heads = |first: usize, count| Heads { stride, first: first * dim, count, dim };
        Ok(ParallelAttention {
            qkv,
            output,
            queries: heads(0, query_count),
            keys: heads(query_count, kv_count),
            values: heads(query_count + kv_count, kv_count),
            shape: AttentionShape {
                pages,
                kv_of_query: share.kv_of_query.clone(),
                scale: 1.0 / (dim as f32).sqrt(),
                window,
            },
            place,
        })
    }

    /// From the normalised rows to the residual stream.
    pub(super) fn forward(
        &self,
        device: &Device,
        act: &mut Activations<T>,
        geometry: &StepGeometry,
        kv: &mut KvStore,
        comm: &mut dyn Collective,
    ) -> Result<(), ModelError> {
        let GroupGeometry { slots, tables } = &geometry.groups[self.place.group];
        let rows = slots.len();
        let wide = rows * self.qkv.outputs();
        linear(device, act.normed.view(rows), &self.qkv, act.qkv.view_mut(0..wide))?;
        let angles = rows * geometry.frequencies.len();
        for heads in [self.queries, self.keys] {
            let (cos, sin) = (geometry.cos.view(0..angles), geometry.sin.view(0..angles));
            rope(device, act.qkv.view_mut(0..wide), heads, Pairs::HalfSplit, cos, sin)?;
        }
        let pages = kv.slot_mut::<T>(self.place.slot)?;
        let qkv = act.qkv.view(0..wide);
        let storage = pages.buffer.view_mut(pages.range.clone());
        kv_append(device, qkv, self.keys, self.values, slots, self.shape.pages, storage)?;
        let cache = PagedCache { pages: pages.buffer.view(pages.range), tables, spans: &geometry.spans };
        attention(device, qkv, self.queries, &self.shape, cache, act.attended.view_mut(rows))?;
        let stream = (&mut act.residual, &mut act.delta, &mut act.has_delta);
        end_layer(device, act.attended.view(rows), &self.output, stream, comm)
    }

    pub(super) fn weight_bytes(&self) -> u64 {
        self.qkv.bytes() + self.output.bytes()
    }
}

/// Gated MLP over the columns of one rank.
pub(super) struct ParallelMlp<T> {
    gate_up: Weight<T>,
    down: Weight<T>,
}

impl<T: KvElement> ParallelMlp<T> {
    /// `prefix` is the layer's, e.g. `model.layers.3.mlp`.
    pub(super) fn load(
        loader: &Loader<'_>,
        prefix: &str,
        share: &Share,
        config: &ModelConfig,
    ) -> Result<Self, LoadError> {
        let name = |projection: &str| format!("{prefix}.{projection}.weight");
        let (gate, up, down) = (name("gate_proj"), name("up_proj"), name("down_proj"));
        let part = |name| Part { name, rows: share.columns.clone(), cols: 0..config.hidden_size };
        let gate_up = loader.gates(&gate, [part(&gate), part(&up)])?;
        let columns = share.columns.clone();
        let down =
            loader.matrix(&down, &[Part { name: &down, rows: 0..config.hidden_size, cols: columns }])?;
        Ok(ParallelMlp { gate_up, down })
    }

    /// From the normalised rows to the residual stream.
    pub(super) fn forward(
        &self,
        device: &Device,
        act: &mut Activations<T>,
        rows: usize,
        comm: &mut dyn Collective,
    ) -> Result<(), ModelError> {
        linear_swiglu(device, act.normed.view(rows), &self.gate_up, act.activated.view_mut(rows))?;
        let stream = (&mut act.residual, &mut act.delta, &mut act.has_delta);
        end_layer(device, act.activated.view(rows), &self.down, stream, comm)
    }

    pub(super) fn weight_bytes(&self) -> u64 {
        self.gate_up.bytes() + self.down.bytes()
    }
}

/// Head over the vocabulary rows of one rank: logits are gathered, a bounded number of rows at a time.
pub(super) struct LogitGather {
    sizes: Vec<usize>,
    local: Buffer<f32>,
    gathered: Buffer<f32>,
    logits: Buffer<f32>,
}

impl LogitGather {
    /// Rows of logits made at a time.
    pub(super) const ROWS_MAX: usize = 32;

    /// `sizes`: vocabulary rows of each rank.
    pub(super) fn new(workspace: &mut Workspace, sizes: Vec<usize>, rank: usize) -> Result<Self, LoadError> {
        let vocabulary: usize = sizes.iter().sum();
        let single = sizes.len() == 1;
        let (local, gathered) = if single { (0, 0) } else { (sizes[rank], vocabulary) };
        Ok(LogitGather {
            local: workspace.buffer("local logits", Self::ROWS_MAX * local)?,
            gathered: workspace.buffer("gathered logits", Self::ROWS_MAX * gathered)?,
            logits: workspace.buffer("logits", Self::ROWS_MAX * vocabulary)?,
            sizes,
        })
    }

    /// Logits `[rows, vocabulary]` of `hidden [rows, width]`, whole on every rank.
    pub(super) fn forward<T: KvElement>(
        &mut self,
        device: &Device,
        hidden: RowsView<'_, T>,
        head: &Weight<T>,
        comm: &mut dyn Collective,
    ) -> Result<&mut [f32], ModelError> {
        let rows = hidden.rows();
        let vocabulary: usize = self.sizes.iter().sum();
        if self.sizes.len() == 1 {
            linear(device, hidden, head, self.logits.view_mut(0..rows * vocabulary))?;
        } else {
            let mine = rows * head.outputs();
            linear(device, hidden, head, self.local.view_mut(0..mine))?;
            let gathered = self.gathered.view_mut(0..rows * vocabulary).host_mut();
            comm.all_gather(self.local.view(0..mine).host(), gathered)?;
            interleave(gathered, &self.sizes, rows, self.logits.as_mut_slice());
        }
        Ok(&mut self.logits.as_mut_slice()[..rows * vocabulary])
    }
}

/// From one block `[rows, size]` per rank to rows that hold every rank's part.
fn interleave(gathered: &[f32], sizes: &[usize], rows: usize, logits: &mut [f32]) {
    let vocabulary: usize = sizes.iter().sum();
    let (mut from, mut column) = (0, 0);
    for &size in sizes {
        for row in 0..rows {
            logits[row * vocabulary + column..][..size].copy_from_slice(&gathered[from..from + size]);
            from += size;
        }
        column += size;
    }
}
