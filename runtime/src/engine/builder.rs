//! From a topology or a model's path to a running engine.

use std::{path::PathBuf, sync::Arc, time::Duration};

use consort_actors::{
    CacheSpec, Ensemble, EnsembleSpec, LayerGroups, LoadProgress, SchedulerConfig, ShardFactory,
};
use consort_kernels::{
    cuda::{cubins::Cubins, settings::Settings},
    device::Isa,
};
use consort_parallel::{
    checkpoint::Checkpoint,
    kv::KvGroups,
    model::{LoadOptions, STEP_LIMIT},
};

use super::{
    Engine, Inner, Limits, LiveRequests,
    cards::Cards,
    factory::ModelFactory,
    optional,
    plan::{Plan, load_options},
    sizing,
};
use crate::{
    error::{DeviceError, EngineError},
    metrics::EngineMetrics,
    server::ServerSettings,
    shard_process::{self, ProcessFactory, Processes},
    text::{ChatTemplate, Tokenizer},
    topology::{
        self, AllReduce, Broken, DeviceSpec, Environment, Isolation, Overrides, Topology, TopologyError,
    },
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
    environment: Option<Environment>,
    on_progress: Option<OnProgress>,
    /// What ranks are that are processes, if not this program.
    shard_executable: Option<PathBuf>,
    /// How long a device may take for a step, if not as long as ever; only tests say so.
    step_limit: Option<Duration>,
    #[cfg(test)]
    faults: Option<crate::testing::Faults>,
    #[cfg(test)]
    processes: Option<Arc<Processes>>,
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

    /// Ranks to split the model over, in each replica; any number.
    pub fn tensor_parallel_size(self, ranks: usize) -> Self {
        self.with_overrides(|overrides| overrides.tensor_parallel_size = Some(ranks))
    }

    /// The ranks' devices, in rank order, instead of CPUs: `cuda:0`, or the UUID of a GPU.
    pub fn devices<S: Into<String>>(self, devices: impl IntoIterator<Item = S>) -> Self {
        let devices: Vec<String> = devices.into_iter().map(Into::into).collect();
        self.with_overrides(move |overrides| overrides.devices = Some(devices.join(",")))
    }

    /// Replicas of the model, each with all ranks and a KV cache of its own. On a CPU each of them loads the weights.
    pub fn data_parallel_size(self, replicas: usize) -> Self {
        self.with_overrides(|overrides| overrides.data_parallel_size = Some(replicas))
    }

    /// `bfloat16`, `float32` or `auto`.
    pub fn dtype(self, dtype: impl Into<String>) -> Self {
        self.with_overrides(|overrides| overrides.dtype = Some(dtype.into()))
    }

    /// Most tokens of one sequence, prompt and answer together.
    pub fn max_model_len(self, tokens: usize) -> Self {
        self.with_overrides(|overrides| overrides.max_model_len = Some(tokens))
    }

    /// Memory for keys and values, over all ranks of a replica.
    pub fn kv_cache_memory_bytes(self, bytes: u64) -> Self {
        self.with_overrides(|overrides| overrides.kv_cache_memory_bytes = Some(bytes.to_string()))
    }

    /// Memory of the host, over all ranks, for blocks that lose their place in the cache; none unless given.
    pub fn kv_offloading_bytes(self, bytes: u64) -> Self {
        self.with_overrides(|overrides| overrides.kv_offloading_bytes = Some(bytes.to_string()))
    }

    /// Compute threads of each rank.
    pub fn threads_per_rank(self, threads: usize) -> Self {
        self.with_overrides(|overrides| overrides.threads_per_rank = Some(threads))
    }

    /// Instruction set of CPU ranks: `portable`, `avx2`, `avx512`, `amx`, or `auto` for the best that the machine has.
    /// All of them compute the same bits; a lower one is for comparison. The environment's `CONSORT_CPU_ISA` says the
    /// same to programs that do not call this.
    pub fn cpu_isa(self, isa: impl Into<String>) -> Self {
        self.with_overrides(|overrides| overrides.cpu_isa = Some(isa.into()))
    }

    /// Whether a request's tokens must not depend on what else runs: on GPUs a choice that costs speed, on CPUs always
    /// so.
    pub fn batch_invariant(self, is_asked_for: bool) -> Self {
        self.with_overrides(|overrides| overrides.batch_invariant = Some(is_asked_for))
    }

    /// What ranks on GPUs sum with: our kernels, NCCL, or whichever is faster at a size, which is so unless this says
    /// otherwise.
    pub fn all_reduce(self, means: AllReduce) -> Self {
        self.with_overrides(|overrides| overrides.all_reduce = Some(means.name().to_owned()))
    }

    /// What separates ranks: threads of this process, or a process for each, on CPUs and on GPUs. Programs that ask for
    /// processes call [`shard_main`](crate::shard_main) at the start of `main`, or name a program that does.
    pub fn isolation(self, isolation: Isolation) -> Self {
        self.with_overrides(|overrides| overrides.isolation = Some(isolation.name().to_owned()))
    }

    /// The program that ranks are, where they are processes: one of the same build that calls
    /// [`shard_main`](crate::shard_main), as the `consort` command does. The program that runs already unless said.
    pub fn shard_executable(mut self, path: impl Into<PathBuf>) -> Self {
        self.shard_executable = Some(path.into());
        self
    }

    /// Most sequences that run at a time.
    pub fn max_num_seqs(self, sequences: usize) -> Self {
        self.with_overrides(|overrides| overrides.max_num_seqs = Some(sequences))
    }

    /// Most tokens of one step, decodes and prompt chunks together.
    pub fn max_num_batched_tokens(self, tokens: usize) -> Self {
        self.with_overrides(|overrides| overrides.max_num_batched_tokens = Some(tokens))
    }

    /// Whether the keys and values of what was computed are kept for requests that begin alike; they are unless this
    /// says otherwise.
    pub fn enable_prefix_caching(self, is_enabled: bool) -> Self {
        self.with_overrides(|overrides| overrides.enable_prefix_caching = Some(is_enabled))
    }

    /// Whether the next step is planned and enqueued while a device computes one; it is unless this says otherwise.
    /// Answers are the same. Models on CPUs compute on the thread that would do so, one step after another.
    pub fn async_scheduling(self, is_enabled: bool) -> Self {
        self.with_overrides(|overrides| overrides.async_scheduling = Some(is_enabled))
    }

    /// How much earlier a request must have come, in milliseconds, to go before one whose priority is better by one;
    /// with 0 priorities have no effect.
    pub fn priority_aging_ms(self, milliseconds: u64) -> Self {
        self.with_overrides(|overrides| overrides.priority_aging_ms = Some(milliseconds))
    }

    /// Name under which the model is served.
    pub fn served_model_name(self, name: impl Into<String>) -> Self {
        self.with_overrides(|overrides| overrides.served_model_name = Some(name.into()))
    }

    /// Reads `CONSORT_*` and the API keys from here instead of the process's environment; [`Environment::empty`] makes
    /// an engine that does not depend on where it runs.
    pub fn environment(mut self, environment: Environment) -> Self {
        self.environment = Some(environment);
        self
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

    /// How long a device may take for a step before it is taken to hang.
    #[cfg(test)]
    pub(crate) fn step_limit(mut self, limit: Duration) -> Self {
        self.step_limit = Some(limit);
        self
    }

    /// What ranks are that are processes.
    fn processes(&self) -> std::io::Result<Arc<Processes>> {
        #[cfg(test)]
        if let Some(processes) = &self.processes {
            return Ok(Arc::clone(processes));
        }
        Processes::new(self.shard_executable.clone())
    }

    /// Gives a test its own processes.
    #[cfg(test)]
    pub(crate) fn of_processes(mut self, processes: &Arc<Processes>) -> Self {
        self.processes = Some(Arc::clone(processes));
        self
    }

    /// The topology, or all that is wrong: what breaks its own rules, and what the model cannot do besides.
    fn topology(&self, overrides: &Overrides) -> Result<Topology, TopologyError> {
        let of_process;
        let environment = match &self.environment {
            Some(environment) => environment,
            None => {
                of_process = Environment::of_process();
                &of_process
            }
        };
        let outcome = match &self.source {
            Some(Source::Topology(path)) => Topology::load_or_rest(path, overrides, environment),
            Some(Source::Model(path)) => Topology::from_model_or_rest(path, overrides, environment),
            None => return Err(TopologyError::NoModel),
        };
        outcome.map_err(|Broken { error, rest }| {
            // A model that cannot be opened is told of once the configuration is right.
            let Some(rest) = rest else { return error };
            let Ok(checkpoint) = open(&rest.topology) else { return error };
            let violations = error.violations().iter().cloned().chain(Plan::violations(&rest, &checkpoint));
            topology::invalid(violations.collect())
        })
    }

    /// What [`EngineBuilder::start`] and a server would run, as a topology file: every value, those that the engine
    /// computes included, each with its origin in a comment. Reads the model's headers, tokenizer and chat template,
    /// and no weights; blocking. Of API keys only their variable is named, they are never shown.
    pub fn effective_config(&self) -> Result<String, EngineError> {
        let topology = self.topology(&self.overrides)?;
        let checkpoint = open(&topology)?;
        // The cards may be in another machine: then the number of blocks is what their absence makes of it.
        let cards = Cards::look(&topology).ok().flatten();
        let plan = Plan::new(&topology, &checkpoint, cards.as_ref())?;
        texts(&checkpoint)?;
        Ok(topology.to_annotated_toml(&plan.computed()))
    }

    /// How the topology wants its server, with the API keys read from the environment.
    pub fn server_settings(&self) -> Result<ServerSettings, EngineError> {
        Ok(ServerSettings::from_topology(&self.topology(&self.overrides)?))
    }

    /// Loads the model and starts its ranks. Needs a tokio runtime; returns once the engine takes requests. What a
    /// topology says of its server is for [`EngineBuilder::server_settings`] and left alone here.
    pub async fn start(self) -> Result<Engine, EngineError> {
        if shard_process::is_misplaced() {
            return Err(EngineError::IsShard);
        }
        let topology = self.topology(&Overrides { without_server: true, ..self.overrides.clone() })?;
        let step_limit = self.step_limit.unwrap_or(STEP_LIMIT);
        let processes = match topology.isolation() {
            Isolation::Thread => None,
            Isolation::Process => Some(self.processes().map_err(EngineError::Processes)?),
        };
        let prepare = move || Prepared::new(&topology, step_limit, processes);
        let prepared = tokio::task::spawn_blocking(prepare).await??;
        let Prepared { spec, tokenizer, template, limits, model_name, checkpoint, metrics, compute } =
            prepared;
        #[cfg(test)]
        let spec = match &self.faults {
            Some(faults) => {
                let wrap = |factory: &Arc<_>| faults.wrap(Arc::clone(factory));
                EnsembleSpec { factories: spec.factories.iter().map(wrap).collect(), ..spec }
            }
            None => spec,
        };
        let ensemble = Ensemble::start(spec, self.on_progress).await?;
        Ok(Engine {
            salt: None,
            inner: Arc::new(Inner {
                ensemble,
                tokenizer,
                template,
                limits,
                model_name,
                compute,
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
    compute: Compute,
}

/// How the ranks compute.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Compute {
    /// Whether they do on the host's processors. Of an instruction set and of threads nothing depends otherwise.
    pub(crate) on_cpus: bool,
    /// `bfloat16` or `float32`.
    pub(crate) dtype: &'static str,
    pub(crate) isa: Isa,
    pub(crate) threads_per_rank: usize,
}

pub(super) fn open(topology: &Topology) -> Result<Arc<Checkpoint>, EngineError> {
    let path = topology.model_path();
    Checkpoint::open(path).map_err(|source| EngineError::Checkpoint { path: path.to_path_buf(), source })
}

/// What turns text into tokens and chats into text.
fn texts(checkpoint: &Checkpoint) -> Result<(Arc<Tokenizer>, Option<ChatTemplate>), EngineError> {
    let tokenizer = Arc::new(Tokenizer::from_checkpoint(checkpoint)?);
    let template = optional(ChatTemplate::from_checkpoint(checkpoint, &tokenizer))?;
    Ok((tokenizer, template))
}

impl Prepared {
    /// Opens and checks; blocking. Weights are not read.
    fn new(
        topology: &Topology,
        step_limit: Duration,
        processes: Option<Arc<Processes>>,
    ) -> Result<Self, EngineError> {
        let checkpoint = open(topology)?;
        // Whether the model can be divided as asked comes before the slower look at its tokenizer.
        let cards = Cards::look(topology).map_err(DeviceError)?;
        let plan = Plan::new(topology, &checkpoint, cards.as_ref())?;
        let config = checkpoint.config();
        let limits = Limits {
            vocab_size: config.vocab_size,
            max_model_len: plan.max_model_len,
            max_waiting_requests: topology.max_waiting_requests(),
            eos_token_ids: config.eos_token_ids.clone(),
            defaults: sizing::sane(checkpoint.generation_defaults()),
        };
        let computed = plan.computed();
        let compute = Compute {
            on_cpus: topology.is_on_cpus(),
            dtype: computed.dtype,
            isa: computed.isa,
            threads_per_rank: computed.threads_per_rank,
        };
        tracing::info!(
            model = %checkpoint.path().display(),
            ranks = topology.tensor_parallel_size(),
            replicas = topology.data_parallel_size(),
            dtype = compute.dtype,
            cpu_isa = %compute.isa,
            threads_per_rank = compute.threads_per_rank,
            kv_blocks = plan.num_blocks,
            "loading the model"
        );
        // Children shall open the very cards that were looked at here, however their driver numbers them.
        let devices = match (&cards, &processes) {
            (Some(cards), Some(_)) => cards.by_uuid(topology.devices()),
            _ => topology.devices().to_vec(),
        };
        let spec = ensemble_spec(topology, &checkpoint, plan, step_limit, &devices, processes);
        let (tokenizer, template) = texts(&checkpoint)?;
        let model_name = topology.served_model_name().to_owned();
        let metrics = EngineMetrics::new(&model_name, spec.replicas(), &spec.cache)?;
        Ok(Self { spec, tokenizer, template, limits, model_name, checkpoint, metrics, compute })
    }
}

fn ensemble_spec(
    topology: &Topology,
    checkpoint: &Arc<Checkpoint>,
    plan: Plan,
    step_limit: Duration,
    devices: &[DeviceSpec],
    processes: Option<Arc<Processes>>,
) -> EnsembleSpec {
    let block_size = topology.block_size();
    let max_num_batched_tokens = topology.max_num_batched_tokens();
    let (num_blocks, max_model_len) = (plan.num_blocks, plan.max_model_len);
    let host_blocks = plan.host_blocks;
    let windows: Vec<Option<usize>> = KvGroups::of(checkpoint.config()).windows().collect();
    let groups = LayerGroups::new(&windows).expect("a model has from 1 to KV_GROUPS_MAX groups of layers");
    let settings = Settings::of_process();
    let cubins = Arc::new(Cubins::new(settings.clone()));
    let factory = |devices: &[DeviceSpec]| ModelFactory {
        checkpoint: Arc::clone(checkpoint),
        partition: plan.partition.clone(),
        options: LoadOptions { step_limit, ..load_options(topology, plan.dtype, max_model_len, num_blocks) },
        num_blocks,
        host_blocks,
        overlaps: topology.async_scheduling(),
        devices: devices.to_vec(),
        threads_per_rank: plan.threads_per_rank,
        isa: plan.isa,
        cubins: Arc::clone(&cubins),
        settings: settings.clone(),
    };
    EnsembleSpec {
        ranks: topology.tensor_parallel_size(),
        vocab_size: checkpoint.config().vocab_size,
        cache: CacheSpec {
            groups,
            host_blocks,
            prefix_caching: topology.enable_prefix_caching(),
            ..CacheSpec::new(block_size, num_blocks)
        },
        scheduler: SchedulerConfig {
            max_num_seqs: topology.max_num_seqs(),
            max_num_batched_tokens,
            max_model_len,
            max_waiting_requests: topology.max_waiting_requests(),
            priority_aging_ms: topology.priority_aging_ms(),
        },
        factories: devices
            .chunks_exact(topology.tensor_parallel_size())
            .map(|devices| isolated(factory(devices), processes.as_ref()))
            .collect(),
    }
}

/// The factory of ranks that are threads, or processes.
fn isolated(model: ModelFactory, processes: Option<&Arc<Processes>>) -> Arc<dyn ShardFactory> {
    match processes {
        None => Arc::new(model),
        Some(processes) => Arc::new(ProcessFactory::new(model, Arc::clone(processes))),
    }
}
