//! What a topology comes to with one checkpoint, before any weight is read.

#[cfg(test)]
mod tests;

use std::{collections::BTreeSet, path::Path, thread};

use consort_kernels::{DType, device::Isa};
use consort_parallel::{
    checkpoint::Checkpoint,
    model::{LoadOptions, STEP_LIMIT},
    partition::{Partition, PartitionError},
    plan::{
        self as planner, ModelShape, PlanError, PlanRequest, Policy, RankDevice, Shortfall, WeightFormat,
    },
};

use super::{builder::open, cards::Cards, host, sizing};
use crate::{
    error::{DeviceError, EngineError},
    topology::{self, Computed, Isolation, Rest, Topology, Violation},
};

const MAX_MODEL_LEN: &str = "model.max_model_len";
const RANKS: [&str; 2] = ["parallel.tensor_parallel_size", "node.devices"];
/// The keys that decide how the model is divided.
const RANKS_AND_WEIGHTS: [&str; 3] = ["parallel.tensor_parallel_size", "parallel.weights", "node"];
/// The keys that decide whether a sequence fits into the cache, whatever the number of ranks.
const CACHE_SIZES: [&str; 3] = ["model.dtype", MAX_MODEL_LEN, "cache"];
const KV_BYTES: &str = "cache.kv_cache_memory_bytes";
const OFFLOADING_BYTES: &str = "cache.kv_offloading_bytes";
const DTYPE: &str = "model.dtype";

/// Most blocks of the host's pool: they have numbers of 32 bits, and the scheduler remembers the tokens of each.
const HOST_BLOCKS_MAX: u64 = 1 << 26;

/// Every number that the model and the machine decide together.
pub(super) struct Plan {
    pub(super) partition: Partition,
    pub(super) dtype: DType,
    pub(super) max_model_len: usize,
    /// Of each replica.
    pub(super) num_blocks: usize,
    /// Blocks that the host keeps beside those.
    pub(super) host_blocks: usize,
    /// One block's bytes, over all ranks of a replica.
    pub(super) block_bytes: u64,
    pub(super) cores: usize,
    pub(super) threads_per_rank: usize,
    pub(super) isa: Isa,
}

impl Plan {
    /// Decides, or tells everything that the model cannot do as asked. Without `cards`, blocks on GPUs are a guess.
    pub(super) fn new(
        topology: &Topology,
        checkpoint: &Checkpoint,
        cards: Option<&Cards>,
    ) -> Result<Plan, EngineError> {
        Draft::new(topology, checkpoint, cards, &BTreeSet::new()).into_plan(topology)
    }

    /// What the model cannot do of a topology that breaks rules of its own, as far as that can be told without the keys
    /// that are in doubt.
    pub(super) fn violations(rest: &Rest, checkpoint: &Checkpoint) -> Vec<Violation> {
        Draft::new(&rest.topology, checkpoint, None, &rest.doubtful).violations
    }

    /// For those who print it.
    pub(super) fn computed(&self) -> Computed {
        Computed {
            dtype: match self.dtype {
                DType::F32 => "float32",
                DType::BF16 => "bfloat16",
            },
            max_model_len: self.max_model_len,
            cores: self.cores,
            threads_per_rank: self.threads_per_rank,
            isa: self.isa,
            num_blocks: self.num_blocks,
            kv_cache_memory_bytes: (self.num_blocks as u64).saturating_mul(self.block_bytes),
        }
    }
}

/// A plan before it is known whether all of it can be.
struct Draft {
    violations: Vec<Violation>,
    /// Whether the number of ranks is known, and the model can be divided over them.
    is_divided: bool,
    dtype: DType,
    max_model_len: usize,
    host_blocks: usize,
    plan: Result<planner::Plan, PlanError>,
    shortfall: Option<Shortfall>,
}

impl Draft {
    fn new(
        topology: &Topology,
        checkpoint: &Checkpoint,
        cards: Option<&Cards>,
        doubtful: &BTreeSet<String>,
    ) -> Draft {
        let mut violations = Vec::new();
        let is_in_doubt =
            |keys: &[&str]| doubtful.iter().any(|doubtful| keys.iter().any(|key| doubtful.starts_with(key)));
        let config = checkpoint.config();
        let max_model_len = max_model_len(topology, config.max_position_embeddings, &mut violations);
        let is_divided =
            !is_in_doubt(&RANKS_AND_WEIGHTS) && is_divisible(topology, checkpoint, &mut violations);
        let dtype = dtype(topology, checkpoint, &mut violations);
        let mut request = request(topology, checkpoint, dtype, max_model_len);
        match (is_divided, cards) {
            (true, Some(cards)) => request.devices = cards.devices(topology.tensor_parallel_size()),
            (true, None) => {}
            // Without any number of ranks: more of them need no less memory than one.
            (false, _) => {
                request.devices = vec![RankDevice::Host];
                (request.shares, request.host_memory_bytes) = (None, None);
            }
        }
        // Steps that carry too little are told of elsewhere, and what is wrong besides can be told nevertheless.
        let limits = &mut request.limits;
        limits.max_num_batched_tokens = limits.max_num_batched_tokens.max(limits.max_num_seqs);
        let plan = planner::Plan::new(&request);
        let shortfall = plan.as_ref().ok().and_then(|plan| {
            let shortfall = plan.shortfall()?;
            let is_asked_for = matches!(shortfall, Shortfall::Given { is_asked_for: true, .. });
            if is_asked_for && !is_in_doubt(&CACHE_SIZES) {
                violations.push(cache_too_small(topology, plan));
            }
            // What is on cards that are not here is a guess, and no reason to refuse.
            let is_guess = cards.is_none() && !topology.devices().iter().all(topology::DeviceSpec::is_cpu);
            (!is_asked_for && !is_guess).then_some(shortfall)
        });
        let host_blocks = match &plan {
            Ok(plan) if !is_in_doubt(&CACHE_SIZES) && topology.enable_prefix_caching() => {
                host_blocks(topology, plan.page_bytes(), &mut violations)
            }
            _ => 0,
        };
        Draft { violations, is_divided, dtype, max_model_len, host_blocks, plan, shortfall }
    }

