//! What a topology comes to with one checkpoint, before any weight is read.

use std::{collections::BTreeSet, thread};

use consort_kernels::{DType, KernelError, device::Isa};
use consort_parallel::{
    checkpoint::{Checkpoint, Encoding},
    config::ModelConfig,
    kv::KvGroups,
    model::{self, LoadOptions, STEP_LIMIT},
    partition::{Partition, PartitionError},
};

use super::{
    cards::{CardMemory, Cards},
    sizing::{self, KvDemand},
};
use crate::{
    error::EngineError,
    topology::{self, Computed, Rest, Topology, Violation},
};

const MAX_MODEL_LEN: &str = "model.max_model_len";
const RANKS: [&str; 2] = ["parallel.tensor_parallel_size", "node.devices"];
/// The keys that decide how the model is divided.
const RANKS_AND_WEIGHTS: [&str; 3] = ["parallel.tensor_parallel_size", "parallel.weights", "node"];
/// The keys that decide whether a sequence fits into the cache, whatever the number of ranks.
const CACHE_SIZES: [&str; 3] = ["model.dtype", MAX_MODEL_LEN, "cache"];
const KV_BYTES: &str = "cache.kv_cache_memory_bytes";
const OFFLOADING_BYTES: &str = "cache.kv_offloading_bytes";
const UTILIZATION: &str = "cache.gpu_memory_utilization";
const DTYPE: &str = "model.dtype";

/// Most blocks of the host's pool: they have numbers of 32 bits, and the scheduler remembers the tokens of each.
const HOST_BLOCKS_MAX: u64 = 1 << 26;

/// Every number that the model and the machine decide together.
pub(super) struct Plan {
    pub(super) partition: Partition,
    pub(super) dtype: DType,
    pub(super) max_model_len: usize,
    pub(super) num_blocks: usize,
    /// Blocks that the host keeps beside those.
    pub(super) host_blocks: usize,
    /// One block's bytes, over all ranks.
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
    partition: Option<Partition>,
    dtype: DType,
    max_model_len: usize,
    num_blocks: usize,
    host_blocks: usize,
    block_bytes: Result<u64, KernelError>,
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
        let partition = match is_in_doubt(&RANKS_AND_WEIGHTS) {
            true => None,
            false => partition(topology, checkpoint, &mut violations),
        };
        let dtype = dtype(topology, checkpoint, &mut violations);
        let block_size = topology.block_size();
        let block_bytes = match &partition {
            Some(partition) => block_bytes(partition, config, dtype, block_size),
            // Without any number of ranks: more of them need no less memory than one.
            None => Partition::new(config, 1, None)
                .map_or(Ok(0), |whole| block_bytes(&whole, config, dtype, block_size)),
        };
        let on_cards = match (&partition, cards) {
            (Some(partition), Some(cards)) => {
                let options = load_options(topology, dtype, max_model_len, 0);
                cards.memory(config, partition, &options, topology.gpu_memory_utilization())
            }
            _ => Ok(None),
        };
        let (on_cards, block_bytes) = match on_cards {
            Ok(on_cards) => (on_cards, block_bytes),
            Err(error) => (None, block_bytes.and(Err(error))),
        };
        let demand = KvDemand {
            given_bytes: topology.kv_cache_memory_bytes(),
            card_blocks: on_cards.map(|memory| memory.blocks),
            block_bytes: *block_bytes.as_ref().unwrap_or(&0),
            block_size,
            groups: KvGroups::of(config).count(),
            max_model_len,
            max_num_seqs: topology.max_num_seqs(),
        };
        let num_blocks = match is_in_doubt(&CACHE_SIZES) {
            true => 0,
            false => num_blocks(topology, &demand, on_cards, &mut violations),
        };
        let host_blocks = match is_in_doubt(&CACHE_SIZES) {
            true => 0,
            false => host_blocks(topology, demand.block_bytes, &mut violations),
        };
        Draft { violations, partition, dtype, max_model_len, num_blocks, host_blocks, block_bytes }
    }

    fn into_plan(self, topology: &Topology) -> Result<Plan, EngineError> {
        let Draft { violations, dtype, max_model_len, num_blocks, host_blocks, .. } = self;
        let (Some(partition), true) = (self.partition, violations.is_empty()) else {
            return Err(topology::invalid(violations).into());
        };
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let ranks = topology.tensor_parallel_size();
        Ok(Plan {
            partition,
            dtype,
            max_model_len,
            num_blocks,
            host_blocks,
            block_bytes: self.block_bytes?,
            cores,
            threads_per_rank: sizing::threads_per_rank(topology.threads_per_rank(), cores, ranks),
            isa: topology.cpu_isa().unwrap_or_else(Isa::detect),
        })
    }
}

/// Bytes of one block over all ranks.
fn block_bytes(
    partition: &Partition,
    config: &ModelConfig,
    dtype: DType,
    block_size: usize,
) -> Result<u64, KernelError> {
    let of_share = |share| Ok(model::kv_layout(config, share, dtype, block_size)?.block_bytes());
    partition.shares().iter().map(of_share).sum()
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

fn partition(
    topology: &Topology,
    checkpoint: &Checkpoint,
    violations: &mut Vec<Violation>,
) -> Option<Partition> {
    let weights: Option<Vec<f32>> =
        topology.weights().map(|weights| weights.iter().map(|weight| *weight as f32).collect());
    let error = match Partition::new(checkpoint.config(), topology.tensor_parallel_size(), weights.as_deref())
    {
        Ok(partition) => return Some(partition),
        Err(error) => error,
    };
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
    None
}

fn num_blocks(
    topology: &Topology,
    demand: &KvDemand,
    on_cards: Option<CardMemory>,
    violations: &mut Vec<Violation>,
) -> usize {
    let small = match demand.num_blocks() {
        Ok(num_blocks) => return num_blocks,
        Err(small) => small,
    };
    if let (None, Some(card)) = (demand.given_bytes, on_cards) {
        let CardMemory { rank, ordinal, memory_bytes, usable_bytes, model_bytes, blocks } = card;
        let problem = format!(
            "{usable_bytes} of the {memory_bytes} bytes of cuda:{ordinal} (rank {rank}) may be used, and weights and \
             activations take {model_bytes}: {blocks} KV blocks are left, but one sequence of max_model_len = {} \
             tokens needs {}",
            demand.max_model_len, small.needed_blocks
        );
        let remedy = "use more cards, raise gpu_memory_utilization, or lower max_model_len or \
                      max_num_batched_tokens"
            .to_owned();
        violations.push(topology.violation(&[UTILIZATION], problem, remedy, None));
        return 0;
    }
    let problem = format!(
        "{} bytes hold {} KV blocks, but one sequence of max_model_len = {} tokens needs {} ({} bytes)",
        small.given_bytes, small.given_blocks, demand.max_model_len, small.needed_blocks, small.needed_bytes
    );
    let mut remedy = format!("give {} or more", small.needed_bytes);
    if small.fitting_len > 0 {
        remedy.push_str(&format!(", or lower max_model_len ({} tokens would fit)", small.fitting_len));
    }
    let other = Some((MAX_MODEL_LEN, "sequences of this length are asked for here"));
    violations.push(topology.violation(&[KV_BYTES], problem, remedy, other));
    0
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
        topology::DType::Auto => match checkpoint.tensor("model.embed_tokens.weight") {
            Ok(embedding) if on_cpus && embedding.encoding == Encoding::F32 => DType::F32,
            _ => DType::BF16,
        },
    }
}
