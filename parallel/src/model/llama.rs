//! Llama and Mistral: RMSNorm, grouped-query attention with rotary embedding and perhaps a window, gated SiLU MLP,
//! perhaps a tied head.

use std::ops::Range;

use consort_kernels::{
    device::Device,
    linear::{Rows, Weight},
    progress,
    workspace::Workspace,
};

use super::{
    HostModel, ModelError, check_layout, check_logit_rows, kv_layout,
    layers::{
        Activations, LogitGather, ParallelAttention, ParallelMlp, Sight, StepGeometry, VocabParallelEmbedding,
    },
    loader::{LoadError, LoadOptions, Loader, Part},
};
use crate::{
    batch::{Batch, BatchLimits},
    checkpoint::Checkpoint,
    collective::Collective,
    config::ModelConfig,
    ids::Rank,
    kv::{KvElement, KvGroups, KvLayout, KvStore},
    partition::{Partition, Share},
};

/// One rank's part of a Llama model, weights and activations of type `T`.
pub(super) struct Llama<T> {
    device: Device,
    config: ModelConfig,
    embedding: VocabParallelEmbedding<T>,
    layers: Vec<Layer<T>>,
    final_norm: Vec<f32>,
    /// Absent when the embedding is the head.
    head: Option<Weight<T>>,
    geometry: StepGeometry,
    activations: Activations<T>,
    /// Output rows whose normalised hidden states are kept for [`HostModel::logits`].
    kept_rows: usize,
    /// `[rows of logits made at a time, hidden]`: some of them.
    asked: Rows<T>,
    gather: LogitGather,
    kv_layout: KvLayout,
    max_batch_tokens: usize,
    workspace_bytes: u64,
}

struct Layer<T> {
    attention_norm: Vec<f32>,
    attention: ParallelAttention<T>,
    mlp_norm: Vec<f32>,
    mlp: ParallelMlp<T>,
}

impl<T: KvElement> Llama<T> {
    /// Reads the slices of `rank` from `checkpoint`.
    pub(super) fn load(
        device: &Device,
        checkpoint: &Checkpoint,
        partition: &Partition,
        rank: Rank,
        options: &LoadOptions,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Self, LoadError> {
        let (config, share) = (checkpoint.config(), partition.share(rank));
        let loader = Loader::new(device, checkpoint, bytes_of_share::<T>(config, share), progress);
        let kv_layout = kv_layout(config, share, options.dtype, options.block_size)?;
        let groups = KvGroups::of(config);
        let sights = groups.places().iter().zip(&config.layer_windows).map(|(&place, &window)| Sight {
            window,
            place,
            pages: kv_layout.host_pages(),
        });
        let embedding = VocabParallelEmbedding::load(&loader, "model.embed_tokens.weight", share, config)?;
        let layers = sights
            .enumerate()
            .map(|(layer, sight)| {
                Layer::load(&loader, &format!("model.layers.{layer}"), share, config, sight)
            })
            .collect::<Result<Vec<_>, _>>()?;
        let final_norm = loader.vector("model.norm.weight", config.hidden_size)?;
        let head = if config.tie_word_embeddings {
            None
        } else {
            let name = "lm_head.weight";
            let (rows, cols) = (share.vocabulary.clone(), 0..config.hidden_size);
            Some(loader.matrix(name, &[Part { name, rows, cols }])?)
        };
        let tokens = options.max_batch_tokens;
        let mut workspace = Workspace::new(device);
        let geometry = StepGeometry::new(&mut workspace, config, groups.count(), tokens)?;
        let ranks = partition.shares().len();
        let activations = Activations::new(&mut workspace, config, share, tokens, ranks)?;
        let asked = workspace.rows("rows of logits", LogitGather::ROWS_MAX, config.hidden_size)?;
        let sizes = partition.shares().iter().map(|share| share.vocabulary.len()).collect();
        let gather = LogitGather::new(&mut workspace, sizes, rank.index())?;
        Ok(Llama {
            device: device.clone(),
            config: config.clone(),
            embedding,
            layers,
            final_norm,
            head,
            geometry,
            activations,
            kept_rows: 0,
            asked,
            gather,
            kv_layout,
            max_batch_tokens: tokens,
            workspace_bytes: workspace.bytes(),
        })
    }

    /// Keeps the output rows, normalised.
    fn keep_outputs(&mut self, output_rows: &[usize]) -> Result<(), ModelError> {
        let act = &mut self.activations;
        act.gather(output_rows, self.config.hidden_size);
        act.normalise(&self.device, output_rows.len(), &self.final_norm, self.config.rms_norm_eps)?;
        self.kept_rows = output_rows.len();
        Ok(())
    }
}

impl<T: KvElement> Layer<T> {
    fn load(
        loader: &Loader<'_>,
        prefix: &str,
        share: &Share,
        config: &ModelConfig,
        sight: Sight,
    ) -> Result<Self, LoadError> {
        let norm = |name: &str| loader.vector(&format!("{prefix}.{name}.weight"), config.hidden_size);
        Ok(Layer {
            attention_norm: norm("input_layernorm")?,
            attention: ParallelAttention::load(loader, &format!("{prefix}.self_attn"), share, config, sight)?,
            mlp_norm: norm("post_attention_layernorm")?,
            mlp: ParallelMlp::load(loader, &format!("{prefix}.mlp"), share, config)?,
        })
    }
}

impl<T: KvElement> HostModel for Llama<T> {
    fn forward(
        &mut self,
        batch: &Batch,
        kv: &mut KvStore,
        comm: &mut dyn Collective,
    ) -> Result<(), ModelError> {
        check_layout(kv, &self.kv_layout)?;
        let block_size = self.kv_layout.pages.block_size();
        batch.check(BatchLimits {
            max_tokens: self.max_batch_tokens,
            vocab_size: self.config.vocab_size,
            groups: self.geometry.groups(),
            block_size,
            num_blocks: kv.num_blocks(),
            drawn: 0,
        })?;
        let (device, rows) = (self.device.clone(), batch.tokens.len());
        let eps = self.config.rms_norm_eps;
        self.kept_rows = 0;
        self.geometry.prepare(&device, batch, block_size)?;
        let act = &mut self.activations;
        act.restart();
        self.embedding.forward(&device, &batch.tokens, &mut act.residual, comm)?;
        for layer in &self.layers {
            progress::note();
            act.normalise(&device, rows, &layer.attention_norm, eps)?;
            layer.attention.forward(&device, act, &self.geometry, kv, comm)?;
            act.normalise(&device, rows, &layer.mlp_norm, eps)?;
            layer.mlp.forward(&device, act, rows, comm)?;
        }
        self.keep_outputs(&batch.output_rows)
    }