    fn into_plan(self, topology: &Topology) -> Result<Plan, EngineError> {
        let Draft { violations, is_divided, dtype, max_model_len, host_blocks, plan, shortfall } = self;
        if !is_divided || !violations.is_empty() {
            return Err(topology::invalid(violations).into());
        }
        let plan = plan?;
        if shortfall.is_some() {
            return Err(EngineError::DoesNotFit { plan: Box::new(plan) });
        }
        let cores = thread::available_parallelism().map_or(1, usize::from);
        // Those of all replicas.
        let ranks = topology.devices().len();
        Ok(Plan {
            // Where the cards are not here, a pool that makes the engine's promises.
            num_blocks: plan.pool_pages().max(usize::try_from(plan.pages_needed()).unwrap_or(usize::MAX)),
            block_bytes: plan.page_bytes(),
            partition: plan.partition,
            dtype,
            max_model_len,
            host_blocks,
            cores,
            threads_per_rank: sizing::threads_per_rank(topology.threads_per_rank(), cores, ranks),
            isa: topology.cpu_isa().unwrap_or_else(Isa::detect),
        })
    }
}

/// What the planner is asked, on devices that nobody has looked at.
fn request(topology: &Topology, checkpoint: &Checkpoint, dtype: DType, max_model_len: usize) -> PlanRequest {
    let format = match dtype {
        DType::F32 => WeightFormat::Float32,
        DType::BF16 => WeightFormat::BFloat16,
    };
    let name = topology.served_model_name().to_owned();
    PlanRequest {
        model: ModelShape {
            name,
            stored: checkpoint.stored_format(),
            ..ModelShape::from(checkpoint.config())
        },
        devices: vec![RankDevice::Host; topology.tensor_parallel_size()],
        replicas: topology.data_parallel_size(),
        shares: shares(topology),
        format,
        kv_format: format.kv(),
        limits: planner::Limits {
            block_size: topology.block_size(),
            max_model_len,
            max_num_seqs: topology.max_num_seqs(),
            max_num_batched_tokens: topology.max_num_batched_tokens(),
            is_batch_invariant: topology.batch_invariant(),
            separate_processes: topology.isolation() == Isolation::Process,
        },
        utilization: Some(topology.gpu_memory_utilization()),
        kv_bytes: topology.kv_cache_memory_bytes(),
        offloading_bytes: topology.kv_offloading_bytes().filter(|_| topology.enable_prefix_caching()),
        host_memory_bytes: host::memory_bytes(Path::new("/")),
        formats: vec![WeightFormat::BFloat16],
    }
}

/// What a topology asks of the planner, and the bytes of its checkpoint's tensors. With `look`, for the cards of this
/// machine where it names any; else for devices of some other machine, which somebody is about to put in their place.
pub(crate) fn plan_request(topology: &Topology, look: bool) -> Result<(PlanRequest, u64), EngineError> {
    let checkpoint = open(topology)?;
    let mut violations = Vec::new();
    let config = checkpoint.config();
    let max_model_len = max_model_len(topology, config.max_position_embeddings, &mut violations);
    let dtype = dtype(topology, &checkpoint, &mut violations);
    if !violations.is_empty() {
        return Err(topology::invalid(violations).into());
    }
    let mut request = request(topology, &checkpoint, dtype, max_model_len);
    let ranks = topology.tensor_parallel_size();
    if !look {
        request.host_memory_bytes = None;
    } else if let Some(cards) = Cards::look(topology).map_err(DeviceError)? {
        request.devices = cards.devices(ranks);
    }
    request.formats = WeightFormat::ALL.to_vec();
    Ok((request, checkpoint.stored_bytes()))
}

/// Relative shares of the ranks, where they are not to be equal.
fn shares(topology: &Topology) -> Option<Vec<f32>> {
    topology.weights().map(|weights| weights.iter().map(|weight| *weight as f32).collect())
}

