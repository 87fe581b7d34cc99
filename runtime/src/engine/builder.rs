//! From a topology or a model's path to a running engine.

use std::{path::PathBuf, sync::Arc, thread};

use consort_actors::{CacheSpec, Ensemble, EnsembleSpec, LoadProgress, SchedulerConfig};
use consort_kernels::DType;
use consort_parallel::{
    checkpoint::{Checkpoint, Encoding},
    model::{self, LoadOptions},
    partition::Partition,
};

use super::{
    Engine, Inner, Limits, LiveRequests,
    factory::ModelFactory,
    optional,
    sizing::{self, KvDemand},
};
use crate::{
    error::EngineError,
    metrics::EngineMetrics,
    server::ServerSettings,
    text::{ChatTemplate, Tokenizer},
    topology::{self, Overrides, Topology, TopologyError},
};

/// What is told while ranks load.
type OnProgress = Arc<dyn Fn(LoadProgress) + Send + Sync>;

enum Source {
    Topology(PathBuf),
    Model(PathBuf),
}

/// Describes an engine; [`EngineBuilder::start`] starts it. What is set here wins over environment and file.
#[derive(Default)]
pub struct EngineBuilder {
    source: Option<Source>,
    overrides: Overrides,
    on_progress: Option<OnProgress>,
    #[cfg(test)]
    faults: Option<crate::testing::Faults>,
}

impl EngineBuilder {
    pub(crate) fn from_toml(path: PathBuf) -> Self {
        Self { source: Some(Source::Topology(path)), ..Self::default() }
    }

    pub(crate) fn from_source(path: PathBuf, is_topology: bool) -> Self {
        if is_topology { Self::from_toml(path) } else { Self::default().model(path) }
    }

    pub(crate) fn with_overrides(mut self, change: impl FnOnce(&mut Overrides)) -> Self {
        change(&mut self.overrides);
        self
    }

    /// The model: a folder with `config.json`, or a GGUF file.
    pub fn model(mut self, path: impl Into<PathBuf>) -> Self {
        self.source = Some(Source::Model(path.into()));
        self
    }

    /// Ranks to split the model over; any number.
    pub fn tensor_parallel_size(self, ranks: usize) -> Self {
        self.with_overrides(|overrides| overrides.tensor_parallel_size = Some(ranks))
    }

    /// `bfloat16` or `float32`.
    pub fn dtype(self, dtype: impl Into<String>) -> Self {
        self.with_overrides(|overrides| overrides.dtype = Some(dtype.into()))
    }

    /// Most tokens of one sequence, prompt and answer together.
    pub fn max_model_len(self, tokens: usize) -> Self {
        self.with_overrides(|overrides| overrides.max_model_len = Some(tokens))
    }

    /// Memory for keys and values, over all ranks.
    pub fn kv_cache_memory_bytes(self, bytes: u64) -> Self {
        self.with_overrides(|overrides| overrides.kv_cache_memory_bytes = Some(bytes))
    }

    /// Compute threads of each rank.
    pub fn threads_per_rank(self, threads: usize) -> Self {
        self.with_overrides(|overrides| overrides.threads_per_rank = Some(threads))
    }

    /// Most sequences that run at a time.
    pub fn max_num_seqs(self, sequences: usize) -> Self {
        self.with_overrides(|overrides| overrides.max_num_seqs = Some(sequences))
    }

    /// Most tokens of one step, decodes and prompt chunks together.
    pub fn max_num_batched_tokens(self, tokens: usize) -> Self {
        self.with_overrides(|overrides| overrides.max_num_batched_tokens = Some(tokens))
    }

    /// Name under which the model is served.
    pub fn served_model_name(self, name: impl Into<String>) -> Self {
        self.with_overrides(|overrides| overrides.served_model_name = Some(name.into()))
    }

    /// Calls back while ranks load, from their threads.
    pub fn on_progress(mut self, report: impl Fn(LoadProgress) + Send + Sync + 'static) -> Self {
        self.on_progress = Some(Arc::new(report));
        self
    }

    /// Lets a test strike the ranks.
    #[cfg(test)]
    pub(crate) fn faults(mut self, faults: &crate::testing::Faults) -> Self {
        self.faults = Some(faults.clone());
        self
    }

    fn topology(&self, overrides: &Overrides) -> Result<Topology, TopologyError> {
        match &self.source {
            Some(Source::Topology(path)) => Topology::load(path, overrides),
            Some(Source::Model(path)) => Topology::from_model(path, overrides),
            None => Err(TopologyError::Read {
                path: PathBuf::from("(no model given: call EngineBuilder::model)"),
                source: std::io::ErrorKind::NotFound.into(),
            }),
        }
    }

    /// How the topology wants its server, with the API key read from the environment.
    pub fn server_settings(&self) -> Result<ServerSettings, EngineError> {
        Ok(ServerSettings::from_topology(&self.topology(&self.overrides)?))
    }

