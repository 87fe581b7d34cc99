//! From the command line to what the planner is asked.

use std::path::Path;

use consort_parallel::{
    checkpoint::{Checkpoint, read_shape},
    plan::{KvFormat, Limits, ModelShape, PlanRequest, RankDevice, WeightFormat, models},
};

use super::{
    Usage,
    args::{Cards, PlanArgs, Wanted},
};
use crate::{
    cli::args::is_topology,
    engine,
    topology::{Environment, Overrides, Topology},
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
    /// Where the model is, for a topology.
    pub(super) model_path: String,
    /// The devices of the topology that is planned, if one is.
    pub(super) devices: Option<Vec<String>>,
    /// Tokens of each sequence in an estimated step.
    pub(super) step_context: usize,
}

pub(super) fn ask(args: &PlanArgs) -> anyhow::Result<Asked> {
    let path = Path::new(&args.source);
    let mut asked = match path {
        _ if is_topology(path) => on_disk(args, path)?,
        _ if is_planned_only(path) => by_configuration(args, path)?,
        _ if path.exists() => on_disk(args, path)?,
        _ => by_name(args)?,
    };
    let request = &mut asked.request;
    if let Some(Cards(cards)) = &args.gpus {
        request.devices = cards.iter().cloned().map(RankDevice::Card).collect();
    }
    if let Some(dtype) = args.dtype {
        request.format = match dtype {
            Wanted::Auto => request.model.stored,
            Wanted::This(format) => format,
        };
        request.kv_format = request.format.kv();
    }
    match args.kv_cache_dtype {
        Some(Wanted::This(format)) => request.kv_format = format,
        Some(Wanted::Auto) | None => {}
    }
    apply_limits(args, request);
    asked.step_context = args.step_context.clamp(1, request.limits.max_model_len.max(1));
    Ok(asked)
}

fn apply_limits(args: &PlanArgs, request: &mut PlanRequest) {
    let limits = &mut request.limits;
    let set = |to: &mut usize, given: Option<usize>| *to = given.unwrap_or(*to);
    set(&mut limits.max_model_len, args.max_model_len);
    set(&mut limits.max_num_seqs, args.max_num_seqs);
    set(&mut limits.max_num_batched_tokens, args.max_num_batched_tokens);
    set(&mut limits.block_size, args.block_size);
    request.utilization = args.gpu_memory_utilization.or(request.utilization);
    request.kv_bytes = args.kv_cache_memory_bytes.or(request.kv_bytes);
}

/// A model of the table, in the format of its checkpoint.
fn by_name(args: &PlanArgs) -> anyhow::Result<Asked> {
    let model = models::find(&args.source).map_err(|error| Usage(error.to_string()))?;
    let model_path = format!("models/{}", model.name);
    by_shape(args, model, None, model_path)
}

/// Whether a folder has a model that only a planner knows, or nothing but its configuration.
fn is_planned_only(path: &Path) -> bool {
    path.is_dir() && Checkpoint::open(path).is_err() && read_shape(path).is_ok()
}

fn by_configuration(args: &PlanArgs, path: &Path) -> anyhow::Result<Asked> {
    let (shape, stored_bytes) = read_shape(path)?;
    let path = std::path::absolute(path)?;
    let name = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    by_shape(args, ModelShape { name, ..shape }, stored_bytes, path.display().to_string())
}

fn by_shape(
    args: &PlanArgs,
    model: ModelShape,
    stored_bytes: Option<u64>,
    model_path: String,
) -> anyhow::Result<Asked> {
    if args.gpus.is_none() {
        let example = format!("consort plan {} --gpus 3xH100-80GB", args.source);
        return Err(Usage(format!("on which cards? Say it with --gpus, as in {example}")).into());
    }
    let format = model.stored;
    Ok(Asked {
        stored_bytes,
        model_path,
        devices: None,
        step_context: 0,
        request: PlanRequest {
            devices: Vec::new(),
            shares: None,
            format,
            kv_format: format.kv(),
            limits: Limits {
                block_size: BLOCK_SIZE,
                max_model_len: model.context_max,
                max_num_seqs: MAX_NUM_SEQS,
                max_num_batched_tokens: BATCHED_TOKENS_ON_CARDS,
                is_batch_invariant: false,
            },
            utilization: None,
            kv_bytes: None,
            formats: WeightFormat::ALL.to_vec(),
            model,
        },
    })
}

/// A topology, or a model with a server's defaults.
fn on_disk(args: &PlanArgs, path: &Path) -> anyhow::Result<Asked> {
    // The server's address and key have nothing to do with memory.
    let overrides = Overrides { without_server: true, ..Overrides::default() };
    let environment = Environment::of_process();
    let is_topology = is_topology(path);
    let topology = match is_topology {
        true => Topology::load_with(path, &overrides, &environment)?,
        false => Topology::from_model_with(path, &overrides, &environment)?,
    };
    let (mut request, stored_bytes) = engine::plan_request(&topology, args.gpus.is_none())?;
    let on_cards = args.gpus.is_some();
    if on_cards {
        request.shares =
            request.shares.filter(|shares| Some(shares.len()) == args.gpus.as_ref().map(|c| c.0.len()));
    }
    if on_cards && !is_topology {
        request.limits.max_num_batched_tokens = BATCHED_TOKENS_ON_CARDS;
        request.limits.is_batch_invariant = false;
        request.utilization = None;
        if request.format == WeightFormat::Float32 {
            (request.format, request.kv_format) = (WeightFormat::BFloat16, KvFormat::BFloat16);
        }
    }
    let model_path = std::path::absolute(topology.model_path())?.display().to_string();
    let devices =
        (is_topology && !on_cards).then(|| topology.devices().iter().map(ToString::to_string).collect());
    Ok(Asked { request, stored_bytes: Some(stored_bytes), model_path, devices, step_context: 0 })
}
