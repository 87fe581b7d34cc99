//! The GPUs that a topology names, as they are on this machine.

use consort_kernels::{
    KernelError,
    cuda::{
        arch::Arch,
        device::{CudaError, DeviceFacts, Selector, devices, free_bytes},
        settings::Settings,
    },
};
use consort_parallel::{
    config::ModelConfig,
    ids::Rank,
    model::{self, LoadOptions},
    partition::Partition,
};

use crate::topology::DeviceSpec;

/// One card for each rank, replica by replica.
#[derive(Debug)]
pub(super) struct Cards {
    cards: Vec<Card>,
}

#[derive(Debug)]
struct Card {
    facts: DeviceFacts,
    /// What others have left of its memory.
    free_bytes: u64,
}

/// What is left for keys and values on the card that has least.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CardMemory {
    /// Blocks that fit on every card.
    pub(super) blocks: usize,
    /// The rank whose card decides, and its number there.
    pub(super) rank: usize,
    pub(super) ordinal: u32,
    /// Bytes of that card, those that may be used, and those that weights and activations take.
    pub(super) memory_bytes: u64,
    pub(super) usable_bytes: u64,
    pub(super) model_bytes: u64,
}

/// What the driver calls the device.
pub(super) fn selector(device: DeviceSpec) -> Result<Selector, CudaError> {
    device.to_string().parse().map_err(|error: consort_kernels::cuda::device::SelectorError| {
        CudaError::NoDevice { wanted: device.to_string(), reason: error.to_string() }
    })
}

impl Cards {
    /// Those of `wanted`, in rank order, `ranks` for each replica; `None` where ranks compute on CPUs. Only they are
    /// opened, and only when they are known to do.
    pub(super) fn look(wanted: &[DeviceSpec], ranks: usize) -> Result<Option<Cards>, CudaError> {
        if wanted.iter().all(DeviceSpec::is_cpu) {
            return Ok(None);
        }
        let settings = Settings::of_process();
        let known = devices(&settings)?;
        let find = |device: &DeviceSpec| {
            let selector = selector(*device)?;
            let found = known.iter().find(|card| selector.matches(card.ordinal, card.uuid));
            found.cloned().ok_or_else(|| {
                let listed: Vec<String> =
                    known.iter().map(|card| format!("cuda:{} ({})", card.ordinal, card.uuid)).collect();
                let reason = match listed.as_slice() {
                    [] => "the driver has no device".to_owned(),
                    listed => format!("the devices of this process are: {}", listed.join(", ")),
                };
                CudaError::NoDevice { wanted: device.to_string(), reason }
            })
        };
        let facts: Vec<DeviceFacts> = wanted.iter().map(find).collect::<Result<_, _>>()?;
        check(wanted, &facts, ranks)?;
        let with_free = |facts: DeviceFacts| {
            let free_bytes = free_bytes(&settings, facts.ordinal)?;
            Ok(Card { facts, free_bytes })
        };
        let cards = facts.into_iter().map(with_free).collect::<Result<_, CudaError>>()?;
        Ok(Some(Cards { cards }))
    }

    /// Blocks that fit on every card beside weights and activations, in `utilization` of its memory. Computed from
    /// headers alone; the options' number of blocks is not read.
    pub(super) fn memory(
        &self,
        config: &ModelConfig,
        partition: &Partition,
        options: &LoadOptions,
        utilization: f64,
    ) -> Result<Option<CardMemory>, KernelError> {
        let mut least: Option<CardMemory> = None;
        // The same shares in each replica.
        for ((at, Card { facts: card, free_bytes }), share) in
            self.cards.iter().enumerate().zip(partition.shares().iter().cycle())
        {
            let rank = at % partition.shares().len();
            let of = Rank(rank as u16);
            let layout = model::kv_layout(config, share, options.dtype, options.block_size)?;
            // Others may have taken some of it.
            let usable_bytes = ((card.memory_bytes as f64 * utilization) as u64).min(*free_bytes);
            let blocks_in =
                |bytes: u64| (bytes / layout.block_bytes().max(1)).min(u64::from(u32::MAX)) as usize;
            // Scratch memory grows with the pool, slowly: that of a pool which fills the card is enough for any.
            let options = LoadOptions { num_blocks: blocks_in(usable_bytes), ..*options };
            let model_bytes =
                model::cuda::memory_bytes(config, partition, of, &options, card.multiprocessors)?;
            let left = usable_bytes.saturating_sub(model_bytes);
            let blocks = blocks_in(left);
            let (ordinal, memory_bytes) = (card.ordinal, card.memory_bytes);
            let here = CardMemory { blocks, rank, ordinal, memory_bytes, usable_bytes, model_bytes };
            if least.is_none_or(|least| blocks < least.blocks) {
                least = Some(here);
            }
        }
        Ok(least)
    }
}

/// Whether these cards, one for each of `wanted`, are different ones, of which the `ranks` of each replica can do the
/// work together.
fn check(wanted: &[DeviceSpec], facts: &[DeviceFacts], ranks: usize) -> Result<(), CudaError> {
    for (at, card) in facts.iter().enumerate() {
        if let Some(rank) = facts[..at].iter().position(|other| other.ordinal == card.ordinal) {
            let reason = format!(
                "\"{}\" (rank {rank}) and \"{}\" (rank {at}) are one card; each rank needs its own",
                wanted[rank], wanted[at]
            );
            return Err(CudaError::NoDevice { wanted: wanted[at].to_string(), reason });
        }
    }
    for (replica, card) in facts.chunks(ranks.max(1)).flat_map(|of| of.iter().map(move |card| (of, card))) {
        let (major, minor) = card.capability;
        Arch::of_device(major, minor).map_err(|error| CudaError::TooOld {
            ordinal: card.ordinal,
            name: card.name.clone(),
            reason: error.to_string(),
        })?;
        let unreached =
            replica.iter().find(|peer| peer.ordinal != card.ordinal && !card.peers.contains(&peer.ordinal));
        if let Some(peer) = unreached {
            return Err(CudaError::NoDevice {
                wanted: format!("cuda:{}", peer.ordinal),
                reason: format!(
                    "cuda:{} cannot use its memory, and ranks sum over each other's (`consort doctor` shows which \
                     cards can)",
                    card.ordinal
                ),
            });
        }
    }
    Ok(())
}