    /// Loads the model and starts its ranks. Needs a tokio runtime; returns once the engine takes requests. What a
    /// topology says of its server is for [`EngineBuilder::server_settings`] and left alone here.
    pub async fn start(self) -> Result<Engine, EngineError> {
        let topology = self.topology(&Overrides { without_server: true, ..self.overrides.clone() })?;
        let prepared = tokio::task::spawn_blocking(move || Prepared::new(&topology)).await??;
        let Prepared { spec, tokenizer, template, limits, model_name, checkpoint, metrics } = prepared;
        #[cfg(test)]
        let spec = match &self.faults {
            Some(faults) => EnsembleSpec { factory: faults.wrap(Arc::clone(&spec.factory)), ..spec },
            None => spec,
        };
        let ensemble = Ensemble::start(spec, self.on_progress).await?;
        Ok(Engine {
            inner: Arc::new(Inner {
                ensemble,
                tokenizer,
                template,
                limits,
                model_name,
                model_path: checkpoint.path().to_path_buf(),
                started_unix_seconds: crate::server::unix_seconds(),
                live: LiveRequests::default(),
                metrics: Arc::new(metrics),
            }),
        })
    }
}

/// Everything that is known before a rank loads.
struct Prepared {
    spec: EnsembleSpec,
    tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
    limits: Limits,
    model_name: String,
    checkpoint: Arc<Checkpoint>,
    metrics: EngineMetrics,
}

impl Prepared {
    /// Opens and checks; blocking. Weights are not read.
    fn new(topology: &Topology) -> Result<Self, EngineError> {
        let path = topology.model_path();
        let checkpoint = Checkpoint::open(path)
            .map_err(|source| EngineError::Checkpoint { path: path.to_path_buf(), source })?;
        let config = checkpoint.config();
        let limits = Limits {
            vocab_size: config.vocab_size,
            max_model_len: sizing::max_model_len(topology.max_model_len(), config)?,
            max_waiting_requests: topology.max_waiting_requests(),
            eos_token_ids: config.eos_token_ids.clone(),
            defaults: sizing::sane(checkpoint.generation_defaults()),
        };
        // Whether the model can be divided as asked comes before the slower look at its tokenizer.
        let spec = ensemble_spec(topology, &checkpoint, limits.max_model_len)?;
        let tokenizer = Arc::new(Tokenizer::from_checkpoint(&checkpoint)?);
        let template = optional(ChatTemplate::from_checkpoint(&checkpoint, &tokenizer))?;
        let model_name = topology.served_model_name().to_owned();
        let metrics = EngineMetrics::new(&model_name, spec.cache.block_size, spec.cache.num_blocks)?;
        Ok(Self { spec, tokenizer, template, limits, model_name, checkpoint, metrics })
    }
}

fn ensemble_spec(
    topology: &Topology,
    checkpoint: &Arc<Checkpoint>,
    max_model_len: usize,
) -> Result<EnsembleSpec, EngineError> {
    let config = checkpoint.config();
    let ranks = topology.tensor_parallel_size();
    let weights: Option<Vec<f32>> =
        topology.weights().map(|weights| weights.iter().map(|weight| *weight as f32).collect());
    let partition = Partition::new(config, ranks, weights.as_deref())
        .map_err(|source| EngineError::Partition { ranks, source })?;
    let dtype = dtype(topology.dtype(), checkpoint);
    let block_size = topology.block_size();
    let mut block_bytes = 0;
    for share in partition.shares() {
        block_bytes += model::kv_layout(config, share, dtype, block_size)?.block_bytes();
    }
    let max_num_seqs = topology.max_num_seqs();
    let num_blocks = KvDemand {
        given_bytes: topology.kv_cache_memory_bytes(),
        block_bytes,
        block_size,
        max_model_len,
        max_num_seqs,
    }
    .num_blocks()?;
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let max_num_batched_tokens = topology.max_num_batched_tokens();
    let factory = ModelFactory {
        checkpoint: Arc::clone(checkpoint),
        partition,
        options: LoadOptions { dtype, max_batch_tokens: max_num_batched_tokens, block_size },
        num_blocks,
        threads_per_rank: sizing::threads_per_rank(topology.threads_per_rank(), cores, ranks),
    };
    Ok(EnsembleSpec {
        ranks,
        vocab_size: config.vocab_size,
        cache: CacheSpec { block_size, num_blocks },
        scheduler: SchedulerConfig {
            max_num_seqs,
            max_num_batched_tokens,
            max_model_len,
            max_waiting_requests: topology.max_waiting_requests(),
        },
        factory: Arc::new(factory),
    })
}

/// The format to compute in. `auto` keeps float32 checkpoints exact.
fn dtype(asked: topology::DType, checkpoint: &Checkpoint) -> DType {
    match asked {
        topology::DType::BFloat16 => DType::BF16,
        topology::DType::Float32 => DType::F32,
        topology::DType::Auto => match checkpoint.tensor("model.embed_tokens.weight") {
            Ok(embedding) if embedding.encoding == Encoding::F32 => DType::F32,
            _ => DType::BF16,
        },
    }
}
