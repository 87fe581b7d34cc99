//! From the command line to what the planner is asked.

use std::path::{Path, PathBuf};

use consort_parallel::{
    checkpoint::{Checkpoint, CheckpointError, read_shape},
    plan::{GpuSpec, Limits, ModelShape, PlanRequest, RankDevice, WeightFormat, models},
};

use super::{
    Usage,
    args::{Cards, PlanArgs, Wanted},
    report::with_cause,
};
use crate::{
    cli::args::is_topology,
    engine,
    topology::{DType, Environment, Overrides, Topology, TopologyError},
};

/// On a card, what keeps it busy while prompts come in.
const BATCHED_TOKENS_ON_CARDS: usize = 2048;
const MAX_NUM_SEQS: usize = 256;
const BLOCK_SIZE: usize = 16;

/// What is asked, and what is known of where it came from.
pub(super) struct Asked {
    pub(super) request: PlanRequest,
    /// Bytes of the checkpoint's tensors, where there is one.
    pub(super) stored_bytes: Option<u64>,
    pub(super) source: Source,
    /// Why `consort serve` would refuse the model, if it would.
    pub(super) not_run: Option<String>,
    /// Tokens of each sequence in an estimated step.
    pub(super) step_context: usize,
}

/// Where the model came from.
pub(super) enum Source {
    /// Nothing that an engine opens: a name, or a shape. The path is where a topology would say that it is.
    Shape { model_path: String },
    /// What `consort serve` takes.
    Served(Box<Served>),
}

/// A topology, or a model with a server's defaults; and what flags say in their place.
pub(super) struct Served {
    path: PathBuf,
    is_topology: bool,
    pub(super) overrides: Overrides,
}

impl Served {
    /// Read anew, under these overrides.
    pub(super) fn topology(&self, overrides: &Overrides) -> Result<Topology, TopologyError> {
        let environment = Environment::of_process();
        match self.is_topology {
            true => Topology::load_with(&self.path, overrides, &environment),
            false => Topology::from_model_with(&self.path, overrides, &environment),
        }
    }
}

pub(super) fn ask(args: &PlanArgs) -> anyhow::Result<Asked> {
    let path = Path::new(&args.source);
    let mut asked = match path {
        _ if is_topology(path) => served(args, path)?,
        _ if !path.exists() => by_name(args)?,
        _ => match planned_only(path) {
            Some(reason) => by_configuration(args, path, &reason)?,
            None => served(args, path)?,
        },
    };
    let request = &mut asked.request;
    if let Some(dtype) = args.dtype {
        request.format = match dtype {
            Wanted::Auto => request.model.own_format(),
            Wanted::This(format) => format,
        };
        request.kv_format = request.format.kv();
    }
    match args.kv_cache_dtype {
        Some(Wanted::This(format)) => request.kv_format = format,
        Some(Wanted::Auto) | None => {}
    }
    asked.step_context = args.step_context.clamp(1, request.limits.max_model_len.max(1));
    Ok(asked)
}

/// A model of the table, in the format of its checkpoint.
fn by_name(args: &PlanArgs) -> anyhow::Result<Asked> {
    let model = models::find(&args.source).map_err(|error| Usage(error.to_string()))?;
    let model_path = format!("models/{}", model.name);
    let not_run = model.config.is_none().then(|| {
        let name = &model.name;
        format!("this version plans {name} and does not run it: it runs Llama and Mistral models")
    });
    Ok(Asked { not_run, ..by_shape(args, model, None, model_path)? })
}

/// Why a model that is here can be planned and not run: what it needs is not built, or there is no more of it than its
/// configuration. A damaged one is neither planned nor run.
fn planned_only(path: &Path) -> Option<CheckpointError> {
    let error = Checkpoint::open(path).err()?;
    let is_sound = matches!(
        error,
        CheckpointError::Unsupported { .. }
            | CheckpointError::Encoding { .. }
            | CheckpointError::NoWeights { .. }
    );
    is_sound.then_some(error)
}

fn by_configuration(args: &PlanArgs, path: &Path, reason: &CheckpointError) -> anyhow::Result<Asked> {
    let (shape, stored_bytes) = read_shape(path)?;
    let path = std::path::absolute(path)?;
    let name = if path.is_dir() { path.file_name() } else { path.file_stem() };
    let name = name.map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    let planned = by_shape(args, ModelShape { name, ..shape }, stored_bytes, path.display().to_string())?;
    Ok(Asked { not_run: Some(format!("not run: {}", with_cause(reason))), ..planned })
}