    fn logits(&mut self, rows: Range<usize>, comm: &mut dyn Collective) -> Result<&mut [f32], ModelError> {
        check_logit_rows(&rows, self.kept_rows, LogitGather::ROWS_MAX)?;
        let count = rows.len();
        self.asked.copy_rows(self.activations.normed(self.kept_rows), rows);
        let head = self.head.as_ref().unwrap_or(self.embedding.table());
        self.gather.forward(&self.device, self.asked.view(count), head, comm)
    }

    fn logit_rows_max(&self) -> usize {
        LogitGather::ROWS_MAX
    }

    fn vocab_size(&self) -> usize {
        self.config.vocab_size
    }

    fn device(&self) -> Option<&Device> {
        Some(&self.device)
    }

    fn weight_bytes(&self) -> u64 {
        let norms = 4 * (2 * self.layers.len() + 1) * self.config.hidden_size;
        let layers: u64 =
            self.layers.iter().map(|layer| layer.attention.weight_bytes() + layer.mlp.weight_bytes()).sum();
        layers + self.embedding.table().bytes() + self.head.as_ref().map_or(0, Weight::bytes) + norms as u64
    }

    fn workspace_bytes(&self) -> u64 {
        self.workspace_bytes
    }
}

/// Bytes that a rank reads while loading, for the progress report.
fn bytes_of_share<T: KvElement>(config: &ModelConfig, share: &Share) -> u64 {
    let (hidden, dim) = (config.hidden_size, config.head_dim);
    let attention = hidden * dim * (2 * share.query_heads.len() + 2 * share.kv_heads.len());
    let mlp = 3 * hidden * share.columns.len();
    let vocabularies = if config.tie_word_embeddings { 1 } else { 2 };
    let matrices = config.num_layers * (attention + mlp) + vocabularies * share.vocabulary.len() * hidden;
    let norms = (2 * config.num_layers + 1) * hidden;
    (matrices * T::DTYPE.bytes() + norms * 4) as u64
}