/// The longest sequence: what was asked for, or what the model was trained for.
fn max_model_len(topology: &Topology, trained: usize, violations: &mut Vec<Violation>) -> usize {
    match topology.max_model_len() {
        Some(asked) if asked > trained => {
            let problem = format!("{asked} exceeds the {trained} positions that the model was trained for");
            let remedy = "lower it or leave it out".to_owned();
            violations.push(topology.violation(&[MAX_MODEL_LEN], problem, remedy, None));
            trained
        }
        Some(asked) => asked,
        None => trained,
    }
}

fn is_divisible(topology: &Topology, checkpoint: &Checkpoint, violations: &mut Vec<Violation>) -> bool {
    let (config, ranks) = (checkpoint.config(), topology.tensor_parallel_size());
    let Err(error) = Partition::new(config, ranks, shares(topology).as_deref()) else { return true };
    let (keys, problem, remedy) = match &error {
        PartitionError::TooManyRanks { ranks, query_heads } => (
            &RANKS[..],
            format!("{ranks} ranks, but the model has {query_heads} query heads, and every rank needs one"),
            format!("use {query_heads} ranks or fewer"),
        ),
        PartitionError::Ranks { .. } => (&RANKS[..], error.to_string(), "use fewer ranks".to_owned()),
        PartitionError::Weights { .. } => (
            &["parallel.weights"][..],
            error.to_string(),
            "give one positive number for each rank".to_owned(),
        ),
    };
    violations.push(topology.violation(keys, problem, remedy, None));
    false
}

/// The memory that was asked for holds not even one sequence of full length.
fn cache_too_small(topology: &Topology, plan: &planner::Plan) -> Violation {
    let max_model_len = plan.request.limits.max_model_len;
    let (given, needed) = (plan.pages(), plan.pages_needed());
    let needed_bytes = needed.saturating_mul(plan.page_bytes());
    let problem = format!(
        "{} bytes hold {given} KV blocks, but one sequence of max_model_len = {max_model_len} tokens needs {needed} \
         ({needed_bytes} bytes)",
        plan.request.kv_bytes.unwrap_or(0),
    );
    let mut remedy = format!("give {needed_bytes} or more");
    let fitting_len = plan.cache.longest(given, max_model_len, Policy::WindowsFreed);
    if fitting_len > 0 {
        remedy.push_str(&format!(", or lower max_model_len ({fitting_len} tokens would fit)"));
    }
    let other = Some((MAX_MODEL_LEN, "sequences of this length are asked for here"));
    topology.violation(&[KV_BYTES], problem, remedy, other)
}

/// Blocks of the host's pool: as many as the memory given for it holds, and an error if that is none.
fn host_blocks(topology: &Topology, block_bytes: u64, violations: &mut Vec<Violation>) -> usize {
    // Bytes are unknown where another error is told.
    let Some(bytes) = topology.kv_offloading_bytes().filter(|_| block_bytes > 0) else { return 0 };
    let blocks = (bytes / block_bytes).min(HOST_BLOCKS_MAX);
    if blocks == 0 {
        let problem = format!("{bytes} bytes hold no KV block, which takes {block_bytes} over all ranks");
        let remedy = "give more, or leave it out".to_owned();
        violations.push(topology.violation(&[OFFLOADING_BYTES], problem, remedy, None));
    }
    blocks as usize
}

/// What a rank's model is loaded for.
pub(super) fn load_options(
    topology: &Topology,
    dtype: DType,
    max_model_len: usize,
    num_blocks: usize,
) -> LoadOptions {
    LoadOptions {
        dtype,
        max_batch_tokens: topology.max_num_batched_tokens(),
        block_size: topology.block_size(),
        max_num_seqs: topology.max_num_seqs(),
        max_model_len,
        num_blocks,
        step_limit: STEP_LIMIT,
        deterministic: topology.batch_invariant(),
        separate_processes: topology.isolation() == Isolation::Process,
        all_reduce: topology.all_reduce(),
    }
}

/// The format to compute in. `auto` keeps float32 checkpoints exact on a CPU; GPUs compute in bfloat16.
fn dtype(topology: &Topology, checkpoint: &Checkpoint, violations: &mut Vec<Violation>) -> DType {
    let on_cpus = topology.devices().iter().all(topology::DeviceSpec::is_cpu);
    match topology.dtype() {
        topology::DType::BFloat16 => DType::BF16,
        topology::DType::Float32 => {
            if !on_cpus {
                let problem = "float32 on GPUs, which compute in bfloat16 only".to_owned();
                let remedy = "use bfloat16, or list \"cpu\" devices".to_owned();
                violations.push(topology.violation(&[DTYPE], problem, remedy, None));
            }
            DType::F32
        }
        topology::DType::Auto if on_cpus && checkpoint.stored_format() == Some(WeightFormat::Float32) => {
            DType::F32
        }
        topology::DType::Auto => DType::BF16,
    }
}