fn by_shape(
    args: &PlanArgs,
    model: ModelShape,
    stored_bytes: Option<u64>,
    model_path: String,
) -> anyhow::Result<Asked> {
    let Some(Cards(cards)) = &args.gpus else {
        let example = format!("consort plan {} --gpus 3xH100-80GB", args.source);
        return Err(Usage(format!("on which cards? Say it with --gpus, as in {example}")).into());
    };
    let format = model.own_format();
    // Every sequence that runs has a token in a step: as in a topology, a bound that is given pulls the other along.
    let max_num_seqs = match (args.max_num_seqs, args.max_num_batched_tokens) {
        (Some(given), _) => given,
        (None, tokens) => tokens.map_or(MAX_NUM_SEQS, |tokens| MAX_NUM_SEQS.min(tokens.max(1))),
    };
    Ok(Asked {
        stored_bytes,
        source: Source::Shape { model_path },
        not_run: None,
        step_context: 0,
        request: PlanRequest {
            devices: cards.iter().cloned().map(RankDevice::Card).collect(),
            replicas: 1,
            shares: None,
            format,
            kv_format: format.kv(),
            limits: Limits {
                block_size: args.block_size.unwrap_or(BLOCK_SIZE),
                max_model_len: args.max_model_len.unwrap_or(model.context_max),
                max_num_seqs,
                max_num_batched_tokens: args
                    .max_num_batched_tokens
                    .unwrap_or_else(|| BATCHED_TOKENS_ON_CARDS.max(max_num_seqs)),
                is_batch_invariant: false,
                // As a server's ranks on cards are.
                separate_processes: true,
            },
            utilization: args.gpu_memory_utilization,
            kv_bytes: args.kv_cache_memory_bytes,
            offloading_bytes: None,
            host_memory_bytes: None,
            formats: WeightFormat::ALL.to_vec(),
            model,
        },
    })
}

/// A topology, or a model with a server's defaults: as `consort serve` would run it with these flags.
fn served(args: &PlanArgs, path: &Path) -> anyhow::Result<Asked> {
    let mut source =
        Served { path: path.to_path_buf(), is_topology: is_topology(path), overrides: overrides(args) };
    let mut topology = source.topology(&source.overrides)?;
    // Written into a file elsewhere, a relative path would mean another place.
    source.overrides.model = std::path::absolute(topology.model_path())?.to_str().map(str::to_owned);
    let mut cards_of_ranks = None;
    let mut planned_format = None;
    if let Some(Cards(cards)) = &args.gpus {
        cards_of_ranks = Some(shared_out(cards, topology.data_parallel_size())?);
        planned_format = put_on_cards(&mut source, &topology, cards.len());
        topology = source.topology(&source.overrides)?;
    }
    let (mut request, stored_bytes) = engine::plan_request(&topology, cards_of_ranks.is_none())?;
    if let Some(format) = planned_format {
        (request.format, request.kv_format) = (format, format.kv());
    }
    if let Some(cards) = cards_of_ranks {
        request.devices = cards.into_iter().map(RankDevice::Card).collect();
        // Of cards that nobody has looked at, all but the reserves, unless somebody said how much.
        if !source.is_topology && topology.origin("cache.gpu_memory_utilization").is_none() {
            request.utilization = None;
        }
    }
    let source = Source::Served(Box::new(source));
    Ok(Asked { request, stored_bytes: Some(stored_bytes), source, not_run: None, step_context: 0 })
}

/// What flags say in place of a topology.
fn overrides(args: &PlanArgs) -> Overrides {
    Overrides {
        // Formats that only a planner knows come in its place later.
        dtype: args.dtype.map(|_| WeightFormat::BFloat16.name().to_owned()),
        max_model_len: args.max_model_len,
        block_size: args.block_size,
        kv_cache_memory_bytes: args.kv_cache_memory_bytes.map(|bytes| bytes.to_string()),
        gpu_memory_utilization: args.gpu_memory_utilization,
        max_num_seqs: args.max_num_seqs,
        max_num_batched_tokens: args.max_num_batched_tokens,
        // The server's address and key have nothing to do with memory.
        without_server: true,
        isolates_gpus: true,
        ..Overrides::default()
    }
}

/// The card of each rank of a replica: of those that its replicas have, the one with the least memory.
fn shared_out(cards: &[GpuSpec], replicas: usize) -> Result<Vec<GpuSpec>, Usage> {
    if !cards.len().is_multiple_of(replicas) {
        let (count, noun) = (cards.len(), if cards.len() == 1 { "card" } else { "cards" });
        return Err(Usage(format!(
            "{count} {noun} cannot be shared out over the topology's {replicas} replicas (data_parallel_size); give a \
             multiple of {replicas} to --gpus, those of replica 0 first"
        )));
    }
    let ranks = cards.len() / replicas;
    let of_rank = |rank| cards.iter().skip(rank).step_by(ranks).min_by_key(|card| card.memory_bytes);
    Ok((0..ranks).filter_map(of_rank).cloned().collect())
}

/// Names so many cards in place of a topology's devices, with what else is no longer as it was on them. The format that
/// it asks for, if cards are only planned with that.
fn put_on_cards(source: &mut Served, topology: &Topology, cards: usize) -> Option<WeightFormat> {
    let overrides = &mut source.overrides;
    overrides.devices = Some((0..cards).map(|at| format!("cuda:{at}")).collect::<Vec<_>>().join(","));
    let ranks = cards / topology.data_parallel_size();
    if topology.weights().is_some_and(|weights| weights.len() != ranks) {
        // Shares of other ranks mean nothing for these.
        overrides.weights = Some(vec!["1"; ranks].join(","));
    }
    // A default that is for processors does not hold for cards.
    if !source.is_topology && topology.origin("scheduler.max_num_batched_tokens").is_none() {
        overrides.max_num_batched_tokens = Some(BATCHED_TOKENS_ON_CARDS.max(topology.max_num_seqs()));
    }
    if topology.dtype() != DType::Float32 {
        return None;
    }
    // As the flag of that name: a topology of cards cannot say it.
    overrides.dtype = Some(WeightFormat::BFloat16.name().to_owned());
    Some(WeightFormat::Float32)
}
