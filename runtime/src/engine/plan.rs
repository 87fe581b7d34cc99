//! What a topology comes to with one checkpoint, before any weight is read.

use std::thread;

use consort_kernels::{DType, device::Isa};
use consort_parallel::{
    checkpoint::{Checkpoint, Encoding},
    model,
    partition::{Partition, PartitionError},
};

use super::sizing::{self, KvDemand};
use crate::{
    error::EngineError,
    topology::{self, Computed, Topology, Violation},
};

const MAX_MODEL_LEN: &str = "model.max_model_len";
const RANKS: [&str; 2] = ["parallel.tensor_parallel_size", "node.devices"];
const KV_BYTES: &str = "cache.kv_cache_memory_bytes";

/// Every number that the model and the machine decide together.
pub(super) struct Plan {
    pub(super) partition: Partition,
    pub(super) dtype: DType,
    pub(super) max_model_len: usize,
    pub(super) num_blocks: usize,
    /// One block's bytes, over all ranks.
    pub(super) block_bytes: u64,
    pub(super) cores: usize,
    pub(super) threads_per_rank: usize,
    pub(super) isa: Isa,
}

impl Plan {
    /// Decides, or tells everything that the model cannot do as asked.
    pub(super) fn new(topology: &Topology, checkpoint: &Checkpoint) -> Result<Plan, EngineError> {
        let mut violations = Vec::new();
        let config = checkpoint.config();
        let max_model_len = max_model_len(topology, config.max_position_embeddings, &mut violations);
        let Some(partition) = partition(topology, checkpoint, &mut violations) else {
            return Err(topology::invalid(violations).into());
        };
        let dtype = dtype(topology.dtype(), checkpoint);
        let block_size = topology.block_size();
        let mut block_bytes = 0;
        for share in partition.shares() {
            block_bytes += model::kv_layout(config, share, dtype, block_size)?.block_bytes();
        }
        let demand = KvDemand {
            given_bytes: topology.kv_cache_memory_bytes(),
            block_bytes,
            block_size,
            max_model_len,
            max_num_seqs: topology.max_num_seqs(),
        };
        let num_blocks = num_blocks(topology, &demand, &mut violations);
        if !violations.is_empty() {
            return Err(topology::invalid(violations).into());
        }
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let ranks = topology.tensor_parallel_size();
        Ok(Plan {
            partition,
            dtype,
            max_model_len,
            num_blocks,
            block_bytes,
            cores,
            threads_per_rank: sizing::threads_per_rank(topology.threads_per_rank(), cores, ranks),
            isa: topology.cpu_isa().unwrap_or_else(Isa::detect),
        })
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

fn num_blocks(topology: &Topology, demand: &KvDemand, violations: &mut Vec<Violation>) -> usize {
    let small = match demand.num_blocks() {
        Ok(num_blocks) => return num_blocks,
        Err(small) => small,
    };
    let problem = format!(
        "{} bytes hold {} KV blocks, but one sequence of max_model_len = {} tokens needs {} ({} bytes)",
        small.given_bytes, small.given_blocks, demand.max_model_len, small.needed_blocks, small.needed_bytes
    );
    let remedy = format!(
        "give {} or more, or lower max_model_len ({} tokens would fit)",
        small.needed_bytes, small.fitting_len
    );
    let other = Some((MAX_MODEL_LEN, "sequences of this length are asked for here"));
    violations.push(topology.violation(&[KV_BYTES], problem, remedy, other));
    0
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
